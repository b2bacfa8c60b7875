"""Compression of a synchronous job's messages: `compress` and `compress_params` of `dtrans.Sync`.

    trainer   encodes the blocks of a gradient after backward (`convert_element_type`, or equations
              that pack bytes), and decodes the parameters that it receives
    pserver   decodes each trainer's gradient, adds the gradients, and runs the optimizer with
              parameters that are not rounded. With `compress_params`, it also stores each block
              encoded (`params/w.block0.bf16`), and sends the encoded block

Packed types (`dtrans.ops.wire_types`) have error feedback: a trainer adds the rounding error of a
leaf's gradient to its next gradient. Rounding errors are part of the trainer's state,
`(params, rounding_errors)`. They begin with zeros, and differ between trainers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import ShapedArray
from dtrans.errors import ConfigError
from dtrans.ir.array_fns import sum_type
from dtrans.ir.builder import Builder
from dtrans.ir.cost import nbytes
from dtrans.ir.pytree import TreeSpec, tuple_of
from dtrans.ir.selection import values_at
from dtrans.ops import OptimizeBlock, WireType, encode_with_feedback, encoded
from dtrans.parameter_server.options import Mode, Sync
from dtrans.slicing.blocks import Block, Placement, Unit
from dtrans.slicing.server_update import ServerWork
from dtrans.step.halves import DividedStep


ROUNDING_ERROR = "rounding_error"  # prefix of names: `rounding_error/params/w`


@dataclasses.dataclass(frozen=True)
class Compression:
    """Types in which a job sends gradients and parameters.

    Attributes:
      gradients: leaf -> type in which its gradient is sent. Other gradients are not encoded.
      params: leaf -> type in which its blocks are sent. Other parameters are not encoded.
      rounding_errors: leaf -> type of its rounding error, for gradients with error feedback.
    """

    gradients: Mapping[str, WireType] = dataclasses.field(default_factory=dict)
    params: Mapping[str, WireType] = dataclasses.field(default_factory=dict)
    rounding_errors: Mapping[str, Any] = dataclasses.field(default_factory=dict)

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

        The argument is the pytree of the parameters, or `(params, rounding_errors)`.
        """
        return tuple_of(params, self.rounding_error_spec) if self.rounding_errors else params

    def sent_gradient(self, block: Block) -> Any:
        """Return the type of a block's gradient in messages."""
        return _sent_type(self.gradients.get(block.leaf), block)

    def sent_param(self, block: Block) -> Any:
        """Return the type of a block of a parameter in messages."""
        return _sent_type(self.params.get(block.leaf), block)

    def received(self, leaf: str, x: Any) -> Any:
        """Return a parameter as trainers receive it: rounded to the type in which it is sent."""
        wire = self.params.get(leaf)
        return x if wire is None else wire.decode(wire.encode(x), x)

    def check_nonfinite(self, reaction: str) -> None:
        """Raise ConfigError if a job checks gradients that are packed.

        Args:
          reaction: the job's option `on_nonfinite`.
        """
        if self.rounding_errors and reaction != "ignore":
            wire = next(iter(self.gradients.values()))
            raise ConfigError(
                f"on_nonfinite={reaction!r} cannot be combined with compress={wire.name!r}: "
                "trainers pack gradients into bytes, which have no infinities or NaN; leave one of "
                "the two options out"
            )

    @cached_property
    def notes(self) -> list[str]:
        """Remarks for a printed plan."""
        notes = []
        if self.gradients:
            wire = next(iter(self.gradients.values()))
            feedback = ""
            if self.rounding_errors:
                feedback = ", and add their rounding errors to their next gradients"
            notes.append(
                f"results are not those of one device: trainers round gradients to {wire.name} "
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
      averages: leaves that trainers compute and servers average.
      tables: leaves that trainers request by rows.

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
    if mode.compress is not None:
        wire = WireType(mode.compress, mode.compress_scale)
        for leaf, gradient in step.gradients.items():
            _check_real(leaf, gradient.aval, f"compress={mode.compress!r}")
            if leaf not in averages and _is_smaller(wire, placement.blocks[leaf]):
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
            rounding_errors[leaf] = ShapedArray(aval.shape, sum_type(aval.dtype))
    return Compression(gradients, params, rounding_errors)


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
def encoded_blocks(wire: WireType, sections: tuple[int, ...]) -> Callable[..., Sequence[jax.Array]]:
    """Return a function of a gradient that returns the encoded blocks.

    With a packed type, the second argument is the rounding error of the last gradient. The last
    result is the new rounding error.

    Args:
      wire: the type.
      sections: the number of rows of each block.
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

    def encode_packed(x: jax.Array, rounding_error: jax.Array) -> list[jax.Array]:
        sent, rests = [], []
        for part, old in zip(split(x), split(rounding_error), strict=True):
            code, rest = encode_with_feedback(wire, part, old)
            sent.append(code)
            rests.append(rest)
        return [*sent, rests[0] if len(rests) == 1 else jnp.concatenate(rests)]

    return encode_packed if wire.is_packed else encode


@functools.cache
def zeros(shape: tuple[int, ...], dtype: Any) -> Callable[[], jax.Array]:
    """Return a function that returns zeros, the first rounding error of a leaf."""
    return lambda: jnp.zeros(shape, dtype)


# -- servers ---------------------------------------------------------------------------------------


def sent_name(name: str, wire: WireType | None) -> str:
    """Return the name of the encoded array of a block or leaf: `params/w.block0.bf16`."""
    return name if wire is None else f"{name}.{wire.name}"


def compress_work(
    work: ServerWork, units: Sequence[Unit], compression: Compression, leaves: Collection[str]
) -> ServerWork:
    """Change the updates of a server: gradients arrive encoded, and parameters are sent encoded.

    Args:
      work: the server's updates, and the arrays that it stores.
      units: the server's blocks.
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
                work.variables[block.name], beside=beside, wire=wire
            )
    updates = tuple(_compressed_update(x, wires, compression) for x in work.blocks)
    return dataclasses.replace(work, blocks=updates, variables=variables, sent=sent)


def _compressed_update(
    update: OptimizeBlock, wires: Mapping[str, WireType], compression: Compression
) -> OptimizeBlock:
    """Return an optimize block that decodes its gradients, and encodes its new parameters."""
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
