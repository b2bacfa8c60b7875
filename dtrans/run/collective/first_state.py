"""First state of a collective job, computed by its startup program.

If the plan slices the state, the startup program is compiled with sharded outputs. Each device
computes its slice, without storing the full leaf. An initialiser that XLA cannot partition, such as
an orthogonal matrix or a permutation, still needs the memory of a full leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import ClosedJaxpr, Literal, closed, jaxpr_as_fun
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.ir.program import Program
from dtrans.run.base.batch import on_one_device
from dtrans.run.base.state import with_padding
from dtrans.run.collective.state_arrays import state_sharding
from dtrans.run.collective.trainers import Trainers


class FirstState:
    """Startup program of a job: computes the first parameters and optimizer state on the devices.

    Args:
      plan: the plan of the job.
      trainers: the backend, which places arrays and runs the program of each trainer.
      donate: True if the first step may reuse the memory of the arrays.
    """

    def __init__(self, plan: CollectivePlan, trainers: Trainers, *, donate: bool) -> None:
        self._plan, self._trainers, self._donate = plan, trainers, donate
        owned = plan.owned
        self.program: Program = plan.startup if owned is None else owned.startup(plan.startup)

    def arrays(self, *args: Any) -> dict[str, Any]:
        """Compute the first state from the arguments of init; return arrays on devices, by name."""
        flat = self.program.flatten(*args)
        compute = self._compute_slices if self._plan.slices_by_axis else self._compute_replicas
        found = compute(flat)
        state = dict(zip(self.program.out_names, found, strict=True))
        extra = {n: jnp.asarray(x) for n, x in self._plan.extra_state.items()}
        if extra:
            state |= zip(extra, self._trainers.replicate([*extra.values()]), strict=True)
        return state

    def _compute_replicas(self, args: Sequence[Any]) -> Sequence[Any]:
        trainers = self._trainers
        args = [on_one_device(x) for x in args]
        if trainers.mesh is not None:
            args = jax.device_put(args, trainers.mesh.local_devices[0])
        outputs = self.program.compiled(*args)
        # copy an array that init returns twice, because an array can be donated only once
        if self._donate:
            outputs = list(map(jnp.copy, outputs))
        return trainers.replicate(outputs)

    def _compute_slices(self, args: Sequence[Any]) -> Sequence[Any]:
        self._trainers.check_start(self._opened)
        outputs = self.compiled(*self._trainers.replicate([*self.program.jaxpr.consts, *args]))
        # jit returns no new array for an output that is an input, or equal to another output. An
        # array can be donated only once, so copy such an output.
        inner = self._opened.jaxpr
        seen = {id(v) for v in inner.invars}
        found = []
        for v, x in zip(inner.outvars, outputs, strict=True):
            if isinstance(v, Literal) or id(v) in seen:
                x = jnp.copy(x)
            found.append(x)
            seen.add(id(v))
        return found

    @cached_property
    def _opened(self) -> ClosedJaxpr:
        """Startup program with constants as inputs, so that trainer 0 can send its own constants.

        All trainers then compute with the same constants.
        """
        inner = self.program.inner
        return closed([], [], [*inner.constvars, *inner.invars], inner.outvars, inner.eqns, inner)

    @cached_property
    def compiled(self) -> Any:
        """Compiled startup program, in which each device computes only its slices of the state.

        Its arguments are the program's constants, and then the arrays of init's arguments.
        """
        names, run = self.program.out_names, jaxpr_as_fun(self._opened)
        plan, trainers = self._plan, self._trainers

        def start(*args: Any) -> list[Any]:
            found = []
            for n, x in zip(names, run(*args), strict=True):
                found.append(with_padding(x, plan.slices_by_axis.get(n, {})))
            return found

        if trainers.mesh is None:
            return jax.jit(start)
        places = []
        for n in names:
            places.append(trainers.state_sharding(state_sharding(plan, n)))
        return jax.jit(start, out_shardings=places)
