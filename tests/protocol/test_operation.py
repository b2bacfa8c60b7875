"""Operations of a trainer. A pending operation is a value, which can be copied in the middle."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dtrans.errors import CheckpointError, PeerError
from dtrans.protocol import wire
from dtrans.protocol.trainer.geo_steps import GeoSteps
from dtrans.protocol.trainer.operation import Operation
from dtrans.protocol.trainer.trainer_line import TrainerLine
from dtrans.protocol.trainer.trainer_steps import TrainerSteps, leave
from tools.simulate.updates import InNumpy


class Lines:
    """Two servers of a trainer, and the messages that it sends them."""

    def __init__(self) -> None:
        self.said: list[wire.Message] = []
        self.known = {ep: self._line(ep) for ep in "ab"}
        self.steps = TrainerSteps(self.known.__getitem__)
        self.memory = {ep: np.zeros(4, np.float32) for ep in "ab"}

    def _line(self, endpoint: str) -> TrainerLine:
        return TrainerLine(endpoint, 0, 1, session="", sync_mode=True, plan={}, secret="",
                           deadline=1.0, say=self.say)  # fmt: skip

    def say(self, frames: Sequence[Any]) -> None:
        self.said.append(wire.parse(frames))

    def begin(self, kind: str) -> Operation[Any]:
        """Begin an operation of a kind."""
        steps, blocks = self.steps, [(ep, "t") for ep in "ab"]
        match kind:
            case "exchange":
                return steps.exchange("a", 0, [(np.ones(4, np.float32), ("all_reduce", "sum"))])
            case "prefetch":
                wanted = [(ep, "t", np.arange(4), rows) for ep, rows in self.memory.items()]
                return steps.prefetch(wanted, train=True)
            case "request":
                return steps.request([(ep, "t", x) for ep, x in self.memory.items()], "ab", ())
            case "saved":
                steps.save("ab", "one", 3)
                return steps.saved()
            case "evict" | "changed":
                return getattr(steps, kind)(blocks, 1)
            case "tables":
                return steps.tables("ab")
        self.known["a"].opened()
        return leave(self.known["a"])

    def take(self, operation: Operation[Any], first: bool) -> None:
        """Deliver the first or the second half of the awaited answer."""
        answer = operation.waits_for
        half = [["t", 0 if first else 8, 8]]
        rows = np.full(2, 1.0 if first else 2.0, np.float32).tobytes()
        fields: dict[str, Any] = {**answer.fields}
        match answer.op:
            case "exchanged":
                fields |= {"values": [["float32", [4]]], "pieces": [[["0", *half[0][1:]]]]}
            case "rows":
                fields |= {"pieces": [half]}
            case "blocks":
                fields |= {"pieces": [half]}
            case "changes":
                pieces = [["ids" if first else "gone", 0, 8]]
                fields |= {"now": 5, "count": 2, "gone": 2, "error": "", "pieces": [pieces]}
            case "saved":
                fields |= {"error": ""}
            case "evicted":
                fields |= {"error": "", "count": 3}
            case "report":
                fields |= {"tables": []}
        request = {"request": answer.number} if answer.number else {}
        frames = [rows] if "pieces" in fields else []
        message = answer.line.receive([wire.header(answer.op, **fields, **request), *frames])
        assert message is not None
        heard = answer.line.answer(message, 0.0)
        assert heard is not None
        operation.take(heard)


KINDS = ("exchange", "prefetch", "request", "saved", "tables", "evict", "changed", "leave")


def finished(lines: Lines, operation: Operation[Any]) -> Any:
    """Finish an operation, after the first half of its answer or its first answer has arrived."""
    first = False
    while not operation.done:
        blocks = operation.waits_for.op in ("exchanged", "rows", "blocks", "changes")
        lines.take(operation, first)
        first = blocks and not first
    said = [(x.op, x.fields) for x in lines.said]
    return str(operation.result), said, {n: x.tolist() for n, x in lines.memory.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_an_operation_is_copied_in_the_middle(kind: str) -> None:
    lines = Lines()
    operation = lines.begin(kind)
    if kind != "leave":
        lines.take(operation, first=True)
    assert not operation.done
    before = {n: x.tolist() for n, x in lines.memory.items()}
    others, other = copy.deepcopy((lines, operation))
    made = finished(others, other)
    assert {n: x.tolist() for n, x in lines.memory.items()} == before
    assert finished(lines, operation) == made
    assert kind not in ("prefetch", "request") or made[2] == {ep: [1, 1, 2, 2] for ep in "ab"}


def test_a_finished_operation_leaves_its_memory_to_others() -> None:
    lines = Lines()
    operation = lines.begin("prefetch")
    lines.known["a"].wait(operation.waits_for, 0.0)
    lines.take(operation, first=True)
    finished(lines, operation)
    memory = weakref.ref(lines.memory.pop("a"))
    del operation
    assert memory() is None


def test_who_could_not_is_named_when_all_have_answered() -> None:
    lines = Lines()
    operation = lines.begin("saved")
    fields = {"name": "one", "request": 1}
    operation.take(wire.Message("saved", {**fields, "error": "no room"}))
    assert not operation.done
    with pytest.raises(
        CheckpointError, match="pserver a could not save its part of .* one: no room"
    ):
        operation.take(wire.Message("saved", {**fields, "error": ""}))
    with pytest.raises(PeerError, match="pserver a answered `tables` with `blocks`"):
        lines.begin("tables").take(wire.Message("blocks", {"step": 0, "pieces": []}))


class Pushes:
    """Queue of pushes. An answer arrives when it is requested."""

    def __init__(self) -> None:
        self.server, self.put_count, self.answered = np.zeros(2, np.float32), 0, 0

    def put(self, deltas: Any, steps: int) -> None:
        self.server, self.put_count = self.server + deltas[0], self.put_count + 1

    def repeat(self, deltas: Any, steps: int, endpoints: Any) -> None:
        raise AssertionError("no process is lost")

    def received(self) -> int:
        return self.answered

    def newest(self) -> Any:
        return [self.server]


def test_geo_sgd_is_copied_where_it_waits() -> None:
    queue = Pushes()
    geo = GeoSteps(queue, InNumpy(), 1, [queue.server])
    geo.step([geo.local[0] + 1], 1, block_on_pull=True)
    assert geo.waits

    def go_on(queue: Pushes, geo: GeoSteps) -> Any:
        while geo.waits:
            queue.answered = queue.put_count
            geo.go_on()
        geo.step([geo.local[0] * 3], 1, block_on_pull=False)
        geo.finish()
        return queue.server.tolist(), geo.local[0].tolist(), queue.put_count

    made = go_on(*copy.deepcopy((queue, geo)))
    assert queue.put_count == 1
    assert go_on(queue, geo) == made == ([3, 3], [3, 3], 2)
