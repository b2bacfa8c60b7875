"""Roles from the variables of schedulers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from paths import ROOT
from role_scripts import ROLE_OF_PROCESS

import dtrans
from dtrans.errors import ConfigError
from dtrans.run.distributed.role import Role, roles_of, trainer_roles
from dtrans.run.distributed.schedulers import expand_nodes, expand_tasks, names_role


SLURM = {
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "n[1-9]",
    "SLURM_STEP_NODELIST": "n[1,3]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
HET = {
    "SLURM_HET_SIZE": "2",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "s1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "t[1-2]",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "1(x2)",
}
MPI = {"OMPI_COMM_WORLD_SIZE": "4"}
TORCHRUN = {"WORLD_SIZE": "4", "MASTER_ADDR": "a", "LOCAL_WORLD_SIZE": "2"}
ONE_HOST = TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    "rank, env, endpoints",
    [
        ("SLURM_PROCID", SLURM, "n1:6174,n1:6175"),
        ("SLURM_PROCID", SLURM | {"DTRANS_PORT": "7000"}, "n1:7000,n1:7001"),
        ("SLURM_PROCID", SLURM | {"DTRANS_HOSTS": "a,b:3"}, "a:6174,b:6174"),
        ("SLURM_PROCID", SLURM | {"DTRANS_PSERVER_ENDPOINTS": "x:1,y:2"}, "x:1,y:2"),
        ("SLURM_PROCID", HET, "s1:6174,s1:6175"),
        ("OMPI_COMM_WORLD_RANK", MPI | {"DTRANS_HOSTS": "a,b,a,b"}, "a:6174,b:6174"),
        (
            "OMPI_COMM_WORLD_RANK",
            MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            "127.0.0.1:6174,127.0.0.1:6175",
        ),
        # mpirun inside a Slurm job: its daemons inherit SLURM_PROCID
        (
            "OMPI_COMM_WORLD_RANK",
            SLURM | MPI | {"SLURM_PROCID": "0", "DTRANS_HOSTS": "a:4"},
            "a:6174,a:6175",
        ),
        ("RANK", ONE_HOST, "a:6174,a:6175"),
        ("RANK", TORCHRUN | {"DTRANS_HOSTS": "a:2,b:2"}, "a:6174,a:6175"),
    ],
)
def test_servers_are_the_first_processes(rank: str, env: dict[str, str], endpoints: str) -> None:
    env = {"DTRANS_PSERVERS": "2"} | env
    found = [Role.from_env(env | {rank: str(i)}) for i in range(4)]
    assert found == list(roles_of(2, endpoints.split(",")))


def test_a_step_over_one_group_of_a_heterogeneous_job() -> None:
    """Slurm 22.05 lists the nodes of all groups, but counts only the tasks of the step."""
    step = {"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "s1", "SLURM_STEP_TASKS_PER_NODE": "2"}
    role = Role.from_env(HET | step | {"SLURM_PROCID": "1", "DTRANS_PSERVERS": "1"})
    assert (role.name, role.trainers, role.pserver_endpoints) == ("trainer 0", 1, ("s1:6174",))
    with pytest.raises(ConfigError, match="tasks per node 2, 3 tasks; set DTRANS_HOSTS"):
        Role.from_env(
            HET | step | {"SLURM_NTASKS": "3", "SLURM_PROCID": "1", "DTRANS_PSERVERS": "1"}
        )


@pytest.mark.parametrize(
    "rank, env, endpoints",
    [
        ("SLURM_PROCID", SLURM, "n1:6174,n1:6175,n3:6174,n3:6175"),
        ("SLURM_PROCID", HET, "s1:6174,s1:6175,t1:6174,t2:6174"),
        ("RANK", TORCHRUN | {"DTRANS_HOSTS": "a:2,b:2"}, "a:6174,a:6175,b:6174,b:6175"),
        (
            "OMPI_COMM_WORLD_RANK",
            MPI | {"DTRANS_TRAINER_ENDPOINTS": "a:1,b:1,c:1,d:1"},
            "a:1,b:1,c:1,d:1",
        ),
    ],
)
def test_all_are_trainers(rank: str, env: dict[str, str], endpoints: str) -> None:
    env = {"DTRANS_PSERVERS": "0"} | env
    found = [Role.from_env(env | {rank: str(i)}) for i in range(4)]
    assert found == list(trainer_roles(endpoints.split(",")))


def test_one_server_needs_the_first_host_only() -> None:
    found = [Role.from_env(TORCHRUN | {"RANK": str(i), "DTRANS_PSERVERS": "1"}) for i in range(4)]
    assert found == list(roles_of(3, ["a:6174"]))


PODS = {"DTRANS_TRAINERS": "2", "DTRANS_PSERVER_ENDPOINTS": "s0:1,s1:1"}


def test_index_of_a_pod() -> None:
    def pod(role: str, index: int, env: dict[str, str]) -> Role:
        return Role.from_env(env | {"DTRANS_ROLE": role, "JOB_COMPLETION_INDEX": str(index)})

    found = [pod(role, i, PODS) for role in ("PSERVER", "TRAINER") for i in range(2)]
    assert found == list(roles_of(2, ["s0:1", "s1:1"]))
    alike = {"DTRANS_TRAINERS": "2", "DTRANS_TRAINER_ENDPOINTS": "t0:1,t1:1"}
    assert [pod("trainer", i, alike) for i in range(2)] == list(trainer_roles(["t0:1", "t1:1"]))
    assert pod("trainer", 1, PODS | {"DTRANS_TRAINER_ID": "0"}).trainer_id == 0


PADDLE = {"PADDLE_TRAINERS_NUM": "2", "PADDLE_PSERVERS_IP_PORT_LIST": "1.2.3.4:1,1.2.3.4:2"}
SERVER = PADDLE | {"TRAINING_ROLE": "PSERVER", "POD_IP": "1.2.3.4", "PADDLE_PORT": "2"}
TRAINER = PADDLE | {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "1"}


def test_names_of_paddle() -> None:
    roles = roles_of(2, ["1.2.3.4:1", "1.2.3.4:2"])
    assert (Role.from_env(SERVER), Role.from_env(TRAINER)) == (roles[1], roles[3])
    fleet = TRAINER | {"PADDLE_TRAINER_ENDPOINTS": "1.2.3.4:8,1.2.3.4:9"}
    assert Role.from_env(fleet) == roles[3]
    assert Role.from_env(TRAINER | {"DTRANS_TRAINER_ID": "0"}) == roles[2]
    alike = {
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_TRAINER_ID": "1",
        "PADDLE_TRAINER_ENDPOINTS": "a:1,b:1",
        "PADDLE_CURRENT_ENDPOINT": "b:1",
    }
    assert Role.from_env(alike) == trainer_roles(["a:1", "b:1"])[1]


def test_variables_of_dtrans_win() -> None:
    role = dtrans.Role("trainer", 2, ("x:1",), trainer_id=1)
    others = SLURM | MPI | TORCHRUN | SERVER | {"JOB_COMPLETION_INDEX": "0", "RANK": "0"}
    others |= {"SLURM_PROCID": "3", "OMPI_COMM_WORLD_RANK": "2", "DTRANS_PSERVERS": "2"}
    assert Role.from_env(others | role.environment()) == role
    env = role.environment()
    del env["DTRANS_TRAINER_ID"]
    with pytest.raises(ConfigError, match="DTRANS_TRAINER_ID is not set"):
        Role.from_env(SLURM | {"SLURM_PROCID": "1"} | env)


@pytest.mark.parametrize(
    "env, message",
    [
        (
            SLURM,
            "Slurm started this process as rank 1 of 4, but DTRANS_PSERVERS is not set; set it",
        ),
        (SLURM | {"DTRANS_PSERVERS": "two"}, "DTRANS_PSERVERS is 'two', expected a number"),
        (
            SLURM | {"DTRANS_PSERVERS": "4"},
            "of 4, but 4 of them are servers, so no trainer is left",
        ),
        (
            SLURM | {"DTRANS_PSERVERS": "1", "SLURM_PROCID": "4"},
            "rank 4 of 4, expected ranks 0 to 3",
        ),
        (
            SLURM | {"DTRANS_PSERVERS": "1", "DTRANS_TRAINERS": "2"},
            "DTRANS_TRAINERS is 2, expected 3",
        ),
        (
            SLURM | {"DTRANS_PSERVERS": "1", "DTRANS_PSERVER_ENDPOINTS": "a:1,b:1"},
            "DTRANS_PSERVER_ENDPOINTS has 2 endpoints, expected 1: a:1,b:1",
        ),
        (
            SLURM | {"DTRANS_PSERVERS": "1", "DTRANS_PORT": "x"},
            "DTRANS_PORT is 'x', expected a number",
        ),
        (
            SLURM | {"DTRANS_PSERVERS": "1", "DTRANS_HOSTS": "a,b"},
            "DTRANS_HOSTS=a,b is for 2 processes, expected 4",
        ),
        (
            SLURM | {"DTRANS_PSERVERS": "1", "DTRANS_HOSTS": "a:x"},
            "DTRANS_HOSTS a:x has the number of slots 'x'",
        ),
        (SLURM | {"SLURM_NTASKS": ""}, "SLURM_NTASKS is not set; srun sets"),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,2"},
            "nodes n.*per node 3,2, 4 tasks",
        ),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x3"}, "is not Slurm's list of tasks per node"),
        (SLURM | {"SLURM_STEP_NODELIST": "n[1-"}, "is not a Slurm node list"),
        (SLURM | {"SLURMD_NODENAME": "n3"}, "process 1 runs on n3, but Slurm's node list has n1"),
        (
            {"SLURM_HET_SIZE": "2", "SLURM_NTASKS": "2"},
            "SLURM_HET_SIZE is 2, but SLURM_JOB_NODELIST_HET_GROUP_0 is not set",
        ),
        (
            MPI | {"OMPI_COMM_WORLD_RANK": "1", "DTRANS_PSERVERS": "1"},
            "hosts of 0 processes, expected 1",
        ),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is not set; mpirun sets"),
        (
            TORCHRUN | {"RANK": "1", "DTRANS_PSERVERS": "2"},
            "hosts of 1 processes, expected 2; set DTRANS_HOSTS",
        ),
        ({"TORCHELASTIC_RUN_ID": "1", "RANK": "1"}, "WORLD_SIZE is not set; torchrun sets"),
        (
            PODS | {"DTRANS_ROLE": "pserver", "JOB_COMPLETION_INDEX": "2"},
            "JOB_COMPLETION_INDEX is 2, but DTRANS_PSERVER_ENDPOINTS has 2",
        ),
        (
            SERVER | {"TRAINING_ROLE": "WORKER"},
            "TRAINING_ROLE is 'WORKER', expected TRAINER or PSERVER",
        ),
        (SERVER | {"PADDLE_PORT": ""}, "PADDLE_PORT is ''; set both, or DTRANS_CURRENT_ENDPOINT"),
        (
            TRAINER | {"PADDLE_TRAINER_ID": ""},
            "TRAINING_ROLE is TRAINER, but PADDLE_TRAINER_ID is not set; set it, or",
        ),
        (TRAINER | {"PADDLE_PSERVERS_IP_PORT_LIST": ""}, "PADDLE_PSERVERS_IP_PORT_LIST is not set"),
    ],
)
def test_wrong_or_partial(env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Role.from_env({"SLURM_PROCID": "1"} | env)


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("n[1-3,05-07],m2", ["n1", "n2", "n3", "n05", "n06", "n07", "m2"]),
        ("n[09-11]", ["n09", "n10", "n11"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
    ],
)
def test_node_lists(text: str, hosts: list[str]) -> None:
    assert list(expand_nodes(text)) == hosts


def test_tasks_per_node() -> None:
    assert expand_tasks("2(x3),1") == (2, 2, 2, 1)


def test_a_scheduler_alone_is_left_to_jax() -> None:
    """Without endpoints, `dtrans.connect` uses JAX's own detection of schedulers."""
    assert not names_role(
        SLURM | HET | MPI | TORCHRUN | {"SLURM_PROCID": "1", "JOB_COMPLETION_INDEX": "0"}
    )
    for name in ("DTRANS_ROLE", "DTRANS_PSERVERS", "DTRANS_HOSTS", "TRAINING_ROLE"):
        assert names_role(SLURM | {name: "1"})


# -- processes that they start ---------------------------------------------------------------------


def free_environment(*prefixes: str) -> dict[str, str]:
    """Return the environment without variables that determine a role."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DTRANS_", *prefixes))}
    return env | {"PYTHONPATH": str(ROOT)}


@pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="there is no mpirun (Debian: openmpi-bin)"
)
def test_mpirun_starts_each_role() -> None:
    """Run two processes: without a server, and with one server."""
    command = ["mpirun", "-n", "2", "--oversubscribe"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    command += [sys.executable, "-c", ROLE_OF_PROCESS, "0", "1"]
    env = free_environment("OMPI_", "PMIX_", "SLURM_")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    ports = [f"127.0.0.1:{port}" for port in (6174, 6175)]
    for i, roles in enumerate((trainer_roles(ports), roles_of(1, ports[:1]))):
        found = sorted((variables[i] for variables in said), key=str)
        assert found == sorted((role.environment() for role in roles), key=str)
