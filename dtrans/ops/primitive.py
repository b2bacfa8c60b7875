"""What all communication primitives share: a type, no lowering, and an error that says so.

Order is by data: what must come after something takes its *token*, an empty boolean array. (Unordered host
callbacks would be reordered by XLA, and the job dead-locks.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax.numpy as jnp

from dtrans._jax import Primitive, ShapedArray, new_primitive
from dtrans.errors import NotRealisedError


def token() -> ShapedArray:
    """The type of a token: it orders equations and carries nothing."""
    return ShapedArray((0,), jnp.bool_)


def communication(name: str, abstract_eval: Callable[..., Sequence[Any]]) -> Primitive:
    """A primitive that only a realiser can carry out. `abstract_eval` gives its output types."""

    def refuse(*args: Any, **params: Any) -> NoReturn:
        raise NotRealisedError(
            f"`{name}` is communication, which a plain function cannot carry out: run the program with "
            "dtrans.Executor(), "
            "or the whole job with plan.on_mesh()"
        )

    primitive = new_primitive(name, types=abstract_eval, impl=refuse, lower=refuse, multiple_results=True)
    primitive.communicates = True  # type: ignore[attr-defined]
    return primitive
