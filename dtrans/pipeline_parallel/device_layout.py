"""Virtual devices: the devices of a job that each stage of a pipeline has.

A stage has a grid of devices with one row for each replica of the model. A row has the devices that
one replica of the stage uses. A layout deals the devices of the job out into grids:

- `auto`: replica by replica, stage by stage, the next devices in order. The stages of one replica
  are neighbours, and the replicas of one stage lie apart. Activations then cross short links,
  gradients long ones.
- `aware_row`: for processes of one device each. The replicas of one stage are neighbours.
- `all`: one stage, which has every device.
- `specific`: grids that the user wrote down.

Devices are ordered by host (`process_index`): all devices of one host and then all of the next, or
the first device of each host and then the second of each. Devices outside of all grids stay idle.
The grids list them, and EPL does not mention them.

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
      idle: the devices of the cluster outside of all grids, in the cluster's order.
    """

    idle: tuple[Any, ...]

    def __new__(
        cls, grids: Iterable[np.ndarray[Any, Any]], idle: Iterable[Any] = ()
    ) -> VirtualDevices:
        self = super().__new__(cls, grids)
        self.idle = tuple(idle)
        return self

    @property
    def replicas(self) -> int:
        """Return the number of replicas of the model."""
        return len(self[0])

    @property
    def notes(self) -> list[str]:
        """Return a remark that lists idle devices, if there are any."""
        if not self.idle:
            return []
        subject = "1 device is" if len(self.idle) == 1 else f"{len(self.idle)} devices are"
        return [f"{subject} idle: {', '.join(map(str, self.idle))}"]


@dataclasses.dataclass(frozen=True, eq=False)
class Cluster:
    """The devices of a job, with the layout that deals them out to the stages of a pipeline.

    Args:
      layout: "auto": replica by replica, stage by stage, the next devices in order. "all": one
        stage, which has every device. "specific": the grids in `slices`. "aware_row": as "auto",
        but the replicas of a stage are neighbours, machine by machine. Every process then has one
        device, and every stage uses one per replica.
      devices: all devices, each once; by default `jax.devices()`. A device is any hashable object
        with a `process_index`, the number of its host.
      slices: with "specific", the devices as [stage][replica][device].
      prefer_intra_node: with "auto" and "all", take all devices of a host before those of the next.
        If False, take the first device of every host before the second of any.

    Raises:
      ConfigError: an unknown layout, `slices` without "specific" or "specific" without `slices`, or
        a device twice.

    Source: `Cluster` of EPL (epl/cluster.py), and `cluster.device_place_prefer_intra_node` of its
    configuration. EPL's "all" takes hosts in order whatever the preference is.

    Example:
      >>> import dataclasses
      >>> from dtrans.pipeline_parallel.device_layout import Cluster
      >>> Device = dataclasses.make_dataclass("Device", ["id", "process_index"], frozen=True)
      >>> cluster = Cluster(devices=[Device(i, process_index=i // 4) for i in range(4)])
      >>> for grid in cluster.virtual_devices([1, 1]):
      ...     print([[device.id for device in replica] for replica in grid])
      [[0], [2]]
      [[1], [3]]
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
                f"layout={self.layout!r} fixes the order of devices; prefer_intra_node=False is "
                "for the other layouts"
            )
        if self.devices is not None:
            _check_distinct(self.devices, "devices")

    def virtual_devices(
        self, device_counts: Sequence[int], replicas: int | None = None, *, use_all: bool = False
    ) -> VirtualDevices:
        """Return the grid of devices of each stage.

        Args:
          device_counts: the number of devices that one replica of each stage uses.
          replicas: the number of replicas of the model; by default the number that uses all
            devices.
          use_all: raise if devices stay idle.

        Returns:
          A tuple with one array for each stage, of shape [replica, device]. It has an attribute
          `idle`.

        Raises:
          ConfigError: too few devices, idle devices with `use_all`, devices that do not divide into
            replicas, or `slices` of different sizes.
        """
        counts = list(device_counts)
        if not counts or min(counts) < 1:
            raise ConfigError(
                f"device_counts={counts}: a pipeline has at least one stage, and each has at least "
                "one device"
            )
        if replicas is not None and replicas < 1:
            raise ConfigError(f"replicas={replicas}: a model has at least one replica")
        devices = list(jax.devices() if self.devices is None else self.devices)
        if not devices:
            raise ConfigError("the cluster has no devices")
        grids = _RULES[self.layout](self, devices, counts, replicas)
        used = {d for grid in grids for d in grid.flat}
        dealt = VirtualDevices(grids, (d for d in devices if d not in used))
        if use_all and dealt.idle:
            raise ConfigError(
                f"layout={self.layout!r}: {dealt.notes[0]}. Ask for more replicas, or for other "
                "stages"
            )
        return dealt


def _auto(
    cluster: Cluster, devices: list[Any], counts: list[int], replicas: int | None
) -> list[np.ndarray[Any, Any]]:
    """Lay out devices in order, replica by replica and stage by stage."""
    replicas = _replicas(cluster, len(devices), counts, replicas)
    following = iter(_ordered(devices, cluster.prefer_intra_node))
    stages: list[list[list[Any]]] = [[] for _ in counts]
    for _ in range(replicas):
        for stage, count in zip(stages, counts, strict=True):
            stage.append(list(itertools.islice(following, count)))
    return list(map(_grid, stages))


def _all(
    cluster: Cluster, devices: list[Any], counts: list[int], replicas: int | None
) -> list[np.ndarray[Any, Any]]:
    """Lay out every device, in one stage."""
    if len(counts) > 1:
        raise ConfigError(
            f"layout='all' gives one stage every device, and there are {len(counts)} stages; use "
            "layout='auto'"
        )
    most = _replicas(cluster, len(devices), counts, None)
    if replicas not in (None, most):
        raise ConfigError(
            f"layout='all' makes {most} replicas of {len(devices)} devices at {counts[0]} each, "
            f"and replicas={replicas}; use layout='auto', which can leave devices idle"
        )
    return _auto(cluster, devices, counts, most)


def _specific(
    cluster: Cluster, devices: list[Any], counts: list[int], replicas: int | None
) -> list[np.ndarray[Any, Any]]:
    """Lay out devices as `cluster.slices` lists them."""
    assert cluster.slices is not None
    # rows may be arrays, which `+=` would add to the list entry by entry
    slices = [list(map(list, stage)) for stage in cluster.slices]
    known = set(devices)
    if len(slices) != len(counts):
        raise ConfigError(
            f"slices has {len(slices)} stages, and the model has {len(counts)}; give one entry for "
            "each stage"
        )
    wanted = len(slices[0]) if replicas is None else replicas
    listed: list[Any] = []
    for s, (stage, count) in enumerate(zip(slices, counts, strict=True)):
        if len(stage) != wanted or not wanted:
            source = "slices[0]" if replicas is None else "replicas"
            raise ConfigError(
                f"slices[{s}] has {len(stage)} replicas, and {source} says {wanted}; give every "
                "stage the same number, at least 1"
            )
        for r, row in enumerate(stage):
            if len(row) != count:
                raise ConfigError(
                    f"slices[{s}][{r}] has {len(row)} devices, and a replica of stage {s} uses "
                    f"{count}; list {count}"
                )
            unknown = next((d for d in row if d not in known), None)
            if unknown is not None:
                raise ConfigError(
                    f"slices[{s}][{r}] has {unknown}, which is none of the {len(known)} "
                    "devices; list devices of the cluster"
                )
            listed += row
    _check_distinct(listed, "slices")
    return list(map(_grid, slices))


def _aware_row(
    cluster: Cluster, devices: list[Any], counts: list[int], replicas: int | None
) -> list[np.ndarray[Any, Any]]:
    """Lay out a run of neighbours for each stage, machine by machine."""
    for process, its_devices in _hosts(devices).items():
        if len(its_devices) > 1:
            raise ConfigError(
                f"layout='aware_row' is for processes of one device each, and process {process} "
                f"has {len(its_devices)}; use layout='auto'"
            )
    if max(counts) > 1:
        raise ConfigError(
            "layout='aware_row' gives each replica of a stage one device, and "
            f"device_counts={counts}; use layout='auto'"
        )
    machines: dict[Hashable, list[Any]] = {}
    for device in devices:
        machines.setdefault(_machine(device), []).append(device)
    sizes = list(map(len, machines.values()))
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"layout='aware_row' needs as many processes on every machine, and they have {sizes}; "
            "use layout='auto'"
        )
    replicas = _replicas(cluster, len(devices), counts, replicas)
    # the machine of the first process stays first: that process writes checkpoints and summaries
    first = min(devices, key=lambda d: d.process_index)
    rows = sorted(machines.values(), key=lambda row: first not in row)
    following = iter([[device] for row in rows for device in row])
    return [_grid(list(itertools.islice(following, replicas))) for _ in counts]


_RULES = {"auto": _auto, "all": _all, "specific": _specific, "aware_row": _aware_row}


def _grid(rows: Sequence[Sequence[Any]]) -> np.ndarray[Any, Any]:
    """Return devices as an array of shape [replica, device]."""
    # filled row by row: `np.array` would take devices that are tuples for another dimension
    grid = np.empty((len(rows), len(rows[0])), dtype=object)
    for r, row in enumerate(rows):
        grid[r, :] = row
    return grid


def _replicas(cluster: Cluster, total: int, counts: list[int], replicas: int | None) -> int:
    """Return the requested number of replicas, or the number that fills all devices."""
    per_replica = sum(counts)
    use = f"one replica of {len(counts)} stages uses {per_replica} devices"
    if replicas is None:
        if total % per_replica or total < per_replica:
            raise ConfigError(
                f"layout={cluster.layout!r}: {use}, and {total} devices do not divide into "
                "replicas; pass replicas= to leave some idle"
            )
        return total // per_replica
    if replicas * per_replica > total:
        raise ConfigError(
            f"layout={cluster.layout!r}: {use}, and {replicas} replicas {replicas * per_replica}; "
            f"there are {total}: ask for fewer replicas or stages"
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
        return list(itertools.chain(*hosts))
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
            raise ConfigError(f"{where} has {device} twice; list each device once")
        seen.add(device)
