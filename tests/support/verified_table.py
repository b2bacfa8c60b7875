"""Generator of `docs/verified.md`: verified plans of the steps and optimizers of the zoos.

python tests/support/verified_table.py     writes the page again (`make docs`)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from paths import DOCS


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)  # before a module makes an array

import optimizer_zoo
import step_zoo
import table_jobs
from step_cases import StepCase

import dtrans
from dtrans.errors import DtransError
from dtrans.step.batch_sharing import Batch
from dtrans.verification.outcome import Report


PAGE = DOCS / "verified.md"
ROWS, RANKS = 12, 3  # floats round 1 / 12 and thirds of it, so exact fractions matter
SMALL = dtrans.Slicing(min_slice_size=1)
SERVERS = "127.0.0.1:1,127.0.0.1:2"
STRATEGIES: Mapping[str, Callable[..., Any]] = {
    "nccl2": lambda main, startup, **o: dtrans.nccl2(main, startup, trainers=3, **o),
    "stage 1": lambda main, startup, **o: dtrans.sharding(
        main, startup, degree=3, stage=1, slices=SMALL, **o
    ),
    "stage 3": lambda main, startup, **o: dtrans.sharding(
        main, startup, degree=3, stage=3, slices=SMALL, **o
    ),
    "pserver": lambda main, startup, **o: dtrans.pserver(
        main, startup, pservers=SERVERS, trainers=3, **o
    ),
    "pipeline": lambda main, startup, **o: dtrans.pipeline(
        main, startup, num_stages=2, num_micro_batch=3, **o
    ),
}
# strategies that only this page has; each is compared at one point, because a replay has many steps
REPLAYED: Mapping[str, Callable[..., Any]] = {
    "async": lambda main, startup, **o: dtrans.pserver(
        main, startup, pservers=SERVERS, trainers=3, mode=dtrans.Async(), **o
    ),
    "GEO": lambda main, startup, **o: dtrans.pserver(
        main, startup, pservers=SERVERS, trainers=3, mode=dtrans.Geo(push_every=1)
    ),
}
COLUMNS = (*STRATEGIES, *REPLAYED)
# modes of parameter servers with a table, and the option `update` of `dtrans.Rows`
ADAPTIVE = dtrans.DelayCompensation(0.5, decay=0.9)
TABLES: Mapping[str, tuple[Any, str]] = {
    "sync": (dtrans.Sync(), "dense"),
    "sync, lazy": (dtrans.Sync(), "lazy"),
    "async": (dtrans.Async(), "dense"),
    "async, lazy": (dtrans.Async(), "lazy"),
    "compensated": (dtrans.Async(delay=ADAPTIVE), "dense"),
    "GEO, lazy": (dtrans.Geo(push_every=2), "lazy"),
}
# the steps that every optimizer of the zoo takes: a mask, statistics of the batch, a loop over time
STEPS = ("masked_mean_and_penalty", "batch_norm_by_hand", "rnn_time_major")
# one optimizer of each class, for all losses of the zoo
CLASSES: Mapping[str, Callable[[], Any]] = {
    "no state": lambda: optax.sgd(0.1),
    "moments": lambda: optax.adamw(1e-2),
    "a norm of all leaves": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    "a norm of each leaf": lambda: optax.lamb(1e-2),
    "rows and columns": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9),
    "products of matrices": lambda: optax.contrib.muon(1e-2),
    "random numbers": lambda: optax.noisy_sgd(1e-2, key=0),
    "every second step": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "a schedule": lambda: optax.inject_hyperparams(optax.sgd)(
        optax.cosine_decay_schedule(0.1, 4), momentum=0.9
    ),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of a plan.

    Attributes:
      report: report of the plan; None if the step is refused.
      refusal: the error.
    """

    report: Report | None
    refusal: str = ""

    def __str__(self) -> str:
        if self.report is None:
            return f"refused: {_in_short(self.refusal)}"
        assert self.report.equal, str(self.report)
        if self.report.complete:
            return "complete"
        return f"incomplete: {'; '.join(map(_in_short, self.report.unevaluated))}"


# part of an error, or of a reason in `unevaluated` -> short text for the page
IN_SHORT: Mapping[str, str] = {
    "values of the full batch": "needs values of the full batch",
    "in a loop or a branch": "the step sums gradients in a loop",
    "is computed from gradients": "a result depends on gradients",
    "which need no gradients": "no gradient was found",
    "is taken at the new": "a gradient is taken after an update",
    "needs the undifferentiated loss": "the step calls jax.grad",
    "near tie": "a tie that rounding decides",
    "which is optimizer state": "the loss or a result reads optimizer state",
    "which only the trainers have": "the update reads an argument",
    "reduces over several blocks": "the optimizer needs all gradients at once",
    "reduces over all rows": "the optimizer needs all rows at once",
    "the update changes all rows": "the optimizer needs all rows at once",
}


def _in_short(text: str) -> str:
    return next((short for long, short in IN_SHORT.items() if long in text), text)


def verify(case: StepCase, strategy: str) -> Outcome:
    """Verify the plan of a step."""
    key = jax.random.key(0)
    main = dtrans.trace(case.step, *jax.eval_shape(case.init, key), *case.batch(ROWS))
    batch = Batch(axes=0 if case.batch_axes is None else case.batch_axes)
    try:
        plan = {**STRATEGIES, **REPLAYED}[strategy](main, dtrans.trace(case.init, key), batch=batch)
    except DtransError as error:
        return Outcome(None, str(error))
    return Outcome(plan.verify(points=(0,)) if strategy in REPLAYED else plan.verify())


def verify_table(optimizer: optimizer_zoo.Case, column: str) -> Outcome:
    """Verify the plan of a step with a table of 11 rows, at one point."""
    mode, update = TABLES[column]
    key, ids = jax.random.key(0), jnp.zeros((ROWS, 2), int)

    def init(key: jax.Array) -> tuple[Any, Any]:
        params: Any = {"emb": jax.random.normal(key, (11, 3)), "w": jnp.linspace(0.5, 2.0, 6)}
        params = optax.LookaheadParams.init_synced(params) if optimizer.pair else params
        return params, optimizer.make().init(params)

    leaf = "params/fast/emb" if optimizer.pair else "params/emb"
    try:
        main = dtrans.trace(optimizer.step(_lookup_loss), *jax.eval_shape(init, key), ids)
        plan = dtrans.pserver(
            main,
            dtrans.trace(init, key),
            pservers=SERVERS,
            trainers=RANKS,
            mode=mode,
            placement=dtrans.BlockPlacement(min_block_size=1),
            sparse={leaf: dtrans.Rows(update)},
        )
    except DtransError as error:
        return Outcome(None, str(error))
    return Outcome(plan.verify(points=(0,)))


def _lookup_loss(params: Any, ids: jax.Array) -> jax.Array:
    """Return the loss of two features from one table: one by index, the other by `jnp.take`."""
    x = jnp.concatenate([params["emb"][ids[:, 0]], jnp.take(params["emb"], ids[:, 1], axis=0)], 1)
    return jnp.mean((jnp.tanh(x) @ params["w"] - 1) ** 2)


def train(case: StepCase, optimizer: optimizer_zoo.Case) -> StepCase:
    """Return a step of the zoo whose loss another optimizer trains."""
    assert case.params is not None and case.loss is not None
    params = case.params

    def init(key: jax.Array) -> tuple[Any, Any]:
        made = params(key)
        made = optax.LookaheadParams.init_synced(made) if optimizer.pair else made
        return made, optimizer.make().init(made)

    return dataclasses.replace(case, init=init, step=optimizer.step(case.loss))


# -- the page --------------------------------------------------------------------------------------

HEAD = f"""# Verified plans of each step

The tests verify plans of these steps by `plan.verify()` ([verify.md](verify.md));
[steps.md](steps.md) describes the steps. No plan differs from the step of one device. *Complete*
means that every number of the state and of the results was compared. *Refused* means that planning
raises an error. Plans have {RANKS} trainers, ranks or micro-batches, two parameter servers, or two
stages; a batch has {ROWS} rows. Pipelines and asynchronous servers refuse batch statistics by
default. With `batch="micro"`, or `batch="local"`, each micro-batch or trainer has its own
statistics. *Async* and *GEO* are compared with a sequential replay, at one point. `make docs`
generates the page.

| step | {" | ".join(COLUMNS)} |
|{" --- |" * (1 + len(COLUMNS))}
"""


TABLES_HEAD = f"""
## Embedding tables

A step looks up rows of a table by two features of a batch; some rows are looked up twice. Servers
update the table in the modes below. *Lazy* is `dtrans.Rows("lazy")`, the other columns are
`dtrans.Rows("dense")`. *Compensated* is `dtrans.Async` with an adaptive `dtrans.DelayCompensation`.
Each plan is compared at one point.

| optimizer | {" | ".join(TABLES)} |
|{" --- |" * (1 + len(TABLES))}
"""


def row(case: StepCase) -> str:
    """Return the line of the page's table for a step."""
    cells = [str(verify(case, strategy)) for strategy in COLUMNS]
    return f"| {case.name} | {' | '.join(cells)} |\n"


def table_row(name: str) -> str:
    """Return the line of the page's table for an optimizer that updates an embedding table."""
    case = optimizer_zoo.Case(lambda: table_jobs.OPTIMIZERS[name])
    cells = [str(verify_table(case, column)) for column in TABLES]
    return f"| {name} | {' | '.join(cells)} |\n"


def page() -> str:
    """Return the page."""
    steps, optimizers = map(row, step_zoo.CASES), map(table_row, table_jobs.OPTIMIZERS)
    return "".join([HEAD, *steps, TABLES_HEAD, *optimizers])


if __name__ == "__main__":
    PAGE.write_text(page())
