"""Faults in jaxprs: a function replaces one equation of a traced program, in any body."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from dtrans._jax import Literal, Var, bodies, closed, constants, opened, shard_map_of, with_bodies


@dataclasses.dataclass
class Surgery:
    """Fault in one equation of a jaxpr.

    Attributes:
      primitive: primitive of the equation.
      number: number of equal primitives before the equation, including bodies; negative from the
        end.
      fault: computes the outputs from the operands, from the right outputs `right`, and from the
        outputs `earlier` of an earlier equation.
      where: chooses among equations by the shape of their first output; by default, all equations.
      earlier: the primitive and the number of the earlier equation.
    """

    primitive: str
    number: int
    fault: Callable[..., Any]
    where: Callable[[tuple[int, ...]], bool] = lambda shape: True
    earlier: tuple[str, int] | None = None
    seen: int = 0
    done: bool = False

    def apply(self, jaxpr: Any) -> Any:
        """Return the program with the fault."""
        if self.number < 0:
            self.number += self._count(jaxpr)
        self.seen, self.done = 0, False
        self._earlier: list[Any] = []
        self._counts: dict[str, int] = {}
        self._with_fault: dict[int, Any] = {}
        found = self._rewritten(jaxpr, {})
        assert self.done, (
            f"the program has {self.seen} equations {self.primitive}, not {self.number + 1}"
        )
        return found

    def _count(self, jaxpr: Any) -> int:
        """Return the number of equations to choose from."""
        count = dataclasses.replace(self, number=1 << 30, done=False, seen=0)
        count._earlier, count._counts, count._with_fault = [], {}, {}
        count._rewritten(jaxpr, {})
        return count.seen

    def _rewritten(self, jaxpr: Any, axes: Mapping[str, int]) -> Any:
        inner = opened(jaxpr)
        new: list[Any] = []
        instead: dict[Var, Any] = {}
        read = lambda a: a if isinstance(a, Literal) else instead.get(a, a)
        for eqn in inner.eqns:
            eqn = eqn.replace(invars=[read(a) for a in eqn.invars])
            if not self.done and self._is_meant(eqn):
                self.done = True
                new += self._replacement(eqn, axes, instead)
                continue
            eqn = self._with_bodies(eqn, axes)
            self._keep(eqn)
            new.append(eqn)
        outs = [read(a) for a in inner.outvars]
        made = closed(inner.constvars, constants(jaxpr), inner.invars, outs, new, inner)
        return made if inner is not jaxpr else opened(made)

    def _is_meant(self, eqn: Any) -> bool:
        if eqn.primitive.name != self.primitive or not self.where(eqn.outvars[0].aval.shape):
            return False
        self.seen += 1
        return self.seen == self.number + 1

    def _keep(self, eqn: Any) -> None:
        """Store the outputs of the equation `earlier`, which `fault` reads."""
        name = eqn.primitive.name
        if self.earlier is not None and name == self.earlier[0]:
            if name == self.primitive and not self.where(eqn.outvars[0].aval.shape):
                return
            number = self._counts.get(self.earlier[0], 0)
            self._counts[self.earlier[0]] = number + 1
            if number == self.earlier[1]:
                self._earlier = list(eqn.outvars)

    def _with_bodies(self, eqn: Any, axes: Mapping[str, int]) -> Any:
        if eqn.primitive.name == "shard_map":
            inside, axes = [eqn.params["jaxpr"]], shard_map_of(eqn).axes
            params = lambda new: {"jaxpr": new[0]}
        else:
            try:
                inside = list(bodies(eqn))
            except KeyError:
                return eqn
            params = lambda new: with_bodies(eqn, new)
        return eqn.replace(params={**eqn.params, **params([self._body(b, axes) for b in inside])})

    def _body(self, body: Any, axes: Mapping[str, int]) -> Any:
        """Return a body with the fault. Several equations may call the same body."""
        if self.done:
            return self._with_fault.get(id(body), body)
        made = self._rewritten(body, axes)
        if self.done:
            self._with_fault[id(body)] = made
        return made

    def _replacement(self, eqn: Any, axes: Mapping[str, int], instead: dict[Var, Any]) -> list[Any]:
        """Return the equations of the fault; later equations read the outputs of the fault.

        If the fault reads the right outputs, the old equation comes first.
        """
        count, made_here = len(eqn.invars), len(eqn.outvars)

        def fn(*values: Any) -> Any:
            right, earlier = values[count : count + made_here], values[count + made_here :]
            given: dict[str, Any] = {"right": right[0] if made_here == 1 else right}
            if earlier:
                given["earlier"] = earlier[0] if len(earlier) == 1 else earlier
            return self.fault(*values[:count], **given)

        atoms = [*eqn.invars, *eqn.outvars, *self._earlier]
        body = _traced(fn, [a.aval for a in atoms], axes)
        env: dict[Any, Any] = dict(zip(body.invars, atoms, strict=True))
        assert not body.constvars
        made = []
        for inner in body.eqns:
            operands = [a if isinstance(a, Literal) else env.get(a, a) for a in inner.invars]
            made.append(inner.replace(invars=operands))
        outs = [a if isinstance(a, Literal) else env.get(a, a) for a in body.outvars]
        read = {a for e in made for a in e.invars if isinstance(a, Var)} | {
            a for a in outs if isinstance(a, Var)
        }
        instead.update(zip(eqn.outvars, outs, strict=True))
        return [*([eqn] if read & {*eqn.outvars} else []), *made]


def _traced(fn: Callable[..., Any], types: Sequence[Any], axes: Mapping[str, int]) -> Any:
    avals = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types]
    if not axes:
        return opened(jax.make_jaxpr(fn)(*avals))
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    (eqn,) = opened(jax.make_jaxpr(mapped)(*avals)).eqns
    return opened(shard_map_of(eqn).body)
