"""Exchange of values between trainers in the middle of a step, through the servers, in rounds.

A step whose parts do not add up (`dtrans.batch`) communicates where rows of the batch meet. A
masked mean adds up two numbers, batch normalisation its statistics. Trainers have connections to
servers only. So every trainer sends its value, one server reduces the values, and answers.

Values that do not depend on each other share a round. A value is in round n if n rounds must
precede it, so the number of rounds is minimal. Equations are sorted by the rounds that they need.
One server carries out a round, and servers take turns.

Results of trainers, and the statistics that they keep, are reduced in the same way. Each trainer
then has the numbers of one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from dtrans._jax import REMAT, Atom, JaxprEqn, Var, bodies, equations, jaxprs_in_params, line_of
from dtrans.batch.trainer_step import TrainerStep
from dtrans.errors import ConfigError
from dtrans.ir.builder import Builder
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import RPC
from dtrans.ops import all_reduce_p, collective_of, exchange_p, way_of
from dtrans.step.forward_backward import Arrange


TRAINERS = ("trainers",)  # the axis that trainers are on


def told_to_all(part: TrainerStep) -> TrainerStep:
    """Reduce a trainer's results and parameters over all; values with rows of a part stay parts.

    Raises:
      ConfigError: communication in the body of a loop, where each turn would take a round.
    """
    jaxpr = inline_calls(part.program.jaxpr, body_of=_communicating_remat)
    b = Builder(jaxpr)
    inner = dataclasses.replace(
        part.program, jaxpr=jaxpr, roles=("",) * len(jaxpr.jaxpr.eqns)
    ).inner
    b.invars += inner.invars
    for eqn in inner.eqns:
        loop = _told_within(eqn)
        if loop is not None:
            raise ConfigError(
                f"batch='exact': {eqn.primitive.name} has values of the whole batch in its body "
                f"({loop.primitive.name} "
                f"for {line_of(loop) or 'an unknown line'}), and with parameter servers each turn "
                "would wait for all "
                "trainers. dtrans.nccl2 and dtrans.sharding carry it out; or say batch='local': "
                "then each part has its "
                "own statistics, random numbers and counts"
            )
        b.keep(eqn)
    outs = dict(zip(part.program.out_names, inner.outvars, strict=True))
    for name, way in part.merges.items():
        if way == "sum":
            (outs[name],) = b.bind(
                all_reduce_p, outs[name], op="sum", name=name, owners=(), over=TRAINERS
            )
    made = b.build([outs[n] for n in part.program.out_names])
    roles = (part.program.roles[0] if part.program.roles else "",) * len(made.jaxpr.eqns)
    program = dataclasses.replace(part.program, jaxpr=made, roles=roles)
    merges = {n: "same" if way == "sum" else way for n, way in part.merges.items()}
    return dataclasses.replace(part, program=program, merges=merges)


def in_rounds(endpoints: Sequence[str], trainer_id: int, trainers: int) -> Arrange:
    """Return the function that sorts equations by rounds, with one equation for each round."""

    def arranged(
        eqns: Sequence[JaxprEqn], roles: Sequence[str], wanted: Collection[Atom]
    ) -> tuple[list[JaxprEqn], list[str]]:
        if not any(map(_is_told, eqns)):
            return list(eqns), list(roles)
        after: dict[Var, int] = {}  # how many rounds come before a value
        at: list[tuple[int, int]] = []
        told: dict[int, list[JaxprEqn]] = {}
        for i, eqn in enumerate(eqns):
            level = max((after.get(a, 0) for a in eqn.invars if isinstance(a, Var)), default=0)
            if _is_told(eqn):
                told.setdefault(level, []).append(eqn)
            else:
                at.append((level, i))
            after.update(dict.fromkeys(eqn.outvars, level + _is_told(eqn)))
        found, of = [], []
        for level in range(max(told) + 2):
            here = [i for n, i in at if n == level]
            found += [eqns[i] for i in here]
            of += [roles[i] for i in here]
            if level in told:
                endpoint = endpoints[level % len(endpoints)]
                params = {"endpoint": endpoint, "round": level, "sync_mode": True}
                params |= {"trainer_id": trainer_id, "trainers": trainers}
                found.append(_round(told[level], params))
                of.append(RPC)
        return found, of

    return arranged


def _round(eqns: Sequence[JaxprEqn], params: dict[str, Any]) -> JaxprEqn:
    """Several equations as one."""
    how = tuple(way_of(e) for e in eqns for _ in e.invars)
    return eqns[0].replace(
        primitive=exchange_p,
        invars=[a for e in eqns for a in e.invars],
        outvars=[v for e in eqns for v in e.outvars],
        params={**params, "how": how},
    )


def _is_told(eqn: JaxprEqn) -> bool:
    return collective_of(eqn) is not None


def _communicating_remat(eqn: JaxprEqn) -> Any:
    """Return the body of a remat that communicates; inlined, it communicates only once."""
    return bodies(eqn)[0] if eqn.primitive.name in REMAT and _told_within(eqn) is not None else None


def _told_within(eqn: JaxprEqn) -> JaxprEqn | None:
    """Return the first collective in the bodies of an equation, or None."""
    return next(
        (e for body in jaxprs_in_params(eqn.params) for e in equations(body) if _is_told(e)), None
    )
