"""The options of a `DistributeTranspiler`: their names, defaults, and which of them contradict each
other.

What only `transpile` knows (its arguments) it checks itself, and so do the transforms what they are
given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dtrans.checks import check_flag, check_one_of, check_type, did_you_mean, is_int
from dtrans.errors import ConfigAssertionError, ConfigError
from dtrans.ops import CommunicatorConfig
from dtrans.parameter_server.dispatch import PSDispatcher, RoundRobin, check_dispatcher
from dtrans.parameter_server.options import (
    Async,
    BlockPlacement,
    DelayCompensation,
    Geo,
    HalfAsync,
    Mode,
    Sync,
)
from dtrans.parameter_server.tables.options import Rows


MIN_BLOCK_SIZE = 8192

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
BEYOND: dict[str, Any] = {"dc_asgd_lambda": 1.0, "dc_asgd_decay": None, "on_trainer_exit": "drop", "communicator": None,
                          "geo_sgd_block_on_pull": False, "merge": None, "sparse": None}  # fmt: skip

# The options of `dtrans.nccl2` and `dtrans.pserver`, and the fields of their records, that have
# other names here.
OPTIONS = {
    "strength": "dc_asgd_lambda",
    "decay": "dc_asgd_decay",
    "push_every": "geo_sgd_need_push_nums",
    "block_on_pull": "geo_sgd_block_on_pull",
    "chains": "nccl_comm_num",
    "trainers_per_node": "hierarchical_allreduce_inter_nranks",
}

# What only makes sense where servers update parameters, and where they add up what trainers did.
_OF_SERVERS = ("enable_dc_asgd", "dc_asgd_lambda", "dc_asgd_decay", "half_async", "completely_not_async",
               "communicator", "on_trainer_exit")  # fmt: skip
_OF_GEO = ("geo_sgd_mode", "geo_sgd_need_push_nums", "geo_sgd_block_on_pull")
_OF_TRAINERS = ("nccl_comm_num", "hierarchical_allreduce_inter_nranks")

COLLECTIVE_MODES = ("grad_allreduce", "local_sgd")


@dataclasses.dataclass(frozen=True)
class Embedding:
    """What Paddle's layers and optimizers say of a table of embeddings: a step in JAX has no op to
    say it.

    Attributes:
      is_sparse: trainers look up rows on the servers, which have runs of rows each (Paddle's
        `remote_prefetch`), and send the gradients of these.
      is_distributed: the same, and row n is on server n % servers.
      lazy_mode: of Adam: rows that nobody looks up stay as they are. Otherwise every optimizer does
        with them what it does on one device.

    Raises:
      ConfigError: something else than True or False.

    Source: `fluid.layers.embedding`; `lazy_mode` of `fluid.optimizer.Adam`.

    Example:
      >>> import dtrans
      >>> dtrans.DistributeTranspilerConfig(sparse={"params/emb": dtrans.paddle.Embedding(is_distributed=True)})
      DistributeTranspilerConfig(sparse={'params/emb': Embedding(is_sparse=True,
      is_distributed=True, lazy_mode=False)})
    """

    is_sparse: bool = True
    is_distributed: bool = False
    lazy_mode: bool = False

    def __post_init__(self) -> None:
        for name in ("is_sparse", "is_distributed", "lazy_mode"):
            check_flag(name, getattr(self, name))

    def rows(self, servers: int) -> Rows:
        """The same, as `dtrans.pserver` takes it, on so many servers."""
        update: Literal["lazy", "dense"] = "lazy" if self.lazy_mode else "dense"
        return Rows(update, "bucket", servers) if self.is_distributed else Rows(update)


class DistributeTranspilerConfig:
    """The options of a `DistributeTranspiler`.

    All of Paddle's attributes are here, with its defaults, and some that it has not:

    Attributes:
      mode: "pserver"; or "nccl2" or "collective": no servers, trainers average their gradients with
        collectives.
      collective_mode: with mode="collective", "grad_allreduce" (each gradient is reduced by
        itself), or "local_sgd" (each trainer takes the step by itself, and what they make is
        averaged: the optimizer's state too, which Paddle does not average).
      slice_var_up: cut parameters into blocks of rows; otherwise each is whole on one server.
        "require" makes it an error if the optimizer does not let one be cut.
      split_method: a subclass of `PSDispatcher`: `RoundRobin` (None is that), `HashName`,
        `SizeBalanced`, your own.
      min_block_size: the fewest elements worth a block of their own, 8192 or more.
      sync_mode: every update uses the gradients of all trainers; otherwise each gradient is an
        update of its own. Either this or the argument of `transpile` turns it off.
      enable_dc_asgd: with sync_mode=False, compensate gradients for their delay.
      dc_asgd_lambda, dc_asgd_decay: how, which Paddle has no attributes for; see
        `dtrans.DelayCompensation`.
      on_trainer_exit: how synchronous updates go on after a trainer that closes before the others,
        which Paddle has no attribute for: "drop" it from them, "paddle", or "error"; see
        `dtrans.pserver`.
      runtime_split_send_recv: with sync_mode=False, trainers have a communicator, and steps wait
        for nothing.
      communicator: how it works, in the place of Paddle's environment variables; a
        `dtrans.CommunicatorConfig`.
      half_async: with both, steps wait for the communicator. (In Paddle the threads of a trainer
        wait for each other; a trainer has one here.) Without a communicator steps wait anyhow, and
        this changes nothing.
      completely_not_async: with both, updates are made of the gradients of all trainers, as with
        sync_mode=True.
      geo_sgd_mode: with sync_mode=False, trainers train by themselves, and servers add up what has
        changed; see `dtrans.Geo`. `GeoSgdTranspiler` does so whatever this is.
      geo_sgd_need_push_nums: after how many steps a trainer gives the servers what has changed.
      geo_sgd_block_on_pull: let that step wait for what others have changed, which Paddle has no
        attribute for.
      merge: how state is merged that trainers make themselves, which Paddle has no attribute for;
        see `dtrans.pserver` and `dtrans.nccl2`.
      sparse: parameters of which trainers look up rows on the servers, by their names, each with a
        `dtrans.paddle.Embedding`; or "auto", as in `dtrans.pserver`. Paddle's programs have that
        with the layers.
      print_log: log the plan when transpiling: at level INFO, by the logger
        "dtrans.paddle.transpiler", whose level and handlers are yours to set. Where logging is not
        set up, the plan goes to stderr, as Python's own warnings do.
      nccl_comm_num: in nccl2 mode, how many chains of reductions may run beside each other; 1
        leaves that to XLA.
      use_hierarchical_allreduce: in nccl2 mode, reduce gradients inside each node, across nodes,
        and gather inside.
      hierarchical_allreduce_inter_nranks: how many trainers a node has; by default as many as have
        endpoints on one host.

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
      dtrans.errors.ConfigError: DistributeTranspilerConfig has no option min_blocksize; did you
        mean min_block_size?
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
    on_trainer_exit: Literal["drop", "paddle", "error"]
    communicator: CommunicatorConfig | None
    geo_sgd_block_on_pull: bool
    merge: Mapping[str, str] | None
    sparse: Mapping[str, Embedding] | Literal["auto"] | None

    def __init__(self, **options: Any) -> None:
        for name, value in {**DEFAULTS, **BEYOND, **options}.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in DEFAULTS and name not in BEYOND:
            known = [*DEFAULTS, *BEYOND]
            raise ConfigError(
                f"DistributeTranspilerConfig has no option {name}; "
                f"{did_you_mean(name, known, 'its options are')}"
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        changed = {n: v for n, v in vars(self).items() if v != (DEFAULTS | BEYOND)[n]}
        return f"DistributeTranspilerConfig({', '.join(f'{n}={v!r}' for n, v in changed.items())})"

    @property
    def dispatcher(self) -> type[PSDispatcher]:
        """`split_method`, or what None stands for."""
        return RoundRobin if self.split_method is None else self.split_method

    def placement(self, seed: int = 0) -> BlockPlacement:
        """How leaves are cut, and placed."""
        return BlockPlacement(self.slice_var_up, self.dispatcher, self.min_block_size, seed)

    def tables(self, servers: int) -> Mapping[str, Rows] | Literal["auto"] | None:
        """The tables, as `dtrans.pserver` takes them, on so many servers."""
        if self.sparse is None or self.sparse == "auto":
            return self.sparse
        return {
            n: x.rows(servers) for n, x in self.sparse.items() if x.is_sparse or x.is_distributed
        } or None

    def when_updated(self, sync_mode: bool) -> Mode:
        """When servers update, and what trainers wait for.

        Args:
          sync_mode: the argument of `transpile`.

        Raises:
          ConfigError: options that contradict each other.
        """
        if self.geo_sgd_mode:
            return Geo(self.geo_sgd_need_push_nums, self.geo_sgd_block_on_pull)
        self._check_async()
        communicator = self.communicator or CommunicatorConfig()
        delay = DelayCompensation(self.dc_asgd_lambda, self.dc_asgd_decay)
        if sync_mode and self.sync_mode:
            if self.enable_dc_asgd:
                raise ConfigAssertionError(
                    "enable_dc_asgd=True is for sync_mode=False: a synchronous gradient has no "
                    "delay"
                )
            return Sync()
        if self.completely_not_async:
            return Sync(runtime_split=True)
        how = delay if self.enable_dc_asgd else None
        if not self.runtime_split_send_recv:
            return Async(how)
        return HalfAsync(how, communicator) if self.half_async else Async(how, communicator)

    def _check_async(self) -> None:
        """Refuse options of asynchronous modes that contradict each other."""
        if not self.enable_dc_asgd:
            self._refuse(("dc_asgd_lambda", "dc_asgd_decay"), "enable_dc_asgd=True, which is False")
        if self.completely_not_async and not self.runtime_split_send_recv:
            raise ConfigError(
                "completely_not_async=True is for runtime_split_send_recv=True, which is False; "
                "sync_mode=True is the "
                "same without a communicator"
            )
        if self.completely_not_async and self.enable_dc_asgd:
            raise ConfigAssertionError(
                "enable_dc_asgd=True is for gradients with a delay, which "
                "completely_not_async=True has not"
            )
        check_type(
            "communicator",
            self.communicator,
            (CommunicatorConfig, type(None)),
            "a CommunicatorConfig",
        )
        if self.communicator is not None and not (
            self.runtime_split_send_recv and not self.completely_not_async
        ):
            raise ConfigError(
                "communicator is for runtime_split_send_recv=True without completely_not_async=True"
            )
        if self.enable_dc_asgd and self.runtime_split_send_recv and not self.half_async:
            raise ConfigError(
                "enable_dc_asgd=True with runtime_split_send_recv=True is for half_async=True, "
                "which is False: a "
                "server knows what a trainer has received, not which of that a step has that does "
                "not wait"
            )

    def check(self) -> None:
        """Refuse options that are out of range or contradict each other, by name. Raises
        ConfigError."""
        check_dispatcher(self.dispatcher)
        check_one_of("mode", self.mode, ("pserver", "nccl2", "collective"))
        size: Any = self.min_block_size
        if not is_int(size) or size < MIN_BLOCK_SIZE:
            raise ConfigAssertionError(
                f"min_block_size must be {MIN_BLOCK_SIZE} or more, it is {size!r}; dtrans.pserver "
                "takes any "
                "positive number"
            )
        if self.mode != "nccl2" and self.use_hierarchical_allreduce:
            raise ConfigError(
                "use_hierarchical_allreduce=True is for mode='nccl2', it is " + repr(self.mode)
            )
        for name, default in DEFAULTS.items():
            if isinstance(default, bool) and name != "slice_var_up":
                check_flag(name, getattr(self, name))
        if self.runtime_split_send_recv and self.sync_mode:
            raise ConfigError("runtime_split_send_recv=True is for sync_mode=False, which is True")
        kind: Any = self.collective_mode
        if self.mode != "collective" and kind is not None:
            raise ConfigError(
                f"collective_mode={kind!r} is for mode='collective', it is {self.mode!r}"
            )
        if self.mode == "collective" and kind not in COLLECTIVE_MODES:
            known = " or ".join(map(repr, COLLECTIVE_MODES))
            raise ConfigError(
                f"collective_mode must be {known} with mode='collective', it is {kind!r}"
            )
        self._check_sparse()
        if self.mode != "pserver":
            self._refuse(
                (*_OF_SERVERS, "runtime_split_send_recv", "sparse", *_OF_GEO),
                f"mode='pserver', it is {self.mode!r}",
            )
            return
        self._refuse(_OF_TRAINERS, "mode='nccl2', it is 'pserver'")
        if self.geo_sgd_mode:
            self._refuse(
                (*_OF_SERVERS, "merge"),
                "geo_sgd_mode=False: in GEO-SGD trainers update by themselves",
            )
            return
        self._refuse(_OF_GEO, "geo_sgd_mode=True, which is False")

    def _check_sparse(self) -> None:
        """Refuse what says nothing of tables."""
        if self.sparse is None or self.sparse == "auto":
            return
        if not isinstance(self.sparse, Mapping):
            raise ConfigError(
                f"sparse={self.sparse!r} must be None, 'auto', or {{'params/emb': "
                f"dtrans.paddle.Embedding(...)}}"
            )
        for name, x in self.sparse.items():
            check_type(f"sparse[{name!r}]", x, Embedding, "a dtrans.paddle.Embedding")

    def _refuse(self, names: Sequence[str], where: str) -> None:
        """Raise for the first of these options that is not at its default."""
        for name in names:
            if getattr(self, name) != (DEFAULTS | BEYOND)[name]:
                raise ConfigError(f"{name}={getattr(self, name)!r} is for {where}")
