"""Schedules of a pipeline: which device does what in which order, as a value that can be asked before anything runs.

A step of `num_micro_batch` micro-batches through `K` model stages is made of tasks: F, the forward of a stage on a
micro-batch; B, its backward; and, where backward is split, B for the cotangents of inputs only and W for the gradients
of weights. What a task needs is the same in all schedules (`Schedule.needs`); a schedule adds the order in which each
device does its own. The rest is read off these orders: what is in flight without any clock, makespan and bubble by
playing the orders with costs, one global sequence from a play in which every task takes one tick. Timed tasks, and
how they are shown, are in `dtrans.pipeline_parallel.gantt`.

Backward goes through micro-batches in ascending order in all schedules, so that gradients are added up in one order
and all schedules give the same numbers. All but PreferForward are one forward, one backward (1F1B): some forwards
ahead, then by turns a backward and a forward, then what is left. They differ in how many are ahead.

Sources: EPL, its pipeline's scheduler.py (the first three); Narayanan et al., arXiv 2104.04473 (Interleaved); Qi et
al., arXiv 2401.10241 (ZeroBubble).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from numbers import Integral, Real
from typing import Any

from dtrans.checks import check_int
from dtrans.errors import ConfigError
from dtrans.pipeline_parallel import gantt
from dtrans.pipeline_parallel.task import Costs, Play, Task, TimedTask


@dataclasses.dataclass(frozen=True, repr=False)
class Schedule:
    """What each device of a pipeline does, in order. `schedule` makes those that have a name; others can be written.

    Model stage k is on device `k % num_stages`: with several chunks, each device has every num_stages-th stage.

    Attributes:
      name: for showing.
      num_stages: how many devices there are.
      num_micro_batch: how many micro-batches a step has.
      chunks: model stages per device.
      orders: by device, its tasks in order.

    Raises:
      ConfigError: as `check`, when one is made.

    Example:
      >>> F, B = [[Task(kind, 0, m) for m in range(2)] for kind in "FB"]
      >>> mine = Schedule("mine", num_stages=1, num_micro_batch=2, chunks=1, orders=[[F[0], B[0], F[1], B[1]]])
      >>> mine.peak, mine.makespan()
      ((1,), 6)
      >>> dataclasses.replace(mine, orders=[[F[0], B[0], B[1], F[1]]])
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
        """Model stages, over all chunks."""
        return self.num_stages * self.chunks

    @cached_property
    def splits_backward(self) -> bool:
        """Whether there are W tasks: B then makes the cotangents of inputs only."""
        return any(task.kind == "W" for order in self.orders for task in order)

    def device_of(self, stage: int) -> int:
        """The device of a model stage.

        Raises:
          ConfigError: there is no such stage.
        """
        if not 0 <= stage < self.num_model_stages:
            raise ConfigError(f"the schedule {self.name} has model stages 0 to {self.num_model_stages - 1}, no {stage}")
        return stage % self.num_stages

    def needs(self, task: Task) -> tuple[Task, ...]:
        """The tasks that make what a task reads: the same in all schedules, for equal numbers of model stages.

        F at stage k needs F at k - 1; B needs F at its own stage and B at k + 1; W needs B at its own stage.
        """
        kind, k, m = task.kind, task.stage, task.micro
        if kind == "F":
            return (Task("F", k - 1, m),) if k else ()
        if kind == "W":
            return (Task("B", k, m),)
        return (Task("F", k, m), Task("B", k + 1, m)) if k + 1 < self.num_model_stages else (Task("F", k, m),)

    def dependencies(self, task: Task) -> tuple[Task, ...]:
        """All tasks that end before a task begins: what it needs, and last the one before it on its device.

        Raises:
          ConfigError: the schedule has no such task.
        """
        if task not in self._position:
            raise ConfigError(f"the schedule {self.name} has no task {task}")
        device, i = self._position[task]
        needs = self.needs(task)
        before = self.orders[device][i - 1 : i] if i else ()
        return needs + tuple(t for t in before if t not in needs)

    def check(self) -> None:
        """See that the orders are a schedule.

        Raises:
          ConfigError: a count is not a positive int; a task is missing, there twice, on another device than its stage,
            or not one of this pipeline at all; W tasks are there for some only; or devices wait for each other.
        """
        for what in ("num_stages", "num_micro_batch", "chunks"):
            check_int(what, getattr(self, what))
        if len(self.orders) != self.num_stages:
            raise ConfigError(
                f"the schedule {self.name} has orders of {len(self.orders)} devices, and num_stages={self.num_stages}"
            )
        seen: set[Task] = set()
        for device, task in ((d, t) for d, order in enumerate(self.orders) for t in order):
            if task not in self._tasks:
                raise ConfigError(
                    f"the schedule {self.name} has {task} on device {device}, which is no task of "
                    f"{self.num_model_stages} model stages and {self.num_micro_batch} micro-batches"
                )
            if task in seen:
                raise ConfigError(f"the schedule {self.name} has {task} twice")
            if device != self.device_of(task.stage):
                raise ConfigError(
                    f"the schedule {self.name} has {task} on device {device}: its stage is on device "
                    f"{self.device_of(task.stage)}"
                )
            seen.add(task)
        missing = sorted(t for t in self._tasks - seen if t.kind != "W" or self.splits_backward)
        if missing:
            nor = len(missing) - 1
            others = f", nor {nor} other task{'s' if nor > 1 else ''}" if nor else ""
            raise ConfigError(f"the schedule {self.name} has no {missing[0]}{others}")
        assert len(self._started) == len(seen)  # or it raises

    @cached_property
    def _tasks(self) -> frozenset[Task]:
        """All tasks that there can be."""
        stages, micros = range(self.num_model_stages), range(self.num_micro_batch)
        return frozenset(Task(kind, k, m) for kind in "FBW" for k in stages for m in micros)

    @cached_property
    def _position(self) -> dict[Task, tuple[int, int]]:
        """Where each task is: its device, and its place in that device's order."""
        return {task: (device, i) for device, order in enumerate(self.orders) for i, task in enumerate(order)}

    @cached_property
    def _started(self) -> tuple[Task, ...]:
        """All tasks, each after its dependencies: every device goes on until it waits, then the next has its turn."""
        done: dict[Task, None] = {}
        heads = [0] * self.num_stages
        while True:
            before = len(done)
            for device, order in enumerate(self.orders):
                while heads[device] < len(order) and all(t in done for t in self.needs(order[heads[device]])):
                    done[order[heads[device]]] = None
                    heads[device] += 1
            if len(done) == before:
                break
        waits = [
            f"device {device} waits with {order[i]} for {next(t for t in self.needs(order[i]) if t not in done)}"
            for device, (order, i) in enumerate(zip(self.orders, heads, strict=True))
            if i < len(order)
        ]
        if waits:
            raise ConfigError(f"the schedule {self.name} cannot go on: {', '.join(waits)}")
        return tuple(done)

    # -- what it costs ---------------------------------------------------------------------------

    def play(self, forward: Costs = 1, backward: Costs = 2, weight: Costs = 1, transfer: float = 0) -> Play:
        """When each task begins and ends, if each device begins its next task as soon as it can.

        Args:
          forward: what F costs, in any unit of time.
          backward: what a whole backward costs.
          weight: what W costs where backward is split; B is then `backward - weight`, so that schedules do equal work.
          transfer: how long what a task makes is on its way to another device, which meanwhile can do something else.

        Returns:
          the timed tasks by start, then device. Times are ints where all costs are.

        Raises:
          ConfigError: a cost that is not a finite number of at least 0, as many costs as there are not model stages,
            or a weight that costs more than the backward that it is a part of.
        """
        costs = {"F": self._costs("forward", forward), "B": self._costs("backward", backward)}
        if self.splits_backward:
            costs["W"] = self._costs("weight", weight)
            for k, (whole, part) in enumerate(zip(costs["B"], costs["W"], strict=True)):
                if part > whole:
                    raise ConfigError(f"at model stage {k} weight={part} is more than backward={whole}, which it is in")
            costs["B"] = [whole - part for whole, part in zip(costs["B"], costs["W"], strict=True)]
        latency = _check_cost("transfer", transfer)
        free: list[float] = [0] * self.num_stages
        ends: dict[Task, float] = {}
        timed = []
        for task in self._started:
            device = self.device_of(task.stage)
            there = [ends[t] + (latency if self.device_of(t.stage) != device else 0) for t in self.needs(task)]
            start = max([free[device], *there])
            free[device] = ends[task] = start + costs[task.kind][task.stage]
            timed.append(TimedTask(task, device, start, ends[task]))
        return Play(sorted(timed, key=lambda t: (t.start, t.device)))

    def makespan(self, forward: Costs = 1, backward: Costs = 2, weight: Costs = 1, transfer: float = 0) -> float:
        """How long a step takes; see `play` for the costs. An int where all of them are."""
        return self.play(forward, backward, weight, transfer).makespan

    @cached_property
    def bubble(self) -> Fraction:
        """The idle share of devices at the default costs of `play`. At others it is `play(...).bubble`."""
        return Fraction(self.play().bubble)

    @cached_property
    def peak(self) -> tuple[int, ...]:
        """By device, how many micro-batches it has in flight at most, counted once for each of its chunks.

        One is in flight from the beginning of its F to the end of its B, or of its W where backward is split: the
        time for which the device keeps what the forward left for it. It follows from the order alone.
        """
        last = "W" if self.splits_backward else "B"
        peaks = []
        for order in self.orders:
            now = most = 0
            for task in order:
                now += task.kind == "F"
                most = max(most, now)
                now -= task.kind == last
            peaks.append(most)
        return tuple(peaks)

    def sequence(self) -> tuple[Task, ...]:
        """All tasks in the order in which one process dispatches them: tick by tick, in a tick device by device."""
        return tuple(t.task for t in self._ticked)

    def ticks(self) -> tuple[tuple[Task | None, ...], ...]:
        """The tick table: rows are devices, columns ticks, None is idle. Every task takes one tick."""
        table: list[list[Task | None]] = [[None] * int(self._ticked.makespan) for _ in self.orders]
        for task, device, start, _ in self._ticked:
            table[device][int(start)] = task
        return tuple(map(tuple, table))

    @cached_property
    def _ticked(self) -> Play:
        return self.play(forward=1, backward=2 if self.splits_backward else 1, weight=1)

    def _costs(self, what: str, given: Costs) -> list[float]:
        """What each model stage costs."""
        each = list(given) if isinstance(given, Iterable) else [given] * self.num_model_stages
        if len(each) != self.num_model_stages:
            raise ConfigError(f"{what} has {len(each)} costs, and the schedule {self.num_model_stages} model stages")
        return [_check_cost(what, cost) for cost in each]

    # -- showing ---------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """Its name, and what it costs, in a line."""
        chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        return (
            f"{self.name}: {self.num_stages} devices{chunks}, {self.num_micro_batch} micro-batches, "
            f"bubble {self.bubble}, peak in flight {' '.join(map(str, self.peak))}"
        )

    def gantt(
        self,
        path: str | os.PathLike[str],
        plays: Sequence[tuple[str, Iterable[TimedTask]]] | None = None,
        *,
        unit: str | Sequence[str] | None = None,
    ) -> None:
        """Draw timed tasks into an image file: this schedule's at the default costs, or others.

        Args:
          path: its ending says of which kind it is: .svg, .png.
          plays: titles and timed tasks, a panel for each. To see what ran beside what was planned, give both.
          unit: of the times, the same for all panels, which then have one scale, or one for each.

        Raises:
          ConfigError: matplotlib is not installed, the file cannot be written, or there is nothing to draw.

        Example:
          >>> import tempfile
          >>> planned = schedule("PreferBackward", 4, 8)
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     planned.gantt(f"{folder}/transfer.svg", [(f"transfer {c}", planned.play(transfer=c)) for c in (0, 1)])
        """
        if plays is None:
            plays, unit = [(self.name, self.play())], unit or "forwards of a stage"
        gantt.draw(path, plays, num_devices=self.num_stages, unit=unit or "")

    def __str__(self) -> str:
        return gantt.text(self.title, self.ticks())

    def __repr__(self) -> str:
        chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        return f"<Schedule {self.name}: {self.num_stages} devices{chunks}, {self.num_micro_batch} micro-batches>"

    def _repr_html_(self) -> str:
        return gantt.html(self.title, self.ticks())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self) if cycle else str(self))


# -- the schedules that have a name ----------------------------------------------------------------


def schedule(name: str, num_stages: int, num_micro_batch: int, chunks: int | None = None) -> Schedule:
    """The schedule of a name, for `num_stages` devices.

    For S devices and M micro-batches, at the default costs of `Schedule.play`, the bubble of the first three is
    (S - 1) / (M + S - 1); on device s at most `peak` micro-batches are in flight:

    - PreferForward: all forwards, then all backwards, as in GPipe. Peak M. Hides transfers best.
    - PreferBackward: a backward as soon as there is one (1F1B). Peak min(M, S - s). EPL's default.
    - PreferBackwardOptimizer: the same with one more forward ahead on all but the last device, which hides a part of
      the transfers. Peak min(M, S - s + 1), on the last device 1.
    - Interleaved: 1F1B with several model stages on each device, which a micro-batch comes by in turn. Any M will do:
      where Megatron-LM needs a multiple of S, rounds here are of S to 2S - 1 (of M, if M < S). For M >= S the bubble is
      (S - 1) / (chunks x M + S - 1), as in the paper. It has more in flight than PreferBackward, and `chunks` times
      the transfers.
    - ZeroBubble: 1F1B with backward split, ZB-H1 of the paper: W comes s micro-batches after its B, in what would be
      idle time. For M >= S the bubble is (S - 1) / (3M + S - 1). Peak min(M, S) on each device.

    Args:
      name: one of these, in any case.
      num_stages: how many devices there are.
      num_micro_batch: how many micro-batches a step has.
      chunks: model stages per device: at least 2, and 2 if not given, for Interleaved; the others have 1.

    Raises:
      ConfigError: an unknown name, or a number that is not as said.

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
    found = {n.lower(): n for n in _SCHEDULES}.get(str(name).lower())
    if found is None:
        raise ConfigError(f"schedule must be one of {', '.join(_SCHEDULES)}, it is {name!r}")
    check_int("num_stages", num_stages)
    check_int("num_micro_batch", num_micro_batch)
    interleaved = found == "Interleaved"
    if chunks is None:
        chunks = 2 if interleaved else 1
    check_int("chunks", chunks)
    if interleaved and chunks == 1:
        raise ConfigError("chunks=1 is PreferBackward: Interleaved needs at least 2 model stages on each device")
    if not interleaved and chunks > 1:
        raise ConfigError(f"{found} has one model stage on each device, not chunks={chunks}: use Interleaved")
    orders = tuple(_SCHEDULES[found](num_stages, num_micro_batch, chunks))
    return Schedule(found, num_stages, num_micro_batch, chunks, orders)


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


_SCHEDULES: dict[str, Callable[[int, int, int], Iterator[tuple[Task, ...]]]] = {
    "PreferForward": _with_ahead(lambda device, stages, micros: micros),
    "PreferBackward": _one_forward_one_backward,
    # one more would gain the last device nothing: what its backward needs is there
    "PreferBackwardOptimizer": _with_ahead(lambda device, stages, micros: stages - device + (device < stages - 1)),
    "Interleaved": _interleaved,
    "ZeroBubble": _zero_bubble,
}


def _check_cost(what: str, cost: object) -> float:
    """A cost as an int where it is one, else a float."""
    if isinstance(cost, bool) or not isinstance(cost, Real) or not math.isfinite(cost) or cost < 0:
        raise ConfigError(f"{what}={cost!r}: a cost is a finite number of at least 0")
    return int(cost) if isinstance(cost, Integral) else float(cost)
