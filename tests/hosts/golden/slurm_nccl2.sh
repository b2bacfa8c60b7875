#!/bin/bash
# roles of a nccl2 job: 3 trainers
#SBATCH --job-name=dtrans-train
#SBATCH --nodes=3 --ntasks=3 --ntasks-per-node=1
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
export DTRANS_TRAINERS=3
export port=${DTRANS_PORT:-6174}

trainer_nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export trainer_nodes
printf -v DTRANS_TRAINER_ENDPOINTS "%s:$port," $trainer_nodes
export DTRANS_TRAINER_ENDPOINTS=${DTRANS_TRAINER_ENDPOINTS%,}
export DTRANS_STATUS_ENDPOINT=${DTRANS_STATUS_ENDPOINT:-${DTRANS_TRAINER_ENDPOINTS%%:*}:$((port + 1))}
echo "this job answers: dtrans status $DTRANS_STATUS_ENDPOINT"

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
export DTRANS_CURRENT_ENDPOINT=$node:$port
export DTRANS_TRAINER_ID=$index
exec "$@"
'
srun --kill-on-bad-exit=1 bash -c "$task" dtrans trainer python train.py 'it'"'"'s'
