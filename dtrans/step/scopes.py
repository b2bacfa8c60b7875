"""Scopes in which a user says which part of a model is a stage, and which is split over devices.

    with dtrans.replicate(name="encoder"):
        h = encode(params, x)
    with dtrans.replicate():
        loss = decode(params, h, y)

A scope is EPL's taskgraph. It marks what is traced within it by its name stack, which `jit`,
`grad`, `vmap`, `remat` and inlining keep, and which changes no equation. The text of a scope is
`dtrans.<kind>[<place>:<name>:<devices>]`:

  - with a name, the place is empty: all scopes of one kind and name are one taskgraph;
  - without, each entry is a taskgraph of its own, and the place says which: function and line of
    the `with`, a digest of the lines on the way there from where JAX began to trace, and the number
    of the entry over this way, from 0.

Places are counted anew inside `numbered`, in which programs are traced, so that a function that is
traced twice gives the same text twice. A counter of all entries would not do: JAX keeps the trace
of a jitted function, so the text that was written first is met again in later traces, beside new
ones.

No scope may be in another (EPL: the same kind in itself, anything in `split`, `split` in
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
    """A taskgraph, as a user marked it.

    Attributes:
      kind: "replicate" or "split".
      place: which of the unnamed ones it is; empty for a named one.
      name: the user's; None if there is none.
      device_count: devices of one replica of it; None if that was not said.
    """

    kind: str
    place: str = ""
    name: str | None = None
    device_count: int | None = None

    @property
    def key(self) -> tuple[str, str]:
        """What makes it this scope and no other."""
        return self.kind, self.place or f":{self.name}"

    def __str__(self) -> str:
        if self.name is not None:
            return f"{self.kind}(name={self.name!r})"
        function, line, _, entry = unquote(self.place).rsplit("-", 3)
        number = "" if entry in ("0", "") else f", entry {entry}"
        return f"the {self.kind}() in {function}, line {line}{number}"

    @property
    def text(self) -> str:
        """How it is written in a name stack."""
        name = "" if self.name is None else quote(self.name, safe="")
        count = "" if self.device_count is None else str(self.device_count)
        return f"dtrans.{self.kind}[{self.place}:{name}:{count}]"


_TEXT = re.compile(r"dtrans\.(replicate|split)\[([\w.~%-]*):([\w.~%-]*):(\d*)\]")

_entered: ContextVar[Scope | None] = ContextVar("dtrans_scope", default=None)
_numbers: ContextVar[dict[str, int] | None] = ContextVar("dtrans_scope_numbers", default=None)
_elsewhere = itertools.count()  # entries outside of any `numbered`: never the same again


@contextmanager
def replicate(device_count: int | None = None, name: str | None = None) -> Iterator[None]:
    """What is computed within is a taskgraph: a stage of the pipeline, replicated for data
    parallelism.

    To be used in the function that is traced. Each entry is a taskgraph of its own, in a loop too;
    those with the same name are one. (EPL, `epl.replicate`; epl/strategies/replicate.py)

    Args:
      device_count: the devices that one replica of it has: each takes a part of the replica's part
        of the batch, so that it makes as many times as many replicas. The same in all scopes of a
        model.
      name: for messages and plans, and to enter one taskgraph several times.

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
    """What is computed within is split over devices: tensor parallelism.

    (EPL, `epl.split`; epl/strategies/split.py)

    Args:
      device_count: over how many devices; all there are if it is not said.
      name: for messages and plans, and to enter one taskgraph several times.

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
    """What is reduced over rows of the batch within is of each trainer's own rows, in a step that
    is exact otherwise.

    To be used in the function that is traced: batch normalisation as Paddle's trainers and torch's
    DistributedDataParallel have it, without an exchange. A sum, a mean or a maximum over rows
    stands for that of the whole batch; what of it enters the state or the results is the mean over
    trainers. Derivatives are in the scope too, but for gradients of parameters, which are of the
    whole batch. On one device it changes nothing.

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
      "exact: mean over 8 rows, with dtrans.local() of each trainer's own"
    """
    with jax.named_scope(LOCAL):
        yield


LOCAL = "dtrans.local"


def in_local_scope(eqn: JaxprEqn) -> bool:
    """Whether an equation was traced in `local`, or is the derivative of one that was."""
    return LOCAL in scope_of(eqn)


def has_local_scope(eqn: JaxprEqn) -> bool:
    """Whether it was, or anything in its bodies."""
    return any(map(in_local_scope, (eqn, *equations_inside(eqn))))


@contextmanager
def numbered() -> Iterator[None]:
    """Count entries of unnamed scopes from the beginning. To be used around the tracing of one
    program.

    Example:
      >>> import jax
      >>> from dtrans.step.scopes import numbered, replicate, scope_of_eqn
      >>> def traced():
      ...     def f(x):  # a new function: JAX keeps nothing of it
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
    """The scope that an equation was traced in, or that all marked equations of its bodies (loop,
    `remat`) were.

    Derivatives are in the scope of what they are derived from.

    Raises:
      ConfigError: it is in several, or its bodies are: a scope within another, or two stages in one
        loop.
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
    """The scope of each of the equations of a program.

    Where an unnamed scope was entered inside a function that JAX calls by one equation (`remat`, a
    loop), each of these equations is a scope of its own: the function is traced once however often
    it is called. A function under `jax.jit` that is inlined leaves no such equation, and marks one
    scope for all its calls: enter scopes around its calls.

    Raises:
      ConfigError: an equation is in several; scopes of one name say different numbers of devices.

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
    """The scopes of all equations of a program, each once, in the order in which they come.

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
            f"{a} has device_count={a.device_count} and device_count={b.device_count}: scopes of "
            "one name are one"
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
    """Which entry of an unnamed scope this is."""
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
    """Module, function and line of the frames between here and where JAX began to trace, the inmost
    first."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == "jax" or module.startswith("jax."):
            return
        if module != "contextlib" and frame.f_code.co_filename != __file__:
            yield module, frame.f_code.co_name, frame.f_lineno
        frame = frame.f_back
