"""Roles from variables of Slurm, Open MPI, torchrun, JobSet and Paddle's launchers.

`role_variables` translates an environment into the DTRANS_* variables that `Role.from_env` reads.
A DTRANS_* variable always wins.

    DTRANS_ROLE        set: schedulers give the index of a JobSet's pod only
    DTRANS_PSERVERS    number of servers, the scheduler's first processes; 0 is nccl2 mode
    DTRANS_HOSTS       host of each process in order of rank, `a:2,b:2`
    DTRANS_PORT        first port on every host; further endpoints on a host take the next ports
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence

from dtrans.endpoints import parse_endpoints, parse_host_slots
from dtrans.errors import ConfigError


PORT = 6174  # port of the first endpoint on a host, as in Paddle; further endpoints take the next
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
    """Processes of a scheduler.

    Attributes:
      name: the scheduler's name, for errors.
      rank: index of this process.
      size: number of processes.
      hosts: hosts of the first ranks, as far as the scheduler names them.
    """

    name: str
    rank: int
    size: int
    hosts: tuple[str, ...]


def names_role(env: Mapping[str, str]) -> bool:
    """Return True if variables of dtrans or Paddle name the role of this process.

    Otherwise JAX detects the processes of a scheduler.
    """
    names = ("DTRANS_ROLE", *_USER_VARIABLES, "TRAINING_ROLE", "PADDLE_TRAINER_ENDPOINTS")
    return any(name in env for name in names)


def role_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the DTRANS_* variables that a scheduler's variables imply.

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
        return found | {"DTRANS_ROLE": found["DTRANS_ROLE"].lower()} | _of_pod(found)
    if found.get("TRAINING_ROLE") or found.get("PADDLE_TRAINER_ENDPOINTS"):
        return _of_paddle(found)
    world = _torchrun(found) or _open_mpi(found) or _slurm(found)
    return found if world is None else found | _of_world(found, world)


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
        raise ConfigError(f"{text!r} is not a list of Slurm's nodes; write one such as n[1-3],m2")
    hosts: list[str] = []
    for item in re.findall(rf"(?:{part})+", text):
        names = [""]
        for piece in re.findall(part, item):
            choices = _numbers(piece[1:-1]) if piece.startswith("[") else [piece]
            names = [name + choice for name in names for choice in choices]
        hosts += names
    return tuple(hosts)


def expand_tasks(text: str) -> tuple[int, ...]:
    """Return the number of tasks on each node, from Slurm's short form.

    Raises:
      ConfigError: the text does not have that form.

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
                f"{text!r} is not a list of tasks per node; write one such as 2(x3),1"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _numbers(text: str) -> list[str]:
    found = []
    for item in text.split(","):
        first, _, last = item.partition("-")
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return found


def _integer(env: Mapping[str, str], name: str, why: str) -> int:
    value = env.get(name, "")
    if not value.isdecimal():
        state = f"is {value!r}, expected a number" if value else "is not set"
        raise ConfigError(f"{name} {state}; {why}")
    return int(value)


def _torchrun(env: Mapping[str, str]) -> _World | None:
    if not (env.get("TORCHELASTIC_RUN_ID") or (env.get("RANK") and env.get("WORLD_SIZE"))):
        return None
    why = "torchrun sets RANK, WORLD_SIZE and MASTER_ADDR in every process"
    rank, size = _integer(env, "RANK", why), _integer(env, "WORLD_SIZE", why)
    # MASTER_ADDR is the host of rank 0; the others' hosts are known only if all share it
    known = size if env.get("LOCAL_WORLD_SIZE") == str(size) else 1
    address = env.get("MASTER_ADDR", "")
    return _World("torchrun", rank, size, (address,) * known if address else ())


def _open_mpi(env: Mapping[str, str]) -> _World | None:
    if not env.get("OMPI_COMM_WORLD_RANK"):
        return None
    why = "mpirun sets OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE in every process"
    rank, size = (_integer(env, f"OMPI_COMM_WORLD_{n}", why) for n in ("RANK", "SIZE"))
    alone = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size)
    return _World("Open MPI", rank, size, ("127.0.0.1",) * size if alone else ())


def _slurm(env: Mapping[str, str]) -> _World | None:
    if not env.get("SLURM_PROCID"):
        return None
    why = "srun sets SLURM_PROCID and SLURM_NTASKS in every process"
    rank, size = (_integer(env, name, why) for name in ("SLURM_PROCID", "SLURM_NTASKS"))
    hosts: list[str] = []
    if not env.get("DTRANS_HOSTS"):
        hosts = _of_groups(env)
        # a step of one group has only the tasks of that group
        if len(hosts) != size:
            nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
            tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "")
            hosts = _per_task(nodes, tasks, size)
    node = env.get("SLURMD_NODENAME", "")
    if hosts and node and rank < size and hosts[rank] != node:
        raise ConfigError(
            f"Slurm's process {rank} runs on {node}, and its node list gives {hosts[rank]}; start "
            "one step with `srun --distribution=block`, or set DTRANS_HOSTS"
        )
    return _World("Slurm", rank, size, tuple(hosts))


def _of_groups(env: Mapping[str, str]) -> list[str]:
    """Return the host of each task of a heterogeneous job.

    A step of all groups numbers its tasks group by group.
    """
    hosts: list[str] = []
    groups = _integer(env, "SLURM_HET_SIZE", "Slurm sets it") if env.get("SLURM_HET_SIZE") else 0
    for group in range(groups):
        nodes = env.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", "")
        if not nodes:
            raise ConfigError(
                f"SLURM_HET_SIZE is {groups}, and SLURM_JOB_NODELIST_HET_GROUP_{group} is not "
                "set; set the DTRANS_* variables of this process"
            )
        hosts += _per_task(nodes, env.get(f"SLURM_TASKS_PER_NODE_HET_GROUP_{group}", ""), None)
    return hosts


def _per_task(nodes: str, tasks: str, size: int | None) -> list[str]:
    if not nodes:
        return []
    hosts = expand_nodes(nodes)
    counts = expand_tasks(tasks or f"1(x{len(hosts)})")
    if len(counts) != len(hosts) or sum(counts) != (size or sum(counts)):
        raise ConfigError(
            f"Slurm's nodes are {nodes}, its tasks per node {tasks or 'not set'}, and its tasks "
            f"{size or sum(counts)}, which do not fit; set DTRANS_HOSTS, such as a:2,b:2"
        )
    found: list[str] = []
    for host, count in zip(hosts, counts, strict=True):
        found += [host] * count
    return found


def _of_pod(env: Mapping[str, str]) -> dict[str, str]:
    """Return the index of a Kubernetes pod among the pods with the same role."""
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
                f"JOB_COMPLETION_INDEX is {index}, and {name} has {len(endpoints)}: {env[name]}; "
                "give the Job as many completions as there are endpoints"
            )
        found["DTRANS_CURRENT_ENDPOINT"] = endpoints[index]
    return {variable: value for variable, value in found.items() if not env.get(variable)}


def _of_paddle(env: Mapping[str, str]) -> dict[str, str]:
    role = env.get("TRAINING_ROLE") or "TRAINER"
    if role not in ("TRAINER", "PSERVER"):
        raise ConfigError(f"TRAINING_ROLE is {role!r}, expected TRAINER or PSERVER")
    found = {name: env.get(name) or env.get(paddle, "") for name, paddle in PADDLE.items()}
    found["DTRANS_ROLE"] = role.lower()
    needed = ["DTRANS_TRAINERS", "DTRANS_TRAINER_ID" if role == "TRAINER" else ""]
    if found["DTRANS_PSERVER_ENDPOINTS"] or role == "PSERVER":
        # Paddle's fleet sets the endpoints of trainers as well as those of servers
        found["DTRANS_TRAINER_ENDPOINTS"] = env.get("DTRANS_TRAINER_ENDPOINTS", "")
        needed.append("DTRANS_PSERVER_ENDPOINTS")
    elif found["DTRANS_TRAINER_ENDPOINTS"]:
        needed.append("DTRANS_CURRENT_ENDPOINT")
    else:
        needed.append("DTRANS_PSERVER_ENDPOINTS")
    if role == "PSERVER" and not found["DTRANS_CURRENT_ENDPOINT"]:
        if not (env.get("POD_IP") and env.get("PADDLE_PORT")):
            raise ConfigError(
                f"TRAINING_ROLE is PSERVER, POD_IP is {env.get('POD_IP', '')!r} and PADDLE_PORT is "
                f"{env.get('PADDLE_PORT', '')!r}; set both, or DTRANS_CURRENT_ENDPOINT"
            )
        found["DTRANS_CURRENT_ENDPOINT"] = f"{env['POD_IP']}:{env['PADDLE_PORT']}"
    for name in filter(None, needed):
        if not found[name]:
            raise ConfigError(
                f"this is Paddle's {role}, and {PADDLE[name]} is not set; set it, or {name}"
            )
    return {**env, **found}


def _of_world(env: Mapping[str, str], world: _World) -> dict[str, str]:
    started = f"{world.name} started this process as rank {world.rank} of {world.size}"
    if world.rank >= world.size:
        raise ConfigError(
            f"{started}, expected ranks 0 to {world.size - 1}; set DTRANS_ROLE and the other "
            "variables of dtrans.Role"
        )
    servers = _servers(env, started)
    if servers >= world.size:
        raise ConfigError(
            f"{started}, and {servers} are servers, expected one trainer or more; start more "
            "processes, or lower DTRANS_PSERVERS"
        )
    trainers = world.size - servers
    if env.get("DTRANS_TRAINERS", "") not in ("", str(trainers)):
        raise ConfigError(
            f"{started}, {servers} of them servers: DTRANS_TRAINERS is {env['DTRANS_TRAINERS']}, "
            f"expected {trainers}; leave it out"
        )

    # endpoints of servers, or in nccl2 mode of trainers
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
    # the user's variables win
    return found | {
        n: env[n] for n in ("DTRANS_TRAINER_ID", "DTRANS_CURRENT_ENDPOINT") if env.get(n)
    }


def _servers(env: Mapping[str, str], started: str) -> int:
    if env.get("DTRANS_PSERVERS"):
        return _integer(env, "DTRANS_PSERVERS", "it is the number of servers")
    if env.get("DTRANS_PSERVER_ENDPOINTS"):
        return len(parse_endpoints(env["DTRANS_PSERVER_ENDPOINTS"]))
    if env.get("DTRANS_TRAINER_ENDPOINTS"):
        return 0
    raise ConfigError(
        f"{started}, and DTRANS_PSERVERS is not set; set it to the number of servers, which are "
        "the first processes, or to 0 for nccl2 mode"
    )


def _endpoints(env: Mapping[str, str], world: _World, count: int, started: str) -> list[str]:
    hosts = list(world.hosts)
    if env.get("DTRANS_HOSTS"):
        hosts = []
        for host, slots in parse_host_slots(env["DTRANS_HOSTS"], "DTRANS_HOSTS"):
            hosts += [host] * (1 if slots is None else slots)
        if len(hosts) != world.size:
            raise ConfigError(
                f"{started}: DTRANS_HOSTS={env['DTRANS_HOSTS']} has {len(hosts)} places, expected "
                f"{world.size}; write the number of processes on each host, such as a:2,b:2"
            )
    if len(hosts) < count:
        raise ConfigError(
            f"{started}, and names the hosts of {len(hosts)} processes, expected {count}; set "
            "DTRANS_HOSTS to the hosts in order of rank, such as a:2,b:2"
        )
    port = PORT
    if env.get("DTRANS_PORT"):
        port = _integer(env, "DTRANS_PORT", "it is the first port on every host")
    used = collections.Counter[str]()
    endpoints = []
    for host in hosts[:count]:
        endpoints.append(f"{host}:{port + used[host]}")
        used[host] += 1
    return endpoints
