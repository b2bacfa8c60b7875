"""A role table as a Kubernetes JobSet (`jobset.x-k8s.io/v1alpha2`).

Servers are one Indexed job, and trainers another. A pod is reached at
`JOBSET-ROLE-0-INDEX.JOBSET`, by the headless service that JobSet makes. Its index comes from the
annotation that Kubernetes gives pods of Indexed jobs; `$(NAME)` in a variable refers to an earlier
one.
"""

from __future__ import annotations

import json
from typing import Any

from dtrans.hosts.emit_parts import EmitParts, parts_of
from dtrans.hosts.role_table import RoleTable
from dtrans.run.distributed.schedulers import PORT
from dtrans.run.distributed.status_door import VARIABLE as STATUS
from dtrans.run.net.net_options import ALLOW_REMOTE


INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
IMAGE = "dtrans-job:latest"
_TARGET = {"pserver": "server", "trainer": "trainer"}


def emit_jobset(table: RoleTable, image: str = IMAGE) -> str:
    """Return the YAML of a JobSet that starts each role in a pod.

    Args:
      table: of `role_table` or `plan.roles`, with a command.
      image: the container image with dtrans and the script.
    """
    parts = parts_of(table)
    kinds = ["pserver", "trainer"] if parts.servers else ["trainer"]
    rules = []
    for kind in kinds:
        target = _TARGET[kind]
        rules.append(
            {"name": f"{target}Failed", "action": "FailJobSet", "targetReplicatedJobs": [target]}
        )
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "subdomain": parts.name},
        "failurePolicy": {"maxRestarts": 0, "rules": rules},
        "replicatedJobs": [_job(parts, kind, image) for kind in kinds],
    }
    if parts.servers:
        spec["startupPolicy"] = {"startupPolicyOrder": "InOrder"}
    found = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": parts.name},
        "spec": spec,
    }
    intro = (
        f"# {table.title}\n# the token: kubectl create secret generic {parts.name}-token "
        "--from-file=token=FILE\n"
    )
    return intro + "".join(f"{line}\n" for line in _yaml(found))


def _job(parts: EmitParts, kind: str, image: str) -> dict[str, Any]:
    count = parts.servers if kind == "pserver" else parts.trainers
    container: dict[str, Any] = {
        "name": "role",
        "image": image,
        "command": [_literal(a) for a in parts.argv],
        "env": _variables(parts, kind),
    }
    if kind == "pserver" or not parts.servers:
        ports = [PORT, PORT + 1] if parts.observed else [PORT]
        container["ports"] = [{"containerPort": port} for port in ports]
    if kind == "pserver":
        container["readinessProbe"] = {"tcpSocket": {"port": PORT}, "periodSeconds": 5}
    if parts.cores is not None:
        container["resources"] = {"requests": {"cpu": str(parts.cores)}}
    pod = {"restartPolicy": "Never", "containers": [container]}
    job = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {"name": _TARGET[kind], "replicas": 1, "template": {"spec": job}}


def _literal(text: str) -> str:
    """Return a text that Kubernetes leaves unchanged.

    In commands and variables it expands `$(NAME)` and `$$`.
    """
    return text.replace("$", "$$")


def _variables(parts: EmitParts, kind: str) -> list[dict[str, Any]]:
    bound = "pserver" if parts.servers else "trainer"
    at = lambda index, port=PORT: f"{parts.name}-{_TARGET[bound]}-0-{index}.{parts.name}:{port}"
    endpoints = [at(i) for i in range(parts.servers or parts.trainers)]
    plain = {
        **{k: _literal(v) for k, v in parts.environment.items()},
        ALLOW_REMOTE: "1",
        "DTRANS_ROLE": kind,
        "DTRANS_TRAINERS": str(parts.trainers),
        parts.variable: ",".join(endpoints),
        **({STATUS: at(0, PORT + 1)} if parts.observed else {}),
    }
    secret = {"name": f"{parts.name}-token", "key": "token"}
    found: list[dict[str, Any]] = [
        {"name": "DTRANS_TOKEN", "valueFrom": {"secretKeyRef": secret}},
        *({"name": k, "value": v} for k, v in plain.items()),
    ]
    index = "DTRANS_TRAINER_ID" if kind == "trainer" else "POD_INDEX"
    found.append({"name": index, "valueFrom": {"fieldRef": {"fieldPath": INDEX}}})
    if kind == bound:
        found.append({"name": "DTRANS_CURRENT_ENDPOINT", "value": at(f"$({index})")})
    return found


def _yaml(value: dict[str, Any], indent: str = "") -> list[str]:
    """Write a mapping in block style; strings in JSON's quotes, which YAML reads."""
    lines = []
    for key, item in value.items():
        if isinstance(item, dict):
            lines += [f"{indent}{key}:", *_yaml(item, indent + "  ")]
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            lines.append(f"{indent}{key}:")
            for element in item:
                first, *rest = _yaml(element, indent + "  ")
                lines += [f"{indent}- {first.strip()}", *rest]
        else:
            lines.append(f"{indent}{key}: {json.dumps(item)}")
    return lines
