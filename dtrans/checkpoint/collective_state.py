"""What the trainers of a data-parallel job, or the ranks of a sharded one, hold: as rows of the
step's arrays.

    nccl2       trainer 0 saves everything, which all have alike
    sharding    each rank of the first group saves its rows of what is cut, without padding, and rank 0 what is not

The rows of a rank are the same in each stage: of a parameter that every rank has whole, each saves
those whose state it has. So no rank has more to save than another, and a checkpoint says nothing of
the stage that made it.

Where ranks own whole leaves, state is in bins (`dtrans.zero.by_leaf.packing`). Each saves the
arrays that are in its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from dtrans.checkpoint.assemble import as_jax, as_numpy, stored, whole
from dtrans.checkpoint.pserver_state import TRAINER, check_type
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.data_parallel.state import CollectiveState
from dtrans.errors import StateError
from dtrans.parameter_server.overview import VarDistributed
from dtrans.zero.plan import ShardingPlan


if TYPE_CHECKING:
    from dtrans.zero.by_leaf.packing import BinSlot
    from dtrans.zero.choose_slices import Sliced


class SavedJob(Protocol):
    """What is asked of a job of `dtrans.run.collective`, beside what all jobs have."""

    plan: Any
    mesh: jax.sharding.Mesh | None

    def slice_axis(self, name: str) -> int | None:
        """The dimension along which ranks have slices of an array; None for no slices."""

    def sharding_of(self, name: str) -> Any:
        """Where an array of the state is."""


def pieces_of(plan: CollectivePlan) -> dict[str, str]:
    """Who saves, and the name of its folder."""
    if isinstance(plan, ShardingPlan):
        return {f"rank {k}": f"rank-{k}" for k in range(plan.options.degree)}
    return {TRAINER: "trainer-0"}


def rows_of(plan: CollectivePlan) -> list[VarDistributed]:
    """Of which array each of them saves which rows."""
    cuts = {**plan.slices.leaves, **plan.slices.state} if isinstance(plan, ShardingPlan) else {}
    first, *_ = who = tuple(pieces_of(plan))
    params, places = {*plan.main.args[0].names}, _places(plan)
    found = []
    for n, t in _types(plan).items():
        kind: Any = "Param" if n in params else "Optimizer"
        row = dataclasses.replace(
            whole(n, t, who[places[n].rank] if n in places else first), vtype=kind
        )
        found += (
            [row]
            if n not in cuts
            else [_slice(row, cuts[n], k, who[k]) for k in range(_filled(cuts[n]))]
        )
    return found


def _places(plan: CollectivePlan) -> Mapping[str, BinSlot]:
    """Where arrays are that lie in bins."""
    return (
        plan.owned.state.places if isinstance(plan, ShardingPlan) and plan.owned is not None else {}
    )


def _types(plan: CollectivePlan) -> dict[str, Any]:
    """Name to type of each array of the state, as one device would have it."""
    step = {n: plan.main.inputs[n] for spec in plan.main.args[:2] for n in spec.names}
    return step | {n: jax.typeof(x) for n, x in plan.extra_state.items()}


def _filled(cut: Sliced) -> int:
    """How many ranks have more than padding of an array."""
    return -(-cut.size // cut.part)


def _slice(row: VarDistributed, cut: Sliced, k: int, who: str) -> VarDistributed:
    """What rank k has of an array, but for padding."""
    start, stop = k * cut.part, min((k + 1) * cut.part, cut.size)
    return dataclasses.replace(_rows_of(row, cut.axis, start, stop), block_id=k, endpoint=who)


def _rows_of(row: VarDistributed, axis: int, start: int, stop: int) -> VarDistributed:
    """Some of the rows of an array."""
    shape = (*row.origin_shape[:axis], stop - start, *row.origin_shape[axis + 1 :])
    is_slice = shape != row.origin_shape
    return dataclasses.replace(row, slice_shape=shape, axis=axis, offset=start, is_slice=is_slice)


# -- from a job ------------------------------------------------------------------------------------


def checked_state(job: SavedJob, state: Any) -> dict[str, jax.Array]:
    """The arrays of a state, by name. Raises StateError unless it is one of this job."""
    plan = job.plan
    if not dataclasses.is_dataclass(state) or not all(
        hasattr(state, f) for f in ("params", "opt_state")
    ):
        raise StateError(
            f"save takes the state that init or step returned, not {type(state).__name__}"
        )
    held: dict[str, Any] = {
        n: x for f in dataclasses.fields(state) for n, x in getattr(state, f.name).items()
    }
    wanted = held_types(plan)
    for n in (*wanted, *held):
        if n not in held or n not in wanted:
            there = "is not in the state" if n in wanted else "is nothing that this plan keeps"
            raise StateError(f"{n} {there} of {plan.main.name}; is it one of another plan?")
    for n, x in held.items():
        check_type(x, wanted[n], n, "this job holds")
        if isinstance(x, jax.Array) and x.is_deleted():
            raise StateError(f"{n} was donated to a step; save the state that step returned")
    return held


def held_types(plan: CollectivePlan) -> dict[str, Any]:
    """Name to type of each array of the state, as a job has it: of all ranks together, padding
    included."""
    cuts, places = plan.cuts if isinstance(plan, ShardingPlan) else {}, _places(plan)
    found = {
        n: cuts[n].of_all(t) if n in cuts else t for n, t in _types(plan).items() if n not in places
    }
    bins = dict.fromkeys(p.bin for p in places.values())
    return found | {n: cuts[n].of_all(plan.program.inputs[n]) for n in bins}


def savers(job: SavedJob) -> list[str]:
    """Those who save that are in this process."""
    who, mesh = list(pieces_of(job.plan)), job.mesh
    if mesh is None:
        return who
    first = mesh.devices.reshape(-1)[: len(who)]  # a group's ranks are next to each other
    return [
        w
        for w, device in zip(who, first, strict=True)
        if device.process_index == jax.process_index()
    ]


def values_of(plan: CollectivePlan, who: str, held: Mapping[str, Any]) -> dict[str, Any]:
    """What one of them saves: on a device that has it, and no more than that."""
    places = _places(plan)
    return {
        row.slice_name: _rows(row, held[row.origin_name])
        if row.origin_name not in places
        else _in_bin(plan, row, places[row.origin_name], held)
        for row in rows_of(plan)
        if row.endpoint == who
    }


def _in_bin(
    plan: CollectivePlan, row: VarDistributed, place: BinSlot, held: Mapping[str, Any]
) -> Any:
    """An array that lies in a bin."""
    inside = _rows_of(whole(place.bin, held[place.bin], row.endpoint), 0, *_span(plan, place))
    return _rows(inside, held[place.bin]).reshape(place.shape)


def _span(plan: CollectivePlan, place: BinSlot) -> tuple[int, int]:
    """From where to where an array is in the bin of all ranks."""
    start = place.rank * plan.program.inputs[place.bin].size + place.start
    return start, start + place.size


def _rows(row: VarDistributed, x: Any) -> Any:
    """Some rows of an array, from a device of this process that has them."""
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
    raise StateError(f"{row} is on no device of this process: the state is that of another job")


# -- to a job --------------------------------------------------------------------------------------


def state_of(
    job: SavedJob,
    there: Container[str],
    read: Callable[[Sequence[VarDistributed]], Sequence[np.ndarray]],
) -> CollectiveState:
    """A state of a job, out of what was saved: on each device of this process what it holds, and
    nothing else.

    Args:
      there: the names of what was saved. What the plan keeps beside the step, and was not saved,
        begins anew.
      read: slices of what was saved, without padding.
    """
    plan, held = job.plan, held_types(job.plan)
    anew = {n: as_numpy(x) for n, x in plan.extra_state.items() if n not in there}
    parts = {n: _parts(job, n, t) for n, t in held.items()}
    wanted = {
        (n, part): _contents(plan, n, job.slice_axis(n), part)
        for n in held
        if n not in anew
        for part in parts[n].values()
    }
    rows = [row for of in wanted.values() for row, _ in of]
    values = iter(read(rows))
    found = {key: [(next(values), start) for _, start in of] for key, of in wanted.items()}
    found |= {(n, part): [(x, 0)] for n, x in anew.items() for part in parts[n].values()}
    made = {}
    for n, t in held.items():
        axis = job.slice_axis(n)
        pieces = [
            as_jax(_filled_up(found[n, of], t, axis, of), t.dtype, device)
            for device, of in parts[n].items()
        ]
        made[n] = _one_array(job, n, t, pieces)
    params, opt_state = (spec.names for spec in plan.program.args[:2])
    return CollectiveState(
        *({n: made[n] for n in names} for names in (params, opt_state, plan.extra_state))
    )


# from where to where a device has an array, along the dimension of slices; empty for one that is
# not sliced
Part = tuple[int, ...]


def _parts(job: SavedJob, name: str, held: Any) -> dict[Any, Part]:
    """What each device of this process has of an array; the default device is None."""
    axis, mesh = job.slice_axis(name), job.mesh
    whole = () if axis is None else (0, held.shape[axis])
    if mesh is None:
        return {None: whole}
    indices: Any = job.sharding_of(name).addressable_devices_indices_map(held.shape)
    return {
        d: whole if axis is None else index[axis].indices(held.shape[axis])[:2]
        for d, index in indices.items()
    }


def _contents(
    plan: CollectivePlan, name: str, axis: int | None, part: Part
) -> list[tuple[VarDistributed, int]]:
    """What there is in a part of an array, but for padding: rows of arrays of the step, and where
    each begins."""
    inside = {n: p for n, p in _places(plan).items() if p.bin == name}
    if inside:
        types, spans = _types(plan), {n: _span(plan, p) for n, p in inside.items()}
        here = {
            n: start for n, (start, stop) in spans.items() if part[0] <= start and stop <= part[1]
        }
        return [(whole(n, types[n]), start - part[0]) for n, start in here.items()]
    row = whole(name, _types(plan)[name])
    if axis is None:
        return [(row, 0)]
    start, stop = part[0], min(part[1], row.origin_shape[axis])
    return [(_rows_of(row, axis, start, stop), 0)] if start < stop else []


def _filled_up(
    found: Sequence[tuple[np.ndarray, int]], held: Any, axis: int | None, part: Part
) -> np.ndarray:
    """A part of an array: what there is, in its place, and zeros."""
    if axis is None:
        ((x, _),) = found
        return x
    shape, dtype = stored(
        (*held.shape[:axis], part[1] - part[0], *held.shape[axis + 1 :]), held.dtype
    )
    made = np.zeros(shape, dtype)
    for x, start in found:
        x = x if x.ndim == made.ndim else x.reshape(-1)  # a bin is a vector
        made[(slice(None),) * axis + (slice(start, start + x.shape[axis]),)] = x
    return made


def _one_array(job: SavedJob, name: str, held: Any, pieces: list[jax.Array]) -> jax.Array:
    """The pieces of the devices here, as their part of one array of all devices."""
    if job.mesh is None:
        return pieces[0]
    return jax.make_array_from_single_device_arrays(held.shape, job.sharding_of(name), pieces)
