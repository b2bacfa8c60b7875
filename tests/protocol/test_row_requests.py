"""Requests for table rows that consist of several messages."""

from __future__ import annotations

import numpy as np
import pytest

from dtrans.errors import WireError
from dtrans.protocol import wire
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.server_blocks import TableSpec
from dtrans.protocol.tables.row_requests import RowRequests


def message(pieces: list[tuple[str, int, int]], ids: np.ndarray) -> wire.Message:
    """A part of a request for four rows of block `t`."""
    fields = {"step": 0, "table": "t", "count": 4, "train": False, "pieces": [pieces]}
    frames = [wire.header("prefetch", **fields), ids.astype(np.int32).tobytes()]
    return wire.parse(frames)


def test_a_malformed_part_does_not_drop_the_request() -> None:
    requests = RowRequests("here:1", {"t": TableSpec(10, (), np.dtype("float32"), {0: "t@GRAD"})})
    grads = Inbox({}, str)
    assert requests.take(0, message([("ids", 0, 8)], np.array([1, 4])), grads) is None
    with pytest.raises(WireError, match="expected its bytes from 8 on"):
        requests.take(0, message([("ids", 4, 8)], np.array([5, 7])), grads)
    found = requests.take(0, message([("ids", 8, 8)], np.array([5, 7])), grads)
    assert found is not None
    assert found[1].tolist() == [1, 4, 5, 7]
