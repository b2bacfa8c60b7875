"""Conversion of settings to arguments of a command, with which a launcher starts roles."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar


T = TypeVar("T")


def as_arguments(settings: Any) -> list[str]:
    """Return the fields of a dataclass as command-line arguments.

    Example:
      >>> import dataclasses
      >>> from examples.settings import as_arguments, from_arguments
      >>> @dataclasses.dataclass(frozen=True)
      ... class Settings:
      ...     batch_size: int = 64
      >>> as_arguments(Settings(8)), from_arguments(Settings, ["--batch-size", "8"])
      (['--batch-size', '8'], Settings(batch_size=8))
    """
    return [
        a
        for n, v in dataclasses.asdict(settings).items()
        for a in (f"--{n.replace('_', '-')}", str(v))
    ]


def from_arguments(kind: type[T], arguments: Sequence[str]) -> T:
    """Parse the result of `as_arguments`. All fields of `kind` must have defaults."""
    parser = argparse.ArgumentParser()
    fields: Any = dataclasses.fields(kind)  # type: ignore[arg-type]
    for field in fields:
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default
        )
    return kind(**vars(parser.parse_args(arguments)))
