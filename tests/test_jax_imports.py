"""Imports of the package: no private module of JAX, undocumented modules only in `_jax`, and no
module that runs code from a message or a file."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import dtrans


ROOT = Path(dtrans.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
FORBIDDEN_MODULES = ("pickle", "cloudpickle", "dill", "marshal", "shelve")


def modules_of(tree):
    """Return all dotted names that a file imports or reads as attributes, such as
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


@functools.cache
def parsed(path):
    """Return the syntax tree of a file, and the names of modules in it."""
    tree = ast.parse(path.read_text())
    return tree, set(modules_of(tree))


def test_private_and_undocumented_jax_stays_out():
    faults = []
    for path in FILES:
        _, names = parsed(path)
        forbidden = ["jax._src", "jaxlib"]
        if not relative(path).startswith("_jax/"):
            forbidden += ["jax.core", "jax.extend", "jax.interpreters"]
        found = {n for n in names if any(under(n, module) for module in forbidden)}
        if "jax._src" in path.read_text():
            found.add("jax._src")
        faults += [f"{relative(path)}: {name}" for name in sorted(found)]
    assert not faults


# The driver sends functions to its actors through Ray, which unpickles all arguments.
OF_RAY = ("hosts/portable_plan.py", "hosts/ray_actor.py")


def test_nothing_is_unpickled_or_evaluated():
    faults = []
    for path in FILES:
        tree, names = parsed(path)
        found = set()
        if relative(path) not in OF_RAY:
            found = {n for n in names if any(under(n, m) for m in FORBIDDEN_MODULES)}
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        called = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        found |= called & {"eval", "exec", "compile", "__import__"}
        # numpy.load unpickles object arrays unless allow_pickle is False
        for keyword in (keyword for call in calls for keyword in call.keywords):
            if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False":
                found.add("allow_pickle")
        faults += [f"{relative(path)}: {name}" for name in sorted(found)]
    assert not faults


def test_the_boundary_is_used():
    assert any(
        under(n, "jax.extend")
        for n in modules_of(ast.parse((ROOT / "_jax" / "imports.py").read_text()))
    )


# keys of the parameters of loops, branches, calls, names and collectives
KEYS = (
    "branches", "body_jaxpr", "cond_jaxpr", "call_jaxpr", "jaxpr", "num_consts", "num_carry",
    "length", "reverse",
    "ft_in", "ft_out", "cond_nconsts", "body_nconsts", "in_shardings", "out_shardings", "_prim",
    "axis_name",
)  # fmt: skip
REGISTERED = (
    "primitive_jvps",
    "primitive_batchers",
    "primitive_transposes",
    "register_lowering",
    "def_abstract_eval",
)


def test_what_equations_are_is_known_in_one_place():
    """No other file reads a parameter of a loop, unpacks a jaxpr by its attributes, or builds a
    jaxpr."""
    files = [path for path in FILES if not relative(path).startswith("_jax/")]
    faults = [
        f"{relative(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in files
        for node in ast.walk(parsed(path)[0])
        if knows_equations(node)
    ]
    assert not faults


def knows_equations(node):
    """Return True if an expression depends on how JAX represents equations."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        owner = ast.unparse(node.value).split(".")[-1]
        return node.slice.value in KEYS and owner in ("params", "p")
    if isinstance(node, ast.Attribute):
        inner = node.value
        is_nested = isinstance(inner, ast.Attribute) and node.attr == inner.attr == "jaxpr"
        return node.attr in REGISTERED or is_nested
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("Jaxpr", "ClosedJaxpr")
    return False
