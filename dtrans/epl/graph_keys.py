"""EPL's names for the ways in which `dtrans.collect` merges an output of all replicas.

Source: `GraphKeys` of EPL (epl/ir/graph.py).
"""

from dtrans.step import collect


class GraphKeys:
    """Keys of `dtrans.collect` (mean, sum or concatenation over replicas) under EPL's names.

    Example:
      >>> import jax.numpy as jnp, dtrans
      >>> dtrans.epl.GraphKeys.GLOBAL_MEAN_OBJECTS
      'GLOBAL_MEAN'
      >>> dtrans.collect(jnp.ones(2), dtrans.epl.GraphKeys.GLOBAL_MEAN_OBJECTS).tolist()
      [1.0, 1.0]
    """

    GLOBAL_CONCAT_OBJECTS = collect.GLOBAL_CONCAT
    GLOBAL_MEAN_OBJECTS = collect.GLOBAL_MEAN
    GLOBAL_SUM_OBJECTS = collect.GLOBAL_SUM
    LOCAL_CONCAT_OBJECTS = collect.LOCAL_CONCAT
    LOCAL_MEAN_OBJECTS = collect.LOCAL_MEAN
    LOCAL_SUM_OBJECTS = collect.LOCAL_SUM
