#!/bin/bash
# roles of a pserver job: 2 pservers, 2 trainers
#SBATCH --job-name=dtrans-train
#SBATCH --nodes=2 --ntasks-per-node=2
set -euo pipefail

# the job's token: from a file, from the environment, or new; never an argument
if [ -n "${DTRANS_TOKEN_FILE:-}" ]; then
  DTRANS_TOKEN=$(cat "$DTRANS_TOKEN_FILE")
  unset DTRANS_TOKEN_FILE
elif [ -z "${DTRANS_TOKEN:-}" ] && [ -z "${DTRANS_KEYS:-}" ]; then
  DTRANS_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
fi
if [ -n "${DTRANS_TOKEN:-}" ]; then export DTRANS_TOKEN; fi
export EXTRA='it'"'"'s $(HOME) $x'
export DTRANS_ALLOW_REMOTE=1
export DTRANS_TRAINERS=2
export port=${DTRANS_PORT:-6174}

node=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
export DTRANS_PSERVER_ENDPOINTS=${node[0]}:$((port + 0)),${node[1]}:$((port + 0))
echo "this job answers: dtrans status ${DTRANS_PSERVER_ENDPOINTS//,/ }"

# the role of each task, and the node of each task
lists=$(mktemp -d)
trap 'rm -r "$lists"' EXIT
cat >"$lists/roles" <<END
0 env DTRANS_ROLE=pserver DTRANS_CURRENT_ENDPOINT=${node[0]}:$((port + 0))
1 env DTRANS_ROLE=pserver DTRANS_CURRENT_ENDPOINT=${node[1]}:$((port + 0))
2-3 env DTRANS_ROLE=trainer DTRANS_TRAINER_ID=%o
END
export SLURM_HOSTFILE=$lists/nodes
printf '%s\n' ${node[0]} ${node[1]} ${node[0]} ${node[1]} >"$SLURM_HOSTFILE"
unset SLURM_NTASKS_PER_NODE  # the list of nodes replaces it
srun --kill-on-bad-exit=1 --ntasks=4 --distribution=arbitrary --multi-prog "$lists/roles" python train.py 'it'"'"'s'
