"""Scopes with which a user marks stages of a model, and layers that are split over devices.

    with dtrans.replicate(name="encoder"): h = encode(params, x) with dtrans.replicate(): loss =
    decode(params, h, y)

A scope is EPL's taskgraph. It marks the equations traced within it by its name stack, which `jit`,
`grad`, `vmap`, `remat` and inlining keep, and which changes no equation. The text of a scope is
`dtrans.<kind>[<place>:<name>:<devices>]`:

  - with a name, the place is empty: all scopes of one kind and name are one taskgraph;
  - without, each entry is its own taskgraph. The place has function and line of the `with`, a
    digest of the lines from JAX's tracing call, and a count of entries.

Counts start from 0 inside `numbered`, in which programs are traced: a function that is traced twice
has the same text twice. A global counter would not do: JAX caches the trace of a jitted function,
so that old texts appear in later traces next to new ones.

Scopes must not be nested (EPL: the same kind in itself, anything in `split`, `split` in
`replicate`).
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
    """Taskgraph that a user marked.

    Attributes:
      kind: "replicate" or "split".
      place: position of an unnamed one; empty for a named one.
      name: the user's name; None if there is none.
      device_count: devices of one replica; None if not specified.
    """

    kind: str
    place: str = ""
    name: str | None = None
    device_count: int | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Identity of the scope."""
        return self.kind, self.place or f":{self.name}"

    def __str__(self) -> str:
        if self.name is not None:
            return f"{self.kind}(name={self.name!r})"
        function, line, _, entry = unquote(self.place).rsplit("-", 3)
        number = "" if entry in ("0", "") else f", entry {entry}"
        return f"the {self.kind}() in {function}, line {line}{number}"

    @property
    def text(self) -> str:
        """Text of the scope in a name stack."""
        name = "" if self.name is None else quote(self.name, safe="")
        count = "" if self.device_count is None else str(self.device_count)
        return f"dtrans.{self.kind}[{self.place}:{name}:{count}]"


_TEXT = re.compile(r"dtrans\.(replicate|split)\[([\w.~%-]*):([\w.~%-]*):(\d*)\]")

_entered: ContextVar[Scope | None] = ContextVar("dtrans_scope", default=None)
_numbers: ContextVar[dict[str, int] | None] = ContextVar("dtrans_scope_numbers", default=None)
_elsewhere = itertools.count()  # entries outside of `numbered` get unique numbers


@contextmanager
def replicate(device_count: int | None = None, name: str | None = None) -> Iterator[None]:
    """Mark a taskgraph: a stage of the pipeline, replicated for data parallelism.

    Use it in the traced function. Each entry is its own taskgraph, in a loop too; entries with one
    name are one. (EPL, `epl.replicate`; epl/strategies/replicate.py)

    Args:
      device_count: devices of one replica; each takes a part of the replica's batch, which
        multiplies the number of replicas. It must be equal in all scopes of a model.
      name: name in messages and plans, and to enter one taskgraph several times.

    Raises:
      ConfigError: it is entered within another scope; `device_count` is no positive integer; the
        name is empty.

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
    """Mark a layer that is split over devices: tensor parallelism.

    (EPL, `epl.split`; epl/strategies/split.py)

    Args:
      device_count: number of devices; all by default.
      name: name in messages and plans, and to enter one taskgraph several times.

    Raises:
      ConfigError: it is entered within another scope; `device_count` is no positive integer; the
        name is empty.

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
    """Reduce over each trainer's own rows within this scope, in a step that is exact otherwise.

    Use it in the traced function, for batch normalisation without communication, as in Paddle and
    torch's DistributedDataParallel. A sum, a mean or a maximum over rows stands for that of the
    full batch. If it enters the state or the results, these are the mean over trainers. Derivatives
    are in the scope too, except gradients of parameters, which cover the full batch. On one device
    it changes nothing.

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
    """Return True if an equation, or the one it is the derivative of, was traced in `local`."""
    return LOCAL in scope_of(eqn)


def has_local_scope(eqn: JaxprEqn) -> bool:
    """Return True if an equation or one in its bodies was traced in `local`."""
    return any(map(in_local_scope, (eqn, *equations_inside(eqn))))


@contextmanager
def numbered() -> Iterator[None]:
    """Count entries of unnamed scopes from 0. Use it around the tracing of one program.

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
    """Return the scope of an equation, or of all marked equations in its bodies (loop, `remat`).

    Derivatives are in the scope of the original equation.

    Raises:
      ConfigError: there are several scopes: nested ones, or two stages in one loop.
    """
    scopes = {scope.key: scope for scope in _scopes_of(eqn)}
    if len(scopes) > 1:
        a, b = list(scopes.values())[:2]
        _refuse_different(a, b)
        raise ConfigError(
            f"one {eqn.primitive.name} equation is in {a} and in {b}: scopes must not be within "
            "each other, nor may "
            f"one loop, branch or rematerialised function have several"
        )
    return next(iter(scopes.values()), None)


def scopes_of(eqns: list[JaxprEqn]) -> tuple[Scope | None, ...]:
    """Return the scope of each equation of a program.

    JAX traces a function that it calls by one equation (`remat`, a loop) once. An unnamed scope
    inside it becomes a separate scope for each of these equations. A `jax.jit` function that is
    inlined leaves no such equation, and has one scope for all its calls: enter scopes around them.

    Raises:
      ConfigError: an equation is in several scopes; scopes of one name differ in device_count.

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
    """Return the scopes of all equations of a program, each once, in order.

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
    return tuple({s.key: s for eqn in opened(jaxpr).eqns for s in _scopes_of(eqn)}.values())


def _scopes_of(eqn: JaxprEqn) -> Iterator[Scope]:
    for inner in (eqn, *equations_inside(eqn)):
        for kind, place, name, count in _TEXT.findall(scope_of(inner)):
            yield Scope(kind, place, unquote(name) or None, int(count) if count else None)


def _refuse_different(a: Scope, b: Scope) -> None:
    if a.key == b.key and a.device_count != b.device_count:
        raise ConfigError(
            f"{a} has device_count={a.device_count} and device_count={b.device_count}; scopes of "
            "one name are one stage or split: give all the same number"
        )


@contextmanager
def _scope(kind: str, device_count: int | None, name: str | None) -> Iterator[None]:
    check_int(f"device_count of {kind}", device_count, "a positive integer", or_none=True)
    if name is not None:
        check_name(f"name of {kind}", name, "a text that is not empty")
    scope = Scope(kind, "" if name else _place(), name, device_count)
    outer = _entered.get()
    if outer is not None:
        raise ConfigError(
            f"{scope} is entered within {outer}: scopes of stages and splits cannot be nested; end "
            "one first"
        )
    before = _entered.set(scope)
    try:
        with jax.named_scope(scope.text):
            yield
    finally:
        _entered.reset(before)


def _place() -> str:
    """Return the position of an unnamed scope."""
    frames = list(_way())
    digest = hashlib.blake2s(repr(frames).encode(), digest_size=4).hexdigest()
    _, function, line = frames[0]
    way = f"{quote(function, safe='')}-{line}-{digest}"
    numbers = _numbers.get()
    if numbers is None:
        return f"{way}-u{next(_elsewhere)}"
    numbers[way] = number = numbers.get(way, -1) + 1
    return f"{way}-{number}"


def _way() -> Iterator[tuple[str, str, int]]:
    """Return module, function and line of the frames up to JAX's tracing call, innermost first."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == "jax" or module.startswith("jax."):
            return
        if module != "contextlib" and frame.f_code.co_filename != __file__:
            yield module, frame.f_code.co_name, frame.f_lineno
        frame = frame.f_back
