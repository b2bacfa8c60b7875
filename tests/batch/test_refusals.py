"""Errors for impossible steps: when the step is planned, or when a batch is passed.

Each error names the cause and a remedy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dtrans
from dtrans.errors import BatchError, ConfigError, TraceError
from dtrans.parameter_server.dispatch import RoundRobin


TX = optax.adam(1e-2)
X = np.ones((4, 6), np.float32)


def init() -> tuple[Any, Any]:
    params = {"w": jnp.ones((6, 2))}
    return params, TX.init(params)


def given(
    loss: Any = lambda params, x: jnp.mean((x @ params["w"]) ** 2), *batch: Any
) -> tuple[Any, Any]:
    step = dtrans.make_train_step(loss, TX)
    return dtrans.trace(step, *init(), *(batch or (X,))), dtrans.trace(init)


@pytest.mark.parametrize(
    ("pservers", "match"),
    [
        ("http://host:1", "'http://host:1' is not an endpoint; expected host:port"),
        ("a:1;b:2", "'a:1;b:2' is not an endpoint"),
        ("::1:80", "'::1:80' is not an endpoint"),
        (None, "pservers is None; expected endpoints"),
        (5, "pservers is 5; expected endpoints"),
        (
            "0.0.0.0:6000",
            "'0.0.0.0:6000' has a wildcard address, .*; write an address of this host",
        ),
        ("[::]:6000", "has a wildcard address"),
    ],
)
def test_endpoints_that_nobody_can_reach(pservers: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        dtrans.pserver(*given(), pservers=pservers, trainers=2)
    assert dtrans.pserver(*given(), pservers="[::1]:6000", trainers=2).servers.keys() == {
        "[::1]:6000"
    }


def test_a_dispatcher_that_answers_differently_each_time() -> None:
    asked: list[int] = []

    class Fickle(RoundRobin):
        def dispatch(self, blocks: Any) -> list[str]:
            asked.append(1)
            return [("127.0.0.1:1", "127.0.0.1:2")[len(asked) % 2] for _ in blocks]

    placement = dtrans.BlockPlacement(split_method=Fickle, min_block_size=1)
    match = (
        "Fickle.dispatch returned 127.0.0.1:2 for params/w.block0 in a first call and "
        "127.0.0.1:1 in a second"
    )
    with pytest.raises(ConfigError, match=match):
        dtrans.pserver(
            *given(), pservers="127.0.0.1:1,127.0.0.1:2", trainers=2, placement=placement
        )


def noisy(params: Any, x: Any, key: Any) -> jax.Array:
    return jnp.mean((x @ params["w"] + jax.random.normal(key, (2, 2))) ** 2)


def test_two_numbers_of_a_key_are_no_rows() -> None:
    key = jax.random.PRNGKey(0)
    programs = given(noisy, X[:2], key)
    with pytest.raises(
        ConfigError,
        match=r"key is uint32\[2\], a raw key of jax.random.PRNGKey, .* jax.random.key",
    ):
        dtrans.nccl2(*programs, trainers=2)
    ids = given(
        lambda params, x, ids: jnp.mean((x @ params["w"])[:, 0] * ids), X[:2], np.ones(2, np.uint32)
    )
    assert "exact: mean over 4 rows" in str(dtrans.nccl2(*ids, trainers=2))  # two rows are two rows


def test_a_constant_with_the_rows_of_the_first_batch() -> None:
    weights = np.ones(4, np.float32)
    programs = given(lambda params, x: jnp.mean((x @ params["w"])[:, 0] * weights))
    match = (
        r"with x of shape \(4, 6\), but tracing it again with shape \(8, 6\) failed: .*\n.*a "
        r"constant in "
        r"the step has the size of the first batch"
    )
    with pytest.raises(TraceError, match=match):
        dtrans.nccl2(*programs, trainers=2)


def test_state_with_the_rows_of_the_batch() -> None:
    def step(params: Any, hidden: Any, x: jax.Array) -> Any:
        loss_of = lambda w: (jnp.mean((x @ w + hidden) ** 2), jnp.tanh(x @ w + hidden))
        (loss, hidden), grad = dtrans.value_and_grad(loss_of, has_aux=True)(params)
        return params - 0.1 * grad, hidden, loss

    w, hidden, x = jnp.ones((6, 2)), jnp.zeros((4, 2)), jnp.ones((4, 6))
    start = dtrans.trace(lambda: (w, hidden))
    with pytest.raises(TraceError, match="If hidden has a row for each row .* pass it to the step"):
        dtrans.nccl2(dtrans.trace(step, w, hidden, x), start, trainers=2)

    def remedy(params: Any, opt_state: Any, x: jax.Array, before: jax.Array) -> Any:
        params, after, loss = step(params, before, x)
        return params, opt_state, loss, after

    start = dtrans.trace(lambda: (w, ()))
    dtrans.nccl2(dtrans.trace(remedy, w, (), x, hidden), start, trainers=2)


@pytest.mark.parametrize("mode", ["nccl2", "sharding", "pserver", "pipeline"])
def test_a_batch_of_another_type_is_not_compiled_anew(mode: str) -> None:
    plans: dict[str, Any] = {
        "nccl2": lambda: dtrans.nccl2(*given(), trainers=2),
        "sharding": lambda: dtrans.sharding(*given(), degree=2),
        "pserver": lambda: dtrans.pserver(*given(), pservers="127.0.0.1:1", trainers=2),
        "pipeline": lambda: dtrans.pipeline(*given(), num_stages=1, num_micro_batch=2),
    }
    job = plans[mode]().simulate()
    state = job.init()
    for other in (X.astype(np.int32), jnp.asarray(X, jnp.bfloat16)):
        with pytest.raises(
            BatchError,
            match=rf"x is {other.dtype}, but the step was traced with float32\[4,6\]; cast",
        ):
            job.step(state, other)
    job.step(state, X.astype(np.float64))  # JAX converts it to float32


def test_a_program_that_was_not_cut_says_that_roles_are_guessed() -> None:
    main, startup = given()
    assert str(main).startswith("program step: roles are guessed from scope names")
    assert "roles are guessed" in main._repr_html_()
    plan = dtrans.nccl2(main, startup, trainers=2)
    assert "guessed" not in str(plan.main) and "guessed" not in str(plan.program)
