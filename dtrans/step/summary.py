"""Summaries: values of a step for TensorBoard, one for each tag in every kind of job.

Inside a step, `scalar`, `histogram`, `image`, `audio` and `text` bind one equation each, without
outputs and with an effect that keeps it (`dtrans._jax.new_effectful`). On one device it does
nothing, and its operand is computed only if something else needs it. A pipeline finds these
equations in the traced loss function (`summaries`) and fetches their operands from every
micro-batch of every replica. It merges them (`merge`), and writes the result
(`dtrans.SummaryWriter`). EPL rewrites the summary operations of all clones to read a merged tensor
(its `update_summaries`).

JAX's fastest call path skips functions with effects: a call of a jitted step with summaries takes
about 60 microseconds longer, for any number of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import Atom, ClosedJaxpr, equations_inside, new_effectful, opened
from dtrans.errors import ConfigError, TraceError
from dtrans.step.collect import GLOBAL_CONCAT, GLOBAL_MEAN, merged


SCALAR, HISTOGRAM, IMAGE, AUDIO, TEXT = KINDS = ("scalar", "histogram", "image", "audio", "text")


def _summary_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    return summary_p.bind(*primals, **params), []


def _summary_batch(
    args: Sequence[Any], dims: Sequence[Any], *, mapped: int, **params: Any
) -> tuple[Any, Any]:
    return summary_p.bind(jnp.moveaxis(args[0], dims[0], 0), mapped=mapped + 1, **params), []


# `mapped`: number of leading dimensions from `jax.vmap`. `options`: pairs of a name and a value.
summary_p = new_effectful("summary", jvp=_summary_jvp, batch=_summary_batch)


# -- inside a step ---------------------------------------------------------------------------------


def scalar(tag: str, value: Any) -> None:
    """Show a number over the steps.

    Args:
      tag: its name, of letters, digits and `_ . - /`; each names one summary of a step.
      value: a real number, 0-d. By default the mean over micro-batches, replicas and dimensions
        from `jax.vmap` is shown. If it was collected (`dtrans.collect`), its key decides.

    Raises:
      ConfigError: a tag that TensorBoard would change, or a value that is not a real number.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans import summary
      >>> def loss_fn(w, x):
      ...     loss = jnp.mean((x @ w) ** 2)
      ...     summary.scalar("train/loss", loss)
      ...     return loss
      >>> jax.grad(loss_fn)(jnp.ones(2), jnp.ones((3, 2))).tolist()
      [4.0, 4.0]
    """
    array = _checked(SCALAR, tag, value)
    require(array.ndim == 0, SCALAR, tag, array, "one number, such as a mean")
    _bind(SCALAR, tag, array)


def histogram(tag: str, value: Any) -> None:
    """Show the distribution of an array's entries, over all micro-batches and replicas.

    Args:
      tag: as in `scalar`.
      value: real numbers, of any shape, at least one.

    Raises:
      ConfigError: as `scalar`.
    """
    array = _checked(HISTOGRAM, tag, value)
    require(array.size > 0, HISTOGRAM, tag, array, "at least one number")
    _bind(HISTOGRAM, tag, array)


def image(tag: str, value: Any) -> None:
    """Show images of all micro-batches and replicas, in order, in rows of eight.

    Args:
      tag: as in `scalar`.
      value: [height, width, channels] or [images, height, width, channels], with 1, 3 or 4
        channels: grey, RGB, or RGBA. Floats from 0 to 1 (others are clipped), or 8-bit integers
        from 0 to 255.

    Raises:
      ConfigError: a tag that TensorBoard would change, or a value that is not an image.
    """
    array = _checked(IMAGE, tag, value)
    require(
        array.ndim in (3, 4) and array.shape[-1] in (1, 3, 4),
        IMAGE,
        tag,
        array,
        "[(images,) height, width, 1|3|4]",
    )
    is_image = array.dtype == jnp.uint8 or jnp.issubdtype(array.dtype, jnp.floating)
    require(is_image, IMAGE, tag, array, "floats from 0 to 1, or uint8")
    _bind(IMAGE, tag, array)


def audio(tag: str, value: Any, sample_rate: int) -> None:
    """Record sound clips of all micro-batches and replicas, in order.

    Args:
      tag: as in `scalar`.
      value: [frames] or [frames, channels], with 1 or 2 channels: floats from -1 to 1 (others are
        clipped).
      sample_rate: frames per second.

    Raises:
      ConfigError: a tag that TensorBoard would change, or a value that is not a clip.
    """
    array = _checked(AUDIO, tag, value)
    require(
        array.ndim == 1 or (array.ndim == 2 and array.shape[1] in (1, 2)),
        AUDIO,
        tag,
        array,
        "[frames(, 1|2)]",
    )
    require(
        bool(jnp.issubdtype(array.dtype, jnp.floating)), AUDIO, tag, array, "floats from -1 to 1"
    )
    if int(sample_rate) != sample_rate or sample_rate < 1:
        raise ConfigError(f"the audio {tag} has sample_rate={sample_rate}; give a positive integer")
    _bind(AUDIO, tag, array, sample_rate=sample_rate)


def text(tag: str, text: str) -> None:
    """Show a text that is known when the step is traced, such as options of a run; it is written
    once.

    Args:
      tag: as in `scalar`.
      text: Markdown.

    Raises:
      ConfigError: a tag that TensorBoard would change, or a value that is not a string.
    """
    _check_tag(TEXT, tag)
    if not isinstance(text, str):
        raise ConfigError(
            f"the text {tag} is {type(text).__name__}; it must be a str, known when the step is "
            "traced"
        )
    _bind(TEXT, tag, text=text)


def _bind(kind: str, tag: str, *operands: Any, **options: Any) -> None:
    summary_p.bind(*operands, tag=tag, kind=kind, mapped=0, options=tuple(sorted(options.items())))


def _check_tag(kind: str, tag: Any) -> None:
    if not isinstance(tag, str) or not re.fullmatch(r"[-\w.][-/\w.]*", tag):
        raise ConfigError(
            f"the tag of a {kind} is {tag!r}; tags have letters, digits and _ . - / (not in front)"
        )


def _checked(kind: str, tag: str, value: Any) -> jax.Array:
    _check_tag(kind, tag)
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, int, float)):
        raise ConfigError(f"the {kind} {tag} is {value!r}; it must be an array")
    array = jnp.asarray(value)
    real = not jnp.issubdtype(array.dtype, jnp.complexfloating) and jnp.issubdtype(
        array.dtype, jnp.number
    )
    require(real or array.dtype == jnp.bool_, kind, tag, array, "real numbers")
    return array


def require(holds: bool, kind: str, tag: str, array: Any, what: str) -> None:
    """Raise ConfigError unless the array of a summary is as its kind needs it."""
    if not holds:
        raise ConfigError(
            f"the {kind} {tag} is {array.dtype}{list(array.shape)}; it must be {what}"
        )


# -- in a traced step ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Summary:
    """Summary of a traced step.

    Attributes:
      tag, kind: tag, and one of `KINDS`.
      atom: value to show; None for a text.
      options: `sample_rate` of audio, `text` of a text.
      mapped: number of leading dimensions from `jax.vmap`.
    """

    tag: str
    kind: str
    atom: Atom | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mapped: int = 0


def summaries(jaxpr: ClosedJaxpr) -> list[Summary]:
    """Return the summaries of a flattened jaxpr, in order.

    Args:
      jaxpr: equations, with calls inlined.

    Raises:
      ConfigError: two summaries with one tag.
      TraceError: a summary inside a loop, a branch or a rematerialised function, whose value the
        step cannot return.
    """
    found: dict[str, Summary] = {}
    for eqn in opened(jaxpr).eqns:
        for inner in equations_inside(eqn):
            if inner.primitive is summary_p:
                raise TraceError(
                    f"the {inner.params['kind']} {inner.params['tag']} is inside "
                    f"{eqn.primitive.name}, and its value "
                    "cannot be seen from outside; return the value from there, and give that to "
                    "dtrans.summary"
                )
        if eqn.primitive is not summary_p:
            continue
        p = eqn.params
        if p["tag"] in found:
            raise ConfigError(
                f"the tag {p['tag']} names a {found[p['tag']].kind} and a {p['kind']} of one step; "
                "give each its own"
            )
        atom = eqn.invars[0] if eqn.invars else None
        found[p["tag"]] = Summary(p["tag"], p["kind"], atom, dict(p["options"]), p["mapped"])
    return list(found.values())


def merge(summary: Summary, micro: Sequence[Sequence[Any]], key: str | None = None) -> Any:
    """Merge the values of all micro-batches of all replicas into the value to show.

    Args:
      summary: the summary; not a text, which has no values.
      micro: values of its `atom`, as [replica][micro-batch].
      key: collection of `atom`, if any.

    Returns:
      The merge by `key` (`dtrans.step.collect.merged`). Without a key, the mean of scalars, and the
      concatenation of others in order. A 0-d array for a scalar, [entries] for a histogram,
      [images, height, width, channels], or [clips, frames, channels].

    Raises:
      ConfigError: as `dtrans.step.collect.merged`.
    """
    if key is None:
        rule = GLOBAL_MEAN if summary.kind == SCALAR else GLOBAL_CONCAT
        shaped = []
        for replica in micro:
            shaped.append([_shaped(summary, x) for x in replica])
        return merged(rule, shaped)
    value = merged(key, micro)
    if summary.kind == IMAGE and micro[0][0].dtype == jnp.uint8 != value.dtype:
        value = jnp.clip(jnp.round(value), 0, 255).astype(jnp.uint8)
    return _shaped(summary, value)


def _shaped(summary: Summary, value: Any) -> Any:
    """Return a value with the dimensions to show."""
    array = jnp.asarray(value)
    if summary.kind == SCALAR:
        return jnp.mean(array) if array.ndim else array
    if summary.kind == IMAGE:
        return array.reshape(-1, *array.shape[-3:])
    if summary.kind == AUDIO:
        frames, channels = (*array.shape[summary.mapped :], 1)[:2]
        return array.reshape(-1, frames, channels)
    return array.reshape(-1)
