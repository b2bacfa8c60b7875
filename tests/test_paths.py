"""Users work in any folder, such as a folder with the name of a library, with a space, or with
letters beyond ASCII."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from paths import ROOT

import dtrans


STEP = """
import dtrans, jax, jax.numpy as jnp, optax

def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2)

def mixing():
    return optax.stateless_with_tree_map(lambda g, p: -0.1 * jnp.cumsum(g, 0))

def programs(tx):
    init = lambda key: (lambda p: (p, tx.init(p)))({"w": jax.random.normal(key, (6, 5))})
    key, x = jax.random.key(0), jnp.ones((4, 6))
    step = dtrans.make_train_step(loss, tx)
    return dtrans.trace(step, *jax.eval_shape(init, key), x), dtrans.trace(init, key)
"""

ROLE = """
import pathlib

def main():
    role = dtrans.Role.from_env()
    here = pathlib.Path(__file__).parent
    pair = programs(optax.adam(0.1))
    plan = dtrans.pserver(*pair, pservers=role.pservers, trainers=role.trainers)
    with dtrans.Executor() as exe:
        if role.is_pserver:
            mine = plan.servers[role.current_endpoint]
            state = exe.run(mine.main, exe.run(mine.startup, jax.random.key(0)))
            dtrans.checkpoint.save(here / "saved", plan, role.current_endpoint, state)
        else:
            params = exe.run(plan.trainer_startup, jax.random.key(0))
            with dtrans.SummaryWriter(here / "logs") as writer:
                for i in range(2):
                    params, loss = exe.run(plan.trainer, params, jnp.ones((4, 6)))
                    writer.write(i, {"loss": loss}, [dtrans.summary.Summary("loss", "scalar")])

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "name", ["dtrans", "jax", "jaxlib", "optax", "optax/contrib", "a folder of Zoë"]
)
def test_a_users_function_is_named_wherever_its_file_lies(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir(parents=True)
    file = folder / "update.py"
    file.write_text(STEP, encoding="utf-8")
    user = runpy.run_path(str(file))
    plan = dtrans.pserver(
        *user["programs"](user["mixing"]()), pservers="127.0.0.1:6174,127.0.0.1:6175"
    )
    assert plan.placement.reasons_unsliced == {"params/w": "cumsum mixes rows of f32[6,5] (mixing)"}


def test_a_transformation_of_optax_is_named_beside_a_users_script(tmp_path):
    user = runpy.run_path(str(_written(tmp_path, STEP)))
    plan = dtrans.pserver(
        *user["programs"](optax.contrib.muon(0.1)), pservers="127.0.0.1:6174,127.0.0.1:6175"
    )
    (reason,) = plan.placement.reasons_unsliced.values()
    assert reason.endswith("(optax.contrib.scale_by_muon)"), reason


def _written(folder: Path, text: str) -> Path:
    file = folder / "script.py"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["dtrans", "Zoë's folder"])
def test_a_job_runs_and_saves_in_any_folder(name):
    """The script, the sockets, the checkpoint and the summaries are all in this folder."""
    with tempfile.TemporaryDirectory(
        prefix="t"
    ) as top:  # a short path: sockets have room for 107 characters
        folder = Path(top) / name
        folder.mkdir()
        script = _written(folder, STEP + ROLE)
        run = [
            sys.executable,
            "-m",
            "dtrans.cli",
            "launch",
            "--trainers",
            "1",
            "--pservers",
            "2",
            script.name,
        ]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(run, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        user = runpy.run_path(str(script))
        main, startup = user["programs"](optax.adam(0.1))
        found, _ = dtrans.checkpoint.load(folder / "saved", main)
        params, opt_state = startup(jax.random.key(0))
        for _ in range(2):
            params, opt_state, _ = main(params, opt_state, jnp.ones((4, 6)))
        np.testing.assert_allclose(found["w"], params["w"], rtol=1e-6)
        assert any((folder / "logs").iterdir())
