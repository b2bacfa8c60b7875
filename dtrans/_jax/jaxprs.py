"""Jaxprs, open and closed: they are taken apart, put together, traced and evaluated here.

Up to jax 0.10 a `ClosedJaxpr` pairs a `Jaxpr` with its constants. From 0.11 both names are the same
class, and constants live in the jaxpr. So code of this package asks neither `isinstance(x, Jaxpr)`
nor `x.jaxpr.jaxpr`: it calls `opened`, `constants` and `closed`.
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
    """True for an open or a closed jaxpr (one class from 0.11)."""
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def is_traced(value: Any) -> bool:
    """Whether it is a value of a function that is being traced, and no array."""
    return isinstance(value, jax.core.Tracer)


def map_bodies(params: Mapping[str, Any], fn: Callable[[Any], Any]) -> dict[str, Any]:
    """The parameters of an equation with another jaxpr for each that is in them. Tuples that have
    names keep them."""

    def mapped(value: Any) -> Any:
        if is_jaxpr(value):
            return fn(value)
        if isinstance(value, tuple) and any(map(is_jaxpr, value)):
            made = [fn(x) if is_jaxpr(x) else x for x in value]
            return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
        return value

    return {key: mapped(value) for key, value in params.items()}


def opened(jaxpr: Any) -> Jaxpr:
    """The jaxpr proper; the identity from 0.11."""
    inner: Jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return inner


def constants(jaxpr: Any) -> list[Any]:
    """The values of the constant variables of a closed jaxpr; none for an open one."""
    return list(jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else []


def closed(
    constvars: Sequence[Var],
    consts: Sequence[Any],
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    eqns: Sequence[JaxprEqn],
    like: Any,
) -> ClosedJaxpr:
    """A new closed jaxpr. `like` lends its debug information; effects are joined from the
    equations."""
    effects: set[Any] = set()
    for eqn in eqns:
        effects |= set(eqn.effects)
    # names for as many inputs and outputs as there are; ours are kept by Program
    info = opened(like).debug_info._replace(
        arg_names=("",) * len(invars), result_paths=("",) * len(outvars)
    )
    parts = (constvars, invars, outvars, eqns, frozenset(effects), info)
    kind: Any = Jaxpr
    made: ClosedJaxpr = (
        kind(*parts, consts=list(consts)) if ONE_CLASS else ClosedJaxpr(kind(*parts), list(consts))
    )
    return made


def closed_with(
    jaxpr: Any,
    *,
    invars: Sequence[Var] | None = None,
    outvars: Sequence[Atom] | None = None,
    eqns: Sequence[JaxprEqn] | None = None,
) -> ClosedJaxpr:
    """Return a jaxpr, open or closed, as a closed one with other inputs, outputs or equations."""
    inner = opened(jaxpr)
    ins, outs = (
        inner.invars if invars is None else invars,
        inner.outvars if outvars is None else outvars,
    )
    return closed(
        inner.constvars, constants(jaxpr), ins, outs, inner.eqns if eqns is None else eqns, jaxpr
    )


def with_equations(jaxpr: Any, eqns: Sequence[JaxprEqn]) -> Any:
    """Return a jaxpr, open or closed as it was, with other equations that have the same effects."""
    old: Any = jaxpr
    inner: Any = opened(old).replace(eqns=list(eqns))
    return inner if not isinstance(jaxpr, ClosedJaxpr) or ONE_CLASS else old.replace(jaxpr=inner)


class HoldsJaxpr:
    """Something that holds a closed jaxpr, as `jaxpr`."""

    jaxpr: ClosedJaxpr

    @property
    def inner(self) -> Jaxpr:
        """The jaxpr proper."""
        return opened(self.jaxpr)

    @property
    def eqns(self) -> list[JaxprEqn]:
        """Its equations."""
        return self.inner.eqns


class NamedJaxpr(HoldsJaxpr):
    """A closed jaxpr with names: a program, half of a step, a block.

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

    `Traced.lojax` is undocumented but has no underscore (0.10.2, 0.11.0, head). It lowers what
    `jax_remat3` and `jax_custom_vjp3` leave as opaque `call_hi_primitive` equations, inside which
    neither gradients nor marks could be seen.
    """
    return jax.jit(fn).trace(*args).lojax.jaxpr


def small_jaxpr(fn: Callable[..., Any], types: Sequence[Any]) -> ClosedJaxpr:
    """`jax.make_jaxpr` of a function of arrays of these types, weak types included."""
    specs = [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in types]
    jaxpr: Any = jax.make_jaxpr(fn)(*specs)
    return jaxpr


def evaluate(jaxpr: ClosedJaxpr, *args: Any) -> list[Any]:
    """The outputs of a closed jaxpr; under a trace, its equations bound anew with their source
    information."""
    inner: Any = opened(jaxpr)
    return jax.core.eval_jaxpr(inner, constants(jaxpr), *args)


def live_part(
    jaxpr: Jaxpr, keep: Sequence[bool], always: Sequence[bool]
) -> tuple[Jaxpr, list[bool]]:
    """Dead-code elimination, inside loops and branches too, and which inputs are left.

    Args:
      keep: the outputs that are wanted.
      always: the inputs that stay whether they are used or not.
    """
    inner: Any = jaxpr
    pruned: Any
    pruned, used = partial_eval.dce_jaxpr(inner, list(keep), instantiate=list(always))
    return pruned, used


def abstract_eval(
    primitive: Primitive, avals: Sequence[Any], params: Mapping[str, Any]
) -> list[Any]:
    """The output types of one equation, as the primitive itself states them."""
    out, _ = primitive.abstract_eval(*avals, **params)
    return list(out) if primitive.multiple_results else [out]


def equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    """Yield all equations of a jaxpr, and those in bodies."""
    for eqn in opened(jaxpr).eqns:
        yield eqn
        yield from equations_inside(eqn)


def equations_inside(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yield the equations in the bodies of an equation, and in those of theirs."""
    for body in jaxprs_in_params(eqn.params):
        yield from equations(body)


def resized(aval: Any, axis: int, size: int) -> Any:
    """A type with another size along one axis."""
    return aval.update(shape=(*aval.shape[:axis], size, *aval.shape[axis + 1 :]))
