"""Tracing of a Python function to a `Program`: equations with named inputs and outputs.

Names of inputs come from the function's parameters and pytree paths, such as `params/w`. If a part
of the result has the structure and shapes of the argument `params`, this part is the new `params`.
Its leaves get the argument's names. The same holds for `opt_state`. Each equation gets a role
(forward, backward or optimize), which its name stack determines.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dtrans._jax import (
    ClosedJaxpr,
    Var,
    current_mesh,
    lowered_jaxpr,
    named_in_errors,
    opened,
    plain_jaxpr,
    plain_type,
    scope_of,
    within_mesh,
)
from dtrans.errors import TraceError
from dtrans.ir.batched_gathers import batched_gathers
from dtrans.ir.dataflow import variables
from dtrans.ir.program import BACKWARD, FORWARD, OPTIMIZE, Program
from dtrans.ir.pytree import (
    NUMBERS,
    Static,
    TreeSpec,
    array_leaves,
    as_array,
    is_array,
    unflatten_all,
)
from dtrans.step.capture import captures, capturing
from dtrans.step.scopes import numbered


def trace(fn: Callable[..., Any], *args: Any, name: str | None = None) -> Program:
    """Trace a training step or an init function to a `Program`, which the transforms take.

    Nothing is computed; JAX only records the equations. Inputs are named after the parameters of
    `fn` and the pytree paths below them, such as `params/w`. Outputs are named by these rules:

    - If `fn` returns a dict, the keys are the names.
    - If `fn` returns a tuple, its first part with the structure and shapes of the argument `params`
      is the new `params`. This part gets the names of the argument. The same holds for the second
      argument, `opt_state`.
    - The first scalar after them is named `loss`, the next value `aux`, and further values by their
      position, `out4`.

    Args:
      fn: a pure function of (params, opt_state, *batch), which are pytrees of arrays. Leaves that
        are not arrays are static.
      *args: example arguments: arrays or `jax.ShapeDtypeStruct`; nothing is computed.
      name: name of the program; the name of the function by default.

    Raises:
      TraceError: `fn` has too few positional parameters, or returns a leaf that is not an array.

    Example:
      >>> import jax, jax.numpy as jnp, dtrans
      >>> def step(params, opt_state, x):
      ...     g = jax.grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
      ...     return jax.tree.map(lambda p, g: p - 0.1 * g, params, g), opt_state
      >>> p = dtrans.trace(step, {"w": jax.ShapeDtypeStruct((3,), "float32")}, (), jnp.ones((4, 3)))
      >>> p.in_names, p.out_names, p.state
      (('params/w', 'x'), ('params/w',), ('params/w',))
    """
    args = tuple(as_array(a) for a in args)
    roots = argument_names(fn, len(args))
    specs = tuple(TreeSpec.from_tree(arg, root) for arg, root in zip(args, roots, strict=True))
    result: list[Any] = []
    mesh = current_mesh()  # `fn` may name axes of the user's mesh

    def on_trees(*trees: Any) -> list[Any]:
        outputs = fn(*unflatten_all(specs, jax.tree.leaves(trees)))
        result.append((outputs, out := _with_arrays(outputs, args)))
        return array_leaves(out)

    trees = []
    for spec, root, arg in zip(specs, roots, args, strict=True):
        trees.append(spec.by_path(root, map(plain_type, spec.flatten(arg))))
    with numbered():
        jaxpr = plain_jaxpr(lowered_jaxpr(named_in_errors(on_trees, fn), *trees))
    with within_mesh(None):
        jaxpr = batched_gathers(jaxpr)
    counting = _with_counts(args, result[-1][0])
    if counting is not None:
        return trace(fn, *counting, name=name)
    out, ambiguous_outputs = name_result(result[-1][1], args, roots)
    numbers = {}
    for leaf, x in zip(out.leaves, jax.tree.leaves(result[-1][0]), strict=True):
        if isinstance(leaf, str) and isinstance(x, NUMBERS):
            numbers[leaf] = x
    return Program(
        name or getattr(fn, "__name__", type(fn).__name__).strip("<>"),
        jaxpr,
        specs,
        out,
        guess_roles(jaxpr),
        specializer=TracedFunction(fn, specs, name, mesh, captures()),
        ambiguous_outputs=ambiguous_outputs,
        numbers=numbers,
        guessed=True,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class TracedFunction:
    """Function that a program was traced from; a call traces it again for other shapes.

    Strategies need traces for other batch sizes. If `fn` can be pickled, this object can be
    pickled, and traces the program in another process.

    Attributes:
      fn: the traced function.
      args: structure of each argument.
      name: name of the program; None for the name of the function.
      mesh: mesh with the axes that the function may name.
      captures: True to trace the loss as one equation (`dtrans.step.capture`).
    """

    fn: Callable[..., Any]
    args: tuple[TreeSpec, ...]
    name: str | None
    mesh: Any
    captures: bool = False

    def __call__(self, types: Sequence[jax.ShapeDtypeStruct]) -> Program:
        """Trace the function again, with inputs of other shapes.

        Args:
          types: types of all arrays among the arguments, in order.
        """
        with within_mesh(self.mesh), capturing(self.captures):
            return trace(self.fn, *unflatten_all(self.args, types), name=self.name)


def argument_names(fn: Callable[..., Any], count: int) -> tuple[str, ...]:
    """Return the names of a function's first `count` positional parameters.

    The entries of `*batch` are named `batch/0`, `batch/1` and so on.

    Raises:
      TraceError: the function has fewer positional parameters.
    """
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return tuple(f"arg{i}" for i in range(count))
    names: list[str] = []
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            names += [f"{p.name}/{i}" for i in range(count - len(names))]
        elif p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
    if len(names) < count:
        raise TraceError(
            f"{getattr(fn, '__name__', fn)} has {len(names)} positional "
            f"parameter{'s' * (len(names) != 1)}; dtrans.trace was called with {count} "
            f"argument{'s' * (count != 1)} for it"
        )
    return tuple(names[:count])


def guess_roles(jaxpr: ClosedJaxpr) -> tuple[str, ...]:
    """Guess the role of each equation (forward, backward or optimize) from its name stack.

    Equations under `transpose(...)` are backward, equations that depend on them are optimize, and
    the rest is forward. `dtrans.step.halves` later replaces the guess by exact roles.
    """
    after: set[Var] = set()
    roles = []
    for eqn in opened(jaxpr).eqns:
        if "transpose(" in scope_of(eqn):
            role = BACKWARD
        elif after.isdisjoint(variables(eqn.invars)):
            role = FORWARD
        else:
            role = OPTIMIZE
        if role != FORWARD:
            after.update(eqn.outvars)
        roles.append(role)
    return tuple(roles)


def name_result(out: Any, args: Sequence[Any], roots: Sequence[str]) -> tuple[TreeSpec, str]:
    """Name the arrays that a traced function returns, by the rules of `trace`.

    Args:
      out: the function's result.
      args: the function's arguments.
      roots: names of the arguments.

    Returns:
      A pair (structure with the names, reason). `reason` is a text if the names are ambiguous, else
      "".
    """
    parts = children(out)
    if (
        args
        and not jax.tree_util.treedef_is_leaf(jax.tree.structure(out))
        and _have_same_shapes(out, args[0])
    ):
        return TreeSpec.from_tree(out, roots[0]), ""
    if parts is None:
        return TreeSpec.from_tree(out, "out"), ""
    by_key = not isinstance(out, (tuple, list)) or hasattr(out, "_fields")
    owner: dict[Any, str] = {}
    state_keys: list[Any] = []
    free = list(range(min(2, len(args))))
    for key, part in parts:
        if by_key:
            owner[key] = str(key)
            continue
        match = [i for i in free if _have_same_shapes(part, args[i])]
        if match:
            owner[key] = roots[match[0]]
            free.remove(match[0])
            state_keys.append(key)
    ambiguous_outputs = ""
    # The state may be in an unusual order. Then no other part may have the structure of the state,
    # since it would be unknown which part is the state.
    if state_keys not in ([], [0], [0, 1]):
        of_state = [a for a in args[:2] if jax.tree.leaves(a)]
        like = []
        for key, part in parts:
            if any(_have_same_shapes(part, a) for a in of_state):
                like.append(key)
        if not set(like) <= set(state_keys):
            ambiguous_outputs = (
                f"parts {', '.join(map(str, like))} of its result all have the structure of its "
                "state"
            )
    unused = ["loss", "aux"] if owner else []
    for key, part in parts:
        if key in owner:
            continue
        is_scalar = getattr(part, "shape", None) == ()
        if unused and (is_scalar or unused[0] != "loss"):
            owner[key] = unused.pop(0)
        else:
            owner[key] = f"out{key}"
    leaves: list[str | Any] = []
    for key, part in parts:
        leaves += TreeSpec.from_tree(part, owner[key]).leaves
    return TreeSpec(jax.tree.structure(out), tuple(leaves)), ambiguous_outputs


def children(tree: Any) -> list[tuple[Any, Any]] | None:
    """Return the parts of a tuple, list or dict as (key, part) pairs; None for other objects."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree, strict=True))
    if isinstance(tree, (tuple, list)):
        return list(enumerate(tree))
    if isinstance(tree, dict):
        return sorted(tree.items())
    return None


def _parts_of(out: Any, args: Sequence[Any]) -> list[Any]:
    """Return the parts of a result that may be the new `params` or the new `opt_state`."""
    parts = children(out)
    structure: Any = jax.tree.structure(out)
    if parts is None or (args and structure == jax.tree.structure(args[0])):
        return [out]
    return [part for _, part in parts]


def _with_arrays(out: Any, args: Sequence[Any]) -> Any:
    """Replace Python numbers among a function's results by arrays, except in its new state."""
    leaves: list[Any] = []
    for part in _parts_of(out, args):
        is_state = any(_have_same_shapes(part, a) for a in args[:2])
        leaves += jax.tree.leaves(part if is_state else jax.tree.map(as_array, part))
    return jax.tree.unflatten(jax.tree.structure(out), leaves)


def _with_counts(args: Sequence[Any], out: Any) -> tuple[Any, ...] | None:
    """Replace Python numbers in the state, such as `step=0`, by arrays if the step changes them.

    A flax `TrainState` starts with `step=0`, and the step returns `step + 1`. A Python number would
    be a constant of the trace. Numbers that the step does not change stay static.

    Args:
      args: the arguments of the step.
      out: the results of the step.

    Returns:
      The new arguments; None if the step changes no Python number.
    """
    found = list(args)
    changed: set[int] = set()
    for i, arg in enumerate(args[:2]):
        structure: Any = jax.tree.structure(arg)
        leaves = jax.tree.leaves(arg)
        for part in _parts_of(out, args):
            if structure != jax.tree.structure(part):
                continue
            for k, (before, after) in enumerate(zip(leaves, jax.tree.leaves(part), strict=True)):
                if _is_number(before) and not Static(before).same(after):
                    leaves[k] = as_array(before)
                    changed.add(i)
        if i in changed:
            found[i] = jax.tree.unflatten(structure, leaves)
    return tuple(found) if changed else None


def _have_same_shapes(tree: Any, other: Any) -> bool:
    """Return True if two pytrees have the same structure and shapes."""
    structure: Any = jax.tree.structure(tree)
    if structure != jax.tree.structure(other):
        return False
    return all(map(_are_same_leaves, jax.tree.leaves(tree), jax.tree.leaves(other)))


def _are_same_leaves(a: Any, b: Any) -> bool:
    """Return True if two leaves are arrays of one shape, or equal Python numbers."""
    if _is_number(a) or _is_number(b):
        return Static(a).same(b)
    return bool(getattr(a, "shape", None) == getattr(b, "shape", None))


def _is_number(x: Any) -> bool:
    """Return True for a Python number; a `numpy.float64` counts as an array."""
    return isinstance(x, NUMBERS) and not is_array(x)
