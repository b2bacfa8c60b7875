"""Paths of values through the files of dtrans, for the drawings of docs/architecture.md.

A profiler hook records each path while a job runs. A value enters a file when a function of another
file calls a function of this file with it. The argument may be the value itself, a container of it,
or an equation with it as an operand. A file *passes* the value if the value enters another file
from there; otherwise the file only reads it. The folders `rows` and `engine` count as one file
each. Calls of functions in `_jax`, `errors`, `ir` and `ops` are not recorded, since all files use
them.

The hook recognizes a value by its name, or by a size that no other value of the step has.

The drawing shows eight functions of each path. If a recorded path does not contain them in this
order, `Route.through` raises an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dtrans
from dtrans._jax import JaxprEqn
from dtrans.endpoints import ReservedEndpoints


PACKAGE = Path(dtrans.__file__).parent
jax.config.update("jax_num_cpu_devices", 2)  # each path is recorded in a separate process

LANGUAGE = ("_jax", "errors", "ir", "ops")  # folders whose calls are not recorded
ONE_PLACE = ("rows", "engine")  # folders that count as one file
WIDTH, HIDDEN, COLUMNS = 11, 13, 17  # sizes that only `x`, `params/w1` and `params/table` have
KEY = jax.random.key(0)
X, Y, IDS = jnp.ones((8, WIDTH)), jnp.ones((8, 2)), jnp.arange(8) % 5
TX = optax.adam(1e-2)


@dataclasses.dataclass(frozen=True)
class Station:
    """A function that is called with the value.

    Attributes:
      role: the name of the thread, e.g. `trainer`.
      place: the file, e.g. `zero/update`, or a folder that counts as one file.
      function: the function's qualified name, e.g. `Slicer.update`.
    """

    role: str
    place: str
    function: str


@dataclasses.dataclass(frozen=True)
class Route:
    """The recorded path of a value.

    Attributes:
      calls: the calls with the value, in order.
      moves: triples (role, file, next file): a function of the next file was called with the value.
    """

    calls: tuple[Station, ...]
    moves: frozenset[tuple[str, str, str]]

    @property
    def files(self) -> set[str]:
        """The files that pass the value."""
        sources = {source for _, source, _ in self.moves}
        return sources.intersection(target for *_, target in self.moves)

    @property
    def asked(self) -> int:
        """The number of files that only read the value."""
        return len({target for *_, target in self.moves} - self.files)

    def through(self, names: Sequence[str]) -> list[Station]:
        """Return a call of each function, in order: the first after the call of the previous one.

        Args:
          names: files and functions, e.g. `zero/update:slice_half`.

        Raises:
          ValueError: the path does not contain these functions in this order.
        """
        found, rest = [], iter(self.calls)
        for name in names:
            station = next((s for s in rest if f"{s.place}:{s.function}" == name), None)
            if station is None:
                raise ValueError(f"a path has no call of {name} after {found[-1:]}")
            found.append(station)
        return found


@dataclasses.dataclass(frozen=True)
class Walk:
    """A value whose path is recorded.

    Attributes:
      value: a description of the value, for the page.
      how: a description of the job, for the page.
      take: function that runs the job. It calls its argument to begin the recording.
      name: a part of the value's names; "" if it has no name.
      last: the number of columns of the value, which is a matrix.
      through: eight functions that the drawing shows, as arguments of `Route.through`.
      depth: the number of container levels in which the hook searches for the value.
    """

    value: str
    how: str
    take: Callable[[Callable[[], None]], object]
    name: str
    last: int
    through: tuple[str, ...]
    depth: int = 1

    def route(self) -> Route:
        """Run the job, and return the path of the value."""
        calls: list[Station] = []
        moves: set[tuple[str, str, str]] = set()
        begun = threading.Event()

        def hook(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            if event != "call" or not begun.is_set() or code.co_name.startswith("<"):
                return
            if frame.f_lasti > _start(code):  # a generator resumes, which is not a call
                return
            place = _place(frame)
            if place is None or not any(self._has(x, self.depth) for x in _arguments(frame)):
                return
            role = threading.current_thread().name
            calls.append(Station(role, place, code.co_qualname.replace(".<locals>", "")))
            before = next(filter(None, map(_place, _callers(frame))), "")
            if before not in ("", place):
                moves.add((role, before, place))

        jax.clear_caches()
        threading.setprofile(hook)
        sys.setprofile(hook)
        try:
            self.take(begun.set)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
        return Route(tuple(calls), frozenset(moves))

    def _is(self, v: object) -> bool:
        if isinstance(v, str):
            return self.name != "" and self.name in v
        if isinstance(v, (bytes, bytearray, memoryview)):  # a message: its header contains names
            return self.depth > 1 and self.name.encode() in bytes(v[:4096])
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
            items = list(v.items())  # a copy, since another thread may change the dict
            return any(self._has(key, 0) or self._has(a, depth - 1) for key, a in items)
        return False


def _place(frame: FrameType) -> str | None:
    """Return the file of a frame, or None if its calls are not recorded."""
    file = frame.f_code.co_filename
    if not file.startswith(f"{PACKAGE}/"):
        return None
    module = Path(file).relative_to(PACKAGE).with_suffix("").as_posix()
    folder = module.split("/")[0]
    return None if folder in LANGUAGE else folder if folder in ONE_PLACE else module


@functools.cache
def _start(code: CodeType) -> int:
    """Return the offset of a function's first instruction, after its prologue."""
    return next(i.offset for i in dis.get_instructions(code) if i.opname == "RESUME")


def _callers(frame: FrameType) -> Iterator[FrameType]:
    """Yield the callers of a frame, innermost first."""
    before = frame.f_back
    while before is not None:
        yield before
        before = before.f_back


def _arguments(frame: FrameType) -> list[object]:
    """Return the values of a call's arguments."""
    code: CodeType = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)
    return [frame.f_locals.get(name) for name in code.co_varnames[:count]]


# -- the jobs --------------------------------------------------------------------------------------

TRAINER, SERVER = "trainer", "server"


def _programs() -> tuple[dtrans.Program, dtrans.Program]:
    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)

    def init(key: jax.Array) -> tuple[Any, Any]:
        one, two = jax.random.split(key)
        params = {
            "w1": jax.random.normal(one, (WIDTH, HIDDEN)),
            "w2": jax.random.normal(two, (HIDDEN, 2)),
        }
        return params, TX.init(params)

    step = dtrans.make_train_step(loss, TX)
    return dtrans.trace(step, *jax.eval_shape(init, KEY), X, Y), dtrans.trace(init, KEY)


def _step(plan: Any, *batch: Any) -> None:
    job = plan.on_mesh()
    job.step(job.init(KEY), *batch)


def _gradient(begin: Callable[[], None]) -> None:
    begin()
    blocks = dtrans.BlockPlacement(min_block_size=16)
    options: dict[str, Any] = {"pservers": "127.0.0.1:1,127.0.0.1:2", "trainers": 2}
    _step(dtrans.pserver(*_programs(), placement=blocks, **options), X, Y)


def _slice(begin: Callable[[], None]) -> None:
    begin()
    slices = dtrans.Slicing(min_slice_size=0)
    _step(dtrans.sharding(*_programs(), stage=3, degree=2, slices=slices), X, Y)


def _micro_batch(begin: Callable[[], None]) -> None:
    begin()
    _step(dtrans.pipeline(*_programs(), num_stages=2, num_micro_batch=2), X, Y)


def _row(begin: Callable[[], None]) -> None:
    def loss(params: Any, ids: jax.Array) -> jax.Array:
        return jnp.mean((params["table"][ids] @ params["out"]) ** 2)

    def init(key: jax.Array) -> tuple[Any, Any]:
        table = jax.random.normal(key, (64, COLUMNS))
        params = {"table": table, "out": jnp.ones((COLUMNS, 2))}
        return params, TX.init(params)

    step = dtrans.make_train_step(loss, TX)
    main = dtrans.trace(step, *jax.eval_shape(init, KEY), IDS)
    servers = "127.0.0.1:1,127.0.0.1:2"
    plan = dtrans.pserver(
        main, dtrans.trace(init, KEY), pservers=servers, trainers=2, sparse="auto"
    )
    begin()
    _step(plan, IDS)


def _message(begin: Callable[[], None]) -> None:
    """Run a trainer and a server in threads, and begin the recording before the second step."""
    with contextlib.closing(ReservedEndpoints()) as reserved:
        (endpoint,) = reserved.choose(1)
        plan = dtrans.pserver(*_programs(), pservers=endpoint, trainers=1)

        def serve() -> None:
            with dtrans.Executor(deadline=60) as executor:
                server = plan.servers[endpoint]
                executor.run(server.main, executor.run(server.startup, KEY))

        def train() -> None:
            with dtrans.Executor(deadline=60) as executor:
                params = executor.run(plan.trainer_startup, KEY)
                params, _ = executor.run(plan.trainer, params, X, Y)
                begin()
                executor.run(plan.trainer, params, X, Y)

        threads = [
            threading.Thread(target=role, name=name)
            for role, name in ((serve, SERVER), (train, TRAINER))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


WALKS = (
    Walk(
        "A gradient, from the loss to the new parameter",
        "`dtrans.pserver` with two trainers and two servers on a mesh: `params/w1`, in blocks",
        _gradient,
        "params/w1",
        HIDDEN,
        (
            "step/marks:make_train_step.step",
            "step/halves:_StepDivider.optimize_half",
            "engine:SplitWriter.equation",
            "parameter_server/placement:place",
            "slicing/unit_program:LevelProgram.block",
            "parameter_server/trainer_program:TrainerCommWriter.send",
            "run/parameter_server/mesh_fabric:MeshStepFabric._send",
            "run/parameter_server/update:CompiledUpdate.run",
        ),
    ),
    Walk(
        "A parameter, a slice on each rank",
        "`dtrans.sharding(stage=3)` with two ranks: `params/w1`",
        _slice,
        "params/w1",
        HIDDEN,
        (
            "step/marks:make_train_step.step",
            "step/halves:_StepDivider.optimize_half",
            "zero/choose_slices:_choose_layer_axes",
            "zero/update:slice_half",
            "zero/all_gather:Gatherer.emit",
            "zero/reduce_scatter:Scatterer.sums",
            "zero/rank_update:RankUpdate.update",
            "run/collective/state_arrays:StateArrays.state",
        ),
    ),
    Walk(
        "A micro-batch",
        "`dtrans.pipeline` with two stages and two micro-batches: the rows of `x`",
        _micro_batch,
        "",
        WIDTH,
        (
            "step/marks:make_train_step.step",
            "pipeline_parallel/staged_model:micro_batch_of",
            "step/capture:operands_of",
            "pipeline_parallel/assign_stages:stages_of",
            "pipeline_parallel/stage_vjp:StageVjp.write_backward",
            "run/pipeline_parallel/job:PipelineJob.step",
            "run/pipeline_parallel/compile_step:compile_step",
            "run/pipeline_parallel/micro_batch:of_micro_batch.run",
        ),
    ),
    Walk(
        "A message, from the trainer to the server and back",
        "a trainer and a server of `dtrans.pserver` in their second step: `params/w1`",
        _message,
        "params/w1",
        HIDDEN,
        (
            "run/executor:Executor.run",
            "run/parameter_server/fabric:EndpointFabric._send",
            "protocol/trainer/trainer_steps:TrainerSteps.request",
            "run/net/zmq_transport:ZmqLink.send",
            "protocol/inbox:Inbox._target",
            "run/parameter_server/sync_update:SyncUpdate.begin",
            "run/net/zmq_transport:ZmqListener.send",
            "protocol/inbox:Inbox._target",
        ),
        depth=2,
    ),
    Walk(
        "A row of a table",
        '`dtrans.pserver(sparse="auto")` with two trainers and two servers on a mesh, the first '
        "step: rows of `params/table`",
        _row,
        "params/table",
        COLUMNS,
        (
            "parameter_server/server_program:ServerProgramWriter._rows",
            "parameter_server/tables/lookups:find_lookups",
            "parameter_server/trainer_program:TrainerCommWriter.on_rows.writer",
            "run/parameter_server/mesh_fabric:MeshStepFabric._prefetch",
            "run/parameter_server/tables/mesh_tables:prefetched",
            "run/parameter_server/mesh_fabric:MeshStepFabric._send_rows",
            "run/parameter_server/tables/mesh_tables:sent_rows",
            "run/parameter_server/tables/row_updates:RowUpdates.run",
        ),
    ),
)
