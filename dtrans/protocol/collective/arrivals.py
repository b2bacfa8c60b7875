"""Values that a process of a pipeline receives from other processes.

The name of a value consists of its sender, the step, and a number within the step. A value may
arrive before the process expects it. The process stores such an early message without a check, and
allocates no array. As soon as the process expects the value, it checks the stored messages. It
drops messages with another shape or dtype than the expected one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from dtrans.errors import WireError
from dtrans.protocol import wire


T = TypeVar("T")

KEYS = 1 << 20  # the number of a value within a step is smaller than this
Name = tuple[int, int, int]  # (id of the sending process, step, number within the step)


@dataclasses.dataclass(frozen=True)
class ValueType:
    """Expected type of a value.

    Attributes:
      shape: expected size of each dimension; None if any size is allowed.
      dtype: dtype of the value; if the value is a `jax.random` key, dtype of the key data.
      impl: PRNG implementation of a `jax.random` key, such as "threefry2x32"; empty for arrays.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]
    impl: str = ""

    def check(self, message: wire.Message) -> tuple[int, ...]:
        """Check that the value in a message has this type, and return the value's shape.

        Raises:
          WireError: the value has another type.
        """
        shape, dtype, impl = message["shape"], message["dtype"], message["impl"]
        is_same = dtype == self.dtype.name and impl == self.impl and len(shape) == len(self.shape)
        if not is_same or not all(map(_fits, shape, self.shape)):
            claimed = f"{wire.brief(dtype)}{wire.brief(shape)}{wire.brief(impl) * bool(impl)}"
            raise WireError(f"a value of type {claimed}, expected {self}")
        return tuple(shape)

    def __str__(self) -> str:
        shape = ",".join("*" if n is None else str(n) for n in self.shape)
        return f"{self.dtype.name}[{shape}]{self.impl}"


def _fits(size: Any, expected: int | None) -> bool:
    """Return True if `size` is the expected size; if `expected` is None, every size is allowed."""
    return type(size) is int and size >= 0 and expected in (None, size)


class Arrivals:
    """Values of a pipeline that have arrived completely or partly.

    Args:
      refuse: callback for each dropped message; its arguments are the sender and the error.

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
        # The step of the value that `take` returned last. All earlier steps are complete.
        self._step = 0
        self._taken: set[Name] = set()  # values of step `_step` that `take` has returned
        self._early: dict[Name, list[wire.Message]] = {}
        self._types: dict[Name, ValueType] = {}
        self._partial: dict[Name, _Partial] = {}

    def hear(self, origin: int, message: wire.Message) -> None:
        """Handle a message if its value is expected, else store the message.

        A malformed message is dropped.

        Args:
          origin: id of the process that sent the message.
          message: the message.
        """
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
            raise WireError(f"process {origin} sent a `{message.op}` message, expected `value`")
        name = (message["process"], message["step"], message["key"])
        if name[0] != origin:
            raise WireError(
                f"process {origin} sent a value that names process {name[0]} as its sender"
            )
        if name[1] < self._step or not 0 <= name[2] < KEYS or name in self._taken:
            raise WireError(
                f"process {name[0]} sent value {name[2]} of step {name[1]}, which is not expected "
                f"in step {self._step}"
            )
        return name

    def _add(self, name: Name, message: wire.Message) -> None:
        shape = self._types[name].check(message)
        begun = self._partial.get(name)
        if begun is not None and begun.array.shape != shape:
            raise WireError(
                f"a value has shape {list(shape)}, but an earlier message of the same value says "
                f"{list(begun.array.shape)}"
            )
        if begun is None:
            try:
                begun = _Partial(np.empty(shape, self._types[name].dtype))
            except (MemoryError, ValueError) as e:
                raise WireError(
                    f"a value of shape {wire.brief(list(shape))}, which is too large"
                ) from e
        begun.take(message)
        self._partial[name] = begun

    def expect(self, name: Name, kind: ValueType) -> None:
        """Begin to expect a value of a type; handle its messages that have arrived early."""
        self._types[name] = kind
        for message in self._early.pop(name, ()):
            try:
                self._add(name, message)
            except WireError as e:
                self._refuse(name[0], e)

    def is_complete(self, name: Name) -> bool:
        """Return True if a value has arrived completely."""
        begun = self._partial.get(name)
        return begun is not None and begun.is_complete

    def take(self, name: Name) -> np.ndarray:
        """Remove and return a complete value. Drop the values of earlier steps."""
        step = name[1]
        if step != self._step:
            self._step, self._taken = step, set()
            self._early = _from_step(self._early, step)
            self._types = _from_step(self._types, step)
            self._partial = _from_step(self._partial, step)
        self._taken.add(name)
        del self._types[name]
        return self._partial.pop(name).array

    @property
    def waiting(self) -> int:
        """Number of stored values, complete or partial, that `take` has not returned yet."""
        return len(self._early) + len(self._partial)


def _from_step(values: dict[Name, T], step: int) -> dict[Name, T]:
    """Return the values of `step` and of later steps."""
    return {name: value for name, value in values.items() if name[1] >= step}


class _Partial:
    """Value that has arrived partly."""

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
                raise WireError(
                    f"a `value` message with a block named {wire.brief(name)}, expected the name "
                    "`value`"
                )
            return self._bytes

        wire.unpack(message, target, self._arrived)
