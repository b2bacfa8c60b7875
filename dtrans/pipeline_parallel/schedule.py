"""Schedules of a pipeline: the order in which each device runs its tasks.

A step sends `num_micro_batch` micro-batches through the model stages. A task is the forward pass
(F) or the backward pass (B) of one micro-batch at one stage. Some schedules split the backward
pass. B then computes the cotangents of inputs, and a third task (W) computes the gradients of
weights.

The dependencies between tasks are the same in all schedules (`Schedule.needs`), so the orders
define a schedule completely. The number of micro-batches in flight depends on the orders only.
A simulation with the costs of tasks (`Schedule.timeline`) computes the duration of a step (the
*makespan*) and the share of idle time (the *bubble*). A second simulation, in which every task
takes one tick, gives the sequence in which one process dispatches all tasks.

    orders    orders of the named schedules, and checks of user-written orders
    task      tasks, their dependencies, and the simulation
    gantt     tables and charts

All schedules run the backward tasks of a stage in the order of the micro-batches. So gradients are
always summed in the same order, and all schedules compute the same numbers.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any

from dtrans.checks import check_int
from dtrans.errors import ConfigError
from dtrans.pipeline_parallel import gantt
from dtrans.pipeline_parallel.orders import ALIASES, ORDERS, check_tasks, topological_order
from dtrans.pipeline_parallel.task import (
    Costs,
    Task,
    Time,
    TimedTask,
    Timeline,
    checked_cost,
    needs,
    peak_in_flight,
    play_tasks,
    task_costs,
    tick_table,
)


@dataclasses.dataclass(frozen=True, repr=False)
class Schedule:
    """Order of the tasks on each device of a pipeline. `schedule` returns the named schedules.

    Model stage k is on device `k % num_stages`.

    Attributes:
      name: the name for display.
      num_stages: the number of devices.
      num_micro_batch: the number of micro-batches of a step.
      chunks: the number of model stages on each device.
      orders: the tasks of each device, in order.

    Raises:
      ConfigError: the orders are not a schedule; see `check`.

    Example:
      >>> F0, B0, F1, B1 = [Task(kind, 0, micro) for micro in range(2) for kind in "FB"]
      >>> mine = Schedule("mine", 1, num_micro_batch=2, chunks=1, orders=[[F0, B0, F1, B1]])
      >>> mine.peak, mine.makespan()
      ((1,), 6)
      >>> dataclasses.replace(mine, orders=[[F0, B0, B1, F1]])  # doctest: +ELLIPSIS
      Traceback (most recent call last):
        ...
      dtrans.errors.ConfigError: the schedule mine deadlocks: B1@0 on device 0 waits for F1@0; ...
    """

    name: str
    num_stages: int
    num_micro_batch: int
    chunks: int
    orders: tuple[tuple[Task, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "orders", tuple(map(tuple, self.orders)))
        self.check()

    # -- structure -------------------------------------------------------------------------------

    @property
    def num_model_stages(self) -> int:
        """Number of model stages: `num_stages * chunks`."""
        return self.num_stages * self.chunks

    @cached_property
    def splits_backward(self) -> bool:
        """True if the backward pass is split into B and W tasks."""
        return any(task.kind == "W" for order in self.orders for task in order)

    def device_of(self, stage: int) -> int:
        """Return the device of a model stage.

        Raises:
          ConfigError: there is no such stage.
        """
        if not 0 <= stage < self.num_model_stages:
            raise ConfigError(
                f"stage is {stage}; expected 0 to {self.num_model_stages - 1}, the model stages of "
                f"the schedule {self.name}"
            )
        return stage % self.num_stages

    def needs(self, task: Task) -> tuple[Task, ...]:
        """Return the tasks that compute the operands of a task.

        F at stage k needs F at stage k - 1. B at stage k needs F at stage k and B at stage k + 1. W
        at stage k needs B at stage k.
        """
        return needs(task, self.num_model_stages)

    def dependencies(self, task: Task) -> tuple[Task, ...]:
        """Return the tasks that a task waits for.

        They compute the task's operands, or precede the task in the order of its device.

        Raises:
          ConfigError: the task is not in the schedule.
        """
        if task not in self._position:
            raise ConfigError(f"task is {task}, which is not in the schedule {self.name}")
        device, i = self._position[task]
        operands = self.needs(task)
        if i == 0 or self.orders[device][i - 1] in operands:
            return operands
        return (*operands, self.orders[device][i - 1])

    def check(self) -> None:
        """Check that the orders form a schedule.

        Raises:
          ConfigError: a count is not a positive int. A task is missing, appears twice, is unknown,
            or is not on the device of its stage. Only some B tasks have a W task. The orders
            deadlock.
        """
        for what in ("num_stages", "num_micro_batch", "chunks"):
            check_int(what, getattr(self, what))
        check_tasks(
            self.name, self.orders, self.num_stages, self.num_model_stages, self.num_micro_batch
        )
        assert self._ordered  # The property raises ConfigError if the orders deadlock.

    @cached_property
    def _position(self) -> dict[Task, tuple[int, int]]:
        """Position of each task: a dict from task to (device, index in the order of the device)."""
        found = {}
        for device, order in enumerate(self.orders):
            for i, task in enumerate(order):
                found[task] = (device, i)
        return found

    @cached_property
    def _ordered(self) -> tuple[Task, ...]:
        """All tasks in one sequence, in which dependencies precede their task."""
        return topological_order(self.name, self.orders, self.num_model_stages)

    # -- costs -----------------------------------------------------------------------------------

    def timeline(
        self, forward: Costs = 1, backward: Costs = 2, weight: Costs = 1, transfer: float = 0
    ) -> Timeline:
        """Simulate a step: each device starts its next task when the operands have arrived.

        Args:
          forward: the time of the forward pass of one micro-batch, in any unit. A number is the
            time of all chunks of one device together. A sequence has the time of each model stage.
          backward: the time of the complete backward pass, in the same form.
          weight: the time of W, the gradients of weights, in the same form. Without a split of the
            backward pass, it is ignored. With a split, B takes `backward - weight`, so that all
            schedules do the same work.
          transfer: the time of a transfer between devices. The sender computes during a transfer.

        Returns:
          The timed tasks, sorted by start, then by device. If all costs are ints, times are exact:
            ints, or fractions if the costs are not multiples of `chunks`.

        Raises:
          ConfigError: a cost is negative or not finite, `weight` exceeds `backward`, or a sequence
            of costs has the wrong length.
        """
        costs = task_costs(
            self.num_stages, self.chunks, self.splits_backward, forward, backward, weight
        )
        return play_tasks(self._ordered, self.num_stages, costs, checked_cost("transfer", transfer))

    def makespan(
        self, forward: Costs = 1, backward: Costs = 2, weight: Costs = 1, transfer: float = 0
    ) -> Time:
        """Return the duration of a step. `timeline` describes the arguments.

        The result is exact if the arguments are ints.

        Example:
          >>> schedule("PreferBackward", 2, 2).makespan()
          9
          >>> schedule("Interleaved", 2, 2, chunks=2).makespan()
          Fraction(15, 2)
        """
        return self.timeline(forward, backward, weight, transfer).makespan

    @cached_property
    def bubble(self) -> Fraction:
        """Share of time in which devices are idle, at the default costs of `timeline`.

        `timeline(...).bubble` is the share at other costs.
        """
        return Fraction(self.timeline().bubble)

    @cached_property
    def peak(self) -> tuple[int, ...]:
        """Largest number of micro-batches in flight on each device.

        A micro-batch counts once for each chunk of the device. It is in flight from the start of
        its F to the end of its B. With a split backward pass, it is in flight to the end of its W.
        The device stores the micro-batch's residuals in this time.
        """
        return tuple(peak_in_flight(order, self.splits_backward) for order in self.orders)

    def sequence(self) -> tuple[Task, ...]:
        """Return the tasks of all devices in one sequence, for a process that runs all devices.

        The process dispatches the tasks in this order. They are sorted by the tick in which they
        run if every task takes one tick, then by device.
        """
        return tuple(t.task for t in self._ticked)

    def ticks(self) -> tuple[tuple[Task | None, ...], ...]:
        """Return the task of each device in each tick, as [device][tick]; None if idle.

        Every task takes one tick.
        """
        return tick_table(self._ticked, self.num_stages)

    @cached_property
    def _ticked(self) -> Timeline:
        """Simulation in which every task takes one tick."""
        tick = self.chunks  # `timeline` divides the costs of a device by its number of chunks.
        # The argument `backward` of `timeline` includes the cost of W.
        kinds = 2 if self.splits_backward else 1
        return self.timeline(forward=tick, backward=kinds * tick, weight=tick)

    # -- tables and charts -----------------------------------------------------------------------

    @property
    def _size(self) -> str:
        chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        return f"{self.num_stages} devices{chunks}, {self.num_micro_batch} micro-batches"

    @property
    def title(self) -> str:
        """Line with the name, the size, the bubble and the peak."""
        peak = " ".join(map(str, self.peak))
        return f"{self.name}: {self._size}, bubble {self.bubble}, peak in flight {peak}"

    def gantt(
        self,
        path: str | os.PathLike[str],
        timelines: Sequence[tuple[str, Iterable[TimedTask]]] | None = None,
        *,
        unit: str | Sequence[str] | None = None,
    ) -> None:
        """Draw a Gantt chart of this schedule, or of the given timelines, into an image file.

        Args:
          path: the file. Its suffix selects the format: .svg, .png, ...
          timelines: a title and timed tasks for each panel, for example the plan and the measured
            run. The default is one panel: this schedule at the default costs of `timeline`.
          unit: the unit of time: one for all panels, or one for each panel. Panels with equal units
            share a scale.

        Raises:
          ConfigError: matplotlib is not installed, the file cannot be written, or `timelines` has
            no tasks.

        Example:
          >>> import tempfile
          >>> planned = schedule("PreferBackward", 4, 8)
          >>> slow = planned.timeline(transfer=1)
          >>> timelines = [("no transfers", planned.timeline()), ("slow", slow)]
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     planned.gantt(f"{folder}/transfer.svg", timelines)
        """
        if timelines is None:
            timelines, unit = [(self.name, self.timeline())], unit or "forwards of a stage"
        gantt.draw(path, timelines, num_devices=self.num_stages, unit=unit or "")

    def __str__(self) -> str:
        return gantt.text(self.title, self.ticks())

    def __repr__(self) -> str:
        return f"<Schedule {self.name}: {self._size}>"

    def _repr_html_(self) -> str:
        return gantt.html(self.title, self.ticks())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self) if cycle else str(self))


# -- named schedules -------------------------------------------------------------------------------


def schedule(
    name: str, num_stages: int, num_micro_batch: int, chunks: int | None = None
) -> Schedule:
    """Return a named schedule for `num_stages` devices.

    In this list, S is the number of devices, M the number of micro-batches, and s the index of a
    device. The *bubble* is the share of idle time at the default costs of `Schedule.timeline`. The
    *peak* is the largest number of micro-batches in flight on device s. The bubble of the first
    three schedules is (S - 1) / (M + S - 1).

    - PreferForward (GPipe): all forwards, then all backwards. Peak M. Hides transfers best.
    - PreferBackward (1F1B): a backward as soon as its operands have arrived. Peak min(M, S - s).
      EPL's default.
    - PreferBackwardOptimizer: PreferBackward with one more forward in the warm-up of each device
      except the last device. The additional forward hides a part of the transfers. Peak
      min(M, S - s + 1); on the last device 1.
    - Interleaved: 1F1B with several model stages on each device. For M >= S, the bubble is
      (S - 1) / (chunks x M + S - 1). It has more micro-batches in flight than PreferBackward, and
      `chunks` times as many transfers. In contrast to Megatron-LM, M need not be a multiple of S.
    - ZeroBubble (ZB-H1): 1F1B with a split backward pass. The W of a micro-batch runs s
      micro-batches after its B, in otherwise idle time. For M >= S, the bubble is
      (S - 1) / (3M + S - 1). Peak min(M, S).

    Args:
      name: one of the names above, in upper or lower case. If it is a name in parentheses, the
        schedule has the name in front of the parentheses.
      num_stages: the number of devices.
      num_micro_batch: the number of micro-batches of a step.
      chunks: the number of model stages on each device. For Interleaved, at least 2, which is the
        default. For all other schedules, 1.

    Raises:
      ConfigError: the name is unknown, or a number is out of range.

    Example:
      >>> print(schedule("PreferBackward", num_stages=3, num_micro_batch=4))
      PreferBackward: 3 devices, 4 micro-batches, bubble 1/3, peak in flight 3 2 1
      tick      0  1  2  3  4  5  6  7  8  9  10 11
      device 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
      device 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
      device 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
      >>> schedule("ZeroBubble", 3, 4).bubble, schedule("Interleaved", 3, 4, chunks=2).bubble
      (Fraction(1, 7), Fraction(1, 5))
    """
    names = {**{n: n for n in ORDERS}, **ALIASES}
    known = {n.lower(): full for n, full in names.items()}
    found = known.get(str(name).lower())
    if found is None:
        raise ConfigError(f"schedule is {name!r}; expected one of {', '.join(names)}")
    check_int("num_stages", num_stages)
    check_int("num_micro_batch", num_micro_batch)
    interleaved = found == "Interleaved"
    if chunks is None:
        chunks = 2 if interleaved else 1
    check_int("chunks", chunks)
    if interleaved and chunks == 1:
        raise ConfigError(
            "chunks is 1, but Interleaved needs at least 2 model stages on each device; use "
            "PreferBackward"
        )
    if not interleaved and chunks > 1:
        raise ConfigError(
            f"chunks is {chunks}, but {found} has one model stage on each device; use Interleaved"
        )
    orders = tuple(ORDERS[found](num_stages, num_micro_batch, chunks))
    return Schedule(found, num_stages, num_micro_batch, chunks, orders)
