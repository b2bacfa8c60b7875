"""Communication primitives: each has a type, and an error for a function that calls it.

Those among trainers also have a lowering over named axes of JAX. A realiser uses it where it maps a
program over them; everywhere else the primitive has no lowering.

Order is by data: what must come after something takes its *token*, an empty boolean array.
(Unordered host callbacks would be reordered by XLA, and the job dead-locks.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import jax.numpy as jnp

from dtrans._jax import Primitive, ShapedArray, new_primitive
from dtrans.errors import NotRealisedError


def token() -> ShapedArray:
    """The type of a token: it orders equations and carries nothing."""
    return ShapedArray((0,), jnp.bool_)


Lowering: TypeAlias = Callable[..., Sequence[Any]]  # of operands and parameters, to results
OVER_AXIS: dict[Primitive, Lowering] = {}
UNDER_VMAP: dict[Primitive, Lowering] = {}  # those that vmap needs in place of `OVER_AXIS`


def communication(
    name: str,
    abstract_eval: Callable[..., Sequence[Any]],
    *,
    over_axis: Lowering | None = None,
    under_vmap: Lowering | None = None,
) -> Primitive:
    """Return a primitive that only a realiser can carry out.

    Args:
      abstract_eval: returns the types of its results.
      over_axis: the same in JAX, where a program is mapped over named axes.
      under_vmap: the same where `vmap` maps it, if `over_axis` does not suit that.
    """

    def refuse(*args: Any, **params: Any) -> NoReturn:
        raise NotRealisedError(
            f"`{name}` is communication, which a plain function cannot carry out: run the program "
            "with "
            "dtrans.Executor(), "
            "or the whole job with plan.on_mesh()"
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
