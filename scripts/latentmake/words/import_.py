"""`latentmake import`: a dataset file of another trainer as a configuration of ours."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from latentmake.errors import ConfigError
from latentmake.words.project import Directory


def import_(
    file: Annotated[
        Path, typer.Argument(help="Dataset file of musubi-tuner or sd-scripts, TOML or JSON.")
    ],
    name: Annotated[
        str | None, typer.Option(metavar="RUN", help="Name of the run.", show_default="the file's")
    ] = None,
    architecture: Annotated[
        str | None,
        typer.Option(help="Architecture of the model.", show_default="as the caches say"),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Task of the model, such as t2v-14B.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="File to write.", show_default="print it")
    ] = None,
    directory: Directory = None,
) -> None:
    """Make a configuration of another trainer's dataset file; notes in it say what differs."""
    from latentmake.exchange.datasets_toml import imported, write

    if directory is not None and not directory.is_dir():
        raise ConfigError("there is no such folder", where=directory, hint="check --directory")
    os.chdir(directory or ".")
    run = name or re.sub(r"[^A-Za-z0-9_.-]+", "_", file.stem).lstrip("_.-")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", run):
        hint = "use letters, digits, `.`, `_` and `-`"
        raise ConfigError("is no name of a run", where=f"--name {run}", hint=hint)
    found = imported(file, run, architecture, task)
    for path, data in found.written.items():
        write(Path(path), data)
    if output is None:
        typer.echo(found.text, nl=False)
    else:
        write(output, found.text.encode())
        typer.echo(
            f"{output}: runs {', '.join(found.values['runs'])}; the first lines say what differs"
        )
