"""Padding of the state of a job, and checks of the state that a user passes to a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from dtrans._jax import is_traced
from dtrans.engine.layout import Sliced
from dtrans.errors import StateError
from dtrans.ir.array_fns import padded_to


def with_padding(x: Any, slices_by_axis: Mapping[str, Sliced]) -> Any:
    """Pad an array of a job's state, so that its devices can store equal slices.

    Args:
      x: the array.
      slices_by_axis: the slices along each mesh axis, by the name of the axis.
    """
    for sliced in slices_by_axis.values():
        x = padded_to(x, sliced.axis, sliced.padded)
    return x


def missing_array(name: str) -> StateError:
    """Return the error to raise if a state lacks an array of the job."""
    return StateError(
        f"this state belongs to another job: it lacks {name}; pass a state that init or step of "
        "this job returned"
    )


def check_kind(state: Any, kind: type, method: str = "step") -> None:
    """Raise StateError if a state does not have the class that `init` and `step` return."""
    if not isinstance(state, kind):
        raise StateError(
            f"{method} takes the state that init or step returned, not {type(state).__name__}"
        )


def check_arrays(arrays: Iterable[tuple[str, Any]], *, donates: bool) -> None:
    """Raise StateError for an array that cannot be donated: it was donated before, or occurs twice.

    A donated array's memory is reused, so the array can no longer be read.

    Args:
      arrays: arrays of the state, with their names.
      donates: True if the step will donate the arrays.
    """
    seen: dict[int, str] = {}
    for n, x in arrays:
        # NumPy arrays (of a checkpoint) and traced arrays cannot be donated, so skip them
        if not isinstance(x, jax.Array) or is_traced(x):
            continue
        # raise the error here, because JAX does not always check this, and never names the array
        if x.is_deleted():
            raise StateError(
                f"a step has already used this state, and its {n} was donated to that step; use "
                "the state that the step returned, or a job with donate=False"
            )
        if seen.setdefault(id(x), n) != n and donates:
            raise StateError(
                f"{n} and {seen[id(x)]} are one array, whose memory cannot be donated twice; copy "
                "one of them (jnp.copy), or use a job with donate=False"
            )


def check_types(arrays: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Raise StateError if an array of a state is missing, or has another shape or dtype.

    Args:
      arrays: arrays of the state, by name.
      types: types of the job's arrays, by name.
    """
    for n, t in types.items():
        if n not in arrays:
            raise missing_array(n)
        x = arrays[n]
        if (x.shape, x.dtype) != (t.shape, t.dtype):
            raise StateError(
                f"this state belongs to another job: {n} is {x.dtype}{list(x.shape)}, expected "
                f"{t.dtype}{list(t.shape)}; use dtrans.checkpoint.save and restore to move a state "
                "from one plan to another"
            )
