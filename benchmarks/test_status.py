"""The cost of an observer that asks a job's servers for their status ten times a second.

Windows of steps with it alternate with windows in which it is silent. It runs on the same machine: its own work is a
part of the ratio.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

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
            pairs = [(*watched(), both(STEPS)) for _ in range(WINDOWS)]
            benchmark.pedantic(watched, rounds=1)
        finally:
            observer.stdin.close()
            observer.wait(timeout=120)
            observer.stdout.close()
    share = statistics.median(alone / seen for seen, _, alone in pairs)
    seen, polls, alone = (statistics.median(t) for t in zip(*pairs, strict=True))
    benchmark.extra_info |= {"of unwatched": share, "polls in a window": polls}
    name = f"sync: steps/s watched / not ({polls:.0f} polls a window, load {os.getloadavg()[0]:.1f})"
    report(name, share, STEPS / seen, STEPS / alone)
