"""Calls of one trainer's program: its program and arguments for each batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from dtrans.batch.exact_step import ExactStep
from dtrans.errors import ConfigError
from dtrans.ir.array_fns import array_type
from dtrans.ir.program import Program
from dtrans.ir.pytree import all_names
from dtrans.ir.selection import values_at
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.epochs import DROPS
from dtrans.run.base.batch import Share, batch_arrays, check_uneven, resize, uneven_rows
from dtrans.step.batch_sharing import without_parts


class StepCall(NamedTuple):
    """Call of a trainer's program for one step.

    Attributes:
      program: the trainer's program.
      batch: the program's arguments after its state.
      shared: the exact split of the batch over trainers; None if the plan has none.
      rows: number of rows of the global batch if parts are uneven, else 0.
    """

    program: Program
    batch: tuple[Any, ...]
    shared: ExactStep | None
    rows: int


class TrainerCalls:
    """Calls of one trainer's program for a step.

    Args:
      plan: the plan of the job.
      trainer_id: id of the trainer.
      on_trainer_loss: reaction of the launcher to the failure of a trainer, as for `launch`.
    """

    def __init__(
        self, plan: PServerPlan, trainer_id: int, *, on_trainer_loss: str = "restart"
    ) -> None:
        self._plan, self._trainer_id = plan, trainer_id
        self._on_trainer_loss = on_trainer_loss
        # program and exact split of unevenly split batches, by the batch's number of rows
        self._uneven_programs: dict[int, tuple[Program, ExactStep]] = {}

    def __call__(self, batch: Sequence[Any]) -> StepCall:
        """Return the call for a batch: its program and arguments.

        Raises:
          BatchError: the rows of the parts do not fit the plan.
          ConfigError: the batch is split unevenly, and the job may drop trainers.
        """
        arrays, rows = without_parts(batch)
        if rows:
            return self._uneven_call(arrays, rows)
        program = self._plan.trainer_program(self._trainer_id)
        return StepCall(program, arrays, self._plan.shared, 0)

    def _uneven_call(self, batch: Sequence[Any], rows: int) -> StepCall:
        """Return the call for an unevenly split batch, with padded arguments.

        The padding gives each trainer the same number of rows, and does not affect results.

        Args:
          batch: this trainer's part of each batch argument.
          rows: number of rows of the global batch.
        """
        plan, main, k = self._plan, self._plan.main, self._trainer_id
        check_uneven(rows, plan.trainers, plan.takes_uneven_batches)
        if self._on_trainer_loss in DROPS:
            # The program scales each part by the rows and the number of all trainers.
            raise ConfigError(
                f"on_trainer_loss={self._on_trainer_loss!r}: the batch has {rows} rows, which "
                f"cannot be split evenly over {plan.trainers} trainers, so the step needs all "
                f"trainers; pass batches with a multiple of {plan.trainers} rows, or launch the "
                "job with --on-trainer-loss restart"
            )
        assert plan.shared is not None
        specs = main.args[2:]
        names = all_names(specs)
        shares: list[Share] = [plan.shared.axes.get(n, "replicated") for n in names]
        arrays = list(zip(batch_arrays(specs, batch, main.inputs), shares, strict=True))
        padded = uneven_rows(names, arrays, rows, k, -(-rows // plan.trainers))

        # one program for each number of rows
        if rows not in self._uneven_programs:
            state = values_at(main.inputs, all_names(main.args[:2]))
            types = list(map(array_type, state))
            types += [resize(x, share, lambda _: rows) for x, share in arrays]
            shared, program = plan.for_uneven_batch(types, k)
            program = dataclasses.replace(program, plan=plan)
            self._uneven_programs[rows] = program, shared
        program, shared = self._uneven_programs[rows]

        by_name = dict(zip(names, padded, strict=True))
        args = tuple(spec.unflatten_named(by_name) for spec in specs)
        return StepCall(program, args, shared, rows)
