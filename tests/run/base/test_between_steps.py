"""Methods of a job for the time between steps: parts of batches, feeds, reports, traces,
metrics."""

from __future__ import annotations

import csv
import gc
import gzip
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import distance

import dtrans
from dtrans.errors import BatchError, ConfigError, StateError, TraceError
from dtrans.run.role_jobs.trainer_job import TrainerJob


TX = optax.adam(0.1)


def loss(params: Any, batch: Any, rate: jax.Array) -> jax.Array:
    return rate * jnp.mean((batch["x"] @ params["w"] - batch["y"].T) ** 2)


def init() -> Any:
    params = {"w": jnp.ones((4, 3))}
    return params, TX.init(params)


def batch(rows: int, seed: int = 0) -> tuple[Any, Any]:
    """Return a batch. The rows of y are along dimension 1."""
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(rows, 4)), "y": rng.normal(size=(3, rows))}, np.float64(1.5)


def plain(params: Any, opt_state: Any, x: jax.Array) -> Any:
    return dtrans.make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), TX)(
        params, opt_state, x
    )


def job_of(trainers: int = 2, way: str = "on_mesh") -> Any:
    main = dtrans.trace(plain, *init(), jnp.ones((2, 4)))
    return getattr(dtrans.nccl2(main, dtrans.trace(init), trainers=trainers), way)()


def rows(count: int, of: int = 4) -> list[np.ndarray]:
    return [np.full((of, 4), i, np.float32) for i in range(count)]


# -- parts of a batch ------------------------------------------------------------------------------


def trainer_job(number: int, trainers: int, **options: Any) -> TrainerJob:
    step = dtrans.make_train_step(lambda p, x, y, rate: loss(p, {"x": x, "y": y}, rate), TX)
    given, rate = batch(2)
    main = dtrans.trace(step, *init(), given["x"], given["y"], rate)
    eps = "127.0.0.1:6174"
    plan = dtrans.pserver(main, dtrans.trace(init), pservers=eps, trainers=trainers, **options)
    return TrainerJob(plan, dtrans.Role("trainer", trainers, (eps,), number), {})


@pytest.mark.usefixtures("x64")
def test_each_process_has_its_rows_along_the_dimension_of_the_plan() -> None:
    given, rate = batch(6)
    parts = []
    for k in range(3):
        with trainer_job(k, 3, batch=dtrans.Batch(axes=(0, 1, None))) as job:
            x, y, same = job.shard_batch(given["x"], given["y"], rate)
            assert isinstance(x, np.ndarray) and same is rate
            parts.append((x, y))
    assert distance(np.concatenate([x for x, _ in parts]), given["x"]) == 0
    assert distance(np.concatenate([y for _, y in parts], 1), given["y"]) == 0


@pytest.mark.usefixtures("x64")
def test_rows_that_processes_do_not_divide_are_named() -> None:
    given, rate = batch(7)
    wanted = (
        "x has 7 rows, which cannot be split evenly over 3 processes; pass a multiple of 3 rows"
    )
    with trainer_job(0, 3, batch="local") as job, pytest.raises(BatchError, match=wanted):
        job.shard_batch(given["x"], given["y"], rate)
    with trainer_job(0, 3, batch=dtrans.Batch(axes=(0, 1, None))) as job:
        x, y, same = job.shard_batch(given["x"], given["y"], rate)
        assert same is rate and (x.rows, y.rows, x.x.shape[0], y.x.shape[1]) == (7, 7, 3, 3)
        with pytest.raises(BatchError, match="the step takes 3 batch arguments, 1 were given"):
            job.shard_batch(given["x"])
        with pytest.raises(TraceError, match="does not have the structure"):
            job.shard_batch((given["x"],), given["y"], rate)


@pytest.mark.usefixtures("x64")
def test_a_trainer_checks_the_state_for_a_function() -> None:
    with trainer_job(0, 2, batch=dtrans.Batch(axes=(0, 1, None))) as job:
        for method, call in (
            ("apply", lambda state: job.apply(lambda params: params, state)),
            ("step", lambda state: job.step(state, *batch(2))),
        ):
            taken = f"^{method} takes the state that init or step returned,"
            with pytest.raises(StateError, match=f"{taken} not dict$"):
                call(init()[0])
            with pytest.raises(StateError, match=f"{taken} a tuple of 1, not a tuple of 2$"):
                call(init())


def test_one_process_has_the_whole_batch() -> None:
    x = rows(1)[0]
    assert job_of().shard_batch(x)[0] is x


def test_a_loader_without_a_job() -> None:
    given, rate = batch(6)
    part = dtrans.shard_batch({"x": given["x"], "rate": rate}, 1, 2)
    assert distance(part["x"], given["x"][3:]) == 0 and part["rate"] is rate
    assert dtrans.shard_batch(given["y"], 0, 3, axis=1).shape == (3, 2)
    with pytest.raises(
        BatchError, match="x has 6 rows, which cannot be split evenly over 4 processes"
    ):
        dtrans.shard_batch({"x": given["x"]}, 0, 4)
    with pytest.raises(ConfigError, match="number must be one of the parts 0 to 1"):
        dtrans.shard_batch(given, 2, 2)


# -- a feeder --------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [4, 5])
def test_batches_come_in_order_and_steps_give_the_same(of: int) -> None:
    """Five rows are not a multiple of two trainers."""
    job, other = job_of(), job_of()
    state, want = job.init(), other.init()
    with dtrans.feed(iter(rows(5, of)), job) as batches:
        for i, x in enumerate(batches):
            assert float(x[0, 0]) == i
            state, got = job.step(state, x)
            want, alone = other.step(want, rows(5, of)[i])
            assert float(got) == float(alone)


@pytest.mark.usefixtures("x64")
def test_a_batch_is_of_the_precision_of_who_asked_for_it() -> None:
    job = job_of()
    with dtrans.feed(((x.astype(np.float64),) for x in rows(1)), job) as batches:
        (x,) = next(batches)
    assert x.dtype == np.float64 and isinstance(x, jax.Array)


def test_at_most_so_many_wait() -> None:
    made: list[int] = []

    def source() -> Iterator[np.ndarray]:
        for i, x in enumerate(rows(10)):
            made.append(i)
            yield x

    with dtrans.feed(source(), job_of(), ahead=1) as batches:
        for taken in range(1, 5):
            next(batches)
            assert len(made) <= taken + 2  # one batch is ready, and one is being read
    ended = len(made)
    assert ended < 10 and not any(t.name == "dtrans feed" for t in threading.enumerate())


def test_an_error_of_the_iterator_comes_where_the_batch_was_to_come() -> None:
    def source() -> Iterator[np.ndarray]:
        yield rows(1)[0]
        raise OSError("the disk is gone")

    with dtrans.feed(source(), job_of()) as batches:
        next(batches)
        with pytest.raises(OSError, match="the disk is gone"):
            next(batches)
    assert not any(t.name == "dtrans feed" for t in threading.enumerate())
    with (
        pytest.raises(ConfigError, match="ahead must be a positive number"),
        dtrans.feed(source(), job_of(), ahead=0),
    ):
        pass


@pytest.mark.parametrize("strategy", ["pserver", "nccl2", "pipeline"])
def test_a_state_prints_without_its_arrays(strategy: str) -> None:
    tx = optax.adam(0.1)
    init = lambda key: (p := {"w": jax.random.normal(key, (64, 64))}, tx.init(p))
    step = dtrans.make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx)
    key = jax.random.key(0)
    programs = dtrans.trace(step, *init(key), np.ones((8, 64))), dtrans.trace(init, key)
    options: dict[str, dict[str, Any]] = {
        "pserver": {"pservers": "a:1", "trainers": 2},
        "nccl2": {"trainers": 2},
        "pipeline": {"num_stages": 1, "num_micro_batch": 2},
    }
    state = getattr(dtrans, strategy)(*programs, **options[strategy]).simulate().init(key)
    arrays = jax.tree.leaves(state)
    size = sum(x.nbytes for x in arrays)
    assert repr(state) == f"<{type(state).__name__}: {len(arrays)} arrays, {size:,} bytes>"


# -- report and trace ------------------------------------------------------------------------------


def test_a_report_counts_steps_and_says_where_time_went(monkeypatch: pytest.MonkeyPatch) -> None:
    from dtrans import step_meter

    now = iter([0.0, 5.0, 6.0, 6.5, 8.0, 9.0])  # before and after each of three steps
    job = job_of()
    monkeypatch.setattr(step_meter.time, "perf_counter", lambda: next(now))
    state = job.init()
    for x in rows(3):
        state, _ = job.step(state, x)
    monkeypatch.undo()
    job.meter.waited = 1.0
    found = job.report()
    assert (found.steps, found.first, found.seconds, found.in_step) == (3, 5.0, 4.0, 1.5)
    assert (found.waiting, found.elsewhere, found.steps_per_second) == (1.0, 1.5, 0.5)
    assert repr(found) == "<JobReport: 3 steps, 0.50 a second>"
    assert "<pre>3 steps, 0.50 a second" in found._repr_html_() and "<table" in found._repr_html_()
    text = str(found)
    assert "3 steps, 0.50 a second after the first (5.000 s)" in text
    assert "in step            1.500 s, 38%" in text and "bytes sent" in text


def test_a_report_compares_steps_with_the_bound_of_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    from dtrans import step_meter

    main = dtrans.trace(plain, *init(), jnp.ones((2, 4)))
    job = dtrans.pserver(main, dtrans.trace(init), trainers=2).simulate()
    state = job.init()
    now = iter([0.0, 5.0, 6.0, 6.5, 8.0, 9.0])
    monkeypatch.setattr(step_meter.time, "perf_counter", lambda: next(now))
    x, *others = rows(3)
    state, _ = job.step(state, x)
    assert job.report(link=96).link_share is None  # the first step compiles, and does not count
    for x in others:
        state, _ = job.step(state, x)
    monkeypatch.undo()
    # the server's link carries 12 numbers for each trainer: 96 bytes
    found = job.report(link=96)
    assert found.link_share == 0.5 and found.costs.link_seconds == 1.0
    line = "2 s a step; the bytes on the busiest link take 1 s: 50% of the bound"
    assert line in str(found) and line in found._repr_html_()
    assert job.report().link_share is None and "bound" not in str(job.report())


def test_a_step_that_fails_is_not_counted() -> None:
    job = job_of()
    with pytest.raises(BatchError):
        job.step(job.init(), np.ones((2, 4)), np.ones(2))
    assert job.report().steps == 0 and "0 steps" in str(job.report())


class Interrupted:
    """Batch whose loading the user interrupts by Ctrl-C."""

    @property
    def ndim(self) -> int:
        raise KeyboardInterrupt


def test_an_interrupt_says_where_the_job_has_stopped(tmp_path: Path) -> None:
    job = job_of()
    with pytest.raises(KeyboardInterrupt) as found:
        job.step(job.init(), Interrupted())
    note = "dtrans: this process has completed 0 steps; it has saved no checkpoint"
    assert found.value.__notes__ == [note]

    with pytest.raises(KeyboardInterrupt) as found, job_of() as job:
        state, _ = job.step(job.init(), rows(1)[0])
        dtrans.checkpoint.save(tmp_path / "1", job, state)
        state, _ = job.step(state, rows(1)[0])
        raise KeyboardInterrupt
    said = f"2 steps; its newest checkpoint is {tmp_path / '1'}, after 1 step"
    assert found.value.__notes__ == [f"dtrans: this process has completed {said}"]


NOT_AN_ARRAY = {
    "text": ("text", "^x is text; a step takes arrays of numbers, so convert x"),
    "object": (object(), r"^x is a .*, but the step was traced with float32\[2,4\]"),
}


@pytest.mark.parametrize(("wrong", "says"), NOT_AN_ARRAY.values(), ids=NOT_AN_ARRAY)
def test_a_batch_without_an_array_is_named(wrong: Any, says: str) -> None:
    job = job_of()
    with pytest.raises(BatchError, match=says):
        job.step(job.init(), wrong)


def test_a_trace_has_the_steps(tmp_path: Path) -> None:
    job = job_of(way="simulate")
    state, _ = job.step(job.init(), rows(1)[0])
    with job.trace(tmp_path):
        jax.block_until_ready(job.step(state, rows(1)[0]))
    (file,) = tmp_path.glob("**/perfetto_trace.json.gz")
    assert "dtrans step" in gzip.decompress(file.read_bytes()).decode()


# -- metrics ---------------------------------------------------------------------------------------


def test_metrics_go_to_a_table_a_folder_and_a_function(tmp_path: Path) -> None:
    heard: list[Any] = []
    with dtrans.MetricsWriter(
        tmp_path / "m.csv", tmp_path / "events", lambda *of: heard.append(of)
    ) as writer:
        for i in range(2):
            writer.write(i, {"loss": jnp.float32(i), "of": {"count": np.int64(3)}})
    with (tmp_path / "m.csv").open() as file:
        assert list(csv.reader(file)) == [
            ["step", "loss", "of/count"],
            ["0", "0.0", "3.0"],
            ["1", "1.0", "3.0"],
        ]
    assert heard[1] == (1, {"loss": 1.0, "of/count": 3.0})
    assert len(list((tmp_path / "events").iterdir())) == 1


def test_what_is_no_metric_is_refused(tmp_path: Path) -> None:
    with dtrans.MetricsWriter(tmp_path / "m.csv") as writer:
        writer.write(0, 0.5)
        with pytest.raises(ConfigError, match="each has 2 elements, but a metric is one number"):
            writer.write(1, {"each": np.ones(2)})
        with pytest.raises(
            ConfigError, match=r"m.csv has columns for loss, but step 1 has accuracy"
        ):
            writer.write(1, {"accuracy": 1})
    assert (tmp_path / "m.csv").read_text().splitlines() == ["step,loss", "0,0.5"]
    with pytest.raises(ConfigError, match="metrics cannot be written to .*: File exists"):
        dtrans.MetricsWriter(tmp_path / "m.csv" / "m.csv")


@pytest.mark.parametrize("order", [("loss.csv", "events"), ("events", "loss.csv")])
def test_metrics_make_the_folders_that_they_need(order: tuple[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    with dtrans.MetricsWriter(*(folder / name for name in order)) as writer:
        writer.write(0, 0.5)
    assert (folder / "loss.csv").read_text().splitlines() == ["step,loss", "0,0.5"]
    assert len(list((folder / "events").iterdir())) == 1


def test_a_writer_that_fails_closes_what_it_opened(tmp_path: Path) -> None:
    """An open file without a reference would cause a ResourceWarning, which is an error in
    tests."""
    taken = tmp_path / "taken"
    taken.write_text("a file")
    with pytest.raises(ConfigError, match=r"metrics cannot be written to .*taken/m\.csv"):
        dtrans.MetricsWriter(tmp_path / "first.csv", taken / "m.csv")
    gc.collect()


# -- positions of batches --------------------------------------------------------------------------


class Seekable:
    """Loader that can go to the batch of a step."""

    def __init__(self, batches: list[np.ndarray]) -> None:
        self._batches, self.position = batches, 0
        self.reads: list[int] = []

    def __iter__(self) -> Iterator[np.ndarray]:
        while self.position < len(self._batches):
            self.reads.append(self.position)
            self.position += 1
            yield self._batches[self.position - 1]

    def seek(self, step: int) -> None:
        self.position = step


class StatefulIterator:
    """Iterator with the methods of grain's iterators."""

    def __init__(self, batches: list[np.ndarray]) -> None:
        self._batches, self._next = batches, 0
        self.reads: list[int] = []

    def __iter__(self) -> StatefulIterator:
        return self

    def __next__(self) -> np.ndarray:
        if self._next == len(self._batches):
            raise StopIteration
        self.reads.append(self._next)
        self._next += 1
        return self._batches[self._next - 1]

    def get_state(self) -> bytes:
        return b"%d" % self._next

    def set_state(self, state: bytes) -> None:
        self._next = int(state)


class StatefulLoader:
    """Loader with the methods of torchdata's loaders. The next `iter` uses a restored state."""

    def __init__(self, batches: list[np.ndarray]) -> None:
        self._batches = batches
        self._restored = self._next = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        self._next, self._restored = self._restored, 0
        while self._next < len(self._batches):
            self._next += 1
            yield self._batches[self._next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._restored = state["next"]


class LiveLoader(StatefulLoader):
    """Loader that returns its live state, and uses the dict that it receives without copying it."""

    def __init__(self, batches: list[np.ndarray]) -> None:
        self._batches, self._state = batches, {"next": 0}

    def __iter__(self) -> Iterator[np.ndarray]:
        while self._state["next"] < len(self._batches):
            self._state["next"] += 1
            yield self._batches[self._state["next"] - 1]

    def state_dict(self) -> dict[str, int]:
        return self._state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._state = state


SOURCES: dict[str, Callable[[list[np.ndarray]], Any]] = {
    "function": lambda batches: lambda step: batches[step],
    "seek": Seekable,
    "get_state": StatefulIterator,
    "state_dict": StatefulLoader,
    "live state_dict": LiveLoader,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_feed_goes_back_and_ahead(kind: str) -> None:
    """The feed drops loaded batches that no step has read."""
    with dtrans.feed(SOURCES[kind](rows(20)), job_of()) as batches:
        read = lambda count: [int(next(batches)[0, 0]) for _ in range(count)]
        assert read(7) == [*range(7)] and batches.position == 7
        batches.seek(2)
        assert read(3) == [2, 3, 4] and batches.position == 5
        batches.seek(11)
        assert read(2) == [11, 12]
        batches.seek(13)  # its current position
        assert read(1) == [13]
        batches.seek(0)
        assert read(1) == [0]


@pytest.mark.parametrize("kind", SOURCES)
def test_another_feed_continues_at_a_saved_position(kind: str) -> None:
    with dtrans.feed(SOURCES[kind](rows(9)), job_of(), ahead=3) as batches:
        for _ in range(4):
            next(batches)
        saved = batches.state_dict()
    with dtrans.feed(SOURCES[kind](rows(9)), job_of()) as batches:
        batches.load_state_dict(pickle.loads(pickle.dumps(saved)))
        assert batches.state_dict() == saved and saved["position"] == 4
        assert [int(next(batches)[0, 0]) for _ in range(3)] == [4, 5, 6]
        batches.seek(5)
        assert int(next(batches)[0, 0]) == 5


@pytest.mark.parametrize("kind", SOURCES)
def test_a_position_is_saved_right_after_a_move(kind: str) -> None:
    """A position saved after `seek`, and before the next batch, is the new position.

    A trainer may start again at its last step.
    """
    with dtrans.feed(SOURCES[kind](rows(9)), job_of()) as batches:
        next(batches)
        batches.seek(5)
        saved = batches.state_dict()
    assert batches.state_dict() == saved and saved["position"] == 5
    with dtrans.feed(SOURCES[kind](rows(9)), job_of()) as batches:
        batches.load_state_dict(saved)
        assert int(next(batches)[0, 0]) == 5


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("numbers", [{}, {"stop": 8}])
def test_a_position_saved_between_steps_is_that_of_the_next_step(
    kind: str, numbers: dict[str, int]
) -> None:
    """`job.steps` has already read the next batches. These batches are not lost if the loop ends
    early."""
    job = job_of()
    source = lambda: SOURCES[kind]([(x,) for x in rows(9)])
    take = lambda: [float(x) for _, x in job.steps(job.init(), batches, start=3, stop=6)]
    with dtrans.feed(source(), job) as batches:
        steps = job.steps(job.init(), batches, ahead=2, **numbers)
        for count in (1, 2, 3):
            next(steps)
            saved = pickle.dumps(batches.state_dict())
            assert batches.position == count
        expected = take()
        assert batches.position == 6 and int(next(batches)[0][0, 0]) == 6
    with dtrans.feed(source(), job) as batches:
        batches.load_state_dict(pickle.loads(saved))
        assert take() == expected and len({*expected}) == 3
        batches.load_state_dict(pickle.loads(saved))
        assert int(next(batches)[0][0, 0]) == 3


@pytest.mark.parametrize("change", [next, lambda batches: batches.seek(7)])
def test_a_loop_over_steps_notices_another_reader(change: Callable[[Any], object]) -> None:
    job = job_of()
    with dtrans.feed(lambda step: (rows(9)[step],), job) as batches:
        steps = job.steps(job.init(), batches)
        next(steps)
        change(batches)
        with pytest.raises(StateError, match="call next, seek and load_state_dict after the loop"):
            next(steps)


def test_a_loader_skips_from_the_nearest_mark() -> None:
    """The loader has few marks, and none before the first one."""
    source = StatefulIterator(rows(1000))
    with dtrans.feed(source, job_of()) as batches:
        for _ in range(900):
            next(batches)
        before = len(source.reads)  # the loading thread reads at once after `seek`
        batches.seek(700)
        assert int(next(batches)[0, 0]) == 700
        assert 700 - min(source.reads[before:]) < 32
        batches.load_state_dict({"position": 500, "source": b"500"})
        batches.seek(499)
        with pytest.raises(
            ConfigError, match="first batch of StatefulIterator has the number 500, so .* batch 499"
        ):
            next(batches)


def test_a_generator_cannot_go_back() -> None:
    with dtrans.feed(iter(rows(9)), job_of(), ahead=1) as batches:
        next(batches)
        batches.seek(0)
        message = "list_iterator is at batch [23], and cannot go to batch 0; pass dtrans.feed a fun"
        with pytest.raises(ConfigError, match=message):
            batches.state_dict()
        with pytest.raises(ConfigError, match=message):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)


def test_steps_begin_at_the_batch_of_their_number() -> None:
    """With `stop`, a feed is read by step numbers. Without, it continues at its position."""
    job = job_of()
    source = Seekable(rows(9))
    with dtrans.feed(lambda step: (source._batches[step],), job) as batches:
        next(batches)
        found = [float(results[1]) for results in job.steps(job.init(), batches, start=2, stop=4)]
        assert batches.position == 4
    expected = [
        float(results[1]) for results in job.steps(job.init(), [(x,) for x in rows(9)[2:4]])
    ]
    assert found == expected and len(found) == 2
    with dtrans.feed([(x,) for x in rows(4)], job) as batches:
        next(batches)
        assert len([*job.steps(job.init(), batches)]) == 3
    with pytest.raises(ConfigError, match="or pass a function or dtrans.feed"):
        job.steps(job.init(), [], stop=3)
    with pytest.raises(ConfigError, match="cannot know the last step"):
        job.steps(job.init(), source, start=3)
