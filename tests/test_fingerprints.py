"""Plans are what they were: communication, blocks, owners, roles and losses, as `fingerprints.py` recorded them."""

from __future__ import annotations

import fingerprints
import pytest


RECORDED = fingerprints.recorded()
PLANS, LOSSES = dict(fingerprints.plans()), dict(fingerprints.losses())
VERSIONS, HERE = RECORDED["versions"], fingerprints.versions()

pytestmark = pytest.mark.skipif(VERSIONS["jax"] != HERE["jax"], reason=f"recorded with jax {VERSIONS['jax']}")


def test_everything_is_recorded() -> None:
    assert set(RECORDED["plans"]) == set(PLANS) and set(RECORDED["losses"]) == set(LOSSES)
    assert len(PLANS) == 25 + 20 + 9 + 5 + 2 and len(LOSSES) == 3


@pytest.mark.parametrize("name", PLANS)
def test_plans_are_as_recorded(name: str) -> None:
    assert PLANS[name]() == RECORDED["plans"][name]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_as_recorded(name: str) -> None:
    """Twenty steps. Processors round differently, so that the last digits are not compared."""
    if name.startswith("characters") and VERSIONS["python"] != HERE["python"]:
        pytest.skip(f"recorded with the library of Python {VERSIONS['python']}")
    now = LOSSES[name]()
    assert len(now) == fingerprints.STEPS
    assert now == pytest.approx(RECORDED["losses"][name], rel=1e-6)
