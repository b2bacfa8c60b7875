"""Rounding errors of compressed gradients in checkpoints.

Each trainer with error feedback has its own rounding errors, which are no part of the single-device
step (`dtrans.parameter_server.compression`). A checkpoint contains them as arrays with a row for
each trainer. Servers save these rows: trainer k sends its row to the server number k modulo the
number of servers. So a trainer needs no access to the folder of checkpoints.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.checkpoint.assemble import full_slice
from dtrans.checkpoint.orbax_io import Checkpoint
from dtrans.errors import CheckpointWarning
from dtrans.parameter_server.overview import VarDistributed
from dtrans.parameter_server.plan import PServerPlan


def rounding_error_saver(plan: PServerPlan, trainer: int) -> str:
    """Return the endpoint of the server that saves the rounding errors of a trainer."""
    endpoints = list(plan.servers)
    return endpoints[trainer % len(endpoints)]


def rounding_error_rows(plan: PServerPlan, endpoint: str = "") -> dict[int, list[VarDistributed]]:
    """Describe the rounding errors of each trainer as slices to save, by the trainer's id.

    Args:
      plan: the plan of the job.
      endpoint: endpoint of a server that saves the slices; empty for the slices on all servers.
    """
    found = dict[int, list[VarDistributed]]()
    types = plan.compression.rounding_error_types
    for k in range(plan.trainers if types else 0):
        saver = rounding_error_saver(plan, k)
        if endpoint in ("", saver):
            found[k] = [_row(n, t, k, plan.trainers, saver) for n, t in types.items()]
    return found


def _row(name: str, t: Any, trainer: int, trainers: int, saver: str = "") -> VarDistributed:
    """Describe a trainer's row of the array with the rounding errors of all trainers."""
    row = full_slice(name, t.update(shape=(trainers, *t.shape)), saver)
    row = dataclasses.replace(row, slice_name=f"{name}.trainer_{trainer}", block_id=trainer)
    if trainers == 1:
        return row
    return dataclasses.replace(row, slice_shape=(1, *t.shape), offset=trainer, is_slice=True)


def rounding_error_slices(
    plan: PServerPlan, arrays: Mapping[str, Any], trainer: int
) -> dict[str, np.ndarray]:
    """Rename a trainer's rounding errors: from names of arrays to names of slices in a checkpoint.

    Args:
      plan: the plan of the job.
      arrays: the trainer's rounding errors, by name.
      trainer: the trainer's id.
    """
    found = {}
    for row in rounding_error_rows(plan).get(trainer, ()):
        found[row.slice_name] = np.asarray(arrays[row.origin_name])[None]
    return found


def restore_rounding_errors(
    saved: Checkpoint, plan: PServerPlan, trainers: Sequence[int]
) -> dict[int, dict[str, np.ndarray]]:
    """Read the rounding errors with which trainers continue from a checkpoint.

    The result maps a trainer's id to a dict of arrays by name.

    If the saved job had another number of trainers, each trainer begins with the mean over the
    saved trainers. This mean is the part of the mean gradient that servers have not received yet.
    So nothing of this part is lost. Arrays that are not in the checkpoint begin with zeros. In both
    cases the job computes other numbers than an uninterrupted job, and the function warns.

    Args:
      saved: the checkpoint.
      plan: the plan of the job that continues.
      trainers: ids of the trainers.
    """
    found: dict[int, dict[str, np.ndarray]] = {k: {} for k in trainers}
    missing, old_count = list[str](), plan.trainers
    for n, t in plan.compression.rounding_error_types.items():
        rows = saved.rows.get(n, ())
        count = rows[0].origin_shape[0] if rows else 0
        if not count:
            missing.append(n)
            values = [np.zeros(t.shape, t.dtype)] * len(trainers)
        elif count == plan.trainers:
            slices = [_row(n, t, k, count) for k in trainers]
            values = [x[0] for x in saved.on_host(slices)]
        else:
            old_count = count
            (full,) = saved.on_host([full_slice(n, t.update(shape=(count, *t.shape)))])
            values = [full.mean(0).astype(t.dtype)] * len(trainers)
        for k, x in zip(trainers, values, strict=True):
            found[k][n] = x
    if missing:
        text = (
            f"the checkpoint at {saved.path} lacks {missing[0]} (missing: {len(missing)} arrays of "
            "each trainer), so trainers begin with zeros; to save these arrays, call "
            "job.save(name) on every trainer while servers run"
        )
        warnings.warn(CheckpointWarning(text), stacklevel=2)
    if old_count != plan.trainers:
        text = (
            f"the checkpoint at {saved.path} has rounding errors of {old_count} trainers, and this "
            f"job has {plan.trainers}; each trainer begins with their mean"
        )
        warnings.warn(CheckpointWarning(text), stacklevel=2)
    return found
