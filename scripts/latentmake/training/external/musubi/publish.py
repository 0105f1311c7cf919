"""Publication of a Wan run: folders that musubi-tuner reads, and the calls of its scripts."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from latentmake import layouts
from latentmake.config import ExternalProgram, Weights, resolution_name
from latentmake.errors import CacheError, ConfigError, SourceError, TrainingError
from latentmake.files.media import VIDEO_EXTENSIONS
from latentmake.files.paths import System
from latentmake.index.memo import Memo
from latentmake.models.wan_files import ModelFile, model_files
from latentmake.sources.items import IMAGE_EXTENSIONS
from latentmake.training.backend import Say
from latentmake.training.checks import Finding, model_finding
from latentmake.training.external.arguments import located
from latentmake.training.external.checks import elsewhere
from latentmake.training.external.installation import Installation
from latentmake.training.external.launch_scripts import Step
from latentmake.training.external.musubi import command
from latentmake.training.external.musubi.dataset_toml import dataset_toml, shapes
from latentmake.training.external.musubi.deploy import names_of
from latentmake.training.external.musubi.installation import find
from latentmake.training.external.musubi.order import ManifestRow, MusubiOrder
from latentmake.training.external.musubi.preflight import precision
from latentmake.training.external.publish import Files, Publication
from latentmake.training.external.published_caches import SETTINGS, PublishedCaches, settings_files
from latentmake.training.order import rows_of

__all__ = ["MusubiPublication"]


class MusubiPublication(Publication[MusubiOrder]):
    """A Wan run's published folder; names are flat, as musubi-tuner reads its folders."""

    program = "musubi-tuner"
    package = "src/musubi_tuner"
    attentions = command.ATTENTIONS
    layout = layouts.of("musubi")

    def __init__(self, order: MusubiOrder, published: str = "") -> None:
        super().__init__(order, published)
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
            if not order.publish.caches and (key := dataset.own_clips):
                raise ConfigError(
                    "musubi-tuner's own scripts cannot make such clips from a published folder",
                    where=f"datasets.{name}.{key}",
                    hint="set `publish.caches: true`, so that caches are published",
                )
            if not order.publish.caches and dataset.text_variants > 1:
                raise ConfigError(
                    "musubi-tuner's own scripts encode one text of an item",
                    where=f"datasets.{name}.captions.variants",
                    hint="set `publish.caches: true`, so that caches of all texts are published",
                )
        self._dit = model.dit
        self._vae = self._weights(model.vae, f"{where}.vae", "the latents")
        self._t5 = self._weights(model.text[0], f"{where}.text", "the captions")
        self._clip: str | None = None
        if model.clip is not None:
            self._clip = self._weights(model.clip, f"{where}.clip", "the latents")
            if self._clip is None:
                self._vae = None  # the latents' script needs both

    def _weights(self, weights: Weights, where: str, what: str) -> str | None:
        """Return the path of a file of weights; None of a folder, which is noted."""
        if weights.path is None:
            raise ConfigError(
                f"{weights.hub} lies on the hub, and a published script needs a file",
                where=where,
                hint="download the original weights, and set `path` to their file",
            )
        if not Path(weights.path).is_dir():
            return weights.path
        fault = f"{weights.path} is a folder, and musubi-tuner's scripts want a single file"
        if not self.order.publish.caches:
            raise ConfigError(
                fault,
                where=where,
                hint="name the file of the original weights, or set `publish.caches: true`",
            )
        note = f"{fault}: the published scripts train from the caches and do not cache {what}"
        self._left_out[where.rpartition(".")[2]] = note
        return None

    @property
    def place(self) -> ExternalProgram:
        """Where musubi-tuner lies."""
        assert self.order.musubi_tuner is not None  # or __init__ had failed
        return self.order.musubi_tuner

    def find(self, place: ExternalProgram, memory: Memo | None) -> Installation:
        """Find musubi-tuner."""
        return find(place, memory)

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
        if Path(self.place.path).is_dir():
            with contextlib.suppress(TrainingError):  # reported above
                tuner = find(self.place.model_copy(update={"venv": None}), memory)
                yield precision(self.order, self._models, tuner)

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
        order, model = self.order, self.order.model

        def named(path: str | None) -> str | None:
            return None if path is None else self.argument(path, system)

        config = self.below(self.toml_name(system), system)
        caching: dict[str, Any] = {
            "dataset_config": config,
            "batch_size": order.publish.batch_size,
            "num_workers": order.publish.num_workers,
            "keep_cache": order.publish.caches,
        }
        latents = text = None
        if vae := named(self._vae):
            latents = command.latents_arguments(model, vae=vae, clip=named(self._clip), **caching)
        if t5 := named(self._t5):
            text = command.text_arguments(model, t5=t5, **caching)
        high = model.dit_high_noise
        training = command.training_arguments(
            located(order, lambda path: self.argument(path, system)),
            dataset_config=config,
            dit=self.argument(command.first_file(self._dit), system),
            dit_high_noise=None if high is None else named(command.first_file(high)),
            output_dir=self.below("output", system),
            logging_dir=self.below("logs", system),
            attention=self.attention,
        )
        does = f"Caches what is missing of run {order.run} and trains it with musubi-tuner."
        return does, [
            _step("caching the latents", command.LATENTS_SCRIPT, latents),
            _step("caching the captions", command.TEXT_SCRIPT, text),
            Step("training", command.TRAINING_SCRIPT, training),
        ]

    def members(self) -> Files:
        """Return the files of items and caches."""
        order, files = self.order, Files()
        if not order.publish.caches:
            for (dataset, resolution), name in self.blocks.items():
                files |= settings_files(
                    f"{name}_cache",
                    latents=self._latents_settings(dataset, resolution),
                    text=[order.model.text[0].path, order.model.fp8_t5],
                )
        for row in rows_of(Path(order.manifest), ManifestRow):
            ending = order.datasets[row.dataset].caption_extension
            for resolution in order.resolutions:
                name = self.blocks[row.dataset, resolution]
                if order.datasets[row.dataset].own_clips != "path":  # of these caches alone count
                    files[f"{name}/{Path(row.source).name}"] = Path(row.source)
                files[f"{name}/{Path(row.stem).name}{ending}"] = _caption(row)
                if order.datasets[row.dataset].own_clips != "path":
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
                raise kind("is not there", where=path, hint="give the same command again")
        return files

    def _latents_settings(self, dataset: str, resolution: tuple[int, int]) -> list[Any]:
        """Return the settings of latents; of files, the paths."""
        model = self.order.model
        clip = None if model.clip is None else model.clip.path
        dtype = model.vae_dtype or model.dtype
        shaped = shapes(self.order.datasets[dataset])
        return [model.vae.path, dtype, model.task, clip, resolution, shaped]

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
                made.drop(f"{block}_cache", "latents", stem)

    def tell_of_strays(self, folder: Path, files: Files, say: Say) -> None:
        """Say which cache files were not published: musubi-tuner trains on all that lie there."""
        caches: dict[str, set[str]] = defaultdict(set)
        for name in files:
            place, _, base = name.rpartition("/")
            if place.endswith("_cache"):
                caches[place].add(base)
        for place, known in caches.items():
            found = {path.name for path in (folder / place).glob("*_wan.safetensors")}
            if strays := sorted(found - known):
                say(
                    f"{folder / place} holds cache files that no item owns, and musubi-tuner "
                    f"trains on them: {', '.join(strays[:3])}{' ...' if len(strays) > 3 else ''}; "
                    "remove them"
                )


def _step(what: str, script: str, arguments: list[str] | None) -> Step:
    without = f"No step for {what}: musubi-tuner's script wants one file of weights, not a folder."
    return Step(what, script, arguments, without)


def _caption(row: ManifestRow) -> Path | bytes:
    """Return the file of an item's caption, or the text itself where that is another."""
    if row.written is not None:
        return f"{row.written}\n".encode()
    return b"" if row.caption is None else Path(row.caption)
