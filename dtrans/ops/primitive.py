"""Communication primitives: each has a type, and an error for a function that calls it.

Collectives among trainers also have a lowering over named axes of JAX. A realiser uses it where it
maps a program over them; elsewhere the primitive has no lowering.

Data orders equations: one that must follow another takes its *token*, an empty boolean array. (XLA
would reorder unordered host callbacks, and deadlock the job.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import jax.numpy as jnp

from dtrans._jax import Primitive, ShapedArray, new_primitive
from dtrans.errors import NotRealisedError


def token() -> ShapedArray:
    """Return the type of a token: it orders equations and has no data."""
    return ShapedArray((0,), jnp.bool_)


Lowering: TypeAlias = Callable[..., Sequence[Any]]  # (*operands, **params) to results
OVER_AXIS: dict[Primitive, Lowering] = {}
UNDER_VMAP: dict[Primitive, Lowering] = {}  # replace `OVER_AXIS` under vmap


def communication(
    name: str,
    abstract_eval: Callable[..., Sequence[Any]],
    *,
    over_axis: Lowering | None = None,
    under_vmap: Lowering | None = None,
) -> Primitive:
    """Return a primitive that only a realiser can carry out.

    Args:
      name: name of the primitive.
      abstract_eval: returns the types of its results.
      over_axis: lowering in JAX, where a program is mapped over named axes.
      under_vmap: lowering under `vmap`, if `over_axis` does not work there.
    """

    def refuse(*args: Any, **params: Any) -> NoReturn:
        raise NotRealisedError(
            f"`{name}` is communication, which a plain function cannot carry out; run the program "
            "with dtrans.Executor(), or the whole job with plan.on_mesh()"
        )

    primitive = new_primitive(
        name, types=abstract_eval, impl=refuse, lower=refuse, multiple_results=True
    )
    primitive.communicates = True  # type: ignore[attr-defined]
    if over_axis is not None:
        OVER_AXIS[primitive] = over_axis
    if under_vmap is not None:
        UNDER_VMAP[primitive] = under_vmap
    return primitive
