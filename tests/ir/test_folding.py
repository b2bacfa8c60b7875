"""Values that are a constant or an unchanged input are found, and no other values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrans._jax import has_bodies, opened
from dtrans.ir.folding import Alias, are_equal, fold, number_by_jax, number_by_numpy
from dtrans.ir.interpret import ForwardAnalysis, forward_jaxpr


# functions of an input p, zeros z and ones; the expected output is "p", a number, or None for
# another value
FOLDED: dict[str, tuple[Any, Any]] = {
    "added": (lambda p, z, one: p + z, "p"),
    "added to": (lambda p, z, one: z + p, "p"),
    "subtracted": (lambda p, z, one: p - z, "p"),
    "subtracted from": (lambda p, z, one: z - p, None),
    "multiplied": (lambda p, z, one: one * p, "p"),
    "twice": (lambda p, z, one: p * (one + one), None),
    "factor": (lambda p, z, one: p[0, 0] * z, 0),
    "may be infinite": (lambda p, z, one: p * z, None),
    "divided by zero": (lambda p, z, one: z / z, None),
    "divided": (lambda p, z, one: z / (one + one), 0),
    "broadcast": (lambda p, z, one: p + jnp.zeros((3, 1)), "p"),
    "wider": (lambda p, z, one: p[:1] + jnp.zeros((3, 3)), None),
    "transposed": (lambda p, z, one: p.T, None),
    "transposed ones": (lambda p, z, one: one.T, 1),
    "reshaped twice": (lambda p, z, one: p.reshape(9).reshape(3, 3), None),
    "reduced": (lambda p, z, one: z.sum(0), 0),
    "ones are reduced": (lambda p, z, one: one.sum(0), None),
    "chosen": (lambda p, z, one: jnp.where(one > 0, p, z), "p"),
    "the same": (lambda p, z, one: jnp.where(p > 0, z, -z), 0),
    "either": (lambda p, z, one: jnp.where(p > 0, p, z), None),
    "rounded": (lambda p, z, one: p.astype(jnp.bfloat16).astype(jnp.float32), None),
    "computed": (lambda p, z, one: jnp.sqrt(one + one + one + one), 2),
    "sine of zero": (lambda p, z, one: jnp.sin(z), 0),
    "branch": (lambda p, z, one: jax.lax.cond(p[0, 0] > 0, lambda: p + z, lambda: p - z), "p"),
    "branches": (lambda p, z, one: jax.lax.cond(p[0, 0] > 0, lambda: p + z, lambda: p + one), None),
    "turns": (lambda p, z, one: jax.lax.fori_loop(0, 3, lambda i, x: x + z, p), "p"),
    "turns that move": (lambda p, z, one: jax.lax.fori_loop(0, 3, lambda i, x: x + one, z), None),
}


@pytest.mark.parametrize("number_of", [number_by_numpy, number_by_jax])
def test_values_are_folded(number_of: Any) -> None:
    def rule(eqn: Any, ins: Any) -> Any:
        if has_bodies(eqn):
            return None
        scalar = lambda i: (
            not eqn.invars[i].aval.ndim if not isinstance(ins[i], np.ndarray) else bool(ins[i] != 0)
        )
        return [fold(eqn, k, ins, scalar, number_of) for k in range(len(eqn.outvars))]

    constant = lambda aval, value: (
        None if value is None or np.size(value) != 1 else np.asarray(value).reshape(())
    )
    analysis = ForwardAnalysis[Any](lambda a, b: a if are_equal(a, b) else None, rule, constant)
    found = {}
    for name, (fn, _) in FOLDED.items():
        jaxpr = jax.make_jaxpr(fn)(*[jnp.ones((3, 3))] * 3)
        p = opened(jaxpr).invars[0]
        ins = [Alias(p), np.zeros((), np.float32), np.ones((), np.float32)]
        fact = forward_jaxpr(analysis, jaxpr, ins).of(opened(jaxpr).outvars[0])
        found[name] = (
            "p" if fact == Alias(p) else None if fact is None or np.isnan(fact) else float(fact)
        )
    assert found == {name: fact for name, (_, fact) in FOLDED.items()}
