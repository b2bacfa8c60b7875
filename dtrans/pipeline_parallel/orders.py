"""Orders of tasks: those of the named schedules, and the check that orders form a schedule.

An order lists the tasks of a device, one after the other. Orders form a schedule if each task
appears once, on the device of its stage, and no device waits for ever.

All named schedules except PreferForward are one forward, one backward (1F1B). A device first runs
some forwards ahead, then a backward and a forward in turn, then the remaining backwards. The
schedules differ in the number of forwards ahead.

Sources: EPL, its pipeline's scheduler.py (the first three); Narayanan et al., arXiv 2104.04473
(Interleaved); Qi et al., arXiv 2401.10241 (ZeroBubble).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from dtrans.errors import ConfigError
from dtrans.pipeline_parallel.task import Task, needs


def _by_turns(forwards: Sequence[Task], backwards: Sequence[Task], ahead: int) -> tuple[Task, ...]:
    """Order forwards ahead, then a backward and a forward in turn, then the remaining backwards."""
    order = list(forwards[:ahead])
    for i, backward in enumerate(backwards):
        order += [backward, *forwards[ahead + i : ahead + i + 1]]
    return tuple(order)


def _with_ahead(
    ahead: Callable[[int, int, int], int],
) -> Callable[[int, int, int], Iterator[tuple[Task, ...]]]:
    """Return 1F1B with one model stage per device and `ahead(device, S, M)` forwards ahead."""

    def orders(num_stages: int, num_micro_batch: int, chunks: int) -> Iterator[tuple[Task, ...]]:
        for device in range(num_stages):
            forwards = [Task("F", device, m) for m in range(num_micro_batch)]
            backwards = [Task("B", device, m) for m in range(num_micro_batch)]
            yield _by_turns(forwards, backwards, ahead(device, num_stages, num_micro_batch))

    return orders


def _interleaved(num_stages: int, num_micro_batch: int, chunks: int) -> Iterator[tuple[Task, ...]]:
    """Order rounds of micro-batches; each round passes one chunk after the other.

    A round of fewer than S micro-batches leaves devices idle between chunks. So the micro-batches
    beyond a multiple of S are divided over the rounds, and a round has at least S. Before its first
    backward a device runs the forwards of the longest round through all chunks but one. It also
    runs two for each device after it: one for the way there, one for the way back.
    """
    num_rounds = max(1, num_micro_batch // num_stages)
    edges = [i * num_micro_batch // num_rounds for i in range(num_rounds + 1)]
    rounds = [range(a, b) for a, b in itertools.pairwise(edges)]
    longest = max(map(len, rounds))
    for device in range(num_stages):
        stages = range(device, num_stages * chunks, num_stages)
        forwards = [Task("F", k, m) for turn in rounds for k in stages for m in turn]
        backwards = [Task("B", k, m) for turn in rounds for k in reversed(stages) for m in turn]
        yield _by_turns(
            forwards, backwards, 2 * (num_stages - device - 1) + (chunks - 1) * longest + 1
        )


_one_forward_one_backward = _with_ahead(lambda device, stages, micros: stages - device)


def _zero_bubble(num_stages: int, num_micro_batch: int, chunks: int) -> Iterator[tuple[Task, ...]]:
    """Order 1F1B with delayed W tasks: by one B task for each device before this one.

    All devices then store residuals of equally many micro-batches.
    """
    for device, order in enumerate(_one_forward_one_backward(num_stages, num_micro_batch, chunks)):
        weights = [Task("W", device, m) for m in range(num_micro_batch)]
        split: list[Task] = []
        for task in order:
            split.append(task)
            if task.kind == "B" and task.micro >= device:
                split.append(weights.pop(0))
        yield (*split, *weights)


# Names of the field: GPipe (arXiv 1811.06965), 1F1B (PipeDream, arXiv 1806.03377), ZB-H1 (arXiv
# 2401.10241).
ALIASES = {"GPipe": "PreferForward", "1F1B": "PreferBackward", "ZB-H1": "ZeroBubble"}

ORDERS: dict[str, Callable[[int, int, int], Iterator[tuple[Task, ...]]]] = {
    "PreferForward": _with_ahead(lambda device, stages, micros: micros),
    "PreferBackward": _one_forward_one_backward,
    # the last device gains nothing from one more: the operands of its backward are there
    "PreferBackwardOptimizer": _with_ahead(
        lambda device, stages, micros: stages - device + (device < stages - 1)
    ),
    "Interleaved": _interleaved,
    "ZeroBubble": _zero_bubble,
}


# -- checks ----------------------------------------------------------------------------------------


def check_tasks(
    name: str,
    orders: Sequence[Sequence[Task]],
    num_stages: int,
    num_model_stages: int,
    num_micro_batch: int,
) -> None:
    """Check that orders have each task once, on the device of its stage.

    Args:
      name: the name of the schedule, for errors.
      orders: by device, its tasks in order.
      num_stages: the number of devices.
      num_model_stages: the number of model stages.
      num_micro_batch: the number of micro-batches.

    Raises:
      ConfigError: a task is missing, appears twice, or is on the wrong device.
    """
    if len(orders) != num_stages:
        raise ConfigError(
            f"the schedule {name} has orders of {len(orders)} devices, and num_stages={num_stages}"
        )
    stages, micros = range(num_model_stages), range(num_micro_batch)
    known = set(itertools.starmap(Task, itertools.product("FBW", stages, micros)))
    seen: set[Task] = set()
    for device, order in enumerate(orders):
        for task in order:
            if task not in known:
                raise ConfigError(
                    f"the schedule {name} has {task} on device {device}, which is no task of "
                    f"{num_model_stages} model stages and {num_micro_batch} micro-batches"
                )
            if task in seen:
                raise ConfigError(f"the schedule {name} has {task} twice")
            home = task.stage % num_stages
            if device != home:
                raise ConfigError(
                    f"the schedule {name} has {task} on device {device}: its stage is on device "
                    f"{home}"
                )
            seen.add(task)
    splits_backward = any(t.kind == "W" for t in seen)
    missing = sorted(t for t in known - seen if t.kind != "W" or splits_backward)
    if missing:
        nor = len(missing) - 1
        others = f", nor {nor} other task{'s' * (nor > 1)}" if nor else ""
        raise ConfigError(f"the schedule {name} has no {missing[0]}{others}")


def in_turn(name: str, orders: Sequence[Sequence[Task]], num_model_stages: int) -> tuple[Task, ...]:
    """Return all tasks, each after its operands: every device runs until it waits, in turn.

    Raises:
      ConfigError: devices wait for each other.
    """
    done: dict[Task, None] = {}
    heads = [0] * len(orders)
    waits_for = lambda task: [t for t in needs(task, num_model_stages) if t not in done]
    progress = True
    while progress:
        progress = False
        for device, order in enumerate(orders):
            while heads[device] < len(order) and not waits_for(order[heads[device]]):
                done[order[heads[device]]] = None
                heads[device] += 1
                progress = True
    waits = []
    for device, (order, head) in enumerate(zip(orders, heads, strict=True)):
        if head < len(order):
            waits.append(
                f"device {device} waits with {order[head]} for {waits_for(order[head])[0]}"
            )
    if waits:
        raise ConfigError(f"the schedule {name} cannot go on: {', '.join(waits)}")
    return tuple(done)
