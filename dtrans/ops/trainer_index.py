"""Index of a trainer along the mesh axes `over`.

i = trainer_index   [over]
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dtrans._jax import ShapedArray
from dtrans.ops.primitive import communication


trainer_index_p = communication(
    "trainer_index",
    lambda *, over: [ShapedArray((), jnp.int32)],
    over_axis=lambda over: [jax.lax.axis_index(over)],
)
