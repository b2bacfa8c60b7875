"""Writer of a shell script that starts a job's roles on hosts by ssh.

The script keeps the standard input of each remote shell open. The first line of this input is the
job's token (the secret by which processes of a job recognize each other). When the script ends for
any reason, the input closes, and the remote shell ends its role.
"""

from __future__ import annotations

import shlex

from dtrans.hosts.emit_parts import parts_of
from dtrans.hosts.role_table import RoleTable
from dtrans.run.distributed.schedulers import PORT
from dtrans.run.distributed.status_door import VARIABLE as STATUS


_REMOTE = """\
IFS= read -r DTRANS_TOKEN; export DTRANS_TOKEN
exec 3<&0
"$@" </dev/null 3<&- & role=$!
{ cat <&3; kill "$role"; sleep 10; kill -9 "$role"; } >/dev/null 2>&1 & watch=$!
wait "$role"; code=$?
kill "$watch" 2>/dev/null
exit "$code"\
"""

_SCRIPT = """\
#!/bin/sh
# {title}
# usage: sh THIS HOST... <TOKEN     or set DTRANS_TOKEN_FILE. The first role runs on the first host.
#        If there are fewer hosts than roles, hosts are used several times.
#        RSH is the program that runs a command on a host (default: ssh).
set -u
[ $# -gt 0 ] || {{ echo "usage: sh $0 HOST... <TOKEN" >&2; exit 2; }}
if [ -n "${{DTRANS_TOKEN_FILE:-}}" ]; then exec <"$DTRANS_TOKEN_FILE"; fi
IFS= read -r token || :
[ -n "$token" ] || {{ echo "no token; create one by: dtrans keygen --token" >&2; exit 2; }}

dir=$(mktemp -d) || exit 1
mkfifo "$dir/alive" "$dir/ended" || exit 1
exec 3<>"$dir/alive" 4<>"$dir/ended"
trap 'exec 3>&-; wait; rm -rf "$dir"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
quote() {{ printf "%s" "$1" | sed "s/'/'\\\\\\\\''/g; 1s/^/'/; \\$s/\\$/'/"; }}

# a host for each of {count} roles
hosts=''
i=0
while [ "$i" -lt {count} ]; do
  for host; do
    [ "$i" -lt {count} ] || break
    hosts="$hosts $host"
    i=$((i + 1))
  done
done
# ssh takes user@host; other roles connect to host
endpoints=''
i=0
for host in $hosts; do
  [ "$i" -lt {bound} ] || break
  endpoints="$endpoints,${{host#*@}}:$(({port} + i))"
  i=$((i + 1))
done
endpoints=${{endpoints#,}}
{observers}
remote={remote}
start() {{ # name, host, variables
  name=$1 host=$2; shift 2
  line="cd $(quote "$PWD") && exec env $* sh -c $(quote "$remote") dtrans"
  (
    # open descriptor 5 before closing 3, since opening a pipe without a writer blocks
    exec 5<"$dir/alive" 3>&-
    {{ printf '%s\\n' "$token"; exec cat <&5; }} | {{
      ${{RSH:-ssh}} "$host" "$line "{command}
      echo "$? $name" >&4
    }}
  ) &
}}

i=0
for host in $hosts; do
  own=${{host#*@}}:$(({port} + i))
  shared={shared}
{choose}
  i=$((i + 1))
done

# the first role that fails ends the script, which ends all other roles
left={count}
while [ "$left" -gt 0 ]; do
  read -r code name <&4
  [ "$code" -eq 0 ] || {{ echo "$name failed: exit code $code" >&2; exit "$code"; }}
  left=$((left - 1))
done
"""


def emit_ssh(table: RoleTable) -> str:
    """Return a shell script that takes hosts as arguments, and starts the roles on the hosts.

    Args:
      table: the roles, with a command: the result of `role_table` or `plan.roles`.
    """
    parts = parts_of(table)
    shared = [f"{k}={shlex.quote(v)}" for k, v in parts.environment.items()]
    shared += ["DTRANS_ALLOW_REMOTE=1", f"DTRANS_TRAINERS={parts.trainers}"]
    trainer = lambda index, more: (
        f'start "trainer {index}" "$host" "$shared" DTRANS_ROLE=trainer '
        f'"DTRANS_TRAINER_ID={index}"{more}'
    )
    bound = ' "DTRANS_CURRENT_ENDPOINT=$own"'

    # the endpoints for `dtrans status`
    listed = f"{parts.variable}=$endpoints"
    observers = []
    if parts.answers_status:
        listed += f" {STATUS}=$observers"
        observers.append(f"observers=${{endpoints%%:*}}:{PORT + parts.trainers}")
    elif parts.servers:
        observers.append("observers=$(echo \"$endpoints\" | tr , ' ')")
    if observers:
        observers.append('echo "this job answers: dtrans status $observers" >&2')

    # shell code that starts role number $i
    if parts.servers:
        index = f"$((i - {parts.servers}))"
        choose = [
            f'if [ "$i" -lt {parts.servers} ]; then',
            f'  start "pserver $i" "$host" "$shared" DTRANS_ROLE=pserver{bound}',
            "else",
            f"  {trainer(index, '')}",
            "fi",
        ]
    else:
        choose = [trainer("$i", bound)]
    observer_lines = [f"{line}\n" for line in observers]
    role_lines = [f"  {line}" for line in choose]
    return _SCRIPT.format(
        title=table.title,
        count=len(table),
        bound=parts.servers or parts.trainers,
        port=PORT,
        remote=shlex.quote(_REMOTE),
        command=shlex.quote(shlex.join(parts.argv)),
        shared=f'{shlex.quote(" ".join(shared))}" {listed}"',
        observers="".join(observer_lines),
        choose="\n".join(role_lines),
    )
