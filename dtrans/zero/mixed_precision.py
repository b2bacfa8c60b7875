"""Mixed precision: products of matrices in 16 bits, everything else in the types it has.

    dot_general f32 x f32      becomes    convert, dot_general in 16 bits, convert back

Weights that are read by products alone are then read in 16 bits alone: sharding converts slices
before it gathers them, and half the bytes are moved. A change of type is written as near to where a
value begins as it goes: before a transpose, before a loop over layers. Sums, norms, softmax and the
loss stay in 32 bits, the parameters that are updated too. bfloat16 has the range of float32. In
float16 gradients would vanish: the loss is scaled, which is one multiplication of the cotangent
that the backward pass begins with (`dtrans.step.marks`).

Source: the white list of Paddle's AMP pass (auto_parallel_fp16.py, amp_lists.py); Micikevicius et
al., Mixed Precision Training (arXiv 1710.03740).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import (
    CUSTOM_RULES,
    REMAT,
    SCAN,
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    constants,
    facts_of,
    has_bodies,
    is_rearrangement,
    jaxprs_in_params,
    map_bodies,
    opened,
    wiring,
)
from dtrans.data_parallel.options import COMPRESSED
from dtrans.errors import ConfigError, GradientError
from dtrans.ir.array_fns import converted, scalar, times
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.dataflow import propagate
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.ir.interpret import ForwardAnalysis, forward
from dtrans.ir.program import BACKWARD, FORWARD, Program
from dtrans.ir.pytree import TreeSpec
from dtrans.step.cut import Cut, cut
from dtrans.step.marks import SEED
from dtrans.zero.options import LossScaling


SCALE = "loss_scale/scale"
GOOD = "loss_scale/good_steps"
SKIPPED = "loss_scale/skipped_steps"


def scale_types(scaling: LossScaling | None) -> dict[str, Any]:
    """Return the initial state of a dynamic loss scale, by name; empty for a fixed scale."""
    if scaling is None or not scaling.dynamic:
        return {}
    return {
        GOOD: jnp.zeros((), jnp.int32),
        SCALE: jnp.asarray(scaling.initial, jnp.float32),
        SKIPPED: jnp.zeros((), jnp.int32),
    }


def scale_spec() -> TreeSpec:
    """Return the structure of a dynamic scale's state."""
    fields = {n.split("/")[1]: jnp.zeros(()) for n in (GOOD, SCALE, SKIPPED)}
    return TreeSpec.from_tree(fields, "loss_scale")


def scale_of(scaling: LossScaling, inputs: Mapping[str, Var]) -> Atom:
    """By what a loss is scaled: one of the step's inputs, or a number."""
    return inputs[SCALE] if scaling.dynamic else scalar(scaling.initial)


def low_precision(main: Program, step: Cut, amp: str, scaling: LossScaling | None) -> Program:
    """Return the step with its products in 16 bits, and its loss scaled.

    Args:
      main: the step.
      step: the same, cut: it tells an update from what products are lowered in.
      amp: "bf16" or "fp16".
      scaling: how the loss is scaled. A dynamic scale becomes the third argument: see `scale_spec`.

    Raises:
      GradientError: the gradients that are to be scaled cannot be told: the step does not use
        `dtrans.value_and_grad`.
    """
    dtype = COMPRESSED[amp]
    roles = iter(step.program.roles)
    jaxpr = inline_calls(main.jaxpr, keep=(SEED,))
    inner = opened(jaxpr)
    seeds = [e for e in inner.eqns if e.primitive.name == SEED]
    b = Builder(jaxpr)
    b.invars += inner.invars
    scale: Atom | None = None
    if scaling is not None:
        _check_seeds(main, inner.eqns, seeds, scaling)
        if scaling.dynamic:
            held = sum(len(spec.names) for spec in main.args[:2])
            kept = {n: Var(jax.typeof(x)) for n, x in scale_types(scaling).items()}
            b.invars[held:held] = [kept[n] for n in scale_spec().names]
            scale = kept[SCALE]
    params = dict(zip(main.in_names, inner.invars, strict=True))
    w = _Lower(b, dtype, [params[n] for n in main.args[0].names])
    found: list[str] = []
    for eqn in inner.eqns:
        if eqn.primitive.name == SEED:
            if scaling is None:
                w.env[eqn.outvars[0]] = w.read(eqn.invars[0])
            elif scale is None:
                (w.env[eqn.outvars[0]],) = b.call(times(scaling.initial), w.read(eqn.invars[0]))
            else:
                (w.env[eqn.outvars[0]],) = b.call(_scaled, w.read(eqn.invars[0]), scale)
            role = BACKWARD
        else:
            role = next(roles)
            w.emit(eqn, rewrite=role in (FORWARD, BACKWARD))
        found += [role] * (len(b.eqns) - len(found))
    outs = [w.read(a) for a in inner.outvars]
    dynamic = scaling is not None and scaling.dynamic
    args = (*main.args[:2], *([scale_spec()] if dynamic else []), *main.args[2:])
    made = Program(
        main.name,
        b.build(outs),
        args,
        main.out,
        tuple(found),
        {},
        ambiguous_outputs=main.ambiguous_outputs,
    )
    return main.rewritten(lambda other: low_precision(other, cut(other), amp, scaling), result=made)


def low_products(
    jaxpr: ClosedJaxpr, amp: str, params: Sequence[Var]
) -> tuple[ClosedJaxpr, list[int]]:
    """A function that is not differentiated yet, with its products in 16 bits; its derivative has
    them so, too.

    All values keep their names and types. Functions with a derivative of their own stay as they
    are.

    Args:
      jaxpr: the function, its calls inlined.
      amp: "bf16" or "fp16".
      params: inputs that are parameters.

    Returns:
      The function, and for each of its equations the position of the one that it was written for.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.zero.mixed_precision import low_products
      >>> jaxpr = jax.make_jaxpr(lambda w, x: jnp.sin(x @ w))(jnp.ones((2, 2)), jnp.ones((1, 2)))
      >>> made, origin = low_products(jaxpr, "bf16", jaxpr.jaxpr.invars[:1])
      >>> [(e.primitive.name, e.outvars[0].aval.dtype.name) for e in made.jaxpr.eqns][2:], origin
      ([('dot_general', 'bfloat16'), ('convert_element_type', 'float32'), ('sin', 'float32')], [0,
      0, 0, 0, 1])
    """
    inner = opened(jaxpr)
    b = Builder(jaxpr)
    b.invars += inner.invars
    w = _Lower(b, COMPRESSED[amp], params)
    origin: list[int] = []
    for i, eqn in enumerate(inner.eqns):
        w.emit(eqn, rewrite=eqn.primitive.name not in CUSTOM_RULES)
        origin += [i] * (len(b.eqns) - len(origin))
    return b.build(inner.outvars), origin


def _check_seeds(
    main: Program, eqns: Sequence[JaxprEqn], seeds: Sequence[JaxprEqn], scaling: LossScaling
) -> None:
    """Refuse losses that cannot be scaled."""
    if not seeds:
        raise GradientError(
            f"the loss of {main.name} cannot be scaled, since it is not known where its derivative "
            "begins: take "
            "gradients with dtrans.value_and_grad (or dtrans.make_train_step), outside of loops; "
            "or use "
            "precision='bf16', which needs no scale"
        )
    for e in seeds:
        check_scale(scaling, e.outvars[0].aval.dtype, main.name)
    reached = propagate(eqns, {e.outvars[0]: 1 for e in seeds}, {})
    if any(isinstance(a, Var) and reached.get(a) for e in seeds for a in e.invars):
        raise GradientError(
            f"{main.name} takes a derivative of a derivative, and the scale of the one would enter "
            "the other: use "
            "precision='bf16', which needs no scale"
        )


def check_scale(scaling: LossScaling, dtype: Any, name: str) -> None:
    """Refuse a fixed scale that the type of a step's loss does not have."""
    if not scaling.dynamic and scaling.initial > float(jnp.finfo(dtype).max):
        raise ConfigError(
            f"loss_scaling={scaling.initial!r} is infinite in {dtype}, the type of the loss of "
            f"{name}: return the loss "
            "in float32, or take a smaller scale"
        )


class _Lower:
    """Writes equations, with their products in 16 bits.

    Args:
      b: that they are written with.
      dtype: of products.
      params: variables that are parameters, or made of nothing else.
    """

    def __init__(self, b: Builder, dtype: Any, params: Sequence[Var]) -> None:
        self.b = b
        self.dtype = dtype
        self.params = set(params)
        self.env: dict[Var, Atom] = {}
        self._producers: dict[Var, JaxprEqn] = {}
        self._low: dict[Var, Atom] = {}

    def read(self, atom: Atom) -> Atom:
        """Return the value of an atom in the rewritten program."""
        return atom if isinstance(atom, Literal) else self.env.get(atom, atom)

    def emit(self, eqn: JaxprEqn, *, rewrite: bool) -> None:
        """Write an equation."""
        atoms = [self.read(a) for a in eqn.invars]
        if rewrite and facts_of(eqn).flops == "product" and self._is_wide(eqn.outvars[0]):
            self._product(eqn, atoms)
        elif rewrite and any(True for _ in jaxprs_in_params(eqn.params)):
            self._body(eqn, atoms)
        else:
            self.b.keep(eqn, atoms)
        for v in eqn.outvars:
            self._producers[v] = eqn
        known = [a for a in eqn.invars if isinstance(a, Var)]
        if len(eqn.outvars) == 1 and is_rearrangement(eqn) and all(a in self.params for a in known):
            self.params.update(eqn.outvars)

    def _is_wide(self, atom: Atom) -> bool:
        t = atom.aval.dtype
        return bool(jnp.issubdtype(t, jnp.floating)) and jnp.finfo(t).bits > 16

    def _product(self, eqn: JaxprEqn, atoms: Sequence[Atom]) -> None:
        numbers = all(jnp.issubdtype(a.aval.dtype, jnp.floating) for a in atoms)
        # what adds up products of 16 bits in 32 was meant to, and so was an algorithm that somebody
        # named
        if not numbers or not any(map(self._is_wide, atoms)) or _names_algorithm(eqn):
            self.b.keep(eqn, atoms)
            return
        (out,) = eqn.outvars
        start = len(self.b.eqns)
        low = [self.low(a) for a in atoms]
        for k in range(
            start, len(self.b.eqns)
        ):  # in the forward or the backward pass, as what they are for
            self.b.eqns[k] = self.b.eqns[k].replace(source_info=eqn.source_info)
        params = {"preferred_element_type": jnp.dtype(self.dtype)}
        (made,) = self.b.copy(eqn, low, [out.aval.update(dtype=jnp.dtype(self.dtype))], **params)
        self._low[out] = made
        self.b.call(converted(out.aval.dtype), made)
        # under the old name, for those who read it, and where it was, for who asks what made it
        self.b.eqns[-1] = self.b.eqns[-1].replace(outvars=[out], source_info=eqn.source_info)

    def low(self, atom: Atom) -> Atom:
        """Return a value in 16 bits, converted as early as possible."""
        if atom.aval.dtype == self.dtype:
            return atom
        if isinstance(atom, Literal):
            return self.b.call(converted(self.dtype), atom)[0]
        if atom not in self._low:
            eqn = self._producers.get(atom)
            if (
                eqn is not None and is_rearrangement(eqn) and len(eqn.outvars) == 1
            ):  # the cast comes before
                (self._low[atom],) = self.b.copy(
                    eqn,
                    [self.low(self.read(eqn.invars[0]))],
                    [atom.aval.update(dtype=jnp.dtype(self.dtype))],
                )
            elif eqn is not None and _narrows(eqn, self.dtype):
                self._low[atom] = self.read(eqn.invars[0])
            else:
                (self._low[atom],) = self.b.call(converted(self.dtype), atom)
        return self._low[atom]

    # -- loops and branches ----------------------------------------------------------------------

    def _body(self, eqn: JaxprEqn, atoms: Sequence[Atom]) -> None:
        """Rewrite an equation with bodies: products in 16 bits, and parameters that allow it."""
        name = eqn.primitive.name
        operands = list(atoms)

        def lowered(body: Any) -> Any:
            if (
                name == SCAN or name in REMAT
            ):  # which have one body, and its inputs are their operands
                hoist = [k not in wiring(eqn).carried for k in range(len(eqn.invars))]
                known = [isinstance(a, Var) and a in self.params for a in eqn.invars]
            else:
                hoist = known = [False] * len(opened(body).invars)
            made, narrow = _lowered(body, self.dtype, known, hoist)
            if any(narrow):
                operands[:] = [
                    self.low(a) if n else a for a, n in zip(operands, narrow, strict=True)
                ]
            return made

        params = map_bodies(eqn.params, lowered)
        self.b.keep(eqn.replace(params=params), operands)


def _names_algorithm(eqn: JaxprEqn) -> bool:
    """Return True if a product's `precision` names an algorithm, which fixes the types."""
    asked = eqn.params.get("precision")
    each = asked if isinstance(asked, tuple) else (asked,)
    return any(p is not None and not isinstance(p, jax.lax.Precision) for p in each)


def _lowered(
    body: Any, dtype: Any, params: Sequence[bool], hoist: Sequence[bool]
) -> tuple[Any, list[bool]]:
    """Return a body with products in 16 bits, and flags of its inputs that are now in 16 bits."""
    inner = opened(body)
    b = Builder(body)
    b.invars += inner.invars
    w = _Lower(b, dtype, [v for v, is_param in zip(inner.invars, params, strict=True) if is_param])
    for eqn in inner.eqns:
        w.emit(eqn, rewrite=True)
    made: ClosedJaxpr = eliminate_dead(b.build([w.read(a) for a in inner.outvars]))
    new = opened(made)
    narrow = [False] * len(new.invars)
    for k, (v, is_param, may) in enumerate(zip(new.invars, params, hoist, strict=True)):
        read = [e for e in new.eqns if any(a is v for a in e.invars)]
        only = read and all(e.primitive.name == "convert_element_type" for e in read)
        if is_param and may and only and not any(a is v for a in new.outvars):
            narrow[k] = all(e.outvars[0].aval.dtype == dtype for e in read)
    if any(narrow):
        made = _narrowed(made, narrow, dtype)
    if isinstance(body, ClosedJaxpr):
        return made, narrow
    assert not constants(made)
    return opened(made), narrow


def _narrowed(body: ClosedJaxpr, narrow: Sequence[bool], dtype: Any) -> ClosedJaxpr:
    """Return a body that takes some inputs in the type that it casts them to."""
    inner = opened(body)
    b = Builder(body)
    env: dict[Var, Atom] = {}
    for v, is_narrow in zip(inner.invars, narrow, strict=True):
        if is_narrow:
            env[v] = b.input(v.aval.update(dtype=jnp.dtype(dtype)))
        else:
            b.invars.append(v)
    for e in inner.eqns:
        if (
            e.primitive.name == "convert_element_type"
            and isinstance(e.invars[0], Var)
            and e.invars[0] in env
        ):
            env[e.outvars[0]] = env[e.invars[0]]
        else:
            b.keep(e, read_from(env, e.invars))
    return b.build(read_from(env, inner.outvars))


def low_gradients(step: Cut, dtype: Any) -> set[str]:
    """Return the leaves whose gradient is a product in 16 bits, in a wider type perhaps."""

    def rule(eqn: JaxprEqn, ins: Sequence[bool]) -> list[bool] | None:
        keeps = is_rearrangement(eqn) or eqn.primitive.name == "add_any"
        is_low = _narrows(eqn, dtype) or (keeps and all(ins))
        return None if has_bodies(eqn) else [is_low] * len(eqn.outvars)

    low = ForwardAnalysis[bool](operator.and_, rule, default=lambda aval, value: False)
    facts = forward(low, step.program.eqns, {})
    return {n for n, g in step.gradients.items() if facts.of(g)}


def _narrows(eqn: JaxprEqn, dtype: Any) -> bool:
    """Return True if an equation casts from `dtype`, so that a cast back loses nothing."""
    return eqn.primitive.name == "convert_element_type" and bool(eqn.invars[0].aval.dtype == dtype)


# small functions, each traced once for a type


def _scaled(seed: jax.Array, scale: jax.Array) -> jax.Array:
    return seed * scale.astype(seed.dtype)


@functools.cache
def next_scale(s: LossScaling) -> Callable[..., tuple[jax.Array, ...]]:
    """(is every gradient finite, good steps, scale, skipped steps) -> the last three after the
    step."""

    def fn(
        finite: jax.Array, good: jax.Array, scale: jax.Array, skipped: jax.Array
    ) -> tuple[jax.Array, ...]:
        good = jnp.where(finite, good + 1, 0)
        grown = scale * s.factor
        grows = (good >= s.interval) & jnp.isfinite(grown)
        smaller = jnp.maximum(scale / s.factor, 1.0)
        scale = jnp.where(finite, jnp.where(grows, grown, scale), smaller)
        return jnp.where(good >= s.interval, 0, good), scale, skipped + jnp.where(finite, 0, 1)

    return fn


def unscaled(g: jax.Array, scale: jax.Array) -> jax.Array:
    """A gradient without its scale, of the same type; a scale may be infinite in float16, which a
    gradient is not."""
    wide = jnp.promote_types(g.dtype, jnp.float32)
    return (g.astype(wide) / scale.astype(wide)).astype(g.dtype)


def all_finite(*xs: jax.Array) -> jax.Array:
    """Return True if every number is finite."""
    return functools.reduce(
        jnp.logical_and, [jnp.all(jnp.isfinite(x)) for x in xs], jnp.bool_(True)
    )
