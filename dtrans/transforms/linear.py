"""Whether an update is linear in its gradients, so that one by a sum of them is what all of them would have done.

That is so for plain SGD at one rate; not with momentum, weight decay or a clip, where how often it is done counts.
"""

from __future__ import annotations

from dtrans._jax import Atom, JaxprEqn, Var
from dtrans.cut import GRAD, OptimizeHalf


# linear in their operand, or in any one of their operands while the others are fixed
_LINEAR = {
    "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "dot_general", "expand_dims", "mul", "neg",
    "reduce_sum", "reshape", "rev", "slice", "squeeze", "transpose",
}  # fmt: skip
# of several operands, all may be linear
_ADDING = {"add", "add_any", "concatenate", "sub"}
# keep what is linear but for a constant
_KEEPING = {"convert_element_type", "copy", "copy_p", "reshape"}

FIXED, LINEAR, SHIFTED = 0, 1, 2  # by a parameter: `w - lr g`


def is_linear(half: OptimizeHalf) -> bool:
    """Whether new parameters are old ones plus something linear in the gradients, and no state is made of gradients."""
    inner = half.jaxpr.jaxpr
    kinds: dict[Var, int] = {v: LINEAR for n, v in zip(half.in_names, inner.invars, strict=True) if n.endswith(GRAD)}
    of = lambda a: kinds.get(a, FIXED) if isinstance(a, Var) else FIXED
    for eqn in inner.eqns:
        operands = [of(a) for a in eqn.invars]
        if any(operands):
            made = _made(eqn, operands)
            if made is None:
                return False
            kinds.update(dict.fromkeys(eqn.outvars, made))
    outs: dict[str, Atom] = dict(zip(half.out_names, inner.outvars, strict=True))
    state = set(half.out_names) - {n.removesuffix(GRAD) for n in half.in_names if n.endswith(GRAD)}
    return all(of(outs[n]) == FIXED for n in state) and all(of(a) != LINEAR for a in outs.values())


def _made(eqn: JaxprEqn, operands: list[int]) -> int | None:
    """What an equation makes of operands of which some are made of gradients; None if it is not linear in them."""
    name = eqn.primitive.name
    if SHIFTED in operands:
        return SHIFTED if name in _KEEPING else None
    if FIXED not in operands:
        return LINEAR if (len(operands) == 1 and name in _LINEAR) or name in _ADDING else None
    if name in ("add", "add_any", "sub"):
        return SHIFTED
    if name == "div":
        return LINEAR if operands[0] == LINEAR and operands.count(LINEAR) == 1 else None
    return LINEAR if name in _LINEAR and operands.count(LINEAR) == 1 else None
