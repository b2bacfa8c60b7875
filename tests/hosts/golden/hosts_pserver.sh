#!/bin/sh
# roles of a pserver job: 2 pservers, 2 trainers
# usage: sh THIS HOST... <TOKEN     or set DTRANS_TOKEN_FILE. The first role runs on the first host.
#        If there are fewer hosts than roles, hosts are used several times.
#        RSH is the program that runs a command on a host (default: ssh).
set -u
[ $# -gt 0 ] || { echo "usage: sh $0 HOST... <TOKEN" >&2; exit 2; }
if [ -n "${DTRANS_TOKEN_FILE:-}" ]; then exec <"$DTRANS_TOKEN_FILE"; fi
IFS= read -r token || :
[ -n "$token" ] || { echo "no token; create one by: dtrans keygen --token" >&2; exit 2; }

dir=$(mktemp -d) || exit 1
mkfifo "$dir/alive" "$dir/ended" || exit 1
exec 3<>"$dir/alive" 4<>"$dir/ended"
trap 'exec 3>&-; wait; rm -rf "$dir"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
quote() { printf "%s" "$1" | sed "s/'/'\\\\''/g; 1s/^/'/; \$s/\$/'/"; }

# a host for each of 4 roles
hosts=''
i=0
while [ "$i" -lt 4 ]; do
  for host; do
    [ "$i" -lt 4 ] || break
    hosts="$hosts $host"
    i=$((i + 1))
  done
done
# ssh takes user@host; other roles connect to host
endpoints=''
i=0
for host in $hosts; do
  [ "$i" -lt 2 ] || break
  endpoints="$endpoints,${host#*@}:$((6174 + i))"
  i=$((i + 1))
done
endpoints=${endpoints#,}
observers=$(echo "$endpoints" | tr , ' ')
echo "this job answers: dtrans status $observers" >&2

remote='IFS= read -r DTRANS_TOKEN; export DTRANS_TOKEN
exec 3<&0
"$@" </dev/null 3<&- & role=$!
{ cat <&3; kill "$role"; sleep 10; kill -9 "$role"; } >/dev/null 2>&1 & watch=$!
wait "$role"; code=$?
kill "$watch" 2>/dev/null
exit "$code"'
start() { # name, host, variables
  name=$1 host=$2; shift 2
  line="cd $(quote "$PWD") && exec env $* sh -c $(quote "$remote") dtrans"
  (
    # open descriptor 5 before closing 3, since opening a pipe without a writer blocks
    exec 5<"$dir/alive" 3>&-
    { printf '%s\n' "$token"; exec cat <&5; } | {
      ${RSH:-ssh} "$host" "$line "'python train.py '"'"'it'"'"'"'"'"'"'"'"'s'"'"''
      echo "$? $name" >&4
    }
  ) &
}

i=0
for host in $hosts; do
  own=${host#*@}:$((6174 + i))
  shared='EXTRA='"'"'it'"'"'"'"'"'"'"'"'s $(HOME) $x'"'"' DTRANS_ALLOW_REMOTE=1 DTRANS_TRAINERS=2'" DTRANS_PSERVER_ENDPOINTS=$endpoints"
  if [ "$i" -lt 2 ]; then
    start "pserver $i" "$host" "$shared" DTRANS_ROLE=pserver "DTRANS_CURRENT_ENDPOINT=$own"
  else
    start "trainer $((i - 2))" "$host" "$shared" DTRANS_ROLE=trainer "DTRANS_TRAINER_ID=$((i - 2))"
  fi
  i=$((i + 1))
done

# the first role that fails ends the script, which ends all other roles
left=4
while [ "$left" -gt 0 ]; do
  read -r code name <&4
  [ "$code" -eq 0 ] || { echo "$name failed: exit code $code" >&2; exit "$code"; }
  left=$((left - 1))
done
