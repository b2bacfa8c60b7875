"""Tensor parallelism inside a stage: the programs of one shard of a split stage.

A *split stage* contains `dtrans.split` scopes, and each of its devices is a *shard*. All shards
have complete copies of the batch, of the results, and of values that the stage receives or sends. A
parameter inside the scope may be sharded: each shard then stores a piece of the parameter, of its
gradient and of its optimizer state. Residuals may also be sharded: each shard saves the residuals
that its forward program computes. `dtrans.engine.split` rewrites the equations for pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from dtrans._jax import Var
from dtrans.engine.split import split
from dtrans.errors import ConfigError
from dtrans.ir.program import FORWARD, Program
from dtrans.ir.selection import retain
from dtrans.pipeline_parallel.forward_pass import ForwardPass
from dtrans.pipeline_parallel.options import SPLIT, PipelineOptions
from dtrans.pipeline_parallel.stage_programs import StagePrograms, program_of
from dtrans.pipeline_parallel.update_by_stage import PlacedUpdate, StagePart
from dtrans.rows.analysis import analyse
from dtrans.rows.layout import RowAxis
from dtrans.step.halves import DividedStep, Gradient
from dtrans.step.scopes import scope_of_eqn, scopes_of
from dtrans.tensor_parallel.defaults import default_axes


@dataclasses.dataclass(frozen=True)
class StageSharding:
    """Parameters and optimizer state that the shards of split stages divide.

    Attributes:
      shards: the number of shards of each stage; 1 for a stage that is not split.
      state: maps each divided array, of the parameters or of the optimizer's state, to its sharded
        dimension.
    """

    shards: tuple[int, ...]
    state: Mapping[str, int] = dataclasses.field(default_factory=dict)


def shards_of(forward: ForwardPass, stage_of: Sequence[int], o: PipelineOptions) -> tuple[int, ...]:
    """Return the number of shards of each stage.

    Raises:
      ConfigError: a split scope has no number of devices, two scopes of a stage have different
        numbers, or an option excludes split scopes.
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
        for option in ("sharding_stage", "offload"):
            if count[s] > 1 and getattr(o.memory, option):
                raise ConfigError(
                    f"{option} is {getattr(o.memory, option)!r}, which is not supported together "
                    f"with {scope_name}; leave out one of them"
                )
        if count[s] > 1 and o.chunks > 1:
            raise ConfigError(
                f"chunks is {o.chunks}, which is not supported together with {scope_name}; leave "
                "out one of them"
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
      step: the training step, divided at its gradients.
      stages: the programs of the stages, not yet split.
      shards: the number of shards of each stage.
      users: maps each parameter with a gradient to the stages that compute it.
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
        for i, axis in default_axes(p.jaxpr, places, count, _is_split).items():
            params[p.in_names[i]] = axis
    if not params:
        return StageSharding(tuple(shards), {})

    # An array of optimizer state is sharded like its parameter, if the array has an entry for each
    # sharded row of the parameter.
    analysis = analyse(step.optimize, step.params, {n: d for n, d in params.items() if d})
    plain = analyse(step.optimize, step.params)
    state = dict(params)
    for name, v in analysis.inputs.items():
        if isinstance(name, Gradient) or name not in step.opt_state or name not in plain.inputs:
            continue
        row = analysis.layout(v)
        has_home = plain.home(plain.layout(plain.inputs[name])) is not None
        if has_home and isinstance(row, RowAxis) and row.leaf in params and row.width == 1:
            state[name] = row.axis
    return StageSharding(tuple(shards), state)


def _is_split(eqn: object) -> bool:
    scope = scope_of_eqn(eqn)  # type: ignore[arg-type]
    return scope is not None and scope.kind == "split"


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
    role = p.roles[0] if p.roles else FORWARD
    return program_of(p.name, sharded.jaxpr, p.in_names, p.out_names, role)


def split_update(
    placed: PlacedUpdate, sharding: StageSharding, sums: Mapping[str, tuple[str, int, int | None]]
) -> PlacedUpdate:
    """Rewrite the update so that the programs of a split stage compute one shard.

    Args:
      placed: the update on complete arrays.
      sharding: the sharded parameters and optimizer state.
      sums: maps each input that is a stage's sum of gradients to (leaf, stage, micro-batch).
    """
    inner = placed.program.inner
    dims: dict[Var, int] = {}  # value -> the dimension along which the value is sharded
    for v, n in zip(inner.invars, placed.program.in_names, strict=True):
        leaf = sums[n][0] if n in sums else n
        if leaf in sharding.state:
            dims[v] = sharding.state[leaf]
    # output -> its dimension; None if it must be complete on each shard
    new: dict[Var, int | None] = {}
    for n, a in placed.program.outvars.items():
        if isinstance(a, Var):
            new[a] = sharding.state.get(n)
    # Values that a stage sends must be complete.
    sent = {(v, origin) for v, origin, _ in placed.sends}
    pieces: list[StagePart] = []
    for p in placed.pieces:
        if sharding.shards[p.place] == 1:
            pieces.append(p)
            continue
        ins = {i: dims[v] for i, v in enumerate(p.reads) if v in dims}
        wanted = {}
        for i, v in enumerate(p.makes):
            if v in new or (v, p.place) in sent:
                wanted[i] = new.get(v)
        sharded = split(p.jaxpr, ins, sharding.shards[p.place], SPLIT, outs=wanted)
        for v, d in zip(p.makes, sharded.out_axes, strict=True):
            if d is not None:
                dims[v] = d
        pieces.append(dataclasses.replace(p, jaxpr=sharded.jaxpr))
    return dataclasses.replace(placed, pieces=tuple(pieces), sharded_axes=dims)
