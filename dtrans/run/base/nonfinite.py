"""Check for infinities and NaNs in gradients, on the trainer that computed them.

Runners have the option `on_nonfinite`: "ignore", "warn" or "error". With "warn" and "error", each
trainer checks its gradients before it reduces or sends them. After a reduction, all trainers would
have the NaN, and no error could name the trainer that computed it.

With collectives, the compiled step checks each bucket before its first reduction. If a gradient is
not finite, a host callback records this, and the step continues. A later step, or a read of the
state, raises the error. Loops that scatter gradients layer by layer (`dtrans.sharding`) check each
layer.

With parameter servers, trainers check gradients before they send them. So servers receive only
finite gradients.

Source: FLAGS_check_nan_inf of Paddle, which checks the outputs of every operator.
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


class NonfiniteCheck:
    """Check that finds infinities and NaNs in gradients.

    Args:
      reaction: the reaction to a gradient that is not finite: "ignore", "warn" or "error".

    Raises:
      ConfigError: `reaction` is none of these values.
    """

    def __init__(self, reaction: str = "ignore") -> None:
        check_one_of("on_nonfinite", reaction, ON_NONFINITE)
        self.reaction = reaction
        self._found: list[str] = []

    @property
    def enabled(self) -> bool:
        """True unless the reaction is "ignore"."""
        return self.reaction != "ignore"

    def note(self, trainer: int | None, names: Sequence[str]) -> None:
        """Warn about gradients that are not finite, or record them for `check` to raise an error.

        Args:
          trainer: the trainer that computed the gradients; None if each name already contains it.
          names: names of the gradients.
        """
        owner = "" if trainer is None else f" of trainer {trainer}"
        more = f", ... ({len(names)})" if len(names) > 5 else ""
        message = f"gradients{owner} are not finite: {', '.join(names[:5])}{more}"
        if self.reaction == "warn":
            warnings.warn(message, NonfiniteWarning, stacklevel=2)
        else:
            self._found.append(message)

    def check(self, *, wait: bool = False) -> None:
        """Raise NonfiniteError if `note` has recorded gradients that are not finite.

        Args:
          wait: True to wait first for the callbacks of steps that still run.
        """
        if not self.enabled:
            return
        if wait:
            jax.effects_barrier()
        if self._found:
            found, self._found = self._found, []
            raise NonfiniteError("; ".join(dict.fromkeys(found)))

    # -- arrays on the host ----------------------------------------------------------------------

    def check_values(self, named: Iterable[tuple[str, Any]]) -> None:
        """Check gradients before they are sent.

        Args:
          named: pairs (name, gradient); names contain the trainer.

        Raises:
          NonfiniteError: a gradient is not finite, and the reaction is "error".
        """
        if not self.enabled:
            return
        bad = [name for name, x in named if not all_finite(np.asarray(x))]
        if bad:
            self.note(None, bad)
            self.check()

    # -- compiled steps --------------------------------------------------------------------------

    def rules(
        self, rules: Rules, buckets: Mapping[str, Sequence[str]], over: Sequence[str]
    ) -> Rules:
        """Return implementations of collectives that also check gradients before their sum.

        The result remembers which reductions it has checked, so use it for only one trace.

        Args:
          rules: the implementation of each communication primitive.
          buckets: names of the gradients in each reduction, by the name of the reduction. A
            hierarchical sum has several reductions with one name, and only the first is checked.
          over: the mesh axes of the trainers.
        """
        if not self.enabled:
            return rules
        seen: set[str] = set()

        def add_check(rule: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
            def run(*xs: Any, name: str, **params: Any) -> Sequence[Any]:
                if name == LAYERS:
                    self._check_traced(xs, ["layers of a loop"], over)
                elif name in buckets and name not in seen:
                    seen.add(name)
                    self._check_traced(xs, buckets[name], over)
                return rule(*xs, name=name, **params)

            return run

        checked = dict(rules)
        for record in COLLECTIVES.values():
            if record.reduces:
                checked[record.primitive] = add_check(rules[record.primitive])
        return checked

    def _check_traced(self, xs: Sequence[Any], leaves: Sequence[str], over: Sequence[str]) -> None:
        floats = [x for x in xs if jnp.issubdtype(x.dtype, jnp.inexact)]
        if not floats:
            return
        # if an array packs several leaves, the error names all of them
        names = list(leaves)
        if not len(leaves) == len(xs) == len(floats):
            names = [", ".join(leaves)] * len(floats)
        # Check sums first, because a sum reads each element only once, at memory bandwidth. A sum
        # of finite elements may overflow. So if a sum is not finite, a branch checks each element.
        fine = jnp.stack([jnp.isfinite(x.sum()) for x in floats]).all()
        index = jax.lax.axis_index(tuple(over)) if over else jnp.int32(0)
        jax.lax.cond(fine, _ignore, functools.partial(self._call, names), index, *floats)

    def _call(self, names: Sequence[str], index: jax.Array, *xs: jax.Array) -> None:
        fine = jnp.stack([jnp.isfinite(x).all() for x in xs])
        jax.debug.callback(functools.partial(self._on_callback, names), fine, index)

    def _on_callback(self, names: Sequence[str], fine: Any, index: Any) -> None:
        bad = [n for n, good in zip(names, np.asarray(fine), strict=True) if not good]
        if bad:  # under vmap, every trainer runs this branch, even if its gradients are finite
            self.note(int(index), list(dict.fromkeys(bad)))


def _ignore(index: jax.Array, *xs: jax.Array) -> None:
    pass


def all_finite(x: np.ndarray) -> bool:
    """Return True if no element is an infinity or a NaN."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return True
    # the sum is faster to check, but may overflow, so check each element if the sum is not finite
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(x.sum())) or bool(np.isfinite(x).all())
