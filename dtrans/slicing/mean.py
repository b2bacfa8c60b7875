"""The mean of what trainers send, as a server's blocks begin with it; and the same without those who have left.

`sum` and `scale` in Paddle. `mean_over` is a rewrite of what `mean_of` has written: it stands beside it, since it has
to find it again.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection

import jax

from dtrans._jax import Atom, Literal, Var
from dtrans.ir.builder import Builder
from dtrans.ops import OptimizeBlock
from dtrans.step.cut import GRAD


def mean_of(*grads: jax.Array) -> jax.Array:
    """The sum, scaled by one over their number."""
    return functools.reduce(jax.lax.add, grads) * (1 / len(grads))


_GRADIENT_OF = re.compile(rf"(.*{GRAD}.*)\.trainer_(\d+)")  # `Block.gradient`, with several trainers


def mean_over(block: OptimizeBlock, present: Collection[int]) -> OptimizeBlock:
    """A block on the gradients of some of the trainers: the `add` of the others' go, and 1/trainers follows.

    Args:
      block: as `ServerUpdateBuilder.work` wrote it, for several trainers.
      present: the trainers whose gradients there are, one at least.

    Returns:
      The same block, without the inputs that are the others'; one that merges nothing as it is.
    """
    inner = block.jaxpr.jaxpr
    merges: dict[str, dict[int, Var]] = {}
    gone: set[Var] = set()
    for name, var in zip(block.in_names, inner.invars, strict=True):
        if found := _GRADIENT_OF.fullmatch(name):
            merges.setdefault(found[1], {})[int(found[2])] = var
            if int(found[2]) not in present:
                gone.add(var)
    if not gone:
        return block
    b = Builder(block.jaxpr)
    env: dict[Var, Atom] = {v: b.input(v.aval) for v in inner.invars if v not in gone}
    starts = {operands[min(operands)]: operands for operands in merges.values()}
    ahead = 0  # how many equations are still those of a merge that is written anew
    for i, eqn in enumerate(inner.eqns):
        operands = next((starts[a] for a in eqn.invars if isinstance(a, Var) and a in starts), None)
        if operands is not None:
            whole = Builder(block.jaxpr)
            whole.call(mean_of, *(whole.input(v.aval) for v in operands.values()))
            ahead = len(whole.eqns)
            written = inner.eqns[i : i + ahead]
            assert [e.primitive for e in written] == [e.primitive for e in whole.eqns], f"{block}: not a merge"
            left = [env[v] for k, v in sorted(operands.items()) if k in present]
            env[written[-1].outvars[0]] = left[0] if len(left) == 1 else b.call(mean_of, *left)[0]
        if ahead:
            ahead -= 1
            continue
        atoms = [a if isinstance(a, Literal) else env.get(a, a) for a in eqn.invars]
        env.update(zip(eqn.outvars, b.copy(eqn, atoms, [v.aval for v in eqn.outvars]), strict=True))
    outs = [a if isinstance(a, Literal) else env.get(a, a) for a in inner.outvars]
    names = tuple(n for n, v in zip(block.in_names, inner.invars, strict=True) if v not in gone)
    return dataclasses.replace(block, jaxpr=b.build(outs), in_names=names)
