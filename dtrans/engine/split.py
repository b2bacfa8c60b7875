"""Tensor parallelism: a program with sharded inputs becomes the program of one shard.

`split` takes the sharded dimension of each input and follows it through the equations
(`dtrans.engine.rules`). A product with columns of a kernel returns columns of logits. A maximum
over columns is a maximum of local maxima. The shard with a label's class returns its loss. The
result is one program for all shards, with collectives as equations (`dtrans.ops`); only
`trainer_index` differs between shards.

`split` sees equations only: gradients are taken first, and the same rules apply to their equations.
It knows neither softmax cross entropy nor layers of experts by name. Their equations lead to three
sums over shards for each example, and to two all-to-alls.

Dimensions that are not a multiple of the number of shards are padded at their end. Padding enters
no result.

Source: EPL's `split` (epl/ops: dense layers by columns, cross entropy over sharded classes,
experts). Differences: the batch is replicated unless its input is named. Remainders are padded and
not added to shard 0. Class ids stay integers, and logarithms get no added epsilon.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dtrans._jax import Atom, ClosedJaxpr, equations, opened
from dtrans.engine.layout import Gathered, ShardLayout, Shards, cut_along
from dtrans.engine.loops import moved_bytes
from dtrans.engine.writer import SplitWriter, written
from dtrans.errors import ConfigError
from dtrans.ir.display import short_type
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.rows.layout import SHARED, RowAxis


@dataclasses.dataclass(frozen=True, eq=False)
class SplitProgram:
    """Program of one shard, as `split` returns it.

    Attributes:
      jaxpr: the program; sharded inputs and outputs are padded to `ceil(size / shards)` entries.
      in_cuts: sharded dimension of each input; None if it is replicated.
      out_cuts: sharded dimension of each output; None if it is replicated.
      shards: number of shards.
      axis_name: named axis of the shards.
      gathers: sharded values that had to be gathered, and why.
    """

    jaxpr: ClosedJaxpr
    in_cuts: tuple[int | None, ...]
    out_cuts: tuple[int | None, ...]
    shards: int
    axis_name: str
    gathers: tuple[Gathered, ...]

    @property
    def moved(self) -> dict[str, int]:
        """Bytes that one shard communicates, by primitive; a gather counts its output.

        Bodies of loops count once.
        """
        return moved_bytes(equations(self.jaxpr))


def split(
    jaxpr: ClosedJaxpr,
    cuts: Mapping[int, int],
    shards: int,
    axis_name: str,
    *,
    outs: Mapping[int, int | None] | None = None,
) -> SplitProgram:
    """Return the program of one shard of a program with sharded inputs.

    An equation without a rule runs on full values: that is always correct, and listed in `gathers`.

    Args:
      jaxpr: a forward pass, or one with its gradients, or a step.
      cuts: position of an input to its sharded dimension. Other inputs are replicated.
      shards: number of shards; with 1 the program is returned unchanged.
      axis_name: named axis of the shards.
      outs: position of an output to its sharded dimension, or None to replicate it. Other outputs
        keep their computed layouts.

    Raises:
      ConfigError: no such input, output or dimension; a dimension without entries; no shards.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.engine.split import split
      >>> logp = lambda w, x: jax.nn.log_softmax(x @ w)
      >>> loss = lambda w, x, y: -jnp.take_along_axis(logp(w, x), y[:, None], 1).mean()
      >>> args = jnp.ones((64, 1000)), jnp.ones((8, 64)), jnp.zeros(8, int)
      >>> one = split(jax.make_jaxpr(loss)(*args), {0: 1}, 4, "model")
      >>> one.jaxpr.in_avals[0].shape, one.out_cuts, one.gathers
      ((64, 250), (None,), ())
      >>> one.moved  # for each of 8 examples a maximum, a sum and the label's logit
      {'all_reduce': 68}
    """
    flat = eliminate_dead(inline_calls(jaxpr))
    inner = opened(flat)
    wanted = dict(outs or {})
    if shards < 1:
        raise ConfigError(f"split needs at least one shard, not shards={shards}")
    _check("cuts", "input", cuts, inner.invars)
    _check("outs", "output", wanted, inner.outvars)
    in_cuts = tuple(cuts.get(i) for i in range(len(inner.invars)))
    if shards == 1:
        return SplitProgram(
            flat, in_cuts, tuple(wanted.get(i) for i in range(len(inner.outvars))), 1, axis_name, ()
        )
    among = Shards(shards, (axis_name,))

    def write(w: SplitWriter) -> SplitProgram:
        for v, axis in zip(inner.invars, in_cuts, strict=True):
            w.take(v, SHARED if axis is None else cut_along(axis), is_input=True)
        results, layouts = w.write(
            inner, lambda i, x: _output(x, wanted.get(i, -1), inner.outvars[i], among)
        )
        out_cuts = tuple(x.axis if isinstance(x, RowAxis) else None for x in layouts)
        jaxpr = eliminate_dead(w.b.build(results))
        return SplitProgram(jaxpr, in_cuts, out_cuts, shards, axis_name, tuple(w.gathers))

    return written(flat, among, write)


def _output(computed: ShardLayout, axis: int | None, a: Atom, shards: Shards) -> ShardLayout:
    """Return an output's layout, entry by entry along `axis`; -1 keeps the computed axis."""
    if axis == -1:
        axis = computed.axis if isinstance(computed, RowAxis) else None
    return SHARED if axis is None else shards.plain(RowAxis("", axis), a.aval.shape[axis])


def _check(option: str, what: str, cuts: Mapping[int, int | None], values: Any) -> None:
    for i, axis in cuts.items():
        if not 0 <= i < len(values):
            raise ConfigError(
                f"{option} names {what} {i}, but the program has {len(values)} {what}s, numbered "
                "from 0"
            )
        aval = values[i].aval
        if axis is not None and not (0 <= axis < aval.ndim and aval.shape[axis]):
            lacks = "entries there" if 0 <= axis < aval.ndim else "such dimension"
            raise ConfigError(
                f"{option} has {what} {i} along dimension {axis}: {short_type(aval)} has no {lacks}"
            )
