"""Choice of the rule that merges the trainers' values of an output, such as "mean" or "concat".

With `batch="local"`, each trainer computes its own loss, batch statistics and other outputs, but a
job returns one value. With local steps, all state must be merged, too. If the user chose a rule
(`Batch.merge`), it is used. Other rules are inferred from two traces: the step of one trainer, and
the step on the full batch. Results that are larger in the second trace grow with the batch, and are
concatenated. An analysis of the equations finds values that depend on rows of the batch, or only on
the number of rows. If no rule can be inferred, the transform raises an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from dtrans._jax import Atom, JaxprEqn, Literal, Var
from dtrans.batch.exact_step import full_type
from dtrans.data_parallel.options import Options
from dtrans.errors import ConfigError
from dtrans.ir.dataflow import propagate
from dtrans.ir.fingerprint import canonical_text
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import Program
from dtrans.ir.pytree import is_under
from dtrans.step.halves import DividedStep


def check_merge(name: str, way: str, t: Any, *, is_state: bool, options: Options) -> None:
    """Raise ConfigError if a merge rule cannot merge an output.

    Args:
      name: the name of the output.
      way: the rule, such as "mean" or "concat".
      t: the type of the output.
      is_state: True if the output is a parameter or optimizer state.
      options: the options of the data-parallel strategy.
    """
    if is_state and way in ("concat", "each"):
        raise ConfigError(
            f"merge[{name!r}]={way!r}: {name} is state, which must be equal on every "
            f"{options.noun}; write 'mean', 'sum' or 'max'"
        )
    if way == "each" and options.micro_steps > 1:
        raise ConfigError(
            f"merge[{name!r}]='each' needs one value for each {options.noun}, but a {options.noun} "
            f"has {options.micro_steps} values, one for each micro-step; write "
            f"merge={{{name!r}: 'mean'}}, or 'sum', 'max', 'concat' or 'same' instead of 'mean' "
            "('same' returns the value of the last micro-step)"
        )
    if name == options.batch.example_count and way != "sum":
        raise ConfigError(
            f"merge[{name!r}]={way!r}: example_count is always summed; leave this rule out, or "
            "write 'sum'"
        )
    if way == "concat" and not t.ndim:
        raise ConfigError(
            f"merge[{name!r}]='concat': the result is {t.str_short()}, which has no dimension 0; "
            "write 'each'"
        )
    number, flag = jnp.issubdtype(t.dtype, jnp.number), jnp.issubdtype(t.dtype, jnp.bool_)
    ordered = flag or (number and not jnp.issubdtype(t.dtype, jnp.complexfloating))
    fits = {"mean": jnp.issubdtype(t.dtype, jnp.inexact), "sum": number, "max": ordered}
    if not fits.get(way, True):
        others = [w for w, fit in fits.items() if fit]
        if not is_state:
            others.append("same" if options.micro_steps > 1 else "each")
        choices = " or ".join(map(repr, others or ["same"]))
        raise ConfigError(f"merge[{name!r}]={way!r}: {name} is {t.str_short()}; write {choices}")


def infer_merges(step: DividedStep, options: Options, count_remedy: str = "") -> dict[str, str]:
    """Choose the rule that merges each output over trainers.

    The outputs are results of the step, and parameters that trainers update locally (batch
    statistics).

    Args:
      step: the step of one trainer.
      options: the options of the data-parallel strategy.
      count_remedy: advice for the user, for an error: a count in the state has no default rule. If
        empty, the advice is to choose a rule with `merge`.

    Returns:
      A rule by output name, such as {"loss": "mean"}.

    Raises:
      ConfigError: no rule can be inferred, or the user's rule cannot merge the output.
    """
    local_state = _local_state(step, options)
    names = (*step.results, *local_state)
    if options.trainers * options.micro_steps == 1:
        found = dict.fromkeys(names, "same")
        for n in names:
            if options.batch.merge.get(n) == "each":
                found[n] = "each"
        if options.batch.example_count is not None:
            found[options.batch.example_count] = "sum"
        return found
    rules = _MergeRules(step, options, local_state, count_remedy)
    return {n: rules.infer(n) for n in names}


class _MergeRules:
    """Inference of merge rules from two traces: with one trainer's rows, and with all rows.

    Args:
      step: the step of one trainer.
      options: the options of the data-parallel strategy.
      local_state: the state that trainers update locally.
      count_remedy: advice for an error, as for `infer_merges`.
    """

    def __init__(
        self, step: DividedStep, options: Options, local_state: Sequence[str], count_remedy: str
    ) -> None:
        self.step, self.options = step, options
        self.local_state, self.count_remedy = local_state, count_remedy
        self.parts = options.trainers * options.micro_steps
        self.outs: Mapping[str, Atom] = step.program.outvars
        self.batch_values = _find_batch_values(step, options)
        self.full_step = self._trace_full_step()
        self.row_counts = {}
        if self.full_step is not None:
            self.row_counts = _find_row_counts(step, self.full_step)

    def _trace_full_step(self) -> Program | None:
        """Trace the step on the full batch; return None if no merge rule depends on this trace."""
        may_grow = []
        is_needed = False
        for n in (*self.step.results, *self.local_state):
            if n in self.options.batch.merge or n == self.options.batch.example_count:
                continue
            out = self.outs[n]
            is_array = n in self.step.results and self.step.program.outputs[n].ndim > 0
            if is_array or isinstance(out, Literal):
                may_grow.append(n)
            # a value that depends on no row may still depend on the number of rows
            is_needed |= isinstance(out, Var) and not self.batch_values.get(out)
        if not may_grow and not is_needed:
            return None
        return _trace_full_batch(self.step, self.options, self.parts, may_grow)

    def infer(self, name: str) -> str:
        """Return the rule that merges an output over trainers, such as "mean".

        Raises:
          ConfigError: no rule can be inferred, or the user's rule cannot merge the output.
        """
        t, out = self.step.program.outputs[name], self.outs[name]
        if name in self.options.batch.merge:
            return self._check_user_rule(name, self.options.batch.merge[name])
        if name == self.options.batch.example_count:
            return "sum"
        if self.full_step is not None and self.full_step.outputs[name].shape != t.shape:
            return self._check_growth(name, self.full_step.outputs[name])
        if isinstance(out, Literal):
            full = None if self.full_step is None else self.full_step.outvars[name]
            return _constant_way(name, out, full, self.parts, self.options.noun)
        if self.batch_values.get(out):
            return self._merge_batch_value(name)
        if self.row_counts.get(out):
            self._refuse_row_count(name)
        return "same"

    def _check_user_rule(self, name: str, way: str) -> str:
        """Check the user's merge rule for an output, and return the rule.

        Raises:
          ConfigError: the rule is "same" for state that differs between trainers.
        """
        noun, out = self.options.noun, self.outs[name]
        differs = isinstance(out, Var) and self.batch_values.get(out)
        if name in self.local_state and way == "same" and differs:
            raise ConfigError(
                f"merge[{name!r}]='same': the value depends on a {noun}'s part of the batch, but "
                f"every {noun} must have the same state; write 'mean', 'sum' or 'max'"
            )
        return way

    def _check_growth(self, name: str, full: Any) -> str:
        """Return the rule "concat" for a result with one entry for each row of the batch.

        Raises:
          ConfigError: the result does not grow along its first dimension.
        """
        t = self.step.program.outputs[name]
        if full.shape != (self.parts * t.shape[0], *t.shape[1:]):
            raise ConfigError(
                f"{name} is {t.str_short()} on a {self.options.noun}'s part and {full.str_short()} "
                "on the full batch, but the two shapes may only differ in dim 0; choose a rule to "
                f"merge the parts, such as merge={{{name!r}: 'sum'}} or merge={{{name!r}: 'each'}}"
            )
        return "concat"

    def _merge_batch_value(self, name: str) -> str:
        """Return the merge rule of an output that depends on the contents of rows.

        Raises:
          ConfigError: the output is an integer, and only the user knows its rule.
        """
        options, t = self.options, self.step.program.outputs[name]
        if jnp.issubdtype(t.dtype, jnp.inexact):
            return (options.reduce.op or "mean") if name in self.step.results else "mean"
        # an integer may be a count, a sum or a flag, so only the user knows how to merge it
        if name in self.local_state:
            remedy = f"write merge={{{name!r}: 'sum'}} or merge={{{name!r}: 'max'}}"
            raise ConfigError(
                f"{name} is {t.str_short()}, and each {options.noun} computes a different value "
                "from its part of the batch; integers and booleans have no default merge: "
                f"{self.count_remedy or remedy}"
            )
        if options.micro_steps > 1:
            raise ConfigError(
                f"{name} is {t.str_short()}, and has {options.micro_steps} values, one for each "
                "micro-step; integers and booleans have no default merge, so write "
                f"merge={{{name!r}: 'sum'}}, or 'max' or 'same' instead of 'sum' ('same' returns "
                "the value of the last micro-step)"
            )
        return "each"

    def _refuse_row_count(self, name: str) -> NoReturn:
        t = self.step.program.outputs[name]
        remedy = self.count_remedy if name in self.local_state else ""
        remedy = remedy or f"write merge={{{name!r}: 'sum'}} or merge={{{name!r}: 'max'}}"
        raise ConfigError(
            f"{name} ({t.str_short()}) depends on the number of rows in a {self.options.noun}'s "
            f"part of the batch, but not on the contents of rows; {remedy}"
        )


def _local_state(step: DividedStep, options: Options) -> list[str]:
    """Return the state that each trainer updates from its rows, such as batch statistics."""
    return [n for n in mergeable_state(step, options) if not _is_unchanged(step.program, n)]


def mergeable_state(step: DividedStep, options: Options) -> Sequence[str]:
    """Return the state arrays for which a user may choose merge rules.

    With local steps (`local_sgd`), these are all state arrays. Otherwise, they are the parameters
    that the optimizer does not update, such as batch statistics.
    """
    if options.local_sgd is not None:
        return (*step.params, *step.opt_state)
    return step.frozen


def _trace_full_batch(
    step: DividedStep, options: Options, parts: int, may_grow: Sequence[str]
) -> Program | None:
    """Trace the step of one trainer again, with the number of rows of the full batch.

    Args:
      step: the step of one trainer.
      options: the options of the data-parallel strategy.
      parts: the number of parts into which the full batch is split.
      may_grow: names of outputs that may grow with the batch. Their merge rules depend on the new
        trace.

    Returns:
      The new trace. None if batch arrays have different numbers of rows, and `may_grow` is empty:
        such a step cannot be traced on the full batch.

    Raises:
      ConfigError: batch arrays have different numbers of rows, and `may_grow` contains outputs.
    """
    types = step.program.inputs
    split = [
        n for n in step.batch if types[n].ndim and not is_under(n, options.batch.unsplit_inputs)
    ]
    rows = {types[n].shape[0]: n for n in split}
    if len(rows) > 1:
        if not may_grow:
            return None
        listed = " and ".join(f"{n} has {count}" for count, n in rows.items())
        raise ConfigError(
            f"the shape of {', '.join(may_grow)} may depend on the size of the batch. Arrays of "
            f"the batch are split over the {options.noun}s on dimension 0, but {listed} rows; pass "
            f"unsplit_inputs=(...) with the arrays that every {options.noun} needs in full"
        )
    full_types = []
    for n, t in types.items():
        axis = 0 if n in split else None
        full_types.append(full_type(t, axis, parts))
    return step.program.specialize_flat(full_types)


def _find_row_counts(step: DividedStep, full_step: Program) -> dict[Var, int]:
    """Find the values of a step that depend on the number of rows, but not on the contents of rows.

    The function compares each equation of a trainer's step with the same equation of the full step.
    A constant such as `len(x)` differs. If the two steps have different equations, the result is
    empty. The result maps each found variable to 1.
    """
    here, there = step.program.eqns, inline_calls(full_step.jaxpr).jaxpr.eqns
    if len(here) != len(there):
        return {}
    seeds: dict[Var, int] = {}
    for x, y in zip(here, there, strict=True):
        if x.primitive != y.primitive:
            return {}
        if _differ(x, y):
            seeds |= dict.fromkeys(x.outvars, 1)
    return propagate(here, seeds, dict.fromkeys(step.boundary.values(), 0))


def _differ(x: JaxprEqn, y: JaxprEqn) -> bool:
    """Return True if two equations of one primitive differ in constants or parameters."""
    for a, b in zip(x.invars, y.invars, strict=True):
        if isinstance(a, Literal) and isinstance(b, Literal) and not np.array_equal(a.val, b.val):
            return True
    if x.params.keys() == y.params.keys() and all(x.params[k] is y.params[k] for k in x.params):
        return False
    return canonical_text(x.params) != canonical_text(y.params)


def _find_batch_values(step: DividedStep, options: Options) -> dict[Var, int]:
    """Find the values that depend on a trainer's rows; the result maps their variables to 1."""
    program = step.program
    inner = program.inner
    ins = program.invars
    outs = program.outvars
    if options.local_sgd is None:
        # stop at gradients, since reduced gradients are equal on all trainers
        stops = dict.fromkeys(step.boundary.values(), 0)
        return propagate(inner.eqns, {ins[n]: 1 for n in step.batch}, stops)
    names = set(step.batch)
    state = {n: a for n in (*step.params, *step.opt_state) if isinstance(a := outs[n], Var)}
    # a local step reads the state that the previous step has returned, so repeat until no state is
    # added
    while True:
        found = propagate(inner.eqns, {ins[n]: 1 for n in names}, {})
        more = {n for n, a in state.items() if found.get(a)}
        if more <= names:
            return found
        names |= more


def _constant_way(name: str, here: Literal, there: Atom | None, parts: int, noun: str) -> str:
    """Return the merge rule of an output that is a constant in both traces.

    For example, a number of rows is 4 on one of two trainers and 8 on the full batch. The rule is
    then "sum".

    Args:
      name: the name of the output.
      here: its value with one trainer's rows.
      there: its value with all rows.
      parts: the number of parts of the batch.
      noun: the word for a trainer in errors.
    """
    if not isinstance(there, Literal) or np.array_equal(here.val, there.val):
        return "same"
    if np.array_equal(parts * np.asarray(here.val), there.val):
        return "sum"
    raise ConfigError(
        f"{name} is {here.val} on a {noun}'s part and {there.val} on the full batch; write "
        f"merge={{{name!r}: 'same'}}, 'sum', 'max' or 'each'"
    )


def _is_unchanged(program: Program, name: str) -> bool:
    ins = program.invars
    outs = program.outvars
    return outs[name] is ins[name]
