"""Plans of random steps compute the step, or planning raises an error of dtrans.

`make test` draws the same steps for a strategy in each run. `make fuzz` draws different steps;
DTRANS_EXAMPLES is their number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import Phase, given, seed, settings, strategies as st
from random_steps import RandomStep, Reading, draw_steps, make_batch
from short_steps import ShortStep, shrink

import dtrans
from dtrans.errors import DtransError
from dtrans.ir import builder
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
    """Strategy that plans random steps.

    Attributes:
      plan: function of a traced step, a traced init and a number of ranks.
      share: percentage of the examples.
      parts: number of parts into which each rank divides its rows; other strategies take any number
        of rows.
      narrow: True if the strategy differentiates the loss itself. It refuses unmarked gradients,
        and most values that an update reads.
    """

    plan: Callable[[Any, Any, int], Any]
    share: int = 10
    parts: int = 0
    narrow: bool = False


STRATEGIES = {
    "nccl2": Strategy(lambda *of: dtrans.nccl2(*of[:2], trainers=of[2]), share=18),
    "stage 1": Strategy(lambda *of: dtrans.sharding(*of[:2], degree=of[2], stage=1, slices=FINEST)),
    "stage 2": Strategy(lambda *of: dtrans.sharding(*of[:2], degree=of[2], stage=2, slices=FINEST)),
    "stage 3": Strategy(
        lambda *of: dtrans.sharding(*of[:2], degree=of[2], stage=3, slices=FINEST), share=18
    ),
    "groups": Strategy(
        lambda *of: dtrans.sharding(*of[:2], degree=2, replicas=of[2], stage=3, slices=FINEST)
    ),
    "by leaf": Strategy(
        lambda *of: dtrans.sharding(*of[:2], degree=of[2], stage=2, slices=WHOLE), share=4
    ),
    "micro-steps": Strategy(
        lambda *of: dtrans.sharding(
            *of[:2], degree=of[2], stage=2, slices=FINEST, num_micro_batch=2
        ),
        share=5,
        parts=2,
        narrow=True,
    ),
    "pserver": Strategy(
        lambda *of: dtrans.pserver(
            *of[:2], pservers=SERVERS, trainers=of[2], placement=FINE_BLOCKS
        ),
        share=15,
    ),
    "pipeline": Strategy(
        lambda *of: dtrans.pipeline(*of[:2], num_stages=2, num_micro_batch=of[2]),
        share=5,
        parts=1,
        narrow=True,
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
    """Step with a plan.

    Attributes:
      step: the step.
      strategy: key of `STRATEGIES`.
      ranks: trainers, or micro-batches of a pipeline.
      rows: number of rows of the traced batch.
      given: number of rows of the verified batch.
      wide: True if numbers have 64 bits.
    """

    step: RandomStep | ShortStep
    strategy: str
    ranks: int
    rows: int
    given: int
    wide: bool

    def verify(self) -> str:
        """Verify the plan. Return `equal`, `incomplete` or `refused`."""
        with jax.enable_x64(self.wide):
            try:
                main, startup = self.step.trace(self.rows)
                plan = STRATEGIES[self.strategy].plan(main, startup, self.ranks)
                report = plan.verify(*make_batch(self.given), points=POINTS)
            except DtransError as error:
                assert str(error)
                return "refused"
        assert report.equal, str(report)
        return "equal" if report.complete else "incomplete"


@st.composite
def draw_cases(draw: st.DrawFn, name: str) -> Case:
    """Return the hypothesis strategy that draws cases of a strategy of dtrans."""
    strategy = STRATEGIES[name]
    ranks = draw(st.sampled_from((3, 2, 5)))
    rows = draw(st.sampled_from((12, 35)))
    given = draw(st.sampled_from((rows, rows, 11)))
    if strategy.parts:
        rows, given = (
            n % 4 * strategy.parts * ranks or 2 * strategy.parts * ranks for n in (rows, given)
        )
    step = draw(draw_steps(marked=strategy.narrow, most_readings=1 if strategy.narrow else 2))
    return Case(step, name, ranks, rows, given, draw(st.booleans()))


MINIMAL = RandomStep((), (), ("linear", 0), "sgd", (), "marked", one_state=False)
# shrunk inputs of faults that were found, and a description of each fault
KEPT = {
    "a result that is an array of a batch: padded rows were handed out": Case(
        dataclasses.replace(MINIMAL, readings=(Reading("vector", 0, 0, "each"),)),
        "pserver",
        3,
        35,
        35,
        wide=True,
    ),
    "a trainer sends a constant: it was looked up among variables": Case(
        dataclasses.replace(MINIMAL, leaves=("scale",), readings=(Reading("rows", 3, 4, "rate"),)),
        "pserver",
        5,
        35,
        35,
        wide=True,
    ),
    "a penalty that the first micro-step has alone: it was taken for a gradient that every rank "
    "has": Case(
        dataclasses.replace(MINIMAL, leaves=("scale",), loss=("sum", 0), anchored=True),
        "micro-steps",
        3,
        18,
        18,
        wide=False,
    ),
    "a loop of the padded step reads all of a leaf: other slices of it were taken than ranks "
    "hold": Case(
        dataclasses.replace(
            MINIMAL, leaves=("layers",), instructions=(("loop", 0, 0, 33),), anchored=True
        ),
        "stage 3",
        2,
        35,
        35,
        wide=False,
    ),
}


@pytest.mark.parametrize("fault", KEPT)
def test_faults_stay_mended(fault: str) -> None:
    assert KEPT[fault].verify() == "equal"


def name_failure(case: Case) -> str:
    """Return the type of the error that a case raises; an empty text without an error."""
    try:
        case.verify()
    except Exception as error:  # report any exception, since a user would see it
        return type(error).__name__
    return ""


def describe(case: Case) -> str:
    """Return a text with the short step of a case, and its origin."""
    return f"{case.step.length(case.rows)} equations: {case.step.short(case.rows)}\n{case}"


@pytest.mark.timeout(0 if EXAMPLES else 300)
@pytest.mark.parametrize("name", STRATEGIES)
def test_plans_of_random_steps_compute_them(name: str) -> None:
    found: Counter[str] = Counter()
    failures: list[Case] = []

    @settings(
        max_examples=(EXAMPLES or BY_DAY) * STRATEGIES[name].share // 100, phases=[Phase.generate]
    )
    @given(draw_cases(name))
    def check(case: Case) -> None:
        try:
            found[case.verify()] += 1
        except Exception:
            failures.append(case)
            raise

    if not EXAMPLES:
        check = seed(zlib.crc32(name.encode()))(check)
    try:
        check()
    except Exception as error:
        if failures:
            failure = name_failure(failures[0])
            fails = lambda case: name_failure(case) == failure
            error.add_note(describe(shrink(failures[0], fails, whole=not STRATEGIES[name].narrow)))
        raise
    print(f"{name}: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.items())))
    assert found["equal"] >= found["refused"], "most steps are refused, which says little"
    # a plan that differs only where ties decide is incomplete
    assert EXAMPLES or not found["incomplete"]


# -- shrinking -------------------------------------------------------------------------------------

BUSY = RandomStep(
    leaves=("bias", "layers"),
    instructions=(
        ("loop", 0, 0, 0),
        ("normalise", 0, 0, 0),
        ("noise", 0, 1, 0),
        ("custom", 0, 0, 4),
        ("mask", 0, 0, 0),
        ("combine", 0, 0, 2),
    ),
    loss=("masked", 0),
    optimizer="adamw",
    readings=(Reading("rows", 0, 1, "mean"), Reading("vector", 0, 0, "each")),
    gradient="plain",
    one_state=True,
    anchored=True,
)
# without batch statistics, which micro-batches cannot exchange
BUSY_IN_PARTS = dataclasses.replace(
    BUSY, instructions=BUSY.instructions[::3], loss=("error", 0), readings=(), gradient="marked"
)
# a strategy, a file, a text of this file, and the faulty text
PLANTED = {
    "each trainer normalises by its own statistics": (
        "nccl2", "engine/writer.py",
        "self.define_outputs(eqn, [PARTIAL] * len(eqn.outvars), values)",
        "self.define_outputs(eqn, way.outs, values)",
    ),
    "trainers draw the same mask": (
        "nccl2", "engine/pieces.py", "b.call(times(local), self.index())", "b.call(times(0), "
"self.index())"
    ),
    "a replicated value is added up": (
        "stage 1", "engine/values.py", "(scaled,) = self.b.call(on_first, value, "
"self.pieces.index())", "scaled = value"
    ),
    "what ranks gather is doubled": (
        "stage 3", "zero/all_gather.py", "sent.append(x)", "sent += b.call(lambda x: 2 * x, x)"
    ),
    "groups add up nothing": (
        "groups", "zero/reduce_scatter.py",
        "return self._sum(bucket.name, slices, (options.slices.replica_axis_name,))",
        "return slices",
    ),
    "a trainer's gradients are left out": (
        "pserver", "slicing/mean.py", "functools.reduce(jax.lax.add, grads)",
        "functools.reduce(jax.lax.add, grads[1:])",
    ),
    "a micro-batch counts twice": (
        "pipeline", "pipeline_parallel/stage_programs.py", "return x + y.astype(x.dtype)\n",
        "return x + 2 * y.astype(x.dtype)\n",
    ),
}  # fmt: skip


@contextlib.contextmanager
def plant(file: str, old: str, new: str) -> Iterator[None]:
    """Run a changed text of a function, in all modules that have imported the function."""
    name = f"dtrans.{file.removesuffix('.py').replace('/', '.')}"
    module = importlib.import_module(name)
    path = str(module.__file__)
    source = Path(path).read_text()
    assert source.count(old) == 1
    changed = {**vars(module)}
    exec(compile(source.replace(old, new), path, "exec"), changed)
    pairs = _pairs_of_functions(name, vars(module), changed)
    ((now, other),) = [pair for pair in pairs if pair[0].__code__ != pair[1].__code__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(now, "__code__", other.__code__)
        _forget_traces()
        yield
    _forget_traces()


def _forget_traces() -> None:
    """Clear the caches of traced functions, whose keys do not depend on the text of a function."""
    jax.clear_caches()
    builder._traced.cache_clear()


def _pairs_of_functions(
    module: str, names: Mapping[str, Any], changed: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Yield the functions and methods of a module, each with its changed version."""
    for name, value in list(names.items()):
        now, other = (inspect.unwrap(getattr(x, "__func__", x)) for x in (value, changed.get(name)))
        if getattr(now, "__module__", None) != module or now is other:
            continue
        if inspect.isfunction(now):
            yield now, other
        elif inspect.isclass(now):
            yield from _pairs_of_functions(module, vars(now), vars(other))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_is_shrunk_to_a_short_step(fault: str) -> None:
    strategy, *texts = PLANTED[fault]
    step = BUSY_IN_PARTS if STRATEGIES[strategy].narrow else BUSY
    case = Case(step, strategy, 3, 36, 36, wide=True)
    with plant(*texts):
        assert name_failure(case) == "AssertionError"
        fails = lambda other: name_failure(other) == "AssertionError"
        case = shrink(case, fails, whole=not STRATEGIES[strategy].narrow)
    assert case.step.length(case.rows) < 15, describe(case)
    assert name_failure(case) == "", "the step fails without the fault"
