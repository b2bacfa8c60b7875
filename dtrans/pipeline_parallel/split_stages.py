"""Stages that are split: the programs of one shard of a stage, where the model has `dtrans.split`
scopes.

What comes into such a stage and what leaves it is whole on all shards, and so are batches and
results. Parameters that the scope cuts are in pieces for good, with their gradients and their
optimizer's state; what is kept of a micro-batch is as the forward pass leaves it. How equations are
carried out on pieces: `dtrans.engine.split`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from dtrans._jax import Var
from dtrans.engine.split import split
from dtrans.errors import ConfigError
from dtrans.ir.program import Program
from dtrans.pipeline_parallel.forward_pass import ForwardPass
from dtrans.pipeline_parallel.options import SPLIT, PipelineOptions
from dtrans.pipeline_parallel.stage_programs import StagePrograms, program_of
from dtrans.pipeline_parallel.update_by_stage import PlacedUpdate, StagePart
from dtrans.rows.analysis import analyse
from dtrans.rows.layout import RowAxis
from dtrans.step.cut import Cut
from dtrans.step.scopes import scope_of_eqn, scopes_of
from dtrans.tensor_parallel.defaults import default_cuts


@dataclasses.dataclass(frozen=True)
class Cuts:
    """Parameters and state that are cut over the shards of stages.

    Attributes:
      shards: the number of shards of each stage; 1 for a stage that is not split.
      state: parameter, or array of the optimizer's state, to the dimension that is cut.
    """

    shards: tuple[int, ...]
    state: Mapping[str, int] = dataclasses.field(default_factory=dict)


def shards_of(forward: ForwardPass, stage_of: Sequence[int], o: PipelineOptions) -> tuple[int, ...]:
    """Return the number of shards of each stage.

    Raises:
      ConfigError: a split scope without a number of devices, two of a stage with different numbers,
        or one with options that exclude it.
    """
    count = [1] * o.model_stages
    said: dict[int, str] = {}
    for scope, s in zip(scopes_of(list(forward.eqns)), stage_of, strict=True):
        if scope is None or scope.kind != "split":
            continue
        if scope.device_count is None:
            raise ConfigError(
                f"{scope} must say over how many devices: dtrans.split(device_count=...)"
            )
        if s in said and count[s] != scope.device_count:
            raise ConfigError(f"stage {s} is split over {count[s]} devices by {said[s]}, and over "
                              f"{scope.device_count} by {scope}")  # fmt: skip
        count[s], said[s] = scope.device_count, str(scope)
    for s, who in said.items():
        for option in ("sharding_stage", "offload"):
            if count[s] > 1 and getattr(o.memory, option):
                raise ConfigError(
                    f"{option}={getattr(o.memory, option)!r} beside {who}: a stage that is split "
                    "keeps its pieces"
                )
        if count[s] > 1 and o.chunks > 1:
            raise ConfigError(
                f"chunks={o.chunks} beside {who}: a device has one stage where stages are split"
            )
    return tuple(count)


def cuts_of(
    step: Cut,
    stages: Sequence[StagePrograms],
    shards: Sequence[int],
    users: Mapping[str, Sequence[int]],
) -> Cuts:
    """Find the parameters that split scopes cut, with their state: those that one stage reads."""
    found: dict[str, int] = {}
    readers = {n: [s.index for s in stages if n in s.params] for n in step.params}
    for stage, count in zip(stages, shards, strict=True):
        if count == 1:
            continue
        p = stage.forward
        places = [i for i, n in enumerate(p.in_names) if n in users and readers[n] == [stage.index]]
        cuts = default_cuts(p.jaxpr, places, count, _is_split)
        found |= {p.in_names[i]: d for i, d in cuts.items()}
    if not found:
        return Cuts(tuple(shards), {})
    analysis = analyse(step.optimize, step.params, {n: d for n, d in found.items() if d})
    plain = analyse(step.optimize, step.params)
    state = dict(found)
    for n, v in analysis.inputs.items():
        row = analysis.layout(v)
        lives = n in plain.inputs and plain.home(plain.layout(plain.inputs[n])) is not None
        if (
            n in step.opt_state
            and lives
            and isinstance(row, RowAxis)
            and row.leaf in found
            and row.width == 1
        ):
            state[n] = row.axis
    return Cuts(tuple(shards), state)


def _is_split(eqn: object) -> bool:
    scope = scope_of_eqn(eqn)  # type: ignore[arg-type]
    return scope is not None and scope.kind == "split"


def split_stages(
    stages: Sequence[StagePrograms], cuts: Cuts
) -> tuple[tuple[StagePrograms, ...], dict[tuple[int, str], int]]:
    """Return the programs of a shard of each stage, and the cut values by stage and name."""
    made: list[StagePrograms] = []
    values: dict[tuple[int, str], int] = {}
    for s in stages:
        if cuts.shards[s.index] == 1:
            made.append(s)
            continue
        here: dict[str, int] = {}
        whole = {*s.sends, *s.results}
        forward = _split(s.forward, s, cuts, here, whole)
        backward = _split(s.backward, s, cuts, here, s.cotangents)
        weights = None if s.weights is None else _split(s.weights, s, cuts, here, ())
        made.append(dataclasses.replace(s, forward=forward, backward=backward, weights=weights))
        values |= {(s.index, n): d for n, d in here.items()}
    return tuple(made), values


def _split(
    p: Program, s: StagePrograms, cuts: Cuts, values: dict[str, int], whole: Collection[str]
) -> Program:
    """Split one program; record in `values` the values that it leaves cut."""
    sums = {n: cuts.state[leaf] for n, leaf in s.sums.items() if leaf in cuts.state}
    known = {**{n: d for n, d in cuts.state.items() if n in s.params}, **sums, **values}
    ins = {i: known[n] for i, n in enumerate(p.in_names) if n in known}
    outs: dict[int, int | None] = {i: None for i, n in enumerate(p.out_names) if n in whole}
    outs |= {i: sums.get(n) for i, n in enumerate(p.out_names) if n in s.sums}
    made = split(p.jaxpr, ins, cuts.shards[s.index], SPLIT, outs=outs)
    for n, d in zip(p.out_names, made.out_cuts, strict=True):
        if d is not None and n not in sums:
            values[n] = d
    return program_of(
        p.name, made.jaxpr, p.in_names, p.out_names, p.roles[0] if p.roles else "forward"
    )


def split_update(
    placed: PlacedUpdate, cuts: Cuts, sums: Mapping[str, tuple[str, int, int | None]]
) -> PlacedUpdate:
    """Return the update with pieces for a shard of each split stage; `sums` as in `Update`."""
    inner = placed.program.inner
    named: dict[Var, str] = dict(zip(inner.invars, placed.program.in_names, strict=True))
    outs = {a: n for n, a in placed.program.outvars.items() if isinstance(a, Var)}
    given = {v: cuts.state.get(sums[n][0] if n in sums else n) for v, n in named.items()}
    dims: dict[Var, int] = {v: d for v, d in given.items() if d is not None}
    new = {v: cuts.state.get(n) for v, n in outs.items()}
    sent = {(v, origin) for v, origin, _ in placed.sends}  # whole
    pieces: list[StagePart] = []
    for p in placed.pieces:
        if cuts.shards[p.place] == 1:
            pieces.append(p)
            continue
        ins = {i: dims[v] for i, v in enumerate(p.reads) if v in dims}
        wanted = {i: new.get(v) for i, v in enumerate(p.makes) if v in new or (v, p.place) in sent}
        made = split(p.jaxpr, ins, cuts.shards[p.place], SPLIT, outs=wanted)
        dims |= {v: d for v, d in zip(p.makes, made.out_cuts, strict=True) if d is not None}
        pieces.append(dataclasses.replace(p, jaxpr=made.jaxpr))
    return dataclasses.replace(placed, pieces=tuple(pieces), cuts=dims)
