"""`latentmake import`: make a configuration of another trainer's dataset file."""

from __future__ import annotations

import os
import re
from pathlib import Path

import typer

from latentmake.base import atomic
from latentmake.base.errors import ConfigError
from latentmake.commands.project import check_directory
from latentmake.config.fields import NAME, PATTERNS
from latentmake.config.root import parse
from latentmake.trainers.exchange.datasets_toml import Imported, imported
from latentmake.trainers.init.local_models import Model, named_model
from latentmake.trainers.init.model_section import fill_in, trainer_of


def import_(
    file: Path,
    name: str | None = None,
    architecture: str | None = None,
    task: str | None = None,
    model: str | None = None,
    output: Path | None = None,
    directory: Path | None = None,
) -> None:
    """Make a configuration of another trainer's dataset file; notes in it say what differs."""
    check_directory(directory)
    os.chdir(directory or ".")
    run = name or re.sub(r"[^A-Za-z0-9_.-]+", "_", file.stem).lstrip("_.-")
    if not re.fullmatch(NAME, run):
        what, hint = "is no name of a run", f"use {PATTERNS[NAME]}"
        raise ConfigError(what, where=f"--name {run}", hint=hint)
    own = named_model(model) if model else None
    if own is not None:
        architecture = architecture or own.architecture.name
        task = task or own.task
    configuration = imported(file, run, architecture, task)
    missing = _fill(configuration, own) if own else []
    for key in missing:
        typer.echo(f"{model}: has no `{key}`: correct its path in the configuration", err=True)
    if output is None:
        typer.echo(configuration.text, nl=False)
        return
    text = configuration.text.encode()
    if output.exists() and output.read_bytes() != text:  # the user may have edited the file
        raise ConfigError("is there already", where=output, hint="rename or remove it")
    atomic.write(output, text)
    names = ", ".join(configuration.values["runs"])
    typer.echo(f"{output}: runs {names}; the first lines say what differs")


def _fill(configuration: Imported, model: Model) -> list[str]:
    """Write a model on the disk into a configuration; return the keys whose files are missing.

    Raises:
        ConfigError: The configuration is of another architecture.
    """
    runs = configuration.values["runs"].values()
    fill_in(model, trainer_of(model, next(iter(runs))["trainer"]["kind"], musubi=True))
    own = {"architecture": model.architecture.name, **model.keys}
    configuration.values["models"] = {model.name: own}
    configuration.has_weights = not model.missing
    for run in runs:
        run["model"] = model.name
    parse(configuration.values)
    return model.missing
