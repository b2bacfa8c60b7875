"""`dtrans.verify`: comparison of a step that a user wrote with `jax.shard_map` with one device's.

Both are functions of the same global arguments, and return the same global values. They are traced,
evaluated at random points of the field, and compared leaf by leaf. `relations` describes wrong
outputs, `repairs` the collectives at fault.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtrans._jax import ClosedJaxpr, equations, plain_type, shard_map_of
from dtrans.errors import ConfigError, TraceError, VerifyError
from dtrans.ir.pytree import TreeSpec, as_array, is_array, unflatten_all
from dtrans.step.trace import argument_names, name_result
from dtrans.verification.check import NEAR_TIES, TRIES, Findings
from dtrans.verification.field_values import NearTie
from dtrans.verification.outcome import Report
from dtrans.verification.random_points import BatchRange, random_arrays, random_point
from dtrans.verification.relations import relation
from dtrans.verification.repairs import find_faults


@dataclasses.dataclass(frozen=True)
class StepPair:
    """Distributed step, and the one-device step that it must compute.

    Attributes:
      title: name of the distributed step.
      distributed, step: their jaxprs, with the same flat inputs.
      inputs: types of the inputs by name.
      outputs: names of the outputs: the name of an input if an output is its new value.
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
            found |= {name: size for name, size in mapped.axes.items() if name in mapped.manual}
        return found


def verify(
    distributed_step: Callable[..., Any],
    step: Callable[..., Any],
    *args: Any,
    points: int = 3,
    seed: int = 0,
) -> Report:
    """Check that a step written with `jax.shard_map` computes a one-device step, without tolerance.

    Both functions take the same global arguments and return the same structure. They are traced,
    and evaluated in a finite field for all ranks (docs/verify_shard_map.md). Nothing is compiled. A
    mesh may have more devices than there are (`jax.sharding.AbstractMesh`).

    Args:
      distributed_step: the function under test; its collectives are in one `shard_map`, or several.
      step: the function for one device.
      *args: global arguments: pytrees of arrays, or of `jax.ShapeDtypeStruct`. Floats are drawn
        near the elements of an array. Integers and keys of an array stay. Of a type, all are drawn.
      points: number of points.
      seed: seed of the points.

    Returns:
      A report in which nothing differs. `report.complete` is False if an output was not compared.

    Raises:
      VerifyError: outputs differ. The message names them and the fault; `error.report` has more.
      ConfigError: `distributed_step` has no `shard_map`, as a function that `jax.jit` shards.
      TraceError: the functions return different structures.

    Example:
      >>> import jax, jax.numpy as jnp, dtrans
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> grad = jax.grad(lambda w, x: jnp.mean((x @ w) ** 2))
      >>> def step(w, x):
      ...     return w - 0.1 * grad(w, x)
      >>> def rank_step(w, x):
      ...     return w - 0.1 * jax.lax.psum(grad(w, x), "data")  # should be pmean
      >>> mesh = AbstractMesh((4,), ("data",))
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
    leaves = [x for x in jax.tree.leaves(args) if is_array(x)]
    arrays = {}
    for name, x in zip(pair.inputs, leaves, strict=True):
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
      ConfigError: the distributed step has no `shard_map`.
      TraceError: they return different structures.
    """
    roots = argument_names(step, len(args))
    specs = [TreeSpec.from_tree(a, root) for a, root in zip(args, roots, strict=True)]
    names = [n for spec in specs for n in spec.names]
    types = [plain_type(x) for x in jax.tree.leaves(args) if is_array(x)]
    title = _name_of(distributed_step)
    distributed, result = _trace(distributed_step, specs, types)
    one_device, wanted = _trace(step, specs, types)
    if not _shard_maps(distributed):
        raise ConfigError(_no_shard_map(title, distributed))
    mine: Any = jax.tree.structure(result)
    right: Any = jax.tree.structure(wanted)
    if mine != right:
        raise TraceError(
            f"{title} returns {mine}, {_name_of(step)} returns {right}; "
            "let both return the same structure of global arrays"
        )
    outputs = name_result(wanted, args, roots)[0].names
    if len(outputs) == 1 and is_array(wanted) and wanted.shape == getattr(args[0], "shape", None):
        outputs = (roots[0],)  # a function of one array and others returns its new value
    return StepPair(title, distributed, one_device, dict(zip(names, types, strict=True)), outputs)


def _trace(
    fn: Callable[..., Any], specs: Sequence[TreeSpec], types: Sequence[Any]
) -> tuple[ClosedJaxpr, Any]:
    """Return the jaxpr of a function of flat arrays, and the traced result."""
    result: list[Any] = []

    def on_arrays(*arrays: Any) -> list[Any]:
        outputs = fn(*unflatten_all(specs, arrays))
        result.append(jax.tree.map(as_array, outputs))
        return [x for x in jax.tree.leaves(result[-1]) if is_array(x)]

    jaxpr: Any = jax.make_jaxpr(on_arrays)(*types)
    return jaxpr, result[-1]


def _shard_maps(jaxpr: Any) -> list[Any]:
    return [shard_map_of(eqn) for eqn in equations(jaxpr) if eqn.primitive.name == "shard_map"]


def _no_shard_map(title: str, jaxpr: Any) -> str:
    """Return the error text for a program without `shard_map`, with its sharding primitives."""
    marks = [eqn.primitive.name for eqn in equations(jaxpr) if _names_shardings(eqn)]
    shards = f" XLA shards it by {' and '.join(dict.fromkeys(marks))}." if marks else ""
    return (
        f"{title} has no shard_map in its jaxpr.{shards} XLA adds its collectives when it "
        "compiles, so there are none to verify; write the step of a rank with jax.shard_map, or "
        "let dtrans.nccl2 or dtrans.sharding write it and call plan.verify()"
    )


def _names_shardings(eqn: Any) -> bool:
    """Return True if XLA shards by an equation."""
    if eqn.primitive.name in ("sharding_constraint", "reshard", "mesh_cast"):
        return True
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(isinstance(s, jax.sharding.Sharding) for s in shardings)


def _name_of(fn: Any) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__)).strip("<>")


# -- comparison ------------------------------------------------------------------------------------


@dataclasses.dataclass
class _HandComparison:
    """Comparison of two steps at random points.

    Attributes:
      pair: the steps.
      arrays: the user's arrays by name; other inputs are random.
      found: the outcome.
      faults: collectives at fault, in words.
    """

    pair: StepPair
    arrays: Mapping[str, Any]
    found: Findings = dataclasses.field(default_factory=Findings)
    faults: tuple[str, ...] = ()

    def check(self, points: int, seed: int) -> None:
        """Compare at random points, until something differs."""

        def compare(range_: BatchRange) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(points):
                if not self.found.differences:
                    self._compare(rng, range_)

        self.found.try_ranges(compare, drawn=len(self.arrays) < len(self.pair.inputs))

    def _compare(self, rng: np.random.Generator, range_: BatchRange) -> None:
        """Compare both steps at one point without a near tie."""
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
        self.found.unfollowed[NEAR_TIES] = None

    def _explain(
        self, point: Mapping[str, Any], outputs: Sequence[Any], wanted: Sequence[Any]
    ) -> None:
        """Describe the differences at a point: relations, faults and first wrong values."""
        pair, differences = self.pair, self.found.differences
        for name, x, y in zip(pair.outputs, outputs, wanted, strict=True):
            if name in differences:
                detail = relation(x, y, point.get(name), pair.axes)
                differences[name] = dataclasses.replace(differences[name], detail=detail)
        arguments = [*point.values()]
        self.faults, unexplained = find_faults(pair.distributed, arguments, wanted, pair.outputs)
        # a fault says more than a first wrong value, which is left for outputs without a fault
        names = [name if k in unexplained else "" for k, name in enumerate(pair.outputs)]
        self.found.name_causes(names, (pair.step, point), (pair.distributed, arguments))
