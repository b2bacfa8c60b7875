"""What a job has for the time between its steps: parts of batches, a feeder, a report, a trace,
metrics."""

from __future__ import annotations

import csv
import gc
import gzip
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import distance

import dtrans
from dtrans.errors import BatchError, ConfigError, TraceError
from dtrans.run.role_job import TrainerJob


TX = optax.adam(0.1)


def loss(params: Any, batch: Any, rate: jax.Array) -> jax.Array:
    return rate * jnp.mean((batch["x"] @ params["w"] - batch["y"].T) ** 2)


def init() -> Any:
    params = {"w": jnp.ones((4, 3))}
    return params, TX.init(params)


def batch(rows: int, seed: int = 0) -> tuple[Any, Any]:
    """Rows are along dim 1 of y."""
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
        with pytest.raises(TraceError, match="another structure"):
            job.shard_batch((given["x"],), given["y"], rate)


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
    """Five rows are no multiple of two trainers."""
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
            assert len(made) <= taken + 2  # one waits, and one is in the making
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
    text = str(found)
    assert "3 steps, 0.50 a second after the first (5.000 s)" in text
    assert "in step            1.500 s, 38%" in text and "bytes sent" in text


def test_a_step_that_fails_is_not_counted() -> None:
    job = job_of()
    with pytest.raises(BatchError):
        job.step(job.init(), np.ones((2, 4)), np.ones(2))
    assert job.report().steps == 0 and "0 steps" in str(job.report())


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
    """An open file that nobody refers to would be a ResourceWarning, which is an error here."""
    taken = tmp_path / "taken"
    taken.write_text("a file")
    with pytest.raises(ConfigError, match=r"metrics cannot be written to .*taken/m\.csv"):
        dtrans.MetricsWriter(tmp_path / "first.csv", taken / "m.csv")
    gc.collect()
