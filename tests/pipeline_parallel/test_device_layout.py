"""Virtual devices: the devices of each stage, for every layout, and errors for impossible
layouts."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st

from dtrans.errors import ConfigError
from dtrans.pipeline_parallel.device_layout import Cluster


class Device:
    """The attributes of a device that a layout reads."""

    def __init__(self, id, process_index, **more):
        self.id, self.process_index = id, process_index
        vars(self).update(more)

    def __repr__(self):
        return f"d{self.id}"


def job(*per_host, **more):
    """Return devices with consecutive numbers, and the given number of them on each host."""
    hosts = [h for h, count in enumerate(per_host) for _ in range(count)]
    return [Device(i, h, **{k: v[i] for k, v in more.items()}) for i, h in enumerate(hosts)]


def ids(grids):
    return [[[d.id for d in row] for row in grid] for grid in grids]


def test_the_stages_of_a_replica_are_neighbours():
    assert ids(Cluster(devices=job(4)).virtual_devices([1, 1])) == [[[0], [2]], [[1], [3]]]


@pytest.mark.parametrize(
    "rows, counts, want",
    [
        (True, [1, 1], [[[0], [2], [4]], [[1], [3], [5]]]),
        (False, [1, 1], [[[0], [1], [2]], [[3], [4], [5]]]),
        (True, [1, 2], [[[0], [3]], [[1, 2], [4, 5]]]),
        (False, [2, 1], [[[0, 3], [4, 2]], [[1], [5]]]),
        (True, [3], [[[0, 1, 2], [3, 4, 5]]]),
    ],
)
def test_auto_takes_the_next_devices_by_rows_or_columns_of_hosts(rows, counts, want):
    assert ids(Cluster(devices=job(3, 3), prefer_intra_node=rows).virtual_devices(counts)) == want


def test_hosts_may_have_unequal_numbers_of_devices_and_come_mixed():
    d = job(3, 1, 2)
    mixed = [d[3], d[0], d[4], d[1], d[5], d[2]]
    assert ids(Cluster(devices=mixed).virtual_devices([1])) == [[[3], [0], [1], [2], [4], [5]]]
    assert ids(Cluster(devices=mixed, prefer_intra_node=False).virtual_devices([1])) == [
        [[3], [0], [4], [1], [5], [2]]
    ]


@pytest.mark.parametrize("layout", ["auto", "all", "aware_row"])
def test_jax_devices_are_the_default(layout):
    if layout == "aware_row":
        with pytest.raises(
            ConfigError, match="processes with one device each, but process 0 has 8"
        ):
            Cluster(layout).virtual_devices([1])
        return
    (grid,) = Cluster(layout).virtual_devices([1])
    assert isinstance(grid, np.ndarray) and grid.dtype == object
    assert grid.shape == (8, 1) and grid[:, 0].tolist() == jax.devices()


def test_devices_that_are_tuples_are_kept_whole():
    class Pair(tuple):
        process_index = 0

    devices = [Pair((i, i)) for i in range(4)]
    a, b = Cluster(devices=devices).virtual_devices([1, 1])
    assert a.shape == b.shape == (2, 1) and a[1, 0] is devices[2] and b[0, 0] is devices[1]


# -- what is left over -----------------------------------------------------------------------------


def test_surplus_devices_are_listed_and_are_an_error_only_if_asked():
    cluster = Cluster(devices=job(4, 4))
    made = cluster.virtual_devices([1, 2], replicas=2)
    assert ids(made) == [[[0], [3]], [[1, 2], [4, 5]]] and made.replicas == 2
    assert [d.id for d in made.idle] == [6, 7] and made.notes == ["2 devices are idle: d6, d7"]
    with pytest.raises(ConfigError, match="2 devices are idle: d6, d7; increase replicas"):
        cluster.virtual_devices([1, 2], replicas=2, use_all=True)
    everything = cluster.virtual_devices([1, 1], use_all=True)
    assert everything.idle == () and everything.notes == [] and everything.replicas == 4
    assert cluster.virtual_devices([7], replicas=1).notes == ["1 device is idle: d7"]


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(1, 4),
    st.booleans(),
)
def test_every_device_is_in_one_grid_or_idle(per_host, counts, replicas, rows):
    devices = job(*per_host)
    cluster = Cluster(devices=devices, prefer_intra_node=rows)
    if sum(counts) * replicas > len(devices):
        with pytest.raises(
            ConfigError, match=f"uses {sum(counts)} devices, so {replicas} replicas"
        ):
            cluster.virtual_devices(counts, replicas)
        return
    made = cluster.virtual_devices(counts, replicas)
    assert [g.shape for g in made] == [(replicas, c) for c in counts]
    used = [d for g in made for d in g.flat]
    assert sorted(d.id for d in (*used, *made.idle)) == list(range(len(devices)))
    # the devices of a replica are consecutive in the cluster
    order = Cluster(devices=devices, prefer_intra_node=rows).virtual_devices([1])[0][:, 0].tolist()
    for r in range(replicas):
        mine = [d for g in made for d in g[r]]
        assert mine == order[r * sum(counts) : (r + 1) * sum(counts)]


# -- the other layouts -----------------------------------------------------------------------------


def test_all_gives_one_stage_every_device():
    assert ids(Cluster("all", job(2, 2)).virtual_devices([1])) == [[[0], [1], [2], [3]]]
    assert ids(Cluster("all", job(2, 2)).virtual_devices([4])) == [[[0, 1, 2, 3]]]
    assert ids(Cluster("all", job(2, 2), prefer_intra_node=False).virtual_devices([2], 2)) == [
        [[0, 2], [1, 3]]
    ]


def test_specific_grids_are_taken_as_they_are():
    d = job(2, 2)
    grids = [[[d[3]], [d[0]]], [[d[2]], [d[1]]]]
    assert ids(Cluster("specific", d, slices=grids).virtual_devices([1, 1])) == [
        [[3], [0]],
        [[2], [1]],
    ]
    part = Cluster("specific", d, slices=np.array(grids)[:, :1]).virtual_devices([1, 1], 1)
    assert ids(part) == [[[3]], [[2]]] and [x.id for x in part.idle] == [0, 1]
    rows = np.array(grids).transpose(0, 2, 1)
    assert ids(Cluster("specific", d, slices=rows).virtual_devices([2, 2])) == [[[3, 0]], [[2, 1]]]
    with pytest.raises(ConfigError, match=r"slices contains .* twice"):
        Cluster("specific", d, slices=rows[[0, 0]]).virtual_devices([2, 2])


def test_aware_row_makes_neighbours_the_replicas_of_a_stage():
    one_each = job(1, 1, 1, 1)
    assert ids(Cluster("aware_row", one_each).virtual_devices([1, 1])) == [[[0], [1]], [[2], [3]]]
    by_machine = job(1, 1, 1, 1, slice_index=[7, 3, 7, 3])
    assert ids(Cluster("aware_row", by_machine).virtual_devices([1, 1])) == [[[0], [2]], [[1], [3]]]
    # the first process stays first, at any position in the list
    assert ids(Cluster("aware_row", by_machine[::-1]).virtual_devices([1, 1])) == [
        [[2], [0]],
        [[3], [1]],
    ]
    left = Cluster("aware_row", job(1, 1, 1)).virtual_devices([1, 1], replicas=1)
    assert ids(left) == [[[0]], [[1]]] and left.notes == ["1 device is idle: d2"]


# -- speeds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, counts, replicas, want",
    [
        (dict(speeds=[4, 1, 2, 3]), [1, 1], 2, (2, 1)),
        (dict(speeds=[4, 1, 2, 3, 0.5]), [1, 1], 2, (2, 1)),  # the last device is idle
        (dict(speeds=[4, 1, 2]), [1, 2], 1, (4, 1)),
        (dict(speeds=[4, 1, 2, 3], layout="aware_row"), [1, 1], 2, (1, 2)),
        (dict(speeds=[4, 1, 2, 3], layout="all"), [2], 2, (1,)),
        (dict(), [1, 1], 2, (1, 1)),
    ],
)
def test_a_stage_is_as_fast_as_its_slowest_device(options, counts, replicas, want):
    assert Cluster(**options).stage_speeds(counts, replicas) == want


def test_speeds_belong_to_the_devices_in_their_order():
    d = job(2, 2)
    cluster = Cluster(devices=d, speeds=[1, 2, 3, 4])
    assert cluster.stage_speeds([1, 1], 2) == (1, 2)
    by_host = Cluster(devices=d, speeds=[1, 2, 3, 4], prefer_intra_node=False)
    assert by_host.stage_speeds([1, 1], 2) == (1, 3)
    chosen = Cluster("specific", d, slices=[[[d[3]]], [[d[1]]]], speeds=[1, 2, 3, 4])
    assert chosen.stage_speeds([1, 1], 1) == (4, 2)
    with pytest.raises(ConfigError, match="speeds has 4 entries, but 2 stages with 3 replicas use"):
        cluster.stage_speeds([1, 1], 3)


# -- errors ----------------------------------------------------------------------------------------

D = job(2, 2)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(layout="row"), "layout is 'row'; expected one of auto, all, specific, aware_row"),
        (dict(layout="specific"), "layout='specific' needs slices="),
        (dict(slices=[[[D[0]]]]), "layout is 'auto', but slices= needs layout='specific'"),
        (dict(devices=[D[0], D[1], D[0]]), "devices contains d0 twice"),
        (dict(layout="aware_row", prefer_intra_node=False), "fixes the order of devices"),
        (dict(devices=D, speeds=[1, 2]), "speeds has 2 entries, but there are 4 devices; pass one"),
        (
            dict(speeds=[1, 0]),
            r"speeds\[1\] must be a positive, finite number, the speed of device",
        ),
        (dict(speeds=[float("nan")]), r"speeds\[0\] must be a positive, finite .* it is nan"),
        (dict(speeds=[True]), r"speeds\[0\] must be a positive, finite .* it is True"),
        (dict(speeds="21"), r"speeds must be a list with the speed of each device, .* it is '21'"),
        (
            dict(layout="specific", slices=[[[D[0]]]], speeds=[1]),
            "layout='specific' does not order the devices; pass devices=",
        ),
    ],
)
def test_clusters_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        Cluster(**options)


@pytest.mark.parametrize(
    "cluster, args, message",
    [
        (dict(), ([],), r"device_counts is \[\]; expected a number for each stage"),
        (dict(), ([1, 0],), r"device_counts is \[1, 0\]; expected"),
        (dict(), ([1], 0), "replicas is 0; expected 1 or more"),
        (dict(devices=[]), ([1],), "has no devices"),
        (dict(), ([1, 2],), "one replica of 2 stages uses 3 devices, and 4 devices are not a mul"),
        (dict(), ([3, 3],), "uses 6 devices, and 4 devices are not a multiple"),
        (dict(), ([1, 1], 3), "uses 2 devices, so 3 replicas need 6, but there are 4"),
        (dict(layout="all"), ([1, 1],), "all devices to one stage, but the model has 2 stages"),
        (dict(layout="all"), ([3],), "uses 3 devices, and 4 devices are not a multiple"),
        (dict(layout="all"), ([2], 1), "replicas is 1, but .* 4 devices into 2 replicas of 2"),
        (dict(layout="aware_row"), ([1],), "process 0 has 2 devices; use layout='auto'"),
        (dict(layout="aware_row", devices=job(1, 1)), ([2],), r"device_counts is \[2\], but"),
        (
            dict(layout="aware_row", devices=job(1, 1, 1)),
            ([1, 1],),
            "uses 2 devices, and 3 devices are not a multiple",
        ),
        (
            dict(layout="aware_row", devices=job(1, 1, 1, slice_index=[0, 0, 1])),
            ([1],),
            r"same number of processes on every machine, but the machines have \[2, 1\]",
        ),
    ],
)
def test_numbers_that_do_not_come_out(cluster, args, message):
    with pytest.raises(ConfigError, match=message):
        Cluster(**{"devices": D, **cluster}).virtual_devices(*args)


@pytest.mark.parametrize(
    "slices, args, message",
    [
        ([[[D[0]]]], ([1, 1],), "slices has 1 stages, but the model has 2"),
        (
            [[[D[0]], [D[1]]], [[D[2]]]],
            ([1, 1],),
            r"slices\[1\] lists 1 replicas; expected 2, as in slices\[0\]",
        ),
        ([[[D[0]], [D[1]]]], ([1], 1), r"slices\[0\] lists 2 replicas; expected 1, the value of"),
        ([[]], ([1],), r"slices\[0\] lists no replica; list at least 1"),
        (
            [[[D[0], D[1]]]],
            ([1],),
            r"slices\[0\]\[0\] has 2 devices, but a replica of stage 0 uses 1",
        ),
        ([[[D[0]]], [[D[0]]]], ([1, 1],), "slices contains d0 twice"),
        ([[["gpu:0"]]], ([1],), r"slices\[0\]\[0\] contains gpu:0, which is not one of the 4 dev"),
    ],
)
def test_specific_grids_are_checked(slices, args, message):
    with pytest.raises(ConfigError, match=message):
        Cluster("specific", D, slices=slices).virtual_devices(*args)
