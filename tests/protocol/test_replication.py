"""Replicas of servers: the messages that a backup accepts from a primary, and the states of the
backup."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from dtrans.errors import WireError
from dtrans.protocol import wire
from dtrans.protocol.server.replication import StoredReplicas
from tools.simulate.case import Case
from tools.simulate.updates import SimulatedUpdate, gradient_name, primary_of, served, snapshot_of


CASE = Case(seed=0, mode="sync", steps=(9, 9), servers=((3,), (2,)), snapshots=20, at_loss=True)
PRIMARY = CASE.endpoints[0]
BLOCK = f"{PRIMARY}/w0"


def backup(updates: list[SimulatedUpdate] | None = None, case: Case = CASE) -> StoredReplicas:
    """Return the copies of a backup, before the first message of its primary.

    Args:
      updates: gets the update of each copy.
      case: the job.
    """

    def new_replica(endpoint: str, state: Mapping[str, np.ndarray], step: int) -> SimulatedUpdate:
        update = SimulatedUpdate(served(case, endpoint), lambda: None, keeps_old=True, merges=True)
        update.go_back(snapshot_of({n: x.copy() for n, x in state.items()}))
        if updates is not None:
            updates.append(update)
        return update

    return StoredReplicas({PRIMARY: primary_of(served(case, PRIMARY))}, new_replica)


def replica(step: int, name: str, x: Any, *, is_state: bool = False) -> wire.Message:
    """Return the message with an array."""
    blocks = [(name, np.asarray(x, np.float32))]
    (frames,) = wire.framed("replica", blocks, step=step, is_state=is_state)
    return wire.parse(frames)


def inputs(step: int, value: float = 1.0) -> wire.Message:
    return replica(step, gradient_name(BLOCK, 0), [value] * 3)


def begun(step: int, updates: list[SimulatedUpdate] | None = None) -> StoredReplicas:
    """Return the copies of a backup that has the state after a step."""
    copies = backup(updates)
    assert copies.take(PRIMARY, replica(step, BLOCK, [0, 0, 0], is_state=True)) is None
    assert copies.received(PRIMARY) == step
    return copies


def test_a_backup_has_the_two_newest_states_of_its_primary() -> None:
    copies = begun(4)
    assert list(copies.newest(PRIMARY)) == [4]
    assert copies.take(PRIMARY, inputs(4)) == 5
    assert copies.take(PRIMARY, inputs(5)) == 6
    copies.apply(4)  # nothing is due before this step
    found = copies.newest(PRIMARY)
    assert list(found) == [6, 5]
    assert found[5][BLOCK].tolist() == [1.0] * 3 and found[6][BLOCK].tolist() == [1.5] * 3


def test_inputs_are_applied_up_to_a_step() -> None:
    updates: list[SimulatedUpdate] = []
    copies = begun(0, updates)
    assert copies.take(PRIMARY, inputs(0)) == 1
    copies.apply(1)
    assert copies.take(PRIMARY, inputs(1, 3.0)) == 2
    copies.apply(1)
    assert [update.state[BLOCK].tolist() for update in updates] == [[1.0] * 3]
    # the memory of the applied inputs is reused
    assert copies.take(PRIMARY, inputs(2, 5.0)) == 3
    assert list(copies.newest(PRIMARY)) == [3, 2]
    assert copies.newest(PRIMARY)[2][BLOCK].tolist() == [3.5] * 3


def test_a_backup_without_a_copy_has_no_states() -> None:
    assert backup().newest(PRIMARY) == {} == backup().newest("another:1")
    assert backup().received(PRIMARY) is backup().received("another:1") is None


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (inputs(5), "of step 5, expected inputs of step 4"),
        (inputs(3), "of step 3, expected inputs of step 4"),
        (replica(4, BLOCK, [0, 0, 0], is_state=True), "expected inputs of step 4"),
        (replica(4, "another", [0, 0, 0]), "with the unknown array 'another'"),
        (replica(4, gradient_name(BLOCK, 0), [0] * 4), "which has 12 bytes"),
    ],
)
def test_unexpected_messages_are_refused_and_change_nothing(
    message: wire.Message, text: str
) -> None:
    copies = begun(4)
    with pytest.raises(WireError, match=text):
        copies.take(PRIMARY, message)
    assert copies.take(PRIMARY, inputs(4)) == 5


@pytest.mark.parametrize("count", [-1, 5, True, None])
def test_a_number_of_rows_out_of_range_is_refused(count: Any) -> None:
    case = dataclasses.replace(CASE, table=4)
    blocks = served(case, PRIMARY)
    (name,) = blocks.tables
    copies = backup(case=case)
    update = SimulatedUpdate(blocks, lambda: None)
    for frames in wire.framed("replica", *update.state_blocks()[:1], step=0, is_state=True):
        copies.take(PRIMARY, wire.parse(frames))
    grad = gradient_name(name, 0)
    ids = np.zeros(1, np.int32)
    rows = {f"ids {grad}": count, grad: 1}
    (frames,) = wire.framed("replica", [(f"ids {grad}", ids)], step=0, is_state=False, rows=rows)
    with pytest.raises(WireError, match=r"rows of ids .*, expected 0 to 4"):
        copies.take(PRIMARY, wire.parse(frames))


def test_an_eviction_of_another_step_is_refused() -> None:
    message = wire.Message("replica_evict", {"step": 5, "table": "t", "unused_for": 1})
    with pytest.raises(WireError, match="`replica_evict` message of step 5, expected step 4"):
        begun(4).take(PRIMARY, message)
    with pytest.raises(WireError, match="expected step None"):
        backup().take(PRIMARY, message)


def test_the_state_comes_first_and_from_the_primary_alone() -> None:
    with pytest.raises(WireError, match="expected the state"):
        backup().take(PRIMARY, inputs(4))
    with pytest.raises(WireError, match="another:1 sent `replica`, but its backup is another"):
        begun(4).take("another:1", inputs(4))
