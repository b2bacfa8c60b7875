"""What servers hold and the pytrees that the step takes: each from the other, by the rows of the
overview.

What servers keep beside the arrays of the step (backups and mean squares of DC-ASGD) has no place
in the pytrees, and begins anew where it is not there (`starts`). What no server holds
(`plan.frozen`) is that of trainer 0.

A state that is given is checked against the plan by name, shape and dtype; what is returned shares
no memory with what was given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dtrans.checkpoint.assemble import as_jax, as_numpy, by_origin, copied, joined, type_of, whole
from dtrans.errors import ConfigError, StateError
from dtrans.ir.program import Program
from dtrans.ir.pytree import TreeSpec
from dtrans.parameter_server.overview import VarDistributed
from dtrans.parameter_server.plan import PServerPlan
from dtrans.step.frozen import check_frozen


TRAINER = "trainer 0"


def gather(
    plan: PServerPlan, servers: Mapping[str, Mapping[str, Any]], trainer: Any = None
) -> tuple[Any, Any]:
    """The single-device `(params, opt_state)`, put together from what servers hold.

    Args:
      plan: of the job.
      servers: endpoint to the state of that server, by name, as `exe.run(pserver, ...)` returns it;
        `state.servers` of a mesh job.
      trainer: the parameters of trainer 0, the whole pytree (`job.params(state)`); needed where no
        server holds some of them (`plan.frozen`).

    Returns:
      New arrays on the default device, in the pytrees that the plan's step takes. The backups of
      DC-ASGD have no place in them.

    Raises:
      StateError: a server or an array is not there, or has another shape or dtype; a state that was
        donated; copies of one array on several servers that are not the same (but for rounding). An
        asynchronous job that lost a trainer may end so, with counts of steps that differ.
      UnknownEndpointError: a server that the plan does not have.
      TraceError: `trainer` has another structure than the parameters.

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
    states = {endpoint: checked(plan, endpoint, state) for endpoint, state in servers.items()}
    gone = next(
        (ep for ep in plan.servers if ep not in states and plan.overview.by_endpoint(ep)), None
    )
    if gone is not None:
        raise StateError(
            f"the state of pserver {gone} is not there: gather takes that of every server"
        )
    if plan.frozen:
        if trainer is None:
            raise StateError(
                f"{plan.frozen[0]} is on no server: gather(plan, servers, trainer) takes the "
                "parameters of trainer 0, "
                "job.params(state) on a mesh"
            )
        states[TRAINER] = checked_trainer(plan, trainer)
    rows = by_origin([*plan.overview, *held_rows(plan)])
    read = lambda row: as_numpy(states[row.endpoint][row.slice_name])
    found = [(joined(x, rows.get(x.origin_name, ()), read), x.dtype) for x in step_rows(plan.main)]
    return as_trees(plan.main, [as_jax(x, dtype) for x, dtype in found])


def scatter(plan: PServerPlan, endpoint: str, params: Any, opt_state: Any) -> dict[str, jax.Array]:
    """What one server holds of a single-device `(params, opt_state)`: the inverse of `gather`.

    It is what `exe.run(pserver, ...)` takes; new arrays on the default device. Backups of DC-ASGD
    are copies of the parameters, as a trainer that starts receives them, and its mean squares of
    gradients are 0.

    Args:
      plan: of the job that is to go on; any number of servers, any blocks.
      endpoint: the server.
      params, opt_state: the pytrees that the plan's step takes.

    Raises:
      UnknownEndpointError: the plan has no such server.
      TraceError: another structure than the plan's step takes.
      StateError: an array of another shape or dtype than it takes.

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
    return held_of(plan, endpoint, arrays_of(plan.main, params, opt_state))


def held_of(plan: PServerPlan, endpoint: str, given: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return what one server holds of the arrays of the step, by name."""
    return {
        row.slice_name: jnp.zeros(row.slice_shape, row.dtype)
        if origin is None
        else copied(given[origin][row.index])
        for row, origin in starts(plan, endpoint)
    }


# -- what is there ---------------------------------------------------------------------------------


def step_rows(main: Program, who: str = "") -> list[VarDistributed]:
    """The arrays that a step takes and makes anew, as rows of an overview."""
    return [whole(n, main.inputs[n], who) for spec in main.args[:2] for n in spec.names]


def held_rows(plan: PServerPlan) -> list[VarDistributed]:
    """What trainer 0 holds and no server, as rows of an overview."""
    return [whole(n, plan.main.inputs[n], TRAINER) for n in plan.frozen]


def starts(
    plan: PServerPlan, endpoint: str, there: Collection[str] = ()
) -> list[tuple[VarDistributed, str | None]]:
    """What a server starts from: for each array that it holds, of which array these rows are; None
    for zeros.

    Args:
      there: what was saved, which may be more than the arrays of the step.
    """
    held = plan.servers[endpoint].held
    begins = lambda x: x.origin if x.origin in there else None if x.zeros else x.of
    return [(row, begins(held[row.slice_name])) for row in plan.overview.by_endpoint(endpoint)]


def named(spec: TreeSpec, tree: Any, what: str) -> dict[str, Any]:
    """The arrays of a pytree, by name."""
    return dict(zip(spec.names, spec.flatten(tree, what), strict=True))


def arrays_of(main: Program, params: Any, opt_state: Any) -> dict[str, Any]:
    """The arrays of `(params, opt_state)`, by name. Raises TraceError, StateError for others than
    the step takes."""
    given = named(main.args[0], params, "params") | named(main.args[1], opt_state, "opt_state")
    for name, x in given.items():
        check_type(x, main.inputs[name], name, f"the step of this plan, {main.name}, takes")
        check_frozen(main, name, x)
    return given


def as_trees(main: Program, arrays: Iterable[Any]) -> tuple[Any, Any]:
    """`(params, opt_state)` of the arrays of `step_rows`."""
    it = iter(arrays)
    params, opt_state = (spec.unflatten([next(it) for _ in spec.names]) for spec in main.args[:2])
    return params, opt_state


# -- what is refused -------------------------------------------------------------------------------


def check_plan(plan: Any) -> None:
    """Raises ConfigError for what is no plan of servers that hold all of the optimizer's state, as
    those of GEO-SGD do not."""
    if not isinstance(plan, PServerPlan):
        raise ConfigError(
            "checkpoints are of the plan that dtrans.pserver made (t.plan of a transpiler), or of "
            "a job that runs what "
            f"dtrans.nccl2 or dtrans.sharding planned (plan.on_mesh()), not {type(plan).__name__}"
        )
    gone = _on_no_server(plan)
    if gone is not None:
        raise ConfigError(
            f"{gone} is on no server, but each trainer's own: such jobs have no checkpoints yet"
        )


def has_checkpoints(plan: PServerPlan) -> bool:
    """Return True if servers hold all of the optimizer's state."""
    return _on_no_server(plan) is None


def _on_no_server(plan: PServerPlan) -> str | None:
    """Return an array of the optimizer's state that each trainer has for itself, if there is
    one."""
    there = {row.origin_name for row in plan.overview}
    return next((n for n in plan.main.args[1].names if n not in there), None)


def check_step(main: Any) -> None:
    """Raises ConfigError for what is no traced step."""
    if not isinstance(main, Program) or len(main.args) < 2:
        raise ConfigError(
            f"load takes the traced step, dtrans.trace(step, ...) or plan.main; it is {main!r}"
        )


def checked(plan: PServerPlan, endpoint: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a server. Raises StateError unless it is one, UnknownEndpointError where there
    is no such server."""
    wanted = plan.servers[endpoint].main.inputs
    if not isinstance(state, Mapping):
        raise StateError(
            f"the state of pserver {endpoint} is a dict of arrays by name, not "
            f"{type(state).__name__}"
        )
    for name in (*wanted, *state):
        if name not in state or name not in wanted:
            there = "is not in the state" if name in wanted else "is nothing that this plan puts"
            raise StateError(f"{name} {there} of pserver {endpoint}; is it one of another plan?")
    for name, x in state.items():
        check_type(x, wanted[name], name, f"pserver {endpoint} holds")
        if isinstance(x, jax.Array) and x.is_deleted():
            raise StateError(
                f"{name} of pserver {endpoint} was donated to a step; save the state that step "
                "returned"
            )
    return dict(state)


def checked_trainer(plan: PServerPlan, params: Any) -> dict[str, Any]:
    """Of the parameters of trainer 0, those that no server holds. Raises StateError for another
    type than it takes."""
    values = named(plan.main.args[0], params, "params")
    for name in plan.frozen:
        check_type(values[name], plan.main.inputs[name], name, "a trainer holds")
    return {name: values[name] for name in plan.frozen}


def check_type(x: Any, wanted: Any, name: str, who: str) -> None:
    if not hasattr(x, "dtype") or type_of(x) != type_of(wanted):
        raise StateError(
            f"{name} is {type_of(x) if hasattr(x, 'dtype') else repr(x)}; {who} {type_of(wanted)}"
        )
