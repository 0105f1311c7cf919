"""What training and publication of a run of sd-scripts are asked to do, as one small file."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from latentmake import digest
from latentmake.config import (
    Dataset,
    Model,
    Publish,
    SdScripts,
    SdScriptsTrainer,
)
from latentmake.config.architectures import ArchitectureName
from latentmake.config.sdscripts_trainer import Script, scripts_of
from latentmake.config.shapes import shaping

__all__ = ["ManifestRow", "SdScriptsOrder"]


class SdScriptsOrder(BaseModel):
    """All that is to be known of a run; paths are relative to the working directory.

    Attributes:
        run: its name.
        manifest: one line an item with the paths of its caches; a `ManifestRow` each.
        lock: one digest of what the manifest names.
        output: folder that gets what is trained.
        datasets: name -> its section of the configuration, in the run's order.
        resolutions: (width, height) in pixels, in the run's order.
        model_name: name of the model.
        model: its section of the configuration.
        weights: digest of the network that is trained; "" where the job has to find it.
        trainer: the trainer's section.
        sd_scripts: where sd-scripts lies.
        publish: what publication puts where.
        planned: when, in nanoseconds: no two orders are the same file to Snakemake.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    run: str
    manifest: str
    lock: str
    output: str
    datasets: dict[str, Dataset]
    resolutions: list[tuple[int, int]]
    model_name: str
    model: Model
    weights: str = ""
    trainer: SdScriptsTrainer
    sd_scripts: SdScripts
    publish: Publish
    planned: int = 0

    @property
    def architecture(self) -> ArchitectureName:
        """Which model is trained."""
        assert self.model.architecture is not None
        return self.model.architecture

    @property
    def script(self) -> Script:
        """Which of its scripts trains it."""
        return self.trainer.script or scripts_of(self.architecture)[0]

    @property
    def cached_text(self) -> bool:
        """Whether its text is cached; else sd-scripts encodes captions while it trains."""
        return self.model.spec.caches_text

    def settings_digest(self) -> str:
        """Return the digest of all settings that shape the trained weights."""
        trainer, model = shaping(self.trainer, "weights"), self.model
        del trainer["script"]  # whose default follows from the architecture
        return digest.of_value(
            [trainer, self.script, self.architecture, model.clip_skip, model.max_token_length]
        )


class ManifestRow(NamedTuple):
    """One item that is trained on.

    Attributes:
        dataset: its dataset's name.
        stem: path below the dataset's folder, without the last ending.
        source: path of the image.
        repeats: how often an epoch shows it.
        latents: resolution's name (`512` or `512x768`) -> path of its cache file.
        text: path of its embedding's cache file, if any.
        caption: path of the caption file; None stands for the empty caption.
        control: none.
        variants: paths of the embeddings of all its texts, where there are several.
        texts: its texts, where they are not what the caption file holds.
    """

    dataset: str
    stem: str
    source: str
    repeats: int
    latents: dict[str, str]
    text: str | None
    caption: str | None
    control: None = None
    variants: list[str] | None = None
    texts: list[str] | None = None
