"""Orders of the tasks of named schedules, and checks of user-written orders.

An order is the sequence of tasks that one device runs. The orders of all devices form a schedule
under two conditions. Each task appears once, on the device of its stage. And the devices do not
deadlock.

All named schedules except PreferForward are variants of 1F1B (one forward, one backward). A device
first runs a number of forwards (the *warm-up*), then alternates one backward and one forward, then
runs the remaining backwards. The variants differ in the length of the warm-up.

Sources: EPL's scheduler.py (PreferForward, PreferBackward, PreferBackwardOptimizer); Narayanan et
al., arXiv 2104.04473 (Interleaved); Qi et al., arXiv 2401.10241 (ZeroBubble).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from dtrans.errors import ConfigError
from dtrans.pipeline_parallel.task import Task, needs


def _alternate(
    forwards: Sequence[Task], backwards: Sequence[Task], warm_up: int
) -> tuple[Task, ...]:
    """Return an order: `warm_up` forwards, then backward and forward in turn, then backwards."""
    order = list(forwards[:warm_up])
    for i, backward in enumerate(backwards):
        order += [backward, *forwards[warm_up + i : warm_up + i + 1]]
    return tuple(order)


def _one_stage_per_device(
    warm_up: Callable[[int, int, int], int],
) -> Callable[[int, int, int], Iterator[tuple[Task, ...]]]:
    """Return a function that yields the 1F1B order of each device, with one stage on each device.

    Args:
      warm_up: function from (device, num_stages, num_micro_batch) to the number of forwards in the
        device's warm-up.
    """

    def orders(num_stages: int, num_micro_batch: int, chunks: int) -> Iterator[tuple[Task, ...]]:
        for device in range(num_stages):
            forwards = _tasks("F", [device], range(num_micro_batch))
            backwards = _tasks("B", [device], range(num_micro_batch))
            yield _alternate(forwards, backwards, warm_up(device, num_stages, num_micro_batch))

    return orders


def _tasks(kind: str, stages: Iterable[int], micros: Iterable[int]) -> list[Task]:
    """Return the tasks of one kind ("F", "B" or "W") for all micro-batches, stage after stage."""
    return [Task(kind, stage, micro) for stage, micro in itertools.product(stages, micros)]


def _interleaved(num_stages: int, num_micro_batch: int, chunks: int) -> Iterator[tuple[Task, ...]]:
    """Yield the order of each device for the schedule Interleaved.

    Each device then runs several stages, its *chunks*.

    Micro-batches are divided into rounds. A device runs the tasks of a round chunk by chunk. With
    fewer than `num_stages` micro-batches in a round, devices would be idle between two chunks. So a
    remainder is spread over the rounds.

    The warm-up of a device has `(chunks - 1) * longest + 1 + 2 * later` forwards. Here `longest` is
    the number of micro-batches in the longest round, and `later` is the number of later devices.
    An activation and its cotangent each pass every later device, hence the factor 2.
    """
    num_rounds = max(1, num_micro_batch // num_stages)
    edges = [i * num_micro_batch // num_rounds for i in range(num_rounds + 1)]
    rounds = list(itertools.starmap(range, itertools.pairwise(edges)))
    longest = max(map(len, rounds))
    for device in range(num_stages):
        stages = range(device, num_stages * chunks, num_stages)
        forwards: list[Task] = []
        backwards: list[Task] = []
        for micros in rounds:
            forwards += _tasks("F", stages, micros)
            backwards += _tasks("B", reversed(stages), micros)
        warm_up = 2 * (num_stages - device - 1) + (chunks - 1) * longest + 1
        yield _alternate(forwards, backwards, warm_up)


_one_forward_one_backward = _one_stage_per_device(lambda device, stages, micros: stages - device)


def _zero_bubble(num_stages: int, num_micro_batch: int, chunks: int) -> Iterator[tuple[Task, ...]]:
    """Yield the order of each device for the schedule ZeroBubble: 1F1B with inserted W tasks.

    A W task computes the gradients of weights. On device d, the W of a micro-batch runs d
    micro-batches after its B (backward). So all devices store residuals of the same number of
    micro-batches.
    """
    for device, order in enumerate(_one_forward_one_backward(num_stages, num_micro_batch, chunks)):
        weights = _tasks("W", [device], range(num_micro_batch))
        split: list[Task] = []
        for task in order:
            split.append(task)
            if task.kind == "B" and task.micro >= device:
                split.append(weights.pop(0))
        yield (*split, *weights)


# Names in the literature -> EPL's names: GPipe (arXiv 1811.06965), 1F1B (PipeDream, arXiv
# 1806.03377), ZB-H1 (arXiv 2401.10241).
ALIASES = {"GPipe": "PreferForward", "1F1B": "PreferBackward", "ZB-H1": "ZeroBubble"}

ORDERS: dict[str, Callable[[int, int, int], Iterator[tuple[Task, ...]]]] = {
    "PreferForward": _one_stage_per_device(lambda device, stages, micros: micros),
    "PreferBackward": _one_forward_one_backward,
    # Each device except the last one has one more forward in its warm-up. The last device needs
    # none, because its backwards wait for no transfer.
    "PreferBackwardOptimizer": _one_stage_per_device(
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
    """Check that the orders contain each task once, on the device of the task's stage.

    Args:
      name: the name of the schedule, for errors.
      orders: the tasks of each device, in order.
      num_stages: the number of devices.
      num_model_stages: the number of model stages.
      num_micro_batch: the number of micro-batches.

    Raises:
      ConfigError: a task is missing, appears twice, or is on the wrong device.
    """
    if len(orders) != num_stages:
        raise ConfigError(
            f"the schedule {name} has orders for {len(orders)} devices, but num_stages is "
            f"{num_stages}; pass one order for each device"
        )
    stages, micros = range(num_model_stages), range(num_micro_batch)
    known = set(itertools.starmap(Task, itertools.product("FBW", stages, micros)))
    seen: set[Task] = set()
    for device, order in enumerate(orders):
        for task in order:
            if task not in known:
                raise ConfigError(
                    f"the schedule {name} has {task} on device {device}; expected tasks F, B and "
                    f"W of {num_model_stages} model stages and {num_micro_batch} micro-batches"
                )
            if task in seen:
                raise ConfigError(f"the schedule {name} has {task} twice; remove one")
            home = task.stage % num_stages
            if device != home:
                raise ConfigError(
                    f"the schedule {name} has {task} on device {device}, but its stage is on "
                    f"device {home}; move the task"
                )
            seen.add(task)
    splits_backward = any(t.kind == "W" for t in seen)
    missing = sorted(t for t in known - seen if t.kind != "W" or splits_backward)
    if missing:
        what = f"the task {missing[0]}; add it to the order of its device"
        if len(missing) > 1:
            what = (
                f"{len(missing)} tasks, the first is {missing[0]}; add each task to the order of "
                "its device"
            )
        raise ConfigError(f"the schedule {name} lacks {what}")


def topological_order(
    name: str, orders: Sequence[Sequence[Task]], num_model_stages: int
) -> tuple[Task, ...]:
    """Return the tasks of all devices in one sequence, in which each task follows its dependencies.

    Raises:
      ConfigError: the orders deadlock.
    """
    done: dict[Task, None] = {}
    heads = [0] * len(orders)  # number of tasks of each device that are done
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
            waits.append(f"{order[head]} on device {device} waits for {waits_for(order[head])[0]}")
    if waits:
        raise ConfigError(
            f"the schedule {name} deadlocks: {', '.join(waits)}; order the tasks of each device so "
            "that each task comes after the tasks that it needs"
        )
    return tuple(done)
