"""Emitted jobs: their text, and the roles of the processes that they start."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import prune_crd
import pytest
import yaml
from paths import ROOT
from role_scripts import ROLE_OF_PROCESS

from dtrans.errors import ConfigError
from dtrans.hosts.emit import EMITTERS
from dtrans.hosts.emit_jobset import INDEX
from dtrans.hosts.role_table import RoleTable, role_table
from dtrans.run.distributed.role import VARIABLES, Role


HERE = Path(__file__).parent
TOKEN = "0123456789abcdef" * 4
COUNTS = {"pserver": (2, 2), "nccl2": (3, None)}
SUFFIX = {"slurm": "sh", "jobset": "yaml", "torchx": "py.txt", "hosts": "sh"}
EXTRA = {"EXTRA": "it's $(HOME) $x"}
modes = pytest.mark.parametrize("mode", COUNTS)


def table_of(mode: str, *command: str) -> RoleTable:
    trainers, pservers = COUNTS[mode]
    return role_table(
        mode, trainers, pservers, command or ("python", "train.py", "it's"), env=EXTRA
    )


@modes
@pytest.mark.parametrize("name", EMITTERS)
def test_golden(name: str, mode: str) -> None:
    compare(f"{name}_{mode}.{SUFFIX[name]}", EMITTERS[name](table_of(mode)))


def compare(file: str, text: str) -> None:
    """Compare a text with a recorded file.

    `DTRANS_WRITE_GOLDEN=1 pytest tests/hosts/test_emit.py` writes the files again.
    """
    golden = HERE / "golden" / file
    if os.environ.get("DTRANS_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert max(len(line) for line in text.splitlines()) < 200


@pytest.mark.parametrize("nodes", [1, 2])
def test_golden_on_shared_nodes(nodes: int) -> None:
    compare(f"slurm_pserver_on_{nodes}.sh", EMITTERS["slurm"](table_of("pserver"), nodes=nodes))


@pytest.mark.parametrize("name", EMITTERS)
def test_what_cannot_be_written_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"have no command; pass role_table\(command=\.\.\.\)"):
        EMITTERS[name](role_table("pserver", 2, 1))


@pytest.mark.parametrize("name", EMITTERS)
def test_the_user_says_where_a_job_answers_observers(name: str) -> None:
    """A single trainer answers no observers.

    Trainers that continue without lost trainers answer none either.
    """
    status = "DTRANS_STATUS_ENDPOINT"
    table = role_table("nccl2", 2, command=("python", "train.py"), env={status: "10.0.0.9:7000"})
    assert {e.environment[status] for e in table.at(["a", "b"])} == {"10.0.0.9:7000"}
    text = EMITTERS[name](table)
    assert text.count(status) == 1 and "10.0.0.9:7000" in text
    assert status not in EMITTERS[name](role_table("nccl2", 1, command=("python", "train.py")))
    drops = {"DTRANS_ON_TRAINER_LOSS": "drop"}
    assert status not in EMITTERS[name](
        role_table("nccl2", 2, command=("python", "train.py"), env=drops)
    )


def same_roles(got: Sequence[Mapping[str, str]], table: RoleTable) -> None:
    """Compare the environments of processes with a role table that has the same endpoints."""
    roles = [Role.from_env(env) for env in got]
    endpoints = roles[0].pserver_endpoints or roles[0].trainer_endpoints
    wanted = {e.name: dict(e.environment) for e in table.with_endpoints(endpoints)}
    found = {}
    for role, env in zip(roles, got, strict=True):
        names = (*VARIABLES, "DTRANS_ALLOW_REMOTE", "DTRANS_STATUS_ENDPOINT", *EXTRA)
        found[role.name] = {k: env[k] for k in names if k in env}
    assert found == wanted


# -- processes that say what they were given -------------------------------------------------------


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


SAY = """
import json, os, sys
with open(os.path.join(sys.argv[1], f"{os.getpid()}.json"), "w") as f:
    json.dump({"argv": sys.argv[2:], "env": dict(os.environ)}, f)
"""


def said(folder: Path) -> list[dict[str, str]]:
    found = [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]
    assert all(f["argv"] == ["it's"] for f in found)
    return [f["env"] for f in found]


def clean_env(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("DTRANS", "SLURM"))} | more


# -- Slurm -----------------------------------------------------------------------------------------


# Stand-ins for two programs of Slurm. `scontrol` prints a list of names. `srun` starts a process on
# each node, or the tasks of `--multi-prog`, and appends the rest of the command to their lines.
SCONTROL = "#!/bin/sh\necho \"$3\" | tr , '\\n'\n"
SRUN = """#!{python}
import os, subprocess, sys
arguments = [a for a in sys.argv[1:] if a != "--kill-on-bad-exit=1"]
components = [[]]
for a in arguments:
    components.append([]) if a == ":" else components[-1].append(a)
running = []

def start(command, node):
    running.append(subprocess.Popen(command, env={{**os.environ, "SLURMD_NODENAME": node}}))

if arguments[1:3] == ["--distribution=arbitrary", "--multi-prog"]:
    nodes = open(os.environ["SLURM_HOSTFILE"]).read().split()
    assert arguments[0] == f"--ntasks={{len(nodes)}}"
    for line in open(arguments[3]):
        ranks, *command = line.split()
        first, _, last = ranks.partition("-")
        for rank in range(int(first), int(last or first) + 1):
            offset = str(rank - int(first))
            start([a.replace("%o", offset) for a in command] + arguments[4:], nodes[rank])
    components = []
for component in components:
    group = ""
    if component[0].startswith("--het-group="):
        group = "_HET_GROUP_" + component.pop(0).partition("=")[2]
    for node in os.environ["SLURM_JOB_NODELIST" + group].split(","):
        start(component, node)
sys.exit(max(p.wait() for p in running))
"""


@modes
@pytest.mark.parametrize("token", [None, "file"])
def test_processes_of_slurm_have_the_roles_of_the_table(
    mode: str, token: str | None, tmp_path: Path
) -> None:
    program(tmp_path / "srun", SRUN.format(python=sys.executable))
    program(tmp_path / "scontrol", SCONTROL)
    say = tmp_path / "say.py"
    say.write_text(SAY)
    table = table_of(mode, sys.executable, str(say), str(tmp_path), "it's")
    lists = {"": "n1,n2,n3", "_HET_GROUP_0": "s1,s2", "_HET_GROUP_1": "t1,t2"}
    env = clean_env(PATH=f"{tmp_path}:{os.environ['PATH']}")
    env |= {f"SLURM_JOB_NODELIST{k}": v for k, v in lists.items()}
    if token:
        (tmp_path / "token").write_text(TOKEN)
        env["DTRANS_TOKEN_FILE"] = str(tmp_path / "token")
    subprocess.run(
        ["bash", "-c", EMITTERS["slurm"](table)], env=env, check=True, timeout=60, cwd=tmp_path
    )
    got = said(tmp_path)
    same_roles(got, table)
    role = Role.from_env(got[0])
    names = role.pserver_endpoints or role.trainer_endpoints
    assert names == (
        ("s1:6174", "s2:6174") if mode == "pserver" else ("n1:6174", "n2:6174", "n3:6174")
    )
    tokens = {e["DTRANS_TOKEN"] for e in got}
    assert len(tokens) == 1
    assert (tokens == {TOKEN}) == bool(token)
    assert re.fullmatch("[0-9a-f]{64}", tokens.pop())


@pytest.mark.parametrize("nodes, counts", [(1, [4]), (2, [2, 2]), (3, [2, 1, 1])])
def test_tasks_on_shared_nodes_have_the_roles_of_the_table(
    nodes: int, counts: list[int], tmp_path: Path
) -> None:
    """Servers are placed where links carry the fewest bytes, by the rule of `place`."""
    program(tmp_path / "srun", SRUN.format(python=sys.executable))
    program(tmp_path / "scontrol", SCONTROL)
    say = tmp_path / "say.py"
    say.write_text(SAY)
    table = table_of("pserver", sys.executable, str(say), str(tmp_path), "it's")
    used = [f"n{i}" for i in range(len(counts))]
    env = clean_env(
        PATH=f"{tmp_path}:{os.environ['PATH']}", TMPDIR=str(tmp_path), DTRANS_PORT="7000"
    )
    env["SLURM_JOB_NODELIST"] = ",".join(used)
    text = EMITTERS["slurm"](table, nodes=nodes)
    subprocess.run(["bash", "-c", text], env=env, check=True, timeout=60, cwd=tmp_path)
    got = said(tmp_path)
    same_roles(got, table)
    assert f"#SBATCH --nodes={len(counts)} --ntasks-per-node={max(counts)}\n" in text

    # A server listens at its node, and the script has removed both lists.
    assert [sum(env["SLURMD_NODENAME"] == n for env in got) for n in used] == counts
    role = Role.from_env(got[0])
    hosts = [e.partition(":")[0] for e in role.pserver_endpoints]
    if nodes == 1:
        assert role.pserver_endpoints == ("127.0.0.1:7000", "127.0.0.1:7001")
    else:
        servers = {
            env["DTRANS_CURRENT_ENDPOINT"]: env for env in got if env["DTRANS_ROLE"] == "pserver"
        }
        assert [servers[e]["SLURMD_NODENAME"] for e in role.pserver_endpoints] == hosts
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("tmp.")]


@pytest.mark.parametrize(
    "mode, nodes, message",
    [
        (
            "nccl2",
            2,
            "nodes=2 is for a job with parameter servers, but this is a nccl2 job; leave nodes out",
        ),
        (
            "pserver",
            5,
            "nodes=5 is more than the roles of a pserver job: 2 pservers, 2 trainers; use at most "
            "4",
        ),
        ("pserver", 0, "nodes"),
    ],
)
def test_shared_nodes_that_cannot_be(mode: str, nodes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EMITTERS["slurm"](table_of(mode), nodes=nodes)


def test_slurm_gives_each_process_its_cores() -> None:
    """`srun` also has the option `--cpus-per-task`: since Slurm 22.05, `srun` ignores the option of
    `sbatch`."""
    table = role_table("pserver", 2, 2, ["python", "train.py"], cores=3)
    for text in (EMITTERS["slurm"](table), EMITTERS["slurm"](table, nodes=2)):
        lines = text.splitlines()
        assert sum(
            li.startswith("#SBATCH") and "--cpus-per-task=3" in li for li in lines
        ) == text.count("--nodes=")
        start = "".join(lines[lines.index(next(li for li in lines if li.startswith("srun"))) :])
        assert start.count("--cpus-per-task=3") == 1 + start.count("--het-group=1")


# -- Kubernetes ------------------------------------------------------------------------------------


def schema() -> Any:
    return yaml.safe_load((HERE / "jobset_schema.yaml").read_text())


def jobset(mode: str) -> Any:
    return document_of(table_of(mode))


def document_of(table: RoleTable) -> Any:
    return yaml.safe_load(EMITTERS["jobset"](table))


@modes
def test_the_jobset_is_valid(mode: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(jobset(mode), schema())
    cores = role_table(mode, *COUNTS[mode], ("python", "train.py"), cores=2)
    jsonschema.validate(document_of(cores), schema())


PUBLISHED = """
spec:
  versions:
  - name: v1alpha1
    schema: {openAPIV3Schema: {type: object}}
  - name: v1alpha2
    schema:
      openAPIV3Schema:
        description: for people
        type: object
        required: [steps]
        properties:
          steps:
            type: array
            x-kubernetes-list-type: atomic
            items:
              type: object
              properties: {name: {type: string, default: a}, count: {type: integer, minimum: 1}}
          limits:
            type: object
            additionalProperties:
              anyOf: [{type: integer}, {type: string}]
              x-kubernetes-int-or-string: true
          status: {type: object}
"""
PRUNED = """
type: object
required: [apiVersion, kind, metadata, spec]
additionalProperties: false
properties:
  limits: {type: object, additionalProperties: {anyOf: [{type: integer}, {type: string}]}}
  steps:
    type: array
    items:
      type: object
      additionalProperties: false
      properties: {count: {type: integer, minimum: 1}}
"""


def test_a_published_schema_is_pruned_to_what_is_written() -> None:
    published = prune_crd.schema_of(yaml.safe_load(PUBLISHED))
    written = [{"steps": [{"count": 1}], "limits": {"cpu": 2}}, {"steps": []}]
    assert prune_crd.prune(published, written) == yaml.safe_load(PRUNED)
    with pytest.raises(ValueError, match=r"the schema has no \.steps\[\]\.colour"):
        prune_crd.prune(published, [{"steps": [{"colour": 1}]}])


def test_the_schema_has_every_field_that_is_written_and_no_other() -> None:
    """If this test fails, write the schema again with `tests/support/prune_crd.py`, from the
    published CRD."""
    assert prune_crd.prune(schema(), prune_crd.emitted_jobsets()) == schema()


def test_typos_in_the_jobset_are_noticed() -> None:
    """If a letter is added to any key of the document, the document must be invalid."""
    document, validator = jobset("pserver"), jsonschema.Draft202012Validator(schema())
    paths: list[tuple[Any, ...]] = []

    def walk(node: Any, path: tuple[Any, ...]) -> None:
        for key in (
            node if isinstance(node, dict) else range(len(node) if isinstance(node, list) else 0)
        ):
            if isinstance(key, str):
                paths.append((*path, key))
            walk(node[key], (*path, key))

    walk(document, ())
    assert len(paths) > 90
    for *above, last in paths:
        wrong = copy.deepcopy(document)
        node = wrong
        for key in above:
            node = node[key]
        node[last + "s"] = node.pop(last)
        assert not validator.is_valid(wrong), (above, last)


def expanded(text: str, env: Mapping[str, str]) -> str:
    """Return a text as Kubernetes expands it: known variables in `$(NAME)`, and `$$` as `$`."""
    value = lambda m: "$" if m[0] == "$$" else env.get(m[1], m[0])
    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


def pods(document: Any) -> list[dict[str, str]]:
    """Return the variables of each pod.

    Kubernetes expands `$(NAME)` of earlier variables, in order.
    """
    found = []
    for job in document["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        assert job["replicas"] == 1 and spec["completions"] == spec["parallelism"]
        (container,) = spec["template"]["spec"]["containers"]
        for index in range(spec["completions"]):
            env = {"JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
            for variable in container["env"]:
                source = variable.get("valueFrom", {})
                if "secretKeyRef" in source:
                    value = TOKEN
                elif "fieldRef" in source:
                    assert source["fieldRef"] == {"fieldPath": INDEX}
                    value = str(index)
                else:
                    value = expanded(variable["value"], env)
                env[variable["name"]] = value
            found.append(env)
    return found


@modes
def test_pods_have_the_roles_of_the_table(mode: str) -> None:
    document = jobset(mode)
    got = pods(document)
    same_roles(got, table_of(mode))
    assert all(env["DTRANS_TOKEN"] == TOKEN for env in got)
    name, network = document["metadata"]["name"], document["spec"]["network"]
    assert network == {"enableDNSHostnames": True, "subdomain": name}
    # JobSet names a pod by the jobset, the replicated job, the index of the job, and the index of
    # the pod
    job, count = ("server", 2) if mode == "pserver" else ("trainer", 3)
    role = Role.from_env(got[0])
    hosts = tuple(f"{name}-{job}-0-{i}.{name}:6174" for i in range(count))
    assert (role.pserver_endpoints or role.trainer_endpoints) == hosts


@pytest.mark.parametrize(
    "counts", [(1, 1), pytest.param((2, None), marks=pytest.mark.rotated)], ids=["pserver", "nccl2"]
)
def test_processes_of_pods_have_the_roles_of_the_table(counts: tuple[int, int | None]) -> None:
    """A process has the environment of a pod, and no other variables."""
    mode = "nccl2" if counts[1] is None else "pserver"
    command = (sys.executable, "-c", ROLE_OF_PROCESS, "")
    table = role_table(mode, *counts, command, env=EXTRA)
    document = document_of(table)
    for job in document["spec"]["replicatedJobs"]:
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        words = container["command"]
    started = []
    for env in pods(document):
        # Python finds dtrans in a folder of the image
        process = subprocess.Popen(
            [expanded(w, env) for w in words], env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        started.append((env, process))
    roles = []
    for env, process in started:
        out, _ = process.communicate(timeout=120)
        (variables,) = json.loads(out)
        assert variables.items() <= env.items()
        roles.append(Role.from_env(variables))
    endpoints = roles[0].pserver_endpoints or roles[0].trainer_endpoints
    assert roles == [e.role for e in table.with_endpoints(endpoints)]


def test_kubernetes_expands_nothing_of_the_user() -> None:
    """`$(DTRANS_ROLE)` and `$$` in arguments and variables of the user stay unchanged."""
    words, text = ["python", "train.py", "$(DTRANS_ROLE) $$x"], "$(DTRANS_ROLE) $$(A) $b"
    document = document_of(role_table("pserver", 1, 1, words, env={"TEXT": text}))
    for job, env in zip(document["spec"]["replicatedJobs"], pods(document), strict=True):
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        assert [expanded(w, env) for w in container["command"]] == words
        assert env["TEXT"] == text


def test_each_role_of_the_jobset_has_a_failure_rule() -> None:
    spec = jobset("pserver")["spec"]
    targets = [r["targetReplicatedJobs"] for r in spec["failurePolicy"]["rules"]]
    assert targets == [[j["name"]] for j in spec["replicatedJobs"]] == [["server"], ["trainer"]]


# -- ssh -------------------------------------------------------------------------------------------


# A host that is this machine. As ssh does, it passes its arguments to a shell as one line.
RSH = '#!/bin/sh\necho "$1" >>"$HOSTS_SEEN"; shift; exec sh -c "$*"\n'


def run_ssh(tmp_path: Path, table: RoleTable, *hosts: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "job.sh"
    script.write_text(EMITTERS["hosts"](table))
    rsh = program(tmp_path / "rsh", RSH)
    env = clean_env(RSH=rsh, HOSTS_SEEN=str(tmp_path / "seen"))
    return subprocess.run(
        ["sh", str(script), *hosts],
        env=env,
        input=TOKEN + "\n",
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )


@modes
def test_processes_of_ssh_have_the_roles_of_the_table(mode: str, tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text(SAY)
    table = table_of(mode, sys.executable, "say.py", str(tmp_path), "it's")
    done = run_ssh(tmp_path, table, "alice@h1", "h2", "h3")
    answers = "h1:6174 h2:6175" if mode == "pserver" else "h1:6177"
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"this job answers: dtrans status {answers}\n"
    got = said(tmp_path)
    same_roles(got, table)
    assert all(env["DTRANS_TOKEN"] == TOKEN for env in got)
    count = len(table)
    assert sorted((tmp_path / "seen").read_text().split()) == sorted(
        ["alice@h1", "h2", "h3", "alice@h1"][:count]
    )
    role = Role.from_env(got[0])
    names = ("h1:6174", "h2:6175", "h3:6176")
    assert (role.pserver_endpoints or role.trainer_endpoints) == names[
        : 2 if mode == "pserver" else 3
    ]


FAIL = """
import os, sys, time
from pathlib import Path
here = Path(sys.argv[1])
(here / f"{os.getpid()}.pid").touch()
if os.environ["DTRANS_ROLE"] == "trainer" and os.environ["DTRANS_TRAINER_ID"] == "1":
    while len(list(here.glob("*.pid"))) < 4:
        time.sleep(0.01)
    sys.exit(7)
time.sleep(600)
"""


def test_a_role_that_fails_ends_all_by_ssh(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(FAIL)
    done = run_ssh(tmp_path, table_of("pserver", sys.executable, "fail.py", str(tmp_path)), "h1")
    assert done.returncode == 7
    assert "\ntrainer 1 failed: exit code 7\n" in done.stderr
    processes = [int(p.stem) for p in tmp_path.glob("*.pid")]
    assert len(processes) == 4
    until = time.monotonic() + 20
    while any(Path(f"/proc/{p}").exists() for p in processes) and time.monotonic() < until:
        time.sleep(0.05)
    assert [p for p in processes if Path(f"/proc/{p}").exists()] == []


def test_ssh_asks_for_hosts_and_a_token(tmp_path: Path) -> None:
    done = run_ssh(tmp_path, table_of("pserver"))
    assert done.returncode == 2 and "HOST..." in done.stderr


# -- TorchX ----------------------------------------------------------------------------------------


class _Specs:
    """Names of `torchx.specs` that the component uses; each call returns its arguments."""

    class macros:
        replica_id = "${replica_id}"

    AppDef = staticmethod(lambda **given: given)
    Role = staticmethod(lambda **given: given)
    Resource = staticmethod(lambda **given: given)


@modes
def test_replicas_of_torchx_have_the_roles_of_the_table(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("torchx")
    module.specs = _Specs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchx", module)
    monkeypatch.setitem(sys.modules, "torchx.specs", _Specs)
    names: dict[str, Any] = {}
    exec(EMITTERS["torchx"](table_of(mode)), names)
    app = names["job"](hosts="${app_id}-x-{i}", token_file="/run/token")
    got = []
    for role in app["roles"]:
        for replica in range(role["num_replicas"]):
            macros = {"${replica_id}": str(replica), "${app_id}": "job-1", "$$": "$"}
            fill = lambda m, macros=macros: macros[m[0]]
            pattern = r"\$\$|\$\{replica_id\}|\$\{app_id\}"
            got.append({k: re.sub(pattern, fill, v) for k, v in role["env"].items()})
    same_roles(got, table_of(mode))
    assert all(env["DTRANS_TOKEN_FILE"] == "/run/token" for env in got)
    role = Role.from_env(got[0])
    assert (role.pserver_endpoints or role.trainer_endpoints)[1] == "job-1-x-1:6174"


# -- the command -----------------------------------------------------------------------------------


def dtrans(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dtrans", *arguments]
    env = clean_env(PYTHONPATH=str(ROOT))
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)


def test_launch_emits(tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    done = dtrans(
        "launch", "--trainers", "2", "--emit", "slurm", "--output", str(path), "train.py", "--x"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    table = role_table("pserver", 2, 1, [sys.executable, "train.py", "--x"])
    assert path.read_text() == EMITTERS["slurm"](table)
    assert shlex.quote(sys.executable) in path.read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--emit", "cloud"], "it is 'cloud'"),
        (["--output", "x"], "--output needs --emit"),
        (["--nodes", "1"], "--nodes needs --emit"),
        (
            ["--emit", "jobset", "--nodes", "1"],
            "--nodes needs --emit slurm, but --emit is ",
        ),
        (["--emit", "slurm", "--time-limit", "3"], "--time-limit cannot be combined with --emit"),
        (
            ["--emit", "slurm", "--trainers-on", "SPREAD"],
            "--trainers-on cannot be combined with --emit",
        ),
    ],
)
def test_what_launch_does_not_emit(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from dtrans import cli

    monkeypatch.setattr(sys, "argv", ["dtrans", "launch", *arguments, "-m", "json.tool"])
    with pytest.raises(SystemExit) as e:
        cli.main()
    assert e.value.code == 1
    assert message in capsys.readouterr().err
