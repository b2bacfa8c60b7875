"""Decisions of a launcher, from the reports of roles: the roles go back to a snapshot, or do not."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

from dtrans.errors import ConfigError
from dtrans.protocol.generations import Generation, ReplacedError
from dtrans.run.distributed.restarts.job_folder import endpoints_of, open_generations
from dtrans.run.distributed.restarts.job_generations import JobGenerations
from dtrans.run.distributed.role import roles_of
from dtrans.run.net.ended_roles import EndedRoles, ended_roles
from dtrans.run.net.generation_log import members_of_steps, read_log
from dtrans.run.net.launcher_folder import LauncherFolder
from dtrans.run.net.role_folder import RoleFolder


ROLES = roles_of(2, ("127.0.0.1:1",))
NAMES = [role.name for role in ROLES]
RUNNING = {*NAMES}


class Job:
    """The generations of a launcher, and the reports of its roles."""

    def __init__(self, path: Path) -> None:
        self.generations = JobGenerations(path, ROLES)
        # the current process of each role, from any generation
        self.folders = {name: RoleFolder(path, name, started=1000) for name in NAMES}

    def enter(self, *names: str) -> None:
        for name in names:
            self.folders[name].enter(self.folders[name].current())

    def can_go_back(self, lost: str) -> bool:
        return self.generations.can_go_back(lost, RUNNING - {lost})


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Return a job whose roles are all in the first generation, and whose server has a snapshot."""
    made = Job(tmp_path)
    made.enter(*NAMES)
    made.folders["pserver 0"].note_snapshot(0, 10)
    return made


def test_all_others_must_be_there_to_go_back(job: Job) -> None:
    assert all(job.can_go_back(name) for name in NAMES)
    assert not job.generations.can_go_back("trainer 1", {"pserver 0"})  # trainer 0 has ended
    job.folders["trainer 0"].leave()
    assert job.can_go_back("trainer 0") and not job.can_go_back("trainer 1")


def test_all_have_entered_until_one_leaves_or_starts_again(job: Job) -> None:
    assert job.generations.have_all_entered
    job.generations.go_back("trainer 1")
    job.enter("pserver 0", "trainer 0")
    assert not job.generations.have_all_entered
    job.enter("trainer 1")
    assert job.generations.have_all_entered
    job.folders["trainer 0"].leave()
    assert not job.generations.have_all_entered


def test_a_generation_names_the_current_processes_of_the_trainers(job: Job) -> None:
    """Servers refuse a process with an older number, which was lost before it took part in the
    generation."""
    job.generations.go_back("trainer 1")
    assert job.folders["pserver 0"].current().incarnations == (0, 1)
    job.generations.go_back("pserver 0")
    assert job.folders["trainer 0"].current().incarnations == (0, 1)
    job.generations.start_again()
    assert job.folders["trainer 0"].current().incarnations == (3, 3)


def test_all_servers_begin_anew_if_one_has_no_snapshot(tmp_path: Path) -> None:
    """Otherwise an asynchronous server with a snapshot would continue from this snapshot."""
    generations = JobGenerations(tmp_path, roles_of(2, ("127.0.0.1:1", "127.0.0.1:2")))
    servers = [RoleFolder(tmp_path, f"pserver {i}") for i in range(2)]
    for server in servers:
        server.enter_alone(server.current())
    servers[0].note_snapshot_alone(20, [10, 10])
    assert generations._newest() is None
    generations.start_again()
    assert servers[0].mark().snapshots == ()


def test_a_server_without_a_snapshot_cannot_go_back(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.enter(*NAMES)
    assert not job.can_go_back("trainer 1")


def test_what_an_earlier_process_has_reported_does_not_count(job: Job) -> None:
    job.folders["trainer 1"].leave()
    job.generations.go_back("trainer 1")
    assert job.generations.generation == Generation(1, 10)
    job.enter("pserver 0", "trainer 0")
    assert job.generations.find_unable(RUNNING) is None
    assert job.can_go_back(
        "trainer 0"
    )  # trainer 1 enters the newest generation when it has started

    job.generations.start_again()
    assert job.generations.generation == Generation(2, 10)
    assert not job.can_go_back("trainer 0")
    job.enter(*NAMES)
    assert job.can_go_back("trainer 0")


def test_a_role_that_has_left_or_ended_cannot_go_back(job: Job) -> None:
    job.generations.go_back("trainer 1")
    assert job.generations.find_unable({"pserver 0", "trainer 1"}) == "trainer 0"
    job.folders["trainer 0"].leave()
    assert job.generations.find_unable(RUNNING) == "trainer 0"


def test_roles_may_leave_when_they_have_gone_back(job: Job) -> None:
    job.generations.go_back("trainer 1")
    job.enter("trainer 0")
    job.folders["trainer 0"].leave()
    assert job.generations.find_unable({"pserver 0", "trainer 1"}) is None
    job.enter("pserver 0", "trainer 1")
    assert job.generations.find_unable({"pserver 0", "trainer 1"}) is None
    assert job.generations.find_unable(set()) is None


@pytest.fixture
def async_job(tmp_path: Path) -> Job:
    """Return a job of an asynchronous server with a snapshot, which trainer 0 has left."""
    made = Job(tmp_path)
    made.enter("trainer 0", "trainer 1")
    made.folders["pserver 0"].enter_alone(made.generations.generation)
    made.folders["pserver 0"].note_snapshot_alone(10, [5, 5])
    made.folders["trainer 0"].leave()
    return made


def test_an_asynchronous_job_does_not_wait_for_a_trainer_that_has_left(async_job: Job) -> None:
    running = {"pserver 0"}
    assert async_job.generations.can_go_back("trainer 1", running)
    assert not async_job.generations.can_go_back(
        "pserver 0", {"trainer 1"}
    )  # may lack its last steps
    async_job.generations.go_back("trainer 1")
    assert async_job.folders["pserver 0"].current().left == (0,)
    async_job.folders["pserver 0"].enter_alone(async_job.generations.generation)
    async_job.enter("trainer 1")
    assert not async_job.generations.excuse_left()
    assert async_job.generations.find_unable(running | {"trainer 1"}) is None
    assert async_job.generations.have_all_entered


def test_a_trainer_that_leaves_during_a_new_generation_is_excused(async_job: Job) -> None:
    async_job.folders["trainer 0"].enter(async_job.generations.generation)  # it has not left yet
    async_job.generations.go_back("trainer 1")
    assert async_job.generations.generation.left == ()
    async_job.folders["trainer 0"].leave()
    assert async_job.generations.excuse_left() and not async_job.generations.excuse_left()
    assert async_job.generations.generation == Generation(2, left=(0,))
    async_job.generations.start_again()
    assert async_job.generations.generation.left == ()  # it starts again, too


def test_a_trainer_returns_if_a_server_starts_again(async_job: Job) -> None:
    async_job.folders["trainer 0"].enter(async_job.generations.generation)  # it has not left yet
    async_job.generations.go_back("pserver 0")
    async_job.folders["trainer 0"].leave()
    assert not async_job.generations.excuse_left()
    assert async_job.generations.find_unable(RUNNING) == "trainer 0"


def test_a_loss_without_a_newer_snapshot_is_noticed(job: Job) -> None:
    assert not job.generations.note_loss("trainer 1")
    assert not job.generations.note_loss("trainer 0")
    job.folders["pserver 0"].note_snapshot(0, 20)
    assert not job.generations.note_loss("trainer 1")
    assert job.generations.note_loss("trainer 1")


def test_jobs_without_reports_may_lose_a_role_twice(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert not any(job.generations.note_loss("trainer 1") for _ in range(3))


def test_reports_of_this_generation_and_of_roles_that_wait_count(job: Job) -> None:
    server = "pserver 127.0.0.1:1"
    job.folders["trainer 0"].report_lost(0, server, "silence")
    job.folders["trainer 1"].report_lost(1, server, "of another generation")
    (report,) = job.generations.reports(RUNNING)
    assert (report.reporter, job.generations.reported_role(report)) == ("trainer 0", "pserver 0")
    assert not job.generations.reports(RUNNING - {"trainer 0"})
    job.folders["trainer 0"].leave()
    assert not job.generations.reports(RUNNING)


def test_another_launcher_continues(job: Job, tmp_path: Path) -> None:
    again = Job(tmp_path)
    assert again.generations.generation == again.folders["pserver 0"].current() == Generation(1, 10)
    assert not again.can_go_back("trainer 0")  # no role has reported yet
    with pytest.raises(
        ConfigError, match=r"with 2 trainers and 1 pservers, but this job has 1 and"
    ):
        JobGenerations(tmp_path, roles_of(1, ("127.0.0.1:1",)))
    with pytest.raises(ConfigError, match=r"but this job has 2 and 2; write as many as before"):
        JobGenerations(tmp_path, roles_of(2, ("127.0.0.1:1", "127.0.0.1:2")))
    # pieces of snapshots and checkpoints contain the endpoints, so the servers get the same
    # endpoints again
    assert endpoints_of(tmp_path) == ("127.0.0.1:1",)
    assert endpoints_of(None) == endpoints_of(tmp_path / "none") == ()


def test_a_job_that_ended_well_leaves_no_snapshots(job: Job, tmp_path: Path) -> None:
    (tmp_path / "10").mkdir()
    (tmp_path / "of the user").touch()
    job.generations.end()
    assert {x.name for x in tmp_path.iterdir()} == {"generations.jsonl", "of the user"}
    assert Job(tmp_path).generations.generation == Generation()
    assert [x.generation for x in read_log(tmp_path / "generations.jsonl")] == [0]


def test_a_dropped_trainer_takes_no_part(job: Job) -> None:
    assert job.generations.can_go_back("trainer 1", RUNNING - {"trainer 1"}, without_lost=True)
    job.generations.drop("trainer 1", "signal SIGKILL")
    assert job.generations.generation == Generation(1, 10, dropped=(1,), members_since=1)
    assert (job.generations.members, job.generations.generation.has_role("trainer 1")) == (
        (0,),
        False,
    )
    assert job.folders["pserver 0"].current() == Generation(1, 10, dropped=(1,), members_since=1)
    job.enter("pserver 0", "trainer 0")
    assert job.generations.have_all_entered and job.generations.find_unable(RUNNING) is None
    # the trainer stays dropped in later generations
    job.generations.go_back("pserver 0", "signal SIGSEGV")
    job.generations.start_again()
    assert job.generations.generation == Generation(3, 10, dropped=(1,), members_since=1)


def test_a_dropped_trainer_joins_when_it_is_ready(tmp_path: Path) -> None:
    generations = JobGenerations(tmp_path, ROLES, on_trainer_loss="replace")
    others = [RoleFolder(tmp_path, name) for name in ("pserver 0", "trainer 0")]
    for role in (*others, RoleFolder(tmp_path, "trainer 1")):
        role.enter(role.current())
    others[0].note_snapshot(0, 10)
    generations.drop("trainer 1", "signal SIGKILL")
    running, waiting = RUNNING - {"trainer 1"}, ["trainer 1"]
    for role in others:
        assert not generations.find_ready(waiting, running)
        role.enter(role.current())
    assert not generations.find_ready(waiting, running)  # the new process has not reported
    new = RoleFolder(tmp_path, "trainer 1", started=1)
    new.enter(new.current())
    assert generations.find_ready(waiting, running) == waiting
    assert not generations.find_ready(waiting, {"trainer 0"})  # the server has ended
    others[0].note_snapshot(1, 20)
    generations.join(waiting)
    assert generations.generation == Generation(2, 20, members_since=2)
    assert new.join() == generations.generation
    assert generations.find_unable(running | {"trainer 1"}) is None
    assert generations.find_unable(running) == "trainer 1"  # it has not entered the generation


def test_a_trainer_joins_no_job_that_another_role_has_left(tmp_path: Path) -> None:
    generations = JobGenerations(tmp_path, ROLES, on_trainer_loss="replace")
    others = [RoleFolder(tmp_path, name) for name in ("pserver 0", "trainer 0")]
    for role in others:
        role.enter(role.current())
    others[0].note_snapshot(0, 10)
    generations.drop("trainer 1", "signal SIGKILL")
    new = RoleFolder(tmp_path, "trainer 1", started=1)
    for role in (*others, new):
        role.enter(role.current())
    assert generations.find_ready(["trainer 1"], RUNNING)
    others[1].leave()
    assert not generations.find_ready(["trainer 1"], RUNNING)


def test_all_trainers_start_again_with_a_replaced_one(tmp_path: Path) -> None:
    JobGenerations(tmp_path, ROLES, on_trainer_loss="replace", quorum=2).drop("trainer 1")
    again = JobGenerations(tmp_path, ROLES, on_trainer_loss="replace", quorum=2)
    assert again.generation.dropped == () and again.generation.members_since == 2


def test_a_process_of_a_dropped_trainer_ends(tmp_path: Path) -> None:
    """The process may still run on a host that was lost."""
    generations, old = JobGenerations(tmp_path, ROLES), RoleFolder(tmp_path, "trainer 1")
    assert old.current() == Generation()
    generations.drop("trainer 1")
    with pytest.raises(ReplacedError, match="of trainer 1, and the job continues without it; this"):
        old.current()


def test_another_launcher_continues_without_a_dropped_trainer(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.generations.drop("trainer 1", "signal SIGKILL")
    again = JobGenerations(tmp_path, ROLES)
    assert again.generation == Generation(2, 10, dropped=(1,), members_since=1)
    assert "continues at step 10, without trainer 1" in capsys.readouterr().err
    assert [
        (x.snapshot, x.members, x.lost, x.reason) for x in read_log(tmp_path / "generations.jsonl")
    ] == [
        (None, (0, 1), "", "the job starts"),
        (10, (0,), "trainer 1", "signal SIGKILL"),
        (10, (0,), "", "the launcher starts again"),
    ]


def test_leaves_of_a_dropped_trainer_are_not_needed(tmp_path: Path) -> None:
    job = Job(tmp_path)
    server, first, second = (job.folders[x] for x in ("pserver 0", "trainer 0", "trainer 1"))
    server.enter(Generation(), with_trainers=True)
    job.enter("trainer 0", "trainer 1")
    server.note_snapshot(0, 10)
    first.note_snapshot(0, 10)
    running = RUNNING - {"trainer 1"}
    assert not job.generations.can_go_back("trainer 1", running)
    assert job.generations.can_go_back("trainer 1", running, without_lost=True)
    second.note_snapshot(0, 10)
    server.note_snapshot(0, 20)
    first.note_snapshot(0, 20)
    job.generations.drop("trainer 1")
    assert job.generations.generation == Generation(1, 20, dropped=(1,), members_since=1)
    assert server.old_snapshot(["pserver 0"]) == 10


def test_one_launcher_has_a_folder(tmp_path: Path) -> None:
    with open_generations(ROLES, tmp_path / "a" / "b") as generations:
        assert generations.generation == Generation()
        with (
            pytest.raises(ConfigError, match="is the folder of a job that runs; wait for its end"),
            open_generations(ROLES, tmp_path / "a" / "b"),
        ):
            pass
    with open_generations(ROLES, tmp_path / "a" / "b") as generations:
        assert generations.generation == Generation(1)


def test_a_folder_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.raises(ConfigError, match="cannot be locked: No locks available; write a folder"),
        open_generations(ROLES, tmp_path),
    ):
        pass


def test_a_role_that_starts_again_has_not_ended_in_the_next_generation() -> None:
    with EndedRoles() as ended:
        ended.note("trainer 1", "signal SIGKILL")
        ended.note("trainer 0", "exit code 0", generation=1)
        first = ended_roles(0, ended.environment)
        assert first == {"trainer 0": "exit code 0", "trainer 1": "signal SIGKILL"}
        assert ended_roles(1, ended.environment) == {"trainer 0": "exit code 0"}
        assert ended_roles(2, ended.environment) == {}


def test_a_second_loss_does_not_go_back_to_an_undone_snapshot(tmp_path: Path) -> None:
    """A server writes its piece of a snapshot after the launcher has chosen an older snapshot."""
    roles = roles_of(4, ("127.0.0.1:1", "127.0.0.1:2"))
    names = [role.name for role in roles]
    generations = JobGenerations(tmp_path, roles, on_trainer_loss="drop")
    folders = {name: RoleFolder(tmp_path, name, started=1000) for name in names}
    for folder in folders.values():
        folder.enter(folder.current())
    for server in ("pserver 0", "pserver 1"):
        folders[server].note_snapshot(0, 20)
    folders["pserver 0"].note_snapshot(0, 30)
    generations.drop("trainer 3")
    assert generations.generation == Generation(1, 20, dropped=(3,), members_since=1)
    folders["pserver 1"].note_snapshot(0, 30)  # it has not read the generation
    assert generations.can_go_back(
        "trainer 2", {*names} - {"trainer 2", "trainer 3"}, without_lost=True
    )
    generations.drop("trainer 2")
    assert generations.generation == Generation(2, 20, dropped=(2, 3), members_since=2)
    members = members_of_steps(read_log(tmp_path / "generations.jsonl"), 0, 31)
    assert members == [(0, 1, 2, 3)] * 20 + [(0, 1)] * 11
    # a role that starts again removes the undone snapshot, and may write another snapshot of this
    # step
    for name in ("pserver 0", "pserver 1"):
        folders[name].enter(folders[name].current())
        assert folders[name].mark().snapshots == (20,)
        folders[name].note_snapshot(2, 30)
    generations.start_again()
    assert generations.generation.snapshot == 30


def test_a_launcher_that_continues_a_job_ignores_undone_snapshots(job: Job, tmp_path: Path) -> None:
    job.generations.drop("trainer 1")
    job.folders["pserver 0"].note_snapshot(0, 20)
    assert JobGenerations(tmp_path, ROLES).generation == Generation(
        2, 10, dropped=(1,), members_since=1
    )


def test_a_launcher_continues_only_with_a_quorum(job: Job, tmp_path: Path) -> None:
    job.generations.drop("trainer 1")
    with pytest.raises(
        ConfigError,
        match="a job that continues with trainer 0, since it has dropped trainer 1, but quorum=2; "
        "write quorum=1, or another folder",
    ):
        JobGenerations(tmp_path, ROLES, on_trainer_loss="drop", quorum=2)
    assert (
        job.generations.generation == LauncherFolder(tmp_path).current()
    )  # no generation was granted
    again = JobGenerations(tmp_path, ROLES, on_trainer_loss="drop", quorum=1)
    assert again.generation == Generation(2, 10, dropped=(1,), members_since=1)
