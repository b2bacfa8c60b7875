"""Programs of shards, on one device or on several devices, compared with the original function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from dtrans._jax import equations, lowered_jaxpr
from dtrans.engine.layout import Shards, sharded_along
from dtrans.engine.split import split
from dtrans.ir.program import is_communication
from dtrans.ops.all_to_all import all_to_all_p
from dtrans.run.base.lowering import OVER_AXIS
from dtrans.run.base.segments import interpret


AXIS = "shard"


def quick(fn):
    """Compile a function in less time than usual."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


def _exchanged(*xs, over, cut, joined, **_):
    return [lax.all_to_all(x, over, cut, joined, tiled=True) for x in xs]


RULES = {**OVER_AXIS, all_to_all_p: _exchanged}


def one_shard(program):
    """Return the program of a shard as a function of flat arrays."""
    inner, consts = program.jaxpr.jaxpr, program.jaxpr.consts

    def run(*args):
        env = {
            **dict(zip(inner.constvars, consts, strict=True)),
            **dict(zip(inner.invars, args, strict=True)),
        }
        return interpret(inner.eqns, env, inner.outvars, RULES)

    return run


def pieces_of(x, axis, shards):
    """Return the pieces of an array, padded with zeros, on a new first dimension for `jax.vmap`."""
    local = Shards(shards, ()).local(x.shape[axis], sharded_along(axis))
    behind = [(0, local * shards - n if d == axis else 0) for d, n in enumerate(x.shape)]
    np_ = np if isinstance(x, np.ndarray) else jnp
    wide = np_.pad(x, behind).reshape(*x.shape[:axis], shards, local, *x.shape[axis + 1 :])
    return np_.moveaxis(wide, axis, 0)


def whole_of(pieces, axis, size):
    """Return the array that stacked pieces form: `size` entries along `axis`, without padding."""
    back = (np if isinstance(pieces, np.ndarray) else jnp).moveaxis(pieces, 0, axis)
    wide = back.reshape(*back.shape[:axis], -1, *back.shape[axis + 2 :])
    return wide[(slice(None),) * axis + (slice(size),)]


def on_shards(program, types, args, noise=False):
    """Run all shards on one device; return the full outputs."""
    if program.shards == 1:
        return one_shard(program)(*args)
    parts = [
        x if d is None else pieces_of(x, d, program.shards)
        for x, d in zip(args, program.in_axes, strict=True)
    ]
    if noise:  # padding may have any value
        parts = [
            p if d is None else _with_noise(p, d, x.shape[d])
            for p, d, x in zip(parts, program.in_axes, args, strict=True)
        ]
    ways = [
        tuple(None if d is None else 0 for d in cuts)
        for cuts in (program.in_axes, program.out_axes)
    ]
    made = quick(
        jax.vmap(
            one_shard(program),
            in_axes=ways[0],
            out_axes=list(ways[1]),
            axis_name=AXIS,
            axis_size=program.shards,
        )
    )(*parts)
    return [
        x if d is None else whole_of(np.asarray(x), d, t.shape[d])
        for x, d, t in zip(made, program.out_axes, types, strict=True)
    ]


def _with_noise(pieces, axis, size):
    """Return pieces with NaN, or the largest integers, in place of padding."""
    local = pieces.shape[axis + 1]
    rows = np.arange(pieces.shape[0])[:, None] * local + np.arange(local)
    where = np.expand_dims(rows >= size, tuple(d for d in range(1, pieces.ndim) if d != axis + 1))
    value = np.nan if pieces.dtype.kind == "f" else np.iinfo(pieces.dtype).max
    return np.where(where, value, pieces).astype(pieces.dtype)


def deep(program):
    """Return all equations, also in bodies."""
    return list(equations(program.jaxpr))


def loops(program):
    return [e for e in deep(program) if e.primitive.name == "scan"]


def on_mesh(program, types, args):
    """Run all shards on devices of this process; return the full outputs."""
    spec = lambda cuts: tuple(P() if d is None else P(*(None,) * d, AXIS) for d in cuts)
    wide = [
        x
        if d is None
        else np.pad(x, [(0, -x.shape[d] % program.shards if k == d else 0) for k in range(x.ndim)])
        for x, d in zip(args, program.in_axes, strict=True)
    ]
    mesh = Mesh(np.array(jax.devices()[: program.shards]), (AXIS,))
    made = jax.jit(
        jax.shard_map(
            lambda *a: tuple(one_shard(program)(*a)),
            mesh=mesh,
            in_specs=spec(program.in_axes),
            out_specs=spec(program.out_axes),
            check_vma=False,
        )
    )(*wide)
    return [
        x if d is None else np.asarray(x)[(slice(None),) * d + (slice(t.shape[d]),)]
        for x, d, t in zip(made, program.out_axes, types, strict=True)
    ]


def traced(fn):
    """Return the lowered jaxpr of a function, like `dtrans.trace` with JAX's future flags."""
    return lambda *args: lowered_jaxpr(fn, *args)


def checked(fn, args, cuts, shards, *, outs=None, mesh=False, noise=True, trace=None):
    """Split a function of flat arrays, and check that the results equal one device's results."""
    jaxpr = (trace or traced)(fn)(*args)
    program = split(jaxpr, cuts, shards, AXIS, outs=outs)
    types = [v.aval for v in jaxpr.jaxpr.outvars]
    expected = jax.tree.leaves(quick(fn)(*args))
    found = on_mesh(program, types, args) if mesh else on_shards(program, types, args, noise)
    for a, b in zip(expected, found, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jnp.inexact):
            wide = a.dtype == np.float64
            np.testing.assert_allclose(
                b, a, rtol=1e-12 if wide else 1e-5, atol=1e-12 if wide else 1e-5
            )
        else:
            np.testing.assert_array_equal(b, a)
    return program


def kinds(program):
    return [
        e.primitive.name
        for e in equations(program.jaxpr)
        if is_communication(e) and e.outvars[0].aval.ndim
    ]


def floats(*shape, seed=0):
    made = np.random.default_rng(seed).normal(size=shape)
    return made if jax.config.jax_enable_x64 else made.astype("float32")


def labels(n, classes, seed=0):
    return np.random.default_rng(seed).integers(0, classes, size=n).astype("int32")
