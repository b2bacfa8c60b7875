"""Host callbacks in jobs of processes: trainer 0 is called once for each step, with the value of
one device."""

from __future__ import annotations

import sys
from pathlib import Path

import callback_trainer as script
import jax
import numpy as np
import pytest
from role_threads import free_endpoints
from trainer_processes import started

from dtrans.run.distributed.role import roles_of, trainer_roles


PATIENCE = 120.0  # seconds for what takes ten on an idle machine


@pytest.mark.parametrize("strategy", ["nccl2", "pserver", "sharding"])
def test_trainer_0_is_called_once_with_the_values_of_one_device(
    strategy: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Use debug.print, debug.callback and io_callback.

    The result of pure_callback enters the update.
    """
    step, (params, opt_state) = jax.jit(script.step_of(strategy)), script.init(jax.random.key(0))
    for batch in script.batches():
        params, opt_state, _ = step(params, opt_state, *batch)
    want, printed = script.calls(), prints(capfd.readouterr().out)
    pure = want.pop("pure_callback")
    assert {len(x) for x in (*want.values(), pure)} == {script.STEPS}
    ends = free_endpoints(2)
    roles = roles_of(2, ends) if strategy == "pserver" else trainer_roles(ends)
    with started(roles, sys.executable, script.__file__, strategy, str(tmp_path)) as processes:
        said = [p.communicate(timeout=PATIENCE)[0] for p in processes]
    assert {p.returncode for p in processes} == {0}, "\n".join(said)
    for role, lines in zip(roles, said, strict=True):
        with np.load(tmp_path / f"{role.name.replace(' ', '-')}.npz") as file:
            found = dict(file)
        held = {n: found.pop(f"params/{n}") for n in params if role.is_trainer}
        for n, x in held.items():
            np.testing.assert_allclose(x, params[n], rtol=1e-5, atol=1e-6)
        for x in found.pop(
            "pure_callback", pure
        ):  # the roles that compute the update may call it any number of times
            assert min(np.abs(x - y).max() for y in pure) < 1e-5
        first = role.name == "trainer 0"
        assert found.keys() == (want.keys() if first else set()), role.name
        for name in found:
            assert found[name].shape == want[name].shape, name
            np.testing.assert_allclose(found[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)
        heard = prints(lines)
        assert [n for n, _ in heard] == [n for n, _ in printed if first], role.name
        for (_, x), (_, y) in zip(heard, printed, strict=False):
            assert abs(x - y) < 2e-5  # they print five digits
    assert len(printed) == script.STEPS * (2 if strategy in script.LATE else 1)


def prints(said: str) -> list[tuple[str, float]]:
    """Return what debug.print has printed, in order: the word and the number."""
    lines = [x.split() for x in said.splitlines() if x.startswith(("loss ", "norm "))]
    return sorted((word, float(number)) for word, number in lines)
