"""Test the division of a training step into two halves at its gradients.

- A step with `jax.grad` is divided at the same values as with `dtrans.value_and_grad`.
- The two halves together compute the step.
- Each input and output has the right role.
- Steps that cannot be divided raise errors with the expected texts.
"""

from __future__ import annotations

import jax
import jax.flatten_util
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from helpers import (
    distance,
    evaluate,
    init_of,
    mlp_batch,
    mlp_forward,
    mlp_loss,
    mlp_params,
    plain_step,
    quick,
    tree_close,
)

import dtrans
from dtrans._jax import equations, scope_of
from dtrans.errors import GradientError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import backward_slice
from dtrans.step.forward_backward import refuse_inseparable
from dtrans.step.halves import Gradient, divide_step
from dtrans.step.marks import mark_p


SIZES = (4, 4, 4, 4)  # layers of equal shapes
PARAMS = mlp_params(SIZES)
BATCH = mlp_batch(8, SIZES)


def micro_batched(tx):
    """Return a step that sums gradients of four micro-batches in a scan, with jax.grad inside."""

    def step(params, opt_state, x, y):
        def one(carry, xy):
            value, grads = jax.value_and_grad(mlp_loss)(params, *xy)
            return (carry[0] + value, jax.tree.map(jnp.add, carry[1], grads)), None

        micro = tuple(a.reshape(4, -1, *a.shape[1:]) for a in (x, y))
        (total, grads), _ = jax.lax.scan(
            one, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), micro
        )
        updates, opt_state = tx.update(jax.tree.map(lambda g: g / 4, grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, total / 4

    return step


def tied_loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["w"].T + params["b"] - y) ** 2)


def some_unused_loss(params, x, y):
    return jnp.mean((x @ params["w"] - y) ** 2)


def cast_loss_step(tx):
    """Return a step in mixed precision: the gradient reads bfloat16 parameters, and the update
    reads float32 parameters."""

    def step(params, opt_state, x, y):
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        loss, grads = jax.value_and_grad(mlp_loss)(
            low, x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
        )
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def cast_marked_step(tx):
    def step(params, opt_state, x, y):
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        loss, grads = dtrans.value_and_grad(mlp_loss)(
            low, x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
        )
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


SQUARE = {"b": jnp.linspace(0.0, 1.0, 4), "w": PARAMS["w1"]}
SPARE = {**SQUARE, "v": PARAMS["w2"]}
ADAM = optax.adam(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
# Muon reshapes its matrices, so that only the norm of all gradients keeps their shapes
CLIPPED_MUON = optax.chain(optax.clip_by_global_norm(0.1), optax.contrib.muon(1e-2))
PARTLY = optax.multi_transform(
    {"a": optax.adam(1e-2), "z": optax.set_to_zero()},
    {n: "z" if n == "w2" else "a" for n in PARAMS},
)
SECOND = optax.MultiSteps(CLIPPED, 2)  # its update is a branch
FINITE = optax.apply_if_finite(CLIPPED, 3)
# JAX versions differ in the calls that they inline into a branch. A `jit` always stays.
JITTED = optax.GradientTransformation(CLIPPED.init, jax.jit(CLIPPED.update))
SECOND_JITTED = optax.MultiSteps(JITTED, 2)

# name: (step with jax.grad, the same step with marks, optimizer, params)
STEPS = {
    "sgd": (plain_step(mlp_loss, optax.sgd(0.1)), None, optax.sgd(0.1), PARAMS),
    "adam": (plain_step(mlp_loss, ADAM), None, ADAM, PARAMS),
    "clipped": (plain_step(mlp_loss, CLIPPED), None, CLIPPED, PARAMS),
    "lamb": (plain_step(mlp_loss, optax.lamb(1e-2)), None, optax.lamb(1e-2), PARAMS),
    "muon": (
        plain_step(mlp_loss, optax.contrib.muon(1e-2)),
        None,
        optax.contrib.muon(1e-2),
        PARAMS,
    ),
    "clipped_muon": (plain_step(mlp_loss, CLIPPED_MUON), None, CLIPPED_MUON, PARAMS),
    "frozen": (plain_step(mlp_loss, PARTLY), None, PARTLY, PARAMS),
    "every_second": (plain_step(mlp_loss, SECOND), None, SECOND, PARAMS),
    "every_second_jitted": (plain_step(mlp_loss, SECOND_JITTED), None, SECOND_JITTED, PARAMS),
    "if_finite": (plain_step(mlp_loss, FINITE), None, FINITE, PARAMS),
    "tied": (plain_step(tied_loss, ADAM), dtrans.make_train_step(tied_loss, ADAM), ADAM, SQUARE),
    "jitted_step": (jax.jit(plain_step(mlp_loss, ADAM)), None, ADAM, PARAMS),
    "jitted_loss": (plain_step(jax.jit(mlp_loss), ADAM), None, ADAM, PARAMS),
    "remat": (
        plain_step(jax.checkpoint(mlp_loss), CLIPPED),
        dtrans.make_train_step(jax.checkpoint(mlp_loss), CLIPPED),
        CLIPPED,
        PARAMS,
    ),
    "mixed_precision": (cast_loss_step(ADAM), cast_marked_step(ADAM), ADAM, PARAMS),
}


def traced(step, tx, params, batch=BATCH):
    return dtrans.trace(step, params, jax.eval_shape(tx.init, params), *batch)


def computed(jaxpr, *args):
    return quick(lambda *a: evaluate(jaxpr, *a))(*args)


def gradients_of(done, params, state, batch):
    """Return the values at which the step is divided, computed from the program's inputs."""
    program = done.program
    builder = Builder(program.jaxpr)
    builder.invars += program.jaxpr.jaxpr.invars
    kept, _ = backward_slice(program.jaxpr.jaxpr.eqns, done.gradients.values())
    for i in kept:
        builder.keep(program.jaxpr.jaxpr.eqns[i])
    outs = computed(
        builder.build(list(done.gradients.values())), *program.flatten(params, state, *batch)
    )
    return dict(zip(done.gradients, outs, strict=True))


@pytest.mark.parametrize("name", STEPS)
def test_inferred_gradients_are_the_marked_ones(name):
    plain, marked, tx, params = STEPS[name]
    marked = marked or dtrans.make_train_step(mlp_loss, tx)
    inferred, known = (
        divide_step(traced(plain, tx, params)),
        divide_step(traced(marked, tx, params)),
    )
    assert not any(e.primitive is mark_p for e in equations(inferred.program.jaxpr))
    assert any(e.primitive is mark_p for e in equations(known.program.jaxpr))
    assert set(inferred.gradients) == set(known.gradients)
    assert (inferred.optimized, inferred.frozen, inferred.results) == (
        known.optimized,
        known.frozen,
        known.results,
    )
    state = tx.init(params)
    a, b = (gradients_of(c, params, state, BATCH) for c in (inferred, known))
    for leaf in a:
        # in mixed precision, the mark is on the bfloat16 value, and the first use is its cast
        assert distance(a[leaf].astype(jnp.float32), b[leaf].astype(jnp.float32)) <= 1e-6, leaf


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*STEPS, "micro_batches"])
@pytest.mark.parametrize("marked", [False, True])
def test_the_halves_make_the_step(name, marked):
    if name == "micro_batches":
        step, tx, params = micro_batched(ADAM), ADAM, PARAMS
    else:
        plain, made, tx, params = STEPS[name]
        step = (made or dtrans.make_train_step(mlp_loss, tx)) if marked else plain
    done = divide_step(traced(step, tx, params))
    state = tx.init(params)
    grads = gradients_of(done, params, state, BATCH)
    values = dict(
        zip(done.program.in_names, done.program.flatten(params, state, *BATCH), strict=True)
    )
    values |= {Gradient(n): g for n, g in grads.items()}
    half = done.optimize
    made = dict(
        zip(half.out_names, computed(half.jaxpr, *[values[n] for n in half.in_names]), strict=True)
    )
    want = dict(
        zip(
            done.program.out_names, jax.tree.leaves(quick(step)(params, state, *BATCH)), strict=True
        )
    )
    assert set(made) == set(done.optimized) | set(done.opt_state)
    for n, v in made.items():
        # Adam's first step divides a gradient by its size, so a rounding error of a tiny gradient
        # is visible
        assert distance(v, want[n]) <= (2e-2 if name == "mixed_precision" else 1e-5), n


def test_the_optimize_half_takes_no_batch_and_makes_no_loss():
    done = divide_step(traced(dtrans.make_train_step(mlp_loss, CLIPPED), CLIPPED, PARAMS))
    assert not set(done.optimize.in_names) & set(done.batch)
    assert done.batch == ("x", "y")
    assert done.results == ("loss",)
    assert done.optimize.in_names[: len(PARAMS)] == tuple(
        Gradient(f"params/{n}") for n in sorted(PARAMS)
    )


def test_a_gradient_summed_in_a_scan_is_cut_after_the_scan():
    done = divide_step(traced(micro_batched(ADAM), ADAM, PARAMS))
    eqns = done.program.jaxpr.jaxpr.eqns
    makers = {
        e.primitive.name for e in eqns for v in e.outvars if v in set(done.gradients.values())
    }
    assert makers == {"scan"}
    (scan,) = [i for i, e in enumerate(eqns) if e.primitive.name == "scan"]
    assert done.program.roles[scan] == "backward"


def test_each_of_several_equal_layers_gets_its_own_gradient():
    done = divide_step(traced(STEPS["adam"][0], ADAM, PARAMS))
    assert len({id(v) for v in done.gradients.values()}) == len(PARAMS)
    grads = gradients_of(done, PARAMS, ADAM.init(PARAMS), BATCH)
    want = jax.grad(mlp_loss)(PARAMS, *BATCH)
    for n, g in want.items():
        assert distance(grads[f"params/{n}"], g) <= 1e-6


def test_a_leaf_that_is_never_changed_stays_with_the_trainers():
    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(mlp_loss)(params, x, y)
        new = {n: p if n == "w2" else p - 0.1 * grads[n] for n, p in params.items()}
        return new, opt_state, loss

    done = divide_step(traced(step, optax.sgd(0.1), PARAMS))
    assert done.frozen == ("params/w2",)
    assert "params/w2" not in done.gradients
    assert "params/w2" not in done.optimized


@pytest.mark.parametrize("grad", [jax.value_and_grad, dtrans.value_and_grad])
def test_a_statistic_that_the_trainers_make_stays_with_the_trainers(grad):
    """The parameters contain a running mean of the batch.

    After a derivative, such a value could be a hidden gradient.
    """

    def step_with(statistic):
        def step(params, opt_state, x):
            loss, grads = grad(lambda w: jnp.mean((x @ w) ** 2))(params["w"])
            return (
                {"mean": 0.9 * params["mean"] + 0.1 * statistic(x), "w": params["w"] - grads},
                opt_state,
                loss,
            )

        return step

    params = {"mean": jnp.zeros(4), "w": jnp.ones((4, 2))}
    done = divide_step(dtrans.trace(step_with(lambda x: x.mean(0)), params, (), BATCH[0]))
    assert (done.frozen, done.optimized) == (("params/mean",), ("params/w",))
    hidden = lambda x: 2 * jax.grad(lambda x: jnp.sum(x**3))(x).mean(0)
    if grad is jax.value_and_grad:
        refused(
            step_with(hidden),
            params,
            (),
            BATCH[0],
            match="params/mean is updated with a derivative",
        )


@pytest.mark.parametrize("marked", [False, True])
def test_a_leaf_that_the_loss_does_not_use_is_updated_on_the_servers(marked):
    tx = optax.adamw(1e-2)
    step = (
        dtrans.make_train_step(some_unused_loss, tx) if marked else plain_step(some_unused_loss, tx)
    )
    done = divide_step(traced(step, tx, SPARE))
    assert done.optimized == ("params/b", "params/v", "params/w")
    state = tx.init(SPARE)
    values = dict(
        zip(done.program.in_names, done.program.flatten(SPARE, state, *BATCH), strict=True)
    )
    values |= {Gradient(n): g for n, g in gradients_of(done, SPARE, state, BATCH).items()}
    made = computed(done.optimize.jaxpr, *[values[n] for n in done.optimize.in_names])
    want = quick(step)(SPARE, state, *BATCH)
    tree_close(made[:3], jax.tree.leaves(want[0]), 1e-6)


@pytest.mark.parametrize("name", STEPS)
def test_roles_are_exact(name):
    """Equations of the new state after the gradients are `optimize`.

    Equations that differentiation transposes are `backward`.
    """
    done = divide_step(traced(STEPS[name][0], STEPS[name][2], STEPS[name][3]))
    program = done.program
    eqns = program.jaxpr.jaxpr.eqns
    optimize = {i for i, r in enumerate(program.roles) if r == "optimize"}
    outs = dict(zip(program.out_names, program.jaxpr.jaxpr.outvars, strict=True))
    state = [outs[n] for n in (*done.optimized, *done.opt_state)]
    assert optimize == set(backward_slice(eqns, state, done.gradients.values())[0])
    for i, (eqn, role) in enumerate(zip(eqns, program.roles, strict=True)):
        assert role in ("forward", "backward", "optimize")
        if i not in optimize:
            transposed = any(
                "transpose(" in scope_of(e)
                for e in [
                    eqn,
                    *(s for j in eqn.params.values() if hasattr(j, "eqns") for s in equations(j)),
                ]
            )
            assert (role == "backward") == transposed
    assert {"forward", "backward", "optimize"} == set(program.roles)


def test_the_program_of_a_cut_is_the_step():
    step = STEPS["clipped"][0]
    state = CLIPPED.init(PARAMS)
    tree_close(
        divide_step(traced(step, CLIPPED, PARAMS)).program(PARAMS, state, *BATCH),
        quick(step)(PARAMS, state, *BATCH),
        1e-6,
    )


# -- refusals --------------------------------------------------------------------------------------


def refused(step, *args, match):
    with pytest.raises(GradientError, match=match) as e:
        refuse_inseparable(divide_step(dtrans.trace(step, *args)), "which only the trainers have")
    return str(e.value)


def test_a_function_of_one_argument_is_not_a_step():
    refused(
        lambda params: params,
        PARAMS,
        match=r"is not a training step: it must be a function of \(params, opt_state, \*batch\)",
    )


def test_a_function_that_returns_no_state_is_not_a_step():
    state = ADAM.init(PARAMS)
    refused(
        lambda p, s, x, y: mlp_loss(p, x, y),
        PARAMS,
        state,
        *BATCH,
        match="is not a training step: it does not return a new p/b1",
    )


def test_a_step_without_a_gradient_is_refused():
    def decay(params, opt_state, x):
        return jax.tree.map(lambda p: 0.9 * p, params), opt_state, jnp.mean(x)

    text = refused(decay, PARAMS, (), BATCH[0], match="no gradient was found in decay")
    assert "params/b1, params/b2, params/b3, params/w1, ..." in text


@pytest.mark.parametrize("shape", [(4, 4), (16,)])
def test_two_values_that_could_be_the_gradient_are_listed(shape):
    def step(params, opt_state, x, y):
        one = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(params["w"])
        two = jax.grad(lambda w: jnp.mean(jnp.abs(x @ w)))(params["w"])
        update = (one.reshape(shape) * jnp.sign(two.reshape(shape))).reshape(4, 4)
        return {"w": params["w"] - 0.1 * update}, opt_state, jnp.mean(x)

    text = refused(
        step,
        {"w": PARAMS["w1"]},
        (),
        *BATCH,
        match=r"the gradient of params/w \(f32\[4,4\]\) is ambiguous in step; candidates:",
    )
    assert len([line for line in text.splitlines() if line.startswith("  f32[4,4] = ")]) == 2
    assert "take gradients with dtrans.value_and_grad in place of jax.value_and_grad" in text


def test_a_hidden_gradient_is_refused():
    """The gradient of a flattened parameter has a different shape from the parameter."""

    def step(params, opt_state, x, y):
        flat, back = jax.flatten_util.ravel_pytree(params)
        g = jax.grad(lambda f: mlp_loss(back(f), x, y))(flat)
        return back(flat - 0.1 * g), opt_state, jnp.mean(x)

    params = {"w1": PARAMS["w1"], "b1": PARAMS["b1"]}
    refused(
        step,
        params,
        (),
        *BATCH,
        match="no gradient was found in step: none of its parameters .* is updated from the "
        "derivative",
    )


@pytest.mark.parametrize("grad", [jax.value_and_grad, dtrans.value_and_grad])
def test_a_gradient_hidden_beside_others_is_refused(grad):
    """Each trainer would compute the hidden gradient from its own rows, so parameters would differ
    between trainers."""

    def step(params, opt_state, x, y):
        flat, back = jax.flatten_util.ravel_pytree({n: params[n] for n in ("b1", "w1")})
        rest = {n: params[n] for n in params if n not in ("b1", "w1")}
        g = jax.grad(lambda f: mlp_loss({**back(f), **rest}, x, y))(flat)
        loss, grads = grad(lambda r: mlp_loss({**params, **r}, x, y))(rest)
        return (
            {**back(flat - 0.1 * g), **jax.tree.map(lambda p, g: p - g, rest, grads)},
            opt_state,
            loss,
        )

    refused(
        step,
        PARAMS,
        (),
        *BATCH,
        match="params/b1 is updated with a derivative that is not one of its gradients .*so each "
        "trainer would compute a different new value",
    )


def test_two_marks_whose_sum_the_update_does_not_read_are_refused():
    def step(params, opt_state, x, y):
        loss, a = dtrans.value_and_grad(mlp_loss)(params, x, y)
        _, b = dtrans.value_and_grad(mlp_loss)(params, y, x)
        return jax.tree.map(lambda p, a, b: p - a - b, params, a, b), opt_state, loss

    told = (
        "params/b1 has 2 marked gradients in step, but its update may read only their sum; "
        "add them up before"
    )
    refused(step, PARAMS, (), *BATCH, match=told)


def test_a_mark_on_something_that_is_no_leaf_is_refused():
    def step(params, opt_state, x, y):
        stacked = jnp.stack([params["w1"], params["w2"]])
        loss, g = dtrans.value_and_grad(lambda s: jnp.mean((x @ s[0] @ s[1] - y) ** 2))(stacked)
        return {"w1": params["w1"] - g[0], "w2": params["w2"] - g[1]}, opt_state, loss

    params = {"w1": PARAMS["w1"], "w2": PARAMS["w2"]}
    refused(
        step,
        params,
        (),
        *BATCH,
        match="differentiates with respect to `its argument`, which is not a leaf of `params`, the "
        "first argument of step",
    )


@pytest.mark.parametrize("grad", [jax.value_and_grad, dtrans.value_and_grad])
def test_an_update_that_reads_the_batch_is_refused(grad):
    def step(params, opt_state, x, y, lr):
        loss, grads = grad(mlp_loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - lr * g, params, grads), opt_state, loss

    text = refused(
        step,
        PARAMS,
        (),
        *BATCH,
        jnp.float32(0.1),
        match="params/b1 is updated with lr, which only the trainers have",
    )
    assert "optax.inject_hyperparams" in text


def test_a_loss_that_reads_the_optimizer_state_is_refused():
    tx = optax.sgd(0.1, momentum=0.9)

    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(mlp_loss)(params, x, y)
        updates, new = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), new, loss + optax.tree.norm(opt_state)

    refused(
        step,
        PARAMS,
        tx.init(PARAMS),
        *BATCH,
        match="loss is computed from opt_state/0/trace/b1, which is optimizer state",
    )


def test_a_gradient_that_reads_the_optimizer_state_is_refused():
    tx = optax.sgd(0.1, momentum=0.9)

    def step(params, opt_state, x, y):
        ahead = jax.tree.map(lambda p, m: p - 0.1 * m, params, opt_state[0].trace)
        loss, grads = dtrans.value_and_grad(lambda a: mlp_loss(a, x, y))(ahead)
        updates, new = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), new, loss

    refused(
        step,
        PARAMS,
        tx.init(PARAMS),
        *BATCH,
        match="which is not a leaf of `params`|which is optimizer state",
    )


def test_a_loss_that_reads_a_new_average_is_refused_with_a_remedy():
    def step(params, opt_state, x, y):
        ema = opt_state if opt_state else params["ema"]
        if opt_state:
            ema = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, ema, params["w"])

        def loss(p):
            teacher = jax.lax.stop_gradient(mlp_forward(ema, x))
            value = jnp.mean((mlp_forward(p, x) - teacher) ** 2)
            return value, jnp.max(teacher)

        (value, top), grads = dtrans.value_and_grad(loss, has_aux=True)(params["w"])
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params["w"], grads)
        if opt_state:
            return {"w": new}, ema, value, {"best": top}
        ema = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, ema, new)
        return {"w": new, "ema": ema}, (), value, {"best": top}

    plan = lambda params, state: dtrans.pserver(
        dtrans.trace(step, params, state, *BATCH),
        dtrans.trace(lambda: (params, state)),
        trainers=2,
    )
    match = (
        r"the gradient of params/w/\w+ is computed from opt_state/\w+, .*keep the average in params"
    )
    with pytest.raises(GradientError, match=match):
        plan({"w": PARAMS}, PARAMS)
    plan({"w": PARAMS, "ema": PARAMS}, ())  # the remedy in the error


@pytest.mark.parametrize("marks", ["gradients", "state", "all"])
def test_state_that_follows_clipped_rows_is_refused_with_a_remedy(marks):
    """The clip follows the norms of gradients of rows, as in adaptive DP-SGD."""

    def step(params, opt_state, x):
        clip = params["clip"] if marks == "all" else opt_state["clip"]
        rows = jax.vmap(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)), (None, 0))
        g = rows(params["w"], x)
        norms = jnp.sqrt(jnp.sum(g**2, (1, 2)))
        value = jnp.mean(g * jnp.minimum(1.0, clip / norms)[:, None, None], 0)
        share = jnp.mean(norms < clip)
        mark = dtrans.value_and_grad(lambda leaf, v: jnp.vdot(jax.lax.stop_gradient(v), leaf))
        _, value = mark(params["w"], value)
        if marks != "gradients":
            _, share = mark(clip, share)
        w, clip = params["w"] - 0.1 * value, clip * jnp.exp(0.5 - share)
        if marks == "all":
            return {"w": w, "clip": clip}, (), jnp.mean(norms)
        return {"w": w}, {"clip": clip}, jnp.mean(norms)

    w, clip = jnp.ones((4, 4)), {"clip": jnp.array(0.5)}
    params, state = ({"w": w, **clip}, ()) if marks == "all" else ({"w": w}, clip)
    main = dtrans.trace(step, params, state, BATCH[0])
    start = dtrans.trace(lambda: (params, state))
    matches = {
        "gradients": "keep opt_state/clip in the first argument of step, and mark the value",
        "state": "opt_state/clip, a leaf of the second argument of step; keep opt_state/clip in",
    }
    if marks == "all":
        dtrans.pserver(main, start, trainers=2)
    else:
        with pytest.raises(GradientError, match=matches[marks]):
            dtrans.pserver(main, start, trainers=2)


def test_state_that_changes_its_type_is_refused():
    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(mlp_loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - g, params, grads), {"n": opt_state["n"] + 0.5}, loss

    refused(
        step,
        PARAMS,
        {"n": jnp.zeros((), jnp.int32)},
        *BATCH,
        match=r"opt_state/n is i32\[\] as an argument and f32\[\] in the result of step; a step",
    )


def test_a_second_gradient_in_the_update_is_refused():
    """Refuse a penalty with its own gradient, which the optimize half would not receive."""

    def step(params, opt_state, x, y):
        loss, grads = dtrans.value_and_grad(mlp_loss)(params, x, y)
        extra = jax.grad(lambda p: mlp_loss(p, y, x))(params)
        return jax.tree.map(lambda p, g, e: p - g - e, params, grads, extra), opt_state, loss

    refused(
        step,
        PARAMS,
        (),
        *BATCH,
        match="params/b1 is updated with a derivative that is not one of its gradients",
    )


def test_new_state_is_told_by_order_where_structures_are_equal():
    def step(params, momentum, x, y):
        loss, grads = jax.value_and_grad(mlp_loss)(params, x, y)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return loss, jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum

    params = mlp_params()
    program = dtrans.trace(step, params, params, *mlp_batch())
    assert [n.split("/")[0] for n in program.out_names] == ["loss"] + ["params"] * 4 + [
        "momentum"
    ] * 4
    assert divide_step(program).results == ("loss",)


def test_a_step_that_returns_gradients_first_is_refused():
    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(mlp_loss)(params, x, y)
        return loss, grads, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), opt_state

    with pytest.raises(
        GradientError,
        match="at an ambiguous position: parts 1, 2 of its result all have the structure",
    ):
        divide_step(dtrans.trace(step, mlp_params(), (), *mlp_batch()))


def test_marked_gradients_of_single_examples_are_refused():
    def step(params, opt_state, x, y):
        one = lambda p, x, y: mlp_loss(p, x[None], y[None])
        _, grads = jax.vmap(dtrans.value_and_grad(one), (None, 0, 0))(params, x, y)
        return (
            jax.tree.map(lambda p, g: p - 0.1 * g.mean(0), params, grads),
            opt_state,
            mlp_loss(params, x, y),
        )

    with pytest.raises(
        GradientError, match="per-example gradients .* Take the gradient of the mean loss"
    ):
        divide_step(dtrans.trace(step, mlp_params(), (), *mlp_batch()))


@pytest.mark.parametrize("cast", [False, True])
def test_a_loop_that_takes_several_steps_is_not_a_gradient(cast):
    def step(params, opt_state, x, y):
        def body(p, _):
            loss, grads = jax.value_and_grad(mlp_loss)(p, x, y)
            return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), loss

        new, losses = jax.lax.scan(body, params, None, length=3)
        if cast:
            new = jax.tree.map(lambda p: jax.lax.reduce_precision(p, 8, 23), new)
        return new, opt_state, losses[-1]

    with pytest.raises(
        GradientError, match="a scan computes derivatives.*A step must have one update; move"
    ):
        divide_step(dtrans.trace(step, mlp_params(), (), *mlp_batch()))


@pytest.mark.parametrize(
    "tx,who",
    [
        (optax.polyak_sgd(0.1), "optax.scale_by_polyak"),
        (optax.lbfgs(0.1), "optax.scale_by_zoom_linesearch"),
        (
            optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
            "optax.contrib.reduce_on_plateau",
        ),
    ],
    ids=["polyak", "lbfgs", "plateau"],
)
def test_an_optimizer_that_is_told_the_loss_is_refused_by_name(tx, who):
    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(mlp_loss)(params, x, y)
        told = {"value": loss, "grad": grads, "value_fn": lambda p: mlp_loss(p, x, y)}
        updates, state = optax.with_extra_args_support(tx).update(grads, state, params, **told)
        return optax.apply_updates(params, updates), state, loss

    params = mlp_params()
    program = dtrans.trace(step, params, jax.eval_shape(tx.init, params), *mlp_batch())
    with pytest.raises(
        dtrans.errors.OptimizerError, match=f"{who} uses loss, which only the trainers have"
    ):
        refuse_inseparable(divide_step(program), "which only the trainers have")


def test_a_gradient_computed_from_another_gradient_is_refused_for_several_trainers():
    """A sharpness-aware step perturbs parameters by their gradient.

    Each trainer would use the gradient for its rows.
    """
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.5))
    tx = optax.contrib.sam(optax.sgd(0.1), ascent, opaque_mode=True)

    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(mlp_loss)(params, x, y)
        updates, state = tx.update(
            grads, state, params, grad_fn=lambda p, _: jax.grad(mlp_loss)(p, x, y)
        )
        return optax.apply_updates(params, updates), state, loss

    params = mlp_params()
    main = dtrans.trace(step, params, jax.eval_shape(tx.init, params), *mlp_batch())
    startup = dtrans.trace(init_of(tx), params)
    dtrans.pserver(main, startup)
    for strategy in (dtrans.nccl2, dtrans.pserver):
        job = strategy(main, startup, trainers=2).simulate()
        state, _ = job.step(job.init(params), *mlp_batch())  # all trainers have the first gradient
        wanted, _, _ = step(params, tx.init(params), *mlp_batch())
        tree_close(job.params(state), wanted, 1e-6)
    with pytest.raises(
        GradientError,
        match="computed from another derivative .*Each of the 2 trainers would compute",
    ):
        dtrans.pserver(main, startup, trainers=2, batch="local")
    with pytest.raises(GradientError, match="computed from another derivative"):
        dtrans.nccl2(main, startup, trainers=2, batch="local")


def test_a_derivative_inside_the_loss_is_part_of_it():
    """The loss has a penalty on the derivative of the model by its input, for each example."""

    def loss(params, x, y):
        slope = jax.vmap(jax.grad(lambda one: jnp.sum(mlp_forward(params, one[None]))))(x)
        return mlp_loss(params, x, y) + jnp.mean(slope**2)

    tx = optax.sgd(0.1)
    params = mlp_params()
    program = dtrans.trace(
        plain_step(loss, tx), params, jax.eval_shape(tx.init, params), *mlp_batch()
    )
    assert divide_step(program).nested == ""


def test_state_that_the_batch_enters_is_looked_for_once(monkeypatch):
    """A step with statistics and many leaves needs one pass for all outputs, and not one pass for
    each."""
    passes = []
    counted = lambda *args: (passes.append(None), backward_slice(*args))[1]
    monkeypatch.setattr("dtrans.step.halves.backward_slice", counted)

    def passes_of(leaves):
        tx = optax.sgd(0.1)

        def step(params, state, x):
            loss = lambda p: sum(jnp.mean((x @ w) ** 2) for w in p)
            value, grads = dtrans.value_and_grad(loss)(params)
            updates, inner = tx.update(grads, state["opt"], params)
            means = [0.9 * m + 0.1 * x.mean(0) for m in state["means"]]
            return optax.apply_updates(params, updates), {"means": means, "opt": inner}, value

        params = [jnp.ones((4, 2))] * leaves
        main = dtrans.trace(
            step,
            params,
            {"means": [jnp.ones(4)] * leaves, "opt": tx.init(params)},
            jnp.ones((8, 4)),
        )
        passes.clear()
        need = divide_step(main).inseparable_need or divide_step(main).argument_need
        assert need is not None and need.what.endswith("state/means/0 is updated with x")
        return len(passes)

    assert passes_of(12) == passes_of(3)
