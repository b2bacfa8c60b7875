"""Jaxprs, open and closed: access, construction, tracing and evaluation.

Up to jax 0.10, a `ClosedJaxpr` is a pair of a `Jaxpr` and its constants. From 0.11, both names are
one class, which contains the constants. So dtrans calls `opened`, `constants` and `closed` instead
of `isinstance(x, Jaxpr)` and `x.jaxpr.jaxpr`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
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
ONE_CLASS = _classes[0] is _classes[1]  # True from jax 0.11


def is_jaxpr(value: Any) -> bool:
    """Return True for an open or a closed jaxpr."""
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def is_traced(value: Any) -> bool:
    """Return True for a tracer."""
    return isinstance(value, jax.core.Tracer)


def map_bodies(params: Mapping[str, Any], fn: Callable[[Any], Any]) -> dict[str, Any]:
    """Apply `fn` to each jaxpr in the parameters of an equation; return the new parameters.

    The jaxprs are bodies of loops, branches and calls. They may be inside tuples.
    """

    def mapped(value: Any) -> Any:
        if is_jaxpr(value):
            return fn(value)
        if isinstance(value, tuple) and any(map(is_jaxpr, value)):
            items = [fn(x) if is_jaxpr(x) else x for x in value]
            if hasattr(value, "_fields"):
                return type(value)(*items)
            return tuple(items)
        return value

    return {key: mapped(value) for key, value in params.items()}


def opened(jaxpr: Any) -> Jaxpr:
    """Return the open jaxpr of a closed jaxpr; return an open jaxpr unchanged."""
    inner: Jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return inner


def constants(jaxpr: Any) -> list[Any]:
    """Return the constants of a closed jaxpr; [] for an open jaxpr."""
    if isinstance(jaxpr, ClosedJaxpr):
        return list(jaxpr.consts)
    return []


def closed(
    constvars: Sequence[Var],
    consts: Sequence[Any],
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    eqns: Sequence[JaxprEqn],
    like: Any,
) -> ClosedJaxpr:
    """Return a new closed jaxpr, with the debug information of `like`."""
    effects: set[Any] = set()
    for eqn in eqns:
        effects |= set(eqn.effects)
    # JAX checks that debug information has one name for each value; `Program` has the real names
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
    """Return a closed copy of `jaxpr` with new inputs, outputs or equations.

    None keeps the old inputs, outputs or equations.
    """
    inner = opened(jaxpr)
    ins = inner.invars if invars is None else invars
    outs = inner.outvars if outvars is None else outvars
    new_eqns = inner.eqns if eqns is None else eqns
    return closed(inner.constvars, constants(jaxpr), ins, outs, new_eqns, jaxpr)


def with_equations(jaxpr: Any, eqns: Sequence[JaxprEqn]) -> Any:
    """Return `jaxpr` with new equations, which must have the effects of the old equations."""
    old: Any = jaxpr
    inner: Any = opened(old).replace(eqns=list(eqns))
    if ONE_CLASS or not isinstance(jaxpr, ClosedJaxpr):
        return inner
    return old.replace(jaxpr=inner)


class HoldsJaxpr:
    """Base class of objects with an attribute `jaxpr`, a closed jaxpr."""

    jaxpr: ClosedJaxpr

    @property
    def inner(self) -> Jaxpr:
        """The open jaxpr."""
        return opened(self.jaxpr)

    @property
    def eqns(self) -> list[JaxprEqn]:
        """Equations of the jaxpr."""
        return self.inner.eqns


class NamedJaxpr(HoldsJaxpr):
    """Base class of closed jaxprs whose inputs and outputs have names, such as `dtrans.Program`.

    Attributes:
      in_names, out_names: name of each input and of each output.
    """

    if TYPE_CHECKING:

        @property
        def in_names(self) -> Sequence[Any]: ...

        @property
        def out_names(self) -> Sequence[Any]: ...

    @property
    def invars(self) -> dict[Any, Var]:
        """Variable of each input, by name; a new dict."""
        return dict(zip(self.in_names, self.inner.invars, strict=True))

    @property
    def outvars(self) -> dict[Any, Atom]:
        """Value of each output, by name; a new dict."""
        return dict(zip(self.out_names, self.inner.outvars, strict=True))


def lowered_jaxpr(fn: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """Trace `fn` to a jaxpr without equations that hide other equations.

    With the flags `jax_remat3` and `jax_custom_vjp3`, JAX creates equations of the primitive
    `call_hi_primitive`. They would hide the equations that compute gradients. `Traced.lojax`
    replaces them. JAX does not document `lojax`, but its name has no underscore (0.10.2, 0.11.0,
    head).
    """
    return jax.jit(fn).trace(*args).lojax.jaxpr


def named_in_errors(wrapper: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `wrapper` with the name, line and signature of `fn`, which JAX shows in errors.

    dtrans often traces a wrapper around the user's function. Without this, errors would name the
    wrapper. The wrapper must take the positional arguments of `fn`.
    """
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    traced: Any = wrapper
    traced.__wrapped__ = inner  # JAX reads the name and the line here
    with contextlib.suppress(TypeError, ValueError):  # a builtin without a signature
        traced.__signature__ = inspect.signature(fn)
    return wrapper


def small_jaxpr(fn: Callable[..., Any], types: Sequence[Any]) -> ClosedJaxpr:
    """Trace a function for arrays of the given types (`ShapedArray`); weak types stay weak.

    Rewrites of programs use it to get the equations of a few operations.
    """
    specs = [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in types]
    jaxpr: Any = jax.make_jaxpr(fn)(*specs)
    return jaxpr


def evaluate(jaxpr: ClosedJaxpr, *args: Any) -> list[Any]:
    """Evaluate a closed jaxpr. If JAX is tracing, traced equations keep their source lines."""
    inner: Any = opened(jaxpr)
    return jax.core.eval_jaxpr(inner, constants(jaxpr), *args)


def live_part(
    jaxpr: Jaxpr, keep: Sequence[bool], always: Sequence[bool]
) -> tuple[Jaxpr, list[bool]]:
    """Remove dead code from a jaxpr, also inside its loops, branches and calls.

    Args:
      jaxpr: the jaxpr.
      keep: one flag for each output; True keeps the output.
      always: one flag for each input; True keeps the input even if it is unused.

    Returns:
      The new jaxpr; and one flag for each input of the old jaxpr, True if the new jaxpr has it.
    """
    inner: Any = jaxpr
    pruned: Any
    pruned, used = partial_eval.dce_jaxpr(inner, list(keep), instantiate=list(always))
    return pruned, used


def abstract_eval(
    primitive: Primitive, avals: Sequence[Any], params: Mapping[str, Any]
) -> list[Any]:
    """Return the output types of an equation with this primitive, operand types and parameters."""
    out, _ = primitive.abstract_eval(*avals, **params)
    if primitive.multiple_results:
        return list(out)
    return [out]


def equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    """Yield the equations of a jaxpr and of all bodies in it."""
    for eqn in opened(jaxpr).eqns:
        yield eqn
        yield from equations_inside(eqn)


def equations_inside(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yield the equations in the bodies of an equation, at any depth."""
    for body in jaxprs_in_params(eqn.params):
        yield from equations(body)


def resized(aval: Any, axis: int, size: int) -> Any:
    """Return a type with a new size along one axis."""
    return aval.update(shape=(*aval.shape[:axis], size, *aval.shape[axis + 1 :]))
