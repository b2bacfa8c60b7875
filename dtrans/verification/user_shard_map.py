"""`dtrans.verify`: check of a step that a user wrote with `jax.shard_map`.

The user's step and a one-device step take the same global arguments, and must return the same
global values. `verify` traces both steps. It evaluates them for random inputs in a finite field,
where arithmetic has no rounding errors, and compares each output. `relations` describes wrong
outputs, and `repairs` finds the collectives at fault.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtrans._jax import ClosedJaxpr, equations, named_in_errors, plain_type, shard_map_of
from dtrans.errors import ConfigError, TraceError, VerifyError
from dtrans.ir.pytree import TreeSpec, all_names, array_leaves, as_array, is_array, unflatten_all
from dtrans.ir.selection import retain
from dtrans.step.trace import argument_names, name_result
from dtrans.verification.check import NEAR_TIES, TRIES, Findings
from dtrans.verification.field_values import NearTie
from dtrans.verification.outcome import Report
from dtrans.verification.random_points import BatchRange, random_arrays, random_point
from dtrans.verification.relations import relation
from dtrans.verification.repairs import find_faults


@dataclasses.dataclass(frozen=True)
class StepPair:
    """Distributed step, and the one-device step that must return the same values.

    Attributes:
      title: name of the distributed step.
      distributed: jaxpr of the distributed step.
      step: jaxpr of the one-device step, with the same flat inputs.
      inputs: types of the inputs, by name.
      outputs: names of the outputs. The new value of an input has the name of the input.
    """

    title: str
    distributed: ClosedJaxpr
    step: ClosedJaxpr
    inputs: Mapping[str, Any]
    outputs: Sequence[str]

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the axes of the distributed step's meshes, by name."""
        found: dict[str, int] = {}
        for mapped in _shard_maps(self.distributed):
            found |= retain(mapped.axes, mapped.manual)
        return found


def verify(
    distributed_step: Callable[..., Any],
    step: Callable[..., Any],
    *args: Any,
    points: int = 3,
    seed: int = 0,
) -> Report:
    """Check without tolerance that a step with `jax.shard_map` equals a one-device step.

    Both functions take the same global arguments and return the same structure. Both are traced,
    and evaluated for random inputs in a finite field, where arithmetic has no rounding errors
    (docs/verify_shard_map.md). Nothing is compiled, and the devices of the mesh need not exist
    (`jax.sharding.AbstractMesh`).

    Args:
      distributed_step: the function under test, with its collectives in one or more `shard_map`.
      step: the function for one device, which is taken as correct.
      *args: global arguments: pytrees of arrays, or of `jax.ShapeDtypeStruct`. Arrays of integers
        and random keys are used unchanged. For an array of floats, random numbers near its entries
        are used; for a `jax.ShapeDtypeStruct`, random values.
      points: number of random inputs to compare.
      seed: seed of the random inputs.

    Returns:
      A report without differences. If an output was not compared, `report.complete` is False.

    Raises:
      VerifyError: outputs differ. The message names the outputs and the fault; `error.report` is
        the report.
      ConfigError: `distributed_step` has no `shard_map` (`jax.jit` shards it, say), or its mesh has
        Explicit axes.
      TraceError: the functions return different structures.

    Example:
      >>> import jax, jax.numpy as jnp, dtrans
      >>> from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
      >>> grad = jax.grad(lambda w, x: jnp.mean((x @ w) ** 2))
      >>> def step(w, x):
      ...     return w - 0.1 * grad(w, x)
      >>> def rank_step(w, x):
      ...     return w - 0.1 * jax.lax.psum(grad(w, x), "data")  # should be pmean
      >>> mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
      >>> specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
      >>> parallel = jax.shard_map(rank_step, mesh=mesh, **specs)
      >>> try:
      ...     dtrans.verify(parallel, step, jnp.ones(2), jnp.ones((8, 2)))
      ... except dtrans.errors.VerifyError as e:
      ...     print("use jax.lax.pmean" in str(e))
      True
    """
    begun = time.monotonic()
    args = tuple(as_array(a) for a in args)
    pair = trace_pair(distributed_step, step, args)
    arrays = {}
    for name, x in zip(pair.inputs, array_leaves(args), strict=True):
        if not isinstance(x, jax.ShapeDtypeStruct):
            arrays[name] = x
    comparison = _HandComparison(pair, arrays)
    with np.errstate(all="ignore"):
        comparison.check(points, seed)
    found = comparison.found.report(pair.title, time.monotonic() - begun)
    report = dataclasses.replace(found, faults=comparison.faults)
    if not report.equal:
        raise VerifyError(report)
    return report


# -- traces ----------------------------------------------------------------------------------------


def trace_pair(
    distributed_step: Callable[..., Any], step: Callable[..., Any], args: Sequence[Any]
) -> StepPair:
    """Trace a distributed step and the step of one device.

    Raises:
      ConfigError: the distributed step has no `shard_map`, or Explicit mesh axes.
      TraceError: the steps return different structures.
    """
    roots = argument_names(step, len(args))
    specs = [TreeSpec.from_tree(arg, root) for arg, root in zip(args, roots, strict=True)]
    names = all_names(specs)
    types = list(map(plain_type, array_leaves(args)))
    title = _name_of(distributed_step)
    distributed, result = _trace(distributed_step, specs, types)
    one_device, wanted = _trace(step, specs, types)
    if not _shard_maps(distributed):
        raise ConfigError(_no_shard_map(title, distributed))
    mine: Any = jax.tree.structure(result)
    right: Any = jax.tree.structure(wanted)
    if mine != right:
        raise TraceError(
            f"{title} returns {mine}, but {_name_of(step)} returns {right}; both must return the "
            "same structure of global arrays"
        )
    outputs = name_result(wanted, args, roots)[0].names
    if len(outputs) == 1 and is_array(wanted) and wanted.shape == getattr(args[0], "shape", None):
        outputs = (roots[0],)  # the step returns the new value of its first argument
    return StepPair(title, distributed, one_device, dict(zip(names, types, strict=True)), outputs)


def _trace(
    fn: Callable[..., Any], specs: Sequence[TreeSpec], types: Sequence[Any]
) -> tuple[ClosedJaxpr, Any]:
    """Trace a function; return its jaxpr on flat arrays, and the pytree of tracers it returned.

    Raises:
      ConfigError: a `shard_map` has Explicit mesh axes.
    """
    result: list[Any] = []

    def on_trees(*trees: Any) -> list[Any]:
        outputs = fn(*unflatten_all(specs, jax.tree.leaves(trees)))
        result.append(jax.tree.map(as_array, outputs))
        return array_leaves(result[-1])

    remaining = iter(types)
    trees = []
    for spec in specs:
        arrays = itertools.islice(remaining, len(spec.names))
        trees.append(spec.by_path(spec.root, arrays))
    try:
        jaxpr: Any = jax.make_jaxpr(named_in_errors(on_trees, fn))(*trees)
    except ValueError as e:
        # JAX compares in_specs with the sharding of an argument only if axes are Explicit.
        if "in_specs passed to shard_map" not in str(e):
            raise
        raise ConfigError(
            f"the mesh of {_name_of(fn)} has Explicit axes, but dtrans.verify traces arguments "
            "without shardings; create the mesh with axis_types=(jax.sharding.AxisType.Auto,)"
        ) from e
    return jaxpr, result[-1]


def _shard_maps(jaxpr: Any) -> list[Any]:
    return [shard_map_of(eqn) for eqn in equations(jaxpr) if eqn.primitive.name == "shard_map"]


def _no_shard_map(title: str, jaxpr: Any) -> str:
    """Return the error text for a distributed step that has no `shard_map`.

    If equations have shardings, from which XLA would write collectives, the text names them.
    """
    marks = [eqn.primitive.name for eqn in equations(jaxpr) if _names_shardings(eqn)]
    by = f" (it is sharded by {' and '.join(dict.fromkeys(marks))})" if marks else ""
    return (
        f"{title} has no shard_map in its jaxpr{by}: XLA would insert the collectives, so there "
        "are none to verify. Write the step of a rank with jax.shard_map, or use dtrans.nccl2 or "
        "dtrans.sharding and plan.verify()"
    )


def _names_shardings(eqn: Any) -> bool:
    """Return True if an equation has shardings, from which XLA would write collectives."""
    if eqn.primitive.name in ("sharding_constraint", "reshard", "mesh_cast"):
        return True
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(isinstance(s, jax.sharding.Sharding) for s in shardings)


def _name_of(fn: Any) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__)).strip("<>")


# -- comparison ------------------------------------------------------------------------------------


@dataclasses.dataclass
class _HandComparison:
    """Comparison of a user's distributed step with a one-device step, for random inputs.

    Attributes:
      pair: the steps.
      arrays: the user's arrays, by name; other inputs are random.
      found: the differences that were found so far.
      faults: descriptions of the collectives at fault.
    """

    pair: StepPair
    arrays: Mapping[str, Any]
    found: Findings = dataclasses.field(default_factory=Findings)
    faults: tuple[str, ...] = ()

    def check(self, points: int, seed: int) -> None:
        """Compare both steps for random inputs, until an output differs."""

        def compare(range_: BatchRange) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(points):
                if not self.found.differences:
                    self._compare(rng, range_)

        self.found.try_ranges(compare, drawn=len(self.arrays) < len(self.pair.inputs))

    def _compare(self, rng: np.random.Generator, range_: BatchRange) -> None:
        """Compare both steps for a random input; if rounding decides a branch, try again."""
        inputs = self.pair.inputs
        for _ in range(TRIES):
            arrays = random_arrays(inputs, rng, range_, self.arrays)
            point = random_point(inputs, arrays, frozenset(), rng)
            try:
                outputs = self.found.evaluate(self.pair.distributed, [*point.values()])
                wanted = self.found.evaluate(self.pair.step, [*point.values()])
            except NearTie:
                continue
            self.found.points += 1
            for name, x, y in zip(self.pair.outputs, outputs, wanted, strict=True):
                self.found.note(name, x, y)
            if self.found.differences:
                self._explain(point, outputs, wanted)
            return
        self.found.unevaluated[NEAR_TIES] = None

    def _explain(
        self, point: Mapping[str, Any], outputs: Sequence[Any], wanted: Sequence[Any]
    ) -> None:
        """Explain differences: collectives at fault, first wrong equation, relation in words.

        Args:
          point: the value of each input, by name.
          outputs: outputs of the distributed step.
          wanted: outputs of the one-device step.
        """
        pair, differences = self.pair, self.found.differences
        for name, x, y in zip(pair.outputs, outputs, wanted, strict=True):
            if name in differences:
                detail = relation(x, y, point.get(name), pair.axes)
                differences[name] = dataclasses.replace(differences[name], detail=detail)
        arguments = [*point.values()]
        self.faults, unexplained = find_faults(pair.distributed, arguments, wanted, pair.outputs)
        # If a fault explains an output, its first wrong value would add nothing to the report.
        names = list(pair.outputs)
        for k in set(range(len(names))) - unexplained:
            names[k] = ""
        self.found.name_causes(names, (pair.step, point), (pair.distributed, arguments))
