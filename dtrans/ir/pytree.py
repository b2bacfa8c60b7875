"""Structures of pytrees: named arrays and static leaves.

A `TreeSpec` describes the pytree of an argument or result. A leaf with a `shape` and a `dtype` is
an array, and its path is its name (`params/dense/kernel`). Any other leaf, such as a function or a
Python number in an Equinox module, is *static*: the program is compiled for this value, as with
`jax.jit(..., static_argnums=...)`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import OrderedDict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef, keystr

from dtrans._jax import plain_array
from dtrans.errors import BatchError, TraceError
from dtrans.ir.cost import nbytes
from dtrans.ir.display import folded_html, plan_html, short_type
from dtrans.ir.selection import values_at


NUMBERS = (bool, int, float, complex)


def is_array(leaf: Any) -> bool:
    """Return True if a leaf has a shape and a dtype."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def array_leaves(tree: Any) -> list[Any]:
    """Return the array leaves of a pytree, in order."""
    return [x for x in jax.tree.leaves(tree) if is_array(x)]


def short_repr(state: Any) -> str:
    """Return a text for `repr` without the entries of the arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> from dtrans.data_parallel.state import CollectiveState
      >>> CollectiveState({"params/w": jnp.ones(3)}, {})
      <CollectiveState: 1 array, 12 bytes>
    """
    arrays = array_leaves(state)
    size = sum(nbytes(x) for x in arrays)
    noun = "array" if len(arrays) == 1 else "arrays"
    return f"<{type(state).__name__}: {len(arrays)} {noun}, {size:,} bytes>"


def state_html(state: Any) -> str:
    """Return the HTML of a state: a folded table of its arrays, without their entries."""
    rows = []
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        name = keystr(path[1:], simple=True, separator=" ")  # without the field of the state
        rows.append((name, short_type(jax.typeof(x)), f"{nbytes(x):,}"))
    table = plan_html("", ("array", "type", "bytes"), rows, (), code=0)
    return folded_html(short_repr(state), table)


def is_differentiable(leaf: Any) -> bool:
    """Return True if a leaf can have gradients: an array of floating-point or complex numbers."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def join_path(root: str, path: tuple[Any, ...]) -> str:
    """Join `root` and a JAX key path to a name: `params/dense/w`."""
    tail = keystr(path, simple=True, separator="/")
    return "/".join(part for part in (root, tail) if part)


def is_under(name: str, roots: Collection[str]) -> bool:
    """Return True if a name is one of `roots`, or starts with one of them and a slash."""
    return any(name == r or name.startswith(r + "/") for r in roots)


def unused_name(name: str, taken: Container[object]) -> str:
    """Append underscores to a name until it is not in `taken`."""
    while name in taken:
        name += "_"
    return name


@dataclasses.dataclass(frozen=True)
class Static:
    """Leaf that is not an array: its value is fixed in the program."""

    value: Any

    def same(self, other: Any) -> bool:
        return other is self.value or (
            type(other) is type(self.value) and bool(other == self.value)
        )


@dataclasses.dataclass(frozen=True)
class TreeSpec:
    """Structure of a pytree, with the name of each array and the value of each static leaf."""

    treedef: PyTreeDef
    leaves: tuple[str | Static, ...]

    @classmethod
    def from_tree(cls, tree: Any, root: str = "") -> TreeSpec:
        paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
        if not root and jax.tree_util.treedef_is_leaf(treedef):
            root = "value"
        leaves: list[str | Static] = []
        for path, leaf in paths:
            leaves.append(join_path(root, path) if is_array(leaf) else Static(leaf))
        return cls(treedef, tuple(leaves))

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays, in leaf order."""
        return tuple(x for x in self.leaves if isinstance(x, str))

    @property
    def root(self) -> str:
        """First path component of all names; empty without arrays."""
        if self.names:
            return self.names[0].split("/")[0]
        return ""

    def flatten(self, tree: Any, what: str = "argument") -> list[Any]:
        """Return the arrays of `tree` in leaf order, without mesh axes in their types.

        Raises:
          TraceError: the structure or a static leaf differs from this spec.
          BatchError: an array has text or objects, or an integer does not fit in 32 bits, to which
            JAX would truncate it.
        """
        found, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef:
            self._check_containers(tree, what)
            raise TraceError(
                f"{what} does not have the structure with which it was traced:\n  traced "
                f"{self.treedef}\n  now    {treedef}"
            )
        arrays = []
        for spec, leaf in zip(self.leaves, found, strict=True):
            if isinstance(spec, str):
                check_numbers(spec, leaf)
                check_integers(spec, leaf)
                arrays.append(plain_array(leaf))
            elif not spec.same(leaf):
                raise TraceError(
                    f"{what} contains {leaf!r}, but was traced with {spec.value!r} at this "
                    "position. Leaves that are not arrays are fixed by the trace: trace again, or "
                    "pass this leaf as an array (jnp.asarray)"
                )
        return arrays

    def _check_containers(self, tree: Any, what: str) -> None:
        """Raise an error that names the first list or other container in place of an array.

        Raises:
          TraceError, BatchError: as in `flatten`.
        """
        try:
            parts = self.treedef.flatten_up_to(tree)
        except (TypeError, ValueError):  # the trees differ above the leaves
            return
        for name, part in zip(self.leaves, parts, strict=True):
            if isinstance(name, Static) or jax.tree_util.all_leaves([part]):
                continue
            kind = "None" if part is None else f"a {type(part).__name__}"
            leaves = jax.tree.leaves(part)
            if leaves and all(isinstance(x, str | bytes) for x in leaves):
                raise BatchError(
                    f"{name} is {kind} of text; a step takes arrays of numbers, so convert {name}"
                )
            remedy = "pass an array"
            if isinstance(part, list | tuple):
                remedy = "convert it, for example by np.asarray(...)"
            raise TraceError(
                f"{what} does not have the structure with which it was traced: {name} is {kind}, "
                f"expected an array; {remedy}"
            )

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        """Return the pytree with these arrays; the inverse of `flatten`."""
        it = iter(arrays)
        return jax.tree.unflatten(
            self.treedef, [next(it) if isinstance(x, str) else x.value for x in self.leaves]
        )

    def by_path(self, root: str, arrays: Iterable[Any]) -> Any:
        """Return the arrays in leaf order, in a dict by their paths below `root`.

        JAX's errors show these paths, for example `params['dense/kernel']`. If the pytree is one
        array, return the array.
        """
        if self.names == (root,):
            return next(iter(arrays))
        paths = [name.removeprefix(f"{root}/") for name in self.names]
        if len({*paths}) < len(paths):  # `Program` refuses such names
            return list(arrays)
        return OrderedDict(zip(paths, arrays, strict=True))

    def unflatten_named(self, values: Mapping[str, Any]) -> Any:
        """Return the pytree with the array `values[name]` for each name; ignore other entries."""
        return self.unflatten(values_at(values, self.names))

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling a PyTreeDef copies the sentinel objects in Equinox nodes, and the copy does not
        # equal the original. Pickling a tree keeps the sentinels.
        return _unpickled, (jax.tree.unflatten(self.treedef, self.leaves),)


def all_names(specs: Iterable[TreeSpec]) -> list[str]:
    """Return the names of the leaves of several pytrees, in order."""
    return [name for spec in specs for name in spec.names]


def unflatten_all(specs: Iterable[TreeSpec], arrays: Iterable[Any]) -> tuple[Any, ...]:
    """Return a pytree for each spec; `arrays` are the arrays of all specs in order."""
    remaining = iter(arrays)
    return tuple(
        spec.unflatten(list(itertools.islice(remaining, len(spec.names)))) for spec in specs
    )


def _unpickled(tree: Any) -> TreeSpec:
    leaves, treedef = jax.tree.flatten(tree)
    return TreeSpec(treedef, tuple(leaves))


def as_array(leaf: Any) -> Any:
    """Convert a Python or NumPy scalar to an array, as JAX does; return other leaves unchanged."""
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    if isinstance(leaf, NUMBERS):
        return jnp.asarray(leaf)
    return leaf


def check_numbers(name: str, leaf: Any, user: str = "a step") -> None:
    """Raise BatchError for text, dates or Python objects, which JAX arrays cannot have.

    Args:
      name: name of the leaf.
      leaf: an array, or a Python object.
      user: the function that takes the leaf, for errors.

    Example:
      >>> import numpy as np
      >>> check_numbers("x", np.array(["a", "b"]))
      Traceback (most recent call last):
      ...
      dtrans.errors.BatchError: x is an array of <U1; a step takes arrays of numbers, so convert x
    """
    kind = ""
    if isinstance(leaf, str | bytes):
        kind = "text"
    elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "USOMm":
        kind = f"an array of {leaf.dtype}"
    if kind:
        raise BatchError(f"{name} is {kind}; {user} takes arrays of numbers, so convert {name}")


def check_integers(name: str, leaf: Any) -> None:
    """Raise BatchError if an array has an integer that JAX would silently truncate to 32 bits.

    Raises:
      BatchError: the error names the leaf and the position of the first such integer.

    Example:
      >>> import numpy as np
      >>> check_integers("ids", np.array([[7, 8], [9, 3_000_000_000]]))  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      dtrans.errors.BatchError: ids[1, 1] is 3000000000, which does not fit in int32, ...
    """
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "iu" or not leaf.size:
        return
    to = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if to == leaf.dtype:
        return
    low, high = np.iinfo(to).min, np.iinfo(to).max
    if low <= leaf.min() and leaf.max() <= high:
        return
    place = tuple(np.argwhere((leaf < low) | (leaf > high))[0].tolist())
    where = f"{name}[{', '.join(map(str, place))}]" if place else name
    raise BatchError(
        f"{where} is {leaf[place]}, which does not fit in {to.name}, the dtype that JAX uses "
        'without x64; enable 64-bit types (jax.config.update("jax_enable_x64", True)), or map the '
        "ids to smaller numbers"
    )


def partition(tree: Any, keep: Any) -> tuple[Any, Any]:
    """Split a pytree into two: leaves for which `keep` returns True, and all other leaves.

    Each result has the structure of `tree`, with None in place of the leaves that are in the other
    result.
    """
    selected = jax.tree.map(lambda x: x if keep(x) else None, tree)
    others = jax.tree.map(lambda x: None if keep(x) else x, tree)
    return selected, others


def combine(first: Any, second: Any) -> Any:
    """Merge two pytrees: fill each None of the first from the second; inverse of `partition`."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, first, second, is_leaf=lambda x: x is None
    )


def tuple_of(*specs: TreeSpec) -> TreeSpec:
    """Return the spec of a tuple of pytrees with these specs."""
    treedef = jax.tree_util.treedef_tuple([spec.treedef for spec in specs])
    return TreeSpec(treedef, tuple(leaf for spec in specs for leaf in spec.leaves))


def result_of(spec: TreeSpec, leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Unflatten the results that a step returns after the new state; return them as a tuple."""
    tree = spec.unflatten(leaves)
    if isinstance(tree, (tuple, list)) and not hasattr(tree, "_fields"):
        return tuple(tree)
    return (tree,)


def without(spec: TreeSpec, part: TreeSpec) -> TreeSpec:
    """Remove the first child that equals `part` from a spec; return the new spec.

    `spec` is a tuple, list, dict or NamedTuple. In a NamedTuple, None replaces the child, because
    its fields are fixed.
    """
    full = jax.tree.unflatten(spec.treedef, spec.leaves)
    is_part = functools.partial(_has_spec, part)
    if isinstance(full, dict):
        gone = next(k for k, child in full.items() if is_part(child))
        remaining: Any = {k: child for k, child in full.items() if k != gone}
    else:
        # Try position 1, the place of the optimizer state, first: an empty state () may also equal
        # other results.
        places = sorted(range(len(full)), key=lambda i: i != 1)
        place = next(i for i in places if is_part(full[i]))
        if hasattr(full, "_fields"):
            remaining = full._replace(**{full._fields[place]: None})
        else:
            remaining = type(full)(child for i, child in enumerate(full) if i != place)
    leaves, treedef = jax.tree.flatten(remaining)
    return TreeSpec(treedef, tuple(leaves))


def replace_child(spec: TreeSpec, part: TreeSpec, new: TreeSpec) -> TreeSpec:
    """Replace the first child of a spec that equals `part` by `new`; return the new spec.

    `spec` is a tuple, a list, a dict or a NamedTuple.
    """
    full = jax.tree.unflatten(spec.treedef, spec.leaves)
    child = jax.tree.unflatten(new.treedef, new.leaves)
    if isinstance(full, dict):
        key = next(k for k, x in full.items() if _has_spec(part, x))
        full = {**full, key: child}
    else:
        place = next(i for i, x in enumerate(full) if _has_spec(part, x))
        if hasattr(full, "_fields"):
            full = full._replace(**{full._fields[place]: child})
        else:
            full = type(full)([*full[:place], child, *full[place + 1 :]])
    leaves, treedef = jax.tree.flatten(full)
    return TreeSpec(treedef, tuple(leaves))


def _has_spec(spec: TreeSpec, tree: Any) -> bool:
    """Return True if a pytree of names and static leaves has this spec."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, Static))
    return treedef == spec.treedef and tuple(leaves) == spec.leaves
