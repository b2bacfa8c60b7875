"""Plans have not changed: communication, blocks, owners, roles and losses equal the lines that
`fingerprints.py` recorded."""

from __future__ import annotations

import fingerprints
import pytest


RECORDED = fingerprints.recorded()
PLANS, LOSSES = dict(fingerprints.plans()), dict(fingerprints.losses())
VERSIONS, HERE = RECORDED["versions"], fingerprints.versions()

AS_RECORDED = VERSIONS["jax"] == HERE["jax"]


def test_everything_is_recorded() -> None:
    assert set(RECORDED["plans"]) == set(PLANS) and set(RECORDED["losses"]) == set(LOSSES)
    assert len(PLANS) == 25 + 20 + 9 + 5 + 2 and len(LOSSES) == 3


@pytest.mark.plan  # the module of plans also trains, for losses
@pytest.mark.parametrize("name", PLANS)
def test_plans_are_as_recorded(name: str) -> None:
    now, then = PLANS[name](), RECORDED["plans"][name]
    if (
        not AS_RECORDED
    ):  # another JAX writes other equations, but the same blocks, messages and bytes
        now, then = fingerprints.moved(now), fingerprints.moved(then)
    assert now == then


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_as_recorded(name: str) -> None:
    """Compare the losses of twenty steps without their last digits, because processors round
    differently."""
    if not AS_RECORDED:
        pytest.skip(f"recorded with jax {VERSIONS['jax']}")
    if name.startswith("characters") and VERSIONS["python"] != HERE["python"]:
        pytest.skip(f"recorded with the library of Python {VERSIONS['python']}")
    now = LOSSES[name]()
    assert len(now) == fingerprints.STEPS
    assert now == pytest.approx(RECORDED["losses"][name], rel=1e-6)
