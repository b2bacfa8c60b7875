"""What the package may import: JAX's private modules never, its undocumented ones in `_jax.py` alone, and
nothing that turns bytes from a wire or a file into code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dtrans


ROOT = Path(dtrans.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
FORBIDDEN_MODULES = ("pickle", "cloudpickle", "dill", "marshal", "shelve")


def modules_of(tree):
    """Every dotted name that a file imports or reaches through attributes, e.g. `jax.extend.core`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names)
        elif isinstance(node, ast.Attribute):
            parts = [node.attr]
            while isinstance(node := node.value, ast.Attribute):
                parts.append(node.attr)
            if isinstance(node, ast.Name):
                yield ".".join([node.id, *reversed(parts)])


def under(name, package):
    return name == package or name.startswith(package + ".")


def relative(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_private_and_undocumented_jax_stays_out(path):
    names = set(modules_of(ast.parse(path.read_text())))
    assert not [n for n in names if under(n, "jax._src") or under(n, "jaxlib")]
    assert "jax._src" not in path.read_text()
    if relative(path) != "_jax.py":
        assert not [n for n in names if under(n, "jax.extend") or under(n, "jax.interpreters")]


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_nothing_is_unpickled_or_evaluated(path):
    tree = ast.parse(path.read_text())
    names = set(modules_of(tree))
    assert not [n for n in names if any(under(n, m) for m in FORBIDDEN_MODULES)]
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert not called & {"eval", "exec", "compile", "__import__"}
    # numpy reads object arrays with pickle unless it is told not to
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            assert not any(
                k.arg == "allow_pickle" and not (isinstance(k.value, ast.Constant) and k.value.value is False)
                for k in node.keywords
            )


def test_the_boundary_is_used():
    assert any(under(n, "jax.extend") for n in modules_of(ast.parse((ROOT / "_jax.py").read_text())))
