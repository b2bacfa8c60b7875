"""Time to slice an optimizer for servers, compared with the time to trace the step.

Slicing has two parts: the row analysis of the update, and the equations of the servers' blocks.
Both should grow linearly with the number of leaves, and the analysis should take less time than
the trace. Adam is elementwise. LAMB after a clip by the global norm needs norms over all servers,
which take three rounds.
"""

from __future__ import annotations

import jax
import optax
import pytest
from models import mlp, programs

import dtrans
from dtrans.parameter_server.placement import place
from dtrans.rows.analysis import analyse
from dtrans.slicing.server_spec import analyse_update
from dtrans.slicing.server_update import write_server
from dtrans.step.halves import divide_step


ENDPOINTS = ("127.0.0.1:6174", "127.0.0.1:6175")
LEAVES = [10, 100, 1000]
OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "clip, lamb": optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-3)),
}
CASES = [(n, leaves) for n in OPTIMIZERS for leaves in LEAVES]


def deep(name: str, leaves: int):
    """Return a function that traces a model's step, and the divided step.

    Args:
      name: name of the optimizer.
      leaves: number of leaves of the model.
    """
    step, init, batch = mlp([16] * (leaves // 2 + 1), 8, OPTIMIZERS[name])
    state = jax.eval_shape(init, jax.random.key(0))
    return lambda: dtrans.trace(step, *state, *batch), divide_step(programs(step, init, batch)[0])


def pairs(leaves: int) -> int:
    return max(3, min(15, 500 // leaves))


@pytest.mark.parametrize("name,leaves", CASES)
def test_analysis_over_trace(benchmark, ratio, name, leaves):
    trace, step = deep(name, leaves)
    ours = lambda: len(analyse(step.optimize, step.optimized).groups)
    compare = lambda: ratio(
        f"analysis / trace, {name}, {leaves} leaves", ours, trace, pairs(leaves)
    )
    benchmark.extra_info["ratio"] = benchmark.pedantic(compare, rounds=1)


@pytest.mark.parametrize("name,leaves", CASES)
def test_slicing_over_trace(benchmark, ratio, name, leaves):
    """Time the equations of all blocks of two servers; every leaf is divided into blocks."""
    trace, step = deep(name, leaves)
    analysis = analyse(step.optimize, step.optimized)
    types = {n: step.program.inputs[n] for n in step.optimized}
    placement = place(analysis, types, ENDPOINTS, dtrans.BlockPlacement(min_block_size=8))

    def ours():
        spec = analyse_update(analysis, placement, trainers=2)
        return sum(len(write_server(spec, ep).blocks) for ep in ENDPOINTS)

    compare = lambda: ratio(f"slicing / trace, {name}, {leaves} leaves", ours, trace, pairs(leaves))
    benchmark.extra_info["ratio"] = benchmark.pedantic(compare, rounds=1)
