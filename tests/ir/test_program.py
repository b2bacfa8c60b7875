"""Programs: names, pairs of state, listings as text and HTML, calls, other batch sizes, and errors
for wrong arguments."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import mlp_batch, mlp_loss, mlp_params, plain_step, tree_close, tree_equal

import dtrans
from dtrans.errors import BatchError, NotRunnableError, TraceError
from dtrans.ir.builder import Builder
from dtrans.ir.pytree import TreeSpec
from dtrans.ops import token
from dtrans.ops.rpc import send_barrier_p
from dtrans.step.trace import argument_names, guess_roles


ADAM = optax.adam(1e-2)
PARAMS = mlp_params()
BATCH = mlp_batch()


def step_program(**more):
    return dtrans.trace(plain_step(mlp_loss, ADAM), PARAMS, ADAM.init(PARAMS), *BATCH, **more)


class Layer(NamedTuple):
    kernel: jax.Array
    bias: jax.Array


# -- names -----------------------------------------------------------------------------------------


def test_inputs_and_outputs_are_named_by_argument_and_path():
    p = step_program(name="train")
    state = [
        f"opt_state/0/{n}" for n in ("count", *(f"{m}/{k}" for m in ("mu", "nu") for k in PARAMS))
    ]
    assert p.name == "train"
    assert set(p.in_names) == {*(f"params/{n}" for n in PARAMS), *state, "batch/0", "batch/1"}
    assert p.out_names == (*p.in_names[:-2], "loss")
    assert p.state == p.in_names[:-2]
    assert p.inputs["params/w1"].shape == (5, 6) and p.outputs["loss"].shape == ()


def test_state_is_found_by_structure_wherever_it_is_returned():
    def loss_first(params, opt_state, x):
        return jnp.sum(x), opt_state, jax.tree.map(lambda p: p * 2, params)

    p = dtrans.trace(loss_first, PARAMS, ADAM.init(PARAMS), BATCH[0])
    assert p.out_names[0] == "loss"
    assert set(p.state) == set(p.in_names) - {"x"}


def test_equal_structures_pair_by_position():
    p = dtrans.trace(lambda a, b: (a + b, b * 2), jnp.ones(3), jnp.ones(3))
    assert p.out_names == ("a", "b")


def test_results_of_a_dict_or_namedtuple_are_named_by_key():
    assert dtrans.trace(lambda x: {"y": x, "sum": {"z": x.sum()}}, jnp.ones(2)).out_names == (
        "sum/z",
        "y",
    )
    assert dtrans.trace(lambda x: Layer(x, x + 1), jnp.ones(2)).out_names == ("kernel", "bias")


def test_what_is_left_is_loss_and_aux_and_numbers():
    def step(params, opt_state, x):
        return params * 2, opt_state, x.sum(), {"n": x.max()}, x

    assert dtrans.trace(step, jnp.ones(2), (), jnp.ones(3)).out_names == (
        "params",
        "loss",
        "aux/n",
        "out4",
    )
    assert dtrans.trace(lambda x: (x.sum(), x), jnp.ones(3)).out_names == ("loss", "x")
    assert dtrans.trace(lambda x: (x.sum(), x.max()), jnp.ones(3)).out_names == ("out0", "out1")
    assert dtrans.trace(lambda x: x * 2, jnp.ones(3)).out_names == ("out",)


def test_nested_user_trees_keep_their_names():
    params = {"body": [Layer(jnp.ones((2, 2)), jnp.ones(2))], "head": (jnp.ones(2),)}
    p = dtrans.trace(
        lambda params, opt_state, x: (jax.tree.map(jnp.sin, params), opt_state, x),
        params,
        (),
        jnp.ones(()),
    )
    assert p.in_names == ("params/body/0/kernel", "params/body/0/bias", "params/head/0", "x")
    assert p.out_names == (*p.in_names[:3], "loss")


def test_a_flax_model_keeps_its_names():
    net = nn.Dense(2)
    params = net.init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    p = dtrans.trace(lambda params, x: net.apply({"params": params}, x), params, jnp.ones((4, 3)))
    assert p.in_names == ("params/bias", "params/kernel", "x")
    tree_close(p(params, jnp.ones((4, 3))), net.apply({"params": params}, jnp.ones((4, 3))), 1e-6)


def test_an_equinox_model_with_functions_among_its_leaves():
    net = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))
    p = dtrans.trace(lambda model, x: jax.vmap(model)(x), net, jnp.ones((4, 2)))
    assert p.in_names[-2:] == ("model/layers/1/bias", "x")
    tree_close(p(net, jnp.ones((4, 2))), jax.vmap(net)(jnp.ones((4, 2))), 1e-6)
    other = eqx.tree_at(lambda n: n.activation, net, replace=jnp.tanh)
    with pytest.raises(
        TraceError, match="argument 0 of program .* contains .*, but was traced with .* at"
    ):
        p(other, jnp.ones((4, 2)))


@pytest.mark.parametrize(
    "fn,count,names",
    [
        (lambda a, b: 0, 2, ("a", "b")),
        (lambda a, /, b, *rest: 0, 4, ("a", "b", "rest/0", "rest/1")),
        (lambda a, *, key=None: 0, 1, ("a",)),
        (max, 2, ("arg0", "arg1")),
    ],
)
def test_argument_names(fn, count, names):
    assert argument_names(fn, count) == names


def test_more_arguments_than_parameters_are_refused():
    def one(a):
        return a

    with pytest.raises(
        TraceError,
        match="one has 1 positional parameter; dtrans.trace was called with 2 arguments",
    ):
        dtrans.trace(one, jnp.ones(1), jnp.ones(1))


def branching(params, x, *batch):
    """Return a step that converts its arguments to Python values, which JAX refuses."""
    if (batch[0] if batch else params["dense/kernel"]).sum() > 0:
        return params, x
    return params, 2 * x


@pytest.mark.parametrize(
    "fn,batch,name",
    [
        (branching, (), r"params\['dense/kernel'\]"),
        (branching, (np.ones(3),), r"batch\[0\]"),
        (functools.partial(branching, {"dense/kernel": 1.0}), (np.ones(3),), r"batch\[0\]"),
    ],
)
def test_errors_of_jax_name_the_function_its_line_and_its_argument(fn, batch, name):
    line = branching.__code__.co_firstlineno
    params = {"dense/kernel": np.ones((3, 2))}
    arguments = (np.ones(2), *batch) if isinstance(fn, functools.partial) else (params, 1.0, *batch)
    text = f"tracing the function branching at .*test_program.py:{line} .*the argument {name}"
    with pytest.raises(jax.errors.TracerBoolConversionError, match=text):
        dtrans.trace(fn, *arguments)


def test_errors_of_jax_name_the_argument_of_a_callable_object():
    class Step:
        def __call__(self, params, x):
            return params if x > 0 else 2 * params

    with pytest.raises(jax.errors.TracerBoolConversionError, match="value of the argument x"):
        dtrans.trace(Step(), np.ones(2), 1.0)


@pytest.mark.parametrize("values", [["a", "b"], [b"a"], [object()], ["2026-01-01"]])
def test_arrays_without_numbers_are_refused_by_name(values):
    x = np.array(values, dtype="datetime64[D]" if "2026-01-01" in values else None)
    text = re.escape(f"x is an array of {x.dtype}; a step takes arrays of numbers, so convert x")
    with pytest.raises(BatchError, match=text):
        dtrans.trace(lambda params, x: params, np.ones(2), x)
    program = dtrans.trace(lambda params, x: params, np.ones(2), np.ones(2))
    with pytest.raises(BatchError, match=text):
        program(np.ones(2), x)


def test_a_step_with_a_numpy_scalar_in_its_state_is_traced_once():
    """`numpy.float64` is a `float` and also an array.

    So the step is not traced again, as for a Python count.
    """
    calls = []

    def step(params, opt_state, x):
        calls.append(1)
        return {"w": params["w"] + x, "scale": params["scale"] * 2}, opt_state, x.sum()

    params = {"w": jnp.ones(2), "scale": np.float64(1.0)}
    program = dtrans.trace(step, params, (), jnp.ones(2))
    assert len(calls) == 1
    assert program.state == ("params/scale", "params/w")


def test_two_inputs_of_one_name_are_refused():
    params = {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}
    with pytest.raises(TraceError, match="program f has two inputs named p/a/b"):
        dtrans.trace(lambda p: p["a/b"], params, name="f")


def test_names_and_roles_must_fit_the_jaxpr():
    p = step_program()
    with pytest.raises(TraceError, match="equations but 0 roles"):
        dataclasses.replace(p, roles=())
    with pytest.raises(TraceError, match="outputs but 1 names"):
        dataclasses.replace(p, out=TreeSpec.from_tree(0.0 * np.ones(1), "loss"))


# -- ops and how they are shown --------------------------------------------------------------------


def scale(x, y):
    return {"z": jnp.sum(2.0 * x, axis=0) @ y}


def test_ops_name_their_operands():
    p = dtrans.trace(scale, jnp.ones((3, 4)), jnp.ones((4, 2)))
    mul, total, dot = p.ops
    assert (mul.type, mul.role, mul.inputs, mul.outputs) == (
        "mul",
        "forward",
        ("2.0", "x"),
        ("%0",),
    )
    assert (total.type, total.inputs, total.attrs["axes"]) == ("reduce_sum", ("%0",), (0,))
    assert (dot.type, dot.inputs, dot.outputs) == ("dot_general", ("%1", "y"), ("z",))
    assert dot.attrs["dimension_numbers"] == (((0,), (0,)), ((), ()))
    assert str(mul) == "%0 = mul 2.0 x"


def test_new_state_is_written_with_a_prime():
    p = dtrans.trace(
        lambda params, opt_state, x: (params - x, opt_state), jnp.ones(2), (), jnp.ones(2)
    )
    assert [op.outputs for op in p.ops] == [("params'",)]


def test_the_listing_has_inputs_ops_and_outputs():
    p = dtrans.trace(scale, jnp.ones((3, 4)), jnp.ones((4, 2)))
    lines = str(p).splitlines()
    assert lines[0].startswith("program scale: roles are guessed")
    assert lines[1:4] == ["  in   x: f32[3,4]", "  in   y: f32[4,2]", "  forward  %0 = mul 2.0 x"]
    assert lines[-1] == "  out  z: f32[2]"
    assert len(lines) == 1 + 2 + 3 + 1
    assert repr(p) == "<Program scale: 2 inputs, 3 ops, 1 outputs>"


def test_an_output_that_is_an_input_or_a_number_says_so():
    p = dtrans.trace(lambda x: {"same": x, "one": 1.0}, jnp.ones(2))
    assert str(p).splitlines()[-2:] == ["  out  one: f32[] = 1.0", "  out  same: f32[2] = x"]


def test_html_escapes_and_colours():
    p = dtrans.trace(lambda x: {"<y>": x + 1}, jnp.ones(2), name="<b>")
    html = p._repr_html_()
    assert "&lt;b&gt;" in html and "&lt;y&gt;" in html and "<y>" not in html
    assert html.count("<tr>") == 1 and "color:#1f6feb" in html


def test_html_of_a_long_program_opens_folded_by_role_with_a_search_box():
    short, long = (
        dtrans.trace(lambda x, n=n: functools.reduce(lambda y, _: y * y, range(n), x), jnp.ones(2))
        for n in (40, 41)
    )
    assert "<details open><summary style" in short._repr_html_()
    assert '<input type="search"' not in short._repr_html_()
    assert "<details><summary style" in long._repr_html_()
    assert long._repr_html_().count('<input type="search"') == 1
    assert "forward: 41 ops" in long._repr_html_() and long._repr_html_().count("<tr>") == 41


def test_html_has_a_group_for_each_run_of_ops_with_one_role():
    p = step_program()
    runs = sum(i == 0 or p.roles[i - 1] != r for i, r in enumerate(p.roles))
    html = p._repr_html_()
    assert html.count("<details") == 1 + runs and html.count("<tr>") == len(p.ops)


def test_roles_of_an_uncut_step_follow_the_name_stack():
    p = step_program()
    roles = [r for i, r in enumerate(p.roles) if i == 0 or p.roles[i - 1] != r]
    assert roles[0] == "forward" and roles[-1] == "optimize" and "backward" in roles
    assert guess_roles(p.jaxpr) == p.roles


def test_bodies_of_calls_are_shown_short():
    p = dtrans.trace(lambda x: jax.lax.scan(lambda c, a: (c + a, a * c), 0.0, x), jnp.ones(3))
    (scan,) = [str(op) for op in p.ops if op.type == "scan"]
    assert re.search(r"length=3, jaxpr=<jaxpr, \d+ equations>", scan) and "\n" not in scan


# -- running ---------------------------------------------------------------------------------------


def test_a_program_computes_what_its_function_computes():
    step, state = plain_step(mlp_loss, ADAM), ADAM.init(PARAMS)
    tree_equal(step_program()(PARAMS, state, *BATCH), jax.jit(step)(PARAMS, state, *BATCH))


def test_tracing_computes_nothing():
    shapes = jax.eval_shape(lambda: (PARAMS, ADAM.init(PARAMS), *BATCH))
    p = dtrans.trace(plain_step(mlp_loss, ADAM), *shapes)
    assert str(p.jaxpr) == str(step_program().jaxpr)


def test_python_numbers_are_arguments():
    p = dtrans.trace(lambda x, n: x * n, jnp.ones(2), 3)
    assert p.in_names == ("x", "n") and p(jnp.ones(2), 5).tolist() == [5.0, 5.0]


def test_another_batch_size_is_traced_once_and_kept():
    calls = []

    def step(params, opt_state, x, y):
        calls.append(x.shape)
        return plain_step(mlp_loss, ADAM)(params, opt_state, x, y)

    state = ADAM.init(PARAMS)
    p = dtrans.trace(step, PARAMS, state, *BATCH)
    assert p.specialize(PARAMS, state, *BATCH) is p
    small = p.specialize(PARAMS, state, *mlp_batch(3))
    assert small.inputs["x"].shape == (3, 5) and small.state == p.state
    assert p.specialize(PARAMS, state, *mlp_batch(3)) is small
    assert calls == [(8, 5), (3, 5)]
    tree_equal(
        p(PARAMS, state, *mlp_batch(3)),
        jax.jit(plain_step(mlp_loss, ADAM))(PARAMS, state, *mlp_batch(3)),
    )
    assert len(calls) == 2


def test_a_rewritten_program_replays_its_passes_on_the_traced_function():
    calls = []

    def step(params, opt_state, x, y):
        calls.append(x.shape)
        return plain_step(mlp_loss, ADAM)(params, opt_state, x, y)

    def turned(program):  # rows of x on dim 1, and the optimizer's state is gone
        b = Builder(program.jaxpr)
        ins = {
            n: b.input(t.update(shape=t.shape[::-1]) if n == "x" else t)
            for n, t in program.inputs.items()
        }
        (x,) = b.call(jnp.transpose, ins["x"])
        outs = dict(
            zip(program.out_names, b.inline(program.jaxpr, *{**ins, "x": x}.values()), strict=True)
        )
        return dtrans.Program.written("turned", b, program.args, program.args[0], outs)

    renamed = lambda program: dataclasses.replace(program, name=f"{program.name} and named")
    state, (x, y) = ADAM.init(PARAMS), BATCH
    main = dtrans.trace(step, PARAMS, state, *BATCH)
    back = lambda types: (
        types | {"x": jax.ShapeDtypeStruct(types["x"].shape[::-1], types["x"].dtype)}
    )
    p = main.rewritten(turned, back).rewritten(renamed)
    x3, y3 = mlp_batch(3)
    small = p.specialize(PARAMS, state, x3.T, y3)
    assert (small.name, small.inputs["x"].shape) == ("turned and named", (5, 3))
    assert (
        small.specialize(PARAMS, state, x.T, y) is p
        and p.specialize(PARAMS, state, x3.T, y3) is small
    )
    assert calls == [(8, 5), (3, 5)]
    tree_equal(p(PARAMS, state, x3.T, y3), main(PARAMS, state, x3, y3)[0])
    assert len(calls) == 2, "the program for three rows is that of the source"
    with pytest.raises(
        TraceError,
        match=r"params/w1 is float32\[4, 6\], but program turned and named was traced with",
    ):
        p({**PARAMS, "w1": jnp.ones((4, 6))}, state, x.T, y)


def test_passes_that_change_nothing_leave_the_program():
    p = step_program()
    assert p.rewritten(lambda program: program) is p
    fixed = dataclasses.replace(p, specializer=None).rewritten(
        lambda program: dataclasses.replace(program, name="n")
    )
    assert fixed.specializer is None


def test_numpy_doubles_are_taken_as_jax_takes_them():
    p = dtrans.trace(lambda x: x * 2, jnp.ones(2))
    assert p.specialize(np.ones(2)) is p
    assert p(np.ones(2)).dtype == jnp.float32


# -- refusals --------------------------------------------------------------------------------------


def test_the_wrong_number_of_arguments_is_refused():
    with pytest.raises(TraceError, match="program step takes 4 arguments, 1 were given"):
        step_program()(PARAMS)


def test_another_structure_is_refused():
    with pytest.raises(
        TraceError, match="argument 0 of program step does not have the structure with which it was"
    ):
        step_program()({"w": PARAMS["w1"]}, ADAM.init(PARAMS), *BATCH)


def test_state_of_another_shape_or_dtype_is_refused():
    p, state = step_program(), ADAM.init(PARAMS)
    with pytest.raises(
        TraceError,
        match=r"params/w1 is float32\[4, 6\], but program step was traced with float32\[5, 6\]$",
    ):
        p({**PARAMS, "w1": jnp.ones((4, 6))}, state, *BATCH)
    with pytest.raises(
        TraceError,
        match=r"params/b1 is bfloat16\[6\], but program step was traced with float32\[6\]",
    ):
        p({**PARAMS, "b1": PARAMS["b1"].astype(jnp.bfloat16)}, state, *BATCH)


def test_a_program_not_made_from_a_function_keeps_its_shapes():
    p = dataclasses.replace(
        dtrans.trace(scale, jnp.ones((3, 4)), jnp.ones((4, 2))), specializer=None
    )
    with pytest.raises(
        TraceError,
        match=r"x is float32\[5, 4\], but program scale was traced with float32\[3, 4\]; trace it "
        r"again with these shapes",
    ):
        p(jnp.ones((5, 4)), jnp.ones((4, 2)))


def test_a_communicating_program_cannot_be_called():
    plain = dtrans.trace(lambda x: x * 2, jnp.ones(2))
    b = Builder(plain.jaxpr)
    x = b.input(plain.jaxpr.jaxpr.invars[0].aval)
    b.role = "rpc"
    b.bind(
        send_barrier_p, b.constant(np.zeros(token().shape, bool)), endpoints=("a:1",), trainer_id=0
    )
    p = dtrans.Program("talks", b.build([x]), plain.args, plain.out, tuple(b.roles))
    assert p.communicates and not plain.communicates
    with pytest.raises(
        NotRunnableError,
        match=r"program talks contains communication \(send_barrier\), so it cannot be called; run "
        r"it with "
        r"dtrans.Executor\(\)",
    ):
        p(jnp.ones(2))
