"""Options of parameter servers: records of update modes and of the placement of blocks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from dtrans.checks import check_flag, check_int, check_number, check_one_of, check_type
from dtrans.errors import ConfigError
from dtrans.ops import ON_TRAINER_EXIT, CommunicatorConfig
from dtrans.parameter_server.dispatch import PSDispatcher, RoundRobin, check_dispatcher
from dtrans.step.batch_sharing import Batch


@dataclasses.dataclass(frozen=True)
class DelayCompensation:
    """Compensation of gradients of old parameters for their delay; see
    `dtrans.parameter_server.dc_asgd`.

    Attributes:
      strength: lambda, or lambda0 of the adaptive variant.
      decay: decay of the mean square of gradients in the adaptive variant, e.g. 0.95; None for a
        fixed lambda.

    Raises:
      ConfigError: a value that is out of range.

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
    """Every update uses the gradients of all trainers.

    Attributes:
      runtime_split: leaves are cut into blocks when trainers run, and not by their programs
        (Paddle's `completely_not_async`). Numbers are the same.

    Raises:
      ConfigError: a value that is out of range.

    Example:
      >>> import dtrans
      >>> dtrans.Sync().runtime_split
      False
    """

    runtime_split: bool = False

    def __post_init__(self) -> None:
        check_flag("runtime_split", self.runtime_split)


@dataclasses.dataclass(frozen=True)
class Async:
    """Every gradient is an update of its own, as soon as it comes.

    No trainer waits for another, and a step of theirs is the sum of what each would do.

    Attributes:
      delay: how gradients are compensated for their delay, if they are.
      communicator: what sends gradients and receives parameters beside the steps, if anything does.
        Gradients are put into its queue, and a step goes on with the parameters that it has
        received last, so that it waits for nothing. Where sending is slower than the steps,
        gradients of several steps are merged.

    Raises:
      ConfigError: a value that is out of range, or both.

    Example:
      >>> import dtrans
      >>> dtrans.Async(delay=dtrans.DelayCompensation(0.5)).delay.strength
      0.5
    """

    delay: DelayCompensation | None = None
    communicator: CommunicatorConfig | None = None

    def __post_init__(self) -> None:
        check_type("delay", self.delay, OPTIONAL_DELAY, "a dtrans.DelayCompensation or None")
        if self.communicator is not None:
            check_type("communicator", self.communicator, CommunicatorConfig)
        if self.delay is not None and self.communicator is not None:
            raise ConfigError(
                "delay and communicator: a server knows what a trainer has received, not which of "
                "that a step has that "
                "does not wait; use dtrans.HalfAsync"
            )


@dataclasses.dataclass(frozen=True)
class HalfAsync:
    """As `Async` with a communicator, for which steps wait: what they sent is sent, and what was
    made of it received.

    Attributes:
      delay: how gradients are compensated for their delay, if they are.
      communicator: what sends and receives.

    Raises:
      ConfigError: a value that is out of range.

    Example:
      >>> import dtrans
      >>> dtrans.HalfAsync(delay=dtrans.DelayCompensation(0.5)).communicator.max_merge_var_num
      20
    """

    delay: DelayCompensation | None = None
    communicator: CommunicatorConfig = CommunicatorConfig()

    def __post_init__(self) -> None:
        check_type("delay", self.delay, OPTIONAL_DELAY, "a dtrans.DelayCompensation or None")
        check_type("communicator", self.communicator, CommunicatorConfig)


@dataclasses.dataclass(frozen=True)
class Geo:
    """Trainers train by themselves, and servers add up what has changed; see
    `dtrans.parameter_server.geo_sgd`.

    Attributes:
      push_every: after how many steps a trainer gives the servers what has changed.
      block_on_pull: let that step wait for what others have changed; otherwise it is in the results
        of the first step that finds it there.

    Of a table (`sparse=`) a trainer keeps the rows that it has looked up; it gives and is told of
    rows.

    Raises:
      ConfigError: a value that is out of range.

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
    """Rules by which leaves are cut into blocks, and blocks are assigned to servers.

    Attributes:
      slice_var_up: cut leaves into blocks of rows; otherwise every leaf is whole on one server. A
        leaf that the optimizer cannot update in blocks stays whole, and the plan gives the reason;
        "require" makes that an error.
      split_method: a subclass of `PSDispatcher`: `RoundRobin`, `HashName`, or one of the user's.
      min_block_size: the least number of elements of a block, at least 1.
      seed: seed of the order in which whole leaves are dispatched if `slice_var_up` is off.

    Raises:
      ConfigError: a value that is out of range.

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
    """Raise ConfigError for options that cannot be planned, by name. Returns how the batch is
    shared."""
    check_int("trainers", trainers, "a positive number of trainers")
    check_type("mode", mode, (Sync, Async, HalfAsync, Geo))
    check_type("placement", placement, BlockPlacement)
    check_one_of("on_trainer_exit", on_trainer_exit, ON_TRAINER_EXIT)
    if on_trainer_exit != "drop" and not isinstance(mode, Sync):
        raise ConfigError(
            f"on_trainer_exit={on_trainer_exit!r} is for synchronous updates: asynchronous ones "
            "never combine "
            "gradients of several trainers"
        )
    found = Batch.from_option(batch, "local" if isinstance(mode, Geo) else "exact")
    if not found.exact:
        found.check_axes()
    if found.exact and found.merge:
        raise ConfigError(
            f"merge={dict(found.merge)!r} is for batch='local': an exact step says so itself"
        )
    if found.example_count is not None or (found.unsplit_inputs and not found.exact):
        raise ConfigError(
            f"batch={batch!r}: with parameter servers it has merge alone where it is local; "
            "plan.on_mesh(unsplit_inputs=...) gives arrays to every trainer whole"
        )
    if found.merge and isinstance(mode, Geo):
        raise ConfigError(
            f"merge={found.merge!r} with dtrans.Geo: what no gradient enters is each trainer's own"
        )
    found.check_merge(("mean", "own"))
    return found
