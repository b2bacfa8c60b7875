"""Functions that are compiled: those of a step are recorded while it is made, and equal ones are
compiled once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class LoweredStep:
    """The lowered functions of a step, in the order in which they are called.

    Attributes:
      parts: name to what `jax.jit(...).lower` gives: `trainers 0`, `127.0.0.1:6174 phase 0`, `stage
        1 forward`.
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


def jitted_once(fn: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    """A jitted function; functions that are lowered to the same text are one, and compiled once.

    To lower takes a tenth of the time of compiling. The tables of a model often have the same
    shape, and so have the programs that make their rows.

    Args:
      fn: a pure function.
      args: what it will be called with, or of the same types.
      options: those of XLA (`compiler_options` of `jax.jit`), of text and numbers.
    """
    given = tuple(sorted(options.items()))
    return _jitted(_Program(jax.jit(fn).lower(*args).as_text(), given, fn))


@dataclasses.dataclass(frozen=True)
class _Program:
    text: str
    options: tuple[tuple[str, Any], ...]
    fn: Callable[..., Any] = dataclasses.field(compare=False)


@functools.lru_cache(256)
def _jitted(program: _Program) -> Callable[..., Any]:
    return jax.jit(program.fn, compiler_options=dict(program.options) or None)
