"""Paddle's interface: `DistributeTranspiler` over the strategies.

Names, arguments and defaults are those of
python/paddle/fluid/transpiler/distribute_transpiler.py. These differ: `transpile` checks everything
and changes none of its arguments. Methods can be called repeatedly and in any order. One object
returns the programs of every role.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from dtrans.checks import check_flag, check_int
from dtrans.data_parallel.options import Reduce
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.data_parallel.startup import rendezvous_startup
from dtrans.data_parallel.transform import nccl2
from dtrans.endpoints import parse_endpoints, split_endpoint
from dtrans.errors import ConfigAssertionError, ConfigError, ConfigTypeError, rename_options
from dtrans.ir.program import Program
from dtrans.paddle.config import OPTIONS, DistributeTranspilerConfig
from dtrans.parameter_server.plan import (
    PServerPlan,
    ServerPrograms,
    check_trainer_endpoint,
    check_trainer_id,
)
from dtrans.parameter_server.transform import pserver
from dtrans.step.batch_sharing import Batch


# print_log=True is an explicit request, so the root logger's default level, WARNING, must not
# suppress it. A level that the user sets on this logger does.
logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)


class DistributeTranspiler:
    """Transpiler of a traced step into the programs of trainers and parameter servers.

    In mode="nccl2" and "collective" all processes are trainers. Their program maps
    (params, opt_state, *batch) to the outputs of the step. Their startup program returns params and
    opt_state, equal on every trainer.

    Example:
      >>> import jax, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.1)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda key: (p := {"w": jnp.ones((4, 2))}, tx.init(p))
      >>> main = dtrans.trace(step, *init(None), jnp.ones((8, 4)))
      >>> startup = dtrans.trace(init, jax.random.key(0))
      >>> t = dtrans.DistributeTranspiler()
      >>> servers = "127.0.0.1:6174"
      >>> t.transpile(0, main, startup_program=startup, pservers=servers, trainers=2)
      >>> [op.type for op in t.get_trainer_program().ops if op.role == "rpc"]
      ['send', 'send_barrier', 'recv', 'fetch_barrier']
      >>> pserver, pserver_startup = t.get_pserver_programs("127.0.0.1:6174")
      >>> [op.type for op in pserver.ops], pserver_startup.out_names
      (['listen_and_serv'], ('params/w',))
    """

    def __init__(self, config: DistributeTranspilerConfig | None = None) -> None:
        if config is not None and not isinstance(config, DistributeTranspilerConfig):
            raise ConfigError(
                f"config must be a DistributeTranspilerConfig, it is {type(config).__name__}"
            )
        self.config = config or DistributeTranspilerConfig()
        self.config.check()
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
        """Plan the job; change none of the arguments.

        Args:
          trainer_id: the id of this trainer; any number in a pserver process.
          program: the traced step.
          pservers: the servers' endpoints, separated by commas; unused in nccl2 mode.
          trainers: the number of trainers; in nccl2 mode their endpoints, a sequence or separated
            by commas.
          sync_mode: every update uses the gradients of all trainers.
          startup_program: the traced init.
          current_endpoint: this trainer's endpoint in nccl2 mode; unused in pserver mode, as in
            Paddle.
          seed: Paddle's `program.random_seed`, from 0 to 2**32 - 1, equal in all processes of a
            job. With slice_var_up=False it determines the order in which leaves are dispatched. No
            global random state is read or changed.

        Raises:
          ConfigError: an option is out of range, contradicts another, or is not supported.
          GradientError, TraceError: as `dtrans.pserver` and `dtrans.nccl2`.
        """
        self.config.check()
        self.config.placement(seed)
        check_flag("sync_mode", sync_mode)
        for name in ("half_async", "completely_not_async", "geo_sgd_mode"):
            if getattr(self.config, name) and sync_mode and self.config.sync_mode:
                raise ConfigError(f"{name}=True needs sync_mode=False, it is True")
        if program is None or startup_program is None:
            raise ConfigError(
                "transpile needs program=dtrans.trace(step, ...) and "
                "startup_program=dtrans.trace(init, ...)"
            )
        with rename_options(OPTIONS):
            if self.config.mode != "pserver":
                self._transpile_collective(
                    trainer_id, program, startup_program, trainers, sync_mode, current_endpoint
                )
            else:
                self._transpile_pserver(
                    trainer_id, program, startup_program, pservers, trainers, sync_mode, seed
                )
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
                f"trainers must be a number in pserver mode, it is {trainers!r}; a list of "
                "endpoints belongs to mode='nccl2'"
            )
        plan = pserver(
            program,
            startup_program,
            pservers=pservers,
            trainers=trainers,
            mode=self.config.update_mode(sync_mode),
            placement=self.config.placement(seed),
            on_trainer_exit=self.config.on_trainer_exit,
            batch=Batch("local", merge=self.config.merge or {}),
            sparse=self.config.tables(len(parse_endpoints(pservers))),
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
            raise ConfigError(
                f"sync_mode=False: mode={self.config.mode!r} is synchronous; leave sync_mode=True"
            )
        endpoints = parse_endpoints(trainers, "trainer")
        check_trainer_endpoint(trainer_id, current_endpoint, endpoints)
        kind, chains = self.config.collective_mode, self.config.nccl_comm_num
        self._plan = nccl2(
            program,
            startup_program,
            trainers=len(endpoints),
            trainers_per_node=self._trainers_per_node(endpoints),
            local_sgd=1 if kind == "local_sgd" else None,
            # Paddle's transpiler/collective.py reduces each gradient by itself
            reduce=Reduce(
                bucket_MB=0 if kind == "grad_allreduce" else 32,
                chains=None if chains == 1 else chains,
            ),
            batch=Batch("local", merge=self.config.merge or {}),
        )
        self._trainer_id, self._endpoints = trainer_id, endpoints

    def _trainers_per_node(self, endpoints: Sequence[str]) -> int:
        """Return the number of trainers of a node; 0 if reductions are not hierarchical."""
        inter: Any = self.config.hierarchical_allreduce_inter_nranks
        count = len(endpoints)
        check_int("hierarchical_allreduce_inter_nranks", inter, "a number of trainers", least=0)
        if not self.config.use_hierarchical_allreduce:
            if inter:
                raise ConfigError(
                    f"hierarchical_allreduce_inter_nranks={inter} needs "
                    "use_hierarchical_allreduce=True, it is False"
                )
            return 0
        if inter <= 1:
            hosts = [split_endpoint(e)[0] for e in endpoints]
            inter = hosts.count(hosts[0])
            if hosts != [h for h in dict.fromkeys(hosts) for _ in range(inter)]:
                raise ConfigError(
                    "use_hierarchical_allreduce=True: hosts have different numbers of trainers, or "
                    f"endpoints of one host are not adjacent in {','.join(endpoints)}; set "
                    "hierarchical_allreduce_inter_nranks"
                )
        if not 1 < inter < count or count % inter:
            raise ConfigAssertionError(
                f"use_hierarchical_allreduce=True: {inter} trainers per node must be several, and "
                f"divide the {count} trainers into several nodes; set "
                "hierarchical_allreduce_inter_nranks"
            )
        return inter

    @property
    def plan(self) -> PServerPlan | CollectivePlan:
        """The plan. Raises ConfigError before `transpile`."""
        if self._plan is None:
            raise ConfigError("call transpile(...) before asking for programs")
        return self._plan

    def get_trainer_program(self, wait_port: bool = True) -> Program:
        """Return the program of this trainer: (params, *batch) -> (params, loss[, aux]).

        In nccl2 mode and in GEO-SGD trainers have the optimizer's state. It follows params in the
        inputs and outputs.

        Paddle waits here until the servers' ports are open. In dtrans the `Executor` waits at its
        first request, so that a plan can be made anywhere; `wait_port` has no effect.
        """
        plan = self.plan
        if isinstance(plan, CollectivePlan):
            return plan.program
        return plan.trainer_program(self._trainer_id)

    def get_trainer_startup_program(self) -> Program:
        """Return the startup program of this trainer: arguments of init -> params[, opt_state].

        Trainers have opt_state in nccl2 mode and in GEO-SGD.
        """
        plan = self.plan
        if isinstance(plan, CollectivePlan):
            return rendezvous_startup(plan, self._trainer_id, self._endpoints)
        return plan.trainer_startup_program(self._trainer_id)

    def get_pserver_program(self, endpoint: str) -> Program:
        """Return the program that serves at `endpoint`.

        Raises:
          UnknownEndpointError: the plan has no server there.
        """
        return self._server(endpoint, "get_pserver_program").main

    def get_pserver_programs(self, endpoint: str) -> tuple[Program, Program]:
        """Return the program that serves at `endpoint`, and its startup program.

        Raises:
          UnknownEndpointError: the plan has no server there.
        """
        programs = self._server(endpoint, "get_pserver_programs")
        return programs.main, programs.startup

    def get_startup_program(
        self, endpoint: str, pserver_program: Any = None, startup_program: Any = None
    ) -> Program:
        """Return the startup program of the server at `endpoint`; ignore the other arguments."""
        return self._server(endpoint, "get_startup_program").startup

    def _set_server_config(self, server_config: Any = None) -> None:
        """Refuse Paddle's numbers of threads of a server.

        Raises:
          ConfigTypeError: servers of dtrans have no such numbers.
        """
        if server_config is not None:
            raise ConfigTypeError(
                f"server_config={server_config!r}: dtrans has no ServerRuntimeConfig, since its "
                "servers have no numbers of threads to set; leave _set_server_config out"
            )

    def _server(self, endpoint: str, method: str) -> ServerPrograms:
        if isinstance(self.plan, CollectivePlan):
            raise ConfigError(
                f"{method}: there are no pservers in mode={self.config.mode!r}; every process runs "
                "get_trainer_startup_program() and get_trainer_program()"
            )
        return self.plan.servers[endpoint]


class GeoSgdTranspiler(DistributeTranspiler):
    """Transpiler of a traced step into the programs of GEO-SGD: see `dtrans.Geo`.

    It copies the config with geo_sgd_mode=True and sync_mode=False. The caller's config is not
    changed, and later changes to it have no effect.

    Source: python/paddle/fluid/transpiler/geo_sgd_transpiler.py.

    Example:
      >>> import jax, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.adam(0.1)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda: (p := {"w": jnp.ones((4, 2))}, tx.init(p))
      >>> main, startup = dtrans.trace(step, *init(), jnp.ones((8, 4))), dtrans.trace(init)
      >>> t = dtrans.GeoSgdTranspiler(dtrans.DistributeTranspilerConfig(geo_sgd_need_push_nums=10))
      >>> t.transpile(0, main, trainers=2, startup_program=startup)
      >>> [op.type for op in t.get_trainer_program().ops if op.role == "rpc"]
      ['send']
    """

    def __init__(self, config: DistributeTranspilerConfig | None = None) -> None:
        if isinstance(config, DistributeTranspilerConfig) or config is None:
            options = {} if config is None else vars(config)
            # True is the default, so it is replaced; a value that is no flag stays for the check
            sync_mode = options.get("sync_mode", True)
            sync_mode = False if sync_mode is True else sync_mode
            changed = {**options, "geo_sgd_mode": True, "sync_mode": sync_mode}
            config = DistributeTranspilerConfig(**changed)
        super().__init__(config)

    def transpile(
        self,
        trainer_id: int,
        program: Program | None = None,
        pservers: str = "127.0.0.1:6174",
        trainers: int | str | Sequence[str] = 1,
        sync_mode: bool = False,
        startup_program: Program | None = None,
        current_endpoint: str = "127.0.0.1:6174",
        seed: int = 0,
    ) -> None:
        """Plan the job, as `DistributeTranspiler.transpile` does.

        Raises:
          ConfigError: sync_mode=True, or as there.
        """
        if sync_mode is True:
            raise ConfigError("sync_mode=True: GEO-SGD has no synchronous mode; leave it out")
        super().transpile(
            trainer_id,
            program,
            pservers,
            trainers,
            sync_mode,
            startup_program,
            current_endpoint,
            seed,
        )


def _log(plan: PServerPlan | CollectivePlan) -> None:
    """Log the plan, for print_log=True."""
    if logger.hasHandlers():
        logger.info("%s", plan)
        return
    # removed afterwards: with a handler that the user adds later, plans would be logged twice
    handler = logging.StreamHandler()
    logger.addHandler(handler)
    try:
        logger.info("%s", plan)
    finally:
        logger.removeHandler(handler)
