"""Steps that accumulate gradients over micro-batches themselves, and divide by the number of
tokens.

Each strategy computes the results of one device. Plans for two and three ranks are verified without
a tolerance, for batches that the number of ranks divides, and for others. Jobs of some cases run in
64 bits, within 1e-10 of one device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dtrans
from dtrans._jax import equations
from dtrans.errors import GradientError
from dtrans.ir.program import is_communication


pytestmark = pytest.mark.usefixtures("x64")
TX = optax.adam(1e-2)
VOCABULARY, WIDTH, TIME, MICRO = 7, 6, 5, 4
Tree = Any


def init(key: jax.Array) -> tuple[Tree, Tree]:
    keys = jax.random.split(key)
    params = {
        "e": jax.random.normal(keys[0], (VOCABULARY, WIDTH)) / 2,
        "n": jnp.ones(WIDTH),
        "w": jax.random.normal(keys[1], (WIDTH, WIDTH)) / 2,
    }
    return params, TX.init(params)


def tokens(rows: int, seed: int) -> tuple[jax.Array, jax.Array]:
    """Return tokens and a mask of the tokens that count.

    The number of counted tokens differs between parts of the batch.
    """
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, VOCABULARY, (rows, TIME))), jnp.asarray(
        rng.random((rows, TIME)) < 0.6
    )


def losses_of(params: Tree, t: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the sum of the losses of tokens, and the number of tokens that count."""
    hidden = jnp.tanh(params["e"][t[:, :-1]] @ params["w"]) * params["n"]
    loss = optax.softmax_cross_entropy_with_integer_labels(hidden @ params["e"].T, t[:, 1:])
    return jnp.sum(loss * m[:, 1:]), m[:, 1:].sum()


def updated(
    params: Tree, opt_state: Tree, grads: Tree, count: Any, loss: jax.Array
) -> tuple[Any, ...]:
    updates, opt_state = TX.update(jax.tree.map(lambda g: g / count, grads), opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss / count


Grad = Callable[..., Any]
zeros_like = lambda params: jax.tree.map(jnp.zeros_like, params)


def scanned(grad: Grad) -> Callable[..., Any]:
    """Return a step whose loop carries gradients, the count and the loss."""

    def step(params: Tree, opt_state: Tree, t: jax.Array, m: jax.Array) -> tuple[Any, ...]:
        def body(carry: Any, rows: Any) -> tuple[Any, None]:
            grads, count, total = carry
            (loss, n), more = grad(losses_of, has_aux=True)(params, *rows)
            return (jax.tree.map(jnp.add, grads, more), count + n, total + loss), None

        rows = t.reshape(MICRO, -1, TIME), m.reshape(MICRO, -1, TIME)
        (grads, count, total), _ = jax.lax.scan(body, (zeros_like(params), 0, 0.0), rows)
        return updated(params, opt_state, grads, count, total)

    return step


def looped(grad: Grad) -> Callable[..., Any]:
    """Return the step of `scanned` with a `fori_loop`."""

    def step(params: Tree, opt_state: Tree, t: jax.Array, m: jax.Array) -> tuple[Any, ...]:
        rows = t.reshape(MICRO, -1, TIME), m.reshape(MICRO, -1, TIME)

        def body(i: Any, carry: Any) -> Any:
            grads, count, total = carry
            (loss, n), more = grad(losses_of, has_aux=True)(params, rows[0][i], rows[1][i])
            return jax.tree.map(jnp.add, grads, more), count + n, total + loss

        grads, count, total = jax.lax.fori_loop(0, MICRO, body, (zeros_like(params), 0, 0.0))
        return updated(params, opt_state, grads, count, total)

    return step


def unrolled(grad: Grad) -> Callable[..., Any]:
    """Return an unrolled step with micro-batches of strided rows."""

    def step(params: Tree, opt_state: Tree, t: jax.Array, m: jax.Array) -> tuple[Any, ...]:
        grads, count, total = zeros_like(params), 0, 0.0
        for i in range(MICRO):
            (loss, n), more = grad(losses_of, has_aux=True)(params, t[i::MICRO], m[i::MICRO])
            grads, count, total = jax.tree.map(jnp.add, grads, more), count + n, total + loss
        return updated(params, opt_state, grads, count, total)

    return step


def averaged(grad: Grad) -> Callable[..., Any]:
    """Return a step with a weighted mean of the means of micro-batches, as `jnp.mean` of a
    stack."""

    def step(params: Tree, opt_state: Tree, t: jax.Array, m: jax.Array) -> tuple[Any, ...]:
        made = [
            grad(losses_of, has_aux=True)(params, t[i::MICRO], m[i::MICRO]) for i in range(MICRO)
        ]
        means = [
            jax.tree.map(lambda g, n=n: g / jnp.maximum(n, 1), grads) for (_, n), grads in made
        ]
        grads = jax.tree.map(lambda *gs: jnp.mean(jnp.stack(gs), 0), *means)
        return updated(params, opt_state, grads, 1.0, sum(loss for (loss, _), _ in made))

    return step


FORMS = {f.__name__: f for f in (scanned, looped, unrolled, averaged)}
GRADS: dict[str, Grad] = {"jax": jax.value_and_grad, "dtrans": dtrans.value_and_grad}
SLICES = dtrans.Slicing(min_slice_size=0)


def planned(
    mode: str, step: Callable[..., Any], ranks: int, batch: Sequence[jax.Array], /, **options: Any
) -> Any:
    key = jax.random.key(0)
    main, startup = dtrans.trace(step, *init(key), *batch), dtrans.trace(init, key)
    if mode == "nccl2":
        return dtrans.nccl2(main, startup, trainers=ranks, **options)
    if mode == "pserver":
        servers, placement = ("127.0.0.1:1", "127.0.0.1:2"), dtrans.BlockPlacement(min_block_size=1)
        return dtrans.pserver(
            main, startup, pservers=servers, trainers=ranks, placement=placement, **options
        )
    if mode == "pipeline":
        return dtrans.pipeline(main, startup, num_stages=ranks, **{"num_micro_batch": 2, **options})
    return dtrans.sharding(
        main, startup, degree=ranks, stage=int(mode[-1]), slices=SLICES, **options
    )


def check(job: Any, step: Callable[..., Any], batches: Sequence[Sequence[jax.Array]]) -> None:
    """Compare a job with one device, step by step."""
    key = jax.random.key(0)
    state, alone = job.init(key), init(key)
    for batch in batches:
        state, loss = job.step(state, *batch)
        *alone, wanted = step(*alone, *batch)
        np.testing.assert_allclose(loss, wanted, rtol=1e-10)
    found = job.params(state), job.opt_state(state)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), found, tuple(alone)
    )


def verify(plan: Any, batch: Sequence[jax.Array]) -> None:
    """Fail if a plan does not compute its step."""
    assert (report := plan.verify(*batch, points=(0, 1))), str(report)


MODES = ["nccl2", "stage 1", "stage 2", "stage 3", "pserver"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("rows", [12, 20])
@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", MODES)
def test_plans_that_accumulate_compute_the_step(
    mode: str, form: str, grad: str, rows: int, ranks: int
) -> None:
    verify(planned(mode, FORMS[form](GRADS[grad]), ranks, tokens(rows, 0)), tokens(rows, 1))


@pytest.mark.parametrize(("grad", "form"), [("jax", "scanned"), ("dtrans", "looped")])
def test_forward_runs_once(grad: str, form: str) -> None:
    """The loop carries a count that the update reads.

    Forward must not run the loop again for the count.
    """
    plan = planned("nccl2", FORMS[form](GRADS[grad]), 2, tokens(12, 0))
    assert [op.type for op in plan.program.ops].count("scan") == 1


@pytest.mark.parametrize("mode", ["nccl2", "stage 3", "pserver"])
def test_parts_of_micro_batches_exchange_counts_and_no_rows(mode: str) -> None:
    """Split each micro-batch over trainers if dimension 0 of the batch counts micro-batches."""

    def step(params: Tree, opt_state: Tree, t: jax.Array, m: jax.Array) -> tuple[Any, ...]:
        def body(carry: Any, rows: Any) -> tuple[Any, None]:
            grads, count, total = carry
            (loss, n), more = jax.value_and_grad(losses_of, has_aux=True)(params, *rows)
            return (jax.tree.map(jnp.add, grads, more), count + n, total + loss), None

        (grads, count, total), _ = jax.lax.scan(body, (zeros_like(params), 0, 0.0), (t, m))
        return updated(params, opt_state, grads, count, total)

    batches = [tuple(x.reshape(MICRO, -1, TIME) for x in tokens(24, seed)) for seed in range(2)]
    plan = planned(mode, step, 2, batches[0], batch=dtrans.Batch(axes=1))
    assert {x.op for x in plan.shared.part.exchanged} == {"all_reduce"}
    loops = [e for e in plan.shared.part.program.eqns if e.primitive.name == "scan"]
    inside = [e for loop in loops for e in equations(loop.params["jaxpr"])]
    assert loops and not any(map(is_communication, inside)), "sums are made once, behind the loop"
    check(plan.simulate(), step, batches)


@pytest.mark.parametrize("mode", ["nccl2", "stage 2", "pserver"])
@pytest.mark.parametrize("grad", GRADS)
def test_gradients_that_are_not_added_up(mode: str, grad: str) -> None:
    def apart(params: Tree, opt_state: Tree, t: jax.Array, m: jax.Array) -> tuple[Any, ...]:
        (loss, n), first = GRADS[grad](losses_of, has_aux=True)(params, t, m)
        _, second = GRADS[grad](losses_of, has_aux=True)(params, t[::-1], m)
        return (
            jax.tree.map(lambda p, a, b: p - 0.1 * a / n - 0.1 * b, params, first, second),
            opt_state,
            loss,
        )

    def added(params: Tree, opt_state: Tree, t: jax.Array, m: jax.Array) -> tuple[Any, ...]:
        (loss, n), first = GRADS[grad](losses_of, has_aux=True)(params, t, m)
        _, second = GRADS[grad](losses_of, has_aux=True)(params, t[::-1], m)
        grads = jax.tree.map(jnp.add, jax.tree.map(lambda g: g / n, first), second)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), opt_state, loss

    told = (
        r"add them up before anything else reads them \(grads = jax.tree.map\(jnp.add, first, "
        r"second\)\)"
    )
    if mode == "pserver":
        with pytest.raises(GradientError, match=told):
            planned(mode, apart, 2, tokens(12, 0))
    else:  # collectives need no gradients
        verify(planned(mode, apart, 2, tokens(12, 0)), tokens(12, 1))
    verify(planned(mode, added, 2, tokens(12, 0)), tokens(12, 1))


def test_a_derivative_beside_the_marked_one() -> None:
    loss_of = lambda p, t, m: losses_of(p, t, m)[0]
    penalty = lambda p, t, m: jnp.sum(jnp.tanh(p["w"]) ** 2) * loss_of(p, t[::-1], m)

    def step(take: Callable[..., Any]) -> Callable[..., Any]:
        def taken(params: Tree, opt_state: Tree, t: jax.Array, m: jax.Array) -> tuple[Any, ...]:
            loss, grads = take(params, t, m)
            return updated(params, opt_state, grads, 1.0, loss)

        return taken

    def beside(*args: Any) -> tuple[Any, Tree]:
        loss, grads = dtrans.value_and_grad(loss_of)(*args)
        return loss, jax.tree.map(jnp.add, grads, jax.grad(penalty)(*args))

    def each(*args: Any) -> tuple[Any, Tree]:
        loss, grads = dtrans.value_and_grad(loss_of)(*args)
        return loss, jax.tree.map(jnp.add, grads, dtrans.value_and_grad(penalty)(*args)[1])

    together = lambda *args: dtrans.value_and_grad(
        lambda p, t, m: loss_of(p, t, m) + penalty(p, t, m)
    )(*args)
    for strategy, take in itertools.product(("nccl2", "stage 2"), (beside, each, together)):
        verify(planned(strategy, step(take), 2, tokens(12, 0)), tokens(12, 1))


def divided_inside(params: Tree, opt_state: Tree, t: jax.Array, m: jax.Array) -> tuple[Any, ...]:
    """Take one gradient of the full batch, and divide by the count of tokens inside the loss
    function."""
    loss, grads = dtrans.value_and_grad(lambda p: losses_of(p, t, m)[0] / m[:, 1:].sum())(params)
    return updated(params, opt_state, grads, 1.0, loss)


@pytest.mark.parametrize("form", ["scanned", "looped", "unrolled"])
def test_pipelines_take_micro_batches_themselves(form: str) -> None:
    told = (
        r"A pipeline splits the batch into micro-batches itself .* divide by counts of the batch "
        r"inside the loss function"
    )
    with pytest.raises(GradientError, match=told):
        planned("pipeline", FORMS[form](dtrans.value_and_grad), 2, tokens(12, 0))


def test_pipelines_take_the_remedy() -> None:
    job = planned("pipeline", divided_inside, 2, tokens(12, 0), num_micro_batch=MICRO).on_mesh()
    check(job, divided_inside, [tokens(12, seed) for seed in range(2)])


@pytest.mark.parametrize("options", [{"mode": dtrans.Async()}, {"batch": "local"}])
def test_servers_refuse_counts_of_each_trainer_and_both_remedies_work(
    options: dict[str, Any],
) -> None:
    """Trainers send the count of the full batch to synchronous servers.

    A loss may instead be divided by the count of each part.
    """
    step, batch = unrolled(dtrans.value_and_grad), tokens(12, 0)
    with pytest.raises(
        GradientError,
        match=r"updated with [mt], .* divide the loss by [a-z0-9_]+ inside the loss function",
    ):
        planned("pserver", step, 2, batch, **options)
    verify(planned("pserver", step, 2, batch), batch)
    # both halves have as many tokens
    even = batch[0], jnp.arange(12 * TIME).reshape(12, TIME) % 3 > 0
    plan = planned(
        "pserver",
        divided_inside,
        2,
        even,
        batch="local",
        **{k: v for k, v in options.items() if k == "mode"},
    )
    if "mode" not in options:  # asynchronous trainers take steps independently
        check(plan.simulate(), divided_inside, [even])


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_of_other_batches_can_be_results(ranks: int) -> None:
    """The update reads one of two gradients of a leaf. The other gradient is only a result."""

    def step(params: Tree, opt_state: Tree, t: jax.Array, m: jax.Array) -> tuple[Any, ...]:
        (loss, n), grads = dtrans.value_and_grad(losses_of, has_aux=True)(params, t, m)
        _, other = dtrans.value_and_grad(losses_of, has_aux=True)(params, t[::-1], m)
        params, opt_state, _ = updated(params, opt_state, grads, n, loss)
        return params, opt_state, optax.tree.norm(other)

    verify(planned("nccl2", step, ranks, tokens(20, 0)), tokens(20, 1))
