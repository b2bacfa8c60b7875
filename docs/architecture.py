"""What the code itself says of its architecture: which folder imports which, and the way of a value through the files.

    python docs/architecture.py docs     writes docs/architecture.md and its drawing anew (`make architecture`)

Arrows are imports of any kind, lazy and type-checking ones too. A walk is recorded by a profiler hook while a plan is
made and takes a step: each function that is entered from another file, the first time that the value goes through it.
The value is known by its name, and by a size that nothing else has.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path


ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dtrans"

# from the ground up: a layer may import from those before it, and a folder from none beside it
LAYERS = (
    ("_jax", "errors", "checks"),
    ("ir", "ops", "endpoints"),
    ("step",),
    ("rows",),
    ("slicing",),
    ("plan",),
    ("parameter_server", "data_parallel"),
    ("zero",),
    ("tensor_parallel",),
    ("pipeline_parallel",),
    ("checkpoint",),
    ("run",),
    ("paddle", "epl"),
    ("examples",),
    ("cli",),
)
RUN_LAYERS = (
    ("base", "net"),
    ("distributed",),
    ("collective", "parameter_server"),
    ("pipeline_parallel",),
    ("realisers", "executor"),
)


# -- imports ---------------------------------------------------------------------------------------


def modules() -> dict[str, Path]:
    """Every module of the package, by its dotted name without `dtrans.`; that of the package itself is empty."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of the package that a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dtrans":
            base = node.module.removeprefix("dtrans").lstrip(".")
            for name in node.names:
                inner = f"{base}.{name.name}".lstrip(".")
                yield inner if inner in known else base
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("dtrans.") for a in node.names if a.name.startswith("dtrans."))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            for a in node.args[:1]:
                if isinstance(a, ast.Constant) and str(a.value).startswith("dtrans."):
                    yield str(a.value).removeprefix("dtrans.")


def arrows() -> dict[str, set[str]]:
    """Module to the modules that it imports."""
    known = modules()
    return {m: {t for t in imports(path, known) if t != m and t in known} for m, path in known.items()}


def rank(module: str) -> tuple[int, int]:
    """The layer of a module, and inside `run` that of its folder."""
    first, _, rest = module.partition(".")
    outer = next(i for i, layer in enumerate(LAYERS) if first in layer)
    inner = rest.split(".")[0]
    return outer, next((i for i, layer in enumerate(RUN_LAYERS) if first == "run" and inner in layer), -1)


def climbs() -> list[str]:
    """Imports that go up, or to a folder beside: there must be none but that of the registry."""
    found = []
    for module, targets in arrows().items():
        if not module or module in ("run",):  # the faces of packages
            continue
        for target in targets:
            if not target or (module, target) == ("plan", "run.realisers"):
                continue
            (a, inside_a), (b, inside_b) = rank(module), rank(target)
            folders = module.split(".")[0], target.split(".")[0]
            up = b > a or (a == b and folders[0] != folders[1] and a > 0)
            if folders == ("run", "run"):
                rooms = module.split(".")[1], target.split(".")[1]
                up = inside_b > inside_a or (inside_a == inside_b and rooms[0] != rooms[1])
            if up:
                found.append(f"{module} -> {target}")
    return sorted(found)


def main(folder: str) -> None:
    raise NotImplementedError(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
