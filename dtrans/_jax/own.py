"""Construction of this package's primitives, with their rules; `DTRANS_PRIMITIVES` has all of
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from dtrans._jax.imports import Primitive, ad, batching, mlir


DTRANS_PRIMITIVES: set[Primitive] = set()
IDENTITIES: set[Primitive] = set()  # primitives whose output is their first operand


def new_primitive(
    name: str,
    *,
    types: Callable[..., Any],
    impl: Callable[..., Any] | None = None,
    lower: Callable[..., Any] | None = None,
    jvp: Callable[..., Any] | None = None,
    batch: Callable[..., Any] | None = None,
    transpose: Callable[..., Any] | None = None,
    multiple_results: bool = False,
) -> Primitive:
    """Return a primitive with its rules.

    Args:
      name: its name.
      types: types of its outputs, from those of its operands and its parameters.
      impl: computation on arrays; None if nothing runs it.
      lower: StableHLO; None to lower the trace of `impl`.
      jvp, batch, transpose: rules of JAX; None for no rule.
      multiple_results: True if it returns a list.
    """
    primitive = _new(name, multiple_results)
    primitive.def_abstract_eval(types)
    if impl is not None:
        primitive.def_impl(impl)
        mlir.register_lowering(
            primitive, lower or mlir.lower_fun(impl, multiple_results=multiple_results)
        )
    _register(primitive, jvp, batch, transpose)
    return primitive


def new_identity(
    name: str,
    *,
    jvp: Callable[..., Any] | None = None,
    batch: Callable[..., Any] | None = None,
    transpose: Callable[..., Any] | None = None,
) -> Primitive:
    """Return a primitive whose output is its first operand.

    Without a batch rule it batches like that operand.
    """

    def first(x: Any, *others: Any, **params: Any) -> Any:
        return x

    def batched(args: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
        return primitive.bind(*args, **params), dims[0]

    primitive = new_primitive(
        name,
        types=first,
        impl=first,
        lower=lambda ctx, x, *others, **params: [x],
        jvp=jvp,
        batch=batch or batched,
        transpose=transpose,
    )
    IDENTITIES.add(primitive)
    return primitive


class _NoOpEffect(jax.debug.DebugEffect):
    """Effect of an equation that does nothing, but must not be removed.

    `jax.debug.print` has `jax.debug.DebugEffect`: loops, branches, rematerialised functions and
    custom derivatives allow it, and recomputation in `jax.checkpoint` drops it. JAX exports it
    without a promise (0.10.2, 0.11.0). `jax.checkpoint` refuses the effect of
    `def_effectful_abstract_eval2`.
    """

    __str__ = lambda self: "Kept"


_NO_OP = frozenset({_NoOpEffect()})


def new_effectful(name: str, *, jvp: Callable[..., Any], batch: Callable[..., Any]) -> Primitive:
    """Return a primitive without results, whose equations are never removed as dead."""
    primitive = _new(name, multiple_results=True)
    primitive.def_impl(lambda *args, **params: [])
    primitive.def_effectful_abstract_eval(lambda *avals, **params: ([], _NO_OP))
    mlir.register_lowering(primitive, lambda ctx, *args, **params: [])
    _register(primitive, jvp, batch, None)
    return primitive


def is_zero(tangent: Any) -> bool:
    """Return True if a tangent or cotangent is a symbolic zero."""
    return type(tangent) is ad.Zero


def _new(name: str, multiple_results: bool) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results
    DTRANS_PRIMITIVES.add(primitive)
    return primitive


def _register(primitive: Primitive, jvp: Any, batch: Any, transpose: Any) -> None:
    rules = (
        (ad.primitive_jvps, jvp),
        (batching.primitive_batchers, batch),
        (ad.primitive_transposes, transpose),
    )
    for table, rule in rules:
        if rule is not None:
            table[primitive] = rule
