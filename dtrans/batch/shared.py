"""How a strategy shares the batch of a step: the step of one trainer, and how what trainers make
becomes one.

    exact   the batch is cut, and everything that crosses it communicates: one device's numbers, whatever the step
    local   each trainer takes the step on its part alone, as Paddle's trainers and torch's DDP do: its own statistics,
            random numbers and counts; gradients are averaged, and results merged as the user says

An exact step whose parts add up without any communication is taken as it is
(`dtrans.batch.scaled`): it is the mean, or the sum, of what trainers make of their parts.
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
class SharedStep:
    """A step as trainers share it.

    Attributes:
      step: what one trainer carries out, on its part.
      reduce: what its gradients are added up to: "mean" or "sum".
      merges: how each result, and each parameter that trainers make, becomes one: "mean", "sum",
        "same", "concat".
      joined: the dimension along which a result that is "concat" is joined.
      axes: the dimension along which each array of the batch is cut; trainers have all of others.
      rows: how many rows the batch of all trainers has.
      part: what a trainer's step was written as, and what trainers exchange for it.
      proven: whether it is the step itself: its parts add up without any communication.
      whole: the same for another batch, from the types of its inputs, which trainers need not
        divide: parts have `ceil(rows / trainers)` rows.
      unpaired: the user's line of an equation that is another one in the step of a part; empty if
        there is none.
    """

    step: Cut
    reduce: str
    merges: Mapping[str, str]
    joined: Mapping[str, int]
    axes: Mapping[str, int]
    rows: int
    part: TrainerStep
    proven: bool
    whole: Callable[[Sequence[jax.ShapeDtypeStruct]], SharedStep]
    unpaired: str = ""

    @property
    def local_note(self) -> str:
        """What a plan says whose trainers take the step on their parts alone, and average."""
        if self.proven and self.reduce == "mean":
            return f"exact: mean over {self.rows} rows"
        why = (
            "the step adds up"
            if self.proven
            else f"one device's would be of the whole batch ({self.reason})"
        )
        return (
            f"local: numbers are of each part alone, and averaged; {why}. batch='exact' says "
            "what can be done"
        )

    @property
    def reason(self) -> str:
        """What is of the whole batch, where the step is not that of its parts."""
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
        """What a plan says of it."""
        own = ", with dtrans.local() of each trainer's own" if self.part.local else ""
        if self.proven:
            return [f"exact: {self.reduce} over {self.rows} rows{own}"]
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
        return [f"exact: {how}{own}", *moved]


def share(
    step: Cut,
    batch: Batch,
    trainers: int,
    over: Sequence[str],
    adapt: Callable[[TrainerStep], TrainerStep] = lambda part: part,
    alone: Callable[[Mapping[str, str]], bool] = lambda merges: True,
    open_state: bool = False,
    noun: str = "trainer",
) -> SharedStep:
    """Share the batch of a step exactly.

    Args:
      step: as the user wrote it, with all gradients that anything uses. Its arrays are a trainer's
        part.
      batch: which of its arrays are cut, and along which dimension.
      trainers: how many there are.
      over: the named axes that they are on.
      adapt: makes another of a trainer's step that is not the step itself.
      alone: whether trainers can take the step itself, where parts add up and their outputs are
        merged in these ways.
      open_state: whether parameters that trainers make are merged as results are.
      noun: what a trainer is called in errors.
    """
    source = step.program
    axes = batch_axes(step, batch)
    rows = rows_of(source, axes, noun)

    def cut_of(types: Sequence[jax.ShapeDtypeStruct]) -> Cut:
        return cut(source.specialize_flat(types)).with_reported()

    def written(step: Cut) -> TrainerStep:
        made = trainer_step(step, axes, trainers, over, open_state=open_state, noun=noun)
        return dataclasses.replace(
            made, program=dataclasses.replace(made.program, name=source.name)
        )

    def all_grown(types: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        return {n: grown(t, axes.get(n), trainers) for n, t in types.items()}

    def shared(part: TrainerStep, step: Cut, scale: PartScale | None) -> SharedStep:
        known = {n: "concat" if isinstance(way, int) else way for n, way in part.merges.items()}
        joined = {n: way for n, way in part.merges.items() if isinstance(way, int)}
        if scale is not None:
            known |= {n: "mean" for n, way in known.items() if way == "sum" and scale.results[n]}
        reduce = "mean" if scale is not None and scale.gradients else "sum"
        proven = scale is not None
        return SharedStep(
            step, reduce, known, joined, axes, trainers * rows, part, proven, whole, unpaired
        )

    def whole(types: Sequence[jax.ShapeDtypeStruct]) -> SharedStep:
        part = adapt(written(cut_of(types)))
        return shared(part, cut(part.program).with_reported(), None)

    unpaired = ""
    together = cut_of([*all_grown(source.inputs).values()])
    part = written(together)
    # the update, what is reported of gradients, or a callback reads a number of rows: of all, and
    # not of a part
    sized = step.unlike(together) or step.observed.unlike(together.observed)
    scale, unpaired = (None, "") if sized else scale_of_parts(step, part, trainers)
    if scale is not None and alone((proven := shared(part, step, scale)).merges):
        return proven
    if open_state:  # parts exchange nothing: nobody carries out the step that does
        return shared(part, step, None)
    part = adapt(part)
    again = lambda other: adapt(written(cut(other).with_reported())).program
    program = together.program.rewritten(again, all_grown, made=part.program)
    return shared(part, cut(program).with_reported(), None)


def share_alone(step: Cut, batch: Batch, parts: int, name: str) -> SharedStep:
    """How a step is shared by parts that exchange nothing but gradients and results.

    Args:
      parts: how many there are.
      name: what the strategy is called, for errors.

    Raises:
      ConfigError: one device's numbers would take an exchange.
    """
    shared = share(step, batch, parts, ("parts",), noun="part")
    if shared.proven:
        return shared
    own = None if shared.part.exchanged else captured_if_marked(step.program)
    if own is not None:
        by_loss = share(cut(own).with_reported(), batch, parts, ("parts",), noun="part")
        if by_loss.proven:
            return dataclasses.replace(by_loss, step=step)
    raise not_made_of_parts(step, shared, name)


def not_made_of_parts(step: Cut, shared: SharedStep, name: str, kind: str = "local") -> ConfigError:
    """What is wrong with a step that parts take alone, which are called `name`; `kind` of `Batch`
    is the remedy."""
    return ConfigError(
        f"batch='exact': {step.program.name} has values of the whole batch ({shared.reason}), and "
        f"{name} exchange "
        "nothing but gradients and results. dtrans.nccl2 and dtrans.sharding do; or say "
        f"batch={kind!r}: then each "
        "part has its own statistics, random numbers and counts"
    )


def batch_axes(step: Cut, batch: Batch) -> dict[str, int]:
    """The arrays of a batch that are cut, and along which dimension.

    Raises:
      ConfigError: a dimension that an array does not have, or axes for other arguments than the
        step has.
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
                    f"{n} is {t.str_short()}, a key as jax.random.PRNGKey makes it, and would be "
                    "cut as rows are: make "
                    f"it with jax.random.key, or name it in dtrans.Batch(unsplit_inputs=({n!r},))"
                )
            if axis >= t.ndim:
                raise ConfigError(
                    f"axes={batch.axes!r}: {n} is {t.str_short()}, which has no dimension {axis}"
                )
            found[n] = axis
    return found


def _is_key_data(program: Program, name: str) -> bool:
    """Whether an array of the batch is the two numbers of a key, and is used as such."""
    v = program.invars[name]
    return v.aval.shape == (2,) and any(
        e.primitive.name == "random_wrap" and e.invars[0] is v for e in program.eqns
    )


def rows_of(program: Program, axes: Mapping[str, int], noun: str) -> int:
    """How many rows the batch of a program has. Raises BatchError where its arrays differ."""
    rows: dict[int, str] = {}
    for n, axis in axes.items():
        rows.setdefault(program.inputs[n].shape[axis], n)
    if len(rows) > 1:
        listed = " and ".join(f"{n} has {count}" for count, n in rows.items())
        raise BatchError(
            f"the arrays of a batch are cut over the {noun}s, but {listed} rows; name what every "
            f"{noun} needs whole "
            "in dtrans.Batch(unsplit_inputs=(...)), or the dimension of the batch in "
            "dtrans.Batch(axes=(...))"
        )
    return next(iter(rows), 0)


def grown(t: Any, axis: int | None, trainers: int) -> jax.ShapeDtypeStruct:
    """The type of the whole of which each trainer has such a part."""
    shape = (
        t.shape
        if axis is None
        else (*t.shape[:axis], t.shape[axis] * trainers, *t.shape[axis + 1 :])
    )
    return jax.ShapeDtypeStruct(shape, t.dtype)
