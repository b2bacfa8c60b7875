"""State of data-parallel trainers or sharded ranks, as rows of the step's arrays.

    nccl2       trainer 0 saves everything, since all trainers have the same
    sharding    each rank of the first group saves its rows of sliced arrays, without padding, and
                rank 0 all other arrays

The rows of a rank are the same in each stage. Each rank saves the rows of a replicated parameter
whose optimizer state it has. So all ranks save equally much, and a checkpoint does not depend on
the stage.

If ranks own complete leaves, state is in bins (`dtrans.zero.by_leaf.packing`). Each rank saves the
arrays in its bins.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from dtrans.checkpoint.assemble import as_jax, as_numpy, full_slice, numpy_type
from dtrans.checkpoint.pserver_state import TRAINER, check_type
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.data_parallel.state import CollectiveState
from dtrans.errors import StateError
from dtrans.ir.selection import subset
from dtrans.parameter_server.overview import VarDistributed
from dtrans.zero.plan import ShardingPlan


if TYPE_CHECKING:
    from dtrans.zero.by_leaf.packing import BinSlot
    from dtrans.zero.choose_slices import Sliced


class SavedJob(Protocol):
    """Attributes of a job of `dtrans.run.collective` that this module reads."""

    plan: Any
    mesh: jax.sharding.Mesh | None

    def slice_axis(self, name: str) -> int | None:
        """Return the dimension along which ranks slice an array; None if they do not."""

    def sharding_of(self, name: str) -> Any:
        """Return the sharding of an array of the state."""


def piece_names(plan: CollectivePlan) -> dict[str, str]:
    """Return the savers, each with the name of its folder."""
    if isinstance(plan, ShardingPlan):
        return {f"rank {k}": f"rank-{k}" for k in range(plan.options.degree)}
    return {TRAINER: "trainer-0"}


def saver_rows(plan: CollectivePlan) -> list[VarDistributed]:
    """Return the rows of each array that each saver writes."""
    cuts = {**plan.slices.leaves, **plan.slices.state} if isinstance(plan, ShardingPlan) else {}
    savers = tuple(piece_names(plan))
    params, places = {*plan.main.args[0].names}, _bin_slots(plan)
    found = []
    for n, t in _types(plan).items():
        kind: Any = "Param" if n in params else "Optimizer"
        owner = savers[places[n].rank] if n in places else savers[0]
        row = dataclasses.replace(full_slice(n, t, owner), vtype=kind)
        if n not in cuts:
            found.append(row)
            continue
        found += [_slice(row, cuts[n], k, savers[k]) for k in range(_filled_ranks(cuts[n]))]
    return found


def _bin_slots(plan: CollectivePlan) -> Mapping[str, BinSlot]:
    """Return the slot of each array in a bin."""
    has_bins = isinstance(plan, ShardingPlan) and plan.owned is not None
    return plan.owned.state.places if has_bins else {}


def _types(plan: CollectivePlan) -> dict[str, Any]:
    """Return the single-device type of each array of the state, by name."""
    step = {n: plan.main.inputs[n] for spec in plan.main.args[:2] for n in spec.names}
    return step | {n: jax.typeof(x) for n, x in plan.extra_state.items()}


def _filled_ranks(cut: Sliced) -> int:
    """Return the number of ranks that have more than padding of an array."""
    return -(-cut.size // cut.part)


def _slice(row: VarDistributed, cut: Sliced, k: int, who: str) -> VarDistributed:
    """Return the rows of an array on rank k, without padding."""
    start, stop = k * cut.part, min((k + 1) * cut.part, cut.size)
    return dataclasses.replace(_rows_of(row, cut.axis, start, stop), block_id=k, endpoint=who)


def _rows_of(row: VarDistributed, axis: int, start: int, stop: int) -> VarDistributed:
    """Return a range of rows of an array."""
    shape = (*row.origin_shape[:axis], stop - start, *row.origin_shape[axis + 1 :])
    is_slice = shape != row.origin_shape
    return dataclasses.replace(row, slice_shape=shape, axis=axis, offset=start, is_slice=is_slice)


# -- from a job ------------------------------------------------------------------------------------


def check_job_state(job: SavedJob, state: Any) -> dict[str, jax.Array]:
    """Return the arrays of a state by name. Raises StateError unless it belongs to this job."""
    plan = job.plan
    is_state = hasattr(state, "params") and hasattr(state, "opt_state")
    if not dataclasses.is_dataclass(state) or not is_state:
        raise StateError(
            f"save takes the state that init or step returned, not {type(state).__name__}"
        )
    arrays: dict[str, Any] = {}
    for field in dataclasses.fields(state):
        arrays |= getattr(state, field.name)
    wanted = state_types(plan)
    for n in (*wanted, *arrays):
        if n not in arrays or n not in wanted:
            problem = "is missing in the state" if n in wanted else "is no part of the state"
            raise StateError(f"{n} {problem} of {plan.main.name}; pass a state of this plan")
    for n, x in arrays.items():
        check_type(x, wanted[n], n, "this job has")
        if isinstance(x, jax.Array) and x.is_deleted():
            raise StateError(f"{n} was donated to a step; save the state that step returned")
    return arrays


def state_types(plan: CollectivePlan) -> dict[str, Any]:
    """Return the type of each array of a job's state, by name: that of all ranks, with padding."""
    cuts, places = plan.cuts if isinstance(plan, ShardingPlan) else {}, _bin_slots(plan)
    separate = {n: t for n, t in _types(plan).items() if n not in places}
    found = {n: cuts[n].padded_type(t) if n in cuts else t for n, t in separate.items()}
    bins = dict.fromkeys(p.bin for p in places.values())
    return found | {n: cuts[n].padded_type(plan.program.inputs[n]) for n in bins}


def local_savers(job: SavedJob) -> list[str]:
    """Return the savers in this process."""
    savers, mesh = list(piece_names(job.plan)), job.mesh
    if mesh is None:
        return savers
    devices = mesh.devices.reshape(-1)[: len(savers)]  # the ranks of a group are adjacent
    is_local = [device.process_index == jax.process_index() for device in devices]
    return list(itertools.compress(savers, is_local))


def values_to_save(plan: CollectivePlan, who: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that one saver writes, on a device that has them and without a gather."""
    places, found = _bin_slots(plan), {}
    for row in saver_rows(plan):
        if row.endpoint != who:
            continue
        if row.origin_name in places:
            found[row.slice_name] = _read_bin(plan, row, places[row.origin_name], arrays)
        else:
            found[row.slice_name] = _rows(row, arrays[row.origin_name])
    return found


def _read_bin(
    plan: CollectivePlan, row: VarDistributed, place: BinSlot, arrays: Mapping[str, Any]
) -> Any:
    """Return an array that is in a bin."""
    everything = full_slice(place.bin, arrays[place.bin], row.endpoint)
    inside = _rows_of(everything, 0, *_bin_span(plan, place))
    return _rows(inside, arrays[place.bin]).reshape(place.shape)


def _bin_span(plan: CollectivePlan, place: BinSlot) -> tuple[int, int]:
    """Return the range of an array in the concatenated bins of all ranks."""
    start = place.rank * plan.program.inputs[place.bin].size + place.start
    return start, start + place.size


def _rows(row: VarDistributed, x: Any) -> Any:
    """Return rows of an array, from a device of this process that has them."""
    if not isinstance(x, jax.Array):
        return x[row.index]
    if not row.is_slice and not row.origin_shape:
        return x.addressable_data(0)
    size = row.slice_shape[row.axis]
    for shard in x.addressable_shards:
        start, stop, _ = shard.index[row.axis].indices(x.shape[row.axis])
        if start <= row.offset and row.offset + size <= stop:
            data: Any = shard.data
            if data.shape == row.slice_shape:
                return data
            return jax.lax.dynamic_slice_in_dim(data, row.offset - start, size, row.axis)
    raise StateError(f"{row} is on no device of this process; pass a state of this job")


# -- to a job --------------------------------------------------------------------------------------


def build_state(
    job: SavedJob,
    saved: Container[str],
    read: Callable[[Sequence[VarDistributed]], Sequence[np.ndarray]],
) -> CollectiveState:
    """Build the state of a job from saved arrays: each device of this process gets its shards only.

    Args:
      job: the job.
      saved: the names of saved arrays. Extra state of the plan that was not saved starts from its
        initial value.
      read: a function that reads saved slices, without padding.
    """
    plan, types = job.plan, state_types(job.plan)
    initial = {n: as_numpy(x) for n, x in plan.extra_state.items() if n not in saved}
    parts = {n: _device_parts(job, n, t) for n, t in types.items()}

    # one call of `read` for all arrays, so that each piece of the checkpoint is read once
    wanted: dict[tuple[str, Part], list[tuple[VarDistributed, int]]] = {}
    for n in types:
        if n not in initial:
            axis = job.slice_axis(n)
            wanted |= {(n, part): _part_rows(plan, n, axis, part) for part in parts[n].values()}
    values = iter(read([row for rows in wanted.values() for row, _ in rows]))
    found: dict[tuple[str, Part], list[tuple[np.ndarray, int]]] = {}
    for key, rows in wanted.items():
        found[key] = [(next(values), start) for _, start in rows]
    for n, x in initial.items():
        found |= {(n, part): [(x, 0)] for part in parts[n].values()}

    arrays = {}
    for n, t in types.items():
        axis, pieces = job.slice_axis(n), []
        for device, part in parts[n].items():
            pieces.append(as_jax(_fill_part(found[n, part], t, axis, part), t.dtype, device))
        arrays[n] = _global_array(job, n, t, pieces)
    params, opt_state = plan.program.args[:2]
    fields = []
    for names in (params.names, opt_state.names, plan.extra_state):
        fields.append(subset(arrays, names))
    return CollectiveState(*fields)


# start and stop of a device's part of an array, along the sliced dimension; empty if not sliced
Part = tuple[int, ...]


def _device_parts(job: SavedJob, name: str, aval: Any) -> dict[Any, Part]:
    """Return the part of an array on each device of this process; the default device is None."""
    axis, mesh = job.slice_axis(name), job.mesh
    if mesh is None:
        return {None: () if axis is None else (0, aval.shape[axis])}
    indices: Any = job.sharding_of(name).addressable_devices_indices_map(aval.shape)
    if axis is None:
        return dict.fromkeys(indices, ())
    return {d: index[axis].indices(aval.shape[axis])[:2] for d, index in indices.items()}


def _part_rows(
    plan: CollectivePlan, name: str, axis: int | None, part: Part
) -> list[tuple[VarDistributed, int]]:
    """Return the step's rows in a part of an array, each with its start there; without padding."""
    inside = {n: p for n, p in _bin_slots(plan).items() if p.bin == name}
    if inside:
        types, spans = _types(plan), {n: _bin_span(plan, p) for n, p in inside.items()}
        return [
            (full_slice(n, types[n]), start - part[0])
            for n, (start, stop) in spans.items()
            if part[0] <= start and stop <= part[1]
        ]
    row = full_slice(name, _types(plan)[name])
    if axis is None:
        return [(row, 0)]
    start, stop = part[0], min(part[1], row.origin_shape[axis])
    return [(_rows_of(row, axis, start, stop), 0)] if start < stop else []


def _fill_part(
    found: Sequence[tuple[np.ndarray, int]], aval: Any, axis: int | None, part: Part
) -> np.ndarray:
    """Return a part of an array: saved values at their starts, and zeros as padding."""
    if axis is None:
        ((x, _),) = found
        return x
    size = part[1] - part[0]
    shape, dtype = numpy_type((*aval.shape[:axis], size, *aval.shape[axis + 1 :]), aval.dtype)
    out = np.zeros(shape, dtype)
    for x, start in found:
        x = x if x.ndim == out.ndim else x.reshape(-1)  # a bin is a vector
        out[(slice(None),) * axis + (slice(start, start + x.shape[axis]),)] = x
    return out


def _global_array(job: SavedJob, name: str, aval: Any, pieces: list[jax.Array]) -> jax.Array:
    """Return the global array with the pieces of this process's devices."""
    if job.mesh is None:
        return pieces[0]
    return jax.make_array_from_single_device_arrays(aval.shape, job.sharding_of(name), pieces)
