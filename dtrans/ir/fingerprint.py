"""Fingerprints of programs, options and versions, which processes compare before a job starts.

If two processes had different programs, a job would compute wrong numbers, so it refuses to start.
A fingerprint is a dict of named parts, so that an error can name the part that differs. A part is a
short text, or the digest of a longer text. Processes that trace the same function with the same
versions write the same text: values are numbered in order, functions are written by name, and
arrays by their bytes. Ids, hashes and addresses never occur. A jaxpr that occurs several times is
written once, so the text stays linear in the size of the program.

    loss       the forward and backward pass, with its constants
    update     the optimizer: new parameters, learning rate and other numbers
    exchange   communication, and the equations that prepare it
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

from dtrans._jax import Atom, JaxprEqn, Literal, Var, constants, is_jaxpr, opened
from dtrans.ir.dataflow import variables
from dtrans.ir.display import without_addresses


BATCH, LOSS = "batch", "loss"  # names of two parts
LONGEST = 32 << 10  # a part with more characters is sent as its digest
DIGEST = "digest "  # prefix of every digest

# description of each part, for errors
PARTS = {
    "init": "the init function",
    "placement": "where blocks are",
    "loss": "the loss, or a constant in it",
    "update": "the optimizer, its learning rate, or another of its numbers",
    "exchange": "what is communicated",
}


class FingerprintedProgram(Protocol):
    """Fields of a `dtrans.ir.program.Program` from which its fingerprint (digests) is computed."""

    @property
    def jaxpr(self) -> Any: ...
    @property
    def roles(self) -> Sequence[str]: ...
    @property
    def in_names(self) -> Sequence[str]: ...
    @property
    def out_names(self) -> Sequence[str]: ...


def environment() -> dict[str, str]:
    """Return the versions of JAX and dtrans and the x64 mode of this process, as texts by name."""
    from dtrans import __version__

    config: Any = jax.config
    x64 = f"jax_enable_x64 {bool(config.jax_enable_x64)}"
    return {"jax": f"jax {jax.__version__}", "dtrans": f"dtrans {__version__}", "x64": x64}


def program_parts(
    program: FingerprintedProgram, groups: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return a digest for each part of a program, e.g. for its loss and for its update.

    A change in one part does not change the digests of other parts. So an error can say that two
    processes have the same loss, but another optimizer.

    Args:
      program: the program.
      groups: the parts of the program: name -> roles of the part's equations, e.g. {"loss":
        ("forward", "backward")}.
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
    part_by_value: dict[Any, str] = {}
    crossing: set[Any] = set()
    for eqn, role in zip(inner.eqns, program.roles, strict=True):
        eqns[part_of[role]].append(eqn)
        part_by_value |= dict.fromkeys(eqn.outvars, part_of[role])
        for v in variables(eqn.invars):
            if part_by_value.get(v, part_of[role]) != part_of[role]:
                crossing.add(v)
    order = [v for v in part_by_value if v in crossing]
    foreign = {v: f"{part_by_value[v]} {i} {write.type(v.aval)}" for i, v in enumerate(order)}
    numbers = {part: {**foreign, **names} for part in groups}
    lines = {part: write.equations(eqns[part], numbers[part]) for part in groups}
    first = next(iter(groups))
    for n, a in zip(program.out_names, inner.outvars, strict=True):
        part = first if isinstance(a, Literal) else part_by_value.get(a, first)
        lines[part].append(f"out {n} {write.atom(a, numbers[part])}")
    for v in order:
        lines[part_by_value[v]].append(f"read {numbers[part_by_value[v]][v]}")
    return {part: digest("\n".join(found)) for part, found in lines.items()}


def value_digests(jaxpr: Any, in_names: Sequence[Any]) -> dict[Any, str]:
    """Return, for each value of a closed jaxpr, a digest of the expression that computes it.

    So two programs can be compared value by value. The expression refers to inputs by name. Digests
    ignore the order of equations, weak types, and conversions that only change a weak type.
    """
    write = _Writer()
    inner, consts = opened(jaxpr), constants(jaxpr)
    found: dict[Any, str] = {
        v: f"const {write.value(x)}" for v, x in zip(inner.constvars, consts, strict=True)
    }
    found |= {v: digest(f"{n} {v.aval.shape}") for v, n in zip(inner.invars, in_names, strict=True)}
    for eqn in inner.eqns:
        ins = [_digest_of(found, a) for a in eqn.invars]
        if (
            eqn.primitive.name == "convert_element_type"
            and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
        ):
            found[eqn.outvars[0]] = ins[0]
            continue
        params = [
            f"{k}={_param_text(write, v)}"
            for k, v in sorted(eqn.params.items())
            if k != "weak_type"
        ]
        outputs = digest(" ".join([eqn.primitive.name, *params, *ins]))
        found |= {v: f"{outputs} {i}" for i, v in enumerate(eqn.outvars)}
    return found


def _param_text(write: _Writer, x: Any) -> str:
    """Return the text of an equation's parameter; for a jaxpr, the digest of its outputs."""
    if isinstance(x, (tuple, list)):
        return f"({', '.join(_param_text(write, v) for v in x)})"
    if not is_jaxpr(x):
        return write.value(x)
    inner: Any = opened(x)
    # value_digests needs the values of constants, which an open jaxpr does not have
    if inner.effects or len(inner.constvars) != len(constants(x)):
        return write.value(x)
    digests = value_digests(x, range(len(inner.invars)))
    return digest(" ".join(_digest_of(digests, a) for a in inner.outvars))


def _digest_of(digests: Mapping[Any, str], atom: Atom) -> str:
    if isinstance(atom, Literal):
        return number(atom)
    return digests[atom]


def output_digests(half: Any) -> dict[str, str]:
    """Return a digest of the computation of each named output of a `dtrans._jax.NamedJaxpr`."""
    digests = value_digests(half.jaxpr, half.in_names)
    return {name: _digest_of(digests, a) for name, a in half.outvars.items()}


def output_digest(half: Any) -> str:
    """Return one digest of all named outputs of a `dtrans._jax.NamedJaxpr`."""
    lines = [f"{name} {text}" for name, text in output_digests(half).items()]
    return digest("\n".join(lines))


def number(literal: Literal) -> str:
    """Convert a literal to its dtype; return the bytes as hexadecimal text."""
    return np.asarray(literal.val, literal.aval.dtype).tobytes().hex()


def canonical_text(value: Any) -> str:
    """Write options, jaxprs or arrays as text; equal values give equal texts in all processes."""
    return _Writer().value(value)


def digest(text: str) -> str:
    """Return the BLAKE2b digest of a text, with the prefix `DIGEST`."""
    return DIGEST + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def table(rows: Mapping[str, Any]) -> str:
    """Return the lines `name value` of a mapping as one text; if it is long, return its digest."""
    text = "\n".join(f"{name} {value}" for name, value in rows.items())
    if len(text) <= LONGEST:
        return text
    return digest(text)


def differences(
    me: str, mine: Mapping[str, str], other: str, theirs: Mapping[str, str]
) -> list[str]:
    """Compare the fingerprints of two processes; return a line of text for each part that differs.

    The caller raises an error with these lines before the job starts.

    Args:
      me: name of this process in the job, such as `trainer 0`.
      mine: its fingerprint: part -> digest or text.
      other: name of the other process, such as a server's endpoint.
      theirs: fingerprint of the other process, from a message with types that were checked.
    """
    found = []
    # two traces of one loss differ if their batch sizes differ, so this is no error
    sized = mine.get(BATCH) != theirs.get(BATCH)

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
        rows, others = _named_lines(a), _named_lines(b)
        name = next(n for n in {**rows, **others, "": ""} if rows.get(n) != others.get(n) or not n)
        found.append(
            f"{brief(name)} is {brief(others.get(name))} at {other}, {brief(rows.get(name))} at "
            f"{me}"
        )
    return found


def _named_lines(text: str) -> dict[str, str]:
    """Parse lines `name value` into a dict: name -> value."""
    rows = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        rows[name] = value
    return rows


def brief(value: Any) -> str:
    """Return a value from another process's message as printable text of at most 80 characters."""
    if value is None:
        return "missing"
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    if len(text) <= 80:
        return text
    return f"{text[:77]}..."


class _Writer:
    """Writer of texts for `canonical_text`, which caches the digests of jaxprs."""

    def __init__(self) -> None:
        # id of a jaxpr -> (jaxpr, its text); the reference keeps the id from being reused
        self._met: dict[int, tuple[Any, str]] = {}
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
            items = sorted(f"{self.value(k)}: {self.value(v)}" for k, v in x.items())
            return f"{{{', '.join(items)}}}"
        if isinstance(x, (set, frozenset)):
            return f"{{{', '.join(sorted(map(self.value, x)))}}}"
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            fields = []
            for field in dataclasses.fields(x):
                if field.repr:
                    fields.append(f"{field.name}={self.value(getattr(x, field.name))}")
            return f"{type(x).__qualname__}({', '.join(fields)})"
        if callable(x) or isinstance(x, type):
            return f"fn {getattr(x, '__qualname__', type(x).__qualname__)}"
        return f"{type(x).__qualname__} {without_addresses(str(x))}"

    def atom(self, a: Any, numbers: Mapping[Var, str]) -> str:
        if isinstance(a, Literal):
            return f"{self.value(a.val)}:{self.type(a.aval)}"
        return numbers[a]

    def type(self, aval: Any) -> str:
        known = self._types.get(aval)
        if known is None:
            known = self._types[aval] = f"{aval}{'*' * bool(getattr(aval, 'weak_type', False))}"
        return known

    def equations(self, eqns: Sequence[JaxprEqn], numbers: dict[Var, str]) -> list[str]:
        """Return a line of text for each equation; add numbers for its outputs to `numbers`."""
        lines, counter = [], itertools.count()
        for eqn in eqns:
            ins = " ".join([self.atom(a, numbers) for a in eqn.invars])
            params = " ".join([f"{k}={self.value(v)}" for k, v in sorted(eqn.params.items())])
            for v in eqn.outvars:
                numbers[v] = str(next(counter))
            outs = " ".join([self.type(v.aval) for v in eqn.outvars])
            lines.append(f"{outs} = {eqn.primitive.name}[{params}] {ins}")
        return lines

    def _jaxpr(self, x: Any) -> str:
        if id(x) not in self._met:
            self._met[id(x)] = x, digest("\n".join(self._lines(x)))
        return self._met[id(x)][1]

    def _lines(self, x: Any) -> list[str]:
        inner = opened(x)
        inputs = (*inner.constvars, *inner.invars)
        numbers: dict[Var, str] = {v: f"in {i}" for i, v in enumerate(inputs)}
        lines = [self.type(v.aval) for v in inputs]
        lines += [self.value(c) for c in constants(x)]
        lines += self.equations(inner.eqns, numbers)
        return [*lines, " ".join([self.atom(a, numbers) for a in inner.outvars])]


def _array(x: Any) -> str:
    """Return the dtype and shape of an array, and a digest of its bytes."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        # a specialization for another batch size may call this function inside a trace
        with jax.ensure_compile_time_eval():
            words = jax.random.key_data(x)
        return f"{jax.random.key_impl(x)} {_array(words)}"
    host = np.asarray(x)
    data: Any = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
    return f"{host.dtype}{list(host.shape)} {hashlib.blake2b(data, digest_size=16).hexdigest()}"
