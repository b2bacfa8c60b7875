"""Summaries: values of a step that are shown in TensorBoard, one for each tag whatever the job
looks like.

Inside a step, `scalar`, `histogram`, `image`, `audio` and `text` bind an equation each, without
results and with an effect that keeps it (`dtrans._jax.new_kept`). On one device it does nothing,
and what it looks at is computed only if something else needs it. A pipeline finds these equations
in the loss function it has traced (`summaries`), fetches what they look at from every micro-batch
of every replica, makes one value of it (`merge`), and has it written (`dtrans.SummaryWriter`).
EPL rewrites the summary operations of all clones to read a merged tensor (its `update_summaries`).

What has an effect is not called by JAX's fastest path: calling a jitted step takes some 60
microseconds longer with summaries, however many there are. Programs that have been read can do
without these equations.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import Atom, ClosedJaxpr, equations_inside, new_kept, opened
from dtrans.errors import ConfigError, TraceError
from dtrans.step.collect import GLOBAL_CONCAT, GLOBAL_MEAN, merged


SCALAR, HISTOGRAM, IMAGE, AUDIO, TEXT = KINDS = ("scalar", "histogram", "image", "audio", "text")


def _summary_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    return summary_p.bind(*primals, **params), []


def _summary_batch(
    args: Sequence[Any], dims: Sequence[Any], *, mapped: int, **params: Any
) -> tuple[Any, Any]:
    return summary_p.bind(jnp.moveaxis(args[0], dims[0], 0), mapped=mapped + 1, **params), []


# `mapped`: how many dimensions `jax.vmap` has put in front. `options`: pairs of a name and a value.
summary_p = new_kept("summary", jvp=_summary_jvp, batch=_summary_batch)


# -- inside a step
# -------------------------------------------------------------------------------------


def scalar(tag: str, value: Any) -> None:
    """Show a number over the steps.

    Args:
      tag: its name, of letters, digits and `_ . - /`; each names one summary of a step.
      value: a real number, 0-d. What is shown is the mean over micro-batches and replicas, and over
        what `jax.vmap` has mapped; or, if it was collected (`dtrans.collect`), what its key says.

    Raises:
      ConfigError: a tag that TensorBoard would change, or a value that is no such number.

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
    """Show how the entries of an array are distributed: those of all micro-batches and replicas
    together.

    Args:
      tag: as of `scalar`.
      value: real numbers, of any shape, at least one.

    Raises:
      ConfigError: as of `scalar`.
    """
    array = _checked(HISTOGRAM, tag, value)
    require(array.size > 0, HISTOGRAM, tag, array, "at least one number")
    _bind(HISTOGRAM, tag, array)


def image(tag: str, value: Any) -> None:
    """Show images: those of all micro-batches and replicas, in order, side by side in rows of
    eight.

    Args:
      tag: as of `scalar`.
      value: [height, width, channels] or [images, height, width, channels], of 1, 3 or 4 channels:
        grey, RGB, or with transparency. Floats from 0 to 1 (others are clipped), or 8-bit integers
        from 0 to 255.

    Raises:
      ConfigError: a tag that TensorBoard would change, or a value that is no such image.
    """
    array = _checked(IMAGE, tag, value)
    require(
        array.ndim in (3, 4) and array.shape[-1] in (1, 3, 4),
        IMAGE,
        tag,
        array,
        "[(images,) height, width, 1|3|4]",
    )
    whole = array.dtype == jnp.uint8 or jnp.issubdtype(array.dtype, jnp.floating)
    require(whole, IMAGE, tag, array, "floats from 0 to 1, or uint8")
    _bind(IMAGE, tag, array)


def audio(tag: str, value: Any, sample_rate: int) -> None:
    """Play a clip of sound: those of all micro-batches and replicas, one after the other.

    Args:
      tag: as of `scalar`.
      value: [frames] or [frames, channels], of 1 or 2 channels: floats from -1 to 1 (others are
        clipped).
      sample_rate: frames per second.

    Raises:
      ConfigError: a tag that TensorBoard would change, or a value that is no such clip.
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
        raise ConfigError(
            f"the audio {tag} is of {sample_rate} frames per second; give a positive integer"
        )
    _bind(AUDIO, tag, array, sample_rate=sample_rate)


def text(tag: str, text: str) -> None:
    """Show a text that is known when the step is traced, such as the options of a run. It is
    written once.

    Args:
      tag: as of `scalar`.
      text: Markdown.

    Raises:
      ConfigError: a tag that TensorBoard would change, or something that is no text.
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
            f"the tag of a {kind} is {tag!r}; tags are of letters, digits and _ . - / (not in "
            "front)"
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
    if not holds:
        raise ConfigError(
            f"the {kind} {tag} is {array.dtype}{list(array.shape)}; it must be {what}"
        )


# -- in a traced step
# ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Summary:
    """One summary of a traced step.

    Attributes:
      tag, kind: as they are; kinds are those of `KINDS`.
      atom: what it looks at; None for a text.
      options: `sample_rate` of audio, `text` of a text.
      mapped: how many dimensions `jax.vmap` has put in front of its value.
    """

    tag: str
    kind: str
    atom: Atom | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mapped: int = 0


def summaries(jaxpr: ClosedJaxpr) -> list[Summary]:
    """The summaries of a flattened jaxpr, in order.

    Args:
      jaxpr: with calls inlined.

    Raises:
      ConfigError: two summaries of one tag.
      TraceError: a summary inside a loop, a branch or a rematerialised function, where nothing else
        can see its value.
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
    """What is shown, of the values of all micro-batches of all replicas.

    Args:
      summary: what is shown, and how; not a text, which has no values.
      micro: the values of its `atom`, as [replica][micro-batch].
      key: the collection that `atom` is in, if it is in one.

    Returns:
      By the key, if there is one (`dtrans.step.collect.merged`), and otherwise the mean of scalars,
      and all of the others, micro-batch after micro-batch and replica after replica. A 0-d array
      for a scalar, [entries] for a histogram, [images, height, width, channels], or [clips, frames,
      channels].

    Raises:
      ConfigError: as `dtrans.step.collect.merged`.
    """
    if key is None:
        rule = GLOBAL_MEAN if summary.kind == SCALAR else GLOBAL_CONCAT
        return merged(rule, [[_shaped(summary, x) for x in replica] for replica in micro])
    value = merged(key, micro)
    if summary.kind == IMAGE and micro[0][0].dtype == jnp.uint8 != value.dtype:
        value = jnp.clip(jnp.round(value), 0, 255).astype(jnp.uint8)
    return _shaped(summary, value)


def _shaped(summary: Summary, value: Any) -> Any:
    """A value with the dimensions that are shown."""
    array = jnp.asarray(value)
    if summary.kind == SCALAR:
        return jnp.mean(array) if array.ndim else array
    if summary.kind == IMAGE:
        return array.reshape(-1, *array.shape[-3:])
    if summary.kind == AUDIO:
        frames, channels = (*array.shape[summary.mapped :], 1)[:2]
        return array.reshape(-1, frames, channels)
    return array.reshape(-1)


# -- written
# -------------------------------------------------------------------------------------------
