"""Record of a step's compiled functions for `job.lower`, and reuse of equal compiled functions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class LoweredStep:
    """Lowered functions of a step, in the order of their calls; result of `job.lower`.

    Attributes:
      parts: maps the name of each function to the result of `jax.jit(...).lower`. Names are
        `trainers 0`, `127.0.0.1:6174 phase 0` or `stage 1 forward`, for example.
    """

    parts: Mapping[str, Any]

    def as_text(self) -> str:
        """Return the StableHLO of all functions, each under its name."""
        return "\n".join(f"// {name}\n{part.as_text()}" for name, part in self.parts.items())


_recorded: dict[str, Any] | None = None


@contextlib.contextmanager
def recording() -> Iterator[dict[str, Any]]:
    """Record the functions that `call_recorded` calls in this block.

    Yields:
      A dict to which each call adds its lowered function, by name.
    """
    global _recorded
    _recorded = {}
    try:
        yield _recorded
    finally:
        _recorded = None


def call_recorded(name: Callable[[], str], jitted: Callable[..., Any], *args: Any) -> Any:
    """Call a jitted function. Inside `recording`, also record its lowered form.

    Args:
      name: function that returns the name for the record. It is called only inside `recording`.
      jitted: the function.
      *args: its arguments.
    """
    if _recorded is not None and hasattr(jitted, "lower"):
        _recorded.setdefault(name(), jitted.lower(*args))
    return jitted(*args)


def jitted_once(fn: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    """Jit a function, or return an earlier jitted function with equal StableHLO and options.

    Lowering takes a tenth of the time of compiling. For example, tables of one shape have equal
    programs that initialize rows, so only one program is compiled.

    Args:
      fn: a pure function.
      args: example arguments of its calls, or types of arguments.
      options: `compiler_options` of `jax.jit`, a dict of texts and numbers.
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
