"""Generator of `docs/combinations.md`: pairs and triples of features in one plan.

python tests/support/mesh_table.py     writes the page again (`make docs`)
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from paths import DOCS


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)  # before a module makes an array
    jax.config.update("jax_num_cpu_devices", 8)

from helpers import tree_close
from mesh_models import (
    WIDTH,
    array,
    attention,
    block_params,
    expert_params,
    experts,
    job_of,
    normed,
)
from pipeline_models import Job

import dtrans
from dtrans.errors import DtransError


PAGE = DOCS / "combinations.md"
ROWS, TOKENS = 4, 8
ZERO = {"ZeRO 1": 1, "ZeRO 2": 2, "ZeRO 3": 3}
FEATURES = (
    "data",
    "split",
    "experts",
    "sequence",
    *ZERO,
    "micro-batches",
    "pipeline",
    "offload",
)
Features = Collection[str]


class NoOptionError(DtransError):
    """Error: no option asks for a combination."""


def model(features: Features) -> Job:
    """Return a step of a transformer's block, whose second layer has experts.

    The layers have `dtrans.split` scopes only if the features need them.
    """
    params = {**block_params(), **expert_params()}

    def scope(name: str) -> Any:
        is_split = "split" in features and name != "experts"
        is_split |= "experts" in features and name == "experts"
        return dtrans.split(name=name, device_count=2) if is_split else contextlib.nullcontext()

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = normed(x, params["norm1"])
        with scope("attention"):
            h = attention(params, h)
        x = x + h
        h = normed(x, params["norm2"])
        with scope("mlp"):
            h = jax.nn.gelu(h @ params["up"] + params["up_b"]) @ params["down"]
        x = x + h + params["down_b"]
        x = x + experts(params, x, scope)
        return jnp.mean((x - y) ** 2)

    shape = (ROWS, TOKENS, WIDTH)
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.05))
    return job_of(loss, params, (array(*shape) * 4, array(*shape, seed=1)), clipped)


def plan_of(step: Job, features: Features) -> Any:
    """Plan a step with some features.

    Raises:
      DtransError: the features cannot be combined.
    """
    stage = next((ZERO[name] for name in ZERO if name in features), 0)
    micro = 2 if "micro-batches" in features else 1
    if "pipeline" in features:
        if "sequence" in features:
            raise NoOptionError("stages do not divide sequences")
        memory = dtrans.StageMemory(
            sharding_stage=stage, min_slice_size=0, offload="offload" in features
        )
        replicas = 2 if stage or "data" in features else 1
        return dtrans.pipeline(
            *step.traced(), num_stages=2, num_micro_batch=micro, replicas=replicas, memory=memory
        )
    if "offload" in features:
        raise NoOptionError("only stages of pipelines have an option for offload")
    mesh = {"data": 2 if stage or "data" in features else 1}
    mesh |= {"model": 2} if {"split", "experts"} & {*features} else {}
    mesh |= {"sequence": 2} if "sequence" in features else {}
    if not stage:
        return dtrans.nccl2(*step.traced(), mesh=mesh, num_micro_batch=micro)
    slices = dtrans.Slicing(min_slice_size=0)
    return dtrans.sharding(
        *step.traced(), mesh=mesh, stage=stage, num_micro_batch=micro, slices=slices
    )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of a combination.

    Attributes:
      refusal: text of the error; "" if the plan computes the numbers of one device.
    """

    refusal: str = ""

    @property
    def cell(self) -> str:
        """Text of a cell: the reason of the error, without its remedy."""
        return self.refusal.split("; ")[0] if self.refusal else "equal"


def combine(features: Features) -> Outcome:
    """Plan a combination, verify the plan, and run its job.

    Raises:
      AssertionError: the plan is not verified completely, or the job has other numbers than one
        device.
    """
    step = model(features)
    try:
        plan = plan_of(step, features)
    except DtransError as error:
        return Outcome(str(error))
    report = plan.verify()
    assert report.equal and report.complete, (features, str(report))
    tree_close(step.of(plan.on_mesh()), step.on_one_device(), 1e-12)
    return Outcome()


def combinations(size: int) -> Iterator[tuple[str, ...]]:
    """Yield the combinations of features, without those with two stages of ZeRO."""
    for features in itertools.combinations(FEATURES, size):
        if len(ZERO.keys() & {*features}) < 2:
            yield features


# -- the page --------------------------------------------------------------------------------------

HEAD = """# Combinations of strategies

Which features can one plan combine? Each cell stands for one plan with the features of its row and
column. All plans are for the same model: a transformer block with a mixture of experts.

- *equal*: `plan.verify()` compared every number. Three steps on eight devices also have the numbers
  of one device, with an error of at most 1e-12.
- *-*: two stages of ZeRO exclude each other.
- All other cells give the reason for which planning refuses the combination.

`make docs` generates the page. These are the features:

- *data*: a batch that trainers, ranks or replicas divide.
- *split*: attention and MLP in `dtrans.split` scopes. *experts*: experts in such a scope.
- *sequence*: an axis "sequence" of a [mesh](mesh.md#sequences).
- *ZeRO*: `dtrans.sharding`, or `sharding_stage` of a pipeline.
- *micro-batches*: `num_micro_batch=2`. *pipeline*: two stages.
- *offload*: the host stores the state.
"""


def page() -> str:
    """Return the text of the page."""
    cells = {features: combine(features).cell for features in combinations(2)}
    lines = [f"| | {' | '.join(FEATURES[:-1])} |", f"| --- {'| --- ' * (len(FEATURES) - 1)}|"]
    for k, row in enumerate(FEATURES[1:], 1):
        texts = [cells.get((column, row), "-") for column in FEATURES[:k]]
        lines.append(f"| {row} | {' | '.join(texts)} {'| ' * (len(FEATURES) - 1 - k)}|")
    triples = ["| features | outcome |", "| --- | --- |"]
    for features in combinations(3):
        if all(cells[pair] == "equal" for pair in itertools.combinations(features, 2)):
            triples.append(f"| {', '.join(features)} | {combine(features).cell} |")
    table, more = "\n".join(lines), "\n".join(triples)
    return (
        f"{HEAD}\n## Pairs\n\n{table}\n\n## Triples\n\n"
        f"Triples of features whose pairs are all equal.\n\n{more}\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page())
