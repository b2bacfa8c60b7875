"""A role of a job as a Ray actor: the process that the driver of `dtrans.hosts.on_ray` calls.

Each actor becomes a process of the job as a launcher would start it: its environment says its role
(`dtrans.Role.environment`), and `plan.on_cluster()` does the rest. Ray is imported in the actor
alone. JAX has no devices here before `begin`, which has to connect them first.
"""

from __future__ import annotations

import itertools
import os
import pickle
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.checkpoint import api as checkpoint
from dtrans.errors import BatchError
from dtrans.ir.pytree import TreeSpec, unflatten_all
from dtrans.parameter_server.plan import PServerPlan
from dtrans.run.distributed.connect import connect
from dtrans.run.distributed.role import Role


class RoleProcess:
    """An actor that is to become a role, or to start the process of one.

    Args:
      name: of the role, `trainer 0`; Ray shows it in front of the actor's output.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._ports: list[socket.socket] = []

    def __repr__(self) -> str:
        return self._name

    def where(self) -> tuple[str, str]:
        """Return the address of this node, and Ray's id of it."""
        import ray

        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()

    def endpoint(self, address: str) -> str:
        """Return an endpoint at an address of this node, on a port that the system chose.

        The port stays bound until `release`, so that two roles on one node never get the same.
        """
        is_v6 = ":" in address
        port = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_STREAM)
        self._ports.append(port)
        port.bind((address, 0))
        host = f"[{address}]" if is_v6 else address
        return f"{host}:{port.getsockname()[1]}"

    def release(self) -> None:
        """Give the ports back, for the role to bind them."""
        for port in self._ports:
            port.close()


class RoleActor(RoleProcess):
    """One role of a plan. Calls come one after the other; the last one of a server is `serve`."""

    _job: Any = None
    _state: Any = None
    _batches: Iterator[Sequence[Any]] | None = None

    def begin(
        self,
        role: Role,
        environment: Mapping[str, str],
        pickled: bytes,
        data: Any,
        options: Mapping[str, Any],
    ) -> str:
        """Become a role: connect, make the plan, and realise it; return the run
        (`dtrans.checkpoint.runs`).

        Args:
          role: the role.
          environment: variables in addition to those of the role, such as the token.
          pickled: the plan (`dtrans.hosts.portable_plan`), and the function that makes batches.
          data: a trainer's part of a dataset, if any, and the rows of its batches.
          options: `deadline` and `patience`.
        """
        os.environ.update({**role.environment(), **environment})
        self.release()
        if role.mode == "nccl2":
            connect(role, allow_remote=True, **options)
            # it may hold arrays: not before JAX is connected
            portable, batches = pickle.loads(pickled)
            self._job = portable.rebuild().on_cluster()
        else:
            portable, batches = pickle.loads(pickled)
            self._job = portable.rebuild(pservers=role.pservers).on_cluster(
                allow_remote=True, **options
            )
        if data is not None:
            part, rows = data
            self._batches = _of_dataset(part, rows, self._job.plan.main.args[2:])
        elif batches is not None:
            self._batches = (_checked(batches(role.trainer_id, step)) for step in itertools.count())
        run: str = self._job.run_id
        return run

    # -- the state -------------------------------------------------------------------------------

    def init(self, arrays: Sequence[Any]) -> None:
        """Make the first state, from the arrays of the arguments of `init`."""
        self._state = self._job.init(*unflatten_all(self._job.plan.startup.args, arrays))

    def take(self, arrays: Sequence[Any]) -> None:
        """Go on from the arrays of one device's parameters and optimizer state."""
        self._state = self._job.state_of(*unflatten_all(self._job.plan.main.args[:2], arrays))

    def restore(self, path: str) -> None:
        """Go on from a checkpoint."""
        self._state = checkpoint.restore(path, self._job)

    def serve(self, method: str, arg: Any, checkpoints: str | None) -> None:
        """Serve until every trainer has closed.

        Args:
          method, arg: the call that makes the state: `init`, `take` or `restore`.
          checkpoints: the folder of the checkpoints that trainers ask for.
        """
        getattr(self, method)(arg)
        state, self._state = self._state, None  # blocks are replaced, and may then be freed
        self._job.serve(state, checkpoints=checkpoints)

    # -- trainers --------------------------------------------------------------------------------

    def step(self, arrays: Sequence[Any] | None) -> Any:
        """Make a step on this trainer's rows of a global batch, or on its own; return its
        results."""
        if arrays is not None:
            batch = self._job.shard_batch(*unflatten_all(self._job.plan.main.args[2:], arrays))
        else:
            assert self._batches is not None
            batch = next(self._batches)
        self._state, *results = self._job.step(self._state, *batch)
        return jax.tree.map(on_host, results)

    def change(self, method: str, options: Mapping[str, Any]) -> None:
        """Replace the state by the result of a method of the job."""
        self._state = getattr(self._job, method)(self._state, **options)

    def read(self, what: str, wanted: bool) -> list[Any] | None:
        """Return the arrays of `params` or `opt_state`. All trainers call it, since some jobs
        gather them.

        Args:
          wanted: the driver reads this trainer's.
        """
        spec = self._job.plan.main.args[("params", "opt_state").index(what)]
        found = getattr(self._job, what)(self._state)
        return [on_host(x) for x in spec.flatten(found)] if wanted else None

    def save(self, path: str, tag: str | None) -> None:
        """Save this process's pieces of a checkpoint; servers save theirs in their folder."""
        if isinstance(self._job.plan, PServerPlan):
            self._job.save(Path(path).name)
        else:
            checkpoint.save(path, self._job, self._state, tag=tag)

    def close(self) -> None:
        """End this trainer's part of the job."""
        self._job.close()


def on_host(x: Any) -> Any:
    """Return an array as one that Ray shares without a copy; keys stay arrays of JAX."""
    if not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return np.asarray(x)


def _checked(batch: Any) -> Sequence[Any]:
    if not isinstance(batch, (tuple, list)):
        raise BatchError(
            f"batches(trainer, step) returned {type(batch).__name__}, expected the arguments of "
            "the step behind its "
            "state; return a tuple, such as (x,)"
        )
    return batch


def _of_dataset(part: Any, rows: int, specs: Sequence[TreeSpec]) -> Iterator[Sequence[Any]]:
    """Yield the batches of a part of a dataset, epoch after epoch."""
    names = [n for spec in specs for n in spec.names]
    while True:
        count = 0
        for columns in part.iter_batches(batch_size=rows, batch_format="numpy", drop_last=True):
            count += 1
            yield list(unflatten_all(specs, [_column(columns, n) for n in names]))
        if not count:
            raise BatchError(
                f"this trainer's part of the dataset has fewer rows than rows={rows}; give a "
                "larger dataset, or fewer rows"
            )


def _column(columns: Mapping[str, Any], name: str) -> Any:
    """Return the column of an argument: under its whole name, or the last part of it."""
    short = name.rpartition("/")[2]
    if name not in columns and short not in columns:
        raise BatchError(f"the dataset has no column {name}; it has {', '.join(columns)}")
    return columns[name if name in columns else short]
