"""Bytes of parameters and optimizer state on each server, for a plan and for other dispatchers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dtrans.ir.program import OPTIMIZE
from dtrans.ops import OptimizeBlock, backup_of
from dtrans.parameter_server.dispatch import PSDispatcher
from dtrans.parameter_server.overview import VarsDistributed
from dtrans.parameter_server.placement import dispatched
from dtrans.slicing.blocks import Placement


def bytes_by_server(
    overview: VarsDistributed, endpoints: Iterable[str]
) -> dict[str, dict[str, int]]:
    """Return the bytes of "params" (parameters) and "opt_state" on each server, by endpoint."""
    found = {endpoint: {"params": 0, "opt_state": 0} for endpoint in endpoints}
    for row in overview:
        key = "opt_state" if row.vtype == "Optimizer" else "params"
        found[row.endpoint][key] += row.nbytes
    return found


def imbalance(sizes: Sequence[int]) -> float:
    """Return the largest size divided by the mean; 1.0 if all sizes are 0."""
    if not any(sizes):
        return 1.0
    return max(sizes) * len(sizes) / sum(sizes)


def compare_dispatchers(
    placement: Placement,
    overview: VarsDistributed,
    optimize_blocks: Iterable[OptimizeBlock],
    trainers: int,
    methods: Iterable[type[PSDispatcher]],
) -> dict[str, float]:
    """Return the imbalance of bytes that a plan would have with each dispatcher, by class name.

    Args:
      placement: the plan's blocks.
      overview: the arrays on the plan's servers.
      optimize_blocks: the updates of all servers, which show the state that each block needs.
      trainers: the number of trainers. (Some state exists once for each trainer.)
      methods: subclasses of `PSDispatcher`.

    Raises:
      ConfigError: a class is not a dispatcher, or does not return a server for each block.
    """
    state, shared = _state_bytes(
        placement, overview, _state_units(placement, optimize_blocks, trainers)
    )
    found = {}
    for method in methods:
        sizes = []
        for units in dispatched(placement, method).units.values():
            size = sum(unit.nbytes + state.get(unit.name, 0) for unit in units)
            sizes.append(size + shared * bool(units))
        found[method.__name__] = imbalance(sizes)
    return found


def _state_units(
    placement: Placement, optimize_blocks: Iterable[OptimizeBlock], trainers: int
) -> dict[str, str]:
    """Return the group of blocks that each array of optimizer state belongs to, by array name.

    The optimizer updates the blocks of a group (a *unit*) together. So they and their state are on
    one server.
    """
    found: dict[str, str] = {}
    for block in optimize_blocks:
        if block.role == OPTIMIZE:
            found |= dict.fromkeys(block.out_names, block.name)
    # No update returns the backups of DC-ASGD, so the loop above does not find them.
    for units in placement.units.values():
        for unit in units:
            for b in unit.blocks:
                for k in range(trainers):
                    found[backup_of(b.name, k)] = unit.name
    return found


def _state_bytes(
    placement: Placement, overview: VarsDistributed, unit_of: dict[str, str]
) -> tuple[dict[str, int], int]:
    """Return the bytes of each unit's optimizer state, and the bytes of all other state.

    A unit is a group of blocks that the optimizer updates together. Other state, such as a step
    count, is copied to every server that stores a block.

    Args:
      placement: the plan's blocks.
      overview: the arrays on the plan's servers.
      unit_of: name of the unit of each state array, by the array's name.
    """
    params = {b.name for b in placement.all_blocks}
    state: dict[str, int] = {}
    shared: dict[str, int] = {}  # the keys are names, so that copies on several servers count once
    for row in overview:
        if row.slice_name in params:
            continue
        unit = unit_of.get(row.slice_name)
        if unit is None:
            shared[row.slice_name] = row.nbytes
        else:
            state[unit] = state.get(unit, 0) + row.nbytes
    return state, sum(shared.values())
