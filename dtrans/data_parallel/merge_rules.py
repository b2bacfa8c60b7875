"""Merge of each trainer's outputs: results, batch statistics, and after local steps all state.

The user's `merge` comes first. Other results are merged as tracing shows. The step is traced a
second time on the batch of all trainers: a dimension that is larger there grows with the batch. A
pass over the equations finds values that depend on the part of the batch, and values that depend on
its number of rows only. A result without a known merge is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dtrans._jax import Atom, JaxprEqn, Literal, Var
from dtrans.batch.exact_step import full_type
from dtrans.data_parallel.options import Options
from dtrans.errors import ConfigError
from dtrans.ir.dataflow import propagate
from dtrans.ir.display import without_addresses
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import Program
from dtrans.ir.pytree import is_under
from dtrans.step.cut import Cut


def check_merge(name: str, way: str, t: Any, *, is_state: bool, o: Options) -> None:
    """Refuse a way to merge something of this type."""
    if is_state and way in ("concat", "each"):
        raise ConfigError(
            f"merge[{name!r}]={way!r}: every {o.noun} has the same state; 'mean', 'sum' and 'max' "
            "keep it so"
        )
    if way == "each" and o.micro_steps > 1:
        raise ConfigError(
            f"merge[{name!r}]='each': a {o.noun} makes it in each of {o.micro_steps} micro-steps; "
            "say 'mean', "
            "'sum', 'max', 'concat', or 'same' (the last one)"
        )
    if name == o.batch.example_count and way != "sum":
        raise ConfigError(
            f"merge[{name!r}]={way!r}: it is example_count, which is added up; leave it out, or "
            "say 'sum'"
        )
    if way == "concat" and not t.ndim:
        raise ConfigError(
            f"merge[{name!r}]='concat': it is {t.str_short()}, which has no dim 0; say 'each'"
        )
    number, flag = jnp.issubdtype(t.dtype, jnp.number), jnp.issubdtype(t.dtype, jnp.bool_)
    ordered = flag or (number and not jnp.issubdtype(t.dtype, jnp.complexfloating))
    fits = {"mean": jnp.issubdtype(t.dtype, jnp.inexact), "sum": number, "max": ordered}
    if not fits.get(way, True):
        others = [w for w, fit in fits.items() if fit] + (
            [] if is_state else ["same" if o.micro_steps > 1 else "each"]
        )
        said = " or ".join(map(repr, others or ["same"]))
        raise ConfigError(f"merge[{name!r}]={way!r}: it is {t.str_short()}; say {said}")


def merges_of(step: Cut, o: Options, of_counts: str = "") -> dict[str, str]:
    """Return the way to merge each result, and each parameter that trainers compute."""
    program = step.program
    made_here = _made_by_trainers(step, o)
    parts = o.trainers * o.micro_steps
    if parts == 1:
        found = {
            n: "each" if o.batch.merge.get(n) == "each" else "same"
            for n in (*step.results, *made_here)
        }
        return found if o.batch.example_count is None else found | {o.batch.example_count: "sum"}
    outs = program.outvars
    of_batch = _of_batch(step, o)
    named = [
        n
        for n in (*step.results, *made_here)
        if n not in o.batch.merge and n != o.batch.example_count
    ]
    still = [n for n in named if isinstance(a := outs[n], Var) and not of_batch.get(a)]
    asked = [
        n
        for n in named
        if (program.outputs[n].ndim and n in step.results) or isinstance(outs[n], Literal)
    ]
    whole = _of_all(step, o, parts, asked) if asked or still else None
    full_type: Mapping[str, Any] = {} if whole is None else whole.outputs
    grown_outs: Mapping[str, Atom] = {} if whole is None else whole.outvars
    of_rows = {} if whole is None else _of_rows(step, whole)
    found = {}
    for n in (*step.results, *made_here):
        t, out = program.outputs[n], outs[n]
        if n in o.batch.merge:
            if (
                n in made_here
                and o.batch.merge[n] == "same"
                and isinstance(out, Var)
                and of_batch.get(out)
            ):
                raise ConfigError(
                    f"merge[{n!r}]='same': it is made of a {o.noun}'s part of the batch, and every "
                    f"{o.noun} has the "
                    "same state; say 'mean', 'sum' or 'max'"
                )
            found[n] = o.batch.merge[n]
        elif n == o.batch.example_count:
            found[n] = "sum"
        elif n in full_type and full_type[n].shape != t.shape:
            if full_type[n].shape != (parts * t.shape[0], *t.shape[1:]):
                raise ConfigError(
                    f"{n} is {t.str_short()} on a {o.noun}'s part and {full_type[n].str_short()} on "
                    "the batch of all: "
                    "it cannot be merged; results may grow with the batch on dim 0 only (or say "
                    f"merge={{{n!r}: ...}})"
                )
            found[n] = "concat"
        elif isinstance(out, Literal):
            found[n] = _static(n, out, grown_outs.get(n), parts, o.noun)
        elif not of_batch.get(out):
            if of_rows.get(out):
                remedy = of_counts if n in made_here else ""
                raise ConfigError(
                    f"{n} is {t.str_short()}, and made of how many rows a {o.noun}'s part has, "
                    "whatever is in them: "
                    + (remedy or f"say how to merge it, merge={{{n!r}: 'sum'}} or 'max'")
                )
            found[n] = "same"
        elif jnp.issubdtype(t.dtype, jnp.inexact):
            found[n] = (o.reduce.op or "mean") if n in step.results else "mean"
        elif n in made_here:
            raise ConfigError(
                f"{n} is {t.str_short()} and made of a {o.noun}'s part of the batch: say how to "
                "merge it, "
                f"merge={{{n!r}: 'sum'}} or 'max'"
            )
        elif o.micro_steps > 1:
            raise ConfigError(
                f"{n} is {t.str_short()} and made in each of {o.micro_steps} micro-steps: say how "
                "to merge it, "
                f"merge={{{n!r}: 'sum'}}, 'max' or 'same' (the last one)"
            )
        else:
            found[n] = "each"
    return found


def _made_by_trainers(step: Cut, o: Options) -> list[str]:
    """Return state that trainers change alone: batch statistics; with local steps, all state."""
    state = step.frozen if o.local_sgd is None else (*step.params, *step.opt_state)
    return [n for n in state if not _unchanged(step.program, n)]


def _of_all(step: Cut, o: Options, parts: int, asked: Sequence[str]) -> Program | None:
    """Return the step traced on all trainers' batch; None if that fails and `asked` is empty."""
    program = step.program
    split = [
        n for n in step.batch if program.inputs[n].ndim and not is_under(n, o.batch.unsplit_inputs)
    ]
    rows = {program.inputs[n].shape[0]: n for n in split}
    if len(rows) > 1:
        if not asked:
            return None
        listed = " and ".join(f"{n} has {count}" for count, n in rows.items())
        raise ConfigError(
            f"{', '.join(asked)} may grow with the batch, whose arrays are split over the "
            f"{o.noun}s on dim 0, but "
            f"{listed} rows; name what every {o.noun} needs whole in unsplit_inputs=(...)"
        )
    return program.specialize_flat(
        [full_type(t, 0 if n in split else None, parts) for n, t in program.inputs.items()]
    )


def _of_rows(step: Cut, whole: Program) -> dict[Var, int]:
    """Return the values that depend on the number of rows, whatever the batch contains.

    Equations are compared one by one; where they do not pair, nothing is known.
    """
    here, there = step.program.eqns, inline_calls(whole.jaxpr).jaxpr.eqns
    if [e.primitive for e in here] != [e.primitive for e in there]:
        return {}
    seeds = {v: 1 for x, y in zip(here, there, strict=True) if _told_apart(x, y) for v in x.outvars}
    return propagate(here, seeds, dict.fromkeys(step.boundary.values(), 0))


def _told_apart(x: JaxprEqn, y: JaxprEqn) -> bool:
    """Return True if two equations of one primitive differ in their numbers or parameters."""
    literals = [(a.val, b.val) for a, b in zip(x.invars, y.invars, strict=True)
                if isinstance(a, Literal) and isinstance(b, Literal)]  # fmt: skip
    if not all(np.array_equal(a, b) for a, b in literals):
        return True
    if x.params.keys() == y.params.keys() and all(x.params[k] is y.params[k] for k in x.params):
        return False
    return without_addresses(str(x.params)) != without_addresses(str(y.params))


def _of_batch(step: Cut, o: Options) -> dict[Var, int]:
    """Return the values that differ by trainer, since parts of the batch enter them."""
    program = step.program
    inner = program.inner
    ins = program.invars
    outs = program.outvars
    if o.local_sgd is None:
        # what is made of gradients is made of the reduced ones
        return propagate(
            inner.eqns, {ins[n]: 1 for n in step.batch}, dict.fromkeys(step.boundary.values(), 0)
        )
    names = set(step.batch)
    while True:  # a local step goes on from the state that the one before has made
        found = propagate(inner.eqns, {ins[n]: 1 for n in names}, {})
        more = {
            n
            for n in (*step.params, *step.opt_state)
            if isinstance(a := outs[n], Var) and found.get(a)
        }
        if more <= names:
            return found
        names |= more


def _static(name: str, here: Literal, whole: Atom | None, parts: int, noun: str) -> str:
    """Return the way to merge a constant result, such as the number of rows of the batch."""
    if not isinstance(whole, Literal) or np.array_equal(here.val, whole.val):
        return "same"
    if np.array_equal(parts * np.asarray(here.val), whole.val):
        return "sum"
    raise ConfigError(
        f"{name} is {here.val} on a {noun}'s part and {whole.val} on the batch of all: say how to "
        "merge it, "
        f"merge={{{name!r}: 'same'}}, 'sum', 'max' or 'each'"
    )


def _unchanged(program: Program, name: str) -> bool:
    ins = program.invars
    outs = program.outvars
    return outs[name] is ins[name]
