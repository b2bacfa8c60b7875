"""Writing the equations that make parts of values: some entries along one axis, and as little as
possible of the rest.

A parameter server starts from rows `start:stop` of leaves that one device would make whole; or it
makes the rows of a table when they are first asked for, by their numbers. What is wanted of the
outputs of an init says what is wanted of the values they are made of, equation by equation, from
the last to the first (`dtrans.rows.parts`); then the equations are written, in their order, each
for the parts that are wanted of it. What has no rule is made whole, and the part is cut out: a QR
decomposition, a permutation, a loop. Of a value that is wanted whole anyway, parts are cut.

So zeros, ones, constants, and whatever is drawn by `jax.random.normal`, `uniform` and
`truncated_normal` under the default generator (see `dtrans.rows.random_bits`), scaled, reshaped,
transposed or concatenated, with the optimizer's state that is made of it, is made in blocks; an
orthogonal initialiser's leaves are whole first.

Everything is a loop over equations: init of a deep model splits one key a thousand times in a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, opened, warn_if_unknown
from dtrans.ir.builder import Builder
from dtrans.ir.program import DIST
from dtrans.rows.parts import Recipe, Want, recipe_of
from dtrans.rows.slices import Slice, Start


def write_parts(b: Builder, jaxpr: ClosedJaxpr, wanted: Sequence[Want]) -> list[Atom]:
    """Write the equations of `jaxpr` that make parts of its values.

    Args:
      b: writes to a program that has the inputs of `jaxpr`, and is like it.
      jaxpr: its calls inlined (`dtrans.ir.inline.inline_calls`).
      wanted: variables of `jaxpr`, with the part that is wanted of each; None for the whole.

    Returns: what is wanted, in that order.

    Example:
      >>> import jax
      >>> from dtrans.ir.builder import Builder
      >>> from dtrans.ir.inline import inline_calls
      >>> init = inline_calls(jax.make_jaxpr(lambda key: 0.1 * jax.random.normal(key, (6, 2)).T)(jax.random.key(0)))
      >>> b = Builder(init)
      >>> b.invars += init.jaxpr.invars
      >>> made = write_parts(b, init, [(init.jaxpr.outvars[0], Slice(axis=1, start=2, size=3))])
      >>> [str(v.aval) for e in b.eqns for v in e.outvars][-3:]
      ['float32[3,2]', 'float32[2,3]', 'float32[2,3]']
    """
    plan = _Plan(opened(jaxpr).eqns, wanted)
    made: dict[Want, Atom] = {}

    def read(want: Want) -> Atom:
        atom, part = plan.normal(want)
        if part is None:
            return atom
        if (atom, part) not in made:
            role, b.role = b.role, DIST
            made[atom, part] = part.cut(b, atom)
            b.role = role
        return made[atom, part]

    for eqn, recipes in plan.steps():
        if recipes is None:
            b.keep(eqn)
            continue
        for want, recipe in recipes:
            made[want] = recipe.write(b, [read(need) for need in recipe.needs])
    return [read(want) for want in wanted]


def write_rows(
    b: Builder, jaxpr: ClosedJaxpr, wanted: Sequence[tuple[Atom, int]], numbers: Var
) -> list[Atom]:
    """Write the equations of an init that make some rows of its outputs: those whose numbers a
    vector has.

    They are the rows of the whole bit for bit, in the order of the numbers, which may repeat. An
    output that cannot be made so (`makes_rows`) is made whole, and its rows are picked. A number
    that no row has gives a row of anything.

    Args:
      b, jaxpr: as `write_parts` takes them.
      wanted: outputs of `jaxpr`, each with the axis that its rows are on.
      numbers: of the rows, int32[n]: a variable of the program that is written.

    Returns: of each output, `n` entries along that axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.ir.builder import Builder
      >>> from dtrans.ir.inline import inline_calls
      >>> fn = lambda key: jax.random.normal(key, (1000, 2))
      >>> init = inline_calls(jax.make_jaxpr(fn)(jax.random.key(0)))
      >>> b = Builder(init)
      >>> b.invars += init.jaxpr.invars
      >>> numbers = b.input(jax.typeof(jnp.zeros(3, jnp.int32)))
      >>> made = b.build(write_rows(b, init, [(init.jaxpr.outvars[0], 0)], numbers))
      >>> some = jnp.array([7, 0, 7], jnp.int32)
      >>> (rows,) = jax.core.eval_jaxpr(made.jaxpr, made.consts, jax.random.key(0), some)
      >>> bool((rows == fn(jax.random.key(0))[some]).all())
      True
    """
    start = Start(lambda b: numbers)
    return write_parts(
        b, jaxpr, [(a, Slice(axis, start, numbers.aval.shape[0])) for a, axis in wanted]
    )


def makes_rows(jaxpr: ClosedJaxpr, output: Atom, axis: int) -> bool:
    """Whether `write_rows` makes rows of an output without anything that has all of them.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.ir.inline import inline_calls
      >>> init = lambda key: ((w := jax.random.uniform(key, (6, 2))), jnp.sort(w, axis=0))
      >>> init = inline_calls(jax.make_jaxpr(init)(jax.random.key(0)))
      >>> [makes_rows(init, v, 0) for v in init.jaxpr.outvars]
      [True, False]
    """
    plan = _Plan(opened(jaxpr).eqns, [(output, Slice(axis, Start(lambda b: output), 1))])
    return not plan.cuts


class _Plan:
    """What is wanted of each value, and how the parts are made.

    Attributes:
      cuts: parts that are cut out of values which are made whole, or are there.
    """

    def __init__(self, eqns: Sequence[JaxprEqn], wanted: Sequence[Want]) -> None:
        self.eqns = eqns
        self._wanted: dict[
            Atom, dict[Slice | None, None]
        ] = {}  # in the order in which it was found out
        self._recipes: dict[int, list[tuple[Want, Recipe]] | None] = {}
        made = {v for e in eqns for v in e.outvars}
        self.cuts: list[Want] = []
        for want in wanted:
            self._add(want)
        for i in range(len(eqns) - 1, -1, -1):
            eqn, found = eqns[i], self._of(eqns[i])
            self._recipes[i] = found
            needs = (
                [(a, None) for a in eqn.invars]
                if found is None
                else [n for _, r in found for n in r.needs]
            )
            for need in needs:
                self._add(need)
            if found is None:
                self.cuts += [(v, part) for v in eqn.outvars for part in self._parts(v)]
        self.cuts += [(v, part) for v in self._wanted if v not in made for part in self._parts(v)]

    def steps(self) -> Iterator[tuple[JaxprEqn, list[tuple[Want, Recipe]] | None]]:
        """All equations in order: with the parts that it makes, or None for one that is carried out
        as it is."""
        return ((eqn, self._recipes[i]) for i, eqn in enumerate(self.eqns))

    def normal(self, want: Want) -> Want:
        """A part that is everything is the whole."""
        atom, part = want
        return (
            (atom, None)
            if part is None or isinstance(atom, Literal) or part.is_all(atom.aval)
            else want
        )

    def _of(self, eqn: JaxprEqn) -> list[tuple[Want, Recipe]] | None:
        """How the parts of what an equation makes are made; None where it is carried out as it
        is."""
        if any(self._is_whole(v) for v in eqn.outvars):
            return None
        found: list[tuple[Want, Recipe]] = []
        for k, v in enumerate(eqn.outvars):
            for part in self._parts(v):
                recipe = recipe_of(eqn, k, part)
                if recipe is None:
                    warn_if_unknown(
                        eqn,
                        "is treated as mixing rows: each server makes all of what init makes with "
                        "it",
                    )
                    return None
                found.append(((v, part), recipe))
        return found

    def _add(self, want: Want) -> None:
        atom, part = self.normal(want)
        if isinstance(atom, Var):
            self._wanted.setdefault(atom, {})[part] = None

    def _is_whole(self, var: Var) -> bool:
        """Whether all of it is made: it is wanted, or so many parts are that they are more than two
        of it."""
        found = self._wanted.get(var, {})
        return (
            None in found
            or sum(p.size / var.aval.shape[p.axis] for p in found if p is not None) > 2
        )

    def _parts(self, var: Atom) -> list[Slice]:
        """The parts that are wanted, in order."""
        parts = [p for p in self._wanted.get(var, ()) if p is not None]
        return sorted(
            parts, key=lambda p: (p.axis, -1 if isinstance(p.start, Start) else p.start, p.size)
        )
