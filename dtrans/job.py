"""Interface of running jobs: the methods that the jobs of all strategies have.

A plan describes a distributed training job, and a `Job` runs the plan. A job consists of compiled
code and of connections to other processes. The state of training (parameters and optimizer state)
is a separate value: `job.step` takes a state and a batch, and returns the next state. So a training
loop can keep, save or discard any state. `dtrans.plan` creates the job of a plan.
"""

from __future__ import annotations

import abc
import collections
import itertools
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import jax

from dtrans._jax import ClosedJaxpr, without_mesh
from dtrans.checks import check_int
from dtrans.errors import ConfigError, Rewound, StateError
from dtrans.ir.display import folded_html
from dtrans.ir.program import Program
from dtrans.ir.selection import subset
from dtrans.step import one_state
from dtrans.step.applied import Applied, groups_by_bytes
from dtrans.step.batch_sharing import part_of_batch
from dtrans.step.hyperparameters import replace_hyperparameters
from dtrans.step_meter import JobReport, StepMeter


BatchOfStep = Callable[[int], Sequence[Any]]  # step number -> batch arguments


@runtime_checkable
class SeekableBatches(Protocol):
    """Iterable of batches with a method `seek`, which jumps to the batch of any step.

    `job.steps` needs `seek` to repeat steps after the failure of a process. `dtrans.feed` returns
    an object of this kind.
    """

    def seek(self, step: int) -> None:
        """Continue with the batch of step number `step`."""

    def __iter__(self) -> Iterator[Sequence[Any]]:
        """Return an iterator over the batches, from the current position on."""


@runtime_checkable
class CountedBatches(Protocol):
    """Iterable of batches that separates reading a batch from counting a finished step.

    `job.steps` reads some batches before their steps run. A checkpoint must store only the number
    of finished steps, or the job would skip batches after a restart. `dtrans.feed` returns an
    object of this kind.
    """

    def read_ahead(self) -> Iterator[Sequence[Any]]:
        """Yield the next batches, and leave the stored position unchanged."""

    def advance(self, batch: Sequence[Any]) -> None:
        """Move the stored position by one step, because the step of this batch has finished."""


def _numbered_steps(
    job: Job,
    state: Any,
    batches: BatchOfStep | SeekableBatches,
    numbers: tuple[int, int],
    ahead: int,
) -> Iterator[tuple[Any, ...]]:
    """Run the steps from `start` to `stop - 1`, and repeat steps after the failure of a process.

    If a process fails, the job goes back to an earlier state and raises `Rewound`. This function
    then continues from that state, with the batch of the next step.

    Args:
      job: the job.
      state: the state before the first step.
      batches: the batches, by step number.
      numbers: the pair (start, stop).
      ahead: number of batches that are read before their step runs.
    """
    start, stop = numbers
    offset = max(start, job.first_step) - job.first_step
    job.repeats_steps = True
    try:
        while True:
            first = offset + job.first_step
            try:
                if isinstance(batches, SeekableBatches):
                    batches.seek(first)
                    count = max(0, stop - first)
                    yield from _steps_ahead(job, state, batches, ahead, count)
                else:
                    yield from _steps_ahead(job, state, map(batches, range(first, stop)), ahead)
                job.end_loop()  # a process may be lost after the last step
            except Rewound as e:
                state = e.state
            else:
                return
    finally:
        job.repeats_steps = False


def _numbers(start: int, stop: int | None) -> tuple[int, int]:
    """Return the pair (start, stop), or raise ConfigError if the user did not pass `stop`.

    A loop over a function of the step number needs the number of the last step.
    """
    if stop is None:
        raise ConfigError(
            "batches is a function of the step number, or has a method seek, so job.steps cannot "
            "know the last step; pass the number of steps: job.steps(state, batches, stop=1000)"
        )
    return start, stop


def _steps_ahead(
    job: Job, state: Any, batches: Iterable[Sequence[Any]], ahead: int, count: int | None = None
) -> Iterator[tuple[Any, ...]]:
    """Run `job.step` for each batch, and yield its results.

    Args:
      job: the job.
      state: the state before the first step.
      batches: the batches.
      ahead: number of steps between `job.prefetch` and `job.step` of a batch.
      count: number of steps to run; None to run until the batches end.
    """
    counted = batches if isinstance(batches, CountedBatches) else None
    source = iter(batches) if counted is None else counted.read_ahead()
    for batch in _announced(job, itertools.islice(source, count), ahead):
        state, *results = job.step(state, *batch)
        if counted is not None:
            counted.advance(batch)
        yield state, *results


def _announced(job: Job, batches: Iterable[Sequence[Any]], ahead: int) -> Iterator[Sequence[Any]]:
    """Yield the batches unchanged, but pass each batch to `job.prefetch` some steps earlier.

    For `ahead=1`, `job.prefetch` gets batch 5 before this function yields batch 4. The first batch
    is never prefetched, because its step runs at once.
    """
    waiting = collections.deque[Sequence[Any]]()
    for batch in batches:
        if waiting:
            job.prefetch(*batch)
        waiting.append(batch)
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting


# These methods create arrays or compile, so they must run outside the caller's mesh.
_ON_DEVICES = {
    "init", "step", "prefetch", "place", "params", "opt_state", "state_of", "lower",
    "server_arrays",
}  # fmt: skip


class StateFunctions(abc.ABC):
    """Methods that read or convert a job's state: parameters, optimizer state, hyperparameters.

    A job stores its state in its own form, such as slices of parameters on several devices. These
    methods convert between this form and the pytrees of the user's step.

    Attributes:
      plan: the plan that the job runs.
    """

    plan: Any
    _functions: weakref.WeakKeyDictionary[Any, Applied] | None = None

    @abc.abstractmethod
    def params(self, state: Any) -> Any:
        """Return the parameters as a pytree, like the step's first argument."""

    @abc.abstractmethod
    def opt_state(self, state: Any) -> Any:
        """Return the optimizer state as a pytree, like the step's second argument."""

    @abc.abstractmethod
    def state_of(self, params: Any, opt_state: Any) -> Any:
        """Convert parameters and optimizer state of the single-device step to a state of this job.

        The job divides the arrays among devices or servers, as `init` does. Use this method to
        continue training from a state of another program.

        Raises:
          TraceError: the structure differs from the structure of the step's arguments.
          StateError: an array has another shape or dtype.
        """

    def gather(self, state: Any) -> Any:
        """Convert the job's state to full arrays, in the form that the single-device step uses.

        Use this method to save or evaluate the state without dtrans; `scatter` is its inverse.

        Args:
          state: the state that `job.init` or `job.step` returned.

        Returns:
          (params, opt_state), or the one state of a step that takes and returns one state.

        Example:
          >>> import jax, jax.numpy as jnp, dtrans
          >>> def step(state, x):
          ...     loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
          ...     return {"w": state["w"] - 0.5 * g, "steps": state["steps"] + 1}, loss
          >>> init = lambda: {"w": jnp.ones(2), "steps": jnp.zeros((), int)}
          >>> x = jnp.eye(2)
          >>> plan = dtrans.nccl2(dtrans.trace(step, init(), x), dtrans.trace(init), trainers=2)
          >>> job = plan.simulate()
          >>> state, loss = job.step(job.init(), x)
          >>> jax.tree.map(lambda a: a.tolist(), job.gather(state))
          {'steps': 1, 'w': [0.5, 0.5]}
        """
        return one_state.merge_state(self.plan.main, self.params(state), self.opt_state(state))

    def scatter(self, state: Any) -> Any:
        """Convert a single-device state to a state of this job; the inverse of `gather`.

        Raises:
          TraceError: the structure differs from the structure of the step's arguments.
          StateError: an array has another shape or dtype.
        """
        return self.state_of(*one_state.split_state(self.plan.main, state))

    @without_mesh
    def with_hyperparameters(self, state: Any, **values: float) -> Any:
        """Return a state in which some hyperparameters of the optimizer have new values.

        The optimizer must be wrapped in `optax.inject_hyperparams`, which stores hyperparameters in
        the optimizer state. Use this method between steps, for example to lower the learning rate.
        The hyperparameters must be in the state of this process. If parameter servers or pipeline
        stages in other processes have them, this method raises an error: pass the value as an
        argument of the step instead.

        Args:
          **values: new values, e.g. `learning_rate=1e-3`. If several optimizers have a
            hyperparameter of this name, use the path of the leaf:
            `**{"opt_state/critic/hyperparams/learning_rate": 1e-3}`.

        Raises:
          ConfigError: no optimizer has a hyperparameter of this name, or several have it. Or
            another process stores its value.

        Example:
          >>> import jax.numpy as jnp, optax, dtrans
          >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
          >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((params["w"] - x) ** 2), tx)
          >>> init = lambda: (p := {"w": jnp.zeros(2)}, tx.init(p))
          >>> x = jnp.ones((2, 2))
          >>> plan = dtrans.nccl2(dtrans.trace(step, *init(), x), dtrans.trace(init), trainers=2)
          >>> job = plan.simulate()
          >>> state, _ = job.step(job.with_hyperparameters(job.init(), learning_rate=0.25), x)
          >>> job.params(state)["w"].tolist()
          [0.25, 0.25]
        """
        return replace_hyperparameters(self.plan.main.in_names, state, values)

    @without_mesh
    def apply(self, fn: Callable[..., Any], state: Any, *args: Any) -> Any:
        """Call a function of the parameters, such as a prediction, to evaluate or to sample.

        Each function object is compiled once for each shape of `args`. The job gathers only arrays
        that `fn` reads, and never all of them at once:

        - Sharded parameters, and tables of parameter servers, are gathered in groups of at most 64
          MiB, or one larger parameter. A group is dropped before the next group is gathered.
        - Each stage of a pipeline computes the equations that read its parameters. Activations move
          to the next stage, but parameters stay on their devices. In a job of several processes,
          the parameters of one stage at a time are sent to all processes.

        Args:
          fn: a pure function `fn(params, *args)`; or `fn(state, *args)`, if the step has one state
            argument instead of params and opt_state. Pass the same object in each call.
          state: the state that `init` or `step` returned.
          *args: pytrees of arrays, replicated over the trainers.

        Returns:
          The result of `fn`.

        Raises:
          ConfigError: `fn` is no function, or it reads state of another process, such as a server's
            optimizer state.
          BatchError: an argument contains text or objects.
          StateError: `state` belongs to a job of another kind.

        Example:
          >>> import jax, jax.numpy as jnp, optax, dtrans
          >>> tx, x = optax.sgd(0.5), jnp.eye(2)
          >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
          >>> init = lambda: (p := {"w": jnp.ones(2)}, tx.init(p))
          >>> plan = dtrans.nccl2(dtrans.trace(step, *init(), x), dtrans.trace(init), trainers=2)
          >>> job = plan.simulate()
          >>> predict = lambda params, x: x @ params["w"]
          >>> job.apply(predict, job.init(), 3 * x).tolist()
          [3.0, 3.0]
        """
        if not callable(fn):
            raise ConfigError(f"job.apply takes a function as its first argument, not {fn!r}")
        applied = _applied(self, fn)
        return applied(lambda names: self._leaves(state, names), *args)

    def _leaves(self, state: Any, names: Collection[str]) -> dict[str, Any]:
        """Return arrays of the state by name, in the form in which the job stores them.

        A leaf is one array of the parameters or of the optimizer state. `apply` fetches leaves with
        this method, and converts them with `_opened`. The base class returns full arrays on one
        device.

        Args:
          state: the state of the job.
          names: names of leaves, such as `params/w`.
        """
        return _on_one_device(self, state, names)

    def _opened(self, leaves: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert arrays that the job stores to the arrays of the single-device step.

        `apply` compiles this conversion together with the user's function. So this method must
        consist of JAX operations. The base class returns the arrays unchanged.

        Args:
          leaves: stored arrays by name, as `_leaves` returns them.
        """
        return leaves

    def _unstacked(
        self, jaxpr: ClosedJaxpr, names: Sequence[str]
    ) -> tuple[ClosedJaxpr, Sequence[str]]:
        """Rewrite a traced function so that its inputs are the arrays that the job stores.

        A pipeline may store a leaf with stacked layers as several arrays, one in each stage. The
        base class returns the arguments unchanged, because other jobs store each leaf as one array.

        Args:
          jaxpr: the user's function in `apply`; its inputs are leaves, then other arguments.
          names: name of each leaf among the inputs.
        """
        return jaxpr, names

    def _groups(self, names: Sequence[str]) -> Mapping[str, int]:
        """Divide the leaves (arrays of the state) that `apply` fetches into groups.

        `apply` fetches the leaves of one group, uses them, and drops them before the next group. So
        the device never has all leaves at once. The result maps each leaf to the number of its
        group.

        Args:
          names: leaves, in the order in which a function reads them.
        """
        return groups_by_bytes({n: self._gathered_bytes(n) for n in names})

    def _gathered_bytes(self, name: str) -> int:
        """Return the number of bytes to fetch from other devices for one array of the state.

        The number is 0 if the array is already stored in full here. `_groups` limits the sum of
        these numbers in a group.

        Args:
          name: name of the array, such as `params/w`.
        """
        return 0


class Job(StateFunctions):
    """Running job: `init` returns the first state, and `step` trains on one batch.

    A job is also a context manager, which closes its connections at the end of the `with` block.
    Jobs with parameter servers have two more members. `roles` lists the servers and trainers of
    this process that write files of a checkpoint. `server_arrays(state, endpoint)` returns the
    arrays of one server.

    Attributes:
      plan: the plan that the job runs.
    """

    _closed = False

    part = (0, 1)  # index of this process's part of a global batch, and the number of parts
    takes_uneven_parts = False  # True if a part may be a `dtrans.UnevenPart`
    # function from the rows of a batch to those of each part; None if parts are equal
    shares: Callable[[int], Sequence[int]] | None = None
    batches_ahead = 1  # default of the argument `ahead` of `steps`
    is_driver = False  # True if Ray actors run the steps, and save and restore the state
    run_id: str  # default tag of the run's checkpoints
    saves = True  # True if this process saves the replicated arrays
    # True while a loop over `steps` can go back to earlier steps; None before such a loop
    repeats_steps: bool | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Let the methods in `_ON_DEVICES` run outside of the caller's mesh (`jax.set_mesh`).

        These methods create arrays or compile programs. Inside of the caller's mesh, JAX would
        place these arrays on the devices of that mesh.
        """
        super().__init_subclass__(**options)
        for name in _ON_DEVICES & vars(cls).keys():
            setattr(cls, name, without_mesh(vars(cls)[name]))

    @abc.abstractmethod
    def check(self, state: Any) -> None:
        """Raise StateError if `state` is from another job, or was donated to a step."""

    @abc.abstractmethod
    def init(self, *args: Any) -> Any:
        """Return the initial state of training.

        Args:
          *args: the arguments of your `init` function, which you passed to `dtrans.trace(init,
            *args)`.
        """

    @abc.abstractmethod
    def step(self, state: Any, *batch: Any) -> tuple[Any, ...]:
        """Run one training step.

        Args:
          state: the state that `init` or `step` returned.
          *batch: the batch arguments of the step. In a job of several processes, each process
            passes its part of the batch (`shard_batch`).

        Returns:
          The new state, then the step's other results in order, such as the loss.
        """

    def prefetch(self, *batch: Any) -> bool:
        """Tell the job about a later step's batch, so that it can request table rows early.

        Large embedding tables stay on parameter servers (docs/tables.md). A trainer requests only
        the rows that a batch looks up. An early request overlaps with the current step. The results
        of steps do not change. `steps` calls this method for you.

        Args:
          *batch: the batch arguments of the later step.

        Returns:
          True if a trainer requested rows. Only trainers of synchronous parameter servers do.
        """
        return False

    def steps(
        self,
        state: Any,
        batches: Iterable[Sequence[Any]] | BatchOfStep,
        ahead: int | None = None,
        *,
        start: int = 0,
        stop: int | None = None,
    ) -> Iterator[tuple[Any, ...]]:
        """Run a step for each batch, and yield the results of each step.

        This method also passes each batch to `prefetch`, some steps before its own step runs.

        A job can recover from the failure of a process if its servers write snapshots of its state
        (`job.serve(state, snapshots=10)`). The loop must then read earlier batches again. So pass a
        function of the step number, or an iterable with a method `seek(step)`.
        `dtrans.feed(loader)` has this method. After the failure, this method repeats the steps
        since the newest snapshot, and yields the same results again.

        Args:
          state: the state before the first step.
          batches: for each step, a tuple of the step's batch arguments, or a function that returns
            this tuple for a step's number. The loop reads them `ahead` batches early.
          ahead: number of steps between `prefetch` and `step` of a batch. Default: the largest
            `staleness` of the plan's embedding tables, at least 1.
          start: the number of the first step. A trainer begins at the servers' step (`first_step`)
            if that is larger.
          stop: the number after the last step, for a function or an iterable with `seek`. Without
            `stop`, an iterable is read from its position to its end, and no steps are repeated.

        Yields:
          The results of `step`.

        Raises:
          ConfigError: `ahead` is not a positive integer; or `stop` is missing for a function, or
            set for an iterable without `seek`.
          Rewound: a process failed, and `batches` cannot be read again: it is a plain iterable, or
            `start` and `stop` are missing.

        Example:
          >>> import jax.numpy as jnp, optax, dtrans
          >>> tx, x = optax.sgd(0.5), jnp.eye(2)
          >>> step = dtrans.make_train_step(lambda w, x: jnp.mean((x @ w) ** 2), tx)
          >>> init = lambda: (jnp.ones(2), tx.init(jnp.ones(2)))
          >>> plan = dtrans.pserver(dtrans.trace(step, *init(), x), dtrans.trace(init),
          ...                       pservers="127.0.0.1:6174", trainers=1)
          >>> job = plan.simulate()
          >>> [float(loss) for state, loss in job.steps(job.init(), [(x,)] * 3)]
          [1.0, 0.25, 0.0625]
        """
        ahead = self.batches_ahead if ahead is None else ahead
        check_int("ahead", ahead, "a number of steps", least=1)
        has_numbers = stop is not None or start > 0
        if callable(batches) or (has_numbers and isinstance(batches, SeekableBatches)):
            return _numbered_steps(self, state, batches, _numbers(start, stop), ahead)
        if has_numbers:
            raise ConfigError(
                "start and stop are for a function of the step number, but batches is "
                f"{type(batches).__name__}; leave them out, or pass a function or dtrans.feed(...)"
            )
        return _steps_ahead(self, state, batches, ahead)

    def check_return(self) -> None:
        """Raise Rewound if a failed process has forced the job back to an earlier step.

        `steps` catches this exception, and repeats the steps from there. The base class does
        nothing.
        """

    def end_loop(self) -> None:
        """Wait until the servers have received all steps, after the last step of a loop.

        Raises:
          Rewound: a process failed in the last steps, so the loop must repeat them.
        """
        self.check_return()

    @property
    def step_count(self) -> int:
        """Number of steps that this process has run in this job."""
        return self.meter.steps

    @property
    def first_step(self) -> int:
        """Number of the step that the job runs next, in the parameter servers' count.

        After a restart, a trainer reads this number to skip batches that the servers have already
        applied. The number is always 0 in jobs without parameter servers.
        """
        return 0

    @cached_property
    def meter(self) -> StepMeter:
        """Counter and timer of this job's steps, which `report` and `trace` read."""
        return StepMeter()

    def report(self, link: float | str | None = None) -> JobReport:
        """Return a table with steps per second, seconds for each activity, and the plan's costs.

        Args:
          link: rate of each host's network link, as for `Plan.costs`: bytes per second, or text
            such as "1gbit". The report then compares the measured time of a step with a lower bound
            from this rate.

        Raises:
          ConfigError: `link` is not a rate, or the plan has no parameter servers.
        """
        return self.meter.report(self.plan.costs(link))

    def trace(self, directory: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Record the steps of a `with` block with JAX's profiler, each with its index.

        Args:
          directory: output folder. Its subfolder `plugins/profile/<time>/` contains
            `perfetto_trace.json.gz`, for ui.perfetto.dev, and files for TensorBoard's profiler.
        """
        return self.meter.trace(directory)

    def shard_batch(self, *batch: Any) -> tuple[Any, ...]:
        """Return the part of a global batch that this process must pass to `step`.

        Process k of N gets rows k*B/N to (k+1)*B/N of each array in `split_axes()`, and all other
        arrays in full. A single process gets the global batch. Some jobs also accept a number of
        rows that is not a multiple of the trainers (attribute `takes_uneven_parts`), or give faster
        trainers more rows (`dtrans.Batch.speeds`). The result then contains `dtrans.UnevenPart`s.

        Args:
          *batch: the batch arguments of the step: pytrees of NumPy or JAX arrays.

        Raises:
          BatchError: the number of processes does not divide the rows, or the structure differs
            from the step's.
        """
        if self.part[1] == 1:
            return batch
        trainers = self.plan.trainers if self.takes_uneven_parts else 0
        specs = self.plan.main.args[2:]
        axes, shares = self.split_axes(), self.shares
        return part_of_batch(specs, batch, axes, self.part, trainers, shares)

    def place(self, *batch: Any) -> tuple[Any, ...]:
        """Return this process's part of a global batch, copied to the job's devices.

        The part is the one that `shard_batch` returns. Only jobs on a mesh copy it to devices. A
        data loader can call this method early, so that the copy overlaps with the current step.
        """
        return self.shard_batch(*batch)

    def split_axes(self) -> Mapping[str, int]:
        """Return the dimension along which each batch array is split, by the array's name."""
        shared = getattr(self.plan, "shared", None)
        return _split_on_dim_0(self.plan.main) if shared is None else shared.axes

    @abc.abstractmethod
    def lower(self, state: Any, *batch: Any) -> Any:
        """Lower the compiled step for these arguments, like `jax.jit(step).lower(...)`.

        Use the result to read the compiled program or its memory, without running a step.
        """

    def close(self) -> None:
        """End the job and close its connections; `step` of a closed job raises StateError."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"the job of {self.plan!r} is closed; create a new job from the plan")

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.meter.add_note(error)
        self.close()

    def __repr__(self) -> str:
        return f"<{'closed ' * self._closed}{type(self).__name__} of {self.plan!r}>"

    def _repr_html_(self) -> str:
        title = f"{self!r}, {self.meter.steps:,} steps"
        return folded_html(title, self.plan._repr_html_())


def _split_on_dim_0(main: Program) -> dict[str, int]:
    """Return `{name: 0}` for the batch arrays that have a dimension."""
    axes = {}
    for spec in main.args[2:]:
        for name in spec.names:
            if main.inputs[name].ndim:
                axes[name] = 0
    return axes


def _on_one_device(job: StateFunctions, state: Any, names: Collection[str]) -> dict[str, Any]:
    """Return full arrays of the state by name, copied to the first device of this process."""
    found: dict[str, Any] = {}
    for spec, tree_of in zip(job.plan.main.args, (job.params, job.opt_state), strict=False):
        if not set(names).isdisjoint(spec.names):
            found |= zip(spec.names, spec.flatten(tree_of(state)), strict=True)
    return on_first_device(subset(found, names))


def on_first_device(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Copy arrays to the first device of this process.

    Servers store parameters on different devices, but a compiled function runs on one device.
    """
    device = jax.local_devices()[0]
    return {n: jax.device_put(x, device) for n, x in leaves.items()}


def _applied(job: StateFunctions, fn: Callable[..., Any]) -> Applied:
    """Return the object that runs the user's function `fn` of `job.apply`.

    The job keeps one object for each function, so that a second call does not compile again.
    """
    if job._functions is None:
        job._functions = weakref.WeakKeyDictionary()
    found = job._functions.get(fn)
    if found is None:
        found = job._functions[fn] = Applied(
            job.plan.main, fn, job._opened, job._unstacked, job._groups
        )
    return found
