"""Publication of a run: folders that musubi-tuner reads, and the calls of its scripts."""

from __future__ import annotations

import contextlib
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from latentmake.config.fields import resolution_name
from latentmake.config.machines import ExternalProgram
from latentmake.data.item import IMAGE_EXTENSIONS
from latentmake.errors import CacheError, ConfigError, SourceError
from latentmake.files.media import VIDEO_EXTENSIONS
from latentmake.files.workspace import System
from latentmake.index.memo import Memo
from latentmake.models.checks import ModelFile
from latentmake.models.files import script_of
from latentmake.plan.manifest import Row, rows_of
from latentmake.training.backend import Finding, model_finding
from latentmake.training.external.installation import Installation, elsewhere
from latentmake.training.external.musubi.checks import model_files, precision
from latentmake.training.external.musubi.command import (
    MODULES,
    PREFERRED,
    caching_arguments,
    places,
    training_arguments,
)
from latentmake.training.external.musubi.deploy import dataset_toml, names_of, shapes
from latentmake.training.external.musubi.order import MusubiOrder, find
from latentmake.training.external.order import located
from latentmake.training.external.publish import Files, Kind, Made, Publication, Step

_MADE_BY: dict[Kind, str] = {"latents": "the latents", "text": "the captions"}
_NUMBER = re.compile(r"_\d+$")


class MusubiPublication(Publication[MusubiOrder]):
    """A run's published folder; names are flat, as musubi-tuner reads its folders."""

    program = "musubi-tuner"
    package = "src/musubi_tuner"
    cache_ending = "_cache"

    def __init__(self, order: MusubiOrder, published: str = "") -> None:
        super().__init__(order, published)
        self.attentions = [x for x in order.scripts.attentions if x in order.attentions]
        if order.trainer.attention == "auto" and order.publish.attention is None:
            self.modules = {x: MODULES[x] for x in PREFERRED if x in self.attentions}
        where = f"models.{order.model_name}"
        if order.musubi_tuner is None:
            raise ConfigError(
                "this key is missing",
                where="musubi_tuner",
                hint="set musubi_tuner.path to its folder, which the published scripts go to",
            )
        if order.model.dit is None:
            raise ConfigError(
                "this key is missing", where=f"{where}.dit", hint="name the network to be trained"
            )
        for name, dataset in order.datasets.items():
            if not order.publish.caches and (keys := dataset.own_clips):
                raise ConfigError(
                    "musubi-tuner's own scripts cannot make such clips from a published folder",
                    where=f"datasets.{name}.{keys[0]}",
                    hint="set `publish.caches: true`, so that caches are published",
                )
            if not order.publish.caches and dataset.text_variants > 1:
                raise ConfigError(
                    "musubi-tuner's own scripts encode one text of an item",
                    where=f"datasets.{name}.captions.variants",
                    hint="set `publish.caches: true`, so that caches of all texts are published",
                )
            needed = order.version.controls[0] > 0 and not order.model.spec.encodes
            if dataset.is_list and (dataset.multiple_target or needed):
                raise _of_list(name)
        self._folders = dict(self._check_weights(where))

    def _check_weights(self, where: str) -> Iterator[tuple[Kind, ModelFile]]:
        """Yield weights in a folder, with what the script that would read them caches.

        An architecture with encoders of ours may have such weights. The script is left out.

        Raises:
            ConfigError: a script cannot run, whose caches are needed.
        """
        model = self.order.model
        for kind, what in _MADE_BY.items():
            for file in script_of(model, kind).files:
                weights, key = model.weights(file.key), f"{where}.{file.key.partition('.')[0]}"
                if weights is None:
                    continue
                if weights.path is None:
                    raise ConfigError(
                        f"{weights.hub} lies on the hub, and a published script needs a file",
                        where=key,
                        hint="name the original file as `file` beside `hub`, or set `path` to it",
                    )
                if not (model.spec.encodes and Path(weights.path).is_dir()):
                    continue
                fault = f"{weights.path} is a folder, and musubi-tuner's scripts want a single file"
                if not self.order.publish.caches:
                    hint = "name the file of the original weights, or set `publish.caches: true`"
                    raise ConfigError(fault, where=key, hint=hint)
                note = f"the published scripts train from the caches and do not cache {what}"
                yield kind, ModelFile(file.key, "", doubt=f"{fault}: {note}")
                break

    @property
    def place(self) -> ExternalProgram:
        """Where musubi-tuner lies."""
        assert self.order.musubi_tuner is not None  # or __init__ had failed
        return self.order.musubi_tuner

    def find(self, place: ExternalProgram, memory: Memo | None) -> Installation:
        """Find musubi-tuner."""
        return find(place, self.order.scripts, memory)

    def own_findings(self) -> Iterator[Finding]:
        """Check the model's files, and the precision of the network."""
        models = [*model_files(self.order.model)]
        folders = {file.key: file for file in self._folders.values()}
        for file in models:
            if file.key not in folders and file.place and not Path(file.place).exists():
                yield elsewhere(f"model: {file.key}", file.place)
            else:
                yield model_finding(folders.get(file.key, file))
        yield precision(self.order, models)

    def dataset(self, system: System) -> str:
        """Return the dataset TOML of one system, with forward slashes."""

        def directory(ending: str) -> Callable[[str, tuple[int, int]], str]:
            return lambda *block: self.below(f"{self.blocks[block]}{ending}", system)

        return dataset_toml(
            self.order,
            image_directory=directory(""),
            cache_directory=directory("_cache"),
            control_directory=directory("_control"),
        )

    def steps(self, system: System) -> list[Step]:
        """Return the calls in the paths of one system; the last one trains."""
        order, config = self.order, self.below(self.toml_name(system), system)
        named = partial(self.named, system=system)
        here, steps = located(order, named), list[Step]()
        for kind, what in _MADE_BY.items():
            if kind not in self._folders:
                caching = caching_arguments(
                    here.model,
                    kind,
                    dataset_config=config,
                    place=lambda _, weights: named(str(weights.path)),
                    batch_size=order.publish.batch_size,
                    num_workers=order.publish.num_workers,
                    keep_cache=order.publish.caches,
                )
                steps.append(Step(f"caching {what}", script_of(order.model, kind).name, caching))
        training = training_arguments(
            here,
            dataset_config=config,
            weights=places(order, named),
            output_dir=self.below("output", system),
            logging_dir=self.below("logs", system),
            attention=self.attention,
        )
        script = order.scripts.training.name
        return [*steps, Step("training", script, training, self.launcher(system))]

    def members(self) -> Files:
        """Return the files of items and caches."""
        order, files = self.order, Files()
        for row in rows_of(Path(order.manifest)):
            if order.datasets[row.dataset].is_list and (row.control_files or row.layers):
                raise _of_list(row.dataset)
            ending = order.datasets[row.dataset].caption_extension
            # Of a list of videos the caches alone count.
            with_sources = "path" not in order.datasets[row.dataset].own_clips
            for resolution in order.resolutions:
                name = self.blocks[row.dataset, resolution]
                if with_sources:
                    files[f"{name}/{Path(row.source).name}"] = Path(row.source)
                files[f"{name}/{Path(row.stem).name}{ending}"] = _caption(row)
                if with_sources:
                    for control in map(Path, row.control_files):
                        files[f"{name}_control/{control.name}"] = control
                    for layer in map(Path, row.layers):
                        files[f"{name}/{layer.name}"] = layer
                if order.publish.caches:
                    size = resolution_name(*resolution)
                    for base, cache in names_of(row, size, order.model.layout_name):
                        files[f"{name}_cache/{base}"] = cache
        for path in {path for path in files.values() if isinstance(path, Path)}:
            if not path.is_file():
                kind = CacheError if path.suffix == ".safetensors" else SourceError
                raise kind("is not there", where=path, hint="run the same command again")
        return files

    def settings(self, dataset: str, resolution: tuple[int, int]) -> dict[Kind, list[Any]]:
        """Return the settings that shape latents and text; of files, the paths."""
        model = self.order.model
        latents: list[Any]
        text: list[Any]
        if model.spec.encodes:
            clip = None if model.clip is None else model.clip.path
            latents = [model.vae.path, model.vae_dtype or model.dtype, model.task, clip]
            text = [model.text[0].path, model.fp8_t5]
        else:
            latents, text = (
                caching_arguments(
                    model, kind, dataset_config="", place=lambda _, weights: str(weights.path)
                )
                for kind in _MADE_BY
            )
        shaped = shapes(self.order.datasets[dataset])
        return {"latents": [*latents, resolution, shaped], "text": text}

    def made_from(self, folder: Path, files: Files, name: str) -> Iterator[Made]:
        """Yield the caches made from a file, before it is replaced."""
        place, _, base = name.rpartition("/")
        block, (stem, _, ending) = place.removesuffix("_control"), base.rpartition(".")
        if not place:
            return
        if block == place and f".{ending.lower()}" not in IMAGE_EXTENSIONS | VIDEO_EXTENSIONS:
            endings = {dataset.caption_extension for dataset in self.order.datasets.values()}
            longest = sorted(endings, key=len, reverse=True)
            known = next(filter(base.endswith, longest), f".{ending}")
            yield f"{block}_cache", "text", base.removesuffix(known)
            return
        scripts, stems = self.order.scripts, {stem}
        if scripts.layers if block == place else self.order.version.controls[1] != 1:
            stems.add(_NUMBER.sub("", stem))  # `a_1` may be a control or layer of `a`
        for each in stems:
            yield f"{block}_cache", "latents", each
            if scripts.text.reads_controls:
                yield f"{block}_cache", "text", each


def _of_list(dataset: str) -> ConfigError:
    what = "a published folder tells control images and layers by their names, not by a list"
    hint = "put them into folders, and name these in place of the list"
    return ConfigError(what, where=f"datasets.{dataset}.path", hint=hint)


def _caption(row: Row) -> Path | bytes:
    """Return the file of an item's caption, or the text itself where that is another."""
    if row.texts is not None:
        return f"{row.texts[0]}\n".encode()
    if row.caption is None:
        return b""
    with contextlib.suppress(OSError), Path(row.caption).open("rb") as file:
        if file.read(len(BOM_UTF8)) == BOM_UTF8:  # musubi-tuner would take it for text
            return file.read()
    return Path(row.caption)
