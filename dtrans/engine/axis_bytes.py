"""Collectives in a program, and the bytes that they move over each mesh axis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dtrans._jax import SCAN, JaxprEqn, jaxprs_in_params, opened, scan_length
from dtrans.ir.cost import total_bytes
from dtrans.ops import collective_of, moved_values


def collectives(jaxpr: Any, times: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """Yield the equations of a program that communicate, with the number of times that each runs.

    An equation in the body of a scan runs once in each iteration.

    Args:
      jaxpr: the program.
      times: number of times that the program runs.
    """
    for eqn in opened(jaxpr).eqns:
        if collective_of(eqn) is not None:
            yield eqn, times
        turns = scan_length(eqn) if eqn.primitive.name == SCAN else 1
        for body in jaxprs_in_params(eqn.params):
            yield from collectives(body, times * turns)


def bytes_by_axis(jaxpr: Any) -> dict[tuple[str, str], int]:
    """Return the bytes of a program's collectives; keys are pairs (primitive, axis).

    A gather counts the bytes of its output, and a reduction the bytes of its input.
    """
    found: dict[tuple[str, str], int] = {}
    for eqn, times in collectives(jaxpr):
        key = (eqn.primitive.name, " and ".join(eqn.params["over"]))
        found[key] = found.get(key, 0) + times * total_bytes(moved_values(eqn))
    return found
