"""A trainer program, compiled for all trainers of a mesh at once.

A value of several trainers is *stacked*: a global array with a leading axis, sharded over the trainer mesh. One
that is the same for all trainers is *replicated*; the batch comes *split* on dim 0. Each piece of the program
becomes one `jit(shard_map)`; a device that stands for several trainers takes them in turn.

Results of several trainers are merged: one that grows with the batch is concatenated, any other
floating-point result (the loss) is averaged, and any other gets a leading axis, one row per trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

from dtrans._jax import Var
from dtrans.errors import BatchError
from dtrans.ir.program import Program
from dtrans.ir.pytree import result_of, without
from dtrans.parameter_server.plan import PServerPlan
from dtrans.run.base.batch import Share
from dtrans.run.base.lowered import called
from dtrans.run.base.segments import COMPUTED, Compute, cut_program


AXIS = "trainers"


class MeshTrainerPrograms:
    """A trainer program for one batch shape, compiled for all trainers of a mesh.

    Args:
      program: of trainer 0, for a trainer's part of the batch.
      batch: the arrays of the global batch, and how trainers share each: `split`, `replicated`, or `key` (each
        has its own); only types are looked at.
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
    ) -> None:
        self.program = program
        self.mesh = mesh
        self.plan = plan
        self.pieces = cut_program(program, computed=COMPUTED)
        self.param_names = plan.main.args[0].names
        inner = program.inner
        count = len(self.param_names)
        self.kinds: dict[Var, str] = {}
        for name, var in zip(self.param_names, inner.invars, strict=False):
            if name in local:
                self.kinds[var] = "stacked"
        for (_, share), var in zip(batch, inner.invars[count:], strict=True):
            if share != "replicated":
                self.kinds[var] = "split" if isinstance(share, int) else "stacked"
        for step in self.pieces.steps:
            reads = step.reads if isinstance(step, Compute) else ()
            if any(v in self.kinds for v in reads):
                assert isinstance(step, Compute)
                self.kinds |= dict.fromkeys(step.makes, "stacked")
        self.outs = program.outvars
        self.steps = [s for s in self.pieces.steps if isinstance(s, Compute)]
        self.compiled = {s: self._compile(s) for s in self.steps}
        self.rest = without(program.out, plan.main.args[0])
        self.merge = self._merger([x for x, _ in batch])

    def is_stacked(self, atom: Any) -> bool:
        """Whether each trainer has a value of its own."""
        return isinstance(atom, Var) and self.kinds.get(atom) == "stacked"

    def compute(self, piece: Compute, values: Sequence[Any]) -> Sequence[Any]:
        """Run one piece for all trainers."""
        made: Sequence[Any] = called(lambda: f"trainers {self.steps.index(piece)}", self.compiled[piece], *values)
        return made

    def _compile(self, piece: Compute) -> Callable[..., Sequence[Any]]:
        kinds = [self.kinds.get(v) for v in piece.reads]
        if not any(kinds):
            return piece.jitted
        each = self.plan.trainers // self.mesh.size

        def on_device(*values: Any) -> list[Any]:
            # the values of the trainers of one device, with a leading axis, beside what all share
            own = [
                x.reshape(each, -1, *x.shape[1:]) if k == "split" else x
                for k, x in zip(kinds, values, strict=True)
                if k
            ]

            def one(mine: Sequence[Any]) -> list[Any]:
                it = iter(mine)
                return list(piece.fn(*(next(it) if k else x for k, x in zip(kinds, values, strict=True))))

            if each == 1:
                return [x[None] for x in one([x[0] for x in own])]
            return jax.lax.map(one, own)

        specs = tuple(P(AXIS) if k else P() for k in kinds)
        # check_vma: the equations were traced without varying types, and replay only without the check
        return jax.jit(jax.shard_map(on_device, mesh=self.mesh, in_specs=specs, out_specs=P(AXIS), check_vma=False))

    def _merger(self, batch: Sequence[Any]) -> Callable[[list[Any]], list[Any]] | None:
        """What makes one result of each that several trainers have."""
        params = set(self.param_names)
        self.result_names = [n for n in self.outs if n not in params]
        stacked = [n for n in self.result_names if self.is_stacked(self.outs[n])]
        if not stacked:
            return None
        if self.plan.shared is not None:
            ways = [self.plan.shared.merges[n] if n in stacked else None for n in self.result_names]
            return _merging(ways)
        local = {n: self.outs[n].aval for n in stacked}
        whole: Mapping[str, Any] = local
        if any(t.ndim for t in local.values()):
            main = self.plan.main
            state = [main.inputs[n] for n in (*main.args[0].names, *main.args[1].names)]
            whole = main.specialize_flat([*state, *batch]).outputs
        how: list[str | None] = []
        for n in self.result_names:
            if n not in local:
                how.append(None)
            elif whole[n].shape != local[n].shape:
                if whole[n].shape != (self.plan.trainers * local[n].shape[0], *local[n].shape[1:]):
                    raise BatchError(
                        f"{n} is {list(local[n].shape)} on a trainer and {list(whole[n].shape)} on one device: "
                        "it cannot be merged; results may grow with the batch on dim 0 only"
                    )
                how.append("concat")
            else:
                how.append("mean" if jnp.issubdtype(local[n].dtype, jnp.inexact) else None)

        return _merging(how)

    def results(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """What the step returns beside its state, merged, in the structure it had."""
        found = [values[n] for n in self.result_names]
        if self.merge is not None:
            found = self.merge(found)
        merged = dict(zip(self.result_names, found, strict=True))
        return result_of(self.rest, [merged[n] for n in self.rest.names])


def _merging(how: Sequence[str | None]) -> Callable[[list[Any]], list[Any]]:
    """What makes one of the results of several trainers, each in its way; None leaves a result as it is."""
    ways: Mapping[str | None, Callable[[Any], Any]] = {
        "mean": lambda x: jnp.mean(x, 0),
        "sum": lambda x: jnp.sum(x, 0, dtype=x.dtype),
        "same": lambda x: x[0],
        "concat": lambda x: x.reshape(-1, *x.shape[2:]),
        None: lambda x: x,
    }
    return jax.jit(lambda values: [ways[way](x) for x, way in zip(values, how, strict=True)])
