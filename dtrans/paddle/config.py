"""Options of a `DistributeTranspiler`: names, defaults and contradictions.

`transpile` checks its own arguments, and the strategies check the options that they receive.
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

# Options that Paddle has no attribute for.
EXTENSIONS: dict[str, Any] = {
    "dc_asgd_lambda": 1.0,
    "dc_asgd_decay": None,
    "on_trainer_exit": "drop",
    "communicator": None,
    "geo_sgd_block_on_pull": False,
    "merge": None,
    "sparse": None,
}

# Options of `dtrans.nccl2` and `dtrans.pserver` (and fields of their records) to Paddle's names.
OPTIONS = {
    "strength": "dc_asgd_lambda",
    "decay": "dc_asgd_decay",
    "push_every": "geo_sgd_need_push_nums",
    "block_on_pull": "geo_sgd_block_on_pull",
    "chains": "nccl_comm_num",
    "trainers_per_node": "hierarchical_allreduce_inter_nranks",
}

# Options of jobs whose servers update parameters; of GEO-SGD, whose servers add up deltas; and of
# jobs without servers.
_OF_SERVERS = (
    "enable_dc_asgd",
    "dc_asgd_lambda",
    "dc_asgd_decay",
    "half_async",
    "completely_not_async",
    "communicator",
    "on_trainer_exit",
)
_OF_GEO = ("geo_sgd_mode", "geo_sgd_need_push_nums", "geo_sgd_block_on_pull")
_OF_TRAINERS = ("nccl_comm_num", "hierarchical_allreduce_inter_nranks")

COLLECTIVE_MODES = ("grad_allreduce", "local_sgd")


@dataclasses.dataclass(frozen=True)
class Embedding:
    """Options of an embedding table that Paddle passes to its layers and optimizers.

    Attributes:
      is_sparse: trainers look up single rows on the servers, and send the gradients of these rows.
        Each server has a contiguous range of rows (Paddle's `remote_prefetch`).
      is_distributed: as `is_sparse`, but row n is on server n % servers.
      lazy_mode: an option of Adam: rows that no trainer looks up stay unchanged. With False every
        optimizer updates them as it does on one device.

    Raises:
      ConfigError: an attribute is neither True nor False.

    Source: `fluid.layers.embedding`; `lazy_mode` of `fluid.optimizer.Adam`.

    Example:
      >>> import dtrans
      >>> table = dtrans.paddle.Embedding(is_distributed=True)
      >>> dtrans.DistributeTranspilerConfig(sparse={"params/emb": table})
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
        """Return these options as `dtrans.pserver` takes them."""
        update: Literal["lazy", "dense"] = "lazy" if self.lazy_mode else "dense"
        return Rows(update, "bucket", servers) if self.is_distributed else Rows(update)


class DistributeTranspilerConfig:
    """Options of a `DistributeTranspiler`: Paddle's attributes and defaults, and some extensions.

    Attributes:
      mode: "pserver"; or "nccl2" or "collective": no servers, trainers all-reduce their gradients.
      collective_mode: for mode="collective". "grad_allreduce" reduces each gradient separately.
        "local_sgd" lets each trainer step alone, then averages their results. The average includes
        the optimizer's state, which Paddle does not average.
      slice_var_up: cut parameters into blocks of rows; False puts each on one server. "require" is
        an error if the optimizer does not let a parameter be cut.
      split_method: a subclass of `PSDispatcher`: `RoundRobin` (the meaning of None), `HashName`,
        `SizeBalanced`, or a subclass that you write.
      min_block_size: the smallest number of elements in a block, 8192 or more.
      sync_mode: every update uses the gradients of all trainers. With False each gradient is a
        separate update. False here or as an argument of `transpile` turns it off.
      enable_dc_asgd: with sync_mode=False, compensate gradients for their delay.
      dc_asgd_lambda, dc_asgd_decay: an extension: fields of `dtrans.DelayCompensation`.
      on_trainer_exit: an extension: synchronous updates after a trainer has closed early. "drop" it
        from them, "paddle", or "error"; see `dtrans.pserver`.
      runtime_split_send_recv: with sync_mode=False, trainers have a communicator, and steps do not
        wait.
      communicator: a `dtrans.CommunicatorConfig`, in place of Paddle's environment variables.
      half_async: with both, steps wait for the communicator. In Paddle the threads of a trainer
        wait for each other; a dtrans trainer has one. Without a communicator it has no effect:
        steps wait anyway.
      completely_not_async: with both, updates use the gradients of all trainers, as with
        sync_mode=True.
      geo_sgd_mode: with sync_mode=False, trainers train locally, and servers add up their deltas;
        see `dtrans.Geo`. `GeoSgdTranspiler` always sets it.
      geo_sgd_need_push_nums: the number of steps between two pushes of a trainer's deltas.
      geo_sgd_block_on_pull: an extension: the pushing step waits for the deltas of other trainers.
      merge: an extension: merge rules for state that trainers update themselves; see
        `dtrans.pserver` and `dtrans.nccl2`.
      sparse: tables whose rows trainers look up on the servers: `{name of a parameter:
        dtrans.paddle.Embedding(...)}`, or "auto", as in `dtrans.pserver`. Paddle's programs have
        this with the layers.
      print_log: log the plan in `transpile`, at level INFO, with the logger
        "dtrans.paddle.transpiler". Without a handler the plan goes to stderr, as Python's warnings
        do.
      nccl_comm_num: in nccl2 mode, the number of chains of reductions that may overlap; 1 leaves
        that to XLA.
      use_hierarchical_allreduce: in nccl2 mode, reduce gradients inside each node, across nodes,
        and gather inside.
      hierarchical_allreduce_inter_nranks: the number of trainers of a node; by default the number
        of endpoints on one host.

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
        for name, value in {**DEFAULTS, **EXTENSIONS, **options}.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in DEFAULTS and name not in EXTENSIONS:
            known = [*DEFAULTS, *EXTENSIONS]
            raise ConfigError(
                f"DistributeTranspilerConfig has no option {name}; "
                f"{did_you_mean(name, known, 'its options are')}"
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        changed = {n: v for n, v in vars(self).items() if v != (DEFAULTS | EXTENSIONS)[n]}
        return f"DistributeTranspilerConfig({', '.join(f'{n}={v!r}' for n, v in changed.items())})"

    @property
    def dispatcher(self) -> type[PSDispatcher]:
        """The dispatcher that `split_method` stands for."""
        return RoundRobin if self.split_method is None else self.split_method

    def placement(self, seed: int = 0) -> BlockPlacement:
        """Return the options of cutting leaves into blocks and placing them on servers."""
        return BlockPlacement(self.slice_var_up, self.dispatcher, self.min_block_size, seed)

    def tables(self, servers: int) -> Mapping[str, Rows] | Literal["auto"] | None:
        """Return the options of tables as `dtrans.pserver` takes them."""
        if self.sparse is None or self.sparse == "auto":
            return self.sparse
        found = {
            name: table.rows(servers)
            for name, table in self.sparse.items()
            if table.is_sparse or table.is_distributed
        }
        return found or None

    def update_mode(self, sync_mode: bool) -> Mode:
        """Return the mode of updates: when servers update, and what trainers wait for.

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
                    "enable_dc_asgd=True needs sync_mode=False: synchronous gradients have no delay"
                )
            return Sync()
        if self.completely_not_async:
            return Sync(runtime_split=True)
        compensation = delay if self.enable_dc_asgd else None
        if not self.runtime_split_send_recv:
            return Async(compensation)
        if self.half_async:
            return HalfAsync(compensation, communicator)
        return Async(compensation, communicator)

    def _check_async(self) -> None:
        """Refuse options of asynchronous modes that contradict each other."""
        if not self.enable_dc_asgd:
            self._refuse(("dc_asgd_lambda", "dc_asgd_decay"), "enable_dc_asgd=True, it is False")
        if self.completely_not_async and not self.runtime_split_send_recv:
            raise ConfigError(
                "completely_not_async=True needs runtime_split_send_recv=True, it is False; "
                "sync_mode=True is the same without a communicator"
            )
        if self.completely_not_async and self.enable_dc_asgd:
            raise ConfigAssertionError(
                "enable_dc_asgd=True needs completely_not_async=False: synchronous gradients have "
                "no delay"
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
                "communicator needs runtime_split_send_recv=True and completely_not_async=False"
            )
        if self.enable_dc_asgd and self.runtime_split_send_recv and not self.half_async:
            raise ConfigError(
                "enable_dc_asgd=True with runtime_split_send_recv=True needs half_async=True, "
                "it is False: a server cannot know which parameters a step reads that does not wait"
            )

    def check(self) -> None:
        """Refuse options that are out of range or contradict each other.

        Raises:
          ConfigError: names the option.
        """
        check_dispatcher(self.dispatcher)
        check_one_of("mode", self.mode, ("pserver", "nccl2", "collective"))
        size: Any = self.min_block_size
        if not is_int(size) or size < MIN_BLOCK_SIZE:
            raise ConfigAssertionError(
                f"min_block_size must be {MIN_BLOCK_SIZE} or more, it is {size!r}; dtrans.pserver "
                "takes any positive number"
            )
        if self.mode != "nccl2" and self.use_hierarchical_allreduce:
            raise ConfigError(
                f"use_hierarchical_allreduce=True needs mode='nccl2', it is {self.mode!r}"
            )
        for name, default in DEFAULTS.items():
            if isinstance(default, bool) and name != "slice_var_up":
                check_flag(name, getattr(self, name))
        if self.runtime_split_send_recv and self.sync_mode:
            raise ConfigError("runtime_split_send_recv=True needs sync_mode=False, it is True")
        kind: Any = self.collective_mode
        if self.mode != "collective" and kind is not None:
            raise ConfigError(
                f"collective_mode={kind!r} needs mode='collective', it is {self.mode!r}"
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
                "geo_sgd_mode=False: in GEO-SGD trainers update their own parameters",
            )
            return
        self._refuse(_OF_GEO, "geo_sgd_mode=True, it is False")

    def _check_sparse(self) -> None:
        """Refuse a `sparse` that is neither a mapping of tables, nor "auto", nor None."""
        if self.sparse is None or self.sparse == "auto":
            return
        if not isinstance(self.sparse, Mapping):
            raise ConfigError(
                f"sparse={self.sparse!r} must be None, 'auto', or {{'params/emb': "
                f"dtrans.paddle.Embedding(...)}}"
            )
        for name, table in self.sparse.items():
            check_type(f"sparse[{name!r}]", table, Embedding, "a dtrans.paddle.Embedding")

    def _refuse(self, names: Sequence[str], needed: str) -> None:
        """Raise ConfigError for the first of these options that is not at its default."""
        for name in names:
            if getattr(self, name) != (DEFAULTS | EXTENSIONS)[name]:
                raise ConfigError(f"{name}={getattr(self, name)!r} needs {needed}")
