"""Exact sharding of a step's batch: the step of one trainer, and how outputs are merged.

    exact   the batch is sharded, and the step communicates where a value depends on the full batch:
            one device's numbers for every step
    local   each trainer takes the step on its part alone, as in Paddle and torch DDP;
            gradients are averaged

An exact step whose parts add up without communication is the user's step itself
(`dtrans.batch.scaled`): the mean, or the sum, of the trainers' steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from dtrans.batch.scaled import PartScale, scale_of_parts
from dtrans.batch.trainer_step import TrainerStep, trainer_step
from dtrans.errors import BatchError, ConfigError
from dtrans.ir.program import Program
from dtrans.ir.pytree import is_under
from dtrans.step.batch_sharing import Batch
from dtrans.step.capture import captured_if_marked
from dtrans.step.cut import Cut, cut


@dataclasses.dataclass(frozen=True, eq=False)
class ExactStep:
    """Step that is sharded over trainers.

    Attributes:
      step: step of one trainer, on its part of the batch.
      reduce: reduction of gradients over trainers: "mean" or "sum".
      merges: merge of each result, and of each parameter that trainers compute: "mean", "sum",
        "same" or "concat".
      joined: dimension along which a "concat" result is concatenated.
      axes: sharded dimension of each batch array; others are replicated.
      rows: number of rows in the batch of all trainers.
      part: step that the engine wrote for a trainer, with its communication.
      proven: True if `step` is the user's step itself: parts add up without communication.
      for_types: returns the sharded step for another batch, from the types of its inputs. Trainers
        need not divide the batch: parts have `ceil(rows / trainers)` rows.
      unpaired: user's line of an equation that differs in the step of a part; empty if none does.
    """

    step: Cut
    reduce: str
    merges: Mapping[str, str]
    joined: Mapping[str, int]
    axes: Mapping[str, int]
    rows: int
    part: TrainerStep
    proven: bool
    for_types: Callable[[Sequence[jax.ShapeDtypeStruct]], ExactStep]
    unpaired: str = ""

    @property
    def local_note(self) -> str:
        """Note of a plan whose trainers average the steps on their parts."""
        if self.proven and self.reduce == "mean":
            return f"exact: mean over {self.rows} rows"
        why = "the step adds up"
        if not self.proven:
            why = f"one device's would depend on the whole batch ({self.reason})"
        return (
            f"local: each part has its own numbers, averaged; {why}. batch='exact' says "
            "what can be done"
        )

    @property
    def reason(self) -> str:
        """Operation that depends on the full batch, if parts do not add up."""
        if self.part.exchanged:
            what, line = self.part.exchanged[0].op, self.part.exchanged[0].line
        elif self.part.gathers:
            what, line = self.part.gathers[0].reason, self.part.gathers[0].line
        else:
            what, line = (
                "numbers of the size of the batch, or random numbers with its rows",
                self.unpaired,
            )
        return what + (f" for {line}" if line else "")

    @property
    def notes(self) -> list[str]:
        """Notes of a plan."""
        scope = (
            ", with dtrans.local() reductions over each trainer's rows" if self.part.local else ""
        )
        if self.proven:
            return [f"exact: {self.reduce} over {self.rows} rows{scope}"]
        found: dict[tuple[str, str], list[int]] = {}
        for x in self.part.exchanged:
            found.setdefault((x.op, x.line), []).append(x.nbytes)
        moved = [
            f"  {op} for {line or 'an unknown line'}: {sum(n):,} bytes in {len(n)}"
            for (op, line), n in found.items()
        ]
        how = f"sum over {self.rows} rows" + (
            ", with an exchange across the batch" if moved else ""
        )
        return [f"exact: {how}{scope}", *moved]


def shard_step(
    step: Cut,
    batch: Batch,
    trainers: int,
    over: Sequence[str],
    adapt: Callable[[TrainerStep], TrainerStep] = lambda part: part,
    alone: Callable[[Mapping[str, str]], bool] = lambda merges: True,
    open_state: bool = False,
    noun: str = "trainer",
) -> ExactStep:
    """Shard the batch of a step exactly.

    Args:
      step: the user's step, traced on a trainer's part, with all gradients that are used.
      batch: sharded arrays and dimensions.
      trainers: number of trainers.
      over: named axes of the trainers.
      adapt: changes a trainer's step that is not the user's step itself.
      alone: returns True if trainers can take the user's step itself and merge outputs in these
        ways.
      open_state: True if parameters that trainers compute are merged as results are.
      noun: name of a trainer in errors.
    """
    source = step.program
    axes = batch_axes(step, batch)
    rows = rows_of(source, axes, noun)

    def cut_of(types: Sequence[jax.ShapeDtypeStruct]) -> Cut:
        return cut(source.specialize_flat(types)).with_reported()

    def written(step: Cut) -> TrainerStep:
        part = trainer_step(step, axes, trainers, over, open_state=open_state, noun=noun)
        return dataclasses.replace(
            part, program=dataclasses.replace(part.program, name=source.name)
        )

    def all_grown(types: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        return {n: full_type(t, axes.get(n), trainers) for n, t in types.items()}

    def shared(part: TrainerStep, step: Cut, scale: PartScale | None) -> ExactStep:
        known = {n: "concat" if isinstance(way, int) else way for n, way in part.merges.items()}
        joined = {n: way for n, way in part.merges.items() if isinstance(way, int)}
        if scale is not None:
            known |= {n: "mean" for n, way in known.items() if way == "sum" and scale.results[n]}
        reduce = "mean" if scale is not None and scale.gradients else "sum"
        proven = scale is not None
        return ExactStep(
            step, reduce, known, joined, axes, trainers * rows, part, proven, for_types, unpaired
        )

    def for_types(types: Sequence[jax.ShapeDtypeStruct]) -> ExactStep:
        part = adapt(written(cut_of(types)))
        return shared(part, cut(part.program).with_reported(), None)

    unpaired = ""
    together = cut_of([*all_grown(source.inputs).values()])
    part = written(together)
    # the update, a report about gradients, or a callback reads the number of rows of the full batch
    sized = step.differing_outputs(together) or step.observed.differing_outputs(together.observed)
    scale, unpaired = (None, "") if sized else scale_of_parts(step, part, trainers)
    if scale is not None and alone((proven := shared(part, step, scale)).merges):
        return proven
    if open_state:  # parts cannot communicate: the step is for the error alone
        return shared(part, step, None)
    part = adapt(part)
    again = lambda other: adapt(written(cut(other).with_reported())).program
    program = together.program.rewritten(again, all_grown, result=part.program)
    return shared(part, cut(program).with_reported(), None)


def shard_alone(step: Cut, batch: Batch, parts: int, name: str) -> ExactStep:
    """Shard a step into parts that exchange gradients and results only.

    Args:
      step: the user's step, traced on a part.
      batch: sharded arrays and dimensions.
      parts: number of parts.
      name: name of the strategy in errors.

    Raises:
      ConfigError: the step needs more communication for one device's numbers.
    """
    shared = shard_step(step, batch, parts, ("parts",), noun="part")
    if shared.proven:
        return shared
    captured_step = None if shared.part.exchanged else captured_if_marked(step.program)
    if captured_step is not None:
        by_loss = shard_step(
            cut(captured_step).with_reported(), batch, parts, ("parts",), noun="part"
        )
        if by_loss.proven:
            return dataclasses.replace(by_loss, step=step)
    raise parts_error(step, shared, name)


def parts_error(step: Cut, shared: ExactStep, name: str, kind: str = "local") -> ConfigError:
    """Return the error for a step whose parts (`name`) would have to communicate.

    `kind` is the `Batch` that the error proposes.
    """
    return ConfigError(
        f"batch='exact': {step.program.name} has values of the whole batch ({shared.reason}), and "
        f"{name} exchange gradients and results only; use dtrans.nccl2 or dtrans.sharding, or "
        f"pass batch={kind!r}: then each part has its own statistics, random numbers and counts"
    )


def batch_axes(step: Cut, batch: Batch) -> dict[str, int]:
    """Return the sharded dimension of each sharded batch array.

    Raises:
      ConfigError: an array lacks the dimension, or the number of axes differs from the step's
        batch arguments.
    """
    specs = step.program.args[2:]
    axes = batch.axes if isinstance(batch.axes, tuple) else (batch.axes,) * len(specs)
    if len(axes) != len(specs):
        raise ConfigError(
            f"axes={batch.axes!r} has {len(axes)} entries, the step has {len(specs)} batch "
            "arguments"
        )
    found: dict[str, int] = {}
    for spec, axis in zip(specs, axes, strict=True):
        for n in spec.names:
            t = step.program.inputs[n]
            if axis is None or not t.ndim or is_under(n, batch.unsplit_inputs):
                continue
            if _is_key_data(step.program, n):
                raise ConfigError(
                    f"{n} is {t.str_short()}, a key of jax.random.PRNGKey, and would be cut "
                    "like rows; make it with jax.random.key, or name it in "
                    f"dtrans.Batch(unsplit_inputs=({n!r},))"
                )
            if axis >= t.ndim:
                raise ConfigError(
                    f"axes={batch.axes!r}: {n} is {t.str_short()}, which has no dimension {axis}"
                )
            found[n] = axis
    return found


def _is_key_data(program: Program, name: str) -> bool:
    """Return True if a batch array is the raw data of a random key, and is used as a key."""
    v = program.invars[name]
    return v.aval.shape == (2,) and any(
        e.primitive.name == "random_wrap" and e.invars[0] is v for e in program.eqns
    )


def rows_of(program: Program, axes: Mapping[str, int], noun: str) -> int:
    """Return the number of rows in the batch of a program.

    Raises:
      BatchError: the batch arrays have different numbers of rows.
    """
    rows: dict[int, str] = {}
    for n, axis in axes.items():
        rows.setdefault(program.inputs[n].shape[axis], n)
    if len(rows) > 1:
        listed = " and ".join(f"{n} has {count}" for count, n in rows.items())
        raise BatchError(
            f"the arrays of a batch are cut over the {noun}s, but {listed} rows; name arrays that "
            f"every {noun} needs whole in dtrans.Batch(unsplit_inputs=(...)), or the dimension "
            "of the batch in dtrans.Batch(axes=(...))"
        )
    return next(iter(rows), 0)


def full_type(t: Any, axis: int | None, trainers: int) -> jax.ShapeDtypeStruct:
    """Return the type of the full value whose parts have type `t`."""
    shape = list(t.shape)
    if axis is not None:
        shape[axis] *= trainers
    return jax.ShapeDtypeStruct(tuple(shape), t.dtype)
