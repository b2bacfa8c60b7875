"""Conversion of a collective job's state to slices of the single-device step's arrays, and back.

    nccl2       trainer 0 saves all arrays, since they are equal on all trainers
    sharding    each rank of the first group saves its rows of sliced arrays, without padding.
                Rank 0 also saves all other arrays

A checkpoint does not depend on the ZeRO stage. In stages 1 and 2, parameters are replicated. But as
in stage 3, each rank saves only the rows for which it has optimizer state. So all ranks save about
as many bytes.

If the plan assigns full leaves to ranks, state is packed into bins
(`dtrans.zero.by_leaf.packing`). Each rank then saves the arrays in its bins.

With a model axis (`mesh=`), the devices of a trainer or rank divide an array. The trainer or rank
joins these pieces before it saves the array, or its rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from dtrans.checkpoint.assemble import as_jax, as_numpy, full_slice, numpy_type
from dtrans.checkpoint.pserver_state import TRAINER, check_names, check_type
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.data_parallel.state import CollectiveState
from dtrans.errors import StateError
from dtrans.ir.pytree import all_names
from dtrans.ir.selection import subset
from dtrans.parameter_server.overview import VarDistributed
from dtrans.zero.plan import ShardingPlan


if TYPE_CHECKING:
    from dtrans.engine.layout import Sliced
    from dtrans.zero.by_leaf.packing import BinSlot


class SavedJob(Protocol):
    """Members of a collective job that this module uses to save and restore the job's state."""

    plan: Any
    mesh: jax.sharding.Mesh | None

    def sharding_of(self, name: str) -> Any:
        """Return the `jax.sharding.Sharding` of an array of the state."""


def piece_names(plan: CollectivePlan) -> dict[str, str]:
    """Return the folder name of each rank or trainer that writes a part of the checkpoint."""
    if isinstance(plan, ShardingPlan):
        return {f"rank {k}": f"rank-{k}" for k in range(plan.options.degree)}
    if plan.options.colocated:
        return {f"trainer {k}": f"trainer-{k}" for k in range(plan.trainers)}
    return {TRAINER: "trainer-0"}


def saver_rows(plan: CollectivePlan) -> list[VarDistributed]:
    """Return the slices of arrays that ranks or trainers save.

    The field `endpoint` of a slice names the rank or trainer that saves it, e.g. `rank 0`.
    """
    slices: Mapping[str, Sliced] = {}
    if isinstance(plan, ShardingPlan):
        slices = {**plan.slices.leaves, **plan.slices.state}
    elif plan.options.colocated and plan.model_state is not None:
        slices = plan.model_state.sliced
    savers = tuple(piece_names(plan))
    params, places = {*plan.main.args[0].names}, _bin_slots(plan)
    found = []
    for n, t in _types(plan).items():
        kind: Any = "Param" if n in params else "Optimizer"
        rank = places[n].rank if n in places else 0
        row = dataclasses.replace(full_slice(n, t, savers[rank]), vtype=kind)
        if n not in slices:
            found.append(row)
            continue
        for k in range(_filled_ranks(slices[n])):
            found.append(_slice(row, slices[n], k, savers[k]))
    return found


def _bin_slots(plan: CollectivePlan) -> Mapping[str, BinSlot]:
    """Return the position of each array in its bin (a vector with all arrays of one rank)."""
    if isinstance(plan, ShardingPlan) and plan.owned is not None:
        return plan.owned.state.places
    return {}


def _types(plan: CollectivePlan) -> dict[str, Any]:
    """Return the single-device type of each array of the state, by name."""
    step = subset(plan.main.inputs, all_names(plan.main.args[:2]))
    return step | {n: jax.typeof(x) for n, x in plan.extra_state.items()}


def _filled_ranks(sliced: Sliced) -> int:
    """Return the number of ranks that have rows of an array.

    If an array has fewer rows than there are ranks, the last ranks have only padding.
    """
    return -(-sliced.size // sliced.part)


def _slice(row: VarDistributed, sliced: Sliced, k: int, who: str) -> VarDistributed:
    """Describe the rows of an array on rank k, without padding, as a slice that `who` saves."""
    start, stop = k * sliced.part, min((k + 1) * sliced.part, sliced.size)
    return dataclasses.replace(_rows_of(row, sliced.axis, start, stop), block_id=k, endpoint=who)


def _rows_of(row: VarDistributed, axis: int, start: int, stop: int) -> VarDistributed:
    """Describe a range of rows of an array as a slice."""
    shape = (*row.origin_shape[:axis], stop - start, *row.origin_shape[axis + 1 :])
    is_slice = shape != row.origin_shape
    return dataclasses.replace(row, slice_shape=shape, axis=axis, offset=start, is_slice=is_slice)


# -- from a job ------------------------------------------------------------------------------------


def check_job_state(job: SavedJob, state: Any) -> dict[str, jax.Array]:
    """Return the arrays of a state by name; raise StateError unless it is a state of this job."""
    plan = job.plan
    is_state = hasattr(state, "params") and hasattr(state, "opt_state")
    if not dataclasses.is_dataclass(state) or not is_state:
        raise StateError(
            f"the state is a {type(state).__name__}; expected the state that job.init or job.step "
            "returned"
        )
    arrays: dict[str, Any] = {}
    for field in dataclasses.fields(state):
        arrays |= getattr(state, field.name)
    wanted = state_types(plan)
    check_names(arrays, wanted, plan.main.name)
    for n, x in arrays.items():
        check_type(x, wanted[n], n, "this job")
        if isinstance(x, jax.Array) and x.is_deleted():
            raise StateError(f"{n} was donated to job.step; save the state that it returned")
    return arrays


def state_types(plan: CollectivePlan) -> dict[str, Any]:
    """Return the global type, with padding, of each array of a job's state (dict by name)."""
    slices_by_axis, places = plan.slices_by_axis, _bin_slots(plan)
    found = {}
    for n, t in _types(plan).items():
        if n in places:
            continue
        found[n] = t
        for sliced in slices_by_axis.get(n, {}).values():
            found[n] = sliced.padded_type(found[n])
    for place in places.values():
        slices = plan.sliced[place.bin]
        found[place.bin] = slices.padded_type(plan.program.inputs[place.bin])
    return found


def local_savers(job: SavedJob) -> list[str]:
    """Return the ranks or trainers of this process that save a part of the checkpoint."""
    savers, mesh = list(piece_names(job.plan)), job.mesh
    if mesh is None:
        return savers
    # The first group of ranks saves. The ranks of a group are adjacent in the mesh, and so are the
    # devices of a rank.
    devices = mesh.devices.reshape(-1)[:: job.plan.devices_per_trainer][: len(savers)]
    local = []
    for saver, device in zip(savers, devices, strict=True):
        if device.process_index == jax.process_index():
            local.append(saver)
    return local


def values_to_save(plan: CollectivePlan, who: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays that one rank or trainer saves.

    The function copies no array from one device to another.

    Args:
      plan: plan of the job.
      who: the rank or trainer: `rank 0`, `trainer 0`.
      arrays: arrays of the job's state, by name, sharded over the devices.

    Returns:
      The saved slices, by name. An array that is not sliced is saved under its name in the step.
    """
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
    """Return one array from a bin, the vector that contains all arrays of one rank."""
    everything = full_slice(place.bin, arrays[place.bin], row.endpoint)
    inside = _rows_of(everything, 0, *_bin_span(plan, place))
    return _rows(inside, arrays[place.bin]).reshape(place.shape)


def _bin_span(plan: CollectivePlan, place: BinSlot) -> tuple[int, int]:
    """Return the range of an array in the concatenation of all ranks' bins.

    A bin is the vector that contains all arrays of one rank.
    """
    start = place.rank * plan.program.inputs[place.bin].size + place.start
    return start, start + place.size


def _rows(row: VarDistributed, x: Any) -> Any:
    """Return a slice of an array, from devices of this process.

    If no device has all rows of the slice, the slice is assembled on the host.
    """
    if not isinstance(x, jax.Array):
        return x[row.index]
    if not row.is_slice and not row.origin_shape:
        return x.addressable_data(0)
    wanted = dict(enumerate(zip((0,) * x.ndim, row.slice_shape, strict=True)))
    wanted[row.axis] = row.offset, row.offset + row.slice_shape[row.axis]
    pieces: dict[tuple[int, ...], Any] = {}  # start of a piece in the slice -> piece
    for shard in x.addressable_shards:
        starts, inside = [], []
        for dim, (first, last) in wanted.items():
            start, stop, _ = shard.index[dim].indices(x.shape[dim])
            begin, end = max(first, start), min(last, stop)
            starts.append(begin - first)
            inside.append((begin - start, end - start))
        if any(end <= begin for begin, end in inside):
            continue
        data: Any = shard.data
        if inside != [(0, n) for n in data.shape]:
            begins = [begin for begin, _ in inside]
            data = jax.lax.dynamic_slice(data, begins, [end - begin for begin, end in inside])
        if data.shape == row.slice_shape:
            return data
        pieces.setdefault(tuple(starts), data)
    if sum(data.size for data in pieces.values()) == math.prod(row.slice_shape):
        shape, dtype = numpy_type(row.slice_shape, x.dtype)
        out = np.empty(shape, dtype)
        for at, data in pieces.items():
            place = [slice(a, a + n) for a, n in zip(at, data.shape, strict=True)]
            out[tuple(place)] = as_numpy(data)
        return out
    raise StateError(f"no device of this process has the slice {row}; pass a state of this job")


# -- to a job --------------------------------------------------------------------------------------


def build_state(
    job: SavedJob,
    saved: Container[str],
    read: Callable[[Sequence[VarDistributed]], Sequence[np.ndarray]],
) -> CollectiveState:
    """Build the state of a job from saved arrays; each device receives only its shards.

    Args:
      job: the job.
      saved: the names of the saved arrays. Extra state of the plan that is not among them starts
        from its initial value.
      read: a function that reads slices of saved arrays, without padding.
    """
    plan, types = job.plan, state_types(job.plan)
    initial = {n: as_numpy(x) for n, x in plan.extra_state.items() if n not in saved}
    parts = {n: _device_parts(job, n, t) for n, t in types.items()}

    # Each call of `read` opens all pieces, so it is called once, with the slices of all arrays. If
    # several devices have the same part of an array, the part is read once.
    wanted: dict[tuple[str, Part], list[tuple[VarDistributed, int]]] = {}
    slices: list[VarDistributed] = []
    for n in types:
        if n in initial:
            continue
        for part in dict.fromkeys(parts[n].values()):
            wanted[n, part] = _part_rows(plan, n, part)
            slices += [row for row, _ in wanted[n, part]]
    values = iter(read(slices))
    found: dict[tuple[str, Part], list[tuple[np.ndarray, int]]] = {}
    for key, rows in wanted.items():
        found[key] = [(next(values), start) for _, start in rows]
    for n, x in initial.items():
        for part in parts[n].values():
            found[n, part] = [(x, 0)]

    arrays = {}
    for n, t in types.items():
        pieces = []
        for device, part in parts[n].items():
            pieces.append(as_jax(_fill_part(found[n, part], t, part), t.dtype, device))
        arrays[n] = _global_array(job, n, t, pieces)
    params, opt_state = plan.program.args[:2]
    fields = []
    for names in (params.names, opt_state.names, plan.extra_state):
        fields.append(subset(arrays, names))
    return CollectiveState(*fields)


# a device's part of an array: (dimension, start, stop) for each sliced dimension
Part = tuple[tuple[int, int, int], ...]


def _device_parts(job: SavedJob, name: str, aval: Any) -> dict[Any, Part]:
    """Map each device of this process to the part of an array that the device stores.

    The device None is JAX's default device.
    """
    axes, mesh = [s.axis for s in job.plan.slices_by_axis.get(name, {}).values()], job.mesh
    indices: Any = {None: [slice(None)] * aval.ndim}
    if mesh is not None:
        indices = job.sharding_of(name).addressable_devices_indices_map(aval.shape)
    parts = {}
    for device, index in indices.items():
        spans = [(axis, *index[axis].indices(aval.shape[axis])[:2]) for axis in axes]
        parts[device] = tuple(spans)
    return parts


def _part_rows(plan: CollectivePlan, name: str, part: Part) -> list[tuple[VarDistributed, int]]:
    """Return the slices of saved arrays that fill one device's part of an array.

    Args:
      name: an array of the job's state: an array of the step, or a bin (a vector with all arrays of
        a rank).
      part: a device's part of the array. If the part is limited along several dimensions, the
        slices are limited only along the first one.

    Returns:
      Pairs (slice of an array of the step, the index in the device's part at which it begins).
    """
    found = []
    types = _types(plan)
    in_bin = {n: place for n, place in _bin_slots(plan).items() if place.bin == name}
    if in_bin:
        for n, place in in_bin.items():
            start, stop = _bin_span(plan, place)
            ((_, first, last),) = part
            if first <= start and stop <= last:
                found.append((full_slice(n, types[n]), start - first))
        return found
    row = full_slice(name, types[name])
    if not part:
        return [(row, 0)]
    # rows from `stop` on are padding
    axis, start, stop = part[0]
    stop = min(stop, row.origin_shape[axis])
    if start < stop:
        found.append((_rows_of(row, axis, start, stop), 0))
    return found


def _fill_part(found: Sequence[tuple[np.ndarray, int]], aval: Any, part: Part) -> np.ndarray:
    """Return a device's part of an array: saved values at their indices, and zeros elsewhere."""
    if not part:
        ((x, _),) = found
        return x
    (axis, *_), *others = part
    sizes = list(aval.shape)
    for dim, first, last in part:
        sizes[dim] = last - first
    shape, dtype = numpy_type(tuple(sizes), aval.dtype)
    out = np.zeros(shape, dtype)
    for x, start in found:
        if x.ndim != out.ndim:
            x = x.reshape(-1)  # the output is a bin: a vector
        for dim, first, last in others:
            x = x[(slice(None),) * dim + (slice(first, last),)]
        # keys have one more dimension of data
        place = [slice(n) for n in x.shape]
        place[axis] = slice(start, start + x.shape[axis])
        out[tuple(place)] = x
    return out


def _global_array(job: SavedJob, name: str, aval: Any, pieces: list[jax.Array]) -> jax.Array:
    """Return the global array, made of the shards on this process's devices."""
    if job.mesh is None:
        return pieces[0]
    return jax.make_array_from_single_device_arrays(aval.shape, job.sharding_of(name), pieces)
