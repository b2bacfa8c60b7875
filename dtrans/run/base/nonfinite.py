"""Gradients that are not finite, found on the trainer where they are.

A realiser takes `on_nonfinite`: "ignore", "warn" or "error". Then each trainer looks at its own
gradients before they are reduced or sent, and names those with an infinity or a NaN in them: after
that they are everybody's.

    collectives        in the compiled step, before the first reduction of each bucket. A host callback hears of it, if
                       there is something to hear of, so that a step never waits. An error comes
                       with a later step, or with what reads the state
    parameter servers  where gradients are sent. An error comes before, and no server has them

A gradient that a loop scatters layer by layer (stage 3 of sharding) is looked at in the loop.

Source: FLAGS_check_nan_inf of Paddle, which looks at the outputs of every operator.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.checks import check_one_of
from dtrans.errors import NonfiniteError, NonfiniteWarning
from dtrans.ops import COLLECTIVES, LAYERS
from dtrans.run.base.segments import Rules


ON_NONFINITE = ("ignore", "warn", "error")


class GradientWatch:
    """Looks at gradients, and says which are not finite.

    Args:
      how: "ignore", "warn" or "error".

    Raises:
      ConfigError: another word.
    """

    def __init__(self, how: str = "ignore") -> None:
        check_one_of("on_nonfinite", how, ON_NONFINITE)
        self.how = how
        self._found: list[str] = []

    @property
    def looks(self) -> bool:
        """Whether it looks at all."""
        return self.how != "ignore"

    def hear(self, trainer: int | None, names: Sequence[str]) -> None:
        """Take note of gradients that are not finite: warn, or keep what `check` raises.

        Args:
          trainer: whose they are; None where the names say it.
        """
        whose = "" if trainer is None else f" of trainer {trainer}"
        many = f"{', '.join(names[:5])}{f', ... ({len(names)})' if len(names) > 5 else ''}"
        said = f"gradients{whose} are not finite: {many}"
        if self.how == "warn":
            warnings.warn(said, NonfiniteWarning, stacklevel=2)
        else:
            self._found.append(said)

    def check(self, *, wait: bool = False) -> None:
        """Raise NonfiniteError for what was heard.

        Args:
          wait: first for steps that are under way.
        """
        if not self.looks:
            return
        if wait:
            jax.effects_barrier()
        if self._found:
            found, self._found = self._found, []
            raise NonfiniteError("; ".join(dict.fromkeys(found)))

    # -- arrays of the host, and of the devices of a mesh
    # ----------------------------------------------

    def look(self, named: Iterable[tuple[str, Any]]) -> None:
        """Look at what is about to be sent, under names that say whose it is. Raises
        NonfiniteError."""
        if not self.looks:
            return
        bad = [name for name, x in named if not all_finite(np.asarray(x))]
        if bad:
            self.hear(None, bad)
            self.check()

    # -- inside of a compiled step
    # ---------------------------------------------------------------------

    def rules(
        self, rules: Rules, buckets: Mapping[str, Sequence[str]], over: Sequence[str]
    ) -> Rules:
        """Rules that look at the operands of reductions first. They are for one trace of a program.

        Args:
          rules: those of all communication.
          buckets: the leaves of each reduction of gradients, by its name; where it is reduced
            twice, in a node and among nodes, the first is looked at.
          over: the axes that trainers are on.
        """
        if not self.looks:
            return rules
        seen: set[str] = set()

        def looking(rule: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
            def run(*xs: Any, name: str, **params: Any) -> Sequence[Any]:
                if name == LAYERS:
                    self._look_inside(xs, ["layers of a loop"], over)
                elif name in buckets and name not in seen:
                    seen.add(name)
                    self._look_inside(xs, buckets[name], over)
                return rule(*xs, name=name, **params)

            return run

        reductions = [record.primitive for record in COLLECTIVES.values() if record.reduces]
        return {**rules, **{p: looking(rules[p]) for p in reductions}}

    def _look_inside(self, xs: Sequence[Any], leaves: Sequence[str], over: Sequence[str]) -> None:
        each = [x for x in xs if jnp.issubdtype(x.dtype, jnp.inexact)]
        if not each:
            return
        # leaves that are packed into one array, or share one, are named together
        names = (
            list(leaves) if len(leaves) == len(xs) == len(each) else [", ".join(leaves)] * len(each)
        )
        # sums tell, at the speed of memory, unless they overflow themselves: only then is each
        # element looked at
        fine = jnp.stack([jnp.isfinite(x.sum()) for x in each]).all()
        index = jax.lax.axis_index(tuple(over)) if over else jnp.int32(0)
        jax.lax.cond(fine, _nothing, functools.partial(self._call, names), index, *each)

    def _call(self, names: Sequence[str], index: jax.Array, *xs: jax.Array) -> None:
        fine = jnp.stack([jnp.isfinite(x).all() for x in xs])
        jax.debug.callback(functools.partial(self._called, names), fine, index)

    def _called(self, names: Sequence[str], fine: Any, index: Any) -> None:
        bad = [n for n, good in zip(names, np.asarray(fine), strict=True) if not good]
        if bad:  # under vmap, which knows no branches, it is called for all
            self.hear(int(index), list(dict.fromkeys(bad)))


def _nothing(index: jax.Array, *xs: jax.Array) -> None:
    pass


def all_finite(x: np.ndarray) -> bool:
    """Whether no element is an infinity or a NaN. The sum tells, at the speed of memory, unless it
    overflows itself."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(x.sum())) or bool(np.isfinite(x).all())
