"""A role table as an `sbatch` file: one heterogeneous job for servers, or plain `srun`.

Servers and trainers are components of the job, with one process on each node. Each process finds
its index by its node's place in `scontrol show hostnames`: `SLURM_PROCID` counts over components.
"""

from __future__ import annotations

import shlex

from dtrans.hosts.emit_parts import parts_of
from dtrans.hosts.role_table import RoleTable
from dtrans.run.distributed.schedulers import PORT


_TOKEN = """\
# the secret of the job: of a file, of the environment, or a new one; never an argument
if [ -n "${DTRANS_TOKEN_FILE:-}" ]; then
  DTRANS_TOKEN=$(cat "$DTRANS_TOKEN_FILE")
  unset DTRANS_TOKEN_FILE
elif [ -z "${DTRANS_TOKEN:-}" ] && [ -z "${DTRANS_KEYS:-}" ]; then
  DTRANS_TOKEN=$(PYTHON -c 'import secrets; print(secrets.token_hex(32))')
fi
if [ -n "${DTRANS_TOKEN:-}" ]; then export DTRANS_TOKEN; fi
"""

_TASK = """\
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
BODY
exec "$@"
'
"""

_OWN = "export DTRANS_CURRENT_ENDPOINT=$node:$port"
_ID = "export DTRANS_TRAINER_ID=$index"


def emit_slurm(table: RoleTable) -> str:
    """Return an `sbatch` file that starts the roles, one on each node.

    Args:
      table: of `role_table` or `plan.roles`, with a command.
    """
    parts = parts_of(table)
    cores = "" if parts.cores is None else f" --cpus-per-task={parts.cores}"
    ask = lambda count: f"#SBATCH --nodes={count} --ntasks={count} --ntasks-per-node=1{cores}"
    lines = ["#!/bin/bash", f"# {table.title}", f"#SBATCH --job-name={parts.name}"]
    if parts.servers:
        lines += [ask(parts.servers), "#SBATCH hetjob"]
    lines += [ask(parts.trainers), "set -euo pipefail", ""]
    lines += _TOKEN.replace("PYTHON", shlex.quote(parts.argv[0])).splitlines()

    # variables that all roles share
    lines += [f"export {k}={shlex.quote(v)}" for k, v in parts.environment.items()]
    lines += [
        "export DTRANS_ALLOW_REMOTE=1",
        f"export DTRANS_TRAINERS={parts.trainers}",
        f"export port=${{DTRANS_PORT:-{PORT}}}",
        "",
    ]
    groups = {"pserver": "_HET_GROUP_0", "trainer": "_HET_GROUP_1"} if parts.servers else {"trainer": ""}
    for kind, group in groups.items():
        lines += [
            f'{kind}_nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST{group}")',
            f"export {kind}_nodes",
        ]
    first = next(iter(groups))
    lines += [
        f'printf -v {parts.variable} "%s:$port," ${first}_nodes',
        f"export {parts.variable}=${{{parts.variable}%,}}",
        "",
        "# which role a process is follows from its node",
    ]

    # the variables that differ
    if parts.servers:
        body = f"if [ $DTRANS_ROLE = pserver ]; then {_OWN}; else {_ID}; fi"
    else:
        body = f"{_OWN}\n{_ID}"
    lines += _TASK.replace("BODY", body).splitlines()
    command = shlex.join(parts.argv)
    start = lambda kind: f'bash -c "$task" dtrans {kind} {command}'
    if parts.servers:
        run = f"--het-group=0 {start('pserver')} \\\n  : --het-group=1 {start('trainer')}"
    else:
        run = start("trainer")
    return "\n".join([*lines, f"srun --kill-on-bad-exit=1 {run}", ""])
