"""Schedules of a pipeline: the order of tasks on each device, as a value.

A step of `num_micro_batch` micro-batches through `K` model stages consists of tasks. F is the
forward of a stage on a micro-batch, and B its backward. If backward is split, B computes the
cotangents of inputs only, and W the gradients of weights.

All schedules have the same dependencies between tasks (`Schedule.needs`). A schedule adds the order
of each device's tasks, and all other facts follow from these orders. Micro-batches in flight need
no clock. Makespan and bubble come from playing the orders with costs. The global sequence comes
from a play in which every task takes one tick.

    orders    orders of the named schedules, and the check of any others
    playing   simulation of orders with costs
    gantt     tables and charts

All schedules run backward tasks by ascending micro-batch. Gradients are then summed in one order,
and all schedules give the same numbers.
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
from dtrans.pipeline_parallel.orders import ALIASES, ORDERS, check_tasks, in_turn
from dtrans.pipeline_parallel.playing import (
    checked_cost,
    peak_in_flight,
    play_tasks,
    task_costs,
    tick_table,
)
from dtrans.pipeline_parallel.task import Costs, Play, Task, Time, TimedTask, needs


@dataclasses.dataclass(frozen=True, repr=False)
class Schedule:
    """Tasks of each device of a pipeline, in order. `schedule` returns the named ones.

    Model stage k is on device `k % num_stages`: with several chunks, each device has every
    num_stages-th stage.

    Attributes:
      name: the name for display.
      num_stages: the number of devices.
      num_micro_batch: the number of micro-batches of a step.
      chunks: model stages per device.
      orders: each device's tasks in order.

    Raises:
      ConfigError: the tasks do not pass `check`.

    Example:
      >>> F0, B0, F1, B1 = [Task(kind, 0, micro) for micro in range(2) for kind in "FB"]
      >>> mine = Schedule("mine", 1, num_micro_batch=2, chunks=1, orders=[[F0, B0, F1, B1]])
      >>> mine.peak, mine.makespan()
      ((1,), 6)
      >>> dataclasses.replace(mine, orders=[[F0, B0, B1, F1]])
      Traceback (most recent call last):
        ...
      dtrans.errors.ConfigError: the schedule mine cannot go on: device 0 waits with B1@0 for F1@0
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
        """The number of model stages, over all chunks."""
        return self.num_stages * self.chunks

    @cached_property
    def splits_backward(self) -> bool:
        """Return True if there are W tasks: B then computes the cotangents of inputs only."""
        return any(task.kind == "W" for order in self.orders for task in order)

    def device_of(self, stage: int) -> int:
        """Return the device of a model stage.

        Raises:
          ConfigError: there is no such stage.
        """
        if not 0 <= stage < self.num_model_stages:
            raise ConfigError(
                f"the schedule {self.name} has model stages 0 to {self.num_model_stages - 1}, no "
                f"{stage}"
            )
        return stage % self.num_stages

    def needs(self, task: Task) -> tuple[Task, ...]:
        """Return the tasks that compute the operands of a task.

        F at stage k needs F at k - 1. B at k needs F at k and B at k + 1. W at k needs B at k. All
        schedules with equally many model stages have the same dependencies.
        """
        return needs(task, self.num_model_stages)

    def dependencies(self, task: Task) -> tuple[Task, ...]:
        """Return the tasks that end before a task begins: its operands, then the previous one on
        its device.

        Raises:
          ConfigError: the schedule has no such task.
        """
        if task not in self._position:
            raise ConfigError(f"the schedule {self.name} has no task {task}")
        device, i = self._position[task]
        operands = self.needs(task)
        before = self.orders[device][i - 1 : i] if i else ()
        return operands + tuple(t for t in before if t not in operands)

    def check(self) -> None:
        """Check that the orders form a schedule.

        Raises:
          ConfigError: a count is not a positive int. A task is missing, appears twice, is on
            another device than its stage, or is unknown. Only some W tasks are there. Devices wait
            for each other.
        """
        for what in ("num_stages", "num_micro_batch", "chunks"):
            check_int(what, getattr(self, what))
        check_tasks(
            self.name, self.orders, self.num_stages, self.num_model_stages, self.num_micro_batch
        )
        assert self._ordered  # raises if devices wait for each other

    @cached_property
    def _position(self) -> dict[Task, tuple[int, int]]:
        """Each task's device, and its index in that device's order."""
        found = {}
        for device, order in enumerate(self.orders):
            for i, task in enumerate(order):
                found[task] = (device, i)
        return found

    @cached_property
    def _ordered(self) -> tuple[Task, ...]:
        """All tasks, each after its dependencies."""
        return in_turn(self.name, self.orders, self.num_model_stages)

    # -- costs -----------------------------------------------------------------------------------

    def play(
        self, forward: Costs = 1, backward: Costs = 2, weight: Costs = 1, transfer: float = 0
    ) -> Play:
        """Return the times of tasks if each device begins its next task as soon as it can.

        Args:
          forward: the time of a forward pass on a device for a micro-batch, in any unit; chunks of
            the device have equal shares. Or a number for each model stage.
          backward: likewise, the time of a complete backward pass.
          weight: likewise, the time of W if backward is split. B then takes `backward - weight`, so
            that schedules do equal work.
          transfer: the time of a transfer between devices; the sender computes meanwhile.

        Returns:
          The timed tasks by start, then device. If all costs are ints, times are exact: ints, or
            fractions if chunks do not divide the costs.

        Raises:
          ConfigError: a cost is not a finite number of at least 0, or costs more than the backward
            pass that includes it. Costs are not as many as model stages.
        """
        costs = task_costs(
            self.num_stages, self.chunks, self.splits_backward, forward, backward, weight
        )
        return play_tasks(self._ordered, self.num_stages, costs, checked_cost("transfer", transfer))

    def makespan(
        self, forward: Costs = 1, backward: Costs = 2, weight: Costs = 1, transfer: float = 0
    ) -> Time:
        """Return the duration of a step; see `play` for the costs. Exact if all of them are ints.

        Example:
          >>> schedule("PreferBackward", 2, 2).makespan()
          9
          >>> schedule("Interleaved", 2, 2, chunks=2).makespan()
          Fraction(15, 2)
        """
        return self.play(forward, backward, weight, transfer).makespan

    @cached_property
    def bubble(self) -> Fraction:
        """The idle share of devices at the default costs of `play`.

        `play(...).bubble` is the share at other costs.
        """
        return Fraction(self.play().bubble)

    @cached_property
    def peak(self) -> tuple[int, ...]:
        """The most micro-batches in flight on each device, counted once for each of its chunks.

        A micro-batch is in flight from the beginning of its F to the end of its B, or of its W if
        backward is split. The device stores its residuals for that time. The peak depends only on
        the order of tasks.
        """
        return tuple(peak_in_flight(order, self.splits_backward) for order in self.orders)

    def sequence(self) -> tuple[Task, ...]:
        """Return all tasks in the order in which one process dispatches them.

        The order is tick by tick, and device by device in a tick.
        """
        return tuple(t.task for t in self._ticked)

    def ticks(self) -> tuple[tuple[Task | None, ...], ...]:
        """Return the tick table: rows are devices, columns ticks, None is idle.

        Every task takes one tick.
        """
        return tick_table(self._ticked, self.num_stages)

    @cached_property
    def _ticked(self) -> Play:
        # costs of a device are divided by its chunks: with these a task takes one tick
        tick = self.chunks
        backward = 2 * tick if self.splits_backward else tick
        return self.play(forward=tick, backward=backward, weight=tick)

    # -- tables and charts -----------------------------------------------------------------------

    @property
    def _size(self) -> str:
        chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        return f"{self.num_stages} devices{chunks}, {self.num_micro_batch} micro-batches"

    @property
    def title(self) -> str:
        """A line with the name, the size and the costs."""
        peak = " ".join(map(str, self.peak))
        return f"{self.name}: {self._size}, bubble {self.bubble}, peak in flight {peak}"

    def gantt(
        self,
        path: str | os.PathLike[str],
        plays: Sequence[tuple[str, Iterable[TimedTask]]] | None = None,
        *,
        unit: str | Sequence[str] | None = None,
    ) -> None:
        """Draw timed tasks into an image file: this schedule's at the default costs, or others.

        Args:
          path: the file; its suffix selects the format: .svg, .png.
          plays: titles and timed tasks, a panel for each. Panels of the plan and of the run compare
            the two.
          unit: the unit of the times: one for all panels, which then share a scale, or one for
            each.

        Raises:
          ConfigError: matplotlib is not installed, the file cannot be written, or there is nothing
            to draw.

        Example:
          >>> import tempfile
          >>> planned = schedule("PreferBackward", 4, 8)
          >>> plays = [("no transfers", planned.play()), ("slow", planned.play(transfer=1))]
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     planned.gantt(f"{folder}/transfer.svg", plays)
        """
        if plays is None:
            plays, unit = [(self.name, self.play())], unit or "forwards of a stage"
        gantt.draw(path, plays, num_devices=self.num_stages, unit=unit or "")

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

    The bubbles below are those of S devices and M micro-batches at the default costs of
    `Schedule.play`. The peak is the most micro-batches in flight on device s. The first three
    schedules have the bubble (S - 1) / (M + S - 1).

    - PreferForward, or GPipe: all forwards, then all backwards. Peak M. Hides transfers best.
    - PreferBackward, or 1F1B: a backward as soon as one is ready. Peak min(M, S - s). EPL's
      default.
    - PreferBackwardOptimizer: PreferBackward with one more forward ahead on all but the last
      device, which hides a part of the transfers. Peak min(M, S - s + 1), on the last device 1.
    - Interleaved: 1F1B with several model stages on each device. M may be any number. A round has S
      to 2S - 1 micro-batches (M, if M < S), and not always S as in Megatron-LM. For M >= S the
      bubble is (S - 1) / (chunks x M + S - 1), as in the paper. It has more micro-batches in flight
      than PreferBackward, and `chunks` times the transfers.
    - ZeroBubble, or ZB-H1: 1F1B with backward split. W runs s micro-batches after its B, in time
      that would be idle. For M >= S the bubble is (S - 1) / (3M + S - 1). Peak min(M, S) on each
      device.

    Args:
      name: a name above, in any case. `Schedule.name` is the first of two names.
      num_stages: the number of devices.
      num_micro_batch: the number of micro-batches of a step.
      chunks: model stages per device: for Interleaved at least 2, by default 2; 1 for the others.

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
        raise ConfigError(f"schedule must be one of {', '.join(names)}, it is {name!r}")
    check_int("num_stages", num_stages)
    check_int("num_micro_batch", num_micro_batch)
    interleaved = found == "Interleaved"
    if chunks is None:
        chunks = 2 if interleaved else 1
    check_int("chunks", chunks)
    if interleaved and chunks == 1:
        raise ConfigError(
            "chunks=1 is PreferBackward: Interleaved needs at least 2 model stages on each device"
        )
    if not interleaved and chunks > 1:
        raise ConfigError(
            f"{found} has one model stage on each device, not chunks={chunks}: use Interleaved"
        )
    orders = tuple(ORDERS[found](num_stages, num_micro_batch, chunks))
    return Schedule(found, num_stages, num_micro_batch, chunks, orders)
