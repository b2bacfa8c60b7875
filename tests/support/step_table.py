"""The page that says what each step of the zoo takes: `docs/steps.md`.

python tests/support/step_table.py     writes it anew (`make docs`)
"""

from __future__ import annotations

from typing import Any

import jax
from paths import DOCS


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)  # before a module makes an array

import step_zoo

import dtrans
from dtrans.batch.shared import SharedStep, share
from dtrans.step.batch_sharing import Batch
from dtrans.step.cut import cut


PAGE = DOCS / "steps.md"
TRAINERS, ROWS = 2, 12

HEAD = f"""# What each step takes

Over collectives (`dtrans.nccl2`, `dtrans.sharding`) a job gives the numbers of one device, whatever the step. The batch
is cut over the trainers, forward and backward are written on their parts, and what crosses the batch communicates where
it does. The table shows the steps that the tests hold to it: parameters, optimizer state and results within 1e-12 of
one device in 64 bits, on two trainers and on three that do not divide the batch, in nccl2 mode and in all three stages
of sharding. It is made by the tests (`make docs`), for {TRAINERS} trainers and {ROWS} rows.

*Alone* says whether parts add up to one device's step without an exchange between trainers: then parameter servers and
pipelines are exact too, which they say themselves; `batch="exact"` refuses other steps there. *Exchanged* counts what
forward and backward move beside gradients and results, and how many bytes each trainer puts in (of a gather, gets out).

| step | what is special about it | alone | exchanged |
| --- | --- | --- | --- |
"""


def shared(case: step_zoo.StepCase) -> SharedStep:
    main = dtrans.trace(case.step, *case.init(jax.random.key(0)), *case.batch(ROWS // TRAINERS))
    axes: Any = 0 if case.batch_axes is None else case.batch_axes
    return share(cut(main).with_reported(), Batch(axes=axes), TRAINERS, ("trainers",))


def row(case: step_zoo.StepCase) -> str:
    found = shared(case)
    moved: dict[str, list[int]] = {}
    for x in found.part.exchanged:
        moved.setdefault(x.op, []).append(x.nbytes)
    alone = f"{found.reduce} of parts" if found.proven else "no"
    listed = ", ".join(f"{len(n)} {op}, {sum(n):,} bytes" for op, n in sorted(moved.items())) or "nothing"
    return f"| {case.name} | {case.what.rstrip('.')} | {alone} | {listed} |\n"


def page() -> str:
    return HEAD + "".join(map(row, step_zoo.CASES))


if __name__ == "__main__":
    PAGE.write_text(page())
