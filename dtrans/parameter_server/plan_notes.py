"""Remarks below the placement table of a printed plan of parameter servers."""

from __future__ import annotations

from typing import Any

from dtrans.batch.exact_step import shard_step
from dtrans.errors import BatchError, TraceError
from dtrans.parameter_server.exchange_rounds import TRAINERS
from dtrans.step.halves import divide_step
from dtrans.step.scopes import ignored_split_notes


def plan_notes(plan: Any) -> list[str]:
    """Return the remarks that a printed plan shows below its table of blocks.

    The remarks describe the batch split, compression, servers, traffic, the update, and state on
    trainers.

    Args:
      plan: a `PServerPlan`. (This module cannot import the class, because the module of the class
        imports this one.)
    """
    notes = _batch_notes(plan)
    notes += plan.compression.notes
    notes += _level_notes(plan)
    notes += _server_notes(plan)
    notes += plan.traffic.notes
    for leaf, reason in plan.placement.reasons_unsliced.items():
        notes.append(f"{leaf}: whole on {plan.placement.blocks[leaf][0].endpoint}: {reason}")
    notes += _shared_state_notes(plan)
    notes += plan.callback_notes
    notes += _device_notes(plan)
    notes += _update_notes(plan)
    if plan.frozen:
        notes.append(f"on the trainers only: {', '.join(plan.frozen)}")
    return notes


def _device_notes(plan: Any) -> list[str]:
    notes = [] if plan.device_program is None else list(plan.device_program.notes)
    if plan.devices is not None and plan.devices.model is not None:
        return [*notes, *plan.devices.model.notes]
    remedy = "to divide it over m devices of each trainer, pass mesh={'data': n, 'model': m}"
    return [*notes, *ignored_split_notes(plan.main.jaxpr, remedy)]


def _batch_notes(plan: Any) -> list[str]:
    if plan.shared is not None:
        notes = list(plan.shared.notes)
        if plan.compression.is_used:
            notes = [n.replace("exact:", "exact before rounding:", 1) for n in notes]
        return notes
    if plan.trainers == 1 or plan.push_every:
        return []
    # each trainer runs the step on its own part of the batch
    step = divide_step(plan.main).with_reported()
    try:
        return [shard_step(step, plan.options.batch, plan.trainers, TRAINERS).local_note]
    except (BatchError, TraceError) as e:
        # This is a note and no error, because the plan works: the user may replicate the arrays
        # that a BatchError names (`plan.on_mesh(unsplit_inputs=...)`), and trainers need no trace
        # of the full batch.
        reason = str(e).partition("\n")[0]
        return [
            "local: each trainer computes its own numbers, and the updates average these; dtrans "
            f"could not compare them with one device's numbers: {reason}"
        ]


def _level_notes(plan: Any) -> list[str]:
    """Return a remark on the bytes that trainers send at each density of `dtrans.TopK`.

    The density is the fraction of a gradient's numbers that trainers send.
    """
    if plan.compression.topk is None:
        return []
    levels = plan.compression.topk.levels
    notes = []
    for (first, density), at in zip(levels, plan.levels, strict=True):
        what = "full gradients" if density == 1 else f"{100 * density:.3g}% of each gradient"
        notes.append(
            f"from step {first} on, a trainer sends {what}: {at.bytes_per_step['send']:,} bytes "
            "per step, with indices"
        )
    return notes


def _server_notes(plan: Any) -> list[str]:
    notes = []
    for endpoint, size in plan.server_bytes.items():
        notes.append(
            f"{endpoint} holds {size['params']:,} bytes of parameters, {size['opt_state']:,} "
            "of optimizer state"
        )
    if len(plan.servers) > 1:
        notes.append(f"the fullest server holds {plan.balance:.2f} times the mean")
    return notes


def _shared_state_notes(plan: Any) -> list[str]:
    servers_with_blocks = sum(bool(units) for units in plan.placement.units.values())
    names_at: dict[str, list[str]] = {}
    for name in plan.update.shared_state:
        endpoints = [row.endpoint for row in plan.overview.by_origin(name)]
        servers = " and ".join(endpoints)
        if len(endpoints) == servers_with_blocks:
            servers = "every server"
        names_at.setdefault(servers, []).append(name)
    return [f"on {servers}: {', '.join(names)}" for servers, names in names_at.items()]


def _update_notes(plan: Any) -> list[str]:
    notes = []
    if plan.update.sized is not None:
        notes.append(
            "the update uses numbers that depend on the batch size; trainers send these numbers "
            "with each step, so a batch may differ in size from the traced one"
        )
    if plan.update.sent_values:
        lines = ", ".join(dict.fromkeys(plan.update.sent_values))
        notes.append(
            "the update reads values that trainers compute from the batch and send with each "
            f"step: {lines}"
        )
    if plan.update.fixed_size and plan.shared is not None:
        notes.append(
            f"the new {plan.update.fixed_size} depends on the batch size, so each batch must have "
            f"{plan.shared.rows} rows ({plan.trainers} times the traced batch); for another size "
            "trace the step with the batch of one trainer"
        )
    if plan.update.has_one_size:
        notes.append(
            "the step can be traced neither with twice nor with half the planned rows, so dtrans "
            "does not know if the update depends on the batch size; pass batches of the planned "
            "size"
        )
    return notes
