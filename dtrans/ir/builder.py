"""Construction of jaxprs from equations of other jaxprs.

`Builder` writes a new jaxpr, usually from a jaxpr that `inline_calls` flattened. The builder copies
equations of the old jaxpr with other operands, and adds new equations. The rule of each primitive
infers the types of outputs. The new jaxpr contains only the constants that it reads. Equations are
never mutated, and copies keep their source information.
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
from dtrans.ir.dataflow import avals
from dtrans.ir.inline import inline_calls


@functools.lru_cache(maxsize=4096)
def _traced(fn: Callable[..., Any], types: tuple[Any, ...]) -> ClosedJaxpr:
    jaxpr = inline_calls(small_jaxpr(fn, types))
    assert not constants(jaxpr), f"{fn} closes over an array"
    return jaxpr


def read_from(env: Mapping[Var, Atom], atoms: Iterable[Atom]) -> list[Atom]:
    """Return `env[atom]` for each atom in `env`; return other variables and literals unchanged."""
    return [env.get(a, a) if isinstance(a, Var) else a for a in atoms]


class Builder:
    """Writer of one closed jaxpr, equation by equation.

    Args:
      like: the old jaxpr, from which equations are copied; new equations may read its constants.

    Attributes:
      role: role (purpose, such as `forward`) that the next equations get.
      source: an equation; new equations get its source line.

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
        """Add an input of this type and return its variable."""
        self.invars.append(Var(aval))
        return self.invars[-1]

    def inputs(self, types: Iterable[Any]) -> list[Var]:
        """Append an input for each type; return the new variables."""
        return [self.input(aval) for aval in types]

    def constant(self, value: Any) -> Var:
        """Add a constant array and return its variable."""
        var = Var(jax.typeof(value))
        self._used[var] = value
        return var

    def is_constant(self, var: Var) -> bool:
        """Return True if a variable of the old jaxpr is one of its constants."""
        return var in self._constants

    def constant_value(self, var: Var) -> Any:
        """Return the value of a constant of the old jaxpr."""
        return self._constants[var]

    def call(self, fn: Callable[..., Any], *atoms: Atom) -> list[Atom]:
        """Write the equations of a small pure function of arrays, and return its outputs.

        Args:
          fn: the function. Traces are cached by function object, so pass a module-level or cached
            function, not a new lambda.
          atoms: the operands.
        """
        return self.inline(_traced(fn, tuple(avals(atoms))), *atoms)

    def call_as(self, var: Var, fn: Callable[..., Any], *atoms: Atom) -> None:
        """Write the equations of a function; its output becomes `var`, a variable of the old jaxpr.

        Equations that are copied later and read `var` then read this output.
        """
        self.call(fn, *atoms)
        self.eqns[-1] = self.eqns[-1].replace(outvars=[var])

    def inline(self, jaxpr: ClosedJaxpr, *atoms: Atom) -> list[Atom]:
        """Write the equations of another closed jaxpr, applied to `atoms`; return its outputs."""
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
        """Copy some equations of another jaxpr; return the copies of the values in `wanted`.

        Args:
          jaxpr: the other jaxpr.
          env: maps variables of `jaxpr` to values of the new jaxpr; other variables stay unchanged.
          eqns: equations in order.
          wanted: variables of `jaxpr`; the method returns their new values.
        """
        known: dict[Var, Atom] = dict(env)
        known |= zip(opened(jaxpr).constvars, map(self.constant, constants(jaxpr)), strict=True)
        for eqn in eqns:
            if self.source is not None:
                eqn = from_line_of(eqn, self.source)
            outputs = self.copy(eqn, read_from(known, eqn.invars), avals(eqn.outvars))
            known.update(zip(eqn.outvars, outputs, strict=True))
        return read_from(known, wanted)

    def bind(self, primitive: Primitive, *atoms: Atom, **params: Any) -> list[Var]:
        """Write a new equation and return its outputs; their types follow from the operands.

        Use this method for primitives of dtrans, and for primitives of `jax.lax` with stable
        parameters. Use `call` for other primitives, because their parameters change between JAX
        releases.
        """
        types = abstract_eval(primitive, avals(atoms), params)
        outs = [Var(t) for t in types]
        eqn = new_jaxpr_eqn(list(atoms), outs, primitive, params, set())
        if self.source is not None:
            eqn = from_line_of(eqn, self.source)
        self._append(eqn, atoms)
        return outs

    def part(self, value: Atom, axis: int, start: int, stop: int) -> Var:
        """Write the slice `start:stop` of a value along one axis, and return it."""
        begin, end = [0] * value.aval.ndim, list(value.aval.shape)
        begin[axis], end[axis] = start, stop
        (piece,) = self.bind(
            jax.lax.slice_p,
            value,
            start_indices=tuple(begin),
            limit_indices=tuple(end),
            strides=None,
        )
        return piece

    def trim(self, value: Atom, axis: int, size: int) -> Atom:
        """Return the first `size` entries along an axis; write a slice if there are more."""
        return value if value.aval.shape[axis] == size else self.part(value, axis, 0, size)

    def copy(
        self,
        eqn: JaxprEqn,
        atoms: Sequence[Atom],
        types: Sequence[Any] | None = None,
        **params: Any,
    ) -> list[Var]:
        """Write an equation of the old jaxpr with other operands, and return its outputs.

        Args:
          eqn: the equation.
          atoms: its new operands.
          types: types of the outputs. By default, these are the old types. If a parameter or the
            type of an operand changes, they are inferred instead.
          params: changed parameters.
        """
        if types is None and not params and avals(atoms) == avals(eqn.invars):
            types = avals(eqn.outvars)
        if types is None:
            types = abstract_eval(eqn.primitive, avals(atoms), {**eqn.params, **params})
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
        """Write a loop, a branch or a call of the old jaxpr with new bodies; return its outputs.

        Args:
          eqn: the equation.
          new: its new bodies, in order.
          atoms: its new operands.
          types: types of its outputs.
          first: additional operands, which every body takes as its first inputs.
          params: other changed parameters.
        """
        rewritten = self.with_bodies(eqn, new, atoms, [Var(t) for t in types], first)
        return self.copy(rewritten, rewritten.invars, types, **params)

    def with_bodies(
        self,
        eqn: JaxprEqn,
        new: Iterable[Any],
        atoms: Sequence[Atom],
        outvars: Sequence[Var],
        first: Sequence[Atom] = (),
    ) -> JaxprEqn:
        """Return a loop, a branch or a call with new bodies, but do not write it.

        Args:
          eqn, new, atoms, first: as for `copy_with_bodies`.
          outvars: output variables of the new equation.
        """
        if eqn.primitive.name in REMAT:  # a remat body has no constants
            (body,) = new
            inner, body_constants = opened(body), [self.constant(c) for c in constants(body)]
            first = [*body_constants, *first]
            invars = [*inner.constvars, *inner.invars]
            new = [opened(closed((), (), invars, inner.outvars, inner.eqns, body))]
        return rebuilt(eqn, new, atoms, outvars, first)

    def keep(self, eqn: JaxprEqn, invars: Sequence[Atom] | None = None) -> None:
        """Append an equation of the old jaxpr with the same output variables.

        Args:
          eqn: the equation.
          invars: new operands; by default, the old ones.
        """
        if invars is None:
            self._append(eqn, eqn.invars)
        else:
            atoms = list(invars)
            self._append(eqn.replace(invars=atoms), atoms)

    def _append(self, eqn: JaxprEqn, atoms: Sequence[Atom]) -> None:
        self._note(atoms)
        self.eqns.append(eqn)
        self.roles.append(self.role)

    def _note(self, atoms: Iterable[Atom]) -> None:
        for a in atoms:
            if isinstance(a, Var) and a in self._constants:
                self._used[a] = self._constants[a]

    def build(self, outvars: Sequence[Atom]) -> ClosedJaxpr:
        """Return the new jaxpr with these outputs; `eliminate_dead` removes its dead equations."""
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
    """Return a jaxpr of some equations of `jaxpr`, with the constants that these equations read."""
    b = Builder(jaxpr)
    b.invars += invars
    for eqn in eqns:
        b.keep(eqn)
    return b.build(outvars)
