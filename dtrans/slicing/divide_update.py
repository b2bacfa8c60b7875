"""Division of a synchronous server's update into parts, which can run at different times.

A server receives gradients one after the other. If the update has parts, the server can update one
parameter while it waits for the next gradient. A server's programs are called optimize blocks; each
updates some rows of a parameter. A *part* is one large optimize block, some rows of a very large
one, or all small ones together. A part needs no output of other parts. Programs without gradients,
such as learning rate schedules, are *common*: every part computes them again, because they are
cheap. The results are bit for bit those of an update without parts.

A server divides its update when the server starts. The plan, which is made earlier, does not
contain parts. `dtrans.run.parameter_server.update_parts` runs the parts.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans._jax import Atom, JaxprEqn, Literal, Var, bodies, facts_of, opened
from dtrans.ir.builder import Builder
from dtrans.ir.cost import nbytes
from dtrans.ir.dataflow import producers_of
from dtrans.ops import OptimizeBlock, all_reduce_p
from dtrans.protocol.buffers import ALIGNMENT
from dtrans.rows.analysis import RowAnalysis, analyse
from dtrans.rows.flow import Flow
from dtrans.rows.layout import SHARED, RowAxis
from dtrans.rows.writer import RowRange, RowWriter
from dtrans.step.halves import Gradient, UpdateProgram


# A block is a separate part if its gradient has at least this number of bytes.
PART_BYTES = 1 << 20
# A larger block is divided by rows into parts whose gradients have at most this number of bytes.
# Smaller parts cost more processor time. With larger ones, a link waits longer for the first and
# the last answer.
PIECE_BYTES = 2 << 20
COMMON_BYTES = 4 << 10  # maximum bytes of the outputs that every part computes again


@dataclasses.dataclass(frozen=True, eq=False)
class PartBlocks:
    """Programs (optimize blocks) that one part of a server's update runs.

    Attributes:
      blocks: the programs; first the common ones, which all parts run. Parts with equal programs
        have the same tuple object, so the server compiles it once.
      rows: the rows of a large block that the part updates; `slice(None)` for all rows.
      piece: index of the part among the parts that update rows of the same block.
      divided: names of the state arrays in which the part reads and writes only `rows`.
      common: names of the state that every part computes, such as a step count.
      shared: names of values that common programs compute and several programs read.
    """

    blocks: tuple[OptimizeBlock, ...]
    rows: slice
    piece: int
    divided: frozenset[str]
    common: frozenset[str]
    shared: frozenset[str]


def divide_update(serve: JaxprEqn) -> tuple[PartBlocks, ...]:
    """Divide a server's update into parts that can run at different times.

    The server calls this function when it starts. The result is empty if the update cannot be
    divided. These updates cannot be divided:

    - An update with values that several blocks compute together, such as a norm of all gradients.
    - An update that reads arguments of the training step, such as a learning rate. The server first
      waits for all trainers, and checks that they sent equal values.
    - An update of tables.
    - An update with a block of one element. XLA may merge the block with common scalars, and the
      rounding then depends on the other blocks.
    - An update without a large block, or with one block that cannot be divided by rows.

    Args:
      serve: the server's `listen_and_serv` equation.
    """
    found = _common_and_groups(serve)
    if found is None:
        return ()
    common, groups = found
    blocks = list(itertools.chain.from_iterable(groups))
    names = frozenset(itertools.chain.from_iterable(b.out_names for b in common))
    state = _state_types(serve)
    shared, of_common = _shared_values(common, blocks, state), names & state.keys()
    parts = []
    for group in groups:
        pieces = _divide_block(group[0], serve) if len(group) == 1 else None
        if pieces is None:
            part = PartBlocks((*common, *group), slice(None), 0, frozenset(), of_common, shared)
            parts.append(part)
            continue
        blocks_of = {size: (*common, block) for size, block in pieces.by_size.items()}
        for i, r in enumerate(pieces.ranges):
            rows = slice(r.start, r.stop)
            parts.append(PartBlocks(blocks_of[r.rows], rows, i, pieces.names, of_common, shared))
    return tuple(parts) if len(parts) > 1 else ()


def copied_state_bytes(serve: JaxprEqn) -> int:
    """Return the number of bytes of optimizer state that a server stores twice.

    If an update has parts, the server keeps the old state until the last part of the new state is
    complete. The plan adds these bytes to the server's memory.

    Args:
      serve: the server's `listen_and_serv` equation.
    """
    found = _common_and_groups(serve) if serve.params["sync_mode"] else None
    if found is None:
        return 0
    groups = found[1]
    if len(groups) == 1 and (len(groups[0]) > 1 or _divide_block(groups[0][0], serve) is None):
        return 0
    blocks = serve.params["optimize_blocks"]
    replaced = set(itertools.chain.from_iterable(b.out_names for b in blocks))
    types = _state_types(serve)
    return sum(
        nbytes(t) for n, t in types.items() if n in replaced - {*serve.params["param_names"]}
    )


def _state_types(serve: JaxprEqn) -> dict[str, Any]:
    """Return the type of each array of a server's state, by name."""
    return {n: a.aval for n, a in zip(serve.params["state_names"], serve.invars, strict=True)}


# -- independent blocks ----------------------------------------------------------------------------


def _common_and_groups(
    serve: JaxprEqn,
) -> tuple[list[OptimizeBlock], list[list[OptimizeBlock]]] | None:
    """Return the programs that every part runs, and lists of programs that can be separate parts.

    There is one list for each large program, and then one list with all small programs. Return None
    if the programs depend on each other, or if all programs are small.
    """
    blocks = serve.params["optimize_blocks"]
    tables = serve.params.get("tables")
    if tables is not None and tables.blocks:
        return None
    common = [b for b in blocks if not b.grads]
    with_gradients = [b for b in blocks if b.grads]
    if not _are_independent(serve, common, with_gradients):
        return None
    common_values = itertools.chain.from_iterable(opened(b.jaxpr).outvars for b in common)
    if sum(nbytes(x.aval) for x in common_values) > COMMON_BYTES:
        return None
    large, small = [], []
    for b in with_gradients:
        if _gradient_bytes(b) >= PART_BYTES:
            large.append([b])
        else:
            small.append(b)
    if not large:
        return None
    return common, [*large, small] if small else large


def _gradient_bytes(block: OptimizeBlock) -> int:
    return sum(nbytes(block.invars[g.name].aval) for g in block.grads)


def _are_independent(
    serve: JaxprEqn, common: Sequence[OptimizeBlock], blocks: Sequence[OptimizeBlock]
) -> bool:
    """Return True if each program needs only gradients, state, and outputs of common programs.

    Args:
      serve: the server's `listen_and_serv` equation.
      common: the programs without gradients.
      blocks: the programs with gradients.
    """
    gradients = list(itertools.chain.from_iterable(b.grads for b in blocks))
    if any(g.op == "same" for g in gradients):
        return False
    sizes = [b.invars[g.name].aval.size for b in blocks for g in b.grads]
    if min(sizes, default=1) == 1:
        return False
    for b in (*common, *blocks):
        if any(eqn.primitive is all_reduce_p for eqn in b.eqns):
            return False
    outputs = set(itertools.chain.from_iterable(b.out_names for b in common))
    written = collections.Counter(n for b in blocks for n in b.out_names)
    if max(written.values(), default=0) > 1 or outputs & written.keys():
        return False
    state = _state_types(serve).keys()
    known = outputs | state
    for b in (*common, *blocks):
        if not known.union(g.name for g in b.grads).issuperset(b.in_names):
            return False
    return state >= written.keys()


def _shared_values(
    common: Sequence[OptimizeBlock], blocks: Sequence[OptimizeBlock], state: Container[str]
) -> frozenset[str]:
    """Return the names of the values from common programs that several other programs read.

    Each part returns these values. Otherwise the results could round differently than without
    parts: XLA rewrites `x / s` to `x * (1 / s)` if only one equation reads `s`. A returned value
    always has a second reader.
    """
    sources: dict[str, Any] = {}  # name of a value -> the block and variable that compute it
    for b in common:
        inner = opened(b.jaxpr)
        read = dict(zip(inner.invars, b.in_names, strict=True))
        for out, name in zip(inner.outvars, b.out_names, strict=True):
            if name in state or isinstance(out, Literal):  # blocks read the state before the step
                continue
            if out in read:
                sources[name] = sources.get(read[out], read[out])
            else:
                sources[name] = b.name, out

    readers = collections.Counter(sources[n] for b in blocks for n in b.in_names if n in sources)
    return frozenset(n for n, source in sources.items() if readers[source] > 1)


# -- rows of a block -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _BlockPieces:
    """Division of one large block into ranges of rows, which are updated separately.

    Attributes:
      ranges: rows of each piece.
      by_size: number of rows -> program of a piece with this number of rows.
      names: state arrays of the block with a row for each row of the gradient.
    """

    ranges: Sequence[RowRange]
    by_size: Mapping[int, OptimizeBlock]
    names: frozenset[str]


def _divide_block(block: OptimizeBlock, serve: JaxprEqn) -> _BlockPieces | None:
    """Divide the update of a large block into updates of ranges of its rows.

    Return None if the update of a row depends on other rows, or on the position of the row. Also
    return None if the block is small, or if another block reads its state.
    """
    ranges = _row_ranges(block)
    analysis = _analyse_rows(block) if ranges else None
    if analysis is None:
        return None
    names = {n for v, n in analysis.input_names.items() if analysis.layout(v) is not SHARED}
    names.update(block.out_names)
    for b in serve.params["optimize_blocks"]:
        if b is not block and names.intersection(b.in_names):
            return None
    by_size: dict[int, OptimizeBlock] = {}
    for rows in ranges:
        if rows.rows not in by_size:
            by_size[rows.rows] = _write_piece(block, analysis, rows)
    return _BlockPieces(ranges, by_size, frozenset(names))


def _row_ranges(block: OptimizeBlock) -> list[RowRange]:
    """Return nearly equal ranges of the rows of a block; [] if the block is not divided.

    Each range begins at a multiple of `ALIGNMENT` bytes of the gradient. JAX can then read the
    received bytes without a copy. Vectors are not divided, and each range has two rows or more.
    XLA's loop over a vector or a single row of odd length rounds differently: adan on 700,001
    elements differs from adan on their first half (jax 0.10.2). A block is also not divided if
    trainers send its gradient in an encoded form without rows.
    """
    if len(block.grads) != 1:
        return []
    (gradient,) = block.grads
    aval = block.invars[gradient.name].aval
    sent = gradient.sent_type(aval)
    rows, width = (aval.shape or (1,))[0], math.prod(aval.shape[1:])
    if width < 2 or sent.shape != aval.shape:
        return []
    step = ALIGNMENT // math.gcd(width * sent.dtype.itemsize, ALIGNMENT)
    count = min(math.ceil(nbytes(aval) / PIECE_BYTES), rows // max(2, step))
    if count < 2:
        return []
    starts = [step * (rows // step * i // count) for i in range(count)]
    return [RowRange(a, b) for a, b in itertools.pairwise([*starts, rows])]


def _analyse_rows(block: OptimizeBlock) -> RowAnalysis | None:
    """Analyze a block's update; return None if the new value of a row depends on other rows.

    Sums along other axes also give None, because XLA may add in another order for other shapes.
    """
    (gradient,), leaf = block.grads, block.name
    in_names = tuple(Gradient(leaf) if n == gradient.name else n for n in block.in_names)
    if leaf not in block.out_names:
        return None
    analysis = analyse(UpdateProgram(block.jaxpr, in_names, block.out_names), (leaf,))
    rows, half = RowAxis(leaf, 0), analysis.half
    layouts = {analysis.layout(v) for v in half.invars.values()} - {SHARED}
    layouts |= {analysis.layout(a) for a in half.outvars.values()}
    types = [v.aval.dtype for v in half.invars.values() if analysis.layout(v) == rows]
    if analysis.groups or analysis.flow.crosses or layouts != {rows}:
        return None
    if not all(isinstance(t, np.dtype) for t in types):  # random keys
        return None
    return analysis if _keeps_bits(half.eqns, analysis.flow) else None


def _keeps_bits(eqns: Sequence[JaxprEqn], flow: Flow) -> bool:
    """Return True if the update of some rows has the same bits as the update of all rows.

    This holds if each equation is elementwise, or only moves or copies elements.

    Args:
      eqns: the equations of the update.
      flow: the equations that compute rows, with their layouts.
    """
    producers = producers_of(eqns)
    for i, step in flow.steps.items():
        for a, row in zip(eqns[i].invars, step.operands, strict=True):
            if row is not None and flow.layout(a) is SHARED and not _is_uniform(a, producers):
                return False
        if step.bodies:
            for body, inside in zip(bodies(eqns[i]), step.bodies, strict=True):
                if not _keeps_bits(opened(body).eqns, inside):
                    return False
        elif not (facts_of(eqns[i]).elementwise or facts_of(eqns[i]).moves):
            return False
    return True


def _is_uniform(atom: Atom, producers: Mapping[Var, JaxprEqn]) -> bool:
    """Return True if all elements of a value are equal, such as a broadcast scalar."""
    if isinstance(atom, Literal) or not atom.aval.ndim:
        return True
    eqn = producers.get(atom)
    if eqn is None or not eqn.invars:
        return False
    copies = len(eqn.invars) == 1 and bool(facts_of(eqn).moves)
    if not (copies or facts_of(eqn).elementwise):
        return False
    return all(_is_uniform(a, producers) for a in eqn.invars)


def _write_piece(block: OptimizeBlock, analysis: RowAnalysis, rows: RowRange) -> OptimizeBlock:
    """Rewrite a block's update so that it updates only some rows."""
    half = analysis.half
    outs = [analysis.layout(a) for a in half.outvars.values()]
    writer = RowWriter(Builder(half.jaxpr), analysis.flow, rows, {})
    return dataclasses.replace(block, jaxpr=writer.rewrite(half.jaxpr, analysis.flow, outs))
