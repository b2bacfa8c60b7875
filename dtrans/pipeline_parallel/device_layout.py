"""Virtual devices: which devices of a job each stage of a pipeline has.

A stage has a grid of devices, a row for each replica of the model and in it as many as one replica
of that stage uses. A layout says how the devices of the job are dealt out into grids:

- `auto`: replica by replica, stage by stage, the next devices in order. The stages of one replica
  are neighbours, and the replicas of one stage lie apart: activations cross short links, gradients
  long ones.
- `aware_row`: the other way round, for processes of one device each: neighbours are replicas of one
  stage.
- `all`: one stage, which has every device.
- `specific`: grids that the user wrote down.

The order is that of hosts (`process_index`): all devices of one and then all of the next, or the
first device of each and then the second of each. Devices that no grid has room for stay idle. EPL
says nothing of them; here they are listed.

Source: `Cluster` and its layouts of EPL (epl/cluster.py).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from dtrans.errors import ConfigError


LAYOUTS = ("auto", "all", "specific", "aware_row")


class VirtualDevices(tuple[np.ndarray[Any, Any], ...]):
    """The grids of all stages, each an array of devices of shape [replica, device].

    Attributes:
      idle: the devices of the cluster that are in none of them, in the cluster's order.
    """

    idle: tuple[Any, ...]

    def __new__(
        cls, grids: Iterable[np.ndarray[Any, Any]], idle: Iterable[Any] = ()
    ) -> VirtualDevices:
        made = super().__new__(cls, grids)
        made.idle = tuple(idle)
        return made

    @property
    def replicas(self) -> int:
        """Return the number of replicas of the model."""
        return len(self[0])

    @property
    def notes(self) -> list[str]:
        """Return a remark that lists idle devices, if there are any."""
        count = len(self.idle)
        which = ", ".join(map(str, self.idle))
        return (
            [f"{count} {'device is' if count == 1 else 'devices are'} idle: {which}"]
            if count
            else []
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Cluster:
    """The devices of a job, and how they are dealt out to the stages of a pipeline.

    Args:
      layout: "auto": replica by replica, stage by stage, the next devices in order. "all": one
        stage, which has every device. "specific": the grids in `slices`. "aware_row": as "auto",
        with the replicas of a stage as neighbours instead of the stages of a replica, and the
        processes of one machine beside each other; every process has one device, and every stage
        uses one per replica.
      devices: all devices, each once; `jax.devices()` if not given. Anything that can be hashed and
        has a `process_index`, which says which host it belongs to.
      slices: with "specific", the devices as [stage][replica][device].
      prefer_intra_node: with "auto" and "all", take all devices of a host before those of the next;
        otherwise the first device of every host before the second of any.

    Raises:
      ConfigError: a layout that does not exist, `slices` without "specific" or the other way round,
        a device twice.

    Source: `Cluster` of EPL (epl/cluster.py), and `cluster.device_place_prefer_intra_node` of its
    configuration. EPL's "all" takes hosts in order whatever the preference is.

    Example:
      >>> import dataclasses
      >>> from dtrans.pipeline_parallel.device_layout import Cluster
      >>> Device = dataclasses.make_dataclass("Device", ["id", "process_index"], frozen=True)
      >>> cluster = Cluster(devices=[Device(i, process_index=i // 4) for i in range(4)])
      >>> [[[d.id for d in replica] for replica in stage] for stage in cluster.virtual_devices([1, 1])]
      [[[0], [2]], [[1], [3]]]
    """

    layout: str = "auto"
    devices: Sequence[Any] | None = None
    slices: Sequence[Sequence[Sequence[Any]]] | None = None
    prefer_intra_node: bool = True

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ConfigError(f"layout={self.layout!r} is none of {', '.join(LAYOUTS)}")
        if (self.slices is not None) != (self.layout == "specific"):
            needs = "needs slices=" if self.slices is None else "has no use for slices="
            raise ConfigError(
                f"layout={self.layout!r} {needs}[stage][replica][device], which is for "
                "layout='specific'"
            )
        if self.layout in ("specific", "aware_row") and not self.prefer_intra_node:
            raise ConfigError(
                f"layout={self.layout!r} has an order of its own; prefer_intra_node=False is for "
                "the others"
            )
        if self.devices is not None:
            _check_distinct(self.devices, "devices")

    def virtual_devices(
        self, device_counts: Sequence[int], replicas: int | None = None, *, use_all: bool = False
    ) -> VirtualDevices:
        """Return the grid of devices of each stage.

        Args:
          device_counts: how many devices one replica of each stage uses.
          replicas: how many replicas of the model there are; by default as many as there are
            devices for, which must come out even.
          use_all: make it an error if devices are left idle.

        Returns:
          One array for each stage, of shape [replica, device], in a tuple that also has the `idle`
          devices.

        Raises:
          ConfigError: too few devices, too many with `use_all`, numbers that do not come out even,
            or grids of `slices` that are not of these numbers.
        """
        counts = list(device_counts)
        if not counts or min(counts) < 1:
            raise ConfigError(
                f"device_counts={counts}: there is at least one stage, and each has at least one "
                "device"
            )
        if replicas is not None and replicas < 1:
            raise ConfigError(f"replicas={replicas}: a model has at least one replica")
        devices = list(jax.devices() if self.devices is None else self.devices)
        if not devices:
            raise ConfigError("the cluster has no devices")
        make = {"auto": _auto, "all": _all, "specific": _specific, "aware_row": _aware_row}[
            self.layout
        ]
        grids = make(self, devices, counts, replicas)
        used = {d for grid in grids for d in grid.flat}
        made = VirtualDevices(grids, (d for d in devices if d not in used))
        if use_all and made.idle:
            raise ConfigError(
                f"layout={self.layout!r}: {made.notes[0]}. Ask for more replicas, or for other "
                "stages"
            )
        return made


def _auto(
    cluster: Cluster, devices: list[Any], counts: list[int], replicas: int | None
) -> list[np.ndarray[Any, Any]]:
    """Lay out devices in order, replica by replica and stage by stage."""
    replicas = _replicas(cluster, len(devices), counts, replicas)
    following = iter(_ordered(devices, cluster.prefer_intra_node))
    dealt = [
        [list(itertools.islice(following, count)) for count in counts] for _ in range(replicas)
    ]
    return [_grid([replica[s] for replica in dealt]) for s in range(len(counts))]


def _all(
    cluster: Cluster, devices: list[Any], counts: list[int], replicas: int | None
) -> list[np.ndarray[Any, Any]]:
    """Every device, in one stage."""
    if len(counts) > 1:
        raise ConfigError(
            f"layout='all' gives one stage every device, and there are {len(counts)} stages; use "
            "layout='auto'"
        )
    made = _replicas(cluster, len(devices), counts, None)
    if replicas not in (None, made):
        raise ConfigError(
            f"layout='all' makes {made} replicas of {len(devices)} devices at {counts[0]} each, "
            "and "
            f"replicas={replicas}; layout='auto' can leave devices idle"
        )
    return _auto(cluster, devices, counts, made)


def _specific(
    cluster: Cluster, devices: list[Any], counts: list[int], replicas: int | None
) -> list[np.ndarray[Any, Any]]:
    """Lay out devices as `cluster.slices` lists them."""
    assert cluster.slices is not None
    slices = [[list(row) for row in stage] for stage in cluster.slices]
    if len(slices) != len(counts):
        raise ConfigError(f"slices is of {len(slices)} stages, and there are {len(counts)}")
    wanted = len(slices[0]) if replicas is None else replicas
    known = set(devices)
    for s, (stage, count) in enumerate(zip(slices, counts, strict=True)):
        if len(stage) != wanted or not wanted:
            why = "replicas" if replicas is not None else "slices[0]"
            raise ConfigError(f"slices[{s}] is of {len(stage)} replicas, and {why} says {wanted}")
        for r, row in enumerate(stage):
            if len(row) != count:
                raise ConfigError(
                    f"slices[{s}][{r}] is of {len(row)} devices, and a replica of stage {s} uses "
                    f"{count}"
                )
            strange = next((d for d in row if d not in known), None)
            if strange is not None:
                raise ConfigError(
                    f"slices[{s}][{r}] has {strange}, which is none of the {len(known)} devices"
                )
    _check_distinct([d for stage in slices for row in stage for d in row], "slices")
    return [_grid(stage) for stage in slices]


def _aware_row(
    cluster: Cluster, devices: list[Any], counts: list[int], replicas: int | None
) -> list[np.ndarray[Any, Any]]:
    """Lay out a run of neighbours for each stage, with processes of one machine side by side."""
    more = next((h for h, of in _hosts(devices).items() if len(of) > 1), None)
    if more is not None:
        raise ConfigError(
            f"layout='aware_row' is for processes of one device each, and process {more} has "
            f"{len(_hosts(devices)[more])}; use layout='auto'"
        )
    if max(counts) > 1:
        raise ConfigError(
            "layout='aware_row' gives each replica of a stage one device, and "
            f"device_counts={counts}; "
            "use layout='auto'"
        )
    machines: dict[Hashable, list[Any]] = {}
    for device in devices:
        machines.setdefault(_machine(device), []).append(device)
    sizes = [len(of) for of in machines.values()]
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"layout='aware_row' needs as many processes on every machine, and they have {sizes}"
        )
    replicas = _replicas(cluster, len(devices), counts, replicas)
    # the machine of the first process stays first: that process is the one that writes checkpoints
    # and summaries
    first = min(devices, key=lambda d: d.process_index)
    rows = sorted(machines.values(), key=lambda of: first not in of)
    following = iter([d for of in rows for d in of])
    return [_grid([[d] for d in itertools.islice(following, replicas)]) for _ in counts]


def _grid(rows: Sequence[Sequence[Any]]) -> np.ndarray[Any, Any]:
    """Devices as an array, which is made first: `np.array` would look into those that are
    tuples."""
    grid = np.empty((len(rows), len(rows[0])), dtype=object)
    for r, row in enumerate(rows):
        grid[r, :] = row
    return grid


def _replicas(cluster: Cluster, total: int, counts: list[int], replicas: int | None) -> int:
    """Return the requested number of replicas, or the number that fills all devices."""
    per_replica = sum(counts)
    of = f"one replica of {len(counts)} stages uses {per_replica} devices"
    if replicas is None:
        if total % per_replica or total < per_replica:
            raise ConfigError(
                f"layout={cluster.layout!r}: {of}, and {total} cannot be shared out into replicas "
                "of that. "
                "Say replicas= to leave the rest idle"
            )
        return total // per_replica
    if replicas * per_replica > total:
        raise ConfigError(
            f"layout={cluster.layout!r}: {of}, and {replicas} replicas {replicas * per_replica}; "
            f"there are {total}"
        )
    return replicas


def _hosts(devices: Iterable[Any]) -> dict[int, list[Any]]:
    """Return the devices of each host, in order; hosts in the order of their first devices."""
    hosts: dict[int, list[Any]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    return hosts


def _ordered(devices: Iterable[Any], rows: bool) -> list[Any]:
    """Return all devices, host after host or the first of every host first."""
    hosts = _hosts(devices).values()
    if rows:
        return [d for of in hosts for d in of]
    columns = itertools.zip_longest(*hosts)  # hosts may have unequal numbers
    return [d for column in columns for d in column if d is not None]


def _machine(device: Any) -> Hashable:
    """Return a key of a device's machine: JAX's slice index, or the process without one."""
    index = getattr(device, "slice_index", None)
    return ("process", device.process_index) if index is None else ("slice", index)


def _check_distinct(devices: Sequence[Any], where: str) -> None:
    seen: set[Any] = set()
    for device in devices:
        if device in seen:
            raise ConfigError(f"{where} has {device} twice")
        seen.add(device)
