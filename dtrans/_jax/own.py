"""How primitives of this package are made: with their rules, in one call, and known by `OWN`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from dtrans._jax.imports import Primitive, ad, batching, mlir


OWN: set[Primitive] = set()
IDENTITIES: set[Primitive] = set()  # those of them whose output is their first operand


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
    """A primitive with its rules.

    Args:
      types: the types of its outputs, from those of its operands and its parameters.
      impl: what it does to arrays; None where nothing carries it out.
      lower: its StableHLO; None for what `impl` is when it is traced.
      jvp, batch, transpose: as JAX takes them; None where it has none.
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
    """A primitive whose output is its first operand. Without a rule of its own it batches as that
    operand."""

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


class _KeptEffect(jax.debug.DebugEffect):
    """The effect of an equation that does nothing, and is kept nevertheless.

    `jax.debug.DebugEffect` is what `jax.debug.print` has: loops, branches, rematerialised functions
    and custom derivatives allow it, and what `jax.checkpoint` computes once more does not have it
    again. JAX exports it and says nothing about it (0.10.2, 0.11.0). The effect of
    `def_effectful_abstract_eval2` is refused under `jax.checkpoint`.
    """

    __str__ = lambda self: "Kept"


_KEPT = frozenset({_KeptEffect()})


def new_kept(name: str, *, jvp: Callable[..., Any], batch: Callable[..., Any]) -> Primitive:
    """A primitive without results, whose equations are not removed as dead."""
    primitive = _new(name, multiple_results=True)
    primitive.def_impl(lambda *args, **params: [])
    primitive.def_effectful_abstract_eval(lambda *avals, **params: ([], _KEPT))
    mlir.register_lowering(primitive, lambda ctx, *args, **params: [])
    _register(primitive, jvp, batch, None)
    return primitive


def is_zero(tangent: Any) -> bool:
    """Whether a tangent or cotangent is known to be zero."""
    return type(tangent) is ad.Zero


def _new(name: str, multiple_results: bool) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results
    OWN.add(primitive)
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
