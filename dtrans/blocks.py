"""Blocks of parameters, and dispatchers that place them on servers.

Two of Paddle's files, with their rules kept to the element and their defects not:
python/paddle/fluid/transpiler/distribute_transpiler.py (`slice_variable`, `VarBlock`) and
python/paddle/fluid/transpiler/ps_dispatcher.py (`RoundRobin`, `HashName`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from dtrans.errors import ConfigError


class Variable(Protocol):
    """What `slice_variable` looks at: anything with a name and a shape."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclasses.dataclass(frozen=True)
class VarBlock:
    """A run of elements of one variable; prints as `name:block_id:size`, as in Paddle.

    Attributes:
      varname: the variable.
      offset: the number of the block within the variable, 0, 1, ... (Paddle's word for it).
      size: its number of elements.
    """

    varname: str
    offset: int
    size: int

    @property
    def name(self) -> str:
        """The name of the block, e.g. `w.block0`; what dispatchers see."""
        return f"{self.varname}.block{self.offset}"

    def __str__(self) -> str:
        return f"{self.varname}:{self.offset}:{self.size}"


def slice_variable(var_list: Iterable[Variable], slice_count: int, min_block_size: int) -> list[VarBlock]:
    """Cut variables into blocks of whole rows.

    A variable of n elements becomes at most `slice_count` blocks, none (but the last) smaller than
    `min_block_size` elements, each a whole number of rows where the variable has rows. The blocks of one
    variable are of equal size but for the last. A 0-d or empty variable is one block.

    Args:
      var_list: anything with a `name` and a `shape`.
      slice_count: the most blocks a variable is cut into, usually the number of servers.
      min_block_size: the fewest elements worth a block of their own.

    Raises:
      ConfigError: a count or size that is not positive, or an unknown (negative) dimension.

    Source: `slice_variable` of Paddle's distribute_transpiler.py, which divides by zero on empty
    variables and silently drops those with a dimension of -1.

    Example:
      >>> import dtrans, jax
      >>> w = jax.ShapeDtypeStruct((784, 256), "float32")
      >>> from types import SimpleNamespace as S
      >>> [str(b) for b in dtrans.slice_variable([S(name="w", shape=(784, 256))], 3, 8192)]
      ['w:0:67072', 'w:1:67072', 'w:2:66560']
    """
    if slice_count < 1 or min_block_size < 1:
        raise ConfigError(
            f"slice_count and min_block_size must be positive, they are {slice_count} and {min_block_size}"
        )
    blocks = []
    for var in var_list:
        shape = tuple(var.shape)
        if any(d < 0 for d in shape):
            raise ConfigError(
                f"{var.name} has the unknown dimension {min(shape)} in its shape {shape}; blocks need the real one"
            )
        numel = math.prod(shape)
        size = max(1, math.ceil(numel / min(slice_count, max(1, numel // min_block_size))))
        if len(shape) >= 2 and numel:
            width = numel // shape[0]
            size = math.ceil(size / width) * width
        count = max(1, math.ceil(numel / size))
        blocks += [VarBlock(var.name, i, min(size, numel - i * size)) for i in range(count)]
    return blocks


# -- dispatchers -----------------------------------------------------------------------------------


class PSDispatcher:
    """Places blocks on servers. Subclass it and define `dispatch` to bring a rule of one's own.

    Args:
      pserver_endpoints: the servers, in order.
    """

    def __init__(self, pserver_endpoints: Sequence[str]) -> None:
        self._eps = list(pserver_endpoints)
        self._step = 0

    @property
    def eps(self) -> list[str]:
        """The servers, in order."""
        return self._eps

    def reset(self) -> None:
        """Forget what was dispatched."""
        self._step = 0

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        """One endpoint for each of the blocks."""
        raise NotImplementedError(f"{type(self).__name__} does not define dispatch(varlist)")


class RoundRobin(PSDispatcher):
    """The servers in turn, going on where the last call stopped.

    Example:
      >>> import dtrans
      >>> rr = dtrans.RoundRobin(["a:1", "b:1"])
      >>> rr.dispatch(["x", "y", "z"]), rr.dispatch(["u"])
      (['a:1', 'b:1', 'a:1'], ['b:1'])
    """

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        eplist = [self._eps[(self._step + i) % len(self._eps)] for i in range(len(varlist))]
        self._step += len(varlist)
        return eplist


class HashName(PSDispatcher):
    """By a hash of the block's name: BLAKE2b, the same in every process and on every run.

    Paddle's used Python's `hash`, which is salted per process (and called the name, so that it raised). A
    checksum such as CRC-32 will not do: it gives `w.block0` and `w.block1` the same parity, so two servers would
    never share a variable.

    Example:
      >>> import dtrans
      >>> dtrans.HashName(["a:1", "b:1"]).dispatch(["w.block0", "w.block1"])
      ['a:1', 'b:1']
    """

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        return [self._eps[_stable_hash(str(getattr(v, "name", v))) % len(self._eps)] for v in varlist]


def _stable_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
