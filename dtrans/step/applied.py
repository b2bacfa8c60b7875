"""Evaluation of a user's function on a job's state, for `job.apply(fn, state, *args)`.

The function may compute a norm of all parameters, for example. One device may have too little
memory for all parameters. So a job may store them in slices, or on the devices of pipeline stages.
For such a function, the job assigns each leaf (array of the state) to a *group*, such as the leaves
of one stage. The function is traced once for each combination of argument types. Its equations are
divided into *parts*, one for each group. An equation belongs to the highest group among its
operands. So a part reads only leaves of its group and earlier groups, and values of earlier parts.
The job fetches the leaves of a part when the part runs. It drops a leaf after the last part that
reads the leaf.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr

from dtrans._jax import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    constants,
    jaxpr_as_fun,
    lowered_jaxpr,
    named_in_errors,
    opened,
    plain_array,
    plain_jaxpr,
    plain_type,
)
from dtrans.ir.array_fns import array_type
from dtrans.ir.builder import extract_part
from dtrans.ir.dataflow import all_operands, live_equations, variables
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import Program
from dtrans.ir.pytree import check_numbers, is_array
from dtrans.ir.selection import exclude, select, subset, values_at
from dtrans.step.one_state import state_spec


GATHERED_BYTES = 2**26  # largest group of `groups_by_bytes`, unless one leaf is larger

Leaves = Mapping[str, Any]


def groups_by_bytes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Assign arrays of the state to groups of at most 64 MiB, so that they fit into memory.

    `job.apply` gathers the arrays of one group, uses them, and drops them. An array of more than 64
    MiB (`GATHERED_BYTES`) has a group of its own.

    Args:
      sizes: bytes of each leaf, in the order in which a function reads the leaves.

    Example:
      >>> from dtrans.step.applied import groups_by_bytes
      >>> groups_by_bytes({"a": 2**25, "b": 2**25, "c": 2**27, "d": 8})
      {'a': 0, 'b': 0, 'c': 1, 'd': 2}
    """
    found: dict[str, int] = {}
    group = total = 0
    for name, size in sizes.items():
        if total and total + size > GATHERED_BYTES:
            group, total = group + 1, 0
        found[name] = group
        total += size
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """Equations of a user's function that read one group of the state's arrays, and run together.

    `job.apply` fetches the arrays of a group just before these equations run. So one device never
    needs memory for all arrays.

    Attributes:
      run: compiled function of the leaves and the values of `reads`, which returns the values of
        `makes`.
      anchors: leaves that are not moved to other devices: the part runs on their devices. Empty if
        the part reads no leaf.
      leaves: all leaves that the part reads.
      reads: arguments of the function, and values of earlier parts.
      makes: values for later parts, and results.
      last: leaves that no later part reads, and that are dropped after this part.
      dropped: values that are dropped after this part: they are no results, and no later part reads
        them.
    """

    run: Callable[[Leaves, Sequence[Any]], Sequence[Any]]
    anchors: tuple[str, ...]
    leaves: tuple[str, ...]
    reads: tuple[Var, ...]
    makes: tuple[Var, ...]
    last: tuple[str, ...]
    dropped: tuple[Var, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Division:
    """User's function of `job.apply`, divided into parts that run one after the other.

    Attributes:
      parts: the parts, in order.
      constants: values of the constants, by variable.
      arguments: the variables of the function's arguments after the state.
      results: the results.
      tree: pytree structure of the results.
    """

    parts: tuple[_Part, ...]
    constants: Mapping[Var, Any]
    arguments: Sequence[Var]
    results: Sequence[Atom]
    tree: Any

    def __call__(self, fetch: Callable[[Collection[str]], Leaves], flat: Sequence[Any]) -> Any:
        """Run the parts in order, and return the results of the user's function.

        Args:
          fetch: function that returns leaves by name; called before each part, for its new leaves.
          flat: the function's other arguments, as a flat list of arrays.
        """
        env: dict[Atom, Any] = dict(zip(self.arguments, flat, strict=True))
        env.update(self.constants.items())
        fetched: dict[str, Any] = {}
        home = None  # not the array itself, which would stay until the next part has its leaves
        for part in self.parts:
            if new := exclude(part.leaves, fetched):
                fetched |= fetch(new)
            if part.anchors:
                home = fetched[part.anchors[0]].sharding
            others = exclude(part.leaves, part.anchors)
            fetched |= zip(others, _moved(home, values_at(fetched, others)), strict=True)
            values = _moved(home, values_at(env, part.reads))
            outputs = part.run(subset(fetched, part.leaves), values)
            env.update(zip(part.makes, outputs, strict=True))
            for name in part.last:
                del fetched[name]
            for v in part.dropped:
                env.pop(v, None)
        results = []
        for a in self.results:
            results.append(jnp.asarray(a.val) if isinstance(a, Literal) else env[a])
        return jax.tree.unflatten(self.tree, _moved(home, results))


class Applied:
    """User's function for `job.apply`, compiled so that it fetches only the arrays that it reads.

    `job.apply` creates one object for each function of the state or parameters, and calls the
    object.

    Args:
      main: the traced training step of one device.
      fn: the user's function: `fn(state, *args)` for a step of one state, else
        `fn(params, *args)`.
      unpacked: traceable function that converts arrays as the job stores them (sliced or packed,
        say) to the arrays of the one-device state.
      unstacked: function that replaces inputs of a traced function by the arrays that the job
        stores. For example, each pipeline stage stores some layers of a stack, so one input becomes
        several. It takes the traced function and the names of its inputs, and returns both.
      groups: function that assigns each stored array a group, an integer from 0. It takes the names
        of the arrays, in the order in which `fn` reads them.
    """

    def __init__(
        self,
        main: Program,
        fn: Callable[..., Any],
        unpacked: Callable[[Leaves], Leaves],
        unstacked: Callable[[ClosedJaxpr, Sequence[str]], tuple[ClosedJaxpr, Sequence[str]]],
        groups: Callable[[Sequence[str]], Mapping[str, int]],
    ) -> None:
        self._spec = state_spec(main) if main.takes_one_state else main.args[0]
        types = values_at(main.inputs, self._spec.names)
        self._types = list(map(array_type, types))
        self._fn, self._unpacked = weakref.ref(fn), unpacked
        self._unstacked, self._groups = unstacked, groups
        self._known: dict[Any, _Division] = {}

    def __call__(self, fetch: Callable[[Collection[str]], Leaves], *args: Any) -> Any:
        """Call the user's function, and fetch the arrays of the state that it reads.

        Args:
          fetch: function that returns the job's arrays with given names, as the job stores them.
          *args: the user's arguments after the state.

        Raises:
          BatchError: an argument contains text or objects.
        """
        paths, structure = jax.tree.flatten_with_path(args)
        flat = []
        for path, x in paths:
            check_numbers(f"args{keystr(path)}", x, "job.apply")
            flat.append(plain_array(x) if is_array(x) else jnp.asarray(x))
        key = structure, tuple(str(jax.typeof(x)) for x in flat)
        if key not in self._known:
            self._known[key] = self._compiled(flat, structure)
        return self._known[key](fetch, flat)

    def _compiled(self, flat: Sequence[Any], structure: Any) -> _Division:
        """Trace the user's function for arguments of these types, and divide it into parts."""
        fn = self._fn()
        assert fn is not None
        result: list[Any] = []

        def on_trees(leaves: Any, *args: Any) -> list[Any]:
            state = self._spec.unflatten(jax.tree.leaves(leaves))
            outputs, tree = jax.tree.flatten(fn(state, *args))
            result.append(tree)
            return outputs

        args = jax.tree.unflatten(structure, map(plain_type, flat))
        state = self._spec.by_path("", self._types)
        traced = inline_calls(
            plain_jaxpr(lowered_jaxpr(named_in_errors(on_trees, fn), state, *args))
        )
        traced, stored = self._unstacked(traced, self._spec.names)
        inner = opened(traced)
        eqns = live_equations(inner.eqns, inner.outvars)
        names = dict(zip(inner.invars, stored, strict=False))
        used = dict.fromkeys([*variables(all_operands(eqns)), *variables(inner.outvars)])
        groups = self._groups([names[v] for v in used if v in names])
        leaves = {v: groups[names[v]] for v in used if v in names}
        parts = self._divide(traced, eqns, names, leaves)
        values = dict(zip(inner.constvars, constants(traced), strict=True))
        arguments = inner.invars[len(stored) :]
        return _Division(parts, values, arguments, inner.outvars, result[-1])

    def _divide(
        self,
        traced: ClosedJaxpr,
        eqns: Iterable[JaxprEqn],
        names: Mapping[Var, str],
        leaves: Mapping[Var, int],
    ) -> tuple[_Part, ...]:
        """Divide the equations of the user's function into parts, one for each group of arrays.

        Args:
          traced: the traced function.
          eqns: its equations, without equations that nothing needs.
          names: the name of each leaf.
          leaves: the group of each leaf that the function reads.
        """
        inner = opened(traced)
        group_of: dict[Var, int] = dict(leaves)
        members: dict[int, list[JaxprEqn]] = {g: [] for g in leaves.values()}
        lowest = min(members, default=0)
        for eqn in eqns:
            groups = [group_of.get(v, lowest) for v in variables(eqn.invars)]
            group = max(groups, default=lowest)
            members.setdefault(group, []).append(eqn)
            group_of |= dict.fromkeys(eqn.outvars, group)

        parts: list[_Part] = []
        results = set(variables(inner.outvars))
        later, later_leaves = set(results), set[str]()
        for group in sorted(members, reverse=True):
            eqns_here = members[group]
            computed: dict[Var, None] = {}
            for eqn in eqns_here:
                computed |= dict.fromkeys(eqn.outvars)
            returned = [v for v, g in leaves.items() if g == group and v in results]
            read = dict.fromkeys([*returned, *variables(all_operands(eqns_here))])
            needed = exclude(read, {*computed, *inner.constvars})
            makes = (*returned, *select(computed, later))
            states, values = select(needed, leaves), exclude(needed, leaves)
            jaxpr = extract_part(traced, [*states, *values], eqns_here, makes)
            read_names = tuple(names[v] for v in states)
            parts.append(
                _Part(
                    self._jitted(jaxpr, read_names),
                    tuple(names[v] for v in states if leaves[v] == group),
                    read_names,
                    tuple(values),
                    makes,
                    tuple(exclude(read_names, later_leaves)),
                    tuple(exclude(values, later)),
                )
            )
            later |= set(values)
            later_leaves |= set(read_names)
        return tuple(reversed(parts))

    def _jitted(
        self, jaxpr: ClosedJaxpr, names: Sequence[str]
    ) -> Callable[[Leaves, Sequence[Any]], Sequence[Any]]:
        """Compile the equations of a part; the result takes arrays as the job stores them."""
        run = jaxpr_as_fun(jaxpr)

        def of_leaves(leaves: Leaves, values: Sequence[Any]) -> list[Any]:
            found = self._unpacked(leaves)
            return [*run(*values_at(found, names), *values)]

        return jax.jit(of_leaves)


def _moved(home: jax.sharding.Sharding | None, arrays: Sequence[Any]) -> list[Any]:
    """Copy arrays to the devices of `home`, unless they are already there.

    The parts of a function run on the devices of different pipeline stages, and JAX rejects
    operands on different devices. An array without a fixed device stays where it is, because JAX
    moves it itself.
    """
    if home is None:
        return list(arrays)
    target = home
    if isinstance(home, NamedSharding):
        target = NamedSharding(home.mesh, PartitionSpec())
    moved = list(arrays)
    for i, x in enumerate(arrays):
        is_committed = isinstance(x, jax.Array) and x.committed
        if is_committed and x.sharding.device_set != home.device_set:
            moved[i] = jax.device_put(x, target)
    return moved
