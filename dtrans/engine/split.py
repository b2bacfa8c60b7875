"""Tensor parallelism: a program whose inputs are cut over shards, as the program of one shard.

`split` is given which inputs are cut, and along which dimension, and follows the cuts through the
equations (`dtrans.engine.rules`): a product with columns of a kernel makes columns of logits, a
maximum over columns is a maximum of local maxima, the loss of a label is given by the shard that
has its class. What is written is one program for all shards, on pieces, with communication as
equations (`dtrans.ops`); only `trainer_index` tells shards apart.

It is given equations, and does not ask what they are for: gradients are taken before, and their
equations are split by the same rules. Softmax cross entropy is not known here by name, nor is a
layer of experts: cross entropy comes to three sums over shards for each example, a layer of experts
to two exchanges, because that is what its equations need.

Dimensions that the shards do not divide are padded at their end; what is in the padding enters no
result.

Source: EPL's `split` (epl/ops: dense layers by columns, cross entropy over classes that are cut,
experts). Unlike there, the batch is whole on every shard unless it is cut by name, remainders are
spread as padding and not given to shard 0, ids of classes stay integers, and nothing is added to a
sum before its logarithm is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dtrans._jax import Atom, ClosedJaxpr, equations, opened
from dtrans.engine.layout import Gathered, Placed, Shards, cut_along
from dtrans.engine.loops import moved_bytes
from dtrans.engine.writer import SplitWriter, written
from dtrans.errors import ConfigError
from dtrans.ir.display import short_type
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.rows.layout import SHARED, RowAxis


@dataclasses.dataclass(frozen=True, eq=False)
class SplitProgram:
    """The program of one shard; made by `split`.

    Attributes:
      jaxpr: inputs and outputs are pieces where they are cut, padded to `ceil(size / shards)`
        entries.
      in_cuts: for each input, the dimension along which it is cut; None where every shard gets all
        of it.
      out_cuts: the same of outputs. One that is whole is equal on all shards.
      shards: how many there are.
      axis_name: the named axis that they are on.
      gathers: what was cut and had to be made whole, and why.
    """

    jaxpr: ClosedJaxpr
    in_cuts: tuple[int | None, ...]
    out_cuts: tuple[int | None, ...]
    shards: int
    axis_name: str
    gathers: tuple[Gathered, ...]

    @property
    def moved(self) -> dict[str, int]:
        """Bytes that one shard puts into communication, by what it is; of a gather, what comes out
        of it.

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
    """The program of one shard of a program whose inputs are cut.

    Everything that has no rule is carried out on whole values: always right, and told in `gathers`.

    Args:
      jaxpr: a forward pass, or one with its gradients, or a step.
      cuts: position of an input to the dimension along which it is cut. Others are whole on every
        shard.
      shards: how many there are. One has all: its program is the one that was given.
      axis_name: the named axis that they are on.
      outs: position of an output to the dimension along which it is wanted cut, or None to have it
        whole. Others are as they are made.

    Raises:
      ConfigError: no such input, output or dimension; a dimension without entries; no shards.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.engine.split import split
      >>> loss = lambda w, x, y: -jnp.take_along_axis(jax.nn.log_softmax(x @ w), y[:, None], 1).mean()
      >>> args = jnp.ones((64, 1000)), jnp.ones((8, 64)), jnp.zeros(8, int)
      >>> one = split(jax.make_jaxpr(loss)(*args), {0: 1}, 4, "model")
      >>> one.jaxpr.in_avals[0].shape, one.out_cuts, one.gathers
      ((64, 250), (None,), ())
      >>> one.moved  # a maximum and a sum for each of 8 examples, and what labels have, summed up
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
        made, layouts = w.write(
            inner, lambda i, x: _output(x, wanted.get(i, -1), inner.outvars[i], among)
        )
        out_cuts = tuple(x.axis if isinstance(x, RowAxis) else None for x in layouts)
        jaxpr = eliminate_dead(w.b.build(made))
        return SplitProgram(jaxpr, in_cuts, out_cuts, shards, axis_name, tuple(w.gathers))

    return written(flat, among, write)


def _output(made: Placed, axis: int | None, a: Atom, shards: Shards) -> Placed:
    """How an output lies: along `axis`, or as it comes (-1), entry by entry; sums are made."""
    if axis == -1:
        axis = made.axis if isinstance(made, RowAxis) else None
    return SHARED if axis is None else shards.plain(RowAxis("", axis), a.aval.shape[axis])


def _check(option: str, what: str, cuts: Mapping[int, int | None], values: Any) -> None:
    for i, axis in cuts.items():
        if not 0 <= i < len(values):
            raise ConfigError(
                f"{option} names {what} {i}, and there are {len(values)} {what}s, numbered from 0"
            )
        aval = values[i].aval
        if axis is not None and not (0 <= axis < aval.ndim and aval.shape[axis]):
            lacks = "entries there" if 0 <= axis < aval.ndim else "such dimension"
            raise ConfigError(
                f"{option} has {what} {i} along dimension {axis}: {short_type(aval)} has no {lacks}"
            )
