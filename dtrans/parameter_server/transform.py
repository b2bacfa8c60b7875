"""Parameter-server mode: a step becomes a trainer program and one program per server.

    trainer   forward, backward; right after the equation that makes a gradient, `split_byref` (where the
              leaf has several blocks) and `send`; at the end `send_barrier`, a `recv` for each parameter,
              `fetch_barrier`, and `concat` for leaves of several blocks
    pserver   one `listen_and_serv`, whose optimize blocks sum the trainers' gradients, scale them by
              1/trainers, and do what the optimizer does, on the rows that live there

With `sync_mode=False` there are no barriers, and an optimize block takes one gradient, of whichever trainer sent it;
with `enable_dc_asgd` it corrects that for its delay (`dtrans.parameter_server.dc_asgd`).

The optimizer's state exists on the servers only. Initial values are the rows of the single-device init, and only these
are computed (`dtrans.slicing.partial_init`).
With a loss that is a mean over the batch, and trainers that see equal shares of it, the job computes what
one device computes on the whole batch.

Source: python/paddle/fluid/transpiler/distribute_transpiler.py (`transpile`, `get_trainer_program`,
`get_pserver_program`), order of operations included; the programs handed in are not changed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dtrans.endpoints import parse_endpoints
from dtrans.errors import ConfigAssertionError, ConfigError, GradientError
from dtrans.ir.program import DIST, Program
from dtrans.ops import ON_TRAINER_EXIT, CommunicatorConfig
from dtrans.parameter_server.averaged_leaves import averaged, averages_of
from dtrans.parameter_server.dc_asgd import Compensation, compensated
from dtrans.parameter_server.dispatch import PSDispatcher, RoundRobin, check_dispatcher
from dtrans.parameter_server.gradient_merging import merging
from dtrans.parameter_server.placement import place
from dtrans.parameter_server.plan import PServerPlan
from dtrans.parameter_server.server_program import ServerProgramWriter
from dtrans.parameter_server.trainer_program import TrainerCommConfig, trainer_program, trainer_startup_program
from dtrans.rows.analysis import analyse
from dtrans.slicing.server_update import ServerUpdateBuilder
from dtrans.step.cut import Cut, cut
from dtrans.step.forward_backward import refuse_nested
from dtrans.step.startup import check_programs, match_startup


def pserver(
    main: Program,
    startup: Program,
    *,
    pservers: str | Sequence[str] = ("127.0.0.1:6174",),
    trainers: int = 1,
    sync_mode: bool = True,
    on_trainer_exit: Literal["drop", "paddle", "error"] = "drop",
    slice_var_up: bool | Literal["require"] = True,
    split_method: type[PSDispatcher] = RoundRobin,
    min_block_size: int = 8192,
    seed: int = 0,
    enable_dc_asgd: bool = False,
    dc_asgd_lambda: float = 1.0,
    dc_asgd_decay: float | None = None,
    runtime_split_send_recv: bool = False,
    half_async: bool = False,
    completely_not_async: bool = False,
    communicator: CommunicatorConfig | None = None,
    merge: Mapping[str, str] | None = None,
) -> PServerPlan:
    """Plan parameter-server training of a traced step.

    Args:
      main: `dtrans.trace(step, params, opt_state, *batch)`.
      startup: `dtrans.trace(init, *args)` with `init(*args) -> (params, opt_state)`.
      pservers: the servers' endpoints, `host:port`, as a sequence or separated by commas.
      trainers: how many trainers share each global batch.
      sync_mode: every update uses the gradients of all trainers. Otherwise every gradient is an update of its own, as
        soon as it comes: no trainer waits for another, and a step of theirs is the sum of what each would do.
      on_trainer_exit: what becomes of updates after a trainer that closes before the others. "drop": each is of the
        gradients of those who take that step, over their number, as on one device that sees their rows only. "paddle":
        as Paddle 1.8 has it: the last gradient of who left counts once more, then as zero, and the sum goes on being
        divided by `trainers`. "error": the job ends with a `PeerError` that names it. One that fails, or closes in the
        middle of a step, ends a synchronous job in any case.
      slice_var_up: cut leaves into blocks of rows; otherwise every leaf is whole on one server. A leaf that the
        optimizer does not let be cut is whole, and the plan says why; "require" makes that an error.
      split_method: a subclass of `PSDispatcher`: `RoundRobin`, `HashName`, or one's own.
      min_block_size: the fewest elements worth a block of their own; any positive number.
      seed: of the order in which whole leaves are dispatched when `slice_var_up` is off.
      enable_dc_asgd: with sync_mode=False, compensate gradients for their delay; see `dtrans.parameter_server.dc_asgd`.
      dc_asgd_lambda: how strongly.
      dc_asgd_decay: of the mean square of gradients in the adaptive variant, e.g. 0.95; None for the other.
      runtime_split_send_recv: with sync_mode=False, trainers have a communicator: gradients are put into its queue, and
        a step goes on with the parameters that it has received last, so that it waits for nothing. Where sending is
        slower than the steps, gradients of several steps are merged.
      half_async: with sync_mode=False, steps wait for the communicator: until what they sent is sent, and what was made
        of it is received. Without one they do that anyhow.
      completely_not_async: with both, an update is made of the gradients of all trainers, as with sync_mode=True.
      communicator: how long queues are, and more; see `dtrans.CommunicatorConfig`.
      merge: what becomes of leaves that trainers make themselves, as batch statistics, by their names or what they lie
        under: "own" (each trainer has its own, which is so by default), or "mean": servers average them. With
        sync_mode=False the newest counts.

    Raises:
      ConfigError: an option that is out of range.
      GradientError: the gradients of the step cannot be told (see `dtrans.step.cut`), or a result is computed
        from them, which each of several trainers would do from its own.
      OptimizerError: an optimizer that must be told the loss, or with "require" one that mixes rows.
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
      ...                       pservers="127.0.0.1:6174,127.0.0.1:6175", trainers=2, min_block_size=1)
      >>> [(b.name, b.shape, b.endpoint) for b in plan.placement.table]
      [('params/w.block0', (3, 2), '127.0.0.1:6174'), ('params/w.block1', (3, 2), '127.0.0.1:6175')]
      >>> [op.type for op in plan.trainer.ops if op.role in ("rpc", "dist")]
      ['split_byref', 'send', 'send_barrier', 'recv', 'fetch_barrier', 'concat']
    """
    endpoints = parse_endpoints(pservers)
    check_options(main, startup, trainers, sync_mode, slice_var_up, split_method, min_block_size)
    how = compensation(sync_mode, enable_dc_asgd, dc_asgd_lambda, dc_asgd_decay)
    check_communicator(sync_mode, runtime_split_send_recv, half_async, completely_not_async, communicator)
    sync_mode = sync_mode or completely_not_async  # of the servers
    check_trainer_exit(on_trainer_exit, sync_mode)
    if how is not None and runtime_split_send_recv and not half_async and not completely_not_async:
        raise ConfigError(
            "enable_dc_asgd=True with runtime_split_send_recv=True is for half_async=True, which is False: a server "
            "knows what a trainer has received, not which of that a step has that does not wait"
        )
    if sync_mode and how is not None:
        raise ConfigAssertionError(
            "enable_dc_asgd=True is for gradients with a delay, which completely_not_async=True has not"
        )
    step = cut(main)
    averages = averages_of(step, merge)
    if averages and on_trainer_exit == "paddle":
        raise ConfigError(
            f"on_trainer_exit='paddle' with merge: {averages[0]} of a trainer that left would count as zero in the "
            "mean; say on_trainer_exit='drop'"
        )
    queue = queue_of(step, communicator) if runtime_split_send_recv and not sync_mode else None
    step = averaged(step, averages)
    gradients_per_update = trainers if sync_mode else 1
    refuse_nested(step, gradients_per_update)
    if step.from_gradients and gradients_per_update > 1:
        raise GradientError(
            f"{step.from_gradients[0]} is computed from gradients; with {trainers} trainers each would compute it "
            "from its own, not from their mean, which only the servers have. Leave it out of the step's results"
        )
    wiring = TrainerCommConfig(trainers, sync_mode, runtime_split_send_recv, half_async, queue, averages)
    analysis = analyse(step.optimize, step.optimized)
    types = {n: step.program.inputs[n] for n in step.optimized}
    placement = place(
        analysis,
        types,
        endpoints,
        slice_var_up=slice_var_up,
        split_method=split_method,
        min_block_size=min_block_size,
        seed=seed,
    )
    startup = match_startup(step, startup)
    slicer = ServerUpdateBuilder(analysis, placement, gradients_per_update)
    adapt = None
    if how is not None:
        adapt = functools.partial(compensated, trainers=trainers, how=how, leaves=step.params, averages=averages)
    servers = ServerProgramWriter(step, slicer, startup, trainers, sync_mode, on_trainer_exit, adapt)
    plan = PServerPlan(
        main=step.program,
        startup=startup,
        placement=placement,
        trainers=trainers,
        sync_mode=sync_mode,
        servers={ep: servers.programs(ep) for ep in endpoints},
        frozen=step.frozen,
        unsent=tuple(n for n in step.optimized if n not in step.gradients),
        unused_effects=step.unused_effects,
        shared_state=slicer.shared_state,
        runtime_split=runtime_split_send_recv,
        make_trainer=lambda k: trainer_program(step, placement, k, wiring),
        make_trainer_startup=lambda k: trainer_startup_program(step, placement, startup, k, wiring),
    )
    if not sync_mode:
        check_async(plan)
    return plan


def check_trainer_exit(on_trainer_exit: Any, sync_mode: bool) -> None:
    """Check the `on_trainer_exit` option."""
    if on_trainer_exit not in ON_TRAINER_EXIT:
        raise ConfigError(f"on_trainer_exit must be 'drop', 'paddle' or 'error', it is {on_trainer_exit!r}")
    if on_trainer_exit != "drop" and not sync_mode:
        raise ConfigError(
            f"on_trainer_exit={on_trainer_exit!r} is for sync_mode=True: "
            "asynchronous updates never combine gradients of several trainers"
        )


def compensation(sync_mode: bool, enabled: Any, strength: Any, decay: Any) -> Compensation | None:
    """How gradients are compensated for their delay, if they are. Refuses what cannot be, by name."""
    if not isinstance(enabled, bool):
        raise ConfigError(f"enable_dc_asgd must be True or False, it is {enabled!r}")
    if isinstance(strength, bool) or not isinstance(strength, (int, float)) or not 0 <= strength < math.inf:
        raise ConfigError(f"dc_asgd_lambda must be a number, 0 or more; it is {strength!r}")
    if decay is not None and (isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1):
        raise ConfigError(f"dc_asgd_decay must be a number from 0 to 1, or None; it is {decay!r}")
    if not enabled:
        for name, value, default in (("dc_asgd_lambda", strength, 1.0), ("dc_asgd_decay", decay, None)):
            if value != default:
                raise ConfigError(f"{name}={value!r} is for enable_dc_asgd=True, which is False")
        return None
    if sync_mode:
        raise ConfigAssertionError("enable_dc_asgd=True is for sync_mode=False: a synchronous gradient has no delay")
    return Compensation(float(strength), None if decay is None else float(decay))


def check_communicator(
    sync_mode: bool, runtime_split: Any, half_async: Any, completely_not_async: Any, communicator: Any
) -> None:
    """Refuse what contradicts itself, by the option's name."""
    for name, value in (
        ("runtime_split_send_recv", runtime_split),
        ("half_async", half_async),
        ("completely_not_async", completely_not_async),
    ):
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, it is {value!r}")
        if value and sync_mode:
            raise ConfigError(f"{name}=True is for sync_mode=False, which is True")
    if completely_not_async and not runtime_split:
        raise ConfigError(
            "completely_not_async=True is for runtime_split_send_recv=True, which is False; sync_mode=True is the same "
            "without a communicator"
        )
    if communicator is not None and not isinstance(communicator, CommunicatorConfig):
        raise ConfigError(f"communicator must be a CommunicatorConfig, it is {communicator!r}")
    if communicator is not None and not (runtime_split and not completely_not_async):
        raise ConfigError("communicator is for runtime_split_send_recv=True without completely_not_async=True")


def queue_of(step: Cut, communicator: CommunicatorConfig | None) -> CommunicatorConfig:
    """How gradients wait, with what this optimizer allows to be merged."""
    found = communicator or CommunicatorConfig()
    how = merging(step)
    if how == "none":
        return dataclasses.replace(found, max_merge_var_num=1, merge="mean")
    return dataclasses.replace(found, merge=how) if found.merge == "auto" else found


def check_async(plan: PServerPlan) -> None:
    """Refuse what an asynchronous job cannot do: its gradients come one by one."""
    for endpoint, programs in plan.servers.items():
        (serve,) = programs.main.jaxpr.jaxpr.eqns
        blocks = serve.params["optimize_blocks"]
        if any(x.level or x.role == DIST for x in blocks):
            raise ConfigError(
                "sync_mode=False: the optimizer reduces over rows of several blocks (a norm of all, or whether all are "
                "finite), which takes the gradients of a whole step; leave sync_mode=True, or clip by value"
            )
        if blocks and not serve.params["grad_to_block_id"]:
            held = ", ".join(serve.params["param_names"])
            raise ConfigError(
                f"sync_mode=False: pserver {endpoint} updates {held} without a gradient, and would not know when; "
                "leave sync_mode=True, or use fewer pservers"
            )


def check_options(
    main: Any, startup: Any, trainers: Any, sync_mode: Any, slice_var_up: Any, split_method: Any, min_block_size: Any
) -> None:
    """Refuse what cannot be planned, by the option's name."""
    check_programs(main, startup)
    if isinstance(trainers, bool) or not isinstance(trainers, int) or trainers < 1:
        raise ConfigError(f"trainers must be a positive number of trainers, it is {trainers!r}")
    if not isinstance(sync_mode, bool):
        raise ConfigError(f"sync_mode must be True or False, it is {sync_mode!r}")
    if slice_var_up is not True and slice_var_up is not False and slice_var_up != "require":
        raise ConfigError(f"slice_var_up must be True, False or 'require', it is {slice_var_up!r}")
    check_dispatcher(split_method)
    if isinstance(min_block_size, bool) or not isinstance(min_block_size, int) or min_block_size < 1:
        raise ConfigError(f"min_block_size must be a positive number of elements, it is {min_block_size!r}")
