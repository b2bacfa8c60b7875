"""Carries out communication equations with the endpoints of other processes.

    split_byref    views of the gradient's memory
    send           to the outbox of each server; it leaves when it is full, or with the message that ends the step
    send_barrier   is only noted
    recv           only notes what is wanted, and where in its parameter's memory it goes
    fetch_barrier  one message to each server: what is left in its outbox, that it was all, and what
                   is wanted; then each block is received into the parameters. An asynchronous step
                   has none: that message goes before what comes next, or at the program's end
                   (`settle`)
    split_ids      the numbers of rows that a step looks up, unique and sorted; they are checked here
    prefetch       only notes what is wanted: before anything else is done (`land_rows`), a message goes to each server
                   for each block of which rows are wanted, and then all answers are waited for.
                   Rows that were announced (`announce`) have come before
    fake_init      an array of none of the table's rows
    send_rows      as `send`, of the rows that were asked for, to the servers that have them
    exchange       a message to the server of the round, and its answer, which is waited for
    concat         nothing is left to do: the blocks lie side by side
    listen_and_serv  serves
    init_on_use    gives what stands for rows that nobody has asked for yet

What programs leave to a communicator or to GEO-SGD is carried out by
`dtrans.run.parameter_server.background`. Where a leaf is cut at run time, its blocks are views of
its memory, too.

The copies: a gradient leaves from where XLA made it (blocks of a few KB are gathered into one
frame); a block is copied once, from ZeroMQ's frame into its parameter, which JAX takes without a
copy.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from dtrans._jax import JaxprEqn, Primitive
from dtrans.checkpoint.pserver_state import TRAINER
from dtrans.checkpoint.runs import new_run, note
from dtrans.checks import check_number
from dtrans.endpoints import split_endpoint
from dtrans.errors import ConfigError, DtransError, PeerError, StateError
from dtrans.ir.program import Program
from dtrans.ops import (
    concat_p,
    exchange_p,
    fake_init_p,
    fetch_barrier_p,
    geo_send_p,
    init_on_use_p,
    listen_and_serv_p,
    prefetch_p,
    recv_p,
    send_barrier_p,
    send_p,
    send_rows_p,
    split_byref_p,
    split_ids_p,
)
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.operation import Operation
from dtrans.protocol.presence import RETRY
from dtrans.protocol.server_link import LastWords, OperationWait, ServerLink
from dtrans.protocol.tables.table_rows import put_in_place, unique_ids
from dtrans.protocol.traffic import Leaf, rows_of
from dtrans.protocol.trainer import Landing, LookedUp, TrainerSteps, leave
from dtrans.protocol.transport import LINGER
from dtrans.run.base.nonfinite import NonfiniteCheck
from dtrans.run.net.keys import Keys
from dtrans.run.net.zmq_transport import ZmqTransport
from dtrans.run.parameter_server.background import BackgroundComm, leaf_of, rows_wanted
from dtrans.run.parameter_server.server import Server
from dtrans.run.parameter_server.state_writer import Keep, KeepLast
from dtrans.run.parameter_server.tables.new_rows import new_rows
from dtrans.run.parameter_server.update import ServerUpdate


T = TypeVar("T")


class EndpointFabric:
    """What one process needs to take part; see the module's docstring. Arguments are those of
    `Executor`."""

    def __init__(
        self,
        *,
        deadline: float,
        patience: float,
        wait_port: bool,
        allow_remote: bool,
        encryption: str,
        watch: NonfiniteCheck,
    ) -> None:
        for name, seconds in (("deadline", deadline), ("patience", patience)):
            check_number(name, seconds, "a positive number of seconds", lambda x: x > 0)
        self.deadline, self.patience = deadline, patience
        self.wait_port = wait_port
        self.allow_remote = allow_remote
        self._encryption = encryption
        self._watch = watch
        self._links: dict[str, ServerLink] = {}
        self._opened: ZmqTransport | None = None
        self._me: tuple[int, int] | None = None
        self._session = new_run()
        self._plan: Mapping[str, str] = {}  # the parts of the fingerprint of the plan
        self._steps = TrainerSteps(lambda endpoint: self._link(endpoint).line)
        self._landings: list[Landing] = []  # the blocks being received
        self._rows: list[
            tuple[JaxprEqn, LookedUp]
        ] = []  # the rows that are to be received, of which equation
        self._barriered: tuple[
            str, ...
        ] = ()  # the servers of a send_barrier that no fetch_barrier follows
        self._pool = BufferPool()
        self._beside = BackgroundComm(self._connected, deadline)
        self._closed = False
        self.keep: Keep | None = None  # saves what a server holds
        self.keep_last: KeepLast | None = None  # when its job ends by an error
        self._rules: dict[Primitive, Callable[[JaxprEqn, list[Any]], Sequence[Any]]] = {
            split_byref_p: self._split,
            send_p: self._send,
            send_barrier_p: self._send_barrier,
            recv_p: self._recv,
            fetch_barrier_p: self._fetch_barrier,
            exchange_p: self._exchange,
            split_ids_p: lambda eqn, values: [unique_ids(values, **eqn.params)],
            prefetch_p: self._prefetch,
            send_rows_p: self._send_rows,
            fake_init_p: lambda eqn, values: [
                np.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars
            ],
            concat_p: self._concat,
            listen_and_serv_p: self._serve,
            init_on_use_p: new_rows,
        }

    def carry_out(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        """The outputs of one communication equation. Those of `recv` are not there before the next,
        or `settle`."""
        if self._closed:
            raise StateError("this executor is closed; make a new one")
        if self._watch.enabled:
            self._look(eqn, values)
        if self._beside.takes(eqn):
            self.settle()
            if "trainers" in eqn.params:
                self._identify(eqn)
            self._steps.forget_asked()
            return self._beside.carry_out(eqn, values)
        if eqn.primitive is not prefetch_p:
            self.land_rows()
        if eqn.primitive is not split_ids_p:  # which needs no connection
            self._beside.rest()
        if eqn.primitive not in (recv_p, fetch_barrier_p):
            self._receive()
        rule = self._rules.get(eqn.primitive)
        if rule is None:
            raise ConfigError(f"endpoints cannot carry out `{eqn.primitive.name}`")
        return rule(eqn, values)

    # -- gradients -------------------------------------------------------------------------------

    def _look(self, eqn: JaxprEqn, values: Sequence[Any]) -> None:
        """Look at what is about to be sent. Raises NonfiniteError; ConfigError where that is no
        gradient."""
        if eqn.primitive is geo_send_p:
            raise ConfigError(
                f"on_nonfinite={self._watch.reaction!r}: with dtrans.Geo trainers keep their gradients, "
                "and send what has "
                "changed; leave it out"
            )
        if eqn.primitive is send_rows_p:
            self._watch.check_values([(eqn.params["table"], values[1])])
        if eqn.primitive is send_p:
            # of blocks; a leaf that is cut when it is sent is one value
            names = eqn.params["names"]
            self._watch.check_values(
                zip(names if len(names) == len(values) else [", ".join(names)], values, strict=True)
            )

    def _split(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        (x,) = values
        return rows_of(np.asarray(x), eqn.params["sections"])

    def settle(self) -> None:
        """Receive what programs without a `fetch_barrier` have asked for: all of it with one
        request to each server."""
        self.land_rows()
        self._receive()

    def _receive(self) -> None:
        if self._landings:
            self._land(self._landings, self._barriered)

    def prepare(self, program: Program) -> None:
        """Learn what a program will want, before it is run for the first time."""
        self._beside.prepare(program)
        if program.plan is not None:
            self._plan = program.plan.identity

    def _send(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        self._identify(eqn)
        if "sections" in eqn.params:
            values = [
                rows
                for _, _, rows in leaf_of(eqn, eqn.invars[0].aval).blocks(np.asarray(values[0]))
            ]
        for x, endpoint, name in zip(values, eqn.params["epmap"], eqn.params["names"], strict=True):
            self._steps.send(endpoint, name, np.asarray(x))
        return [None]

    # -- tables ----------------------------------------------------------------------------------

    def _prefetch(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        self._identify(eqn)
        (uniq,), now = values, self._link(eqn.params["epmap"][0]).line.step
        found = self._steps.announced(eqn.params["table"], uniq, now)
        if found is None:
            found = self._room_for(eqn, uniq)
            self._rows.append((eqn, found))
        else:
            put_in_place(uniq, found.rows, found.wanted, eqn.params["spans"])
        return [found.rows]

    def _room_for(self, eqn: JaxprEqn, uniq: np.ndarray) -> LookedUp:
        """Memory for the rows that a `prefetch` looks up."""
        table, (t,) = eqn.params["table"], eqn.params["types"]
        rows = self._pool.take(f"{table} rows", t.shape, t.dtype)
        return LookedUp(table, uniq, rows, rows_wanted(eqn, uniq, rows))

    def announce(self, lookups: Sequence[tuple[JaxprEqn, np.ndarray]]) -> None:
        """Ask for the rows of `prefetch` equations of a later step, by their numbers, and wait for
        none."""
        if self._closed:
            raise StateError("this executor is closed; make a new one")
        self.settle()
        for eqn, _ in lookups:
            self._identify(eqn)
        self._steps.announce([self._room_for(eqn, uniq) for eqn, uniq in lookups])

    def land_rows(self) -> None:
        """Receive the rows that `prefetch` equations want: what reads them comes next."""
        noted, self._rows = self._rows, []
        if noted:
            self._answered(
                self._steps.prefetch([w for _, x in noted for w in x.wanted], train=True)
            )
        for eqn, x in noted:
            put_in_place(x.uniq, x.rows, x.wanted, eqn.params["spans"])

    def look_up(self, eqn: JaxprEqn, ids: np.ndarray) -> np.ndarray:
        """Rows of a table by their numbers, increasing, for a `prefetch` equation; no step is made
        of them."""
        if self._closed:
            raise StateError("this executor is closed; make a new one")
        t = eqn.params["types"][0]
        rows = np.empty((len(ids), *t.shape[1:]), t.dtype)
        wanted = rows_wanted(eqn, ids, rows)
        if not self._beside.look_up(wanted):
            self._answered(self._steps.prefetch(wanted, train=False))
        put_in_place(ids, rows, wanted, eqn.params["spans"])
        return rows

    def _send_rows(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        self._identify(eqn)
        p, (uniq, grad) = eqn.params, values
        for ep, name, span in zip(p["epmap"], p["names"], p["spans"], strict=True):
            self._steps.send(ep, name, np.asarray(grad)[span.among(uniq)])
        return [None]

    def between(self, what: str, ask: Callable[[TrainerSteps], Operation[T]]) -> T:
        """Ask servers for something between two steps of this trainer; `what` it is, for an
        error."""
        if self._closed:
            raise StateError("this executor is closed; make a new one")
        if self._me is None:
            raise ConfigError(
                f"{what}: no server knows this trainer before its first parameters: job.init"
            )
        self.settle()
        if self._beside.goes_on:
            return self._beside.between(lambda: ask(self._steps))
        self._beside.rest()
        return self._answered(ask(self._steps))

    def _exchange(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        self._identify(eqn)
        self._steps.in_step = True
        return self.exchange(eqn.params["endpoint"], eqn.params["round"], eqn.params["how"], values)

    def exchange(
        self, endpoint: str, number: int, how: Sequence[Sequence[Any]], values: Sequence[Any]
    ) -> list[Any]:
        """Values of which each trainer has a part, made one by a server (`dtrans.ops.rpc`)."""
        parts = [(np.asarray(x), way) for x, way in zip(values, how, strict=True)]
        return self._answered(self._steps.exchange(endpoint, number, parts))

    def _send_barrier(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        self._barriered = eqn.params["endpoints"]
        return [None]

    # -- parameters ------------------------------------------------------------------------------

    def _recv(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        self._identify(eqn)
        types, names = eqn.params["types"], eqn.params["names"]
        if len(types) == 1:
            leaf = leaf_of(eqn, types[0])
        else:
            rows = [t.shape[0] for t in types]
            leaf = Leaf(
                eqn.params["epmap"],
                names,
                tuple(rows),
                (sum(rows), *types[0].shape[1:]),
                types[0].dtype,
            )
        whole = self._pool.take(names[0], leaf.shape, leaf.dtype)
        blocks = leaf.blocks(whole)
        self._landings += blocks
        return [whole] if len(types) == 1 else [rows for _, _, rows in blocks]

    def _fetch_barrier(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        if "trainers" in eqn.params:
            self._identify(eqn)
        landings = self._landings
        # also of a server that has nothing for us: it answers when all trainers are there, and
        # nobody runs ahead
        self._land(landings, eqn.params["endpoints"])
        return [rows for _, _, rows in landings]

    def _land(self, landings: Sequence[Landing], endpoints: Sequence[str]) -> None:
        """End the step, and receive blocks; `endpoints` are asked also for nothing."""
        barriered, self._landings, self._barriered = self._barriered, [], ()
        self._answered(self._steps.request(landings, endpoints, barriered))

    def _answered(self, operation: Operation[T]) -> T:
        self._wait(OperationWait(self._transport, self._links, operation))
        return operation.result

    def _wait(self, wait: OperationWait | LastWords) -> None:
        while not wait.done:
            wait.turn()

    def _concat(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        if all(isinstance(v, np.ndarray) for v in values):
            whole = _side_by_side(values)
            if whole is not None:
                return [whole]
        return [np.concatenate(values, eqn.params["axis"])]

    # -- connections -----------------------------------------------------------------------------

    def _identify(self, eqn: JaxprEqn) -> None:
        me = (eqn.params["trainer_id"], eqn.params["trainers"])
        if self._me not in (None, me):
            raise ConfigError(
                f"this executor already ran programs of trainer {self._me[0]}, and cannot be "
                f"trainer {me[0]}"
            )
        if self._me is None and eqn.params["trainer_id"] == 0:
            note(TRAINER, self._session)  # by which the servers know the run, too
        self._me, self._steps.sync_mode = me, eqn.params["sync_mode"]

    def _link(self, endpoint: str) -> ServerLink:
        if endpoint not in self._links:
            assert self._me is not None
            trainer_id, trainers = self._me
            if not self.wait_port:
                _check_listens(f"trainer {trainer_id}", endpoint, self.deadline)
            self._links[endpoint] = ServerLink(
                self._transport,
                endpoint=endpoint,
                trainer=trainer_id,
                trainers=trainers,
                session=self._session,
                sync_mode=self._steps.sync_mode,
                plan=self._plan,
                secret=self._keys.secret,
                deadline=self.deadline,
                retry=min(RETRY, self.patience),
            )
            try:
                self._answered(self._links[endpoint].greet())
            except BaseException:
                self._links.pop(endpoint).close()
                raise
        return self._links[endpoint]

    def _connected(
        self, endpoints: Collection[str]
    ) -> tuple[ZmqTransport, Mapping[str, ServerLink]]:
        """Connect to servers. Return the transport, and the links to all servers."""
        for endpoint in endpoints:
            self._link(endpoint)
        return self._transport, self._links

    def _leave(self, link: ServerLink, reason: str | None) -> None:
        """Say goodbye to a server, or why not, and wait until it has heard it."""
        if reason is not None:
            self._wait(LastWords(self._transport, link, reason))
            link.close()
            return
        try:
            self._answered(leave(link.line))
        finally:
            link.close(LINGER)

    @functools.cached_property
    def _keys(self) -> Keys:
        return Keys.from_environment(self._encryption)

    @property
    def _transport(self) -> ZmqTransport:
        if self._opened is None:
            self._opened = ZmqTransport(self._keys, self.patience)
        return self._opened

    def _serve(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        names = eqn.params["state_names"]
        server = Server(
            ServerUpdate(eqn),
            dict(zip(names, values, strict=True)),
            deadline=self.deadline,
            patience=self.patience,
            allow_remote=self.allow_remote,
            keys=self._keys,
            plan=self._plan,
            keep=self.keep,
            keep_last=self.keep_last,
        )
        final = server.serve()
        return [final[n] for n in names]

    def close(self, error: BaseException | None) -> None:
        """Leave every server, with the reason if there is one. In the middle of a synchronous step
        there is."""
        if self._closed:
            return
        self._closed = True
        failed: BaseException | None = None
        try:
            self._beside.rest(discard=error is not None)
        except BaseException as e:  # the servers are told of it first
            error = failed = e
        reason = None if error is None else f"{type(error).__name__}: {error}"
        try:
            if error is None:
                self._answered(self._steps.saved())
        except DtransError as e:  # all that was trained is there: servers end as they should
            failed = e
        if self._steps.in_step and reason is None:
            # which some servers may have heard of, and others not
            reason = "it closed in the middle of a step"
        with contextlib.ExitStack() as stack:  # each is closed, whatever the others say
            if self._opened is not None:
                stack.callback(self._opened.close, LINGER)
            for link in self._links.values():
                stack.callback(self._leave, link, reason)
        if failed is not None:
            raise failed


def _check_listens(me: str, endpoint: str, deadline: float) -> None:
    """Raise PeerError if nobody listens at an endpoint."""
    try:
        socket.create_connection(split_endpoint(endpoint), timeout=deadline).close()
    except OSError as e:
        raise PeerError(f"{me} finds no pserver at {endpoint}: {e.strerror or e}") from e


def _side_by_side(blocks: Sequence[np.ndarray]) -> np.ndarray | None:
    """The memory that blocks lie in one after the other, or None where they do not."""
    base = blocks[0].base
    first = blocks[0]
    total = sum(b.shape[0] for b in blocks)
    at = first.ctypes.data
    for b in blocks:
        if b.base is not base or b.ctypes.data != at:
            return None
        at += b.nbytes
    return (
        np.ndarray(
            (total, *first.shape[1:]), first.dtype, base, first.ctypes.data - base.ctypes.data
        )
        if base is not None
        else None
    )
