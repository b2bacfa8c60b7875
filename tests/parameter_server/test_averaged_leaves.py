"""State that trainers compute and servers average: the running statistics of a batch norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batch_norm_job import MEAN, TX, batches_of, init_with, loss, params_of, plan_for, step_with
from helpers import communication, tree_close
from role_threads import HANG, RoleThreads, joined, serve

import dtrans
from dtrans.errors import ConfigError


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def reference(parts: int, batches: Any) -> Any:
    """Return one device's step, which normalizes each trainer's rows separately and averages the
    new statistics."""
    params, opt_state = init_with(TX)(params_of())
    for x, y in batches:
        rows = len(x) // parts
        cut = [(x[k : k + rows], y[k : k + rows]) for k in range(0, len(x), rows)]
        found = [
            jax.value_and_grad(loss, has_aux=True)(params["net"], params["stats"], *part)
            for part in cut
        ]
        grads = jax.tree.map(lambda *g: sum(g) / parts, *[g for _, g in found])
        stats = [s for (_, s), _ in found]
        mean = {n: sum(s[n] for s in stats) / parts for n in ("mean", "var")}
        updates, opt_state = TX.update(grads, opt_state, params["net"])
        params = {
            "net": optax.apply_updates(params["net"], updates),
            "stats": {**params["stats"], **mean},
        }
    return params


def check(got: Any, want: Any, parts: Any = None) -> None:
    """Compare with the reference. The state of each trainer must contain only rows of this
    trainer's parts."""
    got, want = ({"net": p["net"], **p["stats"]} for p in (got, want))
    seen = got.pop("seen")
    want.pop("seen")
    tree_close(got, want, 1e-12)
    assert parts is None or int(seen) == sum(int(jnp.sum(x > 0)) for x, _ in parts)


def test_servers_average_statistics_on_a_mesh() -> None:
    plan = plan_for(3, 2, MEAN)
    assert plan.frozen == ("params/stats/seen",)
    job, batches = plan.on_mesh(), batches_of(4)
    state = job.init(params_of())
    for batch in batches:
        state, _ = job.step(state, *batch)
    check(job.params(state), reference(3, batches))


@pytest.mark.parametrize("runtime_split", [False, True], ids=["sync", "at run time"])
def test_servers_average_statistics_of_processes(
    role_threads: RoleThreads, runtime_split: bool
) -> None:
    plan, batches = plan_for(2, 2, MEAN, rows=3, mode=dtrans.Sync(runtime_split)), batches_of(3)

    def train(k: int) -> Any:
        with dtrans.Executor(deadline=HANG) as exe:
            params = exe.run(plan.trainer_startup_program(k), params_of())
            for x, y in batches:
                params, _ = exe.run(
                    plan.trainer_program(k), params, x[3 * k : 3 * k + 3], y[3 * k : 3 * k + 3]
                )
            return params

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, params_of())
    for k in range(2):
        role_threads.start(f"trainer {k}", train, k)
    ended = role_threads.all()
    want = reference(2, batches)
    for k in range(2):
        check(ended[f"trainer {k}"], want, [(x[3 * k : 3 * k + 3], y) for x, y in batches])
    states = [ended[ep] for ep in plan.servers]
    for name in ("mean", "var"):
        np.testing.assert_allclose(
            joined(plan, states, f"params/stats/{name}"), want["stats"][name], rtol=1e-12
        )


def test_the_newest_statistics_count_without_synchrony(role_threads: RoleThreads) -> None:
    tx = optax.sgd(0.1)
    params, batches = params_of(), batches_of(5)
    plan = plan_for(1, 2, MEAN, rows=6, tx=tx, mode=dtrans.Async())
    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, params)
    want, opt_state = init_with(tx)(params)
    with dtrans.Executor(deadline=HANG) as exe:
        got = exe.run(plan.trainer_startup, params)
        for batch in batches:
            got, _ = exe.run(plan.trainer, got, *batch)
            want, opt_state, _ = step_with(tx)(want, opt_state, *batch)
            check(got, want)
    ended = role_threads.all()
    states = [ended[ep] for ep in plan.servers]
    np.testing.assert_allclose(
        joined(plan, states, "params/stats/var"), want["stats"]["var"], rtol=1e-12
    )


def test_statistics_are_not_compensated_for_their_delay() -> None:
    """Statistics are not gradients, so servers do not store the values that a trainer received."""
    plan = plan_for(2, 2, MEAN, tx=optax.sgd(0.1), mode=dtrans.Async(dtrans.DelayCompensation()))
    backups = {
        row.origin_name.split(".")[0] for row in plan.overview if row.slice_name.endswith("_bak")
    }
    assert backups == {"params/net/out", "params/net/w"}
    for programs in plan.servers.values():
        for block in programs.main.jaxpr.jaxpr.eqns[0].params["optimize_blocks"]:
            if "stats" in block.name:
                assert [e.primitive.name for e in block.jaxpr.jaxpr.eqns] == ["copy"]


def test_statistics_are_sent_when_they_are_made_and_are_nobodys_by_default() -> None:
    plan, own = plan_for(2, 2, MEAN), plan_for(2, 2, None)
    assert own.frozen == ("params/stats/mean", "params/stats/seen", "params/stats/var")
    assert communication(plan.trainer).count("send") == communication(own.trainer).count("send") + 2
    assert communication(plan_for(2, 2, {"params/stats": "own"}).trainer) == communication(
        own.trainer
    )
    sent = [op.inputs[0] for op in plan.trainer.ops if op.type in ("send", "split_byref")]
    assert sent.index("params/stats/mean@GRAD") < sent.index("params/net/w@GRAD"), (
        "in the forward pass"
    )


@pytest.mark.parametrize("merge, message", [
    ({"params/stats": "mean"},
     "merge['params/stats'] is 'mean', but servers average floating-point "
     "and complex numbers only, and params/stats/seen is i32[]; pass 'own'"),
    ({"params/stats/mean": "sum"}, "merge['params/stats/mean'] must be 'mean' or 'own', it is "
"'sum'"),
    ({"params/net/w": "mean"}, "merge['params/net/w'] matches no leaf that trainers compute; "
     "expected one of these leaves, or a prefix of their names: "
     "params/stats/mean, params/stats/seen, params/stats/var"),
    ("mean", "merge='mean' must be a dict from names to merges, such as {'aux': 'sum'}"),
])  # fmt: skip
def test_what_cannot_be_averaged_is_named(merge: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_for(2, 2, merge)
    assert str(caught.value) == message


def test_a_trainer_that_left_and_counts_as_zero_is_refused() -> None:
    """A zero does no harm in a sum of gradients, but would reduce a mean of variances."""
    with pytest.raises(
        ConfigError,
        match="^on_trainer_exit='paddle' cannot be used if merge averages params/stats/mean: the",
    ):
        plan_for(2, 2, MEAN, on_trainer_exit="paddle")
