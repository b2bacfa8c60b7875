"""Metrics of training, written to TensorBoard, to a CSV file or to a function."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dtrans.errors import ConfigError
from dtrans.run.base.summary_writer import SummaryWriter
from dtrans.step.summary import SCALAR, Summary


Sink = Callable[[int, Mapping[str, float]], None]


class MetricsWriter:
    """Writer of metrics, such as the loss, after each step. Use it in a `with` block.

    Args:
      to: any number of destinations. A path that ends in `.csv` is a file. Another path is a folder
        of TensorBoard events. A function is called with the index of the step and a dict of
        metrics. The writer creates missing folders.

    Raises:
      ConfigError: a file cannot be written, or tensorboardX, which writes events, is not installed.

    Example:
      >>> import dtrans
      >>> with dtrans.MetricsWriter(lambda step, values: print(step, values)) as writer:
      ...     writer.write(0, {"loss": 0.5, "of": {"a": 1}})
      0 {'loss': 0.5, 'of/a': 1.0}
    """

    def __init__(self, *to: str | os.PathLike[str] | Sink) -> None:
        self._closing: list[Callable[[], None]] = []
        self._sinks: list[Sink] = []
        try:
            for destination in to:
                if callable(destination):
                    self._sinks.append(destination)
                else:
                    self._sinks.append(self._open(Path(destination)))
        except BaseException:
            self.close()  # close the destinations that were opened before the error
            raise

    def write(self, step: int, values: Any) -> None:
        """Write the metrics of a step.

        Args:
          step: index of the step.
          values: a pytree of numbers, or of arrays with one element. The name of a metric is its
            path in the pytree; a bare number is named `loss`.

        Raises:
          ConfigError: an array has several elements, or a CSV file has columns for other metrics.
        """
        found: dict[str, float] = {}
        for path, x in jax.tree_util.tree_leaves_with_path(values):
            name = jax.tree_util.keystr(path, simple=True, separator="/") or "loss"
            array = np.asarray(x)
            if array.size != 1:
                raise ConfigError(
                    f"{name} has {array.size} elements, but a metric is one number; pass the mean"
                )
            found[name] = float(array.reshape(()))
        for sink in self._sinks:
            sink(step, found)

    def close(self) -> None:
        """Flush and close files."""
        for close in self._closing:
            close()
        self._closing.clear()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *failed: object) -> None:
        self.close()

    def _open(self, path: Path) -> Sink:
        if path.suffix == ".csv":
            return self._open_csv(path)
        return self._open_tensorboard(path)

    def _open_tensorboard(self, folder: Path) -> Sink:
        writer = SummaryWriter(folder)
        self._closing.append(writer.close)

        def sink(step: int, values: Mapping[str, float]) -> None:
            writer.write(step, values, [Summary(n, SCALAR) for n in values])

        return sink

    def _open_csv(self, path: Path) -> Sink:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("w", newline="")
        except OSError as e:
            raise ConfigError(
                f"metrics cannot be written to {path}: {e.strerror}; pass another path"
            ) from e
        self._closing.append(file.close)
        table, names = csv.writer(file), list[str]()

        def sink(step: int, values: Mapping[str, float]) -> None:
            if not names:
                names.extend(values)
                table.writerow(["step", *names])
            if names != list(values):
                raise ConfigError(
                    f"{path} has columns for {', '.join(names)}, but step {step} has "
                    f"{', '.join(values)}; write the same metrics in every step"
                )
            table.writerow([step, *values.values()])
            file.flush()

        return sink
