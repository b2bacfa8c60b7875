"""Ids of the table rows that a step will look up, computed from a batch before the step.

`job.prefetch` uses them to request these rows in advance.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from dtrans._jax import JaxprEqn, constants
from dtrans.errors import ConfigError
from dtrans.ir.dataflow import backward_slice
from dtrans.ir.program import Program, is_communication
from dtrans.ir.selection import values_at
from dtrans.ops import prefetch_p, split_ids_p
from dtrans.protocol.tables.table_rows import unique_ids
from dtrans.run.base.segments import Rules, interpret


class BatchRows:
    """Function that computes the ids of the table rows that a step will look up in a batch.

    The function consists of the equations of the trainer's program that compute the ids.

    Args:
      program: the trainer's program. The program's first argument is the state.
      rules: maps communication primitives to functions that compute them in this process.

    Raises:
      ConfigError: the ids depend on the state, or on data from other processes.
    """

    def __init__(self, program: Program, rules: Rules) -> None:
        # pairs (`split_ids` equation, `prefetch` equation)
        self._lookups: list[tuple[JaxprEqn, JaxprEqn]] = []
        operands: list[Any] = []
        for split in program.eqns:
            if split.primitive is split_ids_p:
                for prefetch in _prefetches(program, split):
                    self._lookups.append((split, prefetch))
                    operands += split.invars
        numbers, read = backward_slice(program.eqns, operands)
        eqns = values_at(program.eqns, numbers)
        self._check(program, eqns, read, rules)
        names = program.in_names
        self._places = [i for i, v in enumerate(program.inner.invars) if v in read]
        invars = [program.invars[names[i]] for i in self._places]
        fixed = dict(zip(program.inner.constvars, constants(program.jaxpr), strict=True))

        def run(*args: Any) -> list[Any]:
            values = {**fixed, **dict(zip(invars, args, strict=True))}
            return interpret(eqns, values, operands, rules)

        self._run = jax.jit(run)

    def _check(
        self, program: Program, eqns: Sequence[JaxprEqn], read: Collection[Any], rules: Rules
    ) -> None:
        """Raise ConfigError if ids depend on the state, or on communication that `rules` lacks."""
        state = [n for n in program.args[0].names if program.invars[n] in read]
        remote = [e for e in eqns if is_communication(e) and e.primitive not in rules]
        if state:
            source = state[0]
        elif remote:
            source = f"the result of `{remote[0].primitive.name}` from other processes"
        else:
            return
        tables = ", ".join(split.params["table"] for split, _ in self._lookups)
        raise ConfigError(
            f"job.prefetch cannot know the rows of {tables} before the step, because the step "
            f"computes their ids from {source}; leave job.prefetch out, or pass the ids with the "
            "batch"
        )

    def __call__(self, flat: Sequence[Any]) -> list[tuple[JaxprEqn, np.ndarray]]:
        """Return pairs (`prefetch` equation of a lookup, ids of its rows) for a batch.

        Args:
          flat: the program's flat inputs. The state among them is not read.

        Raises:
          BatchError: an id is not a row of its table.
        """
        operands = iter(self._run(*values_at(flat, self._places)))
        found = []
        for split, prefetch in self._lookups:
            ids = [next(operands) for _ in split.invars]
            found.append((prefetch, unique_ids(ids, **split.params)))
        return found


def _prefetches(program: Program, split: JaxprEqn) -> list[JaxprEqn]:
    """Return the `prefetch` equations that read the row ids of a `split_ids` equation."""
    (uniq,) = split.outvars
    found = []
    for eqn in program.eqns:
        if eqn.primitive is prefetch_p and eqn.invars[0] is uniq:
            found.append(eqn)
    return found
