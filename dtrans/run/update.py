"""What one server does with gradients: its optimize blocks, as one function to compile.

The blocks of `listen_and_serv` read and write values by name. A server's whole update is compiled at once:
the lr_sched block feeds the others, which are independent, and XLA sees all of them. Leaves stay separate
arrays: on CPU, one flat vector costs more to assemble than the optimizer costs to run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import JaxprEqn, evaluate
from dtrans.errors import ConfigError
from dtrans.ops import OptimizeBlock, listen_and_serv_p
from dtrans.program import LR_SCHED, Program


@dataclasses.dataclass(frozen=True, eq=False)
class ServerUpdate:
    """The update of one server.

    Attributes:
      eqn: its `listen_and_serv`.
    """

    eqn: JaxprEqn

    @classmethod
    def of(cls, program: Program) -> ServerUpdate:
        """The update in a pserver program. Raises ConfigError for any other program."""
        for eqn in program.jaxpr.jaxpr.eqns:
            if eqn.primitive is listen_and_serv_p:
                return cls(eqn)
        raise ConfigError(f"program {program.name} is not a pserver program: it has no listen_and_serv")

    @property
    def blocks(self) -> Sequence[OptimizeBlock]:
        """The optimize blocks, the lr_sched block first if there is one."""
        return self.eqn.params["optimize_blocks"]

    @cached_property
    def types(self) -> dict[str, Any]:
        """Name to type, of the state."""
        return {n: a.aval for n, a in zip(self.eqn.params["state_names"], self.eqn.invars, strict=True)}

    @cached_property
    def grad_types(self) -> dict[str, Any]:
        """Name to type, of the gradients of all trainers."""
        found: dict[str, Any] = {}
        made = {n for b in self.blocks for n in b.out_names}
        for b in self.blocks:
            for name, var in zip(b.in_names, b.jaxpr.jaxpr.invars, strict=True):
                if name not in self.types and name not in made:
                    found[name] = var.aval
        return found

    @cached_property
    def params(self) -> tuple[str, ...]:
        """The parameter blocks, which trainers ask for; everything else in the state is the server's own."""
        return tuple(self.eqn.params["param_names"])

    def __call__(self, grads: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        """The new state. Pure; values are arrays by name."""
        values = {**state, **grads}
        new = dict(state)
        for block in self.blocks:
            outs = evaluate(block.jaxpr, *(values[n] for n in block.in_names))
            made = dict(zip(block.out_names, outs, strict=True))
            if block.role == LR_SCHED:
                # its state is read by no other block under its own name: they see the values it made
                values |= {n: x for n, x in made.items() if n not in self.types}
            new |= {n: x for n, x in made.items() if n in self.types}
        return new


class CompiledUpdate:
    """A server's update, jitted, with the optimizer state donated.

    Parameters are never donated: trainers, sockets and users may still look at them.

    Args:
      update: of the server.
      donate: reuse the memory of the optimizer state for the new one.
      prepare: what makes gradients by name of what a call is given; inside the compiled function.
    """

    def __init__(
        self, update: ServerUpdate, *, donate: bool = True, prepare: Callable[[Any], Mapping[str, Any]] = dict
    ) -> None:
        self.update = update
        self._prepare = prepare
        self._jitted = jax.jit(self._step, donate_argnums=2 if donate else ())

    def __call__(self, grads: Any, state: Mapping[str, Any]) -> dict[str, Any]:
        """The new state. That of before keeps its parameters, and with donation loses the rest."""
        if not state:
            return {}
        own = set(self.update.params)
        params = {n: x for n, x in state.items() if n in own}
        rest = {n: x for n, x in state.items() if n not in own}
        params, rest = self._jitted(grads, params, rest)
        return {**params, **rest}

    def _step(self, grads: Any, params: dict[str, Any], rest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        new = self.update(self._prepare(grads), {**params, **rest})
        return {n: new[n] for n in params}, {n: new[n] for n in rest}


def own_buffers(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state whose arrays share no memory with each other, nor with what they were made from, as donation needs."""
    return {n: jnp.copy(x) for n, x in state.items()}
