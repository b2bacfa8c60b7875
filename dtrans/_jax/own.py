"""Construction of dtrans's primitives; `DTRANS_PRIMITIVES` lists all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from dtrans._jax.imports import Primitive, ad, batching, mlir


DTRANS_PRIMITIVES: set[Primitive] = set()
IDENTITIES: set[Primitive] = set()  # primitives that return their first operand


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
    """Return a new primitive.

    Args:
      name: name of the primitive.
      types: (types of the operands, **params) -> types of the outputs.
      impl: evaluates the primitive on arrays; None if it is never evaluated.
      lower: lowering rule to StableHLO; None to trace and lower `impl`.
      jvp, batch, transpose: JAX rules; None for no rule.
      multiple_results: True if the primitive returns a list.
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
    """Return a new primitive that returns its first operand, such as a marker of gradients.

    The default batching rule keeps the batch dimension of that operand.
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
    """Effect that keeps JAX from removing an equation as dead code.

    The base class is the effect of `jax.debug.print`. JAX exports this class without a promise of
    stability (0.10.2, 0.11.0). JAX allows the effect in loops, branches, `jax.checkpoint` and
    custom derivatives, and does not repeat it in recomputations. The effect of
    `def_effectful_abstract_eval2` does not work here, because `jax.checkpoint` rejects it.
    """

    __str__ = lambda self: "Kept"


_NO_OP = frozenset({_NoOpEffect()})


def new_effectful(name: str, *, jvp: Callable[..., Any], batch: Callable[..., Any]) -> Primitive:
    """Return a new primitive without results; JAX never removes its equations as dead code."""
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
