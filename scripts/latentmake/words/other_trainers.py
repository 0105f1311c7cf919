"""`latentmake import` and `latentmake adopt`: datasets and caches of other programs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from latentmake.errors import ConfigError
from latentmake.files.workspace import usable_cores
from latentmake.plan.build import alone
from latentmake.words.project import ConfigFiles, Directory, opened


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
    from latentmake.exchange.datasets_toml.importing import imported, write

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


def adopt(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs of the configuration.")],
    configfile: ConfigFiles = None,
    directory: Directory = None,
) -> None:
    """Take over caches that other programs made of a run's items; nothing is encoded."""
    from latentmake.exchange.adoption import Format
    from latentmake.exchange.adoption import adopt as adopt_files
    from latentmake.exchange.ai_training.plan import plan_adopt
    from latentmake.exchange.trainer_caches import TrainerCaches

    with opened(configfile, directory, encoders=True) as project, alone():
        facts, names = project.facts, project.run_names(runs)
        plans = project.plan(names).runs
        for name in names:
            run = project.config.runs[name]
            theirs = facts.layout(run.model).external
            form: Format = (
                TrainerCaches.of(project.config, name, run)
                if theirs
                else plan_adopt(facts, plans[name], run)
            )
            adopt_files(plans[name], form, say=typer.echo, threads=usable_cores())
