"""Reading and rebuilding jaxprs.

Two tools are all that the transforms need. `inline_calls` flattens a program, so that every value that
matters is visible at the top. `Builder` writes a new jaxpr: it copies equations of an old one under a
substitution of variables, binds new ones by asking the primitive for its own output types, and closes
the result over just the constants it used. Equations are moved, never mutated, and keep their source
information; no shape is ever written by hand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax

from dtrans._jax import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    abstract_eval,
    closed,
    constants,
    is_plain_jit,
    live_part,
    new_jaxpr_eqn,
    opened,
    small_jaxpr,
    within_scope,
)


# Calls whose body may stand in their place. The derivative rules of custom_jvp and custom_vjp are dead
# weight once gradients have been taken. remat is not here: it is what keeps XLA from merging recomputation.
_INLINED = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # from 0.11, in the place of the two before
}


# those of them that say how they are differentiated
_WITH_RULES = ("custom_jvp_call", "custom_vjp_call")


def _called(eqn: JaxprEqn, rules: bool) -> Any | None:
    """The body of a call that may be inlined; with `rules`, derivative rules are still wanted."""
    if is_plain_jit(eqn):
        return eqn.params["jaxpr"]
    key = _INLINED.get(eqn.primitive.name)
    return None if key is None or (rules and eqn.primitive.name in _WITH_RULES) else eqn.params[key]


# identities that say where a derivative begins (`dtrans.marks`), or how a value is merged (`dtrans.collect`)
_PASSED = ("loss", "loss_seed", "collect")


def inline_calls(jaxpr: ClosedJaxpr, keep: Collection[str] = (), *, rules: bool = False) -> ClosedJaxpr:
    """Replace every call by its body, at the top level and below.

    Loops and branches stay, and so do identities of this package that are named in `keep`. Inlined equations keep the
    name stack they had inside the call, under that of the call; constants of bodies become constants of the whole.

    Args:
      rules: leave calls that have a derivative of their own, since this is still to be differentiated.
    """
    outer = opened(jaxpr)
    constvars, consts = list(outer.constvars), constants(jaxpr)
    hoisted: dict[int, Var] = {}
    eqns: list[JaxprEqn] = []

    def walk(inner: Jaxpr, env: dict[Var, Atom], wrap: Callable[[JaxprEqn], JaxprEqn], top: bool) -> None:
        read: Callable[[Atom], Atom] = lambda a: a if isinstance(a, Literal) else env.get(a, a)
        for eqn in inner.eqns:
            body = _called(eqn, rules)
            if eqn.primitive.name in _PASSED and eqn.primitive.name not in keep:
                env[eqn.outvars[0]] = read(eqn.invars[0])
                continue
            if body is None:
                # a body can be shared by several calls, so its variables are made anew for each
                outs = list(eqn.outvars) if top else [Var(v.aval) for v in eqn.outvars]
                env.update(zip(eqn.outvars, outs, strict=True))
                eqns.append(wrap(eqn.replace(invars=[read(a) for a in eqn.invars], outvars=outs)))
                continue
            sub = opened(body)
            inside: dict[Var, Atom] = dict(zip(sub.invars, map(read, eqn.invars), strict=True))
            for var, value in zip(sub.constvars, constants(body), strict=True):
                if id(value) not in hoisted:
                    hoisted[id(value)] = Var(var.aval)
                    constvars.append(hoisted[id(value)])
                    consts.append(value)
                inside[var] = hoisted[id(value)]
            walk(sub, inside, functools.partial(_within, call=eqn, wrap=wrap), top=False)
            for out, made in zip(eqn.outvars, sub.outvars, strict=True):
                env[out] = made if isinstance(made, Literal) else inside.get(made, made)

    env: dict[Var, Atom] = {}
    walk(outer, env, lambda e: e, top=True)
    outvars = [a if isinstance(a, Literal) else env.get(a, a) for a in outer.outvars]
    return closed(constvars, consts, outer.invars, outvars, eqns, jaxpr)


def _within(eqn: JaxprEqn, call: JaxprEqn, wrap: Callable[[JaxprEqn], JaxprEqn]) -> JaxprEqn:
    return wrap(within_scope(eqn, call))


def needed(eqns: Sequence[JaxprEqn], outputs: Iterable[Atom], stop: Iterable[Var] = ()) -> tuple[list[int], set[Var]]:
    """What `outputs` are made of.

    Returns the positions of the equations they need, in order, and the variables those read that none of
    them makes. Nothing is followed beyond the variables in `stop`.
    """
    stops = set(stop)
    wanted = {a for a in outputs if isinstance(a, Var)}
    kept: list[int] = []
    for i in range(len(eqns) - 1, -1, -1):
        eqn = eqns[i]
        made = [v for v in eqn.outvars if v in wanted and v not in stops]
        if made:
            kept.append(i)
            wanted.difference_update(made)
            wanted.update(a for a in eqn.invars if isinstance(a, Var))
    return kept[::-1], wanted


def eliminate_dead(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Drop what no output needs, inside loops and branches too. All inputs stay; unused constants go."""
    inner = opened(jaxpr)
    hoisted = inner.replace(
        constvars=[],
        invars=[*inner.constvars, *inner.invars],
        debug_info=inner.debug_info.with_unknown_names(),
    )
    count = len(inner.constvars)
    pruned, used = live_part(hoisted, [True] * len(inner.outvars), [False] * count + [True] * len(inner.invars))
    live = sum(used[:count])
    consts = [c for c, u in zip(constants(jaxpr), used[:count], strict=True) if u]
    return closed(pruned.invars[:live], consts, pruned.invars[live:], pruned.outvars, pruned.eqns, jaxpr)


@functools.lru_cache(maxsize=4096)
def _traced(fn: Callable[..., Any], types: tuple[Any, ...]) -> ClosedJaxpr:
    jaxpr = inline_calls(small_jaxpr(fn, types))
    assert not constants(jaxpr), f"{fn} closes over an array"
    return jaxpr


class Builder:
    """Writes one closed jaxpr, equation by equation.

    Args:
      like: the jaxpr that equations are copied from; its constants can be read.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.rewrite import Builder
      >>> old = jax.make_jaxpr(lambda x: jnp.sin(x))(1.0)
      >>> b = Builder(old)
      >>> x = b.input(old.jaxpr.invars[0].aval)
      >>> (y,) = b.copy(old.jaxpr.eqns[0], [x])
      >>> (z,) = b.bind(jax.lax.add_p, y, y)
      >>> jax.core.eval_jaxpr((new := b.build([z])).jaxpr, new.consts, 0.0)[0].item()
      0.0
    """

    def __init__(self, like: ClosedJaxpr) -> None:
        self._like = like
        self._constants: Mapping[Var, Any] = dict(zip(opened(like).constvars, constants(like), strict=True))
        self._used: dict[Var, Any] = {}
        self.invars: list[Var] = []
        self.eqns: list[JaxprEqn] = []
        self.roles: list[str] = []
        self.role = ""
        self.labels: dict[Var, str] = {}

    def input(self, aval: Any) -> Var:
        """A new input."""
        self.invars.append(Var(aval))
        return self.invars[-1]

    def constant(self, value: Any) -> Var:
        """A new constant."""
        var = Var(jax.typeof(value))
        self._used[var] = value
        return var

    def is_constant(self, var: Var) -> bool:
        """Whether a variable of the old jaxpr is one of its constants."""
        return var in self._constants

    def constant_value(self, var: Var) -> Any:
        """The value of a constant of the old jaxpr."""
        return self._constants[var]

    def call(self, fn: Callable[..., Any], *atoms: Atom) -> list[Atom]:
        """The equations of a small pure function of arrays. It is traced once for each set of types: pass no lambda."""
        return self.inline(_traced(fn, tuple(a.aval for a in atoms)), *atoms)

    def inline(self, jaxpr: ClosedJaxpr, *atoms: Atom) -> list[Atom]:
        """The equations of another closed jaxpr, on operands of the types of its inputs; its outputs."""
        body = opened(jaxpr)
        assert all(a.aval.shape == v.aval.shape for a, v in zip(atoms, body.invars, strict=True)), (atoms, body.invars)
        env: dict[Var, Atom] = dict(zip(body.invars, atoms, strict=True))
        env.update((v, self.constant(c)) for v, c in zip(body.constvars, constants(jaxpr), strict=True))
        read = lambda a: a if isinstance(a, Literal) else env[a]
        for eqn in body.eqns:
            made = self.copy(eqn, [read(a) for a in eqn.invars], [v.aval for v in eqn.outvars])
            env.update(zip(eqn.outvars, made, strict=True))
        return [read(a) for a in body.outvars]

    def bind(self, primitive: Primitive, *atoms: Atom, **params: Any) -> list[Var]:
        """A new equation; its output types are what the primitive makes of the operands' types.

        For primitives whose parameters are known: those of this package, and a few of `jax.lax`. Others get
        parameters from release to release; use `call`.
        """
        outs = [Var(t) for t in abstract_eval(primitive, [a.aval for a in atoms], params)]
        self._append(new_jaxpr_eqn(list(atoms), outs, primitive, params, set()), atoms)
        return outs

    def part(self, value: Atom, axis: int, start: int, stop: int) -> Var:
        """Entries `start` to `stop` of a value along one axis."""
        begin, end = [0] * value.aval.ndim, list(value.aval.shape)
        begin[axis], end[axis] = start, stop
        (made,) = self.bind(jax.lax.slice_p, value, start_indices=tuple(begin), limit_indices=tuple(end), strides=None)
        return made

    def copy(
        self, eqn: JaxprEqn, atoms: Sequence[Atom], types: Sequence[Any] | None = None, **params: Any
    ) -> list[Var]:
        """An equation of the old jaxpr on other operands.

        Its output types are worked out anew where operands differ, unless they are known (`types`).
        """
        if types is not None:
            pass
        elif not params and all(a.aval == b.aval for a, b in zip(atoms, eqn.invars, strict=True)):
            types = [v.aval for v in eqn.outvars]
        else:
            types = abstract_eval(eqn.primitive, [a.aval for a in atoms], {**eqn.params, **params})
        outs = [Var(t) for t in types]
        changed = {**eqn.params, **params} if params else eqn.params
        self._append(eqn.replace(invars=list(atoms), outvars=outs, params=changed), atoms)
        return outs

    def keep(self, eqn: JaxprEqn, invars: Sequence[Atom] | None = None) -> None:
        """An equation of the old jaxpr with its own output variables."""
        atoms = list(eqn.invars if invars is None else invars)
        self._append(eqn if invars is None else eqn.replace(invars=atoms), atoms)

    def _append(self, eqn: JaxprEqn, atoms: Sequence[Atom]) -> None:
        self._note(atoms)
        self.eqns.append(eqn)
        self.roles.append(self.role)

    def _note(self, atoms: Iterable[Atom]) -> None:
        for a in atoms:
            if isinstance(a, Var) and a in self._constants:
                self._used[a] = self._constants[a]

    def build(self, outvars: Sequence[Atom]) -> ClosedJaxpr:
        """The finished jaxpr. Dead equations are not removed: see `needed` and `eliminate_dead`."""
        self._note(outvars)
        return closed(list(self._used), list(self._used.values()), self.invars, list(outvars), self.eqns, self._like)
