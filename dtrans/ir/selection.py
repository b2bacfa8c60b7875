"""Selection of items and entries from collections, and inverse mappings."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping
from typing import Any, Protocol, TypeVar


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Hashable)
Key = TypeVar("Key", contravariant=True)
Value = TypeVar("Value", covariant=True)
T = TypeVar("T")
U = TypeVar("U")


class Indexable(Protocol[Key, Value]):
    """Object with `values[key]`: a mapping, a sequence or an array."""

    def __getitem__(self, key: Key, /) -> Value: ...


def values_at(values: Indexable[T, U], keys: Iterable[T]) -> list[U]:
    """Return `values[key]` for each key; `values` may be a mapping or a sequence."""
    return [values[key] for key in keys]


def subset(values: Indexable[Any, U], keys: Iterable[K]) -> dict[K, U]:
    """Return the dict `{key: values[key]}` for some keys, in their order."""
    return {key: values[key] for key in keys}


def retain(mapping: Mapping[K, U], keys: Container[object]) -> dict[K, U]:
    """Return a dict of the entries with keys in `keys`, in the order of the mapping."""
    return {key: value for key, value in mapping.items() if key in keys}


def omit(mapping: Mapping[K, U], keys: Container[object]) -> dict[K, U]:
    """Return a dict of the entries with keys not in `keys`, in the order of the mapping."""
    return {key: value for key, value in mapping.items() if key not in keys}


def invert(mapping: Mapping[K, V]) -> dict[V, K]:
    """Return the dict `{value: key}`; if several keys have one value, the last key."""
    return {value: key for key, value in mapping.items()}


def number_items(items: Iterable[V]) -> dict[V, int]:
    """Return the dict `{item: index}`."""
    return {item: i for i, item in enumerate(items)}


def select(items: Iterable[K], among: Container[Any]) -> list[K]:
    """Return the items that are in `among`, in their order."""
    return [item for item in items if item in among]


def exclude(items: Iterable[K], unwanted: Container[Any]) -> list[K]:
    """Return the items that are not in `unwanted`, in their order."""
    return [item for item in items if item not in unwanted]
