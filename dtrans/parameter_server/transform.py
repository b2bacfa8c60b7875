"""`dtrans.pserver`: rewrites a step into one program for each trainer and each server.

    trainer   forward and backward. After the equation that computes a gradient: `split_byref` (for
              leaves of several blocks) and `send`. At the end: `send_barrier`, a `recv` for each
              parameter, `fetch_barrier`, and `concat` for leaves of several blocks
    pserver   one `listen_and_serv` equation. It contains optimize blocks, which sum the trainers'
              gradients, scale them by 1/trainers, and update the server's rows of parameters

Asynchronous modes have no barriers, and an optimize block uses one trainer's gradient. It may
correct the gradient for its delay (`dtrans.parameter_server.dc_asgd`). GEO-SGD has a different plan
(`dtrans.parameter_server.geo_sgd`).

Only servers store the optimizer state. Each server computes only its own rows of the single-device
init (`dtrans.slicing.partial_init`).

The job computes the same results as one device on the global batch. If a step needs values of the
full batch before its end, such as batch statistics, trainers communicate in `exchange` equations
(`dtrans.parameter_server.exchange_rounds`).

Source: python/paddle/fluid/transpiler/distribute_transpiler.py (`transpile`, `get_trainer_program`,
`get_pserver_program`), with the same order of operations. The input programs are not changed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax

from dtrans._jax import JaxprEqn, equations, jaxprs_in_params, line_of, without_mesh
from dtrans.batch.exact_step import (
    ExactStep,
    batch_axes,
    full_type,
    shard_alone,
    shard_by_speed,
    shard_step,
)
from dtrans.endpoints import parse_endpoints
from dtrans.errors import ConfigError, GradientError, TraceError
from dtrans.ir.dataflow import bits_of, needed_equations, outputs_of, propagate
from dtrans.ir.program import DIST, Program, is_communication
from dtrans.ir.selection import subset
from dtrans.ops import CommunicatorConfig
from dtrans.parameter_server.averaged_leaves import choose_averages
from dtrans.parameter_server.compression import choose_compression, compress_work
from dtrans.parameter_server.dc_asgd import compensate, moving_suffixes
from dtrans.parameter_server.exchange_rounds import TRAINERS, reduce_results
from dtrans.parameter_server.geo_sgd import EACH_TRAINER, plan_geo_sgd
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
from dtrans.parameter_server.tables.choose import AUTO, choose_tables, exactly_summed_leaves
from dtrans.parameter_server.tables.frozen_tables import with_frozen_tables
from dtrans.parameter_server.tables.options import (
    Rows,
    check_row_filters,
    check_sparse,
    check_staleness,
)
from dtrans.parameter_server.tables.row_runs import with_row_runs
from dtrans.parameter_server.tables.touched_rows import mark_tables, resized
from dtrans.parameter_server.trainer_devices import find_devices
from dtrans.parameter_server.trainer_program import TrainerCommConfig, TrainerWriter
from dtrans.plan import with_recipe
from dtrans.rows.analysis import analyse
from dtrans.rows.layout import SHARED
from dtrans.slicing.blocks import Unit
from dtrans.slicing.server_spec import UpdateSpec, analyse_update
from dtrans.slicing.server_update import ServerWork
from dtrans.step.batch_numbers import BatchNumbers, numbers_of_size
from dtrans.step.batch_sharing import Batch
from dtrans.step.forward_backward import refuse_inseparable, refuse_nested
from dtrans.step.halves import DividedStep, asks_for, divide_step
from dtrans.step.handed_values import hand_over
from dtrans.step.local_clip import clip_marked_gradients
from dtrans.step.observers import GRADIENTS, UPDATE, callers_of, check_observers, refuse_observers
from dtrans.step.startup import match_startup, normalize_step


TRAINERS_HAVE = "which only the trainers have"
SYNC_SENDS = (
    "With mode=dtrans.Sync() an update may read arguments that all trainers share and values that "
    "forward computes from the batch (a count of tokens, the loss), and a loss may read optimizer "
    "state that is not cut into rows"
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
    mesh: Mapping[str, int] | None = None,
) -> PServerPlan:
    """Plan parameter-server training of a traced step.

    Args:
      main: `dtrans.trace(step, params, opt_state, *batch)`.
      startup: `dtrans.trace(init, *args)` with `init(*args) -> (params, opt_state)`.
      pservers: the servers' endpoints, `host:port`, as a sequence or separated by commas.
      trainers: the number of trainers. They split each global batch; with `dtrans.Geo` each trainer
        has its own batches.
      mode: the update mode: `dtrans.Sync`, `dtrans.Async`, `dtrans.HalfAsync` or `dtrans.Geo`.
      placement: rules that divide leaves into blocks, and assign blocks to servers.
      on_trainer_exit: the effect on synchronous updates if one trainer closes early.

        - "drop": each later update averages the gradients of the remaining trainers only.
        - "paddle": one more update uses the closed trainer's last gradient. Later updates count its
          gradient as zero, but still divide the sum by `trainers`. Paddle 1.8 does this in one
          outcome of a race. In the other outcome, all later updates use that last gradient
          (`dtrans.ops.listen_and_serv`).
        - "error": the job ends with a `PeerError` that names the trainer.

        A trainer that fails, or closes in the middle of a step, always ends a synchronous job. A
        trainer that closes early also ends the job if trainers exchange values in the middle of a
        step (see `batch`).
      batch: "exact", "local", or a `dtrans.Batch`.

        - "exact": the job computes the same results as one device on the full batch. If the step
          needs values of the full batch, such as batch statistics, trainers exchange them through
          the servers. Asynchronous trainers cannot exchange values, so such a step raises
          ConfigError.
        - "local": each trainer runs the step on its part of the batch, and keeps its own value of
          leaves without gradients, such as batch statistics. With
          `dtrans.Batch("local", merge={"params/stats": "mean"})`, servers average the leaves with
          this name or prefix. Asynchronous servers use the newest value instead of a mean.
      sparse: tables, which trainers request by rows instead of in full: a dict of `dtrans.Rows` by
        leaf name. A trainer requests the rows of its batch before forward, and sends their
        gradients. With `dtrans.Geo`, a trainer stores the rows, and sends their changes. "auto"
        chooses each leaf that a step reads by rows only, if the step looks up at most a fourth of
        the rows. None: no tables.
      mesh: the number of devices of each trainer along each axis, such as {"data": 2, "model": 2}.
        The devices divide the trainer's rows of the batch over "data", and the parameters of
        `dtrans.split` scopes over "model". Servers get one gradient for each leaf and trainer.
        None: a trainer has one device.

    Raises:
      ConfigError: an option is out of range, or a leaf in `sparse` cannot be a table. Also raised
        if the mode is asynchronous, and the step needs values of the full batch.
      BatchError: arrays of an exact step's batch differ in their number of rows.
      GradientError: the gradients of the step are ambiguous (see `dtrans.step.halves`), or a result
        of the step depends on the gradients of several trainers.
      OptimizerError: the optimizer needs the loss; or `slice_var_up` is "require", and the
        optimizer cannot update a leaf in blocks.
      TraceError: `startup` does not return the state that `main` reads.

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
      >>> [(b.name, b.shape, b.endpoint) for b in plan.placement.all_blocks]
      [('params/w.block0', (3, 2), '127.0.0.1:6174'), ('params/w.block1', (3, 2), '127.0.0.1:6175')]
      >>> [op.type for op in plan.trainer.ops if op.role in ("rpc", "dist")]
      ['split_byref', 'send', 'send_barrier', 'recv', 'fetch_barrier', 'concat']
    """
    # Check the options.
    main, startup = normalize_step(main, startup)
    endpoints = parse_endpoints(pservers)
    batch = check_options(trainers, mode, placement, on_trainer_exit, batch)
    check_staleness(sparse := check_sparse(sparse), mode)
    check_row_filters(sparse, mode)
    if batch.has_shares and sparse is not None:
        raise ConfigError(
            f"sparse={sparse!r} cannot be combined with batch=dtrans.Batch(speeds=...): tables are "
            "planned for equally many lookups of all trainers; leave out one of the two"
        )
    main = with_row_runs(with_frozen_tables(main, sparse, AUTO), sparse, AUTO)
    options = PServerOptions(
        mode, placement, on_trainer_exit, batch, trainers, len(endpoints), sparse
    )

    # Divide the step into forward and update, and split its batch.
    plain = divide_step(main)
    refuse_inseparable(plain, TRAINERS_HAVE, may_send=isinstance(mode, Sync), remedy=SYNC_SENDS)
    parts = sent_parts(plain, batch, trainers, mode)
    check_arguments(plain, parts, batch, trainers, on_trainer_exit)
    check_callbacks(plain, trainers, mode, has_tables=sparse is not None)
    devices = find_devices(plain, mesh, mode, batch, sparse)
    shared = split_batch(plain, batch, trainers, mode)
    if isinstance(mode, Geo):
        return plan_geo_sgd(plain, startup, endpoints, options)
    step = plain
    if not isinstance(mode, Sync) and mode.clip_local_norm is not None:
        refuse_clipped_tables(mode.clip_local_norm, sparse)
        step = divide_step(clip_marked_gradients(main, mode.clip_local_norm, mode.clip_local_by))
    if shared is not None and not shared.proven:
        step = divide_step(shared.step.program)
        on_trainer_exit = refuse_paddle_exit(on_trainer_exit, shared)

    # Choose the communication, and derive the update that servers run.
    comm = dataclasses.replace(trainer_comm(step, trainers, mode, batch), batch_arrays=parts)
    refuse_exchange_in_update(comm.hand_over(step))
    # If trainers run the user's step itself on their parts (`proven`), no number of its update
    # depends on the batch size.
    if comm.sync_mode and (shared is None or not shared.proven):
        comm = dataclasses.replace(
            comm, batch_size_numbers=batch_size_numbers(step, batch, comm, shared)
        )
    step = comm.server_update(step)
    check_step(step, comm, on_trainer_exit, is_exact=shared is not None)

    # Choose tables and place blocks. Row analysis finds the rows that a value of the update needs.
    analysis = analyse(step.optimize, step.optimized)
    startup = match_startup(step.program, startup)
    tables = choose_tables(step, analysis, startup, sparse, moving_suffixes(mode))
    types = subset(step.program.inputs, step.optimized)
    placed = place(analysis, types, endpoints, placement, tables.buckets)
    placed = mark_tables(placed, tables.of)
    # A trainer receives optimizer state from one server, so state that is cut into rows is refused.
    for n, output in step.state_read.items():
        if analysis.layout(analysis.inputs[n]) is not SHARED:
            raise asks_for(output, n).refused(TRAINERS_HAVE)

    # Write the programs.
    summed: tuple[str, ...] = ()
    if shared is not None and shared.reduce == "sum":
        summed = tuple(step.gradients)
    exact = exactly_summed_leaves(step, tables, trainers) if comm.sync_mode else ()
    analyse_for = functools.partial(
        analyse_update,
        analysis,
        trainers=comm.gradients_per_update,
        summed=summed,
        arguments=step.arguments,
        requested=tuple(step.state_read),
        exact=exact,
    )
    update = analyse_for(placed)
    # Trainers of an exact step compute equal results, so only trainer 0 calls host callbacks.
    calls_once = trainers == 1 or (shared is not None and isinstance(mode, Sync))
    caller = "trainer 0" if calls_once else EACH_TRAINER
    argument_servers = {n: update.readers_of(n) for n in step.arguments}
    state_servers = {n: update.holder_of(n) for n in step.state_read}
    compression = choose_compression(step, mode, placed, comm.averages, tables.names)
    comm = dataclasses.replace(
        comm,
        compression=compression,
        tables=tables.names,
        argument_servers=argument_servers,
        state_servers=state_servers,
        callbacks_on_first_trainer=calls_once,
    )
    servers = ServerProgramWriter(
        step,
        update,
        startup,
        trainers,
        comm.sync_mode,
        on_trainer_exit,
        adapted_work(step, mode, comm),
        tables.of,
        lambda sizes: analyse_for(resized(placed, sizes)),
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
        trainer_writer=TrainerWriter(step, placed, startup, comm, shared),
        update=served_update(step, update, comm),
        tables=tables,
        shared=shared,
        callback_notes=callers_of(plain.observers, caller, caller),
        compression=compression,
        devices=devices,
    )


def served_update(step: DividedStep, update: UpdateSpec, comm: TrainerCommConfig) -> ServedUpdate:
    """Collect properties of the servers' update for the printed plan.

    An example is the list of parameters that the update leaves unchanged.
    """
    sent_values = []
    fixed_size = ""
    if comm.trainers > 1:
        for n in step.handed:
            sent_values.append(source_line(step, n))
        if comm.batch_size_numbers.fixed:
            fixed_size = comm.batch_size_numbers.fixed[0]
    return ServedUpdate(
        frozen=step.frozen,
        unsent=tuple(n for n in step.optimized if n not in step.gradients),
        shared_state=update.shared_state,
        sized=step.optimize if step.numbers else None,
        sent_values=tuple(sent_values),
        fixed_size=fixed_size,
        has_one_size=comm.batch_size_numbers.has_one_size,
    )


def refuse_clipped_tables(norm: float, sparse: Any) -> None:
    """Raise ConfigError if trainers clip gradients, and `sparse` asks for tables."""
    if sparse is not None:
        raise ConfigError(
            f"clip_local_norm is {norm!r} and sparse is {sparse!r}, but a trainer has only single "
            "rows of a table's gradient; leave out one of the two options, or clip by value in the "
            "optimizer"
        )


def check_callbacks(step: DividedStep, trainers: int, mode: Mode, *, has_tables: bool) -> None:
    """Raise GradientError if a host callback of the step reads a value that only servers compute.

    For example, `jax.debug.print` of a new parameter cannot run on a trainer, since servers update
    parameters.
    """
    if trainers > 1:
        check_observers(step.program, step.observers)
    # Without tables, trainers of GEO-SGD run the full step, so they have all values.
    if isinstance(mode, Geo) and not has_tables:
        return
    remedy = (
        "take it out of the step, and print job.params(state) between steps; or use dtrans.nccl2"
    )
    # If an update uses the gradient of one trainer, callbacks may read it on that trainer.
    is_complete = not isinstance(mode, Geo) and (trainers == 1 or not isinstance(mode, Sync))
    refused = (UPDATE,) if is_complete else (GRADIENTS, UPDATE)
    refuse_observers(step.observers, refused, "only servers have", remedy)


def split_batch(step: DividedStep, batch: Batch, trainers: int, mode: Mode) -> ExactStep | None:
    """Return the split of the batch over trainers, for the same results as on one device.

    Return None if there is one trainer, or if each trainer runs the step independently
    (`batch="local"`).

    Raises:
      ConfigError: updates are asynchronous, and the step needs values of the full batch.
    """
    if trainers == 1 or not batch.exact:
        return None
    if not isinstance(mode, Sync):
        return shard_alone(step.with_reported(), batch, trainers, "asynchronous trainers")
    if batch.has_shares:
        return shard_by_speed(step.with_reported(), batch, trainers, TRAINERS, reduce_results)
    return shard_step(
        step.with_reported(),
        batch,
        trainers,
        TRAINERS,
        adapt=reduce_results,
        # A trainer can run the user's step itself, without `exchange` rounds, only if leaves on
        # trainers stay equal on all trainers.
        alone=lambda merges: all(merges[n] == "same" for n in step.frozen if n in merges),
    )


def sent_parts(
    step: DividedStep, batch: Batch, trainers: int, mode: Mode
) -> tuple[str, ...] | None:
    """Return the batch arrays from which trainers may compute values for the servers' update.

    An update may read a value such as the number of valid tokens. Trainers compute it and send it
    to the servers. The result is None if they cannot: with `batch="local"`, trainers have different
    values, and asynchronous trainers send no values that belong to one step.
    """
    if isinstance(mode, Sync) and (trainers == 1 or batch.exact):
        return tuple(batch_axes(step, batch))
    return None


def batch_size_numbers(
    step: DividedStep, batch: Batch, comm: TrainerCommConfig, shared: ExactStep | None
) -> BatchNumbers:
    """Return the numbers in the update that depend on the batch size, such as 1/n in a mean.

    Trainers send these numbers with each step, so that the batch size may change during the job. To
    find the numbers, the step is traced a second time with twice as many rows, or with half as many
    if that fails. The two updates are compared.

    Raises:
      GradientError: the update reads a value of the forward pass that has a row for each example.
    """
    axes = batch_axes(step, batch)
    twice = [full_type(t, axes.get(n), 2) for n, t in step.program.inputs.items()]
    for types in (twice, _half_types(step.program, axes)):
        try:
            if shared is not None and shared.for_trainer is not None:
                other = comm.hand_over(shared.for_trainer(2, 0).step)
            else:
                other = comm.hand_over(divide_step(step.program.specialize_flat(types)))
            break
        except TraceError:  # a buffer in the state may have fewer rows than the larger batch
            continue
    else:  # the user's step works with one batch size only
        return BatchNumbers(has_one_size=True)
    traced = comm.hand_over(step)
    for n, a in traced.handed.items():
        grows = n in other.handed and other.handed[n].aval.shape != a.aval.shape
        if comm.trainers > 1 and grows:
            raise GradientError(
                f"the update of {step.program.name} reads {a.aval.str_short()}, which has a row "
                f"for each example ({source_line(traced, n)}), but each trainer has only some of "
                "the rows; reduce the rows (a mean, a count) before the update reads them, or use "
                "dtrans.nccl2 or dtrans.sharding, which gather all rows"
            )
    return numbers_of_size(traced, other)


def _half_types(program: Program, axes: Mapping[str, int]) -> list[jax.ShapeDtypeStruct]:
    """Return the types of a program's inputs for half the number of rows, but at least one row."""
    types = []
    for n, t in program.inputs.items():
        shape = list(t.shape)
        if n in axes:
            shape[axes[n]] = max(1, shape[axes[n]] // 2)
        types.append(jax.ShapeDtypeStruct(tuple(shape), t.dtype))
    return types


def source_line(step: DividedStep, handed: str) -> str:
    """Return the source line that computes a value that trainers send to the update."""
    makers = needed_equations(step.program.eqns, [step.handed[handed]])
    return next(filter(None, map(line_of, reversed(makers))), "an unknown line")


def refuse_paddle_exit(on_trainer_exit: str, shared: ExactStep) -> Literal["error"]:
    """Return "error": the rule for early exits of trainers if each step needs all trainers.

    This is the case if trainers exchange values in the middle of a step, such as a mean over the
    full batch. The job then ends with an error when one trainer leaves earlier than the others.

    Args:
      on_trainer_exit: the user's option of `dtrans.pserver`.
      shared: the split of the batch over trainers.

    Raises:
      ConfigError: the user's option is "paddle", which would continue without the rows of the
        trainer that left.
    """
    if on_trainer_exit == "paddle" and shared.shares:
        raise ConfigError(
            "on_trainer_exit='paddle' cannot be combined with speeds of dtrans.Batch: the trainers "
            "have shares of one batch, and an update needs all of them; leave out one of the two"
        )
    if on_trainer_exit == "paddle":
        raise ConfigError(
            "on_trainer_exit='paddle' cannot be used if the step needs values of the full batch "
            f"({shared.reason}): after a trainer has left, they cannot be computed; leave out "
            "on_trainer_exit, or pass batch='local'"
        )
    return "error"


def check_arguments(
    step: DividedStep,
    parts: Sequence[str] | None,
    batch: Batch,
    trainers: int,
    on_trainer_exit: str,
) -> None:
    """Raise an error if the update reads an argument of the step that trainers cannot send.

    Args:
      step: the divided step.
      parts: the result of `sent_parts`.
      batch: the split of the batch.
      trainers: number of trainers.
      on_trainer_exit: the user's option of `dtrans.pserver`.

    Raises:
      ConfigError: `on_trainer_exit` is "paddle".
      GradientError: the update reads an array of the batch, but each trainer has only its part.
    """
    if not step.arguments or trainers == 1:
        return
    if on_trainer_exit == "paddle":
        raise ConfigError(
            f"on_trainer_exit='paddle' cannot be used if the update reads {step.arguments[0]}: "
            "the value of a trainer that has left would count as zero; pass on_trainer_exit='drop'"
        )
    remaining = step
    if parts is not None:
        # Values that trainers compute from the batch become inputs of the update.
        remaining = hand_over(step, parts)
    axes = batch_axes(step, batch)
    if any(n in axes for n in remaining.arguments):
        assert step.argument_need is not None
        raise step.argument_need.refused(TRAINERS_HAVE)


def refuse_exchange_in_update(step: DividedStep) -> None:
    """Raise GradientError if the optimizer's update would need communication between trainers.

    This is the case if the update computes a value for each example, such as random numbers.
    """
    eqns = step.optimize.eqns
    exchanges = [e for e in eqns if is_communication(e) or _has_exchange(e)]
    if not exchanges:
        return
    depends = propagate(eqns, dict.fromkeys(outputs_of(exchanges), 1), {})
    readers = [e for e in eqns if bits_of(depends, *e.invars)]
    line = next(filter(None, map(line_of, [*exchanges, *readers])), "an unknown line")
    raise GradientError(
        f"the update of {step.program.name} reads a value with a row for each example ({line}), "
        "and each trainer has only its own rows; use dtrans.nccl2 or dtrans.sharding, or pass "
        "batch='local', where each trainer computes the value from its own rows"
    )


def _has_exchange(eqn: JaxprEqn) -> bool:
    """Return True if an equation, such as a loop, communicates in its body."""
    inner = itertools.chain.from_iterable(map(equations, jaxprs_in_params(eqn.params)))
    return any(map(is_communication, inner))


def trainer_comm(
    step: DividedStep, trainers: int, mode: Sync | Async | HalfAsync, batch: Batch
) -> TrainerCommConfig:
    """Return the options of the communication between trainers and servers."""
    averages = choose_averages(step, batch.merge)
    if isinstance(mode, Sync):
        return TrainerCommConfig(
            trainers, sync_mode=True, runtime_split=mode.runtime_split, averages=averages
        )
    queue = None
    if mode.communicator is not None:
        queue = communicator_for(step, mode.communicator)
    # With a communicator, full gradients wait in its queue, and are cut when they are sent.
    return TrainerCommConfig(
        trainers,
        sync_mode=False,
        runtime_split=queue is not None,
        half_async=isinstance(mode, HalfAsync),
        communicator=queue,
        averages=averages,
    )


def communicator_for(step: DividedStep, options: CommunicatorConfig) -> CommunicatorConfig:
    """Return the communicator's options, with the right rule to merge gradients.

    A communicator (the background thread of an asynchronous trainer) may merge the gradients of
    several steps before it sends them. For some optimizers the merged gradient is a sum, for others
    a mean, and others allow no merging.
    """
    rule = merging(step)
    if rule == "none":
        return dataclasses.replace(options, max_merge_var_num=1, merge="mean")
    if options.merge == "auto":
        return dataclasses.replace(options, merge=rule)
    return options


def check_step(
    step: DividedStep, comm: TrainerCommConfig, on_trainer_exit: str, *, is_exact: bool
) -> None:
    """Raise an error for a step that cannot be divided between trainers and servers.

    Raises:
      ConfigError: `Batch.merge` is used with `on_trainer_exit="paddle"`.
      GradientError: a gradient, or a result of the step, depends on mean gradients, which only
        servers have.
    """
    if comm.averages and on_trainer_exit == "paddle":
        raise ConfigError(
            f"on_trainer_exit='paddle' cannot be used if merge averages {comm.averages[0]}: the "
            "average would count a trainer that has left as zero; pass on_trainer_exit='drop'"
        )
    # with an exact batch, each trainer computes its part of the inner derivative of one device
    if not is_exact:
        refuse_nested(step, comm.gradients_per_update)
    if step.from_gradients and comm.gradients_per_update > 1:
        raise GradientError(
            f"{step.from_gradients[0]} is computed from gradients, but each of {comm.trainers} "
            "trainers has only its own gradients, and only servers have the mean; leave it out of "
            "the step's results"
        )


def adapted_work(
    step: DividedStep, mode: Sync | Async | HalfAsync, comm: TrainerCommConfig
) -> Callable[[ServerWork, Sequence[Unit]], ServerWork] | None:
    """Return a function that adds compression or delay compensation to the updates of a server.

    Return None if the job uses neither.
    """
    if comm.compression.is_used:
        return functools.partial(compress_work, compression=comm.compression, leaves=step.params)
    if isinstance(mode, Sync) or mode.delay is None:
        return None
    return functools.partial(
        compensate,
        trainers=comm.trainers,
        delay=mode.delay,
        leaves=step.params,
        averages=comm.averages,
    )


def check_async(servers: Mapping[str, ServerPrograms]) -> None:
    """Raise ConfigError if an update needs several gradients at once, or none.

    Asynchronous servers update a block when one gradient of the block arrives. An optimizer that
    needs several gradients (for a global norm), or none, cannot run in this way.
    """
    for endpoint, programs in servers.items():
        (serve,) = programs.main.eqns
        blocks = serve.params["optimize_blocks"]
        if any(x.level or x.role == DIST for x in blocks):
            raise ConfigError(
                "the optimizer reduces over several blocks (a global norm, or a test that all "
                "gradients are finite), so it needs all gradients of a step at once; use "
                "mode=dtrans.Sync(). A trainer can clip its gradients before it sends them: leave "
                "the clip out of the optimizer, and pass clip_local_norm=1.0 to dtrans.Async or "
                "dtrans.HalfAsync"
            )
        if blocks and not serve.params["grad_to_block_id"]:
            params = ", ".join(serve.params["param_names"])
            raise ConfigError(
                f"pserver {endpoint} would update {params} without any gradient, but in "
                "asynchronous modes a gradient triggers each update; use mode=dtrans.Sync(), or "
                "fewer pservers"
            )
