"""Values that a process of a pipeline receives, named by sender, step and a number in the step.

Values come in the order in which they are sent, which is not the order in which they are used. A
message that comes early is stored as it is: the process believes none of its claims, and allocates
no memory for it. When the process expects the value, it checks these messages, and drops and counts
those of another type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from dtrans.errors import WireError
from dtrans.protocol import wire


KEYS = 1 << 20  # values of a step are numbered below this
Name = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class ValueType:
    """Expected type of a value.

    Attributes:
      shape: None for a dimension that the sender decides.
      impl: kind of the keys of `jax.random`, which travel as their data; empty for other values.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]
    impl: str = ""

    def check(self, message: wire.Message) -> tuple[int, ...]:
        """Return the shape of a value. Raises WireError if its type is another one."""
        shape, dtype, impl = message["shape"], message["dtype"], message["impl"]
        same = dtype == self.dtype.name and impl == self.impl and len(shape) == len(self.shape)
        is_length = lambda n: type(n) is int and n >= 0
        if not same or not all(
            is_length(n) and m in (None, n) for n, m in zip(shape, self.shape, strict=True)
        ):
            claimed = f"{wire.brief(dtype)}{wire.brief(shape)}{wire.brief(impl) * bool(impl)}"
            raise WireError(f"a value that is {claimed}, where {self} is expected")
        return tuple(shape)

    def __str__(self) -> str:
        shape = ",".join("*" if n is None else str(n) for n in self.shape)
        return f"{self.dtype.name}[{shape}]{self.impl}"


class Arrivals:
    """Values that have come, in full or in part.

    Args:
      refuse: called with the sender and the reason for each message that is dropped.

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol import wire
      >>> from dtrans.protocol.collective.arrivals import Arrivals, ValueType
      >>> arrivals, name = Arrivals(print), (1, 1, 7)
      >>> arrivals.expect(name, ValueType((2,), np.dtype("float32")))
      >>> data = np.ones(2, np.float32)
      >>> fields = dict(process=1, step=1, key=7, dtype="float32", shape=[2], impl="")
      >>> head = wire.header("value", **fields, pieces=[[["value", 0, 8]]])
      >>> arrivals.hear(1, wire.parse([head, data.tobytes()]))
      >>> arrivals.is_complete(name), arrivals.take(name)
      (True, array([1., 1.], dtype=float32))
    """

    def __init__(self, refuse: Callable[[int, WireError], None]) -> None:
        self._refuse = refuse
        self._step = 0  # of the value that was taken last; no value of an earlier step is due
        self._taken: set[Name] = set()  # in this step
        self._early: dict[Name, list[wire.Message]] = {}
        self._types: dict[Name, ValueType] = {}
        self._partial: dict[Name, _Partial] = {}

    def hear(self, origin: int, message: wire.Message) -> None:
        """Take a message of a process, or store it. A malformed one is dropped, and changes
        nothing."""
        try:
            name = self._name(origin, message)
            if name in self._types:
                self._add(name, message)
            else:
                self._early.setdefault(name, []).append(message)
        except WireError as e:
            self._refuse(origin, e)

    def _name(self, origin: int, message: wire.Message) -> Name:
        if message.op != "value":
            raise WireError(
                f"a `{message.op}` message of process {origin}, where values of a pipeline come"
            )
        name = (message["process"], message["step"], message["key"])
        if name[0] != origin:
            raise WireError(f"a value of process {name[0]} from process {origin}")
        if name[1] < self._step or not 0 <= name[2] < KEYS or name in self._taken:
            raise WireError(
                f"value {name[2]} of step {name[1]} of process {name[0]}, which is not due in step "
                f"{self._step}"
            )
        return name

    def _add(self, name: Name, message: wire.Message) -> None:
        shape = self._types[name].check(message)
        begun = self._partial.get(name)
        if begun is not None and begun.array.shape != shape:
            raise WireError(
                f"a value of shape {list(shape)}, and an earlier piece of it has shape "
                f"{list(begun.array.shape)}"
            )
        if begun is None:
            try:
                begun = _Partial(np.empty(shape, self._types[name].dtype))
            except (MemoryError, ValueError) as e:
                raise WireError(
                    f"a value of shape {wire.brief(list(shape))}, which cannot be one"
                ) from e
        begun.take(message)
        self._partial[name] = begun

    def expect(self, name: Name, kind: ValueType) -> None:
        """Expect a value, and take the messages of it that have come."""
        self._types[name] = kind
        for message in self._early.pop(name, ()):
            try:
                self._add(name, message)
            except WireError as e:
                self._refuse(name[0], e)

    def is_complete(self, name: Name) -> bool:
        """Return True if all of a value is here."""
        begun = self._partial.get(name)
        return begun is not None and begun.is_complete

    def take(self, name: Name) -> np.ndarray:
        """Return a complete value, and drop the values of earlier steps."""
        step = name[1]
        if step != self._step:
            self._step, self._taken = step, set()
            for of in (self._early, self._types, self._partial):
                for old in [n for n in of if n[1] < step]:
                    del of[old]
        self._taken.add(name)
        del self._types[name]
        return self._partial.pop(name).array

    @property
    def waiting(self) -> int:
        """The number of values that are here in full or in part."""
        return len(self._early) + len(self._partial)


class _Partial:
    """A value, and the bytes of it that are here."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self._bytes = wire.as_bytes(array) if array.size else np.empty(0, np.uint8)
        self._arrived: dict[str, int] = {"value": 0}

    @property
    def is_complete(self) -> bool:
        return self._arrived["value"] == self.array.nbytes

    def take(self, message: wire.Message) -> None:
        def target(name: str) -> np.ndarray:
            if name != "value":
                raise WireError(f"a piece of {wire.brief(name)} in a value")
            return self._bytes

        wire.unpack(message, target, self._arrived)
