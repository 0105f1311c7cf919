"""`publish_{run}` of a run of sd-scripts: the folder that a user carries to the trainer's machine.

Images with their caches beside them, as a training here reads them, and the dataset TOML and the
script of each system, with the paths that this system knows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from latentmake.config import Dataset
from latentmake.layouts.sdscripts import SdScripts as SdScriptsLayout
from latentmake.paths import System
from latentmake.sdscripts.command import (
    accelerate_arguments,
    caching_arguments,
    encoder_places,
    training_arguments,
)
from latentmake.sdscripts.deploy import METADATA, bucket_settings, dataset_toml, deployed
from latentmake.sdscripts.order import SdScriptsOrder
from latentmake.trainers.arguments import located
from latentmake.trainers.made_there import SETTINGS, MadeThere, settings_files
from latentmake.trainers.order import read_order
from latentmake.trainers.publishing import (
    Names,
    block_names,
    bring,
    launch_options,
    published_folder,
    script_files,
    writable,
)
from latentmake.trainers.scripts import Commands

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
    blocks = block_names(order)

    def toml(system: System) -> bytes:
        place = f"{published}/"
        text = dataset_toml(
            order, blocks, lambda block: names.named(place + block, system, published)
        )
        return text.encode()

    files = deployed(order, blocks, caches=order.publish.caches)
    if not order.publish.caches:
        for (dataset, _), block in blocks.items():
            files |= settings_files(block, **_settings(order, order.datasets[dataset]))
    files |= {
        f"{order.run}_linux.toml": toml("linux"),
        f"{order.run}_win.toml": toml("windows"),
        **script_files(order, partial(_commands, order, names)),
    }
    names.tell_what_is_missing(say)
    for flag, path in encoder_places(order).items():
        if order.architecture == "flux" and Path(path).is_dir():
            say(
                f"{order.run}: {path} is a folder, and sd-scripts' {flag} wants a file: add "
                f"[{flag}, FILE] to the trainer's `arguments`"
            )
    if order.publish.caches:
        bring(order, folder, files, published, say)
        return
    layout = SdScriptsLayout(order.architecture)
    made = MadeThere(folder, layout, layout.text_ending)
    bring(order, folder, files, published, say, partial(_drop, folder, files, made))
    made.tell(order.run, say)


def _drop(folder: Path, files: Mapping[str, Path | bytes], made: MadeThere, name: str) -> None:
    """Drop what the trainer's machine made from a file that is about to be replaced."""
    block, _, base = name.partition("/")
    if base in SETTINGS:
        made.drop(block, SETTINGS[base])
    elif base == METADATA:
        new = files.get(name, b"{}")
        before, after = _captions(folder / name), _captions(new)
        for image in before | after:
            if before.get(image) != after.get(image):
                made.drop(block, "text", str(PurePosixPath(image).with_suffix("")))
    elif base:
        made.drop(block, "latents", str(PurePosixPath(base).with_suffix("")))


def _captions(metadata: Path | bytes) -> dict[str, str]:
    """Return image -> caption; of a file that is missing or damaged, none."""
    try:
        data = metadata if isinstance(metadata, bytes) else metadata.read_bytes()
        return {image: entry["caption"] for image, entry in json.loads(data).items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return {}


def _settings(order: SdScriptsOrder, dataset: Dataset) -> dict[str, Any]:
    """Return what shapes latents and text besides images and captions; of files, the paths."""
    model = order.model
    shapes = [bucket_settings(dataset, order.architecture), dataset.alpha_mask]
    places = [model.checkpoint, encoder_places(order)]
    further = [model.max_token_length, model.apply_lg_attn_mask, model.apply_t5_attn_mask]
    vae = model.vae.path or [model.vae.hub, model.vae.revision]
    found: dict[str, Any] = {"latents": [vae, model.vae_dtype or model.dtype, shapes]}
    if order.cached_text:
        found["text"] = [places, further, model.text[-1].max_length]
    return found


def _commands(order: SdScriptsOrder, names: Names, system: System) -> Commands:
    """Return what the script of one system does."""
    trainer, place = order.trainer, order.sd_scripts
    config = trainer.accelerate_config
    vae = None
    if not order.publish.caches:
        weights = order.model.vae
        vae = weights.hub if weights.path is None else names.argument(weights.path, system)
    venvs = ["venv", ".venv"]
    if place.venv is not None:
        venvs = [names.argument(place.venv, system, place.venv)]
    training = training_arguments(
        located(order, lambda path: names.argument(path, system)),
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
        attention=order.publish.attention,
        caching=[] if order.publish.caches else caching_arguments(order, vae=vae),
    )
    does = (
        "which first makes caches beside the images" if vae else "from the caches beside this file"
    )
    return Commands(
        run=order.run,
        does=f"Trains run {order.run} with sd-scripts, {does}.",
        program="sd-scripts",
        folder=names.argument(place.path, system, place.path),
        package="",
        venvs=venvs,
        steps=[],
        accelerate=[
            *accelerate_arguments(
                order, config=None if config is None else names.argument(config, system)
            ),
            *launch_options(order),
        ],
        script=f"{order.script}.py",
        training=training,
    )
