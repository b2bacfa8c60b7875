"""What the package may import: JAX's private modules never, its undocumented ones in `_jax` alone,
and nothing that turns bytes from a wire or a file into code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dtrans


ROOT = Path(dtrans.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
FORBIDDEN_MODULES = ("pickle", "cloudpickle", "dill", "marshal", "shelve")


def modules_of(tree):
    """Every dotted name that a file imports or reaches through attributes, e.g.
    `jax.extend.core`."""
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
    if not relative(path).startswith("_jax/"):
        assert not [
            n
            for n in names
            if any(under(n, m) for m in ("jax.core", "jax.extend", "jax.interpreters"))
        ]


# a driver hands its own actors functions, through a Ray cluster, which unpickles all that it
# carries
OF_RAY = ("hosts/portable_plan.py", "hosts/ray_actor.py")


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_nothing_is_unpickled_or_evaluated(path):
    tree = ast.parse(path.read_text())
    names = set(modules_of(tree))
    if relative(path) not in OF_RAY:
        assert not [n for n in names if any(under(n, m) for m in FORBIDDEN_MODULES)]
    called = {
        n.func.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    assert not called & {"eval", "exec", "compile", "__import__"}
    # numpy reads object arrays with pickle unless it is told not to
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            assert not any(
                k.arg == "allow_pickle"
                and not (isinstance(k.value, ast.Constant) and k.value.value is False)
                for k in node.keywords
            )


def test_the_boundary_is_used():
    assert any(
        under(n, "jax.extend")
        for n in modules_of(ast.parse((ROOT / "_jax" / "imports.py").read_text()))
    )


# what loops, branches, calls, names and collectives say in their parameters
KEYS = (
    "branches", "body_jaxpr", "cond_jaxpr", "call_jaxpr", "jaxpr", "num_consts", "num_carry", "length", "reverse",
    "ft_in", "ft_out", "cond_nconsts", "body_nconsts", "in_shardings", "out_shardings", "_prim", "axis_name",
)  # fmt: skip
REGISTERED = (
    "primitive_jvps",
    "primitive_batchers",
    "primitive_transposes",
    "register_lowering",
    "def_abstract_eval",
)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_what_equations_are_is_known_in_one_place(path):
    """No other file has a key of a loop, takes a jaxpr apart by its attributes, or builds one."""
    if relative(path).startswith("_jax/"):
        return
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            of = ast.unparse(node.value)
            assert not (node.slice.value in KEYS and of.split(".")[-1] in ("params", "p")), (
                ast.unparse(node)
            )
        if isinstance(node, ast.Attribute):
            assert node.attr not in REGISTERED, ast.unparse(node)
            assert not (
                node.attr == "jaxpr"
                and isinstance(node.value, ast.Attribute)
                and node.value.attr == "jaxpr"
            )
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("Jaxpr", "ClosedJaxpr"), ast.unparse(node)
