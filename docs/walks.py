"""Ways of values through the files of dtrans, recorded by a profiler hook while jobs run.

A value enters a place when a function of another place calls one of this place with it. An argument
may also contain the value one level down: as an element of a container, or an operand of an
equation. A place is a file; `rows` and `engine` are one place each. The value passes a place if it
enters another one from there. Other places only look at it. Its name identifies a value, or a size
that is unique in the step.

The drawing shows eight functions of each walk, chosen for readers. A recorded walk that enters them
in another order is an error.

`_jax`, `errors`, `ir` and `ops` are no places: they are the language of all files.
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
jax.config.update("jax_num_cpu_devices", 2)  # each walk is recorded in a separate process

LANGUAGE = ("_jax", "errors", "ir", "ops")
ONE_PLACE = ("rows", "engine")
WIDTH, HIDDEN, COLUMNS = 11, 13, 17  # sizes that only x, `params/w1` and `params/table` have
KEY = jax.random.key(0)
X, Y, IDS = jnp.ones((8, WIDTH)), jnp.ones((8, 2)), jnp.arange(8) % 5
TX = optax.adam(1e-2)


@dataclasses.dataclass(frozen=True)
class Station:
    """A function that is called with the value.

    Attributes:
      role: the thread, if the roles of the job are threads.
      place: the file, as `zero/update`, or the folder.
      function: the function's qualified name, as `Slicer.update`.
    """

    role: str
    place: str
    function: str


@dataclasses.dataclass(frozen=True)
class Route:
    """The recorded way of a value.

    Attributes:
      calls: the calls with it, in their order.
      moves: the places between which it moved, with their roles.
    """

    calls: tuple[Station, ...]
    moves: frozenset[tuple[str, str, str]]

    @property
    def files(self) -> set[str]:
        """The places that the value passes."""
        sources = {source for _, source, _ in self.moves}
        return sources.intersection(target for *_, target in self.moves)

    @property
    def asked(self) -> int:
        """The number of places that only look at the value."""
        return len({target for *_, target in self.moves} - self.files)

    def through(self, names: Sequence[str]) -> list[Station]:
        """Return the first calls of functions, each behind the one before.

        Args:
          names: of each, its place and its function: `zero/update:slice_half`.

        Raises:
          ValueError: the value does not go through these functions in this order.
        """
        found, rest = [], iter(self.calls)
        for name in names:
            station = next((s for s in rest if f"{s.place}:{s.function}" == name), None)
            if station is None:
                raise ValueError(f"a walk does not enter {name} behind {found[-1:]}")
            found.append(station)
        return found


@dataclasses.dataclass(frozen=True)
class Walk:
    """A value and its way.

    Attributes:
      value: the value, for people.
      how: the job, for people.
      take: runs the job. It calls its argument where the recording begins.
      name: a part of the value's names; "" if it has no name.
      last: the size of its last dimension of two.
      through: eight functions on its way, as `Route.through` takes them.
      depth: levels of containers in which the value is looked for.
    """

    value: str
    how: str
    take: Callable[[Callable[[], None]], object]
    name: str
    last: int
    through: tuple[str, ...]
    depth: int = 1

    def route(self) -> Route:
        """Record the way of the value."""
        calls: list[Station] = []
        moves: set[tuple[str, str, str]] = set()
        begun = threading.Event()

        def hook(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            if event != "call" or not begun.is_set() or code.co_name.startswith("<"):
                return
            if frame.f_lasti > _start(code):  # a generator goes on, perhaps from before the walk
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
        if isinstance(v, (bytes, bytearray, memoryview)):  # the header of a message
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
            items = list(v.items())  # another thread may write to it
            return any(self._has(key, 0) or self._has(a, depth - 1) for key, a in items)
        return False


def _place(frame: FrameType) -> str | None:
    """Return the place of a frame; None outside of the package and in its language."""
    file = frame.f_code.co_filename
    if not file.startswith(f"{PACKAGE}/"):
        return None
    module = Path(file).relative_to(PACKAGE).with_suffix("").as_posix()
    folder = module.split("/")[0]
    return None if folder in LANGUAGE else folder if folder in ONE_PLACE else module


@functools.cache
def _start(code: CodeType) -> int:
    """Return the offset of the instruction at which calls of a function begin."""
    return next(i.offset for i in dis.get_instructions(code) if i.opname == "RESUME")


def _callers(frame: FrameType) -> Iterator[FrameType]:
    """Yield the frames below one, innermost first."""
    before = frame.f_back
    while before is not None:
        yield before
        before = before.f_back


def _arguments(frame: FrameType) -> list[object]:
    """Return the arguments of a call."""
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
    """Run a trainer and a server in threads; the recording begins with the second step."""
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
            "step/trace:trace.on_arrays",
            "step/cut:_Cutter.optimize_half",
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
            "step/trace:trace.on_arrays",
            "step/cut:_Cutter.optimize_half",
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
            "step/trace:trace.on_arrays",
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
