"""Paddle's `DistributeTranspiler` and `GeoSgdTranspiler`, implemented by dtrans's strategies.

Names, arguments and defaults are equal to
python/paddle/fluid/transpiler/distribute_transpiler.py. Differences: `transpile` checks its
arguments and does not change them. Methods can be called repeatedly and in any order. One object
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


# A user who passes print_log=True wants to see the plan, although the root logger's default level
# is WARNING. The user can still set another level on this logger.
logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)


class DistributeTranspiler:
    """Transpiler from a traced step to the programs of trainers and parameter servers.

    With mode="nccl2" or "collective" all processes are trainers. A trainer's program maps
    (params, opt_state, *batch) to the outputs of the step. Its startup program returns params and
    opt_state, which are equal on every trainer.

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
        """Plan the job, so that the `get_...` methods can return its programs.

        Args:
          trainer_id: the id of this trainer, from 0; in the process of a server, any valid id.
          program: the traced step.
          pservers: the servers' endpoints, separated by commas; unused in nccl2 mode.
          trainers: the number of trainers; in nccl2 mode their endpoints, as a sequence or
            separated by commas.
          sync_mode: True if every update uses the gradients of all trainers.
          startup_program: the traced init.
          current_endpoint: this trainer's endpoint in nccl2 mode; unused in pserver mode.
          seed: Paddle's `program.random_seed`: an integer from 0 to 2**32 - 1, equal in all
            processes of a job. With slice_var_up=False it determines the order in which leaves are
            dispatched. Global random state is neither read nor changed.

        Raises:
          ConfigError: an option is out of range, contradicts another one, or is not supported.
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
                f"trainers is {trainers!r}; expected a number of trainers in pserver mode (a list "
                "of endpoints is for mode='nccl2')"
            )
        if self.config.dgc is not None:
            self.config.dgc.check_trainers(trainers)
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
                f"trainers is {trainers!r}; with mode={self.config.mode!r}, expected the trainers' "
                "endpoints, such as '127.0.0.1:6174,127.0.0.1:6175'"
            )
        if not (sync_mode and self.config.sync_mode):
            raise ConfigError(
                f"sync_mode=False needs mode='pserver', but mode is {self.config.mode!r}"
            )
        endpoints = parse_endpoints(trainers, "trainer")
        check_trainer_endpoint(trainer_id, current_endpoint, endpoints)
        collective_mode, chains = self.config.collective_mode, self.config.nccl_comm_num
        bucket_size = 32
        if collective_mode == "grad_allreduce":
            # Paddle's transpiler/collective.py reduces each gradient separately
            bucket_size = 0
        self._plan = nccl2(
            program,
            startup_program,
            trainers=len(endpoints),
            trainers_per_node=self._trainers_per_node(endpoints),
            local_sgd=1 if collective_mode == "local_sgd" else None,
            reduce=Reduce(
                bucket_MB=bucket_size,
                chains=None if chains == 1 else chains,
                clip_local_norm=self.config.clip_local_norm,
                clip_local_by=self.config.clip_local_by,
            ),
            batch=Batch("local", merge=self.config.merge or {}),
        )
        self._trainer_id, self._endpoints = trainer_id, endpoints

    def _trainers_per_node(self, endpoints: Sequence[str]) -> int:
        """Return the number of trainers per node; 0 if reductions are not hierarchical."""
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
                    "use_hierarchical_allreduce=True needs hosts with equally many trainers, whose "
                    f"endpoints are adjacent; the endpoints are {','.join(endpoints)}. Set "
                    "hierarchical_allreduce_inter_nranks to the number of trainers per node"
                )
        if not 1 < inter < count or count % inter:
            raise ConfigAssertionError(
                f"use_hierarchical_allreduce=True: the {count} trainers have {inter} per node; "
                "expected several nodes, with the same number of trainers in each, two or more. "
                "Set hierarchical_allreduce_inter_nranks to the number of trainers per node"
            )
        return inter

    @property
    def plan(self) -> PServerPlan | CollectivePlan:
        """The plan that `transpile` computed.

        Raises:
          ConfigError: `transpile` was not called.
        """
        if self._plan is None:
            raise ConfigError("the transpiler has no programs yet; call transpile(...) first")
        return self._plan

    def get_trainer_program(self, wait_port: bool = True) -> Program:
        """Return the program of this trainer: (params, *batch) -> (params, loss[, aux]).

        In nccl2 mode and in GEO-SGD it is (params, opt_state, *batch) -> (params, opt_state,
        loss[, aux]), since trainers have the optimizer state.

        Args:
          wait_port: accepted and ignored. Paddle waits here until the servers' ports are open; in
            dtrans the `Executor` waits at its first request.
        """
        plan = self.plan
        if isinstance(plan, CollectivePlan):
            return plan.program
        return plan.trainer_program(self._trainer_id)

    def get_trainer_startup_program(self) -> Program:
        """Return the startup program of this trainer: init's arguments -> params[, opt_state].

        It returns opt_state in nccl2 mode and in GEO-SGD.
        """
        plan = self.plan
        if isinstance(plan, CollectivePlan):
            return rendezvous_startup(plan, self._trainer_id, self._endpoints)
        return plan.trainer_startup_program(self._trainer_id)

    def get_pserver_program(self, endpoint: str) -> Program:
        """Return the main program of the server at `endpoint`.

        Raises:
          UnknownEndpointError: the plan has no server with this endpoint.
        """
        return self._server(endpoint, "get_pserver_program").main

    def get_pserver_programs(self, endpoint: str) -> tuple[Program, Program]:
        """Return the main program and the startup program of the server at `endpoint`.

        Raises:
          UnknownEndpointError: the plan has no server with this endpoint.
        """
        programs = self._server(endpoint, "get_pserver_programs")
        return programs.main, programs.startup

    def get_startup_program(
        self, endpoint: str, pserver_program: Any = None, startup_program: Any = None
    ) -> Program:
        """Return the startup program of the server at `endpoint`.

        The other arguments have no effect. They exist because Paddle has them.
        """
        return self._server(endpoint, "get_startup_program").startup

    def _set_server_config(self, server_config: Any = None) -> None:
        """Accept None only. In Paddle, this method sets numbers of threads of a server.

        Raises:
          ConfigTypeError: `server_config` is not None.
        """
        if server_config is not None:
            raise ConfigTypeError(
                f"server_config is {server_config!r}, but dtrans has no ServerRuntimeConfig: its "
                "servers have no numbers of threads to set; leave _set_server_config out"
            )

    def _server(self, endpoint: str, method: str) -> ServerPrograms:
        if isinstance(self.plan, CollectivePlan):
            raise ConfigError(
                f"{method} needs mode='pserver', but mode is {self.config.mode!r}; in this mode "
                "every process is a trainer, and runs get_trainer_startup_program() and "
                "get_trainer_program()"
            )
        return self.plan.servers[endpoint]


class GeoSgdTranspiler(DistributeTranspiler):
    """Transpiler from a traced step to the programs of GEO-SGD (see `dtrans.Geo`).

    It uses a copy of the config with geo_sgd_mode=True and sync_mode=False. The caller's config is
    not changed, and later changes to it have no effect.

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
            options = {} if config is None else dict(vars(config))
            options["geo_sgd_mode"] = True
            # True is the default. Any other value is kept, so that the config's check finds errors.
            if options.get("sync_mode", True) is True:
                options["sync_mode"] = False
            config = DistributeTranspilerConfig(**options)
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
          ConfigError: `sync_mode` is True; also as in `DistributeTranspiler.transpile`.
        """
        if sync_mode is True:
            raise ConfigError(
                "sync_mode is True, but GEO-SGD has no synchronous mode; leave sync_mode out"
            )
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
    """Log the plan; if logging has no handler, print the plan to stderr."""
    if logger.hasHandlers():
        logger.info("%s", plan)
        return
    # The handler is removed afterwards. Otherwise a handler that the user adds later would print
    # each plan a second time.
    handler = logging.StreamHandler()
    logger.addHandler(handler)
    try:
        logger.info("%s", plan)
    finally:
        logger.removeHandler(handler)
