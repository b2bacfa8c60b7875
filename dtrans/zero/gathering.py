"""What is gathered, and how: slices that are there, gradients that loops scatter, and how far ahead."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dtrans._jax import Atom, JaxprEqn, Var
from dtrans.ir.builder import Builder
from dtrans.zero.choose_slices import Sliced
from dtrans.zero.live_ranges import LiveRanges


@dataclasses.dataclass(frozen=True)
class Given:
    """A slice that is there.

    Attributes:
      leaf: the name of the leaf, or of the stack that it is a layer of.
      sliced: how it is cut.
      atom: the slice.
      stacked: whether loops take it apart, layer by layer.
    """

    leaf: str
    sliced: Sliced
    atom: Atom
    stacked: bool = False

    def for_layer(self, atom: Atom) -> Given:
        """A layer's slice."""
        return Given(self.leaf, self.layer, atom)

    @property
    def layer(self) -> Sliced:
        """How one layer of a stack is cut."""
        return dataclasses.replace(self.sliced, axis=self.sliced.axis - 1)


@dataclasses.dataclass(frozen=True)
class Scattered:
    """How the gradient of a stack of layers is made slices, layer by layer.

    Attributes:
      sliced: how the stack is cut.
      dtype: the type in which it is reduced.
    """

    sliced: Sliced
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Gathering:
    """How leaves are gathered.

    Attributes:
      axis_name: the axis that the ranks are on.
      degree: how many there are.
      prefetch: how many windows ahead.
      prefetch_in_loops: the same, in loops over layers.
      segment: bytes up to which leaves of neighbouring windows are gathered together.
      once: whether what is gathered is kept to its last use, in either direction.
    """

    axis_name: str
    degree: int
    prefetch: int
    prefetch_in_loops: int
    segment: float
    once: bool = False


@dataclasses.dataclass(frozen=True)
class Residual:
    """What a forward loop would hand on of its layers: made of `leaf`, layer by layer, by `chain` from `start`."""

    leaf: Var
    start: Var
    chain: tuple[JaxprEqn, ...]
    out: Var


class LeafGatherer(Protocol):
    """Writes equations that read leaves, where there are slices of them (`dtrans.zero.all_gather`)."""

    late: Var | None

    @property
    def b(self) -> Builder: ...
    @property
    def given(self) -> Mapping[Var, Given]: ...
    @property
    def how(self) -> Gathering: ...
    @property
    def scattered(self) -> Mapping[Var, Scattered]: ...
    @property
    def residuals(self) -> Mapping[Var, Residual]: ...
    @property
    def uses(self) -> LiveRanges: ...

    def stacks(self, eqn: JaxprEqn) -> dict[int, tuple[Var, Any]]:
        """The operands of a loop that are stacks of slices, by position."""

    def for_body(
        self,
        b: Builder,
        eqns: Sequence[JaxprEqn],
        roles: Sequence[str],
        given: Mapping[Var, Given],
        how: Gathering,
        ends: Sequence[tuple[int, Atom]],
    ) -> LeafGatherer:
        """The same for the body of a loop."""

    def given_already(self, whole: Atom) -> None:
        """Take what the first window needs as gathered."""

    def emit(self, eqn: JaxprEqn) -> None:
        """Write one equation."""

    def result(self, atom: Atom, maker: int) -> Atom:
        """A value that is wanted, once the equation at `maker` is written."""
