"""Blocks of parameters, and dispatchers that place them on servers.

Two of Paddle's files, with their rules kept to the element and their defects not:
python/paddle/fluid/transpiler/distribute_transpiler.py (`slice_variable`, `VarBlock`) and
python/paddle/fluid/transpiler/ps_dispatcher.py (`RoundRobin`, `HashName`). `SizeBalanced` is not
Paddle's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from dtrans.errors import ConfigAssertionError, ConfigError


class Variable(Protocol):
    """Variable that `slice_variable` cuts: anything with a name and a shape."""

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


def slice_variable(
    var_list: Iterable[Variable], slice_count: int, min_block_size: int
) -> list[VarBlock]:
    """Cut variables into blocks of whole rows.

    A variable of n elements becomes at most `slice_count` blocks. Each has at least
    `min_block_size` elements, except the last; if the variable has rows, it has a whole number of
    them. All blocks of a variable but the last have the same size. A 0-d or empty variable is one
    block.

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
    """Places blocks on servers. Subclass it, or any subclass, and define `dispatch` to bring a rule
    of one's own.

    A plan makes a dispatcher of its own, and calls `dispatch` once, with the blocks of all leaves,
    in leaf order (as Paddle did for what trainers receive). Each has a `name` (`params/w.block0`),
    `shape`, `dtype`, `size` (elements) and `nbytes`.

    Args:
      pserver_endpoints: the servers, in order.

    Source: `PSDispatcher` of Paddle's ps_dispatcher.py, where only its direct subclasses were
      taken.

    Example:
      >>> import dtrans
      >>> class LargeOnes(dtrans.RoundRobin):
      ...     '''The first server has what is small, the others take turns.'''
      ...     def dispatch(self, varlist):
      ...         turns = dtrans.RoundRobin(self.eps[1:])
      ...         return [turns.dispatch([v])[0] if v.size > 100 else self.eps[0] for v in varlist]
      >>> blocks = [dtrans.VarBlock("w", 0, 500), dtrans.VarBlock("w", 1, 500), dtrans.VarBlock("b", 0, 10)]
      >>> LargeOnes(["a:1", "b:1", "c:1"]).dispatch(blocks)
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
        """Forget what was dispatched."""
        self._step = 0

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        """Return one endpoint for each block, in order. Raises NotImplementedError here."""
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

    Paddle's used Python's `hash`, which is salted per process (and called the name, so that it
    raised). A checksum such as CRC-32 will not do: it gives `w.block0` and `w.block1` the same
    parity, so two servers would never share a variable.

    Example:
      >>> import dtrans
      >>> dtrans.HashName(["a:1", "b:1"]).dispatch(["w.block0", "w.block1"])
      ['a:1', 'b:1']
    """

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        return [
            self._eps[_stable_hash(str(getattr(v, "name", v))) % len(self._eps)] for v in varlist
        ]


class SizeBalanced(PSDispatcher):
    """Each block to the server that has the fewest bytes so far, the largest block first.

    Blocks of one size go in their order, and servers that have as much as one another in theirs:
    the result depends on nothing else. Of what is dispatched in one call, the fullest server has at
    most 4/3 of what the best placement would leave to its fullest (Graham, "Bounds on
    multiprocessing timing anomalies", 1969). A plan gives away first what the optimizer does not
    let be cut; blocks fill up what that leaves.

    It weighs parameters. Where leaves differ in the optimizer state they have, see `plan.balance`
    and `plan.compare`.

    Example:
      >>> import dtrans
      >>> blocks = [dtrans.VarBlock("b", 0, 10), dtrans.VarBlock("w", 0, 500), dtrans.VarBlock("w", 1, 490)]
      >>> dtrans.RoundRobin(["a:1", "b:1"]).dispatch(blocks)
      ['a:1', 'b:1', 'a:1']
      >>> dtrans.SizeBalanced(["a:1", "b:1"]).dispatch(blocks)
      ['b:1', 'a:1', 'b:1']
    """

    def __init__(self, pserver_endpoints: Sequence[str]) -> None:
        super().__init__(pserver_endpoints)
        self._held = dict.fromkeys(self._eps, 0)

    @property
    def held(self) -> dict[str, int]:
        """Server to the bytes that it was given."""
        return dict(self._held)

    def reset(self) -> None:
        super().reset()
        self._held = dict.fromkeys(self._eps, 0)

    def give(self, nbytes: int, endpoint: str | None = None) -> str:
        """Assign bytes to the server with the fewest, or to the named one; return it."""
        taker = min(self._eps, key=self._held.__getitem__) if endpoint is None else endpoint
        self._held[taker] += nbytes
        return taker

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        sizes = [_size(v) for v in varlist]
        taken = {i: self.give(sizes[i]) for i in sorted(range(len(sizes)), key=lambda i: -sizes[i])}
        return [taken[i] for i in range(len(sizes))]


def check_dispatcher(split_method: Any) -> None:
    """Raises ConfigAssertionError (Paddle's assertion) for what is not a subclass of
    `PSDispatcher`."""
    if (
        not (isinstance(split_method, type) and issubclass(split_method, PSDispatcher))
        or split_method is PSDispatcher
    ):
        raise ConfigAssertionError(
            "split_method must be a subclass of dtrans.PSDispatcher, such as dtrans.RoundRobin or "
            f"dtrans.HashName; it is {split_method!r}"
        )


def _size(var: Any) -> int:
    """Return the weight of a block: its bytes, or its elements if it has no `nbytes`."""
    size = getattr(var, "nbytes", getattr(var, "size", None))
    if not isinstance(size, int) or isinstance(size, bool):
        raise ConfigError(
            f"dtrans.SizeBalanced weighs blocks by their nbytes or size; {var!r} has neither"
        )
    return size


def _stable_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
