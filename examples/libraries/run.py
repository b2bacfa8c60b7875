"""Distribution of a library's step: training, output, and comparison with one device.

`planned` traces the step and its init, and returns a plan. `train` runs the plan's job. All other
functions only prepare data or print.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

import dtrans
from dtrans.checks import did_you_mean
from dtrans.errors import ConfigError, missing_extra
from dtrans.plan import Plan
from examples.compare import difference, virtual_devices
from examples.libraries import EXAMPLES


MODES = ("single", "nccl2", "sharding", "pserver", "pipeline")
LINES = 10  # number of steps whose results are printed
BOUND = 1e-10  # bound in 64 bits; in 32 bits, some models amplify rounding too much for a bound


def run(
    name: str,
    mode: str = "nccl2",
    *,
    trainers: int = 2,
    stage: int = 3,
    steps: int = 100,
    x64: bool = True,
) -> bool:
    """Train an example, print its results, and compare with one device.

    Args:
      name: one of `EXAMPLES`.
      mode: one of `MODES`; "single" runs the step on one device, without dtrans.
      trainers: number of trainers, and of servers in pserver mode; or of ranks or stages.
      stage: the ZeRO stage in sharding mode: 1, 2 or 3.
      steps: number of training batches.
      x64: True to compute in 64 bits, where results differ by about 1e-14.

    Returns:
      True if the difference is within its bound. In 32 bits there is no bound.

    Raises:
      ConfigError: the example or the mode does not exist, or a library is missing.
      DtransError: the strategy does not support the step.
    """
    if mode not in MODES:
        raise ConfigError(f"there is no mode {mode!r}; {did_you_mean(mode, MODES, 'it is one of')}")
    virtual_devices(2 * trainers if mode == "pserver" else trainers)
    with jax.enable_x64(x64):
        example = load(name)
        _say(f"{name}: {EXAMPLES[name]}")
        if mode == "single":
            _say("one device")
            init = _in_default_precision(example.init)
            train(example, init(jax.random.key(0)), one_device(example), steps, show=True)
            return True
        plan = planned(example, mode, trainers, stage)
        _say(
            "\n".join(
                [repr(plan).strip("<>"), *(n for n in plan.notes if n.startswith(("exact", "  ")))]
            )
        )
        job = plan.on_mesh()
        alone = jax.tree.map(_on_one_device, job.gather(job.init(jax.random.key(0))))
        state = job.gather(train(example, job.init(jax.random.key(0)), job.step, steps, show=True))
        alone = train(example, alone, one_device(example), steps, show=False)
        apart = difference(_numbers(state), _numbers(alone))
    _say(
        f"state against one device's after the same {steps} batches: max relative difference "
        f"{apart:.1e} "
        + (
            f"(float64, bound {BOUND:.0e})"
            if x64
            else "(float32; with --x64, rounding errors are below 1e-10)"
        )
    )
    return apart < BOUND or not x64


def load(name: str) -> Any:
    """Return the module of an example.

    Raises:
      ConfigError: the example does not exist, or a library is missing.
    """
    if name not in EXAMPLES:
        raise ConfigError(
            f"there is no example {name!r}; {did_you_mean(name, EXAMPLES, 'there are')}"
        )
    for library in ("flax", "equinox", "sklearn"):
        if importlib.util.find_spec(library) is None:
            raise missing_extra(f"the examples need {library}", "libraries")
    return importlib.import_module(f"examples.libraries.{name}")


def planned(example: Any, mode: str, trainers: int, stage: int = 3) -> Plan:
    """Return the plan of an example.

    A pipeline needs `dtrans.value_and_grad` in the step, and is traced with the global batch.
    """
    init, key = _in_default_precision(example.init), jax.random.key(0)
    startup = dtrans.trace(init, key)
    if mode == "pipeline":
        main = dtrans.trace(
            example.training(dtrans.value_and_grad), *_parts(init(key)), *example.batch(0)
        )
        return dtrans.pipeline(main, startup, num_stages=trainers, num_micro_batch=4)
    part = jax.tree.map(lambda a: a[: -(-len(a) // trainers)] if a.ndim else a, example.batch(0))
    main = dtrans.trace(example.training(), *_parts(init(key)), *part)
    if mode == "pserver":
        servers = [f"127.0.0.1:{6174 + i}" for i in range(trainers)]
        return dtrans.pserver(main, startup, pservers=servers, trainers=trainers)
    if mode == "sharding":
        return dtrans.sharding(main, startup, degree=trainers, stage=stage)
    return dtrans.nccl2(main, startup, trainers=trainers)


def one_device(example: Any) -> Callable[..., tuple[Any, ...]]:
    """Return the step on one device with the arguments and results of a job's `step`."""
    step = example.training()

    def from_state(state: Any, *batch: Any) -> tuple[Any, ...]:
        results = step(*_parts(state), *batch)
        return (results[:2], *results[2:]) if isinstance(state, tuple) else results

    return from_state


def train(
    example: Any, state: Any, step: Callable[..., tuple[Any, ...]], steps: int, *, show: bool
) -> Any:
    """Train for some steps, print the results of `LINES` steps, and return the state."""
    for i in range(steps):
        state, *results = step(state, *example.batch(i))
        if show and (i % max(1, steps // LINES) == 0 or i == steps - 1):
            _say(f"step {i + 1:4}  " + "  ".join(f"{n} {float(x):.4f}" for n, x in _named(results)))
    return state


def _parts(state: Any) -> tuple[Any, ...]:
    """Return the step's arguments for a state: the state, or the model and the optimizer state."""
    return state if isinstance(state, tuple) else (state,)


def _in_default_precision(init: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    """Return an init whose floats have JAX's default precision; flax always creates float32."""
    cast = lambda a: jnp.asarray(a, float) if getattr(a, "dtype", None) == jnp.float32 else a

    def wide(key: jax.Array) -> Any:
        return jax.tree.map(cast, init(key))

    return wide


def _on_one_device(x: Any) -> Any:
    return jax.device_put(x, jax.devices()[0]) if hasattr(x, "dtype") else x


def _named(results: Any) -> list[tuple[str, Any]]:
    """Return the results of a step, with their names."""
    found = jax.tree.leaves_with_path(results)
    return [(getattr(path[-1], "key", "loss"), x) for path, x in found]


def _numbers(tree: Any) -> list[Any]:
    """Return the arrays of a state."""
    arrays = [
        jnp.asarray(x)
        for x in jax.tree.leaves(tree)
        if hasattr(x, "dtype") or isinstance(x, (int, float))
    ]
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [jax.random.key_data(x) if is_key(x) else x for x in arrays]


def _say(text: str) -> None:
    Console(soft_wrap=True).print(text, highlight=False, markup=False)
