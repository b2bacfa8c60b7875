"""Trainers with different numbers of rows in one process: each trainer runs a separate program.

With `dtrans.Batch.speeds`, faster trainers get more rows of a batch. So the programs of trainers
have different shapes, and one compiled program cannot run them. The job runs the programs one after
the other on one device, each up to its next communication. All programs communicate in the same
order, so the job then executes the communication of all trainers together.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp

from dtrans._jax import JaxprEqn, Primitive
from dtrans.batch.exact_step import ExactStep
from dtrans.ir.array_fns import array_type
from dtrans.ir.pytree import all_names, result_of, without
from dtrans.ir.selection import values_at
from dtrans.ops import exchange_p, exchanged, trainer_index_p
from dtrans.parameter_server.plan import PServerPlan
from dtrans.parameter_server.state import MeshState
from dtrans.run.base.batch import Share
from dtrans.run.base.lowered import call_recorded
from dtrans.run.base.segments import COMPUTED, Compute, Segments, divide_program
from dtrans.run.parameter_server.mesh_fabric import StepFabric


# The value of a variable on each trainer, in the order of the trainers
OfTrainers = list[Any]


class ShareTrainers:
    """Programs of all trainers for one size of batches, if trainers have different numbers of rows.

    Args:
      plan: a plan with `Batch.speeds`.
      arrays: the arrays of the full batch, each with its split over trainers. Only their shapes and
        dtypes are read.

    Attributes:
      steps: for each trainer, the split of the batch.
      pieces: the program of each trainer, divided at its communication.
    """

    def __init__(self, plan: PServerPlan, arrays: Sequence[tuple[Any, Share]]) -> None:
        self._plan = plan
        state = values_at(plan.main.inputs, all_names(plan.main.args[:2]))
        types = [*map(array_type, state), *(array_type(x) for x, _ in arrays)]
        self.steps: list[ExactStep] = []
        self.pieces: list[Segments] = []
        for k in range(plan.trainers):
            shared, program = plan.for_uneven_batch(types, k)
            index = functools.partial(_index, k)
            self.steps.append(shared)
            self.pieces.append(
                divide_program(program, computed={**COMPUTED, trainer_index_p: index})
            )

    def args(
        self, params: Mapping[str, Any], local: frozenset[str], arrays: Sequence[tuple[Any, Share]]
    ) -> list[list[Any]]:
        """Return the arguments of each trainer's program: parameters, and its rows of the batch.

        Args:
          params: the parameters, by name.
          local: names of the parameters that have one entry for each trainer.
          arrays: the arrays of the full batch, each with its split over trainers.
        """
        names = self._plan.main.args[0].names
        shares, found = self.steps[0].shares, []
        for k in range(self._plan.trainers):
            args = [params[n][k] if n in local else params[n] for n in names]
            start = sum(shares[:k])
            for x, share in arrays:
                if isinstance(share, int):
                    rows = (slice(None),) * share + (slice(start, start + shares[k]),)
                    x = x[rows]
                args.append(x)
            found.append(args)
        return found

    def merged(
        self, outputs: Sequence[Sequence[Any]], state: MeshState, local: frozenset[str]
    ) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Merge the outputs of all trainers; return the parameters by name, and the step's results.

        Args:
          outputs: the outputs of each trainer's program.
          state: the state before the step.
          local: names of the parameters that have one entry for each trainer.
        """
        program, shared = self.pieces[0].program, self.steps[0]
        of_name: dict[str, OfTrainers] = {}
        for n, *values in zip(program.out_names, *outputs, strict=True):
            of_name[n] = values
        params = {}
        for n in state.params:
            params[n] = jnp.stack(of_name[n]) if n in local else of_name[n][0]
        rest = without(program.out, self._plan.main.args[0])
        results = []
        for n in rest.names:
            value = of_name[n][0]
            if shared.merges.get(n) == "concat":
                value = jnp.concatenate(of_name[n], shared.joined[n])
            results.append(value)
        return params, result_of(rest, results)


def _index(k: int, *, over: Any) -> list[Any]:
    return [jnp.int32(k)]


class ShareFabric(StepFabric):
    """Communication of one step of trainers that run separate programs on one device.

    Each operand and each result of an equation is a list with the value of each trainer.
    """

    rules: ClassVar[dict[Primitive, str]] = StepFabric.rules | {exchange_p: "_exchange"}

    def run_trainers(
        self, programs: Sequence[Segments], args: Sequence[Sequence[Any]]
    ) -> list[list[Any]]:
        """Run the programs of all trainers together; return the outputs of each.

        Each program runs up to its next communication. Then the communication of all trainers is
        executed.

        Args:
          programs: the program of each trainer, divided at its communication.
          args: the flat arguments of each trainer's program.
        """
        runs = []
        for k, (pieces, values) in enumerate(zip(programs, args, strict=True)):
            runs.append(pieces.run(values, functools.partial(_compute, k, pieces)))
        sent: list[Any] = [None] * len(runs)
        while True:
            done: list[list[Any]] = []
            waiting: list[tuple[JaxprEqn, list[Any]]] = []
            for run, values in zip(runs, sent, strict=True):
                try:
                    waiting.append(run.send(values))
                except StopIteration as end:
                    done.append(end.value)
            if done:
                assert len(done) == len(runs), "the trainers' programs communicate differently"
                return done
            eqns = [eqn for eqn, _ in waiting]
            assert len({eqn.primitive for eqn in eqns}) == 1, eqns
            operands = list(map(list, zip(*(values for _, values in waiting), strict=True)))
            found = self._carry_out(eqns[0], operands)
            sent = list(map(list, zip(*found, strict=True)))

    def _receive(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        return [[x] * self._plan.trainers for x in super()._receive(eqn, [])]

    def _fetch_barrier(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        return values

    def _send(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        where = zip(eqn.params["epmap"], eqn.params["names"], strict=True)
        for of_trainers, (ep, name) in zip(values, where, strict=True):
            stacked = jnp.stack(of_trainers)
            self._note(name, stacked, True)
            self._grads[ep][name] = [stacked]
        return [[None] * self._plan.trainers]

    def _send_barrier(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        super()._send_barrier(eqn, values)
        return [[None] * self._plan.trainers]

    def _exchange(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        results = []
        for way, parts in zip(eqn.params["how"], values, strict=True):
            results.append([exchanged(way, parts, _no_piece)] * len(parts))
        return results


def _compute(k: int, pieces: Segments, piece: Compute, values: Sequence[Any]) -> Sequence[Any]:
    """Run a compiled piece of a trainer's program; return its outputs.

    Args:
      k: id of the trainer.
      pieces: the trainer's program.
      piece: the piece.
      values: the values that the piece reads.
    """
    name = lambda: f"trainer {k}, {pieces.steps.index(piece)}"
    outs: Sequence[Any] = call_recorded(name, piece.jitted, *values)
    return outs


def _no_piece(x: Any, axis: int) -> Any:
    """Raise AssertionError: no collective of these programs returns a piece of a value.

    Other jobs have a function here that takes one trainer's piece of a value. Here trainers have
    different numbers of rows, so no collective divides a value into pieces.
    """
    raise AssertionError("a collective returns pieces of different sizes")
