"""A trainer program, compiled for all trainers of a mesh at once.

A value of several trainers is *stacked*: a global array with a leading axis, sharded over the
trainer mesh. One that is the same for all trainers is *replicated*; the batch comes *split* on dim
0. Each piece of the program becomes one `jit(shard_map)`; a device that stands for several trainers
takes them in turn. What trainers exchange in the middle of a step crosses on the axis, combined in
their order, as a server does it.

Results of several trainers are merged: where the batch is shared exactly, as the plan says; else
one that grows with the batch is concatenated, any other floating-point result (the loss) is
averaged, and any other gets a leading axis, one row per trainer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dtrans._jax import Var, is_traced
from dtrans.errors import BatchError
from dtrans.ir.program import Program
from dtrans.ir.pytree import result_of, without
from dtrans.ops import exchange_p, exchanged, prefetch_p, split_ids_p, trainer_index_p
from dtrans.parameter_server.plan import PServerPlan
from dtrans.run.base.batch import Share, part_types
from dtrans.run.base.lowered import call_recorded
from dtrans.run.base.merge import Merge
from dtrans.run.base.segments import COMPUTED, Compute, Rules, cut_program
from dtrans.run.base.spmd import AxisSharding, on_mesh, on_one_device


AXIS, TURN = "trainers", "turn"  # the devices, and the trainers that one of them stands for


def _gathered(x: jax.Array) -> list[jax.Array]:
    """A value of every trainer, on each."""
    parts = jax.lax.all_gather(jax.lax.all_gather(x, TURN), AXIS)
    return list(parts.reshape(-1, *x.shape))


def _index() -> jax.Array:
    return jax.lax.axis_index(AXIS) * jax.lax.axis_size(TURN) + jax.lax.axis_index(TURN)


def _mine(x: jax.Array, axis: int) -> jax.Array:
    size = x.shape[axis] // (jax.lax.axis_size(AXIS) * jax.lax.axis_size(TURN))
    return jax.lax.dynamic_slice_in_dim(x, _index() * size, size, axis)


def _exchange(*parts: Any, how: Sequence[tuple[Any, ...]], **_: Any) -> list[Any]:
    return [exchanged(way, _gathered(x), _mine) for way, x in zip(how, parts, strict=True)]


# what each trainer does with the rows that it looks up
OF_ROWS = frozenset({split_ids_p, prefetch_p})

# kinds of values among the trainers of one device
_TURN_OF = {
    None: AxisSharding(),
    "split": AxisSharding().cut_along(0, TURN),
    "stacked": AxisSharding(stacked=(TURN,)),
}

AMONG_TRAINERS: Rules = {exchange_p: _exchange, trainer_index_p: lambda *, over: [_index()]}


def shared_program(
    plan: PServerPlan, arrays: Sequence[tuple[Any, Share]]
) -> tuple[Program, Mapping[str, Merge] | None]:
    """A trainer's program for its part of a batch, and how results are merged, if the plan says so.

    Args:
      arrays: of the batch, and how trainers share each; they need not divide those of an exact
        plan.
    """
    main, shared = plan.main, plan.shared
    if shared is None or not any(
        isinstance(s, int) and x.shape[s] % plan.trainers for x, s in arrays
    ):
        state = [plan.trainer.inputs[n] for n in main.args[0].names]
        program = plan.trainer.specialize_flat([*state, *part_types(arrays, plan.trainers)])
        if shared is None:
            return program, None
        return program, {n: Merge(way, shared.joined.get(n, 0)) for n, way in shared.merges.items()}
    given = [main.inputs[n] for spec in main.args[:2] for n in spec.names] + [x for x, _ in arrays]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given]
    shared, program = plan.for_uneven_batch(types, 0)
    whole = main.specialize_flat(types).outputs
    rows = {n: whole[n].shape[axis] for n, axis in shared.joined.items()}
    return program, {
        n: Merge(way, shared.joined.get(n, 0), rows.get(n)) for n, way in shared.merges.items()
    }


class MeshTrainerPrograms:
    """A trainer program for one batch shape, compiled for all trainers of a mesh.

    Args:
      program: of trainer 0, for a trainer's part of the batch.
      batch: the arrays of the global batch, and how trainers share each
        (`dtrans.run.base.batch.Share`); only types are looked at.
      merges: how results become those of one device; None where the plan does not say.
      mesh: the trainers' devices, on one axis.
      plan: that the program is of.
      local: parameters of which each trainer has its own.

    Raises:
      BatchError: a result that cannot be merged.
    """

    def __init__(
        self,
        program: Program,
        batch: Sequence[tuple[Any, Share]],
        mesh: Mesh,
        plan: PServerPlan,
        local: Collection[str],
        merges: Mapping[str, Merge] | None,
    ) -> None:
        self.program = program
        self.mesh = mesh
        self.plan = plan
        self.pieces = cut_program(program, computed={**COMPUTED, **AMONG_TRAINERS})
        self.param_names = plan.main.args[0].names
        inner = program.inner
        count = len(self.param_names)
        self.kinds: dict[Var, str] = {}
        for name, var in zip(self.param_names, inner.invars, strict=False):
            if name in local:
                self.kinds[var] = "stacked"
        for (_, share), var in zip(batch, inner.invars[count:], strict=True):
            if share != "replicated":
                self.kinds[var] = "split" if share == 0 else "stacked"
        for step in self.pieces.steps:
            if isinstance(step, Compute):
                differs = self._differs(step)
            else:
                differs = step.eqn.primitive in OF_ROWS and any(
                    v in self.kinds for v in step.eqn.invars
                )
            if differs:
                self.kinds |= dict.fromkeys(
                    step.makes if isinstance(step, Compute) else step.eqn.outvars, "stacked"
                )
        self.outs = program.outvars
        self.steps = [s for s in self.pieces.steps if isinstance(s, Compute)]
        self.compiled = {s: self._compile(s) for s in self.steps}
        self.rest = without(program.out, plan.main.args[0])
        self.merge = self._merger([x for x, _ in batch], merges)

    def is_stacked(self, atom: Any) -> bool:
        """Whether each trainer has a value of its own."""
        return isinstance(atom, Var) and self.kinds.get(atom) == "stacked"

    def on_host(self, atoms: Sequence[Any], values: Sequence[Any]) -> list[list[np.ndarray]]:
        """Return what each trainer has of each value, on the host; of a step that is traced, as it
        is."""
        at_hand = [x if is_traced(x) else np.asarray(x) for x in values]
        return [self._on_host(a, x) for a, x in zip(atoms, at_hand, strict=True)]

    def _on_host(self, atom: Any, x: Any) -> list[Any]:
        trainers, kind = self.plan.trainers, self.kinds.get(atom) if isinstance(atom, Var) else None
        if kind is None:
            return [x] * trainers
        return list(x if kind == "stacked" else x.reshape(trainers, -1, *x.shape[1:]))

    def _differs(self, piece: Compute) -> bool:
        """Whether each trainer makes something else of it."""
        return any(v in self.kinds for v in piece.reads) or not AMONG_TRAINERS.keys().isdisjoint(
            piece.rules
        )

    def compute(self, piece: Compute, values: Sequence[Any]) -> Sequence[Any]:
        """Run one piece for all trainers."""
        made: Sequence[Any] = call_recorded(
            lambda: f"trainers {self.steps.index(piece)}", self.compiled[piece], *values
        )
        return made

    def _compile(self, piece: Compute) -> Callable[..., Sequence[Any]]:
        if not self._differs(piece):
            return piece.jitted
        communicates = not AMONG_TRAINERS.keys().isdisjoint(piece.rules)
        each = self.plan.trainers // self.mesh.size
        kinds = [self.kinds.get(v) for v in piece.reads]
        ins = [_TURN_OF[kind] for kind in kinds]
        outs = [_TURN_OF["stacked"]] * len(piece.makes)

        # one device stands for several trainers; each is a turn of its own if they need nothing of
        # each other
        on_device = on_one_device(piece.fn, [(TURN, each)], ins, outs, in_turn=not communicates)
        over_devices = [
            AxisSharding().cut_along(0, AXIS) if kind else AxisSharding() for kind in kinds
        ]
        stacked = [AxisSharding().cut_along(0, AXIS)] * len(outs)
        return jax.jit(on_mesh(on_device, self.mesh, over_devices, stacked))

    def _merger(
        self, batch: Sequence[Any], merges: Mapping[str, Merge] | None
    ) -> Callable[[list[Any]], list[Any]] | None:
        """What makes one result of each that several trainers have."""
        params = set(self.param_names)
        self.result_names = [n for n in self.outs if n not in params]
        stacked = [n for n in self.result_names if self.is_stacked(self.outs[n])]
        if merges is not None:
            return _merging([self._merge_of(n, merges[n]) for n in self.result_names])
        if not stacked:
            return None
        local = {n: self.outs[n].aval for n in stacked}
        whole: Mapping[str, Any] = local
        if any(t.ndim for t in local.values()):
            main = self.plan.main
            state = [main.inputs[n] for n in (*main.args[0].names, *main.args[1].names)]
            whole = main.specialize_flat([*state, *batch]).outputs
        how: list[Merge | None] = []
        for n in self.result_names:
            if n not in local:
                how.append(None)
            elif whole[n].shape != local[n].shape:
                if whole[n].shape != (self.plan.trainers * local[n].shape[0], *local[n].shape[1:]):
                    raise BatchError(
                        f"{n} is {list(local[n].shape)} on a trainer and {list(whole[n].shape)} on "
                        "one device: "
                        "it cannot be merged; results may grow with the batch on dim 0 only"
                    )
                how.append(Merge("concat"))
            else:
                how.append(Merge("mean") if jnp.issubdtype(local[n].dtype, jnp.inexact) else None)

        return _merging(how)

    def _merge_of(self, name: str, merge: Merge) -> Merge | None:
        """Return the merge of a result by where it lies: stacked, as rows of the batch, or one for
        all trainers."""
        atom = self.outs[name]
        kind = self.kinds.get(atom) if isinstance(atom, Var) else None
        if kind == "split":
            return dataclasses.replace(merge, way="joined")
        return merge if kind == "stacked" else None

    def results(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """What the step returns beside its state, merged, in the structure it had."""
        found = [values[n] for n in self.result_names]
        if self.merge is not None:
            found = self.merge(found)
        merged = dict(zip(self.result_names, found, strict=True))
        return result_of(self.rest, [merged[n] for n in self.rest.names])


def _merging(how: Sequence[Merge | None]) -> Callable[[list[Any]], list[Any]]:
    """What makes one of the results of several trainers, each in its way; None leaves a result as
    it is."""
    return jax.jit(
        lambda values: [x if way is None else way(x) for x, way in zip(values, how, strict=True)]
    )
