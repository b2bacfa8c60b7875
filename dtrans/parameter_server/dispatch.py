"""Blocks of parameters, and dispatchers that place them on servers.

The rules equal those of two Paddle files to the element, without their defects:
python/paddle/fluid/transpiler/distribute_transpiler.py (`slice_variable`, `VarBlock`) and
python/paddle/fluid/transpiler/ps_dispatcher.py (`RoundRobin`, `HashName`). `SizeBalanced` is not in
Paddle.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from dtrans.errors import ConfigAssertionError, ConfigError
from dtrans.ir.selection import values_at


class Variable(Protocol):
    """Variable that `slice_variable` cuts: anything with a name and a shape."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclasses.dataclass(frozen=True)
class VarBlock:
    """Run of elements of one variable; it prints as `name:block_id:size`, as in Paddle.

    Attributes:
      varname: name of the variable.
      offset: index of the block within the variable, 0, 1, ... (Paddle's word).
      size: the number of elements.
    """

    varname: str
    offset: int
    size: int

    @property
    def name(self) -> str:
        """Name of the block for dispatchers, e.g. `w.block0`."""
        return f"{self.varname}.block{self.offset}"

    def __str__(self) -> str:
        return f"{self.varname}:{self.offset}:{self.size}"


def slice_variable(
    var_list: Iterable[Variable], slice_count: int, min_block_size: int
) -> list[VarBlock]:
    """Cut variables into blocks of whole rows.

    A variable becomes at most `slice_count` blocks of equal size; the last may be smaller. Each
    other block has at least `min_block_size` elements. A variable of two or more dimensions is cut
    between rows. A 0-d or empty variable is one block.

    Args:
      var_list: objects with a `name` and a `shape`.
      slice_count: the most blocks of a variable, usually the number of servers.
      min_block_size: the least number of elements of a block.

    Raises:
      ConfigError: a count or size is not positive, or a dimension is unknown (negative).

    Source: `slice_variable` of Paddle's distribute_transpiler.py, which divides by zero for empty
    variables and silently drops variables with a dimension of -1.

    Example:
      >>> import dtrans, jax
      >>> w = jax.ShapeDtypeStruct((784, 256), "float32")
      >>> from types import SimpleNamespace as S
      >>> [str(b) for b in dtrans.slice_variable([S(name="w", shape=(784, 256))], 3, 8192)]
      ['w:0:67072', 'w:1:67072', 'w:2:66560']
    """
    if slice_count < 1 or min_block_size < 1:
        raise ConfigError(
            f"slice_count and min_block_size must be positive, they are {slice_count} and "
            f"{min_block_size}"
        )
    blocks = []
    for var in var_list:
        shape = tuple(var.shape)
        if any(d < 0 for d in shape):
            raise ConfigError(
                f"{var.name} has the unknown dimension {min(shape)} in its shape {shape}; blocks "
                "need the real one"
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
    """Base of dispatchers, which place blocks on servers; subclasses define `dispatch`.

    A plan creates a dispatcher, and calls `dispatch` once with the blocks of all leaves. They are
    in leaf order, as in Paddle for the values that trainers receive. Each block has a `name`
    (`params/w.block0`), `shape`, `dtype`, `size` (elements) and `nbytes`.

    Args:
      pserver_endpoints: the servers, in order.

    Source: `PSDispatcher` of Paddle's ps_dispatcher.py; Paddle accepted only its direct subclasses.

    Example:
      >>> import dtrans
      >>> class LargeBlocks(dtrans.RoundRobin):
      ...     '''The first server gets the small blocks, the others take turns.'''
      ...     def dispatch(self, varlist):
      ...         turns = dtrans.RoundRobin(self.eps[1:])
      ...         return [turns.dispatch([v])[0] if v.size > 100 else self.eps[0] for v in varlist]
      >>> w = [dtrans.VarBlock("w", 0, 500), dtrans.VarBlock("w", 1, 500)]
      >>> LargeBlocks(["a:1", "b:1", "c:1"]).dispatch([*w, dtrans.VarBlock("b", 0, 10)])
      ['b:1', 'c:1', 'a:1']
    """

    def __init__(self, pserver_endpoints: Sequence[str]) -> None:
        self._eps = list(pserver_endpoints)
        self._step = 0

    @property
    def eps(self) -> list[str]:
        """The servers, in order."""
        return self._eps

    def reset(self) -> None:
        """Return to the initial state, as before the first `dispatch`."""
        self._step = 0

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        """Return one endpoint for each block, in order; this base raises NotImplementedError."""
        raise NotImplementedError(f"{type(self).__name__} does not define dispatch(varlist)")


class RoundRobin(PSDispatcher):
    """Dispatcher that takes the servers in turn; a call continues where the last one stopped.

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
    """Dispatcher by a hash of the block's name, BLAKE2b, which is equal in every process.

    Paddle's used Python's `hash`, which is salted per process (and called the name, so that it
    raised). A checksum such as CRC-32 gives `w.block0` and `w.block1` the same parity, so two
    servers would never share a variable.

    Example:
      >>> import dtrans
      >>> dtrans.HashName(["a:1", "b:1"]).dispatch(["w.block0", "w.block1"])
      ['a:1', 'b:1']
    """

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        hashes = [_stable_hash(str(getattr(v, "name", v))) for v in varlist]
        return [self._eps[x % len(self._eps)] for x in hashes]


class SizeBalanced(PSDispatcher):
    """Dispatcher that assigns each block to the server with the fewest bytes, largest block first.

    Blocks of equal size keep their order, and servers with equal loads theirs, so the result is
    deterministic. The largest load of one call is at most 4/3 of the optimum (Graham, "Bounds on
    multiprocessing timing anomalies", 1969). A plan first assigns leaves that the optimizer does
    not let be cut; blocks then fill the other servers.

    It balances parameters. For leaves with different optimizer state see `plan.balance` and
    `plan.compare`.

    Example:
      >>> import dtrans
      >>> w = [dtrans.VarBlock("w", 0, 500), dtrans.VarBlock("w", 1, 490)]
      >>> blocks = [dtrans.VarBlock("b", 0, 10), *w]
      >>> dtrans.RoundRobin(["a:1", "b:1"]).dispatch(blocks)
      ['a:1', 'b:1', 'a:1']
      >>> dtrans.SizeBalanced(["a:1", "b:1"]).dispatch(blocks)
      ['b:1', 'a:1', 'b:1']
    """

    def __init__(self, pserver_endpoints: Sequence[str]) -> None:
        super().__init__(pserver_endpoints)
        self._loads = dict.fromkeys(self._eps, 0)

    @property
    def loads(self) -> dict[str, int]:
        """Endpoint to the bytes assigned to it."""
        return dict(self._loads)

    def reset(self) -> None:
        super().reset()
        self._loads = dict.fromkeys(self._eps, 0)

    def assign(self, nbytes: int, endpoint: str | None = None) -> str:
        """Assign bytes to the server with the fewest, or to the named one; return its endpoint."""
        if endpoint is None:
            endpoint = min(self._eps, key=self._loads.__getitem__)
        self._loads[endpoint] += nbytes
        return endpoint

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        sizes = [_size(v) for v in varlist]
        largest_first = sorted(range(len(sizes)), key=lambda i: -sizes[i])
        endpoints = {i: self.assign(sizes[i]) for i in largest_first}
        return values_at(endpoints, range(len(sizes)))


def check_dispatcher(split_method: Any) -> None:
    """Raise ConfigAssertionError, as Paddle asserts, unless it is a subclass of `PSDispatcher`."""
    is_dispatcher = isinstance(split_method, type) and issubclass(split_method, PSDispatcher)
    if not is_dispatcher or split_method is PSDispatcher:
        raise ConfigAssertionError(
            "split_method must be a subclass of dtrans.PSDispatcher, such as dtrans.RoundRobin or "
            f"dtrans.HashName; it is {split_method!r}"
        )


def _size(var: Any) -> int:
    """Return a block's weight: its bytes, or its elements if it has no `nbytes`."""
    size = getattr(var, "nbytes", getattr(var, "size", None))
    if not isinstance(size, int) or isinstance(size, bool):
        raise ConfigError(
            f"dtrans.SizeBalanced weighs blocks by their nbytes or size; {var!r} has neither"
        )
    return size


def _stable_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
