"""Checks of the options that a user passes; each raises ConfigError for an invalid option.

The error states the option, the expected value and the actual value. Related options are fields of
a *record*, a frozen dataclass that checks its fields when it is created. A strategy, such as
`dtrans.pserver`, takes several records and checks their combination.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn

from dtrans.errors import ConfigError


def check_int(
    name: str,
    value: Any,
    what: str = "a positive number",
    *,
    least: float = 1,
    most: float = float("inf"),
    or_none: bool = False,
) -> None:
    """Raise ConfigError unless an option is an integer in a range.

    Args:
      name: name of the option.
      value: value of the option.
      what: description of a valid value, which the error contains.
      least, most: the range, inclusive.
      or_none: True to also accept None.
    """
    if not (is_int(value) and least <= value <= most) and not (or_none and value is None):
        _refuse(name, f"{what}, or None" if or_none else what, value)


def check_number(
    name: str, value: Any, what: str, fits: Callable[[float], bool], *, or_none: bool = False
) -> None:
    """Raise ConfigError unless an option is a number and `fits(number)` is True.

    `what` describes a valid number in the error. With `or_none=True`, None is valid, too.
    """
    if not (is_number(value) and fits(value)) and not (or_none and value is None):
        _refuse(name, f"{what}, or None" if or_none else what, value)


def check_speeds(value: Any, what: str) -> tuple[float, ...]:
    """Return the option `speeds` as a tuple of floats.

    Args:
      value: value of the option.
      what: noun for the object that has a speed, such as "device", for errors.

    Raises:
      ConfigError: the value is no list of positive, finite numbers.
    """
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        _refuse("speeds", f"a list with the speed of each {what}, such as [2, 1]", value)
    speeds = tuple(value)
    for i, speed in enumerate(speeds):
        expected = f"a positive, finite number, the speed of {what} {i}"
        check_number(f"speeds[{i}]", speed, expected, lambda x: 0 < x < math.inf)
    return tuple(map(float, speeds))


def check_size(name: str, value: Any) -> None:
    """Raise ConfigError unless an option is a size in megabytes."""
    check_number(name, value, "a size in megabytes, 0 or more", lambda x: x >= 0)


def check_flag(name: str, value: Any) -> None:
    """Raise ConfigError unless an option is True or False."""
    check_one_of(name, value, (True, False))


def check_one_of(name: str, value: Any, choices: Collection[Any], kind: type | None = None) -> None:
    """Raise ConfigError unless an option is one of `choices`, or an instance of `kind`."""
    if kind is not None and isinstance(value, kind):
        return
    if not any(type(value) is type(c) and value == c for c in choices):
        *first, last = map(repr, choices)
        if kind is not None:
            first.append(f"a dtrans.{kind.__name__}")
        _refuse(name, f"{', '.join(first)} or {last}", value, ",")


def check_type(name: str, value: Any, kind: type | tuple[type, ...], what: str = "") -> None:
    """Raise ConfigError unless an option is an instance of a type."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        _refuse(name, what or " or ".join(f"a dtrans.{k.__name__}" for k in kinds), value)


def check_name(name: str, value: Any, what: str) -> None:
    """Raise ConfigError unless an option is a nonempty string."""
    if not isinstance(value, str) or not value:
        _refuse(name, what, value)


def check_together(options: Mapping[str, bool], why: str, other: str) -> None:
    """Raise ConfigError if one of `options` is set, because the user has also set `other`.

    Args:
      options: dict from the text of an option, such as `"stage=3"`, to True if the option is set.
      why: the reason why the options cannot be combined, as a clause.
      other: text of the option that the user has set.
    """
    for option, is_set in options.items():
        if is_set:
            raise ConfigError(f"{other} cannot be combined with {option}: {why}")


def is_int(x: Any) -> bool:
    """Return True for integers other than True and False."""
    return isinstance(x, int) and not isinstance(x, bool)


def is_number(x: Any) -> bool:
    """Return True for real numbers other than True and False."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def did_you_mean(name: Any, known: Iterable[str], otherwise: str) -> str:
    """Return the end of a message about an unknown name.

    The text suggests the most similar known name. If no name is similar, the text is `otherwise`,
    followed by all known names.
    """
    known = list(known)
    close = difflib.get_close_matches(str(name), known, 1)
    return f"did you mean {close[0]}?" if close else f"{otherwise} {', '.join(known)}"


def check_known(
    who: str,
    options: Mapping[str, Any],
    known: Iterable[str],
    records: Mapping[str, Any],
    renamed: Mapping[str, str],
) -> None:
    """Raise ConfigError if a user passed an option that an interface does not have.

    `dtrans.paddle` and `dtrans.epl` call this function, to check their flat lists of options.

    Args:
      who: name of the interface, for errors.
      options: the options and their values.
      known: names of all other options.
      records: arguments that are dataclasses of options: a dict from the argument's name to its
        default. The names, and the fields of the dataclasses, are valid options.
      renamed: options with another name in the interface: a dict from dtrans's name to this name.
    """
    fields = {name: _field_names(record) for name, record in records.items()}
    known = [*known, *records, *itertools.chain(*fields.values())]
    for name, value in options.items():
        if name in renamed:
            raise ConfigError(f"{name} is an unknown option of {who}; use {renamed[name]}")
        # A string sets only the first field of the record: "exact" is short for Batch("exact").
        # No interface renames this field, so there is nothing to check.
        passed = () if isinstance(value, str) else fields.get(name, ())
        separate = [renamed[field] for field in passed if field in renamed]
        if separate:
            raise ConfigError(
                f"{name}={value!r} is a record, but {who} has {', '.join(separate)} as separate "
                "options; pass the fields of the record as options"
            )
        if name not in known:
            raise ConfigError(
                f"{name} is an unknown option of {who}; "
                f"{did_you_mean(name, known, 'its options are')}"
            )


def group_options(options: Mapping[str, Any], records: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a flat dict of options to the arguments of a strategy such as `dtrans.sharding`.

    A strategy groups related options in dataclasses. For example, `{"prefetch": 2}` becomes
    `{"slicing": Slicing(prefetch=2)}`. `dtrans.paddle` and `dtrans.epl` have flat lists of options,
    so they call this function.

    Args:
      options: the options that the user passed. If the user passed both a dataclass and one of its
        fields, the field's value replaces the value in the dataclass.
      records: the arguments that are dataclasses: a dict from the argument's name to its default.
    """
    found = dict(options)
    for argument, default in records.items():
        names = [name for name in _field_names(default) if name in options]
        if not names:
            continue
        base = found.get(argument)
        if base is None:
            base = default
        elif isinstance(base, str):
            base = type(default)(base)
        for name in names:
            del found[name]
        found[argument] = dataclasses.replace(base, **{n: options[n] for n in names})
    return found


def _field_names(record: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(record)]


def _refuse(name: str, what: str, value: Any, mark: str = "") -> NoReturn:
    mark = mark or (";" if "," in what else ",")
    raise ConfigError(f"{name} must be {what}{mark} it is {value!r}")
