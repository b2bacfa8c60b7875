"""Every refusal of the package.

An error names the user's own thing (leaf path, shape, endpoint, config key), says what is wrong
with it and what to do. All derive from `DtransError`; each also derives from the built-in exception
that fits, so that `except ValueError` written against another library goes on working.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any


class UnknownPrimitiveWarning(UserWarning):
    """JAX made an equation of a primitive that this dtrans does not know: it is treated as mixing
    everything."""


class UntestedJaxWarning(UserWarning):
    """This JAX is newer than the newest that this dtrans was tested with."""


class CheckpointWarning(UserWarning):
    """A checkpoint that cannot be read, and is passed over for the one before it; or copies in it
    that differ."""


class NonfiniteWarning(UserWarning):
    """Gradients of a trainer that are not finite."""


class UnencryptedWarning(UserWarning):
    """Connections to other hosts that are not encrypted, since `transport_encryption="disabled"`
    says so."""


class DtransError(Exception):
    """The base of all."""


class TraceError(DtransError, TypeError):
    """A function, or the arguments of a program, that cannot be traced or matched."""


class GradientError(DtransError, ValueError):
    """The gradients of a step cannot be told, or something runs around them."""


class OptimizerError(GradientError):
    """An optimizer that needs what no server has, or that cannot be sliced where that was
    required."""


class ConfigError(DtransError, ValueError):
    """An option that does not exist, has the wrong value, or contradicts another."""


class ConfigAssertionError(ConfigError, AssertionError):
    """A `ConfigError` where Paddle's transpiler raised a bare `AssertionError`."""


class ConfigTypeError(ConfigError, TypeError):
    """A `ConfigError` where Paddle's transpiler raised a `TypeError`."""


class UnknownEndpointError(ConfigError, KeyError):
    """An endpoint that is not one of the plan's."""

    def __str__(self) -> str:  # KeyError prints the repr of its message
        return str(self.args[0])


class BatchError(DtransError, ValueError):
    """A batch that does not fit the program or the trainers."""


class NotRealisedError(DtransError, RuntimeError):
    """A communicating program was run as if it were a plain function."""


class StateError(DtransError, RuntimeError):
    """The state of a job was used in a way its job does not allow."""


class NonfiniteError(DtransError, FloatingPointError):
    """Gradients of a trainer that are not finite, where `on_nonfinite="error"` was said."""


class VerifyError(DtransError, AssertionError):
    """A distributed step, given to `dtrans.verify`, that computes something else than the step.

    Attributes:
      report: the outcome, whose text is that of the error: the outputs that differ, and the faults
        that were found.
    """

    def __init__(self, report: Any) -> None:
        super().__init__(str(report))
        self.report = report


class WireError(DtransError, ValueError):
    """A message that does not follow the protocol."""


class PeerError(DtransError, RuntimeError):
    """Another role refused, failed, or disagrees about what is being trained."""


class DeadlineError(PeerError, TimeoutError):
    """A wait ran out of time. The message says who waited for whom, for what, and how long."""


class CheckpointError(PeerError):
    """A checkpoint that servers could not write. The job goes on: another one may be asked for."""


@contextlib.contextmanager
def options_named(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name options as an interface over the package does.

    A name is an option at the start of a message, and before `=`.

    Args:
      names: the option of the package to that of the interface.
    """
    try:
        yield
    except DtransError as e:
        words = "|".join(names)
        pattern = rf"^({words})\b|\b({words})(?==)"
        e.args = (re.sub(pattern, lambda found: names[found[0]], str(e)), *e.args[1:])
        raise


def not_installed(what: str, extra: str) -> ConfigError:
    """What to raise where a library is missing that an extra of the distribution brings."""
    return ConfigError(f"{what}: pip install 'dtrans-jax[{extra}]'")


class LaunchError(DtransError, RuntimeError):
    """A launched role ended with an error.

    Attributes:
      role: which, e.g. `pserver 0`; empty when none could be started.
      code: its exit status as a shell gives it, 128 + n for signal n.
    """

    def __init__(self, message: str, *, role: str = "", code: int = 1) -> None:
        super().__init__(message)
        self.role = role
        self.code = code
