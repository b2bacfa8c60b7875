"""Checks of the state that a step takes: it belongs to this job, and its memory is still there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from dtrans._jax import is_traced
from dtrans.errors import StateError


def check_kind(state: Any, kind: type) -> None:
    """Raise StateError unless a state has the class that `init` and `step` of a job return."""
    if not isinstance(state, kind):
        raise StateError(
            f"step takes the state that init or step returned, not {type(state).__name__}"
        )


def check_arrays(arrays: Iterable[tuple[str, Any]], *, donates: bool) -> None:
    """Raise StateError for an array that was donated before, or that would be donated twice."""
    seen: dict[int, str] = {}
    for n, x in arrays:
        # arrays of a checkpoint are NumPy's; traced arrays have no memory
        if not isinstance(x, jax.Array) or is_traced(x):
            continue
        # JAX does not check this in every case, and its error names no array
        if x.is_deleted():
            raise StateError(
                f"this state was already stepped from, and {n} in it was donated to that step; "
                "use the state that step returned, or a job with donate=False"
            )
        if seen.setdefault(id(x), n) != n and donates:
            raise StateError(
                f"{n} and {seen[id(x)]} are one array, whose memory cannot be donated twice: copy "
                "one of them (jnp.copy), or use a job with donate=False"
            )


def check_types(arrays: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Raise StateError for a state of another plan: an array has another shape or dtype.

    Args:
      arrays: arrays of the state, by name.
      types: types of the job's arrays, by name.
    """
    for n, t in types.items():
        if n not in arrays:
            raise StateError(f"this is not a state of this job: it has no {n}")
        x = arrays[n]
        if (x.shape, x.dtype) != (t.shape, t.dtype):
            raise StateError(
                f"this is not a state of this job: {n} is {x.dtype}{list(x.shape)} in it, and "
                f"{t.dtype}{list(t.shape)} here; "
                "dtrans.checkpoint.save and restore take a state from one plan to another"
            )
