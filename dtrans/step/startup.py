"""Match the values that `init` (the startup program) returns with the state arguments of the step.

A user passes two traced functions, the step and `init`. Strategies must know which output of init
is which state array. If init returns a dict, its keys decide (`params`, `opt_state`, or the step's
names). If init returns a tuple, the paths and types of the leaves decide, so that init may also
return (opt_state, params). Shapes alone cannot decide: momentum has the shapes of weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dtrans.errors import ConfigError, TraceError
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import Program
from dtrans.ir.pytree import Static, TreeSpec
from dtrans.ir.selection import values_at
from dtrans.step.frozen import drop_frozen_updates
from dtrans.step.one_state import (
    below_root,
    first_difference,
    is_train_state_step,
    leaf_types,
    mismatch,
    split_startup,
    split_step,
)
from dtrans.step.trace import children


def normalize_step(
    main: Any, startup: Any, *, keep_frozen_updates: bool = False
) -> tuple[Program, Program]:
    """Convert a user's step and init to the form (params, opt_state), which all transforms expect.

    A step of one state is split (`dtrans.step.one_state`). Updates that never change their
    parameter are dropped (`dtrans.step.frozen`).

    Args:
      main: the traced step.
      startup: the traced init.
      keep_frozen_updates: True to keep updates that never change their parameter: `dtrans.sharding`
        slices only parameters that have an update.

    Raises:
      ConfigError: an argument is not a `Program`.
      GradientError: the state of the step has no parameter.
      TraceError: init does not return the state of the step.
    """
    for name, program in (("main", main), ("startup", startup)):
        if not isinstance(program, Program):
            raise ConfigError(
                f"{name} is a {type(program).__name__}; expected a Program, which "
                "dtrans.trace(fn, *args) returns"
            )
    startup = with_numbers(startup, main.args[:2])
    if is_train_state_step(main, startup):
        main = split_step(main)
        startup = split_startup(main, startup)
    if len(main.args) < 2 or keep_frozen_updates:
        return main, startup
    return drop_frozen_updates(main, startup), startup


def with_numbers(startup: Program, state: Sequence[TreeSpec]) -> Program:
    """Remove Python numbers from init's outputs, if the step treats these numbers as constants.

    An Equinox module has Python numbers among its leaves, such as the rate of a dropout. Such a
    number is part of the compiled program. A number that the step changes, such as a count of
    steps, is an array instead.

    Args:
      startup: the startup program.
      state: structures of the step's state, which name its arrays.
    """
    data: set[str] = set()
    for spec in state:
        data.update(map(below_root, spec.names))
    data.discard("")
    static = {n for n in startup.numbers if data.isdisjoint((n, below_root(n)))}
    if not static:
        return startup
    leaves = list(startup.out.leaves)
    for i, leaf in enumerate(leaves):
        if leaf in static:
            leaves[i] = Static(startup.numbers[leaf])
    out = TreeSpec(startup.out.treedef, tuple(leaves))
    return startup.returning(out, out.names, numbers={})


def match_startup(step: Program, startup: Program) -> Program:
    """Rename the outputs of init to the names of the step's state; also inline the calls of init.

    Args:
      step: the step of (params, opt_state, *batch).
      startup: the traced init.

    Raises:
      TraceError: init does not return the state of the step; the message names the first leaf that
        differs.
    """
    params, opt_state = step.args[:2]
    wanted = []
    for spec in (params, opt_state):
        wanted.append(leaf_types(spec.unflatten_named(step.inputs)))
    result = startup.out.unflatten_named(startup.outputs)
    parts = children(result) or []
    types_by_key = {key: leaf_types(part) for key, part in parts}
    roots = [params.root or "params", opt_state.root or "opt_state"]
    if len(parts) != 2:
        order: list[Any] = []
    elif set(types_by_key) == set(roots):
        order = roots
    elif set(types_by_key) == {"params", "opt_state"}:
        order = ["params", "opt_state"]
    else:
        order, found = list(types_by_key), list(types_by_key.values())
        if found == wanted[::-1] and found != wanted:
            order.reverse()
    if not order or values_at(types_by_key, order) != wanted:
        if leaf_types(result) == wanted[0]:
            reason = f"it returns {roots[0]} alone, expected ({roots[0]}, {roots[1]})"
        else:
            reason = _mismatch(order, types_by_key, wanted, roots)
        raise TraceError(
            f"the startup program {startup.name} does not return the state of "
            f"{step.name}: {reason}; startup must be dtrans.trace(init, ...) with "
            "init(...) -> (params, opt_state), where opt_state is tx.init(params)"
        )
    names: list[str] = []
    for key, _ in parts:
        names += (params, opt_state)[order.index(key)].names
    jaxpr = inline_calls(startup.jaxpr)
    out = TreeSpec(startup.out.treedef, _renamed(startup.out, names))
    return startup.with_jaxpr(jaxpr, out=out)


def _mismatch(
    order: Sequence[Any],
    types_by_key: Mapping[Any, Mapping[str, str]],
    wanted: Sequence[Mapping[str, str]],
    roots: Sequence[str],
) -> str:
    """Describe the first difference between init's result and the step's state, for an error.

    Args:
      order: the keys of params and of opt_state in init's result; empty if the result does not have
        two parts.
      types_by_key: for each part, maps the path of each leaf to its type.
      wanted: for params and for opt_state, maps the path of each leaf to its type.
      roots: names of the step's first two arguments.
    """
    if not order:
        return f"it returns {len(types_by_key) or 'no'} values, expected ({', '.join(roots)})"
    for key, want, root in zip(order, wanted, roots, strict=True):
        have = types_by_key[key]
        path = first_difference(want, have)
        if path is not None:
            name = root if path == "value" else f"{root}/{path}"
            return mismatch(name, want.get(path), have.get(path))
    raise AssertionError("no difference")


def _renamed(spec: TreeSpec, names: Sequence[str]) -> tuple[Any, ...]:
    """Return the leaves of a `TreeSpec` with new names for its arrays."""
    remaining = iter(names)
    leaves = list(spec.leaves)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, str):
            leaves[i] = next(remaining)
    return tuple(leaves)
