"""Reports by which a role tells the launcher that it has lost its connection to another role.

A process that hangs, or a host without network, sends no signal to the launcher. The launcher
learns of it from these reports.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from dtrans.run.distributed.child_process import Child
from dtrans.run.distributed.role import Role
from dtrans.run.net.launcher_folder import LauncherFolder
from dtrans.run.net.role_marks import LostReport, RoleMark, is_waiting


# Seconds from a report that a role is lost until the launcher kills the role. A role that fails
# loses its connections first, and prints its error afterwards.
PATIENCE = 1.0


class LostReports:
    """Reader of the reports in which a role names another role that it has lost.

    Args:
      folder: folder of the job's generations and snapshots.
      roles: every role of the job.
    """

    def __init__(self, folder: LauncherFolder, roles: Sequence[Role]) -> None:
        self._folder = folder
        self._by_endpoint = {}
        for role in roles:
            if role.is_pserver:
                self._by_endpoint[f"pserver {role.current_endpoint}"] = role.name

    def current(
        self, generation: int, marks: Mapping[str, RoleMark], running: Collection[str]
    ) -> list[LostReport]:
        """Return the reports of roles that lost another role and still wait for its replacement.

        Args:
          generation: number of the current generation (the time between two failures). Older
            reports are left out.
          marks: the last report of each role's current process, by name.
          running: names of the running roles.
        """
        return [x for x in self._folder.lost(generation) if is_waiting(x.reporter, marks, running)]

    def name_of(self, report: LostReport) -> str:
        """Return the name of the role that a report calls lost, such as "pserver 0".

        Trainers know servers only by their endpoints, so a report may contain an endpoint instead.
        """
        return self._by_endpoint.get(report.role, report.role)


class FirstReport:
    """Rule by which the launcher ends one lost role, although several roles report each other.

    If a connection breaks, both processes may report each other as lost. The launcher acts on the
    first report, and ends only the role that this report names.

    Attributes:
      killed: the last role that was killed because of a report.
    """

    def __init__(self) -> None:
        self.killed: Child | None = None
        self._report: LostReport | None = None
        self._since = 0.0

    def choose(self, reports: Sequence[LostReport]) -> LostReport | None:
        """Return the first report about a lost role, once it is PATIENCE seconds old; else None.

        A role that fails loses its connections first, and prints its error a moment later. The
        pause keeps the launcher from killing the role in between.

        Args:
          reports: the current reports.
        """
        if self._report not in reports:
            self._report, self._since = next(iter(reports), None), time.monotonic()
        if self._report is None or time.monotonic() - self._since < PATIENCE:
            return None
        return self._report
