"""Conversion of a step of one state (a `TrainState`, say) to a step of params and opt_state.

    step      state, *batch                 ->  state, ...
    becomes   params, opt_state, *batch     ->  params, opt_state, ...

Strategies need parameters and optimizer state apart: servers store both, but trainers read only
parameters. The state may be a flax `TrainState`, an nnx or Equinox model with its optimizer, or a
dict of models. So this module assigns a kind to each leaf of the state. The equations that read and
compute the leaf decide its kind, not its name:

    parameter    forward reads the leaf, and the leaf's new value depends on its gradient
    constant     the step returns the leaf unchanged, or adds zeros to it (optax.set_to_zero);
                 forward reads the leaf, or no equation does
    statistics   the new value depends on the batch, but on no gradient: running means, or a count
                 of rows that no other state reads
    key          a typed random key, which the step splits
    follower     forward reads the leaf, and its new value is computed from new parameters: the
                 teacher of a student, say
    optimizer    the rest: moments, counts, averages of parameters that only evaluation reads

In the new step, `opt_state` has the leaves of the kind `optimizer`, and `params` has all other
leaves. Both have the structure of the state, with None in place of missing leaves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import (
    Var,
    closed_with,
    scope_of,
)
from dtrans.errors import GradientError, TraceError
from dtrans.ir.dataflow import bits_of, propagate, variables
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import Program
from dtrans.ir.pytree import TreeSpec, array_leaves, as_array, combine, unused_name
from dtrans.ir.selection import values_at
from dtrans.step.frozen import unchanged_leaves
from dtrans.step.gradients import InlinedStep, candidates_for, counts_rows, crossing, marked
from dtrans.step.trace import children


PARAMETER, CONSTANT, STATISTICS, KEY = "parameter", "constant", "statistics", "key"
FOLLOWER, OPTIMIZER = "follower", "optimizer"


def is_train_state_step(program: Program, startup: Program | None) -> bool:
    """Return True if a step takes one state: `step(state, *batch)`.

    Other steps are `step(params, opt_state, *batch)`.

    The signature of a Python function does not show the difference, so the results decide. A step
    of (state, *batch) returns a new state. If no result is like the second argument, the second
    argument is a batch array.

    If a result is like the second argument, the second argument may still be a batch array: an
    autoencoder returns a value like its input. Then two conditions must hold: `startup` returns
    only the first argument, and the loss reads all leaves of the second argument that the step
    changes.

    Args:
      program: the traced step.
      startup: the traced init; None if it is unknown.
    """
    outs = set(program.out_names)
    if not program.args or not program.args[0].names:
        return False
    if not outs.issuperset(program.args[0].names):
        return False
    second = program.args[1].names if len(program.args) > 1 else None
    if second is None or (second and not outs.issuperset(second)):
        return True
    if not second or startup is None:  # the optimizer has no state, or init is unknown
        return False
    types = program.args[0].unflatten_named(program.inputs)
    returned = startup.out.unflatten_named(startup.outputs)
    if leaf_types(types) != leaf_types(returned):
        return False
    step = InlinedStep(program, inline_calls(program.jaxpr))
    gradients = marked(step)
    read = _read_by_forward(step, gradients.of.values() if gradients else crossing(step), second)
    return all(n in read or step.outs[n] is step.vars[n] for n in second)


def split_step(program: Program) -> Program:
    """Convert a step of one state to a step of (params, opt_state, *batch).

    Raises:
      GradientError: the state has no parameter; the message lists the kinds of the leaves.
    """
    kinds = kinds_of(InlinedStep(program, inline_calls(program.jaxpr)))
    if PARAMETER not in kinds.values():
        found = ", ".join(f"{n} ({kind})" for n, kind in [*kinds.items()][:6])
        more = ", ..." if len(kinds) > 6 else ""
        raise GradientError(
            f"{program.name} is not a training step: no gradient was found. Its state has the "
            f"leaves {found}{more}, but no parameter: a leaf that a loss reads, and that the "
            "derivative of the loss updates. Take gradients with dtrans.value_and_grad in place of "
            "jax.value_and_grad"
        )
    params = {n for n, kind in kinds.items() if kind != OPTIMIZER}
    return program.rewritten(lambda other: _split_program(other, params))


def split_spec(spec: TreeSpec, names: Collection[str]) -> tuple[TreeSpec, TreeSpec]:
    """Split the structure of one state (a `TrainState`) into structures of params and opt_state.

    Both have the form of the full state, with None in place of missing leaves.

    Args:
      spec: the structure of the state.
      names: leaves of the first structure, which also gets all static leaves. The second structure
        gets the remaining leaves.
    """
    first: list[Any] = []
    second: list[Any] = []
    for leaf in spec.leaves:
        is_second = isinstance(leaf, str) and leaf not in names
        first.append(None if is_second else leaf)
        second.append(leaf if is_second else None)
    return (
        _spec(jax.tree.unflatten(spec.treedef, first)),
        _spec(jax.tree.unflatten(spec.treedef, second)),
    )


def _split_program(program: Program, params: Collection[str]) -> Program:
    state, *batch = program.args
    args = (*split_spec(state, params), *batch)
    out = _result(program, args[:2])
    invars: list[Var] = []
    for spec in args:
        invars += values_at(program.invars, spec.names)
    outputs = dict(program.outvars)
    for name, atom in program.outvars.items():
        if name in program.invars:
            outputs[unused_name(f"new_{name}", program.invars)] = atom
    jaxpr = closed_with(program.jaxpr, invars=invars, outvars=values_at(outputs, out.names))
    return dataclasses.replace(program, jaxpr=jaxpr, args=args, out=out, takes_one_state=True)


def _result(program: Program, parts: Sequence[TreeSpec]) -> TreeSpec:
    """Return the result structure of the split step: params, opt_state, then the other results."""
    names = program.args[0].names
    result = jax.tree.unflatten(program.out.treedef, program.out.leaves)
    both = [_tree(spec) for spec in parts]
    if program.out.names == names:
        return _spec((*both,))
    known = set(program.in_names)

    # A result with the type of an input has the input's name, but may not be its new value.
    def rename(leaf: Any) -> Any:
        return unused_name(f"new_{leaf}", known) if leaf in known else leaf

    rest = {}
    for key, part in children(result) or []:
        if _spec(part).names != names:
            rest[key] = jax.tree.map(rename, part)
    if isinstance(result, dict):
        return _spec({"params": both[0], "opt_state": both[1], **rest})
    return _spec((*both, *rest.values()))


def _tree(spec: TreeSpec) -> Any:
    """Return the pytree that a `TreeSpec` describes, with names in place of arrays."""
    return jax.tree.unflatten(spec.treedef, spec.leaves)


def _spec(tree: Any) -> TreeSpec:
    leaves, treedef = jax.tree.flatten(tree)
    return TreeSpec(treedef, tuple(leaves))


# -- kinds of leaves -------------------------------------------------------------------------------


def kinds_of(step: InlinedStep) -> dict[str, str]:
    """Decide for each array of a state if it is a parameter, optimizer state, or another kind.

    The module's docstring lists the kinds.

    Args:
      step: the step of one state, with its calls inlined.

    Returns:
      The kind of each leaf of the step's first argument, by name.
    """
    gradients = marked(step)
    if gradients is not None:
        graded, parameters = set(gradients.of.values()), set(gradients.of)
        read = _read_by_forward(step, graded, step.params)
    else:
        graded = crossing(step)
        read = _read_by_forward(step, graded, step.params)
        parameters = _parameters(step, graded, read)
    by_batch, by_gradient = 1, 2
    seeds: dict[Var, int] = {}
    for spec in step.source.args[1:]:
        seeds |= {step.vars[n]: by_batch for n in spec.names}
    enters = propagate(step.eqns, seeds, dict.fromkeys(graded, by_gradient))
    used: set[Var] = set()
    for eqn in step.eqns:
        used.update(variables(eqn.invars))
    # An update of zeros (optax.set_to_zero) does not make a leaf optimizer state: a clip before it
    # may read the gradient of the leaf.
    unchanged = unchanged_leaves(step)

    def kind(name: str) -> str:
        before, after = step.vars[name], step.outs[name]
        bits = bits_of(enters, after)
        if name in parameters:
            return PARAMETER
        if name in unchanged:
            only_update_reads = name not in read and before in used
            return OPTIMIZER if only_update_reads else CONSTANT
        if bits == by_batch:
            return STATISTICS
        if bits and name in read:
            return FOLLOWER
        if not bits and name not in read and counts_rows(step, before, after):
            return STATISTICS
        is_key = jnp.issubdtype(before.aval.dtype, jax.dtypes.extended)
        return KEY if is_key and not bits else OPTIMIZER

    return {n: kind(n) for n in step.params}


def _read_by_forward(
    step: InlinedStep, gradients: Collection[Var], names: Sequence[str]
) -> set[str]:
    """Return the arrays of the state that the forward or backward pass reads.

    Args:
      step: the training step, with its calls inlined.
      gradients: values at which the search ends, because only the update reads them.
      names: the leaves to check.
    """
    new = variables(values_at(step.outs, step.changed(names)))
    fixed = dict.fromkeys([*gradients, *new], 0)
    enters = propagate(step.eqns, {step.vars[n]: 1 << i for i, n in enumerate(names)}, fixed)
    bits = 0
    for eqn, derived in zip(step.eqns, step.derived, strict=True):
        if derived or "jvp(" in scope_of(eqn):
            bits |= bits_of(enters, *eqn.invars)
    return {n for i, n in enumerate(names) if bits >> i & 1}


def _parameters(step: InlinedStep, gradients: Collection[Var], read: Collection[str]) -> set[str]:
    """Return the arrays of the state that are parameters, in a step without marked gradients.

    The forward pass reads a parameter, and its new value depends on a gradient. A dependency
    through the new value of another parameter does not count.

    Args:
      step: the training step, with its calls inlined.
      gradients: values that may be gradients.
      read: leaves that the forward pass reads.
    """
    graded = []
    for name in step.params:
        before, after = step.vars[name], step.outs[name]
        is_float = jnp.issubdtype(before.aval.dtype, jnp.inexact)
        is_updated = name in read and is_float and after is not before
        if is_updated and candidates_for(step, name, gradients):
            graded.append(name)
    new = set(variables(step.outs[n] for n in graded))
    return {n for n in graded if candidates_for(step, n, gradients, stop=new - {step.outs[n]})}


def _state_behind(main: Program) -> str:
    """Return advice for an error if the step's state is not its first argument; otherwise ""."""
    outs = set(map(below_root, main.out_names)) - {""}
    for i, spec in enumerate(main.args[2:], 1):
        if len(spec.names) > 1 and outs.issuperset(map(below_root, spec.names)):
            return (
                f". {main.name} also returns its argument {i + 1} ({spec.root}); the state must be "
                "the first argument or the first two: step(state, *batch) or "
                "step(params, opt_state, *batch)"
            )
    return ""


def below_root(name: str) -> str:
    """Return the path of an array without the name of its argument: `w` for `params/w`."""
    return name.partition("/")[2]


# -- both programs ---------------------------------------------------------------------------------


def split_startup(main: Program, startup: Program) -> Program:
    """Convert a startup program that returns one state to one that returns (params, opt_state).

    Args:
      main: the split step.
      startup: the startup program, which returns the state.

    Raises:
      TraceError: the result of `startup` does not have the structure of the step's state.
    """
    params, opt_state = main.args[:2]
    state = combine(params.unflatten_named(main.inputs), opt_state.unflatten_named(main.inputs))
    wanted = leaf_types(state)
    have = leaf_types(startup.out.unflatten_named(startup.outputs))
    if wanted != have:
        path = first_difference(wanted, have)
        assert path is not None
        root = main.in_names[0].split("/")[0]
        raise TraceError(
            f"the startup program {startup.name} does not return the state of {main.name}: "
            f"{mismatch(f'{root}/{path}', wanted.get(path), have.get(path))}; startup must be "
            f"dtrans.trace(init, ...) with init(...) -> {root}{_state_behind(main)}"
        )
    name_of = dict(zip(state_spec(main).names, startup.out_names, strict=True))
    parts = []
    for spec in main.args[:2]:
        leaves = [name_of[x] if isinstance(x, str) else x for x in spec.leaves]
        parts.append(jax.tree.unflatten(spec.treedef, leaves))
    out = _spec(tuple(parts))
    return startup.returning(out, out.names)


def first_difference(wanted: Mapping[str, str], have: Mapping[str, str]) -> str | None:
    """Return the first path at which the types of two pytrees differ; None if all are equal.

    Args:
      wanted, have: for each pytree, a dict from the paths of its leaves to their types.
    """
    for path in [*wanted, *have]:
        if wanted.get(path) != have.get(path):
            return path
    return None


def mismatch(name: str, wanted: str | None, have: str | None) -> str:
    """Describe for an error message how a leaf of init's result differs from the step's leaf.

    Args:
      name: name of the leaf.
      wanted: its type in the step; None if the step has no such leaf.
      have: its type in the result of init; None if init does not return it.
    """
    if have is None:
        return f"it does not return {name}, which is {wanted} in the step"
    if wanted is None:
        return f"it returns {name}, which the step does not have"
    return f"it returns {name} as {have}, but the step has {wanted}"


def leaf_types(tree: Any) -> dict[str, str]:
    """Return the type of each array of a pytree, such as {"w": "float32[4, 2]"}.

    The keys are the paths of the arrays in the pytree.
    """
    types = {}
    for name, x in zip(TreeSpec.from_tree(tree).names, array_leaves(tree), strict=True):
        types[name] = f"{x.dtype}{list(x.shape)}"
    return types


# -- states ----------------------------------------------------------------------------------------


def merge_state(main: Program, params: Any, opt_state: Any) -> Any:
    """Combine params and opt_state to the state that the user's step takes.

    For a step of one state, this is one pytree. For other steps, it is the pair (params,
    opt_state).
    """
    return combine(params, opt_state) if main.takes_one_state else (params, opt_state)


def split_state(main: Program, state: Any) -> tuple[Any, Any]:
    """Split a state of the user's step into (params, opt_state); the inverse of `merge_state`.

    Args:
      main: the step; if the user's step takes one state, `split_step` has converted it.
      state: one pytree, or the pair (params, opt_state).

    Raises:
      TraceError: the state has another structure than in the step.
    """
    if not main.takes_one_state:
        if not isinstance(state, tuple) or len(state) != 2:
            raise TraceError(
                f"the state of {main.name} is a {type(state).__name__}; expected a pair "
                "(params, opt_state)"
            )
        return state[0], state[1]
    spec_of_state = state_spec(main)
    leaves, structure = jax.tree.flatten(state)
    if structure == spec_of_state.treedef:
        # The user may pass a Python number in place of an array such as a count of steps.
        for i, leaf in enumerate(spec_of_state.leaves):
            if isinstance(leaf, str):
                leaves[i] = as_array(leaves[i])
        state = jax.tree.unflatten(structure, leaves)
    found = dict(zip(spec_of_state.names, spec_of_state.flatten(state, "the state"), strict=True))
    params, opt_state = main.args[:2]
    return params.unflatten_named(found), opt_state.unflatten_named(found)


def state_spec(main: Program) -> TreeSpec:
    """Return the structure of the user's one state, from a step that `split_step` returned."""
    params, opt_state = main.args[:2]
    return _spec(combine(_tree(params), _tree(opt_state)))
