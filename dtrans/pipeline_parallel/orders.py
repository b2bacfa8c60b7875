"""The orders of the schedules that have a name: which device does which tasks, in which order.

All but PreferForward are one forward, one backward (1F1B): some forwards ahead, then by turns a backward and a forward,
then what is left. They differ in how many are ahead.

Sources: EPL, its pipeline's scheduler.py (the first three); Narayanan et al., arXiv 2104.04473 (Interleaved); Qi et
al., arXiv 2401.10241 (ZeroBubble).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from dtrans.pipeline_parallel.task import Task


def _by_turns(forwards: Sequence[Task], backwards: Sequence[Task], ahead: int) -> tuple[Task, ...]:
    """Some forwards ahead, then by turns a backward and a forward, then the backwards that are left."""
    order = list(forwards[:ahead])
    for i, backward in enumerate(backwards):
        order += [backward, *forwards[ahead + i : ahead + i + 1]]
    return tuple(order)


def _with_ahead(ahead: Callable[[int, int, int], int]) -> Callable[[int, int, int], Iterator[tuple[Task, ...]]]:
    """1F1B of one model stage per device, with `ahead(device, S, M)` forwards before the first backward."""

    def orders(num_stages: int, num_micro_batch: int, chunks: int) -> Iterator[tuple[Task, ...]]:
        for device in range(num_stages):
            forwards, backwards = ([Task(kind, device, m) for m in range(num_micro_batch)] for kind in "FB")
            yield _by_turns(forwards, backwards, ahead(device, num_stages, num_micro_batch))

    return orders


def _interleaved(num_stages: int, num_micro_batch: int, chunks: int) -> Iterator[tuple[Task, ...]]:
    """Rounds of micro-batches go through all chunks, each round through one chunk after the other.

    A round of fewer than S leaves devices idle between chunks, so what is over is shared out among the rounds. Until
    its first backward a device has the forwards of the longest round through all chunks but one, and two for each
    device after it: one for the way there, one for the way back.
    """
    num_rounds = max(1, num_micro_batch // num_stages)
    edges = [i * num_micro_batch // num_rounds for i in range(num_rounds + 1)]
    rounds = [range(a, b) for a, b in itertools.pairwise(edges)]
    longest = max(map(len, rounds))
    for device in range(num_stages):
        stages = range(device, num_stages * chunks, num_stages)
        forwards = [Task("F", k, m) for turn in rounds for k in stages for m in turn]
        backwards = [Task("B", k, m) for turn in rounds for k in reversed(stages) for m in turn]
        yield _by_turns(forwards, backwards, 2 * (num_stages - device - 1) + (chunks - 1) * longest + 1)


_one_forward_one_backward = _with_ahead(lambda device, stages, micros: stages - device)


def _zero_bubble(num_stages: int, num_micro_batch: int, chunks: int) -> Iterator[tuple[Task, ...]]:
    """1F1B; W comes as many micro-batches after its B as there are devices before, so that all keep equally many."""
    for device, order in enumerate(_one_forward_one_backward(num_stages, num_micro_batch, chunks)):
        weights = [Task("W", device, m) for m in range(num_micro_batch)]
        split: list[Task] = []
        for task in order:
            split.append(task)
            if task.kind == "B" and task.micro >= device:
                split.append(weights.pop(0))
        yield (*split, *weights)


ORDERS: dict[str, Callable[[int, int, int], Iterator[tuple[Task, ...]]]] = {
    "PreferForward": _with_ahead(lambda device, stages, micros: micros),
    "PreferBackward": _one_forward_one_backward,
    # one more would gain the last device nothing: what its backward needs is there
    "PreferBackwardOptimizer": _with_ahead(lambda device, stages, micros: stages - device + (device < stages - 1)),
    "Interleaved": _interleaved,
    "ZeroBubble": _zero_bubble,
}
