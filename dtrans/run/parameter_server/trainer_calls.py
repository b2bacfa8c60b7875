"""Choice of the program that a trainer runs on a batch, by the number of the batch's rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from dtrans.batch.exact_step import ExactStep
from dtrans.errors import BatchError, ConfigError
from dtrans.ir.array_fns import array_type
from dtrans.ir.program import Program
from dtrans.ir.pytree import all_names
from dtrans.ir.selection import values_at
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.generations import DROPS
from dtrans.run.base.batch import Share, batch_arrays, check_uneven, resize, uneven_rows
from dtrans.step.batch_sharing import without_parts


class StepCall(NamedTuple):
    """Program and arguments with which a trainer computes one step.

    Attributes:
      program: the trainer's program.
      batch: the program's arguments after its state.
      shared: the split of the batch with which trainers compute the results of one device; None
        with batch="local".
      rows: number of rows of the full batch if trainers have different numbers of rows, else 0.
    """

    program: Program
    batch: tuple[Any, ...]
    shared: ExactStep | None
    rows: int


class TrainerCalls:
    """Programs of one trainer: calling this object with a batch chooses a program.

    If the trainers cannot divide the rows of a batch evenly, they need another program, because
    their results have different weights. Programs are stored, and used again for batches of the
    same shapes.

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
        # program and exact split of unevenly split batches, by the level of the plan and the types
        # of the global batch
        self._uneven_programs: dict[tuple[Any, ...], tuple[Program, ExactStep]] = {}

    def __call__(self, batch: Sequence[Any], level: int | None = None) -> StepCall:
        """Return the program and its arguments for a batch.

        Args:
          batch: this trainer's part of each batch argument, from `job.shard_batch`.
          level: with `dtrans.TopK`, the index of the current density (fraction of a gradient that
            is sent) in the user's list; None for the last density.

        Raises:
          BatchError: the rows of the parts do not fit the plan, or parts of a plan with
            `Batch.speeds` are not from `job.shard_batch`.
          ConfigError: the batch is split unevenly, and the job may drop trainers.
        """
        arrays, rows = without_parts(batch)
        plan = self._plan if level is None else self._plan.levels[level]
        if rows:
            return self._uneven_call(plan, arrays, rows)
        if self._plan.shares is not None:
            raise BatchError(
                "the arrays of the batch are no dtrans.UnevenParts, but dtrans.Batch(speeds=...) "
                "gives trainers different numbers of rows, so a step needs the number of rows of "
                "the full batch; pass job.step(state, *job.shard_batch(*batch))"
            )
        program = plan.trainer_program(self._trainer_id)
        return StepCall(program, arrays, self._plan.shared, 0)

    def _uneven_call(self, plan: PServerPlan, batch: Sequence[Any], rows: int) -> StepCall:
        """Return the program and padded arguments for a batch that is split unevenly.

        For example, 3 trainers have 4, 4 and 2 of 10 rows. Each part is padded to 4 rows, and the
        program gives the padding no weight. With `Batch.speeds`, each trainer has a program without
        padding.

        Args:
          plan: the plan for the current density of `dtrans.TopK`.
          batch: this trainer's part of each batch argument.
          rows: number of rows of the full batch.
        """
        main, k = plan.main, self._trainer_id
        if plan.shares is None:
            check_uneven(rows, plan.trainers, plan.takes_uneven_batches)
        if self._on_trainer_loss in DROPS and plan.shares is None:
            # The program scales the part of each trainer by the rows of all trainers, so the
            # step is wrong if a trainer is dropped.
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
        size, here = -(-rows // plan.trainers), None
        if plan.shares is not None:
            size = here = plan.shares(rows)[k]
        padded = uneven_rows(names, arrays, rows, k, size, here)

        batch_types = [resize(x, share, lambda _: rows) for x, share in arrays]
        key = plan.compression.level, *((t.shape, t.dtype) for t in batch_types)
        if key not in self._uneven_programs:
            state = values_at(main.inputs, all_names(main.args[:2]))
            types = [*map(array_type, state), *batch_types]
            shared, program = plan.for_uneven_batch(types, k)
            program = dataclasses.replace(program, plan=plan)
            self._uneven_programs[key] = program, shared
        program, shared = self._uneven_programs[key]

        by_name = dict(zip(names, padded, strict=True))
        args = tuple(spec.unflatten_named(by_name) for spec in specs)
        return StepCall(program, args, shared, rows)
