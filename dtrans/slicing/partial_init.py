"""Programs that compute only some rows of the outputs of an init function.

A parameter server stores only some rows of a parameter. It computes the initial value of a table
row only when a trainer first looks up the row. So the server should not compute the initial values
of all rows.

A first pass, from the last equation to the first, finds the slices of operands that the wanted
slices of outputs need (`dtrans.rows.parts`). Then the equations are written in order, each for
these slices only. If an equation has no rule (a QR decomposition, a permutation, a loop), its
outputs are computed in full and then sliced.

No full value is computed for zeros, ones and constants, and for `jax.random.normal`, `uniform` and
`truncated_normal` with the default generator (`dtrans.rows.random_bits`). The same holds for arrays
that are scaled, reshaped, transposed or concatenated from these, and for optimizer state that
depends on these. Orthogonal initialisers compute the full parameter.

The pass is a loop because recursion would be too deep: the init of a deep model may split one key a
thousand times in a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, opened, warn_if_unknown
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import outputs_of
from dtrans.ir.program import DIST
from dtrans.rows.parts import Recipe, Want, recipe_of
from dtrans.rows.slices import Slice, Start


def write_parts(b: Builder, jaxpr: ClosedJaxpr, wanted: Sequence[Want]) -> list[Atom]:
    """Write the equations that compute some slices of an init function's outputs.

    Args:
      b: builder of a program with the inputs of `jaxpr`.
      jaxpr: the init, with calls inlined (`dtrans.ir.inline.inline_calls`).
      wanted: pairs (variable of `jaxpr`, wanted slice, or None for the full value).

    Returns:
      The wanted slices or values, in order.

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
            computed[atom, part] = part.take_from(b, atom)
            b.role = role
        return computed[atom, part]

    for eqn, recipes in plan.steps():
        if recipes is None:
            b.keep(eqn)
            continue
        for want, recipe in recipes:
            computed[want] = recipe.write(b, list(map(read, recipe.needs)))
    return list(map(read, wanted))


def write_rows(
    b: Builder, jaxpr: ClosedJaxpr, wanted: Sequence[tuple[Atom, int]], numbers: Var
) -> list[Atom]:
    """Write the equations that compute the initial values of table rows with given ids.

    The rows equal the rows of the full outputs bit for bit. Ids may repeat. If `makes_rows` is
    False for an output, the output is computed in full, and its rows are gathered. For an id out of
    bounds, the result is an arbitrary row.

    Args:
      b, jaxpr: as in `write_parts`.
      wanted: pairs (output of `jaxpr`, axis of its rows).
      numbers: ids of the rows, an int32[n] variable of the new program.

    Returns:
      For each output, the `n` rows, in the order of the ids.

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
    count = numbers.aval.shape[0]
    return write_parts(b, jaxpr, [(a, Slice(axis, start, count)) for a, axis in wanted])


def makes_rows(jaxpr: ClosedJaxpr, output: Atom, axis: int) -> bool:
    """Return True if `write_rows` computes rows of an output without computing the full output.

    Plans of embedding tables call this function: a server then initializes a row at its first
    lookup.

    Args:
      jaxpr: the init, with calls inlined.
      output: an output of `jaxpr`.
      axis: dimension of the rows.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.ir.inline import inline_calls
      >>> init = lambda key: ((w := jax.random.uniform(key, (6, 2))), jnp.sort(w, axis=0))
      >>> init = inline_calls(jax.make_jaxpr(init)(jax.random.key(0)))
      >>> [makes_rows(init, v, 0) for v in init.jaxpr.outvars]
      [True, False]
    """
    plan = _Plan(opened(jaxpr).eqns, [(output, Slice(axis, Start(lambda b: output), 1))])
    return not plan.sliced


class _Plan:
    """Result of the first pass: the slices of each value to compute, and how to compute them.

    A *recipe* computes a slice of an equation's output from slices of its operands.

    Attributes:
      sliced: slices that are cut from full values, as pairs (value, slice).
    """

    def __init__(self, eqns: Sequence[JaxprEqn], wanted: Sequence[Want]) -> None:
        self.eqns = eqns
        # value -> its wanted parts, as keys of a dict to keep their order
        self._wanted: dict[Atom, dict[Slice | None, None]] = {}
        self._recipes: dict[int, list[tuple[Want, Recipe]] | None] = {}
        outputs = set(outputs_of(eqns))
        self.sliced: list[Want] = []
        for want in wanted:
            self._add(want)
        for i in range(len(eqns) - 1, -1, -1):
            eqn, recipes = eqns[i], self._of(eqns[i])
            self._recipes[i] = recipes
            if recipes is None:
                for a in eqn.invars:
                    self._add((a, None))
                for v in eqn.outvars:
                    self._slice_full(v)
            else:
                for _, recipe in recipes:
                    for need in recipe.needs:
                        self._add(need)
        for value in self._wanted:
            if value not in outputs:
                self._slice_full(value)

    def _slice_full(self, value: Atom) -> None:
        """Record that a value must be computed in full, and its wanted slices are cut from it."""
        self.sliced += [(value, part) for part in self._parts(value)]

    def steps(self) -> Iterator[tuple[JaxprEqn, list[tuple[Want, Recipe]] | None]]:
        """Yield the equations in order, each with the recipes for the wanted slices of its outputs.

        The recipes are None if the equation runs on full arrays.
        """
        return ((eqn, self._recipes[i]) for i, eqn in enumerate(self.eqns))

    def normal(self, want: Want) -> Want:
        """Replace a slice that covers the full value by None, in a pair (value, slice)."""
        atom, part = want
        if part is None or isinstance(atom, Literal) or part.is_all(atom.aval):
            return atom, None
        return want

    def _of(self, eqn: JaxprEqn) -> list[tuple[Want, Recipe]] | None:
        """Return recipes (ways to compute slices) for the wanted slices of an equation's outputs.

        Return None if the equation must be computed in full.
        """
        if any(self._is_full(v) for v in eqn.outvars):
            return None
        found: list[tuple[Want, Recipe]] = []
        for k, v in enumerate(eqn.outvars):
            for part in self._parts(v):
                recipe = recipe_of(eqn, k, part)
                if recipe is None:
                    warn_if_unknown(
                        eqn,
                        "is assumed to mix rows, so each server computes its outputs in full",
                    )
                    return None
                found.append(((v, part), recipe))
        return found

    def _add(self, want: Want) -> None:
        atom, part = self.normal(want)
        if isinstance(atom, Var):
            self._wanted.setdefault(atom, {})[part] = None

    def _is_full(self, var: Var) -> bool:
        """Return True if a value must be computed in full.

        This is so in two cases. The full value is wanted. Or all wanted slices together are more
        than twice as large as the full value.
        """
        if None in self._wanted.get(var, ()):
            return True
        return sum(p.size / var.aval.shape[p.axis] for p in self._parts(var)) > 2

    def _parts(self, var: Atom) -> list[Slice]:
        """Return the wanted slices of a value, sorted by axis and start."""
        parts = [p for p in self._wanted.get(var, ()) if p is not None]
        return sorted(parts, key=_position)


def _position(part: Slice) -> tuple[int, int, int]:
    start = -1 if isinstance(part.start, Start) else part.start
    return part.axis, start, part.size
