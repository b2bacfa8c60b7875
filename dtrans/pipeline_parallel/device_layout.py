"""Assignment of a job's devices to the stages and replicas of a pipeline.

Each stage gets a grid of devices: an array of shape [replica, device]. A row of the grid lists the
devices that one replica of the stage uses. A *layout* is a rule that fills the grids:

- `auto`: takes devices in order, replica by replica, and stage by stage within a replica. The
  stages of one replica are neighbours, so activations cross short links. The replicas of one stage
  are far apart, so gradients cross long links.
- `aware_row`: for processes with one device each. The replicas of one stage are neighbours.
- `all`: gives all devices to one stage.
- `specific`: uses grids that the user wrote.

There are two orders of devices; the host of a device is its `process_index`. The first order lists
all devices of one host before the devices of the next host. The second order takes the first device
of every host, then the second of every host. Devices outside of all grids stay idle, and
`VirtualDevices.idle` lists them.

Devices may have different speeds. The devices of a stage wait for each other, so the speed of a
stage is the speed of its slowest device.

Source: `Cluster` and its layouts of EPL (epl/cluster.py). Speeds: Whale (Jia et al., ATC 2022).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from dtrans.checks import check_speeds
from dtrans.errors import ConfigError
from dtrans.ir.selection import exclude


LAYOUTS = ("auto", "all", "specific", "aware_row")


class VirtualDevices(tuple[np.ndarray[Any, Any], ...]):
    """Devices of a pipeline: for each stage, an array of devices with shape [replica, device].

    Attributes:
      idle: the devices of the cluster that no stage uses, in the cluster's order.
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
        """Number of replicas of the model."""
        return len(self[0])

    @property
    def notes(self) -> list[str]:
        """Remarks for the report of the plan: one that names the idle devices, or none."""
        if not self.idle:
            return []
        subject = "1 device is" if len(self.idle) == 1 else f"{len(self.idle)} devices are"
        return [f"{subject} idle: {', '.join(map(str, self.idle))}"]


@dataclasses.dataclass(frozen=True, eq=False)
class Cluster:
    """Devices of a job, and the layout that assigns them to the stages of a pipeline.

    Args:
      layout: "auto": take devices in order, replica by replica, and stage by stage within a
        replica. "all": give all devices to one stage. "specific": use the grids in `slices`.
        "aware_row": take devices machine by machine, so that the replicas of a stage are
        neighbours. Each process must then have one device, and each replica of a stage uses one
        device.
      devices: all devices, each one once; by default `jax.devices()`. A device is any hashable
        object with a `process_index`, the number of its host.
      slices: the devices as [stage][replica][device], for "specific".
      prefer_intra_node: for "auto" and "all": take all devices of a host before the devices of the
        next host. If False, take the first device of every host, then the second of every host.
      speeds: the relative speed of each device, in the order of `devices`. Without `devices`, in
        the order in which the layout takes devices. A stage with devices that are twice as fast
        gets twice the operations. None: all devices are equally fast.

    Raises:
      ConfigError: the layout is unknown, or a device is listed twice. Or the layout is "specific"
        without `slices`, or another layout with `slices`. Or `speeds` is no list of positive
        numbers, one for each device.

    Source: `Cluster` of EPL (epl/cluster.py), and `cluster.device_place_prefer_intra_node` of its
    configuration. EPL's "all" ignores this option, and always takes the hosts in order.

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
    speeds: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ConfigError(f"layout is {self.layout!r}; expected one of {', '.join(LAYOUTS)}")
        if self.layout == "specific" and self.slices is None:
            raise ConfigError("layout='specific' needs slices=[stage][replica][device]")
        if self.layout != "specific" and self.slices is not None:
            raise ConfigError(
                f"layout is {self.layout!r}, but slices= needs layout='specific'; pass only one of "
                "them"
            )
        if self.layout in ("specific", "aware_row") and not self.prefer_intra_node:
            raise ConfigError(
                f"layout={self.layout!r} fixes the order of devices, so prefer_intra_node=False "
                "has no effect; leave it out"
            )
        if self.devices is not None:
            _check_distinct(self.devices, "devices")
        if self.speeds is not None:
            object.__setattr__(self, "speeds", check_speeds(self.speeds, "device"))
            self._check_speeds_fit()

    def _check_speeds_fit(self) -> None:
        """Raise ConfigError if there is not one speed for each device."""
        assert self.speeds is not None
        if self.devices is not None and len(self.speeds) != len(self.devices):
            raise ConfigError(
                f"speeds has {len(self.speeds)} entries, but there are {len(self.devices)} "
                "devices; pass one speed for each device"
            )
        if self.devices is None and self.layout == "specific":
            raise ConfigError(
                "speeds needs an order of devices, but layout='specific' does not order the "
                "devices; pass devices=[...] with one device for each speed"
            )

    def stage_speeds(self, device_counts: Sequence[int], replicas: int) -> tuple[float, ...]:
        """Return the speed of each stage: the speed of its slowest device in any replica.

        Args:
          device_counts: the number of devices that one replica of each stage uses.
          replicas: the number of replicas of the model.

        Raises:
          ConfigError: there are fewer speeds than devices.

        Example:
          >>> from dtrans.pipeline_parallel.device_layout import Cluster
          >>> Cluster(speeds=[4, 1, 2, 1]).stage_speeds([1, 1], replicas=2)
          (2.0, 1.0)
        """
        if self.speeds is None:
            return (1.0,) * len(device_counts)
        needed = replicas * sum(device_counts)
        if needed > len(self.speeds):
            raise ConfigError(
                f"speeds has {len(self.speeds)} entries, but {len(device_counts)} stages with "
                f"{replicas} replicas use {needed} devices; pass one speed for each device"
            )
        ordered = self
        if self.devices is None:
            ordered = dataclasses.replace(self, devices=_numbered(len(self.speeds)))
        assert ordered.devices is not None
        speed_of = dict(zip(ordered.devices, self.speeds, strict=True))
        grids = ordered.virtual_devices(device_counts, replicas)
        return tuple(min(map(speed_of.__getitem__, grid.flat)) for grid in grids)

    def virtual_devices(
        self, device_counts: Sequence[int], replicas: int | None = None, *, use_all: bool = False
    ) -> VirtualDevices:
        """Return the grid of devices of each stage.

        Args:
          device_counts: the number of devices that one replica of each stage uses.
          replicas: the number of replicas of the model; by default the number that uses all
            devices.
          use_all: True to raise ConfigError if a device stays idle.

        Raises:
          ConfigError: there are too few devices, `slices` has different sizes, or a device stays
            idle in spite of `use_all`. Or there is no argument `replicas`, and the number of
            devices is not a multiple of the number that one replica uses.
        """
        counts = list(device_counts)
        if not counts or min(counts) < 1:
            raise ConfigError(
                f"device_counts is {counts}; expected a number for each stage, each 1 or more"
            )
        if replicas is not None and replicas < 1:
            raise ConfigError(f"replicas is {replicas}; expected 1 or more")
        devices = list(jax.devices() if self.devices is None else self.devices)
        if not devices:
            raise ConfigError("Cluster(devices=[]) has no devices; expected at least one")
        grids = _RULES[self.layout](self, devices, counts, replicas)
        used = {d for grid in grids for d in grid.flat}
        found = VirtualDevices(grids, exclude(devices, used))
        if use_all and found.idle:
            raise ConfigError(
                f"layout={self.layout!r}: {found.notes[0]}; "
                "increase replicas or the number of stages"
            )
        return found


@dataclasses.dataclass(frozen=True)
class _NumberedDevice:
    """Placeholder for a device, if the plan knows only the number of devices.

    Each placeholder counts as a separate host.
    """

    process_index: int


def _numbered(count: int) -> list[_NumberedDevice]:
    return list(map(_NumberedDevice, range(count)))


def _auto(
    cluster: Cluster, devices: list[Any], counts: list[int], replicas: int | None
) -> list[np.ndarray[Any, Any]]:
    """Return grids of the layout "auto": devices in order, replica by replica."""
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
    """Return a grid of all devices for the only stage."""
    if len(counts) > 1:
        raise ConfigError(
            f"layout='all' gives all devices to one stage, but the model has {len(counts)} stages; "
            "use layout='auto'"
        )
    most = _replicas(cluster, len(devices), counts, None)
    if replicas not in (None, most):
        raise ConfigError(
            f"replicas is {replicas}, but layout='all' divides {len(devices)} devices into {most} "
            f"replicas of {counts[0]}; use layout='auto', which can leave devices idle"
        )
    return _auto(cluster, devices, counts, most)


def _specific(
    cluster: Cluster, devices: list[Any], counts: list[int], replicas: int | None
) -> list[np.ndarray[Any, Any]]:
    """Return the grids of `cluster.slices`, after checks of their sizes and devices."""
    assert cluster.slices is not None
    # Rows are converted to lists, because `listed += row` would add a NumPy array elementwise.
    slices = [list(map(list, stage)) for stage in cluster.slices]
    known = set(devices)
    if len(slices) != len(counts):
        raise ConfigError(
            f"slices has {len(slices)} stages, but the model has {len(counts)}; list devices for "
            "each stage of the model"
        )
    wanted, source = replicas, "the value of replicas"
    if wanted is None:
        wanted, source = len(slices[0]), "as in slices[0]"
        if not wanted:
            raise ConfigError("slices[0] lists no replica; list at least 1 for every stage")
    listed: list[Any] = []
    for s, (stage, count) in enumerate(zip(slices, counts, strict=True)):
        if len(stage) != wanted:
            raise ConfigError(
                f"slices[{s}] lists {len(stage)} replicas; expected {wanted}, {source}: list the "
                "same number for every stage"
            )
        for r, row in enumerate(stage):
            if len(row) != count:
                raise ConfigError(
                    f"slices[{s}][{r}] has {len(row)} devices, but a replica of stage {s} uses "
                    f"{count}; list {count} devices"
                )
            unknown = exclude(row, known)
            if unknown:
                raise ConfigError(
                    f"slices[{s}][{r}] contains {unknown[0]}, which is not one of the {len(known)} "
                    "devices of the cluster; list devices from Cluster.devices"
                )
            listed += row
    _check_distinct(listed, "slices")
    return list(map(_grid, slices))


def _aware_row(
    cluster: Cluster, devices: list[Any], counts: list[int], replicas: int | None
) -> list[np.ndarray[Any, Any]]:
    """Return the grids of the layout "aware_row".

    Devices are listed machine by machine, and each stage takes the next `replicas` devices of this
    list.
    """
    for process, its_devices in _hosts(devices).items():
        if len(its_devices) > 1:
            raise ConfigError(
                f"layout='aware_row' is for processes with one device each, but process {process} "
                f"has {len(its_devices)} devices; use layout='auto'"
            )
    if max(counts) > 1:
        raise ConfigError(
            f"device_counts is {counts}, but layout='aware_row' gives each replica of a stage one "
            "device; use layout='auto'"
        )
    machines: dict[Hashable, list[Any]] = {}
    for device in devices:
        machines.setdefault(_machine(device), []).append(device)
    sizes = list(map(len, machines.values()))
    if len(set(sizes)) > 1:
        raise ConfigError(
            "layout='aware_row' needs the same number of processes on every machine, but the "
            f"machines have {sizes} processes; use layout='auto'"
        )
    replicas = _replicas(cluster, len(devices), counts, replicas)
    # The machine of process 0 comes first, because process 0 writes checkpoints and summaries.
    first = min(devices, key=lambda d: d.process_index)
    rows = sorted(machines.values(), key=lambda row: first not in row)
    following = iter([[device] for row in rows for device in row])
    return [_grid(list(itertools.islice(following, replicas))) for _ in counts]


_RULES = {"auto": _auto, "all": _all, "specific": _specific, "aware_row": _aware_row}


def _grid(rows: Sequence[Sequence[Any]]) -> np.ndarray[Any, Any]:
    """Return an array of devices with shape [replica, device]."""
    # The grid is filled row by row, because `np.array` would convert devices that are tuples to a
    # dimension.
    grid = np.empty((len(rows), len(rows[0])), dtype=object)
    for r, row in enumerate(rows):
        grid[r, :] = row
    return grid


def _replicas(cluster: Cluster, total: int, counts: list[int], replicas: int | None) -> int:
    """Return the requested number of replicas; by default, the number that uses all devices."""
    per_replica = sum(counts)
    use = f"one replica of {len(counts)} stages uses {per_replica} devices"
    if replicas is None:
        if total % per_replica or total < per_replica:
            raise ConfigError(
                f"layout={cluster.layout!r}: {use}, and {total} devices are not a multiple of "
                "that; pass replicas= to leave some devices idle"
            )
        return total // per_replica
    if replicas * per_replica > total:
        raise ConfigError(
            f"layout={cluster.layout!r}: {use}, so {replicas} replicas need "
            f"{replicas * per_replica}, but there are {total}; reduce replicas or the number "
            "of stages"
        )
    return replicas


def _hosts(devices: Iterable[Any]) -> dict[int, list[Any]]:
    """Return the devices of each host. Hosts are in the order of their first devices."""
    hosts: dict[int, list[Any]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    return hosts


def _ordered(devices: Iterable[Any], host_by_host: bool) -> list[Any]:
    """Return all devices in one of two orders.

    Args:
      devices: the devices.
      host_by_host: True to list all devices of a host before the devices of the next host. False
        to list the first device of every host, then the second device of every host.
    """
    hosts = _hosts(devices).values()
    if host_by_host:
        return list(itertools.chain(*hosts))
    columns = itertools.zip_longest(*hosts)  # Hosts may have different numbers of devices.
    return [d for column in columns for d in column if d is not None]


def _machine(device: Any) -> Hashable:
    """Return a key that identifies a device's machine: JAX's slice index, or else the process."""
    index = getattr(device, "slice_index", None)
    if index is None:
        return ("process", device.process_index)
    return ("slice", index)


def _check_distinct(devices: Sequence[Any], where: str) -> None:
    seen: set[Any] = set()
    for device in devices:
        if device in seen:
            raise ConfigError(f"{where} contains {device} twice; list each device once")
        seen.add(device)
