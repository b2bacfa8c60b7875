"""Division of input files among workers with unequal numbers of replicas: EPL's examples, and
properties of all divisions."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from dtrans.epl.input_files import slice_files
from dtrans.errors import ConfigError


F = [f"file_{i}" for i in range(6)]

# cases of EPL's tests/utils_test.py: replicas, files, options, and the files of each worker
GOLDEN = [
    ([2, 2], F[:2], {}, [F[:1], F[1:2]]),
    ([2, 2], F[:4], {}, [[F[0], F[2]], [F[1], F[3]]]),
    ([2, 2], F[:1], {}, [F[:1], F[:1]]),
    ([2, 2], F[:3], {"drop_last": True}, [[F[0]], [F[1]]]),
    ([2, 2], F[:3], {}, [F[:3], F[:3]]),
    ([4, 2], F[:3], {}, [F[:2], F[2:3]]),
    ([4, 2], F[:2], {}, [F[:2] * 2, F[:2]]),
    ([4, 2], F[:4], {"drop_last": True}, [F[:2], F[2:3]]),
    ([4, 2], F[:4], {}, [F[:4] * 2, F[:4]]),
    ([4, 2], F[:4], {"unbalanced": True}, [[F[0], F[1], F[3]], [F[2]]]),
    # EPL has no case with fewer files than one round, which are never divided
    ([4, 2], F[:2], {"unbalanced": True}, [F[:2] * 2, F[:2]]),
    ([4, 2], F[:2], {"drop_last": True}, [F[:2] * 2, F[:2]]),
]


@pytest.mark.parametrize("replicas, files, options, want", GOLDEN)
def test_it_slices_as_epl_does(replicas, files, options, want):
    assert [slice_files(files, w, replicas, **options) for w in range(len(replicas))] == want


REPLICAS = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def every_worker(count, replicas, **options):
    return [slice_files(range(count), w, replicas, **options) for w in range(len(replicas))]


@given(st.integers(1, 8), REPLICAS)
def test_whole_rounds_are_a_partition_in_proportion_to_replicas(rounds, replicas):
    count = rounds * sum(replicas)
    parts = every_worker(count, replicas)
    assert sorted(i for part in parts for i in part) == list(range(count))
    assert [len(part) for part in parts] == [rounds * r for r in replicas]
    assert all(part == sorted(part) for part in parts)


@given(st.integers(0, 40), REPLICAS)
def test_without_options_every_replica_reads_as_much(count, replicas):
    parts = every_worker(count, replicas)
    assert len({len(part) / r for part, r in zip(parts, replicas, strict=True)}) == 1
    assert {i for part in parts for i in part} == set(range(count))


@given(st.integers(0, 40), REPLICAS)
def test_unbalanced_loses_and_repeats_nothing_once_there_is_a_round(count, replicas):
    read = Counter(
        i for part in every_worker(count + sum(replicas), replicas, unbalanced=True) for i in part
    )
    assert read == Counter(range(count + sum(replicas)))


@given(st.integers(0, 40), REPLICAS)
def test_drop_last_leaves_out_less_than_a_round_at_the_end(count, replicas):
    count += sum(replicas)
    parts = every_worker(count, replicas, drop_last=True)
    assert len({len(part) / r for part, r in zip(parts, replicas, strict=True)}) == 1
    read = sorted(i for part in parts for i in part)
    assert read == list(range(len(read))) and count - len(read) < sum(replicas)


@given(
    st.integers(0, 40),
    REPLICAS,
    st.integers(2, 4),
    st.sampled_from([{}, {"unbalanced": True}, {"drop_last": True}]),
)
def test_only_the_proportions_of_replicas_matter(count, replicas, times, options):
    assert every_worker(count, replicas, **options) == every_worker(
        count, [times * r for r in replicas], **options
    )


@pytest.mark.parametrize(
    "args, options, message",
    [
        ((F, 0, []), {}, "replicas is empty"),
        (
            (F, 0, [2, 0]),
            {},
            r"replicas\[1\] is 0; expected at least 1 replica for each worker",
        ),
        ((F, 2, [1, 1]), {}, "worker is 2; expected 0 to 1, because replicas has 2 entries"),
        ((F, -1, [1, 1]), {}, "worker is -1; expected 0 to 1"),
        (
            (F, 0, [1]),
            {"unbalanced": True, "drop_last": True},
            "unbalanced and drop_last are both True, .*; pass one of them",
        ),
    ],
)
def test_errors_name_what_is_wrong(args, options, message):
    with pytest.raises(ConfigError, match=message):
        slice_files(*args, **options)
