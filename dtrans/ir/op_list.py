"""Equations of a program as ops: with a name for each operand and output.

Names are unique: an input, a label, an output, or a number such as `%3`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dtrans._jax import Literal, NamedJaxpr, Var
from dtrans.errors import TraceError
from dtrans.ir import display


@dataclasses.dataclass(frozen=True)
class Op:
    """Equation of a program, in the form of Paddle's `OpDesc`.

    Attributes:
      type: name of the primitive, e.g. `dot_general`, `send`.
      role: one of `ROLES`.
      inputs, outputs: names of the values; literals as text.
      attrs: parameters of the equation.
    """

    type: str
    role: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]

    def __str__(self) -> str:
        return display.op_line(self)


def list_ops(jaxpr: NamedJaxpr, roles: Sequence[str], names: Mapping[Var, str]) -> tuple[Op, ...]:
    """Return the equations of a program as ops, in order.

    Args:
      jaxpr: the program.
      roles: role of each equation.
      names: name of each value.
    """
    name_of = lambda a: display.literal(a) if isinstance(a, Literal) else names[a]
    ops = []
    for eqn, role in zip(jaxpr.eqns, roles, strict=True):
        inputs, outputs = tuple(map(name_of, eqn.invars)), tuple(map(name_of, eqn.outvars))
        ops.append(Op(eqn.primitive.name, role, inputs, outputs, dict(eqn.params)))
    return tuple(ops)


def name_values(jaxpr: NamedJaxpr, labels: Mapping[Var, str]) -> dict[Var, str]:
    """Return the name of every value of a program, from its labels if it has any."""
    inner = jaxpr.inner
    in_names = set(jaxpr.in_names)
    names: dict[Var, str] = {v: f"const/{i}" for i, v in enumerate(inner.constvars)}
    names |= zip(inner.invars, jaxpr.in_names, strict=True)
    outputs = zip(inner.outvars, jaxpr.out_names, strict=True)
    outs = {v: n for v, n in outputs if isinstance(v, Var)}
    count = 0
    for eqn in inner.eqns:
        for v in eqn.outvars:
            if v in labels:
                names[v] = labels[v]
            elif v in outs and v not in names:
                # a prime distinguishes the new value of an input
                names[v] = outs[v] + ("'" if outs[v] in in_names else "")
            else:
                names[v] = f"%{count}"
                count += 1
    return names


def check_names(program: str, jaxpr: NamedJaxpr) -> None:
    """Raise TraceError unless each input and each output of a program has a name of its own."""
    inner = jaxpr.inner
    for kind, values, names in (
        ("inputs", inner.invars, jaxpr.in_names),
        ("outputs", inner.outvars, jaxpr.out_names),
    ):
        if len(values) != len(names):
            raise TraceError(f"program {program}: {len(values)} {kind} but {len(names)} names")
        repeated = sorted(n for n, count in Counter(names).items() if count > 1)
        if repeated:
            raise TraceError(
                f"program {program}: two {kind} are called {repeated[0]}: rename one of them"
            )
