"""Paddle's interface: `DistributeTranspiler` over the transforms.

The names, arguments and defaults are those of python/paddle/fluid/transpiler/distribute_transpiler.py. What
differs: `transpile` checks everything and changes nothing it is given, methods can be called in any order
and any number of times, and one object gives the programs of every role.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from typing import Any, Literal

from dtrans.addresses import parse_endpoints, split_endpoint
from dtrans.blocks import PSDispatcher, RoundRobin, check_dispatcher
from dtrans.collective import CollectivePlan
from dtrans.errors import ConfigAssertionError, ConfigError, ConfigTypeError
from dtrans.placement import check_seed
from dtrans.plan import PServerPlan, ServerPrograms, check_trainer_endpoint, check_trainer_id
from dtrans.program import Program
from dtrans.transforms.joining import joining_startup
from dtrans.transforms.nccl2 import nccl2
from dtrans.transforms.pserver import pserver


MIN_BLOCK_SIZE = 8192

# print_log asks to be seen: the level of the root logger, by default WARNING, does not hold it back; one set here does
logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

# Attribute to default, as Paddle 1.8.5 has them.
DEFAULTS: dict[str, Any] = {
    "slice_var_up": True,
    "split_method": None,
    "min_block_size": MIN_BLOCK_SIZE,
    "enable_dc_asgd": False,
    "mode": "pserver",
    "print_log": False,
    "wait_port": True,
    "sync_mode": True,
    "runtime_split_send_recv": False,
    "half_async": False,
    "completely_not_async": False,
    "geo_sgd_mode": False,
    "geo_sgd_need_push_nums": 100,
    "nccl_comm_num": 1,
    "use_hierarchical_allreduce": False,
    "hierarchical_allreduce_inter_nranks": 0,
    "collective_mode": None,
}

# What Paddle has no attribute for.
BEYOND: dict[str, Any] = {"dc_asgd_lambda": 1.0, "dc_asgd_decay": None}

# What this version carries out; another value of any of these is refused by name.
_ONLY: dict[str, tuple[Any, ...]] = {
    "runtime_split_send_recv": (False,),
    "completely_not_async": (False,),
    "geo_sgd_mode": (False,),
}

# What `collective_mode` is, as options of `dtrans.nccl2`: Paddle's transpiler/collective.py reduces each gradient by
# itself, and averages parameters after each local step.
COLLECTIVE_MODES: dict[str, dict[str, Any]] = {
    "grad_allreduce": {"fuse_grad_size_in_MB": 0},
    "local_sgd": {"local_sgd": 1},
}


class DistributeTranspilerConfig:
    """The options of a `DistributeTranspiler`.

    All of Paddle's attributes are here, with its defaults; this version carries out pserver mode, synchronous and
    asynchronous, nccl2 and collective mode, and refuses what else there is when it transpiles. Those in use:

    Attributes:
      mode: "pserver"; or "nccl2" or "collective": no servers, trainers average their gradients with collectives.
      collective_mode: with mode="collective", "grad_allreduce" (each gradient is reduced by itself), or "local_sgd"
        (each trainer takes the step by itself, and what they make is averaged: the optimizer's state too, which Paddle
        does not average).
      slice_var_up: cut parameters into blocks of rows; otherwise each is whole on one server. "require" makes it
        an error if the optimizer does not let one be cut.
      split_method: a subclass of `PSDispatcher`: `RoundRobin` (None is that), `HashName`, `SizeBalanced`, your own.
      min_block_size: the fewest elements worth a block of their own, 8192 or more.
      sync_mode: every update uses the gradients of all trainers; otherwise each gradient is an update of its own.
        Either this or the argument of `transpile` turns it off.
      enable_dc_asgd: with sync_mode=False, compensate gradients for their delay.
      dc_asgd_lambda, dc_asgd_decay: how, which Paddle has no attributes for; see `dtrans.pserver`.
      half_async: with sync_mode=False, the threads of a trainer wait for each other before each step. A trainer has one
        here, so that this is the same.
      print_log: log the plan when transpiling: at level INFO, by the logger "dtrans.transpiler", whose level and
        handlers are yours to set. Where logging is not set up, the plan goes to stderr, as Python's own warnings do.
      nccl_comm_num: in nccl2 mode, how many chains of reductions may run beside each other; 1 leaves that to XLA.
      use_hierarchical_allreduce: in nccl2 mode, reduce gradients inside each node, across nodes, and gather inside.
      hierarchical_allreduce_inter_nranks: how many trainers a node has; by default as many as have endpoints on one
        host.

    slice_var_up, split_method and min_block_size are for pserver mode.

    Raises:
      ConfigError: an attribute that does not exist.

    Example:
      >>> import dtrans
      >>> config = dtrans.DistributeTranspilerConfig(min_block_size=16384)
      >>> config.slice_var_up, config.min_block_size
      (True, 16384)
      >>> config.min_blocksize = 1
      Traceback (most recent call last):
      ...
      dtrans.errors.ConfigError: DistributeTranspilerConfig has no option min_blocksize; did you mean min_block_size?
    """

    slice_var_up: bool | Literal["require"]
    split_method: type[PSDispatcher] | None
    min_block_size: int
    enable_dc_asgd: bool
    mode: str
    print_log: bool
    wait_port: bool
    sync_mode: bool
    runtime_split_send_recv: bool
    half_async: bool
    completely_not_async: bool
    geo_sgd_mode: bool
    geo_sgd_need_push_nums: int
    nccl_comm_num: int
    use_hierarchical_allreduce: bool
    hierarchical_allreduce_inter_nranks: int
    collective_mode: str | None
    dc_asgd_lambda: float
    dc_asgd_decay: float | None

    def __init__(self, **options: Any) -> None:
        for name, value in {**DEFAULTS, **BEYOND, **options}.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in DEFAULTS and name not in BEYOND:
            raise ConfigError(f"DistributeTranspilerConfig has no option {name}{_similar(name)}")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        changed = {n: v for n, v in vars(self).items() if v != (DEFAULTS | BEYOND)[n]}
        return f"DistributeTranspilerConfig({', '.join(f'{n}={v!r}' for n, v in changed.items())})"


def _similar(name: str) -> str:
    known = [*DEFAULTS, *BEYOND]
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else f"; its options are {', '.join(known)}"


class DistributeTranspiler:
    """Rewrites a traced step into the programs of trainers and parameter servers.

    In mode="nccl2" and "collective" there are trainers only: their program is (params, opt_state, *batch) -> what the
    step returns, and their startup program returns both params and opt_state, the same on every trainer.

    Example:
      >>> import jax, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.1)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda key: (p := {"w": jnp.ones((4, 2))}, tx.init(p))
      >>> main, startup = dtrans.trace(step, *init(None), jnp.ones((8, 4))), dtrans.trace(init, jax.random.key(0))
      >>> t = dtrans.DistributeTranspiler()
      >>> t.transpile(trainer_id=0, program=main, startup_program=startup, pservers="127.0.0.1:6174", trainers=2)
      >>> [op.type for op in t.get_trainer_program().ops if op.role == "rpc"]
      ['send', 'send_barrier', 'recv', 'fetch_barrier']
      >>> pserver, pserver_startup = t.get_pserver_programs("127.0.0.1:6174")
      >>> [op.type for op in pserver.ops], pserver_startup.out_names
      (['listen_and_serv'], ('params/w',))
    """

    def __init__(self, config: DistributeTranspilerConfig | None = None) -> None:
        if config is not None and not isinstance(config, DistributeTranspilerConfig):
            raise ConfigError(f"config must be a DistributeTranspilerConfig, it is {type(config).__name__}")
        self.config = config or DistributeTranspilerConfig()
        self._check_config()
        self._plan: PServerPlan | CollectivePlan | None = None
        self._trainer_id = 0
        self._endpoints: tuple[str, ...] = ()

    def transpile(
        self,
        trainer_id: int,
        program: Program | None = None,
        pservers: str = "127.0.0.1:6174",
        trainers: int | str | Sequence[str] = 1,
        sync_mode: bool = True,
        startup_program: Program | None = None,
        current_endpoint: str = "127.0.0.1:6174",
        seed: int = 0,
    ) -> None:
        """Plan the job. Nothing that is handed in is changed.

        Args:
          trainer_id: which trainer this process is; any in a pserver process.
          program: the traced step.
          pservers: the servers' endpoints, separated by commas; not used in nccl2 mode.
          trainers: how many trainers there are; in nccl2 mode their endpoints, separated by commas or as a sequence.
          sync_mode: every update uses the gradients of all trainers.
          startup_program: the traced init.
          current_endpoint: in nccl2 mode this trainer's endpoint; in pserver mode not used, as in Paddle.
          seed: Paddle's `program.random_seed`, from 0 to 2**32 - 1: with slice_var_up=False it says in which order
            leaves are dispatched. The same in all processes of a job. No global random state is read or changed.

        Raises:
          ConfigError: an option that is out of range, contradicts another, or is not in this version.
          GradientError, TraceError: as `dtrans.pserver` and `dtrans.nccl2`.
        """
        self._check_config()
        check_seed(seed)
        if not isinstance(sync_mode, bool):
            raise ConfigError(f"sync_mode must be True or False, it is {sync_mode!r}")
        if self.config.half_async and sync_mode and self.config.sync_mode:
            raise ConfigError("half_async=True is for sync_mode=False, which is True")
        if program is None or startup_program is None:
            raise ConfigError(
                "transpile needs program=dtrans.trace(step, ...) and startup_program=dtrans.trace(init, ...)"
            )
        if self.config.mode != "pserver":
            self._transpile_collective(trainer_id, program, startup_program, trainers, sync_mode, current_endpoint)
        else:
            self._transpile_pserver(trainer_id, program, startup_program, pservers, trainers, sync_mode, seed)
        if self.config.print_log:
            _log(self.plan)

    def _transpile_pserver(
        self,
        trainer_id: int,
        program: Program,
        startup_program: Program,
        pservers: str,
        trainers: Any,
        sync_mode: bool,
        seed: int,
    ) -> None:
        if isinstance(trainers, str):
            raise ConfigError(
                f"trainers must be a number in pserver mode, it is {trainers!r}; a list of endpoints belongs to "
                "mode='nccl2'"
            )
        plan = pserver(
            program,
            startup_program,
            pservers=pservers,
            trainers=trainers,
            sync_mode=sync_mode and self.config.sync_mode,
            slice_var_up=self.config.slice_var_up,
            split_method=self._split_method,
            min_block_size=self.config.min_block_size,
            enable_dc_asgd=self.config.enable_dc_asgd,
            dc_asgd_lambda=self.config.dc_asgd_lambda,
            dc_asgd_decay=self.config.dc_asgd_decay,
            seed=seed,
        )
        check_trainer_id(trainer_id, plan.trainers)
        self._plan, self._trainer_id = plan, trainer_id

    def _transpile_collective(
        self,
        trainer_id: int,
        program: Program,
        startup_program: Program,
        trainers: Any,
        sync_mode: bool,
        current_endpoint: str,
    ) -> None:
        if not isinstance(trainers, str) and not (
            isinstance(trainers, Sequence) and all(isinstance(e, str) for e in trainers)
        ):
            raise ConfigAssertionError(
                f"trainers must be the trainers' endpoints in mode={self.config.mode!r}, such as "
                f"'127.0.0.1:6174,127.0.0.1:6175'; it is {trainers!r}"
            )
        if not (sync_mode and self.config.sync_mode):
            raise ConfigError(f"sync_mode=False: mode={self.config.mode!r} is synchronous; leave sync_mode=True")
        if self.config.enable_dc_asgd:
            raise ConfigError(f"enable_dc_asgd=True is for mode='pserver', it is {self.config.mode!r}")
        endpoints = parse_endpoints(trainers, "trainer")
        check_trainer_endpoint(trainer_id, current_endpoint, endpoints)
        self._plan = nccl2(
            program,
            startup_program,
            trainers=len(endpoints),
            nccl_comm_num=None if self.config.nccl_comm_num == 1 else self.config.nccl_comm_num,
            hierarchical_allreduce_inter_nranks=self._trainers_of_a_node(endpoints),
            **COLLECTIVE_MODES.get(self.config.collective_mode or "", {}),
        )
        self._trainer_id, self._endpoints = trainer_id, endpoints

    def _trainers_of_a_node(self, endpoints: Sequence[str]) -> int:
        """How many trainers a node has; 0 where reductions are not hierarchical."""
        inter: Any = self.config.hierarchical_allreduce_inter_nranks
        count = len(endpoints)
        if isinstance(inter, bool) or not isinstance(inter, int) or inter < 0:
            raise ConfigError(f"hierarchical_allreduce_inter_nranks must be a number of trainers, it is {inter!r}")
        if not self.config.use_hierarchical_allreduce:
            if inter:
                raise ConfigError(
                    f"hierarchical_allreduce_inter_nranks={inter} is for use_hierarchical_allreduce=True, it is False"
                )
            return 0
        if inter <= 1:
            hosts = [split_endpoint(e)[0] for e in endpoints]
            inter = hosts.count(hosts[0])
            if hosts != [h for h in dict.fromkeys(hosts) for _ in range(inter)]:
                raise ConfigError(
                    "use_hierarchical_allreduce=True: hosts have different numbers of trainers, or they do not follow "
                    f"one another in {','.join(endpoints)}; set hierarchical_allreduce_inter_nranks"
                )
        if not 1 < inter < count or count % inter:
            raise ConfigAssertionError(
                f"use_hierarchical_allreduce=True: {inter} trainers in a node must be several, and divide the {count} "
                "trainers into several nodes; set hierarchical_allreduce_inter_nranks"
            )
        return inter

    @property
    def plan(self) -> PServerPlan | CollectivePlan:
        """The plan. Raises ConfigError before `transpile`."""
        if self._plan is None:
            raise ConfigError("call transpile(...) before asking for programs")
        return self._plan

    def get_trainer_program(self, wait_port: bool = True) -> Program:
        """The program of this trainer: (params, *batch) -> (params, loss[, aux]); with opt_state in nccl2 mode.

        Paddle waits here until the servers' ports are open. A plan can be made anywhere, so here it is the
        `Executor` that waits, when it first talks to them; `wait_port` is accepted and changes nothing.
        """
        plan = self.plan
        return plan.program if isinstance(plan, CollectivePlan) else plan.trainer_program(self._trainer_id)

    def get_trainer_startup_program(self) -> Program:
        """The startup program of this trainer: the arguments of init -> params; and opt_state in nccl2 mode."""
        plan = self.plan
        if isinstance(plan, CollectivePlan):
            return joining_startup(plan, self._trainer_id, self._endpoints)
        return plan.trainer_startup_program(self._trainer_id)

    def get_pserver_program(self, endpoint: str) -> Program:
        """The program that serves at `endpoint`. Raises UnknownEndpointError for another."""
        return self._server(endpoint, "get_pserver_program").main

    def get_pserver_programs(self, endpoint: str) -> tuple[Program, Program]:
        """The program that serves at `endpoint`, and its startup program."""
        programs = self._server(endpoint, "get_pserver_programs")
        return programs.main, programs.startup

    def get_startup_program(self, endpoint: str, pserver_program: Any = None, startup_program: Any = None) -> Program:
        """The startup program of the server at `endpoint`; the other arguments are Paddle's, and not needed."""
        return self._server(endpoint, "get_startup_program").startup

    def _set_server_config(self, server_config: Any = None) -> None:
        """Paddle's numbers of a server's threads. Raises ConfigTypeError: there is nothing of the kind to set."""
        if server_config is not None:
            raise ConfigTypeError(
                f"server_config={server_config!r}: there is no ServerRuntimeConfig in dtrans, whose servers have no "
                "numbers of threads to set; leave _set_server_config out"
            )

    def _server(self, endpoint: str, asked: str) -> ServerPrograms:
        if isinstance(self.plan, CollectivePlan):
            raise ConfigError(
                f"{asked}: there are no pservers in mode={self.config.mode!r}; every process runs "
                "get_trainer_startup_program() and get_trainer_program()"
            )
        return self.plan.servers[endpoint]

    @property
    def _split_method(self) -> type[PSDispatcher]:
        return RoundRobin if self.config.split_method is None else self.config.split_method

    def _check_config(self) -> None:
        check_dispatcher(self._split_method)
        if self.config.mode not in ("pserver", "nccl2", "collective"):
            raise ConfigError(f"mode must be 'pserver', 'nccl2' or 'collective', it is {self.config.mode!r}")
        size: Any = self.config.min_block_size
        if isinstance(size, bool) or not isinstance(size, int) or size < MIN_BLOCK_SIZE:
            raise ConfigAssertionError(
                f"min_block_size must be {MIN_BLOCK_SIZE} or more, it is {size!r}; dtrans.pserver takes any "
                "positive number"
            )
        if self.config.mode != "nccl2" and self.config.use_hierarchical_allreduce:
            raise ConfigError("use_hierarchical_allreduce=True is for mode='nccl2', it is " + repr(self.config.mode))
        for name, default in DEFAULTS.items():
            value = getattr(self.config, name)
            if isinstance(default, bool) and not isinstance(value, bool) and name != "slice_var_up":
                raise ConfigError(f"{name} must be True or False, it is {value!r}")
        if self.config.runtime_split_send_recv and self.config.sync_mode:
            raise ConfigError("runtime_split_send_recv=True is for sync_mode=False, which is True")
        kind: Any = self.config.collective_mode
        if self.config.mode != "collective" and kind is not None:
            raise ConfigError(f"collective_mode={kind!r} is for mode='collective', it is {self.config.mode!r}")
        if self.config.mode == "collective" and kind not in (*COLLECTIVE_MODES,):
            known = " or ".join(map(repr, COLLECTIVE_MODES))
            raise ConfigError(f"collective_mode must be {known} with mode='collective', it is {kind!r}")
        for name, allowed in _ONLY.items():
            value = getattr(self.config, name)
            if value not in allowed:
                listed = " or ".join(map(repr, allowed))
                raise ConfigError(f"{name}={value!r} is not in this version; leave it at {listed}")


def _log(plan: PServerPlan | CollectivePlan) -> None:
    """What print_log=True asks for."""
    if logger.hasHandlers():
        logger.info("%s", plan)
        return
    handler = logging.StreamHandler()  # for this time: one that the user sets up later must not find it there
    logger.addHandler(handler)
    try:
        logger.info("%s", plan)
    finally:
        logger.removeHandler(handler)
