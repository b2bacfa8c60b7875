"""Trace of a function to a program: names by pytree paths, and roles of equations.

Results are paired with arguments by structure and shapes: the part of a result that is the new
value of an argument gets its name.
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
    opened,
    plain_jaxpr,
    plain_type,
    scope_of,
    within_mesh,
)
from dtrans.errors import TraceError
from dtrans.ir.batched_gathers import batched_gathers
from dtrans.ir.program import BACKWARD, FORWARD, OPTIMIZE, Program
from dtrans.ir.pytree import NUMBERS, Static, TreeSpec, as_array, is_array, unflatten_all
from dtrans.step.capture import captures, capturing
from dtrans.step.scopes import numbered


def trace(fn: Callable[..., Any], *args: Any, name: str | None = None) -> Program:
    """Trace `fn` to a `Program`.

    Inputs are named after the parameters of `fn` and the pytree paths below them. The function is
    one of (params, opt_state, *batch). The first part of its result with the structure and shapes
    of `params` gets the names of `params`. The same is done for `opt_state`. A dict is matched by
    key. The remainder of a tuple is named `loss` (a scalar), `aux`, or by its position, `out2`.

    Args:
      fn: a pure function of pytrees of arrays. Leaves that are not arrays are static.
      *args: example arguments: arrays or `jax.ShapeDtypeStruct`; nothing is computed.
      name: name of the program; the name of the function by default.

    Raises:
      TraceError: the function returns a value that has neither arrays nor structure.

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
    specs = tuple(TreeSpec.from_tree(a, root) for a, root in zip(args, roots, strict=True))
    result: list[Any] = []
    mesh = current_mesh()  # the function may name its axes

    def on_arrays(*arrays: Any) -> list[Any]:
        outputs = fn(*unflatten_all(specs, arrays))
        result.append((outputs, out := _with_arrays(outputs, args)))
        return [x for x in jax.tree.leaves(out) if is_array(x)]

    flat = [x for spec, arg in zip(specs, args, strict=True) for x in spec.flatten(arg)]
    with numbered():
        jaxpr = plain_jaxpr(lowered_jaxpr(on_arrays, *map(plain_type, flat)))
    with within_mesh(None):
        jaxpr = batched_gathers(jaxpr)
    counting = _with_counts(args, result[-1][0])
    if counting is not None:
        return trace(fn, *counting, name=name)
    out, ambiguous_outputs = name_result(result[-1][1], args, roots)
    leaves = zip(out.leaves, jax.tree.leaves(result[-1][0]), strict=True)
    numbers = {n: x for n, x in leaves if isinstance(n, str) and isinstance(x, NUMBERS)}
    called = name or getattr(fn, "__name__", type(fn).__name__).strip("<>")
    return Program(
        called,
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
    """Specializer of a traced program: the function, and the structure of its arguments.

    It can be pickled if the function can, and traces the same program in another process.

    Attributes:
      fn, name: as those of `trace`.
      args: structure of each argument.
      mesh: mesh whose axes the function may name.
      captures: True if losses stay undifferentiated (`dtrans.step.capture`).
    """

    fn: Callable[..., Any]
    args: tuple[TreeSpec, ...]
    name: str | None
    mesh: Any
    captures: bool = False

    def __call__(self, types: Sequence[jax.ShapeDtypeStruct]) -> Program:
        """Trace the function with inputs of these types."""
        with within_mesh(self.mesh), capturing(self.captures):
            return trace(self.fn, *unflatten_all(self.args, types), name=self.name)


def argument_names(fn: Callable[..., Any], count: int) -> tuple[str, ...]:
    """Return the names of the first `count` positional parameters; `batch/0`, ... for `*batch`."""
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
            f"{getattr(fn, '__name__', fn)} takes {len(names)} positional arguments, {count} were "
            "given"
        )
    return tuple(names[:count])


def guess_roles(jaxpr: ClosedJaxpr) -> tuple[str, ...]:
    """Return roles by name stack: `transpose(...)` is backward, equations that read it optimize.

    The cut (`dtrans.step.cut`) replaces them by exact roles.
    """
    after: set[Var] = set()
    roles = []
    for eqn in opened(jaxpr).eqns:
        fed = any(isinstance(a, Var) and a in after for a in eqn.invars)
        role = BACKWARD if "transpose(" in scope_of(eqn) else OPTIMIZE if fed else FORWARD
        if role != FORWARD:
            after.update(eqn.outvars)
        roles.append(role)
    return tuple(roles)


def name_result(out: Any, args: Sequence[Any], roots: Sequence[str]) -> tuple[TreeSpec, str]:
    """Name the parts of a result (see `trace`); the second value says why names are ambiguous,
    if so."""
    parts = children(out)
    if args and not jax.tree_util.treedef_is_leaf(jax.tree.structure(out)) and _alike(out, args[0]):
        return TreeSpec.from_tree(out, roots[0]), ""
    if parts is None:
        return TreeSpec.from_tree(out, "out"), ""
    by_key = not isinstance(out, (tuple, list)) or hasattr(out, "_fields")
    owner: dict[Any, str] = {}
    places: list[Any] = []
    free = list(range(min(2, len(args)))) if not by_key else []
    for key, part in parts:
        if by_key:
            owner[key] = str(key)
        elif match := [i for i in free if _alike(part, args[i])]:
            owner[key] = roots[match[0]]
            free.remove(match[0])
            places.append(key)
    ambiguous_outputs = ""
    # if parts of the state are in an unusual order, nothing else may look like the parameters
    if places not in ([], [0], [0, 1]):
        of_state = [a for a in args[:2] if jax.tree.leaves(a)]
        like = []
        for key, part in parts:
            if any(_alike(part, a) for a in of_state):
                like.append(key)
        if len(like) > len([p for p in places if p in like]):
            ambiguous_outputs = (
                f"parts {', '.join(map(str, like))} of its result all have the "
                "structure of "
                "its state"
            )
    unused = ["loss", "aux"] if owner else []
    for key, part in parts:
        if key not in owner:
            single = getattr(part, "shape", None) == ()
            name = unused[0] if unused and (single or unused[0] != "loss") else ""
            owner[key] = unused.pop(0) if name else f"out{key}"
    leaves: list[str | Any] = []
    for key, part in parts:
        leaves += TreeSpec.from_tree(part, owner[key]).leaves
    return TreeSpec(jax.tree.structure(out), tuple(leaves)), ambiguous_outputs


def children(tree: Any) -> list[tuple[Any, Any]] | None:
    """Return the parts of a result with their keys, in leaf order; None for an array or an
    opaque node."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree, strict=True))
    if isinstance(tree, (tuple, list)):
        return list(enumerate(tree))
    if isinstance(tree, dict):
        return sorted(tree.items())
    return None


def _parts_of(out: Any, args: Sequence[Any]) -> list[Any]:
    """Return the parts of a result that may each be the new value of an argument, in leaf order."""
    parts = children(out)
    structure: Any = jax.tree.structure(out)
    alone = parts is None or (args and structure == jax.tree.structure(args[0]))
    return [out] if alone else [part for _, part in parts or ()]


def _with_arrays(out: Any, args: Sequence[Any]) -> Any:
    """Replace Python numbers in a result by arrays, except static numbers of the state."""
    leaves: list[Any] = []
    for part in _parts_of(out, args):
        handed_on = any(_alike(part, a) for a in args[:2])
        leaves += jax.tree.leaves(part if handed_on else jax.tree.map(as_array, part))
    return jax.tree.unflatten(jax.tree.structure(out), leaves)


def _with_counts(args: Sequence[Any], out: Any) -> tuple[Any, ...] | None:
    """Replace Python numbers that the step increments by arrays; None if there are none.

    A flax `TrainState` begins with `step=0`: a number that changes is data, one that does not is
    part of the program.
    """
    found = list(args)
    for i, arg in enumerate(args[:2]):
        structure: Any = jax.tree.structure(arg)
        leaves = jax.tree.leaves(arg)
        for part in _parts_of(out, args):
            new, of_part = jax.tree.flatten(part)
            if of_part == structure:
                leaves = [
                    as_array(a) if isinstance(a, NUMBERS) and not Static(a).same(b) else a
                    for a, b in zip(leaves, new, strict=True)
                ]
        if any(
            is_array(a) and not is_array(b)
            for a, b in zip(leaves, jax.tree.leaves(arg), strict=True)
        ):
            found[i] = jax.tree.unflatten(structure, leaves)
    return tuple(found) if any(a is not b for a, b in zip(found, args, strict=True)) else None


def _alike(tree: Any, other: Any) -> bool:
    """Return True if two pytrees have the same structure and shapes."""
    structures: list[Any] = [jax.tree.structure(t) for t in (tree, other)]
    if structures[0] != structures[1]:
        return False
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)

    def same(a: Any, b: Any) -> bool:
        number = isinstance(a, NUMBERS) or isinstance(b, NUMBERS)
        return (
            Static(a).same(b) if number else getattr(a, "shape", None) == getattr(b, "shape", None)
        )

    return all(same(a, b) for a, b in pairs)
