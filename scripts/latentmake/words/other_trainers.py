"""`latentmake import` and `latentmake adopt`: datasets and caches of other programs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from latentmake.config.fields import NAME, PATTERNS
from latentmake.errors import ConfigError
from latentmake.files import atomic
from latentmake.plan.build import alone
from latentmake.words.project import ConfigFiles, Directory, opened


def import_(
    file: Annotated[
        Path, typer.Argument(help="Dataset file of musubi-tuner or sd-scripts (TOML).")
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
    from latentmake.exchange.datasets_toml import imported

    if directory is not None and not directory.is_dir():
        raise ConfigError("there is no such folder", where=directory, hint="check --directory")
    os.chdir(directory or ".")
    run = name or re.sub(r"[^A-Za-z0-9_.-]+", "_", file.stem).lstrip("_.-")
    if not re.fullmatch(NAME, run):
        raise ConfigError(
            "is no name of a run", where=f"--name {run}", hint=f"use {PATTERNS[NAME]}"
        )
    found = imported(file, run, architecture, task)
    if output is None:
        typer.echo(found.text, nl=False)
        return
    text = found.text.encode()
    if output.exists() and output.read_bytes() != text:  # which its user may have edited
        raise ConfigError("is there already", where=output, hint="rename or remove it")
    atomic.write(output, text)
    names = ", ".join(found.values["runs"])
    typer.echo(f"{output}: runs {names}; the first lines say what differs")


def adopt(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs of the configuration.")],
    configfile: ConfigFiles = None,
    directory: Directory = None,
) -> None:
    """Take over caches that musubi-tuner, sd-scripts or ai-training made of a run."""
    from latentmake.exchange import adoption
    from latentmake.exchange.trainer_caches import folders_of

    with opened(configfile, directory, encoders=True) as project, alone():
        names = project.run_names(runs)
        plans = project.plan(names).runs
        for name in names:
            adoption.adopt(plans[name], folders_of(project.config, name), say=typer.echo)
