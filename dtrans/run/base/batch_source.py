"""A user's batches, with a return to an earlier batch, for `dtrans.feed`.

After the failure of a process, a job repeats steps, and needs their batches again. The *position*
of a source is the number of batches before the next one. Some loaders can save and restore their
state. `dtrans.run.base.feeder` reads a source in a thread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from dtrans.errors import ConfigError


# Maximum number of saved states of one source. Beyond this number, every second state is dropped.
MOST_MARKS = 64


class _StateMethods(NamedTuple):
    """Names of the methods that save and restore a state."""

    save: str
    restore: str


# First pair: grain's iterators. Second pair: torchdata's `StatefulDataLoader`, and iterable data
# sets of Hugging Face.
STATE_METHODS = (
    _StateMethods("get_state", "set_state"),
    _StateMethods("state_dict", "load_state_dict"),
)


class BatchSource:
    """Batches of an iterable that cannot go back: they are read once, from start to end.

    Subclasses can go back to earlier batches.

    Args:
      batches: the iterable.
      iterator: its iterator.

    Attributes:
      position: number of batches before the next one.
      state: the iterable's saved state at the position; None if it cannot save a state.
    """

    state: Any = None

    def __init__(self, batches: Any, iterator: Iterator[Any]) -> None:
        self._batches, self._iterator = batches, iterator
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._iterator)
        self.position += 1
        return batch

    def seek(self, position: int) -> None:
        """Continue with the batch after the first `position` batches.

        Raises:
          ConfigError: the source cannot go back to this batch.
        """
        if position != self.position:
            raise ConfigError(
                f"{type(self._batches).__name__} is at batch {self.position}, and cannot go to "
                f"batch {position}; pass dtrans.feed a function of the step number, or a loader "
                f"with a method seek(step), {' or '.join(x.restore for x in STATE_METHODS)}"
            )

    def restore(self, position: int, state: Any) -> None:
        """Continue at a position, with the state that the source had there.

        Args:
          position: number of batches before the next one.
          state: the source's state at this position, or None.
        """
        self.seek(position)


class FunctionSource(BatchSource):
    """Endless batches from a function of the step number. It can go to any step."""

    def __init__(self, batch_of: Callable[[int], Any]) -> None:
        super().__init__(batch_of, iter(()))

    def __next__(self) -> Any:
        batch = self._batches(self.position)
        self.position += 1
        return batch

    def seek(self, position: int) -> None:
        self.position = position


class SeekableSource(BatchSource):
    """Batches of an iterable with a method `seek(step)`, which goes to the batch of a step."""

    def seek(self, position: int) -> None:
        if position != self.position:
            self._batches.seek(position)
            self._iterator, self.position = iter(self._batches), position


class StatefulSource(BatchSource):
    """Batches of a loader that can save and restore its state.

    The source saves the loader's state at some positions. To go back to a batch, it restores the
    last state saved before this batch, and skips batches. The first saved state is the state at the
    start, or the state that the user has restored.

    Args:
      batches: the loader, or an iterator.
      iterator: the iterator over the loader.
      stateful: the loader or the iterator: the object that has the methods to save and restore.
      methods: names of these two methods.
    """

    def __init__(
        self, batches: Any, iterator: Iterator[Any], stateful: Any, methods: _StateMethods
    ) -> None:
        super().__init__(batches, iterator)
        self._stateful, self._methods = stateful, methods
        self.state = self._save()
        self._marks = {0: self.state}
        self._first, self._spacing = 0, 1

    def __next__(self) -> Any:
        batch = super().__next__()
        self.state = self._save()
        if (self.position - self._first) % self._spacing == 0:
            self._marks[self.position] = self.state
        if len(self._marks) > MOST_MARKS:
            self._spacing *= 2
            for position in [*self._marks]:
                if (position - self._first) % self._spacing:
                    del self._marks[position]
        return batch

    def seek(self, position: int) -> None:
        if position < self.position:
            marks = [x for x in self._marks if x <= position]
            if not marks:
                raise ConfigError(
                    f"the first batch of {type(self._batches).__name__} has the number "
                    f"{self._first}, so dtrans.feed cannot go to batch {position}; pass "
                    f"load_state_dict a state that was saved at batch {position} or before it"
                )
            self._go_to(max(marks), self._marks[max(marks)])
        while self.position < position:
            next(self)

    def restore(self, position: int, state: Any) -> None:
        state = copy.deepcopy(state)
        self._go_to(position, state)
        self._marks = {position: state}
        self._first, self._spacing = position, 1

    def _go_to(self, position: int, state: Any) -> None:
        # pass a copy, because a loader may use the dict as its live state, and change it
        getattr(self._stateful, self._methods.restore)(copy.deepcopy(state))
        if self._stateful is self._batches:
            self._iterator = iter(self._batches)
        self.position, self.state = position, state

    def _save(self) -> Any:
        # copy the dict, because it may be the loader's live state, which the next batch changes
        return copy.deepcopy(getattr(self._stateful, self._methods.save)())


def open_source(batches: Iterable[Any] | Callable[[int], Any]) -> BatchSource:
    """Return a source of the user's batches that can go back to an earlier batch.

    Args:
      batches: an iterable, or a function that returns the batch of a step number.
    """
    if callable(batches) and not isinstance(batches, Iterable):
        return FunctionSource(batches)
    assert isinstance(batches, Iterable)
    iterator = iter(batches)
    if hasattr(batches, "seek"):
        return SeekableSource(batches, iterator)
    for stateful in (iterator, batches):
        for methods in STATE_METHODS:
            if hasattr(stateful, methods.save) and hasattr(stateful, methods.restore):
                return StatefulSource(batches, iterator, stateful, methods)
    return BatchSource(batches, iterator)
