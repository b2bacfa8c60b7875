"""Checks of the answers to requests between steps: checkpoints, and requests about tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tools.simulate.between_steps import Answered
from tools.simulate.case import COMMUNICATING, Case, Request
from tools.simulate.one_device import OneDevice
from tools.simulate.server_role import SimulatedServer
from tools.simulate.storage import checkpoint_name
from tools.simulate.trainer_role import SimulatedTrainer
from tools.simulate.updates import SimulatedBlocks


Servers = Mapping[str, SimulatedServer]
Trainers = Sequence[SimulatedTrainer]


def faults_of_saves(case: Case, servers: Servers, trainers: Trainers) -> Iterator[str]:
    """Yield checkpoints whose contents or errors differ from the answers to trainers."""
    for t, answer in _answers(trainers, "save"):
        request, name = answer.request, checkpoint_name(case, answer.request)
        for ep, server in servers.items():
            steps, _ = server.storage.written.get(name, (None, {}))
            if not answer.result and steps != request.step:
                what = "not written" if steps is None else f"of step {steps}"
                yield (
                    f"{t.name} received the answer that {name} is saved after {request.step} "
                    f"steps, but on pserver {ep} it is {what}"
                )
        if answer.result and f"pserver {request.fails} could not" not in answer.result:
            yield f"{t.name} received an unexpected error about {name}: {answer.result}"


def faults_of_answers(
    case: Case, device: OneDevice, servers: Servers, trainers: Trainers
) -> Iterator[str]:
    """Yield answers of synchronous servers that differ from the results of one device."""
    for _, answer in _answers(trainers, "save"):
        name, step = checkpoint_name(case, answer.request), answer.request.step
        for server in servers.values():
            saved = server.storage.written.get(name, (0, {}))[1]
            states = [device.values[step]]
            evicting = {k for x in case.requests if x.kind == "evict" for k in x.trainers}
            # The first request for a checkpoint starts the write. Between two steps, a trainer
            # evicts before it saves. So the write precedes the eviction in two cases: if a
            # requesting trainer does not evict, or if it requests the checkpoint before the answer
            # of the step.
            all_evict = evicting.issuperset(answer.request.trainers)
            if not all_evict or answer.request.moment == "ended":
                states.append(device.before[step][0])
            if not any(_is_state(saved, one) for one in states):
                yield f"{server.name} wrote a state to {name} that is not the one after step {step}"
    for t, answer in _answers(trainers, "report", "changes", "export", "evict"):
        request, step = answer.request, answer.request.step
        if request.kind == "evict" and case.eviction_after(step) is None:
            yield (
                f"rows were evicted after step {step}, but only trainers {request.trainers} "
                "requested it"
            )
            continue
        one = _on_one_device(request, device.values[step], device.changed_at[step])
        before = _on_one_device(request, *device.before[step])
        asked_evict = any(x.kind == "evict" and t.k in x.trainers for x in case.requests)
        found = _comparable(request, answer.result)
        if found != one and (asked_evict or found != before):
            yield (
                f"{t.name} requested {request.kind} after step {step} and received {found}, "
                f"expected {one}"
            )


def _is_state(saved: Mapping[str, bytes], state: Mapping[str, np.ndarray]) -> bool:
    return all(x == state[n].tobytes() for n, x in saved.items())


def faults_of_block(
    case: Case,
    server: SimulatedServer,
    block: str,
    after: Sequence[tuple[int, ...]],
    trainers: Trainers,
) -> Iterator[str]:
    """Yield answers of an asynchronous server that match no state between two steps of the trainer.

    Args:
      block: name of the block.
      after: for each value that the block has had, the number of steps of each trainer in it.
    """
    update = server.update
    assert isinstance(update, SimulatedBlocks)
    values = list(zip(update.history[block], after, strict=True))
    evicted = {i for name, i, _ in update.evicted if name == block}
    updates = [known for i, known in enumerate(after) if i not in evicted]
    for t, answer in _answers(trainers, "save"):
        name = checkpoint_name(case, answer.request)
        saved = server.storage.written.get(name, (0, {block: b""}))[1][block]
        moments = [known for x, known in values if x == saved]
        who = answer.request.trainers
        if saved and not any(x[k] == _sends(case, answer.request, k) for x in moments for k in who):
            yield (
                f"{server.name} wrote to {name} a value of {block} after {moments} steps, expected "
                f"the value after {answer.request.step} steps of {t.name}"
            )
    if block not in case.tables:
        return
    for t, answer in _answers(trainers, "report", "changes", "export"):
        due = _sends(case, answer.request, t.k)
        number = list(case.tables).index(block)
        if answer.request.kind == "export":
            rows = answer.result[number].tobytes()
            moments = [known for x, known in values if x == rows]
        else:
            result = answer.result[number]
            now = result.step if answer.request.kind == "report" else result[0]
            moments = updates[now : now + 1]
        if not any(known[t.k] == due for known in moments):
            yield (
                f"{t.name} requested {answer.request.kind} after {due} sends, but {server.name} "
                f"answered with {block} after {moments} sends"
            )


def _answers(trainers: Trainers, *kinds: str) -> Iterator[tuple[SimulatedTrainer, Answered]]:
    for t in trainers:
        for answer in t.between.answers:
            if answer.request.kind in kinds:
                yield t, answer


def _sends(case: Case, request: Request, k: int) -> int:
    """Return the number of gradients that a trainer sent before its request."""
    return case.sends[k] if case.mode in COMMUNICATING else request.step


def _on_one_device(
    request: Request, values: Mapping[str, np.ndarray], changed_at: Mapping[str, np.ndarray]
) -> Any:
    step, since = request.step, request.step // 2
    if request.kind == "report":
        return [(n, len(at), int(np.sum(at > 0)), step) for n, at in changed_at.items()]
    if request.kind == "changes":
        ids = [(np.flatnonzero(x > since), np.flatnonzero(x < -since)) for x in changed_at.values()]
        return [(step, new.tolist(), gone.tolist()) for new, gone in ids]
    if request.kind == "evict":
        return sum(int(np.sum(at == -step - 1)) for at in changed_at.values())
    return [values[n].tolist() for n in changed_at]


def _comparable(request: Request, result: Any) -> Any:
    """Return an answer in the form of the result of `_on_one_device`."""
    if request.kind == "report":
        return [(x.name, x.rows, x.created, x.step) for x in result]
    if request.kind == "changes":
        return [(now, new.tolist(), gone.tolist()) for now, new, gone in result]
    return result if request.kind == "evict" else [x.tolist() for x in result]
