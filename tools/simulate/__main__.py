"""Command line of the simulator: `python -m tools.simulate`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from dtrans.cli import run_command
from tools.simulate.draw import drawn
from tools.simulate.explore import Explorer, small_case
from tools.simulate.verdict import simulated, smaller, verdicts


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command()
def simulate(
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the first schedule; a seed determines all events.")
    ] = 0,
    count: Annotated[
        int, typer.Option(min=1, help="Number of schedules; a single one is printed in full.")
    ] = 1,
    exhaustive: Annotated[
        bool,
        typer.Option("--exhaustive", help="Check all runs of a small job with snapshots instead."),
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the small job.")] = 2,
    servers: Annotated[int, typer.Option(min=1, help="Servers of the small job.")] = 1,
    deaths: Annotated[int, typer.Option(min=0, help="Deaths of processes in each run.")] = 1,
    breaks: Annotated[int, typer.Option(min=0, help="Broken connections in each run.")] = 0,
    drop: Annotated[
        bool, typer.Option("--drop", help="Continue the small job without a lost trainer.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="With --drop, let the trainer join again.")
    ] = False,
) -> None:
    """Run jobs of parameter servers over a simulated network with faults.

    Servers and trainers run the state machines of real jobs. Sockets, clocks and computation are
    simulated. A *promise* is a property that is checked. If a job violates a promise, the command
    prints the smallest schedule that it finds with this violation, and exits with code 1.

    With `--exhaustive`, there is no seed: the command checks all runs of a job of two trainers, in
    which any process may die at any moment.
    """
    if exhaustive:
        case = small_case(steps=steps, servers=servers, quorum=int(drop), replaces=replace)
        explored = Explorer(case, deaths=deaths, breaks=breaks).run()
        print(explored)
        raise typer.Exit(bool(explored.faults))
    if count == 1:
        found = simulated(drawn(seed))
        print(smaller(found) if found.faults else found)
        raise typer.Exit(bool(found.faults))
    begun, wrong = time.monotonic(), 0
    for found in verdicts(range(seed, seed + count)):
        if found.faults:
            wrong += 1
            print(f"{smaller(found)}\n")
    rate = count / (time.monotonic() - begun) * 60
    print(f"{count - wrong} of {count} schedules keep all promises ({rate:,.0f} a minute)")
    raise typer.Exit(bool(wrong))


if __name__ == "__main__":
    run_command(app)
