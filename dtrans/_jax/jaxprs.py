"""Jaxprs, open and closed: access, construction, tracing and evaluation.

Up to jax 0.10 a `ClosedJaxpr` pairs a `Jaxpr` with its constants. From 0.11 both names are one
class, and constants are in the jaxpr. So this package uses neither `isinstance(x, Jaxpr)` nor
`x.jaxpr.jaxpr`: it calls `opened`, `constants` and `closed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from dtrans._jax.imports import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Primitive,
    Var,
    jaxprs_in_params,
    partial_eval,
)


_classes: tuple[Any, Any] = (Jaxpr, ClosedJaxpr)
ONE_CLASS = _classes[0] is _classes[1]  # from 0.11


def is_jaxpr(value: Any) -> bool:
    """Return True for an open or a closed jaxpr (one class from 0.11)."""
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def is_traced(value: Any) -> bool:
    """Return True for a value of a function that is being traced."""
    return isinstance(value, jax.core.Tracer)


def map_bodies(params: Mapping[str, Any], fn: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the parameters of an equation with each jaxpr replaced; named tuples keep their
    type."""

    def mapped(value: Any) -> Any:
        if is_jaxpr(value):
            return fn(value)
        if isinstance(value, tuple) and any(map(is_jaxpr, value)):
            items = [fn(x) if is_jaxpr(x) else x for x in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return value

    return {key: mapped(value) for key, value in params.items()}


def opened(jaxpr: Any) -> Jaxpr:
    """Return the open jaxpr; the identity from 0.11."""
    inner: Jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return inner


def constants(jaxpr: Any) -> list[Any]:
    """Return the values of the constant variables of a closed jaxpr; none for an open one."""
    return list(jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else []


def closed(
    constvars: Sequence[Var],
    consts: Sequence[Any],
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    eqns: Sequence[JaxprEqn],
    like: Any,
) -> ClosedJaxpr:
    """Return a new closed jaxpr; `like` provides debug information, equations the effects."""
    effects: set[Any] = set()
    for eqn in eqns:
        effects |= set(eqn.effects)
    # empty names of the right number; Program has the real ones
    info = opened(like).debug_info._replace(
        arg_names=("",) * len(invars), result_paths=("",) * len(outvars)
    )
    parts = (constvars, invars, outvars, eqns, frozenset(effects), info)
    kind: Any = Jaxpr
    result: ClosedJaxpr = (
        kind(*parts, consts=list(consts)) if ONE_CLASS else ClosedJaxpr(kind(*parts), list(consts))
    )
    return result


def closed_with(
    jaxpr: Any,
    *,
    invars: Sequence[Var] | None = None,
    outvars: Sequence[Atom] | None = None,
    eqns: Sequence[JaxprEqn] | None = None,
) -> ClosedJaxpr:
    """Return a closed jaxpr with different inputs, outputs or equations than a jaxpr."""
    inner = opened(jaxpr)
    ins, outs = (
        inner.invars if invars is None else invars,
        inner.outvars if outvars is None else outvars,
    )
    return closed(
        inner.constvars, constants(jaxpr), ins, outs, inner.eqns if eqns is None else eqns, jaxpr
    )


def with_equations(jaxpr: Any, eqns: Sequence[JaxprEqn]) -> Any:
    """Return a jaxpr, open or closed as before, with new equations of the same effects."""
    old: Any = jaxpr
    inner: Any = opened(old).replace(eqns=list(eqns))
    return inner if not isinstance(jaxpr, ClosedJaxpr) or ONE_CLASS else old.replace(jaxpr=inner)


class HoldsJaxpr:
    """Base of objects with a closed jaxpr, as `jaxpr`."""

    jaxpr: ClosedJaxpr

    @property
    def inner(self) -> Jaxpr:
        """The open jaxpr."""
        return opened(self.jaxpr)

    @property
    def eqns(self) -> list[JaxprEqn]:
        """Its equations."""
        return self.inner.eqns


class NamedJaxpr(HoldsJaxpr):
    """Closed jaxpr with names: a program, half of a step, a block.

    Attributes:
      in_names, out_names: a name for each of its inputs and outputs.
    """

    if TYPE_CHECKING:

        @property
        def in_names(self) -> Sequence[Any]: ...

        @property
        def out_names(self) -> Sequence[Any]: ...

    @property
    def invars(self) -> dict[Any, Var]:
        """Name to variable of each input; a new dict."""
        return dict(zip(self.in_names, self.inner.invars, strict=True))

    @property
    def outvars(self) -> dict[Any, Atom]:
        """Name to value of each output; a new dict."""
        return dict(zip(self.out_names, self.inner.outvars, strict=True))


def lowered_jaxpr(fn: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """Trace `fn` to a plain jaxpr.

    `Traced.lojax` is undocumented but has no underscore (0.10.2, 0.11.0, head). It lowers opaque
    `call_hi_primitive` equations of `jax_remat3` and `jax_custom_vjp3`, which would hide gradients
    and marks.
    """
    return jax.jit(fn).trace(*args).lojax.jaxpr


def small_jaxpr(fn: Callable[..., Any], types: Sequence[Any]) -> ClosedJaxpr:
    """Return the jaxpr of a function for arrays of these types, weak types included."""
    specs = [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in types]
    jaxpr: Any = jax.make_jaxpr(fn)(*specs)
    return jaxpr


def evaluate(jaxpr: ClosedJaxpr, *args: Any) -> list[Any]:
    """Return the outputs of a closed jaxpr; a trace binds its equations with their source
    information."""
    inner: Any = opened(jaxpr)
    return jax.core.eval_jaxpr(inner, constants(jaxpr), *args)


def live_part(
    jaxpr: Jaxpr, keep: Sequence[bool], always: Sequence[bool]
) -> tuple[Jaxpr, list[bool]]:
    """Eliminate dead code, also inside loops and branches; return the jaxpr and the used inputs.

    Args:
      jaxpr: the jaxpr.
      keep: for each output, True if it is wanted.
      always: for each input, True if it stays even if unused.
    """
    inner: Any = jaxpr
    pruned: Any
    pruned, used = partial_eval.dce_jaxpr(inner, list(keep), instantiate=list(always))
    return pruned, used


def abstract_eval(
    primitive: Primitive, avals: Sequence[Any], params: Mapping[str, Any]
) -> list[Any]:
    """Return the output types of one equation, by the primitive's own rule."""
    out, _ = primitive.abstract_eval(*avals, **params)
    return list(out) if primitive.multiple_results else [out]


def equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    """Yield all equations of a jaxpr, and those in bodies."""
    for eqn in opened(jaxpr).eqns:
        yield eqn
        yield from equations_inside(eqn)


def equations_inside(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yield the equations in the bodies of an equation, at any depth."""
    for body in jaxprs_in_params(eqn.params):
        yield from equations(body)


def resized(aval: Any, axis: int, size: int) -> Any:
    """Return a type with another size along one axis."""
    return aval.update(shape=(*aval.shape[:axis], size, *aval.shape[axis + 1 :]))
