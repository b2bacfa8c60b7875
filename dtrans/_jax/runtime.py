"""What JAX knows of its devices and of the processes that it connected."""

from __future__ import annotations

from typing import Any

import jax

from dtrans._jax.imports import multihost_utils
from dtrans._jax.versions import NEWEST_TESTED
from dtrans.errors import TraceError


def backends_started() -> bool:
    """Whether JAX has made its devices, after which processes can no longer be connected.

    JAX has no public way to ask. An option that must be set before tells it: another value is then refused.
    """
    config: Any = jax.config
    had = config.jax_num_cpu_devices
    try:
        config.update("jax_num_cpu_devices", had + 1)
    except RuntimeError:
        return True
    config.update("jax_num_cpu_devices", had)
    return False


def is_varying(x: Any) -> bool:
    """Whether a value has a type that says over which axes of a `shard_map` it varies (`check_vma=True`)."""
    of: Any = jax.typeof(x)
    kind = getattr(of, "manual_axis_type", None)  # since 0.10
    return bool(kind.varying if kind is not None else getattr(of, "vma", ()))


def gloo_scatters_wrongly() -> bool:
    """Whether a reduce-scatter on CPUs may give wrong numbers here, without an error: over Gloo, before 0.12.

    Of 48 of 16 MB between two processes 2 were wrong (jax#40830); all-reduces and all-gathers are right. Gloo carries
    out collectives on CPUs, within one process too, once `jax.distributed` is initialised.
    """
    config: Any = jax.config
    is_gloo = config.jax_cpu_collectives_implementation == "gloo" and jax.distributed.is_initialized()
    return is_gloo and jax.__version_info__ < (0, 12)


def bulletin_board() -> Any:
    """The key-value store of the job that `jax.distributed` connected.

    JAX has no documented way to it; this one goes by what `multihost_utils` itself uses.
    """
    client = _of_job("client")
    assert client is not None, "jax.distributed is not initialized"
    return client


def coordinator() -> str:
    """The address at which `jax.distributed` connected the processes of the job, `host:port`."""
    return str(_of_job("coordinator_address"))


def _of_job(what: str) -> Any:
    utils: Any = multihost_utils
    try:
        return getattr(utils.distributed.global_state, what)
    except AttributeError as e:
        tested = ".".join(map(str, NEWEST_TESTED))
        raise TraceError(
            f"jax {jax.__version__} keeps the store of its processes elsewhere ({e}): dtrans knows where jax 0.10.2 to "
            f"{tested} have it; take one of these"
        ) from e
