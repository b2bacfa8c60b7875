"""Plan of a data-parallel job: the program of all trainers, and the bytes that they communicate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dtrans._jax import is_varying
from dtrans.costs import Costs, RoleCost, program_flops
from dtrans.engine.axis_bytes import bytes_by_axis, collectives
from dtrans.errors import ConfigError
from dtrans.ir.cost import nbytes, total_bytes
from dtrans.ir.program import Program
from dtrans.ir.pytree import all_names, is_under
from dtrans.plan import Plan, runner_of
from dtrans.step.scopes import ignored_split_notes
from dtrans.transfers import RoleTransfer, Transfers


if TYPE_CHECKING:
    from dtrans.batch.exact_step import ExactStep
    from dtrans.data_parallel.options import Options
    from dtrans.data_parallel.sequence_axis import SequenceAxis
    from dtrans.engine.layout import Gathered, Sliced
    from dtrans.tensor_parallel.model_axis import ModelState


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients that one reduction sums over trainers.

    Attributes:
      name: the name, such as "bucket/0".
      leaves: the leaves of the gradients, in the order of the backward pass.
      dtype: the dtype of the gradients.
      nbytes: the bytes that a trainer sends to the reduction, after compression.
    """

    name: str
    leaves: tuple[str, ...]
    dtype: Any
    nbytes: int


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CollectivePlan(Plan):
    """Plan of data-parallel training over collectives, which `dtrans.nccl2` returns.

    All trainers run the same program.

    Attributes:
      main: the step, with calls inlined and a role for each equation.
      startup: the single-device init.
      program: the program that every trainer runs: (params, opt_state, *part of the batch) -> the
        outputs of the step.
      options: the options: see `dtrans.nccl2`.
      buckets: the buckets of gradients in the order of their reductions. With local steps, these
        are buckets of state.
      merges: the merge rule of each result, and of each parameter that trainers update locally
        (dict by name).
      callback_notes: a sentence for each host callback of the step, which names its trainers.
      replan: function that plans the same step with different options.
      shared: the split of the batch with `batch="exact"`; None with `batch="local"`.
      for_uneven_batch: function from the types of the step's inputs to a program. The trainers need
        not divide the batch of this program equally. None if they must divide every batch equally.
      model_state: the state that the devices of a trainer divide; None without a model axis.
      sequence: the axis of the devices that divide sequences; None for a plan without this axis.
      device_gathers: pairs (axis, value that the devices of this axis gather).
    """

    main: Program
    startup: Program
    program: Program
    options: Options
    buckets: tuple[Bucket, ...]
    merges: Mapping[str, str]
    callback_notes: tuple[str, ...]
    replan: Callable[[Any], Any] = dataclasses.field(repr=False, compare=False)
    shared: ExactStep | None = dataclasses.field(default=None, kw_only=True, compare=False)
    for_uneven_batch: Callable[[Sequence[Any]], Program] | None = dataclasses.field(
        default=None, kw_only=True, repr=False, compare=False
    )
    model_state: ModelState | None = dataclasses.field(default=None, kw_only=True, compare=False)
    sequence: SequenceAxis | None = dataclasses.field(default=None, kw_only=True, compare=False)
    device_gathers: tuple[tuple[str, Gathered], ...] = dataclasses.field(
        default=(), kw_only=True, compare=False
    )

    _right, _code = (3,), 1
    strategy: ClassVar = "nccl2"

    @property
    def owned(self) -> Any:
        """Rank that owns each parameter; None if ranks do not own full parameters."""
        return None

    @property
    def sliced(self) -> Mapping[str, Any]:
        """State that trainers store as slices between steps, by name; empty except in sharding."""
        return {}

    @cached_property
    def slices_by_axis(self) -> Mapping[str, Mapping[str, Sliced]]:
        """Slices of state arrays over mesh axes: name of the array -> mesh axis -> slices.

        An array may be divided over several axes. Arrays that devices store in full are absent.
        """
        slices_by_axis: dict[str, dict[str, Sliced]] = {}
        for name, sliced in self.sliced.items():
            slices_by_axis[name] = {self.options.over[-1]: sliced}
        if self.model_state is not None:
            for name, sliced in self.model_state.sliced.items():
                slices_by_axis.setdefault(name, {})[self.model_state.axis] = sliced
        if self.sequence is not None:
            for name, sliced in self.sequence.state.items():
                slices_by_axis.setdefault(name, {})[self.sequence.name] = sliced
        return slices_by_axis

    @property
    def programs(self) -> dict[str, Program]:
        return {"trainer": self.program}

    @property
    def trainers(self) -> int:
        """Number of trainers."""
        return self.options.trainers

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Mesh axes as pairs (name, size): axes of the trainers, then axes of their devices."""
        return (*self.options.axes, *self.device_axes)

    @property
    def device_axes(self) -> tuple[tuple[str, int], ...]:
        """Mesh axes of the devices of one trainer, as pairs (name, size)."""
        axes = []
        if self.sequence is not None:
            axes.append((self.sequence.name, self.sequence.size))
        if self.model_state is not None and self.model_state.axis not in self.options.over:
            axes.append((self.model_state.axis, self.model_state.size))
        return tuple(axes)

    @property
    def has_mesh(self) -> bool:
        """True if the user's `mesh` has an axis "model" or "sequence"."""
        return self.model_state is not None or self.sequence is not None

    @property
    def devices_per_trainer(self) -> int:
        """Number of devices of each trainer."""
        return math.prod(size for _, size in self.device_axes)

    @property
    def device_count(self) -> int:
        """Number of devices of the job."""
        return self.trainers * self.devices_per_trainer

    @property
    def unsplit_inputs(self) -> tuple[str, ...]:
        """Names of the batch arrays that every trainer gets in full."""
        return tuple(self.options.batch.unsplit_inputs)

    @property
    def extra_state(self) -> Mapping[str, Any]:
        """Initial values of state that the plan adds to the user's state, such as a loss scale."""
        return {}

    # -- running ---------------------------------------------------------------------------------

    @property
    def function(self) -> Callable[..., Any]:
        """Program of one trainer as a pure function: (params, opt_state, *batch) -> outputs.

        Use the function to write your own training loop without a dtrans job. Call it under
        `jax.pmap`, `jax.vmap`, or `jax.shard_map(..., check_vma=False)` with the axis names in
        `axes`. One device alone needs no axis. Each trainer passes its part of the batch. Results
        are merged over trainers, with two exceptions. A result with merge rule "concat" has only
        this trainer's rows. A result with rule "each" has only this trainer's value.

        Raises:
          ConfigError: the function is called under a `jax.shard_map` with `check_vma=True`. JAX
            would check varying types, which programs traced outside of `shard_map` do not have.
        """
        per_trainer = runner_of(self, "function")

        def refusal() -> ConfigError:
            return ConfigError(
                f"plan.function: {self.main.name} was traced without the varying types that "
                "shard_map checks; write jax.shard_map(..., check_vma=False)"
            )

        def function(*args: Any) -> Any:
            flat = self.program.flatten(*args)
            program = self.program.specialize_flat(flat)
            if self.device_count > 1 and any(map(is_varying, flat)):
                raise refusal()
            try:
                return program.out.unflatten(per_trainer(program)(*flat))
            except ValueError as e:
                if "varying manual axes" not in str(e):
                    raise
                raise refusal() from e

        return function

    def for_trainers(self, trainers: int) -> CollectivePlan:
        """Return the plan of the same step for another number of trainers.

        If `trainers_per_node` does not divide the new number, reductions are not hierarchical.
        """
        if trainers == self.trainers:
            return self
        node = self.options.trainers_per_node
        if node and (trainers % node or trainers <= node):
            node = 0
        options = dataclasses.replace(self.options, trainers=trainers, trainers_per_node=node)
        return self.replan(options)

    # -- cost ------------------------------------------------------------------------------------

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the mesh axes."""
        return tuple(name for name, _ in self.axes)

    def _role_costs(self) -> Costs:
        moved = list(collectives(self.program.jaxpr))
        sent = sum(times * total_bytes(eqn.invars) for eqn, times in moved)
        received = sum(times * total_bytes(eqn.outvars) for eqn, times in moved)
        rounds = sum(times for _, times in moved)
        names = all_names(self.program.args[:2])
        state = sum(nbytes(self.program.inputs[n]) for n in names)
        flops = program_flops(self.program)
        count = self.device_count
        return Costs([RoleCost("trainer", count, state, sent, received, rounds, flops)])

    def transfers(self) -> Transfers:
        sizes: dict[tuple[str, str], int] = {}
        for eqn, times in collectives(self.program.jaxpr):
            over = eqn.params["over"]
            is_inside = set(over).isdisjoint(self.options.over)
            target = "devices of the trainer" if is_inside else "other trainers"
            key = (target, f"{eqn.primitive.name} over {', '.join(over)}")
            sizes[key] = sizes.get(key, 0) + times * total_bytes(eqn.invars)
        return Transfers(RoleTransfer("trainer", *key, size) for key, size in sizes.items())

    @cached_property
    def bytes_per_step(self) -> dict[str, int]:
        """Bytes of each dtype that a trainer passes to collectives in a step."""
        return self.bytes_over(*self.axis_names)

    def traffic(self) -> dict[tuple[str, str], int]:
        """Return the bytes that collectives move in a step, by primitive and mesh axis.

        A gather counts the bytes of its output, and a reduction the bytes of its input. So a gather
        of all parameters counts the size of the model. In a ring of N devices, each link carries (N
        - 1)/N of this number for a gather or reduce-scatter, and twice that for an all-reduce.
        """
        return bytes_by_axis(self.program.jaxpr)

    def bytes_over(self, *axes: str) -> dict[str, int]:
        """Return the bytes of a step that a trainer passes to collectives over `axes`, by dtype."""
        found: dict[str, int] = {}
        for eqn, times in collectives(self.program.jaxpr):
            if set(axes) & set(eqn.params["over"]):
                for a in eqn.invars:
                    name = np.dtype(a.aval.dtype).name
                    found[name] = found.get(name, 0) + times * nbytes(a.aval)
        return found

    # -- showing ---------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """Rows of the plan's table: for each bucket its name, leaves, type and bytes."""
        rows = []
        for b in self.buckets:
            leaves = ", ".join(b.leaves[:3])
            if len(b.leaves) > 3:
                leaves += f", ... ({len(b.leaves)})"
            rows.append((b.name, leaves, np.dtype(b.dtype).name, f"{b.nbytes:,}"))
        return rows

    @cached_property
    def notes(self) -> list[str]:
        """Sentences for the user about this plan, which are printed below its table."""
        notes = [] if self.shared is None else list(self.shared.notes)
        if self.has_mesh:
            for (kind, axis), count in self.traffic().items():
                notes.append(f"{kind} over {axis}: {count:,} bytes per step")
        else:
            moved = _listed(self.bytes_per_step) or "nothing"
            names = " and ".join(self.axis_names)
            notes.append(f"each trainer puts {moved} into collectives per step, over {names}")
        notes += self.device_notes
        if self.options.trainers_per_node:
            outer, nodes = self.axes[0]
            across = _listed(self.bytes_over(outer))
            notes.append(f"between the {nodes} nodes: {across} per step")
        if self.options.local_sgd is not None:
            notes.append(f"after {self.options.local_sgd} local steps trainers average their state")
            notes.append("statistics, counts and random numbers depend on each trainer's rows only")
        averaged = {leaf for b in self.buckets for leaf in b.leaves}
        for name, way in self.merges.items():
            is_known = self.shared is not None and name in self.shared.undivided_state
            if not is_known and (name not in averaged or way != "mean"):
                notes.append(f"{name}: {way}")
        return notes + list(self.callback_notes)

    @property
    def device_notes(self) -> list[str]:
        """Sentences for the user about a trainer's devices: divided layers, gathered values."""
        if self.model_state is None:
            remedy = "to divide it over m devices, pass mesh={'data': n, 'model': m}"
            notes = list(ignored_split_notes(self.main.jaxpr, remedy))
        else:
            notes = [*self.model_state.notes, *_full_arrays(self)]
        if self.sequence is not None:
            notes += self.sequence.notes
        for axis, x in self.device_gathers:
            notes.append(f"gathered over {axis}: {x}")
        return notes

    @property
    def mesh_text(self) -> str:
        """Text such as "mesh of 4 data x 2 model"."""
        text = f"mesh of {' x '.join(f'{size} {name}' for name, size in self.axes)}"
        is_colocated = self.options.colocated
        return f"{text}, split layers on the same devices" if is_colocated else text

    @property
    def _title(self) -> str:
        size = self.mesh_text if self.has_mesh else f"{self.trainers} trainers"
        return f"nccl2 plan of {self.main.name}: {size}"

    @property
    def _header(self) -> tuple[str, ...]:
        leaves = "gradients of" if self.options.local_sgd is None else "state"
        return "bucket", leaves, "type", "bytes"


def _full_arrays(plan: CollectivePlan) -> Iterator[str]:
    """Yield a note for each batch array that every trainer gets in full for `dtrans.split` layers.

    Trainers divide the parameters of these layers. A trainer gets an array in full if only these
    layers read it.
    """
    if not plan.options.colocated or plan.shared is None:
        return
    for n in all_names(plan.main.args[2:]):
        is_full = n not in plan.shared.axes and plan.main.inputs[n].ndim > 0
        if is_full and not is_under(n, plan.unsplit_inputs):
            yield f"each trainer gets all rows of {n}, which only split layers read"


def _listed(by_kind: Mapping[str, int]) -> str:
    """Return a text such as "76 bytes of float32, 8 bytes of int32"."""
    return ", ".join(f"{count:,} bytes of {kind}" for kind, count in by_kind.items())
