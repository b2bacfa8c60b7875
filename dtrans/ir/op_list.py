"""Ops of a program: its equations, with a unique name for each operand and output.

The name of a value is the name of an input or output, a label, or a number such as `%3`.
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
    """Equation of a program as a record of names, like Paddle's `OpDesc`.

    Attributes:
      type: name of the primitive, e.g. `dot_general`, `send`.
      role: one of `ROLES`.
      inputs, outputs: name of each operand and output; for a literal, its value as text.
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
      names: name of each variable.
    """
    name_of = lambda a: display.literal(a) if isinstance(a, Literal) else names[a]
    ops = []
    for eqn, role in zip(jaxpr.eqns, roles, strict=True):
        inputs, outputs = tuple(map(name_of, eqn.invars)), tuple(map(name_of, eqn.outvars))
        ops.append(Op(eqn.primitive.name, role, inputs, outputs, dict(eqn.params)))
    return tuple(ops)


def name_values(jaxpr: NamedJaxpr, labels: Mapping[Var, str]) -> dict[Var, str]:
    """Map every variable to a unique name: its label, or else a number."""
    inner = jaxpr.inner
    in_names = set(jaxpr.in_names)
    names: dict[Var, str] = {v: f"const/{i}" for i, v in enumerate(inner.constvars)}
    names |= zip(inner.invars, jaxpr.in_names, strict=True)
    outs: dict[Var, str] = {}
    for out, name in zip(inner.outvars, jaxpr.out_names, strict=True):
        if isinstance(out, Var):
            outs[out] = name
    count = 0
    for eqn in inner.eqns:
        for v in eqn.outvars:
            if v in labels:
                names[v] = labels[v]
            elif v in outs and v not in names:
                prime = "'" if outs[v] in in_names else ""  # w' is the new value of input w
                names[v] = outs[v] + prime
            else:
                names[v] = f"%{count}"
                count += 1
    return names


def check_names(program: str, jaxpr: NamedJaxpr) -> None:
    """Raise TraceError if two inputs, or two outputs, of a program have the same name."""
    inner = jaxpr.inner
    for kind, values, names in (
        ("inputs", inner.invars, jaxpr.in_names),
        ("outputs", inner.outvars, jaxpr.out_names),
    ):
        if len(values) != len(names):
            raise TraceError(f"program {program} has {len(values)} {kind} but {len(names)} names")
        repeated = sorted(n for n, count in Counter(names).items() if count > 1)
        if repeated:
            raise TraceError(
                f"program {program} has two {kind} named {repeated[0]}; rename one of them"
            )
