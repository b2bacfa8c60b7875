"""Compiled functions of a step: recorded for `job.lower`, and compiled once if equal."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class LoweredStep:
    """Lowered functions of a step, in the order in which they are called.

    Attributes:
      parts: the results of `jax.jit(...).lower` by name, such as `trainers 0`, `127.0.0.1:6174
        phase 0` or `stage 1 forward`.
    """

    parts: Mapping[str, Any]

    def as_text(self) -> str:
        """Return the StableHLO of all functions, each under its name."""
        return "\n".join(f"// {name}\n{part.as_text()}" for name, part in self.parts.items())


_recorded: dict[str, Any] | None = None


@contextlib.contextmanager
def recording() -> Iterator[dict[str, Any]]:
    """Record the functions that `call_recorded` calls in this block; yield the record."""
    global _recorded
    _recorded = {}
    try:
        yield _recorded
    finally:
        _recorded = None


def call_recorded(name: Callable[[], str], jitted: Callable[..., Any], *args: Any) -> Any:
    """Call a compiled function; inside `recording`, lower it as well.

    Args:
      name: returns the name in the record. It is called only inside `recording`.
    """
    if _recorded is not None and hasattr(jitted, "lower"):
        _recorded.setdefault(name(), jitted.lower(*args))
    return jitted(*args)


def jitted_once(fn: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    """Jit a function, or return an earlier jitted function with the same StableHLO and options.

    Lowering takes a tenth of the time of compiling. The tables of a model often have the same
    shape. The programs that initialise their rows are then equal, and only one is compiled.

    Args:
      fn: a pure function.
      args: arguments of its calls, or their types.
      options: `compiler_options` of `jax.jit`, of text and numbers.
    """
    items = tuple(sorted(options.items()))
    return _jitted(_Program(jax.jit(fn).lower(*args).as_text(), items, fn))


@dataclasses.dataclass(frozen=True)
class _Program:
    text: str
    options: tuple[tuple[str, Any], ...]
    fn: Callable[..., Any] = dataclasses.field(compare=False)


@functools.lru_cache(256)
def _jitted(program: _Program) -> Callable[..., Any]:
    return jax.jit(program.fn, compiler_options=dict(program.options) or None)
