"""Startup programs: pairing of init's outputs with the state that the step takes.

Outputs are paired by their keys (`params`, `opt_state`, or the step's names) or, in a tuple, by the
paths and types of their leaves. Positions alone would mistake momentum for weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dtrans.errors import ConfigError, TraceError
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import Program
from dtrans.ir.pytree import Static, TreeSpec
from dtrans.ir.selection import values_at
from dtrans.step.cut import Cut
from dtrans.step.frozen import drop_frozen_updates
from dtrans.step.one_state import is_train_state_step, leaf_types, split_startup, split_step
from dtrans.step.trace import children


def normalize_step(
    main: Any, startup: Any, *, keep_frozen_updates: bool = False
) -> tuple[Program, Program]:
    """Return a traced step and init with separate parameters and optimizer state.

    A step of one state is split (`dtrans.step.one_state`). Updates that never change their leaf are
    dropped (`dtrans.step.frozen`).

    Args:
      main: the traced step.
      startup: the traced init.
      keep_frozen_updates: True to leave frozen leaves in the update, so that ranks store slices of
        them.

    Raises:
      ConfigError: arguments that are not programs.
      GradientError, TraceError: as `dtrans.step.one_state`.
    """
    for name, program in (("main", main), ("startup", startup)):
        if not isinstance(program, Program):
            raise ConfigError(
                f"{name} must be a Program (dtrans.trace(fn, *args)), it is "
                f"{type(program).__name__}"
            )
    startup = with_numbers(startup, main.args[:2])
    if is_train_state_step(main, startup):
        main = split_step(main)
        startup = split_startup(main, startup)
    if len(main.args) < 2 or keep_frozen_updates:
        return main, startup
    return drop_frozen_updates(main, startup), startup


def with_numbers(startup: Program, state: Sequence[TreeSpec]) -> Program:
    """Return an init program in which numbers are static where the step has them static.

    An Equinox module has numbers among its leaves, such as the rate of a dropout. init returns
    them; they are data only if the step counts them.
    """
    below = lambda n: n.partition("/")[2]
    data = {below(n) for spec in state for n in spec.names} - {""}
    still = {n for n in startup.numbers if data.isdisjoint((n, below(n)))}
    if not still:
        return startup
    leaves = tuple(Static(startup.numbers[x]) if x in still else x for x in startup.out.leaves)
    out = TreeSpec(startup.out.treedef, leaves)
    return startup.returning(out, out.names, numbers={})


def match_startup(step: Cut, startup: Program) -> Program:
    """Return the startup program with outputs named as the step's state, and its calls inlined.

    Raises:
      TraceError: it returns something else; the message names the first leaf that differs.
    """
    state = step.program.args[:2]
    wanted = [leaf_types(_typed(spec, step.program.inputs)) for spec in state]
    names = [spec.names for spec in state]
    result = _typed(startup.out, startup.outputs)
    parts = children(result) or []
    types_by_key = {key: leaf_types(part) for key, part in parts}
    roots = [
        spec.root or default for spec, default in zip(state, ("params", "opt_state"), strict=True)
    ]
    if len(parts) != 2:
        order: list[Any] = []
    elif set(types_by_key) == set(roots):
        order = roots
    elif set(types_by_key) == {"params", "opt_state"}:
        order = ["params", "opt_state"]
    else:
        keys, found = list(types_by_key), list(types_by_key.values())
        is_reversed = found == wanted[::-1] and found != wanted
        order = keys[::-1] if is_reversed else keys
    if not order or values_at(types_by_key, order) != wanted:
        if leaf_types(result) == wanted[0]:
            reason = f"it returns {roots[0]} alone, expected ({roots[0]}, {roots[1]})"
        else:
            reason = _mismatch(order, types_by_key, wanted, roots)
        raise TraceError(
            f"the startup program {startup.name} does not make what {step.program.name} takes: "
            f"{reason}; "
            "startup must be dtrans.trace(init, ...) with init(...) -> (params, opt_state), where "
            "opt_state is "
            "tx.init(params)"
        )
    flat = [n for key, _ in parts for n in names[order.index(key)]]
    jaxpr = inline_calls(startup.jaxpr)
    out = TreeSpec(startup.out.treedef, _renamed(startup.out, flat))
    return startup.with_jaxpr(jaxpr, out=out)


def _typed(spec: TreeSpec, types: Mapping[str, Any]) -> Any:
    """Return the pytree of a spec, with types for arrays."""
    return spec.unflatten_named(types)


def _mismatch(
    order: Sequence[Any],
    types_by_key: Mapping[Any, Mapping[str, str]],
    wanted: Sequence[Mapping[str, str]],
    roots: Sequence[str],
) -> str:
    """Describe the first difference between a startup program and the step."""
    if not order:
        return f"it returns {len(types_by_key) or 'no'} values, expected ({', '.join(roots)})"
    for key, want, root in zip(order, wanted, roots, strict=True):
        have = types_by_key[key]
        for path in [*want, *have]:
            if have.get(path) != want.get(path):
                name = root if path == "value" else f"{root}/{path}"
                return (
                    f"{name} is made as {have.get(path, 'nothing')}, and taken as "
                    f"{want.get(path, 'nothing')}"
                )
    raise AssertionError("no difference")


def _renamed(spec: TreeSpec, names: Sequence[str]) -> tuple[Any, ...]:
    it = iter(names)
    return tuple(next(it) if isinstance(leaf, str) else leaf for leaf in spec.leaves)
