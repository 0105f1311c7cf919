"""Publication of a run: folders that musubi-tuner reads, and the calls of its scripts."""

from __future__ import annotations

import contextlib
import re
from codecs import BOM_UTF8
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from latentmake.config.fields import resolution_name
from latentmake.config.machines import ExternalProgram
from latentmake.data.item import IMAGE_EXTENSIONS
from latentmake.errors import CacheError, ConfigError, SourceError
from latentmake.files.media import VIDEO_EXTENSIONS
from latentmake.files.paths import System
from latentmake.index.memo import Memo
from latentmake.layouts.layout import Layout
from latentmake.models.files import script_of
from latentmake.models.model_files import ModelFile
from latentmake.plan.manifest import Row, rows_of
from latentmake.training.backend import Say
from latentmake.training.checks import Finding, model_finding
from latentmake.training.external.arguments import located
from latentmake.training.external.checks import elsewhere
from latentmake.training.external.installation import Installation
from latentmake.training.external.launch_scripts import Step
from latentmake.training.external.musubi.caching_command import caching_arguments
from latentmake.training.external.musubi.dataset_toml import dataset_toml, shapes
from latentmake.training.external.musubi.deploy import names_of
from latentmake.training.external.musubi.installation import find
from latentmake.training.external.musubi.networks import model_files
from latentmake.training.external.musubi.order import MusubiOrder
from latentmake.training.external.musubi.preflight import precision
from latentmake.training.external.musubi.training_command import (
    places,
    training_arguments,
)
from latentmake.training.external.publish import Files, Publication
from latentmake.training.external.published_caches import SETTINGS, PublishedCaches, settings_files

_MADE_BY = {"latents": "the latents", "text": "the captions"}
_NUMBER = re.compile(r"_\d+$")


class MusubiPublication(Publication[MusubiOrder]):
    """A run's published folder; names are flat, as musubi-tuner reads its folders."""

    program = "musubi-tuner"
    package = "src/musubi_tuner"

    def __init__(self, order: MusubiOrder, published: str = "") -> None:
        super().__init__(order, published)
        self.attentions = [x for x in order.scripts.attentions if x in order.attentions]
        self._left_out: dict[str, str] = {}
        model, where = order.model, f"models.{order.model_name}"
        if order.musubi_tuner is None:
            raise ConfigError(
                "this key is missing",
                where="musubi_tuner",
                hint="set musubi_tuner.path to its folder, which the published scripts go to",
            )
        if model.dit is None:
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
            needed = order.version.controls[0] > 0 and not model.spec.encodes
            if dataset.is_list and (dataset.multiple_target or needed):
                raise _of_list(name)
        self._places = {
            kind: self._weights_of(kind, where, what) for kind, what in _MADE_BY.items()
        }

    def _weights_of(self, kind: str, where: str, what: str) -> dict[str, str] | None:
        """Return the paths of a caching script's weights by the model's keys.

        None where it cannot run, with a note: weights of an architecture with encoders of ours may
        lie in a folder, which the script does not read.

        Args:
            kind: `latents` or `text`.
            where: the model's place in the configuration.
            what: what the script caches.
        """
        model, found = self.order.model, dict[str, str]()
        for file in script_of(model, kind).files:
            weights = model.weights(file.key)
            if weights is None:
                continue
            key = f"{where}.{file.key.partition('.')[0]}"
            if weights.path is None:
                raise ConfigError(
                    f"{weights.hub} lies on the hub, and a published script needs a file",
                    where=key,
                    hint="name the original file as `file` beside `hub`, or set `path` to it",
                )
            if model.spec.encodes and Path(weights.path).is_dir():
                fault = f"{weights.path} is a folder, and musubi-tuner's scripts want a single file"
                if not self.order.publish.caches:
                    hint = "name the file of the original weights, or set `publish.caches: true`"
                    raise ConfigError(fault, where=key, hint=hint)
                note = f"{fault}: the published scripts train from the caches and do not cache"
                self._left_out[file.key] = f"{note} {what}"
                return None
            found[file.key] = weights.path
        return found

    @property
    def layout(self) -> Layout:
        """Names of the caches."""
        return self.order.layout

    @property
    def place(self) -> ExternalProgram:
        """Where musubi-tuner lies."""
        assert self.order.musubi_tuner is not None  # or __init__ had failed
        return self.order.musubi_tuner

    def find(self, place: ExternalProgram, memory: Memo | None) -> Installation:
        """Find musubi-tuner."""
        return find(place, self.order.scripts, memory)

    @cached_property
    def _models(self) -> list[ModelFile]:
        return [*model_files(self.order.model)]

    def own_findings(self) -> Iterator[Finding]:
        """Check the model's files."""
        for file in self._models:
            if file.key in self._left_out:
                yield Finding(f"model: {file.key}", "warning", self._left_out[file.key])
            elif file.place and not Path(file.place).exists():
                yield elsewhere(f"model: {file.key}", file.place)
            else:
                yield model_finding(file)

    def findings(self, memory: Memo | None = None) -> Iterator[Finding]:
        """Check what would be published, before anything is encoded or copied."""
        yield from super().findings(memory)
        yield precision(self.order, self._models)

    def dataset(self, system: System) -> str:
        """Return the dataset TOML of one system, with forward slashes."""

        def directory(ending: str) -> Callable[[str, tuple[int, int]], str]:
            return lambda dataset, resolution: self.named(
                f"{self.published}/{self.blocks[dataset, resolution]}{ending}",
                system,
                self.published,
            )

        return dataset_toml(
            self.order,
            image_directory=directory(""),
            cache_directory=directory("_cache"),
            control_directory=directory("_control"),
        )

    def steps(self, system: System) -> tuple[str, list[Step]]:
        """Return what the script of one system does, and its calls; the last one trains."""
        order = self.order

        def named(path: str) -> str:
            return self.argument(path, system)

        config = self.below(self.toml_name(system), system)
        training = training_arguments(
            located(order, named),
            dataset_config=config,
            weights=places(order, named),
            output_dir=self.below("output", system),
            logging_dir=self.below("logs", system),
            attention=self.attention,
        )
        does = f"Caches what is missing of run {order.run} and trains it with musubi-tuner."
        steps = [self._caching_step(kind, config, named) for kind in _MADE_BY]
        return does, [*steps, Step("training", order.scripts.training.name, training)]

    def _caching_step(self, kind: str, config: str, named: Callable[[str], str]) -> Step:
        """Return the call of the script that caches `latents` or `text`."""
        order, found = self.order, self._places[kind]
        arguments = None
        if found is not None:
            arguments = caching_arguments(
                located(order, named).model,
                kind,
                dataset_config=config,
                place=lambda file, _: named(found[file.key]),
                batch_size=order.publish.batch_size,
                num_workers=order.publish.num_workers,
                keep_cache=order.publish.caches,
            )
        return Step(f"caching {_MADE_BY[kind]}", script_of(order.model, kind).name, arguments)

    def members(self) -> Files:
        """Return the files of items and caches."""
        order, files = self.order, Files()
        if not order.publish.caches:
            for (dataset, resolution), name in self.blocks.items():
                settings = self._settings(dataset, resolution)
                files |= settings_files(f"{name}_cache", **settings)
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

    def _settings(self, dataset: str, resolution: tuple[int, int]) -> dict[str, list[Any]]:
        """Return what shapes latents and embeddings; of files, the paths."""
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

    def drop(self, folder: Path, files: Files, made: PublishedCaches, name: str) -> None:
        """Drop the caches made from a file, before it is replaced."""
        place, _, base = name.rpartition("/")
        if base in SETTINGS:
            made.drop(place, SETTINGS[base])
        elif place:
            block = place.removesuffix("_control")
            stem, _, ending = base.rpartition(".")
            if block == place and f".{ending.lower()}" not in IMAGE_EXTENSIONS | VIDEO_EXTENSIONS:
                endings = {dataset.caption_extension for dataset in self.order.datasets.values()}
                longest = sorted(endings, key=len, reverse=True)
                known = next(filter(base.endswith, longest), f".{ending}")
                made.drop(f"{block}_cache", "text", base.removesuffix(known))
            else:
                for each in self._items_of(stem, control=block != place):
                    made.drop(f"{block}_cache", "latents", each)
                    if self.order.scripts.text.reads_controls:
                        made.drop(f"{block}_cache", "text", each)

    def _items_of(self, stem: str, *, control: bool) -> set[str]:
        """Return the items that an image may belong to: `a_1` may be a control or layer of `a`."""
        several = self.order.version.controls[1] != 1 if control else self.order.scripts.layers
        return {stem, _NUMBER.sub("", stem)} if several else {stem}

    def tell_of_strays(self, folder: Path, files: Files, say: Say) -> None:
        """Say which cache files were not published: musubi-tuner trains on all that lie there."""
        caches: dict[str, set[str]] = defaultdict(set)
        for name in files:
            place, _, base = name.rpartition("/")
            if place.endswith("_cache"):
                caches[place].add(base)
        for place, known in caches.items():
            found = {path.name for path in (folder / place).glob(f"*{self.layout.latents_ending}")}
            if strays := sorted(found - known):
                say(
                    f"{folder / place} holds cache files that no item owns, and musubi-tuner "
                    f"trains on them: {', '.join(strays[:3])}{' ...' if len(strays) > 3 else ''}; "
                    "remove them"
                )


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
