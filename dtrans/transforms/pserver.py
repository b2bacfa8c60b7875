"""Parameter-server mode: a step becomes a trainer program and one program per server.

    trainer   forward, backward; right after the equation that makes a gradient, `split_byref` (where the
              leaf has several blocks) and `send`; at the end `send_barrier`, a `recv` for each parameter,
              `fetch_barrier`, and `concat` for leaves of several blocks
    pserver   one `listen_and_serv`, whose optimize blocks sum the trainers' gradients, scale them by
              1/trainers, and do what the optimizer does, on the rows that live there

With `sync_mode=False` there are no barriers, and an optimize block takes one gradient, of whichever trainer sent it;
with `enable_dc_asgd` it corrects that for its delay (`dtrans.transforms.dc_asgd`).

The optimizer's state exists on the servers only. Initial values are the rows of the single-device init, and only these
are computed (`dtrans.parts`).
With a loss that is a mean over the batch, and trainers that see equal shares of it, the job computes what
one device computes on the whole batch.

Source: python/paddle/fluid/transpiler/distribute_transpiler.py (`transpile`, `get_trainer_program`,
`get_pserver_program`), order of operations included; the programs handed in are not changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dtrans._jax import Var
from dtrans.addresses import parse_endpoints
from dtrans.blocks import PSDispatcher, RoundRobin, check_dispatcher
from dtrans.cut import GRAD, Cut, cut
from dtrans.errors import ConfigAssertionError, ConfigError, GradientError
from dtrans.ops import (
    concat_p,
    fetch_barrier_p,
    listen_and_serv_p,
    recv_p,
    send_barrier_p,
    send_p,
    split_byref_p,
)
from dtrans.parts import Part, write_parts
from dtrans.placement import Placement, place
from dtrans.plan import PServerPlan, ServerPrograms
from dtrans.program import DIST, FORWARD, LR_SCHED, RPC, Program
from dtrans.rewrite import Builder, needed
from dtrans.rows import analyse
from dtrans.shards import Held, Slicer, Work
from dtrans.transforms.dc_asgd import Compensation, compensated
from dtrans.transforms.halves import refuse_nested, write_trainer_half
from dtrans.transforms.startup import check_programs, match_startup
from dtrans.trees import TreeSpec, without


def pserver(
    main: Program,
    startup: Program,
    *,
    pservers: str | Sequence[str] = ("127.0.0.1:6174",),
    trainers: int = 1,
    sync_mode: bool = True,
    slice_var_up: bool | Literal["require"] = True,
    split_method: type[PSDispatcher] = RoundRobin,
    min_block_size: int = 8192,
    seed: int = 0,
    enable_dc_asgd: bool = False,
    dc_asgd_lambda: float = 1.0,
    dc_asgd_decay: float | None = None,
) -> PServerPlan:
    """Plan parameter-server training of a traced step.

    Args:
      main: `dtrans.trace(step, params, opt_state, *batch)`.
      startup: `dtrans.trace(init, *args)` with `init(*args) -> (params, opt_state)`.
      pservers: the servers' endpoints, `host:port`, as a sequence or separated by commas.
      trainers: how many trainers share each global batch.
      sync_mode: every update uses the gradients of all trainers. Otherwise every gradient is an update of its own, as
        soon as it comes: no trainer waits for another, and a step of theirs is the sum of what each would do.
      slice_var_up: cut leaves into blocks of rows; otherwise every leaf is whole on one server. A leaf that the
        optimizer does not let be cut is whole, and the plan says why; "require" makes that an error.
      split_method: a subclass of `PSDispatcher`: `RoundRobin`, `HashName`, or one's own.
      min_block_size: the fewest elements worth a block of their own; any positive number.
      seed: of the order in which whole leaves are dispatched when `slice_var_up` is off.
      enable_dc_asgd: with sync_mode=False, compensate gradients for their delay; see `dtrans.transforms.dc_asgd`.
      dc_asgd_lambda: how strongly.
      dc_asgd_decay: of the mean square of gradients in the adaptive variant, e.g. 0.95; None for the other.

    Raises:
      ConfigError: an option that is out of range.
      GradientError: the gradients of the step cannot be told (see `dtrans.cut`), or a result is computed
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
    step = cut(main)
    for leaf in step.params:
        if GRAD in leaf:
            raise ConfigError(f"{leaf}: names of leaves must not contain {GRAD!r}, which is for gradients; rename it")
    merged = trainers if sync_mode else 1  # how many gradients an update is made of
    refuse_nested(step, merged)
    if step.from_gradients and merged > 1:
        raise GradientError(
            f"{step.from_gradients[0]} is computed from gradients; with {trainers} trainers each would compute it "
            "from its own, not from their mean, which only the servers have. Leave it out of the step's results"
        )
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
    slicer = Slicer(analysis, placement, merged)
    servers = _Servers(step, slicer, startup, trainers, sync_mode, how)
    plan = PServerPlan(
        main=step.program,
        startup=startup,
        placement=placement,
        trainers=trainers,
        sync_mode=sync_mode,
        servers={ep: servers.programs(ep) for ep in endpoints},
        held=step.held,
        unsent=tuple(n for n in step.optimized if n not in step.gradients),
        dropped=step.dropped,
        shared_state=slicer.shared_state,
        make_trainer=lambda k: trainer_program(step, placement, k, trainers, sync_mode),
        make_trainer_startup=lambda k: trainer_startup_program(step, placement, startup, k, trainers, sync_mode),
    )
    if not sync_mode:
        check_async(plan)
    return plan


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


# -- the trainer -----------------------------------------------------------------------------------


def trainer_program(step: Cut, placement: Placement, trainer_id: int, trainers: int, sync_mode: bool) -> Program:
    """The program of one trainer: (params, *batch) -> (params, loss[, aux])."""
    source = step.program
    inner = source.jaxpr.jaxpr
    vars_of = dict(zip(source.in_names, inner.invars, strict=True))
    outs_of = dict(zip(source.out_names, inner.outvars, strict=True))
    b = Builder(source.jaxpr)
    b.invars += [vars_of[n] for n in (*step.params, *step.batch)]
    wire = _TrainerWire(b, placement, trainer_id, trainers, sync_mode)
    write_trainer_half(b, step, step.results, wire.send)
    new = wire.update(step.optimized)
    outs = {**outs_of, **new}

    out = without(source.out, source.args[1])
    param_args = (source.args[0], *source.args[2:])

    def respecialise(types: Sequence[jax.ShapeDtypeStruct]) -> Program:
        count = len(step.params)
        state = [jax.ShapeDtypeStruct(source.inputs[n].shape, source.inputs[n].dtype) for n in step.opt_state]
        again = cut(source.at_flat([*types[:count], *state, *types[count:]]))
        return trainer_program(again, placement, trainer_id, trainers, sync_mode)

    return Program(
        f"trainer {trainer_id}",
        b.build([outs[n] for n in out.names]),
        param_args,
        out,
        tuple(b.roles),
        b.labels,
        respecialise,
    )


def trainer_startup_program(
    step: Cut, placement: Placement, startup: Program, trainer_id: int, trainers: int, sync_mode: bool
) -> Program:
    """What a trainer starts from: parameters from the servers, and what only trainers hold from the init."""
    inner = startup.jaxpr.jaxpr
    outs: dict[str, Any] = dict(zip(startup.out_names, inner.outvars, strict=True))
    b = Builder(startup.jaxpr)
    b.invars += inner.invars
    b.role = FORWARD
    kept, _ = needed(inner.eqns, [outs[n] for n in step.held])
    for i in kept:
        b.keep(inner.eqns[i])
    wire = _TrainerWire(b, placement, trainer_id, trainers, sync_mode)
    outs |= wire.fetch(step.optimized, ())
    spec = step.program.args[0]
    return Program(
        f"trainer {trainer_id} startup",
        b.build([outs[n] for n in step.params]),
        startup.args,
        spec,
        tuple(b.roles),
        b.labels,
    )


class _TrainerWire:
    """Writes the communication of one trainer into a program."""

    def __init__(self, b: Builder, placement: Placement, trainer_id: int, trainers: int, sync_mode: bool) -> None:
        self.b = b
        self.placement = placement
        self.me = {"trainer_id": trainer_id}
        self.common = {"trainer_id": trainer_id, "trainers": trainers, "sync_mode": sync_mode}
        self.tokens: list[Var] = []

    def send(self, leaf: str, grad: Any) -> None:
        """`split_byref` where the leaf has several blocks, and `send`."""
        blocks = self.placement.blocks[leaf]
        merged = self.common["trainers"] if self.common["sync_mode"] else 1
        names = tuple(x.gradient(self.common["trainer_id"], merged) for x in blocks)
        if isinstance(grad, Var):
            self.b.labels.setdefault(grad, leaf + GRAD)
        parts: list[Any] = [grad]
        if len(blocks) > 1:
            self.b.role = DIST
            parts = self.b.bind(split_byref_p, grad, sections=tuple(x.rows for x in blocks))
            self.b.labels.update(zip(parts, names, strict=True))
        self.b.role = RPC
        self.tokens += self.b.bind(send_p, *parts, epmap=tuple(x.endpoint for x in blocks), names=names, **self.common)

    def update(self, leaves: Sequence[str]) -> dict[str, Var]:
        """The barrier after the last gradient, then the new parameters; without one, the newest."""
        if not self.common["sync_mode"]:
            return self.fetch(leaves, self.tokens, barrier=False)
        self.b.role = RPC
        barrier = self.b.bind(send_barrier_p, *self.tokens, endpoints=self.placement.endpoints, **self.me)
        return self.fetch(leaves, barrier)

    def fetch(self, leaves: Sequence[str], after: Sequence[Var], *, barrier: bool = True) -> dict[str, Var]:
        """A `recv` for each parameter, `fetch_barrier` if it is wanted, and `concat` for leaves of several blocks."""
        b = self.b
        b.role = RPC
        arrived: list[Var] = []
        table = [self.placement.blocks[leaf] for leaf in leaves]
        for blocks in table:
            got = b.bind(
                recv_p,
                *after,
                epmap=tuple(x.endpoint for x in blocks),
                names=tuple(x.name for x in blocks),
                types=tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in blocks),
                **self.common,
            )
            b.labels.update(zip(got, (x.name for x in blocks), strict=True))
            arrived += got
        if barrier:
            arrived = b.bind(fetch_barrier_p, *arrived, endpoints=self.placement.endpoints, **self.me)
        done = iter(arrived)
        b.role = DIST
        new: dict[str, Var] = {}
        for leaf, blocks in zip(leaves, table, strict=True):
            parts = [next(done) for _ in blocks]
            if len(parts) > 1:
                b.labels.update(zip(parts, (x.name for x in blocks), strict=True))
                parts = b.bind(concat_p, *parts, axis=0)
            (new[leaf],) = parts
        return new


# -- the servers -----------------------------------------------------------------------------------


class _Servers:
    """Makes the programs of the servers."""

    def __init__(
        self,
        step: Cut,
        slicer: Slicer,
        startup: Program,
        trainers: int,
        sync_mode: bool,
        how: Compensation | None,
    ) -> None:
        self.how = how
        self.step = step
        self.slicer = slicer
        self.startup = startup
        self.trainers = trainers
        self.sync_mode = sync_mode
        self.types = step.program.inputs

    def programs(self, endpoint: str) -> ServerPrograms:
        """The main and startup program of one server."""
        work = self.slicer.work(endpoint)
        if self.how is not None:
            work = compensated(work, self.slicer.placement.units[endpoint], self.trainers, self.how)
        return ServerPrograms(self.main(endpoint, work), self.init(endpoint, work.held))

    def main(self, endpoint: str, work: Work) -> Program:
        """The program that serves."""
        units = self.slicer.placement.units[endpoint]
        grads = [x.named(x.leaf + GRAD) for u in units for x in u.blocks]
        to_block = tuple(f"{n}:{work.grads[n]}" for n in grads if n in work.grads)
        spec = TreeSpec.of({n: held.cut(self.types[held.of]) for n, held in work.held.items()})
        b = Builder(self.step.program.jaxpr)
        b.role = RPC
        state_vars = [b.input(work.held[n].cut(self.types[work.held[n].of])) for n in spec.names]
        final = b.bind(
            listen_and_serv_p,
            *state_vars,
            endpoint=endpoint,
            Fanin=self.trainers,
            sync_mode=self.sync_mode,
            grad_to_block_id=to_block,
            lr_decay_block_id=1 if work.blocks and work.blocks[0].role == LR_SCHED else -1,
            optimize_blocks=work.blocks,
            state_names=spec.names,
            param_names=tuple(x.name for u in units for x in u.blocks),
        )
        return Program(f"pserver {endpoint}", b.build(final), (spec,), spec, tuple(b.roles))

    def init(self, endpoint: str, held: Mapping[str, Held]) -> Program:
        """The program that makes the server's initial values: its rows of the single-device init."""
        inner = self.startup.jaxpr.jaxpr
        made = dict(zip(self.startup.out_names, inner.outvars, strict=True))
        spec = TreeSpec.of({n: x.cut(self.types[x.of]) for n, x in held.items()})
        b = Builder(self.startup.jaxpr)
        b.invars += inner.invars
        b.role = FORWARD
        parts = [(held[n], made[held[n].of]) for n in spec.names]
        spans = [None if x.span is None else Part(x.axis, x.span.start, x.span.stop) for x, _ in parts]
        outs = write_parts(b, self.startup.jaxpr, [(v, p) for (_, v), p in zip(parts, spans, strict=True)])
        outs = [b.call(jnp.zeros_like, v)[0] if held[n].zeros else v for n, v in zip(spec.names, outs, strict=True)]
        for name, part, value in zip(spec.names, spans, outs, strict=True):
            if part is not None and isinstance(value, Var):
                b.labels.setdefault(value, name)
        return Program(f"pserver {endpoint} startup", b.build(outs), self.startup.args, spec, tuple(b.roles), b.labels)
