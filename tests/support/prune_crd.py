"""Prune the published CRD of JobSet to the fields that dtrans writes.

    python tests/support/prune_crd.py jobset.x-k8s.io_jobsets.yaml >tests/hosts/jobset_schema.yaml

The argument is a copy of `config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml` of
kubernetes-sigs/jobset. Types, required fields, enumerations and patterns are those of the CRD.
`additionalProperties: false` makes a field with a typo fail. `STRICTER` has what Kubernetes, or the
  webhook of JobSet, checks beyond the CRD.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dtrans.hosts.emit_jobset import emit_jobset
from dtrans.hosts.role_table import role_table


VERSION = "v1alpha2"
COMMIT = "01078527ec4383c3d7289b5af3e0a788324e14ec"  # after v0.8.0, before v0.9.0
HEAD = f"""\
# The fields of a JobSet (jobset.x-k8s.io/{VERSION}) that dtrans writes, from the CRD of
# kubernetes-sigs/jobset at {COMMIT}. Written by tests/support/prune_crd.py.
"""

# keywords of a schema that restrict values; all other keywords are for people and for API servers
KEPT = (
    "type",
    "format",
    "enum",
    "pattern",
    "anyOf",
    "required",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
)
KEPT += ("minItems", "maxItems")

_LABEL = {"pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}  # a DNS label
_COUNT = {"minimum": 0}
_JOB = ".spec.replicatedJobs[].template.spec"
STRICTER: dict[str, dict[str, Any]] = {
    "": {"required": ["apiVersion", "kind", "metadata", "spec"]},
    ".apiVersion": {"const": f"jobset.x-k8s.io/{VERSION}"},
    ".kind": {"const": "JobSet"},
    # Kubernetes checks the metadata, so the CRD has no schema for it
    ".metadata": {
        "required": ["name"],
        "properties": {"name": {"type": "string", **_LABEL}},
        "additionalProperties": False,
    },
    ".spec.network.subdomain": _LABEL,
    # in the CRD, only the description of the field has the pattern
    ".spec.failurePolicy.rules[].name": {"pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    f"{_JOB}.completionMode": {"enum": ["Indexed", "NonIndexed"]},
    f"{_JOB}.completions": _COUNT,
    f"{_JOB}.parallelism": _COUNT,
    f"{_JOB}.backoffLimit": _COUNT,
    # a Job accepts only these two of a pod's policies
    f"{_JOB}.template.spec.restartPolicy": {"enum": ["Never", "OnFailure"]},
}


def emitted_jobsets() -> list[Any]:
    """Return JobSets that have every field that dtrans writes."""
    command = ("python", "train.py")
    tables = [
        role_table("pserver", 2, 2, command, cores=2),
        role_table("nccl2", 2, command=command),
    ]
    return [yaml.safe_load(emit_jobset(table)) for table in tables]


def prune(schema: Mapping[str, Any], values: Sequence[Any], path: str = "") -> dict[str, Any]:
    """Return a schema with only the properties that occur in `values`.

    Args:
      schema: a schema of OpenAPI 3, as in a CRD.
      values: all values at this place.
      path: this place, for `STRICTER` and for errors.

    Raises:
      ValueError: a value has a property that the schema lacks.
    """
    found = {keyword: schema[keyword] for keyword in KEPT if keyword in schema}
    if "properties" in schema:
        by_name: dict[str, list[Any]] = {}
        for value in values:
            for name, item in value.items():
                by_name.setdefault(name, []).append(item)
        if unknown := sorted(by_name.keys() - schema["properties"].keys()):
            raise ValueError(
                f"the schema has no {path}.{unknown[0]}; take a newer CRD, or do not write that "
                "field"
            )
        properties = schema["properties"]
        found["properties"] = {
            k: prune(properties[k], v, f"{path}.{k}") for k, v in sorted(by_name.items())
        }
        found["additionalProperties"] = False
    elif "items" in schema:
        found["items"] = prune(
            schema["items"], [item for value in values for item in value], f"{path}[]"
        )
    elif isinstance(schema.get("additionalProperties"), Mapping):
        items = [item for value in values for item in value.values()]
        found["additionalProperties"] = prune(schema["additionalProperties"], items, f"{path}.*")
    return found | STRICTER.get(path, {})


def schema_of(crd: Mapping[str, Any], version: str = VERSION) -> Any:
    """Return the schema of one version of a CRD."""
    (found,) = (
        v["schema"]["openAPIV3Schema"] for v in crd["spec"]["versions"] if v["name"] == version
    )
    return found


def main() -> None:
    """Print the pruned schema of the CRD in a file."""
    crd = yaml.safe_load(Path(sys.argv[1]).read_text())
    pruned = prune(schema_of(crd), emitted_jobsets())
    print(HEAD + yaml.safe_dump(pruned, default_flow_style=None, width=110), end="")


if __name__ == "__main__":
    main()
