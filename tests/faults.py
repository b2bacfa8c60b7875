"""Faults that the tests must notice: one or two in each of 30 files that matter, and five ways to
cut a batch wrongly.

    python tests/faults.py                 plants each in a copy of the project, and runs its tests with `pytest -x`
    python tests/faults.py rules writer    some of them

It prints which test notices a fault, of those that run by day or, where none of these does, by
night (`-m soak`), and fails where none does within five minutes each. A layout of the package, or
of its tests, that hides a fault is found in this way.
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
      tests: the files of tests that are run, in the folder of tests.
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
        assert text.count(self.old) == 1, (
            f"{self.file} has {self.old!r} {text.count(self.old)} times"
        )
        return text.replace(self.old, self.new)


BATCHES = ("verification/test_random_steps.py", "batch/test_step_zoo.py")
TABLES = ("run/parameter_server/test_table_zoo.py",)

FAULTS = (
    Fault(  # a gather that fills with sevens is called linear
        "_jax/primitives.py",
        "linear_if=_fills_linearly",
        "linear_if=_always",
        ("test_jax_primitives.py",),
    ),
    Fault(  # rows that change places are called the same
        "_jax/primitives.py",
        '("rev", _F(moves=(0,), linear_in',
        '("rev", _F(moves=(0,), keeps_order=_always, linear_in',
        ("step/test_frozen.py", "test_jax_primitives.py"),
    ),
    Fault(
        "engine/values.py",
        "self.b.call(times(self.shards.count), term)",
        "self.b.call(times(1), term)",
        ("batch/test_local_scope.py",),
    ),
    Fault(
        "zero/rank_values.py",
        "eqn.primitive is trainer_index_p or any(ins)",
        "any(ins)",
        ("zero/test_rank_values.py",),
    ),
    Fault(
        "_jax/equation_params.py",
        "operands = [*first, *invars[:of_cond], *first, *invars[of_cond:]]",
        "operands = [*first, *first, *invars]",
        ("ir/test_builder.py",),
    ),
    Fault(  # a sum that an iteration reads in full is a partial sum in the next one
        "engine/loops.py",
        "return _CLOSED if is_closed and not isinstance(after, RowAxis) else _join(carried, after)",
        "return _join(carried, after)",
        ("engine/test_split.py",),
    ),
    Fault(  # what is carried is what the first turn takes
        "ir/interpret.py",
        "joined = [join(x, results[carried[i]]) if i in carried else x for i, x in enumerate(start)]",
        "joined = list(start)",
        ("ir/test_interpret.py", "zero/test_rank_values.py"),
    ),
    Fault(  # zero minus a value is that value
        "ir/folding.py",
        'for i in (1,) if name == "sub" else (1, 0):',
        "for i in (1, 0):",
        ("ir/test_folding.py",),
    ),
    Fault(
        "ir/fingerprint.py",
        "if part == BATCH or (sized and part == LOSS):",
        "if part in (BATCH, LOSS):",
        ("ir/test_fingerprint.py",),
    ),
    Fault(
        "batch/precomputed_micro_steps.py",
        "[SHARED if n in self.values.full else cut_along(0) for n in program.out_names]",
        "[SHARED for n in program.out_names]",
        ("batch/test_micro_steps.py",),
    ),
    Fault(
        "pipeline_parallel/results.py",
        "jnp.concatenate(parts, axis)",
        "jnp.concatenate(parts)",
        ("pipeline_parallel/test_results.py",),
    ),
    Fault(
        "run/pipeline_parallel/compile_update.py",
        "return slots.array(stage, n)",
        "return slots.array(0, n)",
        ("pipeline_parallel/test_arguments_and_state.py",),
    ),
    Fault(
        "rows/rules.py",
        "reduce=op)",
        'reduce="sum")',
        ("rows/test_analysis.py", "slicing/test_server_update.py"),
    ),
    Fault(
        "rows/flow.py",
        "if any(b.crosses for b in bodies) and not",
        "if False and not",
        ("rows/test_analysis.py", "slicing/test_server_update.py"),
    ),
    Fault(
        "rows/writer.py",
        "return Slice(row.axis, self.start * row.width, self.rows * row.width)",
        "return Slice(row.axis, self.start, self.rows)",
        ("slicing/test_server_update.py", "parameter_server/test_optimizer_zoo.py"),
    ),
    Fault(
        "slicing/rounds.py",
        "self._shared[v] = level + 1\n            else",
        "self._shared[v] = level\n            else",
        ("slicing/test_server_update.py", "run/parameter_server/test_exchange.py"),
    ),
    Fault(
        "slicing/server_spec.py",
        "idle = set(analysis.state_of[None]) - every.shared_state",
        "idle = set[str]()",
        ("slicing/test_server_update.py",),
    ),
    Fault(
        "slicing/unit_program.py",
        "min(levels.of.get(",
        "max(levels.of.get(",
        ("slicing/test_server_update.py",),
    ),
    Fault(
        "slicing/server_update.py",
        "parts if len(parts) == 1 else b.call(_combined(c.op), *parts)",
        "parts[:1]",
        ("slicing/test_server_update.py", "run/parameter_server/test_exchange.py"),
    ),
    Fault(
        "slicing/mean.py",
        "* (1 / len(grads))",
        "* (1 / 2)",
        ("run/parameter_server/test_trainer_exit.py", "run/parameter_server/test_mesh.py"),
    ),
    Fault(
        "parameter_server/dispatch.py",
        "size = math.ceil(size / width) * width",
        "size = max(1, size // width) * width",
        ("parameter_server/test_dispatch.py", "paddle/test_golden.py"),
    ),
    Fault(
        "parameter_server/placement.py",
        "        start += rows\n",
        "        start += max(1, rows - 1)\n",
        ("parameter_server/test_transform.py", "paddle/test_golden.py"),
    ),
    Fault(
        "step/cut.py",
        "return OptimizeHalf(jaxpr, in_names, tuple(out_names)), used, positions",
        "return OptimizeHalf(jaxpr, in_names, tuple(out_names)), used, positions[1:]",
        ("step/test_cut.py", "parameter_server/test_transform.py"),
    ),
    Fault(
        "step/marks.py",
        "return [ct if is_zero(ct) else _seed_p.bind(ct)]",
        "return [ct]",
        ("step/test_marks.py", "zero/test_mixed_precision.py"),
    ),
    Fault(
        "rows/parts.py",
        'first = int(p["start_indices"][axis]) + part.start * stride',
        'first = int(p["start_indices"][axis]) + part.start',
        ("slicing/test_partial_init.py", "parameter_server/test_transform.py"),
    ),
    Fault(
        "rows/random_bits.py",
        "first = start * strides[axis]",
        "first = start",
        ("slicing/test_partial_init.py", "paddle/test_golden.py"),
    ),
    Fault(
        "parameter_server/trainer_program.py",
        'x.gradient(self.me["trainer_id"], self.wiring.gradients_per_update) for x in blocks',
        "x.gradient(0, self.wiring.gradients_per_update) for x in blocks",
        ("parameter_server/test_transform.py", "paddle/test_golden.py"),
    ),
    Fault(
        "data_parallel/reducer.py",
        "return {d: math.inf if splits[d] == 1 else total[d] / (splits[d] - 1) for d in dtypes}",
        "return {d: math.inf if splits[d] == 1 else total[d] / splits[d] for d in dtypes}",
        ("data_parallel/test_options.py", "data_parallel/test_transform.py"),
    ),
    Fault(
        "data_parallel/merge_rules.py",
        "return [n for n",
        "return [] and [n for n",
        ("data_parallel/test_transform.py",),
    ),
    Fault(
        "zero/choose_slices.py",
        "leaves[n] = Sliced(axes[n], size, -(-size // degree), degree)",
        "leaves[n] = Sliced(axes[n], size, size // degree + 1, degree)",
        ("zero/test_plan.py", "zero/test_transform.py"),
    ),
    Fault(
        "zero/all_gather.py",
        "if self.how.prefetch == 0 and self.late is not None:",
        "if False and self.late is not None:",
        ("zero/test_plan.py", "zero/test_layer_scan.py", "zero/test_transform.py"),
    ),
    Fault(
        "zero/slice_writer.py",
        "and (picks in self.local or self._row(picks))",
        "and False",
        ("zero/test_loop_shapes.py",),
    ),
    Fault(
        "zero/slice_writer.py",
        "self.b.call(times(self.how.degree), piece)[0]",
        "piece",
        ("zero/test_loop_shapes.py",),
    ),
    Fault(
        "slicing/mean.py",
        'if len(grads) == 1 or op == "same":',
        "if len(grads) == 1:",
        ("parameter_server/test_told_and_asked.py",),
    ),
    Fault(
        "zero/reduce_scatter.py",
        "if o.replicas == 1:",
        "if True:",
        ("zero/test_plan.py", "zero/test_transform.py"),
    ),
    Fault(
        "pipeline_parallel/stage_programs.py",
        "outs += b.call(_added, passing[v], back[v])",
        "outs.append(back[v])",
        ("pipeline_parallel/test_transform.py", "pipeline_parallel/test_stage_programs.py"),
    ),
    Fault(
        "pipeline_parallel/balance.py",
        "        lambda stop: sent[stop],\n        lambda stop: dearest[:stop]",
        "        lambda stop: 0.0,\n        lambda stop: dearest[:stop]",
        ("pipeline_parallel/test_assign_stages.py",),
    ),
    Fault(
        "pipeline_parallel/orders.py",
        'if task.kind == "B" and task.micro >= device:',
        'if task.kind == "B" and task.micro > device:',
        ("pipeline_parallel/test_schedule.py", "pipeline_parallel/test_stage_programs.py"),
    ),
    Fault(
        "protocol/sync_server.py",
        "            turn.grads.clear()\n",
        "",
        ("run/parameter_server/test_endpoints.py", "run/parameter_server/test_exchange.py"),
    ),
    Fault(
        "protocol/tables/rows_ahead.py",
        "due = max(step, target - table.staleness)",
        "due = step",
        ("run/parameter_server/test_rows_ahead.py",),
    ),
    Fault(  # what a trainer and the servers agree on lags one pull behind
        "protocol/tables/kept_rows.py",
        "self._agree(ids, local + (rows - old), rows)",
        "self._agree(ids, local + (rows - old), old)",
        ("verification/test_asynchronous_tables.py",),
    ),
    Fault(  # a trainer is told of its own changes, and others are not
        "protocol/tables/changed_rows.py",
        "if other != k and len(news):",
        "if other == k and len(news):",
        ("verification/test_asynchronous_tables.py",),
    ),
    Fault(
        "protocol/wire.py",
        "if offset != before:",
        "if offset < before:",
        ("protocol/test_wire.py", "run/parameter_server/test_endpoints.py"),
    ),
    Fault(
        "checkpoint/assemble.py",
        "found += _size(common)",
        "found += _size(box)",
        ("checkpoint/test_pserver_state.py", "checkpoint/test_collective_state.py"),
    ),
    Fault(  # what is a mean and a sum is called a mean
        "batch/scaled.py",
        "_together([[ins[i]] for i in group])[0] for group in groups",
        "ins[group[0]] for group in groups",
        ("batch/test_scaled.py",),
    ),
    Fault(  # each trainer normalises by its own statistics
        "engine/writer.py",
        """            self._define(eqn, [PARTIAL] * len(eqn.outvars), values)
            if self.in_local:""",
        """            self._define(eqn, way.outs, values)
            if self.in_local:""",
        BATCHES,
    ),
    Fault(  # padding is counted
        "engine/pieces.py",
        "if not self.shards.pads(size, row):",
        "if self.shards.count:",
        BATCHES,
    ),
    Fault(  # trainers draw the same mask
        "engine/pieces.py",
        "b.call(times(local), self.index())",
        "b.call(times(0), self.index())",
        BATCHES,
    ),
    Fault(  # what all trainers have is added up
        "engine/values.py",
        "(scaled,) = self.b.call(on_first, value, self.pieces.index())",
        "scaled = value",
        BATCHES,
    ),
    Fault(  # parts are added up as they come
        "protocol/trainer_rounds.py",
        "order = sorted(trainers)",
        "order = list(self._parts)",
        ("run/parameter_server/test_trainer_rounds.py",),
    ),
    Fault(  # servers average terms of a sum
        "parameter_server/transform.py",
        'summed = tuple(step.gradients) if shared.reduce == "sum" else ()',
        "summed = ()",
        BATCHES,
    ),
    Fault(  # rows miss a step
        "run/parameter_server/tables/missed_steps.py",
        "missed = lambda x: (seen <= i)",
        "missed = lambda x: (seen < i)",
        TABLES,
    ),
    Fault(  # rows that enter a reduction are left out of it
        "parameter_server/tables/zero_gradient.py",
        'self.counts = self.counts or ("" if neutral else',
        'self.counts = self.counts or ("" if step.reduce else',
        TABLES,
    ),
    Fault(  # the noise of other rows is added
        "parameter_server/tables/zero_gradient.py",
        'self.positions = self.positions or ("" if alike else',
        'self.positions = self.positions or ("" if step else',
        TABLES,
    ),
    Fault(  # a row is another server's
        "rows/row_buckets.py",
        "return ids // self.count * self._width + ids % self.count - self.start",
        "return ids // self.count * self._width + ids % self.count",
        TABLES,
    ),
    Fault(  # a row that two trainers have looked up is updated twice
        "run/parameter_server/tables/row_updates.py",
        "return ids[0] if len(ids) == 1 else sorted_once(np.concatenate(ids))",
        "return ids[0] if len(ids) == 1 else np.sort(np.concatenate(ids))",
        TABLES,
    ),
)


def notices(fault: Fault) -> tuple[str, float]:
    """The first test that fails with a fault, and the seconds until then; no test, where none does
    in time."""
    with tempfile.TemporaryDirectory(prefix="fault") as folder:
        copy = Path(folder) / "copy"
        skip = shutil.ignore_patterns(".*", "__pycache__", "runs", "*.egg-info")
        shutil.copytree(ROOT, copy, ignore=skip)
        at = copy / "dtrans" / fault.file
        at.write_text(fault.planted(at.read_text()))
        tests = [str(copy / "tests" / name) for name in fault.tests]
        started = time.monotonic()
        env = {**os.environ, "PYTHONPATH": str(copy)}
        for which in ("not soak", "soak"):
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "-m",
                which,
                *tests,
            ]
            try:
                done = subprocess.run(
                    command, cwd=copy, env=env, capture_output=True, text=True, timeout=60 * MINUTES
                )
            except subprocess.TimeoutExpired:
                continue
            found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
            if found and done.returncode:
                return found[1] + f" ({which})" * (which == "soak"), time.monotonic() - started
        return "", time.monotonic() - started


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
