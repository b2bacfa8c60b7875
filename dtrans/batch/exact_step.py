"""Division of a step's batch among trainers (`batch="exact"`), and the merge of their outputs.

    exact   results equal those of one device on the full batch: trainers communicate within the
            step if a value depends on the full batch
    local   each trainer runs the step on its part, and gradients are averaged, as in Paddle and
            torch DDP

The loss may be a masked mean, for example. The mean of the trainers' means is then not one device's
mean: trainers must add up their counts. But many exact steps need no communication. Then each
trainer runs the user's step unchanged on its part. One device's outputs are the mean, or the sum,
of the trainers' outputs (`dtrans.batch.scaled`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from dtrans._jax import JaxprEqn, Var, equations_inside, opened
from dtrans.batch.scaled import PartScale, scale_of_parts
from dtrans.batch.trainer_step import TrainerStep, trainer_step
from dtrans.errors import BatchError, ConfigError
from dtrans.ir.dataflow import bits_of, needed_equations, propagate
from dtrans.ir.program import Program, is_communication
from dtrans.ir.pytree import is_under
from dtrans.step.batch_sharing import Batch
from dtrans.step.capture import captured_if_marked, value_and_grad_p
from dtrans.step.halves import DividedStep, divide_again, divide_step


Types = Sequence[jax.ShapeDtypeStruct]  # types of the inputs of a step


@dataclasses.dataclass(frozen=True, eq=False)
class ExactStep:
    """Step of one trainer on its part of the batch, and rules that merge the trainers' outputs.

    Merged by these rules, the outputs equal those of one device on the full batch. Strategies with
    parts that cannot communicate must check `proven`.

    Attributes:
      step: the step that a trainer runs on its part of the batch: the user's step if `proven`, else
        a step that communicates.
      reduce: reduction of gradients over trainers: "mean" or "sum".
      merges: the merge over trainers of each result, and of each parameter that trainers update
        without an optimizer (such as batch statistics): "mean", "sum", "same" (all are equal) or
        "concat".
      joined: dimension along which each "concat" result is concatenated.
      axes: divided dimension of each batch array; other arrays are replicated.
      rows: number of rows in the full batch.
      part: the step that `dtrans.engine` wrote for one trainer, with a list of its collectives.
        `part` is also set if `step` is the user's step.
      proven: True if `step` is the user's step itself, which needs no communication.
      for_types: returns the trainer's step for other types of the inputs. Parts have `ceil(rows /
        trainers)` rows.
      unpaired: source line of the equation for which the proof of `dtrans.batch.scaled` failed;
        empty if unknown.
      shares: number of rows of each trainer, if they differ by `Batch.speeds`. `step` and `part`
        are then for trainer 0.
      for_trainer: returns the step of any trainer, if `shares` is set. The arguments are the types
        of the inputs with the full batch, and the index of the trainer. A number n instead of types
        stands for n times the planned batch.
    """

    step: DividedStep
    reduce: str
    merges: Mapping[str, str]
    joined: Mapping[str, int]
    axes: Mapping[str, int]
    rows: int
    part: TrainerStep
    proven: bool
    for_types: Callable[[Sequence[jax.ShapeDtypeStruct]], ExactStep]
    unpaired: str = ""
    shares: tuple[int, ...] = ()
    for_trainer: Callable[[Types | int, int], ExactStep] | None = None

    @property
    def local_note(self) -> str:
        """Note of a plan with `batch="local"`: says if results equal those of one device."""
        if self.proven and self.reduce == "mean":
            return f"exact: mean over {self.rows} rows"
        how = "local: each trainer computes on its own part, and the results are averaged"
        if self.proven:
            return f"{how}; one device's step is the sum of the steps on parts"
        return (
            f"{how}; one device's step depends on the full batch ({self.reason}). The error for "
            "batch='exact' lists the alternatives"
        )

    @property
    def reason(self) -> str:
        """Text for errors: the operation that needs the full batch, and its source line.

        An example is "all_reduce for model.py:12".
        """
        if self.part.exchanged:
            what, line = self.part.exchanged[0].op, self.part.exchanged[0].line
        elif self.part.gathers:
            what, line = self.part.gathers[0].reason, self.part.gathers[0].line
        elif self.shares:
            return "the shares of the rows by dtrans.Batch(speeds=...)"
        else:
            what = "numbers that depend on the batch size, or random numbers for each row"
            line = self.unpaired
        if line:
            return f"{what} for {line}"
        return what

    @property
    def undivided_state(self) -> tuple[str, ...]:
        """State arrays that trainers compute themselves, because no gradients were found.

        Empty if the gradients are known, because the optimizer then computes the state.
        """
        return self.step.params if self.step.undivided else ()

    @property
    def notes(self) -> list[str]:
        """Notes of a plan with `batch="exact"`, which list the communication across the batch."""
        scope = ""
        if self.part.local:
            scope = ", with dtrans.local() reductions over each trainer's rows"
        notes = []
        if self.step.undivided:
            reason = self.step.undivided.split("; ")[0].split(". ")[0]
            notes.append(f"no gradients are reduced: {reason}")
        if self.proven:
            return [*notes, f"exact: {self.reduce} over {self.rows} rows{scope}"]
        found: dict[tuple[str, str], list[int]] = {}
        for x in self.part.exchanged:
            found.setdefault((x.op, x.line), []).append(x.nbytes)
        moved = []
        for (op, line), sizes in found.items():
            where = line or "an unknown line"
            moved.append(f"  {op} for {where}: {sum(sizes):,} bytes in {len(sizes)}")
        how = f"sum over {self.rows} rows"
        if moved:
            how += ", with an exchange across the batch"
        if self.shares:
            notes.append(f"rows of trainers, by speed: {', '.join(map(str, self.shares))}")
        return [*notes, f"exact: {how}{scope}", *moved]


def shard_step(
    step: DividedStep,
    batch: Batch,
    trainers: int,
    over: Sequence[str],
    adapt: Callable[[TrainerStep], TrainerStep] = lambda part: part,
    alone: Callable[[Mapping[str, str]], bool] = lambda merges: True,
    pieces: Mapping[str, int] = MappingProxyType({}),
    open_state: bool = False,
    noun: str = "trainer",
) -> ExactStep:
    """Write the step of one trainer, so that all trainers together compute one device's numbers.

    The result is the user's step itself if this is proven to be correct. Otherwise the engine
    writes a step that communicates (`trainer_step`).

    Args:
      step: the user's step, traced on a trainer's part of the batch (after
        `DividedStep.with_reported`).
      batch: the arrays to divide, and the dimension of their rows.
      trainers: number of trainers.
      over: mesh axes of the trainers.
      adapt: function by which the strategy changes a step that `dtrans.engine` wrote.
      alone: function that takes the rules `merges`. It returns True if the strategy can merge
        outputs of the user's step by these rules.
      pieces: sliced dimension of each array of state that trainers store in pieces.
      open_state: True if, for parameters updated without an optimizer (such as batch statistics),
        each trainer may return its term of a sum instead of the sum.
      noun: word for a trainer in errors, such as "rank".
    """
    source = step.program
    axes = batch_axes(step, batch)
    rows = rows_of(source, axes, noun)

    def divided_for(types: Sequence[jax.ShapeDtypeStruct]) -> DividedStep:
        return divide_again(step, source.specialize_flat(types)).with_reported()

    def written(step: DividedStep) -> TrainerStep:
        part = trainer_step(
            step, axes, trainers, over, pieces=pieces, open_state=open_state, noun=noun
        )
        return dataclasses.replace(
            part, program=dataclasses.replace(part.program, name=source.name)
        )

    def all_grown(types: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        full = {}
        for n, t in types.items():
            state = source.inputs[n] if n in pieces else t  # its type does not depend on the batch
            full[n] = full_type(state, axes.get(n), trainers)
        return full

    def shared(part: TrainerStep, step: DividedStep, scale: PartScale | None) -> ExactStep:
        known, joined = split_merges(part.merges)
        if scale is not None:
            known |= {n: "mean" for n, way in known.items() if way == "sum" and scale.results[n]}
        reduce = "mean" if scale is not None and scale.gradients else "sum"
        proven = scale is not None
        return ExactStep(
            step, reduce, known, joined, axes, trainers * rows, part, proven, for_types, unpaired
        )

    def for_types(types: Sequence[jax.ShapeDtypeStruct]) -> ExactStep:
        part = adapt(written(divided_for(types)))
        return shared(part, divide_again(step, part.program).with_reported(), None)

    unpaired = ""
    together = divided_for([*all_grown(source.inputs).values()])
    part = written(together)
    # True if the update, reported values, or a callback depend on the full batch size
    sized = step.differing_outputs(together) or step.observed.differing_outputs(together.observed)
    scale: PartScale | None = None
    if not sized and not pieces:
        scale, unpaired = scale_of_parts(step, part, trainers)
    if scale is not None and alone((proven := shared(part, step, scale)).merges):
        return proven
    if open_state:  # only pipelines set it; their parts cannot communicate
        return shared(part, step, None)
    part = adapt(part)
    again = lambda other: adapt(written(divide_again(step, other).with_reported())).program
    program = together.program.rewritten(again, all_grown, result=part.program)
    return shared(part, divide_again(step, program).with_reported(), None)


def shard_by_speed(
    step: DividedStep,
    batch: Batch,
    trainers: int,
    over: Sequence[str],
    adapt: Callable[[TrainerStep], TrainerStep],
) -> ExactStep:
    """Write the step of each trainer, if trainers have different numbers of rows (`Batch.speeds`).

    Each trainer has a separate program for its rows. The result contains the step of trainer 0, and
    a function that writes the step of any trainer. The sum of the trainers' gradients is one
    device's gradient.

    Args:
      step: the user's step, traced on an equal part of the batch.
      batch: the arrays to divide, the dimension of their rows, and the speeds.
      trainers: number of trainers.
      over: mesh axes of the trainers.
      adapt: function by which the strategy changes a step that `dtrans.engine` wrote.

    Raises:
      ConfigError: the step reshapes rows, such as to pairs of rows, and the speeds do not divide
        the pairs without a remainder.
    """
    source = step.program
    axes = batch_axes(step, batch)
    rows_of(source, axes, "trainer")

    def for_trainer(types: Types | int, index: int) -> ExactStep:
        if isinstance(types, int):
            parts = trainers * types
            types = [full_type(t, axes.get(n), parts) for n, t in source.inputs.items()]
        program = source.specialize_flat(types)
        full = divide_again(step, program).with_reported()
        rows = rows_of(program, axes, "trainer")
        shares = batch.shares(rows)
        part = adapt(trainer_step(full, axes, trainers, over, shares=shares, index=index))
        named = dataclasses.replace(part.program, name=source.name)
        known, joined = split_merges(part.merges)
        return ExactStep(
            divide_again(step, named).with_reported(),
            "sum",
            known,
            joined,
            axes,
            rows,
            part,
            False,
            lambda other: for_trainer(other, index),
            shares=shares,
            for_trainer=for_trainer,
        )

    return for_trainer(1, 0)


def shard_alone(step: DividedStep, batch: Batch, parts: int, name: str) -> ExactStep:
    """Divide the batch of a step into parts that exchange only gradients and results.

    Asynchronous trainers cannot communicate within a step. So the user's step itself must run on
    each part. If this does not give one device's numbers, the function raises an error.

    Args:
      step: the user's step, traced on a part.
      batch: the arrays to divide, and the dimension of their rows.
      parts: number of parts.
      name: name of the strategy in errors.

    Raises:
      ConfigError: one device's numbers need more communication.
    """
    shared = shard_step(step, batch, parts, ("parts",), noun="part")
    if shared.proven:
        return shared
    captured_step = None if shared.part.exchanged else captured_if_marked(step.program)
    if captured_step is not None:
        with_loss = divide_step(captured_step).with_reported()
        by_loss = shard_step(with_loss, batch, parts, ("parts",), noun="part")
        if by_loss.proven:
            return dataclasses.replace(by_loss, step=step)
    raise parts_error(step, shared, name)


def parts_error(
    step: DividedStep, shared: ExactStep, name: str, kind: str = "local"
) -> ConfigError:
    """Return the error for parts of a batch that would have to communicate, but cannot.

    Args:
      step: the step.
      shared: the trainer's step, with a list of its communication.
      name: description of the parts, e.g. "micro-batches".
      kind: the value of the option `batch` that the error proposes.
    """
    if unsent := results_with_communication(shared.part.program, step.results):
        names = ", ".join(unsent)
        return ConfigError(
            f"batch is 'exact', but to compute the result {names}, {step.program.name} needs "
            f"values of the full batch ({shared.reason}), and {name} exchange gradients and "
            f"results only; leave {names} out of the results of the step, and compute the value "
            "after the step from other results, such as the loss; or use dtrans.nccl2 or "
            "dtrans.sharding"
        )
    return ConfigError(
        f"batch is 'exact', but {step.program.name} needs values of the full batch "
        f"({shared.reason}), and {name} exchange gradients and results only; use dtrans.nccl2 or "
        f"dtrans.sharding, or pass batch={kind!r}, with which each part has its own statistics, "
        "random numbers and counts"
    )


def results_with_communication(program: Program, results: Sequence[str]) -> list[str]:
    """Return the results that need communication; [] if another output needs it, too.

    An error then proposes to leave these results out. An example is `jnp.exp(loss)`: each part has
    only its term of the loss.

    Args:
      program: the step of one part, as the engine wrote it, with collectives.
      results: names of the step's results.
    """
    seeds: dict[Var, int] = {}
    for eqn in program.eqns:
        communicate = [_communicates([eqn])] * len(eqn.outvars)
        if eqn.primitive is value_and_grad_p:
            # results of the loss function may communicate although the loss itself does not
            body = opened(eqn.params["loss"])
            values = [_communicates(needed_equations(body.eqns, [a])) for a in body.outvars]
            communicate = [*values, *[values[0]] * eqn.params["count"]]
        seeds |= {v: 1 for v, sends in zip(eqn.outvars, communicate, strict=True) if sends}
    reached = propagate(program.eqns, seeds, {})
    found = [name for name, out in program.outvars.items() if bits_of(reached, out)]
    return found if set(found) <= set(results) else []


def _communicates(eqns: Sequence[JaxprEqn]) -> bool:
    """Return True if an equation, or an equation in its body, is communication."""
    inside = itertools.chain.from_iterable(map(equations_inside, eqns))
    return any(map(is_communication, (*eqns, *inside)))


def batch_axes(step: DividedStep, batch: Batch) -> dict[str, int]:
    """Return the dimension along which each batch array is divided; omit replicated arrays.

    Raises:
      ConfigError: an array does not have the dimension; or `batch.axes` is a tuple whose length
        is not the number of batch arguments.
    """
    specs = step.program.args[2:]
    found: dict[str, int] = {}
    for spec, axis in zip(specs, batch.dims_of("axes", len(specs)), strict=True):
        for n in spec.names:
            t = step.program.inputs[n]
            if axis is None or not t.ndim or is_under(n, batch.unsplit_inputs):
                continue
            if _is_key_data(step.program, n):
                raise ConfigError(
                    f"{n} is {t.str_short()}, a raw key of jax.random.PRNGKey, whose numbers would "
                    "be split like rows; create the key with jax.random.key, or pass "
                    f"batch=dtrans.Batch(unsplit_inputs=({n!r},))"
                )
            if axis >= t.ndim:
                raise ConfigError(
                    f"{n} is {t.str_short()}, which has no dimension {axis}, but "
                    f"axes={batch.axes!r}; write the dimension of its rows instead of {axis}, or "
                    f"None to replicate {n}"
                )
            found[n] = axis
    return found


def _is_key_data(program: Program, name: str) -> bool:
    """Return True if a batch array is a raw random key (`jax.random.PRNGKey`).

    Its two numbers are not rows.
    """
    v = program.invars[name]
    if v.aval.shape != (2,):
        return False
    return any(e.primitive.name == "random_wrap" and e.invars[0] is v for e in program.eqns)


def rows_of(program: Program, axes: Mapping[str, int], noun: str) -> int:
    """Return the number of rows in the batch of a program.

    Args:
      program: the step.
      axes: dimension of the rows of each batch array that is divided.
      noun: word for a trainer in errors, such as "rank".

    Returns:
      The number of rows; 0 if no array is divided.

    Raises:
      BatchError: the batch arrays have different numbers of rows.
    """
    rows: dict[int, str] = {}
    for n, axis in axes.items():
        rows.setdefault(program.inputs[n].shape[axis], n)
    if len(rows) > 1:
        listed = " and ".join(f"{n} has {count}" for count, n in rows.items())
        raise BatchError(
            f"the arrays of a batch are sharded over the {noun}s, but {listed} rows; pass "
            f"batch=dtrans.Batch(unsplit_inputs=(...)) with the arrays that every {noun} needs in "
            "full, or dtrans.Batch(axes=(...)) with the dimension of the rows"
        )
    return next(iter(rows), 0)


def split_merges(ways: Mapping[str, str | int]) -> tuple[dict[str, str], dict[str, int]]:
    """Separate the rules that merge outputs from dimensions of concatenated outputs.

    For example, {"a": 1} becomes ({"a": "concat"}, {"a": 1}).

    Args:
      ways: for each output a rule, or the dimension along which its parts are concatenated.
    """
    merges: dict[str, str] = {}
    joined: dict[str, int] = {}
    for name, way in ways.items():
        if isinstance(way, int):
            merges[name], joined[name] = "concat", way
        else:
            merges[name] = way
    return merges, joined


def full_type(t: Any, axis: int | None, trainers: int) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array, from those of one trainer's part of the array.

    Args:
      t: type of a part.
      axis: dimension along which the value is split; None if each part is a copy of the value.
      trainers: number of parts.
    """
    shape = list(t.shape)
    if axis is not None:
        shape[axis] *= trainers
    return jax.ShapeDtypeStruct(tuple(shape), t.dtype)
