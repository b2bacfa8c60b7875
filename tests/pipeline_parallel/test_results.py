"""Results of a pipeline in addition to its state: collections, summaries, and prints of the
loss."""

from __future__ import annotations

import collections
import io
import itertools
import wave

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import tree_close, tree_equal
from PIL import Image
from pipeline_models import Job, compiled_quickly

import dtrans
from dtrans.errors import ConfigError, TraceError
from dtrans.run.base.summary_writer import SummaryWriter
from dtrans.step import summary
from dtrans.step.collect import KEYS, collect, merged
from dtrans.step.summary import Summary, merge


Pair = collections.namedtuple("Pair", "first second")


@pytest.fixture(autouse=True)
def quickly(x64):
    """Enable 64 bits, and compile programs fast."""
    with compiled_quickly():
        yield


def array(*shape, seed=0):
    """Return normal random numbers, scaled by the first dimension, as weights usually are.

    NumPy draws them, because modules are imported without 64 bits.
    """
    x = np.random.default_rng([seed, *shape]).normal(size=shape)
    return x / np.sqrt(shape[0]) if len(shape) > 1 else x


PARAMS = {f"w{i}": array(n, m, seed=i) for i, (n, m) in enumerate(itertools.pairwise((4, 6, 5, 3)))}


def soak(*values):
    """Return a case that runs only in `make nightly`."""
    return pytest.param(*values, marks=pytest.mark.rotated)


SPLITS = [(1, 1), (4, 2), soak(4, 1), soak(1, 2)]  # micro-batches and replicas


def started(tx):
    params = jax.tree.map(jnp.asarray, PARAMS)
    return params, tx.init(params)


def job_of(loss, *, has_aux=True, count=16):
    """Return a job with a batch of rows, and the number of each row."""
    tx = optax.sgd(0.1)
    batch = (array(count, 4) * 4, array(count, 3, seed=1), np.arange(count))
    return Job(
        dtrans.make_train_step(loss, tx, has_aux=has_aux),
        lambda key: started(tx),
        tuple(map(jnp.asarray, batch)),
    )


def planned(of, micro=2, replicas=2, **options):
    return flat_options.pipeline(
        *of.traced(),
        **{
            "num_stages": 2,
            "num_micro_batch": micro,
            "replicas": replicas,
            "flops_per_byte": 0,
            "kind": "local",
            **options,
        },
    )


def ran(of, plan, way="simulate", steps=1):
    """Return the job, and the results of its last step without the state."""
    job = getattr(plan, way)()
    state = job.init(jax.random.key(0))
    rest = ()
    for _ in range(steps):
        state, *rest = job.step(state, *of.batch)
    return job, rest


def by_hand(values, of, micro, replicas):
    """Return a function's results on each micro-batch of each replica."""
    parts = [[x.reshape(replicas, micro, -1, *x.shape[1:])[r, m] for x in of.batch]
             for r, m in itertools.product(range(replicas), range(micro))]  # fmt: skip
    made = [jax.jit(values)(started(optax.sgd(0.1))[0], *part) for part in parts]
    return [made[r * micro : (r + 1) * micro] for r in range(replicas)]


def merged_tree(key, made):
    """Return a pytree in which each array is merged."""
    return jax.tree.map(lambda *xs: merged(key, nested(xs, made)), *flat(made))


def flat(made):
    return [x for replica in made for x in replica]


def nested(xs, made):
    return [list(xs[i * len(made[0]) : (i + 1) * len(made[0])]) for i in range(len(made))]


def hidden(params, x):
    return jnp.tanh(x @ params["w0"])


def predicted(params, x, h=None):
    return jnp.tanh((hidden(params, x) if h is None else h) @ params["w1"]) @ params["w2"]


def norm(grads):
    return jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))


# -- collections -----------------------------------------------------------------------------------


def metrics(params, x, y, row):
    """Return values of the first and the last stage: floats, integers, booleans, scalars and
    vectors."""
    h = hidden(params, x)
    p = predicted(params, x, h)
    return {
        "late": [p, (jnp.abs(p - y) < 1).astype(bool)],
        "pair": Pair(row, {"early": h}),
        "short": p.astype(jnp.bfloat16),
    }


def numbers(params, x, y, row):
    """Return 0-d values, which cannot be concatenated."""
    p = predicted(params, x)
    return {
        "count": jnp.sum(p > 0),
        "mean": jnp.mean(hidden(params, x)),
        "error": jnp.mean((p - y) ** 2),
    }


def collecting(params, x, y, row):
    """Return a loss that collects every value under every key."""
    values, zero_d = metrics(params, x, y, row), numbers(params, x, y, row)
    found = {
        key: {
            "many": collect(
                jax.tree.map(lambda v: v + 0 if v.dtype != bool else v & True, values), key
            ),
            "one": None
            if key.endswith("CONCAT")
            else collect(jax.tree.map(lambda v: v + 0, zero_d), key),
        }
        for key in KEYS
    }
    return jnp.mean((predicted(params, x) - y) ** 2), found


def check_collected(micro, replicas, way, **options):
    of = job_of(collecting)
    job, (_, found) = ran(of, planned(of, micro, replicas, **options), way)
    values, zero_d = (by_hand(f, of, micro, replicas) for f in (metrics, numbers))
    for key in KEYS:
        tree_close(found[key]["many"], merged_tree(key, values), 1e-12)
        if not key.endswith("CONCAT"):
            tree_close(found[key]["one"], merged_tree(key, zero_d), 1e-12)
    tree_equal(found["GLOBAL_CONCAT"]["many"]["pair"].first, of.batch[2])
    tree_equal(found["LOCAL_CONCAT"]["many"]["pair"].first, of.batch[2][: 16 // replicas])
    return job


@pytest.mark.parametrize("micro,replicas", SPLITS)
def test_collections_are_what_merging_by_hand_gives(micro, replicas):
    check_collected(micro, replicas, "simulate")


def test_collections_on_devices():
    check_collected(2, 2, "on_mesh", schedule="ZeroBubble")


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["Interleaved", "PreferForward", "ZeroBubble"])
@pytest.mark.parametrize("micro,replicas", SPLITS)
def test_collections_on_devices_in_all_schedules(micro, replicas, schedule):
    check_collected(micro, replicas, "on_mesh", schedule=schedule)


def test_a_loss_that_is_collected():
    """The result is the sum over 4 micro-batches; the gradients belong to their mean."""

    def loss(params, x, y, row):
        return collect(jnp.mean((predicted(params, x) - y) ** 2), "GLOBAL_SUM")

    of = job_of(loss, has_aux=False)
    plan = planned(of)
    params, _, value = of.of(plan.simulate(), 1)
    want = of.on_one_device(1)
    tree_close(params, want[0], 1e-12)
    tree_close(value, 4 * want[2], 1e-12)


def test_a_value_that_is_returned_with_and_without_its_mark():
    def loss(params, x, y, row):
        p = predicted(params, x)
        total = jnp.sum(p)
        return jnp.mean((p - y) ** 2), {"plain": total, "collected": collect(total, "GLOBAL_SUM")}

    of = job_of(loss)
    plan = planned(of, merge={"aux/plain": "max"})
    assert (
        plan.model.merges["aux/plain"] == "max"
        and plan.model.merges["aux/collected"] == "GLOBAL_SUM"
    )
    _, (_, found) = ran(of, plan)
    sums = by_hand(lambda p, x, y, row: jnp.sum(predicted(p, x)), of, 2, 2)
    tree_close(found["plain"], jnp.max(jnp.asarray(sums)), 1e-12)
    tree_close(found["collected"], jnp.sum(jnp.asarray(sums)), 1e-12)


def test_what_is_mapped_is_concatenated_along_what_it_is_mapped_over():
    def loss(params, x, y, row):
        each = jax.vmap(lambda of: collect(predicted(params, of), "GLOBAL_CONCAT"))(x)
        return jnp.mean((each - y) ** 2), each

    of = job_of(loss)
    _, (_, found) = ran(of, planned(of))
    tree_close(found, predicted(started(optax.sgd(0.1))[0], of.batch[0]), 1e-12)


def returning(fn):
    """Return a loss, and a function of its predictions as a result."""

    def loss(params, x, y, row):
        p = predicted(params, x)
        return jnp.mean((p - y) ** 2), fn(p)

    return job_of(loss)


def test_collections_that_cannot_be():
    twice = returning(lambda p: [collect(collect(p, "GLOBAL_SUM"), "LOCAL_SUM")])
    with pytest.raises(
        ConfigError, match="collected under both GLOBAL_SUM and LOCAL_SUM; use one key"
    ):
        planned(twice)
    with pytest.raises(
        ConfigError,
        match="aux is collected under GLOBAL_MEAN, but merge\\['aux'\\] is 'max'; leave out one",
    ):
        planned(returning(lambda p: collect(jnp.sum(p), "GLOBAL_MEAN")), merge={"aux": "max"})
    with pytest.raises(ConfigError, match="key is 'MEAN'; expected one of GLOBAL_CONCAT"):
        returning(lambda p: collect(p, "MEAN")).traced()
    with pytest.raises(
        ConfigError, match="aux is collected under GLOBAL_CONCAT, but it is 0-d and cannot be"
    ):
        planned(returning(lambda p: collect(jnp.sum(p), "GLOBAL_CONCAT")))
    in_loop = returning(
        lambda p: jax.lax.scan(lambda c, r: (c, collect(r, "GLOBAL_SUM")), 0.0, p)[1]
    )
    with pytest.raises(
        TraceError,
        match="collected under GLOBAL_SUM inside a scan; return the value from the scan, and",
    ):
        planned(in_loop)


def collecting_outside(fn, wrap=lambda step: step):
    """Return a step that collects values after its loss."""

    def step(params, opt_state, x, y):
        value, grads = dtrans.value_and_grad(lambda p: jnp.mean((predicted(p, x) - y) ** 2))(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return (
            params,
            opt_state,
            {"loss": value, "more": collect(fn(value, grads, x), "GLOBAL_SUM")},
        )

    batch = (jnp.asarray(array(16, 4)), jnp.asarray(array(16, 3)))
    return Job(wrap(step), lambda key: (started(optax.sgd(0.1))[0], ()), batch)


@pytest.mark.parametrize("wrap", [lambda step: step, jax.jit], ids=["plain", "jitted"])
def test_collections_outside_of_the_loss(wrap):
    """Test values of the loss and of the batch, which are sums over 4 micro-batches, and one value
    of the gradients."""
    of = collecting_outside(lambda value, grads, x: 2 * value + jnp.sum(x), wrap)
    _, (found,) = ran(of, planned(of))
    tree_close(found["more"], 4 * 2 * found["loss"] + jnp.sum(of.batch[0]), 1e-12)
    with pytest.raises(
        ConfigError,
        match="more is collected under GLOBAL_SUM, which merges .* or pass batch='micro'",
    ):
        planned(of, kind="exact")
    with pytest.raises(
        ConfigError,
        match="more is collected under GLOBAL_SUM, but it is computed once, from the",
    ):
        planned(collecting_outside(lambda value, grads, x: norm(grads)))


def keeping(key):
    """Return a step whose state is the collected mean of a layer."""

    def loss(params, x, y):
        kept = collect(jnp.mean(hidden(params, x), 0), key)
        return jnp.mean((predicted(params, x) - y) ** 2), kept

    def step(params, opt_state, x, y):
        (value, kept), grads = dtrans.value_and_grad(loss, has_aux=True)(params, x, y)
        return (
            {n: kept if n == "mean" else p - 0.1 * grads[n] for n, p in params.items()},
            opt_state,
            value,
        )

    batch = (jnp.asarray(array(16, 4)), jnp.asarray(array(16, 3)))
    return Job(step, lambda _: (started(optax.sgd(0.1))[0] | {"mean": jnp.zeros(6)}, ()), batch)


def test_state_that_is_collected_is_the_mean_of_all_or_refused():
    of = keeping("GLOBAL_MEAN")
    tree_close(of.of(planned(of).simulate()), of.on_one_device(), 1e-12)
    for key in KEYS:
        if key != "GLOBAL_MEAN":
            with pytest.raises(ConfigError, match=f"params/mean.*{key}"):
                planned(keeping(key))


# -- summaries -------------------------------------------------------------------------------------


def shown(params, x, y, row):
    """Return the values that the summaries record."""
    h = hidden(params, x)
    p = predicted(params, x, h)
    return {
        "scalar": jnp.mean(p),
        "histogram": h,
        "image": jax.nn.sigmoid(h).reshape(-1, 2, 3, 1),
        "bytes": (100 * jax.nn.sigmoid(p)).astype(jnp.uint8).reshape(-1, 1, 3, 1),
        "audio": jnp.tanh(p[:, 0]),
    }


COLLECTED = {"total": "GLOBAL_SUM", "own": "LOCAL_MEAN"}


def showing(params, x, y, row):
    values = shown(params, x, y, row)
    summary.scalar("train/scalar", values["scalar"])
    summary.histogram("histogram", values["histogram"])
    summary.image("image", values["image"])
    summary.image("bytes", values["bytes"])
    summary.audio("audio", values["audio"], 8000)
    summary.text("text", "**bold**")
    for tag, key in COLLECTED.items():
        summary.scalar(tag, collect(jnp.sum(values["histogram"]), key))
    return jnp.mean((predicted(params, x) - y) ** 2)


@pytest.mark.parametrize("micro,replicas", SPLITS)
def test_summaries_are_one_value_for_each_tag(micro, replicas):
    of = job_of(showing, has_aux=False)
    plan = planned(of, micro, replicas)
    job, (value,) = ran(of, plan)
    tree_close(value, of.on_one_device(1)[2], 1e-12)
    made = by_hand(shown, of, micro, replicas)
    each = lambda n: [[values[n] for values in replica] for replica in made]
    want = {
        "train/scalar": merge(Summary("train/scalar", "scalar"), each("scalar")),
        "histogram": merge(Summary("histogram", "histogram"), each("histogram")),
        "image": merge(Summary("image", "image"), each("image")),
        "bytes": merge(Summary("bytes", "image"), each("bytes")),
        "audio": merge(Summary("audio", "audio"), each("audio")),
    }
    sums = [[jnp.sum(values["histogram"]) for values in replica] for replica in made]
    want |= {tag: merge(Summary(tag, "scalar"), sums, key) for tag, key in COLLECTED.items()}
    tree_close(job.summaries, want, 1e-12)
    assert job.summaries["image"].shape == (16, 2, 3, 1), "rows are in the order of the batch"
    tree_close(job.summaries["total"], jnp.sum(job.summaries["histogram"]), 1e-12)
    assert [s.tag for s in plan.shown.summaries] == [*list(want)[:5], "text", *COLLECTED]


def loaded(logdir):
    """Return the values that TensorBoard reads from a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # read all values
    sizes = dict.fromkeys(
        ("scalars", "histograms", "images", "audio", "tensors", "compressedHistograms"), 0
    )
    return EventAccumulator(str(logdir), sizes).Reload()


def test_tensorboard_reads_what_a_job_writes(tmp_path):
    """Run three steps of four micro-batches on two replicas.

    Each tag has one event for each step.
    """
    of = job_of(showing, has_aux=False)
    job = planned(of, 4, 2).on_mesh()
    state = job.init(jax.random.key(0))
    values = []
    with SummaryWriter(tmp_path) as writer:
        for step in range(3):
            state, _ = job.step(state, *of.batch)
            values.append(job.summaries)
            writer.write(step, job.summaries, job.plan.shown.summaries)
    read = loaded(tmp_path)
    tags = read.Tags()
    assert sorted(tags["scalars"]) == ["own", "total", "train/scalar"]
    assert (tags["histograms"], sorted(tags["images"])) == (["histogram"], ["bytes", "image"])
    assert (tags["audio"], tags["tensors"]) == (["audio"], ["text"])
    for tag in tags["scalars"]:
        assert [e.step for e in read.Scalars(tag)] == [0, 1, 2]
        np.testing.assert_allclose(
            [e.value for e in read.Scalars(tag)], [float(v[tag]) for v in values], rtol=1e-6
        )
    assert len({float(v["train/scalar"]) for v in values}) == 3
    for event, v in zip(read.Histograms("histogram"), values, strict=True):
        found = event.histogram_value
        assert found.num == 16 * 6 and found.min == v["histogram"].min()
        assert found.sum == pytest.approx(float(v["histogram"].sum()))
    pixels = np.asarray(Image.open(io.BytesIO(read.Images("image")[0].encoded_image_string)))[
        ..., 0
    ]
    rows = np.rint(255 * np.asarray(values[0]["image"])[..., 0])  # in rows of eight
    assert pixels.shape == (4, 24)
    np.testing.assert_array_equal(
        pixels, np.concatenate([np.concatenate(r, 1) for r in (rows[:8], rows[8:])])
    )
    clip = read.Audio("audio")[2]
    with wave.open(io.BytesIO(clip.encoded_audio_string)) as of_file:
        heard = np.frombuffer(of_file.readframes(16), "<i2") / 32767
    np.testing.assert_allclose(heard, np.asarray(values[2]["audio"]).ravel(), atol=1 / 32767)
    (text,) = read.Tensors("text")
    assert text.step == 0 and text.tensor_proto.string_val == [b"**bold**"]


def watching(params, opt_state, x, y):
    """Return a step that records its loss, its gradients and results of the optimizer."""

    def loss(params):
        value = jnp.mean((predicted(params, x) - y) ** 2)
        summary.scalar("inside", value)
        return value

    value, grads = dtrans.value_and_grad(loss)(params)
    summary.scalar("twice", 2 * value)
    summary.scalar("norm", norm(grads))
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    summary.histogram("new", params["w0"])
    return params, opt_state, value


def test_summaries_of_what_comes_after_the_gradients_are_told_of():
    batch = (jnp.asarray(array(16, 4)), jnp.asarray(array(16, 3)))
    of = Job(watching, lambda key: (started(optax.sgd(0.1))[0], ()), batch)
    plan = planned(of)
    job, (value,) = ran(of, plan)
    tree_close(job.summaries, {"inside": value, "twice": 2 * value}, 1e-12)
    assert len(plan.shown.hidden) == 2 and all("summary" in what for what in plan.shown.hidden)
    assert [n for n in plan.notes if "not computed" in n and "summary" in n]


def test_summaries_of_a_batch_of_another_size():
    def loss(params, x, y, row):
        p = predicted(params, x)
        summary.histogram("rows", row)
        return jnp.mean((p - y) ** 2)

    of = job_of(loss, has_aux=False)
    job = planned(of, replicas=1).simulate()
    state = job.init(jax.random.key(0))
    for count in (16, 8):
        state, _ = job.step(state, *job_of(loss, has_aux=False, count=count).batch)
        assert job.summaries["rows"].tolist() == [*range(count)]


def test_a_summary_in_a_loop_is_named():
    def loss(params, x, y, row):
        def body(total, r):
            summary.scalar("inner", jnp.mean(r))
            return total + jnp.mean(r), None

        return jax.lax.scan(body, 0.0, predicted(params, x))[0]

    with pytest.raises(
        TraceError,
        match="the scalar inner is inside a scan; return its value from the scan",
    ):
        planned(job_of(loss, has_aux=False))


def test_one_tag_of_two_summaries_is_named():
    def loss(params, x, y, row):
        p = predicted(params, x)
        summary.scalar("tag", jnp.mean(p))
        summary.histogram("tag", p)
        return jnp.mean((p - y) ** 2)

    with pytest.raises(ConfigError, match="the tag tag is used by a scalar and a histogram"):
        planned(job_of(loss, has_aux=False))


# -- effects ---------------------------------------------------------------------------------------

RECOMPUTED = {"gradient_checkpoint": "auto"}
EFFECTS = [
    (4, 1, "simulate", RECOMPUTED | {"schedule": "ZeroBubble"}),
    (2, 2, "on_mesh", RECOMPUTED),
    soak(2, 2, "simulate", RECOMPUTED | {"schedule": "ZeroBubble"}),
    soak(2, 2, "on_mesh", {"schedule": "Interleaved", "chunks": 2, "num_stages": 1}),
    soak(4, 1, "on_mesh", {"schedule": "PreferForward"}),
]


@pytest.mark.parametrize("micro,replicas,way,options", EFFECTS)
def test_what_the_loss_tells_is_told_once_for_each_micro_batch(micro, replicas, way, options):
    """The first and the last stage call functions whose operands nothing else reads."""
    early, late = [], []

    def loss(params, x, y, row):
        jax.debug.callback(
            lambda n, h: early.append((int(n), float(h))), row[0], jnp.sum(hidden(params, x))
        )
        value = jnp.mean((predicted(params, x) - y) ** 2)
        jax.debug.callback(lambda n, v: late.append((int(n), float(v))), row[0], value)
        return value

    of = job_of(loss, has_aux=False)
    _, (value,) = ran(of, planned(of, micro, replicas, **options), way)
    jax.effects_barrier()
    each = 16 // (micro * replicas)
    sums = flat(by_hand(lambda p, x, y, row: jnp.sum(hidden(p, x)), of, micro, replicas))
    assert [n for n, _ in sorted(early)] == [n for n, _ in sorted(late)] == [*range(0, 16, each)]
    # a callback in a separate thread does not run in 64 bits
    np.testing.assert_allclose([h for _, h in sorted(early)], sums, rtol=1e-6)
    np.testing.assert_allclose(np.mean([v for _, v in late]), value, rtol=1e-6)


def test_what_the_loss_prints_is_printed(capfd):
    def loss(params, x, y, row):
        value = jnp.mean((predicted(params, x) - y) ** 2)
        jax.debug.print("row {}", row[0])
        return value

    of = job_of(loss, has_aux=False)
    ran(of, planned(of, 4, 1))
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")[:-1]) == ["row 0", "row 12", "row 4", "row 8"]


@pytest.mark.parametrize(("micro", "replicas"), [(2, 1), (2, 2)])
def test_rows_of_a_result_are_joined_along_the_dimension_that_has_them(micro, replicas):
    """Dimension 0 of the batch is time, dimension 1 are rows.

    The result is a loss for each time and row.
    """
    tx = optax.sgd(0.1)

    def loss(params, x):
        each = jnp.sum(jnp.tanh(jnp.tanh(x @ params["w0"]) @ params["w1"]) ** 2, -1)
        return each.mean(), {"each": each}

    step, x = dtrans.make_train_step(loss, tx, has_aux=True), array(3, 8, 4)
    main, startup = dtrans.trace(step, *started(tx), x), dtrans.trace(lambda: started(tx))
    job = dtrans.pipeline(
        main,
        startup,
        num_stages=2,
        num_micro_batch=micro,
        replicas=replicas,
        batch=dtrans.Batch(axes=1),
    ).simulate()
    _, value, found = job.step(job.init(), x)
    *_, wanted, aux = step(*started(tx), x)
    tree_close((value, found), (wanted, aux), 1e-12)


@pytest.mark.parametrize("way", ["simulate", "on_mesh"])
def test_each_replica_has_a_row(way):
    """Vectors and numbers get a leading axis with a row for each replica, as in nccl2 mode."""

    def loss(params, x, y, rows):
        out = predicted(params, x)
        return jnp.mean((out - y) ** 2), {"vector": jnp.sum(out, 0), "number": jnp.sum(out)}

    of = job_of(loss)
    plan = planned(of, 1, 2, merge={"aux/vector": "each", "aux/number": "each"})
    _, (_, found) = ran(of, plan, way)
    expected = flat(by_hand(lambda params, *batch: loss(params, *batch)[1], of, 1, 2))
    for name in ("vector", "number"):
        tree_close(found[name], jnp.stack([part[name] for part in expected]), 1e-12)
