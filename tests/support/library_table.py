"""Generator of `docs/libraries.md`: the strategies that can plan the steps of other libraries.

python tests/support/library_table.py     writes the page again (`make docs`)
"""

from __future__ import annotations

import re
from typing import Any

import jax
from paths import DOCS


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)  # before a module makes an array

import library_zoo

import dtrans
from dtrans.errors import DtransError


PAGE = DOCS / "libraries.md"
MODES = ("nccl2", "stage 1", "stage 2", "stage 3", "pserver", "pipeline")
TRAINERS, ROWS = 2, 12

ORDER = "the gradient of .* is taken at the new .*, so the step would wait for an update"
REFUSED = {  # strategy -> case -> pattern of the error
    "pserver": dict.fromkeys(("gan_in_order", "actor_critic"), ORDER),
    "pipeline": {
        **dict.fromkeys(
            ("flax_batch_norm_dropout", "meta_gradient"), "needs values of the full batch"
        ),
        "sharpness_aware": "dtrans.value_and_grad differentiates with respect to .*, which is not "
        "a leaf of `state`",
        **dict.fromkeys(("gan_in_order", "actor_critic"), ORDER),
    },
}
PER_MICRO_BATCH = ("flax_batch_norm_dropout", "meta_gradient")  # run with batch="micro"
WHY = {  # part of an error -> short text for the table
    ORDER: "a gradient is taken at a parameter that the step has just updated",
    "which is not a leaf of": "a gradient at perturbed parameters",
}

HEAD = f"""# Steps of other libraries

dtrans distributes training steps of flax, nnx and Equinox. `dtrans.trace(step, state, *batch)`
takes one state of any structure: a flax `TrainState`, a state of nnx, an Equinox model with its
optimizer, or a dict of models.

    main = dtrans.trace(train_step, state, images, labels)
    startup = dtrans.trace(create_train_state, key)
    job = dtrans.nccl2(main, startup, trainers=2).on_mesh()
    state = job.init(key)
    state, metrics = job.step(state, images, labels)
    job.apply(accuracy, state, images, labels)  # gathers only what the function reads
    job.gather(state)  # the TrainState of one device; job.scatter takes one

Dataflow gives each leaf of the state its role:

- the loss reads a *parameter*, and the gradient of the loss changes it;
- the loss reads a *follower* (a teacher, a target network), which changes with a parameter;
- *statistics* (running means) are computed from the batch, without a gradient;
- all other leaves that change belong to the *optimizer*.

## Examples to run and to read

In a checkout of dtrans, `dtrans example` lists examples that need no download: `flax_cnn`,
`nnx_mlp`, `equinox_mlp`, `equinox_transformer`, `nanogpt`, `gan` and `lora`. Each is a file of
`examples/libraries/` with a model and its step, in the style of the library's own documentation and
without dtrans. `examples/libraries/run.py` distributes any of them.

    pip install -e '.[libraries]'
    dtrans example flax_cnn --mode sharding --stage 3
    dtrans example nnx_mlp --mode pipeline

The first command trains on two devices of this process (virtual devices on a CPU) and prints the
loss. Then it compares the state with the state of one device after the same batches. With 64-bit
numbers, the default, the two states differ by about 1e-15; `--no-x64` uses 32-bit numbers. The
second command prints an error, because batch norm needs statistics of the full batch.
`--mode single` trains without dtrans.

A step of nnx changes objects in place, but dtrans needs a function. Call `nnx.merge` before the
step and `nnx.state` after it (`nnx_mlp.py`). Here `build(key)` returns a model and its
`nnx.Optimizer(model, tx, wrt=nnx.Param)`:

    graph = nnx.graphdef(nnx.eval_shape(build, key))
    init = lambda key: nnx.state(build(key))

    def step(state, x, y):
        model, optimizer = objects = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
        optimizer.update(model, grads)
        return nnx.state(objects), loss

    main = dtrans.trace(step, jax.eval_shape(init, key), x, y)
    startup = dtrans.trace(init, key)

## Steps that are tested

The tests run these steps, written as in the libraries' documentation, on {TRAINERS} trainers,
servers or stages. Parameters, optimizer state and results equal those of one device within 1e-12
(64-bit numbers). The steps use `value_and_grad` of their library. In a pipeline they use
`dtrans.value_and_grad`, because the loss is split into stages before it is differentiated. Steps
marked `batch="micro"` need values of the full batch inside the loss. A pipeline runs them with
separate values for each micro-batch, and averages losses, gradients and statistics. Their numbers
are not those of one device. `make docs` writes this table.

| step | special property | nccl2 | sharding 1, 2, 3 | servers | pipeline |
| --- | --- | --- | --- | --- | --- |
"""


def planned(case: library_zoo.LibraryCase, mode: str, *, batch: str = "exact") -> Any:
    """Return the plan of a case. A pipeline uses `dtrans.value_and_grad`, and reads `batch`."""
    key = jax.random.key(0)
    step = case.step(dtrans.value_and_grad if mode == "pipeline" else case.value_and_grad)
    main = dtrans.trace(step, *case.state(key), *case.batch(ROWS))
    given = main, dtrans.trace(case.init, key)
    if mode == "nccl2":
        return dtrans.nccl2(*given, trainers=TRAINERS)
    if mode == "pserver":
        placement = dtrans.BlockPlacement(min_block_size=1)
        return dtrans.pserver(
            *given, pservers="127.0.0.1:1,127.0.0.1:2", trainers=TRAINERS, placement=placement
        )
    if mode == "pipeline":
        return dtrans.pipeline(*given, num_stages=2, num_micro_batch=TRAINERS, batch=batch)
    slices = dtrans.Slicing(min_slice_size=0)
    return dtrans.sharding(*given, degree=TRAINERS, stage=int(mode[-1]), slices=slices)


def said(case: library_zoo.LibraryCase, mode: str) -> str:
    """Return the entry of the table for a case and a strategy."""
    try:
        planned(case, mode)
    except DtransError as e:
        if mode == "pipeline" and case.name in PER_MICRO_BATCH:
            planned(case, mode, batch="micro")
            return '`batch="micro"`'
        return "refused: " + next(short for long, short in WHY.items() if re.search(long, str(e)))
    return "exact"


def row(case: library_zoo.LibraryCase) -> str:
    stages = {said(case, f"stage {i}") for i in (1, 2, 3)}
    told = (said(case, "nccl2"), *stages, said(case, "pserver"), said(case, "pipeline"))
    return f"| {case.name} | {case.what} | {' | '.join(told)} |\n"


def page() -> str:
    return HEAD + "".join(map(row, library_zoo.CASES))


if __name__ == "__main__":
    PAGE.write_text(page())
