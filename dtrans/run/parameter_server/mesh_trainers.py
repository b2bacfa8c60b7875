"""Trainer program of a parameter-server job on a mesh, compiled for all trainers together.

A value of the program has one of three layouts. A *replicated* value is the same on all trainers. A
*stacked* value is a global array with one row for each trainer, sharded over the trainers' mesh. A
*split* value is a batch array with rows (dimension 0) that are sharded over the trainers.

The program is divided into pieces at its communication with servers. Each piece becomes one
`jit(shard_map)`. A device with several trainers runs the trainers in turn. Exchanges of values in
the middle of a step are collectives over the mesh axis. They combine values in the same order as a
server: the order of the trainers.

With batch="exact", the plan defines how results of trainers are merged. Otherwise, the job
concatenates a result that grows with the batch, and averages any other floating-point result, such
as the loss. Results of other types get a leading axis with one row for each trainer.
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
from dtrans.batch.exact_step import ExactStep
from dtrans.errors import BatchError
from dtrans.ir.array_fns import array_type
from dtrans.ir.program import Program
from dtrans.ir.pytree import all_names, result_of, without
from dtrans.ir.selection import values_at
from dtrans.ops import exchange_p, exchanged, prefetch_p, split_ids_p, trainer_index_p
from dtrans.parameter_server.plan import PServerPlan
from dtrans.run.base.batch import Share, part_types
from dtrans.run.base.lowered import call_recorded
from dtrans.run.base.merge import Merge
from dtrans.run.base.segments import COMPUTED, Compute, Rules, divide_program
from dtrans.run.base.spmd import AxisSharding, on_mesh, on_one_device
from dtrans.run.parameter_server.device_mesh import simulated_pieces


AXIS = "trainers"  # mesh axis of the devices
TURN = "turn"  # axis over the trainers of one device, which run in turn


def _all_gather(x: jax.Array) -> list[jax.Array]:
    """Return the values that `x` has on all trainers, in the order of the trainers."""
    parts = jax.lax.all_gather(jax.lax.all_gather(x, TURN), AXIS)
    return list(parts.reshape(-1, *x.shape))


def _index() -> jax.Array:
    """Return the id of the trainer that runs this code, from its position on the mesh axes."""
    return jax.lax.axis_index(AXIS) * jax.lax.axis_size(TURN) + jax.lax.axis_index(TURN)


def _slice_of_trainer(x: jax.Array, axis: int) -> jax.Array:
    size = x.shape[axis] // (jax.lax.axis_size(AXIS) * jax.lax.axis_size(TURN))
    return jax.lax.dynamic_slice_in_dim(x, _index() * size, size, axis)


def _exchange(*parts: Any, how: Sequence[tuple[Any, ...]], **_: Any) -> list[Any]:
    results = []
    for way, x in zip(how, parts, strict=True):
        results.append(exchanged(way, _all_gather(x), _slice_of_trainer))
    return results


# Primitives whose outputs differ between trainers if the trainers' row ids differ
OF_ROWS = frozenset({split_ids_p, prefetch_p})

# Sharding of a value over the trainers of one device, by the value's layout; None: replicated
_TURN_OF = {
    None: AxisSharding(),
    "split": AxisSharding().sharded_along(0, TURN),
    "stacked": AxisSharding(stacked=(TURN,)),
}

AMONG_TRAINERS: Rules = {exchange_p: _exchange, trainer_index_p: lambda *, over: [_index()]}


def shared_program(
    plan: PServerPlan, arrays: Sequence[tuple[Any, Share]]
) -> tuple[Program, Mapping[str, Merge] | None]:
    """Return a trainer's program for the shapes of a batch, and merge rules of its results.

    Args:
      plan: the job's plan.
      arrays: the arrays of the full batch, each with its split over trainers. With batch="exact",
        the number of rows need not be divisible by the number of trainers.

    Returns:
      The program, and a map from each result's name to its merge rule. The map is None if the plan
      does not define merge rules.
    """
    main, shared = plan.main, plan.shared
    is_uneven = lambda x, share: isinstance(share, int) and x.shape[share] % plan.trainers
    if shared is not None and any(is_uneven(x, share) for x, share in arrays):
        inputs = values_at(main.inputs, all_names(main.args[:2]))
        inputs += [x for x, _ in arrays]
        types = list(map(array_type, inputs))
        shared, program = plan.for_uneven_batch(types, 0)
        full = main.specialize_flat(types).outputs
        rows = {n: full[n].shape[axis] for n, axis in shared.joined.items()}
        return program, _merges(shared, rows)
    state = values_at(plan.trainer.inputs, plan.trainer_specs[0].names)
    program = plan.trainer.specialize_flat([*state, *part_types(arrays, plan.trainers)])
    return program, None if shared is None else _merges(shared, {})


def _merges(shared: ExactStep, rows: Mapping[str, int]) -> dict[str, Merge]:
    """Return the rule that merges each result over the trainers, by name.

    Args:
      shared: the split of the batch with which trainers compute the results of one device.
      rows: if the batch is padded, the number of rows without padding of each concatenated result,
        by name; otherwise empty.
    """
    merges = {}
    for n, way in shared.merges.items():
        merges[n] = Merge(way, shared.joined.get(n, 0), rows.get(n))
    return merges


class MeshTrainerPrograms:
    """Trainer program for one shape of batches, compiled for all trainers of a mesh.

    Args:
      program: the program of trainer 0, for its part of the batch.
      batch: the arrays of the full batch, each with its split over trainers
        (`dtrans.run.base.batch.Share`). Only their shapes and dtypes are read.
      mesh: the trainers' devices, on one axis.
      plan: the program's plan.
      local: names of parameters and rounding errors that differ between trainers.
      merges: the rule that merges each result, by name; None if the plan does not define merge
        rules.

    Attributes:
      program: the program of a trainer, or of one of its devices.
      pieces: the program, divided at its communication equations.
      kinds: layout of each variable that differs between trainers: "stacked" (one row for each
        trainer) or "split" (rows of the batch).
      outs: maps each output's name to its variable.
      rest: the structure of the step's outputs without the parameters.
      result_names: names of the outputs that are not parameters.

    Raises:
      BatchError: a result cannot be merged.
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
        self.mesh = mesh
        self.plan = plan
        rules = {**COMPUTED, **AMONG_TRAINERS}
        if plan.devices is None:
            self.pieces = divide_program(program, computed=rules)
        else:
            self.pieces = simulated_pieces(plan.devices, program, rules)
        self.program = program = self.pieces.program
        (spec,) = plan.trainer_specs
        self.param_names = spec.names
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
            outs: Sequence[Var]
            if isinstance(step, Compute):
                outs, differs = step.makes, self._differs(step)
            else:
                outs, differs = step.eqn.outvars, step.eqn.primitive in OF_ROWS
                differs &= any(self._kind(a) is not None for a in step.eqn.invars)
            if differs:
                self.kinds |= dict.fromkeys(outs, "stacked")
        self.outs = program.outvars
        self.steps = [s for s in self.pieces.steps if isinstance(s, Compute)]
        self.compiled = {s: self._compile(s) for s in self.steps}
        self.rest = without(program.out, spec)
        self.merge = self._merger([x for x, _ in batch], merges)

    def is_stacked(self, atom: Any) -> bool:
        """Return True if a value is stored as a global array with one row for each trainer."""
        return self._kind(atom) == "stacked"

    def on_host(self, atoms: Sequence[Any], values: Sequence[Any]) -> list[list[np.ndarray]]:
        """Return each value as a list with the value of each trainer, copied to the host.

        Code that handles table rows runs on the host. Traced values are not copied.

        Args:
          atoms: the variables or literals of the program, which determine the layouts.
          values: their values on the mesh.
        """
        on_host = [x if is_traced(x) else np.asarray(x) for x in values]
        return [self._of_trainers(a, x) for a, x in zip(atoms, on_host, strict=True)]

    def _of_trainers(self, atom: Any, x: Any) -> list[Any]:
        trainers, kind = self.plan.trainers, self._kind(atom)
        if kind is None:
            return [x] * trainers
        return list(x if kind == "stacked" else x.reshape(trainers, -1, *x.shape[1:]))

    def _kind(self, atom: Any) -> str | None:
        """Return a value's layout: "stacked" (a row per trainer), "split" (batch rows), or None.

        None means that the value is the same on all trainers.
        """
        return self.kinds.get(atom) if isinstance(atom, Var) else None

    def _differs(self, piece: Compute) -> bool:
        """Return True if trainers compute different outputs in a piece of the program."""
        return any(v in self.kinds for v in piece.reads) or _communicates(piece)

    def compute(self, piece: Compute, values: Sequence[Any]) -> Sequence[Any]:
        """Run one compiled piece of the program for all trainers; return its outputs."""
        name = lambda: f"trainers {self.steps.index(piece)}"
        outs: Sequence[Any] = call_recorded(name, self.compiled[piece], *values)
        return outs

    def _compile(self, piece: Compute) -> Callable[..., Sequence[Any]]:
        if not self._differs(piece):
            return piece.jitted
        each = self.plan.trainers // self.mesh.size
        kinds = [self.kinds.get(v) for v in piece.reads]
        ins = values_at(_TURN_OF, kinds)
        outs = [_TURN_OF["stacked"]] * len(piece.makes)

        # The trainers of one device run in turn. If the piece contains communication, each trainer
        # needs values of other trainers, so all of them run under vmap.
        in_turn = not _communicates(piece)
        on_device = on_one_device(piece.fn, [(TURN, each)], ins, outs, in_turn=in_turn)
        divided, full = AxisSharding().sharded_along(0, AXIS), AxisSharding()
        over_devices = [divided if kind else full for kind in kinds]
        return jax.jit(on_mesh(on_device, self.mesh, over_devices, [divided] * len(outs)))

    def _merger(
        self, batch: Sequence[Any], merges: Mapping[str, Merge] | None
    ) -> Callable[[list[Any]], list[Any]] | None:
        """Return a function that merges the results of all trainers; None if no result differs.

        Args:
          batch: the arrays of the full batch.
          merges: the plan's merge rules by name; None to infer them from the shapes of results.
        """
        params = set(self.param_names)
        self.result_names = [n for n in self.outs if n not in params]
        if merges is not None:
            return _merge_each([self._merge_of(n, merges[n]) for n in self.result_names])
        local = {n: self.outs[n].aval for n in self.result_names if self.is_stacked(self.outs[n])}
        if not local:
            return None
        full: Mapping[str, Any] = local
        if any(t.ndim for t in local.values()):
            main = self.plan.main
            state = values_at(main.inputs, (*main.args[0].names, *main.args[1].names))
            full = main.specialize_flat([*state, *batch]).outputs
        how = []
        for n in self.result_names:
            how.append(self._infer_merge(n, local[n], full[n]) if n in local else None)
        return _merge_each(how)

    def _infer_merge(self, name: str, local: Any, full: Any) -> Merge | None:
        """Choose a result's merge rule by its shape; return None to keep one row per trainer.

        A result that grows with the batch is concatenated. Another floating-point result is
        averaged.

        Args:
          name: name of the result.
          local: shape and dtype of the result on one trainer.
          full: shape and dtype of the result on one device with the full batch.

        Raises:
          BatchError: the result grows with the batch, but not on dimension 0.
        """
        if full.shape == local.shape:
            return Merge("mean") if jnp.issubdtype(local.dtype, jnp.inexact) else None
        if full.shape != (self.plan.trainers * local.shape[0], *local.shape[1:]):
            raise BatchError(
                f"{name} has shape {list(local.shape)} on a trainer and {list(full.shape)} on one "
                "device, so it cannot be merged; results may grow with the batch only on dim 0"
            )
        return Merge("concat")

    def _merge_of(self, name: str, merge: Merge) -> Merge | None:
        """Adapt a merge rule to a result's layout on the mesh; return None if no merge is needed.

        A result that is sharded like a batch is already one array with the rows of all trainers. A
        result that is equal on all trainers needs no merge.
        """
        kind = self._kind(self.outs[name])
        if kind == "split":
            return dataclasses.replace(merge, way="joined")
        return merge if kind == "stacked" else None

    def results(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Merge the results of a step over trainers, and return them as the step does.

        Args:
          values: the program's outputs without the state, by name.
        """
        found = values_at(values, self.result_names)
        if self.merge is not None:
            found = self.merge(found)
        merged = dict(zip(self.result_names, found, strict=True))
        return result_of(self.rest, values_at(merged, self.rest.names))


def _communicates(piece: Compute) -> bool:
    """Return True if a piece of the program communicates, or reads the trainer's id."""
    return not AMONG_TRAINERS.keys().isdisjoint(piece.rules)


def _merge_each(how: Sequence[Merge | None]) -> Callable[[list[Any]], list[Any]]:
    """Return a compiled function that merges each result by its rule; None keeps a result."""

    @jax.jit
    def merge(values: list[Any]) -> list[Any]:
        return [x if way is None else way(x) for x, way in zip(values, how, strict=True)]

    return merge
