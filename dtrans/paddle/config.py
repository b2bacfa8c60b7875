"""Options of a `DistributeTranspiler`: Paddle's names and defaults, and checks of combinations.

`transpile` checks its own arguments. The strategies check the values of the options that they get.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dtrans.checks import (
    check_flag,
    check_int,
    check_number,
    check_one_of,
    check_type,
    did_you_mean,
    is_int,
)
from dtrans.errors import ConfigAssertionError, ConfigError
from dtrans.ops import CommunicatorConfig
from dtrans.paddle.dgc import DGCMomentum
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
from dtrans.parameter_server.tables.options import MOST_UPDATES, Rows


MIN_BLOCK_SIZE = 8192

# attributes of Paddle 1.8.5, with Paddle's defaults
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

# options that Paddle does not have, with their defaults
EXTENSIONS: dict[str, Any] = {
    "dc_asgd_lambda": 1.0,
    "dc_asgd_decay": None,
    "on_trainer_exit": "drop",
    "communicator": None,
    "clip_local_norm": None,
    "clip_local_by": "global_norm",
    "geo_sgd_block_on_pull": False,
    "merge": None,
    "sparse": None,
    "dgc": None,
}

# maps names of options in dtrans to Paddle's names, so that errors contain the user's name
OPTIONS = {
    "strength": "dc_asgd_lambda",
    "decay": "dc_asgd_decay",
    "push_every": "geo_sgd_need_push_nums",
    "block_on_pull": "geo_sgd_block_on_pull",
    "chains": "nccl_comm_num",
    "trainers_per_node": "hierarchical_allreduce_inter_nranks",
}

# options for mode="pserver" that GEO-SGD refuses
_PSERVER_OPTIONS = (
    "enable_dc_asgd",
    "dc_asgd_lambda",
    "dc_asgd_decay",
    "half_async",
    "completely_not_async",
    "communicator",
    "on_trainer_exit",
)
_CLIP_OPTIONS = ("clip_local_norm", "clip_local_by")
# options for GEO-SGD
_GEO_OPTIONS = ("geo_sgd_mode", "geo_sgd_need_push_nums", "geo_sgd_block_on_pull")
# options for mode="nccl2"
_NCCL2_OPTIONS = ("nccl_comm_num", "hierarchical_allreduce_inter_nranks")

COLLECTIVE_MODES = ("grad_allreduce", "local_sgd")


@dataclasses.dataclass(frozen=True)
class CountFilterEntry:
    """Row filter for an embedding table: servers store a row after some updates of the row.

    Before, servers drop the gradients of the row, and lookups return the row's initial value.

    Attributes:
      count_filter: the number of updates with a gradient of a row until servers store the row. With
        0 or 1, the first lookup stores it. Paddle counts the lookups of a row instead.

    Raises:
      ConfigError: `count_filter` is not a number of updates.

    Source: `CountFilterEntry` in python/paddle/distributed/entry_attr.py.

    Example:
      >>> import dtrans
      >>> entry = dtrans.paddle.CountFilterEntry(10)
      >>> dtrans.paddle.Embedding(entry=entry).rows(servers=2).admit_count
      10
    """

    count_filter: int

    def __post_init__(self) -> None:
        wanted = f"a number of updates from 0 to {MOST_UPDATES:,}"
        check_int("count_filter", self.count_filter, wanted, least=0, most=MOST_UPDATES)


@dataclasses.dataclass(frozen=True)
class ProbabilityEntry:
    """Row filter for an embedding table: each update admits a new row with some probability.

    Before its admission, servers drop the gradients of the row, and lookups return the row's
    initial value.

    Attributes:
      probability: the probability, between 0 and 1.

    Raises:
      ConfigError: `probability` is not between 0 and 1.

    Source: `ProbabilityEntry` in python/paddle/distributed/entry_attr.py.

    Example:
      >>> import dtrans
      >>> entry = dtrans.paddle.ProbabilityEntry(0.1)
      >>> dtrans.paddle.Embedding(entry=entry).rows(servers=2).admit_probability
      0.1
    """

    probability: float

    def __post_init__(self) -> None:
        wanted = "a number between 0 and 1"
        check_number("probability", self.probability, wanted, lambda x: 0 < x < 1)


@dataclasses.dataclass(frozen=True)
class Embedding:
    """Options of an embedding table. In Paddle, they are arguments of layers and optimizers.

    Attributes:
      is_sparse: True if trainers request single rows from the servers, and send the gradients of
        these rows. Each server stores a contiguous range of rows (Paddle's `remote_prefetch`).
      is_distributed: like `is_sparse`, but row n is on server `n % servers`.
      lazy_mode: True if rows that no trainer looks up stay unchanged (an option of Paddle's Adam).
        With False every optimizer updates all rows, as on one device.
      entry: the row filter: a `CountFilterEntry`, a `ProbabilityEntry`, or None.

    Raises:
      ConfigError: an attribute has a wrong type.

    Source: `fluid.layers.embedding`; `lazy_mode` of `fluid.optimizer.Adam`; `entry` of
    `paddle.static.nn.sparse_embedding`.

    Example:
      >>> import dtrans
      >>> table = dtrans.paddle.Embedding(is_distributed=True)
      >>> dtrans.DistributeTranspilerConfig(sparse={"params/emb": table})
      DistributeTranspilerConfig(sparse={'params/emb': Embedding(is_sparse=True,
      is_distributed=True, lazy_mode=False, entry=None)})
    """

    is_sparse: bool = True
    is_distributed: bool = False
    lazy_mode: bool = False
    entry: CountFilterEntry | ProbabilityEntry | None = None

    def __post_init__(self) -> None:
        for name in ("is_sparse", "is_distributed", "lazy_mode"):
            check_flag(name, getattr(self, name))
        wanted = "a dtrans.paddle.CountFilterEntry, a dtrans.paddle.ProbabilityEntry or None"
        check_type("entry", self.entry, _ENTRIES, wanted)

    def rows(self, servers: int) -> Rows:
        """Return these options as a `dtrans.Rows`, the form that `dtrans.pserver` takes.

        Args:
          servers: the number of servers.
        """
        update: Literal["lazy", "dense"] = "lazy" if self.lazy_mode else "dense"
        rows = Rows(update, "bucket", servers) if self.is_distributed else Rows(update)
        if isinstance(self.entry, CountFilterEntry):
            return dataclasses.replace(rows, admit_count=max(1, self.entry.count_filter))
        if isinstance(self.entry, ProbabilityEntry):
            return dataclasses.replace(rows, admit_probability=self.entry.probability)
        return rows


_ENTRIES = (CountFilterEntry, ProbabilityEntry, type(None))


class DistributeTranspilerConfig:
    """Options of a `DistributeTranspiler`: Paddle's attributes and defaults, and some extensions.

    Attributes:
      mode: "pserver" for parameter servers; "nccl2" or "collective" for trainers that all-reduce
        gradients, without servers.
      collective_mode: required with mode="collective". With "grad_allreduce" each gradient is
        reduced separately. With "local_sgd" each trainer runs the step alone, and then the job
        averages parameters and optimizer state over trainers. (Paddle averages only parameters.)
      slice_var_up: in pserver mode, True divides parameters into blocks of rows, and False places
        each complete parameter on one server. "require" raises an error if the optimizer cannot
        update a parameter in blocks.
      split_method: in pserver mode, a subclass of `PSDispatcher`: `RoundRobin`, `HashName`,
        `SizeBalanced`, or your own. None is `RoundRobin`.
      min_block_size: in pserver mode, the minimum number of elements in a block, at least 8192.
      sync_mode: True if every update uses the gradients of all trainers; False if each gradient is
        a separate update. `transpile` has an argument of the same name: a job is synchronous if
        both are True.
      enable_dc_asgd: with sync_mode=False, True corrects gradients for their delay.
      dc_asgd_lambda, dc_asgd_decay: an extension: the fields of `dtrans.DelayCompensation`.
      on_trainer_exit: an extension: the effect on synchronous updates if a trainer closes before
        the other trainers: "drop", "paddle" or "error", as in `dtrans.pserver`.
      runtime_split_send_recv: with sync_mode=False, True if a communicator in each trainer sends
        and receives in the background, so that steps do not wait.
      communicator: a `dtrans.CommunicatorConfig`, in place of Paddle's environment variables.
      clip_local_norm, clip_local_by: an extension: with sync_mode=False, or in nccl2 mode, each
        trainer clips its gradients before it sends or reduces them; see `dtrans.Reduce`. In Paddle,
        `fluid.clip.set_gradient_clip` does this.
      half_async: with runtime_split_send_recv=True, True if each step waits for the communicator.
        (In Paddle, the threads of a trainer wait for each other. A dtrans trainer has one thread.)
        Without a communicator it has no effect, since steps wait anyway.
      completely_not_async: with runtime_split_send_recv=True, True if updates use the gradients of
        all trainers, as with sync_mode=True.
      geo_sgd_mode: with sync_mode=False, True if trainers update their own parameters, and servers
        add up the changes (`dtrans.Geo`). `GeoSgdTranspiler` always sets this option.
      geo_sgd_need_push_nums: the number of steps between two pushes of a trainer's changes.
      geo_sgd_block_on_pull: an extension: True if a step that pushes also waits for the changes of
        other trainers.
      merge: an extension: rules that merge the state that trainers update themselves; see
        `dtrans.pserver` and `dtrans.nccl2`.
      sparse: the embedding tables, as `{parameter name: dtrans.paddle.Embedding(...)}`; or "auto",
        as in `dtrans.pserver`. In Paddle, these options are arguments of the layers.
      dgc: an extension: a `dtrans.paddle.DGCMomentum`, with which synchronous trainers compress
        gradients. In Paddle, it is an optimizer.
      print_log: True if `transpile` logs the plan, at level INFO, with the logger
        "dtrans.paddle.transpiler". If logging has no handler, the plan is printed to stderr.
      nccl_comm_num: in nccl2 mode, the number of reductions that may run at the same time; with 1,
        XLA decides.
      use_hierarchical_allreduce: in nccl2 mode, True reduces gradients inside each node, then
        across nodes, and then gathers them inside each node.
      hierarchical_allreduce_inter_nranks: the number of trainers per node; by default the number
        of endpoints with the same host.
      wait_port: accepted and ignored: the `Executor` waits for the servers at its first request.

    Raises:
      ConfigError: an attribute is set that does not exist.

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
    clip_local_norm: float | None
    clip_local_by: str
    geo_sgd_block_on_pull: bool
    merge: Mapping[str, str] | None
    sparse: Mapping[str, Embedding] | Literal["auto"] | None
    dgc: DGCMomentum | None

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
        changed = []
        for name, value in vars(self).items():
            if value != (DEFAULTS | EXTENSIONS)[name]:
                changed.append(f"{name}={value!r}")
        return f"DistributeTranspilerConfig({', '.join(changed)})"

    @property
    def dispatcher(self) -> type[PSDispatcher]:
        """The class in `split_method`, or `RoundRobin` if that is None."""
        return RoundRobin if self.split_method is None else self.split_method

    def placement(self, seed: int = 0) -> BlockPlacement:
        """Return the options of block placement, as the argument `placement` of `dtrans.pserver`.

        Args:
          seed: the argument of `transpile`.
        """
        return BlockPlacement(self.slice_var_up, self.dispatcher, self.min_block_size, seed)

    def tables(self, servers: int) -> Mapping[str, Rows] | Literal["auto"] | None:
        """Return the options of embedding tables, as the argument `sparse` of `dtrans.pserver`.

        Args:
          servers: the number of servers.
        """
        if self.sparse is None or self.sparse == "auto":
            return self.sparse
        found = {}
        for name, table in self.sparse.items():
            if table.is_sparse or table.is_distributed:
                found[name] = table.rows(servers)
        return found or None

    def update_mode(self, sync_mode: bool) -> Mode:
        """Return the update mode of servers, as the argument `mode` of `dtrans.pserver`.

        Args:
          sync_mode: the argument of `transpile`.

        Raises:
          ConfigError: two options contradict each other.
        """
        if self.geo_sgd_mode:
            return Geo(self.geo_sgd_need_push_nums, self.geo_sgd_block_on_pull)
        self._check_async()
        communicator = self.communicator or CommunicatorConfig()
        delay = DelayCompensation(self.dc_asgd_lambda, self.dc_asgd_decay)
        clip = (self.clip_local_norm, self.clip_local_by)
        if (sync_mode and self.sync_mode) or self.completely_not_async:
            self._refuse(_CLIP_OPTIONS, "sync_mode=False or mode='nccl2', and asynchronous updates")
        if sync_mode and self.sync_mode:
            if self.enable_dc_asgd:
                raise ConfigAssertionError(
                    "enable_dc_asgd=True needs sync_mode=False: synchronous gradients have no delay"
                )
            return Sync(compress=None if self.dgc is None else self.dgc.topk)
        self._refuse(("dgc",), "sync_mode=True, it is False")
        if self.completely_not_async:
            return Sync(runtime_split=True)
        compensation = delay if self.enable_dc_asgd else None
        if not self.runtime_split_send_recv:
            return Async(compensation, None, *clip)
        if self.half_async:
            return HalfAsync(compensation, communicator, *clip)
        return Async(compensation, communicator, *clip)

    def _check_async(self) -> None:
        """Raise ConfigError for options of asynchronous modes that contradict each other."""
        if not self.enable_dc_asgd:
            self._refuse(("dc_asgd_lambda", "dc_asgd_decay"), "enable_dc_asgd=True, it is False")
        if self.completely_not_async and not self.runtime_split_send_recv:
            raise ConfigError(
                "completely_not_async=True needs runtime_split_send_recv=True, it is False; for "
                "synchronous updates without a communicator, set sync_mode=True"
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
                "enable_dc_asgd=True with runtime_split_send_recv=True needs half_async=True, it "
                "is False: if a step does not wait, servers cannot know which parameters the step "
                "used"
            )

    def check(self) -> None:
        """Check all options, except those that depend on the arguments of `transpile`.

        Raises:
          ConfigError: an option is out of range, or contradicts another one.
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
                f"use_hierarchical_allreduce=True needs mode='nccl2', but mode is {self.mode!r}"
            )
        for name, default in DEFAULTS.items():
            if isinstance(default, bool) and name != "slice_var_up":
                check_flag(name, getattr(self, name))
        if self.runtime_split_send_recv and self.sync_mode:
            raise ConfigError("runtime_split_send_recv=True needs sync_mode=False, it is True")
        kind: Any = self.collective_mode
        if self.mode != "collective" and kind is not None:
            raise ConfigError(
                f"collective_mode={kind!r} needs mode='collective', but mode is {self.mode!r}"
            )
        if self.mode == "collective" and kind not in COLLECTIVE_MODES:
            known = " or ".join(map(repr, COLLECTIVE_MODES))
            raise ConfigError(
                f"collective_mode must be {known} with mode='collective', it is {kind!r}"
            )
        self._check_sparse()
        check_type("dgc", self.dgc, (DGCMomentum, type(None)), "a dtrans.paddle.DGCMomentum")
        if self.mode != "pserver":
            self._refuse(
                (*_PSERVER_OPTIONS, "runtime_split_send_recv", "sparse", "dgc", *_GEO_OPTIONS),
                f"mode='pserver', but mode is {self.mode!r}",
            )
            return
        self._refuse(_NCCL2_OPTIONS, "mode='nccl2', but mode is 'pserver'")
        if self.geo_sgd_mode:
            self._refuse(
                (*_PSERVER_OPTIONS, *_CLIP_OPTIONS, "merge", "dgc"),
                "geo_sgd_mode=False: in GEO-SGD trainers update their own parameters",
            )
            return
        self._refuse(_GEO_OPTIONS, "geo_sgd_mode=True, it is False")

    def _check_sparse(self) -> None:
        """Raise ConfigError unless `sparse` is None, "auto", or a mapping to `Embedding`."""
        if self.sparse is None or self.sparse == "auto":
            return
        if not isinstance(self.sparse, Mapping):
            raise ConfigError(
                f"sparse is {self.sparse!r}; expected None, 'auto', or {{'params/emb': "
                "dtrans.paddle.Embedding(...)}"
            )
        for name, table in self.sparse.items():
            check_type(f"sparse[{name!r}]", table, Embedding, "a dtrans.paddle.Embedding")

    def _refuse(self, names: Sequence[str], needed: str) -> None:
        """Raise ConfigError if an option is set that has no effect with the other options.

        Args:
          names: options that must have their defaults.
          needed: the condition for these options, for the error: "mode='nccl2', but mode is
            'pserver'".
        """
        for name in names:
            if getattr(self, name) != (DEFAULTS | EXTENSIONS)[name]:
                raise ConfigError(f"{name}={getattr(self, name)!r} needs {needed}")
