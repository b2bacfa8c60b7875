"""Conversion between the state of servers and the pytrees of the single-device step.

Servers also store arrays that are not part of the step. In DC-ASGD (delay compensation), these are
backups of parameters, and mean squares of gradients. These additional arrays start from initial
values unless they were saved (`initial_sources`). The values of leaves that no server stores
(`plan.frozen`) come from trainer 0.

Functions check names, shapes and dtypes of a state. Their results share no memory with their
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
from dtrans.ir.pytree import TreeSpec, all_names, unflatten_all
from dtrans.ir.selection import subset
from dtrans.parameter_server.compression import encoded_copies
from dtrans.parameter_server.overview import VarDistributed
from dtrans.parameter_server.plan import PServerPlan
from dtrans.step.frozen import check_frozen


TRAINER = "trainer 0"


def gather(
    plan: PServerPlan, servers: Mapping[str, Mapping[str, Any]], trainer: Any = None
) -> tuple[Any, Any]:
    """Return the single-device `(params, opt_state)`, assembled from the states of servers.

    Args:
      plan: the plan of the job.
      servers: maps the endpoint of each server to its arrays (a dict by name). The arrays are the
        result of `exe.run(pserver, ...)`; for a job on a mesh, pass `state.servers`.
      trainer: the pytree of trainer 0's parameters (`job.params(state)`). It is needed if there are
        leaves that no server stores (`plan.frozen`).

    Returns:
      New arrays on the default device, in the step's pytrees. Backups of DC-ASGD are left out.

    Raises:
      StateError: a server or an array is missing, was donated, or has another shape or dtype. Also
        raised if copies of an array on several servers differ by more than rounding. (Step counts
        can differ if an asynchronous job lost a trainer.)
      UnknownEndpointError: the plan has no server with this endpoint.
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
            f"the argument servers has no state of pserver {missing[0]}; pass the state of every "
            "server: gather(plan, servers)"
        )
    if plan.frozen:
        if trainer is None:
            raise StateError(
                f"no server stores {plan.frozen[0]}, which is not trained; pass the parameters of "
                "trainer 0, job.params(state), as the third argument: gather(plan, servers, "
                "trainer)"
            )
        states[TRAINER] = frozen_values(plan, trainer)
    rows = group_by_origin([*plan.overview, *trainer_rows(plan)])
    read = lambda row: as_numpy(states[row.endpoint][row.slice_name])
    arrays = []
    for x in step_rows(plan.main):
        arrays.append(as_jax(assemble_slice(x, rows.get(x.origin_name, ()), read), x.dtype))
    return to_trees(plan.main, arrays)


def scatter(plan: PServerPlan, endpoint: str, params: Any, opt_state: Any) -> dict[str, jax.Array]:
    """Return the slices of a single-device `(params, opt_state)` that one server stores.

    This is the inverse of `gather`. Pass the result to `exe.run(pserver, ...)`, which continues
    from it. Its arrays are new, and on the default device. Backups of DC-ASGD are copies of the
    parameters, and the mean squares of gradients are 0.

    Args:
      plan: the plan of the job that continues, with any servers and blocks.
      endpoint: the server's endpoint.
      params, opt_state: the step's pytrees.

    Raises:
      UnknownEndpointError: the plan has no server with this endpoint.
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
    return found | encoded_copies(plan.servers[endpoint].variables, found)


# -- rows and arrays -------------------------------------------------------------------------------


def step_rows(main: Program, who: str = "") -> list[VarDistributed]:
    """Describe each array of params and opt_state as one slice: the full array, saved by `who`."""
    return [full_slice(n, main.inputs[n], who) for n in all_names(main.args[:2])]


def trainer_rows(plan: PServerPlan) -> list[VarDistributed]:
    """List the parameters that no server stores, each as one slice; trainer 0 saves them."""
    return [full_slice(n, plan.main.inputs[n], TRAINER) for n in plan.frozen]


def initial_sources(
    plan: PServerPlan, endpoint: str, saved: Collection[str] = ()
) -> list[tuple[VarDistributed, str | None]]:
    """Return the slices that a server restores, each with the name of the array that contains it.

    The result has pairs (slice, name). The name is None for a slice that starts from zeros. Some
    servers also store compressed copies of parameters, to send them to trainers. These copies are
    left out: `encoded_copies` computes them from the parameters.

    Args:
      plan: the plan of the job.
      endpoint: the server's endpoint.
      saved: names of saved arrays. They may include arrays that are not part of the step.
    """
    found: list[tuple[VarDistributed, str | None]] = []
    for row in plan.overview.by_endpoint(endpoint):
        variable = plan.servers[endpoint].variables[row.slice_name]
        if variable.wire is not None:
            continue
        source: str | None = variable.init_output
        if variable.origin in saved:
            source = variable.origin
        elif variable.zeros:
            source = None
        found.append((row, source))
    return found


def name_leaves(spec: TreeSpec, tree: Any, what: str) -> dict[str, Any]:
    """Return the leaves of a pytree by name; `what` is the tree's name in errors."""
    return dict(zip(spec.names, spec.flatten(tree, what), strict=True))


def arrays_of(main: Program, params: Any, opt_state: Any) -> dict[str, Any]:
    """Return the arrays of `(params, opt_state)`, by name.

    Raises:
      TraceError: the structure differs from the step's arguments.
      StateError: an array has another shape or dtype.
    """
    arrays = name_leaves(main.args[0], params, "params")
    arrays |= name_leaves(main.args[1], opt_state, "opt_state")
    for name, x in arrays.items():
        check_type(x, main.inputs[name], name, f"the step of this plan, {main.name},")
        check_frozen(main, name, x)
    return arrays


def to_trees(main: Program, arrays: Iterable[Any]) -> tuple[Any, Any]:
    """Return `(params, opt_state)`, given their arrays in the order of `step_rows`."""
    params, opt_state = unflatten_all(main.args[:2], arrays)
    return params, opt_state


# -- checks ----------------------------------------------------------------------------------------


def check_plan(plan: Any) -> None:
    """Raise ConfigError unless servers store all optimizer state, so that it can be saved.

    With `dtrans.Geo`, trainers store optimizer state.
    """
    if not isinstance(plan, PServerPlan):
        raise ConfigError(
            f"plan is a {type(plan).__name__}; expected a plan of dtrans.pserver (t.plan of a "
            "transpiler); for plans of other strategies, pass the job (plan.on_mesh())"
        )
    local = _on_no_server(plan)
    if local is not None:
        raise ConfigError(
            f"{local} is different on each trainer, but checkpoints contain only what servers "
            "store; use another mode than dtrans.Geo, or save the trainers' states yourself"
        )


def check_saved_by_servers(plan: PServerPlan) -> None:
    """Raise ConfigError unless servers alone can save a complete checkpoint.

    Servers alone are not enough if trainers store a part of the state. With `dtrans.Geo`, trainers
    store the optimizer state. No server stores the parameters in `plan.frozen`.
    """
    check_plan(plan)
    if plan.frozen:
        raise ConfigError(
            f"{plan.frozen[0]} is only on trainers, so servers cannot save it (job.save, "
            "on_failure='save'); call dtrans.checkpoint.save after the job has ended"
        )


def is_saved_by_servers(plan: PServerPlan) -> bool:
    """Return True if servers store all arrays of a checkpoint."""
    return _on_no_server(plan) is None and not plan.frozen


def _on_no_server(plan: PServerPlan) -> str | None:
    """Return the name of one array of optimizer state that no server stores; None if none."""
    there = {row.origin_name for row in plan.overview}
    return next((n for n in plan.main.args[1].names if n not in there), None)


def check_step(main: Any) -> None:
    """Raise ConfigError unless `main` is a traced step."""
    if not isinstance(main, Program) or len(main.args) < 2:
        raise ConfigError(
            f"main is {main!r}; expected the traced step, dtrans.trace(step, ...) or plan.main"
        )


def check_server_state(
    plan: PServerPlan, endpoint: str, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state of a server as a dict, after checks of its arrays.

    Raises:
      StateError: `state` is not a state of this server.
      UnknownEndpointError: the plan has no server with this endpoint.
    """
    wanted = plan.servers[endpoint].main.inputs
    if not isinstance(state, Mapping):
        raise StateError(
            f"the state of pserver {endpoint} is a {type(state).__name__}; expected a dict of "
            "arrays by name"
        )
    check_names(state, wanted, f"pserver {endpoint}")
    for name, x in state.items():
        check_type(x, wanted[name], name, f"pserver {endpoint}")
        if isinstance(x, jax.Array) and x.is_deleted():
            raise StateError(
                f"{name} of pserver {endpoint} was donated to job.step; save the state that it "
                "returned"
            )
    return dict(state)


def check_names(state: Collection[str], wanted: Collection[str], owner: str) -> None:
    """Raise StateError unless a state has exactly the wanted names; `owner` is for the error."""
    for name in wanted:
        if name not in state:
            raise StateError(f"the state of {owner} lacks {name}; pass a state of this plan")
    for name in state:
        if name not in wanted:
            raise StateError(
                f"the state of {owner} has {name}, which is not an array of this plan; pass a "
                "state of this plan"
            )


def frozen_values(plan: PServerPlan, params: Any) -> dict[str, Any]:
    """Return the parameters of trainer 0 that no server stores, by name.

    Raises:
      StateError: a parameter has another shape or dtype than in the step.
    """
    values = name_leaves(plan.main.args[0], params, "params")
    for name in plan.frozen:
        check_type(values[name], plan.main.inputs[name], name, "a trainer")
    return subset(values, plan.frozen)


def check_type(x: Any, wanted: Any, name: str, owner: str) -> None:
    """Raise StateError unless an array has the wanted shape and dtype.

    Args:
      x: the array.
      wanted: a type or an array.
      name: the array's name, for the error.
      owner: the role or program that expects the array, for the error.
    """
    found = type_of(x) if hasattr(x, "dtype") else repr(x)
    if found != type_of(wanted):
        raise StateError(f"{name} is {found}; {owner} expects {type_of(wanted)}")
