"""Writer of a Kubernetes JobSet (`jobset.x-k8s.io/v1alpha2`) that starts a job's roles in pods.

Servers are one Indexed job, and trainers another. The headless service of the JobSet resolves the
host name `JOBSET-ROLE-0-INDEX.JOBSET` to a pod. A pod reads its index from an annotation, which
Kubernetes adds to pods of Indexed jobs. A pod's own endpoint contains this index: in the value of a
variable, Kubernetes replaces `$(NAME)` by the value of an earlier variable.
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
    """Return a Kubernetes JobSet, as YAML, that starts each role of a job in a pod.

    Args:
      table: the roles, with a command: the result of `role_table` or `plan.roles`.
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
    """Return the part of a JobSet with all roles of one kind: `pserver` or `trainer`."""
    count = parts.servers if kind == "pserver" else parts.trainers
    container: dict[str, Any] = {
        "name": "role",
        "image": image,
        "command": [_literal(a) for a in parts.argv],
        "env": _variables(parts, kind),
    }
    if kind == "pserver" or not parts.servers:
        container["ports"] = [{"containerPort": PORT}]
        if parts.answers_status:
            container["ports"].append({"containerPort": PORT + 1})
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
    """Escape a text of a command or variable, in which Kubernetes expands `$(NAME)` and `$$`."""
    return text.replace("$", "$$")


def _variables(parts: EmitParts, kind: str) -> list[dict[str, Any]]:
    """Return the environment variables of all pods of one kind, as Kubernetes' list `env`."""
    bound = "pserver" if parts.servers else "trainer"  # the kind of role that has endpoints
    at = lambda index, port=PORT: f"{parts.name}-{_TARGET[bound]}-0-{index}.{parts.name}:{port}"
    endpoints = [at(i) for i in range(parts.servers or parts.trainers)]
    plain = {name: _literal(value) for name, value in parts.environment.items()}
    plain |= {
        ALLOW_REMOTE: "1",
        "DTRANS_ROLE": kind,
        "DTRANS_TRAINERS": str(parts.trainers),
        parts.variable: ",".join(endpoints),
    }
    if parts.answers_status:
        plain[STATUS] = at(0, PORT + 1)
    secret = {"name": f"{parts.name}-token", "key": "token"}
    found: list[dict[str, Any]] = [{"name": "DTRANS_TOKEN", "valueFrom": {"secretKeyRef": secret}}]
    found += [{"name": name, "value": value} for name, value in plain.items()]
    index = "DTRANS_TRAINER_ID" if kind == "trainer" else "POD_INDEX"
    found.append({"name": index, "valueFrom": {"fieldRef": {"fieldPath": INDEX}}})
    if kind == bound:
        found.append({"name": "DTRANS_CURRENT_ENDPOINT", "value": at(f"$({index})")})
    return found


def _yaml(value: dict[str, Any], indent: str = "") -> list[str]:
    """Return the lines of a mapping in YAML's block style, with strings quoted as in JSON."""
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
