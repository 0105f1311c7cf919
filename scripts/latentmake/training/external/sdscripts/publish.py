"""Publication of a run of sd-scripts: images with caches beside them, and a training call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from latentmake.config.machines import ExternalProgram
from latentmake.files.workspace import System
from latentmake.index.memo import Memo
from latentmake.training.backend import Finding
from latentmake.training.external.installation import Installation, elsewhere
from latentmake.training.external.order import located
from latentmake.training.external.publish import Files, Kind, Made, Publication, Step
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
from latentmake.training.external.sdscripts.order import SdScriptsOrder, find


class SdScriptsPublication(Publication[SdScriptsOrder]):
    """The published folder of a run of sd-scripts; it looks like that of a training here."""

    program = "sd-scripts"
    attentions = ("sdpa", "xformers", "mem_eff_attn")

    @property
    def place(self) -> ExternalProgram:
        """Where sd-scripts lies."""
        return self.order.sd_scripts

    def find(self, place: ExternalProgram, memory: Memo | None) -> Installation:
        """Find sd-scripts."""
        return find(self.order.script, place, memory)

    def own_findings(self) -> Iterator[Finding]:
        """Check the model's files and the settings."""
        order, publish = self.order, self.order.publish
        insists, files = order.strategies.insists, order.strategies.files
        unread = {file.flag for file in files} - {*order.strategies.folders}
        places = {"checkpoint": order.model.checkpoint or "", **encoder_places(order)}
        if not publish.caches and "vae" not in (file.key for file in files):
            places["vae"] = order.model.vae.path or ""
        for key, place in places.items():
            if place and not Path(place).exists():
                yield elsewhere(f"model: {key}", place)
            elif key in unread and Path(place).is_dir() and (insists or not publish.caches):
                note = f"{place} is a folder, and sd-scripts wants a file: add [{key}, FILE] to the"
                yield Finding(f"model: {key}", "warning", f"{note} trainer's `arguments`")
        if publish.num_workers is not None:
            note = "sd-scripts caches without workers: `publish.num_workers` has no effect"
            yield Finding("num_workers", "warning", note)
        if publish.batch_size is not None and publish.caches:
            note = "`publish.batch_size` has no effect: sd-scripts finds the published caches"
            yield Finding("batch_size", "warning", note)

    def members(self) -> Files:
        """Return the files of items and caches."""
        return deployed(self.order, self.blocks, caches=self.order.publish.caches)

    def settings(self, dataset: str, resolution: tuple[int, int]) -> dict[Kind, Any]:
        """Return the settings that shape latents and text; of files, the paths."""
        order, model, own = self.order, self.order.model, self.order.datasets[dataset]
        shapes = [bucket_settings(own, order.architecture), own.alpha_mask]
        vae = model.vae.path or [model.vae.hub, model.vae.revision]
        found: dict[Kind, Any] = {"latents": [vae, model.vae_dtype or model.dtype, shapes]}
        if order.cached_text:
            places = [model.checkpoint, encoder_places(order)]
            further = [model.max_token_length, model.apply_lg_attn_mask, model.apply_t5_attn_mask]
            found["text"] = [places, further, model.text[-1].max_length]
        return found

    def made_from(self, folder: Path, files: Files, name: str) -> Iterator[Made]:
        """Yield the caches made from a file, before it is replaced."""
        block, _, base = name.partition("/")
        if base == METADATA:
            before, after = _captions(folder / name), _captions(files.get(name, b"{}"))
            for image in before | after:
                if before.get(image) != after.get(image):
                    yield block, "text", str(PurePosixPath(image).with_suffix(""))
        elif base:
            yield block, "latents", str(PurePosixPath(base).with_suffix(""))

    def dataset(self, system: System) -> str:
        """Return the dataset TOML of one system."""
        return dataset_toml(self.order, self.blocks, partial(self.below, system=system))

    def steps(self, system: System) -> list[Step]:
        """Return the call in the paths of one system; it makes missing caches first."""
        order, caching = self.order, list[str]()
        if not order.publish.caches:
            weights = order.model.vae
            vae = weights.hub if weights.path is None else self.named(weights.path, system)
            caching = caching_arguments(order, vae=vae)
        training = training_arguments(
            located(order, partial(self.named, system=system)),
            dataset_config=self.below(self.toml_name(system), system),
            checkpoint=self.named(order.model.checkpoint or "", system),
            encoders={
                flag: self.named(path, system)
                for flag, path in encoder_places(order).items()
                if not Path(path).is_dir() or flag in order.strategies.folders
            },
            output_dir=self.below("output", system),
            logging_dir=self.below("logs", system),
            attention=order.publish.attention,
            caching=caching,
        )
        return [Step("training", f"{order.script}.py", training, self.launcher(system))]


def _captions(metadata: Path | bytes) -> dict[str, str]:
    """Return image -> caption; of a file that is missing or damaged, none."""
    try:
        data = metadata if isinstance(metadata, bytes) else metadata.read_bytes()
        return {image: entry["caption"] for image, entry in json.loads(data).items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return {}
