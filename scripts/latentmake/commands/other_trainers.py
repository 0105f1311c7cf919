"""`latentmake import` and `latentmake adopt`: take over datasets and caches of other programs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from latentmake.base import atomic
from latentmake.base.errors import ConfigError
from latentmake.commands.model_section import Section, section_at, section_of, trainer_of
from latentmake.commands.project import check_directory, plan_of, run_names
from latentmake.config.fields import NAME, PATTERNS
from latentmake.config.root import Config, parse
from latentmake.layouts.layout import layout_of
from latentmake.models.files import vae_factor
from latentmake.models.shapes import text_tokens
from latentmake.plan.build import alone
from latentmake.plan.facts import Facts

if TYPE_CHECKING:
    from latentmake.exchange.datasets_toml import Imported


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
    from latentmake.exchange.datasets_toml import imported

    check_directory(directory)
    os.chdir(directory or ".")
    run = name or re.sub(r"[^A-Za-z0-9_.-]+", "_", file.stem).lstrip("_.-")
    if not re.fullmatch(NAME, run):
        what, hint = "is no name of a run", f"use {PATTERNS[NAME]}"
        raise ConfigError(what, where=f"--name {run}", hint=hint)
    own = section_at(model) if model else None
    if own is not None:
        architecture = architecture or own.model.architecture.name
        task = task or own.model.task
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


def _fill(configuration: Imported, section: Section) -> list[str]:
    """Write a model on the disk into a configuration; return the keys whose files are missing.

    Raises:
        ConfigError: The configuration is of another architecture.
    """
    runs = configuration.values["runs"].values()
    section.kind = trainer_of(section.model, next(iter(runs))["trainer"]["kind"], musubi=True)
    section_of(section)
    own = {"architecture": section.model.architecture.name, **section.keys}
    configuration.values["models"] = {section.name: own}
    configuration.has_weights = not section.missing
    for run in runs:
        run["model"] = section.name
    parse(configuration.values)
    return section.missing


def adopt(facts: Facts, runs: Sequence[str], as_json: bool) -> None:
    """Take over caches that musubi-tuner, sd-scripts or ai-training made of a run."""
    from latentmake.exchange import adoption

    with alone():
        names = run_names(facts.config, runs)
        plans, counts = plan_of(facts, names).runs, dict[str, dict[str, int]]()
        for name in names:
            folders = folders_of(facts.config, name)
            adopted = adoption.adopt(plans[name], folders, say=partial(typer.echo, err=as_json))
            counts[name] = {state: adopted[state] for state in adoption.STATES}
    if as_json:
        typer.echo(json.dumps(counts, indent=1))


def folders_of(config: Config, run: str) -> dict[str, list[str]]:
    """Return dataset -> folders with another program's caches, for a run; raises UserError.

    The key `adopt_from` names the folders. The caches of ai-training lie beside the images unless
    the key says otherwise.
    """
    datasets = {name: config.datasets[name] for name in config.runs[run].datasets}
    folders = {name: list(dataset.adopt_from) for name, dataset in datasets.items()}
    if not layout_of(config.models[config.runs[run].model].layout_name).external:
        check_run(config, run)
        folders = {name: folders[name] or [dataset.folder] for name, dataset in datasets.items()}
    if not any(folders.values()):
        what = "no dataset of the run says where its caches are"
        hint = f"set datasets.{next(iter(folders))}.adopt_from to their folder"
        raise ConfigError(what, where=f"run {run}", hint=hint)
    for name, several in folders.items():
        for folder in several:
            if not Path(folder).is_dir():
                where, hint = f"datasets.{name}.adopt_from", "name the folder of the caches"
                raise ConfigError(f"there is no folder {folder}", where=where, hint=hint)
    return folders


def check_run(config: Config, name: str) -> None:
    """Check that the model's files describe ai-training's caches: their shapes must be known.

    Raises:
        ConfigError: The files do not describe the caches, `ai_training` is missing, or captions
            are changed before they are encoded.
        ModelError: A model's configuration cannot be read.
    """
    run = config.runs[name]
    model, where = config.models[run.model], f"models.{run.model}"
    if (endings := model.ai_training) is None:
        hint = "name what ai-training's files end in: {latents: .img_sdxl, text: .txt_t5cache}"
        raise ConfigError("this key is missing", where=f"{where}.ai_training", hint=hint)
    described = {
        "vae": not endings.latents or vae_factor(model.vae),
        "text": not endings.text or all(map(text_tokens, model.text)),
    }
    for key, is_described in described.items():
        if not is_described:
            what = "no config.json on this disk says what its caches are like"
            hint = "name a folder that has one as `path`, or the file as `config`"
            raise ConfigError(what, where=f"{where}.{key}", hint=hint)
    for dataset in run.datasets if endings.text else ():
        if config.datasets[dataset].composed:
            what = f"the texts of {dataset} are not just what its caption files hold"
            hint = f"leave out models.{run.model}.ai_training.text, so that they are encoded"
            raise ConfigError(what, where=f"run {name}", hint=hint)
