"""Compression of a synchronous job's messages: `compress` and `compress_params` of `dtrans.Sync`.

    trainer   encodes the blocks of a gradient after backward (`convert_element_type`, or equations
              that pack bytes), and decodes the parameters that it receives
    pserver   decodes each trainer's gradient, adds the gradients, and runs the optimizer with
              parameters that are not rounded. With `compress_params`, it also stores each block
              encoded (`params/w.block0.bf16`), and sends the encoded block

Packed types (`dtrans.ops.wire_types`) have error feedback: a trainer adds the rounding error of a
leaf's gradient to its next gradient. Rounding errors are part of the trainer's state,
`(params, rounding_errors)`. They begin with zeros, and differ between trainers.

With `dtrans.TopK`, a trainer sends only a fraction of the numbers of a gradient (the density). This
fraction may decrease during the job, in several *levels*. A trainer has one program for each level.
The number of steps so far, which `rounding_errors` then contains, selects the program. Each message
names its level, and a server decodes all levels. With momentum correction, `rounding_errors` also
contains the momentum of each leaf.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import ShapedArray
from dtrans.errors import ConfigError
from dtrans.ir.array_fns import sum_type
from dtrans.ir.builder import Builder
from dtrans.ir.cost import nbytes
from dtrans.ir.pytree import TreeSpec, tuple_of
from dtrans.ir.selection import values_at
from dtrans.ops import (
    TOPK,
    OptimizeBlock,
    WireType,
    encode_with_feedback,
    encode_with_momentum,
    encoded,
    without_last_bit,
)
from dtrans.parameter_server.options import Mode, Sync
from dtrans.parameter_server.topk import TopK
from dtrans.slicing.blocks import Block, Placement, Unit
from dtrans.slicing.server_update import ServerWork
from dtrans.step.halves import DividedStep
from dtrans.step.local_clip import clip_to_norm


ROUNDING_ERROR = "rounding_error"  # prefix of names: `rounding_error/params/w`
MOMENTUM = "momentum"  # prefix of names in the rounding errors: `momentum/params/w`
STEPS = "steps"  # name of the number of steps in the rounding errors


@dataclasses.dataclass(frozen=True)
class Compression:
    """Types in which the trainers and servers of a job send gradients and parameters.

    `choose_compression` creates this record from the options of `dtrans.Sync`. The functions that
    write the programs of trainers and servers read the type of each message from it. A leaf is an
    array of the parameter pytree, named by its path: `params/w`.

    Attributes:
      gradients: leaf -> type in which its gradient is sent. Gradients of other leaves are sent in
        their own type.
      params: leaf -> type in which servers send the leaf to trainers. Other leaves are sent in
        their own type.
      rounding_errors: leaf -> type of the rounding error that each trainer stores and adds to its
        next gradient (error feedback). With `dtrans.TopK`, also `momentum/LEAF` -> type of its
        momentum, and `steps` -> type of the number of steps.
      topk: the option `dtrans.TopK`; None for other types.
      level: index into `topk.levels`. Each level has a density (the fraction of numbers that
        trainers send). A job uses one level after the other.
    """

    gradients: Mapping[str, WireType] = dataclasses.field(default_factory=dict)
    params: Mapping[str, WireType] = dataclasses.field(default_factory=dict)
    rounding_errors: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    topk: TopK | None = None
    level: int = 0

    @property
    def levels(self) -> tuple[Compression, ...]:
        """One copy of this record for each level of `dtrans.TopK`; without it, only this record.

        Levels differ in the fraction of a gradient's numbers that trainers send.
        """
        if self.topk is None:
            return (self,)
        return tuple(map(self._at_level, range(len(self.topk.levels))))

    def _at_level(self, level: int) -> Compression:
        gradients = {}
        for leaf, wire in self.gradients.items():
            gradients[leaf] = dataclasses.replace(wire, level=level)
        return dataclasses.replace(self, gradients=gradients, level=level)

    def level_of(self, rounding_errors: Mapping[str, Any]) -> int:
        """Return the index of the program that a trainer runs in its next step.

        With `dtrans.TopK`, trainers send a fraction of each gradient, and the fraction may change
        in several levels. The size of messages changes too, so a trainer has one program for each
        level. Without `dtrans.TopK`, the result is 0.

        Args:
          rounding_errors: the trainer's state for compression, by name. The entry `steps` contains
            the number of steps so far.
        """
        if self.topk is None or STEPS not in self.rounding_errors:
            return self.level
        steps = int(np.ravel(rounding_errors[STEPS])[0])
        return sum(first <= steps for first, _ in self.topk.levels) - 1

    @property
    def is_used(self) -> bool:
        """True if any gradient or parameter is encoded."""
        return bool(self.gradients or self.params)

    @property
    def rounding_error_types(self) -> dict[str, Any]:
        """Type of each rounding error, by name."""
        return {f"{ROUNDING_ERROR}/{leaf}": t for leaf, t in self.rounding_errors.items()}

    @cached_property
    def rounding_error_spec(self) -> TreeSpec:
        """Structure of a trainer's rounding errors: a dict by leaf."""
        return TreeSpec.from_tree(dict(self.rounding_errors), ROUNDING_ERROR)

    def trainer_spec(self, params: TreeSpec) -> TreeSpec:
        """Return the structure of the first argument of a trainer's program.

        The argument is the pytree of the parameters. If gradients are sent with error feedback, the
        argument is `(params, rounding_errors)` instead.
        """
        return tuple_of(params, self.rounding_error_spec) if self.rounding_errors else params

    def sent_gradient(self, block: Block) -> Any:
        """Return the type of a block's gradient in messages."""
        return _sent_type(self.gradients.get(block.leaf), block)

    def sent_param(self, block: Block) -> Any:
        """Return the type of a block of a parameter in messages."""
        return _sent_type(self.params.get(block.leaf), block)

    def received(self, leaf: str, x: Any) -> Any:
        """Return a parameter as trainers receive it: rounded to the type in which servers send it.

        A simulation in one process calls this function, to compute the same results as the real
        job.

        Args:
          leaf: name of the parameter, such as `params/w`.
          x: the parameter's value on the server.
        """
        wire = self.params.get(leaf)
        return x if wire is None else wire.decode(wire.encode(x), x)

    def check_nonfinite(self, reaction: str) -> None:
        """Raise ConfigError if servers cannot look for infinities and NaN in gradients.

        Some compressed types pack a gradient into bytes, which have no infinities or NaN.

        Args:
          reaction: the job's option `on_nonfinite`, such as "ignore". All values except "ignore"
            make servers look for such numbers.
        """
        if self.rounding_errors and reaction != "ignore":
            raise ConfigError(
                f"on_nonfinite={reaction!r} cannot be combined with {self.packing_option}: "
                "trainers pack gradients into bytes, which have no infinities or NaN; leave one of "
                "the two options out"
            )

    @property
    def packing_option(self) -> str:
        """Text of the user's option that packs gradients into bytes, for error messages."""
        wire = next(iter(self.gradients.values()))
        return "compress=dtrans.TopK(...)" if wire.is_sparse else f"compress={wire.name!r}"

    @cached_property
    def notes(self) -> list[str]:
        """Remarks for a printed plan."""
        notes = []
        if self.gradients:
            wire = next(iter(self.gradients.values()))
            does, feedback = f"round gradients to {wire.name}", ""
            if self.topk is not None:
                does = "send the largest numbers of gradients"
                feedback = ", and add the other numbers to their next gradients"
                if self.topk.momentum:
                    does = "send the largest numbers of momenta"
                    feedback = (
                        f", with the factor {self.topk.momentum}, and add the other numbers to "
                        "their next momenta; the optimizer of the step should have no momentum"
                    )
            elif self.rounding_errors:
                feedback = ", and add their rounding errors to their next gradients"
            notes.append(
                f"results are not those of one device: trainers {does} "
                f"({_listed(self.gradients)}){feedback}"
            )
        if self.params:
            wire = next(iter(self.params.values()))
            notes.append(
                "results are not those of one device: servers round the parameters that they send "
                f"to {wire.name} ({_listed(self.params)}), but update parameters that are not "
                "rounded"
            )
        return notes


def _sent_type(wire: WireType | None, block: Block) -> Any:
    t = ShapedArray(block.shape, block.dtype)
    return t if wire is None else wire.type_of(t)


def _listed(leaves: Collection[str]) -> str:
    """Return at most three leaves as text."""
    first = list(leaves)[:3]
    if len(leaves) > 3:
        first.append(f"{len(leaves) - 3} more")
    return ", ".join(first)


def choose_compression(
    step: DividedStep,
    mode: Mode,
    placement: Placement,
    averages: Collection[str],
    tables: Collection[str],
) -> Compression:
    """Return the types in which a job sends gradients and parameters.

    Leaves are encoded if this makes their messages smaller. Integers, and leaves that servers
    average, are not encoded.

    Args:
      step: the step, with the update that servers run.
      mode: the mode of the job.
      placement: the blocks of each leaf.
      averages: leaves without gradients that servers average, such as batch statistics.
      tables: embedding tables. Trainers request single rows of a table instead of the full leaf.

    Raises:
      ConfigError: the mode compresses messages, and the plan has tables or complex gradients.
    """
    if not isinstance(mode, Sync):
        return Compression()
    used = [text for text, is_set in mode.compression.items() if is_set]
    if used and tables:
        raise ConfigError(
            f"{used[0]} cannot be combined with sparse: rows of the table {next(iter(tables))} are "
            "sent without compression; leave one of the two options out"
        )
    gradients, params = dict[str, WireType](), dict[str, WireType]()
    topk = mode.compress if isinstance(mode.compress, TopK) else None
    if mode.compress is not None:
        wire = _gradient_wire(mode)
        for leaf, gradient in step.gradients.items():
            _check_real(leaf, gradient.aval, f"compress={mode.compress_text}")
            if leaf not in averages and _is_encoded(wire, placement.blocks[leaf], topk):
                gradients[leaf] = wire
    if mode.compress_params is not None:
        wire = WireType(mode.compress_params)
        for leaf in step.optimized:
            aval = step.program.inputs[leaf]
            _check_real(leaf, aval, f"compress_params={mode.compress_params!r}")
            if leaf not in averages and _is_smaller(wire, placement.blocks[leaf]):
                params[leaf] = wire
    rounding_errors = {}
    for leaf, wire in gradients.items():
        if wire.is_packed:
            aval = step.gradients[leaf].aval
            rounding_errors[leaf] = t = ShapedArray(aval.shape, sum_type(aval.dtype))
            if topk is not None and topk.momentum:
                rounding_errors[f"{MOMENTUM}/{leaf}"] = t
    if topk is None or not gradients:
        return Compression(gradients, params, rounding_errors)
    if len(topk.levels) > 1:
        rounding_errors[STEPS] = ShapedArray((), np.dtype(np.int32))
    return Compression(gradients, params, rounding_errors, topk).levels[-1]


def _gradient_wire(mode: Sync) -> WireType:
    """Return the type in which trainers send gradients, as the option `compress` says."""
    if isinstance(mode.compress, TopK):
        return WireType(TOPK, densities=tuple(x for _, x in mode.compress.levels))
    assert mode.compress is not None
    return WireType(mode.compress, mode.compress_scale)


def _is_encoded(wire: WireType, blocks: Sequence[Block], topk: TopK | None) -> bool:
    """Return True if trainers encode a leaf's gradient in at least some steps.

    A gradient is encoded if this makes its messages smaller. With momentum correction, the encoding
    also computes the momentum. So every floating-point leaf is then encoded, even if a message does
    not become smaller.
    """
    if topk is not None and topk.momentum:
        return jnp.issubdtype(blocks[0].dtype, jnp.floating)
    return any(_is_smaller(x, blocks) for x in wire.levels)


def _check_real(leaf: str, aval: Any, option: str) -> None:
    """Raise ConfigError if an array has complex numbers."""
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        raise ConfigError(
            f"{option}: {leaf} is {aval.str_short()}, but wire types have no complex numbers; "
            f"leave {option.partition('=')[0]} out"
        )


def _is_smaller(wire: WireType, blocks: Sequence[Block]) -> bool:
    """Return True if the encoded blocks of a leaf have fewer bytes than the leaf."""
    if not jnp.issubdtype(blocks[0].dtype, jnp.floating):
        return False
    encoded_bytes = sum(nbytes(_sent_type(wire, b)) for b in blocks)
    return encoded_bytes < sum(b.nbytes for b in blocks)


# -- trainers --------------------------------------------------------------------------------------


@functools.cache
def encoded_blocks(
    wire: WireType, sections: tuple[int, ...], topk: TopK | None = None, clip: float | None = None
) -> Callable[..., Sequence[jax.Array]]:
    """Return a function that encodes a gradient for its messages: one encoded array for each block.

    The returned function has one of these forms:

    - a cast, such as "bf16": gradient -> blocks
    - a packed type, such as "int8", with error feedback: (gradient, rounding error of the last
      gradient) -> (*blocks, new rounding error)
    - with momentum correction: (gradient, rounding error, momentum) -> (*blocks, new rounding
      error, new momentum)

    Args:
      wire: the type in which gradients are sent.
      sections: the number of rows of each block.
      topk: the option `dtrans.TopK`; None for other types.
      clip: the largest norm of the gradient; None for no clip.
    """

    def split(x: jax.Array) -> list[jax.Array]:
        if len(sections) == 1:
            return [x]
        parts, stop = [], 0
        for rows in sections:
            start, stop = stop, stop + rows
            parts.append(jax.lax.slice_in_dim(x, start, stop))
        return parts

    def encode(x: jax.Array) -> list[jax.Array]:
        return list(map(wire.encode, split(x)))

    def encode_part(part: jax.Array, *state: jax.Array) -> Sequence[jax.Array]:
        if topk is None or not topk.momentum:
            return encode_with_feedback(wire, part, *state)
        error, momentum = state
        return encode_with_momentum(
            wire, part, error, momentum, topk.momentum, nesterov=topk.nesterov
        )

    def encode_packed(x: jax.Array, *state: jax.Array) -> list[jax.Array]:
        if clip is not None:
            x = without_last_bit(*clip_to_norm(clip)(x))
        parts = zip(split(x), *map(split, state), strict=True)
        sent, *states = zip(*itertools.starmap(encode_part, parts), strict=True)
        return [*sent, *(xs[0] if len(xs) == 1 else jnp.concatenate(xs) for xs in states)]

    return encode_packed if wire.is_packed else encode


def count_step(steps: jax.Array) -> jax.Array:
    """Return `steps + 1`, for a trainer's program that counts its steps."""
    return steps + 1


@functools.cache
def zeros(shape: tuple[int, ...], dtype: Any) -> Callable[[], jax.Array]:
    """Return a function that returns an array of zeros: the first rounding error of a leaf."""
    return lambda: jnp.zeros(shape, dtype)


# -- servers ---------------------------------------------------------------------------------------


def sent_name(name: str, wire: WireType | None) -> str:
    """Return the name of the encoded array of a block or leaf: `params/w.block0.bf16`."""
    return name if wire is None else f"{name}.{wire.name}"


def compress_work(
    work: ServerWork, units: Sequence[Unit], compression: Compression, leaves: Collection[str]
) -> ServerWork:
    """Change the updates of a server so that they receive and return compressed arrays.

    A changed update first decodes the gradients that arrive. It also stores an encoded copy of each
    new parameter, which trainers request.

    Args:
      work: the server's updates, and the arrays that it stores.
      units: the server's blocks, grouped by update.
      compression: the types in which arrays are sent.
      leaves: names of all parameters. An encoded array must not have one of these names.

    Raises:
      ConfigError: a leaf has the name of an encoded array.
    """
    wires: dict[str, WireType] = {}  # name of a block -> type in which trainers receive it
    variables, sent = dict(work.variables), {}
    for unit in units:
        for block in unit.blocks:
            wire = compression.params.get(block.leaf)
            if wire is None:
                continue
            name, beside = sent_name(block.name, wire), sent_name(block.leaf, wire)
            for taken in (name, beside):
                if taken in variables or taken in leaves:
                    raise ConfigError(
                        f"the step has a leaf named {taken}, the name that servers give to the "
                        f"encoded {block.name}; rename the leaf"
                    )
            wires[block.name], sent[block.name] = wire, name
            variables[name] = dataclasses.replace(
                work.variables[block.name], extra_name=beside, wire=wire
            )
    updates = tuple(_compressed_update(x, wires, compression) for x in work.blocks)
    return dataclasses.replace(work, blocks=updates, variables=variables, compressed_copies=sent)


def _compressed_update(
    update: OptimizeBlock, wires: Mapping[str, WireType], compression: Compression
) -> OptimizeBlock:
    """Return an update that decodes gradients, and also returns the new parameters encoded.

    Args:
      update: the update of one or several blocks.
      wires: for each block that servers send encoded, the type of its messages to trainers.
      compression: the types in which arrays are sent.
    """
    grads = []
    for g in update.grads:
        wire = compression.gradients.get(g.leaf) if g.op != "same" else None
        grads.append(dataclasses.replace(g, wire=wire))
    update = dataclasses.replace(update, grads=tuple(grads))
    names = [n for n in update.out_names if n in wires]
    if not names:
        return update
    b = Builder(update.jaxpr)
    inputs = b.inputs(v.aval for v in update.invars.values())
    outputs = b.inline(update.jaxpr, *inputs)
    new = dict(zip(update.out_names, outputs, strict=True))
    for n, value in zip(names, values_at(new, names), strict=True):
        outputs += b.call(encoded(wires[n]), value)
    return dataclasses.replace(
        update,
        jaxpr=b.build(outputs),
        out_names=(*update.out_names, *(sent_name(n, wires[n]) for n in names)),
    )


def encoded_copies(variables: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return a server's encoded arrays, computed from its blocks.

    Args:
      variables: the arrays that the server stores (`ServerVariable`), by name.
      arrays: the blocks, by name.
    """
    found = {}
    for name, x in variables.items():
        if x.wire is not None:
            block = name.removesuffix(sent_name("", x.wire))
            found[name] = x.wire.encode(jnp.asarray(arrays[block]))
    return found
