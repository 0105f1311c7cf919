"""What training, checklist and publication of a Wan run are asked to do, as one small file."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from latentmake import digest, layouts
from latentmake.config import (
    Dataset,
    Model,
    MusubiTrainer,
    MusubiTuner,
    Publish,
    resolution_name,
)
from latentmake.config.shapes import shaping

__all__ = ["ManifestRow", "MusubiOrder"]


class MusubiOrder(BaseModel):
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
        weights: digest of the networks that are trained; "" where the job has to find it.
        trainer: the trainer's section; the defaults where the run has none.
        musubi_tuner: where musubi-tuner lies; None where the configuration does not say.
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
    trainer: MusubiTrainer
    musubi_tuner: MusubiTuner | None
    publish: Publish
    planned: int = 0

    def settings_digest(self) -> str:
        """Return the digest of all settings that shape the trained weights."""
        return digest.of_value([shaping(self.trainer, "weights"), self.model.task])

    def cache_folder(self, dataset: str, resolution: tuple[int, int]) -> str:
        """Return the folder of one dataset's caches at one resolution."""
        return layouts.of("musubi").folder(dataset, self.model_name, resolution_name(*resolution))


class ManifestRow(NamedTuple):
    """One item that is trained on.

    Attributes:
        dataset: its dataset's name.
        stem: path below the dataset's folder, without the last ending.
        source: path of the image or video.
        caption: path of the caption file; None stands for the empty caption.
        control: path of the control image or video, if any.
        repeats: how often an epoch shows it.
        latents: resolution's name (`256` or `480x832`) -> paths of cache files, one a clip.
        text: resolution's name -> path of the embedding's cache file.
        texts: the text itself, where it is not what the caption file holds.
    """

    dataset: str
    stem: str
    source: str
    caption: str | None
    control: str | None
    repeats: int
    latents: dict[str, list[str]]
    text: dict[str, str]
    texts: list[str] | None = None

    @property
    def written(self) -> str | None:
        """The text, where it is not what the caption file holds."""
        return None if self.texts is None else self.texts[0]
