"""Exceptions and warnings of the package.

An error names the user's thing (leaf path, shape, endpoint, config key), says what is wrong with
it, and gives a remedy. All derive from `DtransError`. Each also derives from the built-in exception
that fits, so that code written for another library, with `except ValueError`, still works.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any


class UnknownPrimitiveWarning(UserWarning):
    """A step has a primitive that dtrans does not know, and assumes to mix all entries."""


class UntestedJaxWarning(UserWarning):
    """The installed JAX is newer than the newest tested one."""


class CheckpointWarning(UserWarning):
    """A checkpoint cannot be read, so the previous one is used; or copies inside it differ."""


class NonfiniteWarning(UserWarning):
    """Gradients of a trainer are not finite."""


class UnencryptedWarning(UserWarning):
    """Connections to other hosts are not encrypted, due to `transport_encryption="disabled"`."""


class DtransError(Exception):
    """Base class of the package's errors."""


class TraceError(DtransError, TypeError):
    """A function cannot be traced, or arguments do not match a program."""


class GradientError(DtransError, ValueError):
    """The gradients of a step cannot be identified, or an operation bypasses them."""


class OptimizerError(GradientError):
    """An optimizer needs values that servers do not have, or cannot be sliced as required."""


class ConfigError(DtransError, ValueError):
    """An option does not exist, has the wrong value, or contradicts another."""


class ConfigAssertionError(ConfigError, AssertionError):
    """A `ConfigError` where Paddle's transpiler raised a bare `AssertionError`."""


class ConfigTypeError(ConfigError, TypeError):
    """A `ConfigError` where Paddle's transpiler raised a `TypeError`."""


class UnknownEndpointError(ConfigError, KeyError):
    """The plan has no such endpoint."""

    def __str__(self) -> str:  # KeyError prints the repr of its message
        return str(self.args[0])


class BatchError(DtransError, ValueError):
    """A batch does not fit the program or the trainers."""


class NotRealisedError(DtransError, RuntimeError):
    """A communicating program was called as a plain function."""


class StateError(DtransError, RuntimeError):
    """The state of a job was used in a way that the job does not allow."""


class NonfiniteError(DtransError, FloatingPointError):
    """Gradients of a trainer are not finite, under `on_nonfinite="error"`."""


class VerifyError(DtransError, AssertionError):
    """A distributed step passed to `dtrans.verify` computes something else than the step.

    Attributes:
      report: the report, whose text is the error's: the outputs that differ, and the faults found.
    """

    def __init__(self, report: Any) -> None:
        super().__init__(str(report))
        self.report = report


class WireError(DtransError, ValueError):
    """A message violates the protocol."""


class PeerError(DtransError, RuntimeError):
    """Another role refused, failed, or disagrees about the training job."""


class DeadlineError(PeerError, TimeoutError):
    """A wait exceeded its deadline. The message has the two roles, the reason and the duration."""


class CheckpointError(PeerError):
    """Servers could not write a checkpoint, or there is none to restore.

    After a failed save the job continues, and another one may be requested.
    """


@contextlib.contextmanager
def rename_options(names: Mapping[str, str]) -> Iterator[None]:
    """Rename options in the messages of errors, from the package's names to an interface's.

    A word is an option at the start of a message and before `=`.

    Args:
      names: the package's name of each option to the interface's.
    """
    try:
        yield
    except DtransError as e:
        words = "|".join(names)
        pattern = rf"^({words})\b|\b({words})(?==)"
        e.args = (re.sub(pattern, lambda found: names[found[0]], str(e)), *e.args[1:])
        raise


def missing_extra(need: str, extra: str) -> ConfigError:
    """Return an error about a missing library, which an extra of the distribution installs."""
    return ConfigError(f"{need}: pip install 'dtrans-jax[{extra}]'")


class LaunchError(DtransError, RuntimeError):
    """A launched role ended with an error.

    Attributes:
      role: the role, e.g. `pserver 0`; empty if none could be started.
      code: its exit status as in a shell, 128 + n for signal n.
    """

    def __init__(self, message: str, *, role: str = "", code: int = 1) -> None:
        super().__init__(message)
        self.role = role
        self.code = code
