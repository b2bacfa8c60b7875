"""Parameters of equations with loops, branches, calls, callbacks and collectives.

No other file of dtrans names these parameters. If JAX renames a parameter, the accessor of this
parameter accepts both names. If an equation has neither name, the accessor raises TraceError.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from dtrans._jax.imports import Atom, ClosedJaxpr, JaxprEqn, Var
from dtrans._jax.jaxprs import opened
from dtrans._jax.primitives import (
    CALLS,
    COND,
    CUSTOM_RULES,
    CUSTOM_VJP,
    JIT,
    LINEAR_SOLVE,
    REMAT,
    SCAN,
    WHILE,
)
from dtrans.errors import TraceError


# -- bodies ----------------------------------------------------------------------------------------

_BODIES = {
    SCAN: ("jaxpr",),
    WHILE: ("cond_jaxpr", "body_jaxpr"),
    **dict.fromkeys((*REMAT, *JIT), ("jaxpr",)),
    **dict.fromkeys((*CALLS, *CUSTOM_RULES), ("call_jaxpr",)),
}


def param(eqn: JaxprEqn, key: str) -> Any:
    """Return a parameter of an equation.

    Raises:
      TraceError: the equation has no such parameter in this version of JAX.
    """
    if key not in eqn.params:
        raise TraceError(
            f"the primitive {eqn.primitive.name} of jax {jax.__version__} has no parameter "
            f"{key!r}, only {', '.join(eqn.params)}; dtrans does not support this version of jax, "
            "so install an older one"
        )
    return eqn.params[key]


def has_bodies(eqn: JaxprEqn) -> bool:
    """Return True for a loop, a branch or a call, which `bodies` accepts."""
    return eqn.primitive.name == COND or eqn.primitive.name in _BODIES


def bodies(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Return the jaxprs of a loop, a branch or a call.

    For a `while`, these are the condition and the body; for a `cond`, all branches.
    """
    if eqn.primitive.name == COND:
        return tuple(param(eqn, "branches"))
    return tuple(param(eqn, key) for key in _BODIES[eqn.primitive.name])


def with_bodies(eqn: JaxprEqn, new: Iterable[Any]) -> dict[str, Any]:
    """Return an equation's parameters with its bodies replaced by `new`."""
    if eqn.primitive.name == COND:
        return {"branches": tuple(new)}
    return dict(zip(_BODIES[eqn.primitive.name], new, strict=True))


def call_body(eqn: JaxprEqn, *, rules: bool) -> Any | None:
    """Return the jaxpr that may replace a call (inlining); None if the call must stay.

    Inlining calls lets analyses see one flat list of equations. After differentiation, custom
    derivative rules have no further use, so calls with such rules can be inlined. The body of a
    `custom_linear_solve` is its `solve`. `jax.checkpoint` is never inlined: the call keeps XLA from
    merging recomputed values.

    Args:
      eqn: the equation.
      rules: True to return None for calls with custom derivative rules.
    """
    name = eqn.primitive.name
    if name == LINEAR_SOLVE and not rules:
        return linear_solve(eqn, eqn.invars)[0]
    if is_plain_jit(eqn) or name in CALLS or (name in CUSTOM_RULES and not rules):
        return bodies(eqn)[0]
    return None


def call_operands(eqn: JaxprEqn) -> Sequence[Any]:
    """Return the operands that an equation passes to the jaxpr from `call_body`.

    These are all operands, except for a `custom_linear_solve`, which also has operands for other
    functions than `solve`.
    """
    if eqn.primitive.name == LINEAR_SOLVE:
        return linear_solve(eqn, eqn.invars)[1]
    operands: Sequence[Any] = eqn.invars
    return operands


def is_plain_jit(eqn: JaxprEqn) -> bool:
    """Return True for a `jit` without shardings and layouts, which can be inlined.

    Donation is ignored, because only the outermost `jit` can donate.
    """
    if eqn.primitive.name not in JIT:
        return False
    keys = ("in_shardings", "out_shardings", "in_layouts", "out_layouts")
    asked = [a for key in keys for a in eqn.params.get(key, ())]
    return all(type(a).__name__ == "UnspecifiedValue" or a is None for a in asked)


# -- loops -----------------------------------------------------------------------------------------


def scan_length(eqn: JaxprEqn) -> int:
    """Return the number of iterations of a `scan`."""
    return int(param(eqn, "length"))


def is_reversed(eqn: JaxprEqn) -> bool:
    """Return True if a `scan` runs its last iteration first."""
    return bool(param(eqn, "reverse"))


def scan_iterations(length: int) -> dict[str, Any]:
    """Return the parameters to change in a `scan` for another number of iterations."""
    return {"length": length}


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Return two numbers of a `scan`: its constants, and its carried operands.

    All other operands are scanned.
    """
    if "ft_in" in eqn.params:  # from jax 0.11, `ft_in` has one pytree for each kind of operand
        consts, carried, _ = map(len, eqn.params["ft_in"].unpack())
        return consts, carried
    return int(param(eqn, "num_consts")), int(param(eqn, "num_carry"))


def closed_over(eqn: JaxprEqn) -> int:
    """Return the number of leading operands of a `custom_vjp` that JAX does not differentiate.

    These are values that the function closes over. The result is 0 for other equations.
    """
    if eqn.primitive.name == CUSTOM_VJP:
        return int(eqn.params.get("num_consts", 0))
    return 0


def params_besides_bodies(eqn: JaxprEqn) -> dict[str, Any]:
    """Return an equation's parameters without its bodies, to compare two equations.

    Two equal scans may have different operand pytrees. So the numbers of constants and of carried
    operands replace these pytrees.
    """
    found = {
        key: value for key, value in eqn.params.items() if "jaxpr" not in key and key != "branches"
    }
    if eqn.primitive.name != SCAN:
        return found
    trees = ("ft_in", "ft_out", "num_consts", "num_carry")
    return {key: value for key, value in found.items() if key not in trees} | {
        "counts": scan_counts(eqn)
    }


def while_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Return two numbers of a `while`: constants of its condition, and constants of its body."""
    return int(param(eqn, "cond_nconsts")), int(param(eqn, "body_nconsts"))


class BodyIndices(NamedTuple):
    """Indices that relate an equation's operands and outputs to inputs and outputs of its bodies.

    Attributes:
      ins: for each body, a list: the equation's operand that is passed to each input of the body.
      outs: for each body, a list: the equation's output that each output of the body becomes. None
        for the condition of a `while`.
      carried: for each carried value of a loop: operand with the initial value -> output with the
        final value.
      slices: operands that a scan reads slice by slice.
      stacks: outputs that a scan stacks.
    """

    ins: Sequence[Sequence[int]]
    outs: Sequence[Sequence[int] | None]
    carried: Mapping[int, int] = MappingProxyType({})
    slices: Sequence[int] = ()
    stacks: Sequence[int] = ()


def body_indices(eqn: JaxprEqn) -> BodyIndices:
    """Return the indices that relate an equation to its bodies, as a `BodyIndices`."""
    name, ins, outs = eqn.primitive.name, range(len(eqn.invars)), range(len(eqn.outvars))
    if name == SCAN:
        consts, carried = scan_counts(eqn)
        first = consts + carried
        return BodyIndices(
            [ins],
            [outs],
            dict(zip(ins[consts:first], outs, strict=False)),
            ins[first:],
            outs[carried:],
        )
    if name == WHILE:
        of_cond, of_body = while_counts(eqn)
        carry = ins[of_cond + of_body :]
        return BodyIndices(
            [[*ins[:of_cond], *carry], ins[of_cond:]],
            [None, outs],
            dict(zip(carry, outs, strict=True)),
        )
    count = len(bodies(eqn))
    return BodyIndices([ins[int(name == COND) :]] * count, [outs] * count)


def scan_with(
    eqn: JaxprEqn, body: ClosedJaxpr, invars: Sequence[Atom], outvars: Sequence[Var]
) -> JaxprEqn:
    """Return a copy of a `scan` with a new body, new operands and new outputs.

    The numbers of scanned operands and stacked outputs may change. The numbers of constants and
    carried values must stay the same.
    """
    return rebuilt(eqn, [body], invars, outvars)


def rebuilt(
    eqn: JaxprEqn,
    new: Iterable[Any],
    invars: Sequence[Atom],
    outvars: Sequence[Var],
    first: Sequence[Atom] = (),
) -> JaxprEqn:
    """Return a copy of a loop, a branch or a call with new bodies, operands and outputs.

    A loop must have as many constants and carried values as before. A `scan` may have other scanned
    operands and stacked outputs.

    Args:
      eqn: the old equation.
      new: the new bodies.
      invars, outvars: the new operands and outputs.
      first: additional operands, which every body takes as its first inputs; constants in a loop.
    """
    name, count, params = eqn.primitive.name, len(first), {**eqn.params, **with_bodies(eqn, new)}
    operands = [*first, *invars]
    if name == COND:
        operands = [invars[0], *first, *invars[1:]]
    elif name == WHILE:
        of_cond, of_body = while_counts(eqn)
        operands = [*first, *invars[:of_cond], *first, *invars[of_cond:]]
        params |= {"cond_nconsts": of_cond + count, "body_nconsts": of_body + count}
    elif name == SCAN:
        consts, carried = scan_counts(eqn)
        params |= {"num_consts": consts + count}
        if "ft_in" in params:
            del params["num_consts"]
            params |= _scan_trees(
                consts + count, carried, len(invars) - consts - carried, len(outvars) - carried
            )
    return eqn.replace(invars=operands, outvars=list(outvars), params=params)


@functools.cache
def _scan_trees(consts: int, carried: int, scanned: int, stacked: int) -> dict[str, Any]:
    """Return the operand pytrees that a JAX 0.11 `scan` needs, by tracing an example."""

    def loop(fixed: list[Any], carry: list[Any], parts: list[Any]) -> Any:
        def turn(carry: list[Any], parts: list[Any]) -> tuple[list[Any], list[Any]]:
            one = sum([*fixed, *carry, *parts], 0.0)  # read all, since JAX drops unread constants
            return [one] * carried, [one] * stacked

        return jax.lax.scan(turn, carry, parts, length=1)

    jaxpr = jax.make_jaxpr(loop)([0.0] * consts, [0.0] * carried, [jax.numpy.zeros(1)] * scanned)
    (eqn,) = (e for e in opened(jaxpr).eqns if e.primitive.name == SCAN)
    return {key: eqn.params[key] for key in ("ft_in", "ft_out")}


def linear_solve(eqn: JaxprEqn, operands: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the `solve` jaxpr of a `custom_linear_solve`, and the operands of this jaxpr."""
    lengths, jaxprs = param(eqn, "const_lengths"), param(eqn, "jaxprs")
    counts = [int(n) for n in lengths]  # constants of matvec, vecmat, ...
    first = sum(counts[:2])
    return jaxprs.solve, [*operands[first : first + counts[2]], *operands[sum(counts) :]]


def combiner_of(eqn: JaxprEqn) -> Any:
    """Return the jaxpr by which a `reduce` combines two numbers."""
    return param(eqn, "jaxpr")


# -- callbacks -------------------------------------------------------------------------------------

CALLBACKS = ("debug_callback", "debug_print", "io_callback")  # with side effects


def host_function(eqn: JaxprEqn) -> Callable[..., Any]:
    """Return the host function of a callback."""
    if eqn.primitive.name == "debug_print":
        impl: Any = eqn.primitive.impl
        return functools.partial(impl, **eqn.params)
    fn: Callable[..., Any] = param(eqn, "callback")
    return fn


def is_ordered(eqn: JaxprEqn) -> bool:
    """Return True if an equation is an ordered callback (`ordered=True`), or contains one."""
    return any(type(e).__name__.startswith("Ordered") for e in eqn.effects)


# -- names and axes --------------------------------------------------------------------------------


def checkpoint_name_of(eqn: JaxprEqn) -> str | None:
    """Return the name from `jax.ad_checkpoint.checkpoint_name`; None for any other equation."""
    if eqn.primitive.name == "name":
        return str(param(eqn, "name"))
    # from jax 0.12, JAX_REMAT3 wraps the primitive in a `call_hi_primitive`
    hijax: Any = eqn.params.get("_prim") if eqn.primitive.name == "call_hi_primitive" else None
    if type(hijax).__name__ == "CheckpointName":
        return str(hijax.name)
    return None


def axes_of(eqn: JaxprEqn) -> list[Any]:
    """Return the axes of a JAX collective: mesh axes, or array dimensions under `vmap`."""
    each = [eqn.params.get(key, ()) for key in ("axes", "axis_name")]
    return [n for axes in each for n in (axes if isinstance(axes, (tuple, list)) else (axes,))]


@dataclasses.dataclass(frozen=True)
class ShardMap:
    """Parameters of a `shard_map` equation.

    Attributes:
      axes: mesh axis -> size.
      manual: the axes over which the body communicates explicitly.
      in_specs, out_specs: partition specs of operands and results.
      body: jaxpr of one device.
    """

    axes: dict[str, int]
    manual: frozenset[str]
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]
    body: Any


def shard_map_of(eqn: JaxprEqn) -> ShardMap:
    """Return the parameters of a `shard_map` equation."""
    key = "manual_axes" if "manual_axes" in eqn.params else "newly_manual_axes"
    return ShardMap(
        dict(param(eqn, "mesh").shape),
        frozenset(param(eqn, key)),
        tuple(param(eqn, "in_specs")),
        tuple(param(eqn, "out_specs")),
        param(eqn, "jaxpr"),
    )
