"""Summaries written as TensorBoard events.

Audio clips are encoded with Python's `wave`, because tensorboardX would need another library.
"""

from __future__ import annotations

import io
import itertools
import os
import wave
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dtrans.errors import ConfigError, missing_extra
from dtrans.step.summary import AUDIO, HISTOGRAM, IMAGE, SCALAR, TEXT, Summary, require


_files = itertools.count()


class SummaryWriter:
    """Writer of summaries as TensorBoard events, with tensorboardX; a context manager.

    Args:
      logdir: the folder of events, which the writer creates if it does not exist. Each writer adds
        one file.

    Raises:
      ConfigError: tensorboardX is not installed.

    Example:
      >>> import tempfile, pathlib
      >>> import dtrans
      >>> summary = dtrans.summary.Summary("loss", "scalar")
      >>> with tempfile.TemporaryDirectory() as logdir:
      ...     with dtrans.SummaryWriter(logdir) as writer:
      ...         writer.write(0, {"loss": 0.5}, [summary])
      ...     len(list(pathlib.Path(logdir).iterdir()))
      1
    """

    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        try:
            import tensorboardX
        except ImportError as e:
            raise missing_extra("summaries are written with tensorboardX", "summary") from e
        # tensorboardX names files by the second, so two writers would use one file
        self._writer = tensorboardX.SummaryWriter(
            os.fspath(logdir), filename_suffix=f".{os.getpid()}.{next(_files)}"
        )
        self._texts: set[str] = set()

    def __enter__(self) -> SummaryWriter:
        return self

    def __exit__(self, *failed: object) -> None:
        self.close()

    def close(self) -> None:
        """Flush the file and close it."""
        self._writer.close()

    def write(self, step: int, values: Mapping[str, Any], specs: Iterable[Summary]) -> None:
        """Write the summaries of one step. A text is written only once.

        Args:
          step: index of the step.
          values: maps each tag to its value, as `dtrans.step.summary.merge` returns it. An image
            may also be [height, width, channels], and audio [frames] or [frames, channels].
          specs: the summaries to write. A text summary contains its text, and needs no value.

        Raises:
          ConfigError: a summary has no value, or a value has no summary; an array has the wrong
            rank; a histogram contains infinities or NaNs.
        """
        shown = {s.tag: s for s in specs}
        missing = [t for t, s in shown.items() if s.kind != TEXT and t not in values]
        if missing:
            raise ConfigError(
                f"values lacks {', '.join(missing)}, which specs lists; add the value"
            )
        unknown = [t for t in values if t not in shown]
        if unknown:
            raise ConfigError(
                f"specs lacks the summary {', '.join(unknown)}, which values contains; add the "
                "summary"
            )
        for tag, s in shown.items():
            if s.kind != TEXT:
                self._write(step, s, np.asarray(values[tag]))
            elif tag not in self._texts:
                self._texts.add(tag)
                self._writer.file_writer.add_summary(_text_event(tag, s.options["text"]), step)

    def _write(self, step: int, s: Summary, array: np.ndarray[Any, Any]) -> None:
        if array.dtype.kind not in "biuf":  # NumPy itself lacks some types, such as bfloat16
            array = array.astype(np.float32)
        ranks = {SCALAR: (0,), IMAGE: (3, 4), AUDIO: (1, 2, 3)}.get(s.kind)
        is_valid = ranks is None or array.ndim in ranks
        require(is_valid, s.kind, s.tag, array, f"a value with ndim in {ranks}")
        if s.kind == SCALAR:
            self._writer.add_scalar(s.tag, float(array), step)
        elif s.kind == HISTOGRAM:
            array = array.astype(np.float64)
            wrong = int(np.sum(~np.isfinite(array)))
            if wrong:
                raise ConfigError(
                    f"the histogram {s.tag} of step {step} has {wrong} entries that are not "
                    "finite; leave out infinities and NaNs"
                )
            self._writer.add_histogram(s.tag, array, step)
        elif s.kind == IMAGE:
            images = array.reshape(-1, *array.shape[-3:])
            if images.dtype != np.uint8:
                require(
                    images.dtype.kind == "f", IMAGE, s.tag, array, "floats from 0 to 1, or uint8"
                )
                images = np.rint(255 * np.clip(np.nan_to_num(images), 0, 1)).astype(np.uint8)
            self._writer.add_images(s.tag, images, step, dataformats="NHWC")
        else:
            clips = array.reshape(-1, 1) if array.ndim == 1 else array.reshape(-1, array.shape[-1])
            self._writer.file_writer.add_summary(
                _audio_event(s.tag, clips, s.options["sample_rate"]), step
            )


def _text_event(tag: str, text: str) -> Any:
    from tensorboardX.summary import text as encoded

    event = encoded(tag, text)
    event.value[0].tag = tag  # tensorboardX appends "/text_summary" to the tag
    return event


def _audio_event(tag: str, frames: np.ndarray[Any, Any], sample_rate: int) -> Any:
    """Encode a clip [frames, channels] as a WAV file of 16 bits."""
    from tensorboardX.proto.summary_pb2 import Summary as Event

    with io.BytesIO() as file:
        with wave.open(file, "wb") as clip:
            clip.setnchannels(frames.shape[1])
            clip.setsampwidth(2)
            clip.setframerate(sample_rate)
            clip.writeframes(
                np.rint(32767 * np.clip(np.nan_to_num(frames), -1, 1)).astype("<i2").tobytes()
            )
        encoded = file.getvalue()
    audio = Event.Audio(
        sample_rate=sample_rate,
        num_channels=frames.shape[1],
        length_frames=frames.shape[0],
        encoded_audio_string=encoded,
        content_type="audio/wav",
    )
    return Event(value=[Event.Value(tag=tag, audio=audio)])
