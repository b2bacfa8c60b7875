"""Plans of random steps compute the step, or are refused by an error of dtrans.

`make test` draws the same steps each time. `make fuzz` draws others, as many as DTRANS_EXAMPLES says.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import pytest
from hypothesis import find, given, seed, settings, strategies as st
from random_steps import RandomStep, Reading, draw_steps, make_batch

import dtrans
from dtrans._jax import equations
from dtrans.engine.layout import Shards
from dtrans.errors import DtransError
from dtrans.verification.check import STEPS


FINEST = dtrans.Slicing(min_slice_size=0)
WHOLE = dtrans.Slicing(min_slice_size=0, partition="greedy_even")
SERVERS = "127.0.0.1:1,127.0.0.1:2"
FINE_BLOCKS = dtrans.BlockPlacement(min_block_size=1)
EXAMPLES = int(os.environ.get("DTRANS_EXAMPLES", 0))
BY_DAY = 200
POINTS = STEPS if EXAMPLES else (0, 1)


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to make plans of random steps.

    Attributes:
      plan: of a traced step, a traced init and a number of ranks.
      share: of all examples, in percent.
      parts: in how many parts each rank takes its rows; other strategies take any number of rows.
      narrow: it refuses gradients that are not marked, and most values that an update reads.
    """

    plan: Callable[[Any, Any, int], Any]
    share: int = 10
    parts: int = 0
    narrow: bool = False


STRATEGIES = {
    "nccl2": Strategy(lambda *of: dtrans.nccl2(*of[:2], trainers=of[2]), share=18),
    "stage 1": Strategy(lambda *of: dtrans.sharding(*of[:2], degree=of[2], stage=1, slices=FINEST)),
    "stage 2": Strategy(lambda *of: dtrans.sharding(*of[:2], degree=of[2], stage=2, slices=FINEST)),
    "stage 3": Strategy(lambda *of: dtrans.sharding(*of[:2], degree=of[2], stage=3, slices=FINEST), share=18),
    "groups": Strategy(lambda *of: dtrans.sharding(*of[:2], degree=2, replicas=of[2], stage=3, slices=FINEST)),
    "by leaf": Strategy(lambda *of: dtrans.sharding(*of[:2], degree=of[2], stage=2, slices=WHOLE), share=4),
    "micro-steps": Strategy(
        lambda *of: dtrans.sharding(*of[:2], degree=of[2], stage=2, slices=FINEST, num_micro_batch=2),
        share=5,
        parts=2,
        narrow=True,
    ),
    "pserver": Strategy(
        lambda *of: dtrans.pserver(*of[:2], pservers=SERVERS, trainers=of[2], placement=FINE_BLOCKS), share=15
    ),
    "pipeline": Strategy(
        lambda *of: dtrans.pipeline(*of[:2], num_stages=2, num_micro_batch=of[2]), share=5, parts=1, narrow=True
    ),
    "pipelines": Strategy(
        lambda *of: dtrans.pipeline(*of[:2], num_stages=2, num_micro_batch=2, replicas=of[2]),
        share=5,
        parts=2,
        narrow=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A step, and a plan of it.

    Attributes:
      step: the step.
      strategy: of `STRATEGIES`.
      ranks: trainers, or micro-batches of a pipeline.
      rows: those that are traced.
      given: those that are verified.
      wide: numbers have 64 bits.
    """

    step: RandomStep
    strategy: str
    ranks: int
    rows: int
    given: int
    wide: bool

    def verify(self) -> str:
        """Verify the plan. Return `equal`, `incomplete` or `refused`."""
        with jax.enable_x64(self.wide):
            main, startup = self.step.trace(self.rows)
            try:
                plan = STRATEGIES[self.strategy].plan(main, startup, self.ranks)
                report = plan.verify(*make_batch(self.given), points=POINTS)
            except DtransError as error:
                assert str(error)
                return "refused"
        assert report.equal, str(report)
        return "equal" if report.complete else "incomplete"


@st.composite
def draw_cases(draw: st.DrawFn, name: str) -> Case:
    """Return the strategy of hypothesis that draws cases of a strategy of dtrans."""
    strategy = STRATEGIES[name]
    ranks = draw(st.sampled_from((3, 2, 5)))
    rows = draw(st.sampled_from((12, 35)))
    given = draw(st.sampled_from((rows, rows, 11)))
    if strategy.parts:
        rows, given = (n % 4 * strategy.parts * ranks or 2 * strategy.parts * ranks for n in (rows, given))
    step = draw(draw_steps(marked=strategy.narrow, most_readings=1 if strategy.narrow else 2))
    return Case(step, name, ranks, rows, given, draw(st.booleans()))


MINIMAL = RandomStep((), (), ("linear", 0), "sgd", (), "marked", one_state=False)
# shrunk inputs of faults that were found, and what was wrong
KEPT = {
    "a result that is an array of a batch: padded rows were handed out": Case(
        dataclasses.replace(MINIMAL, readings=(Reading("vector", 0, 0, "each"),)), "pserver", 3, 35, 35, wide=True
    ),
}


@pytest.mark.parametrize("fault", KEPT)
def test_faults_stay_mended(fault: str) -> None:
    assert KEPT[fault].verify() == "equal"


@pytest.mark.timeout(0 if EXAMPLES else 300)
@pytest.mark.parametrize("name", STRATEGIES)
def test_plans_of_random_steps_compute_them(name: str) -> None:
    found: Counter[str] = Counter()

    @settings(max_examples=(EXAMPLES or BY_DAY) * STRATEGIES[name].share // 100)
    @given(draw_cases(name))
    def check(case: Case) -> None:
        found[case.verify()] += 1

    if not EXAMPLES:
        check = seed(zlib.crc32(name.encode()))(check)
    check()
    print(f"{name}: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.items())))
    assert found["equal"] >= found["refused"], "most steps are refused, which says little"


@pytest.mark.soak
def test_a_fault_of_the_rewriter_is_shrunk_to_a_short_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of padding are counted: the shortest step that shows it has eleven equations."""
    monkeypatch.setattr(Shards, "pads", lambda self, size, row: False)

    @functools.cache
    def differs(case: Case) -> bool:
        try:
            case.verify()
        except AssertionError:
            return True
        return False

    limits = settings(max_examples=BY_DAY, database=None)
    case = find(draw_cases("nccl2"), differs, settings=limits, random=random.Random(0))
    main, _ = case.step.trace(case.rows)
    assert len(list(equations(main.jaxpr))) < 15, main.jaxpr
