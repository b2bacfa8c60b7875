"""Strategies with a flat list of options, so that tables of tests can name a field of a record.

    flat_options.nccl2(main, startup, trainers=2, bucket_MB=0)
    dtrans.nccl2(main, startup, trainers=2, reduce=dtrans.Reduce(bucket_MB=0))

Some options (`reduce`, `example_count`, `merge`) exist only for trainers that compute separate
numbers. With one of these options, the default of `batch` is "local".
"""

from __future__ import annotations

from typing import Any

import dtrans
from dtrans.checks import group_options


SHARED = {"reduce": dtrans.Reduce(), "batch": dtrans.Batch()}
OF_PSERVER = {"placement": dtrans.BlockPlacement(), "batch": dtrans.Batch()}
OF_SHARDING = SHARED | {"precision": dtrans.Precision(), "slices": dtrans.Slicing()}
OF_PIPELINE = SHARED | {"stages": dtrans.Stages(), "memory": dtrans.StageMemory()}


def _grouped(options: dict[str, Any], records: dict[str, Any]) -> dict[str, Any]:
    if {"example_count", "merge"} & options.keys() or isinstance(options.get("reduce"), str):
        options = {"kind": "local", **options}
    return group_options(options, records)


def nccl2(main: Any, startup: Any, **options: Any) -> Any:
    return dtrans.nccl2(main, startup, **_grouped(options, SHARED))


def sharding(main: Any, startup: Any, **options: Any) -> Any:
    return dtrans.sharding(main, startup, **_grouped(options, OF_SHARDING))


def pipeline(main: Any, startup: Any, **options: Any) -> Any:
    return dtrans.pipeline(main, startup, **_grouped(options, OF_PIPELINE))


def pserver(main: Any, startup: Any, **options: Any) -> Any:
    return dtrans.pserver(main, startup, **_grouped(options, OF_PSERVER))
