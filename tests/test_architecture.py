"""The layers of the package: imports of every kind go down, and no two things share a name."""

from __future__ import annotations

import importlib
import sys

import pytest
from paths import DOCS


@pytest.fixture
def architecture(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.delitem(sys.modules, "architecture", raising=False)
    return importlib.import_module("architecture")


def test_every_folder_is_in_a_layer(architecture):
    for module in architecture.modules():
        if module:
            architecture.rank(module)


def test_no_import_goes_up(architecture):
    """Lazy and type-checking ones count; the one exception is the registry of realisers."""
    assert architecture.climbs() == []
    assert "run.realisers" in architecture.arrows()["plan"], "the exception is still needed"


def test_there_are_no_circles(architecture):
    arrows = architecture.arrows()
    arrows["plan"].discard("run.realisers")
    state: dict[str, int] = {}

    def visit(module, way):
        assert state.get(module) != 1, f"a circle: {' -> '.join([*way, module])}"
        if module not in state:
            state[module] = 1
            for target in sorted(arrows[module]):
                if target:  # the face of the package is not a part of it
                    visit(target, [*way, module])
            state[module] = 2

    for module in arrows:
        if module:
            visit(module, [])
