"""Writer of parts of an init's outputs: some entries along one axis, without the others.

A parameter server starts from rows `start:stop` of leaves that one device would compute in full. It
computes the rows of a table on first use, by their ids. The wanted parts of outputs determine the
wanted parts of their operands, from the last equation to the first (`dtrans.rows.parts`). The
equations are then written in order, each for its wanted parts. A value without a rule is computed
in full, then sliced: a QR decomposition, a permutation, a loop.

Blocks are computed without the full value for zeros, ones, constants, and draws of
`jax.random.normal`, `uniform` and `truncated_normal` with the default generator
(`dtrans.rows.random_bits`). They may be scaled, reshaped, transposed or concatenated, and state
that depends on them is computed in blocks too. Leaves of an orthogonal initialiser are computed in
full.

The walk is a loop, not recursive: init of a deep model splits one key a thousand times in a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, opened, warn_if_unknown
from dtrans.ir.builder import Builder
from dtrans.ir.program import DIST
from dtrans.rows.parts import Recipe, Want, recipe_of
from dtrans.rows.slices import Slice, Start


def write_parts(b: Builder, jaxpr: ClosedJaxpr, wanted: Sequence[Want]) -> list[Atom]:
    """Write the equations of `jaxpr` for parts of its values.

    Args:
      b: builder of a program with the inputs of `jaxpr`.
      jaxpr: equations, with calls inlined (`dtrans.ir.inline.inline_calls`).
      wanted: variables of `jaxpr`, with the wanted part of each; None for the full value.

    Returns:
      The wanted parts, in order.

    Example:
      >>> import jax
      >>> from dtrans.ir.builder import Builder
      >>> from dtrans.ir.inline import inline_calls
      >>> fn = lambda key: 0.1 * jax.random.normal(key, (6, 2)).T
      >>> init = inline_calls(jax.make_jaxpr(fn)(jax.random.key(0)))
      >>> b = Builder(init)
      >>> b.invars += init.jaxpr.invars
      >>> parts = write_parts(b, init, [(init.jaxpr.outvars[0], Slice(axis=1, start=2, size=3))])
      >>> [str(v.aval) for e in b.eqns for v in e.outvars][-3:]
      ['float32[3,2]', 'float32[2,3]', 'float32[2,3]']
    """
    plan = _Plan(opened(jaxpr).eqns, wanted)
    computed: dict[Want, Atom] = {}

    def read(want: Want) -> Atom:
        atom, part = plan.normal(want)
        if part is None:
            return atom
        if (atom, part) not in computed:
            role, b.role = b.role, DIST
            computed[atom, part] = part.cut(b, atom)
            b.role = role
        return computed[atom, part]

    for eqn, recipes in plan.steps():
        if recipes is None:
            b.keep(eqn)
            continue
        for want, recipe in recipes:
            computed[want] = recipe.write(b, [read(need) for need in recipe.needs])
    return [read(want) for want in wanted]


def write_rows(
    b: Builder, jaxpr: ClosedJaxpr, wanted: Sequence[tuple[Atom, int]], numbers: Var
) -> list[Atom]:
    """Write the equations of an init for the rows of its outputs whose ids a vector has.

    They are equal to the rows of the full outputs bit for bit, in the order of the ids, which may
    repeat. An output without rules for rows (`makes_rows`) is computed in full, then gathered. An
    id out of bounds returns an arbitrary row.

    Args:
      b, jaxpr: as in `write_parts`.
      wanted: outputs of `jaxpr`, each with the axis of its rows.
      numbers: ids of the rows, int32[n], a variable of the new program.

    Returns:
      For each output, `n` entries along that axis.

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
    """Return True if `write_rows` computes rows of an output without the full value.

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
    """Wanted parts of each value, and their recipes.

    Attributes:
      cuts: parts that are sliced from full values.
    """

    def __init__(self, eqns: Sequence[JaxprEqn], wanted: Sequence[Want]) -> None:
        self.eqns = eqns
        # parts in the order of discovery
        self._wanted: dict[Atom, dict[Slice | None, None]] = {}

        self._recipes: dict[int, list[tuple[Want, Recipe]] | None] = {}
        outputs = {v for e in eqns for v in e.outvars}
        self.cuts: list[Want] = []
        for want in wanted:
            self._add(want)
        for i in range(len(eqns) - 1, -1, -1):
            eqn, recipes = eqns[i], self._of(eqns[i])
            self._recipes[i] = recipes
            if recipes is None:
                for a in eqn.invars:
                    self._add((a, None))
                for v in eqn.outvars:
                    self._cut(v)
            else:
                for _, recipe in recipes:
                    for need in recipe.needs:
                        self._add(need)
        for value in self._wanted:
            if value not in outputs:
                self._cut(value)

    def _cut(self, value: Atom) -> None:
        """Slice the wanted parts from a full value."""
        self.cuts += [(value, part) for part in self._parts(value)]

    def steps(self) -> Iterator[tuple[JaxprEqn, list[tuple[Want, Recipe]] | None]]:
        """Yield all equations in order, with the parts that each computes, or None for full
        outputs."""
        return ((eqn, self._recipes[i]) for i, eqn in enumerate(self.eqns))

    def normal(self, want: Want) -> Want:
        """Replace a part that covers the full value by None."""
        atom, part = want
        if part is None or isinstance(atom, Literal) or part.is_all(atom.aval):
            return atom, None
        return want

    def _of(self, eqn: JaxprEqn) -> list[tuple[Want, Recipe]] | None:
        """Return the recipes for the parts of an equation's outputs; None if it runs in full."""
        if any(self._is_full(v) for v in eqn.outvars):
            return None
        found: list[tuple[Want, Recipe]] = []
        for k, v in enumerate(eqn.outvars):
            for part in self._parts(v):
                recipe = recipe_of(eqn, k, part)
                if recipe is None:
                    warn_if_unknown(
                        eqn,
                        "is treated as mixing rows: each server computes its outputs in full",
                    )
                    return None
                found.append(((v, part), recipe))
        return found

    def _add(self, want: Want) -> None:
        atom, part = self.normal(want)
        if isinstance(atom, Var):
            self._wanted.setdefault(atom, {})[part] = None

    def _is_full(self, var: Var) -> bool:
        """Return True if a value is computed in full: it is wanted, or its parts have over twice
        its size."""
        found = self._wanted.get(var, {})
        return (
            None in found
            or sum(p.size / var.aval.shape[p.axis] for p in found if p is not None) > 2
        )

    def _parts(self, var: Atom) -> list[Slice]:
        """Return the wanted parts of a value, in order."""
        parts = [p for p in self._wanted.get(var, ()) if p is not None]
        return sorted(
            parts, key=lambda p: (p.axis, -1 if isinstance(p.start, Start) else p.start, p.size)
        )
