"""Values that differ between ranks, on small jaxprs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dtrans.ops import trainer_index_p
from dtrans.zero.rank_values import local_values


def test_what_a_loop_makes_of_its_rank_differs() -> None:
    """The inputs of the loop are equal on all ranks, but its body reads the rank."""

    def body(carry: Any, _: Any) -> tuple[Any, None]:
        (index,) = trainer_index_p.bind(over=("dp",))
        return (carry[0] + index, carry[1] + 1), None

    traced = jax.make_jaxpr(lambda x: jax.lax.scan(body, (x, x), length=2)[0])(jnp.int32(0))
    asks, counts = traced.jaxpr.outvars
    assert local_values(traced.eqns, ()) & {asks, counts} == {asks}
