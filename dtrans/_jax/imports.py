"""Imports from outside JAX's documented API.

`jax.extend` and `jax.interpreters` may change in any release. For each imported name,
docs/longevity.md says why dtrans needs it and what could replace it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jax.core import ShapedArray as ShapedArray
from jax.experimental import multihost_utils as multihost_utils
from jax.experimental.multihost_utils import (
    ProcessFailureError as ProcessFailureError,
    live_devices as live_devices,
)
from jax.extend.backend import register_backend_factory as register_backend_factory
from jax.extend.core import (
    Primitive as Primitive,
    jaxpr_as_fun as jaxpr_as_fun,
    jaxprs_in_params as jaxprs_in_params,
)
from jax.extend.random import threefry2x32_p as threefry2x32_p
from jax.interpreters import (
    ad as ad,
    batching as batching,
    mlir as mlir,
    partial_eval as partial_eval,
)


if TYPE_CHECKING:
    # Stubs of JAX's IR classes. JAX types `aval` as an abstract value without shape and dtype, but
    # values here always have both. From 0.11, Jaxpr and ClosedJaxpr are one class.
    class Var:
        aval: Any

        def __init__(self, aval: Any) -> None: ...

    class Literal:
        aval: Any
        val: Any

        def __init__(self, val: Any, aval: Any) -> None: ...

    class JaxprEqn:
        primitive: Any
        params: dict[str, Any]
        invars: list[Var | Literal]
        outvars: list[Var]
        effects: Any
        source_info: Any
        ctx: Any

        def replace(self, **changes: Any) -> JaxprEqn: ...

    class Jaxpr:
        constvars: list[Var]
        invars: list[Var]
        outvars: list[Var | Literal]
        eqns: list[JaxprEqn]
        effects: Any
        debug_info: Any

        def __init__(
            self,
            constvars: Sequence[Var],
            invars: Sequence[Var],
            outvars: Sequence[Var | Literal],
            eqns: Sequence[JaxprEqn],
            effects: Any,
            debug_info: Any,
        ) -> None: ...

        def replace(self, **changes: Any) -> Jaxpr: ...

    class ClosedJaxpr:
        jaxpr: Jaxpr
        consts: list[Any]

        def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> None: ...

    def new_jaxpr_eqn(
        invars: Sequence[Var | Literal],
        outvars: Sequence[Var],
        primitive: Any,
        params: dict[str, Any],
        effects: Any,
    ) -> JaxprEqn: ...
else:
    from jax.extend.core import (
        ClosedJaxpr as ClosedJaxpr,
        Jaxpr as Jaxpr,
        JaxprEqn as JaxprEqn,
        Literal as Literal,
        Var as Var,
        new_jaxpr_eqn as new_jaxpr_eqn,
    )


Atom = Var | Literal
