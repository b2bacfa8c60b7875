"""Requests for checkpoints whose arrays come from several trainers."""

from __future__ import annotations

import types
from typing import Any

import jax
import numpy as np
import pytest

from dtrans.errors import WireError
from dtrans.protocol import wire
from dtrans.protocol.server.save_requests import SaveRequests


FLOATS = wire.MESSAGE_BYTES // 4 + 10  # an array that needs two messages


class Requests:
    """Requests of the trainers 0, 1 and 2; the server saves arrays of the trainers 0 and 2."""

    def __init__(self) -> None:
        self.said: list[tuple[bytes, dict[str, Any]]] = []
        self.started: list[tuple[str, int, dict[str, np.ndarray]]] = []
        self.gone, self.left, self.begun = set[int](), set[int](), set[int]()
        known = {k: types.SimpleNamespace(address=b"%d" % k) for k in range(3)}
        trainers: Any = types.SimpleNamespace(
            present=[0, 1, 2],
            known=known,
            left=self.left,
            left_before_step=lambda k, step: k in self.gone,
        )
        status: Any = types.SimpleNamespace(saving={}, saved=lambda *_: None)
        self.saves = SaveRequests(trainers, status, self.say)
        self.saves.start = self.start
        array = jax.ShapeDtypeStruct((1, FLOATS), np.dtype("float32"))
        steps: Any = types.SimpleNamespace(step=7, has_begun=lambda k: k in self.begun)
        self.saves.expect({0: {"e.0": array}, 2: {"e.2": array}}, steps)

    def say(self, address: bytes, op: str, **fields: Any) -> None:
        if op == "saved":
            self.said.append((address, fields))

    def start(self, name: str, steps: int, arrays: Any) -> int:
        self.started.append((name, steps, dict(arrays)))
        return len(arrays)

    def take(self, k: int, *, parts: slice = slice(None), name: str = "") -> None:
        """Deliver some of the messages of a trainer's request, or all of them."""
        blocks = [(name or f"e.{k}", np.full((1, FLOATS), k, np.float32))] if k != 1 else []
        fields = {"step": 7, "name": "a", "made": 7, "request": k}
        for frames in list(wire.framed("save", blocks, **fields))[parts]:
            self.saves.take(k, wire.parse(frames), now=0.0)

    def errors(self) -> dict[bytes, str]:
        return {address: fields["error"] for address, fields in self.said}


def test_the_write_starts_when_the_arrays_of_all_trainers_have_arrived() -> None:
    job = Requests()
    first, rest = slice(1), slice(1, None)
    job.take(2, parts=first)
    job.take(1)
    job.take(0)
    job.saves.look()
    assert not job.started and job.saves.asked() == {"a": 7}
    job.take(2, parts=rest)
    ((name, steps, arrays),) = job.started
    assert (name, steps) == ("a", 7)
    for k in (0, 2):
        np.testing.assert_array_equal(arrays[f"e.{k}"], np.full((1, FLOATS), k))
    job.saves.look()
    assert not job.said
    job.saves.written("a", "", 1.0)
    assert job.errors() == {b"0": "", b"1": "", b"2": ""}


@pytest.mark.parametrize("what", ["begun its next step", "closed its job"])
def test_a_trainer_that_goes_on_is_named(what: str) -> None:
    job = Requests()
    job.take(0)
    (job.begun if what == "begun its next step" else job.left).add(2)
    job.saves.look()
    assert list(job.errors()) == [b"0"]
    assert f"trainer 2 has {what} without job.save('a')" in job.errors()[b"0"]
    assert not job.started and not job.saves.asked()


def test_a_trainer_that_left_in_an_earlier_step_has_no_rounding_errors() -> None:
    job = Requests()
    job.gone.add(2)
    job.take(0)
    ((_, _, arrays),) = job.started
    assert np.all(arrays["e.0"] == 0) and np.all(arrays["e.2"] == 0)
    job = Requests()
    job.gone.add(0)
    job.take(2)
    ((_, _, arrays),) = job.started
    assert np.all(arrays["e.0"] == 0) and np.all(arrays["e.2"] == 2)


def test_an_array_that_the_plan_does_not_have_is_refused() -> None:
    job = Requests()
    with pytest.raises(WireError, match="`save` message of trainer 0 with the array 'e.1', which"):
        job.take(0, name="e.1")
    assert not job.saves.asked()
    job.take(0)
    job.take(2)
    assert len(job.started) == 1
