"""Strategies whose options are one flat list: tables of tests name a field of a record by itself.

flat_options.nccl2(main, startup, trainers=2, bucket_MB=0)
dtrans.nccl2(main, startup, trainers=2, reduce=dtrans.Reduce(bucket_MB=0))
"""

from __future__ import annotations

from typing import Any

import dtrans
from dtrans.checks import grouped


SHARED = {"reduce": dtrans.Reduce(), "batch": dtrans.Batch()}
OF_PSERVER = {"placement": dtrans.BlockPlacement(), "batch": dtrans.Batch()}
OF_SHARDING = SHARED | {"precision": dtrans.Precision(), "slices": dtrans.Slicing()}
OF_PIPELINE = SHARED | {"stages": dtrans.Stages(), "memory": dtrans.StageMemory()}


def nccl2(main: Any, startup: Any, **options: Any) -> Any:
    return dtrans.nccl2(main, startup, **grouped(options, SHARED))


def sharding(main: Any, startup: Any, **options: Any) -> Any:
    return dtrans.sharding(main, startup, **grouped(options, OF_SHARDING))


def pipeline(main: Any, startup: Any, **options: Any) -> Any:
    return dtrans.pipeline(main, startup, **grouped(options, OF_PIPELINE))


def pserver(main: Any, startup: Any, **options: Any) -> Any:
    return dtrans.pserver(main, startup, **grouped(options, OF_PSERVER))
