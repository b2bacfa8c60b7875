"""State of servers from the step's pytrees, and back, by the rows of the overview.

Servers also have arrays that are no part of the step: backups and mean squares of DC-ASGD. They
start from initial values unless they were saved (`initial_sources`). Leaves on no server
(`plan.frozen`) are trainer 0's.

States are checked against the plan by name, shape and dtype. Results share no memory with the
arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dtrans.checkpoint.assemble import (
    as_jax,
    as_numpy,
    assemble_slice,
    copy_array,
    full_slice,
    group_by_origin,
    type_of,
)
from dtrans.errors import ConfigError, StateError
from dtrans.ir.program import Program
from dtrans.ir.pytree import TreeSpec, unflatten_all
from dtrans.ir.selection import subset
from dtrans.parameter_server.overview import VarDistributed
from dtrans.parameter_server.plan import PServerPlan
from dtrans.step.frozen import check_frozen


TRAINER = "trainer 0"


def gather(
    plan: PServerPlan, servers: Mapping[str, Mapping[str, Any]], trainer: Any = None
) -> tuple[Any, Any]:
    """Assemble the single-device `(params, opt_state)` from the states of servers.

    Args:
      plan: the plan of the job.
      servers: the state of each server by endpoint, arrays by name: results of
        `exe.run(pserver, ...)`, or `state.servers` of a mesh job.
      trainer: the pytree of trainer 0's parameters (`job.params(state)`); needed if some are on no
        server (`plan.frozen`).

    Returns:
      New arrays on the default device, in the step's pytrees, without the backups of DC-ASGD.

    Raises:
      StateError: a server or an array is missing, was donated, or has another shape or dtype. Or
        copies of an array on several servers differ by more than rounding. Step counts of an
        asynchronous job that lost a trainer may differ so.
      UnknownEndpointError: the plan has no such server.
      TraceError: `trainer` differs in structure from the parameters.

    Example:
      >>> import jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda: (p := {"w": jnp.arange(3.0)}, tx.init(p))
      >>> plan = dtrans.pserver(dtrans.trace(step, *init(), jnp.ones((4, 3))), dtrans.trace(init),
      ...                       pservers="127.0.0.1:6174,127.0.0.1:6175",
      ...                       placement=dtrans.BlockPlacement(min_block_size=1))
      >>> servers = {"127.0.0.1:6174": {"params/w.block0": jnp.array([7.0, 8.0])},
      ...            "127.0.0.1:6175": {"params/w.block1": jnp.array([9.0])}}
      >>> dtrans.checkpoint.gather(plan, servers)[0]["w"].tolist()
      [7.0, 8.0, 9.0]
    """
    check_plan(plan)
    states = {ep: check_server_state(plan, ep, state) for ep, state in servers.items()}
    missing = [ep for ep in plan.servers if ep not in states and plan.overview.by_endpoint(ep)]
    if missing:
        raise StateError(
            f"the state of pserver {missing[0]} is missing; pass gather the state of every server"
        )
    if plan.frozen:
        if trainer is None:
            raise StateError(
                f"{plan.frozen[0]} is on no server; pass the parameters of trainer 0 to "
                "gather(plan, servers, trainer), job.params(state) on a mesh"
            )
        states[TRAINER] = frozen_values(plan, trainer)
    rows = group_by_origin([*plan.overview, *trainer_rows(plan)])
    read = lambda row: as_numpy(states[row.endpoint][row.slice_name])
    found = [
        (assemble_slice(x, rows.get(x.origin_name, ()), read), x.dtype)
        for x in step_rows(plan.main)
    ]
    return to_trees(plan.main, [as_jax(x, dtype) for x, dtype in found])


def scatter(plan: PServerPlan, endpoint: str, params: Any, opt_state: Any) -> dict[str, jax.Array]:
    """Return the state of one server from a single-device `(params, opt_state)`.

    This is the inverse of `gather`, and the argument of `exe.run(pserver, ...)`: new arrays on the
    default device. Backups of DC-ASGD are copies of the parameters, and its mean squares of
    gradients are 0.

    Args:
      plan: the plan of the job that continues, with any number of servers and blocks.
      endpoint: the server's endpoint.
      params, opt_state: the step's pytrees.

    Raises:
      UnknownEndpointError: the plan has no such server.
      TraceError: a pytree differs in structure from the step's argument.
      StateError: an array differs in shape or dtype from the step's argument.

    Example:
      >>> import jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda: (p := {"w": jnp.arange(3.0)}, tx.init(p))
      >>> plan = dtrans.pserver(dtrans.trace(step, *init(), jnp.ones((4, 3))), dtrans.trace(init),
      ...                       pservers="127.0.0.1:6174,127.0.0.1:6175",
      ...                       placement=dtrans.BlockPlacement(min_block_size=1))
      >>> dtrans.checkpoint.scatter(plan, "127.0.0.1:6175", *init())
      {'params/w.block1': Array([2.], dtype=float32)}
    """
    check_plan(plan)
    plan.servers[endpoint]  # raises UnknownEndpointError
    return server_state(plan, endpoint, arrays_of(plan.main, params, opt_state))


def server_state(
    plan: PServerPlan, endpoint: str, arrays: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Return the state of one server from the arrays of the step, by name."""
    found = {}
    for row, origin in initial_sources(plan, endpoint):
        if origin is None:
            found[row.slice_name] = jnp.zeros(row.slice_shape, row.dtype)
        else:
            found[row.slice_name] = copy_array(arrays[origin][row.index])
    return found


# -- rows and arrays -------------------------------------------------------------------------------


def step_rows(main: Program, who: str = "") -> list[VarDistributed]:
    """Return the arrays that a step updates, as rows of an overview."""
    return [full_slice(n, main.inputs[n], who) for spec in main.args[:2] for n in spec.names]


def trainer_rows(plan: PServerPlan) -> list[VarDistributed]:
    """Return the leaves that trainer 0 stores and no server does, as rows of an overview."""
    return [full_slice(n, plan.main.inputs[n], TRAINER) for n in plan.frozen]


def initial_sources(
    plan: PServerPlan, endpoint: str, saved: Collection[str] = ()
) -> list[tuple[VarDistributed, str | None]]:
    """Return the arrays of a server, each with the array it starts from; None for zeros.

    Args:
      plan: the plan.
      endpoint: the server's endpoint.
      saved: names of saved arrays, which may include arrays that are no part of the step.
    """
    arrays = plan.servers[endpoint].variables

    def source(name: str) -> str | None:
        array = arrays[name]
        if array.origin in saved:
            return array.origin
        return None if array.zeros else array.of

    return [(row, source(row.slice_name)) for row in plan.overview.by_endpoint(endpoint)]


def name_leaves(spec: TreeSpec, tree: Any, what: str) -> dict[str, Any]:
    """Return the arrays of a pytree, by name."""
    return dict(zip(spec.names, spec.flatten(tree, what), strict=True))


def arrays_of(main: Program, params: Any, opt_state: Any) -> dict[str, Any]:
    """Return the arrays of `(params, opt_state)`, by name.

    Raises:
      TraceError, StateError: they differ from the step's arguments.
    """
    arrays = name_leaves(main.args[0], params, "params")
    arrays |= name_leaves(main.args[1], opt_state, "opt_state")
    for name, x in arrays.items():
        check_type(x, main.inputs[name], name, f"the step of this plan, {main.name}, takes")
        check_frozen(main, name, x)
    return arrays


def to_trees(main: Program, arrays: Iterable[Any]) -> tuple[Any, Any]:
    """Return `(params, opt_state)` from the arrays of `step_rows`."""
    params, opt_state = unflatten_all(main.args[:2], arrays)
    return params, opt_state


# -- checks ----------------------------------------------------------------------------------------


def check_plan(plan: Any) -> None:
    """Raise ConfigError unless all of the optimizer's state is on servers of the plan.

    Trainers of GEO-SGD have it.
    """
    if not isinstance(plan, PServerPlan):
        raise ConfigError(
            f"checkpoints have no {type(plan).__name__}; pass a plan of dtrans.pserver (t.plan of "
            "a transpiler), or a job of another plan (plan.on_mesh())"
        )
    local = _on_no_server(plan)
    if local is not None:
        raise ConfigError(
            f"{local} is local to each trainer, and checkpoints have the state of servers alone; "
            "use another mode than Geo, or save the trainers' states yourself"
        )


def has_checkpoints(plan: PServerPlan) -> bool:
    """Return True if servers hold all of the optimizer's state."""
    return _on_no_server(plan) is None


def _on_no_server(plan: PServerPlan) -> str | None:
    """Return the name of an array of the optimizer's state on no server, if there is one."""
    there = {row.origin_name for row in plan.overview}
    return next((n for n in plan.main.args[1].names if n not in there), None)


def check_step(main: Any) -> None:
    """Raise ConfigError unless this is a traced step."""
    if not isinstance(main, Program) or len(main.args) < 2:
        raise ConfigError(
            f"load takes the traced step, dtrans.trace(step, ...) or plan.main; it is {main!r}"
        )


def check_server_state(
    plan: PServerPlan, endpoint: str, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state of a server as a dict.

    Raises:
      StateError: it is no state of this server.
      UnknownEndpointError: the plan has no such server.
    """
    wanted = plan.servers[endpoint].main.inputs
    if not isinstance(state, Mapping):
        raise StateError(
            f"the state of pserver {endpoint} must be a dict of arrays by name, it is "
            f"{type(state).__name__}"
        )
    for name in (*wanted, *state):
        if name not in state or name not in wanted:
            problem = "is missing in the state" if name in wanted else "is no part of the state"
            raise StateError(f"{name} {problem} of pserver {endpoint}; pass a state of this plan")
    for name, x in state.items():
        check_type(x, wanted[name], name, f"pserver {endpoint} has")
        if isinstance(x, jax.Array) and x.is_deleted():
            raise StateError(
                f"{name} of pserver {endpoint} was donated to a step; save the state that step "
                "returned"
            )
    return dict(state)


def frozen_values(plan: PServerPlan, params: Any) -> dict[str, Any]:
    """Return the parameters of trainer 0 that are on no server.

    Raises:
      StateError: one has another type than the step's.
    """
    values = name_leaves(plan.main.args[0], params, "params")
    for name in plan.frozen:
        check_type(values[name], plan.main.inputs[name], name, "a trainer has")
    return subset(values, plan.frozen)


def check_type(x: Any, wanted: Any, name: str, who: str) -> None:
    """Raise StateError unless a value has a type; `who` is such as "the step takes"."""
    found = type_of(x) if hasattr(x, "dtype") else repr(x)
    if found != type_of(wanted):
        raise StateError(f"{name} is {found}; {who} {type_of(wanted)}")
