"""Asynchronous modes of parameter servers, for the tests of verification."""

from __future__ import annotations

from typing import Any

import dtrans


SERVERS = "127.0.0.1:1,127.0.0.1:2"
DELAY = dtrans.DelayCompensation(0.5)
ASYNCHRONOUS: dict[str, Any] = {
    "async": dtrans.Async(),
    "compensated": dtrans.Async(delay=DELAY),
    "adaptive": dtrans.Async(delay=dtrans.DelayCompensation(0.5, decay=0.9)),
    "half": dtrans.HalfAsync(delay=DELAY),
    "communicator": dtrans.Async(communicator=dtrans.CommunicatorConfig(max_merge_var_num=1)),
    "geo": dtrans.Geo(push_every=2),
    "geo that waits": dtrans.Geo(push_every=1, block_on_pull=True),
}
