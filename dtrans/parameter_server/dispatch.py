"""Blocks of parameters, and dispatchers that place them on servers.

Paddle defines the rules in python/paddle/fluid/transpiler: `slice_variable` and `VarBlock` in
distribute_transpiler.py, `RoundRobin` and `HashName` in ps_dispatcher.py. Blocks here are equal to
Paddle's, element for element. Docstrings name defects of Paddle that dtrans does not have.
`SizeBalanced` is not in Paddle.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from dtrans.errors import ConfigAssertionError, ConfigError


class Variable(Protocol):
    """Argument of `slice_variable`: any object with a name and a shape."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclasses.dataclass(frozen=True)
class VarBlock:
    """Consecutive elements of one variable; a block prints as `name:block_id:size`, as in Paddle.

    Attributes:
      varname: name of the variable.
      offset: index of the block within the variable, from 0. The name of this field is Paddle's.
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
    """Cut variables into blocks of complete rows; return the blocks of all variables in order.

    A variable becomes at most `slice_count` blocks of equal size, but the last block may be
    smaller. The other blocks have at least `min_block_size` elements. A variable with two or more
    dimensions is cut between rows. A scalar or an empty variable is one block.

    Args:
      var_list: objects with a `name` and a `shape`.
      slice_count: the maximum number of blocks per variable, usually the number of servers.
      min_block_size: the minimum number of elements in a block.

    Raises:
      ConfigError: a count or size is not positive, or a dimension is unknown (negative).

    Source: `slice_variable` of Paddle's distribute_transpiler.py. Paddle's function divides by zero
    for an empty variable, and silently drops a variable that has a dimension of -1.

    Example:
      >>> import dtrans, jax
      >>> w = jax.ShapeDtypeStruct((784, 256), "float32")
      >>> from types import SimpleNamespace as S
      >>> [str(b) for b in dtrans.slice_variable([S(name="w", shape=(784, 256))], 3, 8192)]
      ['w:0:67072', 'w:1:67072', 'w:2:66560']
    """
    if slice_count < 1 or min_block_size < 1:
        raise ConfigError(
            f"slice_count is {slice_count} and min_block_size is {min_block_size}; expected "
            "positive numbers"
        )
    blocks = []
    for var in var_list:
        shape = tuple(var.shape)
        if any(d < 0 for d in shape):
            raise ConfigError(
                f"{var.name} has the shape {shape}; expected known dimensions, but {min(shape)} "
                "stands for an unknown one"
            )
        numel = math.prod(shape)
        size = max(1, math.ceil(numel / min(slice_count, max(1, numel // min_block_size))))
        if len(shape) >= 2 and numel:
            width = numel // shape[0]
            size = math.ceil(size / width) * width
        count = max(1, math.ceil(numel / size))
        for i in range(count):
            blocks.append(VarBlock(var.name, i, min(size, numel - i * size)))
    return blocks


# -- dispatchers -----------------------------------------------------------------------------------


class PSDispatcher:
    """Base class of dispatchers, which choose a server for each block.

    Subclasses define `dispatch`. A plan creates the dispatcher, and calls `dispatch` with the
    blocks of all leaves, in leaf order. Each block has a `name` (`params/w.block0`), `shape`,
    `dtype`, `size` (elements) and `nbytes`.

    Args:
      pserver_endpoints: the servers' endpoints.

    Source: `PSDispatcher` of Paddle's ps_dispatcher.py. Paddle accepts direct subclasses only.

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
        """The servers' endpoints, in the order of the constructor's argument."""
        return self._eps

    def reset(self) -> None:
        """Return to the state before the first call of `dispatch`."""
        self._step = 0

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        """Return one endpoint for each block, in order. Each subclass defines this method.

        Raises:
          NotImplementedError: the subclass does not define this method.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define dispatch(varlist)")


class RoundRobin(PSDispatcher):
    """Dispatcher that assigns blocks to the servers in turn, across all calls of `dispatch`.

    Example:
      >>> import dtrans
      >>> rr = dtrans.RoundRobin(["a:1", "b:1"])
      >>> rr.dispatch(["x", "y", "z"]), rr.dispatch(["u"])
      (['a:1', 'b:1', 'a:1'], ['b:1'])
    """

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        eplist = []
        for _ in varlist:
            eplist.append(self._eps[self._step % len(self._eps)])
            self._step += 1
        return eplist


class HashName(PSDispatcher):
    """Dispatcher that chooses the server by a BLAKE2b hash of the block's name.

    Every process computes the same hash. Paddle uses Python's `hash`, which differs between
    processes. A checksum such as CRC-32 would not work: the checksums of `w.block0` and `w.block1`
    are both even or both odd, so that one of two servers would get both blocks.

    Example:
      >>> import dtrans
      >>> dtrans.HashName(["a:1", "b:1"]).dispatch(["w.block0", "w.block1"])
      ['a:1', 'b:1']
    """

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        eplist = []
        for var in varlist:
            name_hash = _stable_hash(str(getattr(var, "name", var)))
            eplist.append(self._eps[name_hash % len(self._eps)])
        return eplist


class SizeBalanced(PSDispatcher):
    """Dispatcher that assigns blocks, the largest first, to the server with the fewest bytes.

    The result is deterministic: ties are decided by the order of blocks and of servers. The largest
    load after one call is at most 4/3 of the optimum (Graham, "Bounds on multiprocessing timing
    anomalies", 1969). A plan first places the leaves that cannot be cut, and then the blocks.

    Only the bytes of parameters are balanced, not those of optimizer state: `plan.balance` and
    `plan.compare` count both.

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
        """Bytes assigned so far, by endpoint."""
        return dict(self._loads)

    def reset(self) -> None:
        super().reset()
        self._loads = dict.fromkeys(self._eps, 0)

    def assign(self, nbytes: int, endpoint: str | None = None) -> str:
        """Add bytes to the load of a server, and return the server's endpoint.

        Args:
          nbytes: bytes to add.
          endpoint: the server; None for the server with the smallest load so far.
        """
        if endpoint is None:
            endpoint = min(self._eps, key=self._loads.__getitem__)
        self._loads[endpoint] += nbytes
        return endpoint

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        sizes = list(map(_size, varlist))
        eplist = [""] * len(sizes)
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            eplist[i] = self.assign(sizes[i])
        return eplist


def check_dispatcher(split_method: Any) -> None:
    """Check that `split_method` is a proper subclass of `PSDispatcher`.

    Raises:
      ConfigAssertionError: `split_method` is something else. Paddle has an assertion here.
    """
    is_dispatcher = isinstance(split_method, type) and issubclass(split_method, PSDispatcher)
    if not is_dispatcher or split_method is PSDispatcher:
        raise ConfigAssertionError(
            f"split_method is {split_method!r}; expected a subclass of dtrans.PSDispatcher, such "
            "as dtrans.RoundRobin or dtrans.HashName"
        )


def _size(var: Any) -> int:
    """Return a block's bytes, or its number of elements if it has no `nbytes`."""
    size = getattr(var, "nbytes", getattr(var, "size", None))
    if not isinstance(size, int) or isinstance(size, bool):
        raise ConfigError(
            f"dtrans.SizeBalanced got the block {var!r}; expected an object with an integer "
            "nbytes or size"
        )
    return size


def _stable_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
