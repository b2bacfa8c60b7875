"""Snapshots that servers write after a failure, so that the job loses fewer steps.

Normally a job goes back to the last periodic snapshot. With `Snapshots(at_loss=True)`, the
surviving servers first write their newest states, and the job goes back to these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from dtrans.run.distributed.role_output import say
from dtrans.run.net.launcher_folder import LauncherFolder
from dtrans.run.net.role_marks import RoleMark, can_complete_snapshot, find_writers


# Seconds that the launcher waits, after a failure, until servers have written their newest states.
# Then it chooses the newest complete snapshot.
WRITE_PATIENCE = 10.0
POLL = 0.02  # seconds between two looks at the servers' reports


class SnapshotsAtLoss:
    """The launcher's request, after a failure, that servers write snapshots of their newest states.

    Args:
      folder: folder in which the launcher and the servers exchange messages, and which has the
        snapshots.
      servers: names of all servers.
    """

    def __init__(self, folder: LauncherFolder, servers: Sequence[str]) -> None:
        self._folder, self._servers = folder, servers

    def request(
        self,
        generation: int,
        marks: Mapping[str, RoleMark],
        lost: str,
        running: Callable[[], Collection[str]],
        is_stopped: Callable[[], bool],
    ) -> None:
        """Make servers write their newest states as snapshots, after the failure of a role.

        The method waits for all live servers, up to WRITE_PATIENCE seconds. If a server was lost,
        another server may have a replica of its state, and writes this replica. The method returns
        at once if no complete snapshot is possible. For example, a server was lost and there is no
        replica.

        Args:
          generation: number of the generation (the time between two failures of the job) that ends
            now.
          marks: the last report of each role's current process, by name.
          lost: name of the lost role.
          running: returns the names of the running roles.
          is_stopped: returns True if the job ends, so that it needs no snapshot.
        """
        writers = find_writers(marks, self._servers, {*running()} - {lost}, generation)
        if not self._announce(writers):
            return
        limit = time.monotonic() + WRITE_PATIENCE
        late = writers
        while time.monotonic() < limit and not is_stopped():
            marks, dead = self._folder.marks(), set(self._servers) - writers
            late = {name for name in writers if not marks[name].has_ended(generation, dead)}
            if not late:
                return
            gone = late - {*running()}
            writers -= gone
            if gone and not self._announce(writers):
                return
            time.sleep(POLL)
        if not is_stopped():
            say(f"{', '.join(sorted(late))} did not write a snapshot within {WRITE_PATIENCE:.0f} s")

    def _announce(self, writers: Collection[str]) -> bool:
        """Ask servers to write their newest states; return False if no snapshot would be complete.

        Args:
          writers: names of the live servers. They also write the replicas of the other servers.
        """
        if not can_complete_snapshot(self._folder.marks(), self._servers, writers):
            return False
        try:
            self._folder.announce_end([name for name in self._servers if name not in writers])
        except OSError as e:
            say(
                f"the servers write no snapshot at this failure, because {self._folder.path} "
                f"cannot be written: {e.strerror}"
            )
            return False
        return True
