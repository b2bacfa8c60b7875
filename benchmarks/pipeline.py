"""Tables of schedules and memory of pipelines: `python benchmarks/pipeline.py`.

`--write` writes the tables to docs/pipeline_schedules.md. It also runs the Python code of the pages
about pipelines, and writes the output of the code to these pages. The results are the same on any
machine. `test_pipeline.py` times steps, and starts this file with `--process`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from halves import CASES, TINY, Case, ours, planned

import dtrans
from dtrans.pipeline_parallel.schedule import schedule
from dtrans.run.pipeline_parallel.instructions import Instruction, Transfer
from dtrans.run.pipeline_parallel.job import PipelineJob
from dtrans.run.pipeline_parallel.profile import Measured, measured


DOCS = Path(__file__).resolve().parent.parent / "docs"
SCHEDULES = (
    "PreferForward",
    "PreferBackward",
    "PreferBackwardOptimizer",
    "Interleaved",
    "ZeroBubble",
)
RECOMPUTED = "PreferBackward, gradient_checkpoint='auto'"
DEVICES = 4


# -- what is counted -------------------------------------------------------------------------------


def instructions(job: PipelineJob, case: Case, count: int) -> dict[str, tuple[float, float]]:
    """Measure the thread that dispatches the work of a step.

    Return, for each kind of work, the number of instructions in a step, and the median
    microseconds of an instruction.
    """
    state = job.init(jax.random.key(0))
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(count):
        last = [time.perf_counter()]

        def note(what: str, last: list[float] = last) -> None:
            now = time.perf_counter()
            found[what].append(now - last[0])
            last[0] = now

        program, env = job.prepare(state, *case.batch)
        note("before the first task")

        def look(ins: Instruction, note: Callable[[str], None] = note) -> None:
            note(
                "moves"
                if isinstance(ins, Transfer)
                else "tasks"
                if ins.task
                else "zeros, update, results"
            )

        job.execute(program, env, look)
        state, _ = job.collect(program, env)
        note("after the last task")
        jax.block_until_ready(state)
    return {what: (len(of) / count, 1e6 * sorted(of)[len(of) // 2]) for what, of in found.items()}


def kept(case: Case, *, steps: int = 2, **options: Any) -> Measured:
    """Return the measured buffers of the last of `steps` steps."""
    job = planned(case, **options).on_mesh()
    state = job.init(jax.random.key(0))
    for _ in range(steps):
        (state, _), found = measured(job, state, *case.batch)
    return found


# -- the page --------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))


def schedules_of(
    stages: int = 4, micro: int = 8, transfers: Sequence[float] = (0, 0.5, 1, 2)
) -> str:
    """Return the table of schedules, computed from their ticks."""
    rows = []
    for name in SCHEDULES:
        s = schedule(name, stages, micro)
        spans = [s.makespan(transfer=c) for c in transfers]
        rows.append(
            [name, str(s.bubble), " ".join(map(str, s.peak)), *(f"{float(x):g}" for x in spans)]
        )
    return table(("schedule", "bubble", "peak", *(f"transfer {c:g}" for c in transfers)), rows)


def memory_of() -> str:
    """Return the table of bytes that a pipeline keeps between forward and backward.

    The model is the transformer, with sixteen micro-batches.
    """
    case = CASES["transformer, 4 blocks of 128"]()
    rows: list[list[str]] = []
    whole = 0
    for name in (*SCHEDULES, RECOMPUTED):
        how, _, rest = name.partition(", ")
        found = kept(
            case, num_micro_batch=16, schedule=how, gradient_checkpoint="auto" if rest else ""
        )
        most = max(found.peak_bytes)
        whole = whole or most  # the first schedule is PreferForward
        sizes = [f"{n / 2**20:.2f}" for n in found.peak_bytes]
        rows.append([name, " ".join(map(str, found.peak)), *sizes, f"{most / whole:.2f}"])
    return table(
        ("schedule", "micro-batches kept", "MiB, device 0", "MiB, device 1", "of PreferForward"),
        rows,
    )


def chart(path: Path) -> None:
    """Draw all schedules, for four devices and eight micro-batches."""
    made = [(name, schedule(name, 4, 8)) for name in SCHEDULES]
    plays = [(name, s.timeline()) for name, s in made]
    made[0][1].gantt(path, plays, unit="forwards of a stage")
    # to make the file smaller, round coordinates to tenths of a point
    shorter = lambda m: " ".join(re.sub(r"(\.\d)\d+", r"\1", m[0]).split())
    drawn = re.sub(r' (d|x|y|transform)="[^"]*"', lambda m: " " + shorter(m), path.read_text())
    path.write_text(re.sub(r"font-family: [^;]*;", "font-family: sans-serif;", drawn))


def written(page: str, parts: dict[str, str]) -> str:
    """Return the page with new tables between `<!-- name -->` and `<!-- /name -->`."""
    for name, text in parts.items():
        before, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        assert begin and end, f"docs/pipeline_schedules.md has no place for {name}"
        page = f"{before}{begin}\n{text}\n\n{end}{after}"
    return page


def ran(page: str, names: dict[str, Any]) -> str:
    """Run the code of a page, and return the page with the new output.

    `names` contains the variables that the code of earlier pages has defined.
    """

    def printed(m: re.Match[str]) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(m[1], "page", "exec"), names)
        assert bool(out.getvalue()) == bool(m[2]), (
            f"a block of text with the output must follow code that prints:\n{m[1]}"
        )
        return f"```python\n{m[1]}```\n" + (f"\n```text\n{out.getvalue()}```\n" if m[2] else "")

    return re.sub(r"```python\n(.*?)```\n(\n```text\n.*?```\n)?", printed, page, flags=re.S)


# -- as processes ----------------------------------------------------------------------------------


def process(name: str) -> None:
    """Run one of the two processes of a pipeline.

    For each number on standard input, train this number of steps, and print the seconds.
    """
    dtrans.connect(deadline=120)
    case = {**CASES, **TINY}[name]()
    job, k, n = planned(case).on_cluster(), jax.process_index(), jax.process_count()
    inputs, targets = (x[k * len(x) // n : (k + 1) * len(x) // n] for x in case.batch)
    run = ours(dataclasses.replace(case, batch=(inputs, targets)), job)
    jax.block_until_ready(run())
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            made = run()
        jax.block_until_ready(made)
        print(time.perf_counter() - start, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the tables, the output of the code, and the picture",
    )
    parser.add_argument(
        "--process", metavar="MODEL", help="be one of the two processes of test_pipeline.py"
    )
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 1 if args.process else DEVICES)
    if args.process:
        process(args.process)
        return
    parts = {"schedules": schedules_of(), "memory": memory_of()}
    print(*parts.values(), sep="\n\n")
    if args.write:
        schedules = DOCS / "pipeline_schedules.md"
        schedules.write_text(written(schedules.read_text(), parts))
        names: dict[str, Any] = {}
        for page in [DOCS / "pipeline.md", *sorted(DOCS.glob("pipeline_*.md")), DOCS / "epl.md"]:
            page.write_text(ran(page.read_text(), names))
        chart(DOCS / "pipeline.svg")


if __name__ == "__main__":
    main()
