"""The way of a value through the files of dtrans, recorded by a profiler hook while a plan is made
and takes a step.

A station is a function that is entered from another file with the value, or with something that has
it one level down: an element of a container, an operand of an equation. It counts the first time.
The value is known by its name, or by a size that nothing else in the step has. `_jax`, `errors`,
`ir` and `ops` are no stations: they are the language that the others speak, and every file speaks
it all the time.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dtrans
from dtrans._jax import JaxprEqn


PACKAGE = Path(dtrans.__file__).parent
jax.config.update("jax_num_cpu_devices", 2)  # a walk is recorded in a process of its own

LANGUAGE = ("_jax", "errors", "ir", "ops")
WIDTH, HIDDEN = 11, 13  # sizes that only x and `params/w1` have
KEY = jax.random.key(0)
X, Y = jnp.ones((8, WIDTH)), jnp.ones((8, 2))


@dataclasses.dataclass(frozen=True)
class Station:
    """A function that the value goes through.

    Attributes:
      file: Its module, `zero/update`.
      function: Its name, `Slicer.update`.
    """

    file: str
    function: str


@dataclasses.dataclass(frozen=True)
class Walk:
    """A value and its way.

    Attributes:
      value: What it is, for people.
      how: The job, for people.
      take: Makes the plan, and one step with it.
      name: What names of the value have in them; "" where it has no name.
      last: The size of its last dimension of two.
    """

    value: str
    how: str
    take: Callable[[], object]
    name: str
    last: int

    def stations(self) -> list[Station]:
        """The stations in their order."""
        route: list[Station] = []
        seen: set[CodeType] = set()

        def hook(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            if event != "call" or code in seen or code.co_name.startswith("<") or not _ours(frame):
                return
            if not any(
                self._has(frame.f_locals.get(v), 1) for v in code.co_varnames[: _arguments(code)]
            ):
                return
            before = frame.f_back
            while before is not None and not _ours(before):
                before = before.f_back
            if before is None or before.f_code.co_filename != code.co_filename:
                seen.add(code)
                route.append(Station(_module(code), code.co_qualname.replace(".<locals>", "")))

        jax.clear_caches()
        sys.setprofile(hook)
        try:
            self.take()
        finally:
            sys.setprofile(None)
        return [s for s in route if s.file.split("/")[0] not in LANGUAGE]

    def _is(self, v: object) -> bool:
        if isinstance(v, str):
            return self.name != "" and self.name in v
        shape = getattr(getattr(v, "aval", v), "shape", None)
        return isinstance(shape, tuple) and len(shape) == 2 and shape[1] == self.last

    def _has(self, v: object, depth: int) -> bool:
        if self._is(v):
            return True
        if isinstance(v, JaxprEqn):
            return any(self._is(a) for a in (*v.invars, *v.outvars))
        if depth and isinstance(v, (tuple, list)):
            return any(self._has(a, depth - 1) for a in v)
        if depth and isinstance(v, dict):
            return any(self._has(a, 0) for a in v) or any(
                self._has(a, depth - 1) for a in v.values()
            )
        return False


def files_of(stations: list[Station]) -> list[str]:
    """The files in the order in which the value visits them."""
    return [file for file, _ in itertools.groupby(s.file for s in stations)]


def returns(stations: list[Station]) -> int:
    """Visits of files after their first."""
    files = files_of(stations)
    return len(files) - len(set(files))


def _ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(f"{PACKAGE}/")


def _module(code: CodeType) -> str:
    return Path(code.co_filename).relative_to(PACKAGE).with_suffix("").as_posix()


def _arguments(code: CodeType) -> int:
    return code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)


def _programs() -> tuple[dtrans.Program, dtrans.Program]:
    tx = optax.adam(1e-2)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)

    def init(key: jax.Array) -> tuple[Any, Any]:
        one, two = jax.random.split(key)
        params = {
            "w1": jax.random.normal(one, (WIDTH, HIDDEN)),
            "w2": jax.random.normal(two, (HIDDEN, 2)),
        }
        return params, tx.init(params)

    step = dtrans.make_train_step(loss, tx)
    return dtrans.trace(step, *jax.eval_shape(init, KEY), X, Y), dtrans.trace(init, KEY)


def _stepped(plan: Any) -> object:
    job = plan.on_mesh()
    return job.step(job.init(KEY), X, Y)


def _pserver() -> object:
    pservers = "127.0.0.1:1,127.0.0.1:2"
    return _stepped(
        dtrans.pserver(
            *_programs(),
            pservers=pservers,
            trainers=2,
            placement=dtrans.BlockPlacement(min_block_size=16),
        )
    )


WALKS = (
    Walk(
        "A gradient, from the loss to the new parameter",
        "`dtrans.pserver` with two trainers and two servers, `params/w1` in blocks",
        _pserver,
        "params/w1",
        HIDDEN,
    ),
    Walk(
        "A parameter of which each rank has a slice",
        "`dtrans.sharding(stage=3)` with two ranks, `params/w1`",
        lambda: _stepped(
            dtrans.sharding(
                *_programs(), stage=3, degree=2, slices=dtrans.Slicing(min_slice_size=0)
            )
        ),
        "params/w1",
        HIDDEN,
    ),
    Walk(
        "A micro-batch",
        "`dtrans.pipeline` with two stages and two micro-batches, the rows of `x`",
        lambda: _stepped(dtrans.pipeline(*_programs(), num_stages=2, num_micro_batch=2)),
        "",
        WIDTH,
    ),
)
