"""The observer of `test_status.py`: `python observe.py ENDPOINT...`, and on its input `on` or
`off`.

After `on` it asks the servers ten times a second, and after `off` it prints how often they
answered.
"""

from __future__ import annotations

import sys
import threading

from dtrans.run.status.observer import JobObserver


INTERVAL = 0.1  # seconds between two requests


def main(endpoints: list[str]) -> None:
    """Ask while it is on."""
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
