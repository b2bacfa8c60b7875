"""Options of nccl2 mode that change the reduction of gradients: hierarchical, over micro-steps, in
other buckets, in chains, compressed, or clipped before.

The tests compare each option with one device on the global batch, in every way to run a plan, and
check the programs.
"""

from __future__ import annotations

import functools

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import distance, init_of, mlp_batch, mlp_forward, mlp_params, tree_close
from jax.sharding import Mesh, PartitionSpec as P

import dtrans
from dtrans._jax import Var, equations
from dtrans.errors import BatchError, ConfigError


SIZES = (5, 6, 3)
# options of XLA for fast compilation
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
WAYS = ("simulate", "mesh", "vmap", "pmap", "shard_map")
# JAX refuses a pmap in a pmap, so at most one of two axes is a pmap, and the other a vmap
MAPS = {
    "vmap": (jax.vmap, jax.vmap),
    "pmap": (jax.pmap, jax.vmap),
    "vmap of pmap": (jax.vmap, jax.pmap),
}


# -- how a plan is run -----------------------------------------------------------------------------


def on_each_trainer(plan, way, batch):
    """Run `plan.function` on batches under one of JAX's maps.

    Each output gets a leading axis of trainers.
    """
    names, sizes = zip(*plan.axes, strict=True)
    whole = [
        not x.ndim or bool({*spec.names} & {*plan.unsplit_inputs})
        for spec, x in zip(plan.main.args[2:], batch, strict=True)
    ]
    one = lambda *args: [jnp.asarray(x) for x in plan.program.out.flatten(plan.function(*args))]
    if "shard_map" in way:
        mesh = Mesh(np.array(jax.devices()[: plan.trainers]).reshape(sizes), names)
        specs = (P(), P(), *(P() if w else P(names) for w in whole))
        fn = lambda *args: [x[None] for x in one(*args)]
        check = way == "checked shard_map"
        return quick(
            jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P(names), check_vma=check)
        )
    mapped, axes = one, (None, None, *(None if w else 0 for w in whole))
    for (name, size), over in reversed(list(zip(plan.axes, MAPS[way], strict=False))):
        mapped = over(mapped, in_axes=axes, axis_name=name, axis_size=size)
    mapped = quick(mapped)

    def run(params, opt_state, *batch):
        parts = [
            x if w else x.reshape(*sizes, -1, *x.shape[1:])
            for x, w in zip(batch, whole, strict=True)
        ]
        return [x.reshape(-1, *x.shape[len(sizes) :]) for x in mapped(params, opt_state, *parts)]

    return run


def trained(plan, way, params, batches):
    """Return (parameters, optimizer state, ...) after each step."""
    if way in ("simulate", "mesh"):
        job = plan.simulate() if way == "simulate" else plan.on_mesh()
        state = job.init(params)
        for batch in batches:
            state, *rest = job.step(state, *batch)
            yield jax.device_get((job.params(state), job.opt_state(state), *rest))
        return
    run, out = on_each_trainer(plan, way, batches[0]), plan.program.out
    params, opt_state = plan.startup(params)
    for batch in batches:
        merged = []
        for name, x in zip(out.names, jax.device_get(run(params, opt_state, *batch)), strict=True):
            kind = plan.merges.get(name, "same")
            if kind == "concat":
                x = x.reshape(-1, *x.shape[2:])
            elif kind != "each":
                assert np.array_equal(x, np.broadcast_to(x[0], x.shape)), (
                    f"{name} differs from trainer to trainer"
                )
                x = x[0]
            merged.append(x)
        made = out.unflatten(merged)
        params, opt_state, *_ = made
        yield made


def batch(seed, rows=16, dtype=jnp.float32):
    x, y = mlp_batch(rows, SIZES, dtype, seed)
    return x, y, jnp.asarray(np.random.default_rng(seed).integers(0, 3, rows) + 0.5, dtype)


# -- a model that has results of every kind --------------------------------------------------------

MERGE = {
    "aux/any": "max", "aux/average": "mean", "aux/count": "sum", "aux/first": "each",
    "aux/hits": "sum",
    "aux/worst": "max", "params/top": "max",
}  # fmt: skip
PLAIN = optax.sgd(1.0)
TX = optax.chain(optax.clip_by_global_norm(2.0), optax.sgd(0.1, momentum=0.9))


def weighted_loss(net, x, y, mask, total=False):
    """Return the mean or the sum over the rows that the mask counts, and results for each kind of
    merge."""
    predicted = mlp_forward(net, x)
    each = jnp.sum((predicted - y) ** 2, -1) * mask
    count = jnp.sum(mask)
    return jnp.sum(each) / (1 if total else count), {
        "any": jnp.any(x > 2.5),
        "average": x[:, 0] @ mask / count,
        "bias": net["b1"],
        "count": count,
        "first": jnp.max(x[:, 0]),
        "hits": jnp.sum(x > 0, dtype=jnp.int32),
        "predicted": predicted,
        "rows": x.shape[0],
        "worst": jnp.max(each),
    }


def norm_of(grads):
    """Return the global norm of arrays of JAX or NumPy."""
    return sum((g**2).sum() for g in jax.tree.leaves(grads)) ** 0.5


def step_of(tx, total=False):
    """Return a step whose state has the largest number so far, and whose result is the gradient's
    norm."""

    def step(params, opt_state, x, y, mask):
        of = lambda net: weighted_loss(net, x, y, mask, total)
        (value, aux), grads = dtrans.value_and_grad(of, has_aux=True)(params["net"])
        updates, opt_state = tx.update(grads, opt_state, params["net"])
        new = {
            "net": optax.apply_updates(params["net"], updates),
            "top": jnp.maximum(params["top"], jnp.max(x)),
        }
        return new, opt_state, value, aux | {"norm": norm_of(grads)}

    return step


@functools.cache
def jitted_step(tx, total=False):
    return quick(step_of(tx, total))


def start():
    return {"net": mlp_params(SIZES, jnp.float64), "top": jnp.zeros(())}


def batches_of(weighted, rows=32, steps=3):
    """Return batches.

    If the option is weighted, they have a mask whose sums differ between parts.
    """
    return [
        (x, y, mask if weighted else jnp.ones_like(mask))
        for x, y, mask in (batch(seed, rows, jnp.float64) for seed in range(steps))
    ]


@functools.cache
def plan_of(trainers, tx=TX, **options):
    total = options.get("reduce") == "sum"
    # else the last one's
    merge = MERGE | ({"aux/first": "max"} if options.get("num_micro_batch", 1) > 1 else {})
    init = lambda params: (params, tx.init(params["net"]))
    main = dtrans.trace(step_of(tx, total), *jax.eval_shape(init, start()), *batches_of(True)[0])
    return flat_options.nccl2(
        main, dtrans.trace(init, start()), trainers=trainers, merge=merge, **options
    )


@functools.cache
def alone(weighted, total):
    """Return (parameters, optimizer state, loss, results) after each step on one device."""
    step, made = jitted_step(TX, total), []
    now = start(), TX.init(start()["net"])
    for part in batches_of(weighted):
        made.append(jax.device_get(step(*now, *part)))
        now = made[-1][:2]
    return made


def with_each(made, plan, part):
    """Return one device's results, with a row for each trainer if the result is merged by
    "each"."""
    if plan.merges["aux/first"] != "each":
        return made
    first = np.asarray(part[0])[:, 0].reshape(plan.trainers, -1).max(1)
    return (*made[:3], made[3] | {"first": first})


def cases(of):
    """Yield each option with every number of trainers. A single option with four trainers runs in
    every way.

    `make test` runs every second of these ways, and `make nightly` runs the others. The next option
    begins with the other half.
    """
    made = []
    for name, options in of.items():
        inter = options.get("trainers_per_node", 0)
        counts = [n for n in (1, 2, 4, 8) if not inter or n > inter]
        turn = len(made)
        for i, n in enumerate(counts):
            one = (WAYS[(turn + i) % len(WAYS)],)
            ways = WAYS if n == 4 and "," not in name else one
            late = [way not in one and (turn + k) % 2 for k, way in enumerate(ways)]
            made += [
                pytest.param(
                    options,
                    n,
                    way,
                    id=f"{name}-{n}-{way}",
                    marks=[pytest.mark.rotated] * bool(is_late),
                )
                for way, is_late in zip(ways, late, strict=True)
            ]
    return made


# -- numbers ---------------------------------------------------------------------------------------


NODES = {"trainers_per_node": 2}
WINDOW = {"num_micro_batch": 4}
COUNT = {"example_count": "aux/count"}
CHAINS = {"chains": 2, "bucket_MB": 0}
OPTIONS = {
    "one bucket": {"bucket_MB": 32},
    "one by one": {"bucket_MB": 0},
    "example_count": COUNT,
    "sum": {"reduce": "sum"},
    "hierarchical": NODES,
    "hierarchical, of 4": {"trainers_per_node": 4},
    "window": WINDOW,
    "splits": {"max_buckets": 3},
    "chain, all": {"chains": 1, "bucket_MB": 0},
    "chains": CHAINS,
    "weight, hierarchical": COUNT | NODES,
    "weight, window": COUNT | WINDOW,
    "weight, chains": COUNT | CHAINS,
    "sum, hierarchical": {"reduce": "sum"} | NODES,
    "sum, window": {"reduce": "sum"} | WINDOW,
    "window, hierarchical": NODES | WINDOW,
    "splits, chain, hierarchical": {"max_buckets": 3, "chains": 1} | NODES,
    "weight, window, hierarchical, chains": COUNT | WINDOW | NODES | CHAINS,
}


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("options,trainers,way", cases(OPTIONS))
def test_every_way_to_reduce_gives_the_numbers_of_one_device(options, trainers, way):
    plan, weighted = plan_of(trainers, **options), "example_count" in options
    batches, expected = batches_of(weighted), alone(weighted, "reduce" in options)
    for got, made, part in zip(
        trained(plan, way, start(), batches), expected, batches, strict=True
    ):
        tree_close(got, with_each(made, plan, part), 1e-12)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("first", ["simulate", "pmap", "vmap of pmap", "shard_map"])
def test_a_plan_runs_under_one_map_after_the_other(first):
    """Also map the trainers of a node by a pmap inside a vmap over nodes."""
    plan, batches = plan_of.__wrapped__(4, **COUNT, **NODES), batches_of(True, steps=1)
    for way in (first, "vmap of pmap", "shard_map", "pmap", "vmap"):
        (got,) = trained(plan, way, start(), batches)
        tree_close(got, with_each(alone(True, False)[0], plan, batches[0]), 1e-12)


gradient = quick(jax.grad(lambda *args: weighted_loss(*args)[0]))


def parts_of(params, part, trainers):
    """Return the gradient of each trainer's part, and the part's share of the total weight."""
    parts = list(zip(*(np.split(np.asarray(x), trainers) for x in part), strict=True))
    shares = np.array([mask.sum() for _, _, mask in parts]) / np.asarray(part[2]).sum()
    return jax.device_get([gradient(params["net"], *p) for p in parts]), shares


CLIP = {"clip_local_norm": 3.5}
CLIPPED = {
    "clip": CLIP,
    "clip, one by one": CLIP | {"bucket_MB": 0},
    "clip, weight": CLIP | COUNT,
    "clip, hierarchical": CLIP | NODES,
    "clip, window": CLIP | WINDOW,
    "clip, weight, window": CLIP | COUNT | WINDOW,
    "clip, weight, hierarchical, chains": CLIP | COUNT | NODES | CHAINS,
}


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("options,trainers,way", cases(CLIPPED))
def test_each_trainer_clips_its_own_gradient_before_they_are_averaged(options, trainers, way):
    plan, batches = plan_of(trainers, **options), batches_of("example_count" in options)
    step, now, most = (
        jitted_step(TX),
        (start(), TX.init(start()["net"])),
        options["clip_local_norm"],
    )
    found = []
    for got, part in zip(trained(plan, way, start(), batches), batches, strict=True):
        grads, shares = parts_of(now[0], part, trainers)
        norms = [norm_of(of) for of in grads]
        found += norms
        weights = [share * min(1.0, most / norm) for share, norm in zip(shares, norms, strict=True)]
        mean = {n: sum(w * of[n] for w, of in zip(weights, grads, strict=True)) for n in grads[0]}
        made = jax.device_get(step(*now, *part))
        updates, opt_state = TX.update(mean, now[1], now[0]["net"])
        now = {"net": optax.apply_updates(now[0]["net"], updates), "top": made[0]["top"]}, opt_state
        aux = made[3] | {"norm": norm_of(mean)}
        tree_close(got, with_each((*now, made[2], aux), plan, part), 1e-12)
    assert min(found) < most < max(found), "some are to be clipped, others not"


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [0, 1], ids=["nccl2", "sharding"])
def test_a_clip_of_each_micro_batch_comes_before_they_are_added_up(stage):
    """Clip the gradients (3, 0), (0, 0.5), (0, 4) and (1, 0) to 1 by hand, and average them.

    The clip happens before the sum.
    """
    x = jnp.asarray([[3.0, 0.0], [0.0, 0.5], [0.0, 4.0], [1.0, 0.0]])
    loss = lambda params, x: jnp.mean(x @ params["w"])
    init = lambda key: (p := {"w": jnp.zeros(2)}, optax.sgd(1.0).init(p))
    main = dtrans.trace(dtrans.make_train_step(loss, optax.sgd(1.0)), *init(jax.random.key(0)), x)
    got = {}
    for per in ("micro_batch", "step"):
        options = {
            "num_micro_batch": 2,
            "reduce": dtrans.Reduce(clip_local_norm=1.0, clip_local_per=per),
        }
        given = main, dtrans.trace(init, jax.random.key(0))
        if stage:
            slices = dtrans.Slicing(min_slice_size=0)
            plan = dtrans.sharding(*given, stage=1, degree=2, slices=slices, **options)
        else:
            plan = dtrans.nccl2(*given, trainers=2, **options)
        job = plan.simulate()
        state, _ = job.step(job.init(jax.random.key(0)), x)
        got[per] = job.params(state)["w"]
    np.testing.assert_allclose(
        got["micro_batch"], [-(1 + 0 + 0 + 1) / 4, -(0 + 0.5 + 1 + 0) / 4], rtol=1e-12
    )
    each = [np.array([1.5, 0.25]), np.array([0.5, 2.0])]
    want = -sum(g / np.linalg.norm(g) for g in each) / 2
    np.testing.assert_allclose(got["step"], want, rtol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "strategy, per",
    [
        ("nccl2", "step"),
        ("nccl2", "micro_batch"),
        ("sharding", "step"),
        ("sharding", "micro_batch"),
        ("scaled", "step"),  # plans with a scaled loss do not clip each micro-batch
    ],
)
def test_a_clip_by_norm_limits_the_gradient_of_each_parameter(strategy, per):
    """Compute Paddle's ClipByNorm by hand on each trainer, before the all-reduce."""
    x = jnp.asarray([[3.0, 0.25], [0.0, 0.25], [0.0, 8.0], [1.0, 8.0]])
    loss = lambda params, x: jnp.mean(x[:, 0] * params["a"] + x[:, 1] * params["b"])
    init = lambda key: ({"a": jnp.zeros(()), "b": jnp.zeros(())}, optax.sgd(1.0).init(0))
    key = jax.random.key(0)
    main = dtrans.trace(dtrans.make_train_step(loss, optax.sgd(1.0)), *init(key), x)
    reduce = dtrans.Reduce(clip_local_norm=1.0, clip_local_per=per, clip_local_by="norm")
    options = {"num_micro_batch": 2, "reduce": reduce}
    if strategy == "nccl2":
        plan = dtrans.nccl2(main, dtrans.trace(init, key), trainers=2, **options)
    else:
        precision = None
        if strategy == "scaled":  # gradients of a scaled loss are clipped at their true size
            precision = dtrans.Precision("bf16", loss_scaling=128)
        given = (main, dtrans.trace(init, key))
        plan = dtrans.sharding(*given, stage=1, degree=2, precision=precision, **options)
    job = plan.simulate()
    state, _ = job.step(job.init(key), x)
    a = {"step": -(1.0 + 0.5) / 2, "micro_batch": -(1 + 0 + 0 + 1) / 4}[per]
    got = jax.device_get(job.params(state))
    np.testing.assert_allclose((got["a"], got["b"]), (a, -(0.25 + 1.0) / 2), rtol=1e-12)


def test_a_clip_by_norm_needs_a_norm_and_parameters_that_are_not_cut_into_stages():
    with pytest.raises(ConfigError, match="clip_local_by='norm' needs clip_local_norm, but that"):
        dtrans.Reduce(clip_local_by="norm")
    with pytest.raises(ConfigError, match="clip_local_by must be 'global_norm' or 'norm', it is 2"):
        dtrans.Reduce(clip_local_norm=1.0, clip_local_by=2)
    tx, x = optax.sgd(1.0), jnp.ones((4, 2))
    init = lambda: (p := {"w": jnp.ones(2)}, tx.init(p))
    step = dtrans.make_train_step(lambda p, x: jnp.mean(jnp.tanh(x @ p["w"])), tx)
    reduce = dtrans.Reduce(clip_local_norm=1.0, clip_local_by="norm")
    with pytest.raises(ConfigError, match="^clip_local_by is 'norm', but if one parameter"):
        dtrans.pipeline(
            dtrans.trace(step, *init(), x), dtrans.trace(init), num_stages=1, reduce=reduce
        )


def test_a_clip_of_each_micro_batch_needs_a_norm_and_a_plain_scale():
    with pytest.raises(
        ConfigError, match="clip_local_per='micro_batch' needs clip_local_norm, but that is None"
    ):
        dtrans.Reduce(clip_local_per="micro_batch")
    with pytest.raises(
        ConfigError, match="clip_local_per must be 'step' or 'micro_batch', it is 'window'"
    ):
        dtrans.Reduce(clip_local_norm=1.0, clip_local_per="window")


BFLOAT, HALF = {"compress": "bf16"}, {"compress": "fp16"}
COMPRESS = {
    "bf16": BFLOAT,
    "fp16, not scaled": HALF,
    "fp16 scaled": HALF | {"compress_scale": 1024.0},
    "bf16, scaled, one by one": BFLOAT | {"compress_scale": 8.0, "bucket_MB": 0},
    "bf16, weight": BFLOAT | COUNT,
    "bf16, hierarchical": BFLOAT | NODES,
    "fp16, window": HALF | WINDOW,
    "bf16, weight, window": BFLOAT | COUNT | WINDOW,
    "fp16 scaled, weight, hierarchical, chains": HALF
    | {"compress_scale": 64.0}
    | COUNT
    | NODES
    | CHAINS,
}


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("options,trainers,way", cases(COMPRESS))
def test_what_is_compressed_is_as_far_off_as_its_type_says(options, trainers, way):
    """The gradients of n trainers are rounded once, and their sum n - 1 times.

    Each rounding is at most the unit roundoff of the summands, or half of the smallest number of
    fp16. A single trainer sends nothing.
    """
    plan, batches = plan_of(trainers, PLAIN, **options), batches_of("example_count" in options)
    unit, least = (2.0**-8, 0.0) if options["compress"] == "bf16" else (2.0**-11, 2.0**-25)
    least *= trainers / options.get("compress_scale", 1.0)
    step, params, errors = jitted_step(PLAIN), jax.device_get(start()), []
    for got, part in zip(trained(plan, way, start(), batches), batches, strict=True):
        grads, shares = parts_of(params, part, trainers)
        _, _, value, aux = step(params, PLAIN.init(params["net"]), *part)
        applied = jax.tree.map(lambda a, b: a - b, params["net"], got[0]["net"])
        for n, g in applied.items():
            sent = np.stack([share * of[n] for share, of in zip(shares, grads, strict=True)])
            error, most = np.abs(g - sent.sum(0)), trainers * unit * np.abs(sent).sum(0)
            errors.append((error / np.abs(sent).mean()).max())
            if trainers == 1:
                assert distance(g, sent.sum(0)) < 1e-12
            else:
                assert np.all(error <= 1.05 * most + least), n
        norm = norm_of(applied)
        _, _, *rest = with_each((None, None, value, aux | {"norm": norm}), plan, part)
        tree_close(tuple(got[2:]), tuple(rest), 1e-12)
        params = got[0]
    assert trainers == 1 or max(errors) > unit / 100, "nothing was rounded"


# -- micro-steps -----------------------------------------------------------------------------------


def noisy_step(params, state, x, scales, key):
    """Return a step with statistics that depend on the order of rows, a loss that depends on a key,
    and the random numbers as result."""

    def loss(w):
        return jnp.mean((x * scales @ w + jax.random.normal(key, x.shape[:1])) ** 2)

    value, grads = dtrans.value_and_grad(loss)(params["w"])
    seen = params["seen"] * 0.5 + jnp.mean(x)
    return (
        {"seen": seen, "w": params["w"] - 0.1 * grads},
        state,
        value,
        jax.random.normal(key, (1,)),
    )


NOISY = [
    (1, {"num_micro_batch": 2}, WAYS[1:3]),
    (4, {}, WAYS[3:]),
    (8, NODES, WAYS[:2]),
    (2, {"num_micro_batch": 4}, WAYS),
    (4, NODES | {"num_micro_batch": 2}, WAYS),
]


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "trainers,options,way", [(*of, way) for *of, ways in NOISY for way in ways]
)
def test_statistics_go_from_micro_step_to_micro_step_and_keys_differ(trainers, options, way):
    """Fold the key by hand: first with the trainer (if there are several trainers), then with the
    micro-step."""
    jitted, params = quick(noisy_step), {"seen": jnp.ones(()), "w": jnp.ones(3)}
    x, scales = mlp_batch(16, (3, 1), jnp.float64)[0], jnp.array([1.0, 0.5, 2.0])
    args = [(x, scales, jax.random.key(seed)) for seed in range(2)]
    main = dtrans.trace(noisy_step, params, (), *args[0])
    steps = options.get("num_micro_batch", 1)
    plan = flat_options.nccl2(main, dtrans.trace(lambda p: (p, ()), params), trainers=trainers,
                              merge={"aux": "concat"},
                        unsplit_inputs=("scales",), **options)  # fmt: skip
    for got, (_, _, key) in zip(trained(plan, way, params, args), args, strict=True):
        made, drawn = [], []
        for k, part in enumerate(np.split(np.asarray(x), trainers)):
            now = params
            for i, rows in enumerate(np.split(part, steps)):
                own = key if trainers == 1 else jax.random.fold_in(key, k)
                own = own if steps == 1 else jax.random.fold_in(own, i)
                new, _, value, noise = jitted(now, (), rows, scales, own)
                drawn.append(noise)
                made.append((value, new["w"]))
                now = new | {"w": params["w"]}
            made[-1] += (now["seen"],)
        value, w = (sum(m[i] for m in made) / len(made) for i in range(2))
        seen = sum(m[2] for m in made if len(m) == 3) / trainers
        tree_close(got, ({"seen": seen, "w": w}, (), value, jnp.concatenate(drawn)), 1e-12)
        params = {"seen": seen, "w": w}


# -- programs --------------------------------------------------------------------------------------


def counted_loss(params, x, y, mask):
    predicted = mlp_forward(params, x)
    each = jnp.sum((predicted - y) ** 2, -1) * mask
    count = jnp.sum(mask)
    return jnp.sum(each) / count, {"count": count, "predicted": predicted, "worst": jnp.max(each)}


def planned(tx, params, loss=counted_loss, has_aux=True, like=None, **options):
    step = dtrans.make_train_step(loss, tx, has_aux=has_aux)
    main = dtrans.trace(
        step, params, jax.eval_shape(tx.init, params), *(batch(0) if like is None else like)
    )
    return step, flat_options.nccl2(main, dtrans.trace(init_of(tx), params), **options)


def collectives(plan):
    """Return the kind and axes of each collective, in order, including collectives in a scan."""
    kinds = ("all_reduce", "reduce_scatter", "all_gather")
    return [
        (e.primitive.name, e.params["over"])
        for e in equations(plan.program.jaxpr)
        if e.primitive.name in kinds
    ]


def test_a_hierarchy_moves_one_nth_of_the_bytes_between_nodes():
    params = mlp_params(SIZES)  # 6, 3, 30 and 18 numbers: padded to 8, 4, 32 and 20
    _, plan = planned(
        optax.sgd(0.1), params, like=batch(0), trainers=8, trainers_per_node=4, kind="local"
    )
    exter, inter = plan.axis_names
    assert plan.axes == (("trainers_exter", 2), ("trainers_inter", 4))
    assert collectives(plan)[:3] == [
        ("reduce_scatter", (inter,)),
        ("all_reduce", (exter,)),
        ("all_gather", (inter,)),
    ]
    results = 3 * 4  # loss, count and worst, over both axes
    assert plan.bytes_over(exter) == {"float32": (8 + 4 + 32 + 20) // 4 * 4 + results}
    assert plan.bytes_over(inter) == {
        "float32": (8 + 4 + 32 + 20) * 4 + (8 + 4 + 32 + 20) // 4 * 4 + results
    }
    assert "between the 2 nodes: 76 bytes of float32" in str(plan)


def test_a_window_reduces_once_and_not_inside():
    _, plan = planned(optax.sgd(0.1), mlp_params(SIZES), like=batch(0),
                      merge={"aux/worst": "max"}, trainers=2, num_micro_batch=4)  # fmt: skip
    (scan,) = [e for e in plan.program.jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    assert scan.params["length"] == 4
    inside = {e.primitive.name for e in equations(scan.params["jaxpr"])}
    assert "dot_general" in inside and "all_reduce" not in inside
    assert [kind for kind, _ in collectives(plan)] == ["all_reduce"] * 3  # gradients, sums, maxima
    with pytest.raises(
        BatchError, match="x has 6 rows on each trainer, expected a multiple of the 4 micro-steps"
    ):
        plan.simulate().step(plan.simulate().init(mlp_params(SIZES)), *batch(0, 12))


@pytest.mark.parametrize(
    "sizes,max_buckets,groups",
    [
        ([100] * 10, 5, [2, 2, 2, 2, 2]),
        ([100] * 10, 2, [10]),
        ([100] * 20, 5, [5, 5, 5, 5]),
        ([10] * 9 + [1000], 5, [1, 9]),
    ],
)
def test_buckets_by_epls_rule(sizes, max_buckets, groups):
    """The expected groups follow epl/communicators/coalescing.py.

    Gradients come in the order of the backward pass.
    """
    params = {f"w{i:02}": jnp.zeros(n) for i, n in enumerate(sizes)}
    loss = lambda p, x: jnp.mean(x) * sum(jnp.sum(q**2) for q in p.values())
    options = {"trainers": 2, "max_buckets": max_buckets, "kind": "local"}
    _, plan = planned(optax.sgd(0.1), params, loss, False, [jnp.ones(8)], **options)
    assert [len(b.leaves) for b in plan.buckets] == groups


def test_buckets_by_epls_rule_never_mix_types():
    types = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float32, jnp.bfloat16]
    params = {f"w{i}": jnp.zeros(4, t) for i, t in enumerate(types)}
    loss = lambda p, x: jnp.mean(x) * sum(jnp.sum(q.astype(x.dtype) ** 2) for q in p.values())
    _, plan = planned(optax.sgd(0.1), params, loss, False, [jnp.ones(8)], trainers=2, max_buckets=2)
    assert sorted(len(b.leaves) for b in plan.buckets) == [1, 2, 2]


@pytest.mark.parametrize(
    "count,waits", [(None, {}), (1, {1: 0, 2: 1, 3: 2}), (2, {2: 0, 3: 1}), (3, {3: 0})]
)
@pytest.mark.parametrize("nodes", [False, True])
def test_reductions_of_a_chain_wait_for_each_other(nodes, count, waits):
    """A barrier makes one reduction wait for another. The expected pairs are numbers of buckets."""
    params = {n: jnp.zeros(4) for n in "abcd"}
    loss = lambda p, x: jnp.mean(x) * sum(jnp.sum(q**2) for q in p.values())
    options = NODES if nodes else {}
    _, plan = planned(
        optax.sgd(0.1), params, loss, False, [jnp.ones(8)], trainers=4, bucket_MB=0, chains=count,
        **options,
    )  # fmt: skip
    made_of, found, last = {}, {}, "all_gather" if nodes else "all_reduce"
    for eqn in plan.program.jaxpr.jaxpr.eqns:
        of = [made_of[v] for v in eqn.invars if isinstance(v, Var) and v in made_of]
        if eqn.primitive.name == "optimization_barrier":
            before = {number for kind, number in of if kind == last}
            made_of.update((v, ("barrier", before)) for v in eqn.outvars)
        elif eqn.params.get("name", "").startswith("bucket/"):
            number = int(eqn.params["name"].removeprefix("bucket/"))
            for kind, value in of:
                if kind == "barrier":
                    (found[number],) = value
            made_of.update((v, (eqn.primitive.name, number)) for v in eqn.outvars)
        elif of:
            made_of.update((v, of[0]) for v in eqn.outvars)
    assert found == waits


def test_clipping_before_and_after_the_sum_are_different_things():
    """With the gradients (3, 0) and (0, 4), clipping to 1 before averaging differs from clipping
    after averaging."""
    params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    loss = lambda p, x: jnp.mean(x[:, 0] * p["a"] + x[:, 1] * p["b"])
    x = jnp.array([[3.0, 0.0], [0.0, 4.0]])
    after = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    for tx, options, expected in (
        (optax.sgd(1.0), {"clip_local_norm": 1.0}, (-0.5, -0.5)),
        (after, {}, (-0.6, -0.8)),
        (optax.sgd(1.0), {}, (-1.5, -2.0)),
    ):
        _, plan = planned(tx, params, loss, False, [x], trainers=2, **options)
        for job in (plan.simulate(), plan.on_mesh()):
            state, _ = job.step(job.init(params), x)
            np.testing.assert_allclose(
                [job.params(state)["a"], job.params(state)["b"]], expected, rtol=1e-6
            )


@pytest.mark.parametrize(
    "options,message",
    [
        (
            {"trainers": 1, "trainers_per_node": 2},
            "=2 does not divide the 1 trainers into two or more nodes",
        ),
        (
            {"trainers": 2, "trainers_per_node": 2},
            "=2 does not divide the 2 trainers into two or more nodes",
        ),
        ({"trainers_per_node": 3}, "=3 does not divide the 4 trainers into two or more nodes"),
        ({"trainers_per_node": 4}, "=4 does not divide the 4 trainers into two or more nodes"),
        ({"trainers_per_node": 1}, "=1 does not divide the 4 trainers into two or more nodes"),
        ({"trainers_per_node": -2}, "must be a number of trainers, it is -2"),
        (
            {"num_micro_batch": 0},
            "num_micro_batch must be a positive number of micro-steps, it is 0",
        ),
        (
            {"num_micro_batch": True},
            "num_micro_batch must be a positive number of micro-steps, it is True",
        ),
        ({"max_buckets": 0}, "max_buckets must be a positive number, or None; it is 0"),
        ({"chains": 1.5}, "^chains must be a positive number, or None; it is 1.5"),
        ({"clip_local_norm": 0}, "clip_local_norm must be a positive number, or None; it is 0"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        planned(optax.sgd(0.1), mlp_params(SIZES), like=batch(0), **{"trainers": 4} | options)


def test_a_result_that_every_micro_step_makes_must_be_merged_by_the_user():
    loss = lambda p, x: (jnp.mean(x * p["w"]), jnp.sum(x > 0))
    given = optax.sgd(0.1), {"w": jnp.ones(2)}, loss, True, [jnp.ones((8, 2))]
    with pytest.raises(
        ConfigError, match="aux is int32.*has 2 values, one for each micro-step; .*write merge="
    ):
        planned(*given, trainers=2, num_micro_batch=2, kind="local")
    plan = planned(*given, trainers=2, num_micro_batch=2)[1]
    # a count that depends on no parameter is computed once
    assert plan.merges == {
        "loss": "sum",
        "aux": "same",
    }
    assert plan.verify(jnp.ones((8, 2))).complete


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("options", [NODES, NODES | WINDOW, COUNT | CHAINS | CLIP])
def test_a_shard_map_that_checks_varying_types_is_refused_by_name(options):
    plan = plan_of.__wrapped__(4, **options)
    with pytest.raises(
        ConfigError, match=r"plan\.function: .*; write jax\.shard_map\(\.\.\., check_vma=False\)"
    ):
        list(trained(plan, "checked shard_map", start(), batches_of(True)))


# -- what was once wrong ---------------------------------------------------------------------------


def test_a_weight_that_is_known_when_traced_weights_a_window_too():
    params, x = {"w": jnp.ones(2)}, jnp.arange(16.0).reshape(8, 2)
    loss = lambda p, x: (jnp.mean((x * p["w"]) ** 2), x.shape[0])
    plan = planned(
        optax.sgd(0.1), params, loss, True, [x], trainers=2, num_micro_batch=2, example_count="aux"
    )[1]
    job = plan.simulate()
    state, value, rows = job.step(job.init(params), x)
    want = jax.grad(lambda p: loss(p, x)[0])(params)
    tree_close(job.params(state), jax.tree.map(lambda p, g: p - 0.1 * g, params, want), 1e-6)
    assert (float(value), int(rows)) == (float(loss(params, x)[0]), 8)


def test_a_row_for_each_trainer_is_refused_where_a_trainer_makes_several():
    loss = lambda p, x: (jnp.mean(x * p["w"]), jnp.max(x))
    for options in ({"num_micro_batch": 2}, {"local_sgd": 2}):
        with pytest.raises(
            ConfigError,
            match=r"^merge\['aux'\]='each' needs one value for each trainer, but a trainer has 2 values",
        ):
            planned(optax.sgd(0.1), {"w": jnp.ones(2)}, loss, True, [jnp.ones((8, 2))], trainers=2,
                    merge={"aux": "each"}, **options)  # fmt: skip


def test_a_complex_gradient_is_clipped_by_its_absolute_value():
    params, x = {"w": jnp.zeros((), jnp.complex64)}, jnp.ones((2, 1))
    loss = lambda p, x: jnp.mean(x) * jnp.real(p["w"] * (3 - 4j))
    plan = planned(optax.sgd(1.0), params, loss, False, [x], trainers=2, clip_local_norm=1.0)[1]
    job = plan.simulate()
    state, _ = job.step(job.init(params), x)
    np.testing.assert_allclose(abs(job.params(state)["w"]), 1.0, rtol=1e-6)


def of_counted(params, x, mask):
    """Return a mean over the rows that the mask counts; 0/0 if the mask counts none."""
    return jnp.sum((x @ params["w"]) ** 2 * mask) / jnp.sum(mask), {"count": jnp.sum(mask)}


PARTS = [{"trainers": 4}, {"trainers": 2, "num_micro_batch": 2},
         {"trainers": 1, "num_micro_batch": 4},
         {"trainers": 2, "num_micro_batch": 2, "clip_local_norm": 1e9}]  # fmt: skip


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("options", PARTS)
def test_a_part_that_counts_for_nothing_is_nothing(options):
    params, x = {"w": jnp.ones(2)}, jnp.arange(16.0).reshape(8, 2)
    mask = jnp.array([1.0, 1, 0, 0, 1, 1, 1, 1])
    step, plan = planned(
        optax.sgd(0.1), params, of_counted, True, [x, mask], example_count="aux/count", **options
    )
    want, _, want_loss, want_aux = step(params, optax.sgd(0.1).init(params), x, mask)
    for job in (plan.simulate(), plan.on_mesh()):
        state, loss, aux = job.step(job.init(params), x, mask)
        tree_close((job.params(state), loss, aux), (want, want_loss, want_aux), 1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("options", PARTS[:3])
@pytest.mark.parametrize("way", [None, "mean"])
def test_results_from_gradients_and_the_batch_are_weighted_as_they_are_without_a_window(
    options, way
):
    """Return the norm of the reduced gradient times a mean over a trainer's part.

    All divisions of the batch give the same result.
    """

    def step(params, opt_state, x, mask):
        (loss, aux), grads = dtrans.value_and_grad(of_counted, has_aux=True)(params, x, mask)
        seen = jnp.sum(x[:, 0] * mask) / jnp.sum(mask)
        return (
            {"w": params["w"] - 0.1 * grads["w"]},
            opt_state,
            loss,
            aux | {"scaled": norm_of(grads) * seen},
        )

    params, x = {"w": jnp.ones(2)}, jnp.arange(16.0).reshape(8, 2)
    mask = jnp.array([1.0, 1, 3, 1, 1, 2, 1, 1])
    main, startup = dtrans.trace(step, params, (), x, mask), dtrans.trace(lambda p: (p, ()), params)
    merge = {"aux/scaled": way} if way else {}
    plan = flat_options.nccl2(main, startup, example_count="aux/count", merge=merge, **options)
    job = plan.simulate()
    state, loss, aux = job.step(job.init(params), x, mask)
    want, _, want_loss, want_aux = step(params, (), x, mask)
    tree_close((job.params(state), loss, aux), (want, want_loss, want_aux), 1e-12)


def test_the_weight_is_added_up_and_nothing_else():
    options = {"example_count": "aux/count", "merge": {"aux/count": "max"}, "trainers": 2}
    with pytest.raises(
        ConfigError, match=r"^merge\['aux/count'\]='max': example_count is always summed"
    ):
        planned(
            optax.sgd(0.1),
            {"w": jnp.ones(2)},
            of_counted,
            True,
            [jnp.ones((8, 2)), jnp.ones(8)],
            **options,
        )


@pytest.mark.parametrize(
    "options", [{"num_micro_batch": 2, "example_count": "aux/count"}, {"local_sgd": 1}]
)
def test_sums_of_16_bits_do_not_overflow_on_their_way(options):
    """The gradient and the parameters fit into float16, but their products with the count or the
    number of trainers do not."""
    params = {"w": jnp.full(2, 20000.0, jnp.float16)}
    loss = lambda p, x, mask: (jnp.mean(x @ p["w"] / 100), {"count": jnp.sum(mask)})
    x, mask = jnp.ones((16, 2), jnp.float16), jnp.full(16, 4000.0)
    plan = planned(optax.sgd(100.0), params, loss, True, [x, mask], trainers=4, **options)[1]
    job = plan.simulate()
    state, *_ = job.step(job.init(params), x, mask)
    np.testing.assert_allclose(job.params(state)["w"], [19999.0] * 2, rtol=1e-3)


def counting(params, opt_state, x):
    value, grad = dtrans.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(params["w"])
    n = params["n"] + jnp.sum(x > 0.5, dtype=jnp.int32)
    return {"n": n, "w": params["w"] - 0.01 * grad}, opt_state, value


@pytest.mark.parametrize("options", [{}, {"num_micro_batch": 2}, {"local_sgd": 2}])
def test_counts_in_the_state_are_what_one_device_counts(options):
    params, x = (
        {"n": jnp.zeros((), jnp.int32), "w": jnp.ones(2)},
        jnp.arange(16.0).reshape(8, 2) / 10,
    )
    main, startup = dtrans.trace(counting, params, (), x), dtrans.trace(lambda p: (p, ()), params)
    plan = flat_options.nccl2(main, startup, trainers=2, merge={"params/n": "sum"}, **options)
    for job in (plan.simulate(), plan.on_mesh()):
        state, counts = job.init(params), []
        for _ in range(3):
            state, _ = job.step(state, x)
            counts.append(int(job.params(state)["n"]))
        assert counts == [10, 20, 30]
    with pytest.raises(
        ConfigError, match=r"^merge\['params/n'\]='same': the value depends on a trainer's part"
    ):
        flat_options.nccl2(main, startup, trainers=2, merge={"params/n": "same"}, **options)
    with pytest.raises(
        ConfigError,
        match=r"^params/n is int32\[\], and each trainer .* or merge={'params/n': 'max'}$",
    ):
        flat_options.nccl2(main, startup, trainers=2, kind="local", **options)


def test_what_is_made_of_the_number_of_rows_must_be_merged_by_name():
    loss = lambda p, x: (jnp.mean(x * p["w"]), jnp.ones(x.shape[:1]).sum())
    given = optax.sgd(0.1), {"w": jnp.ones(2)}, loss, True, [jnp.ones((8, 2))]
    with pytest.raises(
        ConfigError, match=r"^aux \(float32.* depends on the number of rows in a trainer's part"
    ):
        planned(*given, trainers=2, kind="local")
    job = planned(*given, trainers=2, merge={"aux": "sum"})[1].simulate()
    assert float(job.step(job.init({"w": jnp.ones(2)}), jnp.ones((8, 2)))[2]) == 8.0


def test_a_leaf_without_elements_is_reduced_nowhere():
    params = {"none": jnp.zeros((0, 3)), "w": jnp.ones(2)}
    loss = lambda p, x: jnp.mean(x @ p["w"]) + jnp.sum(p["none"])
    plan = planned(optax.sgd(0.1), params, loss, False, [jnp.ones((8, 2))], trainers=4, **NODES)[1]
    job = plan.on_mesh()
    state, _ = job.step(job.init(params), jnp.ones((8, 2)))
    assert job.params(state)["none"].shape == (0, 3) and [b.leaves for b in plan.buckets] == [
        ("params/w",)
    ]


@pytest.mark.parametrize(
    "options,message",
    [
        ({"merge": "loss"}, "^merge='loss' must be a dict from names to merges"),
        ({"merge": ["loss"]}, r"^merge=\['loss'\] must be a dict"),
        ({"unsplit_inputs": None}, "^unsplit_inputs=None must be a list of names"),
    ],
)
def test_options_of_another_type_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        planned(optax.sgd(0.1), mlp_params(SIZES), like=batch(0), trainers=2, **options)
