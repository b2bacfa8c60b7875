"""Jobs, which run plans: the interface that all strategies share.

A job has compiled code and connections; a state is a value. `step` maps a state and a batch to the
next state, so a loop may store, save or discard any state. Read `dtrans.plan` next: it finds the
job of a plan.
"""

from __future__ import annotations

import abc
import collections
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import jax

from dtrans._jax import without_mesh
from dtrans.checks import check_int
from dtrans.errors import StateError
from dtrans.step import one_state
from dtrans.step.batch_sharing import part_of_batch
from dtrans.step.hyperparameters import replace_hyperparameters
from dtrans.step_meter import JobReport, StepMeter


def _steps_ahead(
    job: Job, state: Any, batches: Iterable[Sequence[Any]], ahead: int
) -> Iterator[tuple[Any, ...]]:
    waiting = collections.deque[Sequence[Any]]()
    for batch in batches:
        if waiting:
            job.prefetch(*batch)
        waiting.append(batch)
        if len(waiting) > ahead:
            state, *results = job.step(state, *waiting.popleft())
            yield state, *results
    while waiting:
        state, *results = job.step(state, *waiting.popleft())
        yield state, *results


# methods that create arrays or compile
_ON_DEVICES = {
    "init", "step", "prefetch", "place", "params", "opt_state", "state_of", "lower",
    "server_arrays",
}  # fmt: skip


class Job(abc.ABC):
    """Running plan: `init`, `step`, and functions of a state.

    Jobs of parameter servers also have `roles`, the roles of this process that save pieces of
    checkpoints. Their `server_arrays(state, endpoint)` returns the arrays of a server.

    Attributes:
      plan: the plan that the job runs.
    """

    plan: Any
    _closed = False
    _functions: weakref.WeakKeyDictionary[Any, one_state.Applied] | None = None

    part = (0, 1)  # index of this process's part of a global batch, and the number of parts
    takes_uneven_parts = False  # True if parts may be `dtrans.UnevenPart`s
    batches_ahead = 1  # the default of `steps(ahead=...)`
    is_driver = False  # True if actors step, and `save` and `restore` are calls to them
    run_id: str  # the default tag of the run's checkpoints
    saves = True  # True if this process saves replicated arrays

    def __init_subclass__(cls, **options: Any) -> None:
        """Run the methods outside the caller's mesh, since a job has its own devices."""
        super().__init_subclass__(**options)
        for name in _ON_DEVICES & vars(cls).keys():
            setattr(cls, name, without_mesh(vars(cls)[name]))

    @abc.abstractmethod
    def check(self, state: Any) -> None:
        """Raise StateError unless `state` belongs to this job and was not donated."""

    @abc.abstractmethod
    def init(self, *args: Any) -> Any:
        """Return the initial state, for the arguments of the user's `init`."""

    @abc.abstractmethod
    def step(self, state: Any, *batch: Any) -> tuple[Any, ...]:
        """Run one step and return (state, loss[, aux]), or (state, *results) of another step."""

    def prefetch(self, *batch: Any) -> bool:
        """Announce a later batch, so that a job can request its rows before the step.

        Trainers of synchronous parameter servers request rows of tables (docs/tables.md); other
        jobs do nothing. It does not change the results of a step.

        Args:
          batch: the arguments of `step` behind the state.

        Returns:
          True if a trainer requested rows.
        """
        return False

    def steps(
        self, state: Any, batches: Iterable[Sequence[Any]], ahead: int | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """Run a step for each batch, and pass each batch to `prefetch` some steps earlier.

        Args:
          state: the state before the first step.
          batches: for each step, the arguments of `step` behind the state. The iterator is `ahead`
            batches ahead of the steps.
          ahead: steps between `prefetch` and `step` of a batch. Default: `batches_ahead`, which is
            1, or the staleness of the plan's tables.

        Yields:
          The results of `step`.

        Raises:
          ConfigError: `ahead` is not a positive integer.

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
        return _steps_ahead(self, state, batches, ahead)

    @abc.abstractmethod
    def params(self, state: Any) -> Any:
        """Return the parameters, in the pytree of the step."""

    @abc.abstractmethod
    def opt_state(self, state: Any) -> Any:
        """Return the optimizer's state, in the pytree of the step."""

    @abc.abstractmethod
    def state_of(self, params: Any, opt_state: Any) -> Any:
        """Return the job's state for single-device values, such as those of `checkpoint.load`.

        Raises:
          TraceError: the structure differs from the structure of the step's arguments.
          StateError: an array has another shape or dtype.
        """

    @cached_property
    def meter(self) -> StepMeter:
        """Meter that counts and times the steps."""
        return StepMeter()

    def report(self) -> JobReport:
        """Return steps/s, seconds by activity, and the plan's costs; it prints as a table."""
        return self.meter.report(self.plan.costs())

    def trace(self, directory: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Trace the steps of a `with` block with JAX's profiler, each with its index.

        Args:
          directory: output folder. `plugins/profile/<time>/` in it has `perfetto_trace.json.gz`,
            for ui.perfetto.dev, and files for TensorBoard's profiler.
        """
        return self.meter.trace(directory)

    def shard_batch(self, *batch: Any) -> tuple[Any, ...]:
        """Return this process's part of a global batch, as its `step` takes it.

        Process k of N gets rows k*B/N to (k+1)*B/N of each array in `cut_axes()`, and every other
        array in full. A single process gets the global batch. If the trainers do not divide the
        rows, and `takes_uneven_parts`, a part is a `dtrans.UnevenPart`.

        Args:
          batch: the arguments of `step` behind the state: pytrees of arrays, NumPy's or JAX's.

        Raises:
          BatchError: the processes do not divide the rows, or the structure is not the step's.
        """
        if self.part[1] == 1:
            return batch
        trainers = self.plan.trainers if self.takes_uneven_parts else 0
        specs = self.plan.main.args[2:]
        return part_of_batch(specs, batch, self.cut_axes(), self.part, trainers)

    def place(self, *batch: Any) -> tuple[Any, ...]:
        """Return this process's part of a global batch; meshes put it on the step's devices."""
        return self.shard_batch(*batch)

    def cut_axes(self) -> Mapping[str, int]:
        """Return the dimension that is split over trainers, for each array that is split."""
        shared = getattr(self.plan, "shared", None)
        if shared is not None:
            axes: Mapping[str, int] = shared.axes
            return axes
        names = (n for spec in self.plan.main.args[2:] for n in spec.names)
        return {n: 0 for n in names if self.plan.main.inputs[n].ndim}

    def gather(self, state: Any) -> Any:
        """Return the single-device state: (params, opt_state), or the one state of the step.

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
        """Return this job's state for the single-device state that `gather` returns.

        Raises:
          TraceError: the structure differs from the structure of the step's arguments.
          StateError: an array has another shape or dtype.
        """
        return self.state_of(*one_state.split_state(self.plan.main, state))

    @without_mesh
    def with_hyperparameters(self, state: Any, **values: float) -> Any:
        """Return a state with different hyperparameters (`optax.inject_hyperparams`).

        The state of this process must have them. The optimizer's state of parameter servers is in
        the servers' processes, and that of a pipeline's stage in the process of that stage. Such
        jobs take the value as an argument of the step.

        Args:
          values: values by name, as `learning_rate=1e-3`. If several optimizers have the name, by
            the path of the leaf, as `**{"opt_state/critic/hyperparams/learning_rate": 1e-3}`.

        Raises:
          ConfigError: no optimizer has the name, several have it, or its leaf is in the state of
            another process.

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
        """Return `fn(params, *args)`, or `fn(state, *args)` for a step of one state.

        It is for evaluation and sampling. `fn` is compiled once for each function and shape. The
        job gathers only the arrays that `fn` reads. On a mesh slices stay on their devices, and XLA
        gathers the operands of each product.

        Args:
          fn: a pure function; pass the same object each time, so that it is compiled once.
          args: pytrees of arrays, replicated over the trainers.

        Returns:
          The result of `fn`.

        Raises:
          ConfigError: `fn` reads state of another process, such as a server's optimizer state.

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
        if self._functions is None:
            self._functions = weakref.WeakKeyDictionary()
        applied = self._functions.get(fn)
        if applied is None:
            applied = self._functions[fn] = one_state.Applied(self.plan.main, fn, self._opened)
        return applied(lambda names: self._leaves(state, names), *args)

    def _leaves(self, state: Any, names: Collection[str]) -> dict[str, Any]:
        """Return the arrays of these names, in the layout of `_opened`'s argument."""
        found: dict[str, Any] = {}
        for spec, tree_of in zip(self.plan.main.args, (self.params, self.opt_state), strict=False):
            if not set(names).isdisjoint(spec.names):
                found |= zip(spec.names, spec.flatten(tree_of(state)), strict=True)
        # the leaves of stages and servers are on different devices, and `fn` is one computation
        device = jax.local_devices()[0]
        return {n: jax.device_put(found[n], device) for n in names}

    def _opened(self, leaves: Mapping[str, Any]) -> Mapping[str, Any]:
        """Map the arrays of `_leaves` to single-device arrays; `jax.jit` traces it."""
        return leaves

    @abc.abstractmethod
    def lower(self, state: Any, *batch: Any) -> Any:
        """Lower `step` for these arguments, as `jax.jit(...).lower` does."""

    def close(self) -> None:
        """End the job and close its connections. A closed job raises StateError in `step`."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"this job is closed: make another from its plan, {self.plan!r}")

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{'closed ' * self._closed}{type(self).__name__} of {self.plan!r}>"
