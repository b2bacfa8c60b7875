"""Exceptions and warnings of the package.

Each message names an object that the user knows (a leaf, option, endpoint or step). It contains the
actual value, the expected value, and a remedy. Each error class derives from `DtransError`, and
also from a built-in exception such as `ValueError`, so that users can catch either.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any


class UnknownPrimitiveWarning(UserWarning):
    """Warning: a step has a primitive that dtrans does not know.

    dtrans assumes that each entry of the outputs depends on all entries of the operands.
    """


class UntestedJaxWarning(UserWarning):
    """Warning: the installed JAX is newer than the newest version that dtrans was tested with."""


class CheckpointWarning(UserWarning):
    """Warning: a checkpoint is unreadable and skipped, or two copies of a saved array differ."""


class NonfiniteWarning(UserWarning):
    """Warning: gradients of a trainer have infinities or NaN."""


class UnencryptedWarning(UserWarning):
    """Warning: `transport_encryption="disabled"` leaves connections to other hosts unencrypted."""


class DtransError(Exception):
    """Base class of the package's errors."""


class TraceError(DtransError, TypeError):
    """Error: a function cannot be traced, or arguments do not match a program."""


class GradientError(DtransError, ValueError):
    """Error: dtrans cannot find a step's gradients, or cannot divide the step at its gradients.

    For example, the update reads one value per example, but each trainer has only some examples.
    """


class OptimizerError(GradientError):
    """Error: an optimizer cannot update slices of a parameter, or needs another argument."""


class ConfigError(DtransError, ValueError):
    """Error: an option is unknown, has an invalid value, or conflicts with another option."""


class ConfigAssertionError(ConfigError, AssertionError):
    """`ConfigError` that is also an `AssertionError`, because Paddle's transpiler raises this."""


class ConfigTypeError(ConfigError, TypeError):
    """`ConfigError` that is also a `TypeError`, because Paddle's transpiler raises `TypeError`."""


class UnknownEndpointError(ConfigError, KeyError):
    """Error: the plan does not have this endpoint."""

    def __str__(self) -> str:  # KeyError would print the repr of its message
        return str(self.args[0])


class BatchError(DtransError, ValueError):
    """Error: a batch does not fit the program or the trainers."""


class NotRunnableError(DtransError, RuntimeError):
    """Error: a program with communication was called as a function."""


class StateError(DtransError, RuntimeError):
    """Error: a state does not fit the job or was donated, or the job is closed."""


class DamagedError(StateError):
    """Error: a checkpoint lacks files, mixes files of several saves, or fails a checksum."""


class DamagedSnapshotError(DamagedError):
    """Error: a role cannot read its state, because the snapshot of the job is damaged.

    `dtrans launch --restarts` then starts all roles again, from an older snapshot.
    """


class NonfiniteError(DtransError, FloatingPointError):
    """Error: gradients of a trainer have infinities or NaN, and `on_nonfinite="error"`."""


class VerifyError(DtransError, AssertionError):
    """Error: a step passed to `dtrans.verify` differs from the one-device step.

    Attributes:
      report: the report of the check, with the outputs that differ. The message is its text.
    """

    def __init__(self, report: Any) -> None:
        super().__init__(str(report))
        self.report = report


class WireError(DtransError, ValueError):
    """Error: a message violates the protocol."""


class PeerError(DtransError, RuntimeError):
    """Error: another role refused a request, failed, or has a different plan."""


class LostPeerError(PeerError):
    """Error: another role was lost: its process has ended, or the connection to it.

    In a job that writes snapshots (`job.serve(state, snapshots=10)`), the
    launcher starts the other role again.

    Attributes:
      role: the other role: "trainer 1", or "pserver " and its endpoint.
    """

    def __init__(self, message: str, role: str = "") -> None:
        super().__init__(message)
        self.role = role


class DeadlineError(PeerError, TimeoutError):
    """Error: a role waited for another role longer than its deadline."""


class CheckpointError(PeerError):
    """Error: servers could not write a checkpoint, or there is no checkpoint to restore.

    After a failed save the job continues, and a new save may be requested.
    """


class Rewound(DtransError):
    """Signal: the job goes back to an earlier step, because a process failed or a trainer rejoined.

    In a synchronous job, all processes have loaded a snapshot of the job's state. In an
    asynchronous job, this trainer has received the newest parameters.

    `job.steps` handles the signal, and repeats the steps after `step`. If you call `job.step` in a
    loop, catch the signal and continue from its `state`.

    Attributes:
      step: the number of steps after which the trainer continues.
      state: the trainer's state after these steps.
      generation: number of the job's generation. The failure of a process begins a generation, and
        so does a trainer that joins the job again. The job starts with generation 0.
    """

    def __init__(self, step: int, state: Any, generation: int) -> None:
        super().__init__(
            f"a process was lost, or a trainer joined again, and the job continues after step "
            f"{step}; use job.steps(state, batch_of_step, stop=steps), which repeats the steps, or "
            "catch dtrans.errors.Rewound and continue from its state"
        )
        self.step, self.state, self.generation = step, state, generation


@contextlib.contextmanager
def rename_options(names: Mapping[str, str]) -> Iterator[None]:
    """Rename options in the messages of errors that are raised in a `with` block.

    `dtrans.paddle` and `dtrans.epl` use this function, because their options have other names. A
    word is replaced if it is the first word of a message, or stands before `=`.

    Args:
      names: maps dtrans's name of an option to the name in the interface that the user calls. A key
        with a space is a phrase, which is replaced at every place.
    """
    try:
        yield
    except DtransError as e:
        patterns = []
        for n in names:
            patterns.append(re.escape(n) if " " in n else rf"^{n}\b|\b{n}(?==)")
        text = re.sub("|".join(patterns), lambda found: names[found[0]], str(e))
        e.args = (text, *e.args[1:])
        raise


def missing_extra(need: str, extra: str) -> ConfigError:
    """Return the error for a missing library.

    Args:
      need: clause that names the library.
      extra: the extra (group of optional dependencies) of `dtrans-jax` that has the library.
    """
    return ConfigError(f"{need}: pip install 'dtrans-jax[{extra}]'")


class LaunchError(DtransError, RuntimeError):
    """Error: a launched role ended with an error.

    Attributes:
      role: name of the role, e.g. `pserver 0`; empty if no role could be started.
      code: exit status of the role as in a shell, 128 + n for signal n.
    """

    def __init__(self, message: str, *, role: str = "", code: int = 1) -> None:
        super().__init__(message)
        self.role = role
        self.code = code
