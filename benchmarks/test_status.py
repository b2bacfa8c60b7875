"""Cost of an observer that asks a job's servers for their status ten times a second.

Steps are timed without the observer, with the observer, and again without the observer. The ratio
of the two times without the observer is the noise. The observer runs on the same machine, so its
work also slows the steps.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from test_processes import running_job


STEPS, WINDOWS = 200, 15


def test_steps_while_somebody_watches(benchmark, report):
    with running_job("sync") as (endpoints, both):
        both(STEPS)
        observer = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("observe.py")), *endpoints],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        def watched() -> tuple[float, int]:
            observer.stdin.write("on\n")
            observer.stdin.flush()
            seconds = both(STEPS)
            observer.stdin.write("off\n")
            observer.stdin.flush()
            return seconds, int(observer.stdout.readline())

        try:
            watched()
            windows = [(both(STEPS), *watched(), both(STEPS)) for _ in range(WINDOWS)]
            benchmark.pedantic(watched, rounds=1)
        finally:
            observer.stdin.close()
            observer.wait(timeout=120)
            observer.stdout.close()
    shares = [(before + after) / 2 / seen for before, seen, _, after in windows]
    noises = [before / after for before, _, _, after in windows]
    share, noise = statistics.median(shares), statistics.median(noises)
    before, seen, polls, after = (statistics.median(t) for t in zip(*windows, strict=True))
    benchmark.extra_info |= {"of unwatched": share, "of itself": noise, "polls in a window": polls}
    load = f"load {os.getloadavg()[0]:.1f}"
    among = f"{polls:.0f} polls a window, half of windows {spread(shares)}, {load}"
    report(f"sync: steps/s watched / not ({among})", share, STEPS / seen, STEPS / after)
    among = f"half of windows {spread(noises)}, {load}"
    report(
        f"sync: steps/s not watched / the same again ({among})",
        noise,
        STEPS / after,
        STEPS / before,
    )


def spread(ratios: Sequence[float]) -> str:
    """Return the quartiles between which half of the ratios lie."""
    low, high = np.quantile(ratios, (0.25, 0.75))
    return f"{low:.2f} to {high:.2f}"
