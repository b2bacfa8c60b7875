"""Effect of delayed gradients on training: `python benchmarks/delays.py`.

`--write` writes docs/delays.md and its plot.

A delay counts the updates with other trainers' gradients between a trainer's read of the parameters
and the arrival of its gradient. Clocks do not matter: trainers step in a fixed order, which
determines the delays, so that results can be repeated. The exception is a communicator for which
steps do not wait. Its runs differ, and have a separate table.

Servers and trainers run in threads of this process, and communicate over loopback. One job trains a
perceptron for each seed: every array has one row per seed, and rows do not interact.

To add a mode, add a line to `MODES` with its options of `DistributeTranspilerConfig`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
import itertools
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.compilation_cache import compilation_cache
from jax.typing import ArrayLike

import dtrans
from dtrans.endpoints import ReservedEndpoints
from examples import digits


SEEDS = (0, 1, 2, 3, 4)
GRID_SEEDS = (5, 6, 7, 8, 9)  # seeds on which lambda, the strength of delay compensation, is chosen
HIDDEN = 32
ROWS = 16  # examples in a gradient
# number of updates, each with one gradient; a multiple of 3, 8, 12 and 16, the numbers of trainers
UPDATES = 1776
RATE = 0.15
RATES = (RATE, 0.05, 0.02)  # learning rates of runs whose steps do not wait for the communicator
TIMES = 3  # number of runs with a communicator, for each order of turns and learning rate
DECAY = 0.95  # decay m of the adaptive variant
EVERY = 72  # updates between two points of a curve
DEADLINE = 120.0
DOCS = Path(__file__).resolve().parent.parent / "docs"

Params = dict[str, jax.Array]
Config = Mapping[str, Any]


# -- the model, one for each seed ------------------------------------------------------------------


def init_one(seed: jax.Array) -> Params:
    k1, k2 = jax.random.split(jax.random.key(seed))
    return {
        "w1": jax.random.normal(k1, (digits.PIXELS, HIDDEN)) / digits.PIXELS**0.5,
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(k2, (HIDDEN, digits.CLASSES)) / HIDDEN**0.5,
        "b2": jnp.zeros(digits.CLASSES),
    }


def logits_one(params: Params, x: ArrayLike) -> jax.Array:
    return jnp.tanh(jnp.asarray(x) @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss_one(params: Params, x: ArrayLike, y: ArrayLike) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits_one(params, x), y).mean()


def loss_fn(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the sum of the mean losses of all seeds, which are dimension 1 of the batch.

    The gradient of a seed's parameters is the gradient of that seed's loss.
    """
    return jnp.sum(jax.vmap(loss_one, in_axes=(0, 1, 1))(params, x, y))


@functools.cache
def data() -> digits.Digits:
    return digits.load()


@functools.cache
def batches(seeds: tuple[int, ...], count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return `count` batches of `ROWS` examples for each seed, in the seed's order."""

    def of(seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        epoch = 0
        while True:
            yield from digits.batches(data(), seed, epoch, ROWS)
            epoch += 1

    made = []
    for each in itertools.islice(zip(*map(of, seeds), strict=True), count):
        made.append(
            (np.stack([x for x, _ in each], axis=1), np.stack([y for _, y in each], axis=1))
        )
    return made


@jax.jit
def train_loss(params: Params) -> jax.Array:
    """Return the loss on all training images, for each seed."""
    return jax.vmap(loss_one, in_axes=(0, None, None))(params, data().x, data().y)


@jax.jit
def test_accuracy(params: Params) -> jax.Array:
    """Return the accuracy on the test images, for each seed."""
    scores = jax.vmap(logits_one, in_axes=(0, None))(params, data().test_x)
    return jnp.mean(jnp.argmax(scores, -1) == data().test_y, axis=1)


# -- modes and delays ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mode:
    """Mode of training.

    Attributes:
      name: its name in the table.
      config: options of `DistributeTranspilerConfig`; None for one device, without a job.
      few: True to run it with 3 trainers only.
      grid: candidates for lambda, the strength of delay compensation.
    """

    name: str
    config: Config | None
    few: bool = False
    grid: tuple[float, ...] = ()

    @property
    def together(self) -> bool:
        """True if trainers are synchronous: all of them step in each turn."""
        return self.config is not None and self.config.get("sync_mode", True)

    def strong(self, strength: float) -> Mode:
        """Return the same mode with another lambda."""
        return dataclasses.replace(self, config={**(self.config or {}), "dc_asgd_lambda": strength})


@dataclasses.dataclass(frozen=True)
class Delay:
    """Order in which trainers step, which determines the delays of gradients.

    Attributes:
      name: its name in the table.
      trainers: the number of trainers.
      slow: the last trainer has every `slow`th turn, and the other trainers share the remaining
        turns. With None, trainers step in turn.
      rate: the learning rate.
    """

    name: str
    trainers: int
    slow: int | None = None
    rate: float = RATE

    def order(self, updates: int) -> list[int]:
        """Return the trainer of each turn."""
        if self.slow is None:
            return [t % self.trainers for t in range(updates)]
        last, slow = self.trainers - 1, self.slow
        return [last if t % slow == slow - 1 else (t - t // slow) % last for t in range(updates)]

    @property
    def oldest(self) -> int:
        """Delay of the gradients of the last trainer."""
        return (self.slow or self.trainers) - 1

    def of_gradients(self, updates: int) -> list[int]:
        """Return the delay of each gradient."""
        seen: dict[int, int] = {}
        found = []
        for t, k in enumerate(self.order(updates)):
            found.append(t - seen.get(k, -1) - 1)
            seen[k] = t
        return found


ONE_DEVICE = Mode("one device", None)
SYNC = Mode("synchronous, 3 trainers", {"sync_mode": True})
ASYNC = Mode("asynchronous", {"sync_mode": False})
DC = {"sync_mode": False, "enable_dc_asgd": True}
CONSTANT = Mode("DC-ASGD, constant", DC, grid=(1.0, 4.0, 16.0, 64.0, 256.0))
ADAPTIVE = Mode("DC-ASGD, adaptive", {**DC, "dc_asgd_decay": DECAY}, grid=(0.5, 1.0, 2.0, 4.0, 8.0))
BESIDE = {"sync_mode": False, "runtime_split_send_recv": True}
HALF = Mode("half-asynchronous", {**BESIDE, "half_async": True}, few=True)
GEO = {"sync_mode": False, "geo_sgd_mode": True, "geo_sgd_block_on_pull": True}
OFTEN = Mode("GEO-SGD, every 3 steps", {**GEO, "geo_sgd_need_push_nums": 3}, few=True)
SELDOM = Mode("GEO-SGD, every 10 steps", {**GEO, "geo_sgd_need_push_nums": 10}, few=True)
MODES = (ASYNC, HALF, OFTEN, SELDOM, CONSTANT, ADAPTIVE)
COMMUNICATOR = Mode("communicator", BESIDE)  # steps do not wait for the communicator

IN_TURN = Delay("3 trainers in turn", 3)
ONE_SLOW = Delay("3 trainers, one slow", 3, slow=20)
HEAVY = Delay("16 trainers in turn", 16)
EIGHT = Delay("8 trainers in turn", 8)
TWELVE = Delay("12 trainers in turn", 12)
GENTLE = Delay("16 trainers in turn, rate 0.1", 16, rate=0.1)
DELAYS = (IN_TURN, ONE_SLOW, EIGHT, TWELVE, HEAVY, GENTLE)


# -- one run ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """Result of one run, for each seed.

    Attributes:
      loss, accuracy: training loss and test accuracy of the servers' final parameters.
      at: numbers of updates, e.g. 0, 72, 144.
      curve: the training loss after each of these numbers, for a trainer's newest parameters.
    """

    loss: np.ndarray
    accuracy: np.ndarray
    at: np.ndarray
    curve: np.ndarray


class Roles:
    """Threads, one for each role of a job. A thread runs its functions in order."""

    def __init__(self, names: Sequence[Any]) -> None:
        self._pools = {n: ThreadPoolExecutor(1) for n in names}

    def __enter__(self) -> Roles:
        return self

    def __exit__(self, *_: Any) -> None:
        for pool in self._pools.values():
            pool.shutdown()

    def start(self, name: Any, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._pools[name].submit(fn, *args)

    def all(self, names: Sequence[Any], fn: Callable[[Any], Any]) -> list[Any]:
        """Call `fn` with each name, concurrently in the thread of this name; return the results."""
        return [f.result() for f in [self.start(n, fn, n) for n in names]]


ENDPOINTS = ReservedEndpoints()  # endpoints of all jobs, reserved until this process ends


def train(
    mode: Mode,
    delay: Delay,
    seeds: tuple[int, ...] = SEEDS,
    updates: int = UPDATES,
    pservers: int = 2,
) -> Run:
    """Train every seed on the same examples in the same order, for every mode.

    A synchronous step of n trainers is one update by the mean of their gradients. It replaces n
    asynchronous updates, so it has n times the learning rate.
    """
    given = batches(seeds, updates)
    first = jnp.asarray(seeds)
    tx = optax.sgd(delay.rate * (delay.trainers if mode.together else 1))
    step = dtrans.make_train_step(loss_fn, tx)

    def init(seeds: jax.Array) -> tuple[Params, Any]:
        params = jax.vmap(init_one)(seeds)
        return params, tx.init(params)

    record = _Record(updates)
    if mode.config is None:
        params, state = init(first)
        jitted = jax.jit(step)
        for i, batch in enumerate(given):
            params, state, _ = jitted(params, state, *batch)
            record(i + 1, params)
        return record.ended(params)

    main = dtrans.trace(step, *jax.eval_shape(init, first), *given[0])
    startup = dtrans.trace(init, first)
    endpoints = ENDPOINTS.choose(pservers)
    trainers = range(delay.trainers)

    def role(k: int) -> dtrans.DistributeTranspiler:
        config = dtrans.DistributeTranspilerConfig(**(mode.config or {}))
        t = dtrans.DistributeTranspiler(config)
        t.transpile(k, main, ",".join(endpoints), delay.trainers, config.sync_mode, startup)
        return t

    def serve(endpoint: str) -> dict[str, Any]:
        with dtrans.Executor(deadline=DEADLINE) as exe:
            pserver, pserver_startup = role(0).get_pserver_programs(endpoint)
            return dict(exe.run(pserver, exe.run(pserver_startup, first)))

    with Roles([*endpoints, *trainers]) as roles:
        served = [roles.start(e, serve, e) for e in endpoints]
        with contextlib.ExitStack() as stack:
            own = {k: role(k) for k in trainers}
            exes = {k: stack.enter_context(dtrans.Executor(deadline=DEADLINE)) for k in trainers}
            programs = {k: t.get_trainer_program() for k, t in own.items()}
            # all trainers fetch the initial parameters before any trainer steps
            fetched = roles.all(
                trainers, lambda k: exes[k].run(own[k].get_trainer_startup_program(), first)
            )
            # number of the program's arguments before the batch
            count = len(programs[0].args) - len(given[0])
            held = {k: (x,) if count == 1 else x for k, x in enumerate(fetched)}
            turns: list[tuple[int, ...]] = [(k,) for k in delay.order(updates)]
            if mode.together:
                turns = [tuple(trainers)] * (updates // delay.trainers)

            def take(mine: Mapping[int, Any], k: int) -> Any:
                return exes[k].run(programs[k], *held[k], *mine[k])

            done = 0
            for turn in turns:
                mine = dict(zip(turn, given[done:], strict=False))
                made = roles.all(turn, functools.partial(take, mine))
                held.update((k, x[:count]) for k, x in zip(turn, made, strict=True))
                done += len(turn)
                record(done, held[turn[0]][0])
        state = {n: x for f in served for n, x in f.result().items()}
    return record.ended({n: state[f"params/{n}"] for n in held[0][0]})


class _Record:
    """Training losses of a run, recorded every `EVERY` updates."""

    def __init__(self, updates: int) -> None:
        self._next, self._at, self._curve = 0, list[int](), list[np.ndarray]()

    def __call__(self, done: int, params: Params) -> None:
        if done >= self._next:
            self._at.append(done)
            self._curve.append(np.asarray(train_loss(params)))
            self._next = done + EVERY

    def ended(self, params: Params) -> Run:
        loss, accuracy = np.asarray(train_loss(params)), np.asarray(test_accuracy(params))
        return Run(loss, accuracy, np.asarray(self._at), np.stack(self._curve))


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """Cache compiled functions in a folder, so that functions of several roles are compiled once."""
    options = {
        "jax_compilation_cache_dir": None,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    with tempfile.TemporaryDirectory(prefix="dtrans-") as folder:
        for name, value in options.items():
            jax.config.update(name, folder if value is None else value)
        compilation_cache.reset_cache()
        try:
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()


# -- all of them -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Results:
    """Results of all runs.

    Attributes:
      runs: maps the names of delay and mode to the run.
      beside: maps the name of the delay to the runs of `COMMUNICATOR`.
      tried: mean loss by mode and lambda, on `GRID_SEEDS`.
      chosen: lambda by mode.
    """

    runs: Mapping[tuple[str, str], Run]
    beside: Mapping[str, Sequence[Run]]
    tried: Mapping[str, Mapping[float, float]]
    chosen: Mapping[str, float]


def alone(rate: float) -> Delay:
    return Delay(f"rate {rate}", 1, rate=rate)


def three(rate: float) -> Delay:
    return Delay(f"rate {rate}", 3, rate=rate)


def at_rate(delay: Delay, rate: float) -> Delay:
    """Return the same order of turns with another learning rate."""
    return (
        delay
        if rate == delay.rate
        else dataclasses.replace(delay, name=f"{delay.name}, rate {rate}", rate=rate)
    )


def everything() -> Results:
    """Choose lambda for each mode under the heavy delay, on other seeds, and run all modes."""
    tried: dict[str, dict[float, float]] = {}
    chosen: dict[str, float] = {}
    runs: dict[tuple[str, str], Run] = {}
    for mode in (m for m in MODES if m.grid):
        losses = tried[mode.name] = {}
        for strength in mode.grid:
            run = told(
                f"{mode.name}, lambda {strength:g}", mode.strong(strength), HEAVY, GRID_SEEDS
            )
            losses[strength] = float(np.mean(run.loss))
        chosen[mode.name] = min(losses.items(), key=lambda x: np.nan_to_num(x[1], nan=np.inf))[0]
    for rate in sorted({d.rate for d in DELAYS}, reverse=True):
        for mode, delay in ((ONE_DEVICE, alone(rate)), (SYNC, three(rate))):
            runs[delay.name, mode.name] = told(f"{mode.name}, {delay.name}", mode, delay)
    for delay, mode in itertools.product(DELAYS, MODES):
        if mode.few and delay.trainers > 3:
            continue
        with_lambda = mode.strong(chosen[mode.name]) if mode.grid else mode
        runs[delay.name, mode.name] = told(f"{mode.name}, {delay.name}", with_lambda, delay)
    beside: dict[str, list[Run]] = {}
    for rate, delay in itertools.product(RATES, (IN_TURN, ONE_SLOW)):
        slower = at_rate(delay, rate)
        for mode, needed in ((SYNC, three(rate)), (ASYNC, slower)):
            if (needed.name, mode.name) not in runs:
                runs[needed.name, mode.name] = told(f"{mode.name}, {needed.name}", mode, needed)
        what = f"{COMMUNICATOR.name}, {slower.name}"
        beside[slower.name] = [told(what, COMMUNICATOR, slower) for _ in range(TIMES)]
    return Results(runs, beside, tried, chosen)


def told(what: str, mode: Mode, delay: Delay, seeds: tuple[int, ...] = SEEDS) -> Run:
    """Run a mode, and print a line about it to the standard error."""
    start = time.monotonic()
    run = train(mode, delay, seeds)
    line = f"{what}: loss {_number(float(np.mean(run.loss)))}, {time.monotonic() - start:.1f} s"
    print(line, file=sys.stderr, flush=True)
    return run


# -- what is shown ---------------------------------------------------------------------------------


def _number(x: float) -> str:
    if not np.isfinite(x):
        return "not finite"
    return f"{x:.4f}" if x < 1 else f"{x:.1f}"


def _spread(values: np.ndarray, show: Callable[[float], str]) -> str:
    lost = int(np.sum(~np.isfinite(values)))
    if lost:
        return f"not finite for {lost} of {len(values)} seeds"
    return f"{show(values.mean())} ({show(values.min())} to {show(values.max())})"


def within(run: Run, reference: Run) -> bool:
    """Return True if a run's mean loss lies between the extreme losses of another run's seeds."""
    return bool(reference.loss.min() <= np.mean(run.loss) <= reference.loss.max())


def _line(mode: str, run: Run, sync: Run | None, plain: Run | None) -> str:
    cells = [mode, _spread(run.loss, _number), _spread(run.accuracy, lambda x: f"{100 * x:.1f} %")]
    cells.append("" if sync is None else "yes" if within(run, sync) else "no")
    cells.append(
        "" if plain is None else f"{int(np.sum(run.loss < plain.loss))} of {len(run.loss)}"
    )
    return f"| {' | '.join(cells)} |"


def table(results: Results) -> str:
    """Return the table of all runs, in Markdown."""
    lines = [
        "| mode | training loss | test accuracy | in sync's spread | seeds with less loss than "
        "async |",
        "| --- | --- | --- | --- | --- |",
    ]
    for rate in sorted({d.rate for d in DELAYS}, reverse=True):
        name = alone(rate).name
        lines.append(f"| **no delay, {name}** | | | | |")
        for mode in (ONE_DEVICE, SYNC):
            lines.append(_line(mode.name, results.runs[name, mode.name], None, None))
        for delay in (d for d in DELAYS if d.rate == rate):
            old = delay.of_gradients(UPDATES)
            lines.append(
                f"| **{delay.name}: delay {np.mean(old):.1f}, at most {max(old)}** | | | | |"
            )
            for mode in (m for m in MODES if (delay.name, m.name) in results.runs):
                run, plain = (
                    results.runs[delay.name, mode.name],
                    results.runs[delay.name, ASYNC.name],
                )
                sync = results.runs[name, SYNC.name]
                lines.append(_line(mode.name, run, sync, None if mode is ASYNC else plain))
    return "\n".join(lines)


def table_beside(results: Results) -> str:
    """Return the table of runs whose steps do not wait, in Markdown."""
    lines = [
        f"| rate | trainers | {SYNC.name} | {ASYNC.name} | {COMMUNICATOR.name}, {TIMES} runs |",
        "| --- | --- | --- | --- | --- |",
    ]
    for rate, delay in itertools.product(RATES, (IN_TURN, ONE_SLOW)):
        slower = at_rate(delay, rate).name
        sync, plain = results.runs[three(rate).name, SYNC.name], results.runs[slower, ASYNC.name]
        found = ", ".join(_number(run.loss.mean()) for run in results.beside[slower])
        cells = [
            f"{rate}",
            delay.name,
            _spread(sync.loss, _number),
            _number(plain.loss.mean()),
            found,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def grid(results: Results) -> str:
    """Return the table of the losses by which lambda was chosen, in Markdown."""
    lines = ["| mode | lambda: mean training loss |", "| --- | --- |"]
    for mode, tried in results.tried.items():
        cells = [f"**{x:g}**" if x == results.chosen[mode] else f"{x:g}" for x in tried]
        lines.append(
            f"| {mode} | "
            f"{', '.join(f'{c}: {_number(v)}' for c, v in zip(cells, tried.values(), strict=True))} |"
        )
    return "\n".join(lines)


def plot(results: Results) -> str:
    """Return the curves of all runs as SVG; equal results give equal text."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(
        {"svg.hashsalt": "dtrans", "svg.fonttype": "none", "path.simplify": True}
    ):
        figure = Figure(figsize=(10, 6), layout="constrained")
        axes = figure.subplots(2, 3, sharex=True).flat
        styles = {ONE_DEVICE.name: ("black", "--"), SYNC.name: ("tab:gray", "-")}
        colours = (
            "tab:red",
            "tab:orange",
            "tab:purple",
            "tab:brown",
            "tab:blue",
            "tab:green",
            "tab:pink",
            "tab:cyan",
        )
        styles |= {m.name: (c, ":" if m.few else "-") for m, c in zip(MODES, colours, strict=False)}
        for panel, delay in zip(axes, DELAYS, strict=True):
            reference = alone(delay.rate).name
            for mode, (colour, style) in styles.items():
                run = results.runs.get((delay.name, mode)) or results.runs.get((reference, mode))
                if run is None:
                    continue
                examples = run.at * ROWS / 1000
                panel.plot(
                    examples, run.curve.mean(1), style, color=colour, linewidth=1.2, label=mode
                )
                panel.fill_between(
                    examples,
                    run.curve.min(1),
                    run.curve.max(1),
                    color=colour,
                    alpha=0.15,
                    linewidth=0,
                )
            panel.set(title=delay.name, yscale="log")
            panel.title.set_fontsize("medium")
            panel.grid(alpha=0.3)
        figure.supxlabel("thousands of examples")
        figure.supylabel("training loss")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside upper center", ncols=(len(labels) + 1) // 2, frameon=False
        )
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def findings(results: Results) -> str:
    """Return the findings in Markdown.

    Raises:
      ValueError: a finding does not hold for these results, and has to be rewritten.
    """
    of = lambda delay, mode: results.runs[delay.name, mode.name]
    mean = lambda delay, mode: float(of(delay, mode).loss.mean())
    better = lambda delay, mode: int(np.sum(of(delay, mode).loss < of(delay, ASYNC).loss))
    quarter = lambda mode: float(
        of(GENTLE, mode).curve[np.searchsorted(of(GENTLE, mode).at, UPDATES // 4)].mean()
    )
    first = lambda delay, mode: float(of(delay, mode).curve[1].mean())
    at = lambda delay, mode: _number(mean(delay, mode))
    sync, plain, every = of(three(RATE), SYNC), of(alone(RATE), ONE_DEVICE), len(SEEDS)
    few = [of(d, m) for d in (IN_TURN, ONE_SLOW) for m in MODES if (d.name, m.name) in results.runs]
    heavy = [of(HEAVY, m).loss for m in (CONSTANT, ADAPTIVE)]
    said: list[tuple[str, Any]] = []
    say = lambda holds, *lines: said.append((" ".join(lines), holds))
    say(
        all(within(run, sync) for run in few),
        "**Three trainers.** In both settings, *in turn* and *one slow*, every mode ends within",
        f"the spread of the synchronous seeds ({_number(sync.loss.min())} to "
        f"{_number(sync.loss.max())}). Asynchronous",
        f"training ends at {at(IN_TURN, ASYNC)} in turn, and at {at(ONE_SLOW, ASYNC)} with one "
        "slow trainer. There is",
        "nothing to compensate, and compensation changes little.",
    )
    say(
        all(np.array_equal(of(d, HALF).curve, of(d, ASYNC).curve) for d in (IN_TURN, ONE_SLOW))
        and all(np.array_equal(of(d, HALF).loss, of(d, ASYNC).loss) for d in (IN_TURN, ONE_SLOW)),
        "**Half-asynchronous.** With one thread for each trainer, this is asynchronous training: "
        "the losses of all",
        "seeds are equal to the bit, during training and at the end.",
    )
    say(
        all(first(d, SELDOM) > first(d, OFTEN) > first(d, ASYNC) for d in (IN_TURN, ONE_SLOW))
        and all(within(of(d, m), sync) for d in (IN_TURN, ONE_SLOW) for m in (SELDOM, OFTEN)),
        "**GEO-SGD.** Less frequent exchanges increase the loss at first. After "
        f"{of(IN_TURN, ASYNC).at[1]} gradients of all trainers in turn, the loss",
        f"of asynchronous training is {first(IN_TURN, ASYNC):.2f}. With an exchange every 3 steps, "
        f"it is {first(IN_TURN, OFTEN):.2f},",
        f"and every 10 steps {first(IN_TURN, SELDOM):.2f}. These are losses of the "
        "trainer that stepped last. At the end, less frequent exchanges do not increase the loss:",
        f"it is {at(IN_TURN, SELDOM)} (every 10 steps) and {at(IN_TURN, OFTEN)} (every 3 steps) "
        "in turn, and",
        f"{at(ONE_SLOW, SELDOM)} and {at(ONE_SLOW, OFTEN)} with one slow trainer.",
    )
    say(
        mean(EIGHT, ASYNC) > sync.loss.max()
        and max(better(EIGHT, CONSTANT), better(EIGHT, ADAPTIVE)) <= every // 2,
        "**Eight trainers in turn.** Asynchronous training is worse than synchronous training: it "
        f"ends at {at(EIGHT, ASYNC)}.",
        f"DC-ASGD is *not* better: it ends at {at(EIGHT, CONSTANT)} (constant) and "
        f"{at(EIGHT, ADAPTIVE)} (adaptive).",
        f"For {better(EIGHT, CONSTANT)} (constant) and {better(EIGHT, ADAPTIVE)} (adaptive) of "
        f"{every} seeds, its loss is lower than without compensation.",
    )
    say(
        better(TWELVE, CONSTANT) == better(TWELVE, ADAPTIVE) == every,
        f"**Twelve trainers in turn.** Asynchronous training ends at {at(TWELVE, ASYNC)}, DC-ASGD "
        f"at {at(TWELVE, CONSTANT)} (constant)",
        f"and {at(TWELVE, ADAPTIVE)} (adaptive). For every seed, the loss is lower than "
        "without compensation.",
    )
    say(
        of(HEAVY, ASYNC).loss.min() > np.log(digits.CLASSES)
        and np.max(heavy) < 0.2
        and np.min(heavy) > plain.loss.mean(),
        "**Sixteen trainers in turn.** Asynchronous training diverges: it ends at "
        f"{at(HEAVY, ASYNC)}, while a uniform guess has a loss of 2.3. DC-ASGD",
        f"ends at {at(HEAVY, CONSTANT)} (constant) and {at(HEAVY, ADAPTIVE)} (adaptive). Training "
        "on one device, which has no delay, ends at",
        f"{_number(plain.loss.mean())}.",
    )
    say(
        max(better(GENTLE, CONSTANT), better(GENTLE, ADAPTIVE)) < every
        and max(quarter(CONSTANT), quarter(ADAPTIVE)) < quarter(ASYNC) / 2,
        f"**A lower rate is a remedy too.** At a rate of {GENTLE.rate}, asynchronous training with "
        f"sixteen trainers ends at {at(GENTLE, ASYNC)}.",
        "DC-ASGD is better during training: after a quarter of the examples, its loss is "
        f"{quarter(CONSTANT):.2f} (constant)",
        f"and {quarter(ADAPTIVE):.2f} (adaptive), against {quarter(ASYNC):.2f} without "
        "compensation. At the end it is not better:",
        f"{at(GENTLE, CONSTANT)} (constant) and {at(GENTLE, ADAPTIVE)} (adaptive).",
        f"For {better(GENTLE, CONSTANT)} (constant) and {better(GENTLE, ADAPTIVE)} (adaptive) of "
        f"{every} seeds, the loss is lower than without compensation.",
    )
    return _checked(said)


def findings_beside(results: Results) -> str:
    """Return the findings about steps that do not wait, in Markdown.

    They are limited to statements on which several runs agreed.

    Raises:
      ValueError: a finding does not hold for these results.
    """
    sync = {rate: results.runs[three(rate).name, SYNC.name] for rate in RATES}
    plain = {
        rate: [results.runs[at_rate(d, rate).name, ASYNC.name] for d in (IN_TURN, ONE_SLOW)]
        for rate in RATES
    }
    found = {
        rate: [results.beside[at_rate(d, rate).name] for d in (IN_TURN, ONE_SLOW)] for rate in RATES
    }
    means = {
        rate: [float(run.loss.mean()) for runs in found[rate] for run in runs] for rate in RATES
    }
    fast, between, slow = RATES
    said: list[tuple[str, Any]] = [
        (
            f"At {slow} every run ends within the spread of the synchronous seeds"
            f" ({_number(sync[slow].loss.min())} to {_number(sync[slow].loss.max())}):"
            f" {_number(min(means[slow]))} to {_number(max(means[slow]))}.",
            all(within(run, sync[slow]) for runs in found[slow] for run in runs),
        ),
        (
            f"At {fast} no run ends within this spread. Every run ends above asynchronous training:"
            f" at {_number(min(means[fast]))} to {_number(max(means[fast]))}. Asynchronous training"
            f" ends at {' and '.join(_number(run.loss.mean()) for run in plain[fast])}.",
            not any(within(run, sync[fast]) for runs in found[fast] for run in runs)
            and all(
                np.mean(run.loss) > old.loss.mean()
                for runs, old in zip(found[fast], plain[fast], strict=True)
                for run in runs
            ),
        ),
        (
            f"At {between} the result depends on the run: here,"
            f" {sum(within(run, sync[between]) for runs in found[between] for run in runs)}"
            f" of {len(means[between])} runs end within the spread.",
            True,
        ),
    ]
    return _checked(said)


def _checked(said: Sequence[tuple[str, Any]]) -> str:
    """Return sentences as a Markdown list; raise ValueError if one does not hold."""
    for sentence, holds in said:
        if not holds:
            raise ValueError(f"the results contradict this sentence: {sentence}")
    return "\n".join(f"- {sentence}" for sentence, _ in said)


def filled(text: str) -> str:
    """Return Markdown whose paragraphs and items are filled to lines of equal length."""
    blocks = []
    for block in text.strip().split("\n\n"):
        if block[0].isalpha() or block.startswith(("- ", "`", "*")):
            items = re.split(r"\n(?=- )", block)
            indent = "  " if block.startswith("- ") else ""
            items = [" ".join(item.split()) for item in items]
            wrap = functools.partial(
                textwrap.fill, subsequent_indent=indent, break_on_hyphens=False
            )
            block = "\n".join(wrap(item, 120) for item in items)
        blocks.append(block)
    return "\n\n".join(blocks) + "\n"


def page(results: Results) -> str:
    """Return the text of docs/delays.md."""
    text = f"""# Delayed gradients

<!-- Written by benchmarks/delays.py. -->

Asynchronous training uses gradients of old parameters. This page measures how much higher the loss
becomes, and how much of the difference delay compensation (`enable_dc_asgd`) removes. It is a small
version of the comparison in Zheng et al., Asynchronous Stochastic Gradient Descent with Delay
Compensation (arXiv 1609.08326):

    .venv/bin/python benchmarks/delays.py --write

This command writes the page and its plot. Two runs on one machine gave the same bytes, except for
[steps that do not wait](#steps-that-do-not-wait).

## What is compared

A perceptron of {digits.PIXELS}, {HIDDEN} (tanh) and {digits.CLASSES} units learns the
{digits.TRAIN_IMAGES:,} training images of `examples.digits` by SGD. The job has two parameter
servers, to which trainers connect over loopback. Every mode computes {UPDATES:,} gradients of
{ROWS} examples each: {UPDATES * ROWS:,} examples in all. The learning rate is {RATE} if the table
gives no rate. A seed determines the initial parameters and the order of examples. A synchronous
step is one update with the mean of 3 gradients, at 3 times the rate. All seeds ({SEEDS[0]} to
{SEEDS[-1]}) train in one job: each array has one independent row for each seed.

The *delay* of a gradient is the number of other trainers' gradients that the servers have applied
since this gradient's trainer received parameters. It does not depend on clocks: trainers take turns,
and the order of turns determines the delays:

- *in turn*: with n trainers, after the first turns, every gradient is n - 1 updates old;
- *one slow*: the last of 3 trainers has every {ONE_SLOW.slow}th turn, so its gradients are
  {ONE_SLOW.oldest} updates old. The other trainers share the remaining turns.

In any order, the mean delay is one less than the number of trainers. So all gradients can have
large delays only with many trainers.

In the half-asynchronous mode, every step waits until a communicator has sent its gradients and
received parameters (`runtime_split_send_recv`, `half_async`). In GEO-SGD, a trainer updates its own
parameters. After every 3rd or 10th step, it exchanges changes with the servers, and waits for the
answer (`geo_sgd_block_on_pull`). So it sees its own updates at once. It sees other trainers'
updates later than the delay in the table's heading.

Lambda is a parameter of DC-ASGD. The benchmark has chosen one lambda for each variant: the one
with the least training loss in the setting "16 trainers in turn", on other seeds
({GRID_SEEDS[0]} to {GRID_SEEDS[-1]}). All runs use this lambda. `dtrans.pserver` uses 1 by
default; Paddle always uses 1. The adaptive variant has a decay of {DECAY}.

{grid(results)}

## Figures

Loss is the mean cross entropy of all training images at the end, with the servers' parameters. The
table shows the mean over five seeds, and the smallest and the largest value in parentheses. A mode
is in the spread of synchronous training if its mean lies between the smallest and the largest loss
of the synchronous seeds.

{table(results)}

![Training loss by examples seen, for each delay](delays.svg)

The plot shows the mean of five seeds, and shades the range from the smallest to the largest.

## What follows

{findings(results)}

With one lambda for all runs, DC-ASGD is better only where delays limit training. The paper's result
is better: for residual networks on CIFAR-10 and ImageNet, DC-ASGD beats asynchronous and
synchronous SGD, and nearly equals sequential SGD. Here, synchronous training is as good as training
on one device. The gap at 16 trainers is large, because training with these delays diverges at this
rate.

## Steps that do not wait

With a communicator and without `half_async`, a step uses the newest parameters that have arrived,
so timing matters. A step of this model takes less time than a message, so its parameters lack the
last gradients of all trainers. The communicator merges queued gradients into their sum, which
causes one update. The number of queued gradients varies, so **these figures differ in each run**.
The table shows the mean training loss of five seeds. The last column has one mean for each of
{TIMES} runs with a communicator.

{table_beside(results)}

{findings_beside(results)}

The command fails if the first two statements do not hold for its runs. In other runs at {RATE} with
one slow trainer, the loss was up to 1.3."""
    return filled(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"write {DOCS.name}/delays.md and {DOCS.name}/delays.svg",
    )
    write = parser.parse_args().write
    with compiled_once():
        results = everything()
    print(table(results), grid(results), table_beside(results), sep="\n\n")
    if write:
        # compute both before writing either: `page` raises an error if a finding does not hold
        texts = {"delays.md": page(results), "delays.svg": plot(results)}
        for name, text in texts.items():
            (DOCS / name).write_text(text)


if __name__ == "__main__":
    main()
