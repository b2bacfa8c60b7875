"""Steps of one state: their leaves are split into parameters and optimizer state.

    step      state, *batch                 ->  state, ...
    becomes   params, opt_state, *batch     ->  params, opt_state, ...

Examples are a flax `TrainState`, an nnx or Equinox model with its optimizer, or a dict of models.
Dataflow decides the kind of each leaf, not its name:

    parameter    forward reads it, and its own gradient enters its new value
    constant     the step returns it unchanged; parameters and optimizers have such
    statistics   the batch enters its new value, but no gradient (running means), or a count of
                 rows that no other state reads
    key          a typed random key, which the step splits
    follower     forward reads it, but its new value reads a new parameter: a teacher, say
    optimizer    everything else: moments, counts, averages of parameters that only evaluation reads

The last kind, and constants that only updates read, are `opt_state` of the split step: the state's
own structure, with None for other leaves. The rest is `params`.
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
from dtrans.ir.dataflow import backward_slice, bits_of, propagate, variables, variables_read
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import Program
from dtrans.ir.pytree import TreeSpec, as_array, combine, is_array, unused_name
from dtrans.ir.selection import number_items, values_at
from dtrans.step.gradients import OpenStep, candidates_for, counts_rows, crossing, marked
from dtrans.step.trace import children


PARAMETER, CONSTANT, STATISTICS, KEY = "parameter", "constant", "statistics", "key"
FOLLOWER, OPTIMIZER = "follower", "optimizer"


def is_train_state_step(program: Program, startup: Program | None) -> bool:
    """Return True if a step takes and returns one state, its first argument.

    A result may look like a batch array, as that of an autoencoder does: `startup` decides, and
    without one the answer is False. But a second argument with a leaf that the step changes and the
    loss does not read is optimizer state, which `startup` forgot.
    """
    outs, first = set(program.out_names), program.args[0].names if program.args else ()
    if not first or not outs.issuperset(first):
        return False
    second = program.args[1].names if len(program.args) > 1 else None
    if second is None or (second and not outs.issuperset(second)):
        return True
    if not second or startup is None:  # an optimizer without state
        return False
    types = program.args[0].unflatten_named(program.inputs)
    returned = startup.out.unflatten_named(startup.outputs)
    if leaf_types(types) != leaf_types(returned):
        return False
    step = OpenStep(program, inline_calls(program.jaxpr))
    gradients = marked(step)
    read = _read_by_forward(step, gradients.of.values() if gradients else crossing(step), second)
    return all(n in read or step.outs[n] is step.vars[n] for n in second)


def split_step(program: Program) -> Program:
    """Return a step of one state as a step of (params, opt_state, *batch).

    Raises:
      GradientError: none of its leaves is a parameter; the message lists their kinds.
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
    params = {n for n, kind in kinds.items() if kind != OPTIMIZER}
    return program.rewritten(lambda other: _split_program(other, params))


def split_spec(spec: TreeSpec, names: Collection[str]) -> tuple[TreeSpec, TreeSpec]:
    """Split the spec of a state into two specs of its structure.

    The first has the leaves with these names, and all leaves that are no arrays; the second has the
    others. Each has None in place of the other's leaves.
    """
    leaves = spec.leaves
    first = [leaf if leaf in names or not isinstance(leaf, str) else None for leaf in leaves]
    second = [leaf if isinstance(leaf, str) and leaf not in names else None for leaf in leaves]
    return _spec(jax.tree.unflatten(spec.treedef, first)), _spec(
        jax.tree.unflatten(spec.treedef, second)
    )


def _split_program(program: Program, params: Collection[str]) -> Program:
    state, *batch = program.args
    args = (*split_spec(state, params), *batch)
    place = number_items(program.in_names)
    order = [place[n] for spec in args for n in spec.names]
    out = _result(program, args[:2])
    outputs = dict(program.outvars)
    inner = program.inner
    outputs |= {unused_name(f"new_{n}", place): v for n, v in outputs.items() if n in place}
    invars = values_at(inner.invars, order)
    jaxpr = closed_with(program.jaxpr, invars=invars, outvars=values_at(outputs, out.names))
    return dataclasses.replace(program, jaxpr=jaxpr, args=args, out=out, takes_one_state=True)


def _result(program: Program, parts: Sequence[TreeSpec]) -> TreeSpec:
    """Return the result spec of the split step: both parts, then the other results."""
    names = program.args[0].names
    result = jax.tree.unflatten(program.out.treedef, program.out.leaves)
    both = [jax.tree.unflatten(spec.treedef, spec.leaves) for spec in parts]
    if program.out.names == names:
        return _spec((*both,))
    known = set(program.in_names)
    # a result may look like an input without being its new value
    called = lambda leaf: unused_name(f"new_{leaf}", known) if leaf in known else leaf
    found = children(result) or []
    rest = {key: jax.tree.map(called, part) for key, part in found if _spec(part).names != names}
    if isinstance(result, dict):
        return _spec({"params": both[0], "opt_state": both[1], **rest})
    return _spec((*both, *rest.values()))


def _spec(tree: Any) -> TreeSpec:
    leaves, treedef = jax.tree.flatten(tree)
    return TreeSpec(treedef, tuple(leaves))


# -- kinds of leaves -------------------------------------------------------------------------------


def kinds_of(step: OpenStep) -> dict[str, str]:
    """Return the kind of each leaf of the first argument."""
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
        bits = bits_of(enters, out)
        if name in parameters:
            return PARAMETER
        if out is v:
            return OPTIMIZER if name not in read and v in used else CONSTANT
        if bits == by_batch or (not bits and name not in read and counts_rows(step, v, out)):
            return STATISTICS
        if bits and name in read:
            return FOLLOWER
        return KEY if jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) and not bits else OPTIMIZER

    used = set(variables_read(step.eqns))
    return {n: kind(n) for n in names}


def _read_by_forward(step: OpenStep, gradients: Collection[Var], names: Sequence[str]) -> set[str]:
    """Return the inputs whose original values enter differentiated equations."""
    new: list[Atom] = [step.outs[n] for n in names if step.outs[n] is not step.vars[n]]
    fixed = dict.fromkeys([*gradients, *variables(new)], 0)
    enters = propagate(step.eqns, {step.vars[n]: 1 << i for i, n in enumerate(names)}, fixed)
    bits = 0
    for eqn, derived in zip(step.eqns, step.derived, strict=True):
        if derived or "jvp(" in scope_of(eqn):
            bits |= bits_of(enters, *eqn.invars)
    return {n for i, n in enumerate(names) if bits >> i & 1}


def _parameters(step: OpenStep, gradients: Collection[Var], read: Collection[str]) -> set[str]:
    """Return the leaves that forward reads, and whose new value reads a gradient directly."""
    floating = [
        n for n in step.params if n in read and jnp.issubdtype(step.vars[n].aval.dtype, jnp.inexact)
    ]
    moving = [n for n in floating if step.outs[n] is not step.vars[n]]
    graded = [n for n in moving if candidates_for(step, n, gradients)]
    new = {a for n in graded if isinstance(a := step.outs[n], Var)}
    return {n for n in graded if candidates_for(step, n, gradients, stop=new - {step.outs[n]})}


def _state_behind(main: Program) -> str:
    """Return advice for a step with state after its batch arguments, or an empty text."""
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


def split_startup(main: Program, startup: Program) -> Program:
    """Return the init of one state as an init of its two parts.

    Raises:
      TraceError: it returns something else.
    """
    params, opt_state = main.args[:2]
    state = combine(params.unflatten_named(main.inputs), opt_state.unflatten_named(main.inputs))
    returned = startup.out.unflatten_named(startup.outputs)
    wanted, have = (leaf_types(tree) for tree in (state, returned))
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
    name_of = dict(zip(_state_spec(main).names, startup.out_names, strict=True))
    parts = []
    for spec in main.args[:2]:
        leaves = [name_of[x] if isinstance(x, str) else x for x in spec.leaves]
        parts.append(jax.tree.unflatten(spec.treedef, leaves))
    out = _spec(tuple(parts))
    return startup.returning(out, out.names)


def leaf_types(tree: Any) -> dict[str, str]:
    """Return the type of each array of a pytree, by its path below the root."""
    arrays = [x for x in jax.tree.leaves(tree) if is_array(x)]
    return {
        n: f"{x.dtype}{list(x.shape)}"
        for n, x in zip(TreeSpec.from_tree(tree).names, arrays, strict=True)
    }


# -- states and functions of them ------------------------------------------------------------------


def merge_state(main: Program, params: Any, opt_state: Any) -> Any:
    """Merge parameters and optimizer state into the state that a step takes: one pytree, or a
    pair."""
    return combine(params, opt_state) if main.takes_one_state else (params, opt_state)


def split_state(main: Program, state: Any) -> tuple[Any, Any]:
    """Split the state that a step takes; the inverse of `merge_state`.

    Raises:
      TraceError: another structure.
    """
    if not main.takes_one_state:
        if not isinstance(state, tuple) or len(state) != 2:
            raise TraceError(
                f"the state of {main.name} is a pair, (params, opt_state), not "
                f"{type(state).__name__}"
            )
        return state[0], state[1]
    spec_of_state = _state_spec(main)
    leaves, structure = jax.tree.flatten(state)
    if structure == spec_of_state.treedef:  # a count may be a Python number
        counts = [
            as_array(x) if isinstance(of, str) else x
            for of, x in zip(spec_of_state.leaves, leaves, strict=True)
        ]
        state = jax.tree.unflatten(structure, counts)
    found = dict(zip(spec_of_state.names, spec_of_state.flatten(state, "the state"), strict=True))
    params, opt_state = main.args[:2]
    return params.unflatten_named(found), opt_state.unflatten_named(found)


def _state_spec(main: Program) -> TreeSpec:
    """Return the spec of the one state of a split step."""
    parts = [jax.tree.unflatten(spec.treedef, spec.leaves) for spec in main.args[:2]]
    return _spec(combine(*parts))


class Applied:
    """Function of a step's state, or of its parameters, that gets only the leaves it reads.

    Args:
      main: the step.
      fn: `fn(state, *args)` for a step of one state, `fn(params, *args)` for others.
      unpacked: maps leaves of the job to those of one device; it is traced.
    """

    def __init__(
        self,
        main: Program,
        fn: Callable[..., Any],
        unpacked: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    ) -> None:
        self._spec = _state_spec(main) if main.takes_one_state else main.args[0]
        self._types = [
            jax.ShapeDtypeStruct(main.inputs[n].shape, main.inputs[n].dtype)
            for n in self._spec.names
        ]
        self._fn, self._unpacked = weakref.ref(fn), unpacked
        self._known: dict[Any, tuple[tuple[str, ...], Callable[..., list[Any]], Any]] = {}

    def __call__(self, leaves: Callable[[Collection[str]], Mapping[str, Any]], *args: Any) -> Any:
        """Return the function's result; `leaves` returns the job's leaves of the given names."""
        flat, structure = jax.tree.flatten(args)
        flat = [plain_array(x) if is_array(x) else jnp.asarray(x) for x in flat]
        key = structure, tuple(str(jax.typeof(x)) for x in flat)
        if key not in self._known:
            self._known[key] = self._compiled(flat, structure)
        names, run, result = self._known[key]
        arrays = leaves(names)
        return jax.tree.unflatten(result, run(arrays, _move_to_job(arrays, flat)))

    def _compiled(
        self, flat: Sequence[Any], structure: Any
    ) -> tuple[tuple[str, ...], Callable[..., list[Any]], Any]:
        """Return the names that the function reads, the compiled function, and its result's
        structure."""
        fn = self._fn()
        assert fn is not None
        result: list[Any] = []

        def on_arrays(*arrays: Any) -> list[Any]:
            state, rest = arrays[: len(self._types)], arrays[len(self._types) :]
            outputs, tree = jax.tree.flatten(
                fn(self._spec.unflatten(state), *jax.tree.unflatten(structure, rest))
            )
            result.append(tree)
            return outputs

        traced = inline_calls(
            plain_jaxpr(lowered_jaxpr(on_arrays, *self._types, *map(plain_type, flat)))
        )
        inner = opened(traced)
        _, read = backward_slice(inner.eqns, inner.outvars)
        names = tuple(n for n, v in zip(self._spec.names, inner.invars, strict=False) if v in read)
        state_vars = [v for v in inner.invars[: len(self._types)] if v in read]
        invars = [*state_vars, *inner.invars[len(self._types) :]]
        run = jaxpr_as_fun(closed_with(traced, invars=invars))

        def of_leaves(leaves: Mapping[str, Any], flat: Sequence[Any]) -> list[Any]:
            found = self._unpacked(leaves)
            return [*run(*values_at(found, names), *flat)]

        return names, jax.jit(of_leaves), result[-1]


def _move_to_job(arrays_of_job: Mapping[str, Any], arrays: Sequence[Any]) -> list[Any]:
    """Move arrays from other devices to those of the job's arrays."""
    at = next((x.sharding for x in arrays_of_job.values()), None)
    if at is None:
        return list(arrays)
    where = NamedSharding(at.mesh, PartitionSpec()) if isinstance(at, NamedSharding) else at
    is_elsewhere = lambda x: (
        isinstance(x, jax.Array) and x.committed and x.sharding.device_set != at.device_set
    )
    return [jax.device_put(x, where) if is_elsewhere(x) else x for x in arrays]
