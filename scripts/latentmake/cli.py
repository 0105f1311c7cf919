"""The command `latentmake`, which answers questions and keeps house; Snakemake makes the files.

`latentmake.words.signatures` has a function for each word. Exit status: 0 fine, 1 findings, 2 a
mistake in the command or the configuration.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import latentmake
from latentmake.errors import UserError, system_error
from latentmake.words import signatures

_BEGIN = "Begin (writes a configuration)"
_LOOK = "Look (builds nothing; safe beside a running build)"
_KEEP = "Keep house (no build may run meanwhile)"
_EPILOG = (
    "Snakemake makes the files: `snakemake --cores 1 train_RUN`, `caches_RUN`, `generate_RUN` and "
    "others. Exit status: 0 fine, 1 findings, 2 a mistake in the command or the configuration."
)
_WITH_VALUE = ("-c", "--configfile", "--directory")


class _Words(TyperGroup):
    """Group whose shared options may stand before the word; a user's mistake is one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        shared: list[str] = []
        while args and args[0].partition("=")[0] in _WITH_VALUE:
            count = 1 if "=" in args[0] else 2
            shared, args = shared + args[:count], args[count:]
        return super().parse_args(ctx, args[:1] + shared + args[1:])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            mistake = error
        except OSError as error:
            if isinstance(error, BrokenPipeError) or not (known := system_error(error)):
                raise
            mistake = known
        typer.echo(f"error: {mistake}", err=True)
        raise typer.Exit(2)


app = typer.Typer(
    cls=_Words,
    name="latentmake",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"latentmake {latentmake.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Ask about the caches, captions and trainings of a project, and keep it tidy."""


for _panel, _words in (
    (_BEGIN, "init import_"),
    (_LOOK, "status explain check verify captions report compare doctor"),
    (_KEEP, "prune adopt"),
):
    for _name in _words.split():
        app.command(_name.rstrip("_"), rich_help_panel=_panel)(getattr(signatures, _name))


def main() -> None:
    """Run the command line."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
