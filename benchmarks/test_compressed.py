"""Loss on characters with compressed gradients, compared with exact jobs: runs `compressed.py`."""

from __future__ import annotations

import compressed


ROUNDS, STEPS = 5, 100  # number of seeds, number of steps of each


def test_losses_with_compressed_gradients_are_within_the_spread_of_seeds(benchmark) -> None:
    assert benchmark.pedantic(lambda: compressed.main(STEPS, ROUNDS), rounds=1) == 0
