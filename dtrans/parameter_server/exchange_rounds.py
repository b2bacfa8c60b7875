"""All-reduces between trainers within a step, through the servers.

Some steps need values of the full batch before the gradients are complete (`dtrans.batch`). A
masked mean needs the masks of all rows, and batch normalisation needs statistics of all rows. But
trainers have connections to servers only. So in a *round* every trainer sends its values to one
server, which reduces them and answers with the result. The servers take turns.

Independent values share a round, so that a step has as few rounds as possible. The values of round
n (counted from 0) depend on the results of n earlier rounds. Equations are sorted by the round
after which they can run.

The step's results, such as the loss, and statistics that trainers store are all-reduced too. So
each trainer returns the numbers that one device with the full batch would return.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from dtrans._jax import (
    LOOPS,
    REMAT,
    Atom,
    JaxprEqn,
    Var,
    bodies,
    equations,
    jaxprs_in_params,
    line_of,
)
from dtrans.batch.trainer_step import TrainerStep
from dtrans.errors import ConfigError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import variables
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import RPC
from dtrans.ir.selection import values_at
from dtrans.ops import all_reduce_p, collective_of, exchange_p, way_of
from dtrans.step.forward_backward import Arrange


TRAINERS = ("trainers",)  # Name of the mesh axis of the trainers.


def reduce_results(part: TrainerStep) -> TrainerStep:
    """Return a trainer's step in which results are summed over all trainers.

    For example, each trainer computes the loss of its rows, and the sum is the loss of the full
    batch. Outputs with one row for each example, such as predictions, are not summed.

    Raises:
      ConfigError: the body of a loop or a branch has a collective. Trainers would then have to
        communicate through the servers in each iteration, or in this branch only.
    """
    jaxpr = inline_calls(part.program.jaxpr, body_of=_communicating_remat)
    inner = part.program.with_jaxpr(jaxpr).inner
    b = Builder(jaxpr)
    b.invars += inner.invars
    for eqn in inner.eqns:
        collective = _collective_inside(eqn)
        if collective is not None:
            line = line_of(collective) or "an unknown line"
            reason, remedy = "with parameter servers each iteration would wait for all trainers", ""
            if eqn.primitive.name not in LOOPS:
                reason = "with parameter servers trainers cannot exchange values in a branch"
                remedy = "compute both branches and select with jnp.where; or "
            raise ConfigError(
                f"batch is 'exact', but the body of {eqn.primitive.name} needs values of the full "
                f"batch ({collective.primitive.name} for {line}), and {reason}; {remedy}use "
                "dtrans.nccl2 or dtrans.sharding, or pass batch='local', where each trainer has "
                "its own statistics, random numbers and counts"
            )
        b.keep(eqn)
    outs = dict(zip(part.program.out_names, inner.outvars, strict=True))
    merges = dict(part.merges)
    for name, way in part.merges.items():
        if way == "sum":
            params = {"op": "sum", "name": name, "owners": (), "over": TRAINERS}
            (outs[name],) = b.bind(all_reduce_p, outs[name], **params)
            merges[name] = "same"
    reduced = b.build(values_at(outs, part.program.out_names))
    role = part.program.roles[0] if part.program.roles else ""
    roles = (role,) * len(reduced.jaxpr.eqns)
    program = dataclasses.replace(part.program, jaxpr=reduced, roles=roles)
    return dataclasses.replace(part, program=program, merges=merges)


def sort_by_rounds(endpoints: Sequence[str], trainer_id: int, trainers: int) -> Arrange:
    """Return a function that replaces a step's collectives by `exchange` equations.

    Trainers have no connections to each other. So in an `exchange`, all trainers send some values
    to one server, and receive the reduced values. One `exchange` replaces several collectives if
    they do not depend on each other. For this, the returned function changes the order of
    equations.

    Args:
      endpoints: endpoints of the servers. Round n uses server n modulo the number of servers.
      trainer_id: index of the trainer.
      trainers: the number of trainers.
    """

    def arrange(
        eqns: Sequence[JaxprEqn], roles: Sequence[str], wanted: Collection[Atom]
    ) -> tuple[list[JaxprEqn], list[str]]:
        if not any(map(_is_collective, eqns)):
            return list(eqns), list(roles)
        rounds_before: dict[Var, int] = {}
        collectives: dict[int, list[JaxprEqn]] = {}
        others: dict[int, list[int]] = {}
        for i, eqn in enumerate(eqns):
            inputs = variables(eqn.invars)
            level = max((rounds_before.get(a, 0) for a in inputs), default=0)
            if _is_collective(eqn):
                collectives.setdefault(level, []).append(eqn)
            else:
                others.setdefault(level, []).append(i)
            rounds_before.update(dict.fromkeys(eqn.outvars, level + _is_collective(eqn)))

        sorted_eqns: list[JaxprEqn] = []
        sorted_roles: list[str] = []
        for level in range(max(collectives) + 2):
            for i in others.get(level, ()):
                sorted_eqns.append(eqns[i])
                sorted_roles.append(roles[i])
            if level in collectives:
                endpoint = endpoints[level % len(endpoints)]
                params = {"endpoint": endpoint, "round": level, "sync_mode": True}
                params |= {"trainer_id": trainer_id, "trainers": trainers}
                sorted_eqns.append(_exchange(collectives[level], params))
                sorted_roles.append(RPC)
        return sorted_eqns, sorted_roles

    return arrange


def _exchange(eqns: Sequence[JaxprEqn], params: dict[str, Any]) -> JaxprEqn:
    """Return the `exchange` equation that replaces some independent collectives.

    In an `exchange`, all trainers send the inputs of these collectives to one server, and receive
    the results.
    """
    invars: list[Atom] = []
    outvars: list[Var] = []
    how: list[Any] = []
    for eqn in eqns:
        invars += eqn.invars
        outvars += eqn.outvars
        how += [way_of(eqn)] * len(eqn.invars)
    return eqns[0].replace(
        primitive=exchange_p, invars=invars, outvars=outvars, params={**params, "how": tuple(how)}
    )


def _is_collective(eqn: JaxprEqn) -> bool:
    return collective_of(eqn) is not None


def _communicating_remat(eqn: JaxprEqn) -> Any:
    """Return the body of a `jax.checkpoint` equation that contains a collective; None otherwise.

    The caller replaces such an equation by its body. Otherwise the backward pass would recompute
    the body, and communicate a second time.
    """
    if eqn.primitive.name not in REMAT or _collective_inside(eqn) is None:
        return None
    return bodies(eqn)[0]


def _collective_inside(eqn: JaxprEqn) -> JaxprEqn | None:
    """Return the first collective in the bodies of an equation, or None."""
    for body in jaxprs_in_params(eqn.params):
        found = next(filter(_is_collective, equations(body)), None)
        if found is not None:
            return found
    return None
