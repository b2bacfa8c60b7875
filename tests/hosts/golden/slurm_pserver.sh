#!/bin/bash
# roles of a pserver job: 2 pservers, 2 trainers
#SBATCH --job-name=dtrans-train
#SBATCH --nodes=2 --ntasks=2 --ntasks-per-node=1
#SBATCH hetjob
#SBATCH --nodes=2 --ntasks=2 --ntasks-per-node=1
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

pserver_nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0")
export pserver_nodes
trainer_nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
export trainer_nodes
printf -v DTRANS_PSERVER_ENDPOINTS "%s:$port," $pserver_nodes
export DTRANS_PSERVER_ENDPOINTS=${DTRANS_PSERVER_ENDPOINTS%,}
echo "this job answers: dtrans status ${DTRANS_PSERVER_ENDPOINTS//,/ }"

# a process computes its index from its node
task='
export DTRANS_ROLE=$1; shift
case $DTRANS_ROLE in pserver) nodes=$pserver_nodes ;; *) nodes=$trainer_nodes ;; esac
index=0
for node in $nodes; do
  [ "$node" != "$SLURMD_NODENAME" ] || break
  index=$((index + 1))
done
if [ "$node" != "$SLURMD_NODENAME" ]; then
  echo "node $SLURMD_NODENAME is not one of: $nodes" >&2
  exit 1
fi
if [ $DTRANS_ROLE = pserver ]; then export DTRANS_CURRENT_ENDPOINT=$node:$port; else export DTRANS_TRAINER_ID=$index; fi
exec "$@"
'
srun --kill-on-bad-exit=1 --het-group=0 bash -c "$task" dtrans pserver python train.py 'it'"'"'s' \
  : --het-group=1 bash -c "$task" dtrans trainer python train.py 'it'"'"'s'
