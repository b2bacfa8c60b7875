"""Startup programs: that there is one, and which of what init makes is which of what the step
takes.

What init returns is told apart by its keys (`params`, `opt_state`, or what the step calls them) or,
in a tuple, by the paths and types of its leaves: never by position alone, which would take momentum
for weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dtrans._jax import opened
from dtrans.errors import ConfigError, TraceError
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import FORWARD, Program
from dtrans.ir.pytree import Static, TreeSpec
from dtrans.step.cut import Cut
from dtrans.step.frozen import hands_on_what_is_still
from dtrans.step.one_state import has_one_state, in_two_parts, leaf_types, startup_in_two_parts
from dtrans.step.trace import children


def of_two_parts(main: Any, startup: Any, *, slices_still: bool = False) -> tuple[Program, Program]:
    """A traced step and a traced init; of a step of one state, both in two parts
    (`dtrans.step.one_state`).

    What the step holds still, although it writes an update for it, it hands on
    (`dtrans.step.frozen`).

    Args:
      slices_still: leave it as it is: ranks hold slices of what is updated, and all of what is
        handed on.

    Raises:
      ConfigError: something else.
      GradientError, TraceError: as `dtrans.step.one_state` says.
    """
    for name, program in (("main", main), ("startup", startup)):
        if not isinstance(program, Program):
            raise ConfigError(
                f"{name} must be a Program (dtrans.trace(fn, *args)), it is "
                f"{type(program).__name__}"
            )
    startup = with_numbers(startup, main.args[:2])
    if has_one_state(main, startup):
        main = in_two_parts(main)
        startup = startup_in_two_parts(main, startup)
    if len(main.args) < 2 or slices_still:
        return main, startup
    return hands_on_what_is_still(main, startup), startup


def with_numbers(startup: Program, state: Sequence[TreeSpec]) -> Program:
    """What makes a state, with those of its numbers held still that the step holds still.

    An Equinox module has numbers among its leaves, as the rate of a dropout: init returns them, and
    they are data where the step counts them.
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
    """The startup program with its outputs named as the step's state, and its calls inlined.

    Raises:
      TraceError: it makes something else; the message names the first leaf that differs.
    """
    state = step.program.args[:2]
    wanted = [leaf_types(_typed(spec, step.program.inputs)) for spec in state]
    names = [spec.names for spec in state]
    result = _typed(startup.out, startup.outputs)
    parts = children(result) or []
    made = {key: leaf_types(part) for key, part in parts}
    roots = [
        spec.root or default for spec, default in zip(state, ("params", "opt_state"), strict=True)
    ]
    if len(parts) != 2:
        order: list[Any] = []
    elif set(made) == set(roots):
        order = roots
    elif set(made) == {"params", "opt_state"}:
        order = ["params", "opt_state"]
    else:
        keys = list(made)
        order = next((o for o in (keys, keys[::-1]) if [made[k] for k in o] == wanted), keys)
    if not order or [made[k] for k in order] != wanted:
        if leaf_types(result) == wanted[0]:
            reason = f"it returns {roots[0]} alone, expected ({roots[0]}, {roots[1]})"
        else:
            reason = _mismatch(order, made, wanted, roots)
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
    roles = (FORWARD,) * len(opened(jaxpr).eqns)
    return dataclasses.replace(startup, jaxpr=jaxpr, out=out, roles=roles, specializer=None)


def _typed(spec: TreeSpec, types: Mapping[str, Any]) -> Any:
    """The pytree of a spec, with types for arrays."""
    return spec.unflatten([types[n] for n in spec.names])


def _mismatch(
    order: Sequence[Any],
    made: Mapping[Any, Mapping[str, str]],
    wanted: Sequence[Mapping[str, str]],
    roots: Sequence[str],
) -> str:
    """The first thing in which a startup program differs from the step."""
    if not order:
        return f"it returns {len(made) or 'no'} values, expected ({', '.join(roots)})"
    for key, want, root in zip(order, wanted, roots, strict=True):
        have = made[key]
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
