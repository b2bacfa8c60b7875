"""What a step compiles, where it is several functions: recorded while a step is made."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class LoweredStep:
    """The lowered functions of a step, in the order in which they are called.

    Attributes:
      parts: name to what `jax.jit(...).lower` gives: `trainers 0`, `127.0.0.1:6174 phase 0`, `stage 1 forward`.
    """

    parts: Mapping[str, Any]

    def as_text(self) -> str:
        """The text of all of them, each under its name."""
        return "\n".join(f"// {name}\n{part.as_text()}" for name, part in self.parts.items())


_recorded: dict[str, Any] | None = None


@contextlib.contextmanager
def recording() -> Iterator[dict[str, Any]]:
    """Record the functions that are `called` in this block."""
    global _recorded
    _recorded = {}
    try:
        yield _recorded
    finally:
        _recorded = None


def called(name: Callable[[], str], jitted: Callable[..., Any], *args: Any) -> Any:
    """Call a compiled function; and lower it, if anybody records."""
    if _recorded is not None and hasattr(jitted, "lower"):
        _recorded.setdefault(name(), jitted.lower(*args))
    return jitted(*args)
