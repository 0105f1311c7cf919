"""`publish_{run}` of a run of sd-scripts: the folder that a user carries to the trainer's machine.

Images with their caches beside them, as a training here reads them, and the dataset TOML and the
script of each system, with the paths that this system knows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from latentmake.paths import System
from latentmake.sdscripts.command import (
    accelerate_arguments,
    encoder_places,
    training_arguments,
)
from latentmake.sdscripts.deploy import dataset_toml, deployed
from latentmake.sdscripts.order import SdScriptsOrder
from latentmake.trainers.order import read_order
from latentmake.trainers.publishing import Names, bring, published_folder, writable
from latentmake.trainers.scripts import Commands, batch_script, shell_script

__all__ = ["publish", "publish_order"]


def publish_order(order: Path, say: Callable[[str], None]) -> None:
    """Publish what an order file says; see `publish`."""
    publish(read_order(order, SdScriptsOrder), say)


def publish(order: SdScriptsOrder, say: Callable[[str], None]) -> None:
    """Bring the published folder of a run up to date: only what changed is copied.

    The folder is `{publish.path}/{run}`. What an earlier publication put there and no item owns any
    longer is removed; nothing else is.

    Args:
        order: the run.
        say: says a line to the user.

    Raises:
        ConfigError: the configuration says too little for a publication.
        TrainingError: the manifest is missing or damaged.
        SourceError: an image or caption cannot be read.
        CacheError: a cache file is not where the manifest says.
        StorageError: the folder cannot be written; finished work is kept.
    """
    published = published_folder(order)
    folder = writable(published, order, "sd-scripts")
    names = Names(order, published)

    def toml(system: System) -> bytes:
        place = f"{published}/"
        text = dataset_toml(order, lambda block: names.named(place + block, system, published))
        return text.encode()

    files = deployed(order)
    files |= {
        f"{order.run}_linux.toml": toml("linux"),
        f"{order.run}_win.toml": toml("windows"),
        f"train_{order.run}.sh": shell_script(_commands(order, names, "linux")).encode(),
        f"train_{order.run}.bat": batch_script(_commands(order, names, "windows")).encode(),
    }
    names.tell_what_is_missing(say)
    for flag, path in encoder_places(order).items():
        if order.architecture == "flux" and Path(path).is_dir():
            say(
                f"{order.run}: {path} is a folder, and sd-scripts' {flag} wants a file: add "
                f"[{flag}, FILE] to the trainer's `arguments`"
            )
    bring(order, folder, files, published, say)


def _commands(order: SdScriptsOrder, names: Names, system: System) -> Commands:
    """Return what the script of one system does."""
    trainer, place = order.trainer, order.sd_scripts
    config = trainer.accelerate_config
    venvs = ["venv", ".venv"]
    if place.venv is not None:
        venvs = [names.argument(place.venv, system, place.venv)]
    training = training_arguments(
        order,
        dataset_config=names.below(
            f"{order.run}_{'win' if system == 'windows' else 'linux'}.toml", system
        ),
        checkpoint=names.argument(order.model.checkpoint or "", system),
        encoders={
            flag: names.argument(path, system)
            for flag, path in encoder_places(order).items()
            if not Path(path).is_dir()
        },
        output_dir=names.below("output", system),
        output_name=order.run,
        logging_dir=names.below("logs", system) if trainer.logging else None,
    )
    return Commands(
        run=order.run,
        does=f"Trains run {order.run} with sd-scripts, from the caches beside this file.",
        program="sd-scripts",
        folder=names.argument(place.path, system, place.path),
        package="",
        venvs=venvs,
        steps=[],
        accelerate=accelerate_arguments(
            order, config=None if config is None else names.argument(config, system)
        ),
        script=f"{order.script}.py",
        training=training,
    )
