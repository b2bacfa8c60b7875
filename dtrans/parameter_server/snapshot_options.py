"""Options of snapshots: copies of servers' state, from which a job continues after a failure."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtrans.checks import check_flag, check_int, check_one_of
from dtrans.ops import listen_and_serv_p
from dtrans.parameter_server.overview import VarsDistributed
from dtrans.parameter_server.replica_placement import backups_of
from dtrans.parameter_server.server_balance import bytes_by_server
from dtrans.slicing.divide_update import copied_state_bytes


if TYPE_CHECKING:
    from dtrans.parameter_server.plan import PServerPlan


@dataclasses.dataclass(frozen=True)
class Snapshots:
    """Options of snapshots: copies of servers' state, to continue from after a failure.

    Pass the object to `job.serve`. Servers write snapshots only in jobs that `dtrans launch
    --restarts` started.

    Attributes:
      every: number of steps between two snapshots. An asynchronous server counts the steps of all
        trainers.
      at_loss: True to also write a snapshot when a process fails. After the failure of a trainer,
        the job then repeats only the incomplete step. For this, each server stores the states after
        its two newest steps, which takes the memory of one more state. For an embedding table, it
        stores only the old values of rows that a step has changed. Requires synchronous servers,
        and a step in which trainers compute no leaves themselves, such as batch statistics.
      replicas: 1 to store a copy of each server's state on another server. If the servers run on
        several hosts, the copy is on another host. After the failure of one server, the job then
        repeats only the incomplete step, too. Implies `at_loss`. Requires several servers. Each of
        them needs a trained parameter, and more memory: `extra_bytes` returns how much.

    Raises:
      ConfigError: a value is out of range.

    Example:
      >>> import dtrans
      >>> dtrans.Snapshots(every=100, at_loss=True).every
      100
    """

    every: int
    at_loss: bool = False
    replicas: int = 0

    def __post_init__(self) -> None:
        check_int("every", self.every, "a number of steps", least=1)
        check_flag("at_loss", self.at_loss)
        check_one_of("replicas", self.replicas, (0, 1))
        if self.replicas:
            object.__setattr__(self, "at_loss", True)

    def extra_bytes(self, plan: PServerPlan) -> dict[str, int]:
        """Return the additional memory on each server for these options, by endpoint, in bytes.

        The result is the memory beyond that of `plan.costs()`:

        - `at_loss`: a server keeps its parameters and optimizer state before the newest step. If it
          sends parameters early, `plan.costs()` already counts the old optimizer state.
        - `replicas`: each server has a backup, the server with its copy. A server keeps the merged
          gradients of the last two steps until the backup has received them. For each server that
          it copies, a backup stores two states and at most four sets of gradients.

        For a table in a copy, the result counts all rows, although only existing rows are copied.
        The result does not count buffers of connections, or old values and gradients of a step's
        table rows.
        """
        by_kind = bytes_by_server(_without_tables(plan), plan.servers)
        sizes = {ep: sum(found.values()) for ep, found in by_kind.items()}
        tables = {ep: sum(x.values()) - sizes[ep] for ep, x in plan.server_bytes.items()}
        extra = dict.fromkeys(sizes, 0)
        if self.at_loss:
            counted = _counted_copies(plan)
            extra = {ep: size - counted[ep] for ep, size in sizes.items()}
        if self.replicas:
            for primary, backup in backups_of(list(sizes)).items():
                gradients = by_kind[primary]["params"]  # as large as the parameters
                # Messages of a step stay in memory until the server sends the next step's messages.
                extra[primary] += 2 * gradients
                # Gradients of even and odd steps have separate buffers. Each has a second buffer,
                # for gradients that arrive while an update still reads the first one.
                extra[backup] += 2 * sizes[primary] + 4 * gradients + tables[primary]
        return extra


def _counted_copies(plan: PServerPlan) -> dict[str, int]:
    """Return the bytes of old optimizer state that `plan.costs()` already counts, by server."""
    found = {}
    for endpoint, programs in plan.servers.items():
        serve = [e for e in programs.main.eqns if e.primitive is listen_and_serv_p]
        found[endpoint] = sum(map(copied_state_bytes, serve))
    return found


def _without_tables(plan: PServerPlan) -> VarsDistributed:
    """Return a plan's overview of arrays, without tables that are not stored a second time.

    These are tables with an update that changes only some rows.
    """
    names = set[str]()
    for programs in plan.servers.values():
        for eqn in programs.main.eqns:
            tables = eqn.params.get("tables")
            for block in () if tables is None else tables.blocks.values():
                if not block.updates_all:
                    names.update(block.arrays)
    return VarsDistributed(tuple(row for row in plan.overview if row.slice_name not in names))
