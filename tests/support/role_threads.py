"""Roles of a job in threads of this process, ports, and a peer that sends arbitrary messages."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import zmq

import dtrans
from dtrans.endpoints import ReservedEndpoints
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol import token, wire
from dtrans.protocol.collective.join_loop import FIRST
from dtrans.protocol.transport import ROLE_USER
from dtrans.run.net.keys import Keys
from dtrans.run.net.net_options import choose_encryption
from dtrans.run.net.sockets import Authenticator, bind, connect, new_socket


HANG = 25.0  # seconds; longer than anything here takes on a busy machine
NEVER = 100 * HANG  # seconds; a role that waits for this deadline hangs, so its test fails


RESERVED = ReservedEndpoints()  # closed at the end of a test with the fixture `folder`
atexit.register(RESERVED.close)


def free_endpoints(count: int) -> tuple[str, ...]:
    """Return endpoints on loopback that no other test gets, in no process, before its server binds
    them."""
    return RESERVED.choose(count)


SERVED: dict[str, PServerPlan] = {}  # the plan of each server that was started, by its endpoint


class RoleThreads:
    """Functions that run in threads, and their results or errors, by name.

    No method waits without a limit.
    """

    def __init__(self) -> None:
        self._threads: dict[str, threading.Thread] = {}
        self._ended: dict[str, Any] = {}

    def start(self, name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if fn is serve:
            SERVED[args[1]] = args[0]
        x64 = jax.config.jax_enable_x64  # a setting of each thread

        def body() -> None:
            try:
                with jax.enable_x64(x64):
                    self._ended[name] = fn(*args, **kwargs)
            except BaseException as e:
                self._ended[name] = e.with_traceback(None)  # frames would keep sockets open

        self._threads[name] = threading.Thread(
            target=body, name=f"role_threads {name}", daemon=True
        )
        self._threads[name].start()

    def end(self, name: str) -> Any:
        """Return the result of a thread, or the exception that it raised."""
        # a role may wait for HANG until it notices that another role is missing, and then ends
        thread = self._threads[name]
        thread.join(2 * HANG)
        if thread.is_alive():
            frame = sys._current_frames()[thread.ident or 0]
            raise AssertionError(f"{name} hangs:\n{''.join(traceback.format_stack(frame))}")
        return self._ended[name]

    def all(self) -> dict[str, Any]:
        """Return the result of each thread; raise the first exception of a thread."""
        ended = {name: self.end(name) for name in self._threads}
        for what in ended.values():
            if isinstance(what, BaseException):
                raise what
        return ended

    def forget(self) -> None:
        """Forget the threads that have ended."""
        self.join()
        self._threads.clear()

    def join(self) -> None:
        for name in self._threads:
            self.end(name)


def serve(plan: PServerPlan, endpoint: str, *args: Any, **options: Any) -> dict[str, jax.Array]:
    """Run one pserver, as its process would run it."""
    with dtrans.Executor(**{"deadline": HANG, **options}) as exe:
        role = plan.servers[endpoint]
        return exe.run(role.main, exe.run(role.startup, *args))


def train(
    plan: PServerPlan,
    k: int,
    batches: Sequence[Sequence[Any]],
    *args: Any,
    before: Any = None,
    **options: Any,
) -> tuple[Any, list[Any]]:
    """Run one trainer on its rows of each batch, as its process would run it.

    Args:
      plan: the plan.
      k: id of the trainer.
      batches: the global batches.
      *args: arguments of init.
      before: called with the number of a step before this step.
      **options: options of the executor.
    """
    with dtrans.Executor(**{"deadline": HANG, **options}) as exe:
        params = exe.run(plan.trainer_startup_program(k), *args)
        program, losses = plan.trainer_program(k), []
        for i, batch in enumerate(batches):
            if before:
                before(i)
            n = len(batch[0]) // plan.trainers
            params, loss, *_ = exe.run(program, params, *(x[k * n : (k + 1) * n] for x in batch))
            losses.append(loss)
        return params, losses


class StepOrder:
    """Order in which trainers step, after all of them have the same parameters."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = list(order)
        self._at = 0
        self._there: set[int] = set()
        self._changed = threading.Condition()

    def take(self, k: int, step: Callable[[], Any]) -> Any:
        """Wait for the turn of trainer `k`, then run its step."""
        with self._changed:
            self._there.add(k)
            self._changed.notify_all()
            its_turn = lambda: self._there.issuperset(self._order) and self._order[self._at] == k
            assert self._changed.wait_for(its_turn, HANG), f"trainer {k} never had its turn"
            made = step()
            self._at += 1
            self._changed.notify_all()
            return made

    def end(self) -> None:
        """Wait until all turns were taken."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._at == len(self._order), HANG), (
                "some turns were never taken"
            )


def joined(plan: PServerPlan, states: Sequence[dict[str, Any]], name: str) -> Any:
    """Return a value, assembled from its blocks on the servers."""
    held = {n: x for state in states for n, x in state.items()}
    if name in held:
        return held[name]
    count = sum(n.startswith(f"{name}.block") and n.rpartition(".block")[2].isdigit() for n in held)
    return jnp.concatenate([held[f"{name}.block{i}"] for i in range(count)])


def check_state(
    plan: PServerPlan, states: Any, params: Any, opt_state: Any, rtol: float = 1e-12
) -> None:
    for root, tree in (("params", params), ("opt_state", opt_state)):
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = f"{root}/{jax.tree_util.keystr(path, simple=True, separator='/')}"
            np.testing.assert_allclose(
                joined(plan, states, name), x, rtol=rtol, atol=rtol, err_msg=name
            )


class Peer:
    """ZeroMQ peer of a pserver that may send any message.

    Args:
      encryption: `transport_encryption` of the peer; by default the value of the environment.
    """

    def __init__(self, endpoint: str, user: str = ROLE_USER, encryption: str | None = None) -> None:
        self._context = zmq.Context()
        self._endpoint = endpoint
        self._socket = new_socket(self._context, zmq.DEALER)
        self._socket.reconnect_ivl = 5  # milliseconds between two attempts
        connect(
            self._socket,
            f"tcp://{endpoint}",
            Keys(token.job_token(), choose_encryption(encryption)),
            user,
            "trainer 0",
        )

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: Any) -> None:
        self._context.destroy(linger=0)

    def end(self) -> None:
        """Close the socket when all messages have been sent."""
        self._context.destroy(linger=int(HANG * 1000))

    def leave(self) -> None:
        """Leave like a trainer after its last step, and close the socket."""
        self.tell("complete")
        assert self.hear().op == "goodbye"
        self.tell("goodbye")
        self.end()

    def say(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def tell(self, op: str, *frames: bytes, **fields: Any) -> None:
        self.say(wire.header(op, **fields), *frames)

    def hear(self) -> wire.Message:
        """Return the next message."""
        assert self._socket.poll(HANG * 1000), "no answer"
        return wire.parse(self._socket.recv_multipart())

    def refused(self) -> str:
        """Return the reason in the next message, which must be a refusal."""
        message = self.hear()
        assert message.op == "refuse", message
        return message["reason"]

    def hello(self, trainer: int = 0, trainers: int = 1, **fields: Any) -> None:
        plan = SERVED[self._endpoint].identity if self._endpoint in SERVED else {}
        header = {
            "trainer": trainer,
            "trainers": trainers,
            "session": "peer",
            "order": sys.byteorder,
            "plan": plan,
        }
        self.tell("hello", **header | fields)


def until(condition: Callable[[], Any], what: str) -> Any:
    """Return the first true value of `condition`; fail after a long time without one."""
    end = time.monotonic() + HANG
    while not (found := condition()):
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.01)
    return found


class FakeServer:
    """Listener in place of a pserver, which sends arbitrary answers."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        keys = Keys(token.job_token(), choose_encryption(None))
        self._authenticator = Authenticator(self._context, keys, {ROLE_USER: "", FIRST: ""})
        self._socket = new_socket(self._context, zmq.ROUTER)
        bind(self._socket, f"tcp://{endpoint}", keys)
        self._last, self._nonce = b"", ""

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._end(0)

    def end(self) -> None:
        """Close the socket when all messages have been sent."""
        self._end(int(HANG * 1000))

    def _end(self, linger: int) -> None:
        if not self._context.closed:
            self._authenticator.close()
        self._context.destroy(linger=linger)

    def hear(self) -> wire.Message:
        """Return the next message."""
        assert self._socket.poll(HANG * 1000), "nobody spoke"
        self._last, *parts = self._socket.recv_multipart()
        if parts == [b""]:  # a connection is made
            return self.hear()
        message = wire.parse(parts)
        if "nonce" in message.fields:
            self._nonce = message["nonce"]
        return message

    def say(self, *frames: bytes) -> None:
        """Send a message to the last sender."""
        self._socket.send_multipart([self._last, *frames])

    def tell(self, op: str, **fields: Any) -> None:
        self.say(
            wire.header(
                op, **{"proof": token.shown(token.job_token(), f"{op} {self._nonce}")} | fields
            )
        )
