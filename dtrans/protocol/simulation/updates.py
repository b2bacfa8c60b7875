"""What simulated servers compute: a decay, a mean of gradients in the order of trainers, and parts of a norm.

Numbers are of 32 bits, so that another order of a sum, or a gradient more or less, has other bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

from dtrans._jax import ClosedJaxpr
from dtrans.protocol.exchange import Alike, Exchange
from dtrans.protocol.served import ServedBlocks, Vectors
from dtrans.protocol.simulation.case import Case


class ArrayType:
    """The shape and dtype of a simulated block."""

    def __init__(self, size: int) -> None:
        self.shape = (size,)
        self.dtype = np.dtype(np.float32)
        self.ndim = 1


def block_name(endpoint: str, i: int) -> str:
    """The name of a server's block."""
    return f"{endpoint}/w{i}"


def gradient_name(block: str, k: int) -> str:
    """The name under which trainer k sends the gradient of a block."""
    return f"{block}@GRAD.trainer_{k}"


def initial(block: str, size: int) -> np.ndarray:
    """What a block begins with."""
    return _numbers(size, f"initial {block}")


def gradient(block: str, size: int, k: int, step: int) -> np.ndarray:
    """The gradient of trainer k in a step."""
    return _numbers(size, f"{block} {k} {step}")


def round_part(k: int, step: int, number: int) -> np.ndarray:
    """What trainer k gives to a round."""
    return _numbers(2, f"round {k} {step} {number}")


def _numbers(size: int, what: str) -> np.ndarray:
    r = Random(what)
    return np.array([r.uniform(-1, 1) for _ in range(size)], np.float32)


def mean(grads: Sequence[np.ndarray]) -> np.ndarray:
    """The mean, added up in the order in which they are given."""
    total = grads[0].copy()
    for g in grads[1:]:
        total += g
    return total / np.float32(len(grads))


def norm_part(means: Mapping[str, np.ndarray]) -> np.ndarray:
    """One server's part of the norm."""
    return np.array([sum((np.sum(x * x) for x in means.values()), np.float32(0))], np.float32)


def applied(x: np.ndarray, g: np.ndarray, norm: np.float32) -> np.ndarray:
    """A block after a step."""
    return np.asarray(x * np.float32(0.5) + g / np.float32(math.sqrt(1 + norm)), np.float32)


def decayed(x: np.ndarray, g: np.ndarray) -> np.ndarray:
    """A block of an asynchronous server after a gradient."""
    return applied(x, g, np.float32(0))


def added(x: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """A block after a push of GEO-SGD."""
    return np.asarray(x + delta, np.float32)


class InNumpy:
    """`dtrans.protocol.geo_steps.GeoArithmetic` of simulated parameters."""

    def copied(self, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Copies."""
        return [x.copy() for x in values]

    def pushed(
        self, local: Sequence[np.ndarray], old: Sequence[np.ndarray], trainers: int
    ) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
        """What is sent, and what is agreed on from then."""
        deltas = [np.asarray((x - o) / np.float32(trainers), np.float32) for x, o in zip(local, old, strict=True)]
        return deltas, [added(o, d) for o, d in zip(old, deltas, strict=True)]

    def pulled(
        self, local: Sequence[np.ndarray], server: Sequence[np.ndarray], old: Sequence[np.ndarray]
    ) -> Sequence[np.ndarray]:
        """With what others have changed."""
        return [added(x, s - o) for x, s, o in zip(local, server, old, strict=True)]


def served(case: Case, endpoint: str) -> ServedBlocks:
    """What a simulated server's protocol is about."""
    sizes = case.servers[case.endpoints.index(endpoint)]
    blocks = {block_name(endpoint, i): ArrayType(n) for i, n in enumerate(sizes)}
    sync = case.sync_mode
    # a synchronous trainer has names of its own; asynchronous ones send one name each
    sent = [{k: gradient_name(b, k if sync else 0) for k in range(case.trainers)} for b in blocks]
    types = {gradient_name(b, k): t for b, t in blocks.items() for k in (range(case.trainers) if sync else (0,))}
    exchanges = (_exchange(case, endpoint),) if case.mode == "exchange" else ()
    return ServedBlocks(endpoint, case.trainers, sync, case.on_trainer_exit, blocks, types, sent, exchanges=exchanges)


def _exchange(case: Case, endpoint: str) -> Exchange:
    everywhere = case.endpoints
    kinds = (Alike("float32", "sum", everywhere, everywhere, ("norm",), ((1,),)),)
    nothing: Any = None  # what is computed is computed here
    local: ClosedJaxpr = nothing
    return Exchange(endpoint, 1, kinds, local, ("norm",), (), (("norm", "norm"),))


class SimulatedUpdate:
    """The update of a synchronous server (`dtrans.protocol.served.StepUpdate`).

    Args:
      work: is called for each piece of work.
    """

    def __init__(self, blocks: ServedBlocks, work: Callable[[], None]) -> None:
        self.state: dict[str, Any] = {n: initial(n, t.shape[0]) for n, t in blocks.params.items()}
        self.exchange: Exchange | None = None
        self._blocks, self._work = blocks, work
        self._means: dict[str, np.ndarray] = {}

    @property
    def values(self) -> Mapping[str, Any]:
        """The parameters as memory to send from."""
        return self.state

    def begin(self, grads: Mapping[str, Any], present: frozenset[int], step: int) -> Vectors | None:
        """As `StepUpdate.begin`."""
        self._work()
        sent = dict(zip(self._blocks.params, self._blocks.sent, strict=True))
        self._means = {n: mean([grads[names[k]] for k in sorted(present)]) for n, names in sent.items()}
        if self._blocks.exchanges:
            (self.exchange,) = self._blocks.exchanges
            return {ep: [norm_part(self._means)] for ep in self.exchange.peers}
        self._finish(np.float32(0))
        return None

    def go_on(self, arrived: Vectors | None) -> Vectors | None:
        """As `StepUpdate.go_on`."""
        assert arrived is not None and self.exchange is not None
        self._work()
        parts = {**arrived, self._blocks.endpoint: [norm_part(self._means)]}
        (kind,) = self.exchange.kinds
        self.exchange = None
        self._finish(sum((parts[ep][0][0] for ep in kind.owners), np.float32(0)))
        return None

    def rows(self, name: str, ids: np.ndarray, *, train: bool) -> np.ndarray:
        """As `StepUpdate.rows`."""
        return self.values[name][ids]

    def _finish(self, norm: np.float32) -> None:
        self.state = {n: applied(x, self._means[n], norm) for n, x in self.state.items()}


class SimulatedBlocks:
    """The blocks of an asynchronous server (`dtrans.protocol.served.BlockUpdate`).

    Attributes:
      log: what was applied: block, and the bytes of its gradient.
      history: every value that each block has had.
      begun: how many steps of trainers have begun.
    """

    def __init__(self, blocks: ServedBlocks, work: Callable[[], None], *, geo: bool) -> None:
        self.log: list[tuple[str, bytes]] = []
        self.begun = 0
        self.history = {n: [initial(n, t.shape[0]).tobytes()] for n, t in blocks.params.items()}
        self._blocks, self._work, self._apply = blocks, work, added if geo else decayed

    def begin(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """As `BlockUpdate.begin`."""
        self.begun += 1
        return {}, {}

    def ready(self, arrived: Collection[str], used: Collection[str]) -> list[str]:
        """As `BlockUpdate.ready`."""
        return [n for n in self._blocks.params if n not in used and gradient_name(n, 0) in arrived]

    def apply(
        self, block: str, grads: Mapping[str, Any], state: Mapping[str, Any], values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """As `BlockUpdate.apply`."""
        self._work()
        given = grads[gradient_name(block, 0)].copy()
        made = self._apply(state[block], given)
        self.log.append((block, given.tobytes()))
        self.history[block].append(made.tobytes())
        return {block: made}

    def rows(self, name: str, ids: np.ndarray, state: Mapping[str, Any], *, train: bool) -> np.ndarray:
        """As `BlockUpdate.rows`."""
        rows: np.ndarray = state[name][ids]
        return rows
