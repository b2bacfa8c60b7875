"""Scripts that train the steps of flax, nnx and Equinox with any strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from examples import options
from examples.libraries.run import run


def script(name: str) -> Callable[..., None]:
    """Return the script of an example of `examples.libraries`."""

    def main(
        mode: Annotated[
            str,
            typer.Option(
                help="`nccl2`, `sharding`, `pserver` or `pipeline`; or `single`, without dtrans."
            ),
        ] = "nccl2",
        trainers: Annotated[
            int,
            typer.Option(min=1, help="Number of trainers, and of servers; or of ranks or stages."),
        ] = 2,
        stage: Annotated[int, typer.Option(min=1, max=3, help="ZeRO stage of `sharding`.")] = 3,
        steps: Annotated[int, typer.Option(min=1, help="Number of training batches.")] = 100,
        x64: Annotated[
            bool, typer.Option(help="Compute in 64 bits, so that rounding errors are small.")
        ] = True,
    ) -> None:
        options.end(run(name, mode, trainers=trainers, stage=stage, steps=steps, x64=x64))

    return main
