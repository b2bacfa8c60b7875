"""First state of a collective job, from its startup program.

If anything is sliced, the program is compiled for slices: each device computes its part, and none
holds a whole leaf. Some initialisers need one nevertheless: an orthogonal matrix, a permutation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import ClosedJaxpr, Literal, closed, jaxpr_as_fun
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.ir.array_fns import padded_to
from dtrans.ir.program import Program
from dtrans.run.base.batch import on_one_device
from dtrans.run.collective.trainers import Trainers


class FirstState:
    """The compiled startup program of a job.

    Args:
      plan: the plan.
      trainers: the backend.
      donate: True if the first step may reuse the memory of the arrays.
    """

    def __init__(self, plan: CollectivePlan, trainers: Trainers, *, donate: bool) -> None:
        self._plan, self._trainers, self._donate = plan, trainers, donate
        owned = plan.owned
        self.program: Program = plan.startup if owned is None else owned.startup(plan.startup)

    def arrays(self, *args: Any) -> dict[str, Any]:
        """Return the arrays of the state by name, placed, from the arguments of init."""
        flat = self.program.flatten(*args)
        found = self._sliced(flat) if self._plan.cuts else self._replicated(flat)
        made = dict(zip(self.program.out_names, found, strict=True))
        extra = {n: jnp.asarray(x) for n, x in self._plan.extra_state.items()}
        if extra:
            made |= zip(extra, self._trainers.everywhere([*extra.values()]), strict=True)
        return made

    def _replicated(self, args: Sequence[Any]) -> Sequence[Any]:
        trainers = self._trainers
        args = [on_one_device(x) for x in args]
        if trainers.mesh is not None:
            args = jax.device_put(args, trainers.mesh.local_devices[0])
        made = self.program.compiled(*args)
        # copies: a state may be donated, and init may return one array twice
        return trainers.everywhere([jnp.copy(x) for x in made] if self._donate else made)

    def _sliced(self, args: Sequence[Any]) -> Sequence[Any]:
        self._trainers.check_start(self._opened)
        made = self.compiled(*self._trainers.everywhere([*self.program.jaxpr.consts, *args]))
        # an output that is an input, or another output, is the same array: a copy may be donated
        inner = self._opened.jaxpr
        seen = {id(v) for v in inner.invars}
        found = []
        for v, x in zip(inner.outvars, made, strict=True):
            found.append(jnp.copy(x) if isinstance(v, Literal) or id(v) in seen else x)
            seen.add(id(v))
        return found

    @cached_property
    def _opened(self) -> ClosedJaxpr:
        """The startup program with its constants as first inputs: all processes take those of rank
        0."""
        inner = self.program.inner
        return closed([], [], [*inner.constvars, *inner.invars], inner.outvars, inner.eqns, inner)

    @cached_property
    def compiled(self) -> Any:
        """The jitted program: flat arrays, constants first -> padded arrays, on the trainers."""
        names, run = self.program.out_names, jaxpr_as_fun(self._opened)
        cuts, trainers = self._plan.cuts, self._trainers
        axes = [cuts[n].axis if n in cuts else None for n in names]

        def start(*args: Any) -> list[Any]:
            found = []
            for n, x in zip(names, run(*args), strict=True):
                found.append(padded_to(x, cuts[n].axis, cuts[n].padded) if n in cuts else x)
            return found

        places = None if trainers.mesh is None else [trainers.at(axis) for axis in axes]
        return jax.jit(start, out_shardings=places)
