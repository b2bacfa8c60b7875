"""How the batch of a step is shared: a record of options that all strategies take."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from dtrans.checks import check_one_of
from dtrans.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Batch:
    """How a batch is shared, and how the results of its parts are merged.

    Attributes:
      unsplit_inputs: names of batch arrays that every trainer gets whole. Others are split on dim 0; 0-d arrays go to
        every trainer, a `jax.random.key` folded with the trainer's number unless it is named here.
      example_count: the name of a result, a scalar that says how many examples a trainer's part of the batch has. It is
        itself added up.
      merge: how results are merged, and parameters that the optimizer does not make (batch statistics), by name:
        "mean", "sum" (of parameters: of what trainers add to them), "max", "concat" (on dim 0), "each" (a leading axis,
        one row per trainer), or "same" (they are equal anyway). By default what grows with the batch is concatenated,
        other floating-point results are reduced as gradients are, and parameters averaged; other results get a row per
        trainer. What is computed from gradients is computed from the reduced ones, or with `local_sgd` in each step
        from its own. Parameter servers have ways of their own, see `dtrans.pserver`.

    Raises:
      ConfigError: what are no names.

    Example:
      >>> import dtrans
      >>> dtrans.Batch(unsplit_inputs=["class_weights"], merge={"aux/hits": "sum"}).unsplit_inputs
      ('class_weights',)
    """

    unsplit_inputs: Collection[str] = ()
    example_count: str | None = None
    merge: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        names: Any = self.unsplit_inputs
        merge: Any = self.merge
        if isinstance(names, str) or not isinstance(names, Collection):
            raise ConfigError(f"unsplit_inputs={names!r} must be a collection of names of batch arrays")
        if not isinstance(merge, Mapping) or not all(isinstance(n, str) for n in merge):
            raise ConfigError(f"merge={merge!r} must say for each name how to merge it, such as {{'aux': 'sum'}}")
        object.__setattr__(self, "unsplit_inputs", tuple(names))
        object.__setattr__(self, "merge", dict(merge))

    def check_merge(self, ways: Collection[str]) -> None:
        """Raise ConfigError for a way to merge that a strategy does not have."""
        for name, way in self.merge.items():
            check_one_of(f"merge[{name!r}]", way, ways)
