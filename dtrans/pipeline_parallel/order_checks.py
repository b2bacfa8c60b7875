"""Whether orders of tasks are a schedule: each task once, on the device of its stage, and no device waits for ever."""

from __future__ import annotations

from collections.abc import Sequence

from dtrans.errors import ConfigError
from dtrans.pipeline_parallel.task import Task, needs


def check_tasks(
    name: str, orders: Sequence[Sequence[Task]], num_stages: int, num_model_stages: int, num_micro_batch: int
) -> None:
    """Check that orders have each task once, on the device of its stage.

    Args:
      name: of the schedule, for errors.
      orders: by device, its tasks in order.

    Raises:
      ConfigError: they do not.
    """
    if len(orders) != num_stages:
        raise ConfigError(f"the schedule {name} has orders of {len(orders)} devices, and num_stages={num_stages}")
    stages, micros = range(num_model_stages), range(num_micro_batch)
    known = {Task(kind, k, m) for kind in "FBW" for k in stages for m in micros}
    seen: set[Task] = set()
    for device, task in ((d, t) for d, order in enumerate(orders) for t in order):
        if task not in known:
            raise ConfigError(
                f"the schedule {name} has {task} on device {device}, which is no task of {num_model_stages} model "
                f"stages and {num_micro_batch} micro-batches"
            )
        if task in seen:
            raise ConfigError(f"the schedule {name} has {task} twice")
        if device != task.stage % num_stages:
            raise ConfigError(
                f"the schedule {name} has {task} on device {device}: its stage is on device {task.stage % num_stages}"
            )
        seen.add(task)
    splits_backward = any(t.kind == "W" for t in seen)
    missing = sorted(t for t in known - seen if t.kind != "W" or splits_backward)
    if missing:
        nor = len(missing) - 1
        others = f", nor {nor} other task{'s' if nor > 1 else ''}" if nor else ""
        raise ConfigError(f"the schedule {name} has no {missing[0]}{others}")


def in_turn(name: str, orders: Sequence[Sequence[Task]], num_model_stages: int) -> tuple[Task, ...]:
    """All tasks, each after those that it needs: every device goes on until it waits, then the next has its turn.

    Raises:
      ConfigError: devices wait for each other.
    """
    done: dict[Task, None] = {}
    heads = [0] * len(orders)
    waits_for = lambda task: [t for t in needs(task, num_model_stages) if t not in done]
    while True:
        before = len(done)
        for device, order in enumerate(orders):
            while heads[device] < len(order) and not waits_for(order[heads[device]]):
                done[order[heads[device]]] = None
                heads[device] += 1
        if len(done) == before:
            break
    waits = [
        f"device {device} waits with {order[i]} for {waits_for(order[i])[0]}"
        for device, (order, i) in enumerate(zip(orders, heads, strict=True))
        if i < len(order)
    ]
    if waits:
        raise ConfigError(f"the schedule {name} cannot go on: {', '.join(waits)}")
    return tuple(done)
