"""Status of a job as metrics that Prometheus scrapes (the extra `prometheus`).

Each scrape asks the servers of the job. `dtrans_up` is 0 for a server that does not answer. Metrics
of servers have the label `endpoint`, metrics of trainers the label `trainer`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from dtrans.endpoints import split_endpoint
from dtrans.errors import ConfigError, missing_extra
from dtrans.protocol.job_status import STATES
from dtrans.run.status.job_view import merge_trainers
from dtrans.run.status.observer import Answer, JobObserver


LOOPBACK = "127.0.0.1"
# (metric, field of a server's status, kind, help)
SERVER_METRICS = (
    ("dtrans_step", "step", "gauge", "Steps that the server has completed."),
    (
        "dtrans_steps_per_second",
        "steps_per_second",
        "gauge",
        "Steps per second of the server, as in `dtrans status`.",
    ),
    ("dtrans_received_bytes", "received", "counter", "Bytes from trainers and other servers."),
    ("dtrans_sent_bytes", "sent", "counter", "Bytes to trainers and other servers."),
    ("dtrans_refused_messages", "refused", "counter", "Messages that the server refused."),
    ("dtrans_barred_connections", "barred", "counter", "Connections that the server refused."),
    (
        "dtrans_snapshot_step",
        "snapshot",
        "gauge",
        "Step of the newest snapshot that the server has written.",
    ),
    (
        "dtrans_generation",
        "generation",
        "gauge",
        "How often the job has continued after a failure or after the return of a trainer.",
    ),
    ("dtrans_uptime_seconds", "uptime", "gauge", "Seconds since the server started."),
)
TRAINER_METRICS = (
    (
        "dtrans_trainer_step",
        "step",
        "gauge",
        "Steps that the trainer has completed, at the slowest server.",
    ),
    (
        "dtrans_trainer_steps_per_second",
        "steps_per_second",
        "gauge",
        "Steps per second of the trainer, as in `dtrans status`.",
    ),
    (
        "dtrans_trainer_staleness",
        "staleness",
        "gauge",
        "Steps of other trainers that the trainer's last gradients did not include.",
    ),
    (
        "dtrans_trainer_silent_seconds",
        "silent",
        "gauge",
        "Seconds since a server received a message from the trainer.",
    ),
    ("dtrans_trainer_received_bytes", "bytes_in", "counter", "Bytes that the trainer received."),
    ("dtrans_trainer_sent_bytes", "bytes_out", "counter", "Bytes that the trainer sent."),
)


class JobCollector:
    """Prometheus collector that asks the servers of a job at each scrape.

    Args:
      observer: the observer of the job.
    """

    def __init__(self, observer: JobObserver) -> None:
        self._observer = observer
        # several threads may scrape, but the observer serves one at a time
        self._lock = threading.Lock()

    def describe(self) -> Iterable[Any]:
        """Return an empty list, so that Prometheus does not call `collect` at registration.

        That call would fail if no server answers yet.
        """
        return []

    def collect(self) -> Iterable[Any]:
        """Ask the job, and return its metrics."""
        with self._lock:
            answers = self._observer.ask()
        return list(job_metrics(answers))


def job_metrics(answers: Sequence[Answer]) -> Iterable[Any]:
    """Yield the Prometheus metrics of a job, from the answers of its servers."""
    from prometheus_client.core import GaugeMetricFamily

    # servers
    up = GaugeMetricFamily("dtrans_up", "1 if the server answers.", labels=["endpoint"])
    for x in answers:
        up.add_metric([x.endpoint], float(x.server is not None))
    yield up
    servers = [x for x in answers if x.server is not None]
    for name, field, kind, text in SERVER_METRICS:
        values = {x.endpoint: getattr(x.server, field) for x in servers}
        yield _family(name, kind, text, "endpoint", values)

    # checkpoints
    ages, failed = {}, {}
    for x in servers:
        if x.server and x.server.checkpoint:
            error = x.server.checkpoint["error"]
            failed[x.endpoint] = float(bool(error))
            if not error:
                ages[x.endpoint] = x.server.checkpoint["ago"]
    text = "Seconds since the last checkpoint."
    yield _family("dtrans_checkpoint_age_seconds", "gauge", text, "endpoint", ages)
    text = "1 if the last checkpoint could not be written."
    yield _family("dtrans_checkpoint_failed", "gauge", text, "endpoint", failed)

    # tables
    rows = GaugeMetricFamily(
        "dtrans_table_rows",
        "Rows of a table that exist in the server's memory.",
        labels=["endpoint", "block"],
    )
    for x in servers:
        for table in x.server.tables if x.server else ():
            rows.add_metric([x.endpoint, table["name"]], table["created"])
    yield rows

    # trainers
    trainers = merge_trainers(answers)
    for name, field, kind, text in TRAINER_METRICS:
        values = {str(t.trainer): getattr(t, field) for t in trainers}
        yield _family(name, kind, text, "trainer", values)
    states = GaugeMetricFamily(
        "dtrans_trainer_state", "1 if the trainer is in this state.", labels=["trainer", "state"]
    )
    for t in trainers:
        for state in STATES:
            states.add_metric([str(t.trainer), state], float(t.state == state))
    yield states


def _family(name: str, kind: str, text: str, label: str, values: dict[str, Any]) -> Any:
    """Return a metric with several values.

    Args:
      name: the name of the metric.
      kind: "counter" or "gauge".
      text: the help text of the metric.
      label: the name of the metric's label.
      values: the metric's value for each label value (dict). Values that are None are left out.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    classes = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    family = classes[kind](name, text, labels=[label])
    for at, value in values.items():
        if value is not None:
            family.add_metric([at], value)
    return family


def serve_metrics(observer: JobObserver, where: str) -> tuple[Any, str]:
    """Serve /metrics in a thread of this process.

    Args:
      observer: the observer of the job.
      where: a port on loopback, or host:port.

    Returns:
      The server, which the caller must shut down; and its address, host:port.

    Raises:
      ConfigError: prometheus-client is not installed, or the port cannot be bound.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as e:
        raise missing_extra("--prometheus needs prometheus-client", "prometheus") from e
    if where.isdigit():
        host, port = LOOPBACK, int(where)
    else:
        host, port = split_endpoint(where)
    registry = CollectorRegistry()
    registry.register(JobCollector(observer))
    try:
        server, _ = start_http_server(port, addr=host, registry=registry)
    except OSError as e:
        raise ConfigError(
            f"--prometheus {where} cannot be bound: {e.strerror}; choose another port"
        ) from e
    return server, f"{host}:{server.server_port}"
