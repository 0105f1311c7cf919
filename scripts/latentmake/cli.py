"""The command `latentmake`, which builds by Snakemake, answers questions and keeps house.

`latentmake.commands.signatures` has a function for each word. Exit status: 0 fine, 1 findings, 2 a
mistake in the command or the configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import latentmake
from latentmake.base.errors import mistake_of
from latentmake.base.machine import expect_many_objects
from latentmake.commands import signatures

_MAKE = "Make (runs Snakemake)"
_BEGIN = "Begin (writes a configuration)"
_LOOK = "Look (builds nothing; safe beside a running build)"
_KEEP = "Keep house (no build may run meanwhile)"
_EPILOG = (
    "`latentmake build RUN` trains; other targets are `caches_RUN`, `generate_RUN` and others. "
    "`snakemake` makes the same. Exit status: 0 fine, 1 findings or a failed job, 2 a mistake in "
    "the command or the configuration."
)
_WITH_VALUE = ("-c", "--configfile", "--directory")


class _Words(TyperGroup):
    """Group whose shared options may stand before the word; a user's mistake is one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        shared: list[str] = []
        while args and args[0].partition("=")[0] in _WITH_VALUE:
            count = 1 if "=" in args[0] else 2
            shared, args = shared + args[:count], args[count:]
        if args[:1] == ["build"] and "--" in args:
            cut = args.index("--")
            args, ctx.obj = args[:cut], args[cut + 1 :]  # the rest goes to Snakemake
        return super().parse_args(ctx, args[:1] + shared + args[1:])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            mistake = None if isinstance(error, BrokenPipeError) else mistake_of(error)
            if mistake is None:
                raise
        from latentmake.commands.project import coloured  # here: help needs no project

        typer.echo(f"{coloured('error')}: {mistake}", err=True)
        raise typer.Exit(2)


app = typer.Typer(
    cls=_Words,
    name="latentmake",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(given: bool) -> None:
    if given:
        typer.echo(f"latentmake {latentmake.__version__}")
        raise typer.Exit


def _snakefile(given: bool) -> None:
    if given:
        typer.echo(Path(__file__).resolve().parents[2] / "Snakefile")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    snakefile: Annotated[
        bool,
        typer.Option("--snakefile", callback=_snakefile, is_eager=True, help="Print its path."),
    ] = False,
) -> None:
    """Build caches and trainings of a project, ask about them, and keep it tidy."""


for _panel, _words in (
    (_MAKE, "build"),
    (_BEGIN, "new demo init import_"),
    (_LOOK, "status explain check cost verify captions report compare diff runs uses doctor"),
    (_KEEP, "prune adopt"),
):
    for _name in _words.split():
        app.command(_name.rstrip("_"), rich_help_panel=_panel)(getattr(signatures, _name))


def main() -> None:
    """Run the command line."""
    expect_many_objects()
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
