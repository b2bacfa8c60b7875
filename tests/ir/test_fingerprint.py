"""Fingerprints are equal in every process.

If numbers change, the corresponding part of the fingerprint changes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import init_of, mlp_batch, mlp_loss, mlp_params
from paths import ROOT, SUPPORT

import dtrans
from dtrans.ir import fingerprint
from dtrans.parameter_server.plan import PServerPlan


def plan_of(
    tx: Any = None,
    loss: Callable[..., Any] = mlp_loss,
    init: Callable[..., Any] | None = None,
    **options: Any,
) -> PServerPlan:
    tx, params = tx or optax.adam(1e-2), mlp_params()
    main = dtrans.trace(
        dtrans.make_train_step(loss, tx), params, jax.eval_shape(tx.init, params), *mlp_batch(8)
    )
    start = dtrans.trace(init or init_of(tx), params)
    return flat_options.pserver(
        main, start, **{"trainers": 2, "min_block_size": 1, "pservers": "h:1,h:2"} | options
    )


def differing(one: PServerPlan, other: PServerPlan) -> set[str]:
    return {part for part, text in one.identity.items() if other.identity[part] != text}


CONSTANT = np.arange(2000.0, dtype=np.float32)  # longer than NumPy's text of an array


def with_constant(value: np.ndarray, nested: bool = False) -> Callable[..., Any]:
    """Return a loss that closes over an array, inside or outside the body of a loop."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        add = lambda total, _: (total + jnp.sum(jnp.asarray(value) ** 2) * 1e-12, None)
        return mlp_loss(params, x, y) + (
            jax.lax.scan(add, jnp.float32(0), None, 2)[0] if nested else add(0.0, 0)[0]
        )

    return loss


CHANGED = CONSTANT.copy()
CHANGED[1000] += 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "one, other, parts",
    [
        ({"tx": optax.adam(1e-2)}, {"tx": optax.adam(1.1e-2)}, {"update"}),
        ({"tx": optax.adam(1e-2)}, {"tx": optax.adam(1e-2, b1=0.8)}, {"update"}),
        ({"tx": optax.sgd(0.1, 0.9)}, {"tx": optax.sgd(0.1, 0.9, nesterov=True)}, {"update"}),
        ({}, {"loss": lambda p, x, y: 2.0 * mlp_loss(p, x, y)}, {"loss"}),
        ({"loss": with_constant(CONSTANT)}, {"loss": with_constant(CHANGED)}, {"loss"}),
        ({"loss": with_constant(CONSTANT, nested=True)},
         {"loss": with_constant(CHANGED, nested=True)}, {"loss"}),
        ({"loss": lambda p, x, y: jnp.sum(x @ p["w1"]) + jnp.sum(x @ p["w1"] @ p["w2"])},
         {"loss": lambda p, x, y: jnp.sum(x @ p["w1"]) + jnp.sum(jnp.tanh(x @ p["w1"]) @ p["w2"])},
         {"loss"}),
        ({}, {"init": lambda p: init_of(optax.adam(1e-2))(jax.tree.map(lambda x: x + 1, p))},
         {"init"}),
        ({}, {"on_trainer_exit": "error"}, {"options"}),
        ({}, {"trainers": 1}, {"options"}),
        ({}, {"min_block_size": 10**6}, {"options", "placement"}),
    ],
    ids=["rate", "moment", "optimizer", "loss", "constant", "nested constant", "equal shapes",
         "init", "option",
         "trainers", "placement"],
)  # fmt: skip
def test_what_differs_is_said_by_its_part(
    one: dict[str, Any], other: dict[str, Any], parts: set[str]
) -> None:
    assert differing(plan_of(**one), plan_of(**one)) == set()
    assert differing(plan_of(**one), plan_of(**other)) == parts


def test_roles_may_have_traced_batches_of_other_sizes() -> None:
    """If sizes differ, the number 1/B differs, so the loss is not compared.

    All other parts are compared.
    """

    def planned(rows: int, rate: float = 0.1, power: int = 2) -> dict[str, str]:
        params, tx = {"w": jnp.ones((3, 2))}, optax.sgd(rate)
        step = dtrans.make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** power), tx)
        main = dtrans.trace(step, params, tx.init(params), jnp.ones((rows, 3)))
        return dtrans.pserver(main, dtrans.trace(init_of(tx), params)).identity

    said = lambda one, other: fingerprint.differences("a", one, "b", other)
    assert planned(2)["loss"] != planned(4)["loss"] and said(planned(2), planned(4)) == []
    assert [x.split()[1] for x in said(planned(2), planned(4, rate=0.2))] == ["update"]
    assert [x.split()[1] for x in said(planned(2), planned(2, power=3))] == ["loss"]


def test_gradients_that_change_places_are_noticed() -> None:
    """Both halves contain the same equations, but pass different values to each other."""
    params = {"a": jnp.ones((3, 2)), "b": jnp.ones((3, 2))}

    def planned(first: str, second: str) -> PServerPlan:
        loss = lambda p, x: jnp.sum(jnp.sin(x @ p[first])) + jnp.sum(jnp.cos(x @ p[second]))
        tx = optax.sgd(0.1)
        main = dtrans.trace(
            dtrans.make_train_step(loss, tx), params, tx.init(params), jnp.ones((4, 3))
        )
        return dtrans.pserver(main, dtrans.trace(init_of(tx), params))

    assert "loss" in differing(planned("a", "b"), planned("b", "a"))


def test_x64_is_a_part() -> None:
    def of_x64(on: bool) -> dict[str, str]:
        with jax.enable_x64(on):
            return fingerprint.environment()

    assert fingerprint.differences("here", of_x64(False), "there", of_x64(True)) == [
        "jax_enable_x64 is True at there, False at here"
    ]


SCRIPT = """
import sys
sys.path[:0] = {path!r}
import test_fingerprint as t
print(t.plan_of(loss=t.with_constant(t.CONSTANT, nested=True)).identity)
"""


def test_every_process_makes_the_same_fingerprint() -> None:
    """Ids, hashes of texts and addresses differ between processes, so they must not enter a
    fingerprint."""
    script = SCRIPT.format(path=[str(SUPPORT), str(ROOT), os.path.dirname(__file__)])
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    said = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert said.strip() == str(plan_of(loss=with_constant(CONSTANT, nested=True)).identity)


@pytest.mark.parametrize(
    "mine, theirs, said",
    [
        ({"loss": "digest 1"}, {"loss": "digest 1"}, []),
        ({"loss": "digest 1"}, {"loss": "digest 2"}, ["part loss (the loss, or a constant in it)"]),
        ({"jax": "jax 0.10.2"}, {"jax": "jax 0.11.0"}, ["jax is 0.11.0 at trainer 1, 0.10.2 at "
"pserver h:1"]),
        ({"state": "params/w f32[4]"}, {"state": "params/w f32[4]\nparams/v f32[2]"},
         ["params/v is f32[2] at trainer 1, missing at pserver h:1"]),
        ({"state": "params/w f32[4]"}, {}, ["part state"]),
        ({}, {"x\n" * 99: "y"}, [f"part {repr(chr(120) + chr(10)) [1:-1] * 25}..."]),
    ],
)  # fmt: skip
def test_differences_are_named(
    mine: dict[str, str], theirs: dict[str, str], said: list[str]
) -> None:
    found = fingerprint.differences("pserver h:1", mine, "trainer 1", theirs)
    if said and said[0].endswith("..."):
        assert len(found[0]) < 120 and "\n" not in found[0]
    else:
        assert found == said
