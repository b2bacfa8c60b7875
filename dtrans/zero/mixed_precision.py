"""Mixed precision: matrix products are computed in 16 bits, everything else as before.

    dot_general f32 x f32      becomes    convert, dot_general in 16 bits, convert back

If only products read a weight, ranks convert their slices of the weight before the all-gather. So
the all-gather sends half as many bytes. For this, the conversion is written as early as possible:
before a transpose, and before a loop over layers. Sums, norms, softmax, the loss and the update
keep 32 bits.

bfloat16 has the range of float32. float16 has a smaller range, in which small gradients become
zero. So with float16 the loss is scaled: the first cotangent of the backward pass
(`dtrans.step.marks`) is multiplied by a large number, the loss scale. Gradients are divided by it
before the update.

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
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    body_indices,
    constants,
    facts_of,
    has_bodies,
    is_rearrangement,
    jaxprs_in_params,
    map_bodies,
    opened,
)
from dtrans.errors import ConfigError, GradientError
from dtrans.ir.array_fns import converted, scalar, times
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.dataflow import bits_of, propagate, variables
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.ir.interpret import ForwardAnalysis, forward
from dtrans.ir.program import BACKWARD, FORWARD, Program
from dtrans.ir.pytree import TreeSpec
from dtrans.ir.selection import values_at
from dtrans.ops import CASTS
from dtrans.step.halves import DividedStep, divide_step
from dtrans.step.marks import SEED, mark_p
from dtrans.zero.live_ranges import is_cast
from dtrans.zero.options import LossScaling


SCALE = "loss_scale/scale"
GOOD = "loss_scale/good_steps"
SKIPPED = "loss_scale/skipped_steps"


# -- the scale -------------------------------------------------------------------------------------


def scale_types(scaling: LossScaling | None) -> dict[str, Any]:
    """Return the first state of a dynamic loss scale, by name: the scale, and counts of steps.

    The result is empty for a fixed scale, or without a scale.
    """
    if scaling is None or not scaling.dynamic:
        return {}
    return {
        GOOD: jnp.zeros((), jnp.int32),
        SCALE: jnp.asarray(scaling.initial, jnp.float32),
        SKIPPED: jnp.zeros((), jnp.int32),
    }


def scale_spec() -> TreeSpec:
    """Return the pytree structure of the state of a dynamic loss scale."""
    fields = {n.split("/")[1]: jnp.zeros(()) for n in (GOOD, SCALE, SKIPPED)}
    return TreeSpec.from_tree(fields, "loss_scale")


def scale_of(scaling: LossScaling, inputs: Mapping[str, Var]) -> Atom:
    """Return the loss scale as a value of a program: an input if it is dynamic, else a constant."""
    return inputs[SCALE] if scaling.dynamic else scalar(scaling.initial)


def check_scale(scaling: LossScaling, dtype: Any, name: str) -> None:
    """Raise ConfigError if a fixed loss scale is too large for the type of the loss.

    Args:
      scaling: the scaling of the loss.
      dtype: the type of the loss.
      name: name of the step, for the message.
    """
    if not scaling.dynamic and scaling.initial > float(jnp.finfo(dtype).max):
        raise ConfigError(
            f"loss_scaling={scaling.initial!r} is infinite in {dtype}, the type of the loss of "
            f"{name}; return the loss in float32, or pass a smaller loss_scaling"
        )


def _check_seeds(
    main: Program, eqns: Sequence[JaxprEqn], seeds: Sequence[JaxprEqn], scaling: LossScaling
) -> None:
    """Raise an error if the loss of a step cannot be scaled.

    Args:
      main: the traced training step of one device.
      eqns: the equations of the step, in order.
      seeds: the equations that start a backward pass.
      scaling: the scaling of the loss.

    Raises:
      GradientError: the start of the backward pass is unknown, or the step differentiates twice.
      ConfigError: the scale overflows the type of the loss.
    """
    if not seeds:
        raise GradientError(
            f"the loss of {main.name} cannot be scaled, since the start of its backward pass is "
            "unknown; take gradients with dtrans.value_and_grad (or dtrans.make_train_step) "
            "outside loops. Or pass precision='bf16', which needs no scale"
        )
    for eqn in seeds:
        check_scale(scaling, eqn.outvars[0].aval.dtype, main.name)
    reached = propagate(eqns, {eqn.outvars[0]: 1 for eqn in seeds}, {})
    for eqn in seeds:
        if bits_of(reached, *eqn.invars):
            raise GradientError(
                f"{main.name} takes the derivative of a derivative, so that the loss scale would "
                "count twice; pass precision='bf16', which needs no scale"
            )


# -- steps and functions ---------------------------------------------------------------------------


def low_precision(
    main: Program,
    step: DividedStep,
    amp: str,
    scaling: LossScaling | None,
    *,
    unscales: bool = False,
) -> Program:
    """Rewrite a step so that its matrix products have 16 bits, and its loss is scaled.

    Args:
      main: the traced training step of one device.
      step: the same step, divided into its gradient computation and its update. Only products in
        the forward and backward pass change.
      amp: "bf16" or "fp16".
      scaling: the scaling of the loss. With a dynamic scale, the new step takes the state of the
        scale (`scale_spec`) as its third argument.
      unscales: True if the new step divides its gradients by a fixed scale. By default it does not,
        and the caller divides them after their reduction.

    Raises:
      GradientError: the start of the backward pass is unknown, since the step does not use
        `dtrans.value_and_grad`.
      ConfigError: the scale overflows the type of the loss.
    """
    jaxpr = inline_calls(main.jaxpr, keep=(SEED,))
    inner = opened(jaxpr)
    b = Builder(jaxpr)
    b.invars += inner.invars
    args = list(main.args)
    scale: Atom | None = None
    if scaling is not None:
        seeds = [e for e in inner.eqns if e.primitive.name == SEED]
        _check_seeds(main, inner.eqns, seeds, scaling)
        if scaling.dynamic:
            first = sum(len(spec.names) for spec in main.args[:2])
            state = {n: Var(jax.typeof(x)) for n, x in scale_types(scaling).items()}
            b.invars[first:first] = values_at(state, scale_spec().names)
            args.insert(2, scale_spec())
            scale = state[SCALE]

    params = dict(zip(main.in_names, inner.invars, strict=True))
    writer = _LowWriter(b, CASTS[amp], values_at(params, main.args[0].names))
    # `step` has a role for each equation of `main`, except for the seeds of the backward pass
    roles = iter(step.program.roles)
    found: list[str] = []
    for eqn in inner.eqns:
        if eqn.primitive.name == SEED:
            role = BACKWARD
            seed = writer.read(eqn.invars[0])
            writer.env[eqn.outvars[0]] = _scale_seed(b, seed, scale, scaling)
        else:
            role = next(roles)
            writer.emit(eqn, rewrite=role in (FORWARD, BACKWARD))
        if unscales and scaling is not None and eqn.primitive is mark_p:
            (gradient,) = eqn.outvars
            (writer.env[gradient],) = b.call(unscale, gradient, scalar(scaling.initial))
        found += [role] * (len(b.eqns) - len(found))
    lowered = Program(
        main.name,
        b.build(read_from(writer.env, inner.outvars)),
        tuple(args),
        main.out,
        tuple(found),
        {},
        ambiguous_outputs=main.ambiguous_outputs,
    )
    return main.rewritten(
        lambda other: low_precision(other, divide_step(other), amp, scaling, unscales=unscales),
        result=lowered,
    )


def _scale_seed(b: Builder, seed: Atom, scale: Atom | None, scaling: LossScaling | None) -> Atom:
    """Multiply the start of a backward pass by the loss scale, which scales all gradients.

    The start is the first cotangent, 1 for the loss itself.

    Args:
      b: the builder to write with.
      seed: the cotangent.
      scale: a dynamic scale; None for a fixed scale.
      scaling: the scaling; None for a loss that is not scaled.
    """
    if scaling is None:
        return seed
    if scale is None:
        return b.call(times(scaling.initial), seed)[0]
    return b.call(multiply_seed, seed, scale)[0]


def low_products(
    jaxpr: ClosedJaxpr, amp: str, params: Sequence[Var]
) -> tuple[ClosedJaxpr, list[int]]:
    """Rewrite the matrix products of a function to 16 bits, before the function is differentiated.

    The products in the derivative of the function then also have 16 bits. Pipelines rewrite their
    stages in this way. All variables of the function keep their names and types. Calls of functions
    with a custom derivative rule are copied.

    Args:
      jaxpr: the function, with inlined calls.
      amp: "bf16" or "fp16".
      params: inputs that are parameters.

    Returns:
      The new function; and for each new equation, the index of the old equation that it replaces.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.zero.mixed_precision import low_products
      >>> jaxpr = jax.make_jaxpr(lambda w, x: jnp.sin(x @ w))(jnp.ones((2, 2)), jnp.ones((1, 2)))
      >>> lowered, origin = low_products(jaxpr, "bf16", jaxpr.jaxpr.invars[:1])
      >>> [(e.primitive.name, e.outvars[0].aval.dtype.name) for e in lowered.jaxpr.eqns][2:], origin
      ([('dot_general', 'bfloat16'), ('convert_element_type', 'float32'), ('sin', 'float32')], [0,
      0, 0, 0, 1])
    """
    inner = opened(jaxpr)
    b = Builder(jaxpr)
    b.invars += inner.invars
    writer = _LowWriter(b, CASTS[amp], params)
    origin: list[int] = []
    for i, eqn in enumerate(inner.eqns):
        writer.emit(eqn, rewrite=eqn.primitive.name not in CUSTOM_RULES)
        origin += [i] * (len(b.eqns) - len(origin))
    return b.build(inner.outvars), origin


def low_gradients(step: DividedStep, dtype: Any) -> set[str]:
    """Return the parameters with gradients that can be sent in 16 bits without further rounding.

    The step computes these gradients in `dtype`, and then casts them to 32 bits. So a cast back to
    `dtype` is exact.
    """

    def rule(eqn: JaxprEqn, ins: Sequence[bool]) -> list[bool] | None:
        keeps = is_rearrangement(eqn) or eqn.primitive.name == "add_any"
        is_low = _widens(eqn, dtype) or (keeps and all(ins))
        return None if has_bodies(eqn) else [is_low] * len(eqn.outvars)

    low = ForwardAnalysis[bool](operator.and_, rule, default=lambda aval, value: False)
    facts = forward(low, step.program.eqns, {})
    return {n for n, g in step.gradients.items() if facts.of(g)}


# -- equations -------------------------------------------------------------------------------------


class _LowWriter:
    """Writer that copies equations, but computes their matrix products in 16 bits.

    Args:
      b: the builder to write with.
      dtype: the type of products.
      params: variables that are parameters, or computed from parameters only.
    """

    def __init__(self, b: Builder, dtype: Any, params: Sequence[Var]) -> None:
        self.b = b
        self.dtype = dtype
        self.params = set(params)
        self.env: dict[Var, Atom] = {}
        self._producers: dict[Var, JaxprEqn] = {}
        self._low: dict[Var, Atom] = {}

    def read(self, atom: Atom) -> Atom:
        """Return the new value that replaces a value of the original program."""
        return read_from(self.env, [atom])[0]

    def emit(self, eqn: JaxprEqn, *, rewrite: bool) -> None:
        """Write the next equation of the program.

        Args:
          eqn: the equation.
          rewrite: True to compute its products in 16 bits; False to copy it.
        """
        atoms = read_from(self.env, eqn.invars)
        if rewrite and facts_of(eqn).flops == "product" and _is_wide(eqn.outvars[0]):
            self._write_product(eqn, atoms)
        elif rewrite and any(True for _ in jaxprs_in_params(eqn.params)):
            self._write_bodies(eqn, atoms)
        else:
            self.b.keep(eqn, atoms)
        for v in eqn.outvars:
            self._producers[v] = eqn
        known = variables(eqn.invars)
        if len(eqn.outvars) == 1 and is_rearrangement(eqn) and all(a in self.params for a in known):
            self.params.update(eqn.outvars)

    def _write_product(self, eqn: JaxprEqn, atoms: Sequence[Atom]) -> None:
        """Write a matrix product in 16 bits, and a cast of its result to the original type."""
        are_floats = all(jnp.issubdtype(a.aval.dtype, jnp.floating) for a in atoms)
        # copy products that have 16-bit operands or a named algorithm: the user chose their types
        if not are_floats or not any(map(_is_wide, atoms)) or _names_algorithm(eqn):
            self.b.keep(eqn, atoms)
            return
        (out,) = eqn.outvars
        start = len(self.b.eqns)
        operands = [self.low(a) for a in atoms]
        # casts copy the source info, since its name stack separates forward from backward equations
        for k in range(start, len(self.b.eqns)):
            self.b.eqns[k] = self.b.eqns[k].replace(source_info=eqn.source_info)
        dtype = jnp.dtype(self.dtype)
        params = {"preferred_element_type": dtype}
        (product,) = self.b.copy(eqn, operands, [out.aval.update(dtype=dtype)], **params)
        self._low[out] = product
        self.b.call(converted(out.aval.dtype), product)
        # give the cast the product's output variable and source line
        self.b.eqns[-1] = self.b.eqns[-1].replace(outvars=[out], source_info=eqn.source_info)

    def low(self, atom: Atom) -> Atom:
        """Return a value cast to 16 bits; an earlier cast of the same value is reused.

        For a transpose, the operand of the transpose is cast. So a cast of a parameter can move
        before the all-gather.
        """
        if atom.aval.dtype == self.dtype:
            return atom
        if isinstance(atom, Literal):
            return self.b.call(converted(self.dtype), atom)[0]
        if atom not in self._low:
            self._low[atom] = self._convert(atom)
        return self._low[atom]

    def _convert(self, atom: Var) -> Atom:
        eqn = self._producers.get(atom)
        if eqn is not None and is_rearrangement(eqn) and len(eqn.outvars) == 1:
            # cast the operand: if it is a parameter, the cast can move before the gather
            operand = self.low(self.read(eqn.invars[0]))
            return self.b.copy(eqn, [operand], [atom.aval.update(dtype=jnp.dtype(self.dtype))])[0]
        if eqn is not None and _widens(eqn, self.dtype):
            return self.read(eqn.invars[0])
        return self.b.call(converted(self.dtype), atom)[0]

    def _write_bodies(self, eqn: JaxprEqn, atoms: Sequence[Atom]) -> None:
        """Write a loop, branch or call, with 16-bit products in its bodies.

        If a body only casts a parameter, the parameter is cast before the loop instead.
        """
        name = eqn.primitive.name
        operands = list(atoms)

        def lower(body: Any) -> Any:
            hoist = known = [False] * len(opened(body).invars)
            if name == SCAN or name in REMAT:  # here operand k is input k of the only body
                carried = body_indices(eqn).carried
                hoist = [k not in carried for k in range(len(eqn.invars))]
                known = [isinstance(a, Var) and a in self.params for a in eqn.invars]
            lowered, narrow = _lower_body(body, self.dtype, known, hoist)
            for k, is_narrow in enumerate(narrow):
                if is_narrow:
                    operands[k] = self.low(operands[k])
            return lowered

        params = map_bodies(eqn.params, lower)
        self.b.keep(eqn.replace(params=params), operands)


def _lower_body(
    body: Any, dtype: Any, params: Sequence[bool], hoist: Sequence[bool]
) -> tuple[Any, list[bool]]:
    """Rewrite the matrix products in the body of a loop, branch or call to 16 bits.

    Args:
      body: the body.
      dtype: the type of products.
      params: for each input of the body, True if it is a parameter.
      hoist: for each input of the body, True if a cast of this input may move out of the body.

    Returns:
      The new body; and for each input, True if it now has 16 bits.
    """
    inner = opened(body)
    b = Builder(body)
    b.invars += inner.invars
    known = [v for v, is_param in zip(inner.invars, params, strict=True) if is_param]
    writer = _LowWriter(b, dtype, known)
    for eqn in inner.eqns:
        writer.emit(eqn, rewrite=True)
    lowered: ClosedJaxpr = eliminate_dead(b.build(read_from(writer.env, inner.outvars)))
    new = opened(lowered)
    narrow = []
    for v, is_param, may in zip(new.invars, params, hoist, strict=True):
        narrow.append(is_param and may and _is_only_cast(new, v, dtype))
    if any(narrow):
        lowered = _narrow_inputs(lowered, narrow, dtype)
    if isinstance(body, ClosedJaxpr):
        return lowered, narrow
    assert not constants(lowered)
    return opened(lowered), narrow


def _is_only_cast(body: Jaxpr, v: Var, dtype: Any) -> bool:
    """Return True if all readers of a body's input `v` cast it to `dtype`.

    The cast can then move out of the body.
    """
    readers = 0
    for eqn in body.eqns:
        if any(a is v for a in eqn.invars):
            if not is_cast(eqn) or eqn.outvars[0].aval.dtype != dtype:
                return False
            readers += 1
    return readers > 0 and not any(a is v for a in body.outvars)


def _narrow_inputs(body: ClosedJaxpr, narrow: Sequence[bool], dtype: Any) -> ClosedJaxpr:
    """Change the type of some inputs of a body to `dtype`, and remove the casts of these inputs.

    Args:
      body: the body.
      narrow: for each input, True to change its type.
      dtype: the new type.
    """
    inner = opened(body)
    b = Builder(body)
    env: dict[Var, Atom] = {}
    for v, is_narrow in zip(inner.invars, narrow, strict=True):
        if is_narrow:
            env[v] = b.input(v.aval.update(dtype=jnp.dtype(dtype)))
        else:
            b.invars.append(v)
    for eqn in inner.eqns:
        operand = eqn.invars[0] if is_cast(eqn) else None
        if isinstance(operand, Var) and operand in env:
            env[eqn.outvars[0]] = env[operand]
        else:
            b.keep(eqn, read_from(env, eqn.invars))
    return b.build(read_from(env, inner.outvars))


def _is_wide(atom: Atom) -> bool:
    """Return True if an atom has floats of more than 16 bits."""
    dtype = atom.aval.dtype
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits > 16


def _names_algorithm(eqn: JaxprEqn) -> bool:
    """Return True if the user chose an algorithm for a product, which must then keep its types."""
    precision = eqn.params.get("precision")
    for name in precision if isinstance(precision, tuple) else (precision,):
        if name is not None and not isinstance(name, jax.lax.Precision):
            return True
    return False


def _widens(eqn: JaxprEqn, dtype: Any) -> bool:
    """Return True if an equation casts a value from `dtype`; a cast of the result back is exact."""
    return is_cast(eqn) and bool(eqn.invars[0].aval.dtype == dtype)


# -- functions of arrays: `Builder.call` traces each once per type ---------------------------------


def multiply_seed(seed: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiply the first cotangent of a backward pass by the loss scale."""
    return seed * scale.astype(seed.dtype)


@functools.cache
def next_scale(s: LossScaling) -> Callable[..., tuple[jax.Array, ...]]:
    """Return the function that updates a dynamic loss scale after each step.

    The scale grows after many steps with finite gradients, and shrinks after a step with an
    infinite gradient. The arguments of the function are:

    - finite: True if all gradients of this step are finite;
    - good: the number of finite steps in a row;
    - scale: the loss scale;
    - skipped: the number of skipped steps.

    It returns the new values of `good`, `scale` and `skipped`.
    """

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


def unscale(g: jax.Array, scale: jax.Array) -> jax.Array:
    """Divide a gradient by the loss scale.

    The division uses at least 32 bits, because the scale may be infinite in float16.
    """
    wide = jnp.promote_types(g.dtype, jnp.float32)
    return (g.astype(wide) / scale.astype(wide)).astype(g.dtype)


def all_finite(*xs: jax.Array) -> jax.Array:
    """Return True if all elements of all arrays are finite."""
    return functools.reduce(
        jnp.logical_and, [jnp.all(jnp.isfinite(x)) for x in xs], jnp.bool_(True)
    )
