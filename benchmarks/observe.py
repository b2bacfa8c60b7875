"""Process that asks servers for their status: `python observe.py ENDPOINT...`.

`test_status.py` writes the lines `on` and `off` to its standard input. After `on` it asks the
servers ten times a second. After `off` it prints the number of answers.
"""

from __future__ import annotations

import sys
import threading

from dtrans.run.status.observer import JobObserver


INTERVAL = 0.1  # seconds between two requests


def main(endpoints: list[str]) -> None:
    """Ask the servers between each `on` and `off` of standard input."""
    with JobObserver(endpoints, 10.0) as observer:
        observer.ask()
        for line in sys.stdin:
            assert line == "on\n", line
            stop, answered = threading.Event(), list[bool]()

            def ask(stop: threading.Event = stop, answered: list[bool] = answered) -> None:
                while not stop.wait(INTERVAL):
                    answered.append(not any(x.error for x in observer.ask()))

            poller = threading.Thread(target=ask)
            poller.start()
            sys.stdin.readline()
            stop.set()
            poller.join()
            assert all(answered)
            print(len(answered), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
