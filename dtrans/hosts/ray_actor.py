"""The Ray actor that runs one role of a job, called by the driver (`dtrans.hosts.on_ray`).

Each actor becomes a process of the job, as if a launcher had started it: it sets the environment
variables of its role (`dtrans.Role.environment`), and calls `plan.on_cluster()`. Only methods that
run in an actor import Ray. JAX must not create devices before `begin` has connected the roles.
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
from dtrans.ir.pytree import TreeSpec, all_names, unflatten_all
from dtrans.parameter_server.plan import PServerPlan
from dtrans.run.distributed.connect import connect
from dtrans.run.distributed.role import Role


class RoleProcess:
    """Base class of Ray actors that run one role: finds the node's address and free ports.

    Args:
      name: the role's name, `trainer 0`. Ray prints it in front of the actor's output.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._ports: list[socket.socket] = []

    def __repr__(self) -> str:
        return self._name

    def where(self) -> tuple[str, str]:
        """Return the address and the Ray id of this node."""
        import ray

        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()

    def endpoint(self, address: str) -> str:
        """Return an endpoint at an address of this node, on a port that the system chooses.

        The port stays bound until `release`, so that two roles on one node get different ports.
        """
        is_v6 = ":" in address
        port = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_STREAM)
        self._ports.append(port)
        port.bind((address, 0))
        host = f"[{address}]" if is_v6 else address
        return f"{host}:{port.getsockname()[1]}"

    def release(self) -> None:
        """Release the ports that `endpoint` has reserved, so that the role can bind them."""
        for port in self._ports:
            port.close()


class RoleActor(RoleProcess):
    """Ray actor that runs one role of a plan, such as trainer 0. The driver calls its methods.

    Ray runs the calls one by one. `begin` is the first call. A server's last call is `serve`, which
    returns at the end of the job.
    """

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
        """Connect to the other roles, rebuild the plan, and create the job of this role.

        Args:
          role: the role.
          environment: variables in addition to those of the role, such as the token.
          pickled: the pickled `PortablePlan`, and the function `batches` or None.
          data: a pair (the trainer's part of the dataset, number of rows in a batch), or None.
          options: `deadline` and `patience`.

        Returns:
          The random id of this run of the job (`dtrans.checkpoint.runs`).
        """
        os.environ.update({**role.environment(), **environment})
        self.release()
        if role.mode == "nccl2":
            connect(role, allow_remote=True, **options)
            # unpickle after `connect`: arrays make JAX create devices, after which no process
            # can connect
            portable, batches = pickle.loads(pickled)
            self._job = portable.rebuild().on_cluster()
        else:
            portable, batches = pickle.loads(pickled)
            self._job = portable.rebuild(pservers=role.pservers).on_cluster(
                allow_remote=True, **options
            )
        if data is not None:
            part, rows = data
            self._batches = _read_batches(part, rows, self._job.plan.main.args[2:])
        elif batches is not None:
            self._batches = (
                _check_batch(batches(role.trainer_id, step)) for step in itertools.count()
            )
        run: str = self._job.run_id
        return run

    # -- the state -------------------------------------------------------------------------------

    def init(self, arrays: Sequence[Any]) -> None:
        """Create the first state by the user's `init` function.

        Args:
          arrays: the leaves of the function's arguments.
        """
        self._state = self._job.init(*unflatten_all(self._job.plan.startup.args, arrays))

    def take(self, arrays: Sequence[Any]) -> None:
        """Create the state from given parameters and a given optimizer state.

        Args:
          arrays: the leaves of both.
        """
        self._state = self._job.state_of(*unflatten_all(self._job.plan.main.args[:2], arrays))

    def restore(self, path: str) -> None:
        """Create the state from a checkpoint."""
        self._state = checkpoint.restore(path, self._job)

    def serve(self, method: str, arg: Any, checkpoints: str | None) -> None:
        """Create this server's state, and answer trainers until every trainer has closed.

        Args:
          method: the method that creates the state: `init`, `take` or `restore`.
          arg: its argument.
          checkpoints: the folder for checkpoints that trainers request.
        """
        getattr(self, method)(arg)
        # drop this reference, so that old blocks are freed when updates replace them
        state, self._state = self._state, None
        self._job.serve(state, checkpoints=checkpoints)

    # -- trainers --------------------------------------------------------------------------------

    def step(self, arrays: Sequence[Any] | None) -> Any:
        """Take a step; return its results.

        Args:
          arrays: the leaves of the global batch; this trainer uses its rows. With None, it uses the
            next batch of `batches` or of the dataset.
        """
        if arrays is not None:
            batch = self._job.shard_batch(*unflatten_all(self._job.plan.main.args[2:], arrays))
        else:
            assert self._batches is not None
            batch = next(self._batches)
        self._state, *results = self._job.step(self._state, *batch)
        return jax.tree.map(on_host, results)

    def change(self, method: str, options: Mapping[str, Any]) -> None:
        """Replace the state by a changed one, for example with another learning rate.

        Args:
          method: name of the job's method that returns the new state, such as
            "with_hyperparameters".
          options: the method's named arguments.
        """
        self._state = getattr(self._job, method)(self._state, **options)

    def read(self, what: str, wanted: bool) -> list[Any] | None:
        """Return the parameters or the optimizer state as a list of NumPy arrays.

        All trainers must call this method, because some jobs gather the arrays by collectives.

        Args:
          what: "params" or "opt_state".
          wanted: False for a trainer whose leaves the driver does not read; the result is None.
        """
        spec = self._job.plan.main.args[("params", "opt_state").index(what)]
        found = getattr(self._job, what)(self._state)
        if not wanted:
            return None
        return list(map(on_host, spec.flatten(found)))

    def save(self, path: str, tag: str | None) -> None:
        """Save this process's pieces of a checkpoint, or ask the servers to save theirs."""
        if isinstance(self._job.plan, PServerPlan):
            self._job.save(Path(path).name)
        else:
            checkpoint.save(path, self._job, self._state, tag=tag)

    def close(self) -> None:
        """End this trainer's part of the job."""
        self._job.close()


def on_host(x: Any) -> Any:
    """Convert an array to NumPy, which Ray shares without a copy; leave PRNG keys unchanged."""
    if not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return np.asarray(x)


def _check_batch(batch: Any) -> Sequence[Any]:
    """Return the batch; raise BatchError unless it is a tuple or list."""
    if not isinstance(batch, (tuple, list)):
        raise BatchError(
            f"batches(trainer, step) returned a {type(batch).__name__}, expected a tuple of the "
            "step's arguments after its state, such as (x,)"
        )
    return batch


def _read_batches(part: Any, rows: int, specs: Sequence[TreeSpec]) -> Iterator[Sequence[Any]]:
    """Yield batches of this trainer's part of a dataset without end.

    After the last row, it starts again at the first.

    Args:
      part: this trainer's shard of a dataset of Ray Data.
      rows: number of rows of a batch.
      specs: the step's arguments after its state. Columns have the names of their leaves.
    """
    names = all_names(specs)
    while True:
        count = 0
        for columns in part.iter_batches(batch_size=rows, batch_format="numpy", drop_last=True):
            count += 1
            yield list(unflatten_all(specs, [_column(columns, n) for n in names]))
        if not count:
            raise BatchError(
                f"this trainer's part of the dataset has fewer than rows={rows} rows; use a larger "
                "dataset, or fewer rows"
            )


def _column(columns: Mapping[str, Any], name: str) -> Any:
    """Return the column of an argument, by its full name or the last part of its name."""
    short = name.rpartition("/")[2]
    if name not in columns and short not in columns:
        raise BatchError(f"the dataset has no column {name}; it has {', '.join(columns)}")
    return columns[name if name in columns else short]
