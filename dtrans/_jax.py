"""Every import outside JAX's documented API, with what it is, since when, and why.

`jax.extend` and `jax.interpreters` promise nothing from release to release, so the rest of the
package imports these names from here and nowhere else (a test greps for it). Supported:
`jax>=0.10.2,<0.13`.

The one difference that matters: up to 0.10 a `ClosedJaxpr` pairs a `Jaxpr` with its constants; from
0.11 both names are the same class, and constants live in the jaxpr. Code here therefore never asks
`isinstance(x, Jaxpr)` to tell an open jaxpr from a closed one: it calls `opened`, `constants`, `closed`.
From 0.11 a `scan` also says in another way which of its operands are constants and which are carried: `scan_counts`
knows both.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.core import ShapedArray as ShapedArray
from jax.experimental import multihost_utils
from jax.experimental.multihost_utils import ProcessFailureError as ProcessFailureError, live_devices as live_devices
from jax.extend.core import (
    Primitive as Primitive,
    jaxpr_as_fun as jaxpr_as_fun,
    jaxprs_in_params as jaxprs_in_params,
)
from jax.extend.random import threefry2x32_p as threefry2x32_p
from jax.interpreters import ad as ad, batching as batching, mlir as mlir, partial_eval


if TYPE_CHECKING:
    # What this package uses of JAX's IR classes. JAX types `aval` as an abstract value without a shape or
    # dtype, and ours always have both; from 0.11 two of the classes are one.
    class Var:
        aval: Any

        def __init__(self, aval: Any) -> None: ...

    class Literal:
        aval: Any
        val: Any

        def __init__(self, val: Any, aval: Any) -> None: ...

    class JaxprEqn:
        primitive: Any
        params: dict[str, Any]
        invars: list[Var | Literal]
        outvars: list[Var]
        effects: Any
        source_info: Any

        def replace(self, **changes: Any) -> JaxprEqn: ...

    class Jaxpr:
        constvars: list[Var]
        invars: list[Var]
        outvars: list[Var | Literal]
        eqns: list[JaxprEqn]
        debug_info: Any

        def __init__(
            self,
            constvars: Sequence[Var],
            invars: Sequence[Var],
            outvars: Sequence[Var | Literal],
            eqns: Sequence[JaxprEqn],
            effects: Any,
            debug_info: Any,
        ) -> None: ...

        def replace(self, **changes: Any) -> Jaxpr: ...

    class ClosedJaxpr:
        jaxpr: Jaxpr
        consts: list[Any]

        def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> None: ...

    def new_jaxpr_eqn(
        invars: Sequence[Var | Literal], outvars: Sequence[Var], primitive: Any, params: dict[str, Any], effects: Any
    ) -> JaxprEqn: ...
else:
    from jax.extend.core import (
        ClosedJaxpr,
        Jaxpr,
        JaxprEqn,
        Literal,
        Var,
        new_jaxpr_eqn as new_jaxpr_eqn,
    )


Atom = Var | Literal


def is_jaxpr(value: Any) -> bool:
    """True for an open or a closed jaxpr (one class from 0.11)."""
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def map_bodies(params: Mapping[str, Any], fn: Callable[[Any], Any]) -> dict[str, Any]:
    """The parameters of an equation with another jaxpr for each that is in them. Tuples that have names keep them."""

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
    """A new closed jaxpr. `like` lends its debug information; effects are joined from the equations."""
    effects: set[Any] = set()
    for eqn in eqns:
        effects |= set(eqn.effects)
    # names for as many inputs and outputs as there are; ours are kept by Program
    info = opened(like).debug_info._replace(arg_names=("",) * len(invars), result_paths=("",) * len(outvars))
    return ClosedJaxpr(Jaxpr(constvars, invars, outvars, eqns, frozenset(effects), info), list(consts))


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
    """The outputs of a closed jaxpr; under a trace, its equations bound anew with their source information."""
    inner: Any = jaxpr.jaxpr
    return jax.core.eval_jaxpr(inner, jaxpr.consts, *args)


def live_part(jaxpr: Jaxpr, keep: Sequence[bool], always: Sequence[bool]) -> tuple[Jaxpr, list[bool]]:
    """Dead-code elimination, inside loops and branches too, and which inputs are left.

    Args:
      keep: the outputs that are wanted.
      always: the inputs that stay whether they are used or not.
    """
    inner: Any = jaxpr
    pruned: Any
    pruned, used = partial_eval.dce_jaxpr(inner, list(keep), instantiate=list(always))
    return pruned, used


def abstract_eval(primitive: Primitive, avals: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """The output types of one equation, as the primitive itself states them."""
    out, _ = primitive.abstract_eval(*avals, **params)
    return list(out) if primitive.multiple_results else [out]


def is_plain_jit(eqn: JaxprEqn) -> bool:
    """A `jit` equation that only groups equations: no sharding or layout asked for. Donation is the caller's."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return False
    p = eqn.params
    asked = (
        *p.get("in_shardings", ()),
        *p.get("out_shardings", ()),
        *p.get("in_layouts", ()),
        *p.get("out_layouts", ()),
    )
    return all(type(a).__name__ == "UnspecifiedValue" or a is None for a in asked)


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a `scan` are constants, and how many are carried; the rest is taken apart."""
    p = eqn.params
    if "ft_in" in p:  # from 0.11: a tree for each kind of operand
        consts, carried, _ = map(len, p["ft_in"].unpack())
        return consts, carried
    return int(p["num_consts"]), int(p["num_carry"])


def while_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a `while` are constants of its condition, and how many of its body; the rest is carried."""
    return int(eqn.params["cond_nconsts"]), int(eqn.params["body_nconsts"])


def scan_with(eqn: JaxprEqn, body: ClosedJaxpr, invars: Sequence[Atom], outvars: Sequence[Var]) -> JaxprEqn:
    """A `scan` with another body, which takes apart and makes other stacks; its constants and what it carries stay."""
    params = {**eqn.params, "jaxpr": body}
    if "ft_in" in params:
        consts, carried = scan_counts(eqn)
        params |= _scan_trees(consts, carried, len(invars) - consts - carried, len(outvars) - carried)
    return eqn.replace(invars=list(invars), outvars=list(outvars), params=params)


@functools.cache
def _scan_trees(consts: int, carried: int, taken: int, made: int) -> dict[str, Any]:
    """How a `scan` says from 0.11 which operands and results are of which kind: JAX is asked for one of this kind."""

    def loop(fixed: list[Any], carry: list[Any], parts: list[Any]) -> Any:
        def turn(carry: list[Any], parts: list[Any]) -> tuple[list[Any], list[Any]]:
            one = sum([*fixed, *carry, *parts], 0.0)  # so that every constant is read
            return [one] * carried, [one] * made

        return jax.lax.scan(turn, carry, parts, length=1)

    jaxpr = jax.make_jaxpr(loop)([0.0] * consts, [0.0] * carried, [jax.numpy.zeros(1)] * taken)
    (eqn,) = (e for e in opened(jaxpr).eqns if e.primitive.name == "scan")
    return {key: eqn.params[key] for key in ("ft_in", "ft_out")}


def scope_of(eqn: JaxprEqn) -> str:
    """The name stack of an equation as text, e.g. `transpose(jvp(dense))/dot`."""
    return str(eqn.source_info.name_stack)


def within_scope(eqn: JaxprEqn, outer: JaxprEqn) -> JaxprEqn:
    """`eqn`, inlined out of the call `outer`, under the name stack it had inside that call.

    It takes over the call's traceback: a jitted function is traced once, and its equations remember who called it
    first, which may have been another program.
    """
    info, call = eqn.source_info, outer.source_info
    stack = call.name_stack + info.name_stack if len(call.name_stack) else info.name_stack
    return eqn.replace(source_info=info.replace(name_stack=stack, traceback=call.traceback))


@functools.cache
def _library_of(path: str) -> str:
    """The library that a source file belongs to: `jax`, `jaxlib`, `optax` or `dtrans`; "" for a file of the user.

    Files are compared with the folders that the libraries are imported from: a user's own folder may be called so too.
    """
    for library in ("jax", "jaxlib", "optax", "dtrans"):
        spec = importlib.util.find_spec(library)
        for folder in (spec and spec.submodule_search_locations) or ():
            if os.path.abspath(path).startswith(os.path.join(os.path.abspath(folder), "")):
                return library
    return ""


def origin_of(eqn: JaxprEqn) -> str:
    """Who wrote an equation, as far as its traceback tells: `optax.clip_by_global_norm`, or a function's own name.

    Of optax it is the transformation that is named: a function that has an `update` inside.
    """
    traceback = eqn.source_info.traceback
    for frame in [] if traceback is None else traceback.frames:
        library = _library_of(frame.file_name)
        if library == "optax":
            outer, _, rest = frame.function_name.partition(".")
            if "update" in rest:
                contrib = os.path.basename(os.path.dirname(frame.file_name)) == "contrib"
                return ("optax.contrib." if contrib else "optax.") + outer
        elif not library:
            return frame.function_name.replace(".<locals>", "").removesuffix(".<lambda>")
    return ""


def equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    """All equations, those of nested jaxprs included."""
    for eqn in opened(jaxpr).eqns:
        yield eqn
        for sub in jaxprs_in_params(eqn.params):
            yield from equations(sub)


def backends_started() -> bool:
    """Whether JAX has made its devices, after which processes can no longer be connected.

    JAX has no public way to ask. An option that must be set before tells it: another value is then refused.
    """
    config: Any = jax.config
    had = config.jax_num_cpu_devices
    try:
        config.update("jax_num_cpu_devices", had + 1)
    except RuntimeError:
        return True
    config.update("jax_num_cpu_devices", had)
    return False


def is_varying(x: Any) -> bool:
    """Whether a value has a type that says over which axes of a `shard_map` it varies (`check_vma=True`)."""
    of: Any = jax.typeof(x)
    kind = getattr(of, "manual_axis_type", None)  # since 0.10
    return bool(kind.varying if kind is not None else getattr(of, "vma", ()))


def gloo_scatters_wrongly() -> bool:
    """Whether a reduce-scatter on CPUs may give wrong numbers here, without an error: over Gloo, before 0.12.

    Of 48 of 16 MB between two processes 2 were wrong (jax#40830); all-reduces and all-gathers are right. Gloo carries
    out collectives on CPUs, within one process too, once `jax.distributed` is initialised.
    """
    config: Any = jax.config
    is_gloo = config.jax_cpu_collectives_implementation == "gloo" and jax.distributed.is_initialized()
    return is_gloo and jax.__version_info__ < (0, 12)


def bulletin_board() -> Any:
    """The key-value store of the job that `jax.distributed` connected.

    JAX has no documented way to it; this one goes by what `multihost_utils` itself uses.
    """
    utils: Any = multihost_utils
    client = utils.distributed.global_state.client
    assert client is not None, "jax.distributed is not initialized"
    return client


# -- for dtrans.summary ------------------------------------------------------------------------------


class _KeptEffect(jax.debug.DebugEffect):
    """The effect of an equation that does nothing, and is kept nevertheless.

    `jax.debug.DebugEffect` is what `jax.debug.print` has: loops, branches, rematerialised functions and custom
    derivatives allow it, and what `jax.checkpoint` computes once more does not have it again. JAX exports it and says
    nothing about it (0.10.2, 0.11.0). The effect of `def_effectful_abstract_eval2` is refused under `jax.checkpoint`.
    """

    __str__ = lambda self: "Kept"


_KEPT = frozenset({_KeptEffect()})


def def_kept(primitive: Primitive) -> None:
    """Make `primitive` one without results, whose equations are not removed as dead."""
    primitive.multiple_results = True
    primitive.def_impl(lambda *args, **params: [])
    primitive.def_effectful_abstract_eval(lambda *avals, **params: ([], _KEPT))
