"""What a launched process knows about itself: its role, from environment variables.

    DTRANS_ROLE                 trainer or pserver
    DTRANS_TRAINERS             how many trainers there are
    DTRANS_PSERVER_ENDPOINTS    pserver mode: all pservers, separated by commas
    DTRANS_TRAINER_ENDPOINTS    nccl2 mode: all trainers, separated by commas
    DTRANS_TRAINER_ID           of a trainer: which one, from 0
    DTRANS_CURRENT_ENDPOINT     of a pserver, and of a trainer in nccl2 mode: which of the endpoints is its own
    DTRANS_ON_TRAINER_LOSS      nccl2 mode: abort or drop; see `dtrans.connect`
    DTRANS_TOKEN                a secret of the job, the same in all processes; see `dtrans.protocol.token`
    DTRANS_TOKEN_FILE           the path of a file that holds it, where DTRANS_TOKEN is not set
    DTRANS_STATUS_ENDPOINT      collectives: where trainer 0 answers `dtrans status`; chosen by `dtrans launch` if unset
    DTRANS_KEYS                 a folder of separate keys, in the place of a token; see `dtrans.run.net.keys`
    DTRANS_TRANSPORT_ENCRYPTION required, auto or disabled; the same in all processes; see there
    DTRANS_ALLOW_REMOTE         1 allows addresses that other hosts reach; see `dtrans.run.net.net_options`

`dtrans launch` sets them; so can any scheduler. The mode is told by whose endpoints there are. They
are Paddle's (TRAINING_ROLE, PADDLE_TRAINER_ID, ...; python/paddle/distributed/launch_ps.py), under
names of our own. `Role.environment` and `Role.from_env` are each other's inverse.
`dtrans.run.distributed.schedulers` derives the names above from the variables of Slurm, Open MPI,
torchrun, JobSet and Paddle.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Literal

from dtrans.endpoints import parse_endpoints
from dtrans.errors import ConfigError
from dtrans.parameter_server.plan import check_trainer_endpoint, check_trainer_id
from dtrans.run.distributed.schedulers import role_variables


TRAINER, PSERVER = "trainer", "pserver"
VARIABLES = (
    "DTRANS_ROLE",
    "DTRANS_TRAINER_ID",
    "DTRANS_TRAINERS",
    "DTRANS_PSERVER_ENDPOINTS",
    "DTRANS_TRAINER_ENDPOINTS",
    "DTRANS_CURRENT_ENDPOINT",
)
# not who a process is, but what it does when others end: see `dtrans.connect`
LOSS = "DTRANS_ON_TRAINER_LOSS"


@dataclasses.dataclass(frozen=True)
class Role:
    """One participant of a job.

    Attributes:
      kind: `trainer` or `pserver`.
      trainers: how many trainers there are.
      pserver_endpoints: of all pservers, in the order that every role has to agree on; none in
        nccl2 mode.
      trainer_id: which trainer this is; 0 in a pserver, so that it can be handed to `transpile` as
        it is.
      current_endpoint: of a pserver, or of a trainer in nccl2 mode, its own; else empty.
      trainer_endpoints: in nccl2 mode those of all trainers, in their order; else none.

    Raises:
      ConfigError: values that contradict each other.

    Example:
      >>> import dtrans
      >>> role = dtrans.Role("trainer", 2, ("127.0.0.1:6174", "127.0.0.1:6175"), trainer_id=1)
      >>> role.name, role.pservers
      ('trainer 1', '127.0.0.1:6174,127.0.0.1:6175')
      >>> dtrans.Role.from_env(role.environment()) == role
      True
      >>> dtrans.Role("trainer", 1, (), current_endpoint="127.0.0.1:6174", trainer_endpoints=("127.0.0.1:6174",)).mode
      'nccl2'
    """

    kind: Literal["trainer", "pserver"]
    trainers: int
    pserver_endpoints: tuple[str, ...]
    trainer_id: int = 0
    current_endpoint: str = ""
    trainer_endpoints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.trainers < 1:
            raise ConfigError(f"a job needs a trainer, DTRANS_TRAINERS is {self.trainers}")
        if self.trainer_endpoints:
            self._check_nccl2()
            return
        parse_endpoints(self.pserver_endpoints)
        if self.is_trainer:
            check_trainer_id(self.trainer_id, self.trainers)
        elif self.current_endpoint not in self.pserver_endpoints:
            raise ConfigError(
                f"this pserver's endpoint {self.current_endpoint!r} (DTRANS_CURRENT_ENDPOINT) is "
                "not one of "
                f"DTRANS_PSERVER_ENDPOINTS: {self.pservers}"
            )

    def _check_nccl2(self) -> None:
        parse_endpoints(self.trainer_endpoints, "trainer")
        if self.pserver_endpoints or not self.is_trainer:
            raise ConfigError(
                "DTRANS_TRAINER_ENDPOINTS is for nccl2 mode, which has no pservers; "
                f"this is a {self.kind}, and DTRANS_PSERVER_ENDPOINTS is {self.pservers!r}"
            )
        if len(self.trainer_endpoints) != self.trainers:
            raise ConfigError(
                f"DTRANS_TRAINERS is {self.trainers}, and DTRANS_TRAINER_ENDPOINTS has "
                f"{len(self.trainer_endpoints)}: "
                f"{','.join(self.trainer_endpoints)}"
            )
        check_trainer_endpoint(self.trainer_id, self.current_endpoint, self.trainer_endpoints)

    @property
    def mode(self) -> Literal["pserver", "nccl2"]:
        """As `DistributeTranspilerConfig.mode`."""
        return "nccl2" if self.trainer_endpoints else "pserver"

    @property
    def is_trainer(self) -> bool:
        """Whether this is a trainer."""
        return self.kind == TRAINER

    @property
    def is_pserver(self) -> bool:
        """Whether this is a parameter server."""
        return self.kind == PSERVER

    @property
    def pservers(self) -> str:
        """The endpoints as one string with commas, as `transpile` takes them."""
        return ",".join(self.pserver_endpoints)

    @property
    def name(self) -> str:
        """`trainer 0`, `pserver 1`: what messages call it."""
        index = (
            self.trainer_id
            if self.is_trainer
            else self.pserver_endpoints.index(self.current_endpoint)
        )
        return f"{self.kind} {index}"

    def environment(self) -> dict[str, str]:
        """The variables that say this."""
        found = {
            "DTRANS_ROLE": self.kind,
            "DTRANS_TRAINERS": str(self.trainers),
        }
        if self.mode == "nccl2":
            return found | {
                "DTRANS_TRAINER_ENDPOINTS": ",".join(self.trainer_endpoints),
                "DTRANS_TRAINER_ID": str(self.trainer_id),
                "DTRANS_CURRENT_ENDPOINT": self.current_endpoint,
            }
        found["DTRANS_PSERVER_ENDPOINTS"] = self.pservers
        if self.is_trainer:
            return found | {"DTRANS_TRAINER_ID": str(self.trainer_id)}
        return found | {"DTRANS_CURRENT_ENDPOINT": self.current_endpoint}

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Role:
        """Return the role of this process, from DTRANS_* variables or from those of a scheduler.

        Args:
          environ: `os.environ` by default.

        Raises:
          ConfigError: a variable that is missing or has a value that cannot be.
        """
        env = role_variables(os.environ if environ is None else environ)
        kind = _read(env, "DTRANS_ROLE")
        trainers = _number(env, "DTRANS_TRAINERS")
        if kind not in (TRAINER, PSERVER):
            raise ConfigError(f"DTRANS_ROLE is {kind!r}; it must be {TRAINER} or {PSERVER}")
        if env.get("DTRANS_TRAINER_ENDPOINTS", "").strip():
            return cls(
                "trainer" if kind == TRAINER else "pserver",
                trainers,
                tuple(e for e in env.get("DTRANS_PSERVER_ENDPOINTS", "").split(",") if e),
                trainer_id=_number(env, "DTRANS_TRAINER_ID"),
                current_endpoint=_read(env, "DTRANS_CURRENT_ENDPOINT"),
                trainer_endpoints=parse_endpoints(
                    _read(env, "DTRANS_TRAINER_ENDPOINTS"), "trainer"
                ),
            )
        endpoints = parse_endpoints(_read(env, "DTRANS_PSERVER_ENDPOINTS"))
        if kind == TRAINER:
            return cls("trainer", trainers, endpoints, trainer_id=_number(env, "DTRANS_TRAINER_ID"))
        own = _read(env, "DTRANS_CURRENT_ENDPOINT")
        return cls("pserver", trainers, endpoints, current_endpoint=own)


def roles_of(trainers: int, endpoints: Sequence[str]) -> tuple[Role, ...]:
    """Every role of a job: the pservers, then the trainers."""
    every = tuple(endpoints)
    servers = (Role("pserver", trainers, every, current_endpoint=e) for e in every)
    return (*servers, *(Role("trainer", trainers, every, trainer_id=i) for i in range(trainers)))


def trainer_roles(endpoints: Sequence[str]) -> tuple[Role, ...]:
    """Every role of an nccl2 job."""
    every = tuple(endpoints)
    return tuple(
        Role("trainer", len(every), (), trainer_id=i, current_endpoint=e, trainer_endpoints=every)
        for i, e in enumerate(every)
    )


def _read(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "").strip()
    if not value:
        raise ConfigError(
            f"the environment variable {name} is not set: start this script with `dtrans launch "
            "script.py`, "
            f"or set {', '.join(VARIABLES)}"
        )
    return value


def _number(env: Mapping[str, str], name: str) -> int:
    value = _read(env, name)
    if not value.isdecimal():
        raise ConfigError(f"{name} is {value!r}; it must be a number")
    return int(value)
