"""Trainers that leave a synchronous job before the others, and the updates after that."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assemble, init_of, mlp_batch, mlp_loss, mlp_params, plain_step, tree_close
from role_threads import HANG, Peer, RoleThreads, free_endpoints, serve, train, until

import dtrans
from dtrans.errors import ConfigError, PeerError
from dtrans.ir.display import without_addresses
from dtrans.ops import send_barrier_p
from dtrans.parameter_server.plan import PServerPlan
from dtrans.run.parameter_server import sync_update
from dtrans.run.parameter_server.update import ServerUpdate
from dtrans.slicing.mean import sent_by


@pytest.fixture(autouse=True)
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


ROWS = 3  # of each trainer, in each step

OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "global norm": optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1, momentum=0.9)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
}


def plan_for(pservers: Sequence[str], trainers: int, tx: Any, **options: Any) -> PServerPlan:
    params = mlp_params(dtype=jnp.float64)
    batch = mlp_batch(ROWS * trainers, dtype=jnp.float64)
    return flat_options.pserver(
        dtrans.trace(
            dtrans.make_train_step(mlp_loss, tx), params, jax.eval_shape(tx.init, params), *batch
        ),
        dtrans.trace(init_of(tx), params),
        pservers=pservers,
        trainers=trainers,
        min_block_size=1,
        **options,
    )


def batches(trainers: int, count: int) -> list[Any]:
    return [mlp_batch(ROWS * trainers, dtype=jnp.float64, seed=s) for s in range(count)]


def rows_of(present: Sequence[int], batch: Any) -> list[Any]:
    return [jnp.concatenate([x[k * ROWS : (k + 1) * ROWS] for k in present]) for x in batch]


def with_those_present(tx: Any, steps: Sequence[int]) -> tuple[list[Any], Any]:
    """Run one device on the rows of the trainers that take each step.

    Return the parameters before each step and at the end, and the last state.
    """
    step, count = plain_step(mlp_loss, tx), len(steps)
    params = [mlp_params(dtype=jnp.float64)]
    state = tx.init(params[0])
    for i, batch in enumerate(batches(count, max(steps))):
        present = [k for k in range(count) if steps[k] > i]
        new, state, _ = jax.jit(step)(params[-1], state, *rows_of(present, batch))
        params.append(new)
    return params, state


def run(
    role_threads: RoleThreads, plan: PServerPlan, steps: Sequence[int]
) -> tuple[dict[str, Any], list[Any]]:
    """Run a job in which each trainer makes a given number of steps.

    Return the final state of the servers, and each trainer's last parameters.
    """
    params, data = mlp_params(dtype=jnp.float64), batches(plan.trainers, max(steps))
    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, params)
    for k, count in enumerate(steps):
        role_threads.start(f"trainer {k}", train, plan, k, data[:count], params)
    ended = role_threads.all()
    return {ep: ended[ep] for ep in plan.servers}, [
        ended[f"trainer {k}"][0] for k in range(plan.trainers)
    ]


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "tx, servers, steps",
    [
        pytest.param("adam", 1, (1, 3), id="one of two"),
        pytest.param("adam", 2, (4, 2, 5), id="two, in different steps"),
        pytest.param("adam", 2, (2, 5, 2), id="two, in the same step"),
        pytest.param("adam", 1, (3, 0, 2), id="one before its first step"),
        pytest.param("global norm", 3, (2, 5, 4), id="a global norm over three servers"),
        pytest.param("global norm", 1, (1, 2, 3, 4), id="one after the other"),
        pytest.param("adafactor", 2, (2, 1), id="sums over rows"),
    ],
)
def test_updates_are_those_of_one_device_on_the_rows_of_those_present(
    role_threads: RoleThreads, tx: str, servers: int, steps: Sequence[int]
) -> None:
    optimizer = OPTIMIZERS[tx]
    plan = plan_for(free_endpoints(servers), len(steps), optimizer)
    held, got = run(role_threads, plan, steps)
    want, want_state = with_those_present(optimizer, steps)
    for k, count in enumerate(steps):
        tree_close(got[k], want[count], 1e-12)
    spec = plan.startup.out.flatten((want[-1], want_state), "the result")
    check = dict(zip(plan.startup.out_names, spec, strict=True))
    tree_close(assemble(plan, held, list(check)), check, 1e-12)


def test_as_paddle_the_last_gradient_counts_once_more_and_the_divisor_stays(
    role_threads: RoleThreads,
) -> None:
    steps, tx = (2, 5, 0), optax.sgd(0.1, momentum=0.9)
    plan = plan_for(free_endpoints(2), 3, tx, on_trainer_exit="paddle")
    _, got = run(role_threads, plan, steps)
    params = mlp_params(dtype=jnp.float64)
    state, grad = tx.init(params), jax.jit(jax.grad(mlp_loss))
    last = [
        jax.tree.map(jnp.zeros_like, params)
    ] * 3  # zero for the trainer that never sent a gradient
    for i, batch in enumerate(batches(3, 5)):
        for k, count in enumerate(steps):
            if i < count:
                last[k] = grad(params, *rows_of([k], batch))
            elif i > count:
                last[k] = jax.tree.map(jnp.zeros_like, params)
        updates, state = tx.update(jax.tree.map(lambda *g: sum(g) / 3, *last), state, params)
        params = optax.apply_updates(params, updates)
    tree_close(got[1], params, 1e-12)


# -- in any order of arrival -----------------------------------------------------------------------

START = np.arange(8.0).reshape(4, 2)
NAME = "params/w@GRAD"


class Seat(Peer):
    """Trainer of a server of one leaf `params/w` with SGD at rate 0.5."""

    def __init__(self, endpoint: str, k: int, trainers: int) -> None:
        super().__init__(endpoint)
        self.k = k
        self.hello(k, trainers, session=str(k))
        assert self.hear().op == "welcome"

    def send(self, step: int, value: float, name: str = "") -> None:
        frame = np.full((4, 2), value).tobytes()
        self.tell("send", frame, step=step, pieces=[[[name or f"{NAME}.trainer_{self.k}", 0, 64]]])

    def was_heard(self) -> None:
        """Wait until the server has handled all messages, because it answers wrong messages in
        order."""
        self.tell("recv", step=99)
        until(lambda: self.hear().op == "refuse", "the refusal")

    def barrier(self, step: int) -> None:
        self.tell("send_barrier", step=step)
        self.tell("recv", step=step + 1, blocks=[["params/w", [4, 2], "float64"]])

    def take(self, step: int, value: float) -> None:
        self.send(step, value)
        self.barrier(step)

    def waits_for(self) -> str:
        """Return the roles for which the trainer waits, from the server's message."""
        message = self.hear()
        assert message.op == "waiting", message
        return message["reason"].partition(" s for ")[2]

    def moved(self) -> float:
        """Return the change of the parameters since the start."""
        while (message := self.hear()).op == "waiting":
            pass
        assert message.op == "blocks", message
        far = np.frombuffer(message.frames[0]).reshape(4, 2) - START
        assert (far == far[0, 0]).all()
        return float(far[0, 0])

    def leave(self) -> None:
        self.tell("complete")
        while (message := self.hear()).op == "waiting":
            pass
        assert message.op == "goodbye", message


@contextlib.contextmanager
def table(role_threads: RoleThreads, trainers: int, **options: Any) -> Iterator[list[Seat]]:
    """Yield the trainers of a server, which ends without an error after they have left."""
    (ep,) = pservers = free_endpoints(1)
    params, tx = {"w": jnp.asarray(START)}, optax.sgd(0.5)
    loss = lambda params, x: jnp.mean(x @ params["w"])
    plan = flat_options.pserver(
        dtrans.trace(
            dtrans.make_train_step(loss, tx), params, tx.init(params), jnp.ones((trainers, 4))
        ),
        dtrans.trace(init_of(tx), params),
        pservers=pservers,
        trainers=trainers,
        **options,
    )
    role_threads.start("server", serve, plan, ep, params)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Seat(ep, k, trainers)) for k in range(trainers)]
    role_threads.all()


def first_step(seats: Sequence[Seat], *values: float) -> None:
    for seat, value in zip(seats, values, strict=True):
        seat.take(0, value)
    for seat in seats:
        assert seat.moved() == -0.5 * sum(values) / len(values)


def test_who_leaves_while_another_waits_at_the_barrier(role_threads: RoleThreads) -> None:
    with table(role_threads, 3) as (a, b, c):
        first_step((a, b, c), 1.0, 2.0, 6.0)
        a.take(1, 10.0)
        c.take(1, 20.0)
        assert a.waits_for() == "gradients of step 2 from trainer 1 (computing)"
        b.leave()
        assert a.moved() == c.moved() == -1.5 - 0.5 * 15
        a.take(2, 4.0)
        # and not from trainer 1
        assert a.waits_for() == "gradients of step 3 from trainer 2 (computing)"
        c.take(2, 2.0)
        assert a.moved() == c.moved() == -9.0 - 0.5 * 3
        a.leave()
        c.take(3, 8.0)
        assert c.moved() == -10.5 - 4.0
        c.leave()


def test_who_leaves_when_another_has_sent_and_is_not_at_the_barrier(
    role_threads: RoleThreads,
) -> None:
    with table(role_threads, 2) as (a, b):
        first_step((a, b), 1.0, 3.0)
        a.send(1, 10.0)
        a.was_heard()
        b.leave()
        a.barrier(1)
        assert a.moved() == -1.0 - 5.0
        a.leave()


def test_who_leaves_before_another_goes_on(role_threads: RoleThreads) -> None:
    with table(role_threads, 2) as (a, b):
        first_step((a, b), 1.0, 3.0)
        b.leave()
        a.take(1, 10.0)
        assert a.moved() == -1.0 - 5.0
        a.leave()


def test_who_has_not_come_is_waited_for_also_when_another_has_left(
    role_threads: RoleThreads,
) -> None:
    (ep,) = pservers = free_endpoints(1)
    plan = plan_for(pservers, 3, optax.sgd(0.1))
    params = mlp_params(dtype=jnp.float64)
    role_threads.start("server", serve, plan, ep, params)
    role_threads.start("trainer 0", train, plan, 0, [], params)
    role_threads.end("trainer 0")
    with Seat(ep, 1, 3) as seat:
        types = {
            n: x
            for n, x in ServerUpdate.from_program(plan.servers[ep].main).grad_types.items()
            if n.endswith("_1")
        }
        for name, t in types.items():
            frame = np.zeros(t.shape, t.dtype).tobytes()
            seat.tell("send", frame, step=0, pieces=[[[name, 0, len(frame)]]])
        seat.tell("send_barrier", step=0)
        assert seat.waits_for() == "gradients of step 1 from trainer 2 (not here yet)"
        role_threads.start("trainer 2", train, plan, 2, batches(3, 1), params)
        role_threads.end("trainer 2")
        seat.leave()
    role_threads.all()


def test_as_paddle_in_the_memory_of_a_trainer_that_sent_nothing_is_zero(
    role_threads: RoleThreads,
) -> None:
    with table(role_threads, 2, on_trainer_exit="paddle") as (a, b):
        b.leave()
        a.take(0, 4.0)
        assert a.moved() == -0.5 * 4 / 2
        a.leave()


def test_as_paddle_in_numbers(role_threads: RoleThreads) -> None:
    with table(role_threads, 2, on_trainer_exit="paddle") as (a, b):
        first_step((a, b), 1.0, 3.0)
        a.take(1, 10.0)
        assert a.waits_for() == "gradients of step 2 from trainer 1 (computing)"
        b.leave()
        assert a.moved() == -1.0 - 0.5 * (10 + 3) / 2
        a.take(2, 2.0)
        assert a.moved() == -4.25 - 0.5 * 2 / 2
        a.leave()


# -- what still ends the job -----------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("on_trainer_exit", ["drop", "paddle", "error"])
@pytest.mark.parametrize("says_barrier", [False, True])
def test_who_closes_in_the_middle_of_a_step_ends_the_job(
    role_threads: RoleThreads, on_trainer_exit: str, says_barrier: bool
) -> None:
    with (
        pytest.raises(PeerError) as caught,
        table(role_threads, 2, on_trainer_exit=on_trainer_exit) as (a, b),
    ):
        first_step((a, b), 1.0, 3.0)
        b.send(1, 1.0)
        if says_barrier:
            b.tell("send_barrier", step=1)
        b.leave()
        assert a.refused() == f"it ended: {role_threads.end('server')}"
    after = ", after its send_barrier" if says_barrier else ""
    assert str(caught.value) == f"trainer 1 closed in the middle of step 2{after}"


def test_an_executor_that_closes_in_the_middle_of_a_step_ends_the_job_on_every_server(
    role_threads: RoleThreads,
) -> None:
    """Every server ends, also a server that has not learned of the step and would continue without
    the trainer."""
    pservers = free_endpoints(2)
    params, plan = mlp_params(dtype=jnp.float64), plan_for(pservers, 2, optax.sgd(0.1))

    begun = threading.Event()  # all servers know trainer 0

    def leaves_half_way() -> None:
        exe = dtrans.Executor(deadline=HANG)
        got = exe.run(plan.trainer_startup_program(1), params)
        assert begun.wait(HANG)

        def stops(eqn: Any, values: Any) -> Any:
            raise KeyboardInterrupt

        exe._fabric._rules[send_barrier_p] = stops
        with contextlib.suppress(KeyboardInterrupt):
            exe.run(plan.trainer_program(1), got, *rows_of([1], batches(2, 1)[0]))
        exe.close()

    for ep in pservers:
        role_threads.start(ep, serve, plan, ep, params)
    role_threads.start(
        "trainer 0", train, plan, 0, batches(2, 2), params, before=lambda i: begun.set()
    )
    role_threads.start("trainer 1", leaves_half_way)
    for ep in pservers:
        error = role_threads.end(ep)
        assert type(
            error
        ) is PeerError and "trainer 1 failed: it closed in the middle of a step" in str(error)
    assert "trainer 1 failed: it closed in the middle of a step" in str(
        role_threads.end("trainer 0")
    )
    assert role_threads.end("trainer 1") is None


def test_servers_that_would_do_different_things_do_not_serve_together(
    role_threads: RoleThreads,
) -> None:
    pservers = free_endpoints(2)
    params = mlp_params(dtype=jnp.float64)
    for ep, on_trainer_exit in zip(pservers, ("drop", "paddle"), strict=True):
        plan = plan_for(pservers, 1, OPTIMIZERS["global norm"], on_trainer_exit=on_trainer_exit)
        role_threads.start(ep, serve, plan, ep, params, deadline=3.0)
    errors = [str(role_threads.end(ep)) for ep in pservers]
    assert any(
        f"is planned with on_trainer_exit='{on_trainer_exit}', pserver " in e
        for e in errors
        for on_trainer_exit in ("drop", "paddle")
    )


# -- what is compiled ------------------------------------------------------------------------------


def test_an_update_is_compiled_once_for_each_set_of_trainers(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dtrans.pserver")
    made: list[set[str]] = []
    real = sync_update.CompiledUpdate

    def compiled(update: ServerUpdate, *, keeps_old: bool) -> Any:
        made.append({n.rpartition("_")[2] for n in update.grad_types})
        return real(update, keeps_old=keeps_old)

    monkeypatch.setattr(sync_update, "CompiledUpdate", compiled)
    (ep,) = pservers = free_endpoints(1)
    run(role_threads, plan_for(pservers, 3, optax.adam(1e-2)), (2, 7, 4))
    assert made == [{"0", "1", "2"}, {"1", "2"}, {"1"}]
    assert [r.getMessage() for r in caplog.records] == [
        f"pserver {ep} continues without trainer 0: step 3 and later steps use "
        "gradients of trainers 1, 2",
        f"pserver {ep} continues without trainers 0, 2: step 5 and later steps use "
        "gradients of trainer 1",
    ]


@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_blocks_of_some_trainers_are_those_of_a_job_of_as_many(tx: Any) -> None:
    """Compare equation by equation. The sent values still have the trainers' names."""
    pservers = ("127.0.0.1:1", "127.0.0.1:2")
    four, two = (plan_for(pservers, n, tx) for n in (4, 2))
    one = plan_for(pservers, 1, tx)
    blocks = lambda plan: [
        b for ep in pservers for b in ServerUpdate.from_program(plan.servers[ep].main).blocks
    ]
    merging = 0
    for whole, half, alone in zip(blocks(four), blocks(two), blocks(one), strict=True):
        text = lambda block: without_addresses(str(block.jaxpr.jaxpr))
        for present in ((0, 1), (1, 3), (0, 2)):
            made = sent_by(whole, present)
            assert text(made) == text(half) == text(alone)
            for field in ("name", "role", "in_names", "out_names", "level"):
                assert getattr(made, field) == getattr(half, field) == getattr(alone, field)
            for ours, of_four, of_two in zip(made.grads, whole.grads, half.grads, strict=True):
                assert (ours.name, ours.leaf, ours.index) == (
                    of_two.name,
                    of_two.leaf,
                    of_two.index,
                )
                assert ours.sent == {k: of_four.sent[k] for k in present} and len(of_two.sent) == 2
            merging += len(made.grads)
    assert merging


# -- options ---------------------------------------------------------------------------------------


def test_what_is_not_one_of_three_is_refused() -> None:
    for wrong in ("dropped", None, True, ["drop"]):
        with pytest.raises(
            ConfigError, match=r"^on_trainer_exit must be 'drop', 'paddle' or 'error', it is "
        ):
            plan_for(("127.0.0.1:1",), 2, optax.sgd(0.1), on_trainer_exit=wrong)


@pytest.mark.parametrize("on_trainer_exit", ["paddle", "error"])
def test_an_asynchronous_job_has_no_say(on_trainer_exit: Any) -> None:
    plan_for(("127.0.0.1:1",), 2, optax.sgd(0.1), on_trainer_exit="drop", mode=dtrans.Async())
    with pytest.raises(
        ConfigError,
        match=f"^on_trainer_exit='{on_trainer_exit}' needs mode=dtrans.Sync\\(\\), since "
        "asynchronous "
        "updates never combine",
    ):
        plan_for(
            ("127.0.0.1:1",),
            2,
            optax.sgd(0.1),
            on_trainer_exit=on_trainer_exit,
            mode=dtrans.Async(),
        )


def transpiled(on_trainer_exit: Any, **options: Any) -> dtrans.DistributeTranspiler:
    plan = plan_for(("127.0.0.1:1",), 2, optax.sgd(0.1))
    t = dtrans.DistributeTranspiler(
        dtrans.DistributeTranspilerConfig(on_trainer_exit=on_trainer_exit, **options)
    )
    trainers: Any = "127.0.0.1:1,127.0.0.1:2" if options else 2
    t.transpile(0, plan.main, "127.0.0.1:1", trainers, True, plan.startup, "127.0.0.1:1")
    return t


def test_the_config_has_it_too() -> None:
    assert dtrans.DistributeTranspilerConfig().on_trainer_exit == "drop"
    for on_trainer_exit in ("drop", "paddle", "error"):
        (op,) = transpiled(on_trainer_exit).get_pserver_program("127.0.0.1:1").ops
        assert op.attrs["on_trainer_exit"] == on_trainer_exit
    with pytest.raises(
        ConfigError, match=r"^on_trainer_exit must be 'drop', 'paddle' or 'error', it is 'leave'$"
    ):
        transpiled("leave")


def test_a_job_without_servers_has_no_say() -> None:
    transpiled("drop", mode="nccl2")
    with pytest.raises(
        ConfigError, match=r"^on_trainer_exit='paddle' needs mode='pserver', but mode is 'nccl2'$"
    ):
        transpiled("paddle", mode="nccl2")
