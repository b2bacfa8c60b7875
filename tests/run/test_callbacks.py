"""Host callbacks of a step: a job calls each callback once, with the value of one device, or
refuses it and names its line."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import endpoints
from jax.experimental import io_callback

import dtrans


X = jnp.arange(24.0).reshape(12, 2) / 24
Y = jnp.sin(jnp.arange(12.0))
TX = optax.adam(0.1)
SEEN: list[tuple[str, np.ndarray]] = []


def see(name):
    return lambda value: SEEN.append((name, np.array(value)))


def told(name, value):
    jax.debug.callback(see(name), value)


def init(key):
    params = {"w": jnp.array([0.5, -0.25]), "b": jnp.zeros(())}
    return params, TX.init(params)


def loss_of(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def step_of(watch=lambda **values: None, loss=loss_of):
    """Return a step that passes values of each kind to `watch`."""

    def step(params, opt_state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, new_state = TX.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        watch(
            params=params,
            x=x,
            y=y,
            loss=value,
            grads=grads,
            state=opt_state,
            new_state=new_state,
            new=new,
        )
        return new, new_state, value

    return step


def programs(step):
    return dtrans.trace(step, *init(None), X, Y), dtrans.trace(init, jax.random.key(0))


def called(job, step):
    """Return the values of the callbacks in a step of a job, and on one device, by name."""
    found = []
    for run in (
        lambda: jax.jit(step)(*init(None), X, Y),
        lambda: job.step(job.init(jax.random.key(0)), X, Y),
    ):
        SEEN.clear()
        jax.block_until_ready(run())
        jax.effects_barrier()
        found.append(sorted(SEEN, key=lambda x: (x[0], x[1].ravel().tolist())))
    return found


def check(plan, step, way):
    """Check that the job and one device make equal calls; callbacks do not use 64 bits."""
    one, several = called(getattr(plan, way)(), step)
    assert [name for name, _ in several] == [name for name, _ in one] != []
    for (_, a), (_, b) in zip(one, several, strict=True):
        np.testing.assert_allclose(b, a, rtol=3e-6, atol=1e-7)


FORWARD = {
    "the loss": lambda v: told("loss", v["loss"]),
    "rows": lambda v: told("rows", v["x"][:, 0]),
    "a count of rows": lambda v: told("count", v["x"].shape[0]),
    "parameters": lambda v: told("params", v["params"]["w"]),
    "a scan": lambda v: jax.lax.scan(
        lambda c, row: (c, told("row", jnp.sum(v["x"]) + row)), 0, v["y"][:3]
    ),
    "a branch": lambda v: jax.lax.cond(
        v["loss"] > 0, lambda: told("positive", v["loss"]), lambda: None
    ),
    "io_callback": lambda v: io_callback(see("io"), None, v["loss"]),
}
LATE = {
    "gradients": lambda v: told("grad", v["grads"]["w"]),
    "a norm and the loss": lambda v: told("norm", optax.tree.norm(v["grads"]) / v["loss"]),
    "gradients and rows": lambda v: told("dot", v["x"] @ v["grads"]["w"]),
    "new parameters": lambda v: told("new", v["new"]["w"]),
    "state": lambda v: told("mu", v["state"][0].mu["w"] + 1),
    "new state": lambda v: told("count", v["new_state"][0].count),
    "io_callback of gradients": lambda v: io_callback(see("io"), None, v["grads"]["b"]),
    "a scan over gradients": lambda v: jax.lax.scan(
        lambda c, g: (c, told("entry", g)), 0, v["grads"]["w"]
    ),
}


@pytest.mark.parametrize("what", [*FORWARD, *LATE])
@pytest.mark.parametrize(("trainers", "way"), [(2, "on_mesh"), (3, "simulate")])
def test_nccl2_calls_once_with_the_values_of_one_device(trainers, way, what):
    step = step_of(lambda **values: (FORWARD | LATE)[what](values))
    plan = dtrans.nccl2(*programs(step), trainers=trainers)
    check(plan, step, way)
    assert re.search(r"_callback \(test_callbacks.py:\d+\) is called by trainer 0", str(plan))


@pytest.mark.parametrize("what", FORWARD)
def test_sharding_calls_once_what_ranks_have(what):
    step = step_of(lambda **values: FORWARD[what](values))
    plan = dtrans.sharding(
        *programs(step), degree=2, stage=3, slices=dtrans.Slicing(min_slice_size=0)
    )
    check(plan, step, "on_mesh")
    assert re.search(r"_callback \(test_callbacks.py:\d+\) is called by rank 0", str(plan))


@pytest.mark.parametrize("what", [name for name in FORWARD if name != "a scan"])
def test_trainers_of_servers_call_once_what_trainers_have(what):
    step = step_of(lambda **values: FORWARD[what](values))
    plan = dtrans.pserver(*programs(step), pservers=endpoints(2), trainers=2)
    check(plan, step, "on_mesh")
    assert re.search(r"_callback \(test_callbacks.py:\d+\) is called by trainer 0", str(plan))


def strategies(step):
    """Yield strategies in which no role has the gradients, or the optimizer's values, of the full
    step."""
    main, startup = programs(step)
    return {
        "sharding": lambda: dtrans.sharding(main, startup, degree=2, stage=1),
        "pserver": lambda: dtrans.pserver(main, startup, trainers=2),
        "pipeline": lambda: dtrans.pipeline(main, startup, num_stages=1, num_micro_batch=2),
    }


@pytest.mark.parametrize("what", LATE)
def test_others_refuse_what_reads_gradients_by_its_line(what):
    for plan in strategies(step_of(lambda **values: LATE[what](values))).values():
        with pytest.raises(
            dtrans.errors.GradientError, match=r"_callback \(test_callbacks.py:\d+\) reads .*; "
        ):
            plan()


def test_the_remedies_work():
    """Return a value as a result in sharding and pipelines.

    With servers, use the new state between steps.
    """

    def step(params, opt_state, x, y):
        *state, value = step_of()(params, opt_state, x, y)
        grads = jax.grad(loss_of)(params, x, y)
        return *state, value, optax.tree.norm(grads), jnp.sum(state[0]["w"])

    main, startup = programs(step)
    *_, norm, total = jax.jit(step)(*init(None), X, Y)
    job = dtrans.sharding(main, startup, degree=2, stage=1).on_mesh()
    *_, norm_there, total_there = job.step(job.init(jax.random.key(0)), X, Y)
    np.testing.assert_allclose([norm_there, total_there], [norm, total], rtol=1e-5)


def test_every_micro_batch_calls_where_the_user_says_so():
    step = dtrans.make_train_step(
        lambda p, x, y: (told("loss", loss_of(p, x, y)), loss_of(p, x, y))[1], TX
    )
    main, startup = programs(step)
    with pytest.raises(
        dtrans.errors.GradientError,
        match=r"\(test_callbacks.py:\d+\) .*one micro-batch at a time; .*batch='micro'",
    ):
        dtrans.pipeline(main, startup, num_stages=1, num_micro_batch=3)
    plan = dtrans.pipeline(main, startup, num_stages=1, num_micro_batch=3, batch="micro")
    assert "is called by its stage, for each micro-batch" in str(plan)
    one, several = called(plan.on_mesh(), step)
    np.testing.assert_allclose(np.mean([v for _, v in several]), one[0][1], rtol=1e-6)
    assert len(several) == 3
    check(dtrans.pipeline(main, startup, num_stages=1, num_micro_batch=1), step, "on_mesh")


@pytest.mark.parametrize("what", ["parameters", *LATE])
def test_micro_steps_do_not_call(what):
    marked = lambda p, x, y: dtrans.value_and_grad(loss_of)(p, x, y)

    def step(params, opt_state, x, y):
        value, grads = marked(params, x, y)
        updates, new_state = TX.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        values = {"params": params, "x": x, "loss": value, "grads": grads, "state": opt_state}
        (FORWARD | LATE)[what](values | {"new_state": new_state, "new": new})
        return new, new_state, value

    make = lambda: dtrans.nccl2(*programs(step), trainers=2, num_micro_batch=3)
    if what in ("a norm and the loss", "gradients and rows"):
        with pytest.raises(dtrans.errors.DtransError, match=r"test_callbacks.py:\d+"):
            make()
    else:
        check(make(), step, "on_mesh")


def test_micro_steps_refuse_what_has_their_rows():
    step = step_of(lambda **values: told("loss", values["loss"]))
    with pytest.raises(
        dtrans.errors.GradientError, match=r"\(test_callbacks.py:\d+\) reads values of the batch"
    ):
        dtrans.nccl2(*programs(step), trainers=2, num_micro_batch=3)


def test_trainers_with_numbers_of_their_own_call_with_those():
    def watch(**values):
        told("loss", values["loss"])
        told("grad", values["grads"]["b"])

    plan = dtrans.nccl2(*programs(step := step_of(watch)), trainers=2, batch="local")
    one, several = called(plan.on_mesh(), step)
    assert [name for name, _ in several] == ["grad", "loss", "loss"]
    np.testing.assert_allclose(several[0][1], one[0][1], rtol=1e-6)
    np.testing.assert_allclose(np.mean([v for _, v in several[1:]]), one[1][1], rtol=1e-6)
    assert "is called by each trainer, with its own values" in str(plan)


def test_uneven_rows_are_called_with_as_they_are():
    step = step_of(lambda **values: (FORWARD["rows"](values), FORWARD["the loss"](values)))
    plan = dtrans.nccl2(*programs(step), trainers=5)
    check(plan, step, "simulate")


def test_what_cannot_be_called_once_is_refused_by_its_line():
    ordered = step_of(lambda **values: jax.debug.print("{}", values["loss"], ordered=True))
    asking = step_of(
        lambda **values: io_callback(
            lambda v: v, jax.ShapeDtypeStruct((), "float32"), values["loss"]
        )
    )
    for step, words in ((ordered, "ordered=True"), (asking, "returns values.*jax.pure_callback")):
        with pytest.raises(
            dtrans.errors.GradientError, match=rf"\(test_callbacks.py:\d+\).*{words}"
        ):
            dtrans.nccl2(*programs(step), trainers=2)


def test_a_print_says_what_one_device_prints(capfd):
    step = step_of(
        lambda **values: jax.debug.print("norm {n:.4f}", n=optax.tree.norm(values["grads"]))
    )
    jax.block_until_ready(jax.jit(step)(*init(None), X, Y))
    jax.effects_barrier()
    one = capfd.readouterr().out
    job = dtrans.nccl2(*programs(step), trainers=2).on_mesh()
    jax.block_until_ready(job.step(job.init(jax.random.key(0)), X, Y))
    jax.effects_barrier()
    assert capfd.readouterr().out == one != ""


@pytest.mark.parametrize("of", ["rows", "gradients"])
def test_a_pure_callback_is_a_function_like_others(of):
    """The result of the function enters the loss or the update. The state equals one device."""
    doubled = lambda v: jax.pure_callback(
        lambda a: 2 * np.asarray(a), jax.ShapeDtypeStruct(v.shape, v.dtype), v
    )

    def loss(params, x, y):
        return loss_of(params, doubled(x) if of == "rows" else x, y)

    def step(params, opt_state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        grads = {n: doubled(g) if of == "gradients" else g for n, g in grads.items()}
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    main, startup = programs(step)
    want = jax.jit(step)(*init(None), X, Y)
    for plan in (
        dtrans.nccl2(main, startup, trainers=2),
        dtrans.sharding(main, startup, degree=2, stage=2, slices=dtrans.Slicing(min_slice_size=0)),
        dtrans.pserver(main, startup, pservers=endpoints(2), trainers=2),
    ):
        job = plan.on_mesh()
        state, value = job.step(job.init(jax.random.key(0)), X, Y)
        np.testing.assert_allclose(value, want[2], rtol=1e-6)
        for n, w in want[0].items():
            np.testing.assert_allclose(job.params(state)[n], w, rtol=1e-5, atol=1e-7)


def test_asynchronous_trainers_call_with_values_of_their_own():
    main, startup = programs(step_of(lambda **values: LATE["gradients"](values)))
    plan = dtrans.pserver(main, startup, trainers=2, mode=dtrans.Async())
    assert "is called by each trainer, with its own values" in str(plan)
    assert [op.type for op in plan.trainer.ops].count("debug_callback") == 1
