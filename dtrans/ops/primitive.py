"""Communication primitives: JAX can trace them, but raises an error if it runs them.

Collectives among trainers also have a lowering to collectives over named axes of JAX. A runner that
maps a program over named axes (with `jax.vmap` or `jax.shard_map`) uses the lowering.

Data dependencies define the order of equations. An equation outputs a *token*, an empty boolean
array, which is an operand of all equations that must run later. (Without tokens XLA would reorder
host callbacks, and the job would deadlock.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import jax.numpy as jnp

from dtrans._jax import Primitive, ShapedArray, new_primitive
from dtrans.errors import NotRunnableError


def token() -> ShapedArray:
    """Return the type of a token, an array without data that orders equations."""
    return ShapedArray((0,), jnp.bool_)


# Function of (*operands, **params) that returns the results.
Lowering: TypeAlias = Callable[..., Sequence[Any]]
OVER_AXIS: dict[Primitive, Lowering] = {}  # lowerings over named axes
UNDER_VMAP: dict[Primitive, Lowering] = {}  # lowerings under vmap, where `OVER_AXIS` fails


def communication(
    name: str,
    abstract_eval: Callable[..., Sequence[Any]],
    *,
    over_axis: Lowering | None = None,
    under_vmap: Lowering | None = None,
) -> Primitive:
    """Return a primitive that a runner (`dtrans.run`) must implement.

    Args:
      name: name of the primitive.
      abstract_eval: function of (*operand types, **parameters) that returns the types of the
        results.
      over_axis: lowering in a program that is mapped over named axes.
      under_vmap: lowering under `vmap`, if `over_axis` does not work there.
    """

    def refuse(*args: Any, **params: Any) -> NoReturn:
        raise NotRunnableError(
            f"`{name}` communicates, so the program cannot be called as a function; run it with "
            "dtrans.Executor(), or run the full job with plan.on_mesh()"
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
