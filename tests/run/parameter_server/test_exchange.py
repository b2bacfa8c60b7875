"""Servers that exchange partial results: packed arrays, jobs on a mesh and over endpoints, and
failures."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exchanges import (
    MOMENTUM,
    NORM,
    RATE,
    SGD,
    all_reduce,
    block,
    clip_factor,
    clipping_plan,
    reference,
)
from helpers import (
    assemble,
    blocks_of,
    distance,
    endpoints,
    mlp_batch,
    mlp_loss,
    mlp_params,
    plain_run,
    plain_step,
    tree_close,
)
from paths import ROOT, SUPPORT
from role_threads import HANG, NEVER, FakeServer, Peer, RoleThreads, free_endpoints, serve, train
from strict_python import STRICT_PYTHON

from dtrans.errors import DeadlineError, LostPeerError, PeerError
from dtrans.ir.program import DIST
from dtrans.ops import combine
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.server.exchange import Exchange, vector_types


# -- what is packed --------------------------------------------------------------------------------

ENDS = ("a:1", "b:2", "c:3", "d:4")


def random_exchanges(
    seed: int,
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]], dict[str, Exchange]]:
    """Return some reductions, the part of each owner, and the exchange of each server.

    Each server lists the reductions in a different order.
    """
    rng = np.random.default_rng(seed)
    reductions: list[dict[str, Any]] = []
    values: dict[str, dict[str, Any]] = {ep: {} for ep in ENDS}
    for i in range(40):
        over = [ep for ep in ENDS if rng.random() < 0.6]
        if len(over) < 2:
            over = list(ENDS)
        owners = [ep for ep in over if rng.random() < 0.6] or over[:1]
        rng.shuffle(owners)
        dtype = ["float32", "bool", "int32", "bfloat16"][rng.integers(4)]
        ops = ["and", "or"] if dtype == "bool" else ["sum", "prod", "max", "min"]
        shape = [(), (3,), (2, 2), (0, 2), (1,)][rng.integers(5)]
        reductions.append(
            {
                "name": f"all_reduce/{i}",
                "op": ops[rng.integers(len(ops))],
                "owners": tuple(owners),
                "over": tuple(over),
            }
        )
        for ep in over:
            values[ep][f"all_reduce/{i}"] = jnp.asarray(rng.normal(size=shape) * 3).astype(dtype)
    made: dict[str, Exchange] = {}
    for ep in ENDS:
        mine = [r for r in reductions if ep in r["over"]]
        rng.shuffle(mine)  # type: ignore[arg-type]
        types = {f"{r['name']} here": values[ep][r["name"]] for r in mine}
        fn = lambda *xs, mine=mine: [
            xs[0],
            *(all_reduce(**r, x=x) for r, x in zip(mine, xs, strict=True)),
        ]
        exchange = Exchange.of(
            block("all_reduce", DIST, 0, fn, types, ["plain", *(r["name"] for r in mine)]), ep
        )
        assert exchange is not None
        made[ep] = exchange
    return reductions, values, made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
def test_every_server_gets_what_it_needs_and_all_get_the_same_bits(seed: int) -> None:
    reductions, values, exchanges = random_exchanges(seed)
    sent = {ep: x.addressed(jax.jit(x.pack)(values[ep])) for ep, x in exchanges.items()}
    for ep, x in exchanges.items():
        arrived = {source: sent[source][ep] for source in x.sources} | {ep: sent[ep][ep]}
        for source, parcel in x.sources.items():
            assert vector_types(parcel) == [(v.dtype.name, v.size) for v in arrived[source]]
            dtypes = [v.dtype for v in arrived[source]]
            assert len(set(dtypes)) == len(dtypes)  # one vector for each
            assert x.fingerprint(source) == exchanges[source].fingerprint(ep) != ""
        assert {e for e, y in exchanges.items() if ep in y.parcels} - {ep} == set(x.sources)
        got = jax.jit(x.combined)(arrived)
        assert list(x.plain) == ["plain"]
        mine = [r for r in reductions if ep in r["over"]]
        assert set(got) == {r["name"] for r in mine}
        for r in mine:
            want = combine(r["op"], [values[o][r["name"]] for o in r["owners"]])
            assert distance(got[r["name"]], want) == 0.0, r


def test_servers_that_get_the_same_share_one_vector() -> None:
    fn = lambda x: [
        all_reduce("sum", "all_reduce/0", ENDS, ENDS, x),
        all_reduce("sum", "all_reduce/1", ENDS, ENDS, x),
    ]
    types = {"x": jnp.ones(3)}
    exchange = Exchange.of(block("all_reduce", DIST, 2, fn, types, ["y", "z"]), "b:2")
    assert exchange is not None and exchange.level == 2
    packed = exchange.pack({f"all_reduce/{i}": jnp.ones(3) for i in range(2)})
    assert [[v.shape for v in vectors] for vectors in packed] == [[(6,)]]
    assert set(exchange.addressed(packed)) == set(ENDS)


def test_fingerprints_tell_other_reductions_apart() -> None:
    def one(
        name: str = "all_reduce/0", op: str = "sum", shape: tuple[int, ...] = (), level: int = 0
    ) -> str:
        fn = lambda x: [all_reduce(op, name, ENDS, ENDS, x)]
        exchange = Exchange.of(
            block("all_reduce", DIST, level, fn, {"x": jnp.ones(shape)}, ["y"]), "a:1"
        )
        assert exchange is not None
        return exchange.fingerprint("b:2")

    found = [one(), one(name="all_reduce/1"), one(op="max"), one(shape=(1,)), one(level=1)]
    assert len(set(found)) == len(found)
    assert one() == one()


# -- on a mesh -------------------------------------------------------------------------------------


BATCHES = 4


def batches() -> list[Any]:
    return [mlp_batch(8, dtype=jnp.float64, seed=s) for s in range(BATCHES)]


def single_device(
    rounds: int, params: Any, loss: Any = mlp_loss, tx: Any = None
) -> tuple[Any, Any, list[Any]]:
    tx = tx or reference(rounds)
    return plain_run(plain_step(loss, tx), params, tx.init(params), batches())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [8, 1, 2, 4])
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_mesh_equals_one_device(rounds: int, devices: int) -> None:
    with jax.enable_x64(True):
        params = mlp_params(dtype=jnp.float64)
        made = clipping_plan(rounds, endpoints(3), params).on_mesh(jax.devices()[:devices])
        state = made.init(params)
        losses = []
        for batch in batches():
            state, loss = made.step(state, *batch)
            losses.append(loss)
        want, want_state, want_losses = single_device(rounds, params)
        tree_close(made.params(state), want, 1e-12)
        tree_close(made.opt_state(state)[0].trace, want_state[-1][0].trace, 1e-12)
        tree_close(losses, want_losses, 1e-12)


# -- over endpoints --------------------------------------------------------------------------------


def equals_one_device(
    role_threads: RoleThreads,
    plan: PServerPlan,
    params: Any,
    rounds: int,
    *like: Any,
    **options: Any,
) -> None:
    """Run all roles of a plan in threads."""
    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, params)
    for k in range(plan.trainers):
        role_threads.start(f"trainer {k}", train, plan, k, batches(), params)
    ended = role_threads.all()
    want, want_state, _ = single_device(rounds, params, *like, **options)
    for k in range(plan.trainers):
        tree_close(ended[f"trainer {k}"][0], want, 1e-12)
    held = {ep: ended[ep] for ep in plan.servers}
    traces = assemble(plan, held, [f"opt_state/0/trace/{n}" for n in params])
    tree_close(
        {n.rpartition("/")[2]: x for n, x in traces.items()}, dict(want_state[-1][0].trace), 1e-12
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rounds, trainers, servers", [(1, 2, 3), (2, 2, 3), (2, 1, 2)])
def test_servers_equal_one_device(
    role_threads: RoleThreads, rounds: int, trainers: int, servers: int
) -> None:
    with jax.enable_x64(True):
        params = mlp_params(dtype=jnp.float64)
        plan = clipping_plan(rounds, free_endpoints(servers), params, trainers=trainers)
        equals_one_device(role_threads, plan, params, rounds)


def test_a_server_without_blocks_takes_no_part_in_exchanges(role_threads: RoleThreads) -> None:
    with jax.enable_x64(True):
        params = {"b1": jnp.zeros(1), "w1": jnp.ones((1, 3))}  # two leaves that cannot be sliced
        loss = lambda params, x, y: jnp.mean((x[:, :3] * params["w1"] + params["b1"] - y) ** 2)
        plan = clipping_plan(2, free_endpoints(3), params, loss=loss)
        assert [bool(blocks_of(plan, ep)) for ep in plan.servers] == [True, True, False]
        equals_one_device(role_threads, plan, params, 2, loss)


def owners_only(plan: PServerPlan, owner: str) -> Any:
    """Return one device's optimizer, in which the norm has only the rows on one server."""

    def total(grads: Any) -> Any:
        rows = [
            (b.leaf.removeprefix("params/"), b.span)
            for u in plan.placement.units[owner]
            for b in u.blocks
        ]
        parts = [grads[n] if span is None else grads[n][span.start : span.stop] for n, span in rows]
        return sum(jnp.sum(x**2) for x in parts)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        factor = clip_factor(total(grads))
        return jax.tree.map(lambda g: g * factor, grads), state

    return optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), update), SGD)


def test_servers_that_own_nothing_get_what_another_has(role_threads: RoleThreads) -> None:
    with jax.enable_x64(True):
        params = mlp_params(dtype=jnp.float64)
        pservers = free_endpoints(3)
        plan = clipping_plan(1, pservers, params, owners=pservers[1:2])
        tx = owners_only(plan, pservers[1])
        equals_one_device(role_threads, plan, params, 1, tx=tx)
        made = plan.on_mesh()
        state = made.init(params)
        for batch in batches():
            state, _ = made.step(state, *batch)
        tree_close(made.params(state), single_device(1, params, tx=tx)[0], 1e-12)


# -- what goes wrong -------------------------------------------------------------------------------

START = np.arange(8, dtype=np.float32).reshape(4, 2)
GRAD = np.ones((2, 2), np.float32)
MEET = {"order": sys.byteorder}
WELCOME = {"step": 0, "local": ""}


class Half:
    """A real server with the first two rows of `params/w`, in a job of two servers and one trainer.

    Attributes:
      ep, other: endpoint of the real server, and endpoint of the server that the test plays.
      fake_server: listener of the played server.
      line: connection from the played server to the real server.
      trainer: the only trainer, which was welcomed.
    """

    def __init__(self, role_threads: RoleThreads, rounds: int = 1, **options: Any) -> None:
        self.ep, self.other = pservers = free_endpoints(2)
        params = {"w": jnp.asarray(START)}
        loss = lambda params, x, y: jnp.mean((x[:, :4] @ params["w"] - y[:, :2]) ** 2)
        plan = clipping_plan(rounds, pservers, params, trainers=1, loss=loss)
        self.stack = contextlib.ExitStack()
        self.fake_server = self.stack.enter_context(FakeServer(self.other))
        role_threads.start("server", serve, plan, self.ep, params, **options)
        self.trainer = self.stack.enter_context(Peer(self.ep))
        self.line = self.stack.enter_context(Peer(self.ep))
        self.trainer.hello()
        assert self.trainer.hear().op == "welcome"
        self.met = self.fake_server.hear()
        assert self.met.op == "peer" and self.met["endpoint"] == self.ep

    def __enter__(self) -> Half:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stack.close()

    def meet(self, **fields: Any) -> None:
        """Send the hello of the other server, by default a valid one."""
        same = {n: self.met[n] for n in ("layout", "plan")}
        self.line.tell("peer", **{"endpoint": self.other} | same | MEET | fields)

    def become(self) -> None:
        """Send a valid hello of the other server, and expect a welcome."""
        self.meet()
        assert self.line.hear().op == "welcome"
        self.fake_server.tell("welcome", **WELCOME)

    def give(self, value: float, step: int = 0, level: int = 0) -> None:
        """Send the partial result of the other server."""
        frame = np.float32(value).tobytes()
        self.line.tell("partials", frame, step=step, level=level, pieces=[[["float32", 0, 4]]])

    def push(self, step: int = 0) -> None:
        """Send the trainer's gradient, and request new parameters."""
        self.trainer.tell(
            "send", GRAD.tobytes(), step=step, pieces=[[["params/w@GRAD.block0", 0, 16]]]
        )
        self.trainer.tell("send_barrier", step=step)
        self.trainer.tell("recv", step=step + 1, blocks=[["params/w.block0", [2, 2], "float32"]])

    def pull(self) -> np.ndarray:
        """Return the new parameters."""
        while (message := self.trainer.hear()).op == "waiting":
            pass
        assert message.op == "blocks", message
        return np.frombuffer(message.frames[0], np.float32).reshape(2, 2)

    def taken(self) -> float:
        """Return the partial result that the server sends to the other server."""
        message = self.fake_server.hear()
        assert message.op == "partials", message
        return float(np.frombuffer(message.frames[0], np.float32)[0])


def test_what_a_server_says_wrongly_is_refused_and_changes_nothing(
    role_threads: RoleThreads, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dtrans.pserver")
    with Half(role_threads) as half, Peer(half.ep) as stranger:
        ep, other, line = half.ep, half.other, half.line
        noise = np.float32(1e9).tobytes()
        one = lambda *piece: {"step": 0, "level": 0, "pieces": [[list(piece)]]}
        right = one("float32", 0, 4)

        def refused(peer: Peer, reason: str, op: str, *frames: bytes, **fields: Any) -> None:
            peer.tell(op, *frames, **fields)
            got = peer.refused()
            assert reason in got, got
            assert got in caplog.records[-1].getMessage()

        refused(line, "from a peer that has not said hello", "partials", noise, **right)
        as_other = MEET | {
            "endpoint": other,
            "layout": half.met["layout"],
            "plan": half.met["plan"],
        }
        told = "has no reduction in common with pserver"
        refused(line, f"pserver '{ep}1' {told} {ep}", "peer", **as_other | {"endpoint": ep + "1"})
        refused(line, f"pserver '{ep}' {told} {ep}", "peer", **as_other | {"endpoint": ep})
        refused(
            line,
            f"{other} is middle-endian, pserver {ep} is",
            "peer",
            **as_other | {"order": "middle"},
        )
        wrong = f"pserver {other} and pserver {ep} have different plans for the reductions between"
        refused(line, wrong, "peer", **as_other | {"layout": "0" * 64})
        refused(half.trainer, "trainer 0 sent a `peer` message, which only", "peer", **as_other)
        half.become()
        half.meet()  # a second message changes nothing
        assert line.hear().op == "welcome"
        stranger.tell("peer", **as_other)  # this server may already be in its next job
        message = stranger.hear()
        assert (message.op, message["reason"]) == (
            "waiting",
            f"the end of another job in which pserver {other} takes part",
        )
        refused(line, f"{other} is planned with on_trainer_exit='error', pserver {ep} with "
"'drop'", "peer",
                **as_other | {"on_trainer_exit": "error"})  # fmt: skip
        hello = {"trainer": 0, "trainers": 1, "session": "peer"} | MEET
        refused(line, f"pserver {other} sent a `hello` message as trainer 0", "hello", **hello)
        refused(
            line,
            f"a `send` message from pserver {other}; servers send each other only `peer`, ",
            "send",
            step=0,
            pieces=[],
        )
        refused(
            half.trainer,
            "a `partials` message, which servers do not accept",
            "partials",
            noise,
            **right,
        )
        refused(stranger, "from a peer that has not said hello", "partials", noise, **right)
        for step in (-1, 2):
            refused(
                line,
                f"pserver {other} sent `partials` of step {step}, but pserver {ep} is at step 0",
                "partials",
                noise,
                **right | {"step": step},
            )
        for level in (-1, 1):
            told = f"pserver {other} sent `partials` of level {level}, but pserver {ep} expects"
            refused(line, told, "partials", noise, **right | {"level": level})
        refused(
            line,
            f"`partials` of dtype 'int32' from pserver {other}, expected float32",
            "partials",
            noise,
            **one("int32", 0, 4),
        )
        refused(
            line,
            "bytes 0 to 8 of float32, which has 4",
            "partials",
            noise + noise,
            **one("float32", 0, 8),
        )
        refused(
            line,
            "a truncated frame: its header lists 4 bytes up to the end of float32, but it has 3",
            "partials",
            noise[:3],
            **right,
        )
        refused(line, "with 2 frames, but its header lists 1", "partials", noise, noise, **right)
        refused(
            line, "a frame of 8 bytes, but its header lists 4", "partials", noise + noise, **right
        )
        refused(
            line,
            "whose field `pieces` is not a list of lists",
            "partials",
            noise,
            **right | {"pieces": [7]},
        )

        half.give(0.0, step=1)  # early
        twice = "bytes 0 to 4 of float32; expected its bytes from 4 on"
        refused(line, twice, "partials", noise, **right | {"step": 1})
        half.push()
        assert half.taken() == 4.0
        line.tell("partials", np.float32(12).tobytes()[:2], **one("float32", 0, 2))  # in two parts
        line.tell("partials", np.float32(12).tobytes()[2:], **one("float32", 2, 2))
        trace = GRAD * np.float32(NORM / 4)
        want = START[:2] - np.float32(RATE) * trace
        np.testing.assert_allclose(half.pull(), want, rtol=1e-6)
        refused(
            line,
            f"pserver {other} sent `partials` of step 0, but pserver {ep} is at step 1",
            "partials",
            noise,
            **right,
        )
        refused(line, twice, "partials", noise, **right | {"step": 1})
        half.push(1)
        assert half.taken() == 4.0
        trace = np.float32(MOMENTUM) * trace + GRAD * np.float32(NORM / 2)
        np.testing.assert_allclose(half.pull(), want - np.float32(RATE) * trace, rtol=1e-6)
        half.fake_server.close()  # it ends first, because no role needs it any more
        half.trainer.leave()
        assert set(role_threads.end("server")) == {"params/w.block0", "opt_state/0/trace/w.block0"}


def ended(role_threads: RoleThreads, half: Half, kind: type[Exception]) -> str:
    """Return the error of the server. The server also sends it to its trainer at once."""
    error = role_threads.end("server")
    assert type(error) is kind, error
    while (message := half.trainer.hear()).op == "waiting":
        pass
    assert message["reason"] == f"it ended: {error}"
    return str(error)


@pytest.mark.parametrize("there", [False, True])
def test_a_server_that_is_waited_for_in_vain_is_named(
    role_threads: RoleThreads, there: bool
) -> None:
    with Half(role_threads, rounds=2, deadline=1.5) as half:
        if there:
            half.become()
            half.give(3.0)
        half.push()
        level, absent = (1, "") if there else (0, f" (not connected: {half.other})")
        what = f"partial results of step 1, level {level}, from pserver {half.other}{absent}"
        reasons = []
        while (message := half.trainer.hear()).op == "waiting":
            reasons.append(message["reason"])
        assert all(r.endswith(" s for " + what) for r in reasons) and reasons
        error = role_threads.end("server")
        assert type(error) is DeadlineError
        waited = str(error).split()[6]
        assert str(error) == f"pserver {half.ep} and trainer 0 waited {waited} s for {what}"
        assert float(waited) >= 1.5
        assert message["reason"] == f"it ended: {error}"


@pytest.mark.parametrize("level", [0, 1])
def test_a_server_that_goes_away_between_levels_is_named_at_once(
    role_threads: RoleThreads, level: int
) -> None:
    # for one second, the server may connect again
    with Half(role_threads, rounds=2, patience=1.0, deadline=NEVER) as half:
        half.become()
        half.push()
        assert half.taken() == 4.0
        if level:
            half.give(12.0)
            assert half.taken() == pytest.approx(NORM / 4)
        half.fake_server.close()
        assert ended(role_threads, half, LostPeerError) == (
            f"pserver {half.other} went away while pserver {half.ep} waited for partial results of "
            "step 1, "
            f"level {level}, from pserver {half.other}"
        )


def test_a_server_that_went_away_before_a_step_is_named_when_it_is_needed(
    role_threads: RoleThreads,
) -> None:
    with Half(role_threads) as half:
        half.become()
        half.give(12.0)
        half.push()
        half.taken()
        half.pull()
        half.fake_server.close()
        half.push(1)
        assert f"pserver {half.other} went away" in ended(role_threads, half, LostPeerError)


def test_what_a_server_says_before_it_is_welcome_is_not_lost_with_the_connection(
    role_threads: RoleThreads,
) -> None:
    """At first, a server of another job listens. The partial results are for the next job's
    server."""
    with Half(role_threads) as half:
        half.meet()
        assert half.line.hear().op == "welcome"
        half.push()
        while "partial results" not in half.trainer.hear().fields.get("reason", ""):
            pass
        half.fake_server.close()
        with FakeServer(half.other) as again:
            assert again.hear().op == "peer"
            again.tell("welcome", **WELCOME)
            message = again.hear()
            assert message.op == "partials" and np.frombuffer(message.frames[0], np.float32) == 4.0
            half.give(12.0)
            half.pull()
            half.trainer.leave()
            assert isinstance(role_threads.end("server"), dict)


def test_a_server_ends_when_the_others_know_it_too(role_threads: RoleThreads) -> None:
    """A server that starts after this would send its hello to the next job on the same endpoint."""
    with Half(role_threads) as half:
        half.trainer.leave()
        half.become()
        assert isinstance(role_threads.end("server"), dict)


def test_a_server_that_never_greets_is_named_when_the_trainers_have_closed(
    role_threads: RoleThreads,
) -> None:
    with Half(role_threads, deadline=1.0) as half:
        half.trainer.tell("complete")
        assert half.trainer.hear().op == "goodbye"
        error = role_threads.end("server")
        assert isinstance(error, DeadlineError)
        assert str(error).startswith(f"pserver {half.ep}, whose trainers have all left, waited ")
        assert str(error).endswith(
            f" s for a greeting of pserver {half.other} (not connected: {half.other})"
        )


def test_a_server_does_not_wait_for_the_welcome_of_a_server_that_has_ended(
    role_threads: RoleThreads,
) -> None:
    """The other server has sent its hello, and the welcome was lost with the connection."""
    with Half(role_threads, patience=1.0) as half:
        half.meet()
        assert half.line.hear().op == "welcome"
        half.trainer.leave()
        half.stack.close()  # the other server has ended
        assert isinstance(role_threads.end("server"), dict)


def test_a_server_that_is_refused_ends_with_the_reason(role_threads: RoleThreads) -> None:
    with Half(role_threads) as half:
        half.fake_server.tell("refuse", reason="I plan something else")
        error = ended(role_threads, half, PeerError)
        assert error == f"pserver {half.other} refused pserver {half.ep}: I plan something else"


def test_a_server_that_is_answered_with_garbage_says_by_whom(role_threads: RoleThreads) -> None:
    with Half(role_threads) as half:
        half.fake_server.say(b"\xc1")
        error = ended(role_threads, half, PeerError)
        assert error.startswith(
            f"pserver {half.other} answered pserver {half.ep} with a message whose header is not"
        )


def test_servers_of_different_plans_end_and_name_each_other(role_threads: RoleThreads) -> None:
    params = mlp_params()
    pservers = free_endpoints(2)
    plans = [clipping_plan(rounds, pservers, params, trainers=1) for rounds in (1, 2)]
    for ep, plan in zip(pservers, plans, strict=True):
        role_threads.start(ep, serve, plan, ep, params, deadline=3.0)
    role_threads.start("trainer", train, plans[0], 0, [mlp_batch(8)], params, deadline=3.0)
    errors = {ep: role_threads.end(ep) for ep in pservers}
    told = "have different plans for the reductions between them"
    # The refused server ends. A server that is not ready then, or the trainer, may find no listener
    # any more.
    refused = {ep for ep, e in errors.items() if told in str(e)}
    assert refused
    for ep, peer in zip(pservers, pservers[::-1], strict=True):
        assert isinstance(errors[ep], PeerError)
        assert ep not in refused or str(errors[ep]).startswith(
            f"pserver {peer} refused pserver {ep}: "
        )
    assert isinstance(role_threads.end("trainer"), PeerError)


def test_a_trainer_that_fails_ends_all_servers_with_its_reason(role_threads: RoleThreads) -> None:
    params = mlp_params()
    pservers = free_endpoints(3)
    plan = clipping_plan(2, pservers, params)

    def fails(i: int) -> None:
        if i == 1:
            raise ZeroDivisionError("the third image is blank")

    options: dict[str, Any] = {"deadline": NEVER}
    for ep in pservers:
        role_threads.start(ep, serve, plan, ep, params, **options)
    for k, before in enumerate((fails, None)):
        three = [mlp_batch(8)] * 3
        role_threads.start(f"trainer {k}", train, plan, k, three, params, before=before, **options)
    assert isinstance(role_threads.end("trainer 0"), ZeroDivisionError)
    for name in (*pservers, "trainer 1"):
        error = role_threads.end(name)
        assert type(error) is PeerError
        assert "trainer 0 failed: ZeroDivisionError: the third image is blank" in str(error)


# -- real processes --------------------------------------------------------------------------------

ROLE = """
import os, signal, sys
sys.path[:0] = {path!r}
import jax, numpy as np
jax.config.update("jax_enable_x64", True)
import dtrans
from exchanges import clipping_plan
from helpers import mlp_batch, mlp_params
from dtrans.protocol.server.server_peers import ServerPeers

kind, which, pservers, steps, dies, out = sys.argv[1:]
params = mlp_params(dtype=np.float64)
plan = clipping_plan(2, pservers.split(","), params)
if dies == "dies":
    real = ServerPeers.collected
    def collected(self, step, exchange):
        if step == 1 and exchange.level == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, step, exchange)
    ServerPeers.collected = collected
with dtrans.Executor(deadline=60) as exe:
    if kind == "pserver":
        role = plan.servers[which]
        result = exe.run(role.main, exe.run(role.startup, params))
    else:
        k = int(which)
        result = exe.run(plan.trainer_startup_program(k), params)
        for i in range(int(steps)):
            x, y = mlp_batch(8, dtype=np.float64, seed=i)
            rows = slice(4 * k, 4 * k + 4)
            result, _ = exe.run(plan.trainer_program(k), result, x[rows], y[rows])
np.savez(out, **result)
"""


@contextlib.contextmanager
def process(
    folder: Path, kind: str, which: str, pservers: Sequence[str], dies: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """Run one role as a process, which is killed at the end if it still runs."""

    script = ROLE.format(path=[str(SUPPORT), str(ROOT)])
    out = str(folder / f"{kind}{which.rpartition(':')[2]}.npz")
    arguments = [kind, which, ",".join(pservers), str(BATCHES), dies, out]
    role = subprocess.Popen(
        [*STRICT_PYTHON, "-c", script, *arguments], stderr=subprocess.PIPE, text=True
    )
    try:
        yield role
    finally:
        role.kill()
        role.communicate()


def test_processes_equal_one_device(tmp_path: Path) -> None:
    pservers = free_endpoints(3)
    with contextlib.ExitStack() as stack:
        roles = [stack.enter_context(process(tmp_path, "pserver", ep, pservers)) for ep in pservers]
        roles += [
            stack.enter_context(process(tmp_path, "trainer", str(k), pservers)) for k in range(2)
        ]
        for role in roles:
            _, errors = role.communicate(timeout=2 * HANG)
            assert role.returncode == 0, errors
    with jax.enable_x64(True):
        want, _, _ = single_device(2, mlp_params(dtype=jnp.float64))
        for k in range(2):
            with np.load(tmp_path / f"trainer{k}.npz") as found:
                tree_close(dict(found), jax.tree.map(np.asarray, want), 1e-12)


def test_a_server_killed_between_levels_is_named_by_all(
    role_threads: RoleThreads, tmp_path: Path
) -> None:
    pservers = free_endpoints(2)
    with jax.enable_x64(True), process(tmp_path, "pserver", pservers[1], pservers, "dies") as role:
        params = mlp_params(dtype=jnp.float64)
        plan = clipping_plan(2, pservers, params)
        role_threads.start("server", serve, plan, pservers[0], params, deadline=NEVER)
        for k in range(2):
            role_threads.start(f"trainer {k}", train, plan, k, batches(), params, deadline=NEVER)
        assert role.wait(2 * HANG) == -9
        for name in ("server", "trainer 0", "trainer 1"):
            error = role_threads.end(name)
            assert isinstance(error, PeerError) and not isinstance(error, DeadlineError)
            assert f"pserver {pservers[1]} went away while " in str(error)
