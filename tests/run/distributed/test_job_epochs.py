"""Decisions of a launcher, from the reports of roles: the roles go back to a cut, or do not."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

from dtrans.errors import ConfigError
from dtrans.protocol.epochs import Epoch, ReplacedError
from dtrans.run.distributed.restarts.job_epochs import JobEpochs
from dtrans.run.distributed.restarts.job_folder import endpoints_of, open_epochs
from dtrans.run.distributed.role import roles_of
from dtrans.run.net.ended_roles import EndedRoles, ended_roles
from dtrans.run.net.epoch_log import members_of_steps, read_log
from dtrans.run.net.launcher_folder import LauncherFolder
from dtrans.run.net.role_folder import RoleFolder


ROLES = roles_of(2, ("127.0.0.1:1",))
NAMES = [role.name for role in ROLES]
RUNNING = {*NAMES}


class Job:
    """The epochs of a launcher, and the reports of its roles."""

    def __init__(self, path: Path) -> None:
        self.epochs = JobEpochs(path, ROLES)
        # the current process of each role, from any epoch
        self.folders = {name: RoleFolder(path, name, started=1000) for name in NAMES}

    def enter(self, *names: str) -> None:
        for name in names:
            self.folders[name].enter(self.folders[name].current())

    def can_go_back(self, lost: str) -> bool:
        return self.epochs.can_go_back(lost, RUNNING - {lost})


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Return a job whose roles are all in the first epoch, and whose server has a cut."""
    made = Job(tmp_path)
    made.enter(*NAMES)
    made.folders["pserver 0"].note_cut(0, 10)
    return made


def test_all_others_must_be_there_to_go_back(job: Job) -> None:
    assert all(job.can_go_back(name) for name in NAMES)
    assert not job.epochs.can_go_back("trainer 1", {"pserver 0"})  # trainer 0 has ended
    job.folders["trainer 0"].leave()
    assert job.can_go_back("trainer 0") and not job.can_go_back("trainer 1")


def test_all_have_entered_until_one_leaves_or_starts_again(job: Job) -> None:
    assert job.epochs.have_all_entered
    job.epochs.go_back("trainer 1")
    job.enter("pserver 0", "trainer 0")
    assert not job.epochs.have_all_entered
    job.enter("trainer 1")
    assert job.epochs.have_all_entered
    job.folders["trainer 0"].leave()
    assert not job.epochs.have_all_entered


def test_an_epoch_names_the_current_processes_of_the_trainers(job: Job) -> None:
    """Servers refuse a process with an older number, which was lost before it took part in the
    epoch."""
    job.epochs.go_back("trainer 1")
    assert job.folders["pserver 0"].current().incarnations == (0, 1)
    job.epochs.go_back("pserver 0")
    assert job.folders["trainer 0"].current().incarnations == (0, 1)
    job.epochs.start_again()
    assert job.folders["trainer 0"].current().incarnations == (3, 3)


def test_all_servers_begin_anew_if_one_has_no_cut(tmp_path: Path) -> None:
    """Otherwise an asynchronous server with a cut would continue from this cut."""
    epochs = JobEpochs(tmp_path, roles_of(2, ("127.0.0.1:1", "127.0.0.1:2")))
    servers = [RoleFolder(tmp_path, f"pserver {i}") for i in range(2)]
    for server in servers:
        server.enter_alone(server.current())
    servers[0].note_cut_alone(20, [10, 10])
    assert epochs._newest() is None
    epochs.start_again()
    assert servers[0].mark().cuts == ()


def test_a_server_without_a_cut_cannot_go_back(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.enter(*NAMES)
    assert not job.can_go_back("trainer 1")


def test_what_an_earlier_process_has_reported_does_not_count(job: Job) -> None:
    job.folders["trainer 1"].leave()
    job.epochs.go_back("trainer 1")
    assert job.epochs.epoch == Epoch(1, 10)
    job.enter("pserver 0", "trainer 0")
    assert job.epochs.find_unable(RUNNING) is None
    assert job.can_go_back("trainer 0")  # trainer 1 enters the newest epoch when it has started

    job.epochs.start_again()
    assert job.epochs.epoch == Epoch(2, 10)
    assert not job.can_go_back("trainer 0")
    job.enter(*NAMES)
    assert job.can_go_back("trainer 0")


def test_a_role_that_has_left_or_ended_cannot_go_back(job: Job) -> None:
    job.epochs.go_back("trainer 1")
    assert job.epochs.find_unable({"pserver 0", "trainer 1"}) == "trainer 0"
    job.folders["trainer 0"].leave()
    assert job.epochs.find_unable(RUNNING) == "trainer 0"


def test_roles_may_leave_when_they_have_gone_back(job: Job) -> None:
    job.epochs.go_back("trainer 1")
    job.enter("trainer 0")
    job.folders["trainer 0"].leave()
    assert job.epochs.find_unable({"pserver 0", "trainer 1"}) is None
    job.enter("pserver 0", "trainer 1")
    assert job.epochs.find_unable({"pserver 0", "trainer 1"}) is None
    assert job.epochs.find_unable(set()) is None


@pytest.fixture
def async_job(tmp_path: Path) -> Job:
    """Return a job of an asynchronous server with a cut, which trainer 0 has left."""
    made = Job(tmp_path)
    made.enter("trainer 0", "trainer 1")
    made.folders["pserver 0"].enter_alone(made.epochs.epoch)
    made.folders["pserver 0"].note_cut_alone(10, [5, 5])
    made.folders["trainer 0"].leave()
    return made


def test_an_asynchronous_job_does_not_wait_for_a_trainer_that_has_left(async_job: Job) -> None:
    running = {"pserver 0"}
    assert async_job.epochs.can_go_back("trainer 1", running)
    assert not async_job.epochs.can_go_back("pserver 0", {"trainer 1"})  # may lack its last steps
    async_job.epochs.go_back("trainer 1")
    assert async_job.folders["pserver 0"].current().left == (0,)
    async_job.folders["pserver 0"].enter_alone(async_job.epochs.epoch)
    async_job.enter("trainer 1")
    assert not async_job.epochs.excuse_left()
    assert async_job.epochs.find_unable(running | {"trainer 1"}) is None
    assert async_job.epochs.have_all_entered


def test_a_trainer_that_leaves_during_a_new_epoch_is_excused(async_job: Job) -> None:
    async_job.folders["trainer 0"].enter(async_job.epochs.epoch)  # it has not left yet
    async_job.epochs.go_back("trainer 1")
    assert async_job.epochs.epoch.left == ()
    async_job.folders["trainer 0"].leave()
    assert async_job.epochs.excuse_left() and not async_job.epochs.excuse_left()
    assert async_job.epochs.epoch == Epoch(2, left=(0,))
    async_job.epochs.start_again()
    assert async_job.epochs.epoch.left == ()  # it starts again, too


def test_a_trainer_returns_if_a_server_starts_again(async_job: Job) -> None:
    async_job.folders["trainer 0"].enter(async_job.epochs.epoch)  # it has not left yet
    async_job.epochs.go_back("pserver 0")
    async_job.folders["trainer 0"].leave()
    assert not async_job.epochs.excuse_left()
    assert async_job.epochs.find_unable(RUNNING) == "trainer 0"


def test_a_loss_without_a_newer_cut_is_noticed(job: Job) -> None:
    assert not job.epochs.note_loss("trainer 1")
    assert not job.epochs.note_loss("trainer 0")
    job.folders["pserver 0"].note_cut(0, 20)
    assert not job.epochs.note_loss("trainer 1")
    assert job.epochs.note_loss("trainer 1")


def test_jobs_without_reports_may_lose_a_role_twice(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert not any(job.epochs.note_loss("trainer 1") for _ in range(3))


def test_reports_of_this_epoch_and_of_roles_that_wait_count(job: Job) -> None:
    server = "pserver 127.0.0.1:1"
    job.folders["trainer 0"].report_lost(0, server, "silence")
    job.folders["trainer 1"].report_lost(1, server, "of another epoch")
    (report,) = job.epochs.reports(RUNNING)
    assert (report.reporter, job.epochs.reported_role(report)) == ("trainer 0", "pserver 0")
    assert not job.epochs.reports(RUNNING - {"trainer 0"})
    job.folders["trainer 0"].leave()
    assert not job.epochs.reports(RUNNING)


def test_another_launcher_continues(job: Job, tmp_path: Path) -> None:
    again = Job(tmp_path)
    assert again.epochs.epoch == again.folders["pserver 0"].current() == Epoch(1, 10)
    assert not again.can_go_back("trainer 0")  # no role has reported yet
    with pytest.raises(
        ConfigError, match=r"with 2 trainers and 1 pservers, but this job has 1 and"
    ):
        JobEpochs(tmp_path, roles_of(1, ("127.0.0.1:1",)))
    with pytest.raises(ConfigError, match=r"but this job has 2 and 2; write as many as before"):
        JobEpochs(tmp_path, roles_of(2, ("127.0.0.1:1", "127.0.0.1:2")))
    # pieces of cuts and checkpoints contain the endpoints, so the servers get the same endpoints
    # again
    assert endpoints_of(tmp_path) == ("127.0.0.1:1",)
    assert endpoints_of(None) == endpoints_of(tmp_path / "none") == ()


def test_a_job_that_ended_well_leaves_no_cuts(job: Job, tmp_path: Path) -> None:
    (tmp_path / "10").mkdir()
    (tmp_path / "of the user").touch()
    job.epochs.end()
    assert {x.name for x in tmp_path.iterdir()} == {"epochs.jsonl", "of the user"}
    assert Job(tmp_path).epochs.epoch == Epoch()
    assert [x.epoch for x in read_log(tmp_path / "epochs.jsonl")] == [0]


def test_a_dropped_trainer_takes_no_part(job: Job) -> None:
    assert job.epochs.can_go_back("trainer 1", RUNNING - {"trainer 1"}, without_lost=True)
    job.epochs.drop("trainer 1", "signal SIGKILL")
    assert job.epochs.epoch == Epoch(1, 10, dropped=(1,), members_since=1)
    assert (job.epochs.members, job.epochs.epoch.has_role("trainer 1")) == ((0,), False)
    assert job.folders["pserver 0"].current() == Epoch(1, 10, dropped=(1,), members_since=1)
    job.enter("pserver 0", "trainer 0")
    assert job.epochs.have_all_entered and job.epochs.find_unable(RUNNING) is None
    # the trainer stays dropped in later epochs
    job.epochs.go_back("pserver 0", "signal SIGSEGV")
    job.epochs.start_again()
    assert job.epochs.epoch == Epoch(3, 10, dropped=(1,), members_since=1)


def test_a_dropped_trainer_joins_when_it_is_ready(tmp_path: Path) -> None:
    epochs = JobEpochs(tmp_path, ROLES, on_trainer_loss="replace")
    others = [RoleFolder(tmp_path, name) for name in ("pserver 0", "trainer 0")]
    for role in (*others, RoleFolder(tmp_path, "trainer 1")):
        role.enter(role.current())
    others[0].note_cut(0, 10)
    epochs.drop("trainer 1", "signal SIGKILL")
    running, waiting = RUNNING - {"trainer 1"}, ["trainer 1"]
    for role in others:
        assert not epochs.find_ready(waiting, running)
        role.enter(role.current())
    assert not epochs.find_ready(waiting, running)  # the new process has not reported
    new = RoleFolder(tmp_path, "trainer 1", started=1)
    new.enter(new.current())
    assert epochs.find_ready(waiting, running) == waiting
    assert not epochs.find_ready(waiting, {"trainer 0"})  # the server has ended
    others[0].note_cut(1, 20)
    epochs.join(waiting)
    assert epochs.epoch == Epoch(2, 20, members_since=2)
    assert new.join() == epochs.epoch
    assert epochs.find_unable(running | {"trainer 1"}) is None
    assert epochs.find_unable(running) == "trainer 1"  # it has not entered the epoch


def test_a_trainer_joins_no_job_that_another_role_has_left(tmp_path: Path) -> None:
    epochs = JobEpochs(tmp_path, ROLES, on_trainer_loss="replace")
    others = [RoleFolder(tmp_path, name) for name in ("pserver 0", "trainer 0")]
    for role in others:
        role.enter(role.current())
    others[0].note_cut(0, 10)
    epochs.drop("trainer 1", "signal SIGKILL")
    new = RoleFolder(tmp_path, "trainer 1", started=1)
    for role in (*others, new):
        role.enter(role.current())
    assert epochs.find_ready(["trainer 1"], RUNNING)
    others[1].leave()
    assert not epochs.find_ready(["trainer 1"], RUNNING)


def test_all_trainers_start_again_with_a_replaced_one(tmp_path: Path) -> None:
    JobEpochs(tmp_path, ROLES, on_trainer_loss="replace", quorum=2).drop("trainer 1")
    again = JobEpochs(tmp_path, ROLES, on_trainer_loss="replace", quorum=2)
    assert again.epoch.dropped == () and again.epoch.members_since == 2


def test_a_process_of_a_dropped_trainer_ends(tmp_path: Path) -> None:
    """The process may still run on a host that was lost."""
    epochs, old = JobEpochs(tmp_path, ROLES), RoleFolder(tmp_path, "trainer 1")
    assert old.current() == Epoch()
    epochs.drop("trainer 1")
    with pytest.raises(ReplacedError, match="of trainer 1, and the job continues without it; this"):
        old.current()


def test_another_launcher_continues_without_a_dropped_trainer(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.epochs.drop("trainer 1", "signal SIGKILL")
    again = JobEpochs(tmp_path, ROLES)
    assert again.epoch == Epoch(2, 10, dropped=(1,), members_since=1)
    assert "continues at step 10, without trainer 1" in capsys.readouterr().err
    assert [(x.cut, x.members, x.lost, x.reason) for x in read_log(tmp_path / "epochs.jsonl")] == [
        (None, (0, 1), "", "the job starts"),
        (10, (0,), "trainer 1", "signal SIGKILL"),
        (10, (0,), "", "the launcher starts again"),
    ]


def test_leaves_of_a_dropped_trainer_are_not_needed(tmp_path: Path) -> None:
    job = Job(tmp_path)
    server, first, second = (job.folders[x] for x in ("pserver 0", "trainer 0", "trainer 1"))
    server.enter(Epoch(), with_trainers=True)
    job.enter("trainer 0", "trainer 1")
    server.note_cut(0, 10)
    first.note_cut(0, 10)
    running = RUNNING - {"trainer 1"}
    assert not job.epochs.can_go_back("trainer 1", running)
    assert job.epochs.can_go_back("trainer 1", running, without_lost=True)
    second.note_cut(0, 10)
    server.note_cut(0, 20)
    first.note_cut(0, 20)
    job.epochs.drop("trainer 1")
    assert job.epochs.epoch == Epoch(1, 20, dropped=(1,), members_since=1)
    assert server.old_cut(["pserver 0"]) == 10


def test_one_launcher_has_a_folder(tmp_path: Path) -> None:
    with open_epochs(ROLES, tmp_path / "a" / "b") as epochs:
        assert epochs.epoch == Epoch()
        with (
            pytest.raises(ConfigError, match="is the folder of a job that runs; wait for its end"),
            open_epochs(ROLES, tmp_path / "a" / "b"),
        ):
            pass
    with open_epochs(ROLES, tmp_path / "a" / "b") as epochs:
        assert epochs.epoch == Epoch(1)


def test_a_folder_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.raises(ConfigError, match="cannot be locked: No locks available; write a folder"),
        open_epochs(ROLES, tmp_path),
    ):
        pass


def test_a_role_that_starts_again_has_not_ended_in_the_next_epoch() -> None:
    with EndedRoles() as ended:
        ended.note("trainer 1", "signal SIGKILL")
        ended.note("trainer 0", "exit code 0", epoch=1)
        first = ended_roles(0, ended.environment)
        assert first == {"trainer 0": "exit code 0", "trainer 1": "signal SIGKILL"}
        assert ended_roles(1, ended.environment) == {"trainer 0": "exit code 0"}
        assert ended_roles(2, ended.environment) == {}


def test_a_second_loss_does_not_go_back_to_an_undone_cut(tmp_path: Path) -> None:
    """A server writes its piece of a cut after the launcher has chosen an older cut."""
    roles = roles_of(4, ("127.0.0.1:1", "127.0.0.1:2"))
    names = [role.name for role in roles]
    epochs = JobEpochs(tmp_path, roles, on_trainer_loss="drop")
    folders = {name: RoleFolder(tmp_path, name, started=1000) for name in names}
    for folder in folders.values():
        folder.enter(folder.current())
    for server in ("pserver 0", "pserver 1"):
        folders[server].note_cut(0, 20)
    folders["pserver 0"].note_cut(0, 30)
    epochs.drop("trainer 3")
    assert epochs.epoch == Epoch(1, 20, dropped=(3,), members_since=1)
    folders["pserver 1"].note_cut(0, 30)  # it has not read the epoch
    assert epochs.can_go_back("trainer 2", {*names} - {"trainer 2", "trainer 3"}, without_lost=True)
    epochs.drop("trainer 2")
    assert epochs.epoch == Epoch(2, 20, dropped=(2, 3), members_since=2)
    members = members_of_steps(read_log(tmp_path / "epochs.jsonl"), 0, 31)
    assert members == [(0, 1, 2, 3)] * 20 + [(0, 1)] * 11
    # a role that starts again removes the undone cut, and may write another cut of this step
    for name in ("pserver 0", "pserver 1"):
        folders[name].enter(folders[name].current())
        assert folders[name].mark().cuts == (20,)
        folders[name].note_cut(2, 30)
    epochs.start_again()
    assert epochs.epoch.cut == 30


def test_a_launcher_that_continues_a_job_ignores_undone_cuts(job: Job, tmp_path: Path) -> None:
    job.epochs.drop("trainer 1")
    job.folders["pserver 0"].note_cut(0, 20)
    assert JobEpochs(tmp_path, ROLES).epoch == Epoch(2, 10, dropped=(1,), members_since=1)


def test_a_launcher_continues_only_with_a_quorum(job: Job, tmp_path: Path) -> None:
    job.epochs.drop("trainer 1")
    with pytest.raises(
        ConfigError,
        match="a job that continues with trainer 0, since it has dropped trainer 1, but quorum=2; "
        "write quorum=1, or another folder",
    ):
        JobEpochs(tmp_path, ROLES, on_trainer_loss="drop", quorum=2)
    assert job.epochs.epoch == LauncherFolder(tmp_path).current()  # no epoch was granted
    again = JobEpochs(tmp_path, ROLES, on_trainer_loss="drop", quorum=1)
    assert again.epoch == Epoch(2, 10, dropped=(1,), members_since=1)
