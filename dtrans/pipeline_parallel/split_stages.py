"""Tensor parallelism inside a stage: the programs of one shard of a split stage.

A *split stage* contains `dtrans.split` scopes, and each of its devices is a *shard*. All shards
have complete copies of the batch, of the results, and of values that the stage receives or sends. A
parameter inside the scope may be sharded. Each shard then stores a piece of the parameter, and the
same piece of its gradient and optimizer state. Residuals may also be sharded: each shard saves the
residuals that its forward program computes. `dtrans.engine.split` rewrites the equations so that
they work on such pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import jax.numpy as jnp

from dtrans._jax import Var
from dtrans.engine.layout import Sliced
from dtrans.engine.split import split
from dtrans.errors import ConfigError
from dtrans.ir.builder import Builder
from dtrans.ir.program import Program
from dtrans.ir.selection import retain
from dtrans.pipeline_parallel.forward_pass import ForwardPass
from dtrans.pipeline_parallel.options import SPLIT, PipelineOptions
from dtrans.pipeline_parallel.stage_programs import StagePrograms, with_jaxpr
from dtrans.pipeline_parallel.update_by_stage import PlacedUpdate, StagePart
from dtrans.step.halves import DividedStep
from dtrans.step.scopes import in_split_scope, scopes_of
from dtrans.tensor_parallel.defaults import default_axes
from dtrans.tensor_parallel.model_axis import state_axes


@dataclasses.dataclass(frozen=True)
class StageSharding:
    """Arrays of the state that the devices of one stage divide (tensor parallelism).

    Attributes:
      shards: for each stage, the number of devices (shards) that divide it; 1 for a stage that is
        not split.
      params: the sharded dimension of each divided parameter (dict by parameter).
      state: the same for parameters and arrays of the optimizer's state.
    """

    shards: tuple[int, ...]
    params: Mapping[str, int] = dataclasses.field(default_factory=dict)
    state: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def without_conflicts(self, slices: Mapping[str, Sliced]) -> StageSharding:
        """Return a copy without the arrays that replicas already slice along the sharded dimension.

        An array cannot be divided twice along one dimension.

        Args:
          slices: the slices of each array that replicas slice (dict by array).
        """
        state = {}
        for n, axis in self.state.items():
            if n not in slices or slices[n].axis != axis:
                state[n] = axis
        return dataclasses.replace(self, state=state)


def shards_of(forward: ForwardPass, stage_of: Sequence[int], o: PipelineOptions) -> tuple[int, ...]:
    """Return the number of shards of each stage.

    Raises:
      ConfigError: a `dtrans.split` scope has no number of devices, or two scopes on the same
        devices have different numbers.
    """
    count = [1] * o.model_stages
    named: dict[int, str] = {}  # stage -> one of the stage's split scopes, for errors
    for scope, s in zip(scopes_of(list(forward.eqns)), stage_of, strict=True):
        if scope is None or scope.kind != "split":
            continue
        if scope.device_count is None:
            raise ConfigError(
                f"{scope} has no number of devices; write dtrans.split(device_count=...)"
            )
        if s in named and count[s] != scope.device_count:
            raise ConfigError(
                f"stage {s} is split over {count[s]} devices by {named[s]}, and over "
                f"{scope.device_count} by {scope}; give both one device_count"
            )
        count[s], named[s] = scope.device_count, str(scope)
    for s, scope_name in named.items():
        for other in range(s % o.num_stages, s, o.num_stages):
            if other in named and count[other] != count[s]:
                raise ConfigError(
                    f"chunks is {o.chunks}, so stages {other} and {s} run on the same devices, but "
                    f"stage {other} is split over {count[other]} devices by {named[other]}, and "
                    f"stage {s} over {count[s]} by {scope_name}; give both one device_count"
                )
    return tuple(count)


def sharding_of(
    step: DividedStep,
    stages: Sequence[StagePrograms],
    shards: Sequence[int],
    users: Mapping[str, Sequence[int]],
) -> StageSharding:
    """Return the parameters and optimizer state that the shards of split stages divide.

    A parameter is sharded only if a single stage reads it.

    Args:
      step: the training step, divided into forward and backward, and the update.
      stages: the programs of the stages, not yet split.
      shards: the number of shards of each stage.
      users: maps each parameter to the stages that compute its gradient.
    """
    readers: dict[str, list[int]] = {}
    for stage in stages:
        for n in stage.params:
            readers.setdefault(n, []).append(stage.index)
    params: dict[str, int] = {}
    for stage, count in zip(stages, shards, strict=True):
        if count == 1:
            continue
        p = stage.forward
        alone = {n for n in stage.params if n in users and readers[n] == [stage.index]}
        places = [i for i, n in enumerate(p.in_names) if n in alone]
        for i, axis in default_axes(p.jaxpr, places, count, in_split_scope).items():
            params[p.in_names[i]] = axis
    if not params:
        return StageSharding(tuple(shards))
    return StageSharding(tuple(shards), params, params | state_axes(step, params))


def split_stages(
    stages: Sequence[StagePrograms], sharding: StageSharding
) -> tuple[tuple[StagePrograms, ...], dict[tuple[int, str], int]]:
    """Rewrite the programs of split stages for one shard.

    Returns:
      The programs of all stages; and the sharded dimensions of values, by (stage, name of a value).
    """
    sharded: list[StagePrograms] = []
    values: dict[tuple[int, str], int] = {}
    for s in stages:
        if sharding.shards[s.index] == 1:
            sharded.append(s)
            continue
        here: dict[str, int] = {}
        forward = _split(s.forward, s, sharding, here, {*s.sends, *s.results})
        backward = _split(s.backward, s, sharding, here, s.cotangents)
        weights = s.weights
        if weights is not None:
            weights = _split(weights, s, sharding, here, ())
        sharded.append(dataclasses.replace(s, forward=forward, backward=backward, weights=weights))
        for n, axis in here.items():
            values[s.index, n] = axis
    return tuple(sharded), values


def _split(
    p: Program,
    s: StagePrograms,
    sharding: StageSharding,
    values: dict[str, int],
    replicated: Collection[str],
) -> Program:
    """Rewrite a program of a split stage for one shard.

    Args:
      p: a program of the stage.
      s: the programs of the stage.
      sharding: the sharded parameters.
      values: maps sharded outputs of the stage's earlier programs to their dimensions. The function
        adds the sharded outputs of `p`.
      replicated: the outputs that must be complete on each shard.
    """
    sums = {n: sharding.state[leaf] for n, leaf in s.sums.items() if leaf in sharding.state}
    params = retain(sharding.state, s.params)
    known = {**params, **sums, **values}
    ins = {i: known[n] for i, n in enumerate(p.in_names) if n in known}
    outs: dict[int, int | None] = {}
    for i, n in enumerate(p.out_names):
        if n in replicated or n in s.sums:
            outs[i] = sums.get(n)
    sharded = split(p.jaxpr, ins, sharding.shards[s.index], SPLIT, outs=outs)
    for n, d in zip(p.out_names, sharded.out_axes, strict=True):
        if d is not None and n not in sums:
            values[n] = d
    return with_jaxpr(p, sharded.jaxpr)


def split_update(
    placed: PlacedUpdate, sharding: StageSharding, sums: Mapping[str, tuple[str, int, int | None]]
) -> PlacedUpdate:
    """Rewrite the update so that each device of a split stage updates its shard.

    Args:
      placed: the update, which works on complete arrays.
      sharding: the sharded parameters and optimizer state.
      sums: the inputs that are sums of gradients of one stage; maps each one to (leaf, stage,
        micro-batch).
    """
    return _UpdateSplitter(placed, sharding, sums).split()


class _UpdateSplitter:
    """Writer of `split_update`: rewrites an optimizer's update for one shard of each split stage.

    The arguments are those of `split_update`. A shard is one of the devices that share a stage.

    Stages send each other only complete values. So before a split stage sends a divided value, its
    shards gather a complete copy. When it receives a complete value that its shards store divided,
    each shard takes its piece.
    """

    def __init__(
        self,
        placed: PlacedUpdate,
        sharding: StageSharding,
        sums: Mapping[str, tuple[str, int, int | None]],
    ) -> None:
        self.placed, self.sharding, self.program = placed, sharding, placed.program
        self.dims: dict[Var, int] = {}  # value -> the dimension along which the value is sharded
        for n, v in self.program.invars.items():
            leaf = sums[n][0] if n in sums else n
            if leaf in sharding.state:
                self.dims[v] = sharding.state[leaf]
        # output -> its dimension; None if it must be complete on each shard
        self.new: dict[Var, int | None] = {}
        self.senders = {(v, origin) for v, origin, _ in placed.sends}
        self.exports = {v for v, _ in self.senders}
        for n, a in self.program.outvars.items():
            if isinstance(a, Var):
                self.new.setdefault(a, sharding.state.get(n))
                if n not in self.program.invars:
                    self.exports.add(a)
        self.pieces: list[StagePart] = []
        self.complete: dict[Var, tuple[Var, int]] = {}  # sharded value -> (its copy, the stage)
        self.copies: dict[Var, Var] = {}  # copy -> the value

    def split(self) -> PlacedUpdate:
        """Return the update of one shard."""
        for n, v in self.program.invars.items():
            if v in self.dims and v in self.exports:
                stage = self.placed.stage_of_input[n]
                assert stage is not None, n
                self._gather(v, stage)
        places: dict[Var, set[int]] = {}
        for p in self.placed.pieces:
            self._split_piece(p)
            for v in p.outputs:
                places.setdefault(v, set()).add(p.place)
                if v in self.dims and v in self.exports:
                    self._gather(v, p.place)

        outputs: dict[str, Var] = {}
        for n, a in self.program.outvars.items():
            stage = self.placed.stage_of_input.get(n)
            if n in self.sharding.state and stage is not None and a in places:
                if stage not in places[a]:
                    outputs[n] = self._take_piece(a, self.sharding.state[n], stage)
            elif n not in self.program.invars and a in self.complete:
                outputs[n] = self.complete[a][0]
        sends = []
        for v, origin, target in self.placed.sends:
            copy, stage = self.complete.get(v, (v, origin))
            sends.append((copy if stage == origin else v, origin, target))
        return dataclasses.replace(
            self.placed,
            pieces=tuple(self.pieces),
            sends=tuple(sends),
            sharded_axes=self.dims,
            copies=self.copies,
            outputs=outputs,
        )

    def _split_piece(self, p: StagePart) -> None:
        """Rewrite a group of equations that one stage runs, for one shard, and add the group."""
        p = dataclasses.replace(p, reads=tuple(self._read(v, p.place) for v in p.reads))
        if self.sharding.shards[p.place] > 1:
            ins = {i: self.dims[v] for i, v in enumerate(p.reads) if v in self.dims}
            wanted = {}
            for i, v in enumerate(p.outputs):
                if v in self.new or (v, p.place) in self.senders:
                    wanted[i] = self.new.get(v)
            sharded = split(p.jaxpr, ins, self.sharding.shards[p.place], SPLIT, outs=wanted)
            for v, d in zip(p.outputs, sharded.out_axes, strict=True):
                if d is not None:
                    self.dims[v] = d
            p = dataclasses.replace(p, jaxpr=sharded.jaxpr)
        self.pieces.append(p)

    def _read(self, v: Var, stage: int) -> Var:
        """Return the variable from which a stage reads a value: the value itself, or a copy."""
        copy, origin = self.complete.get(v, (v, stage))
        return v if origin == stage else copy

    def _gather(self, v: Var, stage: int) -> None:
        """Add equations by which the shards of a stage gather a divided value."""
        self.complete[v] = self._copy(v, v, stage, {0: self.dims[v]}, None), stage

    def _take_piece(self, v: Var, dim: int, stage: int) -> Var:
        """Add equations with which each shard of a stage slices its piece from a full value."""
        piece = self._copy(v, self._read(v, stage), stage, {}, dim)
        self.dims[piece] = dim
        return piece

    def _copy(self, v: Var, read: Var, stage: int, ins: Mapping[int, int], out: int | None) -> Var:
        """Add equations that copy a value to another layout (divided or complete); return the copy.

        Args:
          v: the value.
          read: the variable from which the stage reads the value.
          stage: the stage.
          ins: {0: sharded dimension of the value}, or {} if the value is complete.
          out: the sharded dimension of the copy; None for a complete copy.
        """
        b = Builder(self.program.jaxpr)
        jaxpr = b.build(b.call(jnp.copy, b.input(v.aval)))
        copied = split(jaxpr, ins, self.sharding.shards[stage], SPLIT, outs={0: out})
        copy = Var(v.aval)
        self.copies[copy] = v
        self.pieces.append(StagePart(stage, copied.jaxpr, (read,), (copy,)))
        return copy
