"""A stage's equations, differentiated: what its forward pass keeps, and the backward pass that
reads it.

`jax.vjp` is taken of the stage by itself, and what its derivative reads of the forward pass (the
*residuals*) is looked at one by one. Inputs of the stage are read again, numbers stand in the
program, what is made of state alone (a weight in another type) is made again. With checkpoints all
is made again but what has a name that was asked for, what was made of random numbers alone (so that
a mask is not drawn twice), what has an effect, and what comes from other replicas.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
    checkpoint_name_of,
    closed_with,
    evaluate,
    opened,
    small_jaxpr,
)
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import backward_slice, propagate
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import is_communication


class StageVjp:
    """The forward and the backward of a stage's equations.

    Attributes:
      forward: (inputs of the step, received) -> (outputs, what is kept).
      backward: (what the derivative reads, cotangents) -> cotangents of `wrt`.
      kept: the outputs of `forward` that are residuals.
    """

    def __init__(
        self,
        prelude: ClosedJaxpr,
        body: ClosedJaxpr,
        reads: Sequence[Var],
        received: Sequence[Var],
        heard: Sequence[Var],
        wrt: Sequence[Var],
        ahead: Sequence[Atom],
        outs: Sequence[Atom],
        in_types: Sequence[Any],
        n_state: int,
        checkpoints: Collection[str] | None,
    ) -> None:
        self.in_types = in_types
        names = [*reads, *heard]
        places: dict[Atom, int] = {
            a: i for i, a in enumerate(opened(body).outvars) if isinstance(a, Var)
        }
        n_step = len(in_types) - len(received)
        structure: list[Any] = []

        def forward(*args: Any) -> list[Any]:
            values = dict(
                zip(
                    [*reads, *received],
                    [*evaluate(prelude, *args[:n_step]), *args[n_step:]],
                    strict=True,
                )
            )

            def function(*of: Any) -> tuple[list[Any], list[Any]]:
                made = evaluate(
                    body, *({**values, **dict(zip(wrt, of, strict=True))}[v] for v in names)
                )
                return [made[places[a]] for a in ahead], made[: len(outs)]

            _, vjp, made = jax.vjp(function, *(values[v] for v in wrt), has_aux=True)
            leaves, tree = jax.tree.flatten(vjp)
            structure.append(tree)
            return [*made, *leaves]

        traced = inline_calls(small_jaxpr(forward, in_types))
        inner = opened(traced)
        count = len(outs)
        leaves = inner.outvars[count:]
        cheap = propagate(inner.eqns, dict.fromkeys(inner.invars[n_state:], 1), {})
        at: set[Atom] = {*inner.invars}
        self._source = traced
        self._residuals: list[Atom] = list(leaves)
        made = [a for a in leaves if isinstance(a, Var) and a not in at]
        # what has an effect is not carried out again
        seen = propagate(inner.eqns, {v: 1 for e in inner.eqns if e.effects for v in e.outvars}, {})
        self._again = {a for a in made if not cheap.get(a) and not seen.get(a)}
        self.kept: list[Var] = list(dict.fromkeys(a for a in made if a not in self._again))
        if checkpoints is not None:
            self.kept = _barriers(inner, self.kept, at, checkpoints)
            self._again = {a for a in made if a not in self.kept}
        outvars = [*inner.outvars[:count], *self.kept]
        live, _ = backward_slice(
            inner.eqns, [*outvars, *(a for e in inner.eqns if e.effects for a in e.invars)]
        )
        live = sorted({*live, *(i for i, e in enumerate(inner.eqns) if e.effects)})
        self.forward = closed_with(traced, outvars=outvars, eqns=[inner.eqns[i] for i in live])
        tree = structure[-1]

        def backward(*args: Any) -> Any:
            return tree.unflatten(args[: len(leaves)])(list(args[len(leaves) :]))

        types = [a.aval for a in leaves] + [a.aval.update(weak_type=False) for a in ahead]
        self.backward = inline_calls(small_jaxpr(backward, types))

    def named(self, outs: Sequence[str], ins: Collection[str]) -> list[str]:
        """The names of what is kept: those of outputs that are the same, others are numbered.

        A parameter that is made anew has the name of what it was before, which an input has
        already.
        """
        of: dict[Atom, str] = {}
        for n, a in zip(outs, opened(self.forward).outvars, strict=False):
            if isinstance(a, Var) and n not in ins:
                of.setdefault(a, n)
        numbers = itertools.count()
        return [of[v] if v in of else f"@residual/{next(numbers)}" for v in self.kept]

    def gives(self, outvars: Sequence[Atom]) -> ClosedJaxpr:
        """Return the forward pass with these outputs."""
        return closed_with(self.forward, outvars=outvars)

    def write_backward(
        self, b: Builder, inputs: Sequence[Atom], saved: Sequence[Atom], cotangents: Sequence[Atom]
    ) -> list[Atom]:
        """Write the backward pass, on the stage's inputs, what was kept, and cotangents."""
        inner = opened(self._source)
        env = dict(zip([*inner.invars, *self.kept], [*inputs, *saved], strict=True))
        again = [inner.eqns[i] for i in backward_slice(inner.eqns, self._again, self.kept)[0]]
        return b.inline(
            self.backward, *b.inline_part(self._source, env, again, self._residuals), *cotangents
        )


def _barriers(
    inner: Jaxpr, wanted: Sequence[Var], given: Collection[Atom], names: Collection[str]
) -> list[Var]:
    """Return the values that must be stored so that `wanted` can be recomputed from `given`.

    These are values that depend on random numbers alone, values of equations with effects, values
    from other replicas, and values with one of `names`.
    """
    made_by = {v: e for e in inner.eqns for v in e.outvars}
    drawn, other = 1, 2
    keys = [v for v in inner.invars if not jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)]
    seeds = {v: drawn for e in inner.eqns if _draws(e) for v in e.outvars}
    of = propagate(inner.eqns, dict.fromkeys(keys, other), seeds)
    found: dict[Var, None] = {}
    seen: set[Atom] = set()
    stack: list[Atom] = list(wanted)
    while stack:
        v = stack.pop()
        if not isinstance(v, Var) or v in seen or v in given or v not in made_by:
            continue
        seen.add(v)
        eqn = made_by[v]
        named = checkpoint_name_of(eqn) in names
        if named or of.get(v) == drawn or is_communication(eqn) or eqn.effects:
            found[v] = None
        else:
            stack += eqn.invars
    return list(found)


def _draws(eqn: JaxprEqn) -> bool:
    """Return True if an equation draws random numbers."""
    name = eqn.primitive.name
    return name.startswith(("random_bits", "threefry2x32", "rng_"))
