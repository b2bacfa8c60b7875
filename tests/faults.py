"""Faults that the tests must notice: one in each of 24 files that matter.

    python tests/faults.py                 plants each in a copy of the project, and runs its tests with `pytest -x`
    python tests/faults.py rules writer    some of them

It prints which test notices a fault, and fails where none does within five minutes. A layout of the package, or of its
tests, that hides a fault is found in this way.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path


ROOT = Path(__file__).parents[1]
MINUTES = 5


@dataclasses.dataclass(frozen=True)
class Fault:
    """A change of one place.

    Attributes:
      file: in the package.
      old, new: the text that is there, once, and what is put in its place.
      tests: the files of tests that are run, by name, wherever they lie.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        """`rules`."""
        return Path(self.file).stem

    def planted(self, text: str) -> str:
        """The text of the file with the fault."""
        assert text.count(self.old) == 1, f"{self.file} has {self.old!r} {text.count(self.old)} times"
        return text.replace(self.old, self.new)


FAULTS = (
    Fault(
        "rules.py",
        'reduce=eqn.primitive.name.removeprefix("reduce_")',
        'reduce="sum"',
        ("test_rows.py", "test_shards.py"),
    ),
    Fault(
        "rows.py", "if any(b.crosses for b in bodies) and not", "if False and not", ("test_rows.py", "test_shards.py")
    ),
    Fault(
        "writer.py",
        "return self.start * row.width, self.stop * row.width",
        "return self.start, self.stop",
        ("test_shards.py", "test_optimizer_zoo.py"),
    ),
    Fault(
        "levels.py",
        "self._shared[v] = level + 1\n            else",
        "self._shared[v] = level\n            else",
        ("test_shards.py", "test_exchange.py"),
    ),
    Fault(
        "shards.py",
        "parts if len(parts) == 1 else b.call(_combined(c.op), *parts)",
        "parts[:1]",
        ("test_shards.py", "test_exchange.py"),
    ),
    Fault("means.py", "* (1 / len(grads))", "* (1 / 2)", ("test_leaver.py", "test_mesh.py")),
    Fault(
        "blocks.py",
        "size = math.ceil(size / width) * width",
        "size = max(1, size // width) * width",
        ("test_blocks.py", "test_golden.py"),
    ),
    Fault(
        "placement.py",
        "        start += rows\n",
        "        start += max(1, rows - 1)\n",
        ("test_pserver.py", "test_golden.py"),
    ),
    Fault(
        "cut.py",
        "return OptimizeHalf(jaxpr, in_names, tuple(out_names)), used, kept",
        "return OptimizeHalf(jaxpr, in_names, tuple(out_names)), used, kept[1:]",
        ("test_cut.py", "test_pserver.py"),
    ),
    Fault(
        "marks.py",
        "ad.primitive_transposes[_loss_p] = lambda ct, x: [ct if type(ct) is ad.Zero else _seed_p.bind(ct)]",
        "ad.primitive_transposes[_loss_p] = lambda ct, x: [ct]",
        ("test_marks.py", "test_sharding_amp.py"),
    ),
    Fault(
        "parts.py",
        'first = p["start_indices"][axis] + part.start * stride',
        'first = p["start_indices"][axis] + part.start',
        ("test_parts.py", "test_pserver.py"),
    ),
    Fault("bits.py", "first = start * strides[axis]", "first = start", ("test_parts.py", "test_golden.py")),
    Fault(
        "transforms/trainers.py",
        'names = tuple(x.gradient(self.me["trainer_id"], merged) for x in blocks)',
        "names = tuple(x.gradient(0, merged) for x in blocks)",
        ("test_pserver.py", "test_golden.py"),
    ),
    Fault(
        "transforms/reducer.py",
        "return {d: math.inf if splits[d] == 1 else total[d] / (splits[d] - 1) for d in dtypes}",
        "return {d: math.inf if splits[d] == 1 else total[d] / splits[d] for d in dtypes}",
        ("test_nccl2_options.py", "test_nccl2.py"),
    ),
    Fault("transforms/merges.py", "return [n for n", "return [] and [n for n", ("test_nccl2.py",)),
    Fault(
        "transforms/slices.py",
        "leaves[n] = Sliced(axes[n], size, -(-size // degree), degree)",
        "leaves[n] = Sliced(axes[n], size, size // degree + 1, degree)",
        ("test_sharding_structure.py", "test_sharding.py"),
    ),
    Fault(
        "transforms/gathers.py",
        "if self.how.prefetch == 0 and self.late is not None:",
        "if False and self.late is not None:",
        ("test_sharding_structure.py", "test_sharding_layers.py", "test_sharding.py"),
    ),
    Fault(
        "transforms/scatters.py",
        "return self._sum(bucket.name, mine, (o.dp_axis_name,)) if o.dp_degree > 1 else mine",
        "return mine",
        ("test_sharding_structure.py", "test_sharding.py"),
    ),
    Fault(
        "transforms/stage_programs.py",
        "outs += b.call(_added, passing[v], back[v])",
        "outs.append(back[v])",
        ("test_pipeline.py", "test_pipeline_structure.py"),
    ),
    Fault(
        "transforms/partition.py",
        "next_total[stop], next_squares[stop] = total[best] + sent[stop], even.min()",
        "next_total[stop], next_squares[stop] = total[best], even.min()",
        ("test_stages.py",),
    ),
    Fault(
        "schedules.py",
        'if task.kind == "B" and task.micro >= device:',
        'if task.kind == "B" and task.micro > device:',
        ("test_schedules.py", "test_pipeline_structure.py"),
    ),
    Fault("run/endpoints/server.py", "            t.arrived.clear()\n", "", ("test_endpoints.py", "test_exchange.py")),
    Fault(
        "run/endpoints/wire.py", "if offset != before:", "if offset < before:", ("test_wire.py", "test_endpoints.py")
    ),
    Fault(
        "checkpoint/slices.py",
        "found += _size(common)",
        "found += _size(box)",
        ("test_checkpoint.py", "test_sharding_checkpoint.py"),
    ),
)


def notices(fault: Fault) -> tuple[str, float]:
    """The first test that fails with a fault, and the seconds until then; no test, where none does in time."""
    with tempfile.TemporaryDirectory(prefix="fault") as folder:
        copy = Path(folder) / "copy"
        skip = shutil.ignore_patterns(".*", "__pycache__", "runs", "*.egg-info")
        shutil.copytree(ROOT, copy, ignore=skip)
        at = copy / "dtrans" / fault.file
        at.write_text(fault.planted(at.read_text()))
        tests = [str(p) for name in fault.tests for p in sorted((copy / "tests").rglob(name))]
        assert len(tests) == len(fault.tests), (fault.tests, tests)
        started = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        env = {**os.environ, "PYTHONPATH": str(copy)}
        try:
            done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=60 * MINUTES)
        except subprocess.TimeoutExpired:
            return "", time.monotonic() - started
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
        return found[1] if found and done.returncode else "", time.monotonic() - started


def main(names: list[str]) -> int:
    """Plant them; how many nothing noticed."""
    unnoticed = 0
    for fault in FAULTS:
        if not names or fault.name in names:
            test, seconds = notices(fault)
            print(f"{fault.file:32} {test or 'NOT NOTICED':80} {seconds:.0f} s", flush=True)
            unnoticed += not test
    return unnoticed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
