"""What the package may import: JAX's private modules never, its undocumented ones in `_jax` alone,
and nothing that turns bytes from a wire or a file into code."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

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


@functools.cache
def parsed(path):
    """The syntax tree of a file, and the names of modules in it."""
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


# a driver hands its own actors functions, through a Ray cluster, which unpickles all that it
# carries
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
        # numpy reads object arrays with pickle unless it is told not to
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


# what loops, branches, calls, names and collectives say in their parameters
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
    """No other file has a key of a loop, takes a jaxpr apart by its attributes, or builds one."""
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
