"""Parameter-server mode: a step becomes a trainer program and one program per server.

    trainer   forward, backward; right after the equation that makes a gradient, `split_byref` (where the
              leaf has several blocks) and `send`; at the end `send_barrier`, a `recv` for each
              parameter, `fetch_barrier`, and `concat` for leaves of several blocks
    pserver   one `listen_and_serv`, whose optimize blocks sum the trainers' gradients, scale them by
              1/trainers, and do what the optimizer does, on the rows that live there

In asynchronous modes there are no barriers, and an optimize block takes one gradient, of whichever
trainer sent it; it may correct that for its delay (`dtrans.parameter_server.dc_asgd`). Geo is a
plan of its own (`dtrans.parameter_server.geo_sgd`).

The optimizer's state exists on the servers only. Initial values are the rows of the single-device
init, and only these are computed (`dtrans.slicing.partial_init`).
The job computes what one device computes on the whole batch: where the step is not made of its
parts, a trainer's program has what crosses the batch as `exchange` equations
(`dtrans.parameter_server.exchange_rounds`).

Source: python/paddle/fluid/transpiler/distribute_transpiler.py (`transpile`, `get_trainer_program`,
`get_pserver_program`), order of operations included; the programs handed in are not changed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from dtrans._jax import Var, equations, jaxprs_in_params, line_of, without_mesh
from dtrans.batch.exact_step import ExactStep, batch_axes, full_type, shard_alone, shard_step
from dtrans.endpoints import parse_endpoints
from dtrans.errors import ConfigError, GradientError, TraceError
from dtrans.ir.dataflow import backward_slice, propagate
from dtrans.ir.program import DIST, Program, is_communication
from dtrans.ops import CommunicatorConfig
from dtrans.parameter_server.averaged_leaves import averages_of
from dtrans.parameter_server.dc_asgd import compensated, kept_beside
from dtrans.parameter_server.exchange_rounds import TRAINERS, told_to_all
from dtrans.parameter_server.geo_sgd import plan_geo_sgd
from dtrans.parameter_server.gradient_merging import merging
from dtrans.parameter_server.options import (
    Async,
    BlockPlacement,
    Geo,
    HalfAsync,
    Mode,
    Sync,
    check_options,
)
from dtrans.parameter_server.placement import place
from dtrans.parameter_server.plan import (
    PServerOptions,
    PServerPlan,
    ServedUpdate,
    ServerPrograms,
)
from dtrans.parameter_server.server_program import ServerProgramWriter
from dtrans.parameter_server.tables.choose import choose_tables, exactly_summed_leaves
from dtrans.parameter_server.tables.options import Rows, check_sparse, check_staleness
from dtrans.parameter_server.tables.touched_rows import mark_tables, resized
from dtrans.parameter_server.trainer_program import TrainerCommConfig, TrainerSide
from dtrans.plan import with_recipe
from dtrans.rows.analysis import analyse
from dtrans.rows.layout import SHARED
from dtrans.slicing.blocks import Placement, Unit
from dtrans.slicing.server_spec import UpdateSpec, analyse_update
from dtrans.slicing.server_update import ServerWork
from dtrans.step.batch_numbers import BatchNumbers, numbers_of_size
from dtrans.step.batch_sharing import Batch
from dtrans.step.cut import Cut, asks_for, cut
from dtrans.step.forward_backward import refuse_across, refuse_nested
from dtrans.step.handed_values import hand_over
from dtrans.step.observers import GRADIENTS, UPDATE, callers_of, check_observers, refuse_observers
from dtrans.step.startup import match_startup, normalize_step


TRAINERS_HAVE = "which only the trainers have"
SYNC_TELLS = (
    "With mode=dtrans.Sync() an update may read arguments that all trainers share and values that "
    "forward makes of the "
    "batch (a count of tokens, the loss), and a loss state of the optimizer that no row enters"
)


@with_recipe
@without_mesh
def pserver(
    main: Program,
    startup: Program,
    *,
    pservers: str | Sequence[str] = ("127.0.0.1:6174",),
    trainers: int = 1,
    mode: Mode = Sync(),
    placement: BlockPlacement = BlockPlacement(),
    on_trainer_exit: Literal["drop", "paddle", "error"] = "drop",
    batch: Batch | str = Batch(),
    sparse: Mapping[str, Rows] | Literal["auto"] | None = None,
) -> PServerPlan:
    """Plan parameter-server training of a traced step.

    Args:
      main: `dtrans.trace(step, params, opt_state, *batch)`.
      startup: `dtrans.trace(init, *args)` with `init(*args) -> (params, opt_state)`.
      pservers: the servers' endpoints, `host:port`, as a sequence or separated by commas.
      trainers: the number of trainers that share each global batch; with `dtrans.Geo` each has its
        own batches.
      mode: when servers update, and what trainers wait for: `dtrans.Sync`, `Async`, `HalfAsync` or
        `Geo`.
      placement: a `dtrans.BlockPlacement`: the cut of leaves into blocks, and the server of each.
      on_trainer_exit: the effect on synchronous updates of a trainer that closes before the others.
        "drop": each later update averages the gradients of the trainers that take the step, as on
        one device that sees only their rows. "paddle": as Paddle 1.8 mostly does: the last gradient
        of the closed trainer counts once more, then as zero, and the sum is still divided by
        `trainers`. (It is one outcome of a race: in the other that gradient counts for ever; see
        `dtrans.ops.listen_and_serv`.) "error": the job ends with a `PeerError` that names the
        trainer. A trainer that fails, or closes in the middle of a step, always ends a synchronous
        job. So does one that closes early if the parts of the step do not add up.
      batch: "exact": the job gives one device's numbers. Where parts of the batch do not add up to
        them by themselves, trainers exchange what crosses it through the servers, in rounds that
        the plan counts; asynchronous trainers cannot, and such a step is refused by its line.
        "local": each trainer takes the step on its part alone. Or a `dtrans.Batch`. With "local",
        its `merge` says of leaves that trainers make themselves, as batch statistics, by their
        names, or what they lie under: "own" (each trainer has its own, which is so by default) or
        "mean": servers average them. In asynchronous modes the newest counts. With `dtrans.Geo` a
        batch is each trainer's own.
      sparse: leaves that trainers have by rows only, such as embedding tables: name to
        `dtrans.Rows`. "auto": leaves that a step reads by rows only, if it looks up at most a
        fourth of a leaf's rows. A trainer asks for the rows of its batch before forward, and sends
        their gradients; with `dtrans.Geo` it stores them, and sends their changes. None: trainers
        have all leaves.

    Raises:
      ConfigError: an option that is out of range; an exact step that these trainers cannot take; no
        table.
      BatchError: arrays of an exact step's batch that differ in their number of rows.
      GradientError: the gradients of the step cannot be told (see `dtrans.step.cut`), or a result
        is computed from them, which each of several trainers would do from its own.
      OptimizerError: an optimizer that must be told the loss, or with "require" one that mixes
        rows.
      TraceError: `startup` does not make what `main` takes.

    Source: `DistributeTranspiler.transpile` in Paddle's distribute_transpiler.py.

    Example:
      >>> import jax, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.1)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> def init(key):
      ...     params = {"w": jax.random.normal(key, (6, 2))}
      ...     return params, tx.init(params)
      >>> key, x = jax.random.key(0), jnp.ones((4, 6))
      >>> plan = dtrans.pserver(dtrans.trace(step, *init(key), x), dtrans.trace(init, key),
      ...                       pservers="127.0.0.1:6174,127.0.0.1:6175", trainers=2,
      ...                       placement=dtrans.BlockPlacement(min_block_size=1))
      >>> [(b.name, b.shape, b.endpoint) for b in plan.placement.table]
      [('params/w.block0', (3, 2), '127.0.0.1:6174'), ('params/w.block1', (3, 2), '127.0.0.1:6175')]
      >>> [op.type for op in plan.trainer.ops if op.role in ("rpc", "dist")]
      ['split_byref', 'send', 'send_barrier', 'recv', 'fetch_barrier', 'concat']
    """
    main, startup = normalize_step(main, startup)
    endpoints = parse_endpoints(pservers)
    batch = check_options(trainers, mode, placement, on_trainer_exit, batch)
    check_staleness(sparse := check_sparse(sparse), mode)
    options = PServerOptions(
        mode, placement, on_trainer_exit, batch, trainers, len(endpoints), sparse
    )
    plain = cut(main)
    refuse_across(plain, TRAINERS_HAVE, may_send=isinstance(mode, Sync), remedy=SYNC_TELLS)
    parts = sent_parts(plain, batch, trainers, mode)
    check_arguments(plain, parts, batch, trainers, on_trainer_exit)
    check_callbacks(plain, trainers, mode, in_geo=sparse is None)
    shared = shared_by(plain, batch, trainers, mode)
    if isinstance(mode, Geo):
        return plan_geo_sgd(plain, startup, endpoints, options)
    step = plain if shared is None or shared.proven else cut(shared.step.program)
    # how trainers talk to servers
    comm = dataclasses.replace(trainer_comm(step, trainers, mode, batch), parts=parts)
    refuse_exchange_in_update(comm.handed_over(step))
    summed: tuple[str, ...] = ()
    if shared is not None:
        summed = tuple(step.gradients) if shared.reduce == "sum" else ()
        on_trainer_exit = on_trainer_exit if shared.proven else refuse_exit(on_trainer_exit, shared)
    if comm.sync_mode and (shared is None or not shared.proven):
        comm = dataclasses.replace(comm, numbers=numbers_of_batch(step, batch, comm))
    step = comm.update_of(step)
    check_step(step, comm, on_trainer_exit)
    # the leaf whose rows each value of the update follows
    analysis = analyse(step.optimize, step.optimized)
    startup = match_startup(step, startup)
    tables = choose_tables(step, analysis, startup, sparse, kept_beside(mode))
    placed = place(
        analysis,
        {n: step.program.inputs[n] for n in step.optimized},
        endpoints,
        placement,
        tables.buckets,
    )
    placed = mark_tables(placed, tables.of)
    for n, output in step.state_read.items():
        if analysis.layout(analysis.inputs[n]) is not SHARED:
            raise asks_for(output, n).refused(TRAINERS_HAVE)

    exact = exactly_summed_leaves(step, tables, trainers) if comm.sync_mode else ()

    def updating(placed: Placement) -> UpdateSpec:
        asked = tuple(step.state_read)
        return analyse_update(
            analysis, placed, comm.gradients_per_update, summed, step.arguments, asked, exact
        )

    update = updating(placed)
    comm = dataclasses.replace(
        comm,
        tables=tables.names,
        told={n: update.readers_of(n) for n in step.arguments},
        asked={n: update.holder_of(n) for n in step.state_read},
        calls_once=trainers == 1 or (shared is not None and isinstance(mode, Sync)),
    )
    servers = ServerProgramWriter(
        step,
        update,
        startup,
        trainers,
        comm.sync_mode,
        on_trainer_exit,
        compensation(step, mode, comm),
        tables.of,
        lambda sizes: updating(resized(placed, sizes)),
    )
    programs = {ep: servers.programs(ep) for ep in endpoints}

    if not comm.sync_mode:
        check_async(programs)
    return PServerPlan(
        main=plain.program,
        startup=startup,
        options=options,
        placement=placed,
        servers=programs,
        trainer_side=TrainerSide(step, placed, startup, comm),
        update=ServedUpdate(
            frozen=step.frozen,
            unsent=tuple(n for n in step.optimized if n not in step.gradients),
            shared_state=update.shared_state,
            sized=step.optimize if step.numbers else None,
            sent_values=() if trainers == 1 else tuple(source_line(step, n) for n in step.handed),
            fixed_size=comm.numbers.fixed[0] if comm.numbers.fixed and trainers > 1 else "",
        ),
        tables=tables,
        shared=shared,
        callers=callers_of(plain.observers, *["trainer 0" if comm.calls_once else OWN_VALUES] * 2),
    )


OWN_VALUES = "each trainer, with values of its own"


def check_callbacks(step: Cut, trainers: int, mode: Mode, *, in_geo: bool) -> None:
    """Refuse host callbacks with values that no trainer has.

    Args:
      in_geo: whether trainers of GEO-SGD carry out the step as it is.
    """
    if trainers > 1:
        check_observers(step.program, step.observers)
    if isinstance(mode, Geo) and in_geo:
        return
    remedy = (
        "take it out of the step, and print job.params(state) between steps; or use dtrans.nccl2"
    )
    own = not isinstance(mode, Geo) and (trainers == 1 or not isinstance(mode, Sync))
    refuse_observers(
        step.observers, (UPDATE,) if own else (GRADIENTS, UPDATE), "only servers have", remedy
    )


def shared_by(step: Cut, batch: Batch, trainers: int, mode: Mode) -> ExactStep | None:
    """Split the batch over trainers; return None if each takes the step on its part alone.

    Raises:
      ConfigError: updates are asynchronous, and the parts of the step do not add up.
    """
    if trainers == 1 or not batch.exact:
        return None
    if not isinstance(mode, Sync):
        return shard_alone(step.with_reported(), batch, trainers, "asynchronous trainers")
    return shard_step(
        step.with_reported(),
        batch,
        trainers,
        TRAINERS,
        adapt=told_to_all,
        # what trainers keep of parts that differ has to be told, and nobody would
        alone=lambda merges: all(merges[n] == "same" for n in step.frozen if n in merges),
    )


def sent_parts(step: Cut, batch: Batch, trainers: int, mode: Mode) -> tuple[str, ...] | None:
    """Return the batch arrays whose values trainers send for the update; None where they send
    none."""
    exact = trainers == 1 or batch.exact
    return tuple(batch_axes(step, batch)) if exact and isinstance(mode, Sync) else None


def numbers_of_batch(step: Cut, batch: Batch, comm: TrainerCommConfig) -> BatchNumbers:
    """Find the numbers of the size of the batch that the update has: those that a batch of twice
    the rows changes.

    Raises:
      GradientError: the update reads values of forward that have the rows of the batch.
    """
    axes = batch_axes(step, batch)
    twice = [full_type(t, axes.get(n), 2) for n, t in step.program.inputs.items()]
    try:
        other = comm.handed_over(cut(step.program.specialize_flat(twice)))
    except TraceError:  # a step for one size of the batch alone is given no other
        return BatchNumbers()
    given = comm.handed_over(step)
    for n, a in given.handed.items():
        grows = n in other.handed and other.handed[n].aval.shape != a.aval.shape
        if comm.trainers > 1 and grows:
            raise GradientError(
                f"the update of {step.program.name} reads {a.aval.str_short()} with the rows of "
                "the batch "
                f"({source_line(given, n)}), and each trainer makes some of the rows; reduce it "
                "before the update "
                "reads it (a mean, a count), or take dtrans.nccl2 or dtrans.sharding, whose "
                "trainers have all rows"
            )
    return numbers_of_size(given, other)


def source_line(step: Cut, handed: str) -> str:
    """Return the line of the user that makes a value of forward."""
    eqns = step.program.eqns
    makers = [eqns[i] for i in backward_slice(eqns, [step.handed[handed]])[0]]
    return next(filter(None, map(line_of, reversed(makers))), "an unknown line")


def refuse_exit(on_trainer_exit: str, shared: ExactStep) -> Literal["error"]:
    """Refuse "paddle" for a step on the whole batch; return "error", which ends the job."""
    if on_trainer_exit == "paddle":
        raise ConfigError(
            f"on_trainer_exit='paddle': the step has values of the whole batch ({shared.reason}), "
            "which nobody has "
            "without the trainer that left; leave it out, or say batch='local'"
        )
    return "error"


def check_arguments(
    step: Cut, parts: Sequence[str] | None, batch: Batch, trainers: int, on_trainer_exit: str
) -> None:
    """Refuse updates that read arguments whose parts differ between trainers.

    Args:
      parts: the batch arrays whose values trainers send.
    """
    if not step.arguments or trainers == 1:
        return
    if on_trainer_exit == "paddle":
        raise ConfigError(
            f"on_trainer_exit='paddle': {step.arguments[0]}, which the update reads, would count "
            "as zero of a trainer "
            "that left; say on_trainer_exit='drop'"
        )
    left = step if parts is None else hand_over(step, parts)
    cut_ = batch_axes(step, batch)
    if any(n in cut_ for n in left.arguments):
        assert step.argument_need is not None
        raise step.argument_need.refused(TRAINERS_HAVE)


def refuse_exchange_in_update(step: Cut) -> None:
    """Refuse an update that reads what trainers make in parts, as random numbers with the rows of
    the batch."""
    eqns = step.optimize.eqns
    parts = [
        e for e in eqns if is_communication(e) or any(map(_exchanges, jaxprs_in_params(e.params)))
    ]
    if not parts:
        return
    behind = propagate(eqns, {v: 1 for e in parts for v in e.outvars}, {})
    readers = [e for e in eqns if any(isinstance(a, Var) and behind.get(a) for a in e.invars)]
    where = next(filter(None, map(line_of, [*parts, *readers])), "an unknown line")
    raise GradientError(
        f"the update of {step.program.name} reads values with the rows of the batch ({where}), of "
        "which each trainer "
        "makes its own rows; dtrans.nccl2 and dtrans.sharding take such a step, or say "
        "batch='local', which makes "
        "them of each part alone"
    )


def _exchanges(body: Any) -> bool:
    """Return True if something in a jaxpr communicates."""
    return any(map(is_communication, equations(body)))


def trainer_comm(
    step: Cut, trainers: int, mode: Sync | Async | HalfAsync, batch: Batch
) -> TrainerCommConfig:
    """Return the configuration of the communication between trainers and servers."""
    averages = averages_of(step, batch.merge)
    if isinstance(mode, Sync):
        return TrainerCommConfig(
            trainers, sync_mode=True, runtime_split=mode.runtime_split, averages=averages
        )
    queue = None if mode.communicator is None else queue_of(step, mode.communicator)
    return TrainerCommConfig(
        trainers,
        sync_mode=False,
        runtime_split=queue
        is not None,  # whole gradients wait in the queue, and are cut when they are sent
        half_async=isinstance(mode, HalfAsync),
        communicator=queue,
        averages=averages,
    )


def queue_of(step: Cut, found: CommunicatorConfig) -> CommunicatorConfig:
    """Return the communicator's options, with the merge that this optimizer allows."""
    how = merging(step)
    if how == "none":
        return dataclasses.replace(found, max_merge_var_num=1, merge="mean")
    return dataclasses.replace(found, merge=how) if found.merge == "auto" else found


def check_step(step: Cut, comm: TrainerCommConfig, on_trainer_exit: str) -> None:
    """Refuse steps that trainers and servers cannot share."""
    if comm.averages and on_trainer_exit == "paddle":
        raise ConfigError(
            f"on_trainer_exit='paddle' with merge: {comm.averages[0]} of a trainer that left would "
            "count as zero in "
            "the mean; say on_trainer_exit='drop'"
        )
    refuse_nested(step, comm.gradients_per_update)
    if step.from_gradients and comm.gradients_per_update > 1:
        raise GradientError(
            f"{step.from_gradients[0]} is computed from gradients; with {comm.trainers} trainers "
            "each would compute it "
            "from its own, not from their mean, which only the servers have. Leave it out of the "
            "step's results"
        )


def compensation(
    step: Cut, mode: Sync | Async | HalfAsync, comm: TrainerCommConfig
) -> Callable[[ServerWork, Sequence[Unit]], ServerWork] | None:
    """Return the delay compensation of servers, or None if there is none."""
    if isinstance(mode, Sync) or mode.delay is None:
        return None
    return functools.partial(
        compensated,
        trainers=comm.trainers,
        how=mode.delay,
        leaves=step.params,
        averages=comm.averages,
    )


def check_async(servers: Mapping[str, ServerPrograms]) -> None:
    """Refuse what an asynchronous job cannot do: its gradients come one by one."""
    for endpoint, programs in servers.items():
        (serve,) = programs.main.eqns
        blocks = serve.params["optimize_blocks"]
        if any(x.level or x.role == DIST for x in blocks):
            raise ConfigError(
                "the optimizer reduces over rows of several blocks (a norm of all, or whether all "
                "are finite), which "
                "takes the gradients of a whole step: it is for synchronous updates; or clip by "
                "value"
            )
        if blocks and not serve.params["grad_to_block_id"]:
            held = ", ".join(serve.params["param_names"])
            raise ConfigError(
                f"pserver {endpoint} updates {held} without a gradient, and would not know when in "
                "asynchronous modes; "
                "update synchronously, or use fewer pservers"
            )
