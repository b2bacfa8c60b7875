"""State of JAX: its devices, and the processes that it connected."""

from __future__ import annotations

import os
from typing import Any

import jax

from dtrans._jax.imports import multihost_utils, register_backend_factory
from dtrans._jax.versions import NEWEST_TESTED
from dtrans.errors import TraceError


def backends_started() -> bool:
    """Return True if JAX has created its devices; processes cannot be connected any more.

    JAX has no public function for it. An option that must be set earlier shows it: a new value is
    then refused.
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
    """Return True if a value's type varies over axes of a `shard_map` (`check_vma=True`)."""
    of: Any = jax.typeof(x)
    kind = getattr(of, "manual_axis_type", None)  # since 0.10
    return bool(kind.varying if kind is not None else getattr(of, "vma", ()))


def gloo_scatters_wrongly() -> bool:
    """Return True if reduce-scatters on CPUs may be silently wrong: over Gloo, before 0.12.

    Of 48 of 16 MB between two processes, 2 were wrong (jax#40830); all-reduces and all-gathers are
    right. Gloo carries out collectives on CPUs, within one process too, once `jax.distributed` is
    initialised.
    """
    config: Any = jax.config
    is_gloo = (
        config.jax_cpu_collectives_implementation == "gloo" and jax.distributed.is_initialized()
    )
    return is_gloo and jax.__version_info__ < (0, 12)


def let_gloo_bind(host: str) -> bool:
    """Make Gloo bind an address of this host and publish it, instead of the host name's address.

    Call it between `jax.distributed.initialize` and the first use of a device. JAX's own factory of
    CPU devices passes no address, and Gloo then takes that of `gethostname()`, which is 127.0.1.1
    on Debian.

    Args:
      host: the address.

    Returns:
      False if this JAX does not support it.
    """
    utils: Any = multihost_utils
    try:
        bridge = utils.xla_bridge
        make_client, make_gloo = bridge.make_cpu_client, bridge._jax.make_gloo_tcp_collectives
    except AttributeError:
        return False

    def factory() -> Any:
        return make_client(make_gloo(distributed_client=bulletin_board(), hostname=host))

    register_backend_factory("cpu", factory, priority=0, fail_quietly=False)
    return True


def job_size() -> tuple[int, int]:
    """Return the index of this process and the number of processes, without creating devices."""
    return int(_of_job("process_id")), int(_of_job("num_processes"))


def bulletin_board() -> Any:
    """Return the key-value store of the job that `jax.distributed` connected.

    JAX has no documented access to it; `multihost_utils` itself uses the same one.
    """
    client = _of_job("client")
    assert client is not None, "jax.distributed is not initialized"
    return client


def detected_coordinator(timeout: int) -> str:
    """Return the coordinator that JAX detects from schedulers, `host:port`; empty if none.

    JAX has no public function for it before it connects.
    """
    utils: Any = multihost_utils
    try:
        detect = utils.distributed.clusters.ClusterEnv.auto_detect_unset_distributed_params
    except AttributeError:
        return ""
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    return str(address or detect(None, None, None, None, None, timeout)[0] or "")


def has_coordinator_mtls() -> bool:
    """Return True if JAX supports mutual TLS of its coordinator (JAX_MTLS_CERT_FILE and others)."""
    return hasattr(jax.config, "jax_mtls_cert_file")


def coordinator() -> str:
    """Return the coordinator address at which `jax.distributed` connected, `host:port`."""
    return str(_of_job("coordinator_address"))


def _of_job(what: str) -> Any:
    utils: Any = multihost_utils
    try:
        return getattr(utils.distributed.global_state, what)
    except AttributeError as e:
        tested = ".".join(map(str, NEWEST_TESTED))
        raise TraceError(
            f"jax {jax.__version__} keeps the store of its processes elsewhere ({e}): dtrans knows "
            "where jax 0.10.2 to "
            f"{tested} have it; take one of these"
        ) from e
