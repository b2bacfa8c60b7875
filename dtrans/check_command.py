"""`dtrans check module:function`: verify a plan, or a step that a user wrote by hand."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
from rich.console import Console
from rich.text import Text

from dtrans.errors import ConfigError, VerifyError
from dtrans.named_object import named_object
from dtrans.plan import Plan
from dtrans.verification.outcome import Report
from dtrans.verification.user_shard_map import verify


EQUAL, DIFFERS, INCOMPLETE = 0, 1, 2  # exit codes of `dtrans check`


def check(name: str, *, seed: int = 0, devices: int | None = None) -> Report:
    """Verify a plan, or a step, that a module defines.

    Args:
      name: `module:name` of a plan or a function. The function has no arguments, and returns a
        plan, a report, or a tuple `(distributed_step, step, args)`.
      seed: seed of the random inputs, on which the distributed and the one-device step are
        compared.
      devices: number of CPU devices to create, for the meshes of the module.

    Raises:
      ConfigError: the module has no such object, or the function returns something else.
      DtransError: the plan or the steps cannot be verified.
    """
    if devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    found = named_object(name, "dtrans check", "function")
    try:
        return _report(name, found, seed)
    except VerifyError as e:
        report: Report = e.report
        return report


def _report(name: str, found: Any, seed: int) -> Report:
    """Return the report for an object that the user named: a plan, a report, or a tuple.

    If the object is a function, it is called first. A plan or a tuple is then verified.

    Raises:
      VerifyError: the outputs of a step written by hand differ.
    """
    target = found() if callable(found) and not isinstance(found, Plan) else found
    if isinstance(target, Report):
        return target
    if isinstance(target, Plan):
        return target.verify(seed=seed)
    if not (
        isinstance(target, tuple)
        and len(target) == 3
        and callable(target[0])
        and callable(target[1])
    ):
        raise ConfigError(
            f"{name} returns a {type(target).__name__}; expected a plan, or a tuple "
            "(distributed_step, step, args)"
        )
    distributed_step, step, args = target
    if not isinstance(args, (tuple, list)):
        raise ConfigError(
            f"{name} returns args of type {type(args).__name__}; expected a tuple of "
            "arguments, with which both steps are called"
        )
    return verify(distributed_step, step, *args, seed=seed)


def show(report: Report, *, as_json: bool) -> None:
    """Print a report, as text with a coloured first line or as JSON."""
    if as_json:
        summary = {"equal": report.equal, "complete": report.complete}
        print(json.dumps({**summary, **dataclasses.asdict(report)}))
        return
    text = Text(str(report))
    incomplete = "yellow" if report.equal else "red"
    text.stylize("green" if report else incomplete, 0, str(report).find("\n") % len(text))
    Console(soft_wrap=True).print(text)


def exit_code(report: Report) -> int:
    """Return 0 if all outputs are equal, 1 if one differs, 2 if some were not compared."""
    if not report.equal:
        return DIFFERS
    return EQUAL if report.complete else INCOMPLETE
