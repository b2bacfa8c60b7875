"""Scopes: `with` statements that mark parts of a model for a pipeline or for tensor parallelism.

    with dtrans.replicate(name="encoder"):
        h = encode(params, x)
    with dtrans.replicate():
        loss = decode(params, h, y)

`replicate` marks a stage of a pipeline, and `split` a layer that several devices divide. The
equations in a scope are a *taskgraph* (a word of Alibaba's EPL). A scope adds a text to the name
stack of the equations that are traced in it. `jit`, `grad`, `vmap`, `remat` and inlining keep the
name stack, and the equations are unchanged. The text is `dtrans.<kind>[<place>:<name>:<devices>]`:

  - With a name, the place is empty. All scopes with one kind and name are one taskgraph.
  - Without a name, every entry of the `with` statement starts a new taskgraph. The place then
    identifies the entry. It has the function and line of the `with`, a digest of the call stack
    below JAX's tracing call, and a count.

`dtrans.trace` counts entries from 0 (`numbered`), so that every trace of a function has the same
texts. A global counter would give a function new texts in each trace. JAX caches the traces of
jitted functions, so a trace would mix old and new texts.

Scopes must not be nested. (EPL forbids a kind within itself, any scope in `split`, and `split` in
`replicate`.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote, unquote

import jax

from dtrans._jax import ClosedJaxpr, JaxprEqn, equations_inside, opened, scope_of
from dtrans.checks import check_int, check_name
from dtrans.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Scope:
    """One marked part of a model: a stage (`replicate`) or a layer that devices divide (`split`).

    Attributes:
      kind: "replicate" or "split".
      place: identity of an unnamed scope, see the module's docstring; empty for a named scope.
      name: the user's name; None for an unnamed scope.
      device_count: number of devices of one replica; None if not specified.
    """

    kind: str
    place: str = ""
    name: str | None = None
    device_count: int | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Identity of the marked part: equal for all scopes that mark the same stage or layer."""
        return self.kind, self.place or f":{self.name}"

    def __str__(self) -> str:
        if self.name is not None:
            return f"{self.kind}(name={self.name!r})"
        function, line, _, entry = unquote(self.place).rsplit("-", 3)
        number = "" if entry in ("0", "") else f", entry {entry}"
        return f"the {self.kind}() in {function}, line {line}{number}"

    @property
    def text(self) -> str:
        """Text that marks an equation's name stack with this scope."""
        name = quote(self.name or "", safe="")
        return f"dtrans.{self.kind}[{self.place}:{name}:{self.device_count or ''}]"


_TEXT = re.compile(r"dtrans\.(replicate|split)\[([\w.~%-]*):([\w.~%-]*):(\d*)\]")

_entered: ContextVar[Scope | None] = ContextVar("dtrans_scope", default=None)
_numbers: ContextVar[dict[str, int] | None] = ContextVar("dtrans_scope_numbers", default=None)
_outside = itertools.count()  # numbers of entries outside of `numbered`, unique in the process


@contextmanager
def replicate(device_count: int | None = None, name: str | None = None) -> Iterator[None]:
    """Mark a part of the model as one stage of a pipeline.

    Use `with dtrans.replicate():` in the traced function. Each stage runs on its own devices, and
    several replicas of a stage may divide the batch. Scopes with the same name are one stage.
    Without a name, every entry of the `with` statement starts a new stage, also in a Python loop.

    Source: `epl.replicate` (epl/strategies/replicate.py).

    Args:
      device_count: number of devices that divide the batch of each replica. All scopes of a model
        must have the same number.
      name: name of the stage, also used in messages and plans.

    Raises:
      ConfigError: the scope is within another scope, `device_count` is not a positive integer, or
        the name is empty.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.step.scopes import replicate, scope_of_eqn
      >>> def loss(x):
      ...     with replicate(name="first"):
      ...         x = jnp.sin(x)
      ...     return x + 1
      >>> [str(scope_of_eqn(eqn)) for eqn in jax.make_jaxpr(loss)(1.0).jaxpr.eqns]
      ["replicate(name='first')", 'None']
    """
    with _scope("replicate", device_count, name):
        yield


@contextmanager
def split(device_count: int | None = None, name: str | None = None) -> Iterator[None]:
    """Mark a layer so that several devices divide its parameters (tensor parallelism).

    Use `with dtrans.split():` in the traced function. Source: `epl.split`
    (epl/strategies/split.py).

    Args:
      device_count: number of devices; all by default.
      name: name of the layer, also used in messages and plans. Scopes with the same name are one
        layer.

    Raises:
      ConfigError: the scope is within another scope, `device_count` is not a positive integer, or
        the name is empty.

    Example:
      >>> import jax
      >>> from dtrans.step.scopes import scope_of_eqn, split
      >>> def head(x):
      ...     with split(device_count=4):
      ...         return x * 2
      >>> scope_of_eqn(jax.make_jaxpr(head)(1.0).jaxpr.eqns[0]).device_count
      4
    """
    with _scope("split", device_count, name):
        yield


@contextmanager
def local() -> Iterator[None]:
    """Mark code in which means over the batch are means over each trainer's own rows only.

    With `batch="exact"`, a job computes means over the full batch, which needs communication. Batch
    normalisation in Paddle and in torch's DistributedDataParallel uses each trainer's rows instead.
    Use `with dtrans.local():` in the traced function for this behaviour. A sum, mean or maximum
    over the batch in the scope becomes a reduction over the trainer's rows. Results and state that
    depend on this reduction are averaged over trainers. The scope also includes derivatives of its
    equations, but gradients of parameters remain sums over the full batch. On one device the scope
    has no effect.

    Example:
      >>> import jax, jax.numpy as jnp, optax, dtrans
      >>> def loss(params, x):
      ...     with dtrans.local():
      ...         x = x - jnp.mean(x, axis=0)
      ...     return jnp.mean((x @ params["w"]) ** 2)
      >>> tx = optax.sgd(0.1)
      >>> step = dtrans.make_train_step(loss, tx)
      >>> init = lambda: (p := {"w": jnp.ones((2, 2))}, tx.init(p))
      >>> main, startup = dtrans.trace(step, *init(), jnp.ones((4, 2))), dtrans.trace(init)
      >>> dtrans.nccl2(main, startup, trainers=2).notes[0]
      "exact: mean over 8 rows, with dtrans.local() reductions over each trainer's rows"
    """
    with jax.named_scope(LOCAL):
        yield


LOCAL = "dtrans.local"


def in_local_scope(eqn: JaxprEqn) -> bool:
    """Return True if an equation was traced in `with dtrans.local()`, or is its derivative."""
    return LOCAL in scope_of(eqn)


def in_split_scope(eqn: JaxprEqn) -> bool:
    """Return True if an equation was traced in `with dtrans.split()`, or is its derivative."""
    return any(kind == "split" for kind, *_ in _TEXT.findall(scope_of(eqn)))


def has_local_scope(eqn: JaxprEqn) -> bool:
    """Return True if an equation, or one in its bodies, was traced in `with dtrans.local()`."""
    return any(map(in_local_scope, (eqn, *equations_inside(eqn))))


@contextmanager
def numbered() -> Iterator[None]:
    """Give unnamed scopes the same texts in every trace of a function.

    Within this `with` block, entries of unnamed scopes are counted from 0. `dtrans.trace` uses this
    block.

    Example:
      >>> import jax
      >>> from dtrans.step.scopes import numbered, replicate, scope_of_eqn
      >>> def traced():
      ...     def f(x):  # a new function: JAX has not cached it
      ...         with replicate():
      ...             return x * 2
      ...     with numbered():
      ...         return scope_of_eqn(jax.make_jaxpr(f)(1.0).jaxpr.eqns[0])
      >>> traced() == traced()
      True
    """
    before = _numbers.set({})
    try:
        yield
    finally:
        _numbers.reset(before)


def scope_of_eqn(eqn: JaxprEqn) -> Scope | None:
    """Return the scope of an equation; None if the equation has no scope.

    The scope of a loop is the one scope of the equations in its body. A derivative has the scope of
    the differentiated equation.

    Raises:
      ConfigError: there are several scopes: nested scopes, or two stages in one loop.
    """
    scopes = {scope.key: scope for scope in _scopes_of(eqn)}
    if len(scopes) > 1:
        a, b = list(scopes.values())[:2]
        _refuse_different(a, b)
        raise ConfigError(
            f"one {eqn.primitive.name} equation is in {a} and in {b}; do not nest scopes, and use "
            "at most one in a loop, a branch or a rematerialised function"
        )
    return next(iter(scopes.values()), None)


def scopes_of(eqns: list[JaxprEqn]) -> tuple[Scope | None, ...]:
    """Return the stage or split layer of each equation of a program; None without a scope.

    A pipeline uses the result to divide the equations into stages. JAX traces the body of a loop or
    of `remat` once, even if several equations have this body. An unnamed scope in the body is a
    separate scope for each of these equations. A function under `jax.jit` differs, because its
    calls are inlined: an unnamed scope in the function is one scope for all calls. For separate
    scopes, put the scope around each call.

    Raises:
      ConfigError: an equation is in several scopes, or scopes with one name have different
        device_count.

    Example:
      >>> import jax
      >>> from dtrans.step.scopes import replicate, scopes_of
      >>> def f(x):
      ...     for _ in range(2):
      ...         with replicate():
      ...             x = x * 2
      ...     return x
      >>> first, second = scopes_of(jax.make_jaxpr(f)(1.0).jaxpr.eqns)
      >>> first == second
      False
    """
    found: list[Scope | None] = []
    known: dict[tuple[str, str], Scope] = {}
    calls: dict[str, int] = {}
    for eqn in eqns:
        scope = scope_of_eqn(eqn)
        if scope is not None and scope.name is None and not _TEXT.search(scope_of(eqn)):
            calls[scope.place] = call = calls.get(scope.place, -1) + 1
            scope = dataclasses.replace(scope, place=f"{scope.place}.{call}")
        if scope is not None:
            _refuse_different(known.setdefault(scope.key, scope), scope)
        found.append(scope)
    return tuple(found)


def scopes_within(jaxpr: ClosedJaxpr) -> tuple[Scope, ...]:
    """Return all stages and split layers that a user marked in a program, each once, in order.

    Example:
      >>> import jax
      >>> from dtrans.step.scopes import replicate, scopes_within
      >>> @jax.jit
      ... def f(x):
      ...     with replicate(device_count=2, name="body"):
      ...         return x * 2
      >>> [str(scope) for scope in scopes_within(jax.make_jaxpr(f)(1.0))]
      ["replicate(name='body')"]
    """
    found: dict[tuple[str, str], Scope] = {}
    for eqn in opened(jaxpr).eqns:
        found |= {scope.key: scope for scope in _scopes_of(eqn)}
    return tuple(found.values())


def split_scopes(jaxpr: ClosedJaxpr) -> tuple[Scope, ...]:
    """Return the layers that a user marked with `dtrans.split`, each once, in order."""
    return tuple(scope for scope in scopes_within(jaxpr) if scope.kind == "split")


def ignored_split_notes(jaxpr: ClosedJaxpr, remedy: str) -> list[str]:
    """Return a note for the user if a plan ignores the `split` scopes of a step.

    `dtrans.nccl2` without a mesh, for example, does not divide these layers.

    Args:
      jaxpr: the step; the list is empty if the step has no `split` scope.
      remedy: advice to the user, as a clause.

    Example:
      >>> import jax
      >>> from dtrans.step.scopes import ignored_split_notes, split
      >>> def head(x):
      ...     with split(name="head"):
      ...         return x * 2
      >>> ignored_split_notes(jax.make_jaxpr(head)(1.0), "pass mesh=")
      ["split(name='head') has no effect: every trainer computes the layer in full; pass mesh="]
    """
    names = " and ".join(map(str, split_scopes(jaxpr)))
    if not names:
        return []
    return [f"{names} has no effect: every trainer computes the layer in full; {remedy}"]


def _scopes_of(eqn: JaxprEqn) -> Iterator[Scope]:
    for inner in (eqn, *equations_inside(eqn)):
        for kind, place, name, count in _TEXT.findall(scope_of(inner)):
            yield Scope(kind, place, unquote(name) or None, int(count) if count else None)


def _refuse_different(a: Scope, b: Scope) -> None:
    if a.key == b.key and a.device_count != b.device_count:
        raise ConfigError(
            f"{a} has device_count={a.device_count} and device_count={b.device_count}; scopes with "
            "the same name need the same device_count"
        )


@contextmanager
def _scope(kind: str, device_count: int | None, name: str | None) -> Iterator[None]:
    check_int(f"device_count of {kind}", device_count, "a positive integer", or_none=True)
    if name is not None:
        check_name(f"name of {kind}", name, "a nonempty text")
    scope = Scope(kind, "" if name else _place(), name, device_count)
    outer = _entered.get()
    if outer is not None:
        raise ConfigError(
            f"{scope} is entered within {outer}; replicate and split scopes cannot be nested: end "
            "the outer `with` block before the inner one starts"
        )
    before = _entered.set(scope)
    try:
        with jax.named_scope(scope.text):
            yield
    finally:
        _entered.reset(before)


def _place() -> str:
    """Return a text that identifies an unnamed scope: function, line, call stack and count."""
    frames = list(_user_frames())
    digest = hashlib.blake2s(repr(frames).encode(), digest_size=4).hexdigest()
    _, function, line = frames[0]
    place = f"{quote(function, safe='')}-{line}-{digest}"
    numbers = _numbers.get()
    if numbers is None:
        return f"{place}-u{next(_outside)}"
    numbers[place] = number = numbers.get(place, -1) + 1
    return f"{place}-{number}"


def _user_frames() -> Iterator[tuple[str, str, int]]:
    """Yield the frames of the call stack from the `with` statement to JAX's tracing call.

    Yields:
      Module, function and line of each frame.
    """
    frame: Any = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == "jax" or module.startswith("jax."):
            return
        if module != "contextlib" and frame.f_code.co_filename != __file__:
            yield module, frame.f_code.co_name, frame.f_lineno
        frame = frame.f_back
