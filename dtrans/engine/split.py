"""Tensor parallelism: a program with sharded inputs becomes the SPMD program of one shard.

`split` propagates the sharded dimensions of inputs through the equations (`dtrans.engine.rules`).
For example, if each shard has some columns of a kernel, it computes the same columns of the logits.
A maximum over columns is the maximum of the local maxima. The result is one program for all shards,
with collectives as equations (`dtrans.ops`). Only `trainer_index` differs between shards.

`split` works on equations, so it needs no rules for derivatives or layers: pass a program that
contains its gradients. Softmax cross entropy over sharded classes leads to three all-reduced
numbers per example, and a mixture of experts to two all-to-alls.

A dimension that is not a multiple of the number of shards is padded at its end. Padding does not
change any result.

Source: EPL's `split` (epl/ops: dense layers by columns, cross entropy over sharded classes,
experts). Differences: `split` replicates the batch, unless `axes` shards it. `split` pads
remainders, but EPL assigns them to shard 0. Class ids stay integers, and logarithms get no added
epsilon.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dtrans._jax import Atom, ClosedJaxpr, Var, equations, opened
from dtrans.engine.layout import Gathered, ShardLayout, Shards, sharded_along
from dtrans.engine.loops import moved_bytes
from dtrans.engine.writer import SplitWriter, written
from dtrans.errors import ConfigError
from dtrans.ir.dataflow import outputs_of, variables_read
from dtrans.ir.display import short_type
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.rows.layout import SHARED, RowAxis
from dtrans.step.scopes import in_split_scope


@dataclasses.dataclass(frozen=True, eq=False)
class SplitProgram:
    """Program of one shard; result of `split`.

    Attributes:
      jaxpr: the program; sharded inputs and outputs are padded to `ceil(size / shards)` entries.
      in_axes: sharded dimension of each input; None for a replicated input.
      out_axes: sharded dimension of each output; None for a replicated output.
      shards: number of shards.
      axis_name: named axis of the shards.
      gathers: records of the sharded values that are gathered, with reasons.
      values: maps variables of the split jaxpr to the values that a shard computes for them.
      groups: maps each value of `jaxpr` to the label of the equation that computes it (see
        `split`).
    """

    jaxpr: ClosedJaxpr
    in_axes: tuple[int | None, ...]
    out_axes: tuple[int | None, ...]
    shards: int
    axis_name: str
    gathers: tuple[Gathered, ...]
    values: Mapping[Var, Atom] = dataclasses.field(default_factory=dict)
    groups: Mapping[Var, str] = dataclasses.field(default_factory=dict)

    @property
    def moved(self) -> dict[str, int]:
        """Bytes that one shard communicates: primitive name -> bytes. Loop bodies count once."""
        return moved_bytes(equations(self.jaxpr))


def split(
    jaxpr: ClosedJaxpr,
    axes: Mapping[int, int],
    shards: int,
    axis_name: str,
    *,
    outs: Mapping[int, int | None] | None = None,
    groups: Mapping[Var, str] = MappingProxyType({}),
    gathers_in_loops: bool = False,
    rows: Mapping[int, int] = MappingProxyType({}),
) -> SplitProgram:
    """Rewrite a program for one shard, given the sharded dimensions of its inputs.

    An equation without a rule runs on gathered operands, which `gathers` lists.

    Args:
      jaxpr: a forward pass, with or without its gradients, or a complete training step.
      axes: index of an input -> its sharded dimension. Other inputs are replicated.
      shards: number of shards; with 1, the jaxpr is returned with calls inlined.
      axis_name: mesh axis of the shards.
      outs: index of an output -> its sharded dimension, or None to replicate it. Outputs that are
        not in `outs` keep the layouts in which they were computed.
      groups: maps outputs of equations to labels of these equations, such as "backward". Each
        equation that replaces such an equation gets the same label.
      gathers_in_loops: as for `Shards`.
      rows: index of an input -> its batch dimension, if shards divide the batch outside of
        `dtrans.split` scopes. Inputs that only scopes read are in `rows`, but not in `axes`.

    Raises:
      ConfigError: an input, output or dimension does not exist; a sharded dimension is empty; or
        `shards` is less than 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.engine.split import split
      >>> logp = lambda w, x: jax.nn.log_softmax(x @ w)
      >>> loss = lambda w, x, y: -jnp.take_along_axis(logp(w, x), y[:, None], 1).mean()
      >>> args = jnp.ones((64, 1000)), jnp.ones((8, 64)), jnp.zeros(8, int)
      >>> one = split(jax.make_jaxpr(loss)(*args), {0: 1}, 4, "model")
      >>> one.jaxpr.in_avals[0].shape, one.out_axes, one.gathers
      ((64, 250), (None,), ())
      >>> one.moved  # for each of 8 examples a maximum, a sum and the label's logit
      {'all_reduce': 68}
    """
    flat = eliminate_dead(inline_calls(jaxpr))
    inner = opened(flat)
    wanted = dict(outs or {})
    if shards < 1:
        raise ConfigError(f"shards={shards}; split needs at least 1 shard")
    _check("axes", "input", axes, inner.invars)
    _check("outs", "output", wanted, inner.outvars)
    in_axes = tuple(axes.get(i) for i in range(len(inner.invars)))
    if shards == 1:
        out_axes = tuple(wanted.get(i) for i in range(len(inner.outvars)))
        return SplitProgram(flat, in_axes, out_axes, 1, axis_name, ())
    among = Shards(shards, (axis_name,), gathers_in_loops=gathers_in_loops)
    outside = rows_outside(flat, rows, among) if rows else {}

    def write(w: SplitWriter) -> SplitProgram:
        w.groups, w.outside = groups, outside
        for v, axis in zip(inner.invars, in_axes, strict=True):
            w.take(v, SHARED if axis is None else sharded_along(axis), is_input=True)
        results, layouts = w.write(
            inner, lambda i, x: _output(x, wanted.get(i, -1), inner.outvars[i], among)
        )
        out_axes = tuple(x.axis if isinstance(x, RowAxis) else None for x in layouts)
        jaxpr = eliminate_dead(w.b.build(results))
        group_of = {}
        for eqn, group in zip(w.b.eqns, w.b.roles, strict=True):
            group_of.update(dict.fromkeys(eqn.outvars, group))
        return SplitProgram(
            jaxpr, in_axes, out_axes, shards, axis_name, tuple(w.gathers), w.computed(), group_of
        )

    return written(flat, among, write)


def rows_outside(flat: ClosedJaxpr, rows: Mapping[int, int], shards: Shards) -> dict[Var, RowAxis]:
    """Return the outputs of `dtrans.split` scopes, with the layout of their batch dimension.

    The layouts are those of data parallelism, as if there were no scopes. A value without a batch
    dimension, or with rows in another order than on one device, is omitted.

    Args:
      flat: a program with inlined calls.
      rows: index of an input -> its batch dimension.
      shards: number and mesh axes of the shards.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.engine.layout import Shards
      >>> from dtrans.engine.split import rows_outside
      >>> from dtrans.step.scopes import split
      >>> def loss(table, ids):
      ...     with split():
      ...         h = table[ids]
      ...     return jnp.tanh(h).sum()
      >>> jaxpr = jax.make_jaxpr(loss)(jnp.ones((6, 2)), jnp.arange(4))
      >>> [row.axis for row in rows_outside(jaxpr, {1: 0}, Shards(2, ("data",))).values()]
      [0]
    """
    inner = opened(flat)
    computed = set(outputs_of([e for e in inner.eqns if in_split_scope(e)]))
    read = variables_read([e for e in inner.eqns if not in_split_scope(e)])
    leaving = [v for v in read if v in computed]
    if not leaving:
        return {}

    def layouts(w: SplitWriter) -> dict[Var, RowAxis]:
        for i, v in enumerate(inner.invars):
            w.take(v, sharded_along(rows[i]) if i in rows else SHARED, is_input=True)
        for eqn in inner.eqns:
            w.equation(eqn)
        found = {}
        for v in leaving:
            row = w.layout(v)
            if isinstance(row, RowAxis) and row.order is None:
                found[v] = row
        return found

    return written(flat, shards, layouts)


def _output(computed: ShardLayout, axis: int | None, a: Atom, shards: Shards) -> ShardLayout:
    """Return the layout of an output.

    `axis` is the wanted sharded dimension, None for a replicated output, or -1 to keep the layout
    in which the output was computed.
    """
    if axis == -1:
        axis = computed.axis if isinstance(computed, RowAxis) else None
    if axis is None:
        return SHARED
    return shards.plain(RowAxis("", axis), a.aval.shape[axis])


def _check(option: str, what: str, axes: Mapping[int, int | None], values: Any) -> None:
    for i, axis in axes.items():
        if not 0 <= i < len(values):
            raise ConfigError(
                f"{option} contains {what} {i}, but the program has only {len(values)} "
                f"{what}{'s' * (len(values) != 1)} (the first is number 0)"
            )
        aval = values[i].aval
        if axis is not None and not (0 <= axis < aval.ndim and aval.shape[axis]):
            problem = "is empty" if 0 <= axis < aval.ndim else "does not exist"
            raise ConfigError(
                f"{option} shards {what} {i}, {short_type(aval)}, along dimension {axis}, which "
                f"{problem}"
            )
