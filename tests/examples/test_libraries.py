"""Examples of other libraries: two run in each session, all strategies run at night.

Refusals are tested, too.
"""

from __future__ import annotations

import importlib.util

import pytest

from dtrans.errors import ConfigError, DtransError
from examples.libraries import EXAMPLES
from examples.libraries.run import run


STRATEGIES = (
    ("nccl2", 3),
    ("sharding", 1),
    ("sharding", 2),
    ("sharding", 3),
    ("pserver", 3),
    ("pipeline", 3),
)
REFUSED = {
    "nnx_mlp": "needs values of the full batch",
}
CHEAP = {"nnx_mlp": ("pserver", 3), "lora": ("pipeline", 3)}


def ways() -> list[object]:
    every = [
        (name, *way)
        for name in EXAMPLES
        for way in STRATEGIES
        if way[0] != "pipeline" or name not in REFUSED
    ]
    return [
        pytest.param(*w, marks=() if CHEAP.get(w[0]) == w[1:] else pytest.mark.soak) for w in every
    ]


@pytest.mark.parametrize(("name", "mode", "stage"), ways())
def test_an_example_gives_one_devices_numbers(
    name: str, mode: str, stage: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, mode, stage=stage, steps=2)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{name}: {EXAMPLES[name]}" and out[2].startswith("exact: ")
    assert [line.split()[1] for line in out if line.startswith("step ")] == ["1", "2"]
    assert float(out[-1].split("difference ")[1].split()[0]) < 1e-10


@pytest.mark.soak
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_learns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, "single", steps=60)
    found = [
        line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("step ")
    ]
    loss = "discriminator" if name == "gan" else "loss"
    first, last = (float(line[line.index(loss) + 1]) for line in (found[0], found[-1]))
    assert last < 0.8 * first


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_pipeline_refuses_is_said(name: str) -> None:
    with pytest.raises(DtransError, match=REFUSED[name]):
        run(name, "pipeline")


def test_what_cannot_be_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match="there is no mode 'fsdp'; it is one of single, nccl2, sharding"
    ):
        run("lora", "fsdp")
    with pytest.raises(ConfigError, match="there is no example 'flax'; did you mean flax_cnn"):
        run("flax")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "equinox" else found(name, *a)
    )
    with pytest.raises(ConfigError, match=r"need equinox: pip install 'dtrans-jax\[libraries\]'"):
        run("lora")
