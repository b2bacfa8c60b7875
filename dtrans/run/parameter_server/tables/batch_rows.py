"""Which rows a trainer's step looks up, from its batch alone: what is asked of servers before the
step is made."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from dtrans._jax import JaxprEqn, constants
from dtrans.errors import ConfigError
from dtrans.ir.dataflow import backward_slice
from dtrans.ir.program import Program, is_communication
from dtrans.ops import prefetch_p, split_ids_p
from dtrans.protocol.tables.table_rows import unique_ids
from dtrans.run.base.segments import Rules, interpret


class BatchRows:
    """The part of a trainer's program that makes numbers of rows.

    Args:
      program: of a trainer; its first argument is its state.
      rules: makes what is communication by name, and is computed.

    Raises:
      ConfigError: they are made of more than the batch.
    """

    def __init__(self, program: Program, rules: Rules) -> None:
        self._lookups = [
            (e, p) for e in program.eqns if e.primitive is split_ids_p for p in _reading(program, e)
        ]
        operands = [a for split, _ in self._lookups for a in split.invars]
        kept, read = backward_slice(program.eqns, operands)
        eqns = [program.eqns[i] for i in kept]
        self._check(program, eqns, read, rules)
        names = program.in_names
        self._places = [i for i, v in enumerate(program.inner.invars) if v in read]
        invars = [program.invars[names[i]] for i in self._places]
        fixed = dict(zip(program.inner.constvars, constants(program.jaxpr), strict=True))

        def run(*args: Any) -> list[Any]:
            return interpret(
                eqns, {**fixed, **dict(zip(invars, args, strict=True))}, operands, rules
            )

        self._run = jax.jit(run)

    def _check(
        self, program: Program, eqns: Sequence[JaxprEqn], read: Collection[Any], rules: Rules
    ) -> None:
        tables = ", ".join(split.params["table"] for split, _ in self._lookups)
        state = [n for n in program.args[0].names if program.invars[n] in read]
        told = [e for e in eqns if is_communication(e) and e.primitive not in rules]
        made_of = (
            state[0]
            if state
            else told and f"`{told[0].primitive.name}`, which other processes answer"
        )
        if made_of:
            raise ConfigError(
                f"job.prefetch: which rows of {tables} a step looks up is made of {made_of}, and "
                "known only when the "
                "step is made: leave job.prefetch out, or give what they are made of with the batch"
            )

    def __call__(self, flat: Sequence[Any]) -> list[tuple[JaxprEqn, np.ndarray]]:
        """Each `prefetch` with the numbers of its rows. Raises BatchError for a row that a table
        does not have.

        Args:
          flat: the arrays of the program's inputs; those of the state are not read.
        """
        made = iter(self._run(*(flat[i] for i in self._places)))
        return [
            (prefetch, unique_ids([next(made) for _ in split.invars], **split.params))
            for split, prefetch in self._lookups
        ]


def _reading(program: Program, split: JaxprEqn) -> list[JaxprEqn]:
    """The `prefetch` of the rows that a `split_ids` has numbered."""
    (uniq,) = split.outvars
    return [e for e in program.eqns if e.primitive is prefetch_p and e.invars[0] is uniq]
