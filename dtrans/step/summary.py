"""Summaries: values of a step that a user records for TensorBoard, also in distributed jobs.

A user calls `scalar`, `histogram`, `image`, `audio` or `text` inside the step. A pipeline computes
a step in micro-batches on several replicas, but TensorBoard gets one value per tag and step.

Each call binds one equation without outputs. The equation has an effect, so that JAX does not
remove it. On one device the equation does nothing: XLA computes its operand only if another
equation needs the operand. A pipeline finds the equations in the traced loss function
(`summaries`), and fetches their operands from every micro-batch of every replica. Then the pipeline
merges the operands (`merge`) and writes the result (`dtrans.SummaryWriter`).
Source: `update_summaries` of EPL, which rewrites the summary operations of all clones to read a
merged tensor.

JAX does not use its fastest call path for functions with effects. A call of a jitted step with
summaries therefore takes about 60 microseconds longer, for any number of summaries.
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


# The parameter `mapped` is the number of leading dimensions that `jax.vmap` added; `options` is a
# tuple of (name, value).
summary_p = new_effectful("summary", jvp=_summary_jvp, batch=_summary_batch)


# -- inside a step ---------------------------------------------------------------------------------


def scalar(tag: str, value: Any) -> None:
    """Record a number in each step, as a curve in TensorBoard.

    Args:
      tag: name of the summary, made of letters, digits and `_ . - /`. Two summaries of a step
        cannot have the same tag.
      value: a 0-d array of real numbers. By default, its mean over micro-batches, replicas, and
        dimensions from `jax.vmap` is recorded. If it was marked by `dtrans.collect`, the key of
        that call decides.

    Raises:
      ConfigError: the tag has other characters, or the value is not one real number.

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
    """Record the distribution of an array's entries over all micro-batches and replicas.

    Args:
      tag: as in `scalar`.
      value: a nonempty array of real numbers, of any shape.

    Raises:
      ConfigError: the tag has other characters, or the value is empty or not real.
    """
    array = _checked(HISTOGRAM, tag, value)
    require(array.size > 0, HISTOGRAM, tag, array, "at least one number")
    _bind(HISTOGRAM, tag, array)


def image(tag: str, value: Any) -> None:
    """Record the images of all micro-batches and replicas, in order, in rows of eight.

    Args:
      tag: as in `scalar`.
      value: [height, width, channels] or [images, height, width, channels], with 1, 3 or 4
        channels: grey, RGB, or RGBA. Floats are clipped to 0 to 1; 8-bit integers are 0 to 255.

    Raises:
      ConfigError: the tag has other characters, or the value is not an image.
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
    """Record the sound clips of all micro-batches and replicas, in order.

    Args:
      tag: as in `scalar`.
      value: [frames] or [frames, channels], with 1 or 2 channels: floats, clipped to -1 to 1.
      sample_rate: frames per second.

    Raises:
      ConfigError: the tag has other characters, or the value is not a sound clip.
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
    """Record a text once in a run, such as the options of the run.

    Args:
      tag: as in `scalar`.
      text: Markdown, known when the step is traced.

    Raises:
      ConfigError: the tag has other characters, or the text is not a string.
    """
    _check_tag(TEXT, tag)
    if not isinstance(text, str):
        raise ConfigError(
            f"the text {tag} is a {type(text).__name__}; expected a str that is known when the "
            "step is traced"
        )
    _bind(TEXT, tag, text=text)


def _bind(kind: str, tag: str, *operands: Any, **options: Any) -> None:
    summary_p.bind(*operands, tag=tag, kind=kind, mapped=0, options=tuple(sorted(options.items())))


def _check_tag(kind: str, tag: Any) -> None:
    if not isinstance(tag, str) or not re.fullmatch(r"[-\w.][-/\w.]*", tag):
        raise ConfigError(
            f"the tag of a {kind} is {tag!r}; a tag has letters, digits and _ . - /, and does not "
            "start with /"
        )


def _checked(kind: str, tag: str, value: Any) -> jax.Array:
    _check_tag(kind, tag)
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, int, float)):
        raise ConfigError(f"the {kind} {tag} is {value!r}; expected an array")
    array = jnp.asarray(value)
    is_number = jnp.issubdtype(array.dtype, jnp.number)
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    is_real = (is_number and not is_complex) or array.dtype == jnp.bool_
    require(is_real, kind, tag, array, "real numbers")
    return array


def require(is_valid: bool, kind: str, tag: str, array: Any, expected: str) -> None:
    """Raise ConfigError if a summary's value has a wrong type.

    Args:
      is_valid: the condition; the function does nothing if it is True.
      kind, tag: kind and tag of the summary, for the message.
      array: the value.
      expected: description of the expected type.
    """
    if not is_valid:
        raise ConfigError(
            f"the {kind} {tag} is {array.dtype}{list(array.shape)}; expected {expected}"
        )


# -- in a traced step ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Summary:
    """One call of a summary function (`scalar`, `image`, ...) that was found in a traced step.

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
    """Find the summaries that a traced step records, in order.

    Args:
      jaxpr: the jaxpr, with calls inlined.

    Raises:
      ConfigError: two summaries have one tag.
      TraceError: a summary is inside a loop, a branch or a rematerialised function.
    """
    found: dict[str, Summary] = {}
    for eqn in opened(jaxpr).eqns:
        for inner in equations_inside(eqn):
            if inner.primitive is summary_p:
                raise TraceError(
                    f"the {inner.params['kind']} {inner.params['tag']} is inside a "
                    f"{eqn.primitive.name}; return its value from the {eqn.primitive.name}, and "
                    "call dtrans.summary outside"
                )
        if eqn.primitive is not summary_p:
            continue
        p = eqn.params
        if p["tag"] in found:
            raise ConfigError(
                f"the tag {p['tag']} is used by a {found[p['tag']].kind} and a {p['kind']} of one "
                "step; use two tags"
            )
        atom = eqn.invars[0] if eqn.invars else None
        found[p["tag"]] = Summary(p["tag"], p["kind"], atom, dict(p["options"]), p["mapped"])
    return list(found.values())


def merge(summary: Summary, micro: Sequence[Sequence[Any]], key: str | None = None) -> Any:
    """Merge a summary's values from all micro-batches and replicas into the value to record.

    Args:
      summary: the summary, other than a text.
      micro: values of its `atom`, indexed by [replica][micro-batch].
      key: key under which the user collected `atom`; None if it was not collected.

    Returns:
      The value, merged by `key` (`dtrans.step.collect.merged`). Without a key, scalars are averaged
      and arrays are concatenated in order. Its shape is [] for a scalar, [entries] for a histogram,
      [images, height, width, channels], or [clips, frames, channels].

    Raises:
      ConfigError: `key` cannot merge the values, as in `dtrans.step.collect.merged`.
    """
    if key is None:
        shaped = []
        for replica in micro:
            shaped.append([_shaped(summary, x) for x in replica])
        return merged(GLOBAL_MEAN if summary.kind == SCALAR else GLOBAL_CONCAT, shaped)
    value = merged(key, micro)
    if summary.kind == IMAGE and micro[0][0].dtype == jnp.uint8 != value.dtype:
        value = jnp.clip(jnp.round(value), 0, 255).astype(jnp.uint8)
    return _shaped(summary, value)


def _shaped(summary: Summary, value: Any) -> Any:
    """Reshape a summary's value to the shape that TensorBoard needs.

    `merge` lists these shapes. The array of a scalar summary is averaged to shape [].
    """
    array = jnp.asarray(value)
    if summary.kind == SCALAR:
        return jnp.mean(array) if array.ndim else array
    if summary.kind == IMAGE:
        return array.reshape(-1, *array.shape[-3:])
    if summary.kind == AUDIO:
        frames, channels = (*array.shape[summary.mapped :], 1)[:2]
        return array.reshape(-1, frames, channels)
    return array.reshape(-1)
