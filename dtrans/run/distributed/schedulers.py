"""Roles of processes from variables of Slurm, Open MPI, torchrun, JobSet and Paddle's launchers.

`role_variables` translates an environment into the DTRANS_* variables that `Role.from_env` reads.
A DTRANS_* variable that is set already takes precedence. The user controls the translation by four
variables:

    DTRANS_ROLE        if it is set, only the index of a Kubernetes pod comes from the scheduler
    DTRANS_PSERVERS    number of servers, which are the first processes; 0 is nccl2 mode
    DTRANS_HOSTS       hosts in the order of ranks, with the number of processes: `a:2,b:2`
    DTRANS_PORT        first port on every host; further endpoints on a host use the next ports
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence

from dtrans.endpoints import parse_endpoints, parse_host_slots
from dtrans.errors import ConfigError


PORT = 6174  # default port of the first endpoint on a host, as in Paddle
PADDLE = {  # set by python/paddle/distributed/launch_ps.py and launch.py
    "DTRANS_ROLE": "TRAINING_ROLE",
    "DTRANS_TRAINERS": "PADDLE_TRAINERS_NUM",
    "DTRANS_TRAINER_ID": "PADDLE_TRAINER_ID",
    "DTRANS_PSERVER_ENDPOINTS": "PADDLE_PSERVERS_IP_PORT_LIST",
    "DTRANS_TRAINER_ENDPOINTS": "PADDLE_TRAINER_ENDPOINTS",
    "DTRANS_CURRENT_ENDPOINT": "PADDLE_CURRENT_ENDPOINT",
}
_USER_VARIABLES = ("DTRANS_PSERVERS", "DTRANS_HOSTS", "DTRANS_TRAINER_ENDPOINTS")


@dataclasses.dataclass(frozen=True)
class _World:
    """The processes that a scheduler has started.

    Attributes:
      name: the scheduler's name, for errors.
      rank: index of this process.
      size: number of processes.
      hosts: the hosts of ranks 0, 1, ...; it is shorter than `size` if some hosts are unknown.
    """

    name: str
    rank: int
    size: int
    hosts: tuple[str, ...]


def names_role(env: Mapping[str, str]) -> bool:
    """Return True if the environment variables of dtrans or Paddle name the role of this process.

    If not, `dtrans.connect` lets JAX detect the processes that a scheduler started.
    """
    names = ("DTRANS_ROLE", *_USER_VARIABLES, "TRAINING_ROLE", "PADDLE_TRAINER_ENDPOINTS")
    return any(name in env for name in names)


def role_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the DTRANS_* variables that a scheduler's variables imply.

    Raises:
      ConfigError: variables are missing or contradict each other.

    Example:
      >>> from dtrans.run.distributed.schedulers import role_variables
      >>> slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_JOB_NODELIST": "n[1-3]"}
      >>> role_variables(slurm | {"DTRANS_PSERVERS": "1"})["DTRANS_PSERVER_ENDPOINTS"]
      'n1:6174'
    """
    found = {name: value.strip() for name, value in env.items()}
    if found.get("DTRANS_ROLE"):
        return found | {"DTRANS_ROLE": found["DTRANS_ROLE"].lower()} | _read_pod(found)
    if found.get("TRAINING_ROLE") or found.get("PADDLE_TRAINER_ENDPOINTS"):
        return _read_paddle(found)
    world = _torchrun(found) or _open_mpi(found) or _slurm(found)
    return found if world is None else found | _derive_variables(found, world)


def expand_nodes(text: str) -> tuple[str, ...]:
    """Return the hosts of a Slurm node list.

    Raises:
      ConfigError: the text is not a node list.

    Example:
      >>> from dtrans.run.distributed.schedulers import expand_nodes
      >>> expand_nodes("n[1-2,05],m2")
      ('n1', 'n2', 'n05', 'm2')
    """
    part = r"[^\[\],\s]+|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
    if not re.fullmatch(rf"(?:{part})+(?:,(?:{part})+)*", text):
        raise ConfigError(f"{text!r} is not a Slurm node list; expected a list such as n[1-3],m2")
    hosts: list[str] = []
    for item in re.findall(rf"(?:{part})+", text):
        names = [""]
        for piece in re.findall(part, item):
            choices = _numbers(piece[1:-1]) if piece.startswith("[") else [piece]
            names = [name + choice for name in names for choice in choices]
        hosts += names
    return tuple(hosts)


def expand_tasks(text: str) -> tuple[int, ...]:
    """Return the number of tasks on each node, from Slurm's text such as "2(x3),1".

    Raises:
      ConfigError: the text is not in this form.

    Example:
      >>> from dtrans.run.distributed.schedulers import expand_tasks
      >>> expand_tasks("2(x3),1")
      (2, 2, 2, 1)
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise ConfigError(
                f"{text!r} is not Slurm's list of tasks per node; expected a list such as 2(x3),1"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _numbers(text: str) -> list[str]:
    """Expand the numbers in the brackets of a node list: `1-3,05`. Leading zeros stay."""
    found = []
    for item in text.split(","):
        first, _, last = item.partition("-")
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return found


def _integer(env: Mapping[str, str], name: str, why: str) -> int:
    value = env.get(name, "")
    if not value:
        raise ConfigError(f"{name} is not set; {why}")
    if not value.isdecimal():
        raise ConfigError(f"{name} is {value!r}, expected a number; {why}")
    return int(value)


def _torchrun(env: Mapping[str, str]) -> _World | None:
    if not (env.get("TORCHELASTIC_RUN_ID") or (env.get("RANK") and env.get("WORLD_SIZE"))):
        return None
    why = "torchrun sets RANK, WORLD_SIZE and MASTER_ADDR in every process"
    rank, size = _integer(env, "RANK", why), _integer(env, "WORLD_SIZE", why)
    # MASTER_ADDR is the host of rank 0, and of all ranks if they share one host.
    known = size if env.get("LOCAL_WORLD_SIZE") == str(size) else 1
    address = env.get("MASTER_ADDR", "")
    hosts: tuple[str, ...] = ()
    if address:
        hosts = (address,) * known
    return _World("torchrun", rank, size, hosts)


def _open_mpi(env: Mapping[str, str]) -> _World | None:
    if not env.get("OMPI_COMM_WORLD_RANK"):
        return None
    why = "mpirun sets OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE in every process"
    rank = _integer(env, "OMPI_COMM_WORLD_RANK", why)
    size = _integer(env, "OMPI_COMM_WORLD_SIZE", why)
    hosts: tuple[str, ...] = ()
    if env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size):
        hosts = ("127.0.0.1",) * size
    return _World("Open MPI", rank, size, hosts)


def _slurm(env: Mapping[str, str]) -> _World | None:
    if not env.get("SLURM_PROCID"):
        return None
    why = "srun sets SLURM_PROCID and SLURM_NTASKS in every process"
    rank, size = _integer(env, "SLURM_PROCID", why), _integer(env, "SLURM_NTASKS", why)
    hosts: list[str] = []
    if not env.get("DTRANS_HOSTS"):
        hosts = _list_group_hosts(env)
        # There are no groups, or the Slurm step runs on some groups only: use the variables of the
        # Slurm step.
        if len(hosts) != size:
            nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
            tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "")
            hosts = _list_task_hosts(nodes, tasks, size)
    node = env.get("SLURMD_NODENAME", "")
    if hosts and node and rank < size and hosts[rank] != node:
        raise ConfigError(
            f"Slurm's process {rank} runs on {node}, but Slurm's node list has {hosts[rank]} for "
            "it; start one step with `srun --distribution=block`, or set DTRANS_HOSTS"
        )
    return _World("Slurm", rank, size, tuple(hosts))


def _list_group_hosts(env: Mapping[str, str]) -> list[str]:
    """Return the host of each task of a heterogeneous job; empty for another job.

    Slurm numbers the tasks group by group.
    """
    hosts: list[str] = []
    if not env.get("SLURM_HET_SIZE"):
        return hosts
    groups = _integer(env, "SLURM_HET_SIZE", "Slurm sets it to the number of groups")
    for group in range(groups):
        nodes = env.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", "")
        if not nodes:
            raise ConfigError(
                f"SLURM_HET_SIZE is {groups}, but SLURM_JOB_NODELIST_HET_GROUP_{group} is not "
                "set; set the DTRANS_* variables of this process"
            )
        hosts += _list_task_hosts(
            nodes, env.get(f"SLURM_TASKS_PER_NODE_HET_GROUP_{group}", ""), None
        )
    return hosts


def _list_task_hosts(nodes: str, tasks: str, size: int | None) -> list[str]:
    """Return the host of each task.

    Args:
      nodes: Slurm's node list.
      tasks: Slurm's list of tasks per node; one task per node if empty.
      size: the number of tasks; None if unknown.
    """
    if not nodes:
        return []
    hosts = expand_nodes(nodes)
    counts = expand_tasks(tasks or f"1(x{len(hosts)})")
    if len(counts) != len(hosts) or sum(counts) != (size or sum(counts)):
        raise ConfigError(
            f"Slurm's variables contradict each other: nodes {nodes}, tasks per node "
            f"{tasks or 'not set'}, {size or sum(counts)} tasks; set DTRANS_HOSTS, such as a:2,b:2"
        )
    found: list[str] = []
    for host, count in zip(hosts, counts, strict=True):
        found += [host] * count
    return found


def _read_pod(env: Mapping[str, str]) -> dict[str, str]:
    """Return the DTRANS_* variables of a Kubernetes pod that follow from its index in the Job.

    For example, pod 2 of the trainers has DTRANS_TRAINER_ID=2. Variables that the user has set are
    not in the result.
    """
    if not env.get("JOB_COMPLETION_INDEX"):
        return {}
    index = _integer(env, "JOB_COMPLETION_INDEX", "an indexed Job of Kubernetes sets it")
    name, found = "DTRANS_TRAINER_ENDPOINTS", {"DTRANS_TRAINER_ID": str(index)}
    if env["DTRANS_ROLE"].lower() == "pserver":
        name, found = "DTRANS_PSERVER_ENDPOINTS", {}
    if env.get(name) and not env.get("DTRANS_CURRENT_ENDPOINT"):
        endpoints = parse_endpoints(env[name])
        if index >= len(endpoints):
            raise ConfigError(
                f"JOB_COMPLETION_INDEX is {index}, but {name} has {len(endpoints)} endpoints: "
                f"{env[name]}; set the Job's completions to the number of endpoints"
            )
        found["DTRANS_CURRENT_ENDPOINT"] = endpoints[index]
    return {variable: value for variable, value in found.items() if not env.get(variable)}


def _read_paddle(env: Mapping[str, str]) -> dict[str, str]:
    role = env.get("TRAINING_ROLE") or "TRAINER"
    if role not in ("TRAINER", "PSERVER"):
        raise ConfigError(f"TRAINING_ROLE is {role!r}, expected TRAINER or PSERVER")
    found = {name: env.get(name) or env.get(paddle, "") for name, paddle in PADDLE.items()}
    found["DTRANS_ROLE"] = role.lower()
    needed = ["DTRANS_TRAINERS", "DTRANS_TRAINER_ID" if role == "TRAINER" else ""]
    if found["DTRANS_PSERVER_ENDPOINTS"] or role == "PSERVER":
        # Paddle's fleet sets endpoints of trainers also in jobs with servers; ignore these
        # endpoints
        found["DTRANS_TRAINER_ENDPOINTS"] = env.get("DTRANS_TRAINER_ENDPOINTS", "")
        needed.append("DTRANS_PSERVER_ENDPOINTS")
    elif found["DTRANS_TRAINER_ENDPOINTS"]:
        needed.append("DTRANS_CURRENT_ENDPOINT")
    else:
        needed.append("DTRANS_PSERVER_ENDPOINTS")
    if role == "PSERVER" and not found["DTRANS_CURRENT_ENDPOINT"]:
        if not (env.get("POD_IP") and env.get("PADDLE_PORT")):
            raise ConfigError(
                f"TRAINING_ROLE is PSERVER, but POD_IP is {env.get('POD_IP', '')!r} and "
                f"PADDLE_PORT is {env.get('PADDLE_PORT', '')!r}; set both, or "
                "DTRANS_CURRENT_ENDPOINT"
            )
        found["DTRANS_CURRENT_ENDPOINT"] = f"{env['POD_IP']}:{env['PADDLE_PORT']}"
    for name in filter(None, needed):
        if not found[name]:
            raise ConfigError(
                f"TRAINING_ROLE is {role}, but {PADDLE[name]} is not set; set it, or {name}"
            )
    return {**env, **found}


def _derive_variables(env: Mapping[str, str], world: _World) -> dict[str, str]:
    """Derive the DTRANS_* variables of this process from its rank and hosts."""
    started = f"{world.name} started this process as rank {world.rank} of {world.size}"
    if world.rank >= world.size:
        raise ConfigError(
            f"{started}, expected ranks 0 to {world.size - 1}; set DTRANS_ROLE and the other "
            "variables of dtrans.Role"
        )
    servers = _count_servers(env, started)
    if servers >= world.size:
        raise ConfigError(
            f"{started}, but {servers} of them are servers, so no trainer is left; start more "
            "processes, or lower DTRANS_PSERVERS"
        )
    trainers = world.size - servers
    if env.get("DTRANS_TRAINERS", "") not in ("", str(trainers)):
        raise ConfigError(
            f"{started}, {servers} of them servers: DTRANS_TRAINERS is {env['DTRANS_TRAINERS']}, "
            f"expected {trainers}; unset it"
        )

    # endpoints of servers, or of trainers in nccl2 mode
    name, count = "DTRANS_PSERVER_ENDPOINTS", servers
    if not servers:
        name, count = "DTRANS_TRAINER_ENDPOINTS", trainers
    if env.get(name):
        endpoints: Sequence[str] = parse_endpoints(env[name])
        if len(endpoints) != count:
            raise ConfigError(
                f"{started}: {name} has {len(endpoints)} endpoints, expected {count}: {env[name]}"
            )
    else:
        endpoints = _endpoints(env, world, count, started)

    # role of this rank: servers come first
    found = {"DTRANS_TRAINERS": str(trainers), name: ",".join(endpoints)}
    if world.rank < servers:
        return found | {"DTRANS_ROLE": "pserver", "DTRANS_CURRENT_ENDPOINT": endpoints[world.rank]}
    found |= {"DTRANS_ROLE": "trainer", "DTRANS_TRAINER_ID": str(world.rank - servers)}
    if not servers:
        found["DTRANS_CURRENT_ENDPOINT"] = endpoints[world.rank]
    # variables that the user has set take precedence
    for n in ("DTRANS_TRAINER_ID", "DTRANS_CURRENT_ENDPOINT"):
        if env.get(n):
            found[n] = env[n]
    return found


def _count_servers(env: Mapping[str, str], started: str) -> int:
    if env.get("DTRANS_PSERVERS"):
        return _integer(env, "DTRANS_PSERVERS", "set it to the number of servers")
    if env.get("DTRANS_PSERVER_ENDPOINTS"):
        return len(parse_endpoints(env["DTRANS_PSERVER_ENDPOINTS"]))
    if env.get("DTRANS_TRAINER_ENDPOINTS"):
        return 0
    raise ConfigError(
        f"{started}, but DTRANS_PSERVERS is not set; set it to the number of servers, which are "
        "the first processes, or to 0 for nccl2 mode"
    )


def _endpoints(env: Mapping[str, str], world: _World, count: int, started: str) -> list[str]:
    """Return the endpoints of the first `count` ranks.

    Args:
      started: the start of errors: the scheduler, and the rank of this process.
    """
    hosts = list(world.hosts)
    if env.get("DTRANS_HOSTS"):
        hosts = []
        for host, slots in parse_host_slots(env["DTRANS_HOSTS"], "DTRANS_HOSTS"):
            hosts += [host] * (1 if slots is None else slots)
        if len(hosts) != world.size:
            raise ConfigError(
                f"{started}: DTRANS_HOSTS={env['DTRANS_HOSTS']} is for {len(hosts)} processes, "
                f"expected {world.size}; write the number of processes on each host, such as "
                "a:2,b:2"
            )
    if len(hosts) < count:
        raise ConfigError(
            f"{started}, but its variables have the hosts of {len(hosts)} processes, expected "
            f"{count}; set DTRANS_HOSTS to the hosts in the order of ranks, such as a:2,b:2"
        )
    port = PORT
    if env.get("DTRANS_PORT"):
        port = _integer(env, "DTRANS_PORT", "set it to the first port on every host")
    used = collections.Counter[str]()
    endpoints = []
    for host in hosts[:count]:
        endpoints.append(f"{host}:{port + used[host]}")
        used[host] += 1
    return endpoints
