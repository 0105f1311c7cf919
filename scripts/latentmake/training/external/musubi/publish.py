"""Publication of a run of musubi-tuner: flat folders, and the calls of its scripts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from latentmake.errors import ConfigError
from latentmake.models.files import script_of
from latentmake.training.backend import Finding, model_finding
from latentmake.training.external import publish
from latentmake.training.external.installation import elsewhere
from latentmake.training.external.musubi import checks, command, deploy
from latentmake.training.external.musubi.order import MusubiOrder
from latentmake.training.external.order import located
from latentmake.training.external.publish import Blocks, Call, Kind, Names, Publication

_KINDS: tuple[Kind, Kind] = ("latents", "text")


def publication(order: MusubiOrder) -> Publication:
    """Return the published folder of a run; raises ConfigError if it cannot be published."""
    place, blocks = order.musubi_tuner, publish.blocks_of(order)
    if place is None:
        hint = "set musubi_tuner.path to its folder, which the published scripts go to"
        raise ConfigError("this key is missing", where="musubi_tuner", hint=hint)
    _refuse(order)
    attentions = [x for x in order.scripts.attentions if x in order.attentions]
    chooses = order.trainer.attention == "auto" and order.publish.attention is None
    preferred = [x for x in command.PREFERRED if chooses and x in attentions]
    return Publication(
        order=order,
        place=place,
        findings=partial(_findings, order),
        members=partial(deploy.published, order, blocks),
        settings=partial(_settings, order),
        made_from=partial(deploy.made_from, order),
        dataset=partial(_dataset, order, blocks),
        calls=partial(_calls, order),
        attentions=attentions,
        modules={x: command.MODULES[x] for x in preferred},
        cache_ending="_cache",
    )


def _refuse(order: MusubiOrder) -> None:
    """Refuse datasets and weights that musubi-tuner's own scripts could not read."""
    by_script = not order.publish.caches
    needs_controls = order.version.controls[0] > 0 and not order.model.spec.encodes
    faults: dict[str, str] = {}
    for name, dataset in order.datasets.items():
        if dataset.is_list and (dataset.multiple_target or needs_controls):
            raise deploy.of_list(name)
        if by_script and dataset.own_clips:
            faults[f"datasets.{name}.{dataset.own_clips[0]}"] = "cut other clips of a folder"
        if by_script and dataset.text_variants > 1:
            faults[f"datasets.{name}.captions.variants"] = "encode one text of an item"
    faults |= checks.unreadable(order) if by_script else {}
    for where, fault in faults.items():
        hint = "set `publish.caches: true`, so that caches are published"
        raise ConfigError(f"musubi-tuner's own scripts {fault}", where=where, hint=hint)


def _findings(order: MusubiOrder) -> Iterator[Finding]:
    """Check the model's files, and the precision of the network."""
    models = [*checks.model_files(order.model)]
    for file in models:
        if file.place and not (file.doubt or Path(file.place).exists()):  # or on the hub
            yield elsewhere(f"model: {file.key}", file.place)
        else:
            yield model_finding(file)
    yield checks.precision(order, models)
    yield from checks.samples(order)


def _dataset(order: MusubiOrder, blocks: Blocks, names: Names) -> str:
    """Return the dataset TOML of one system, with forward slashes."""
    return deploy.dataset_toml(
        order,
        image_directory=lambda *block: names.below(blocks[block]),
        cache_directory=lambda *block: names.below(f"{blocks[block]}_cache"),
        control_directory=lambda *block: names.below(f"{blocks[block]}_control"),
    )


def _calls(order: MusubiOrder, names: Names) -> list[Call]:
    """Return the calls in the paths of one system: of missing caches, and of the training."""
    here, calls = located(order, names.of), list[Call]()
    for kind in () if order.publish.caches else _KINDS:
        arguments = command.caching_arguments(
            here.model,
            kind,
            dataset_config=names.toml,
            place=lambda _, weights: names.of(str(weights.path)),
            batch_size=order.publish.batch_size,
            num_workers=order.publish.num_workers,
            keep_cache=False,
        )
        calls.append((script_of(order.model, kind).name, arguments))
    training = command.training_arguments(
        here,
        dataset_config=names.toml,
        weights=command.places(order, names.of),
        output_dir=names.below("output"),
        logging_dir=names.below("logs"),
        attention=publish.attention_of(order),
        prompts=names.prompts,
    )
    return [*calls, (order.scripts.training.name, training)]


def _settings(order: MusubiOrder, dataset: str, size: tuple[int, int]) -> dict[Kind, list[Any]]:
    """Return the settings that shape latents and text; of files, the paths."""
    model, latents, text = order.model, list[Any](), list[Any]()
    if model.spec.encodes:
        clip = None if model.clip is None else model.clip.path
        latents = [model.vae.path, model.vae_dtype or model.dtype, model.task, clip]
        text = [model.text[0].path, model.fp8_t5]
    else:
        latents, text = (
            command.caching_arguments(
                model, kind, dataset_config="", place=lambda _, weights: str(weights.path)
            )
            for kind in _KINDS
        )
    return {"latents": [*latents, size, deploy.shapes(order.datasets[dataset])], "text": text}
