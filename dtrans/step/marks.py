"""Marks in a training step that show dtrans which values are gradients.

A *mark* is an identity equation on a gradient (primitive `mark_p`). Its second operand is the
parameter, which shows the parameter of each gradient. Each parameter has a separate mark: one
equation over the full pytree would make every gradient depend on every other gradient.

`dtrans.value_and_grad` writes marks, and `make_train_step` calls `dtrans.value_and_grad`. jit,
vmap, scan, remat and differentiation of the step keep marks; lowering removes them. alpa also marks
gradients, in a wrapper of `jax.grad` (alpa/api.py, `alpa.grad`).
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_map_with_path

from dtrans._jax import is_zero, new_identity
from dtrans.errors import GradientError, OptimizerError
from dtrans.ir.pytree import combine, is_differentiable, join_path, partition
from dtrans.step.capture import capture_loss, captures


def _mark_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, leaf: str) -> tuple[Any, Any]:
    # A derivative of a gradient is not a gradient of the step, so it gets no mark.
    return mark_p.bind(*primals, leaf=leaf), tangents[0]


mark_p = new_identity("gradient", jvp=_mark_jvp)

# Name of an identity primitive that marks where the backward pass starts: loss scaling multiplies
# this cotangent. When calls are inlined, only mixed precision keeps the primitive
# (`dtrans.ir.inline`).
SEED = "loss_seed"


def _seed_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return _seed_p.bind(*primals), tangents[0]


_seed_p = new_identity(SEED, jvp=_seed_jvp)


def _loss_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    return x, t if is_zero(t) else _loss_p.bind(t)


def _loss_transpose(ct: Any, x: Any) -> list[Any]:
    return [ct if is_zero(ct) else _seed_p.bind(ct)]


# Identity on the tangent of a loss. Its transpose binds the seed primitive, so the seed appears
# only if the loss is differentiated.
_loss_p = new_identity("loss", jvp=_loss_jvp, transpose=_loss_transpose)


def _as_loss(value: Any) -> Any:
    """Return the loss unchanged, but mark the start of its backward pass in the trace.

    Mixed precision multiplies the first cotangent by the loss scale there. A value that is no real
    scalar gets no mark, because `jax.value_and_grad` raises an error for it.
    """
    is_loss = (
        isinstance(value, jax.Array)
        and value.ndim == 0
        and jnp.issubdtype(value.dtype, jnp.floating)
    )
    return _loss_p.bind(value) if is_loss else value


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Return `jax.value_and_grad(fun)`, with marks that tell dtrans which values are gradients.

    Use this function in place of `jax.value_and_grad` in a training step. On one device it computes
    the same numbers. Differentiated arguments may have leaves that cannot be differentiated
    (integers, functions of an Equinox module). The gradient of these leaves is None, as in
    `equinox.filter_value_and_grad`.

    Args:
      fun: a function that returns a scalar, or (scalar, aux) if `has_aux` is True.
      argnums: positions of the arguments to differentiate.
      has_aux: True if `fun` returns auxiliary data.

    Example:
      >>> import jax.numpy as jnp, dtrans
      >>> dtrans.value_and_grad(lambda p: jnp.sum(p["w"] ** 2))({"w": jnp.array([1.0, 2.0])})
      (Array(5., dtype=float32), {'w': Array([2., 4.], dtype=float32)})
    """
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        diffs: list[Any] = []
        rests: list[Any] = []
        for i in positions:
            diff, rest = partition(args[i], is_differentiable)
            diffs.append(diff)
            rests.append(rest)
        if not jax.tree.leaves(diffs):
            raise GradientError(
                f"argument {argnums} of {getattr(fun, '__name__', fun)} has no floating-point "
                "array; argnums must name an argument to differentiate"
            )

        def of_differentiable(diffs: list[Any]) -> Any:
            full = list(args)
            for i, diff, rest in zip(positions, diffs, rests, strict=True):
                full[i] = combine(diff, rest)
            result = fun(*full, **kwargs)
            if not has_aux:
                return _as_loss(result)
            if isinstance(result, tuple) and len(result) == 2:
                return _as_loss(result[0]), result[1]
            return result  # `jax.value_and_grad` raises the error for this result

        if captures():
            value, grads = capture_loss(of_differentiable, diffs, has_aux)
        else:
            value, grads = jax.value_and_grad(of_differentiable, has_aux=has_aux)(diffs)
        marked = []
        for diff, grad in zip(diffs, grads, strict=True):
            marked.append(tree_map_with_path(_mark, diff, grad))
        return value, marked[0] if isinstance(argnums, int) else tuple(marked)

    return wrapped


def _mark(path: Any, parameter: Any, gradient: Any) -> Any:
    return mark_p.bind(gradient, parameter, leaf=keystr(path, simple=True, separator="/"))


def make_train_step(
    loss_fn: Callable[..., Any], tx: Any, *, has_aux: bool = False
) -> Callable[..., Any]:
    """Build a training step from a loss function and an optax optimizer.

    The step computes the loss and the gradients, calls the optimizer, and returns the new
    parameters.

    Args:
      loss_fn: a function `loss_fn(params, *batch)` that returns the loss, a scalar; or (loss, aux)
        if `has_aux` is True.
      tx: an `optax.GradientTransformation`, or an object with the same `update`.
      has_aux: True if `loss_fn` returns auxiliary data.

    Returns:
      `step(params, opt_state, *batch) -> (params, opt_state, loss[, aux])`. Its batch arguments
      have the names that `loss_fn` uses. Leaves of `params` that cannot be differentiated are
      returned unchanged, and `tx` does not get them: call `tx.init` on the other leaves.

    Raises:
      OptimizerError: raised by the step, if the optimizer needs the loss or the loss function.

    Example:
      >>> import jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((params["w"] - x) ** 2), tx)
      >>> params = {"w": jnp.zeros(2)}
      >>> params, _, loss = step(params, tx.init(params), jnp.array([2.0, 4.0]))
      >>> params["w"].tolist(), float(loss)
      ([1.0, 2.0], 10.0)
    """
    gradient = value_and_grad(loss_fn, has_aux=has_aux)

    def step(params: Any, opt_state: Any, *batch: Any) -> tuple[Any, ...]:
        value, grads = gradient(params, *batch)
        diff, rest = partition(params, is_differentiable)
        updates, opt_state = _update(tx, grads, opt_state, diff)
        params = combine(_apply_updates(diff, updates), rest)
        if has_aux:
            return (params, opt_state, *value)
        return params, opt_state, value

    step.__signature__ = _step_signature(loss_fn)  # type: ignore[attr-defined]
    return step


# Messages of optax if `update` lacks an argument: `what` is the argument, and `who` needs it.
_MISSING_ARGUMENT = (
    re.compile(
        r"(?P<who>\w+)\.<locals>\.\w+\(\) missing \d+ required keyword-only arguments?: "
        r"(?P<what>.*)"
    ),
    re.compile(r"(?P<what>\w+) must be provided to (?P<who>\w+) update function"),
    re.compile(r"(?P<what>\w+) must be provided when (?P<who>\w+=\w+)"),
)


def _update(tx: Any, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    """Call `tx.update`, and explain its error if the optimizer needs further arguments.

    Args:
      tx: the optimizer.
      grads, opt_state, params: the arguments that every optax optimizer accepts.

    Raises:
      OptimizerError: `tx.update` needs another argument, such as the value of the loss.
    """
    try:
        result: tuple[Any, Any] = tx.update(grads, opt_state, params)
        return result
    except (TypeError, ValueError) as e:
        for pattern in _MISSING_ARGUMENT:
            missing = pattern.search(str(e))
            if missing is not None:
                raise OptimizerError(
                    f"{missing['who']} needs {missing['what']} in its update, but make_train_step "
                    "passes only (grads, state, params); use an optimizer that reads only these, "
                    "such as optax.lbfgs(linesearch=None), or a learning-rate schedule. Or write "
                    f"the step yourself, pass {missing['what']} to tx.update, and use dtrans.nccl2"
                ) from e
        raise


def _step_signature(loss_fn: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of the step: params, opt_state, then the batch arguments of `loss_fn`.

    `dtrans.trace` names the step's inputs after these arguments.
    """
    first, *batch = inspect.signature(loss_fn).parameters.values()
    if first.kind is first.VAR_POSITIONAL:  # loss_fn(*args): the number of arguments is unknown
        batch = [first.replace(name="batch"), *batch]
    if any(p.name in ("params", "opt_state") for p in batch):
        raise GradientError(
            "a batch argument of loss_fn is called params or opt_state, which are the names of the "
            "step's state; rename it"
        )
    state = [
        inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in ("params", "opt_state")
    ]
    return inspect.Signature([*state, *(p.replace(annotation=p.empty) for p in batch)])


def _apply_updates(params: Any, updates: Any) -> Any:
    """Add updates to parameters, like `optax.apply_updates`; an update None changes nothing.

    Raises:
      OptimizerError: an update has another shape than its parameter.
    """

    def apply(path: Any, p: Any, u: Any) -> Any:
        if p is None or u is None:
            return p
        if jnp.shape(u) != jnp.shape(p):
            raise OptimizerError(
                f"the update of {join_path('params', path)} has shape {jnp.shape(u)}, but the "
                f"parameter has shape {jnp.shape(p)}; the optimizer may expect other gradients, "
                "such as per-example gradients"
            )
        return (p + u).astype(p.dtype)

    return tree_map_with_path(apply, params, updates, is_leaf=lambda x: x is None)
