"""Plans of parameter servers whose trainers are meshes of devices: programs, bytes and refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from device_mesh_job import MESH, TOKENS, WORDS, mlp, plan_of, transformer
from mesh_models import INNER, WIDTH, array, job_of

import dtrans
from dtrans.errors import ConfigError, GradientError
from dtrans.ops import send_p


pytestmark = pytest.mark.usefixtures("x64")

ROWS = 8  # rows of one trainer in a traced step


# -- programs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime_split", [False, True])
def test_servers_get_the_messages_of_trainers_with_one_device(runtime_split):
    of, mode = transformer(), dtrans.Sync(runtime_split=runtime_split)
    plan, other = (plan_of(of, mesh=mesh, mode=mode) for mesh in (MESH, None))
    assert str(plan.trainer) == str(other.trainer)
    assert [str(p.main) for p in plan.servers.values()] == [
        str(p.main) for p in other.servers.values()
    ]
    assert sends_of(plan.device_program.program) == sends_of(other.trainer)
    assert other.device_program is None


def sends_of(program):
    """Return the names and types of all values that a program sends."""
    sent = {}
    for eqn in program.eqns:
        if eqn.primitive is send_p:
            sent[eqn.params["names"]] = tuple(a.aval.str_short() for a in eqn.invars)
    return sent


def test_results_are_reduced_before_the_trainer_waits_for_servers():
    ops = [op.type for op in plan_of(transformer()).device_program.program.ops]
    assert ops.index("send_barrier") > max(i for i, x in enumerate(ops) if x == "all_reduce")


def test_processes_with_different_meshes_are_different_jobs():
    plans = [plan_of(mlp(), mesh=mesh) for mesh in (None, {"data": 2}, MESH)]
    assert len({str(plan.identity) for plan in plans}) == 3
    assert {k: v for k, v in plans[1].identity.items() if k != "mesh"} == plans[0].identity


# -- bytes -----------------------------------------------------------------------------------------


def test_a_plan_prints_the_bytes_of_a_transformer():
    """The model axis moves four activations, as in Megatron, and the gradients of its parameters.

    The data axis moves the gradients of a device's parameters.
    """
    plan = plan_of(transformer())
    activation = ROWS // 2 * TOKENS * WIDTH * 8
    divided = (4 * WIDTH * WIDTH + 2 * WIDTH * INNER + INNER) * 8
    others = (3 * WIDTH + WIDTH * WORDS) * 8
    lines = str(plan).splitlines()
    assert "2 trainers with a mesh of 2 data x 2 model, 2 pservers, sync" in lines[0]
    assert [x for x in lines if x.startswith("in each trainer")] == [
        f"in each trainer, all_reduce over model: {4 * activation:,} bytes per step",
        f"in each trainer, all_reduce over data: {divided // 2 + others + 8:,} bytes per step",
        f"in each trainer, all_gather over model: {divided:,} bytes per step",
    ]
    assert "sharded over model along dimension 1: params/block/q, params/block/k" in str(plan)
    assert not any("gathered over" in x for x in lines)
    inside = [t for t in plan.transfers() if t.target == "devices of the trainer"]
    assert [(t.source, t.what, t.nbytes) for t in inside] == [
        ("trainer", "all_reduce over model", 4 * activation),
        ("trainer", "all_reduce over data", divided // 2 + others + 8),
        ("trainer", "all_gather over model", divided),
    ]


def test_a_plan_names_values_that_devices_gather_for_lack_of_a_rule():
    def loss(params, x):
        with dtrans.split(name="sorted"):
            return jnp.mean(jnp.sort(x @ params["w"], -1)[:, :3] ** 2)

    of = job_of(loss, {"w": array(WIDTH, INNER)}, (array(ROWS, WIDTH),))
    assert "gathered over model: float64[8, 12] for sort of f64[8,12]" in str(
        plan_of(of, mesh={"model": 2})
    )


def test_a_split_scope_without_a_model_axis_has_a_note():
    note = "split(name='mlp') has no effect: every trainer computes the layer in full; to divide it"
    assert note in str(plan_of(mlp(), mesh={"data": 2}))
    assert note in str(plan_of(mlp(), mesh=None))
    assert note not in str(plan_of(mlp()))


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error",
    [
        ({"mode": dtrans.Async()}, r"mesh=.* cannot be combined with mode=dtrans.Async\(...\)"),
        ({"mode": dtrans.HalfAsync()}, "cannot be combined with mode=dtrans.HalfAsync"),
        ({"mode": dtrans.Geo()}, "cannot be combined with mode=dtrans.Geo"),
        ({"mode": dtrans.Sync(compress="int8")}, "cannot be combined with compress='int8'"),
        (
            {"mode": dtrans.Sync(compress_params="bf16")},
            "cannot be combined with compress_params='bf16'",
        ),
        ({"sparse": "auto"}, "cannot be combined with sparse='auto'"),
        (
            {"batch": dtrans.Batch(speeds=[2, 1])},
            r"cannot be combined with batch=dtrans.Batch\(speeds=...\), which gives each trainer",
        ),
        ({"mesh": {"data": 2, "sequence": 2}}, "has 'sequence', but the devices of a trainer"),
        ({"mesh": {"data": 2, "model": "data"}}, "has 'model': 'data', but the devices"),
        ({"mesh": {"rows": 2}}, "mesh has an axis 'rows'"),
        ({"mesh": {"data": 0}}, r"mesh\['data'\] must be a positive number of devices"),
        ({"mesh": 4}, "mesh must be a dict such as"),
        (
            {"mesh": {"data": 2}, "batch": dtrans.Batch(axes=None)},
            "no array of the batch with rows that the devices could divide; leave 'data' out",
        ),
    ],
    ids=str,
)
def test_options_that_exclude_a_mesh_are_named(options, error):
    with pytest.raises(ConfigError, match=error):
        plan_of(mlp(), **options)


def test_a_model_axis_without_split_layers_is_refused():
    of = job_of(
        lambda params, x: jnp.mean((x @ params["w"]) ** 2), {"w": array(4, 2)}, [array(8, 4)]
    )
    with pytest.raises(ConfigError, match=r"has no dtrans.split\(\) scope"):
        plan_of(of)


def test_a_local_scope_is_refused():
    def loss(params, x):
        with dtrans.local():
            mean = x.mean(0)
        return jnp.mean(((x - mean) @ params["w"]) ** 2)

    of = job_of(loss, {"w": array(4, 2)}, [array(8, 4)])
    with pytest.raises(ConfigError, match=r"step has a dtrans.local\(\) scope, whose values"):
        plan_of(of, mesh={"data": 2})


def test_a_host_callback_is_refused():
    def loss(params, x):
        value = jnp.mean((x @ params["w"]) ** 2)
        jax.debug.print("{}", value)
        return value

    of = job_of(loss, {"w": array(4, 2)}, [array(8, 4)])
    with pytest.raises(GradientError, match="every device of a trainer would call"):
        plan_of(of, mesh={"data": 2})
