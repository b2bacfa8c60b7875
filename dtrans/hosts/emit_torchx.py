"""Writer of a TorchX component: a Python file that defines a job's roles as an `AppDef`.

TorchX fills in `${replica_id}` and `${app_id}` when it starts a replica. Each scheduler names the
hosts of replicas differently. So the user passes the component a pattern for host names, with `{i}`
for the index of the server.
"""

from __future__ import annotations

from dtrans.hosts.emit_parts import parts_of
from dtrans.hosts.role_table import RoleTable
from dtrans.run.distributed.schedulers import PORT
from dtrans.run.distributed.status_door import VARIABLE as STATUS


IMAGE = "dtrans-job:latest"

_FILE = '''\
"""{title}

torchx run -s local_cwd THIS:job
torchx run -s local_docker THIS:job --hosts '${{app_id}}-{bound}-{{i}}' --token_file /run/token \\
    --mounts type=bind,src=/run/token,dst=/run/token,readonly
torchx run -s kubernetes THIS:job --hosts '${{app_id}}-{bound}-{{i}}-0.${{app_id}}' --token_file ...
"""

from typing import List, Optional

import torchx.specs as specs

COMMAND = {command!r}
ENVIRONMENT = {environment!r}


def job(
    image: str = {image!r},
    hosts: str = "127.0.1.{{i}}",
    port: int = {port},
    token_file: str = "",
    cpu: int = {cores},
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    """Describe the processes of the job.

    Args:
        image: container image with dtrans and the script
        hosts: pattern for the host of {bound} {{i}}, from 0; the default is for one Linux machine
        port: port of every {bound}
        token_file: path of the token file in each process; by default DTRANS_TOKEN is inherited
        cpu: processors for each process
        mounts: mounts as in dist.ddp, for example of the token file
    """
    at = lambda i, port=port: hosts.replace("{{i}}", str(i)) + f":{{port}}"
    shared = {{
        **ENVIRONMENT,
        "DTRANS_ALLOW_REMOTE": "1",
        "DTRANS_TRAINERS": "{trainers}",
        "{variable}": ",".join(at(i) for i in range({count})),
{observers}    }}
    if token_file:
        shared["DTRANS_TOKEN_FILE"] = token_file

    def role(name, count, own):
        return specs.Role(
            name=name,
            image=image,
            entrypoint=COMMAND[0],
            args=COMMAND[1:],
            env={{**shared, "DTRANS_ROLE": name, **own}},
            num_replicas=count,
            max_retries=0,
            port_map={{"dtrans": port}},
            resource=specs.Resource(cpu=cpu, gpu=0, memMB=1024 * cpu),
            mounts=specs.parse_mounts(mounts) if mounts else [],
        )

    current = {{"DTRANS_CURRENT_ENDPOINT": at(specs.macros.replica_id)}}
    index = {{"DTRANS_TRAINER_ID": specs.macros.replica_id}}
    return specs.AppDef(
        name={name!r},
        roles=[
{roles}
        ],
    )
'''


def emit_torchx(table: RoleTable, image: str = IMAGE) -> str:
    """Return a Python file with a TorchX component.

    Args:
      table: the roles, with a command: the result of `role_table` or `plan.roles`.
      image: the container image with dtrans and the script.
    """
    parts = parts_of(table)
    if parts.servers:
        roles = [
            f'role("pserver", {parts.servers}, current),',
            f'role("trainer", {parts.trainers}, index),',
        ]
    else:
        roles = [f'role("trainer", {parts.trainers}, {{**current, **index}}),']
    role_lines = [f"            {line}" for line in roles]
    # `$$` escapes `$`, which begins a macro of TorchX
    command = [a.replace("$", "$$") for a in parts.argv]
    environment = {k: v.replace("$", "$$") for k, v in parts.environment.items()}
    observers = f'        "{STATUS}": at(0, port + 1),\n' if parts.answers_status else ""
    return _FILE.format(
        title=table.title,
        bound="pserver" if parts.servers else "trainer",
        command=command,
        environment=environment,
        image=image,
        port=PORT,
        cores=parts.cores or 1,
        trainers=parts.trainers,
        variable=parts.variable,
        count=parts.servers or parts.trainers,
        observers=observers,
        # short, because TorchX's Docker scheduler cuts long host names
        name=parts.name[:15].rstrip("-"),
        roles="\n".join(role_lines),
    )
