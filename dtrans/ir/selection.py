"""Selection and inversion of mappings."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Protocol, TypeVar


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Hashable)
Key = TypeVar("Key", contravariant=True)
Value = TypeVar("Value", covariant=True)
T = TypeVar("T")
U = TypeVar("U")


class Indexable(Protocol[Key, Value]):
    """Mapping, sequence or array: anything with `values[key]`."""

    def __getitem__(self, key: Key, /) -> Value: ...


def values_at(values: Indexable[T, U], keys: Iterable[T]) -> list[U]:
    """Return `values[key]` for each key; `values` may be a mapping or a sequence."""
    return [values[key] for key in keys]


def subset(values: Indexable[Any, U], keys: Iterable[K]) -> dict[K, U]:
    """Return a dict of the entries under some keys, in the order of the keys."""
    return {key: values[key] for key in keys}


def invert(mapping: Mapping[K, V]) -> dict[V, K]:
    """Return a dict from each value to its key; the last key, if several have one value."""
    return {value: key for key, value in mapping.items()}


def number_items(items: Iterable[V]) -> dict[V, int]:
    """Return a dict from each item to its index."""
    return {item: i for i, item in enumerate(items)}
