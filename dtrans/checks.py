"""Small checks of options, and records of options.

A check names the option, says what it must be and what it is. Records (frozen dataclasses, one for
each concern) check themselves when they are made; what several options say together is checked by
the strategy that takes them.
"""

from __future__ import annotations

import dataclasses
import difflib
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn

from dtrans.errors import ConfigError


def check_int(
    name: str, given: Any, what: str = "a positive number", *, least: float = 1, most: float = float("inf"),
    or_none: bool = False,
) -> None:  # fmt: skip
    """Raise ConfigError unless an option is an integer from `least` to `most`, or None where it may
    be."""
    if not (is_int(given) and least <= given <= most) and not (or_none and given is None):
        _refuse(name, f"{what}, or None" if or_none else what, given)


def check_number(
    name: str, given: Any, what: str, fits: Callable[[float], bool], *, or_none: bool = False
) -> None:
    """Raise ConfigError unless an option is a number that fits, or None where it may be."""
    if not (is_number(given) and fits(given)) and not (or_none and given is None):
        _refuse(name, f"{what}, or None" if or_none else what, given)


def check_size(name: str, given: Any) -> None:
    """Raise ConfigError unless an option is a size in megabytes."""
    check_number(name, given, "a size in megabytes, 0 or more", lambda x: x >= 0)


def check_flag(name: str, given: Any) -> None:
    """Raise ConfigError unless an option is True or False."""
    check_one_of(name, given, (True, False))


def check_one_of(name: str, given: Any, choices: Collection[Any]) -> None:
    """Raise ConfigError unless an option is one of these values."""
    if not any(type(given) is type(c) and given == c for c in choices):
        *first, last = map(repr, choices)
        _refuse(name, f"{', '.join(first)} or {last}", given, ",")


def check_type(name: str, given: Any, kind: type | tuple[type, ...], what: str = "") -> None:
    """Raise ConfigError unless an option is of a type."""
    if not isinstance(given, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        _refuse(name, what or " or ".join(f"a dtrans.{k.__name__}" for k in kinds), given)


def check_name(name: str, given: Any, what: str) -> None:
    """Raise ConfigError unless an option is a text that is not empty."""
    if not isinstance(given, str) or not given:
        _refuse(name, what, given)


def check_together(options: Mapping[str, bool], why: str, beside: str) -> None:
    """Raise ConfigError for the first of these options that is asked for; none goes with the one
    that it is beside."""
    for other, asked in options.items():
        if asked:
            raise ConfigError(f"{beside} and {other}: {why}")


def is_int(x: Any) -> bool:
    """Whether it is an integer, and no truth value."""
    return isinstance(x, int) and not isinstance(x, bool)


def is_number(x: Any) -> bool:
    """Whether it is a number, and no truth value."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def did_you_mean(name: Any, known: Iterable[str], otherwise: str) -> str:
    """How a message goes on about a name that is not known: with the closest one, or with all."""
    known = list(known)
    close = difflib.get_close_matches(str(name), known, 1)
    return f"did you mean {close[0]}?" if close else f"{otherwise} {', '.join(known)}"


def check_known(
    who: str,
    given: Mapping[str, Any],
    known: Iterable[str],
    records: Mapping[str, Any],
    renamed: Mapping[str, str],
) -> None:
    """Raise ConfigError for options that an interface over a strategy does not have.

    Args:
      who: the interface.
      known: its own options.
      records: as for `grouped`.
      renamed: options of the strategy that have other names in the interface.
    """
    fields = {
        name: [f.name for f in dataclasses.fields(record)] for name, record in records.items()
    }
    known = [*known, *records, *(name for names in fields.values() for name in names)]
    for name, value in given.items():
        if name in renamed:
            raise ConfigError(f"{name} is {renamed[name]} in {who}")
        theirs = [
            renamed[n] for n in fields.get(name, ()) if n in renamed and not isinstance(value, str)
        ]
        if theirs:
            raise ConfigError(
                f"{name}={value!r}: {who} says {', '.join(theirs)} by its names; give others one "
                "by one"
            )
        if name not in known:
            raise ConfigError(
                f"{name} is no option of {who}; {did_you_mean(name, known, 'its options are')}"
            )


def grouped(options: Mapping[str, Any], records: Mapping[str, Any]) -> dict[str, Any]:
    """Options, with records in the place of those that are fields of records.

    An interface with a flat list of options becomes that of a strategy so.

    Args:
      records: the names of arguments that are records, each with its default. One that is given is
        the record whose fields are replaced.
    """
    found = dict(options)
    for argument, default in records.items():
        names = [f.name for f in dataclasses.fields(default) if f.name in options]
        if names:
            given = found.get(argument)
            base = (
                default
                if given is None
                else type(default)(given)
                if isinstance(given, str)
                else given
            )
            found[argument] = dataclasses.replace(base, **{n: found.pop(n) for n in names})
    return found


def _refuse(name: str, what: str, given: Any, mark: str = "") -> NoReturn:
    raise ConfigError(
        f"{name} must be {what}{mark or (';' if ',' in what else ',')} it is {given!r}"
    )
