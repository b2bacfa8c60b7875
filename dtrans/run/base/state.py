"""Checks of the state that a step is given: whether it is one of this job, and still there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from dtrans._jax import is_traced
from dtrans.errors import StateError


def check_kind(state: Any, kind: type) -> None:
    """Raises StateError for what no `init` or `step` of such a job returned."""
    if not isinstance(state, kind):
        raise StateError(
            f"step takes the state that init or step returned, not {type(state).__name__}"
        )


def check_arrays(held: Iterable[tuple[str, Any]], *, donates: bool) -> None:
    """Raises StateError for arrays whose memory was given away, or would be given away twice."""
    seen: dict[int, str] = {}
    for n, x in held:
        # NumPy's, if the state comes from a checkpoint; a step that is traced has no memory yet
        if not isinstance(x, jax.Array) or is_traced(x):
            continue
        if x.is_deleted():  # JAX would look for its memory, and not always find out
            raise StateError(
                f"this state was already stepped from, and {n} in it was donated to that step; "
                "use the state that step returned, or a job with donate=False"
            )
        if seen.setdefault(id(x), n) != n and donates:  # nor that it was to give its memory twice
            raise StateError(
                f"{n} and {seen[id(x)]} are one array, whose memory cannot be donated twice: copy "
                "one of them "
                "(jnp.copy), or use a job with donate=False"
            )


def check_types(held: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Raises StateError for arrays of other shapes or types than a job has: a state of another
    plan.

    Args:
      types: of the arrays of the job, by name.
    """
    for n, t in types.items():
        if n not in held:
            raise StateError(f"this is not a state of this job: it has no {n}")
        x = held[n]
        if (x.shape, x.dtype) != (t.shape, t.dtype):
            raise StateError(
                f"this is not a state of this job: {n} is {x.dtype}{list(x.shape)} in it, and "
                f"{t.dtype}{list(t.shape)} "
                "here; dtrans.checkpoint.save and restore take a state from one plan to another"
            )
