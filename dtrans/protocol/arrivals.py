"""What one process of a pipeline receives: values, named by who sends them, the step, and a number
in it.

Values come in the order in which they are sent, which is not that in which they are wanted. What
comes before it is wanted is kept as it came: nothing of what a message claims is believed, and no
memory is made for it, until the process says what it expects there. Then the messages are looked
at; those that are not of such a value are dropped and counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from dtrans.errors import WireError
from dtrans.protocol import wire


KEYS = 1 << 20  # numbers that values of a step may have
Name = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class ValueType:
    """What is expected of a value.

    Attributes:
      shape: None for a dimension that the sender says.
      impl: the kind of keys, for those of `jax.random`, which come as their data.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]
    impl: str = ""

    def check(self, message: wire.Message) -> tuple[int, ...]:
        """The shape of a value that comes. Raises WireError where it is another than is
        expected."""
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
        return f"{self.dtype.name}[{','.join('*' if n is None else str(n) for n in self.shape)}]{self.impl}"


class Arrivals:
    """Values that come, whole or not.

    Args:
      refuse: is told of each message that is dropped, and of whose.

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol import wire
      >>> from dtrans.protocol.arrivals import Arrivals, ValueType
      >>> arrivals, name = Arrivals(print), (1, 1, 7)
      >>> arrivals.expect(name, ValueType((2,), np.dtype("float32")))
      >>> data = np.ones(2, np.float32)
      >>> fields = dict(process=1, step=1, key=7, dtype="float32", shape=[2], impl="")
      >>> head = wire.header("value", **fields, pieces=[[["value", 0, 8]]])
      >>> arrivals.hear(1, wire.parse([head, data.tobytes()]))
      >>> arrivals.is_whole(name), arrivals.take(name)
      (True, array([1., 1.], dtype=float32))
    """

    def __init__(self, refuse: Callable[[int, WireError], None]) -> None:
        self._refuse = refuse
        self._step = 0  # of the value that was taken last: none of earlier steps is due any more
        self._had: set[Name] = set()  # what was taken of this step
        self._kept: dict[Name, list[wire.Message]] = {}
        self._types: dict[Name, ValueType] = {}
        self._begun: dict[Name, _Begun] = {}

    def hear(self, origin: int, message: wire.Message) -> None:
        """Take a message of a process, or keep it. One that is not right is dropped, and changes
        nothing."""
        try:
            name = self._name(origin, message)
            if name in self._types:
                self._add(name, message)
            else:
                self._kept.setdefault(name, []).append(message)
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
        if name[1] < self._step or not 0 <= name[2] < KEYS or name in self._had:
            raise WireError(
                f"value {name[2]} of step {name[1]} of process {name[0]}, which is not due in step "
                f"{self._step}"
            )
        return name

    def _add(self, name: Name, message: wire.Message) -> None:
        shape = self._types[name].check(message)
        begun = self._begun.get(name)
        if begun is not None and begun.array.shape != shape:
            raise WireError(
                f"a value of shape {list(shape)}, of which a piece was of shape "
                f"{list(begun.array.shape)}"
            )
        if begun is None:
            try:
                begun = _Begun(np.empty(shape, self._types[name].dtype))
            except (MemoryError, ValueError) as e:
                raise WireError(
                    f"a value of shape {wire.brief(list(shape))}, which cannot be one"
                ) from e
        begun.take(message)
        self._begun[name] = begun

    def expect(self, name: Name, kind: ValueType) -> None:
        """Say what is wanted next, and look at what has come of it."""
        self._types[name] = kind
        for message in self._kept.pop(name, ()):
            try:
                self._add(name, message)
            except WireError as e:
                self._refuse(name[0], e)

    def is_whole(self, name: Name) -> bool:
        """Whether all of a value is here."""
        begun = self._begun.get(name)
        return begun is not None and begun.is_whole

    def take(self, name: Name) -> np.ndarray:
        """A value that is whole; values of earlier steps are dropped."""
        step = name[1]
        if step != self._step:
            self._step, self._had = step, set()
            for of in (self._kept, self._types, self._begun):
                for old in [n for n in of if n[1] < step]:
                    del of[old]
        self._had.add(name)
        del self._types[name]
        return self._begun.pop(name).array

    @property
    def waiting(self) -> int:
        """How many values are here, or a part of them."""
        return len(self._kept) + len(self._begun)


class _Begun:
    """A value, as far as it has come."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self._bytes = wire.as_bytes(array) if array.size else np.empty(0, np.uint8)
        self._arrived: dict[str, int] = {"value": 0}

    @property
    def is_whole(self) -> bool:
        return self._arrived["value"] == self.array.nbytes

    def take(self, message: wire.Message) -> None:
        def target(name: str) -> np.ndarray:
            if name != "value":
                raise WireError(f"a piece of {wire.brief(name)} in a value")
            return self._bytes

        wire.unpack(message, target, self._arrived)
