"""Schedules: the orders of EPL's schedulers, bubbles, makespans, peaks, and drawings.

EPL's orders are replayed from the dependencies that EPL adds. Every order can be executed, and its
computed properties hold in the execution.
"""

from __future__ import annotations

import dataclasses
import graphlib
import importlib.util
import itertools
import re
import struct
import xml.etree.ElementTree as ET
from fractions import Fraction
from numbers import Rational

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dtrans.errors import ConfigError
from dtrans.pipeline_parallel.gantt import draw
from dtrans.pipeline_parallel.orders import ALIASES
from dtrans.pipeline_parallel.schedule import Schedule, schedule
from dtrans.pipeline_parallel.task import Task, TimedTask, Timeline


pytestmark = pytest.mark.usefixtures("system_fonts")

EPL = ("PreferForward", "PreferBackward", "PreferBackwardOptimizer")
NAMES = (*EPL, "Interleaved", "ZeroBubble")
SIZES = list(itertools.product(range(1, 7), range(1, 13)))


def all_of(num_stages, num_micro_batch):
    """Return all schedules of a size."""
    return [
        *(schedule(name, num_stages, num_micro_batch) for name in NAMES if name != "Interleaved"),
        *(schedule("Interleaved", num_stages, num_micro_batch, chunks) for chunks in (2, 3, 4)),
    ]


@st.composite
def schedules(draw):
    name = draw(st.sampled_from(NAMES))
    chunks = draw(st.integers(2, 4)) if name == "Interleaved" else None
    return schedule(name, draw(st.integers(1, 6)), draw(st.integers(1, 12)), chunks)


@st.composite
def played(draw):
    """Draw a schedule, and costs of its tasks."""
    s = draw(schedules())
    each = lambda low, high: st.lists(
        st.integers(low, high), min_size=s.num_model_stages, max_size=s.num_model_stages
    )
    cost = lambda low, high: draw(st.one_of(st.integers(low, high), each(low, high)))
    return s, dict(
        forward=cost(0, 5), backward=cost(2, 9), weight=cost(0, 2), transfer=draw(st.integers(0, 4))
    )


def short(order):
    return " ".join(f"{t.kind}{t.micro}" for t in order)


# -- the orders of EPL -----------------------------------------------------------------------------


def edges_of_epl(name, S, M):
    """Return the dependencies that EPL's scheduler adds, as (stage, before, after).

    A task is (kind, micro-batch).
    """
    edges = []
    for m, s in itertools.product(range(1, M), range(S)):
        more = int(name == "PreferBackwardOptimizer")
        r = s + m - S - more
        if name == "PreferForward":
            pairs = [(("F", m - 1), ("F", m)), (("B", m - 1), ("B", m))]
            pairs += [(("F", M - 1), ("B", 0))] if m == M - 1 else []
        elif s == S - 1:
            pairs = [(("B", m - 1), ("F", m))]
        elif r >= 0:
            pairs = [(("F", m - 1), ("B", r)), (("B", r), ("F", m))]
            pairs += [(("F", m), ("B", r + 1))] if m == M - 1 else []
        else:
            pairs = [(("F", m - 1), ("F", m)), (("B", M - m - 1), ("B", M - m))]
        edges += [(s, before, after) for before, after in pairs]
    return edges


def replayed(name, S, M):
    """Return each stage's order if F takes 1 and B takes 2, and each task begins as early as the
    dependencies allow."""
    before = {(kind, s, m): set() for kind in "FB" for s in range(S) for m in range(M)}
    for kind, s, m in before:
        if kind == "F" and s:
            before["F", s, m].add(("F", s - 1, m))
        if kind == "B":
            before["B", s, m] |= {("F", s, m), *([("B", s + 1, m)] if s < S - 1 else [])}
    for s, (kind, m), (kind2, m2) in edges_of_epl(name, S, M):
        before[kind2, s, m2].add((kind, s, m))
    ends, free, orders, now = {}, [0] * S, [[] for _ in range(S)], 0
    while len(ends) < len(before):
        for s in range(S):
            done = {t for t, end in ends.items() if end <= now}
            ready = [t for t in before if t[1] == s and t not in ends and before[t] <= done]
            if ready and free[s] <= now:
                assert len(ready) == 1, "the edges leave open which comes first"
                (task,) = ready
                ends[task] = free[s] = now + (1 if task[0] == "F" else 2)
                orders[s].append(Task(*task))
        now += 1
    return tuple(map(tuple, orders)), max(ends.values())


@pytest.mark.parametrize(("name", "count"), list(zip(EPL, (60, 52, 52), strict=True)))
def test_the_oracle_has_as_many_edges_as_epl_adds(name, count):
    assert len(edges_of_epl(name, 4, 8)) == count


@pytest.mark.parametrize("name", EPL)
def test_orders_are_those_of_epls_edges(name):
    for S, M in [*SIZES, (8, 16)]:
        orders, makespan = replayed(name, S, M)
        assert schedule(name, S, M).orders == orders, (S, M)
        assert schedule(name, S, M).makespan() == makespan


def test_known_orders():
    one = schedule("PreferBackward", 4, 8).orders
    assert short(one[0]) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert short(one[3]) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"
    assert short(schedule("PreferForward", 4, 3).orders[1]) == "F0 F1 F2 B0 B1 B2"
    assert short(schedule("ZeroBubble", 3, 4).orders[0]) == "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    assert short(schedule("ZeroBubble", 3, 4).orders[2]) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"


def test_interleaved_is_megatrons_where_that_has_one():
    """The expected orders are formulas of Megatron-LM's schedules.py: the i-th F and B, and the
    number of warm-up tasks."""
    for S, turns, v in itertools.product(range(1, 6), range(1, 4), (2, 3)):
        M = S * turns
        for device, order in enumerate(schedule("Interleaved", S, M, v).orders):
            # the chunk and the micro-batch
            at = [(i // S % v, i // (S * v) * S + i % S) for i in range(M * v)]
            forwards = [(c * S + device, m) for c, m in at]
            backwards = [((v - 1 - c) * S + device, m) for c, m in at]
            warmup = min((S - device - 1) * 2 + (v - 1) * S, M * v)
            expected = [("F", *t) for t in forwards[:warmup]]
            for i, forward in enumerate(forwards[warmup:]):
                expected += [("F", *forward), ("B", *backwards[i])]
            expected += [("B", *t) for t in backwards[M * v - warmup :]]
            assert order == tuple(Task(*t) for t in expected), (S, M, v, device)


def test_backward_goes_up_in_all_schedules_and_at_all_stages():
    for s in (s for size in SIZES for s in all_of(*size)):
        for kind, k in itertools.product(
            "FBW" if s.splits_backward else "FB", range(s.num_model_stages)
        ):
            micros = [t.micro for t in s.orders[s.device_of(k)] if (t.kind, t.stage) == (kind, k)]
            assert micros == list(range(s.num_micro_batch))


# -- bubble, makespan, peak ------------------------------------------------------------------------


def idle(table):
    return Fraction(sum(t is None for row in table for t in row), len(table) * len(table[0]))


@pytest.mark.parametrize("name", EPL)
def test_bubble_of_epls_schedules(name):
    for S, M in SIZES:
        s = schedule(name, S, M)
        assert s.bubble == s.timeline().bubble == idle(s.ticks()) == Fraction(S - 1, M + S - 1), (
            S,
            M,
        )
        assert isinstance(s.bubble, Fraction)


def test_bubble_of_the_others_is_less():
    for S, M in SIZES:
        of_epl = Fraction(S - 1, M + S - 1)
        zero = schedule("ZeroBubble", S, M)
        assert zero.bubble < of_epl or S == 1
        assert idle(zero.ticks()) == zero.bubble
        if M >= S:
            assert zero.bubble == Fraction(S - 1, 3 * M + S - 1)
        for chunks in (2, 3, 4):
            several = schedule("Interleaved", S, M, chunks)
            # a single micro-batch occupies one device at a time
            assert several.bubble < of_epl or S == 1 or M == 1
            assert idle(several.ticks()) < of_epl or S == 1 or M == 1
            # the path of one micro-batch, and the tasks of the other micro-batches behind it
            length = 3 * (chunks * M + S - 1) if M >= S else 3 * (chunks * S + M - 1)
            assert several.makespan() == Fraction(length, chunks), (S, M, chunks)
            assert (
                several.makespan() < schedule("PreferBackward", S, M).makespan() or S == 1 or M == 1
            )
    assert schedule("ZeroBubble", 1, 4).bubble == schedule("Interleaved", 1, 4).bubble == 0


@pytest.mark.parametrize(("name", "makespan"), list(zip(EPL, (63, 85, 78), strict=True)))
def test_makespan_with_transfers(name, makespan):
    assert schedule(name, 4, 16).makespan(transfer=1) == makespan
    assert schedule(name, 4, 16).makespan() == 57


def test_nothing_is_transferred_between_stages_of_one_device():
    assert (
        schedule("Interleaved", 1, 3, 2).makespan(transfer=9)
        == schedule("Interleaved", 1, 3, 2).makespan()
        == 9
    )


@pytest.mark.parametrize(
    "name,same",
    [("GPipe", "PreferForward"), ("1F1B", "PreferBackward"), ("zb-h1", "ZeroBubble")],
    ids=str,
)
def test_names_of_the_field(name, same):
    assert schedule(name, 4, 8) == schedule(same, 4, 8) and schedule(name, 4, 8).name == same


def test_a_chunk_is_a_part_of_the_work_of_its_device():
    """Compute by hand: two devices, two chunks each, two micro-batches. F of a chunk takes 1/2, B
    takes 1.

    device 0   F0@0 F1@0 F0@2 F1@2 .    B0@2 B1@2 B0@0 B1@0
    device 1   .    F0@1 F1@1 F0@3 .. B0@3 ..
    """
    s = schedule("Interleaved", 2, 2, 2)
    at = {str(t.task): (t.start, t.end) for t in s.timeline()}
    half = Fraction(1, 2)
    assert (at["F0@0"], at["F1@0"], at["F0@2"]) == ((0, half), (half, 1), (1, 3 * half))
    assert (at["F0@1"], at["F0@3"]) == ((half, 1), (3 * half, 2))
    # a device has 2 micro-batches x 2 chunks x 3/2 of work; at both ends it waits for half of an F
    # and of a B of a chunk
    assert s.makespan() == 2 * 3 + (half + 1) == Fraction(15, 2)
    assert schedule("PreferBackward", 2, 2).makespan() == 2 * 3 + 3
    # costs of model stages are used without scaling
    assert s.makespan([0.5] * 4, [1] * 4) == 7.5
    assert s.makespan(2, 4, transfer=0) == 15 and isinstance(s.makespan(2, 4), int)


def test_all_schedules_do_equal_work():
    busy = {s.name: sum(t.end - t.start for t in s.timeline(3, 7, 2)) for s in all_of(4, 8)}
    assert set(busy.values()) == {4 * 8 * 10}


PEAKS = {
    "PreferForward": lambda S, M, s: M,
    "PreferBackward": lambda S, M, s: min(M, S - s),
    "PreferBackwardOptimizer": lambda S, M, s: min(M, S - s + 1) if s < S - 1 else 1,
    "ZeroBubble": lambda S, M, s: min(M, S),
}


@pytest.mark.parametrize("name", PEAKS)
def test_peak(name):
    for S, M in SIZES:
        assert schedule(name, S, M).peak == tuple(PEAKS[name](S, M, s) for s in range(S)), (S, M)


@pytest.mark.parametrize(
    ("name", "peak"), list(zip(EPL, [(8, 8, 8, 8), (4, 3, 2, 1), (5, 4, 3, 1)], strict=True))
)
def test_peak_of_four_stages_and_eight_micro_batches(name, peak):
    assert schedule(name, 4, 8).peak == peak


def test_peak_of_interleaved_counts_chunks():
    # 2(S - s - 1) + (chunks - 1) S + 1
    assert schedule("Interleaved", 4, 8, 2).peak == (
        11,
        9,
        7,
        5,
    )
    assert schedule("Interleaved", 2, 1, 3).peak == (3, 3)


def peak_seen(s, timeline):
    """Return the largest number of micro-batches in flight.

    A micro-batch that ends frees its place for one that begins.
    """
    last = "W" if s.splits_backward else "B"
    changes = [(t.start, 1, t.device, 1) for t in timeline if t.task.kind == "F"]
    changes += [(t.end, 0, t.device, -1) for t in timeline if t.task.kind == last]
    now, most = [0] * s.num_stages, [0] * s.num_stages
    for _, _, device, change in sorted(changes):
        now[device] += change
        most[device] = max(most[device], now[device])
    assert now == [0] * s.num_stages
    return tuple(most)


@given(schedules(), st.integers(0, 3))
def test_peak_is_what_a_play_shows(s, transfer):
    assert peak_seen(s, s.timeline(transfer=transfer)) == s.peak


# -- timelines and sequences ---------------------------------------------------------------------------


def test_what_tasks_need():
    s = schedule("ZeroBubble", 3, 2)
    assert s.needs(Task("F", 0, 1)) == ()
    assert s.needs(Task("F", 2, 1)) == (Task("F", 1, 1),)
    assert s.needs(Task("B", 2, 1)) == (Task("F", 2, 1),)
    assert s.needs(Task("B", 1, 0)) == (Task("F", 1, 0), Task("B", 2, 0))
    assert s.needs(Task("W", 1, 0)) == (Task("B", 1, 0),)
    # F0 F1 B0 W0 B1 W1 on device 0
    assert s.dependencies(Task("F", 0, 0)) == ()
    assert s.dependencies(Task("B", 0, 0)) == (Task("F", 0, 0), Task("B", 1, 0), Task("F", 0, 1))
    assert s.dependencies(Task("W", 0, 0)) == (Task("B", 0, 0),)
    with pytest.raises(ConfigError, match="task is F2@0, which is not in the schedule"):
        s.dependencies(Task("F", 0, 2))
    with pytest.raises(ConfigError, match="stage is 3; expected 0 to 2"):
        s.device_of(3)


@given(played())
def test_in_a_play_each_task_begins_as_soon_as_it_can(case):
    s, costs = case
    timeline = s.timeline(**costs)
    at = {t.task: t for t in timeline}
    assert len(at) == len(timeline) == sum(map(len, s.orders))
    cost = lambda what, k: (
        costs[what][k] if isinstance(costs[what], list) else Fraction(costs[what], s.chunks)
    )
    for task, (_, device, start, end) in at.items():
        assert device == s.device_of(task.stage) == task.stage % s.num_stages
        far = [
            at[t].end + (costs["transfer"] if at[t].device != device else 0) for t in s.needs(task)
        ]
        assert start == max(
            [0, *far, *(at[t].end for t in s.dependencies(task) if at[t].device == device)]
        )
        whole, part = (
            cost("backward", task.stage),
            cost("weight", task.stage) if s.splits_backward else 0,
        )
        assert (
            end - start
            == {"F": cost("forward", task.stage), "B": whole - part, "W": part}[task.kind]
        )
    for device, order in enumerate(s.orders):
        assert all(at[a].end <= at[b].start for a, b in itertools.pairwise(order))
        assert all(at[t].device == device for t in order)
    assert [(t.start, t.device) for t in timeline] == sorted((t.start, t.device) for t in timeline)
    assert timeline.makespan == s.makespan(**costs) == max(t.end for t in timeline)
    assert all(
        isinstance(x, int if s.chunks == 1 else Rational)
        for t in timeline
        for x in (t.start, t.end)
    )


@given(schedules())
def test_a_sequence_respects_all_orders_and_dependencies(s):
    sequence = s.sequence()
    assert sorted(sequence) == sorted(t for order in s.orders for t in order)
    done = set()
    for task in sequence:
        assert set(s.dependencies(task)) <= done
        done.add(task)
    for device, order in enumerate(s.orders):
        assert [t for t in sequence if s.device_of(t.stage) == device] == list(order)


@given(schedules())
def test_the_tick_table_is_the_sequence_tick_by_tick(s):
    table = s.ticks()
    assert len(table) == s.num_stages and len({len(row) for row in table}) == 1
    assert tuple(t for column in zip(*table, strict=True) for t in column if t) == s.sequence()
    tick = {task: i for row in table for i, task in enumerate(row) if task}
    assert all(tick[before] < tick[task] for task in tick for before in s.dependencies(task))
    for row, order in zip(table, s.orders, strict=True):
        assert tuple(t for t in row if t) == order
    # no task could start a tick earlier
    assert all(
        i == max([-1, *(tick[t] for t in s.dependencies(task))]) + 1 for task, i in tick.items()
    )


def test_costs_of_floats_and_of_each_stage():
    s = schedule("PreferBackward", 2, 2)
    assert s.makespan(0.5, 1.0) == 4.5
    assert s.timeline(0.5, 1.0).bubble == pytest.approx(1 / 3)
    # orders F0 F1 B0 B1 and F0 B0 F1 B1; the second device is three times as slow
    assert s.makespan([1, 3], [2, 6]) == 1 + 2 * (3 + 6) + 2
    assert s.timeline((1, 3), np.array([2, 6])).bubble == 1 - Fraction(2 * (1 + 2 + 3 + 6), 2 * 21)
    assert isinstance(s.timeline(np.int64(1), np.float32(2)).makespan, float)
    free = s.timeline(0, 0)
    assert (free.makespan, free.bubble) == (0, 0)
    assert (Timeline().makespan, Timeline().bubble, Timeline().num_devices) == (0, 0, 0)


def test_a_measured_play_can_be_asked():
    ran = Timeline(
        [TimedTask(Task("F", 1, 0), 1, 102.0, 103.0), TimedTask(Task("F", 0, 0), 0, 100.0, 101.0)]
    )
    assert (ran.makespan, ran.num_devices, ran.bubble) == (3.0, 2, pytest.approx(2 / 3))


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        (dict(forward=-1), "forward is -1; expected a finite number, 0 or more"),
        (dict(backward=[1, 2, float("nan"), 4]), "backward is nan"),
        (dict(backward=float("inf")), "backward is inf"),
        (dict(transfer=True), "transfer is True"),
        (dict(transfer="2"), "transfer is '2'"),
        (dict(forward="1234"), "forward is '1'"),
        (
            dict(forward=[1, 2]),
            "forward has 2 costs; expected one number, or a cost for each of the 4 model",
        ),
        (
            dict(backward=[2, 2, 0.5, 2]),
            "weight=1 of model stage 2 is more than backward=0.5, but the time of the weight "
            "gradients is a",
        ),
    ],
)
def test_costs_that_are_none(costs, says):
    with pytest.raises(ConfigError, match=says):
        schedule("ZeroBubble", 4, 4).timeline(**costs)


# -- making one, and one of one's own --------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_names_are_in_any_case(name):
    assert schedule(name.lower(), 3, 4) == schedule(name.upper(), 3, 4) == schedule(name, 3, 4)
    assert schedule(name.lower(), 3, 4).name == name
    assert hash(schedule(name, 3, 4)) == hash(schedule(name, 3, 4))
    assert schedule(name, 3, 4).chunks == (2 if name == "Interleaved" else 1)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ("PreferBackwards", 2, 2),
            f"schedule is 'PreferBackwards'; expected one of {', '.join((*NAMES, *ALIASES))}",
        ),
        ((None, 2, 2), f"schedule is None; expected one of {', '.join((*NAMES, *ALIASES))}"),
        (("PreferForward", 0, 2), "num_stages must be a positive number, it is 0"),
        (("PreferForward", True, 2), "num_stages must be a positive number, it is True"),
        (("PreferForward", 2, -1), "num_micro_batch must be a positive number, it is -1"),
        (("PreferForward", 2, 2.0), "num_micro_batch must be a positive number, it is 2.0"),
        (("PreferForward", 2, "2"), "num_micro_batch must be a positive number, it is '2'"),
        (("Interleaved", 2, 2, 0), "chunks must be a positive number, it is 0"),
        (("Interleaved", 2, 2, True), "chunks must be a positive number, it is True"),
        (("Interleaved", 2, 2, 1), "Interleaved needs at least 2 model stages on each device"),
        (
            ("ZeroBubble", 2, 2, 2),
            "chunks is 2, but ZeroBubble has one model stage on each device; use Interleaved",
        ),
    ],
)
def test_schedules_that_there_are_not(args, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        schedule(*args)


def test_one_chunk_may_be_said():
    assert schedule("PreferBackward", 2, 2, 1) == schedule("PreferBackward", 2, 2)


ONE = schedule("PreferBackward", 2, 2)
F00, F01, B00, B01 = (Task(kind, 0, m) for kind in "FB" for m in range(2))
F10, F11, B10, B11 = (Task(kind, 1, m) for kind in "FB" for m in range(2))
FIRST, LAST = (F00, F01, B00, B01), (F10, B10, F11, B11)


@pytest.mark.parametrize(
    ("orders", "says"),
    [
        ([FIRST], "orders for 1 devices, but num_stages is 2"),
        ([FIRST[:-1], LAST], "lacks the task B1@0; add it to the order"),
        ([(F00, B00), LAST], "lacks 2 tasks, the first is B1@0; add each task to the order"),
        ([(*FIRST, F00), LAST], "has F0@0 twice"),
        ([LAST, FIRST], "has F0@1 on device 0, but its stage is on device 1"),
        (
            [(*FIRST, Task("F", 2, 0)), LAST],
            "has F0@2 on device 0; expected tasks F, B and W of 2 model stages and 2 micro",
        ),
        ([(*FIRST, Task("F", 0, 2)), LAST], "has F2@0 on device 0; expected tasks F, B and W"),
        ([(*FIRST, Task("X", 0, 0)), LAST], "has X0@0 on device 0; expected tasks F, B and W"),
        ([(*FIRST, "F0"), LAST], "has F0 on device 0; expected tasks F, B and W"),
        ([(*FIRST, Task("W", 0, 0)), LAST], "lacks 3 tasks, the first is W1@0"),
        (
            [(F00, B00, F01, B01), (F10, F11, B10, B11)],
            "deadlocks: B0@0 on device 0 waits for B0@1, F1@1 on device 1 waits for F1@0",
        ),
        ([(F00, F01, B00, B01), (B10, F10, F11, B11)], "B0@1 on device 1 waits for F0@1"),
    ],
)
def test_orders_that_are_no_schedule(orders, says):
    with pytest.raises(ConfigError, match=says):
        Schedule("PreferBackward", 2, 2, 1, orders)


@pytest.mark.parametrize("field", ["num_stages", "num_micro_batch", "chunks"])
@pytest.mark.parametrize("count", [0, -1, True, 1.0])
def test_counts_are_checked_in_ones_own_too(field, count):
    with pytest.raises(ConfigError, match=f"{field} must be a positive number, it is {count}"):
        dataclasses.replace(ONE, **{field: count})


def test_one_of_ones_own():
    mine = Schedule(
        "mine", num_stages=2, num_micro_batch=2, chunks=1, orders=[list(FIRST), list(LAST)]
    )
    assert mine == dataclasses.replace(ONE, name="mine") and mine.orders == (FIRST, LAST)
    assert mine.bubble == Fraction(1, 3) and mine.peak == (2, 1)


@given(schedules(), st.randoms(use_true_random=False), st.integers(0, 3))
def test_orders_are_refused_if_and_only_if_devices_wait_for_each_other(s, random, swaps):
    """Swap neighbours at random.

    A topological sort of the standard library decides if the order can be executed.
    """
    orders = [list(order) for order in s.orders]
    for _ in range(swaps):
        order = random.choice(orders)
        i = random.randrange(len(order) - 1)
        order[i], order[i + 1] = order[i + 1], order[i]
    graph = {task: set(s.needs(task)) for order in orders for task in order}
    for order in orders:
        for before, after in itertools.pairwise(order):
            graph[after].add(before)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        with pytest.raises(ConfigError, match="deadlocks: "):
            dataclasses.replace(s, orders=orders)
    else:
        assert len(dataclasses.replace(s, orders=orders).timeline()) == len(graph)


# -- showing ---------------------------------------------------------------------------------------


def test_tasks_are_short():
    assert str(Task("F", stage=1, micro=3)) == "F3@1"
    assert sorted([Task("W", 0, 0), Task("B", 1, 0), Task("B", 0, 2)])[0] == Task("B", 0, 2)


def test_text():
    lines = str(schedule("PreferBackward", 4, 8)).splitlines()
    assert (
        lines[0]
        == "PreferBackward: 4 devices, 8 micro-batches, bubble 3/11, peak in flight 4 3 2 1"
    )
    assert lines[1].split() == ["tick", *map(str, range(22))]
    assert lines[2] == "device 0  F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 F6 B3 F7 B4 .  B5 .  B6 .  B7"
    assert lines[5] == "device 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 .  .  ."
    assert len(lines) == 6
    assert (
        repr(schedule("Interleaved", 4, 8))
        == "<Schedule Interleaved: 4 devices of 2 chunks, 8 micro-batches>"
    )


@given(schedules())
def test_text_has_all_tasks_in_lines_that_can_be_read(s):
    title, *lines = str(s).splitlines()
    assert s.name in title and str(s.bubble) in title
    assert all(len(line) <= 120 and line == line.rstrip() for line in lines)
    cells = [[] for _ in s.orders]
    for line in lines:
        if line.startswith("device"):
            _, device, *row = line.split()
            cells[int(device)] += row
    name = str if s.chunks > 1 else (lambda t: f"{t.kind}{t.micro}")
    assert cells == [[name(t) if t else "." for t in row] for row in s.ticks()]


def test_html():
    s = dataclasses.replace(schedule("ZeroBubble", 2, 3), name="a<b")
    root = ET.fromstring(f"<div>{s._repr_html_()}</div>".replace("&nbsp;", " "))
    rows = [[cell.text or "." for cell in row.iter("td")] for row in root.iter("tr")]
    assert rows == [[f"{t.kind}{t.micro}" if t else "." for t in row] for row in s.ticks()]
    assert root.find("b").text.startswith("a<b: 2 devices")
    colours = {
        c.text[0]: re.search("background:(#......)", c.get("style"))[1]
        for c in root.iter("td")
        if c.text
    }
    assert len(set(colours.values())) == 3


SVG = "{http://www.w3.org/2000/svg}"


def bars_of(path):
    """Return each bar by id (left, right, top and colour, in points), and all texts."""
    root = ET.parse(path).getroot()
    bars = {}
    for group in root.iter(f"{SVG}g"):
        if re.match(r"timeline\d", group.get("id", "")):
            outline = group.find(f"{SVG}path")
            points = [
                tuple(map(float, p))
                for p in re.findall(r"[ML] ([\d.]+) ([\d.]+)", outline.get("d"))
            ]
            xs, ys = zip(*points, strict=True)
            bars[group.get("id")] = (
                min(xs),
                max(xs),
                min(ys),
                re.search("fill: (#......)", outline.get("style"))[1],
            )
    return bars, [t.text for t in root.iter(f"{SVG}text")]


def test_a_chart_has_the_bars_of_all_timelines(tmp_path):
    s = schedule("ZeroBubble", 3, 4)
    ran = [
        (t.task, t.device, 1e3 + 0.9 * t.start, 1e3 + 0.9 * t.end) for t in s.timeline(transfer=1)
    ]
    panels = [("planned", s.timeline()), ("as it ran", [TimedTask(*t) for t in ran])]
    s.gantt(tmp_path / "chart.svg", panels, unit="ms")
    bars, text = bars_of(tmp_path / "chart.svg")
    assert len(bars) == 2 * len(s.sequence())
    lefts = [
        min(bar[0] for name, bar in bars.items() if name.startswith(f"timeline{i}"))
        for i in range(2)
    ]
    assert lefts[0] == pytest.approx(lefts[1], abs=0.01)  # times count from the first start
    scale = bars["timeline0-F0-stage0"][1] - bars["timeline0-F0-stage0"][0]  # one unit
    for i, (_, timeline) in enumerate(panels):
        first = min(t.start for t in timeline)
        for task, _, start, end in timeline:
            left, right, _, _ = bars[f"timeline{i}-{task.kind}{task.micro}-stage{task.stage}"]
            assert (left - lefts[i]) / scale == pytest.approx(start - first, abs=0.01)
            assert (right - left) / scale == pytest.approx(end - start, abs=0.01)
    for i in range(2):  # a row for each device, the first on top
        tops = [
            {bar[2] for name, bar in bars.items() if re.match(rf"timeline{i}.*-stage{k}$", name)}
            for k in range(3)
        ]
        assert [len(t) for t in tops] == [1, 1, 1] and tops == sorted(tops, key=min)
    assert len({(name.split("-")[1][0], bar[3]) for name, bar in bars.items()}) == 3
    assert "planned (bubble 14.3%)" in text
    assert f"as it ran (bubble {float(s.timeline(transfer=1).bubble):.1%})" in text
    assert text.count("time (ms)") == text.count("device") == 2
    assert {"forward", "cotangents of inputs", "gradients of weights"} <= set(text)
    # the numbers in bars and the ticks
    assert sum(t in {"0", "1", "2", "3"} for t in text) >= 2 * len(s.sequence())


def test_a_chart_of_the_schedule_alone(tmp_path):
    s = schedule("Interleaved", 2, 4, 3)
    s.gantt(tmp_path / "one.svg")
    bars, text = bars_of(tmp_path / "one.svg")
    assert set(bars) == {f"timeline0-{t.kind}{t.micro}-stage{t.stage}" for t in s.sequence()}
    assert len({bar[3] for bar in bars.values()}) == 6  # two kinds in three shades
    assert {f"{kind}, chunk {c}" for kind in ("forward", "backward") for c in range(3)} <= set(text)
    assert "time (forwards of a stage)" in text
    s.gantt(tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_panels_of_one_unit_have_one_scale(tmp_path):
    s = schedule("PreferForward", 2, 2)
    both = [("slow", s.timeline(2, 4)), ("fast", s.timeline())]
    widths = {}
    for name, unit in ("same", "ms"), ("each", ("ms", "ticks")):
        s.gantt(tmp_path / f"{name}.svg", both, unit=unit)
        bars, _ = bars_of(tmp_path / f"{name}.svg")
        slow, fast = (bars[f"timeline{i}-F0-stage0"] for i in range(2))
        widths[name] = (slow[1] - slow[0]) / (fast[1] - fast[0])
    assert widths == {"same": pytest.approx(2, rel=1e-3), "each": pytest.approx(1, rel=1e-3)}


def test_numbers_only_stand_in_bars_that_they_fit(tmp_path):
    schedule("PreferBackward", 1, 500).gantt(tmp_path / "thin.svg")
    bars, text = bars_of(tmp_path / "thin.svg")
    assert len(bars) == 1000
    assert not {"7", "77", "497"} & set(text)


def test_a_chart_as_pixels(tmp_path):
    schedule("PreferBackward", 4, 8).gantt(tmp_path / "chart.png")
    data = (tmp_path / "chart.png").read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data.startswith(b"\x89PNG") and width == 1800 and 250 < height < 500
    assert len(data) > 5000


@pytest.mark.parametrize(
    ("name", "timelines", "unit", "says"),
    [
        ("chart.txt", [("a", ONE.timeline())], "", "its name must end in one of .*png, .*svg"),
        ("chart", [("a", ONE.timeline())], "", "its name must end in one of"),
        (
            "nowhere/chart.svg",
            [("a", ONE.timeline())],
            "",
            "the directory .*nowhere does not exist",
        ),
        ("chart.svg", [], "", "timelines is empty"),
        ("chart.svg", [("nothing", [])], "", "the timeline 'nothing' has no tasks to draw"),
        (
            "chart.svg",
            [("odd", [TimedTask(Task("X", 0, 0), 0, 0, 1)])],
            "",
            "the timeline 'odd' contains X0@0",
        ),
        ("chart.svg", [("a", ONE.timeline())], ("s", "s"), "unit has 2 entries for 1 timelines"),
    ],
)
def test_charts_that_cannot_be_drawn(tmp_path, name, timelines, unit, says):
    with pytest.raises(ConfigError, match=says):
        draw(tmp_path / name, timelines, unit=unit)


def test_a_chart_that_cannot_be_written(tmp_path):
    (tmp_path / "chart.svg").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be written to .*chart.svg: Is a directory"):
        ONE.gantt(tmp_path / "chart.svg")


def test_a_chart_needs_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"needs matplotlib: pip install 'dtrans-jax\[examples\]'"
    ):
        ONE.gantt(tmp_path / "chart.svg")
