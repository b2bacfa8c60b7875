"""The command line: `dtrans launch` and `dtrans train`.

Errors of the package come out as one message without a traceback and exit code 1, usage errors with 2, and a
failed role with that role's own exit code.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import dtrans
from dtrans.errors import DtransError, LaunchError


# a bug should look like one: plain tracebacks, not boxes with local variables
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")

Trainers = Annotated[int, typer.Option(min=1, help="How many trainers.")]
PServers = Annotated[int | None, typer.Option(min=1, help="How many parameter servers; none in nccl2 mode.")]
Mode = Annotated[str, typer.Option(help="`pserver`, or `nccl2`: trainers only, with collectives.")]


def main() -> None:
    """The entry point."""
    try:
        app()
    except LaunchError as e:
        _fail(e)
        sys.exit(e.code)
    except DtransError as e:
        _fail(e)
        sys.exit(1)


def _fail(error: DtransError) -> None:
    # markup off: messages may hold brackets, shapes for instance
    Console(stderr=True, soft_wrap=True).print(f"dtrans: {error}", style="red", markup=False, highlight=False)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dtrans {dtrans.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Rewrites a training step written for one device into the programs of a distributed job."""


# what follows the script is the script's
@app.command(name="launch", context_settings={"allow_interspersed_args": False})
def launch_command(
    script: Annotated[str, typer.Argument(help="The script that every role runs.", metavar="SCRIPT")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments, verbatim.", metavar="ARGS...")] = None,
    trainers: Trainers = 1,
    pservers: PServers = None,
    mode: Mode = "pserver",
    on_trainer_loss: Annotated[
        str, typer.Option(help="`abort`; or in nccl2 mode `drop`: go on without a trainer that fails.")
    ] = "abort",
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in `python -m`.")] = False,
    deadline: Annotated[
        float | None, typer.Option(min=0, help="End the job when it takes more seconds than this.")
    ] = None,
) -> None:
    """Start the roles of a job on this host and wait for them.

    Each role finds out what it is from DTRANS_ROLE, DTRANS_TRAINER_ID, DTRANS_TRAINERS,
    DTRANS_PSERVER_ENDPOINTS (DTRANS_TRAINER_ENDPOINTS in nccl2 mode) and DTRANS_CURRENT_ENDPOINT;
    `dtrans.Role.from_env()` reads them, and so does `dtrans.connect()`. When one fails
    the others are ended, and its error and exit code are those of this command.
    """
    from dtrans.run.launch import launch

    if not module and not Path(script).is_file():
        raise typer.BadParameter(f"there is no script {script}", param_hint="SCRIPT")
    command = [sys.executable, *(["-m"] if module else []), script, *(arguments or [])]
    launch(
        command,
        trainers=trainers,
        pservers=pservers,
        mode=mode,
        on_trainer_loss=on_trainer_loss,
        deadline=deadline,
    )


@app.command()
def train(
    engine: Annotated[str, typer.Option(help="`processes`: one per role. `mesh`: all in this one.")] = "processes",
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, adam, adamw, lion, rmsprop, ...")] = "momentum",
    trainers: Trainers = 2,
    pservers: PServers = None,
    mode: Mode = "pserver",
    epochs: Annotated[int, typer.Option(min=1)] = 20,
    batch_size: Annotated[int, typer.Option(min=1, help="Images in a global batch; trainers share it.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Of the split, the first parameters and the batches.")] = 0,
    min_block_size: Annotated[int, typer.Option(help="The fewest elements worth a block; 8192 or more.")] = 8192,
    plot: Annotated[Path | None, typer.Option(help="Draw the loss into this file.")] = None,
    deadline: Annotated[float, typer.Option(min=0.1, help="Seconds that any role may wait for another.")] = 60.0,
    check: Annotated[
        bool, typer.Option(help="End with exit code 1 when accuracy or difference are out of bounds.")
    ] = True,
) -> None:
    """Train on handwritten digits, distributed, and compare with one device on the same batches."""
    from dtrans.examples.job import Settings
    from dtrans.examples.train import train as run

    settings = Settings(optimizer, epochs, batch_size, seed, min_block_size, deadline)
    within = run(settings, engine=engine, mode=mode, trainers=trainers, pservers=pservers, plot=plot)
    if check and not within:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
