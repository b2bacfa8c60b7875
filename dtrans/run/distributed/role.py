"""The role of a process, from environment variables.

    DTRANS_ROLE                  trainer or pserver
    DTRANS_TRAINERS              number of trainers
    DTRANS_PSERVER_ENDPOINTS     pserver mode: endpoints of all pservers, separated by commas
    DTRANS_TRAINER_ENDPOINTS     nccl2 mode: endpoints of all trainers, separated by commas
    DTRANS_TRAINER_ID            id of this trainer, from 0
    DTRANS_CURRENT_ENDPOINT      endpoint of this pserver, or of this trainer in nccl2 mode
    DTRANS_SPARE                 set in a process that waits for the variables above; see
                                 `dtrans.run.distributed.identity`
    DTRANS_ON_TRAINER_LOSS       nccl2 mode: abort or drop; see `dtrans.connect`
    DTRANS_SNAPSHOTS             folder of generations and snapshots, from the launcher; see
                                 `dtrans.run.net.generation_folder`
    DTRANS_TOKEN                 secret of the job; see `dtrans.protocol.token`
    DTRANS_TOKEN_FILE            path of a file with the secret, if DTRANS_TOKEN is not set
    DTRANS_STATUS_ENDPOINT       nccl2 mode: endpoint at which trainer 0 answers `dtrans status`
    DTRANS_KEYS                  folder of separate keys; see `dtrans.run.net.keys`
    DTRANS_TRANSPORT_ENCRYPTION  required, auto or disabled; see `dtrans.run.net.keys`
    DTRANS_ALLOW_REMOTE          1 for several hosts; see `dtrans.run.net.net_options`
    DTRANS_SHARED_MEMORY         auto or disabled; see `dtrans.run.net.net_options`

`dtrans launch` sets these variables. Under a scheduler, `dtrans.run.distributed.schedulers` derives
them from the variables of Slurm, Open MPI, torchrun, JobSet and Paddle. The mode is nccl2 if
trainers have endpoints. `Role.environment` is the inverse of `Role.from_env`.

The variables correspond to Paddle's (TRAINING_ROLE, PADDLE_TRAINER_ID, ...) in
python/paddle/distributed/launch_ps.py.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Literal

from dtrans.endpoints import parse_endpoints
from dtrans.errors import ConfigError
from dtrans.parameter_server.plan import check_trainer_endpoint, check_trainer_id
from dtrans.run.distributed.identity import receive_identity
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
LOSS = "DTRANS_ON_TRAINER_LOSS"  # default of `dtrans.connect(on_trainer_loss=)`


@dataclasses.dataclass(frozen=True)
class Role:
    """Role of a process in a job.

    Attributes:
      kind: `trainer` or `pserver`.
      trainers: number of trainers.
      pserver_endpoints: endpoints of all pservers, in the same order in all processes; empty in
        nccl2 mode.
      trainer_id: id of this trainer. A pserver has 0, as `transpile` expects.
      current_endpoint: endpoint of this pserver, or of this trainer in nccl2 mode; else empty.
      trainer_endpoints: in nccl2 mode, endpoints of all trainers, in the order of their ids.

    Raises:
      ConfigError: values contradict each other.

    Example:
      >>> import dtrans
      >>> role = dtrans.Role("trainer", 2, ("127.0.0.1:6174", "127.0.0.1:6175"), trainer_id=1)
      >>> role.name, role.pservers
      ('trainer 1', '127.0.0.1:6174,127.0.0.1:6175')
      >>> dtrans.Role.from_env(role.environment()) == role
      True
      >>> endpoint = "127.0.0.1:6174"
      >>> alone = dtrans.Role(
      ...     "trainer", 1, (), current_endpoint=endpoint, trainer_endpoints=(endpoint,)
      ... )
      >>> alone.mode
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
            raise ConfigError(f"DTRANS_TRAINERS is {self.trainers}; it must be 1 or more")
        if self.trainer_endpoints:
            self._check_nccl2()
            return
        parse_endpoints(self.pserver_endpoints)
        if self.is_trainer:
            check_trainer_id(self.trainer_id, self.trainers)
        elif self.current_endpoint not in self.pserver_endpoints:
            raise ConfigError(
                f"this pserver's endpoint {self.current_endpoint!r} (DTRANS_CURRENT_ENDPOINT) is "
                f"not one of DTRANS_PSERVER_ENDPOINTS: {self.pservers}"
            )

    def _check_nccl2(self) -> None:
        parse_endpoints(self.trainer_endpoints, "trainer")
        if self.pserver_endpoints or not self.is_trainer:
            raise ConfigError(
                "DTRANS_TRAINER_ENDPOINTS is set, which is for nccl2 mode without pservers, but "
                f"this is a {self.kind} and DTRANS_PSERVER_ENDPOINTS is {self.pservers!r}; for a "
                "job with pservers, unset DTRANS_TRAINER_ENDPOINTS; for nccl2 mode, unset "
                "DTRANS_PSERVER_ENDPOINTS, and set DTRANS_ROLE=trainer"
            )
        if len(self.trainer_endpoints) != self.trainers:
            raise ConfigError(
                f"DTRANS_TRAINERS is {self.trainers}, but DTRANS_TRAINER_ENDPOINTS has "
                f"{len(self.trainer_endpoints)} endpoints: {','.join(self.trainer_endpoints)}; set "
                "one endpoint for each trainer"
            )
        check_trainer_endpoint(self.trainer_id, self.current_endpoint, self.trainer_endpoints)

    @property
    def mode(self) -> Literal["pserver", "nccl2"]:
        """The mode of the job: "pserver" with parameter servers, "nccl2" without."""
        return "nccl2" if self.trainer_endpoints else "pserver"

    @property
    def is_trainer(self) -> bool:
        """True if the process is a trainer."""
        return self.kind == TRAINER

    @property
    def is_pserver(self) -> bool:
        """True if the process is a parameter server."""
        return self.kind == PSERVER

    @property
    def pservers(self) -> str:
        """The endpoints of the pservers, separated by commas, as `transpile` takes them."""
        return ",".join(self.pserver_endpoints)

    @property
    def name(self) -> str:
        """The name of the role in messages: `trainer 0`, `pserver 1`."""
        if self.is_trainer:
            return f"{self.kind} {self.trainer_id}"
        return f"{self.kind} {self.pserver_endpoints.index(self.current_endpoint)}"

    def environment(self) -> dict[str, str]:
        """Return the environment variables of this role."""
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
        """Return the role of this process, from DTRANS_* or scheduler variables.

        A spare (`dtrans launch --spares`) waits here until it takes the place of a lost role.

        Args:
          environ: environment variables; by default `os.environ`.

        Raises:
          ConfigError: a variable is missing or has an invalid value.
        """
        if environ is None or environ is os.environ:
            receive_identity()
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
        endpoint = _read(env, "DTRANS_CURRENT_ENDPOINT")
        return cls("pserver", trainers, endpoints, current_endpoint=endpoint)


def roles_of(trainers: int, endpoints: Sequence[str]) -> tuple[Role, ...]:
    """Return every role of a job: the pservers, then the trainers."""
    every = tuple(endpoints)
    roles = [Role("pserver", trainers, every, current_endpoint=e) for e in every]
    roles += [Role("trainer", trainers, every, trainer_id=i) for i in range(trainers)]
    return tuple(roles)


def trainer_roles(endpoints: Sequence[str]) -> tuple[Role, ...]:
    """Return every role of a job without servers, from the endpoints of its trainers."""
    every = tuple(endpoints)
    roles = []
    for i, e in enumerate(every):
        role = Role(
            "trainer", len(every), (), trainer_id=i, current_endpoint=e, trainer_endpoints=every
        )
        roles.append(role)
    return tuple(roles)


def _read(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "").strip()
    if not value:
        raise ConfigError(
            f"the environment variable {name} is not set: start this script with `dtrans launch "
            f"script.py`, or set {', '.join(VARIABLES)}"
        )
    return value


def _number(env: Mapping[str, str], name: str) -> int:
    value = _read(env, name)
    if not value.isdecimal():
        raise ConfigError(f"{name} is {value!r}; it must be a number")
    return int(value)
