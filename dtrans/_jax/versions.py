"""Versions of JAX with which dtrans was tested.

pyproject.toml requires the oldest of these versions. A newer JAX than the newest of them may work,
so dtrans only warns.
"""

from __future__ import annotations

import warnings

import jax

from dtrans.errors import UntestedJaxWarning


NEWEST_TESTED = (0, 12, 0, 1)


def warn_untested() -> None:
    """Warn, once for each process, if JAX is newer than the newest tested version."""
    if _numbers(jax.__version__)[:2] > NEWEST_TESTED[:2]:
        tested = ".".join(map(str, NEWEST_TESTED))
        text = f"dtrans was tested with jax up to {tested}, and this is {jax.__version__}"
        warnings.warn(UntestedJaxWarning(text), stacklevel=2)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
