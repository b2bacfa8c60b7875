"""Parameters, state and results that read values of the forward pass equal one device, in every
strategy.

Steps are drawn at random: a value of forward or of gradients (the loss, a statistic of activations,
a count of rows), and a place where the value enters. Each strategy computes the step or refuses it.
One job of each kind computes the results of one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import dtrans
from dtrans.errors import ConfigError, DtransError, GradientError


WIDE, HIDDEN, OUT = 4, 6, 3
ROWS_CUT = dtrans.Slicing(min_slice_size=0)


def init(key: jax.Array) -> tuple[Any, Any]:
    keys = jax.random.split(key)
    params = {
        "v": jax.random.normal(keys[0], (HIDDEN, OUT)),
        "w": jax.random.normal(keys[1], (WIDE, HIDDEN)) / 2,
    }
    return params, {
        "best": jnp.array(1e9),
        "mean": jnp.zeros(()),
        "momentum": jax.tree.map(jnp.zeros_like, params),
    }


def batch(rows: int, seed: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(rows, WIDE))), jnp.asarray(rng.normal(size=(rows, OUT)))


def loss_of(params: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden = jnp.tanh(x @ params["w"])
    return jnp.mean((hidden @ params["v"] - y) ** 2), hidden


# functions from the loss, activations, gradients and the batch to a number
VALUES: dict[str, Callable[..., jax.Array]] = {
    "loss": lambda loss, hidden, grads, x, y: loss,
    "root of the loss": lambda loss, hidden, grads, x, y: jnp.sqrt(loss),
    "mean of activations": lambda loss, hidden, grads, x, y: jnp.mean(hidden**2),
    "variance of activations": lambda loss, hidden, grads, x, y: hidden.var(),
    "largest activation": lambda loss, hidden, grads, x, y: jnp.abs(hidden).max(),
    "share of rows": lambda loss, hidden, grads, x, y: jnp.mean(
        (hidden[:, 0] > y[:, 0]).astype(x.dtype)
    ),
    "count of rows": lambda loss, hidden, grads, x, y: jnp.sum(y[:, 0] > 0.0) / 10.0,
    "size of the batch": lambda loss, hidden, grads, x, y: jnp.asarray(len(x) / 100.0),
    "loss times statistic": lambda loss, hidden, grads, x, y: loss * jnp.mean(hidden),
    "largest input": lambda loss, hidden, grads, x, y: x.max(),
    "rows times gradient": lambda loss, hidden, grads, x, y: jnp.mean((x @ grads["w"]) ** 2),
    "activations times gradient": lambda loss, hidden, grads, x, y: jnp.mean(
        (hidden @ grads["v"]) ** 2
    ),
    "median of activations": lambda loss, hidden, grads, x, y: jnp.median(jnp.abs(hidden)),
    "loss over norm": lambda loss, hidden, grads, x, y: loss / (1.0 + jnp.sum(grads["w"] ** 2)),
}
USES = ("rate", "gate", "parameter", "outer", "state", "least", "result")


@dataclasses.dataclass(frozen=True)
class Case:
    """Step of the tests.

    Attributes:
      value, use: keys of `VALUES` and `USES`.
      marked: True if the gradient is taken with `dtrans.value_and_grad`.
      one_state: True if parameters and state are one pytree.
      noisy: True if forward adds random numbers to the batch, and the value is one of these
        numbers.
    """

    value: str
    use: str
    marked: bool
    one_state: bool
    noisy: bool = False

    def step(self) -> Callable[..., Any]:
        """Return the step, as a user would write it."""
        value_and_grad = dtrans.value_and_grad if self.marked else jax.value_and_grad

        def update(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, Any]:
            noise = jax.random.normal(jax.random.key(5), x.shape) if self.noisy else jnp.zeros(())
            (loss, hidden), grads = value_and_grad(loss_of, has_aux=True)(params, x + noise, y)
            if self.noisy:
                x, hidden = noise, jnp.tanh(noise @ params["w"])
            value = VALUES[self.value](loss, hidden, grads, x, y)
            momentum = jax.tree.map(lambda m, g: 0.5 * m + g, state["momentum"], grads)
            rate = 0.1 * value if self.use == "rate" else 0.1
            new = jax.tree.map(lambda p, m: p - rate * m, params, momentum)
            if self.use == "gate":
                new = jax.tree.map(lambda p, q: jnp.where(value < 0.7, p, q), new, params)
            if self.use == "parameter":
                new["v"] = new["v"] + 0.01 * value
            if self.use == "outer":
                new["w"] = new["w"] + 0.01 * value * (x.T @ hidden) / len(x)
            kept = {**state, "momentum": momentum}
            if self.use == "state":
                kept["mean"] = 0.9 * state["mean"] + 0.1 * value
            if self.use == "least":
                kept["best"] = jnp.minimum(state["best"], value)
            results = {"loss": loss, "value": value} if self.use == "result" else {"loss": loss}
            return new, kept, results

        def together(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any]:
            params, kept, results = update(state["params"], state["opt"], x, y)
            return {"params": params, "opt": kept}, results

        return together if self.one_state else update

    def init(self) -> Callable[[jax.Array], Any]:
        """Return the init of the step."""
        together = lambda key: dict(zip(("params", "opt"), init(key), strict=True))
        return together if self.one_state else init


STRATEGIES: dict[str, Callable[..., Any]] = {
    "nccl2": lambda main, startup, n: dtrans.nccl2(main, startup, trainers=n),
    **{
        f"stage {k}": lambda main, startup, n, k=k: dtrans.sharding(
            main, startup, degree=n, stage=k, slices=ROWS_CUT
        )
        for k in (1, 2, 3)
    },
    **{
        f"groups, stage {k}": lambda main, startup, n, k=k: dtrans.sharding(
            main, startup, degree=2, replicas=n, stage=k, slices=ROWS_CUT
        )
        for k in (1, 3)
    },
    "by leaf": lambda main, startup, n: dtrans.sharding(
        main,
        startup,
        degree=n,
        stage=2,
        slices=dataclasses.replace(ROWS_CUT, partition="greedy_even"),
    ),
    "pserver": lambda main, startup, n: dtrans.pserver(
        main,
        startup,
        pservers="127.0.0.1:6174,127.0.0.1:6175",
        trainers=n,
        placement=dtrans.BlockPlacement(min_block_size=1),
    ),
    "pipeline": lambda main, startup, n: dtrans.pipeline(
        main, startup, num_stages=n, num_micro_batch=2
    ),
}
NEVER_REFUSE = (
    "nccl2",
    "stage 1",
    "stage 2",
    "stage 3",
    "groups, stage 1",
    "groups, stage 3",
    "by leaf",
)


def planned(case: Case, strategy: str, trainers: int, rows: int) -> Any:
    """Return the plan of a step."""
    key = jax.random.key(0)
    first = case.init()(key)
    alone = (first,) if case.one_state else first
    main = dtrans.trace(case.step(), *alone, *batch(rows, 0))
    return STRATEGIES[strategy](main, dtrans.trace(case.init(), key), trainers)


def check(case: Case, strategy: str, trainers: int, rows: int) -> bool:
    """Verify that a plan computes the step. Return False if the strategy refuses the step."""
    try:
        report = planned(case, strategy, trainers, rows).verify()
    except DtransError as e:
        assert strategy not in NEVER_REFUSE, f"{case} is refused: {e}"
        named = (
            "test_forward_values.py",
            "new_params",
            "params/",
            "state/",
            "loss",
            "value",
            "x has 13 rows",
            "the update of",
        )
        assert any(word in str(e) for word in named), f"{e} names nothing of {case}"
        return False
    assert report, f"{case}, {strategy}: {report}"
    return True


JOBS = (  # one case for each strategy, and for each way in which a value reaches the update
    ("nccl2", Case("variance of activations", "gate", marked=False, one_state=True), 3, 13),
    ("stage 2", Case("loss", "least", marked=True, one_state=False), 2, 12),
    (
        "groups, stage 3",
        Case("median of activations", "rate", marked=False, one_state=False),
        2,
        13,
    ),
    ("by leaf", Case("share of rows", "parameter", marked=True, one_state=True), 2, 12),
    (
        "pserver",
        Case("mean of activations", "rate", marked=False, one_state=False, noisy=True),
        3,
        13,
    ),
)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("strategy", "case", "trainers", "rows"), JOBS, ids=[name for name, *_ in JOBS]
)
def test_a_job_gives_the_numbers_of_one_device(
    strategy: str, case: Case, trainers: int, rows: int
) -> None:
    key, step = jax.random.key(0), jax.jit(case.step())
    job = planned(case, strategy, trainers, rows).simulate()
    first = case.init()(key)
    state, alone = job.init(key), [first] if case.one_state else [*first]
    found, wanted = [], []
    for i in range(2):
        state, results = job.step(state, *batch(rows, i))
        *alone, by_one = step(*alone, *batch(rows, i))
        found.append(results)
        wanted.append(by_one)
    want = alone[0] if case.one_state else tuple(alone)
    pairs = zip(
        jax.tree.leaves((job.gather(state), found)), jax.tree.leaves((want, wanted)), strict=True
    )
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


CASES = st.builds(
    Case,
    st.sampled_from(list(VALUES)),
    st.sampled_from(USES),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("strategy", STRATEGIES)
@given(case=CASES, trainers=st.sampled_from((2, 3)), rows=st.sampled_from((12, 13)))
def test_values_of_forward_are_those_of_one_device(
    strategy: str, case: Case, trainers: int, rows: int
) -> None:
    check(case, strategy, trainers, rows)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("value", ["count of rows", "size of the batch", "largest input"])
@pytest.mark.parametrize("make", ["nccl2", "sharding"])
def test_micro_steps_refuse_an_update_that_reads_the_batch(make: str, value: str) -> None:
    """Forward may read values of the full batch, but the update would read one trainer's rows."""
    case, key = Case(value, "rate", marked=True, one_state=False), jax.random.key(0)
    main = dtrans.trace(case.step(), *init(key), *batch(12, 0))
    options = {"nccl2": {"trainers": 2}, "sharding": {"degree": 2, "stage": 2}}[make]
    at_once = "reads parts of the batch one after the other, but update has values that depend on"
    with pytest.raises(
        ConfigError,
        match=f"{at_once}|depends on gradients, and also on rows of the batch"
        ".*test_forward_values.py:",
    ):
        getattr(dtrans, make)(main, dtrans.trace(init, key), num_micro_batch=2, **options)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_compute_forward_once_and_keep_their_slices(stage: int) -> None:
    """The update reads the loss of forward, and multiplies no slice of a parameter with a rank's
    rows."""
    case, key = Case("loss", "rate", marked=True, one_state=False), jax.random.key(0)
    main = dtrans.trace(case.step(), *init(key), *batch(12, 0))
    plan = dtrans.sharding(main, dtrans.trace(init, key), degree=2, stage=stage, slices=ROWS_CUT)
    assert set(plan.slices.leaves) == {"params/v", "params/w"}
    products = [op for op in plan.program.ops if op.type == "dot_general"]
    assert len(products) == 5, "two of forward, three of backward"


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("value", "use"), [("largest input", "outer"), ("median of activations", "rate")]
)
@pytest.mark.parametrize("stage", [1, 3])
def test_groups_of_ranks_gather_rows_of_all_for_the_update(
    stage: int, value: str, use: str
) -> None:
    """A median gathers activations from ranks and groups. `outer` adds to complete parameters."""
    assert check(
        Case(value, use, marked=stage == 3, one_state=False), f"groups, stage {stage}", 2, 13
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("value", ["mean of activations", "largest input"])
def test_trainers_send_what_the_update_reads_of_random_rows(value: str) -> None:
    """Each trainer draws the random numbers for its rows, and the update reads all numbers."""
    case = Case(value, "rate", marked=False, one_state=False, noisy=True)
    assert check(case, "pserver", 2, 6) and check(case, "pserver", 3, 13)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("value", ["mean of activations", "rows times gradient"])
def test_no_owner_of_a_leaf_reduces_random_rows_by_itself(value: str) -> None:
    """An all-reduce in a branch that only the owner of a leaf runs would wait for the other ranks
    forever."""
    assert check(Case(value, "rate", marked=False, one_state=False, noisy=True), "by leaf", 2, 12)


@pytest.mark.usefixtures("x64")
def test_servers_refuse_rows_that_meet_gradients() -> None:
    """The product reads rows of activations, which only trainers have, and the gradient, which only
    servers have."""
    case, key = (
        Case("activations times gradient", "rate", marked=False, one_state=False),
        jax.random.key(0),
    )
    main, startup = dtrans.trace(case.step(), *init(key), *batch(6, 0)), dtrans.trace(init, key)
    told = (
        r"update reads float64\[12,6\], which has a row for each example "
        r"\(test_forward_values.py:\d+\), .* reduce the rows"
    )
    with pytest.raises(GradientError, match=told):
        STRATEGIES["pserver"](main, startup, 2)
    assert all(check(case, other, 2, 12) for other in ("nccl2", "stage 2")), "which the error names"


@pytest.mark.usefixtures("x64")
def test_a_plan_says_that_random_rows_in_an_update_are_those_of_one_batch() -> None:
    case, key = (
        Case("rows times gradient", "rate", marked=False, one_state=False, noisy=True),
        jax.random.key(0),
    )
    main, startup = dtrans.trace(case.step(), *init(key), *batch(6, 0)), dtrans.trace(init, key)
    servers = ("127.0.0.1:1", "127.0.0.1:2")
    plan = dtrans.pserver(main, startup, pservers=servers, trainers=2)
    assert (
        "depends on the batch size, so each batch must have 12 rows (2 times the traced batch)"
        in str(plan)
    )
    job, alone = plan.simulate(), init(key)
    state, _ = job.step(job.init(key), *batch(12, 0))
    params, *_ = case.step()(*alone, *batch(12, 0))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), job.params(state), params
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("value", "use"), [("root of the loss", "rate"), ("count of rows", "state"), ("loss", "outer")]
)
def test_servers_are_sent_values_of_forward(value: str, use: str) -> None:
    """The plan names the line that computes the values, and counts their bytes."""
    case, key = Case(value, use, marked=True, one_state=False), jax.random.key(0)
    assert check(case, "pserver", 2, 12) and check(case, "pserver", 3, 13)
    main, startup = dtrans.trace(case.step(), *init(key), *batch(12, 0)), dtrans.trace(init, key)
    servers, cut = ("127.0.0.1:1", "127.0.0.1:2"), dtrans.BlockPlacement(min_block_size=1)
    plan = dtrans.pserver(main, startup, pservers=servers, trainers=2, placement=cut)
    told = (
        "the update reads values that trainers compute from the batch and send with each step: "
        "test_forward_values.py:"
    )
    assert told in str(plan) and "forward/0" in plan.traffic.arguments
