"""Reports of roles to the launcher of a job that survives failures, and decisions from them.

A role reports its generation (the time between two failures), the snapshots that it has
written, and roles that it has lost. `dtrans.run.net.role_folder` writes the reports, and
`dtrans.run.net.generation_folder` reads them. The functions below compute the launcher's decisions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class RoleMark:
    """Report of one role to the launcher: its generation and the snapshots that it has written.

    A generation is the time between two failures of the job.

    Attributes:
      generation: number of the generation in which the role takes part.
      snapshots: steps of the snapshots that the role has written, increasing.
      early: steps of snapshots that the role has written before table rows were evicted (removed)
        after the step; see `complete_snapshots`.
      left: True if the role has left the job after its last step.
      with_trainers: in a server's report, True if trainers write parts of its snapshots, too.
      is_alone: True for an asynchronous server, which continues from its own snapshot,
        independently of other servers.
      counts: for an asynchronous server, the number of steps of each trainer in its snapshot.
      writes_newest: True for a server that can write its newest states when a process fails.
      writes_replicas: True if the server can also write the newest states of a lost server then.
      ended: number of the last generation after which the server wrote its newest states, or -1.
      ended_for: names of the lost servers for which the server wrote states after that generation.
    """

    generation: int = 0
    snapshots: tuple[int, ...] = ()
    early: tuple[int, ...] = ()
    left: bool = False
    with_trainers: bool = False
    is_alone: bool = False
    counts: tuple[int, ...] = ()
    writes_newest: bool = False
    writes_replicas: bool = False
    ended: int = -1
    ended_for: tuple[str, ...] = ()

    def has_ended(self, generation: int, lost: Collection[str]) -> bool:
        """Return True if the server has written its newest state after a failure.

        The launcher asks servers to write it.

        Args:
          generation: number of the generation (the time between two failures) that ended with this
            failure.
          lost: names of the lost servers. The replicas of their states must be written, too.
        """
        return self.ended >= generation and {*lost} <= {*self.ended_for}

    def snapshots_until(self, snapshot: int | None) -> tuple[int, ...]:
        """Return the steps of written snapshots up to step `snapshot`; () if `snapshot` is None."""
        written = sorted({*self.snapshots, *self.early})
        return () if snapshot is None else tuple(step for step in written if step <= snapshot)

    def without_snapshot(self, step: int) -> RoleMark:
        """Return this report without one snapshot, for a snapshot with damaged files."""
        snapshots = tuple(x for x in self.snapshots if x != step)
        early = tuple(x for x in self.early if x != step)
        return dataclasses.replace(self, snapshots=snapshots, early=early)


@dataclasses.dataclass(frozen=True)
class LostReport:
    """Report of one role that it has lost its connection to another role.

    Attributes:
      reporter: name of the role that reports.
      generation: number of the generation (the time between two failures) in which it lost the
        other role.
      role: the lost role: "trainer 1", or "pserver " and its endpoint.
      reason: text of the error.
    """

    reporter: str
    generation: int
    role: str
    reason: str


def mark_of(fields: Mapping[str, Any]) -> RoleMark:
    """Return a report from the contents of its file, in which tuples are lists."""
    mark = RoleMark(**fields)
    return dataclasses.replace(
        mark,
        snapshots=tuple(mark.snapshots),
        early=tuple(mark.early),
        counts=tuple(mark.counts),
        ended_for=tuple(mark.ended_for),
    )


def complete_snapshots(marks: Mapping[str, RoleMark], roles: Collection[str]) -> set[int]:
    """Return the steps at which every role has written its part of a snapshot of the job.

    After a step, trainers may ask servers to evict (remove) rows of tables. A server may write an
    *early* part before it knows if it will get such a request. If another server has written a part
    that is not early, the next step has begun. All servers have then made all evictions, so the
    early parts contain them, too. Therefore a snapshot is complete only if at least one part is not
    early.

    Args:
      marks: the report of each role, by name.
      roles: names of the roles that write snapshots.

    Example:
      >>> from dtrans.run.net.role_marks import RoleMark, complete_snapshots
      >>> first, second = RoleMark(snapshots=(10, 20)), RoleMark(snapshots=(10,))
      >>> marks = {"pserver 0": first, "pserver 1": second}
      >>> complete_snapshots(marks, ["pserver 0", "pserver 1"])
      {10}
    """
    written, with_evictions = [], set[int]()
    for name in roles:
        mark = marks.get(name, RoleMark())
        written.append({*mark.snapshots, *mark.early})
        with_evictions.update(mark.snapshots)
    return set.intersection(with_evictions, *written)


def old_snapshot(complete: Collection[int]) -> int:
    """Return the step of the second newest complete snapshot; 0 if there is none.

    Roles remove the snapshots before this step. The second newest snapshot must stay, because the
    launcher may not know yet that the newest one is complete.

    Args:
      complete: steps of the complete snapshots.
    """
    common = sorted(complete)
    return common[-2] if len(common) > 1 else 0


def without_undone(
    marks: Mapping[str, RoleMark], generation: int, snapshot: int | None
) -> dict[str, RoleMark]:
    """Remove snapshots from the roles' reports, if the job has undone their steps.

    After a failure, the job goes back to a snapshot, and a new generation begins. A role that has
    not entered this generation may have written later snapshots. The job has undone their steps,
    and may repeat them with other trainers.

    Args:
      marks: the report of each role, by name.
      generation: number of the current generation.
      snapshot: step of the snapshot at the start of the current generation; None without a
        snapshot.

    Example:
      >>> from dtrans.run.net.role_marks import RoleMark, without_undone
      >>> marks = {"pserver 0": RoleMark(1, (20, 30)), "pserver 1": RoleMark(0, (20, 30))}
      >>> [mark.snapshots for mark in without_undone(marks, generation=1, snapshot=20).values()]
      [(20, 30), (20,)]
    """
    found = {}
    for name, mark in marks.items():
        if mark.generation < generation:
            mark = dataclasses.replace(mark, snapshots=mark.snapshots_until(snapshot), early=())
        found[name] = mark
    return found


def newest_alone(marks: Mapping[str, RoleMark], servers: Collection[str]) -> tuple[int, ...]:
    """Return the step of the newest snapshot of each asynchronous server; () if one has none.

    Args:
      marks: the report of each role, by name.
      servers: names of all servers.
    """
    newest = []
    for name in servers:
        if name not in marks or not marks[name].is_alone or not marks[name].snapshots:
            return ()
        newest.append(marks[name].snapshots[-1])
    return tuple(newest)


def can_go_back(
    marks: Mapping[str, RoleMark],
    roles: Collection[str],
    running: Collection[str],
    *,
    is_pending: bool,
) -> bool:
    """Return True if the roles that were not lost can continue from a snapshot.

    If not, the launcher must restart all roles. Three conditions must hold for each role: it runs;
    it has not left the job; and it has reported that it takes part in the job. The last condition
    does not hold for a role that has just started again. If `is_pending` is True, it is not
    required.

    Args:
      marks: the report of each role's current process, by name.
      roles: names of the roles.
      running: names of the running roles.
      is_pending: True if some roles have not entered the current generation yet.

    Example:
      >>> from dtrans.run.net.role_marks import RoleMark, can_go_back
      >>> can_go_back({"pserver 0": RoleMark()}, ["pserver 0"], ["pserver 0"], is_pending=False)
      True
    """
    for name in roles:
        mark = marks.get(name)
        if name not in running or (mark is None and not is_pending):
            return False
        if mark is not None and mark.left:
            return False
    return True


def find_left(
    marks: Mapping[str, RoleMark], servers: Collection[str], started: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the ids of the finished trainers that need not repeat steps after a failure.

    They exist only with asynchronous servers. If a server has started again since a trainer's last
    report, the server may lack this trainer's last steps. The trainer is then not in the result.

    Args:
      marks: the report of each role's current process, by name.
      servers: names of all servers.
      started: for each role, number of the generation in which its process was started.

    Example:
      >>> from dtrans.run.net.role_marks import RoleMark, find_left
      >>> marks = {"pserver 0": RoleMark(2, is_alone=True), "trainer 1": RoleMark(2, left=True)}
      >>> find_left(marks, ["pserver 0"], started={"pserver 0": 1})
      (1,)
      >>> find_left(marks, ["pserver 0"], started={"pserver 0": 3})
      ()
    """
    if not any(name in marks and marks[name].is_alone for name in servers):
        return ()
    newest = max(started.get(name, 0) for name in servers)
    found = []
    for name, mark in marks.items():
        if name not in servers and mark.left and mark.generation >= newest:
            found.append(int(name.removeprefix("trainer ")))
    return tuple(sorted(found))


def is_waiting(reporter: str, marks: Mapping[str, RoleMark], running: Collection[str]) -> bool:
    """Return True if a role still waits for the replacement of another role that it has lost.

    A role that has ended, or has left the job, does not wait.

    Args:
      reporter: name of the role that has reported the failure.
      marks: the report of each role's current process, by name.
      running: names of the running roles.
    """
    return reporter in running and not (reporter in marks and marks[reporter].left)


def have_entered(marks: Mapping[str, RoleMark], roles: Collection[str], generation: int) -> bool:
    """Return True if all roles take part in a generation (time between failures) of the job.

    The result is False if a role has left the job. The launcher lets a dropped trainer join again
    only if the result is True. Otherwise a role might be unable to go back to a snapshot.

    Args:
      marks: the report of each role's current process, by name.
      roles: names of the roles.
      generation: number of the generation.

    Example:
      >>> from dtrans.run.net.role_marks import RoleMark, have_entered
      >>> have_entered({"pserver 0": RoleMark(1, left=True)}, ["pserver 0"], generation=1)
      False
    """
    found = [marks.get(name, RoleMark(generation=-1)) for name in roles]
    return all(mark.generation == generation and not mark.left for mark in found)


def find_writers(
    marks: Mapping[str, RoleMark], servers: Collection[str], live: Collection[str], generation: int
) -> set[str]:
    """Return the servers that the launcher asks to write their newest states after a failure.

    If a running server cannot write its newest state, no complete snapshot is possible. The result
    is then empty.

    Args:
      marks: the report of each role's current process, by name.
      servers: names of all servers.
      live: names of the running roles.
      generation: number of the generation.

    Example:
      >>> from dtrans.run.net.role_marks import RoleMark, find_writers
      >>> marks = {"pserver 0": RoleMark(2, writes_newest=True)}
      >>> find_writers(marks, ["pserver 0"], live=["pserver 0"], generation=2)
      {'pserver 0'}
    """
    writers = {name for name in servers if name in live}
    for name in writers:
        mark = marks.get(name, RoleMark(generation=-1))
        if not mark.writes_newest or mark.generation != generation or mark.left:
            return set()
    return writers


def can_complete_snapshot(
    marks: Mapping[str, RoleMark], servers: Collection[str], writers: Collection[str]
) -> bool:
    """Return True if some servers together can write the newest states of all servers.

    Either no server is lost, or the servers have replicas of the lost servers' states.

    Args:
      marks: the report of each role, by name.
      servers: names of all servers.
      writers: names of the servers that write their newest states.

    Example:
      >>> from dtrans.run.net.role_marks import RoleMark, can_complete_snapshot
      >>> marks = {"pserver 0": RoleMark(writes_replicas=True)}
      >>> can_complete_snapshot(marks, ["pserver 0", "pserver 1"], writers=["pserver 0"])
      True
    """
    has_replicas = all(marks[name].writes_replicas for name in writers)
    return bool(writers) and (has_replicas or {*servers} <= {*writers})
