"""`latentmake adopt`: take over caches that other programs made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import typer

from latentmake.base.errors import ConfigError
from latentmake.commands.project import plan_of, print_json, run_names
from latentmake.config.root import Config
from latentmake.layouts.layout import layout_of
from latentmake.models.files import text_tokens, vae_factor
from latentmake.plan.build_locks import alone
from latentmake.plan.facts import Facts
from latentmake.trainers.exchange import adoption, export


def adopt(facts: Facts, runs: Sequence[str], as_json: bool) -> None:
    """Take over caches that musubi-tuner, sd-scripts or ai-training made of a run."""
    with alone():
        names = run_names(facts.config, runs)
        plans, counts = plan_of(facts, names, batched=True).runs, dict[str, dict[str, int]]()
        for name in names:
            folders = folders_of(facts.config, name)
            adopted = adoption.adopt(plans[name], folders, say=partial(typer.echo, err=as_json))
            counts[name] = {state: adopted[state] for state in adoption.STATES}
    if as_json:
        print_json(counts)


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
    latents, texts = export.endings_of(model, where)
    described = {
        "vae": not latents or vae_factor(model.vae),
        "text": not texts or all(map(text_tokens, model.text)),
    }
    for key, is_described in described.items():
        if not is_described:
            raise export.undescribed(f"{where}.{key}")
    for dataset in run.datasets if texts else ():
        if config.datasets[dataset].composed:
            what = f"the texts of {dataset} are not just what its caption files hold"
            hint = f"leave out models.{run.model}.ai_training.text, so that they are encoded"
            raise ConfigError(what, where=f"run {name}", hint=hint)
