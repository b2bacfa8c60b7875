"""Collections: values of every micro-batch and replica, merged by a rule.

`collect` marks values with a rule, one identity primitive each (as `dtrans.step.marks` marks
gradients). On one device a mark does nothing. A pipeline reads the marks (`collected`), and
replaces a marked output by one merged value (`merged`):

- LOCAL_* merges the micro-batches of the first replica, in their order;
- GLOBAL_* then merges the replicas, in their order.

The merged value is the one that `collect` returns; the value before the mark is unchanged. Sums and
means are elementwise. EPL reduces over all axes, so that a collected value becomes a scalar, and
concatenates the first micro-batch last; neither is copied.

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

# name of the mark; only pipelines keep it when calls are inlined (`dtrans.ir.builder`)
COLLECT = "collect"


def _collect_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, key: str) -> tuple[Any, Any]:
    # the derivative of a collected value is not one itself
    return collect_p.bind(*primals, key=key), tangents[0]


def _collect_batch(args: Sequence[Any], dims: Sequence[Any], *, key: str) -> tuple[Any, Any]:
    # values are concatenated along dimension 0, which is the mapped dimension under vmap
    return collect_p.bind(jnp.moveaxis(args[0], dims[0], 0), key=key), 0


collect_p = new_identity(COLLECT, jvp=_collect_jvp, batch=_collect_batch)


def collect(value: Any, key: str) -> Any:
    """Mark the arrays of a pytree to be merged over the micro-batches and replicas of a pipeline.

    Outside of pipelines it changes nothing. Under `jax.vmap` the mapped axis comes first, and is
    concatenated.

    Args:
      value: an array, or a pytree of arrays.
      key: "LOCAL_SUM", "LOCAL_MEAN" or "LOCAL_CONCAT": merged over the micro-batches of the first
        replica. "GLOBAL_SUM", "GLOBAL_MEAN" or "GLOBAL_CONCAT": also over replicas. See `merged`.

    Returns:
      The same pytree with marked values. They are merged where the step returns them.

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
                f"{where or 'the value'} cannot be collected under {key}: it is {leaf!r}; "
                "collect arrays"
            )
        return collect_p.bind(leaf, key=key)

    return tree_map_with_path(mark, value)


def _check_key(key: str) -> None:
    if key not in KEYS:
        raise ConfigError(f"{key!r} is no collection; there are {', '.join(KEYS)}")


def collected(jaxpr: ClosedJaxpr) -> dict[Var, str]:
    """Return the marked values of a flattened jaxpr, with the key of each.

    Args:
      jaxpr: with calls inlined, and these marks kept.

    Raises:
      ConfigError: a value that is in two collections.
      TraceError: a marked value inside a loop, a branch or a rematerialised function, which the
        step cannot return.
    """
    found: dict[Var, str] = {}
    marked: dict[Atom, Atom] = {}  # marked value to the value before all marks
    keys: dict[Atom, str] = {}  # by the value before all marks
    for eqn in opened(jaxpr).eqns:
        # a body that `jax.checkpoint` recomputes was seen the first time
        again = eqn.params.get("differentiated", False)
        for inner in () if again else equations_inside(eqn):
            if inner.primitive is collect_p:
                raise TraceError(
                    f"a value{_described(inner.outvars[0], scope_of(inner))} is collected under "
                    f"{inner.params['key']} "
                    f"inside {eqn.primitive.name}; return it from there, and collect what comes out"
                )
        if eqn.primitive is not collect_p:
            continue
        (atom,), (out,), key = eqn.invars, eqn.outvars, eqn.params["key"]
        value = marked.get(atom, atom) if isinstance(atom, Var) else atom
        had = keys.setdefault(value, key) if isinstance(value, Var) else key
        if had != key:
            raise ConfigError(
                f"a value{_described(out, scope_of(eqn))} is collected under both {had} and {key}; "
                "choose one of them"
            )
        marked[out], found[out] = value, key
    return found


def _described(var: Var, scope: str) -> str:
    return f" of {short_type(var.aval)}" + (f" (of {scope})" if scope else "")


def merged(key: str, micro: Sequence[Sequence[Any]]) -> Any:
    """Merge the values of all micro-batches of all replicas into one.

    Args:
      key: the collection.
      micro: the values as [replica][micro-batch], all of one dtype.

    Returns:
      SUM: the elementwise sum, with the dtype of `jnp.sum`: small integers are widened, and
        booleans counted.
      MEAN: the elementwise mean, with the dtype of `jnp.mean`: a float for integers, even for a
        single micro-batch.
      CONCAT: the values concatenated along dimension 0. Micro-batches are merged first, in order,
        then replicas. Additions follow that order, 16-bit floats in 32 bits. LOCAL keys merge the
        first replica alone.

    Raises:
      ConfigError: an unknown key, no values, or replicas with unequal numbers of micro-batches.
        Values that cannot be added or concatenated, such as 0-d values under a CONCAT key.

    Source: `merge_outputs` of EPL (epl/parallel/parallel.py), but for the order and the axes of
    reductions.

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
            f"{key} merges equal numbers of micro-batches from all replicas, at least one; the "
            f"replicas have {counts}"
        )
    place, _, how = key.partition("_")
    merge = {"SUM": _summed, "MEAN": _averaged, "CONCAT": _concatenated}[how]
    replicas = micro[:1] if place == "LOCAL" else micro
    _check_shapes(key, [x for replica in replicas for x in replica])
    return merge([merge(list(replica)) for replica in replicas])


def _check_shapes(key: str, values: Sequence[Any]) -> None:
    concat = key.endswith("CONCAT")
    shapes = [jnp.shape(x) for x in values]
    if concat and () in shapes:
        raise ConfigError(
            f"{key} concatenates along dimension 0, and a 0-d value has none; use a MEAN or SUM "
            "key for it"
        )
    if len({s[concat:] for s in shapes}) > 1:
        of = "entries of one shape" if concat else "values of one shape"
        raise ConfigError(
            f"{key} merges {of}, these have {', '.join(map(str, dict.fromkeys(shapes)))}"
        )
    if not concat and jnp.issubdtype(values[0].dtype, jax.dtypes.prng_key):
        raise ConfigError(f"{key} cannot add up random keys; use a CONCAT key for them")


def _folded(values: Sequence[Any], reduction: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return the sum in order, in the type of the additions, and the result type of the
    reduction."""
    first = jnp.asarray(values[0])
    out = jax.eval_shape(reduction, first).dtype
    wide = jnp.promote_types(out, jnp.float32) if jnp.issubdtype(out, jnp.floating) else out
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
    return jnp.concatenate(values, axis=0) if len(values) > 1 else jnp.asarray(values[0])
