"""The example with characters: its text, its batches, its causal model, and the timing of its
plans."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import sysconfig
import textwrap
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from paths import ROOT

from dtrans.errors import BatchError, ConfigError
from examples import character_job, characters
from examples.characters import LENGTH, VOCABULARY, Text, decode, encode


LIBRARY = Path(sysconfig.get_path("stdlib"))


@pytest.fixture(scope="module")
def text() -> Text:
    return characters.load()


def make_small(patch: pytest.MonkeyPatch) -> None:
    for name, value in {"LAYERS": 2, "WIDTH": 16, "HEADS": 2, "LENGTH": 16}.items():
        patch.setattr(characters, name, value)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a model that compiles and runs fast."""
    make_small(monkeypatch)


@pytest.fixture(scope="module")
def first_params() -> Any:
    """First parameters of the small model."""
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        return jax.jit(lambda key: characters.init(key))(jax.random.key(0))


# -- the text --------------------------------------------------------------------------------------


def test_the_text_is_the_library(text: Text) -> None:
    assert len(text.train) == 950_000 and len(text.validation) == 50_000
    found = decode(np.concatenate([text.train, text.validation]))
    first, second = list(characters.modules(LIBRARY))[:2]
    both = first.read_text() + second.read_text()
    assert decode(encode(both)) == found[: len(both)]
    assert first.name == "__future__.py"
    for word in ("import ", "def __init__(self", "return ", "\n    "):
        assert word in decode(text.train) and word in decode(text.validation)


def test_the_text_is_the_same_each_time(text: Text) -> None:
    again = characters.load()
    assert np.array_equal(text.train, again.train) and np.array_equal(
        text.validation, again.validation
    )


def test_almost_all_characters_have_tokens_of_their_own(text: Text) -> None:
    assert text.train.dtype == np.uint8 and text.train.max() < VOCABULARY
    assert len(np.unique(text.train)) > 90
    assert np.mean(text.train == VOCABULARY - 1) < 1e-3


def library_in(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, **modules: bytes) -> Path:
    """Return a library of these modules; `count` characters are taken, and two of them are held
    out."""
    monkeypatch.setattr(characters, "CHARACTERS", count)
    monkeypatch.setattr(characters, "VALIDATION", 2)
    for name, source in modules.items():
        (folder / f"{name}.py").write_bytes(source)
    return folder


def test_modules_in_order_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of other distributions, and packages, are not part of the text."""
    modules = {"zipfile": b"z", "os": b"oo", "ast": b"aaa", "sitecustomize": b"XX", "mine": b"XX"}
    library = library_in(tmp_path, monkeypatch, 5, **modules)
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "decoder.py").write_text("XX")
    assert [p.stem for p in characters.modules(library)] == ["ast", "os", "zipfile"]
    found = characters.load(library)
    assert (decode(found.train), decode(found.validation)) == ("aaa", "oo")


def test_the_last_module_is_cut_where_the_text_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = characters.load(library_in(tmp_path, monkeypatch, 4, ast=b"abc", os=b"def"))
    assert (decode(found.train), decode(found.validation)) == ("ab", "cd")


def test_source_is_read_as_python_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a file by its declared encoding, with newlines of one kind."""
    source = "# coding: latin-1\r\né".encode("latin-1")
    found = characters.load(library_in(tmp_path, monkeypatch, 19, ast=source))
    assert decode(found.train) == "# coding: latin-1" and found.validation.tolist() == [95, 96]


def test_no_source(tmp_path: Path) -> None:
    (tmp_path / "os.py").write_text("x" * 1234)
    with pytest.raises(ConfigError, match="has 1,234 characters in .*, expected 1,000,000"):
        characters.load(tmp_path)


@given(st.text(st.characters(codec=None)))
def test_tokens_are_characters(string: str) -> None:
    tokens = encode(string)
    assert len(tokens) == len(string)
    kept = "".join(
        c if " " <= c <= "~" or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in string
    )
    assert decode(tokens) == kept


# -- batches ---------------------------------------------------------------------------------------


def test_batches_depend_on_seed_and_step_alone(text: Text) -> None:
    first = characters.batch(text, 0, 0, 8)
    assert first.shape == (8, LENGTH + 1) and first.dtype == np.int32
    assert np.array_equal(first, characters.batch(text, 0, 0, 8))
    for seed, step in ((0, 1), (1, 0)):
        assert not np.array_equal(first, characters.batch(text, seed, step, 8))


def test_rows_are_from_all_of_the_training_text_and_nowhere_else() -> None:
    """Each token is its own position in the text, so a row counts up from its start."""
    text = Text(np.arange(LENGTH + 3), np.full(100, 96))
    rows = characters.batch(text, 0, 0, 200)
    assert np.array_equal(rows - rows[:, :1], np.tile(np.arange(LENGTH + 1), (200, 1)))
    assert set(rows[:, 0].tolist()) == {0, 1, 2}


def test_no_batch(text: Text) -> None:
    with pytest.raises(BatchError, match="a batch of 0 rows"):
        characters.batch(text, 0, 0, 0)


def test_each_held_out_character_is_told_once() -> None:
    rows = characters.validation_rows(Text(np.arange(0), np.arange(3 * LENGTH + 7)))
    assert rows.shape == (3, LENGTH + 1)
    assert rows[:, 1:].ravel().tolist() == list(range(1, 3 * LENGTH + 1))
    assert np.array_equal(rows[:, 0], [0, LENGTH, 2 * LENGTH])


def test_entropy() -> None:
    assert characters.entropy(np.repeat([3, 5, 7, 9], 10)) == pytest.approx(math.log(4))
    assert characters.entropy(np.array([3, 3])) == 0
    assert characters.entropy(np.array([1, 1, 1, 2])) == pytest.approx(
        0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    )


# -- the model -------------------------------------------------------------------------------------


@pytest.fixture
def params(small: None, first_params: Any) -> Any:
    """Return the first parameters of the small model."""
    return first_params


# compile, because running the operations one by one would take longer
loss, logits = jax.jit(characters.loss_fn), jax.jit(characters.logits)


@pytest.mark.parametrize("at", [0, 7, 15])
def test_it_reads_nothing_that_comes_later(params: Any, text: Text, at: int) -> None:
    tokens = characters.batch(text, 0, 0, 2)[:, :-1]
    changed = tokens.copy()
    changed[:, at] = (changed[:, at] + 1) % VOCABULARY
    apart = np.abs(logits(params, changed) - logits(params, tokens)).max((0, 2))
    assert apart[:at].max(initial=0) == 0 and apart[at:].min() > 0


def test_the_first_loss_is_that_of_knowing_nothing(params: Any, text: Text) -> None:
    # scores have the variance WIDTH * 0.1**2 = 0.16; a normal distribution of scores adds half of
    # it
    first = np.mean([loss(params, characters.batch(text, 0, k, 8)) for k in range(8)])
    assert first == pytest.approx(math.log(VOCABULARY) + 0.08, abs=0.1)


def test_all_parameters_are_trained(params: Any, text: Text) -> None:
    grads = jax.jit(jax.grad(characters.loss_fn))(params, characters.batch(text, 0, 0, 8))
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))
    # the embedding is also the last layer, so characters that no row reads get gradients, too
    assert np.all(np.abs(grads["embedding"]).max(1) > 0)


def test_loss_is_the_mean_over_rows(params: Any, text: Text) -> None:
    tokens = characters.batch(text, 0, 0, 4)
    each = [float(loss(params, tokens[i : i + 1])) for i in range(4)]
    assert float(loss(params, tokens)) == pytest.approx(np.mean(each), rel=1e-6)


def test_validation_is_on_all_that_is_held_out(params: Any) -> None:
    """The model knows one character, and all rows except the first consist of it."""
    params = jax.tree.map(jnp.zeros_like, params)
    params["norm"]["bias"] = params["norm"]["bias"].at[0].set(1.0)
    params["embedding"] = params["embedding"].at[5, 0].set(50.0)
    tokens = np.full(3 * 16 + 1, 5)
    assert characters.validation_loss(params, Text(tokens, tokens)) == pytest.approx(0, abs=1e-6)
    tokens[1:17] = 6
    assert characters.validation_loss(params, Text(tokens, tokens)) == pytest.approx(
        50 / 3, rel=1e-5
    )


# -- the job ---------------------------------------------------------------------------------------

SMALL = character_job.CharactersSettings(micro_batches=2, steps=2, batch_size=4)


def planned(text: Text, **changed: Any) -> Any:
    return character_job.plan_characters(dataclasses.replace(SMALL, **changed), text)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["PreferForward", "PreferBackward", "ZeroBubble"])
def test_the_planned_play_has_the_work_that_ran(small: None, text: Text, schedule: str) -> None:
    plan = planned(text, schedule=schedule)
    timeline = character_job.planned_play(plan, work=12.0)
    took = lambda kinds, stage: sum(
        t.end - t.start for t in timeline if t.task.kind in kinds and t.task.stage == stage
    )
    assert took("FBW", 0) + took("FBW", 1) == pytest.approx(12.0)
    flops = [s.flops for s in plan.stages]
    for k in range(2):
        assert took("FBW", k) == pytest.approx(12 * flops[k] / sum(flops))
        assert took("BW", k) == pytest.approx(2 * took("F", k))
    if schedule == "ZeroBubble":
        # the first stage computes only gradients of its weights
        assert took("B", 0) == 0 and took("B", 1) == pytest.approx(took("W", 1))
    # up to a factor, this is the schedule
    assert float(timeline.bubble) == pytest.approx(float(plan.schedule.timeline().bubble), abs=0.1)
    assert plan.schedule.bubble == {"ZeroBubble": Fraction(1, 7)}.get(schedule, Fraction(1, 3))


@pytest.mark.soak
def test_what_ran_is_what_was_planned(small: None, text: Text) -> None:
    """Each planned task ran once. The drawing beside it has as much work."""
    plan = planned(text)
    job, tokens = plan.on_mesh(), character_job.batch(SMALL, text, 0)
    watched = character_job.watch(SMALL, job, job.init(SMALL.key), tokens)
    assert watched.ran is not None
    assert sorted(t.task for t in watched.ran) == sorted(t.task for t in watched.planned)
    assert sum(t.end - t.start for t in watched.planned) == pytest.approx(
        sum(t.end - t.start for t in watched.ran)
    )
    assert watched.kept.peak == plan.schedule.peak == (2, 1)


def test_one_device_trains_on_the_same_batches(params: Any, text: Text) -> None:
    trained = character_job.single_device(SMALL, text)
    assert trained.losses[0] == pytest.approx(
        float(loss(params, characters.batch(text, 0, 0, 4))), rel=1e-5
    )
    # the learning rate starts at a twentieth, because Adam's first steps are large
    moved = jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), trained.params, params))
    rate = characters.LEARNING_RATE / characters.WARM_UP
    assert rate < min(moved) and max(moved) < 4 * rate
    assert trained.speed(4) == pytest.approx(4 * 16 / trained.seconds)


def test_the_library_is_that_of_the_running_python() -> None:
    assert all(p.stem in sys.stdlib_module_names for p in characters.modules(LIBRARY))
    assert LIBRARY / "ast.py" in list(characters.modules(LIBRARY))


def test_devices_that_were_asked_for_stay() -> None:
    """Before JAX starts, a job requests more devices, never fewer.

    After the start, the number of devices is fixed.
    """
    code = """
        import jax
        from examples.compare import virtual_devices
        virtual_devices(3), virtual_devices(2)
        print(len(jax.devices("cpu")))
        virtual_devices(5)
        print(len(jax.devices("cpu")))
    """
    environment = {
        k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.split() == ["3", "3"]
