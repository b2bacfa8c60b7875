"""Digest of the state of a simulated process: equal digests mean equal behaviour.

The digest contains all attributes of the protocol's state machines, without logs, statistics and
the memory of arrays that have not arrived. Instead of a time, it contains whether the time has
passed, because the timers of `tools.simulate.choice_clock` may fire at any moment. Entries of a
dict have no order in the digest: the order affects only the order of messages to different
processes, and the order of two summands.
"""

from __future__ import annotations

import collections
import hashlib
import math
import types
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import numpy as np

from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.job_status import StatusReporter
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.server.server_loop import ServerLoop
from dtrans.protocol.server.server_peers import ServerPeers
from dtrans.protocol.server.serving import Serving
from dtrans.protocol.server.step_waits import StepWaits
from dtrans.protocol.server.trainer_registry import TrainerRegistry
from dtrans.protocol.server.trainer_state import Trainer
from dtrans.protocol.server_blocks import ServerBlocks
from dtrans.protocol.trainer.operation import PendingAnswer
from dtrans.protocol.trainer.trainer_line import TrainerLine
from dtrans.protocol.transport import RETRY
from dtrans.protocol.wait_reminder import WaitReminder
from dtrans.protocol.wire import Message
from tools.simulate.between_steps import BetweenSteps
from tools.simulate.case import Case
from tools.simulate.clock import Clock
from tools.simulate.launcher import SimulatedGenerations, SimulatedLauncher
from tools.simulate.network import Network, SimulatedLink, SimulatedListener, SimulatedTransport
from tools.simulate.process import Process
from tools.simulate.storage import SimulatedStorage
from tools.simulate.trainer_role import Origin, SimulatedTrainer
from tools.simulate.updates import SimulatedTables


# Objects without a state, and objects whose state never affects a message
STATELESS = (
    *(BufferPool, Case, Clock, Network, Origin, Random, ServerBlocks, SimulatedGenerations),
    *(SimulatedLauncher, SimulatedStorage, SimulatedTables, SimulatedTransport, BetweenSteps),
    *(Refusals, StatusReporter, WaitReminder),
)

# Attributes that never affect a message: statistics, texts of errors, starts of waits, and results
UNUSED: dict[type, frozenset[str]] = {
    Process: frozenset({"spent", "killed_at", "_took", "ended", "_free", "_wakes"}),
    SimulatedTrainer: frozenset(
        {
            *("pulled", "pushed", "reduced", "looked_up", "begun_generations", "newest_received"),
            *("left_at", "greeted_at", "welcomed_at"),
        }
    ),
    Serving: frozenset({"_now"}),
    ServerLoop: frozenset({"_next_look", "_next_generation_look"}),
    StepWaits: frozenset({"_since"}),
    Trainer: frozenset({"heard_at", "received", "sent"}),
    TrainerRegistry: frozenset({"started", "to_servers"}),
    TrainerLine: frozenset({"patience", "_since", "_waits_for", "_reason", "_deadline"}),
    PendingAnswer: frozenset({"memory", "room", "what", "reply"}),
    ServerPeers: frozenset({"_levels"}),
}


# Attributes whose truth value alone affects messages. `TrainerRegistry.lost` only tests if `silent`
# is 0.
# `ServerLoop` compares `_lost_at` with None, and with a deadline that never passes in a search.
ONLY_TRUTH: dict[type, frozenset[str]] = {
    TrainerRegistry: frozenset({"silent"}),
    ServerLoop: frozenset({"_lost_at"}),
}


def digest_of(x: Any, now: float) -> str:
    """Return the digest of an object.

    Args:
      x: the object.
      now: time of the object's process.
    """
    return hashlib.blake2b(text_of(x, now).encode(), digest_size=16).hexdigest()


def text_of(x: Any, now: float) -> str:
    """Return a text with the state of an object; equal states have equal texts."""
    writer = _Writer(now)
    writer.write(x)
    return " ".join(writer.parts)


class _Writer:
    def __init__(self, now: float) -> None:
        self.parts: list[str] = []
        self._now, self._seen = now, dict[int, int]()
        self._owner: Process | None = None

    def write(self, x: Any) -> None:
        """Add an object to the text."""
        say = self.parts.append
        if x is None or isinstance(x, (int, str, bytes, slice)):
            say(repr(x))
        elif isinstance(x, float):
            say(self._time(x))
        elif isinstance(x, (np.ndarray, memoryview)):
            say(x.tobytes().hex())
        elif isinstance(x, (list, tuple, collections.deque)):
            self._write_all(x)
        elif isinstance(x, dict):
            self._write_all(sorted(x.items(), key=_key_text))
        elif isinstance(x, (set, frozenset)):
            say(repr(sorted(x)))
        elif isinstance(x, BaseException):
            say(type(x).__name__)
        elif isinstance(x, types.GeneratorType):
            self._write_script(x)
        elif isinstance(x, SimulatedLink):
            say(repr(x.address))
        elif isinstance(x, SimulatedListener):
            say(x.endpoint)
        elif isinstance(x, Message) and x.op == "waiting":
            pass  # the message only restarts a deadline, and deadlines are not a part of the digest
        elif not isinstance(x, STATELESS) and not callable(x):
            self._write_object(x)

    def _write_all(self, items: Any) -> None:
        self.parts.append("[")
        for item in items:
            self.write(item)
        self.parts.append("]")

    def _write_object(self, x: Any) -> None:
        say = self.parts.append
        if isinstance(x, Process):
            if self._owner not in (None, x):
                say(x.name)
                return
            self._owner = x
        if id(x) in self._seen:
            say(f"*{self._seen[id(x)]}")
            return
        self._seen[id(x)] = len(self._seen)
        say(type(x).__name__)
        if isinstance(x, Inbox):
            self._write_arrived(x)
            return
        if isinstance(x, SimulatedTrainer):
            say(repr([step for step, _ in x.pulled[-1:]]))
        for name, value in _attributes(x):
            say(name)
            self.write(bool(value) if name in ONLY_TRUTH.get(type(x), ()) else value)

    def _write_arrived(self, inbox: Inbox) -> None:
        """Add the bytes that have arrived; all other bytes are uninitialized memory."""
        for name, nbytes in inbox._arrived.items():
            self.parts.append(f"{name} {nbytes}")
            if name in inbox.memory:
                self.parts.append(
                    inbox.memory[name].reshape(-1).view(np.uint8)[:nbytes].tobytes().hex()
                )

    def _write_script(self, script: types.GeneratorType[Any, Any, Any]) -> None:
        """Add the position and the local variables of a generator, without its arrays."""
        at: Any = script
        while isinstance(at, types.GeneratorType) and at.gi_frame is not None:
            self.parts.append(f"{at.gi_code.co_name} {at.gi_frame.f_lasti}")
            for name, value in sorted(at.gi_frame.f_locals.items()):
                if isinstance(value, (int, str, type(None), BaseException)):
                    self.parts.append(name)
                    self.write(value)
            at = at.gi_yieldfrom

    def _time(self, x: float) -> str:
        if math.isinf(x) or math.isnan(x):
            return str(x)
        if x > self._now:
            return "later"
        return "now" if x > self._now - RETRY else "past"


def _key_text(entry: tuple[Any, Any]) -> str:
    return repr(entry[0])


def _attributes(x: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object that may affect a message."""
    if isinstance(x, Mapping):
        yield from x.items()
        return
    unused: set[str] = set()
    for kind in type(x).__mro__:
        unused |= UNUSED.get(kind, frozenset())
    for name, value in sorted(vars(x).items()):
        if name not in unused:
            yield name, value
