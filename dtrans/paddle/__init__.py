"""Paddle's interface over the strategies: its names, options and defaults.

transpiler   `DistributeTranspiler`, `GeoSgdTranspiler`
strategies   `sharding`
dgc          `DGCMomentum`
config       `DistributeTranspilerConfig`, `Embedding`, `CountFilterEntry`, `ProbabilityEntry`
optimizers   Paddle's optimizers, decays and clips, which compute what Paddle's kernels compute
"""

import importlib
from typing import TYPE_CHECKING, Any

from dtrans.paddle.config import (
    CountFilterEntry as CountFilterEntry,
    Embedding as Embedding,
    ProbabilityEntry as ProbabilityEntry,
)
from dtrans.paddle.dgc import DGCMomentum as DGCMomentum
from dtrans.paddle.strategies import sharding as sharding


if TYPE_CHECKING:
    from dtrans.paddle import optimizers as optimizers


def __getattr__(name: str) -> Any:
    """Import `dtrans.paddle.optimizers` at first use, since optax doubles the import time."""
    if name == "optimizers":
        return importlib.import_module("dtrans.paddle.optimizers")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
