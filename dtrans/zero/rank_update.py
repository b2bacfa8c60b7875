"""Writer of the equations of a rank's program that follow the reductions of gradients.

These equations divide gradients by the loss scale, update slices, gather parameters, and compute
results such as a gradient norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from dtrans._jax import Atom
from dtrans.engine.layout import Sliced
from dtrans.ir.array_fns import rows_from, times, together
from dtrans.ir.builder import Builder
from dtrans.ir.program import DIST, OPTIMIZE
from dtrans.ir.selection import values_at
from dtrans.ops import all_gather_p, all_reduce_p, trainer_index_p
from dtrans.step.halves import DividedStep, Gradient, Name
from dtrans.zero.forward_values import differing_values
from dtrans.zero.gradient_results import GradientResults
from dtrans.zero.mixed_precision import GOOD, SCALE, SKIPPED, all_finite, next_scale, unscale
from dtrans.zero.rank_layout import RankLayout
from dtrans.zero.update import slice_half


class RankUpdate:
    """Writer of the equations of a rank's program that follow the reductions of gradients.

    Args:
      b: the builder to write with.
      step: the step, divided into its gradient computation and its update.
      layout: the arrays that ranks slice, and the reduction of each gradient.
      local: the inputs of the rank's program, and values of the forward pass that the update reads,
        by name.
      scale: the scale of the loss; None if the loss is not scaled.
    """

    def __init__(
        self,
        b: Builder,
        step: DividedStep,
        layout: RankLayout,
        local: Mapping[str, Atom],
        scale: Atom | None,
    ) -> None:
        self.b, self.step, self.layout = b, step, layout
        self.local, self.scale = local, scale
        self.options = layout.options
        self.leaves = layout.slices.leaves
        self._index: Atom | None = None  # the index of the rank in its group

    # -- the update ------------------------------------------------------------------------------

    def update(self, means: Mapping[str, Atom]) -> dict[str, Atom]:
        """Write the optimizer's update of this rank's slices.

        If ranks store full parameters between steps, the new slices are then gathered.

        Args:
          means: the reduced gradients by parameter.

        Returns:
          The new parameters and optimizer state by name.
        """
        b, half = self.b, self.layout.half
        b.role = OPTIMIZE
        inputs: list[Atom] = []
        for n in half.in_names:
            if isinstance(n, Gradient):
                inputs.append(means[n.leaf])
            elif n in self.leaves:
                inputs.append(self._slice_of(n))
            else:
                inputs.append(self.local[n])
        found = dict(zip(half.out_names, b.inline(half.jaxpr, *inputs), strict=True))
        if not self.options.slices_params:
            found |= self._gather({n: found[n] for n in self.leaves if n in found})
        return found

    def _slice_of(self, leaf: str) -> Atom:
        """Return this rank's slice of a parameter, cut from the full parameter if necessary."""
        s, options, b = self.leaves[leaf], self.options, self.b
        if options.slices_params:
            return self.local[leaf]
        if self._index is None:
            (self._index,) = b.bind(trainer_index_p, over=(options.axis_name,))
        (start,) = b.call(times(s.part), self._index)
        return b.call(rows_from(s.axis, s.part, s.padded), self.local[leaf], start)[0]

    def _gather(self, slices: Mapping[str, Atom]) -> dict[str, Atom]:
        """Write all-gathers that combine slices to full arrays, and return these arrays by name."""
        b, options = self.b, self.options
        b.role = DIST
        found: dict[str, Atom] = {}
        previous: Sequence[Atom] = ()
        for i, bucket in enumerate(self._gather_buckets(slices)):
            sent: Sequence[Atom] = values_at(slices, bucket)
            if previous and not options.slices.overlap:
                sent = b.call(together, *sent, *previous)[: len(sent)]
            gathered = b.bind(
                all_gather_p,
                *sent,
                name=f"params/{i}",
                over=(options.axis_name,),
                size=options.degree,
                axis=self.leaves[bucket[0]].axis,
            )
            for n, x in zip(bucket, gathered, strict=True):
                s = self.leaves[n]
                b.labels[x] = f"{n}.gathered"
                found[n] = b.trim(x, s.axis, s.size)
            previous = gathered
        return found

    def _gather_buckets(self, slices: Mapping[str, Atom]) -> list[list[str]]:
        """Divide parameters into lists of limited size; each list is gathered by one all-gather.

        All parameters of a list have the same pipeline stage, dtype and sliced dimension.
        """
        limit = self.options.reduce.bucket_MB * 2**20
        groups = self.layout.groups
        kind = lambda n: (groups.get(n, 0), str(slices[n].aval.dtype), self.leaves[n].axis)
        found: list[list[str]] = []
        size = 0.0
        for n in sorted(slices, key=kind):
            t = slices[n].aval
            nbytes = t.size * t.dtype.itemsize * self.leaves[n].degree
            if not found or kind(found[-1][0]) != kind(n) or size + nbytes > limit:
                found.append([])
                size = 0.0
            found[-1].append(n)
            size += nbytes
        return found

    # -- results of gradients --------------------------------------------------------------------

    def gradient_results(self, means: Mapping[str, Atom]) -> dict[str, Atom]:
        """Write the results that the step computes from gradients, such as a gradient norm.

        The equations run on slices, and gather an array only if an equation needs the full array.

        Args:
          means: the reduced gradients by parameter.

        Returns:
          The results by name.
        """
        step, b, options = self.step, self.b, self.options
        if not step.from_gradients:
            return {}
        if self.layout.owned is not None:
            means = self.layout.owned.gather_gradients(b, means, options)
        computed = set(b.invars)
        for eqn in b.eqns:
            computed.update(eqn.outvars)
        results = GradientResults(step, self.leaves, computed, differing_values(step, options))
        slices: dict[Name, Sliced] = {}
        for leaf, sliced in self.leaves.items():
            if leaf not in results.mixed:
                slices[Gradient(leaf)] = sliced
                if options.slices_params:
                    slices[leaf] = sliced
        half, _ = slice_half(results.half, slices, options.degree, options.axis_name)

        # gather the leaves that results combine with rows of the batch
        full_grads = self._gather({n: means[n] for n in results.mixed if n in half.graded})
        params = {n: self.local[n] for n in results.mixed if n in half.in_names}
        if options.slices_params:
            params = self._gather(params)
        b.role = OPTIMIZE
        inputs: list[Atom] = []
        for n in half.in_names:
            if isinstance(n, Gradient):
                inputs.append(full_grads.get(n.leaf, means[n.leaf]))
            elif n in results.others:
                inputs.append(results.others[n])
            else:
                inputs.append(params.get(n, self.local[n]))
        return dict(zip(half.out_names, b.inline(half.jaxpr, *inputs), strict=True))

    # -- loss scaling ----------------------------------------------------------------------------

    def unscale_gradients(self, means: Mapping[str, Atom]) -> tuple[dict[str, Atom], Atom | None]:
        """Divide the gradients by the loss scale, and check that they are finite.

        Args:
          means: the reduced gradients by parameter.

        Returns:
          A pair (divided gradients by parameter, finite). `finite` is True if all gradients of all
          ranks are finite. Without a dynamic scale, `finite` is None.
        """
        b, scaling = self.b, self.options.precision.scaling
        if scaling is None or self.scale is None:
            return dict(means), None
        b.role = OPTIMIZE
        unscaled = {n: b.call(unscale, g, self.scale)[0] for n, g in means.items()}
        if not scaling.dynamic:
            return unscaled, None
        (finite,) = b.call(all_finite, *means.values())
        if self.leaves:
            # each rank has checked only its slices
            over = (self.options.axis_name,)
            (finite,) = b.bind(all_reduce_p, finite, op="and", name="finite", owners=(), over=over)
            b.labels[finite] = "finite"
        return unscaled, finite

    def skip_unless(self, finite: Atom, found: Mapping[str, Atom]) -> dict[str, Atom]:
        """Keep the old parameters and state if a gradient is not finite, and adapt the loss scale.

        Args:
          finite: True if all gradients are finite.
          found: the outputs of the step.

        Returns:
          Parameters, state and the state of the scale, by name.
        """
        b, scaling = self.b, self.options.precision.scaling
        assert scaling is not None
        b.role = OPTIMIZE
        selected: dict[str, Atom] = {}
        for spec in self.step.program.args[:2]:
            for n in spec.names:
                if found[n] is not self.local[n]:
                    (selected[n],) = b.call(_select, finite, found[n], self.local[n])
        names = (GOOD, SCALE, SKIPPED)
        state = values_at(self.step.program.invars, names)
        new = b.call(next_scale(scaling), finite, *state)
        return selected | dict(zip(names, new, strict=True))


def _select(finite: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(finite, new, old)
