"""Errors of trainers that check that they train the same step."""

from __future__ import annotations

import pytest

from dtrans.errors import PeerError
from dtrans.run.distributed import multihost


def test_an_error_about_one_trainer_is_in_the_singular() -> None:
    with pytest.raises(PeerError, match="^trainer 1 disagrees with trainer 0 .*: it has x$"):
        multihost._check_equal({0: ["a"], 1: ["b"]}, 0, "x")


def test_an_error_about_several_trainers_is_in_the_plural() -> None:
    with pytest.raises(
        PeerError, match="^trainer 1 and trainer 2 disagree with trainer 0 .*: they have x$"
    ):
        multihost._check_equal({0: ["a"], 1: ["b"], 2: ["c"]}, 0, "x")
