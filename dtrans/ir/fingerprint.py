"""What roles must have in common, as short texts: fingerprints of programs, options and this
process's JAX.

A fingerprint has named parts, so that roles that differ can say in what. A part is the digest of a
canonical text, or the text itself where it is short. Canonical means that every process that traces
the same function with the same versions writes the same: values are numbered in the order in which
they are made, functions are written by their names, arrays by their bytes, and neither ids, hashes
nor addresses occur. The text is linear in the program: a jaxpr that several equations share is
written once.

    loss       the forward and backward pass, with the constants that it closes over
    update     the optimizer: what makes new parameters, its learning rate and other numbers
    exchange   what the program communicates, and what is done for that
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import JaxprEqn, Literal, Var, constants, is_jaxpr, opened
from dtrans.ir.display import without_addresses


BATCH, LOSS = "batch", "loss"  # the types of the batch, which may differ, and what depends on them
LONGEST = 32 << 10  # characters of a part that is told as it is; longer ones are told as digests
DIGEST = "digest "  # what a digest begins with

# what digests are of, for people
PARTS = {
    "init": "the init function",
    "placement": "where blocks are",
    "loss": "the loss, or a constant in it",
    "update": "the optimizer, its learning rate, or another of its numbers",
    "exchange": "what is communicated",
}


class FingerprintedProgram(Protocol):
    """What is looked at of a program (`dtrans.ir.program.Program`)."""

    @property
    def jaxpr(self) -> Any: ...
    @property
    def roles(self) -> Sequence[str]: ...
    @property
    def in_names(self) -> Sequence[str]: ...
    @property
    def out_names(self) -> Sequence[str]: ...


def environment() -> dict[str, str]:
    """The parts that are of a process, not of its plan."""
    from dtrans import __version__

    config: Any = jax.config
    x64 = f"jax_enable_x64 {bool(config.jax_enable_x64)}"
    return {"jax": f"jax {jax.__version__}", "dtrans": f"dtrans {__version__}", "x64": x64}


def of_program(
    program: FingerprintedProgram, groups: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """The fingerprint of a program, in parts.

    Args:
      groups: part to the roles of the equations that it is made of. What one part makes and another
        reads has a number among all such values; else parts are independent. Inputs are known by
        their names.
    """
    write = _Writer()
    inner, consts = opened(program.jaxpr), constants(program.jaxpr)
    names: dict[Var, str] = {
        v: f"const {write.value(x)}" for v, x in zip(inner.constvars, consts, strict=True)
    }
    names |= {
        v: f"{n} {write.type(v.aval)}" for v, n in zip(inner.invars, program.in_names, strict=True)
    }
    part_of = {role: part for part, roles in groups.items() for role in roles}
    eqns: dict[str, list[JaxprEqn]] = {part: [] for part in groups}
    made_by: dict[Any, str] = {}
    crossing: set[Any] = set()
    for eqn, role in zip(inner.eqns, program.roles, strict=True):
        eqns[part_of[role]].append(eqn)
        made_by |= dict.fromkeys(eqn.outvars, part_of[role])
        crossing |= {
            a
            for a in eqn.invars
            if not isinstance(a, Literal) and made_by.get(a, part_of[role]) != part_of[role]
        }
    order = [v for v in made_by if v in crossing]
    foreign = {v: f"{made_by[v]} {i} {write.type(v.aval)}" for i, v in enumerate(order)}
    numbers = {part: {**foreign, **names} for part in groups}
    lines = {part: write.equations(eqns[part], numbers[part]) for part in groups}
    first = next(iter(groups))
    for n, a in zip(program.out_names, inner.outvars, strict=True):
        part = first if isinstance(a, Literal) else made_by.get(a, first)
        lines[part].append(f"out {n} {write.atom(a, numbers[part])}")
    for v in order:
        lines[made_by[v]].append(f"read {numbers[made_by[v]][v]}")
    return {part: digest("\n".join(found)) for part, found in lines.items()}


def of_values(jaxpr: Any, in_names: Sequence[Any]) -> dict[Any, str]:
    """What each value of a closed jaxpr is made of, as a digest: inputs are known by their names.

    The order of equations does not count, nor do weak types and the conversions that only change
    these.
    """
    write = _Writer()
    inner, consts = opened(jaxpr), constants(jaxpr)
    found: dict[Any, str] = {
        v: f"const {write.value(x)}" for v, x in zip(inner.constvars, consts, strict=True)
    }
    found |= {v: digest(f"{n} {v.aval.shape}") for v, n in zip(inner.invars, in_names, strict=True)}
    for eqn in inner.eqns:
        ins = [number(a) if isinstance(a, Literal) else found[a] for a in eqn.invars]
        if (
            eqn.primitive.name == "convert_element_type"
            and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
        ):
            found[eqn.outvars[0]] = ins[0]
            continue
        params = [
            f"{k}={_made(write, v)}" for k, v in sorted(eqn.params.items()) if k != "weak_type"
        ]
        made = digest(" ".join([eqn.primitive.name, *params, *ins]))
        found |= {v: f"{made} {i}" for i, v in enumerate(eqn.outvars)}
    return found


def _made(write: _Writer, x: Any) -> str:
    """Return the text of a parameter of an equation; a body is the digest of its outputs."""
    if isinstance(x, (tuple, list)):
        return f"({', '.join(_made(write, v) for v in x)})"
    if not is_jaxpr(x):
        return write.value(x)
    inner: Any = opened(x)
    # an open jaxpr has no values of its constants; from JAX 0.11 open and closed ones are of one
    # class
    if inner.effects or len(inner.constvars) != len(constants(x)):
        return write.value(x)
    made = of_values(x, range(len(inner.invars)))
    return digest(" ".join(number(a) if isinstance(a, Literal) else made[a] for a in inner.outvars))


def of_outputs(half: Any) -> str:
    """Return the digest of the outputs of a jaxpr with names (`dtrans._jax.NamedJaxpr`), each with
    its name."""
    made = of_values(half.jaxpr, half.in_names)
    lines = [
        f"{n} {number(a) if isinstance(a, Literal) else made[a]}" for n, a in half.outvars.items()
    ]
    return digest("\n".join(lines))


def number(literal: Literal) -> str:
    """A literal, however Python holds it: 1 and an array of 1 are the same number of the same
    type."""
    return np.asarray(literal.val, literal.aval.dtype).tobytes().hex()


def of_value(value: Any) -> str:
    """Options, jaxprs, arrays, and what holds them, as canonical text."""
    return _Writer().value(value)


def digest(text: str) -> str:
    """A digest of a text."""
    return DIGEST + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def table(rows: Mapping[str, Any]) -> str:
    """A part that is told as it is, where it is not too long: a line for each name, with its
    value."""
    text = "\n".join(f"{name} {value}" for name, value in rows.items())
    return text if len(text) <= LONGEST else digest(text)


def differences(
    me: str, mine: Mapping[str, str], other: str, theirs: Mapping[str, str]
) -> list[str]:
    """In what two roles differ, for a message; nothing where they agree.

    Roles may have traced the step with batches of different sizes. Their losses are not compared
    then.

    Args:
      me, other: what they are called.
      mine, theirs: their parts. Nothing is taken for granted of those of another process but that
        they are texts.
    """
    found = []
    sized = mine.get(BATCH) != theirs.get(
        BATCH
    )  # a loss has numbers of the size of the batch that it was traced with
    for part in dict.fromkeys([*mine, *theirs]):
        if part == BATCH or (sized and part == LOSS):
            continue
        a, b = mine.get(part, ""), theirs.get(part, "")
        if a == b:
            continue
        if not a or not b or DIGEST in (a[: len(DIGEST)], b[: len(DIGEST)]):
            what = f" ({PARTS[part]})" if part in PARTS else ""
            found.append(f"part {brief(part)}{what}")
            continue
        rows, others = (
            {n: x for n, _, x in (line.partition(" ") for line in text.splitlines())}
            for text in (a, b)
        )
        name = next(n for n in {**rows, **others, "": ""} if rows.get(n) != others.get(n) or not n)
        found.append(
            f"{brief(name)} is {brief(others.get(name))} at {other}, {brief(rows.get(name))} at "
            f"{me}"
        )
    return found


def brief(value: Any) -> str:
    """What somebody sent, for a message: it may be of any size."""
    text = (
        value
        if isinstance(value, str) and value.isprintable()
        else "not there"
        if value is None
        else repr(value)
    )
    return text if len(text) <= 80 else f"{text[:77]}..."


class _Writer:
    """Writes values as canonical text; jaxprs that it has met before by their number."""

    def __init__(self) -> None:
        self._met: dict[
            int, tuple[Any, str]
        ] = {}  # id to the jaxpr, which lives as long as this, and its text
        self._types: dict[Any, str] = {}

    def value(self, x: Any) -> str:
        if x is None or isinstance(x, (bool, int, float, complex, str, bytes)):
            return repr(x)
        if isinstance(x, enum.Enum):
            return f"{type(x).__name__}.{x.name}"
        if isinstance(x, (tuple, list)):
            return f"{type(x).__name__}({', '.join(map(self.value, x))})"
        if is_jaxpr(x):
            return self._jaxpr(x)
        if isinstance(x, np.generic):
            return f"{x.dtype} {x!r}"
        if isinstance(x, (np.ndarray, jax.Array)):
            return _array(x)
        if isinstance(x, Mapping):
            return f"{{{', '.join(sorted(f'{self.value(k)}: {self.value(v)}' for k, v in x.items()))}}}"
        if isinstance(x, (set, frozenset)):
            return f"{{{', '.join(sorted(map(self.value, x)))}}}"
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            fields = ", ".join(
                f"{f.name}={self.value(getattr(x, f.name))}"
                for f in dataclasses.fields(x)
                if f.repr
            )
            return f"{type(x).__qualname__}({fields})"
        if callable(x) or isinstance(x, type):
            return f"fn {getattr(x, '__qualname__', type(x).__qualname__)}"
        return f"{type(x).__qualname__} {without_addresses(str(x))}"

    def atom(self, a: Any, numbers: Mapping[Var, str]) -> str:
        return f"{self.value(a.val)}:{self.type(a.aval)}" if isinstance(a, Literal) else numbers[a]

    def type(self, aval: Any) -> str:
        known = self._types.get(aval)
        if known is None:
            known = self._types[aval] = f"{aval}{'*' * bool(getattr(aval, 'weak_type', False))}"
        return known

    def equations(self, eqns: Sequence[JaxprEqn], numbers: dict[Var, str]) -> list[str]:
        """A line for each equation; what they make is numbered."""
        lines, made = [], itertools.count()
        for eqn in eqns:
            ins = " ".join([self.atom(a, numbers) for a in eqn.invars])
            params = " ".join([f"{k}={self.value(v)}" for k, v in sorted(eqn.params.items())])
            for v in eqn.outvars:
                numbers[v] = str(next(made))
            outs = " ".join([self.type(v.aval) for v in eqn.outvars])
            lines.append(f"{outs} = {eqn.primitive.name}[{params}] {ins}")
        return lines

    def _jaxpr(self, x: Any) -> str:
        if id(x) not in self._met:
            self._met[id(x)] = x, digest("\n".join(self._lines(x)))
        return self._met[id(x)][1]

    def _lines(self, x: Any) -> list[str]:
        inner = opened(x)
        given = (*inner.constvars, *inner.invars)
        numbers: dict[Var, str] = {v: f"in {i}" for i, v in enumerate(given)}
        lines = [self.type(v.aval) for v in given] + [self.value(c) for c in constants(x)]
        lines += self.equations(inner.eqns, numbers)
        return [*lines, " ".join([self.atom(a, numbers) for a in inner.outvars])]


def _array(x: Any) -> str:
    """An array by its type and its bytes."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        with (
            jax.ensure_compile_time_eval()
        ):  # a step may be planned for a batch while a job is traced
            words = jax.random.key_data(x)
        return f"{jax.random.key_impl(x)} {_array(words)}"
    host = np.asarray(x)
    data: Any = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
    return f"{host.dtype}{list(host.shape)} {hashlib.blake2b(data, digest_size=16).hexdigest()}"
