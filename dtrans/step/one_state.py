"""Steps of one state: which of its leaves are parameters, and which belong to the optimizer.

    step(state, *batch) -> state, ...     becomes     step(params, opt_state, *batch) -> params, opt_state, ...

A flax `TrainState`, an nnx or Equinox model beside its optimizer, a dict of models: what each leaf
is for is told by dataflow, not by its name.

    parameter    forward reads it, and its own gradient makes its new value
    constant     the step hands it on as it came in; parameters and optimizers have such
    statistics   the batch makes its new value, and no gradient does, as for running means; or its size does: a count
                 of what went by, in steps other than one, that nothing else reads
    key          a typed random key, which the step splits
    follower     forward reads it too, but a parameter's new value makes its own: a teacher, a target network
    optimizer    everything else: moments, counts, averages of parameters that only evaluation reads

The last kind, and constants that only updates read, are `opt_state` of the step in two parts: the
state's own structure, with None for the leaves that are not in it. The rest is `params`.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dtrans._jax import (
    Atom,
    Var,
    closed_with,
    jaxpr_as_fun,
    lowered_jaxpr,
    opened,
    plain_array,
    plain_jaxpr,
    plain_type,
    scope_of,
)
from dtrans.errors import GradientError, TraceError
from dtrans.ir.dataflow import backward_slice, propagate
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import Program
from dtrans.ir.pytree import TreeSpec, as_array, combine, is_array, unused_name
from dtrans.step.gradients import OpenStep, candidates_for, counts_rows, crossing, marked
from dtrans.step.trace import children


PARAMETER, CONSTANT, STATISTICS, KEY = "parameter", "constant", "statistics", "key"
FOLLOWER, OPTIMIZER = "follower", "optimizer"


def has_one_state(program: Program, startup: Program) -> bool:
    """Return True if a step takes and returns one state: its first argument, which `startup` makes,
    and not its second.

    A result may look like an array of the batch, as that of an autoencoder does: what `startup`
    makes decides. But a second argument with a leaf that the step changes and the loss does not
    read is the optimizer's state, and `startup` forgot it.
    """
    outs, first = set(program.out_names), program.args[0].names if program.args else ()
    if not first or not outs.issuperset(first):
        return False
    second = program.args[1].names if len(program.args) > 1 else None
    if second is None or (second and not outs.issuperset(second)):
        return True
    if not second:  # an optimizer without state
        return False
    types = program.args[0].unflatten([program.inputs[n] for n in first])
    if leaf_types(types) != leaf_types(
        startup.out.unflatten([startup.outputs[n] for n in startup.out_names])
    ):
        return False
    step = OpenStep(program, inline_calls(program.jaxpr))
    gradients = marked(step)
    read = _read_by_forward(step, gradients.of.values() if gradients else crossing(step), second)
    return all(n in read or step.outs[n] is step.vars[n] for n in second)


def in_two_parts(program: Program) -> Program:
    """A step of one state as one of (params, opt_state, *batch); see the module's docstring.

    Raises:
      GradientError: none of its leaves is a parameter; the message lists what was found.
    """
    kinds = kinds_of(OpenStep(program, inline_calls(program.jaxpr)))
    if PARAMETER not in kinds.values():
        found = ", ".join(f"{n} ({kind})" for n, kind in [*kinds.items()][:6])
        raise GradientError(
            f"{program.name} is not a training step: no gradient was found, since none of the "
            "leaves of its state is "
            f"read by a loss and updated from that loss's derivative; found: {found}"
            f"{', ...' if len(kinds) > 6 else ''}. Take gradients with dtrans.value_and_grad in "
            "place of "
            "jax.value_and_grad"
        )
    held = {n for n, kind in kinds.items() if kind != OPTIMIZER}
    return program.rewritten(lambda other: _divided(other, held))


def divide(spec: TreeSpec, names: Collection[str]) -> tuple[TreeSpec, TreeSpec]:
    """A state twice: the leaves with these names, and those that are no arrays; and all others.
    None elsewhere."""
    leaves = spec.leaves
    first = [leaf if leaf in names or not isinstance(leaf, str) else None for leaf in leaves]
    second = [leaf if isinstance(leaf, str) and leaf not in names else None for leaf in leaves]
    return _spec(jax.tree.unflatten(spec.treedef, first)), _spec(
        jax.tree.unflatten(spec.treedef, second)
    )


def _divided(program: Program, params: Collection[str]) -> Program:
    state, *batch = program.args
    args = (*divide(state, params), *batch)
    place = {n: i for i, n in enumerate(program.in_names)}
    order = [place[n] for spec in args for n in spec.names]
    out = _result(program, args[:2])
    made = dict(program.outvars)
    inner = program.inner
    made |= {unused_name(f"new_{n}", place): v for n, v in made.items() if n in place}
    invars = [inner.invars[i] for i in order]
    jaxpr = closed_with(program.jaxpr, invars=invars, outvars=[made[n] for n in out.names])
    return dataclasses.replace(program, jaxpr=jaxpr, args=args, out=out, of_one_state=True)


def _result(program: Program, parts: Sequence[TreeSpec]) -> TreeSpec:
    """The result of the step in two parts: both, then what the step returns beside its state."""
    names = program.args[0].names
    whole = jax.tree.unflatten(program.out.treedef, program.out.leaves)
    both = [jax.tree.unflatten(spec.treedef, spec.leaves) for spec in parts]
    if program.out.names == names:
        return _spec((*both,))
    known = set(program.in_names)
    called = lambda leaf: (
        unused_name(f"new_{leaf}", known) if leaf in known else leaf
    )  # looks like it, and is not it
    found = children(whole) or []
    rest = {key: jax.tree.map(called, part) for key, part in found if _spec(part).names != names}
    if isinstance(whole, dict):
        return _spec({"params": both[0], "opt_state": both[1], **rest})
    return _spec((*both, *rest.values()))


def _spec(tree: Any) -> TreeSpec:
    leaves, treedef = jax.tree.flatten(tree)
    return TreeSpec(treedef, tuple(leaves))


# -- what each leaf is for -------------------------------------------------------------------------


def kinds_of(step: OpenStep) -> dict[str, str]:
    """What each leaf of the first argument is for."""
    names = step.params
    gradients = marked(step)
    of = set(gradients.of.values()) if gradients else crossing(step)
    read = _read_by_forward(step, of, names)
    parameters = set(gradients.of) if gradients else _parameters(step, of, read)
    by_batch, by_gradient = 1, 2
    batch = [n for spec in step.source.args[1:] for n in spec.names]
    enters = propagate(
        step.eqns, {step.vars[n]: by_batch for n in batch}, dict.fromkeys(of, by_gradient)
    )

    def kind(name: str) -> str:
        v, out = step.vars[name], step.outs[name]
        bits = enters.get(out, 0) if isinstance(out, Var) else 0
        if name in parameters:
            return PARAMETER
        if out is v:
            return OPTIMIZER if name not in read and v in used else CONSTANT
        if bits == by_batch or (not bits and name not in read and counts_rows(step, v, out)):
            return STATISTICS
        if bits and name in read:
            return FOLLOWER
        return KEY if jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) and not bits else OPTIMIZER

    used = {a for e in step.eqns for a in e.invars if isinstance(a, Var)}
    return {n: kind(n) for n in names}


def _read_by_forward(step: OpenStep, gradients: Collection[Var], names: Sequence[str]) -> set[str]:
    """Return those of these inputs whose values, as they came in, enter what is differentiated."""
    new: list[Atom] = [step.outs[n] for n in names if step.outs[n] is not step.vars[n]]
    fixed = dict.fromkeys([*gradients, *(a for a in new if isinstance(a, Var))], 0)
    enters = propagate(step.eqns, {step.vars[n]: 1 << i for i, n in enumerate(names)}, fixed)
    bits = 0
    for eqn, derived in zip(step.eqns, step.derived, strict=True):
        if derived or "jvp(" in scope_of(eqn):
            for a in eqn.invars:
                bits |= enters.get(a, 0) if isinstance(a, Var) else 0
    return {n for i, n in enumerate(names) if bits >> i & 1}


def _parameters(step: OpenStep, gradients: Collection[Var], read: Collection[str]) -> set[str]:
    """The leaves that forward reads, and whose new value is made of a gradient, and of no other's
    new value first."""
    floating = [
        n for n in step.params if n in read and jnp.issubdtype(step.vars[n].aval.dtype, jnp.inexact)
    ]
    moving = [n for n in floating if step.outs[n] is not step.vars[n]]
    graded = [n for n in moving if candidates_for(step, n, gradients)]
    new = {a for n in graded if isinstance(a := step.outs[n], Var)}
    return {n for n in graded if candidates_for(step, n, gradients, stop=new - {step.outs[n]})}


def _state_behind(main: Program) -> str:
    """What to do about a step that has more of its state behind the batch; or nothing."""
    below = lambda n: n.partition("/")[2]
    outs = set(map(below, main.out_names)) - {""}
    for i, spec in enumerate(main.args[2:], 1):
        if len(spec.names) > 1 and outs.issuperset(map(below, spec.names)):
            return (
                f". {main.name} returns its argument {i + 1} ({spec.root}) too: its state must "
                "come first, as "
                "step(params, opt_state, *batch), or step(state, *batch)"
            )
    return ""


# -- both programs ---------------------------------------------------------------------------------


def startup_in_two_parts(main: Program, startup: Program) -> Program:
    """What makes the one state of a step, as what makes its two parts.

    Raises:
      TraceError: it makes something else.
    """
    state = combine(
        *(spec.unflatten([main.inputs[n] for n in spec.names]) for spec in main.args[:2])
    )
    made = startup.out.unflatten([startup.outputs[n] for n in startup.out_names])
    wanted, have = (leaf_types(tree) for tree in (state, made))
    if wanted != have:
        path = next(p for p in [*wanted, *have] if wanted.get(p) != have.get(p))
        root = main.in_names[0].split("/")[0]
        raise TraceError(
            f"the startup program {startup.name} does not make what {main.name} takes: "
            f"{root}/{path} is made as "
            f"{have.get(path, 'nothing')}, and taken as {wanted.get(path, 'nothing')}; startup "
            "must be "
            f"dtrans.trace(init, ...) with init(...) -> {root}{_state_behind(main)}"
        )
    name_of = dict(zip(_whole(main).names, startup.out_names, strict=True))
    parts = [
        TreeSpec(spec.treedef, tuple(name_of[x] if isinstance(x, str) else x for x in spec.leaves))
        for spec in main.args[:2]
    ]
    out = _spec((*(jax.tree.unflatten(spec.treedef, spec.leaves) for spec in parts),))
    return startup.returning(out, out.names)


def leaf_types(tree: Any) -> dict[str, str]:
    """Return the type of each array of a pytree, by its path below the root."""
    arrays = [x for x in jax.tree.leaves(tree) if is_array(x)]
    return {
        n: f"{x.dtype}{list(x.shape)}" for n, x in zip(TreeSpec.of(tree).names, arrays, strict=True)
    }


# -- states and functions of them ------------------------------------------------------------------


def joined(main: Program, params: Any, opt_state: Any) -> Any:
    """What a step takes, of its two parts: one pytree, or a pair."""
    return combine(params, opt_state) if main.of_one_state else (params, opt_state)


def divided(main: Program, state: Any) -> tuple[Any, Any]:
    """The inverse of `joined`. Raises TraceError for another structure."""
    if not main.of_one_state:
        if not isinstance(state, tuple) or len(state) != 2:
            raise TraceError(
                f"the state of {main.name} is a pair, (params, opt_state), not "
                f"{type(state).__name__}"
            )
        return state[0], state[1]
    whole = _whole(main)
    leaves, structure = jax.tree.flatten(state)
    if structure == whole.treedef:  # a count may be a number of Python's
        counts = [
            as_array(x) if isinstance(of, str) else x
            for of, x in zip(whole.leaves, leaves, strict=True)
        ]
        state = jax.tree.unflatten(structure, counts)
    found = dict(zip(whole.names, whole.flatten(state, "the state"), strict=True))
    first, second = (spec.unflatten([found[n] for n in spec.names]) for spec in main.args[:2])
    return first, second


def _whole(main: Program) -> TreeSpec:
    """The one state of a step in two parts."""
    parts = [jax.tree.unflatten(spec.treedef, spec.leaves) for spec in main.args[:2]]
    return _spec(combine(*parts))


class Applied:
    """A function of the state that a step takes, or of its parameters, given only the leaves that
    it reads.

    Args:
      main: the step.
      fn: `fn(state, *args)` of a step of one state, `fn(params, *args)` of others.
      unpacked: leaves as one device has them, from those that the job has; it is traced.
    """

    def __init__(
        self,
        main: Program,
        fn: Callable[..., Any],
        unpacked: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    ) -> None:
        self._spec = _whole(main) if main.of_one_state else main.args[0]
        self._types = [
            jax.ShapeDtypeStruct(main.inputs[n].shape, main.inputs[n].dtype)
            for n in self._spec.names
        ]
        self._fn, self._unpacked = weakref.ref(fn), unpacked
        self._known: dict[Any, tuple[tuple[str, ...], Callable[..., list[Any]], Any]] = {}

    def __call__(self, leaves: Callable[[Collection[str]], Mapping[str, Any]], *args: Any) -> Any:
        """What the function returns, of the leaves that the job has under the names which it is
        asked for."""
        flat, structure = jax.tree.flatten(args)
        flat = [plain_array(x) if is_array(x) else jnp.asarray(x) for x in flat]
        key = structure, tuple(str(jax.typeof(x)) for x in flat)
        if key not in self._known:
            self._known[key] = self._compiled(flat, structure)
        names, run, result = self._known[key]
        held = leaves(names)
        return jax.tree.unflatten(result, run(held, _beside(held, flat)))

    def _compiled(
        self, flat: Sequence[Any], structure: Any
    ) -> tuple[tuple[str, ...], Callable[..., list[Any]], Any]:
        """The names of what the function reads, the function of these and of the arrays, and its
        result's structure."""
        fn = self._fn()
        assert fn is not None
        result: list[Any] = []

        def on_arrays(*arrays: Any) -> list[Any]:
            state, rest = arrays[: len(self._types)], arrays[len(self._types) :]
            made, tree = jax.tree.flatten(
                fn(self._spec.unflatten(state), *jax.tree.unflatten(structure, rest))
            )
            result.append(tree)
            return made

        traced = inline_calls(
            plain_jaxpr(lowered_jaxpr(on_arrays, *self._types, *map(plain_type, flat)))
        )
        inner = opened(traced)
        _, read = backward_slice(inner.eqns, inner.outvars)
        names = tuple(n for n, v in zip(self._spec.names, inner.invars, strict=False) if v in read)
        given = [v for v in inner.invars[: len(self._types)] if v in read]
        invars = [*given, *inner.invars[len(self._types) :]]
        run = jaxpr_as_fun(closed_with(traced, invars=invars))

        def of_leaves(leaves: Mapping[str, Any], flat: Sequence[Any]) -> list[Any]:
            found = self._unpacked(leaves)
            return [*run(*(found[n] for n in names), *flat)]

        return names, jax.jit(of_leaves), result[-1]


def _beside(held: Mapping[str, Any], arrays: Sequence[Any]) -> list[Any]:
    """Move arrays that are on other devices to those of the arrays that a job holds."""
    at = next((x.sharding for x in held.values()), None)
    if at is None:
        return list(arrays)
    where = NamedSharding(at.mesh, PartitionSpec()) if isinstance(at, NamedSharding) else at
    is_elsewhere = lambda x: (
        isinstance(x, jax.Array) and x.committed and x.sharding.device_set != at.device_set
    )
    return [jax.device_put(x, where) if is_elsewhere(x) else x for x in arrays]
