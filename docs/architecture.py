"""Page about the architecture, written from the imports of the code and from recorded walks.

    python docs/architecture.py docs     writes docs/architecture.md and its drawings

`make architecture` does the same.

Arrows are imports of any kind, also lazy imports and imports for type checking. A walk is the path
of one value through the files; `docs/walks.py` records the walks.
"""

from __future__ import annotations

import ast
import functools
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dtrans"

# from the lowest layer up: a folder imports only from folders in earlier layers
LAYERS = (
    ("_jax", "errors", "checks", "named_object"),
    ("ir", "ops", "endpoints", "nn", "optimizers"),
    ("protocol",),
    ("step",),
    ("verification",),
    ("rows",),
    ("slicing",),
    ("engine",),
    ("batch", "tensor_parallel"),
    ("step_meter", "costs", "transfers"),
    ("job",),
    ("plan",),
    ("parameter_server", "data_parallel"),
    ("zero",),
    ("pipeline_parallel",),
    ("checkpoint",),
    ("run",),
    ("hosts",),
    ("paddle", "epl"),
    ("check_command",),
    ("cli",),
    ("__main__",),
)
RUN_LAYERS = (
    ("base", "net"),
    ("distributed", "status"),
    ("collective", "parameter_server"),
    ("pipeline_parallel",),
    ("executor",),
    ("replays",),
    ("role_jobs", "verified"),
    ("runners",),
)


# -- imports ---------------------------------------------------------------------------------------


def modules() -> dict[str, Path]:
    """Return the file of each module, by its name without `dtrans.`; "" is the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return the imports and calls of a file. The result is cached, because parsing is slow."""
    kinds = ast.ImportFrom | ast.Import | ast.Call
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def imports(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules of dtrans that a file imports, at the top or inside of functions."""
    for node in nodes(path):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "dtrans"
        ):
            base = node.module.removeprefix("dtrans").lstrip(".")
            for name in node.names:
                inner = f"{base}.{name.name}".lstrip(".")
                yield inner if inner in known else base
        elif isinstance(node, ast.Import):
            yield from (
                a.name.removeprefix("dtrans.") for a in node.names if a.name.startswith("dtrans.")
            )
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            for a in node.args[:1]:
                if isinstance(a, ast.Constant) and str(a.value).startswith("dtrans."):
                    yield str(a.value).removeprefix("dtrans.")


@functools.cache
def arrows() -> dict[str, set[str]]:
    """Return the imports of each module."""
    known = modules()
    found = {}
    for module, path in known.items():
        found[module] = {t for t in imports(path, known) if t != module and t in known}
    return found


def rank(module: str) -> tuple[int, int]:
    """Return (layer of a module, layer of its folder inside `run` or -1)."""
    first, _, rest = module.partition(".")
    outer = next(i for i, layer in enumerate(LAYERS) if first in layer)
    inner = rest.split(".")[0]
    return outer, next(
        (i for i, layer in enumerate(RUN_LAYERS) if first == "run" and inner in layer), -1
    )


def climbs() -> list[str]:
    """Return imports that do not lead to a lower layer, except that of the registry of jobs."""
    found = []
    for module, targets in arrows().items():
        if not module or module in ("run",):  # these two import from all their folders
            continue
        for target in targets:
            if not target or (module, target) == ("plan", "run.runners"):
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


def between_folders(inside: str = "") -> list[tuple[str, str]]:
    """Return pairs (folder, imported folder); with `inside="run"`, of the folders in `run`."""
    depth = 1 if inside else 0
    found = set()
    for module, targets in arrows().items():
        for target in targets:
            names = module.split("."), target.split(".")
            deep = min(map(len, names)) > depth and all(
                n[:depth] == [inside][:depth] for n in names
            )
            if module and target and deep and (module, target) != ("plan", "run.runners"):
                found.add((names[0][depth], names[1][depth]))
    return sorted(pair for pair in found if pair[0] != pair[1])


def shortest(edges: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Drop each arrow for which a path of other arrows leads to the same folder."""

    def reached(start: str, without: tuple[str, str]) -> set[str]:
        found: set[str] = set()
        todo = [start]
        while todo:
            at = todo.pop()
            new = {b for a, b in edges if a == at and (a, b) != without} - found
            found |= new
            todo += new
        return found

    return [e for e in edges if e[1] not in reached(e[0], e)]


# -- the drawing -----------------------------------------------------------------------------------

WIDE, HIGH, GAP, STEP = 148, 40, 22, 74


def draw(edges: Sequence[tuple[str, str]], width: int) -> tuple[list[str], int]:
    """Draw boxes in rows, each above its imports, with arrows; return the lines and the height.

    An arrow that spans several rows gets a place in each row, so that it crosses no box.
    """
    below: dict[str, list[str]] = {}
    for a, b in edges:
        below.setdefault(a, []).append(b)
        below.setdefault(b, [])

    def height(box: str) -> int:
        return max((height(b) + 1 for b in below[box]), default=0)

    level = {box: height(box) for box in below}
    rows: list[list[str]] = [[] for _ in range(max(level.values()) + 1)]
    for box in sorted(below):
        rows[level[box]].append(box)
    ways: list[list[str]] = []
    for a, b in edges:
        bends = [f"{a}>{b}@{i}" for i in range(level[a] - 1, level[b], -1)]
        for bend in bends:
            rows[int(bend.rpartition("@")[2])].append(bend)
        ways.append([a, *bends, b])
    x = {n: float(i) for row in rows for i, n in enumerate(row)}
    near: dict[str, list[str]] = {n: [] for n in x}
    for way in ways:
        for one, other in itertools.pairwise(way):
            near[one].append(other)
            near[other].append(one)
    for _ in range(40):
        for row in rows:
            row.sort(key=lambda n: (sum(x[m] for m in near[n]) / len(near[n]), n))
            sizes = [GAP if "@" in n else WIDE + GAP for n in row]
            left = (width - sum(sizes)) / 2
            for n, size in zip(row, sizes, strict=True):
                x[n] = left + size / 2
                left += size
    top = {i: 10 + (len(rows) - 1 - i) * STEP for i in range(len(rows))}
    lines = []
    for way in ways:
        a, b = way[0], way[-1]
        path = f"M{x[a]:.0f} {top[level[a]] + HIGH}"
        y = top[level[a]] + HIGH
        for n in way[1:]:
            to = top[level[a] - way.index(n)]
            path += (
                f" C{x[way[way.index(n) - 1]]:.0f} {y + 18} {x[n]:.0f} {to - 18} {x[n]:.0f} {to}"
            )
            y = to
            if n != b:
                y = to + HIGH
                path += f" L{x[n]:.0f} {y}"
        lines.append(
            f'<path d="{path}" fill="none" stroke="#57606a" stroke-width="1.3" '
            'marker-end="url(#a)"/>'
        )
    for box in sorted(below):
        left, y = x[box] - WIDE / 2, top[level[box]]
        lines.append(
            f'<rect x="{left:.0f}" y="{y}" width="{WIDE}" height="{HIGH}" rx="6" fill="#ddf4ff" '
            'stroke="#1f6feb"/>'
        )
        lines.append(f'<text x="{x[box]:.0f}" y="{y + 25}" text-anchor="middle">{box}</text>')
    return lines, len(rows) * STEP - STEP + HIGH + 20


def drawing() -> str:
    """Return a picture of the folders of dtrans, and of the folders in `run`."""
    outer, high = draw(shortest(between_folders()), 800)
    inner, inside = draw(shortest(between_folders("run")), 400)
    width = 1220
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {high}" '
            'font-family="Menlo, Consolas, monospace" font-size="13" fill="#24292f">',
            '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" '
            'orient="auto"><path d="M0 0L8 4L0 8z" fill="#57606a"/></marker></defs>',
            f'<rect width="{width}" height="{high}" fill="#ffffff"/>',
            *outer,
            f'<g transform="translate(810 {high - inside - 20})">',
            f'<rect x="-4" y="-24" width="408" height="{inside + 34}" rx="8" fill="#f6f8fa" '
            'stroke="#8c959f"/>',
            '<text x="10" y="-4" font-weight="bold">inside run</text>',
            *inner,
            "</g>",
            "</svg>\n",
        ]
    )


# -- the page --------------------------------------------------------------------------------------

PAGE = """\
# The architecture of dtrans

<!-- Written by `make architecture`: change the code or docs/architecture.py, not this page. -->

`dtrans.trace` turns a training step into a program. A transform turns the program into a plan, and
a runner runs the plan as a job:

    step  --trace-->  Program  --pserver | nccl2 | sharding | pipeline-->  plan  --run/-->  job

Only `run` and the folders above it start processes and use devices. All other code consists of
functions from programs to programs. There is a folder for each layer, and one for each strategy. A
layer imports only from the layers below it. The one exception is `dtrans.plan`, which imports
`run.runners` when `plan.on_mesh()` is called. An arrow in the picture is an import. If a path of
other arrows leads to the same folder, the picture omits the import.

![The folders and their imports](architecture.svg)

## The folders

{folders}

## Five ways through the files

A walk follows one value, such as a gradient, while a job is planned and runs a step. A profiler
hook records the functions that are called with this value. A file *passes the value on* if one of
its functions gets the value from a second file and calls a third file with it. All other recorded
files only read the value. Each row of the drawing shows eight of these functions, in the order of
their calls. Yellow boxes are functions of the server. {language} are left out, because all files
use them. `rows` and `engine` count as one file each.

![The walks](walks.svg)

{walks}
"""


def summary_of(module: str, known: Mapping[str, Path]) -> str:
    """Return the summary of a module: the first paragraph of its docstring."""
    text = ast.get_docstring(ast.parse(known[module].read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def folders() -> str:
    """Return the table of folders, from the top of the picture down."""
    known = modules()
    rows = ["| folder | what it is | imports from |", "|---|---|---|"]
    for inside, layers in (("", LAYERS), ("run", RUN_LAYERS)):
        pairs = between_folders(inside)
        for name in (n for layer in reversed(layers) for n in layer):
            full = f"{inside}.{name}".strip(".")
            targets = ", ".join(b for a, b in pairs if a == name)
            path = f"{full.replace('.', '/')}" + (
                "" if known[full].name == full.split(".")[-1] + ".py" else "/"
            )
            rows.append(f"| `{path}` | {summary_of(full, known)} | {targets or 'none'} |")
    return "\n".join(rows)


def recorded() -> list[tuple[Any, Any]]:
    """Record all walks; return pairs (walk, route)."""
    import walks  # here, because it imports JAX, which the tests of layers do not need

    return [(walk, walk.route()) for walk in walks.WALKS]


def walk_list(routes: Sequence[tuple[Any, Any]]) -> str:
    """Return a Markdown list with the job of each walk, and the number of files on its path."""
    lines = []
    for walk, route in routes:
        lines.append(
            f"- **{walk.value}**: {walk.how}. {len(route.files)} files pass the value on, and "
            f"{route.asked} other files read it."
        )
    return "\n".join(lines)


BROAD = 196  # width of a station
STRIDE, TALL, BAND = BROAD + 18, 62, 118  # distance of stations, their height, distance of walks


def walk_drawing(routes: Sequence[tuple[Any, Any]]) -> str:
    """Return a picture of the walks: a row of stations for each."""
    width, high = 8 * STRIDE + 12, len(routes) * BAND
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {high}" '
        'font-family="Menlo, Consolas, monospace" font-size="13" fill="#24292f">',
        f'<rect width="{width}" height="{high}" fill="#ffffff"/>',
    ]
    for k, (walk, route) in enumerate(routes):
        top = k * BAND + 34
        lines.append(f'<text x="10" y="{top - 12}" font-weight="bold">{walk.value}</text>')
        for i, station in enumerate(route.through(walk.through)):
            lines += station_box(station, 10 + i * STRIDE, top)
            if i:
                x, y = 10 + i * STRIDE, top + TALL // 2
                tip = f"M{x - 8} {y - 4}L{x - 3} {y}L{x - 8} {y + 4}"
                lines.append(
                    f'<path d="M{x - 18} {y}L{x - 3} {y}{tip}" '
                    'fill="none" stroke="#57606a" stroke-width="1.3"/>'
                )
    return "\n".join([*lines, "</svg>\n"])


def station_box(station: Any, x: int, y: int) -> list[str]:
    """Return the box of a station: folder, file and function; yellow for servers."""
    folder, _, file = station.place.rpartition("/")
    fill, stroke = ("#fff8c5", "#9a6700") if station.role == "server" else ("#ddf4ff", "#1f6feb")
    function = ".".join(station.function.split(".")[-2:])
    texts = ((folder, 11, 16, "#57606a"), (file, 13, 34, "#24292f"), (function, 11, 52, "#24292f"))
    middle = x + BROAD // 2
    return [
        f'<rect x="{x}" y="{y}" width="{BROAD}" height="{TALL}" rx="6" fill="{fill}" '
        f'stroke="{stroke}"/>',
        *(
            f'<text x="{middle}" y="{y + at}" font-size="{size}" fill="{color}" '
            f'text-anchor="middle">{text}</text>'
            for text, size, at, color in texts
        ),
    ]


LANGUAGE = "`_jax`, `errors`, `ir` and `ops`"


def main(folder: str) -> None:
    """Write the page and its drawings into a folder."""
    where = Path(folder)
    (where / "architecture.svg").write_text(drawing())
    routes = recorded()
    (where / "walks.svg").write_text(walk_drawing(routes))
    page = PAGE.format(folders=folders(), walks=walk_list(routes), language=LANGUAGE)
    (where / "architecture.md").write_text(page)


if __name__ == "__main__":
    main(*sys.argv[1:])
