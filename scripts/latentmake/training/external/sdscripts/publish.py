"""`publish_{run}` of a run of sd-scripts: the folder that a user carries to the trainer's machine.

Images with their caches beside them, as a training here reads them, and the dataset TOML and the
script of each system, with the paths that this system knows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from latentmake.config import Dataset
from latentmake.files.paths import System
from latentmake.index.remembered import Memory
from latentmake.layouts.sdscripts import SdScripts as SdScriptsLayout
from latentmake.training.checks import Finding, passed
from latentmake.training.external import publication_checks
from latentmake.training.external.arguments import accelerate_arguments, located
from latentmake.training.external.launch_scripts import Commands
from latentmake.training.external.publication_checks import SYSTEMS, attention, elsewhere
from latentmake.training.external.publish import (
    Names,
    block_names,
    bring,
    launch_options,
    published_folder,
    script_files,
    writable,
)
from latentmake.training.external.published_caches import SETTINGS, PublishedCaches, settings_files
from latentmake.training.external.sdscripts.backend import SdScripts as Backend
from latentmake.training.external.sdscripts.command import (
    caching_arguments,
    encoder_places,
    training_arguments,
)
from latentmake.training.external.sdscripts.deploy import (
    METADATA,
    bucket_settings,
    dataset_toml,
    deployed,
)
from latentmake.training.external.sdscripts.order import SdScriptsOrder

__all__ = ["findings", "publish"]


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
    written = _Written(order, published)
    passed(_findings(order, written), say)
    files = deployed(order, written.blocks, caches=order.publish.caches)
    if not order.publish.caches:
        for (dataset, _), block in written.blocks.items():
            files |= settings_files(block, **_settings(order, order.datasets[dataset]))
    files |= {
        f"{order.run}_linux.toml": written.tomls["linux"].encode(),
        f"{order.run}_win.toml": written.tomls["windows"].encode(),
        **script_files(order, written.commands),
    }
    if order.publish.caches:
        bring(order, folder, files, published, say)
        return
    layout = SdScriptsLayout(order.architecture)
    made = PublishedCaches(folder, layout, layout.text_ending)
    bring(order, folder, files, published, say, partial(_drop, folder, files, made))
    made.tell(order.run, say)


def findings(order: SdScriptsOrder, memory: Memory | None = None) -> list[Finding]:
    """Check what would be published, before anything is encoded or copied.

    Args:
        order: the run.
        memory: keeps what is found out about the trainer; None asks anew.

    Raises:
        ConfigError: the configuration says too little for a publication.
    """
    return [*_findings(order, _Written(order, published_folder(order)), memory)]


class _Written:
    """Text files of a published folder: dataset TOMLs and commands in the paths of each system."""

    def __init__(self, order: SdScriptsOrder, published: str) -> None:
        names, blocks = Names(order, published), block_names(order)

        def toml(system: System) -> str:
            place = f"{published}/"
            return dataset_toml(
                order, blocks, lambda block: names.named(place + block, system, published)
            )

        self.names = names
        self.blocks = blocks
        self.tomls = {system: toml(system) for system in SYSTEMS}
        self.commands = {system: _commands(order, names, system) for system in SYSTEMS}


def _findings(
    order: SdScriptsOrder, written: _Written, memory: Memory | None = None
) -> Iterator[Finding]:
    places = {"checkpoint": order.model.checkpoint or "", **encoder_places(order)}
    if not order.publish.caches and order.architecture != "flux":
        places["vae"] = order.model.vae.path or ""
    for key, place in places.items():
        if place and not Path(place).exists():
            yield elsewhere(f"model: {key}", place)
        elif key.startswith("--") and Path(place).is_dir():
            note = f"{place} is a folder, and sd-scripts wants a file: add [{key}, FILE] to the "
            note += "trainer's `arguments`"
            if order.architecture == "flux" or not order.publish.caches:
                yield Finding(f"model: {key}", "warning", note)
    chosen = order.publish.attention is not None
    asked = order.publish.attention or order.trainer.attention
    yield attention(asked, ("sdpa", "xformers", "mem_eff_attn"), "sd-scripts", chosen)
    if order.publish.num_workers is not None:
        note = "sd-scripts makes its caches without workers: `publish.num_workers` has no effect"
        yield Finding("num_workers", "warning", note)
    if order.publish.batch_size is not None and order.publish.caches:
        note = "`publish.batch_size` has no effect: sd-scripts finds the caches that are published"
        yield Finding("batch_size", "warning", note)
    # Its environment may lie on the trainer's machine alone.
    there = order.sd_scripts.model_copy(update={"venv": None})
    here = order.model_copy(update={"sd_scripts": there})
    yield from publication_checks.findings(
        commands=written.commands,
        tomls=written.tomls,
        names=written.names,
        folder=there.path,
        find=lambda: Backend().find(here, memory),
        further=order.trainer.arguments,
        accelerate_config=order.trainer.accelerate_config,
    )


def _drop(
    folder: Path, files: Mapping[str, Path | bytes], made: PublishedCaches, name: str
) -> None:
    """Drop the caches made from a file before it is replaced."""
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
    """Return the settings of latents and text; of files, the paths."""
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
        logging_dir=names.below("logs", system),
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
                trainer.mixed_precision,
                config=None if config is None else names.argument(config, system),
            ),
            *launch_options(order),
        ],
        script=f"{order.script}.py",
        training=training,
    )
