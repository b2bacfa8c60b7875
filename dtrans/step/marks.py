"""Marks: the boundary between gradients and the optimizer.

`mark_p` is an identity on a gradient, with the gradient's parameter as its second operand. The cut
(`dtrans.step.cut`) then pairs them by variables, whatever their names are. Each leaf has its own
equation: one mark over the full pytree would make every leaf depend on every other.

Marks come from `value_and_grad`, or from `make_train_step`, which calls it. They survive jit, vmap,
scan, remat and differentiation of the step, and vanish in lowering. As in alpa (alpa/api.py,
`alpa.grad`), wrapping `grad` is safer than asking users to mark.
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
    # a second derivative is not a gradient of this step: tangents pass unmarked
    return mark_p.bind(*primals, leaf=leaf), tangents[0]


mark_p = new_identity("gradient", jvp=_mark_jvp)

# Seed: an identity on the first cotangent of the backward pass. Loss scaling multiplies it. Only
# mixed precision keeps it when calls are inlined (`dtrans.ir.builder`).
SEED = "loss_seed"


def _seed_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return _seed_p.bind(*primals), tangents[0]


_seed_p = new_identity(SEED, jvp=_seed_jvp)


def _loss_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    return x, t if is_zero(t) else _loss_p.bind(t)


def _loss_transpose(ct: Any, x: Any) -> list[Any]:
    return [ct if is_zero(ct) else _seed_p.bind(ct)]


# identity on the tangent of a loss, whose transpose is the seed; without derivatives it is absent
_loss_p = new_identity("loss", jvp=_loss_jvp, transpose=_loss_transpose)


def _as_loss(value: Any) -> Any:
    """Return a loss whose derivative starts with a seed; values that `value_and_grad` refuses,
    unchanged."""
    is_loss = (
        isinstance(value, jax.Array)
        and value.ndim == 0
        and jnp.issubdtype(value.dtype, jnp.floating)
    )
    return _loss_p.bind(value) if is_loss else value


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Return `jax.value_and_grad` of a function, with the gradients marked for dtrans.

    Arguments may have leaves that cannot be differentiated (integers, Equinox's functions): their
    gradient is None, as with `equinox.filter_value_and_grad`. For pytrees of floating-point arrays
    it equals `jax.value_and_grad`.

    Args:
      fun: returns a scalar, or (scalar, aux) with `has_aux`.
      argnums: positions of the arguments to differentiate.
      has_aux: True if `fun` returns auxiliary data.

    Example:
      >>> import jax.numpy as jnp, dtrans
      >>> dtrans.value_and_grad(lambda p: jnp.sum(p["w"] ** 2))({"w": jnp.array([1.0, 2.0])})
      (Array(5., dtype=float32), {'w': Array([2., 4.], dtype=float32)})
    """
    several = not isinstance(argnums, int)
    places = tuple(argnums) if not isinstance(argnums, int) else (argnums,)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        halves = [partition(args[i], is_differentiable) for i in places]
        if not any(jax.tree.leaves(diff) for diff, _ in halves):
            raise GradientError(
                f"argument {argnums} of {getattr(fun, '__name__', fun)} has no floating-point "
                "array to differentiate"
            )

        def of_differentiable(diffs: list[Any]) -> Any:
            full = list(args)
            for i, diff, (_, rest) in zip(places, diffs, halves, strict=True):
                full[i] = combine(diff, rest)
            result = fun(*full, **kwargs)
            if has_aux and isinstance(result, tuple) and len(result) == 2:
                return _as_loss(result[0]), result[1]
            return result if has_aux else _as_loss(result)

        diffs = [diff for diff, _ in halves]
        if captures():
            value, grads = capture_loss(of_differentiable, diffs, has_aux)
        else:
            value, grads = jax.value_and_grad(of_differentiable, has_aux=has_aux)(diffs)
        marked = [
            tree_map_with_path(
                lambda path, p, g: mark_p.bind(g, p, leaf=keystr(path, simple=True, separator="/")),
                diff,
                grad,
            )
            for diff, grad in zip(diffs, grads, strict=True)
        ]
        return value, (tuple(marked) if several else marked[0])

    return wrapped


def make_train_step(
    loss_fn: Callable[..., Any], tx: Any, *, has_aux: bool = False
) -> Callable[..., Any]:
    """Build a training step: loss and gradients, the optax update, new parameters.

    Args:
      loss_fn: `loss_fn(params, *batch)` returns a scalar; with `has_aux`, (loss, aux).
      tx: an `optax.GradientTransformation`, or an object with the same `update`.
      has_aux: True if `loss_fn` returns auxiliary data.

    Returns:
      `step(params, opt_state, *batch) -> (params, opt_state, loss[, aux])`, with the parameter
      names of `loss_fn` for the batch. Leaves of `params` that cannot be differentiated are
      returned unchanged, and the optimizer does not see them: call `tx.init` on the others.

    Raises:
      OptimizerError: raised by the step if the optimizer needs the loss, or a function of it.

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
        return (params, opt_state, *(value if has_aux else (value,)))

    step.__signature__ = _step_signature(loss_fn)  # type: ignore[attr-defined]
    return step


# errors of optax for a missing argument of `update`: the function that needs it, and its name
_ASKS = (
    re.compile(
        r"(?P<who>\w+)\.<locals>\.\w+\(\) missing \d+ required keyword-only arguments?: "
        r"(?P<what>.*)"
    ),
    re.compile(r"(?P<what>\w+) must be provided to (?P<who>\w+) update function"),
    re.compile(r"(?P<what>\w+) must be provided when (?P<who>\w+=\w+)"),
)


def _update(tx: Any, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    """Call `tx.update` with gradients, state and parameters alone."""
    try:
        result: tuple[Any, Any] = tx.update(grads, opt_state, params)
        return result
    except (TypeError, ValueError) as e:
        matches = (p.search(str(e)) for p in _ASKS)
        asked = next(filter(None, matches), None)
        if asked is None:
            raise
        raise OptimizerError(
            f"{asked['who']} needs {asked['what']} in its update, and make_train_step gives it "
            "(grads, state, params). "
            "Use one that takes these, such as optax.lbfgs(linesearch=None), or a learning-rate "
            "schedule; or write the "
            "step yourself and give tx.update what it needs, which dtrans.nccl2 takes"
        ) from e


def _step_signature(loss_fn: Callable[..., Any]) -> inspect.Signature:
    """Return the signature (params, opt_state, batch arguments of `loss_fn` by their names)."""
    first, *batch = inspect.signature(loss_fn).parameters.values()
    if first.kind is first.VAR_POSITIONAL:  # loss_fn(*args): the number of arguments is unknown
        batch = [first.replace(name="batch"), *batch]
    if any(p.name in ("params", "opt_state") for p in batch):
        raise GradientError("the batch arguments of loss_fn may not be called params or opt_state")
    state = [
        inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in ("params", "opt_state")
    ]
    return inspect.Signature([*state, *(p.replace(annotation=p.empty) for p in batch)])


def _apply_updates(params: Any, updates: Any) -> Any:
    """Add updates as `optax.apply_updates` does, in the parameter's dtype; None updates nothing."""

    def apply(path: Any, p: Any, u: Any) -> Any:
        if p is None or u is None:
            return p
        if jnp.shape(u) != jnp.shape(p):
            raise OptimizerError(
                f"the optimizer makes an update of shape {jnp.shape(u)} for "
                f"{join_path('params', path)} of shape "
                f"{jnp.shape(p)}; it may expect other gradients, such as the gradient of each "
                "example"
            )
        return (p + u).astype(p.dtype)

    return tree_map_with_path(apply, params, updates, is_leaf=lambda x: x is None)
