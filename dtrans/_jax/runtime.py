"""Runtime of JAX: its devices, and the processes that `jax.distributed` connected."""

from __future__ import annotations

import os
from typing import Any

import jax

from dtrans._jax.imports import multihost_utils, register_backend_factory
from dtrans._jax.versions import NEWEST_TESTED
from dtrans.errors import TraceError


def backends_started() -> bool:
    """Return True if JAX has created its devices, after which it can no longer connect processes.

    JAX has no public function for this test. But once JAX has devices, it refuses to change some
    options.
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
    """Return True if the type of a value says that it differs along axes of a `shard_map`."""
    of: Any = jax.typeof(x)
    kind = getattr(of, "manual_axis_type", None)  # from jax 0.10
    return bool(kind.varying if kind is not None else getattr(of, "vma", ()))


def gloo_scatters_wrongly() -> bool:
    """Return True if reduce-scatters on CPUs may silently return wrong numbers.

    This is a bug of Gloo before jax 0.12 (jax#40830): 2 of 48 reduce-scatters of 16 MB between two
    processes were wrong. All-reduces and all-gathers are right. Once `jax.distributed` is
    initialised, JAX uses Gloo for all collectives on CPUs, even within one process.
    """
    config: Any = jax.config
    is_gloo = (
        config.jax_cpu_collectives_implementation == "gloo" and jax.distributed.is_initialized()
    )
    return is_gloo and jax.__version_info__ < (0, 12)


def let_gloo_bind(host: str) -> bool:
    """Set the address of this host that Gloo binds and publishes.

    Call this function between `jax.distributed.initialize` and the first use of a device. By
    default, Gloo uses the address of `gethostname()`, which is 127.0.1.1 on Debian, so other hosts
    cannot connect.

    Args:
      host: the address.

    Returns:
      False if this version of JAX has no such setting.
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
    """Return (index of this process, number of processes) without creating devices."""
    return int(_of_job("process_id")), int(_of_job("num_processes"))


def bulletin_board() -> Any:
    """Return the key-value store of `jax.distributed`, in which processes leave messages.

    `multihost_utils` uses the same store.
    """
    client = _of_job("client")
    assert client is not None, "jax.distributed is not initialized"
    return client


def detected_coordinator(timeout: int) -> str:
    """Return the coordinator address that JAX detects in a cluster, `host:port`; "" if none.

    JAX has no public function that detects the coordinator without connecting.
    """
    utils: Any = multihost_utils
    try:
        detect = utils.distributed.clusters.ClusterEnv.auto_detect_unset_distributed_params
    except AttributeError:
        return ""
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    return str(address or detect(None, None, None, None, None, timeout)[0] or "")


def has_coordinator_mtls() -> bool:
    """Return True if JAX supports mutual TLS with its coordinator (JAX_MTLS_CERT_FILE)."""
    return hasattr(jax.config, "jax_mtls_cert_file")


def coordinator() -> str:
    """Return the address of the coordinator of `jax.distributed`, `host:port`."""
    return str(_of_job("coordinator_address"))


def _of_job(what: str) -> Any:
    utils: Any = multihost_utils
    try:
        return getattr(utils.distributed.global_state, what)
    except AttributeError as e:
        tested = ".".join(map(str, NEWEST_TESTED))
        raise TraceError(
            f"dtrans cannot read the state of jax.distributed in jax {jax.__version__} ({e}); "
            f"install a jax version from 0.10.2 to {tested}"
        ) from e
