"""Options of parameter servers: update modes, and the placement of blocks."""

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
    """Options of DC-ASGD, which corrects gradients of old parameters for their delay.

    `dtrans.parameter_server.dc_asgd` has the formulas.

    Attributes:
      strength: lambda, or lambda0 of the adaptive variant.
      decay: decay of the mean squares of gradients in the adaptive variant, e.g. 0.95; None for a
        fixed lambda.

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
      runtime_split: True if trainers cut leaves into blocks at run time, without equations for it
        (Paddle's `completely_not_async`). Numbers are equal.

    Raises:
      ConfigError: a value is out of range.

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
    """Asynchronous mode: servers update with each gradient as it arrives.

    Trainers do not wait for each other.

    Attributes:
      delay: delay compensation of gradients; None for none.
      communicator: options of a background thread that sends gradients and receives parameters.
        A step puts its gradients into a queue and continues with the parameters received last. If
        sends are slower than steps, gradients of several steps are merged. None: each step waits
        for its sends and receives.

    Raises:
      ConfigError: a value is out of range, or both are set.

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
                "delay and communicator: a server cannot know which received parameters a step "
                "used that does not wait; use dtrans.HalfAsync"
            )


@dataclasses.dataclass(frozen=True)
class HalfAsync:
    """Asynchronous mode with a communicator for which steps wait.

    A step waits until its gradients are sent, and the parameters after their updates received.

    Attributes:
      delay: delay compensation of gradients; None for none.
      communicator: options of the background thread that sends and receives.

    Raises:
      ConfigError: a value is out of range.

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
    """GEO-SGD: trainers update their own parameters, and servers add up the changes.

    `dtrans.parameter_server.geo_sgd` has the protocol. A trainer stores the rows of a table
    (`sparse=`) that it looked up, and exchanges changes of rows.

    Attributes:
      push_every: steps between pushes of a trainer's changes to the servers.
      block_on_pull: True if the step of a push waits for the changes of other trainers. Otherwise
        they are in the results of the first later step that finds them.

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
      slice_var_up: True cuts leaves into blocks of rows; with False every leaf is whole on one
        server. A leaf that the optimizer cannot update in blocks stays whole, and the plan gives
        the reason; "require" makes that an error.
      split_method: a subclass of `PSDispatcher`: `RoundRobin`, `HashName`, or the user's.
      min_block_size: the least number of elements of a block, at least 1.
      seed: seed of the order in which whole leaves are dispatched if `slice_var_up` is False.

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
    """Return the options of the batch; raise ConfigError for options that contradict each other."""
    check_int("trainers", trainers, "a positive number of trainers")
    check_type("mode", mode, (Sync, Async, HalfAsync, Geo))
    check_type("placement", placement, BlockPlacement)
    check_one_of("on_trainer_exit", on_trainer_exit, ON_TRAINER_EXIT)
    if on_trainer_exit != "drop" and not isinstance(mode, Sync):
        raise ConfigError(
            f"on_trainer_exit={on_trainer_exit!r} is for synchronous updates: asynchronous ones "
            "never combine gradients of several trainers; leave it out"
        )
    found = Batch.from_option(batch, "local" if isinstance(mode, Geo) else "exact")
    if not found.exact:
        found.check_axes()
    if found.exact and found.merge:
        raise ConfigError(
            f"merge={dict(found.merge)!r} is for batch='local': an exact step has one device's "
            "values; leave merge out"
        )
    if found.example_count is not None or (found.unsplit_inputs and not found.exact):
        raise ConfigError(
            f"batch={batch!r}: with parameter servers a local batch has only merge; pass "
            "plan.on_mesh(unsplit_inputs=...) to replicate arrays"
        )
    if found.merge and isinstance(mode, Geo):
        raise ConfigError(
            f"merge={found.merge!r} with dtrans.Geo: each trainer keeps leaves without gradients; "
            "leave merge out"
        )
    found.check_merge(("mean", "own"))
    return found
