"""Writer of an `sbatch` file, from which Slurm starts a job's roles (servers and trainers).

    emit_slurm(table)           one node per process: a heterogeneous job of servers and trainers,
                                or plain `srun` if all processes are trainers
    emit_slurm(table, nodes=2)  servers and trainers share two nodes: `srun --multi-prog`

In a heterogeneous job, the servers are one component and the trainers another. A process computes
its index within its component from the position of its node in `scontrol show hostnames`, because
`SLURM_PROCID` numbers the processes of both components together. On shared nodes,
`role_table.place` chooses the node of each process. The file then contains two lists for `srun`:
the role of each task, and the node of each task.
"""

from __future__ import annotations

import collections
import shlex

from dtrans.checks import check_int
from dtrans.errors import ConfigError
from dtrans.hosts.emit_parts import EmitParts, parts_of
from dtrans.hosts.role_table import RoleTable, place
from dtrans.ir.selection import number_items
from dtrans.run.distributed.schedulers import PORT
from dtrans.run.distributed.status_door import VARIABLE as STATUS


_TOKEN = """\
# the job's token: from a file, from the environment, or new; never an argument
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

_ENDPOINT = "export DTRANS_CURRENT_ENDPOINT=$node:$port"
_ID = "export DTRANS_TRAINER_ID=$index"

# `srun --multi-prog` appends the command to each line of this list. It does not interpret quotes
# or % in the command.
_MULTI_PROG = """\
# the role of each task, and the node of each task
lists=$(mktemp -d)
trap 'rm -r "$lists"' EXIT
cat >"$lists/roles" <<END
ROLES
END
export SLURM_HOSTFILE=$lists/nodes
printf '%s\\n' NODES >"$SLURM_HOSTFILE"
unset SLURM_NTASKS_PER_NODE  # the list of nodes replaces it
"""


def emit_slurm(table: RoleTable, nodes: int | None = None) -> str:
    """Return an `sbatch` file that starts the roles of a job under Slurm.

    Args:
      table: the roles, with a command: the result of `role_table` or `plan.roles`.
      nodes: number of nodes that servers and trainers share, in one allocation. The file requests
        fewer nodes if `place` leaves some empty. By default each process has its own node.

    Raises:
      ConfigError: the table has no command; or `nodes` is given, and the table has no servers or
        fewer processes than nodes.

    Example:
      >>> import dtrans
      >>> from dtrans.hosts.emit_slurm import emit_slurm
      >>> table = dtrans.role_table("pserver", 2, 1, ["python", "train.py"])
      >>> print(emit_slurm(table, nodes=1).splitlines()[-1])
      srun --kill-on-bad-exit=1 --ntasks=3 --distribution=arbitrary --multi-prog "$lists/roles"
      python train.py
    """
    parts = parts_of(table)
    if nodes is None:
        return _node_for_each(table, parts)
    return _shared_nodes(table, parts, nodes)


def _node_for_each(table: RoleTable, parts: EmitParts) -> str:
    """Return the file of a job with one node per process."""
    ask = lambda n: f"#SBATCH --nodes={n} --ntasks={n} --ntasks-per-node=1{_cores(parts)}"
    asks = [ask(parts.trainers)]
    if parts.servers:
        asks = [ask(parts.servers), "#SBATCH hetjob", *asks]
    lines = _head(table.title, parts, asks)
    groups = {"trainer": ""}
    if parts.servers:
        groups = {"pserver": "_HET_GROUP_0", "trainer": "_HET_GROUP_1"}
    for kind, group in groups.items():
        lines += [
            f'{kind}_nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST{group}")',
            f"export {kind}_nodes",
        ]
    first = next(iter(groups))
    lines += [
        f'printf -v {parts.variable} "%s:$port," ${first}_nodes',
        f"export {parts.variable}=${{{parts.variable}%,}}",
        *_observers(parts),
        "",
        "# a process computes its index from its node",
    ]

    # variables that differ between the processes of a component
    if parts.servers:
        body = f"if [ $DTRANS_ROLE = pserver ]; then {_ENDPOINT}; else {_ID}; fi"
    else:
        body = f"{_ENDPOINT}\n{_ID}"
    lines += _TASK.replace("BODY", body).splitlines()
    command = shlex.join(parts.argv)
    start = lambda kind: f'{_cores(parts)} bash -c "$task" dtrans {kind} {command}'
    if parts.servers:
        run = f" --het-group=0{start('pserver')} \\\n  : --het-group=1{start('trainer')}"
    else:
        run = start("trainer")
    return "\n".join([*lines, f"srun --kill-on-bad-exit=1{run}", ""])


def _shared_nodes(table: RoleTable, parts: EmitParts, nodes: int) -> str:
    """Return the file of a job with servers and trainers on the same nodes."""
    check_int("nodes", nodes, "a number of nodes", least=1)
    if not parts.servers:
        raise ConfigError(
            f"nodes={nodes} is for a job with parameter servers, but this is a {table.mode} job; "
            "leave nodes out"
        )
    if nodes > len(table):
        raise ConfigError(
            f"nodes={nodes} is more than the {table.title}; use at most {len(table)} nodes, or "
            "leave nodes out"
        )
    slots = -(-len(table) // nodes)
    names = [(str(n), slots) for n in range(nodes)]
    places = list(map(int, place(table, names)))
    used = number_items(sorted(set(places)))
    node = [f"${{node[{used[p]}]}}" for p in places]

    # a job on one node uses loopback
    alone = len(used) == 1
    taken: collections.Counter[str] = collections.Counter()
    endpoints = []
    for name in node[: parts.servers]:
        host = "127.0.0.1" if alone else name
        endpoints.append(f"{host}:$((port + {taken[name]}))")
        taken[name] += 1

    # servers are the first tasks
    roles = []
    for i, endpoint in enumerate(endpoints):
        roles.append(f"{i} env DTRANS_ROLE=pserver DTRANS_CURRENT_ENDPOINT={endpoint}")
    last = len(table) - 1
    tasks = f"{parts.servers}-{last}" if parts.trainers > 1 else f"{last}"
    roles.append(f"{tasks} env DTRANS_ROLE=trainer DTRANS_TRAINER_ID=%o")

    most = max(collections.Counter(node).values())
    ask = f"#SBATCH --nodes={len(used)} --ntasks-per-node={most}{_cores(parts)}"
    lists = _MULTI_PROG.replace("ROLES", "\n".join(roles)).replace("NODES", " ".join(node))
    lines = [
        *_head(table.title, parts, [ask], remote=not alone),
        'node=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))',
        f"export {parts.variable}={','.join(endpoints)}",
        *_observers(parts),
        "",
        *lists.splitlines(),
        f"srun --kill-on-bad-exit=1{_cores(parts)} --ntasks={len(table)} --distribution=arbitrary "
        f'--multi-prog "$lists/roles" {shlex.join(parts.argv)}',
        "",
    ]
    return "\n".join(lines)


def _head(title: str, parts: EmitParts, asks: list[str], *, remote: bool = True) -> list[str]:
    """Return the first lines of an `sbatch` file: Slurm's options, and variables of all roles.

    Args:
      title: a comment about the job.
      parts: the job's values.
      asks: the `#SBATCH` lines with nodes and tasks.
      remote: True if roles run on several nodes.
    """
    token = _TOKEN.replace("PYTHON", shlex.quote(parts.argv[0]))
    exports = [f"export {name}={shlex.quote(x)}" for name, x in parts.environment.items()]
    if remote:
        exports.append("export DTRANS_ALLOW_REMOTE=1")
    return [
        "#!/bin/bash",
        f"# {title}",
        f"#SBATCH --job-name={parts.name}",
        *asks,
        "set -euo pipefail",
        "",
        *token.splitlines(),
        *exports,
        f"export DTRANS_TRAINERS={parts.trainers}",
        f"export port=${{DTRANS_PORT:-{PORT}}}",
        "",
    ]


def _observers(parts: EmitParts) -> list[str]:
    """Return the lines of an `sbatch` file that print the `dtrans status` command of the job.

    Without servers, they also set the endpoint at which trainer 0 answers.
    """
    lines, shown = [], f"${{{parts.variable}//,/ }}"
    if parts.answers_status:
        first = f"${{{parts.variable}%%:*}}:$((port + 1))"
        lines, shown = [f"export {STATUS}=${{{STATUS}:-{first}}}"], f"${STATUS}"
    if parts.answers_status or parts.servers:
        lines.append(f'echo "this job answers: dtrans status {shown}"')
    return lines


def _cores(parts: EmitParts) -> str:
    """Return Slurm's option with the number of processors of each process; "" without a number.

    Both `sbatch` and `srun` need it: from Slurm 22.05 on, `srun` does not inherit the number from
    `sbatch`.
    """
    if parts.cores is None:
        return ""
    return f" --cpus-per-task={parts.cores}"
