"""Removal of a user's meshes and shardings from arrays, constants and contexts.

From JAX 0.8, the type of a value contains the mesh under which it was traced. With Explicit axes,
the type also contains the sharding. So a program that is traced with arrays on a user's mesh could
not run on another mesh. These functions remove meshes and shardings from types, and drop equations
that only place a value. The plan decides placement.

    without_mesh        removes the mesh that `jax.set_mesh` has set while a function runs
    plain_type          the type of an argument
    plain_jaxpr         a jaxpr, with its constants
    plain_array         an array that is passed to a program
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from dtrans._jax.equation_params import is_plain_jit
from dtrans._jax.imports import Atom, ClosedJaxpr, JaxprEqn, Literal, Var
from dtrans._jax.jaxprs import closed, constants, equations, is_traced, map_bodies, opened
from dtrans.errors import TraceError


# primitives that return their operand with another placement
_MOVES = frozenset({"sharding_constraint", "reshard", "mesh_cast"})
_SAYS_WHERE = ("sharding", "out_sharding")  # names of parameters that are placements

P = ParamSpec("P")
R = TypeVar("R")


# -- contexts --------------------------------------------------------------------------------------


def current_mesh() -> Mesh | None:
    """Return the mesh that `jax.set_mesh` has set, if any."""
    if jax.sharding.get_abstract_mesh().empty:
        return None
    mesh: Mesh = jax.sharding.get_mesh()
    return mesh


@contextlib.contextmanager
def within_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Set a mesh, as `jax.set_mesh` does; None removes the current mesh."""
    if mesh is None and jax.sharding.get_abstract_mesh().empty:
        yield
        return
    setting: Any = jax.set_mesh
    with setting(mesh):
        yield


def without_mesh(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it runs without the mesh that `jax.set_mesh` has set."""

    @functools.wraps(fn)
    def run(*args: P.args, **options: P.kwargs) -> R:
        with within_mesh(None):
            return fn(*args, **options)

    return run


# -- arguments and constants -----------------------------------------------------------------------


def plain_type(x: Any) -> Any:
    """Return an array's type without mesh and sharding; return other values unchanged."""
    if isinstance(x, jax.ShapeDtypeStruct) or (isinstance(x, jax.Array) and not is_traced(x)):
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, weak_type=bool(getattr(x, "weak_type", False))
        )
    return x


def plain_array(x: Any) -> Any:
    """Return an array without Explicit axes in its type; its data are not copied."""
    if not isinstance(x, jax.Array) or is_traced(x):
        return x
    at = x.sharding
    if isinstance(at, NamedSharding) and AxisType.Explicit in at.mesh.axis_types:
        auto = Mesh(at.mesh.devices, at.mesh.axis_names)
        return jax.device_put(x, NamedSharding(auto, at.spec, memory_kind=at.memory_kind))
    return x


def _plain_constant(x: Any) -> Any:
    """Return a constant as an uncommitted array, which JAX may move to any device."""
    if (
        not isinstance(x, jax.Array)
        or is_traced(x)
        or not (x.committed or len(x.sharding.device_set) > 1)
    ):
        return x
    if not (x.is_fully_addressable or x.is_fully_replicated):
        raise TraceError(
            f"the step closes over an array of shape {tuple(x.shape)}, and other processes store "
            "parts of this array; pass the array as an argument of the step"
        )
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            _plain_constant(jax.random.key_data(x)), impl=jax.random.key_impl(x)
        )
    return jnp.asarray(np.asarray(x), x.dtype)


# -- jaxprs ----------------------------------------------------------------------------------------


@without_mesh
def plain_jaxpr(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Return a copy of a jaxpr without meshes and shardings in its types and equations."""
    return _Plain().closed(jaxpr)


class _Plain:
    """Rewriter that removes meshes and shardings from jaxprs, each of them only once."""

    def __init__(self) -> None:
        # id of a jaxpr -> (jaxpr, new jaxpr); the reference keeps the id from being reused
        self._met: dict[int, tuple[Any, Any]] = {}

    def closed(self, jaxpr: Any) -> Any:
        values = constants(jaxpr)
        plain = [_plain_constant(c) for c in values]
        if not _is_placed(jaxpr) and all(a is b for a, b in zip(values, plain, strict=True)):
            return jaxpr
        if id(jaxpr) not in self._met:
            self._met[id(jaxpr)] = jaxpr, self._written(jaxpr, plain)
        return self._met[id(jaxpr)][1]

    def _written(self, jaxpr: Any, values: Sequence[Any]) -> Any:
        inner = opened(jaxpr)
        env: dict[Var, Atom] = {}

        def renamed(v: Var) -> Var:
            env[v] = Var(_plain_aval(v.aval))
            return env[v]  # type: ignore[return-value]

        def read(a: Atom) -> Atom:
            if isinstance(a, Literal):
                return Literal(a.val, _plain_aval(a.aval))
            return env[a]

        constvars = [renamed(v) for v in inner.constvars]
        invars = [renamed(v) for v in inner.invars]
        eqns = []
        for eqn in inner.eqns:
            operands = [read(a) for a in eqn.invars]
            if _only_moves(eqn):
                env |= zip(eqn.outvars, operands, strict=True)
                continue
            outs = [renamed(v) for v in eqn.outvars]
            changes = {"invars": operands, "outvars": outs, "params": self._params(eqn)}
            eqns.append(eqn.replace(**changes, ctx=_plain_context(eqn.ctx)))
        new = closed(constvars, values, invars, [read(a) for a in inner.outvars], eqns, jaxpr)
        if isinstance(jaxpr, ClosedJaxpr):
            return new
        return opened(new)

    def _params(self, eqn: JaxprEqn) -> dict[str, Any]:
        # leave `shard_map` unchanged: transforms later refuse a step that communicates
        if eqn.primitive.name == "shard_map":
            return dict(eqn.params)
        params = map_bodies(eqn.params, self.closed)
        if "ctx_mesh" in params:
            asks_nothing = _plain_call()
            params["ctx_mesh"] = asks_nothing["ctx_mesh"]
            for key in ("in_shardings", "out_shardings"):
                params[key] = asks_nothing[key] * len(params[key])
        return params | {key: None for key in _SAYS_WHERE if _places(eqn, key)}


@functools.cache
def _plain_context(context: Any) -> Any:
    """Return the context of an equation (random number mode and the like) without its mesh."""
    with context.manager, jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        (eqn,) = opened(jax.make_jaxpr(lambda x: x + 1)(0.0)).eqns
    return eqn.ctx


@functools.cache
def _plain_call() -> dict[str, Any]:
    """Return the parameters of a `jit` equation without shardings, by tracing an example."""
    with within_mesh(None):
        (eqn,) = opened(jax.make_jaxpr(jax.jit(lambda x: x + 1))(0.0)).eqns
    return eqn.params


def _is_placed(jaxpr: Any) -> bool:
    """Return True if a type or an equation in a jaxpr contains a mesh or a sharding."""
    inner = opened(jaxpr)
    if any(_has_mesh(v.aval) for v in (*inner.constvars, *inner.invars)):
        return True
    return any(_has_placement(e) for e in equations(jaxpr))


def _has_placement(eqn: JaxprEqn) -> bool:
    """Return True if an equation, or the type of an output, contains a mesh or a sharding."""
    if _only_moves(eqn) or not eqn.ctx.cur_abstract_mesh.empty:
        return True
    if "ctx_mesh" in eqn.params and not is_plain_jit(eqn):
        return True
    if any(_places(eqn, key) for key in _SAYS_WHERE):
        return True
    return any(_has_mesh(v.aval) for v in eqn.outvars)


def _places(eqn: JaxprEqn, key: str) -> bool:
    """Return True if the parameter `key` of an equation is a sharding."""
    return isinstance(eqn.params.get(key), Sharding)


def _only_moves(eqn: JaxprEqn) -> bool:
    """Return True if an equation only places an array on devices, so that it can be dropped."""
    if eqn.primitive.name == "device_put":
        targets = eqn.params["devices"]
        return all(
            isinstance(d, (Sharding, jax.Device)) and _is_memory_of_device(d) for d in targets
        )
    return eqn.primitive.name in _MOVES


def _is_memory_of_device(target: Any) -> bool:
    kind = getattr(target, "memory_kind", None)
    return kind in (None, "device") or not isinstance(target, Sharding)


def _has_mesh(aval: Any) -> bool:
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and not mesh.empty


def _plain_aval(aval: Any) -> Any:
    if _has_mesh(aval):
        return aval.update(sharding=None)
    return aval
