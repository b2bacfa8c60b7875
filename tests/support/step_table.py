"""Generator of `docs/steps.md`: the exchanges of each step of the zoo.

python tests/support/step_table.py     writes the page (`make docs`)
"""

from __future__ import annotations

from typing import Any

import jax
from paths import DOCS


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)  # before a module makes an array

import step_zoo

import dtrans
from dtrans.batch.exact_step import ExactStep, shard_step
from dtrans.errors import DtransError, GradientError
from dtrans.step.batch_sharing import Batch
from dtrans.step.halves import divide_step, leave_undivided


PAGE = DOCS / "steps.md"
TRAINERS, ROWS = 2, 12

HEAD = f"""# Steps in each strategy

Some training steps compute the results of one device only if trainers exchange values
([exact.md](exact.md)). `print(plan)` lists the exchanges of your step; this table lists them for {len(step_zoo.CASES)}
steps.

The tests verify each plan by [`plan.verify()`](verify.md), without a tolerance. Strategies are
nccl2 mode, sharding stages 1 to 3, synchronous parameter servers, and pipelines with two stages.
Plans have two trainers and 12 rows, or three trainers and 13 rows. Pipelines have no trainers, and
always 12 rows. Steps that a strategy refuses are left out. The tests also run seven jobs, at least
one for each strategy. Their parameters, state and results equal those of one device within 1e-12
(64 bits). `make docs` generates the table, for {TRAINERS} trainers or micro-batches and
{ROWS} rows.

| column | meaning |
| --- | --- |
| alone | reduction that turns the losses and gradients of the parts into those of one device; \
"no" if trainers must exchange values; "no gradient" if the step does not have one gradient |
| exchanged | collectives in addition to those for gradients and results, with the bytes of each \
trainer; without a gradient, all collectives except those for results |
| servers | number of rounds in which trainers exchange these values, and results, through \
servers; "exact" if no round is needed |
| pipeline | number of values that are computed for the full batch before the micro-batches; \
"exact" if no value is needed |

| step | description | alone | exchanged | servers | pipeline |
| --- | --- | --- | --- | --- | --- |
"""


def shared(case: step_zoo.StepCase) -> ExactStep:
    main = dtrans.trace(case.step, *case.init(jax.random.key(0)), *case.batch(ROWS // TRAINERS))
    try:
        step = divide_step(main).with_reported()
    except GradientError as e:
        step = leave_undivided(main, str(e))
    return shard_step(step, Batch(axes=axes_of(case)), TRAINERS, ("trainers",))


def axes_of(case: step_zoo.StepCase) -> Any:
    return 0 if case.batch_axes is None else case.batch_axes


def on_servers(case: step_zoo.StepCase) -> str:
    """Return the entry of the column `servers`."""
    key = jax.random.key(0)
    main = dtrans.trace(case.step, *case.init(key), *case.batch(ROWS // TRAINERS))
    options = {
        "pservers": "127.0.0.1:1,127.0.0.1:2",
        "trainers": TRAINERS,
        "batch": Batch(axes=axes_of(case)),
    }
    try:
        startup = dtrans.trace(case.init, key)
        plan = dtrans.pserver(main, startup, **options)  # type: ignore[arg-type]
    except DtransError as e:
        return f"refused: {why(e)}"
    count = len(plan.traffic.exchanges)
    return f"{count} round{'s' * (count > 1)}" if count else "exact"


def in_pipeline(case: step_zoo.StepCase) -> str:
    """Return the entry of the column `pipeline`."""
    key = jax.random.key(0)
    main = dtrans.trace(case.step, *case.init(key), *case.batch(ROWS))
    options = {"num_stages": 2, "num_micro_batch": TRAINERS, "batch": Batch(axes=axes_of(case))}
    try:
        startup = dtrans.trace(case.init, key)
        plan = dtrans.pipeline(main, startup, **options)  # type: ignore[arg-type]
    except DtransError as e:
        return f"refused: {why(e)}"
    count = 0 if plan.values is None else len(plan.values.outputs)
    return f"{count} value{'s' * (count > 1)} before" if count else "exact"


def why(error: DtransError) -> str:
    """Return a refusal in a few words."""
    told = str(error)
    words = {
        "values of the full batch": "needs values of the full batch",
        "in a loop or a branch": "the step sums gradients in a loop",
        "is computed from gradients": "a result depends on gradients",
        "which need no gradients": "no gradient was found",
        "is taken at the new": "a gradient is taken after an update",
        "needs the undifferentiated loss": "the step calls jax.grad",
    }
    # unpack, because the StopIteration of `next` would end the caller's `map`
    (found,) = (short for long, short in words.items() if long in told)
    return found


def row(case: step_zoo.StepCase) -> str:
    found = shared(case)
    moved: dict[str, list[int]] = {}
    for x in found.part.exchanged:
        moved.setdefault(x.op, []).append(x.nbytes)
    alone = f"{found.reduce} of parts" if found.proven else "no"
    if found.step.undivided:
        alone = "no gradient"
    listed = (
        ", ".join(f"{len(n)} {op}, {sum(n):,} bytes" for op, n in sorted(moved.items()))
        or "nothing"
    )
    what = " ".join(case.what.split()).rstrip(".")
    return (
        f"| {case.name} | {what} | {alone} | {listed} | {on_servers(case)} | "
        f"{in_pipeline(case)} |\n"
    )


def page() -> str:
    return HEAD + "".join(map(row, step_zoo.CASES))


if __name__ == "__main__":
    PAGE.write_text(page())
