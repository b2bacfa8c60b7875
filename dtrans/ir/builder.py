"""Reading and rebuilding jaxprs.

Two tools are all that the transforms need. `inline_calls` flattens a program, so that every value
that matters is visible at the top. `Builder` writes a new jaxpr: it copies equations of an old one
under a substitution of variables, binds new ones by asking the primitive for its own output types,
and closes the result over just the constants it used. Equations are moved, never mutated, and keep
their source information; no shape is ever written by hand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from dtrans._jax import (
    REMAT,
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Primitive,
    Var,
    abstract_eval,
    closed,
    constants,
    from_line_of,
    new_jaxpr_eqn,
    opened,
    rebuilt,
    small_jaxpr,
)
from dtrans.ir.inline import inline_calls


@functools.lru_cache(maxsize=4096)
def _traced(fn: Callable[..., Any], types: tuple[Any, ...]) -> ClosedJaxpr:
    jaxpr = inline_calls(small_jaxpr(fn, types))
    assert not constants(jaxpr), f"{fn} closes over an array"
    return jaxpr


def read_from(env: Mapping[Var, Atom], atoms: Iterable[Atom]) -> list[Atom]:
    """Return values in the place of others; literals, and variables that are not in `env`, stay."""
    return [env.get(a, a) if isinstance(a, Var) else a for a in atoms]


class Builder:
    """Writes one closed jaxpr, equation by equation.

    Args:
      like: the jaxpr that equations are copied from; its constants can be read.

    Attributes:
      role: of what is written next.
      source: the equation that new ones are written for: they come from its line.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.ir.builder import Builder
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
        self._constants: Mapping[Var, Any] = dict(
            zip(opened(like).constvars, constants(like), strict=True)
        )
        self._used: dict[Var, Any] = {}
        self.invars: list[Var] = []
        self.eqns: list[JaxprEqn] = []
        self.roles: list[str] = []
        self.role = ""
        self.source: JaxprEqn | None = None
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
        """The equations of a small pure function of arrays. It is traced once for each set of
        types: pass no lambda."""
        return self.inline(_traced(fn, tuple(a.aval for a in atoms)), *atoms)

    def call_as(self, var: Var, fn: Callable[..., Any], *atoms: Atom) -> None:
        """Write a function as `call` does; its output is a variable of the old jaxpr, which other
        equations read."""
        self.call(fn, *atoms)
        self.eqns[-1] = self.eqns[-1].replace(outvars=[var])

    def inline(self, jaxpr: ClosedJaxpr, *atoms: Atom) -> list[Atom]:
        """The equations of another closed jaxpr, on operands of the types of its inputs; its
        outputs."""
        body = opened(jaxpr)
        assert all(a.aval.shape == v.aval.shape for a, v in zip(atoms, body.invars, strict=True)), (
            atoms,
            body.invars,
        )
        return self.inline_part(
            jaxpr, dict(zip(body.invars, atoms, strict=True)), body.eqns, body.outvars
        )

    def inline_part(
        self,
        jaxpr: ClosedJaxpr,
        env: Mapping[Var, Atom],
        eqns: Iterable[JaxprEqn],
        wanted: Iterable[Atom],
    ) -> list[Atom]:
        """Write some equations of another jaxpr; return values that are wanted of it.

        Args:
          env: values of the other jaxpr that are here, by its variables. Others keep their
            variables.
          eqns: in order, those that make `wanted` of these values.
        """
        known: dict[Var, Atom] = dict(env)
        known |= zip(opened(jaxpr).constvars, map(self.constant, constants(jaxpr)), strict=True)
        for eqn in eqns:
            eqn = eqn if self.source is None else from_line_of(eqn, self.source)
            made = self.copy(eqn, read_from(known, eqn.invars), [v.aval for v in eqn.outvars])
            known.update(zip(eqn.outvars, made, strict=True))
        return read_from(known, wanted)

    def bind(self, primitive: Primitive, *atoms: Atom, **params: Any) -> list[Var]:
        """A new equation; its output types are what the primitive makes of the operands' types.

        For primitives whose parameters are known: those of this package, and a few of `jax.lax`.
        Others get parameters from release to release; use `call`.
        """
        outs = [Var(t) for t in abstract_eval(primitive, [a.aval for a in atoms], params)]
        eqn = new_jaxpr_eqn(list(atoms), outs, primitive, params, set())
        self._append(eqn if self.source is None else from_line_of(eqn, self.source), atoms)
        return outs

    def part(self, value: Atom, axis: int, start: int, stop: int) -> Var:
        """Entries `start` to `stop` of a value along one axis."""
        begin, end = [0] * value.aval.ndim, list(value.aval.shape)
        begin[axis], end[axis] = start, stop
        (made,) = self.bind(
            jax.lax.slice_p,
            value,
            start_indices=tuple(begin),
            limit_indices=tuple(end),
            strides=None,
        )
        return made

    def copy(
        self,
        eqn: JaxprEqn,
        atoms: Sequence[Atom],
        types: Sequence[Any] | None = None,
        **params: Any,
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

    def copy_with_bodies(
        self,
        eqn: JaxprEqn,
        new: Iterable[Any],
        atoms: Sequence[Atom],
        types: Sequence[Any],
        first: Sequence[Atom] = (),
        **params: Any,
    ) -> list[Var]:
        """Write a loop, a branch or a call of the old jaxpr with other bodies; return its outputs.

        Args:
          new: its bodies, in order.
          atoms, types: its operands, and the types of its outputs.
          first: operands that all bodies take in front of theirs.
        """
        made = self.with_bodies(eqn, new, atoms, [Var(t) for t in types], first)
        return self.copy(made, made.invars, types, **params)

    def with_bodies(
        self,
        eqn: JaxprEqn,
        new: Iterable[Any],
        atoms: Sequence[Atom],
        outvars: Sequence[Var],
        first: Sequence[Atom] = (),
    ) -> JaxprEqn:
        """Return a loop, a branch or a call with other bodies, operands and outputs; arguments as
        above."""
        if eqn.primitive.name in REMAT:  # the body of remat cannot have constants
            (body,) = new
            inner, held = opened(body), [self.constant(c) for c in constants(body)]
            first = [*held, *first]
            invars = [*inner.constvars, *inner.invars]
            new = [opened(closed((), (), invars, inner.outvars, inner.eqns, body))]
        return rebuilt(eqn, new, atoms, outvars, first)

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
        return closed(
            list(self._used),
            list(self._used.values()),
            self.invars,
            list(outvars),
            self.eqns,
            self._like,
        )


def extract_part(
    jaxpr: ClosedJaxpr, invars: Iterable[Var], eqns: Iterable[JaxprEqn], outvars: Sequence[Atom]
) -> ClosedJaxpr:
    """Return a jaxpr of some equations of another, with the constants that they read."""
    b = Builder(jaxpr)
    b.invars += invars
    for eqn in eqns:
        b.keep(eqn)
    return b.build(outvars)
