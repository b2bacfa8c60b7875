"""Word vectors: the trained vectors, compared with one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dtrans.errors import ConfigError
from examples import word2vec
from examples.__main__ import app
from examples.word2vec import ENOUGH, PARTNERS, Words, WordSettings, nearest, read


def test_the_text_is_words_and_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word2vec, "FREQUENT", 1.0)
    (tmp_path / "a.py").write_text("import os, x1\n" * 9 + "rare = 1")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "b.py").write_text("skipped " * 99)
    words = read(library=tmp_path)
    assert words.words.tolist() == ["import", "os"] and words.counts.tolist() == [9, 9]
    assert set(zip(words.centers.tolist(), words.contexts.tolist(), strict=True)) <= {
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    }
    words.save(tmp_path / "words.npz")
    again = Words.load(tmp_path / "words.npz")
    for a, b in zip(words.batch(WordSettings(), 3), again.batch(WordSettings(), 3), strict=True):
        assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no source of Python's standard library"):
        read(library=tmp_path / "empty")


def test_the_nearest_words_are_those_of_the_smallest_angles() -> None:
    words = Words(np.array(["int", "float", "list"]), np.ones(3), *np.zeros((2, 0), np.int32))
    vectors = np.array([[1.0, 0.0], [9.0, 1.0], [0.0, 1.0]])
    assert nearest(words, vectors, "int", 2) == ["float", "list"]
    with pytest.raises(ConfigError, match="'no' is not among the 3 words"):
        nearest(words, vectors, "no")


def test_a_few_steps_in_processes_are_those_of_one_device() -> None:
    """After so few steps the vectors have learned nothing, so the command exits with 1."""
    made = train("--steps", "12", "--batch-size", "256", "--trainers", "2", "--loss", "tree")
    assert made.exit_code == 1 and "fewer than 15 words have a partner" in made.output
    assert (
        "losses against one device on the same 12 batches" in made.output
        and "above the bound" not in made.output
    )


@pytest.mark.soak
def test_words_that_are_used_alike_have_vectors_that_are_alike(tmp_path: Path) -> None:
    made = train("--plot", str(tmp_path / "words.png"))
    assert made.exit_code == 0, made.output
    assert (tmp_path / "words.png").stat().st_size > 10_000
    assert len(PARTNERS) == 20 and ENOUGH == 15


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--batch-size", "63"], "63 pairs cannot be divided among 2 trainers"),
        (["--loss", "softmax"], "loss"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments: list[str], said: str) -> None:
    made = train(*arguments)
    assert made.exit_code and said in str(made.exception)


def train(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["word2vec", *arguments])
