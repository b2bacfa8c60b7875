"""`dtrans status` of running jobs, which continue undisturbed."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flat_options
import jax
import optax
import pytest
from helpers import init_of, mlp_batch, mlp_loss, mlp_params, plain_run, plain_step, tree_close
from rich.console import Console
from role_threads import HANG, Peer, RoleThreads, free_endpoints, serve, train, until

import dtrans
from dtrans import cli
from dtrans.errors import ConfigError
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol import wire
from dtrans.protocol.job_status import OBSERVER, RATE, ServerStatus, TrainerStatus
from dtrans.run.net.zmq_transport import ZmqTransport
from dtrans.run.status.job_metrics import serve_metrics
from dtrans.run.status.job_view import as_document, merge_trainers
from dtrans.run.status.observer import Answer, JobObserver
from dtrans.run.status.status_table import duration, job_tables, rate, size


pytestmark = pytest.mark.usefixtures("folder")
TX = optax.sgd(0.1)
BATCHES = [mlp_batch(8, seed=s) for s in range(4)]
HELD = 2  # the step before which trainers wait for a test


def planned(pservers: tuple[str, ...], **options: Any) -> PServerPlan:
    params = mlp_params()
    return flat_options.pserver(
        dtrans.trace(
            dtrans.make_train_step(mlp_loss, TX),
            params,
            jax.eval_shape(TX.init, params),
            *BATCHES[0],
        ),
        dtrans.trace(init_of(TX), params),
        pservers=pservers,
        trainers=2,
        min_block_size=1,
        **options,
    )


def asked(observer: JobObserver) -> list[Answer]:
    """Return the answers of the servers. The observer does not exceed their rate limit."""
    time.sleep(1 / RATE)
    return observer.ask()


class Job:
    """Two servers, and two trainers that stop in the middle until the test continues them."""

    def __init__(self, threads: RoleThreads, **options: Any) -> None:
        self.endpoints = free_endpoints(2)
        self.threads, plan = threads, planned(self.endpoints, **options)
        self.go = [threading.Event(), threading.Event()]
        self.go_on = threading.Event()  # for the last step of trainer 1
        for ep in self.endpoints:
            threads.start(ep, serve, plan, ep, mlp_params())
        for k in range(2):
            threads.start(
                f"trainer {k}", train, plan, k, BATCHES, mlp_params(), before=self._holds(k)
            )

    def _holds(self, k: int) -> Callable[[int], object]:
        """Return the function that trainer k calls before each step."""
        waits = {HELD: self.go[k], **({HELD + 1: self.go_on} if k else {})}
        return lambda step: step not in waits or waits[step].wait(HANG)

    def held(self, observer: JobObserver) -> list[Answer]:
        """Return the answers when both trainers wait."""

        def look() -> list[Answer]:
            answers = asked(observer)
            steps = [t.step for x in answers for t in x.trainers]
            return answers if steps == [HELD] * 4 else []

        return until(look, "two steps")

    def end(self) -> list[Any]:
        """Continue the trainers. Return their results."""
        for event in (*self.go, self.go_on):
            event.set()
        ended = self.threads.all()
        return [ended[f"trainer {k}"][0] for k in range(2)]


@pytest.fixture
def job(role_threads: RoleThreads) -> Iterator[Job]:
    made = Job(role_threads)
    yield made
    made.end()


def printed(answers: list[Answer], width: int = 180) -> str:
    console = Console(width=width, file=sys.stderr)
    with console.capture() as capture:
        console.print(job_tables(answers))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def test_a_job_is_shown_while_it_runs_and_trains_as_if_nobody_looked(
    role_threads: RoleThreads,
) -> None:
    job = Job(role_threads)
    with JobObserver(job.endpoints, HANG) as observer:
        answers = job.held(observer)
        job.go[0].set()
        waits = "waiting for gradients of step 3 from trainer 1 (computing)"
        until(
            lambda: all(x.server.doing == waits for x in asked(observer) if x.server), "a barrier"
        )
        answers = asked(observer)
        rows = merge_trainers(answers)
        text = printed(answers)
        stop, polls = threading.Event(), [0]

        def poll() -> None:
            while not stop.is_set():
                asked(observer)
                polls[0] += 1

        poller = threading.Thread(target=poll)
        observer._timeout = 0.5  # the last request is to servers that have ended
        poller.start()
        params = job.end()
        stop.set()
        poller.join(HANG)
    want, *_ = plain_run(plain_step(mlp_loss, TX), mlp_params(), TX.init(mlp_params()), BATCHES)
    for mine in params:
        tree_close(mine, want, 1e-6)
    assert [(t.trainer, t.state, t.doing, t.step, t.staleness) for t in rows] == [
        (0, "present", "waiting for the update", 2, None),
        (1, "present", "computing", 2, None),
    ]
    bytes_of_parameters = sum(x.nbytes for x in jax.tree.leaves(mlp_params()))
    for t in rows:  # the initial values and those of two steps; two steps and their gradients
        assert 3 * bytes_of_parameters < t.bytes_in < 3 * bytes_of_parameters + 40_000
        assert (
            (3 - t.trainer) * bytes_of_parameters < t.bytes_out < 3 * bytes_of_parameters + 40_000
        )
    assert {
        (x.server.mode, x.server.step, x.server.refused, x.server.barred)
        for x in answers
        if x.server
    } == {("synchronous", 2, 0, 0)}
    assert len({x.server.plan for x in answers if x.server}) == 1
    title, head, *_ = lines = text.splitlines()
    assert "synchronous job" in title and "2 of 2 trainers here" in title
    assert " ".join(head.split()) == "endpoint step steps/s in out in/s out/s doing"
    assert lines[2].startswith(job.endpoints[0]) and lines[2].endswith(waits)
    assert lines[-1].split()[:2] == ["1", "2"] and lines[-1].endswith("computing")


def test_the_staleness_of_an_asynchronous_job(role_threads: RoleThreads) -> None:
    job = Job(role_threads, mode=dtrans.Async())
    with JobObserver(job.endpoints, HANG) as observer:
        job.held(observer)
        job.go[0].set()
        rows = lambda: merge_trainers(asked(observer))
        until(lambda: [t.state for t in rows()] == ["left", "present"], "trainer 0 to leave")
        job.go[1].set()
        until(lambda: rows()[1].step == HELD + 1, "a step of trainer 1")
        answers = asked(observer)
        job.end()
    first, second = merge_trainers(answers)
    assert (first.step, first.state) == (len(BATCHES), "left")
    # its parameters lacked the last two steps of trainer 0, and earlier steps arrived after its
    # request for parameters
    assert second.staleness in (2, 3, 4)
    assert "staleness" in printed(answers)
    assert {x.server.step for x in answers if x.server} == {len(BATCHES)}


def test_one_that_does_not_answer_is_a_row_of_its_own(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    (nobody,) = free_endpoints(1)
    with JobObserver(job.endpoints, HANG) as observer:
        job.held(observer)
    assert run(*job.endpoints, "--timeout", str(HANG)) == 0
    assert "no answer" not in capsys.readouterr().out
    assert run(",".join([nobody, *job.endpoints]), "--timeout", "2") == 1
    rows = capsys.readouterr().out.splitlines()
    (row,) = [x for x in rows if x.startswith(nobody)]
    assert row.split(None, 1)[1] == "no answer within 2 s"
    assert any(x.startswith(job.endpoints[1]) for x in rows)


def run(*arguments: str) -> int:
    """Run `dtrans status` in this process. Return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dtrans", "status", *arguments])
        with pytest.raises(SystemExit) as e:
            cli.main()
    return int(e.value.code or 0)


def test_a_document_for_programs(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    (nobody,) = free_endpoints(1)
    with JobObserver(job.endpoints, HANG) as observer:
        job.held(observer)
    assert run(*job.endpoints, nobody, "--json", "--timeout", "4") == 1
    found = json.loads(capsys.readouterr().out)
    assert [x["endpoint"] for x in found["servers"]] == [*job.endpoints, nobody]
    assert found["servers"][2]["error"] == "no answer within 4 s"
    assert [x["step"] for x in found["servers"][:2]] == [HELD, HELD]
    assert [(t["trainer"], t["step"], t["state"]) for t in found["trainers"]] == [
        (k, HELD, "present") for k in (0, 1)
    ]


def test_a_document_a_line_for_as_long_as_one_watches(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = []
    real = JobObserver.ask

    def ask(self: JobObserver) -> list[Answer]:
        if len(answers) == 3:
            raise KeyboardInterrupt
        answers.append(real(self))
        return answers[-1]

    monkeypatch.setattr(JobObserver, "ask", ask)
    assert (
        run(*job.endpoints, "--json", "--watch", "--interval", "0.1", "--timeout", str(HANG)) == 0
    )
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(documents) == 3
    assert all({"time", "servers", "trainers"} == x.keys() for x in documents)


@pytest.mark.parametrize(
    "its, mine", [("a secret of the job", ""), ("a secret of the job", "another one")]
)
def test_another_token_is_named(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch, its: str, mine: str
) -> None:
    bound = threading.Semaphore(0)
    real = ZmqTransport.bind

    def bind(*args: Any, **options: Any) -> Any:
        door = real(*args, **options)
        bound.release()
        return door

    monkeypatch.setattr(ZmqTransport, "bind", bind)
    monkeypatch.setenv("DTRANS_TOKEN", its)
    job = Job(role_threads)
    with JobObserver(job.endpoints, HANG) as observer:
        job.held(observer)
        monkeypatch.setenv("DTRANS_TOKEN", mine)
        with JobObserver(job.endpoints[:1], HANG) as stranger:
            for _ in range(2):  # and again, on a new connection
                (answer,) = stranger.ask()
                assert answer.error.startswith(
                    "it refused the connection of dtrans status: the two processes have different "
                    "values of DTRANS_TOKEN"
                )
        assert until(
            lambda: all(x.server.barred for x in asked(observer)[:1] if x.server), "a count"
        )
    job.end()


def test_an_observer_is_no_role(job: Job) -> None:
    """The observer has the token, but may not send messages of roles. Such messages are counted."""
    ep = job.endpoints[0]
    with JobObserver(job.endpoints, HANG) as observer, Peer(ep, OBSERVER) as peer:
        job.held(observer)
        peer.hello(trainer=1, trainers=2)
        assert peer.refused() == "a `hello` message of an observer, which may only send `status`"
        peer.tell("abort", reason="I say so")
        assert peer.refused().startswith("a `abort` message of an observer")
        peer.say(b"\xff" * 100)
        assert "not msgpack" in peer.refused()
        with Peer(ep) as stranger:  # connects as a role, and may send no requests
            stranger.tell("status")
            assert "a `status` message from a peer that has not said hello" in stranger.refused()
        server = asked(observer)[0].server
        assert server is not None and server.refused == 4


def test_a_flood_of_requests_is_refused_and_the_job_goes_on(role_threads: RoleThreads) -> None:
    job = Job(role_threads)
    with JobObserver(job.endpoints, HANG) as observer:
        job.held(observer)
    with Peer(job.endpoints[0], OBSERVER) as peer:
        for i in range(3000):
            peer.tell("status", request=i)
        ops = [peer.hear().op for _ in range(200)]
        assert ops.count("status_report") < 200 and "refuse" in ops
        params = job.end()  # although the observer does not read its answers
    want, *_ = plain_run(plain_step(mlp_loss, TX), mlp_params(), TX.init(mlp_params()), BATCHES)
    tree_close(params[0], want, 1e-6)


# -- metrics ---------------------------------------------------------------------------------------


def scraped(address: str) -> dict[str, float]:
    """Return the samples at an address, by name and labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=HANG) as answer:
        lines = answer.read().decode().splitlines()
    rows = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}


def scraped_of(endpoints: Sequence[str], timeout: float) -> dict[str, float]:
    """Return the samples of one scrape of a job."""
    with JobObserver(endpoints, timeout) as observer:
        server, address = serve_metrics(observer, "0")
        try:
            return scraped(address)
        finally:
            server.shutdown()
            server.server_close()


def test_metrics_are_asked_for_at_each_scrape(job: Job) -> None:
    first, second = job.endpoints
    (nobody,) = free_endpoints(1)
    with JobObserver(job.endpoints, HANG) as observer:
        job.held(observer)
    assert scraped_of([nobody], timeout=0.2) == {f'dtrans_up{{endpoint="{nobody}"}}': 0}
    with JobObserver(job.endpoints, HANG) as observer:
        server, address = serve_metrics(observer, "0")
        try:
            found = scraped(address)
            assert address.startswith("127.0.0.1:")
            assert found[f'dtrans_up{{endpoint="{first}"}}'] == 1
            assert found[f'dtrans_up{{endpoint="{second}"}}'] == 1
            assert found[f'dtrans_step{{endpoint="{first}"}}'] == HELD
            assert found['dtrans_trainer_step{trainer="1"}'] == HELD
            assert found['dtrans_trainer_state{state="present",trainer="0"}'] == 1
            before = found['dtrans_trainer_sent_bytes_total{trainer="0"}']
            job.go[0].set()
            sent = lambda: scraped(address).get('dtrans_trainer_sent_bytes_total{trainer="0"}', 0)
            until(lambda: sent() > before, "another step")
        finally:
            server.shutdown()
            server.server_close()


def test_a_port_that_cannot_be_bound_is_named() -> None:
    with JobObserver(free_endpoints(1), 1.0) as observer:
        server, address = serve_metrics(
            observer, "127.0.0.1:0".replace(":0", f":{free_endpoints(1)[0].rpartition(':')[2]}")
        )
        try:
            with pytest.raises(
                ConfigError,
                match=rf"^--prometheus {address} cannot be bound: .*; choose another port$",
            ):
                serve_metrics(observer, address)
            with pytest.raises(ConfigError, match="'a port' is not an endpoint"):
                serve_metrics(observer, "a port")
        finally:
            server.shutdown()
            server.server_close()


@pytest.mark.parametrize("other", ["--json", "--watch"])
def test_metrics_are_not_printed(capsys: pytest.CaptureFixture[str], other: str) -> None:
    assert run("127.0.0.1:1", "--prometheus", "1", other) == 1
    assert "--prometheus cannot be combined with --watch and --json" in capsys.readouterr().err


# -- what is shown ---------------------------------------------------------------------------------


def server_status(**fields: Any) -> ServerStatus:
    common = {
        "endpoint": "h:1",
        "plan": "p",
        "mode": "asynchronous",
        "count": 2,
        "uptime": 7.0,
        "doing": "serving",
    }
    numbers = {
        "step": 5,
        "steps_per_second": 2.0,
        "received": 10,
        "sent": 20,
        "refused": 0,
        "barred": 0,
    }
    rates = {"received_per_second": 1.0, "sent_per_second": 2.0}
    empty: dict[str, Any] = {"saving": {}, "checkpoint": {}, "tables": []}
    empty |= {"generation": None, "snapshot": None}
    return ServerStatus(**common | numbers | rates | empty | fields)


def trainer_status(trainer: int, **fields: Any) -> TrainerStatus:
    common = {
        "trainer": trainer,
        "state": "present",
        "doing": "computing",
        "step": 5,
        "steps_per_second": 2.0,
    }
    return TrainerStatus(
        **common | {"staleness": 1, "silent": 3.0, "received": 1, "sent": 2} | fields
    )


def test_a_trainer_is_where_it_is_slowest() -> None:
    first = [trainer_status(0), trainer_status(1, step=None, silent=None)]
    second = [
        trainer_status(0, step=4, doing="sending", steps_per_second=1.5, staleness=7, silent=0.5),
        trainer_status(1, state="connection lost"),
    ]
    answers = [
        Answer("h:1", "", server_status(), first),
        Answer("h:2", "", server_status(), second),
    ]
    zero, one = merge_trainers([*answers, Answer("h:3", "no answer")])
    assert (zero.step, zero.doing, zero.steps_per_second, zero.staleness, zero.silent) == (
        4,
        "sending",
        1.5,
        7,
        0.5,
    )
    assert (zero.bytes_in, zero.bytes_out) == (4, 2)
    assert (one.state, one.step, one.silent) == ("connection lost", 5, 3.0)
    assert as_document(answers)["trainers"][0]["step"] == 4


def test_what_is_wrong_is_in_the_table() -> None:
    saved = {
        "name": "100",
        "step": 1,
        "ago": 200.0,
        "seconds": 1.0,
        "blocks": 3,
        "error": "no space",
    }
    tables = [{"name": "t", "created": 1234, "rows": 5000}]
    odd = server_status(
        saving={"101": 4.0}, checkpoint=saved, tables=tables, refused=3, barred=2, plan="q"
    )
    odd = dataclasses.replace(odd, generation=2, snapshot=1040)
    lost = [trainer_status(0), trainer_status(1, state="failed", doing="")]
    text = printed(
        [
            Answer("h:1", "", odd, lost),
            Answer("h:2", "", server_status(), lost),
            Answer("h:3", "no answer"),
        ]
    )
    assert "SERVERS OF DIFFERENT PLANS" in text and "1 of 2 trainers here" in text
    _, head, first, second, third, *_ = text.splitlines()
    assert "rows made" in head and " 1,234 " in first
    assert "100 FAILED" in first and " 1,040, generation 2 " in first
    assert first.endswith(
        "saving 101 for 4.0 s; serving; 3 messages refused; 2 connections refused"
    )
    assert second.endswith("serving") and third.split() == ["h:3", "no", "answer"]
    assert text.splitlines()[-1].endswith("failed")


def test_numbers_for_people() -> None:
    assert [size(n) for n in (0, 999, 1000, 12_345, 999_600, 5.5e9, 7e15)] == [
        *("0 B", "999 B", "1 kB", "12.3 kB", "1 MB", "5.5 GB", "7e+03 TB")
    ]
    assert [duration(s) for s in (0, 9.94, 9.96, 119, 121, 7199, 7201, 172799, 172801)] == [
        *("0.0 s", "9.9 s", "10 s", "119 s", "2 min", "120 min", "2 h", "48 h", "2 d")
    ]
    assert [rate(x) for x in (None, 0.0, 0.0123, 56.12, 1234.5)] == [
        "-",
        "0",
        "0.0123",
        "56.1",
        "1,234",
    ]


def test_the_wire_has_both_messages() -> None:
    assert {"status", "status_report"} <= wire.FIELDS.keys()
