"""Command line of the examples: `dtrans example NAME`, or `python -m examples NAME` in the
repository."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from dtrans.cli import run_command
from examples import (
    libraries,
    train_characters,
    train_clicks,
    train_digits,
    train_library,
    train_words,
)


app = typer.Typer(
    add_completion=False,
    help="Train an example distributed, and compare with one device on the same batches.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("digits")(train_digits.main)
app.command("characters")(train_characters.main)
app.command("word2vec")(train_words.main)
app.command("ctr")(train_clicks.main)
for name, what in libraries.EXAMPLES.items():
    panel = "Steps of Flax, nnx and Equinox"
    app.command(name, help=f"Train {what}.", rich_help_panel=panel)(train_library.script(name))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run an example.

    Args:
      arguments: the name and the options of the example. Default: the arguments of this process.
    """
    app(args=arguments, prog_name="dtrans example")


if __name__ == "__main__":
    run_command(main)
