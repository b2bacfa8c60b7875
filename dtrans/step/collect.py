"""Marks for outputs of a step that a pipeline must merge over micro-batches and replicas.

A pipeline computes a step in pieces: it splits the batch among replicas, and each replica splits
its part into micro-batches. A user calls `collect(value, key)` to say how the pieces of a value
become one: sum, mean or concatenation. The call adds an identity equation as a mark. On one device
a mark does nothing. A pipeline finds the marks (`collected`), and replaces a marked output by one
merged value (`merged`):

- LOCAL_* keys merge the micro-batches of the first replica, in their order.
- GLOBAL_* keys merge the micro-batches of each replica, then the replicas, in their order.

A pipeline merges only the value that `collect` returns, not the operand of `collect`. Sums and
means are elementwise. Alibaba's EPL, the model of this function, differs: its sums and means are
scalars, over all axes, and its concatenation has the first micro-batch at its end.

Source: `add_to_collection` and `merge_outputs` of EPL (epl/parallel/parallel.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_map_with_path

from dtrans._jax import (
    Atom,
    ClosedJaxpr,
    Var,
    equations_inside,
    new_identity,
    opened,
    scope_of,
)
from dtrans.errors import ConfigError, TraceError
from dtrans.ir.display import short_type


GLOBAL_CONCAT = "GLOBAL_CONCAT"
GLOBAL_MEAN = "GLOBAL_MEAN"
GLOBAL_SUM = "GLOBAL_SUM"
LOCAL_CONCAT = "LOCAL_CONCAT"
LOCAL_MEAN = "LOCAL_MEAN"
LOCAL_SUM = "LOCAL_SUM"
KEYS = (GLOBAL_CONCAT, GLOBAL_MEAN, GLOBAL_SUM, LOCAL_CONCAT, LOCAL_MEAN, LOCAL_SUM)

# Name of the identity primitive. When calls are inlined, only pipelines keep the primitive
# (`dtrans.ir.inline`).
COLLECT = "collect"


def _collect_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, key: str) -> tuple[Any, Any]:
    # A tangent is not a collected value, so it gets no mark.
    return collect_p.bind(*primals, key=key), tangents[0]


def _collect_batch(args: Sequence[Any], dims: Sequence[Any], *, key: str) -> tuple[Any, Any]:
    # CONCAT keys concatenate along dimension 0, so the mapped dimension becomes dimension 0.
    return collect_p.bind(jnp.moveaxis(args[0], dims[0], 0), key=key), 0


collect_p = new_identity(COLLECT, jvp=_collect_jvp, batch=_collect_batch)


def collect(value: Any, key: str) -> Any:
    """Mark arrays that a pipeline must merge over its micro-batches and replicas.

    Call this function inside the step, and return its result from the step. The key selects a sum,
    a mean or a concatenation. For example, the key "GLOBAL_SUM" turns counts of correct answers in
    each micro-batch into the count of the full batch. Outside of pipelines the mark has no effect.
    Under `jax.vmap` the mapped axis becomes dimension 0, along which CONCAT keys concatenate.

    Args:
      value: an array, or a pytree of arrays.
      key: "LOCAL_SUM", "LOCAL_MEAN" or "LOCAL_CONCAT" merges over the micro-batches of the first
        replica. "GLOBAL_SUM", "GLOBAL_MEAN" or "GLOBAL_CONCAT" merges over the micro-batches of
        all replicas. See `merged`.

    Returns:
      The same pytree with marked values. A pipeline merges them if the step returns them.

    Raises:
      ConfigError: an unknown key, or a leaf that is not an array.

    Source: `epl.add_to_collection` (epl/ir/graph.py).

    Example:
      >>> import jax.numpy as jnp, dtrans
      >>> from dtrans.step.collect import collect
      >>> collect({"right": jnp.arange(3).sum()}, "GLOBAL_SUM")
      {'right': Array(3, dtype=int32)}
    """
    _check_key(key)

    def mark(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
            where = keystr(path, simple=True, separator="/")
            raise ConfigError(
                f"{where or 'the value'} is {leaf!r}; only arrays can be collected under {key}"
            )
        return collect_p.bind(leaf, key=key)

    return tree_map_with_path(mark, value)


def _check_key(key: str) -> None:
    if key not in KEYS:
        raise ConfigError(f"key is {key!r}; expected one of {', '.join(KEYS)}")


def collected(jaxpr: ClosedJaxpr) -> dict[Var, str]:
    """Return the values of a traced step that the user marked with `collect`, with their keys.

    Args:
      jaxpr: a jaxpr with calls inlined that still has the marks.

    Raises:
      ConfigError: one value is collected under two keys.
      TraceError: a value is marked inside a loop, a branch or a rematerialised function.
    """
    found: dict[Var, str] = {}
    unmarked: dict[Atom, Atom] = {}  # for each marked value, the operand of its first mark
    keys: dict[Atom, str] = {}  # the key of each unmarked value
    for eqn in opened(jaxpr).eqns:
        # The backward pass of `jax.checkpoint` repeats its body; marks there are copies.
        is_recomputation = eqn.params.get("differentiated", False)
        for inner in equations_inside(eqn):
            if inner.primitive is collect_p and not is_recomputation:
                raise TraceError(
                    f"a value{_described(inner.outvars[0], scope_of(inner))} is collected under "
                    f"{inner.params['key']} inside a {eqn.primitive.name}; return the value from "
                    f"the {eqn.primitive.name}, and call dtrans.collect outside"
                )
        if eqn.primitive is not collect_p:
            continue
        (atom,), (out,), key = eqn.invars, eqn.outvars, eqn.params["key"]
        value = unmarked.get(atom, atom) if isinstance(atom, Var) else atom
        had = keys.setdefault(value, key) if isinstance(value, Var) else key
        if had != key:
            raise ConfigError(
                f"a value{_described(out, scope_of(eqn))} is collected under both {had} and {key}; "
                "use one key"
            )
        unmarked[out], found[out] = value, key
    return found


def _described(var: Var, scope: str) -> str:
    text = f" of {short_type(var.aval)}"
    return f"{text} (of {scope})" if scope else text


def merged(key: str, micro: Sequence[Sequence[Any]]) -> Any:
    """Merge the values of all micro-batches and replicas by a key of `collect`.

    The micro-batches of a replica are merged first, in order, then the replicas. 16-bit floats are
    added in 32 bits. LOCAL keys merge only the first replica.

    Args:
      key: a key of `collect`, such as "GLOBAL_MEAN".
      micro: the values, indexed by [replica][micro-batch], all of one dtype.

    Returns:
      SUM: the elementwise sum, with the dtype that `jnp.sum` returns: small integers are widened,
        and booleans are counted.
      MEAN: the elementwise mean, with the dtype that `jnp.mean` returns: the mean of integers is a
        float, even for a single micro-batch.
      CONCAT: the values concatenated along dimension 0.

    Raises:
      ConfigError: `key` is unknown, there are no values, or replicas have unequal numbers of
        micro-batches. Or the values cannot be merged: 0-d values under a CONCAT key, say.

    Source: `merge_outputs` of EPL (epl/parallel/parallel.py), which reduces other axes in another
    order.

    Example:
      >>> import jax.numpy as jnp
      >>> from dtrans.step.collect import merged
      >>> values = [[jnp.array([1, 2]), jnp.array([3, 4])], [jnp.array([5, 6]), jnp.array([7, 8])]]
      >>> merged("GLOBAL_CONCAT", values).tolist(), merged("LOCAL_SUM", values).tolist()
      ([1, 2, 3, 4, 5, 6, 7, 8], [4, 6])
      >>> merged("GLOBAL_MEAN", values).tolist()
      [4.0, 5.0]
    """
    _check_key(key)
    counts = sorted({len(replica) for replica in micro})
    if len(counts) != 1 or not counts[0]:
        raise ConfigError(
            f"the replicas have {counts} micro-batches; {key} needs the same number from each, "
            "at least one"
        )
    place, _, how = key.partition("_")
    merge = {"SUM": _summed, "MEAN": _averaged, "CONCAT": _concatenated}[how]
    replicas = micro
    if place == "LOCAL":
        replicas = micro[:1]
    _check_shapes(key, [x for replica in replicas for x in replica])
    return merge([merge(list(replica)) for replica in replicas])


def _check_shapes(key: str, values: Sequence[Any]) -> None:
    concat = key.endswith("CONCAT")
    shapes = [jnp.shape(x) for x in values]
    if concat and () in shapes:
        raise ConfigError(
            f"a 0-d value is collected under {key}, which concatenates along dimension 0; use a "
            "MEAN or SUM key"
        )
    if len({s[concat:] for s in shapes}) > 1:
        equal = "shapes that differ only in dimension 0" if concat else "equal shapes"
        raise ConfigError(
            f"the values have shapes {', '.join(map(str, dict.fromkeys(shapes)))}; {key} needs "
            f"{equal}"
        )
    if not concat and jnp.issubdtype(values[0].dtype, jax.dtypes.prng_key):
        raise ConfigError(f"random keys are collected under {key}; use a CONCAT key for them")


def _folded(values: Sequence[Any], reduction: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Add up the values of micro-batches in order, with 16-bit floats in 32 bits.

    Args:
      values: the terms.
      reduction: `jnp.sum` or `jnp.mean`.

    Returns:
      The sum, and the dtype in which `reduction` would return its result.
    """
    first = jnp.asarray(values[0])
    out = wide = jax.eval_shape(reduction, first).dtype
    if jnp.issubdtype(out, jnp.floating):
        wide = jnp.promote_types(out, jnp.float32)
    total = first.astype(wide)
    for x in values[1:]:
        total = total + jnp.asarray(x).astype(wide)
    return total, out


def _summed(values: Sequence[Any]) -> Any:
    total, dtype = _folded(values, jnp.sum)
    return total.astype(dtype)


def _averaged(values: Sequence[Any]) -> Any:
    total, dtype = _folded(values, jnp.mean)
    return (total / len(values)).astype(dtype)


def _concatenated(values: Sequence[Any]) -> Any:
    if len(values) == 1:
        return jnp.asarray(values[0])
    return jnp.concatenate(values, axis=0)
