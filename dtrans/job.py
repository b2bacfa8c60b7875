"""Running plans: the interface that jobs of all strategies share.

A job holds compiled code and connections; a state is a value. `step` maps a state and a batch to the
next state, so a loop may keep, save or discard states as it likes. `dtrans.plan` comes next: it finds
the job of a plan.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import without_mesh
from dtrans.checks import check_int
from dtrans.errors import BatchError, ConfigError, StateError
from dtrans.step import one_state
from dtrans.step.batch_sharing import part_of
from dtrans.step_meter import JobReport, StepMeter


def _hyperparameter_leaf(leaves: Iterable[str], name: str) -> str:
    """Return the leaf that holds a hyperparameter.

    Raises:
      ConfigError: no leaf holds it, or several do.
    """
    kept: dict[str, list[str]] = {}
    for leaf in leaves:
        _, found, short = leaf.rpartition("hyperparams/")
        if found:
            # nnx wraps each array in a variable, whose one child is called `value`
            kept.setdefault(short.removesuffix("/value"), []).append(leaf)
    if any(name in same for same in kept.values()):
        return name
    if name not in kept:
        raise ConfigError(
            f"the optimizer keeps no {name!r} in its state; it keeps "
            f"{', '.join(kept) or 'nothing'} by name. "
            "Wrap it in optax.inject_hyperparams, or let the step take what changes as an argument"
        )
    if len(kept[name]) > 1:
        raise ConfigError(
            f"{name!r} is kept by several optimizers: {', '.join(kept[name])}; give the whole "
            "name, as "
            f"**{{{kept[name][0]!r}: ...}}"
        )
    return kept[name][0]


# the methods of jobs that make arrays, or compile
_CALLED = {"init", "step", "prefetch", "place", "params", "opt_state", "state_of", "lower", "held"}


class Job(abc.ABC):
    """A running plan: `init`, `step`, and functions of a state.

    Jobs of parameter servers also have `roles`, the roles of this process that save a piece of a
    checkpoint, and `held(state, endpoint)`, the arrays of a server.

    Attributes:
      plan: the plan that the job runs.
    """

    plan: Any
    _closed = False
    _functions: weakref.WeakKeyDictionary[Any, one_state.Applied] | None = None

    part = (0, 1)  # this process's part of a global batch, and the number of parts
    takes_uneven_parts = False  # True if those may be `dtrans.UnevenPart`s
    batches_ahead = 1  # the default of `steps(ahead=...)`
    is_driver = False  # True if other processes step, and `save` and `restore` are calls to them
    run_id: str  # the default tag of the run's checkpoints
    saves = True  # True if this process saves arrays that all processes have

    def __init_subclass__(cls, **options: Any) -> None:
        """Run the methods outside the caller's mesh: a job has its own devices."""
        super().__init_subclass__(**options)
        for name in _CALLED & vars(cls).keys():
            setattr(cls, name, without_mesh(vars(cls)[name]))

    @abc.abstractmethod
    def check(self, state: Any) -> None:
        """Raise StateError unless `state` is a state of this job that was not donated."""

    @abc.abstractmethod
    def init(self, *args: Any) -> Any:
        """Return the first state, from the arguments of `init`."""

    @abc.abstractmethod
    def step(self, state: Any, *batch: Any) -> tuple[Any, ...]:
        """Run one step. Returns (state, loss[, aux]), or (state, *results) of another step."""

    def prefetch(self, *batch: Any) -> bool:
        """Announce the batch after the next, so that a job can request its rows ahead of the step.

        Trainers of synchronous parameter servers request rows of tables (docs/tables.md). Other jobs
        do nothing. Numbers are the same with and without it.

        Args:
          batch: the arguments of `step` behind the state.

        Returns:
          True if anything was requested.
        """
        return False

    def steps(
        self, state: Any, batches: Iterable[Sequence[Any]], ahead: int | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """Run a step for each batch, and announce each batch to `prefetch` some steps earlier.

        Args:
          state: as `step` takes it.
          batches: for each step, the arguments of `step` behind the state. `ahead` of them are read
            in advance.
          ahead: steps between the announcement of a batch and its step; by default `batches_ahead`,
            which is 1, or the staleness of the plan's tables.

        Yields:
          The results of `step`.

        Raises:
          ConfigError: `ahead` is no positive number. Otherwise as `prefetch` and `step` do.

        Example:
          >>> import jax.numpy as jnp, optax, dtrans
          >>> step = dtrans.make_train_step(lambda w, x: jnp.mean((x @ w) ** 2), tx := optax.sgd(0.5))
          >>> init = lambda: (jnp.ones(2), tx.init(jnp.ones(2)))
          >>> plan = dtrans.pserver(dtrans.trace(step, *init(), jnp.eye(2)), dtrans.trace(init),
          ...                       pservers="127.0.0.1:6174", trainers=1)
          >>> job = plan.simulate()
          >>> [float(loss) for state, loss in job.steps(job.init(), [(jnp.eye(2),)] * 3)]
          [1.0, 0.25, 0.0625]
        """
        ahead = self.batches_ahead if ahead is None else ahead
        check_int("ahead", ahead, "a number of steps", least=1)
        waiting = collections.deque[Sequence[Any]]()
        for batch in batches:
            if waiting:
                self.prefetch(*batch)
            waiting.append(batch)
            if len(waiting) > ahead:
                state, *made = self.step(state, *waiting.popleft())
                yield state, *made
        while waiting:
            state, *made = self.step(state, *waiting.popleft())
            yield state, *made

    @abc.abstractmethod
    def params(self, state: Any) -> Any:
        """Return the parameters, in the pytree of the step."""

    @abc.abstractmethod
    def opt_state(self, state: Any) -> Any:
        """Return the optimizer's state, in the pytree of the step."""

    @abc.abstractmethod
    def state_of(self, params: Any, opt_state: Any) -> Any:
        """Return the job's state for a single-device (params, opt_state), as
        `dtrans.checkpoint.load` returns them.

        Raises:
          TraceError: another structure than the step takes; StateError: an array of another shape
            or dtype.
        """

    @cached_property
    def meter(self) -> StepMeter:
        """The meter that counts and times the steps."""
        return StepMeter()

    def report(self) -> JobReport:
        """Return steps/s, the time of each part of a step, and the bytes moved, printed as a
        table."""
        return self.meter.report(self.plan.costs())

    @contextlib.contextmanager
    def trace(self, directory: str | os.PathLike[str]) -> Iterator[None]:
        """Trace the steps of this block with JAX's profiler, each with its number.

        Args:
          directory: gets `plugins/profile/<time>/`, with `perfetto_trace.json.gz` (open it at
            ui.perfetto.dev), and what TensorBoard's profiler reads.
        """
        with jax.profiler.trace(os.fspath(directory), create_perfetto_trace=True):
            self.meter.is_traced = True
            try:
                yield
            finally:
                self.meter.is_traced = False

    def shard_batch(self, *batch: Any) -> tuple[Any, ...]:
        """Return this process's part of a global batch, as its `step` takes it.

        Process k of N has rows k*B/N to (k+1)*B/N of each array in `cut_axes()`, and all of every
        other array. A single process has the global batch. If the trainers do not divide the
        rows, and `takes_uneven_parts`, a part is a `dtrans.UnevenPart`.

        Args:
          batch: the arguments of `step` behind the state: pytrees of arrays, NumPy's or JAX's.

        Raises:
          BatchError: the processes do not divide the rows, or the structure is not the step's.
        """
        number, count = self.part
        if count == 1:
            return batch
        specs, axes, uneven = self.plan.main.args[2:], self.cut_axes(), self.takes_uneven_parts
        if len(batch) != len(specs):
            raise BatchError(
                f"the step takes {len(specs)} batch arguments, {len(batch)} were given"
            )
        found = []
        for spec, given in zip(specs, batch, strict=True):
            arrays = zip(spec.names, spec.flatten(given), strict=True)
            cut = lambda n, x: part_of(
                x, number, count, axes[n], n, self.plan.trainers if uneven else 0
            )
            found.append(spec.unflatten([cut(n, x) if n in axes else x for n, x in arrays]))
        return tuple(found)

    def place(self, *batch: Any) -> tuple[Any, ...]:
        """Return this process's part of a global batch, on the devices of the step if possible."""
        return self.shard_batch(*batch)

    def cut_axes(self) -> Mapping[str, int]:
        """Return the dimension that is split over trainers, by batch array; others are
        replicated."""
        shared = getattr(self.plan, "shared", None)
        if shared is not None:
            axes: Mapping[str, int] = shared.axes
            return axes
        names = (n for spec in self.plan.main.args[2:] for n in spec.names)
        return {n: 0 for n in names if self.plan.main.inputs[n].ndim}

    def gather(self, state: Any) -> Any:
        """Return the single-device state: the state of a step of one state, or (params, opt_state).

        Example:
          >>> import jax, jax.numpy as jnp, dtrans
          >>> def step(state, x):
          ...     loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
          ...     return {"w": state["w"] - 0.5 * g, "steps": state["steps"] + 1}, loss
          >>> init = lambda: {"w": jnp.ones(2), "steps": jnp.zeros((), int)}
          >>> plan = dtrans.nccl2(dtrans.trace(step, init(), jnp.eye(2)), dtrans.trace(init), trainers=2)
          >>> job = plan.simulate()
          >>> state, loss = job.step(job.init(), jnp.eye(2))
          >>> jax.tree.map(lambda a: a.tolist(), job.gather(state))
          {'steps': 1, 'w': [0.5, 0.5]}
        """
        return one_state.merge_state(self.plan.main, self.params(state), self.opt_state(state))

    def scatter(self, state: Any) -> Any:
        """Return this job's state for the single-device state that `gather` returns.

        Raises:
          TraceError: another structure than the step takes; StateError: an array of another shape
            or dtype.
        """
        return self.state_of(*one_state.split_state(self.plan.main, state))

    @without_mesh
    def with_hyperparameters(self, state: Any, **values: float) -> Any:
        """Return a state with other hyperparameters (`optax.inject_hyperparams`).

        Args:
          values: by name, as `learning_rate=1e-3`. If several optimizers have the name, by the path
            of the leaf, as `**{"opt_state/critic/hyperparams/learning_rate": 1e-3}`.

        Raises:
          ConfigError: the optimizer has no such name, several have it, or its leaf is in another
            process.

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
        leaves = {name: _hyperparameter_leaf(self.plan.main.in_names, name) for name in values}
        wanted, found = {leaves[name]: x for name, x in values.items()}, set()

        def replaced(path: Any, x: Any) -> Any:
            key = getattr(path[-1], "key", None)
            name = key[-1] if isinstance(key, tuple) else key
            if name not in wanted:
                return x
            found.add(name)
            new = jnp.full(x.shape, wanted[name], x.dtype)
            return jax.device_put(new, x.sharding) if isinstance(x, jax.Array) else new

        new = jax.tree_util.tree_map_with_path(replaced, state)
        if found != set(wanted):
            raise ConfigError(
                f"{next(n for n in wanted if n not in found)} is on the servers: let the step take "
                "what changes as an "
                "argument, which trainers tell them"
            )
        return new

    @without_mesh
    def apply(self, fn: Callable[..., Any], state: Any, *args: Any) -> Any:
        """Return `fn(params, *args)`, or `fn(state, *args)` for a step of one state.

        It is for evaluation and sampling. `fn` is jitted, once for each function and shape. Only the
        arrays that it reads are gathered. On a mesh slices stay on their devices, and XLA gathers
        the operands of each product.

        Args:
          fn: a pure function, the same object at each call; another object is compiled again.
          args: pytrees of arrays, replicated over the trainers.

        Returns:
          The result of `fn`.

        Raises:
          ConfigError: `fn` reads state of other processes, as that of servers in a job of
            processes.

        Example:
          >>> import jax, jax.numpy as jnp, optax, dtrans
          >>> tx = optax.sgd(0.5)
          >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
          >>> init = lambda: (p := {"w": jnp.ones(2)}, tx.init(p))
          >>> plan = dtrans.nccl2(dtrans.trace(step, *init(), jnp.eye(2)), dtrans.trace(init), trainers=2)
          >>> job = plan.simulate()
          >>> predict = lambda params, x: x @ params["w"]
          >>> job.apply(predict, job.init(), 3 * jnp.eye(2)).tolist()
          [3.0, 3.0]
        """
        if self._functions is None:
            self._functions = weakref.WeakKeyDictionary()
        applied = self._functions.get(fn)
        if applied is None:
            applied = self._functions[fn] = one_state.Applied(self.plan.main, fn, self._opened)
        return applied(lambda names: self._leaves(state, names), *args)

    def _leaves(self, state: Any, names: Collection[str]) -> dict[str, Any]:
        """Return the arrays of these names, in the layout that `_opened` takes."""
        found: dict[str, Any] = {}
        for spec, whole in zip(self.plan.main.args, (self.params, self.opt_state), strict=False):
            if not set(names).isdisjoint(spec.names):
                found |= zip(spec.names, spec.flatten(whole(state)), strict=True)
        one = jax.local_devices()[0]  # stages and servers have devices of their own
        return {n: jax.device_put(found[n], one) for n in names}

    def _opened(self, leaves: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return single-device arrays for those of `_leaves`; traced."""
        return leaves

    @abc.abstractmethod
    def lower(self, state: Any, *batch: Any) -> Any:
        """Return the lowered `step` for these arguments, as `jax.jit(...).lower` does."""

    def close(self) -> None:
        """End the job and its connections to other processes. A closed job refuses to step."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"this job is closed: make another of its plan, {self.plan!r}")

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{'closed ' * self._closed}{type(self).__name__} of {self.plan!r}>"
