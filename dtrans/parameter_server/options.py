"""Options of parameter servers: update modes, and the placement of blocks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, Self

from dtrans.checks import (
    check_flag,
    check_int,
    check_number,
    check_one_of,
    check_together,
    check_type,
)
from dtrans.errors import ConfigError
from dtrans.ops import CASTS, ON_TRAINER_EXIT, WIRE_TYPES, CommunicatorConfig
from dtrans.parameter_server.dispatch import PSDispatcher, RoundRobin, check_dispatcher
from dtrans.parameter_server.topk import TopK
from dtrans.step.batch_sharing import Batch
from dtrans.step.local_clip import check_local_clip


@dataclasses.dataclass(frozen=True)
class DelayCompensation:
    """Options of DC-ASGD: servers correct gradients that were computed with older parameters.

    For the formulas see `dtrans.parameter_server.dc_asgd`.

    Attributes:
      strength: lambda, or lambda0 of the adaptive variant.
      decay: decay of the mean squares of gradients in the adaptive variant, for example 0.95; None
        for a fixed lambda.

    Raises:
      ConfigError: a value is out of range.

    Example:
      >>> import dtrans
      >>> dtrans.DelayCompensation(0.5, decay=0.95).strength
      0.5
    """

    strength: float = 1.0
    decay: float | None = None

    def __post_init__(self) -> None:
        check_number("strength", self.strength, "a number, 0 or more", lambda x: 0 <= x < math.inf)
        check_number(
            "decay", self.decay, "a number from 0 to 1", lambda x: 0 <= x < 1, or_none=True
        )


OPTIONAL_DELAY = (DelayCompensation, type(None))


@dataclasses.dataclass(frozen=True)
class Sync:
    """Synchronous mode: every update uses the gradients of all trainers.

    Attributes:
      runtime_split: True if the equations `send` and `recv` transfer full leaves, and the runtime
        cuts and joins the servers' blocks (Paddle's `completely_not_async`). With False, the
        trainer's program has separate equations that cut and concatenate. Results are equal.
      compress: the type in which trainers send gradients; None for the leaf's own type. Servers add
        the gradients in the leaf's own type. With compression, results differ from those of one
        device.

        - "bf16" or "fp16": a cast to 16 bits.
        - "int8": one byte for each number, and a scale for each block.
        - "e3m0": half a byte for each number (the nearest power of two), and a scale for each
          block.
        - a `dtrans.TopK`: the largest numbers, with their indices.

        With "int8", "e3m0" and `dtrans.TopK` a trainer adds the rounding errors of a step to its
        next gradients (error feedback).
      compress_scale: the factor that multiplies gradients before the cast to "bf16" or "fp16", and
        divides them after it.
      compress_params: "bf16" or "fp16": the type in which servers send parameters. Servers update
        parameters that are not rounded.

    Raises:
      ConfigError: a value is out of range, or two options contradict each other.

    Example:
      >>> import dtrans
      >>> dtrans.Sync(compress="bf16").runtime_split
      False
    """

    runtime_split: bool = False
    compress: str | TopK | None = None
    compress_scale: float = 1.0
    compress_params: str | None = None

    def __post_init__(self) -> None:
        check_flag("runtime_split", self.runtime_split)
        check_one_of("compress", self.compress, (*WIRE_TYPES, None), TopK)
        check_one_of("compress_params", self.compress_params, (*CASTS, None))
        check_number("compress_scale", self.compress_scale, "a positive number", lambda x: x > 0)
        if self.compress not in CASTS and self.compress_scale != 1.0:
            raise ConfigError(
                f"compress_scale={self.compress_scale!r} needs compress='bf16' or 'fp16', but "
                f"compress is {self.compress_text}; leave compress_scale out"
            )
        if self.runtime_split:
            why = "trainers encode each block before they send it; leave one of the two options out"
            check_together(self.compression, why, "runtime_split=True")

    @property
    def compress_text(self) -> str:
        """The value of `compress` as text, for error messages."""
        return "dtrans.TopK(...)" if isinstance(self.compress, TopK) else repr(self.compress)

    @property
    def compression(self) -> dict[str, bool]:
        """Options that compress messages, as text for errors; True for each one that is set.

        For `Sync(compress="bf16")`: `{"compress='bf16'": True, "compress_params=None": False}`.
        """
        return {
            f"compress={self.compress_text}": self.compress is not None,
            f"compress_params={self.compress_params!r}": self.compress_params is not None,
        }


class _FullMessages:
    """Base of the modes without compression, which name the mode that has it."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        for name in ("compress", "compress_scale", "compress_params"):
            if name in options:
                raise ConfigError(
                    f"dtrans.{cls.__name__} has no option {name}: only synchronous trainers send "
                    f"smaller messages; pass mode=dtrans.Sync({name}=...), or leave {name} out"
                )
        return super().__new__(cls)


@dataclasses.dataclass(frozen=True)
class Async(_FullMessages):
    """Asynchronous mode: a server applies each gradient as soon as it arrives.

    Trainers do not wait for each other.

    Attributes:
      delay: options of delay compensation; None turns it off.
      communicator: options of a background thread that sends gradients and receives parameters. A
        step puts its gradients into a queue, and continues with the parameters received last. If
        sends are slower than steps, the thread merges the gradients of several steps. None: no
        thread; each step waits for its sends and receives.
      clip_local_norm, clip_local_by: each trainer clips its gradients before it sends them; see
        `dtrans.Reduce`. (A clip by norm in the optimizer needs all gradients at once, which
        asynchronous servers do not have.)

    Raises:
      ConfigError: a value is out of range, or both `delay` and `communicator` are set.

    Example:
      >>> import dtrans
      >>> dtrans.Async(delay=dtrans.DelayCompensation(0.5)).delay.strength
      0.5
    """

    delay: DelayCompensation | None = None
    communicator: CommunicatorConfig | None = None
    clip_local_norm: float | None = None
    clip_local_by: str = "global_norm"

    def __post_init__(self) -> None:
        check_local_clip(self.clip_local_norm, self.clip_local_by)
        check_type("delay", self.delay, OPTIONAL_DELAY, "a dtrans.DelayCompensation or None")
        if self.communicator is not None:
            check_type("communicator", self.communicator, CommunicatorConfig)
        if self.delay is not None and self.communicator is not None:
            raise ConfigError(
                "delay and communicator are both set; with a communicator a step does not wait, "
                "so the server cannot know which parameters the step used; use "
                "mode=dtrans.HalfAsync(delay=...)"
            )


@dataclasses.dataclass(frozen=True)
class HalfAsync(_FullMessages):
    """Asynchronous mode in which each step waits until a background thread has sent its gradients.

    The background thread (the communicator) sends gradients and receives parameters. A step ends
    after the thread has sent the step's gradients and received the updated parameters. Trainers do
    not wait for each other.

    Attributes:
      delay: options of delay compensation; None turns it off.
      communicator: options of the background thread that sends and receives.
      clip_local_norm, clip_local_by: each trainer clips its gradients before it sends them; see
        `dtrans.Reduce`. (A clip by norm in the optimizer needs all gradients at once, which
        asynchronous servers do not have.)

    Raises:
      ConfigError: a value is out of range.

    Example:
      >>> import dtrans
      >>> dtrans.HalfAsync(delay=dtrans.DelayCompensation(0.5)).communicator.max_merge_var_num
      20
    """

    delay: DelayCompensation | None = None
    communicator: CommunicatorConfig = CommunicatorConfig()
    clip_local_norm: float | None = None
    clip_local_by: str = "global_norm"

    def __post_init__(self) -> None:
        check_local_clip(self.clip_local_norm, self.clip_local_by)
        check_type("delay", self.delay, OPTIONAL_DELAY, "a dtrans.DelayCompensation or None")
        check_type("communicator", self.communicator, CommunicatorConfig)


@dataclasses.dataclass(frozen=True)
class Geo(_FullMessages):
    """GEO-SGD: trainers update their own parameters, and servers add up the changes.

    For the formulas see `dtrans.parameter_server.geo_sgd`. If a leaf is an embedding table (the
    option `sparse`), a trainer stores only the rows that it looked up. It sends and receives
    changes of these rows only.

    Attributes:
      push_every: the number of steps between two pushes of a trainer's changes to the servers.
      block_on_pull: True if a step that pushes also waits for the changes of other trainers. With
        False, a later step adds them once they have arrived.

    Raises:
      ConfigError: a value is out of range.

    Example:
      >>> import dtrans
      >>> dtrans.Geo(push_every=10).block_on_pull
      False
    """

    push_every: int = 100
    block_on_pull: bool = False

    def __post_init__(self) -> None:
        check_int("push_every", self.push_every, "a positive number of steps")
        check_flag("block_on_pull", self.block_on_pull)


Mode = Sync | Async | HalfAsync | Geo


@dataclasses.dataclass(frozen=True)
class BlockPlacement:
    """Rules that cut leaves into blocks, and assign blocks to servers.

    Attributes:
      slice_var_up: True: leaves are cut into blocks of rows, so that several servers share a leaf.
        Some optimizers cannot update a leaf in blocks. Such a leaf stays in full on one server, and
        the printed plan gives the reason. "require": such a leaf raises OptimizerError. False:
        every leaf is in full on one server.
      split_method: a subclass of `PSDispatcher`: `RoundRobin`, `HashName`, `SizeBalanced`, or a
        subclass that the user defines.
      min_block_size: the minimum number of elements in a block, at least 1.
      seed: with `slice_var_up=False`, the dispatcher gets the leaves in a random order; this is the
        seed of the order.

    Raises:
      ConfigError: a value is out of range.

    Example:
      >>> import dtrans
      >>> dtrans.BlockPlacement(split_method=dtrans.HashName).min_block_size
      8192
    """

    slice_var_up: bool | Literal["require"] = True
    split_method: type[PSDispatcher] = RoundRobin
    min_block_size: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        check_one_of("slice_var_up", self.slice_var_up, (True, False, "require"))
        check_dispatcher(self.split_method)
        check_int("min_block_size", self.min_block_size, "a positive number of elements")
        check_int("seed", self.seed, "an integer from 0 to 2**32 - 1", least=0, most=2**32 - 1)


def check_options(
    trainers: Any, mode: Any, placement: Any, on_trainer_exit: Any, batch: Any
) -> Batch:
    """Check the arguments of `dtrans.pserver`; return the option `batch` as a `Batch`.

    Raises:
      ConfigError: a value is out of range, or two options contradict each other.
    """
    check_int("trainers", trainers, "a positive number of trainers")
    check_type("mode", mode, (Sync, Async, HalfAsync, Geo))
    check_type("placement", placement, BlockPlacement)
    check_one_of("on_trainer_exit", on_trainer_exit, ON_TRAINER_EXIT)
    if on_trainer_exit != "drop" and not isinstance(mode, Sync):
        raise ConfigError(
            f"on_trainer_exit={on_trainer_exit!r} needs mode=dtrans.Sync(), since asynchronous "
            "updates never combine gradients of several trainers; leave on_trainer_exit out"
        )
    found = Batch.from_option(batch, "local" if isinstance(mode, Geo) else "exact")
    if not found.exact:
        found.check_axes()
    if found.exact and found.merge:
        raise ConfigError(
            f"merge={dict(found.merge)!r} needs batch='local', since trainers of an exact step "
            "have equal values; leave merge out"
        )
    if found.example_count is not None or (found.unsplit_inputs and not found.exact):
        raise ConfigError(
            f"batch={batch!r} sets more than merge; with parameter servers, a local batch has no "
            "other option; call plan.on_mesh(unsplit_inputs=...) to replicate arrays"
        )
    if found.merge and isinstance(mode, Geo):
        raise ConfigError(
            f"merge={found.merge!r} cannot be used with dtrans.Geo, where each trainer has "
            "separate values of the leaves without gradients; leave merge out"
        )
    found.check_merge(("mean", "own"))
    _check_speeds(found, trainers, mode)
    if found.has_shares and isinstance(mode, Sync):
        why = "trainers of different speeds send exact gradients; leave one of the two options out"
        check_together(mode.compression, why, "batch=dtrans.Batch(speeds=...)")
    return found


def _check_speeds(batch: Batch, trainers: int, mode: Mode) -> None:
    """Raise ConfigError if `Batch.speeds` does not fit the other options."""
    if not batch.speeds:
        return
    speeds = f"batch=dtrans.Batch(speeds={list(batch.speeds)})"
    if len(batch.speeds) != trainers:
        raise ConfigError(
            f"{speeds} has {len(batch.speeds)} entries, but trainers={trainers}; pass one speed "
            "for each trainer"
        )
    if not isinstance(mode, Sync):
        raise ConfigError(
            f"{speeds} cannot be combined with mode=dtrans.{type(mode).__name__}(...), whose "
            "trainers do not wait for each other, so a fast trainer takes more steps; leave out "
            "speeds"
        )
    if not batch.exact:
        raise ConfigError(
            f"{speeds} cannot be combined with kind={batch.kind!r}, which gives the gradients of "
            "all trainers equal weights; pass kind='exact', or leave out speeds"
        )
