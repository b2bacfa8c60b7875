"""Summaries: equations without effect that survive every transformation of JAX, their merge rules,
and the files that TensorBoard's loader reads."""

from __future__ import annotations

import io
import sys
import wave

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import closes_remat, mlp_batch, mlp_loss, mlp_params, quick, tree_close, tree_equal
from hypothesis import given, strategies as st
from PIL import Image

import dtrans
from dtrans._jax import equations, lowered_jaxpr
from dtrans.errors import ConfigError, TraceError
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.run.base.summary_writer import SummaryWriter
from dtrans.step import summary
from dtrans.step.summary import Summary, merge, summaries, summary_p


def tags(fn, *args):
    """Return the tags of all summaries in a function, also in bodies."""
    return [
        e.params["tag"] for e in equations(jax.make_jaxpr(fn)(*args)) if e.primitive is summary_p
    ]


def found(fn, *args):
    """Return the summaries that `summaries` finds in a function, with the shapes of their
    operands."""
    flat = eliminate_dead(inline_calls(lowered_jaxpr(fn, *args)))
    return [(s.tag, s.kind, s.atom and s.atom.aval.shape, dict(s.options)) for s in summaries(flat)]


# -- inside a step ---------------------------------------------------------------------------------


def plain(w, x):
    y = jnp.tanh(x @ w)
    return jnp.sum(y * y)


def loss(w, x):
    y = jnp.tanh(x @ w)
    summary.scalar("mean", jnp.mean(y))
    summary.histogram("all", y)
    summary.text("about", "a test")
    return jnp.sum(y * y)


def scanned(f):
    return lambda w, x: jax.lax.scan(lambda c, row: (c + f(w, row), None), 0.0, x)[0]


def branched(f):
    return lambda w, x: jax.lax.cond(x[0, 0] > 0, f, lambda w, x: jnp.sum(w), w, x)


def looped(f):
    return lambda w, x: jax.lax.while_loop(lambda c: c < 3, lambda c: c + f(w, x), 0.0)


TRANSFORMED = {
    "jit": jax.jit,
    "value_and_grad": jax.value_and_grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "grad of grad": lambda f: jax.grad(lambda w, x: jnp.sum(jax.grad(f)(w, x) ** 2)),
    "checkpoint": jax.checkpoint,
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "jit of grad of checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(jax.jit(f)))),
    "scan": scanned,
    "grad of scan": lambda f: jax.grad(scanned(f)),
    "scan of checkpoint": lambda f: jax.grad(scanned(jax.checkpoint(f))),
    "cond": branched,
    "grad of cond": lambda f: jax.grad(branched(f)),
    "while": looped,
    "vmap": lambda f: jax.vmap(f, (None, 0)),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f), (None, 0)),
    "vmap of scan": lambda f: jax.vmap(scanned(f), (None, 0)),
    "vmap of cond": lambda f: jax.vmap(branched(lambda w, x: f(w, x)), (0, None)),
    "jvp": lambda f: lambda w, x: jax.jvp(lambda v: f(v, x), (w,), (w,)),
    "custom_vjp": lambda f: jax.grad(ruled(f)),
}


def ruled(f):
    g = jax.custom_vjp(lambda w, x: f(w, x))
    g.defvjp(lambda w, x: jax.vjp(f, w, x), lambda pull, ct: pull(ct))
    return g


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_summaries_survive_and_change_nothing(name):
    transform = TRANSFORMED[name]
    w, x = jnp.linspace(-1, 1, 8).reshape(4, 2), jnp.linspace(0, 1, 12).reshape(3, 4)
    w = jnp.stack([w, 2 * w]) if name == "vmap of cond" else w
    x = jnp.stack([x, 2 * x]) if name == "vmap of scan" else x
    # each summary occurs once: a recomputation does not record it again
    assert sorted(tags(transform(loss), w, x)) == ["about", "all", "mean"]
    tree_close(quick(transform(loss))(w, x), quick(transform(plain))(w, x), 1e-6)
    tree_close(transform(loss)(w, x), transform(plain)(w, x), 1e-6)


def test_on_one_device_there_is_nothing_of_them():
    w, x = jnp.ones((4, 2)), jnp.ones((3, 4))
    lowered, without = (jax.jit(jax.value_and_grad(f)).lower(w, x) for f in (loss, plain))
    assert "custom_call" not in lowered.as_text() and "summary" not in lowered.as_text()
    assert lowered.compile().cost_analysis() == without.compile().cost_analysis()


def test_a_train_step_runs_and_keeps_them_when_it_is_traced():
    def shown(params, *batch):
        value = mlp_loss(params, *batch)
        summary.scalar("loss", value)
        return value

    params, batch = mlp_params(), mlp_batch()
    tx = optax.sgd(0.1)
    step, without = (dtrans.make_train_step(f, tx) for f in (shown, mlp_loss))
    state = tx.init(params)
    tree_equal(jax.jit(step)(params, state, *batch), jax.jit(without)(params, state, *batch))
    assert found(step, params, state, *batch) == [("loss", "scalar", (), {})]
    traced = dtrans.trace(step, params, state, *batch)
    assert [s.tag for s in summaries(traced.jaxpr)] == ["loss"]


def test_a_mapped_dimension_comes_first_and_is_counted():
    def fn(x):
        summary.scalar("s", x[0])
        summary.audio("a", x, 8000)
        return x

    jaxpr = jax.make_jaxpr(jax.vmap(jax.vmap(fn, in_axes=1, out_axes=1)))(jnp.ones((2, 5, 3)))
    s, a = summaries(jaxpr)
    assert (s.mapped, s.atom.aval.shape) == (2, (2, 3)) and (a.mapped, a.atom.aval.shape) == (
        2,
        (2, 3, 5),
    )


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: summary.scalar("a b", 1.0),
            "the tag of a scalar is 'a b'; a tag has letters, digits and _ . - /",
        ),
        (lambda: summary.scalar("/a", 1.0), "the tag of a scalar is '/a'"),
        (lambda: summary.text("", "x"), "the tag of a text is ''"),
        (lambda: summary.histogram(3, jnp.ones(2)), "the tag of a histogram is 3"),
        (
            lambda: summary.scalar("a", jnp.ones(2)),
            r"the scalar a is float32\[2\]; expected one number",
        ),
        (lambda: summary.scalar("a", "1"), "the scalar a is '1'; expected an array"),
        (
            lambda: summary.scalar("a", jnp.complex64(1)),
            r"the scalar a is complex64\[\]; expected real numbers",
        ),
        (
            lambda: summary.histogram("h", jax.random.key(0)),
            "the histogram h is key.* expected real numbers",
        ),
        (
            lambda: summary.histogram("h", jnp.ones((0, 2))),
            r"float32\[0, 2\]; expected at least one number",
        ),
        (
            lambda: summary.image("i", jnp.ones((4, 4))),
            r"the image i is float32\[4, 4\]; expected \[\(images,\)",
        ),
        (lambda: summary.image("i", jnp.ones((4, 4, 2))), "height, width, 1|3|4"),
        (
            lambda: summary.image("i", jnp.ones((4, 4, 3), int)),
            "int32.* expected floats from 0 to 1, or uint8",
        ),
        (
            lambda: summary.audio("n", jnp.ones((4, 3)), 8000),
            r"the audio n is float32\[4, 3\]; expected \[frames",
        ),
        (lambda: summary.audio("n", jnp.ones(4, int), 8000), "expected floats from -1 to 1"),
        (lambda: summary.audio("n", jnp.ones(4), 0.5), "the audio n has sample_rate=0.5"),
        (lambda: summary.text("t", 3), "the text t is a int; expected a str"),
    ],
)
def test_what_cannot_be_shown_is_named(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


# -- in a traced step ------------------------------------------------------------------------------


def test_they_are_found_in_order_with_what_they_look_at():
    def fn(x):
        summary.scalar("a/s", 0.5)
        jax.jit(lambda y: summary.histogram("b", y * 2))(x)
        summary.image("c", x.reshape(2, 2, 1))
        summary.audio("d", x, sample_rate=8000)
        summary.text("e", "*text*")
        return x

    assert found(fn, jnp.ones(4)) == [
        ("a/s", "scalar", (), {}),
        ("b", "histogram", (4,), {}),
        ("c", "image", (2, 2, 1), {}),
        ("d", "audio", (4,), {"sample_rate": 8000}),
        ("e", "text", None, {"text": "*text*"}),
    ]


def test_a_tag_used_twice_is_an_error():
    def fn(x):
        summary.scalar("x", x)
        summary.histogram("x", x)

    with pytest.raises(
        ConfigError, match="the tag x is used by a scalar and a histogram of one step; use two tags"
    ):
        found(fn, 1.0)


@pytest.mark.parametrize(
    "wrap, inside",
    [
        (scanned, "scan"),
        (branched, "cond"),
        (looped, "while"),
        pytest.param(jax.checkpoint, "remat2", marks=closes_remat),
    ],
)
def test_a_summary_that_nothing_can_see_is_an_error(wrap, inside):
    with pytest.raises(
        TraceError,
        match=f"the scalar mean is inside a {inside}; return its value from the {inside}",
    ):
        found(wrap(loss), jnp.ones((4, 2)), jnp.ones((3, 4)))


# -- merging ---------------------------------------------------------------------------------------


def micro(shape, replicas=2, micros=3, dtype=jnp.float32):
    size = int(np.prod(shape))
    return [
        [(jnp.arange(size) + 100 * r + 10 * m).reshape(shape).astype(dtype) for m in range(micros)]
        for r in range(replicas)
    ]


@given(st.integers(1, 3), st.integers(1, 4))
def test_scalars_are_the_mean_of_all(replicas, micros):
    values = micro((), replicas, micros)
    assert float(merge(Summary("s", "scalar"), values)) == pytest.approx(np.mean(values), rel=1e-6)
    mapped = merge(Summary("s", "scalar", mapped=1), micro((5,), replicas, micros))
    assert mapped.shape == () and float(mapped) == pytest.approx(np.mean(values) + 2, rel=1e-6)


@pytest.mark.parametrize(
    "s, shape, want",
    [
        (Summary("h", "histogram"), (), (6,)),
        (Summary("h", "histogram"), (2, 2), (24,)),
        (Summary("i", "image"), (2, 4, 3), (6, 2, 4, 3)),
        (Summary("i", "image"), (5, 2, 4, 3), (30, 2, 4, 3)),
        (Summary("i", "image", mapped=1), (5, 2, 4, 3), (30, 2, 4, 3)),
        (Summary("a", "audio"), (7,), (6, 7, 1)),
        (Summary("a", "audio"), (7, 2), (6, 7, 2)),
        (Summary("a", "audio", mapped=1), (5, 7), (30, 7, 1)),
        (Summary("a", "audio", mapped=2), (2, 5, 7, 2), (60, 7, 2)),
    ],
)
def test_the_others_are_all_of_them_in_order(s, shape, want):
    made = merge(s, micro(shape))
    assert made.shape == want
    whole = np.concatenate([np.ravel(x) for replica in micro(shape) for x in replica])
    np.testing.assert_array_equal(np.ravel(made), whole)


@pytest.mark.parametrize(
    "s, shape, key, want",
    [
        (Summary("s", "scalar"), (), "GLOBAL_SUM", 6 * 60),
        (Summary("s", "scalar"), (), "LOCAL_MEAN", 10),
        (Summary("s", "scalar", mapped=1), (3,), "LOCAL_CONCAT", 11),
        (Summary("h", "histogram"), (2,), "LOCAL_SUM", [30, 33]),
        (Summary("i", "image"), (1, 1, 1), "LOCAL_MEAN", [[[[10]]]]),
        (Summary("i", "image"), (1, 1, 1), "LOCAL_CONCAT", [[[[0]], [[10]], [[20]]]]),
        (Summary("a", "audio"), (2,), "LOCAL_CONCAT", [[[0], [1], [10], [11], [20], [21]]]),
    ],
)
def test_collected_values_are_merged_as_their_key_says(s, shape, key, want):
    assert merge(s, micro(shape), key).tolist() == want


def test_images_of_8_bits_stay_so():
    made = merge(Summary("i", "image"), micro((1, 1, 1), dtype=jnp.uint8), "GLOBAL_SUM")
    assert made.dtype == jnp.uint8 and made.tolist() == [[[[255]]]]
    assert merge(
        Summary("i", "image"), micro((1, 1, 1), dtype=jnp.uint8), "GLOBAL_MEAN"
    ).tolist() == [[[[60]]]]


# -- written ---------------------------------------------------------------------------------------


def loaded(logdir):
    """Return the values that TensorBoard reads from a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # read all values
    sizes = dict.fromkeys(
        ("scalars", "histograms", "images", "audio", "tensors", "compressedHistograms"), 0
    )
    return EventAccumulator(str(logdir), sizes).Reload()


def test_tensorboard_reads_what_is_written(tmp_path):
    specs = [
        Summary("train/loss", "scalar"),
        Summary("h", "histogram"),
        Summary("i", "image"),
        Summary("a", "audio", options={"sample_rate": 8000}),
        Summary("t", "text", options={"text": "**bold**"}),
    ]
    entries = np.array([-1.0, 0.0, 0.0, 3.0])
    frames = np.linspace(-1.5, 1, 6).reshape(1, 3, 2)
    with SummaryWriter(tmp_path / "made" / "here") as writer:
        for step in (3, 4):
            pixels = np.full((2, 3, 5, 1), step * 10, np.uint8)
            values = {"train/loss": step / 8, "h": entries * step, "i": pixels, "a": frames}
            writer.write(step, jax.tree.map(jnp.asarray, values), specs)
    read = loaded(tmp_path / "made" / "here")
    assert read.Tags() | {"graph": 0, "meta_graph": 0, "run_metadata": 0} == {
        "scalars": ["train/loss"],
        "histograms": ["h"],
        "distributions": ["h"],
        "images": ["i"],
        "audio": ["a"],
        "tensors": ["t"],
        "graph": 0,
        "meta_graph": 0,
        "run_metadata": 0,
    }
    assert [(e.step, e.value) for e in read.Scalars("train/loss")] == [(3, 0.375), (4, 0.5)]
    third, fourth = (e.histogram_value for e in read.Histograms("h"))
    assert (third.min, third.max, third.num, third.sum, third.sum_squares) == (-3, 9, 4, 6, 90)
    assert (fourth.min, fourth.max, sum(fourth.bucket)) == (-4, 12, 4)
    shown = [np.asarray(Image.open(io.BytesIO(e.encoded_image_string))) for e in read.Images("i")]
    assert [(s.shape, set(s.flat)) for s in shown] == [((3, 10, 3), {30}), ((3, 10, 3), {40})]
    first, _ = read.Audio("a")
    assert (first.step, first.sample_rate, first.length_frames, first.content_type) == (
        3,
        8000,
        3,
        "audio/wav",
    )
    with wave.open(io.BytesIO(first.encoded_audio_string)) as clip:
        assert (clip.getnchannels(), clip.getframerate(), clip.getnframes()) == (2, 8000, 3)
        heard = np.frombuffer(clip.readframes(3), "<i2") / 32767
    np.testing.assert_allclose(heard, np.clip(frames.ravel(), -1, 1), atol=1 / 32767)
    (text,) = read.Tensors("t")  # once, and under its own tag
    assert text.step == 3 and text.tensor_proto.string_val == [b"**bold**"]


def test_each_tag_is_written_once_whatever_the_job_looks_like(tmp_path):
    def shown(x):
        summary.scalar("mean", jnp.mean(x))
        summary.image("pixels", x.reshape(2, 2, 1))
        return x

    specs = summaries(lowered_jaxpr(shown, jnp.ones(4)))
    batch = jnp.arange(24.0).reshape(2, 3, 4) / 24
    read = []
    for replicas, micros in ((2, 3), (3, 2), (1, 6)):
        by = batch.reshape(replicas, micros, 4)
        values = {
            "mean": merge(specs[0], [[jnp.mean(x) for x in replica] for replica in by]),
            "pixels": merge(specs[1], [[x.reshape(2, 2, 1) for x in replica] for replica in by]),
        }
        with SummaryWriter(tmp_path / f"{replicas}") as writer:
            writer.write(0, values, specs)
        read.append(loaded(tmp_path / f"{replicas}"))
    for r in read:
        assert len(r.Scalars("mean")) == len(r.Images("pixels")) == 1
        assert r.Scalars("mean")[0].value == pytest.approx(23 / 48, rel=1e-6)
        assert (
            r.Images("pixels")[0].encoded_image_string
            == read[0].Images("pixels")[0].encoded_image_string
        )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int8, jnp.bool_])
def test_short_types_are_written_as_numbers(tmp_path, dtype):
    with SummaryWriter(tmp_path) as writer:
        values = {"s": jnp.ones((), dtype), "h": jnp.ones(3, dtype)}
        writer.write(0, values, [Summary("s", "scalar"), Summary("h", "histogram")])
    read = loaded(tmp_path)
    assert read.Scalars("s")[0].value == 1.0 and read.Histograms("h")[0].histogram_value.sum == 3.0


@pytest.mark.parametrize(
    "value, want",
    [
        (np.array([[[0.0], [1.0], [0.5]]]), [0, 255, 128]),
        (np.array([[[-1.0], [2.0], [np.nan]]]), [0, 255, 0]),
        (np.array([[[0], [255], [7]]], np.uint8), [0, 255, 7]),
    ],
)
def test_pixels_are_from_0_to_255(tmp_path, value, want):
    with SummaryWriter(tmp_path) as writer:
        writer.write(0, {"i": value}, [Summary("i", "image")])
    (event,) = loaded(tmp_path).Images("i")
    assert np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))[0, :, 0].tolist() == want


def test_values_that_are_not_finite_are_shown_where_they_can_be(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        writer.write(0, {"s": jnp.nan}, [Summary("s", "scalar")])
        with pytest.raises(
            ConfigError, match="the histogram h of step 7 has 2 entries that are not finite"
        ):
            writer.write(7, {"h": jnp.array([1, jnp.nan, jnp.inf])}, [Summary("h", "histogram")])
    assert np.isnan(loaded(tmp_path).Scalars("s")[0].value)


def test_two_writers_of_one_folder_do_not_overwrite_each_other(tmp_path):
    with SummaryWriter(tmp_path) as a, SummaryWriter(tmp_path) as b:
        a.write(0, {"s": 1.0}, [Summary("s", "scalar")])
        b.write(1, {"s": 2.0}, [Summary("s", "scalar")])
    assert len(list(tmp_path.iterdir())) == 2
    assert {(e.step, e.value) for e in loaded(tmp_path).Scalars("s")} == {(0, 1.0), (1, 2.0)}


@pytest.mark.parametrize(
    "values, specs, message",
    [
        ({}, [Summary("s", "scalar")], "values lacks s, which specs lists"),
        ({"s": 1.0, "z": 2.0}, [Summary("s", "scalar")], "lacks the summary z"),
        (
            {"s": np.ones(2)},
            [Summary("s", "scalar")],
            r"the scalar s is float64\[2\]; expected a value with ndim in \(0,\)",
        ),
        (
            {"i": np.ones((2, 2, 1), int)},
            [Summary("i", "image")],
            "expected floats from 0 to 1, or uint8",
        ),
        ({"a": np.ones(())}, [Summary("a", "audio")], r"expected a value with ndim in \(1, 2, 3\)"),
    ],
)
def test_what_cannot_be_written_is_named(tmp_path, values, specs, message):
    with SummaryWriter(tmp_path) as writer, pytest.raises(ConfigError, match=message):
        writer.write(0, values, specs)


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        ConfigError, match=r"written with tensorboardX: pip install 'dtrans-jax\[summary\]'"
    ):
        SummaryWriter("nowhere")
