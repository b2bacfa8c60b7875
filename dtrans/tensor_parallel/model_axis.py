"""Model axis of a mesh: the devices that shard the parameters of layers in `dtrans.split` scopes.

`shard_state` chooses the sharded parameters and optimizer state. `shard_program` rewrites the
program of one trainer for one device of the axis. The program may already have collectives over
other mesh axes, such as the all-reduce of gradients over trainers. In the new program, these
collectives run on shards.

Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053). The rules of `dtrans.engine` write the same
two all-reduces per layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from dtrans._jax import JaxprEqn, Var, opened
from dtrans.engine.layout import Gathered, Sliced
from dtrans.engine.split import split
from dtrans.errors import ConfigError
from dtrans.ir.program import DIST, FORWARD, Program
from dtrans.ops import collective_of
from dtrans.rows.analysis import analyse
from dtrans.rows.layout import RowAxis
from dtrans.step.halves import DividedStep, Gradient
from dtrans.step.scopes import has_local_scope, in_split_scope, split_scopes
from dtrans.tensor_parallel.defaults import axes_and_reads


@dataclasses.dataclass(frozen=True)
class ModelState:
    """Parameters and optimizer state that the devices of the model axis shard.

    Attributes:
      axis: name of the axis.
      size: number of its devices.
      sliced: sharded parameters and arrays of optimizer state, by name.
      params: names of the sharded parameters.
      replicated: names of the other parameters that `dtrans.split` scopes read.
    """

    axis: str
    size: int
    sliced: Mapping[str, Sliced]
    params: tuple[str, ...]
    replicated: tuple[str, ...]

    @property
    def dims(self) -> dict[str, int]:
        """Sharded dimension of each sharded parameter."""
        return {n: self.sliced[n].axis for n in self.params}

    def without_conflicts(self, dims: Mapping[str, int]) -> ModelState:
        """Return a copy without arrays that another mesh axis shards along the same dimension.

        Args:
          dims: maps each array to the dimension that the other axis shards.
        """
        sliced = {n: s for n, s in self.sliced.items() if dims.get(n) != s.axis}
        return dataclasses.replace(self, sliced=sliced)

    @property
    def notes(self) -> list[str]:
        """Sentences for the user that list the sharded and the replicated parameters."""
        dims: dict[int, list[str]] = {}
        for name in self.params:
            dims.setdefault(self.sliced[name].axis, []).append(name)
        notes = []
        for dim, names in sorted(dims.items()):
            notes.append(f"sharded over {self.axis} along dimension {dim}: {', '.join(names)}")
        if self.replicated:
            notes.append(f"replicated over {self.axis}: {', '.join(self.replicated)}")
        return notes


def shard_state(step: DividedStep, axis: str, size: int) -> ModelState:
    """Choose the parameters and the optimizer state that the devices of a model axis divide.

    Args:
      step: the single-device step, divided into the computation of gradients and the optimizer
        update.
      axis: name of the axis.
      size: number of its devices.

    Raises:
      ConfigError: a scope has another number of devices. Or no parameter of the scopes can be
        sharded, or the step has `dtrans.local` scopes.
    """
    program = step.program
    scopes = split_scopes(program.jaxpr)
    for scope in scopes:
        if scope.device_count not in (None, size):
            raise ConfigError(
                f"{scope} has device_count={scope.device_count}, but {size} devices of the mesh "
                f"divide split layers; leave device_count out, or pass a mesh in which "
                f"{scope.device_count} devices divide them"
            )
    if any(map(has_local_scope, program.eqns)):
        raise ConfigError(
            f"{program.name} has a dtrans.local() scope, which a mesh for split layers does not "
            "support; remove the scope, or leave 'model' out of mesh"
        )
    places = [i for i, n in enumerate(program.in_names) if n in step.params]
    chosen, read = axes_and_reads(program.jaxpr, places, size, in_split_scope)
    dims = {program.in_names[i]: dim for i, dim in chosen.items()}
    if size > 1 and not dims:
        reason = "has no dtrans.split() scope"
        if scopes:
            names = " and ".join(dict.fromkeys(map(str, scopes)))
            reason = f"reads no parameter that can be sharded in {names}"
        without_rule = [f"{program.in_names[i]} in {name}" for i, name in read.items() if name]
        if without_rule:
            reason += f", since no rule divides {', '.join(without_rule)}"
        raise ConfigError(
            f"{size} devices of the mesh divide split layers, but {program.name} {reason}; put the "
            "products (`@`, einsum), convolutions or lookups of large parameters into "
            "`with dtrans.split():`, or leave 'model' out of mesh"
        )
    replicated = [program.in_names[i] for i in sorted(read) if i not in chosen]
    sliced = {}
    for n, dim in {**dims, **state_axes(step, dims)}.items():
        sliced[n] = Sliced.from_shape(program.inputs[n].shape, dim, size)
    return ModelState(axis, size, sliced, tuple(dims), tuple(replicated))


def state_axes(step: DividedStep, params: Mapping[str, int]) -> dict[str, int]:
    """Return the sharded dimension of each array of optimizer state, by name.

    An array such as Adam's momentum is sharded like its parameter. An array is replicated if it
    does not have one entry for each row of the parameter along the sharded dimension.

    Args:
      step: the single-device step, divided into the computation of gradients and the optimizer
        update.
      params: maps each sharded parameter to its sharded dimension.
    """
    analysis = analyse(step.optimize, step.params, {n: d for n, d in params.items() if d})
    plain = analyse(step.optimize, step.params)
    found = {}
    for name, v in analysis.inputs.items():
        if isinstance(name, Gradient) or name not in step.opt_state or name not in plain.inputs:
            continue
        row = analysis.layout(v)
        has_home = plain.home(plain.layout(plain.inputs[name])) is not None
        if has_home and isinstance(row, RowAxis) and row.leaf in params and row.width == 1:
            found[name] = row.axis
    return found


@dataclasses.dataclass(frozen=True)
class ShardedProgram:
    """Program that each device of the model axis runs.

    Attributes:
      program: the program. Its sharded inputs and outputs have the shapes of shards.
      gathers: values that the devices all-gather, with reasons: no rule can shard the equations
        that read them.
      joined: for each sharded result, the dimension along which the caller must concatenate the
        shards.
    """

    program: Program
    gathers: tuple[Gathered, ...]
    joined: dict[str, int]


def shard_program(
    program: Program,
    state: ModelState,
    inputs: Mapping[str, int] = MappingProxyType({}),
    *,
    splits_results: bool = False,
    gathers_in_loops: bool = False,
    rows: Mapping[str, int] = MappingProxyType({}),
) -> ShardedProgram:
    """Rewrite the program of one trainer for one device of the axis `state.axis`.

    By default, all devices of the axis have the trainer's part of the batch, and return equal
    results.

    Args:
      program: the program of one trainer.
      state: the state that the devices divide.
      inputs: name -> dimension of other inputs that the devices divide. An output with the same
        name is replicated.
      splits_results: True if outputs other than state may be sharded, too.
      gathers_in_loops: True to shard loops even if their bodies must all-gather in each iteration.
        This uses less memory, and more communication.
      rows: name of an array of the batch -> dimension with the batch's rows. Outside of
        `dtrans.split` scopes, each device computes only some of these rows.
    """
    stored = {n: s.axis for n, s in state.sliced.items()}
    dims = {**stored, **inputs}
    ins = {i: dims[n] for i, n in enumerate(program.in_names) if n in dims}
    outs: dict[int, int | None] = {}
    for i, n in enumerate(program.out_names):
        if not splits_results or n in program.in_names:
            outs[i] = stored.get(n)
    roles: dict[Var, str] = {}
    for eqn, role in zip(program.eqns, program.roles, strict=True):
        roles.update(dict.fromkeys(eqn.outvars, role))
    row_dims = {i: rows[n] for i, n in enumerate(program.in_names) if n in rows}
    options: Any = {"groups": roles, "gathers_in_loops": gathers_in_loops, "rows": row_dims}
    write = partial(split, program.jaxpr, ins, state.size, state.axis, **options)
    shard = write(outs=outs)
    computed = dict(zip(program.out_names, shard.out_axes, strict=True))
    padded = []
    joined = {}
    for i, (n, v) in enumerate(program.outvars.items()):
        dim = computed[n]
        if i not in outs and dim is not None:
            joined[n] = dim
            if v.aval.shape[dim] % state.size:
                padded.append(i)
    if padded:  # padding of results would stay in the concatenation, so replicate them
        outs |= dict.fromkeys(padded)
        shard = write(outs=outs)
        for i in padded:
            del joined[program.out_names[i]]
    labels = {}
    for v, label in program.labels.items():
        value = shard.values.get(v)
        if isinstance(value, Var):
            labels[value] = label
    written = [_role(eqn, shard.groups) for eqn in opened(shard.jaxpr).eqns]
    changed: dict[str, Any] = {"roles": tuple(written), "labels": labels}
    return ShardedProgram(program.with_jaxpr(shard.jaxpr, **changed), shard.gathers, joined)


def _role(eqn: JaxprEqn, groups: Mapping[Var, str]) -> str:
    """Return an equation's label in the new program, such as "forward"; "dist" for a collective."""
    if collective_of(eqn) is not None:
        return DIST
    return next((groups[v] for v in eqn.outvars if groups.get(v)), FORWARD)
