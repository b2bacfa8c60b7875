"""Overview of the arrays on parameter servers: for each array, its server, origin and rows.

Checkpoints, printed plans and costs read the overview. It contains parameters and optimizer state.
(Paddle's, `program._parameters_on_pservers`, contains only parameters.)

Source: `VarDistributed` and `VarsDistributed` of
  python/paddle/fluid/transpiler/details/vars_distributed.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from dtrans.ir import display
from dtrans.rows.row_buckets import RowBuckets
from dtrans.rows.writer import RowRange, RowSet
from dtrans.slicing.server_update import ServerVariable


VariableKind: TypeAlias = Literal["Param", "RemotePrefetch", "Optimizer"]


@dataclasses.dataclass(frozen=True)
class VarDistributed:
    """Array on one server (the *slice*), and the array of the step that it is cut from (*origin*).

    For example, the slice `params/w.block1` of shape (2, 2) contains the rows 3 and 4 of its origin
    `params/w` of shape (5, 2).

    Attributes:
      origin_name: name of the origin: `params/w`, `opt_state/0/mu/w`.
      origin_shape: shape of the origin.
      slice_name: name of the slice: `params/w.block0`, or the origin's name if it was not cut.
      slice_shape: shape of the slice.
      dtype: type of both arrays.
      axis: the dimension along which the origin was cut; 0 if it was not cut. This can differ from
        0 for optimizer state, for example if the optimizer stores a transposed array.
      offset: the first index of the slice along `axis`.
      block_id: index of the slice within its origin: 0 for the first.
      is_slice: True if the slice is smaller than its origin.
      vtype: "Param" for a parameter that trainers receive in full, "RemotePrefetch" for a table
        from which trainers request single rows, "Optimizer" for optimizer state.
      endpoint: the server's endpoint.
      buckets: the slice's rows if `dtrans.Rows(place="bucket")` spreads the rows over servers by
        their ids; None for a contiguous range that begins at `offset`.
    """

    origin_name: str
    origin_shape: tuple[int, ...]
    slice_name: str
    slice_shape: tuple[int, ...]
    dtype: Any
    axis: int
    offset: int
    block_id: int
    is_slice: bool
    vtype: VariableKind
    endpoint: str
    buckets: RowBuckets | None = None

    @property
    def rows(self) -> RowSet:
        """Indices of the slice in the origin, along `axis`."""
        if self.buckets is not None:
            return self.buckets
        start = self.offset if self.is_slice else 0
        return RowRange(start, start + self.slice_shape[self.axis])

    @property
    def nbytes(self) -> int:
        """Bytes of the slice."""
        return math.prod(self.slice_shape) * int(self.dtype.itemsize)

    @property
    def index(self) -> tuple[slice | np.ndarray, ...]:
        """NumPy index that cuts the slice out of its origin: `origin[var.index]`."""
        if not self.is_slice:
            return ()
        return (slice(None),) * self.axis + (self.rows.index,)

    def __str__(self) -> str:
        slice_ = f"{self.slice_name}{list(self.slice_shape)} on {self.endpoint}"
        rows = ""
        if self.is_slice:
            first = f"from {self.offset}"
            if self.buckets is not None:
                first = str(self.buckets)
            rows = f" {first} along axis {self.axis}"
        return f"{self.vtype} {slice_}: {self.origin_name}{list(self.origin_shape)}{rows}"


class VarsDistributed(tuple[VarDistributed, ...]):
    """Overview of a plan (`plan.overview`): the arrays of all servers, one server after the other.

    Example:
      >>> import jax, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.1, momentum=0.9)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda key: (p := {"w": jnp.ones((5, 2))}, tx.init(p))
      >>> main = dtrans.trace(step, *init(None), jnp.ones((8, 5)))
      >>> startup = dtrans.trace(init, jax.random.key(0))
      >>> plan = dtrans.pserver(main, startup, pservers="127.0.0.1:6174,127.0.0.1:6175",
      ...                       placement=dtrans.BlockPlacement(min_block_size=1))
      >>> print(plan.overview)
      Optimizer opt_state/0/trace/w.block0[3, 2] on 127.0.0.1:6174:
        opt_state/0/trace/w[5, 2] from 0 along axis 0
      Param params/w.block0[3, 2] on 127.0.0.1:6174:
        params/w[5, 2] from 0 along axis 0
      Optimizer opt_state/0/trace/w.block1[2, 2] on 127.0.0.1:6175:
        opt_state/0/trace/w[5, 2] from 3 along axis 0
      Param params/w.block1[2, 2] on 127.0.0.1:6175:
        params/w[5, 2] from 3 along axis 0
      >>> [row.endpoint for row in plan.overview.by_origin("params/w")]
      ['127.0.0.1:6174', '127.0.0.1:6175']
    """

    __slots__ = ()

    def by_endpoint(self, endpoint: str) -> VarsDistributed:
        """Return the arrays on one server, like Paddle's `get_distributed_vars_by_ep`."""
        return VarsDistributed(row for row in self if row.endpoint == endpoint)

    def by_origin(self, name: str) -> VarsDistributed:
        """Return the slices of one array of the step, in the order of the array's rows."""
        slices = [row for row in self if row.origin_name == name]
        return VarsDistributed(sorted(slices, key=lambda row: row.block_id))

    def by_slice(self, name: str) -> VarsDistributed:
        """Return the arrays named `name`, like Paddle's `get_distributed_var_by_slice`.

        The result has several entries only for state that belongs to no parameter, such as a step
        count. Several servers can have a copy of such state.
        """
        return VarsDistributed(row for row in self if row.slice_name == name)

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def __repr__(self) -> str:
        servers = len({row.endpoint for row in self})
        return f"<VarsDistributed: {len(self)} arrays on {servers} servers>"

    def _repr_html_(self) -> str:
        header = ("server", "array", "shape", "kind", "slice of", "from row", "bytes")
        rows = []
        for row in self:
            first = "" if not row.is_slice else str(row.buckets or row.offset)
            shape = str(list(row.slice_shape))
            names = (row.endpoint, row.slice_name, shape, row.vtype, row.origin_name)
            rows.append((*names, first, f"{row.nbytes:,}"))
        return display.plan_html(repr(self).strip("<>"), header, rows, (), code=1)


def overview_of(
    servers: Mapping[str, Mapping[str, ServerVariable]],
    types: Mapping[str, Any],
    params: Collection[str],
    tables: Collection[str] = (),
) -> VarsDistributed:
    """Return the overview of a plan: one `VarDistributed` for each array on each server.

    Args:
      servers: a dict for each server, by endpoint; it contains the server's arrays, by name. Arrays
        that a server adds for a block, such as the backups of DC-ASGD, are cut like the block:
        `params/w.block0.trainer_1_bak` has the origin `params/w.trainer_1_bak`.
      types: types of the step's arrays, by name.
      params: names of parameters.
      tables: names of the parameters from which trainers request single rows.
    """
    found: list[VarDistributed] = []
    for endpoint, variables in servers.items():
        for name, x in variables.items():
            origin_type = types[x.init_output]
            stored = x.stored_type(origin_type)
            axis, offset = (x.part.axis, x.part.first) if x.part else (0, 0)
            vtype: VariableKind = "Optimizer"
            if x.origin in params:
                vtype = "RemotePrefetch" if x.origin in tables else "Param"
            found.append(
                VarDistributed(
                    origin_name=x.origin,
                    origin_shape=tuple(origin_type.shape),
                    slice_name=name,
                    slice_shape=tuple(stored.shape),
                    dtype=stored.dtype,
                    axis=axis,
                    offset=offset,
                    block_id=x.block,
                    is_slice=x.part is not None,
                    vtype=vtype,
                    endpoint=endpoint,
                    buckets=x.buckets,
                )
            )
    return VarsDistributed(found)
