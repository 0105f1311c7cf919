"""Order of `clips_{run}`: the clips of a run as .npz files, and its planning."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from latentmake.config.root import Run
from latentmake.data.item import Item
from latentmake.errors import ConfigError
from latentmake.files.workspace import Need
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import WAN_FPS, Clip, SourceFps
from latentmake.plan.facts import Facts
from latentmake.plan.run_plan import RunPlan

CLIPS = Path("clips")
LIST = "train.jsonl"
NPZ_HEADER = 128
"""Bytes of numpy's header before the array of a clip."""
_AROUND = 1024  # bytes of the archive around an array, comment included; an estimate


class ClipFile(NamedTuple):
    """One clip and its file.

    Attributes:
        name: of the file, without its ending.
        dataset: name of the clip's dataset.
        size: of its frames.
        item: the clip's video and prompt.
        clip: place among the frames of the video that are kept.
        content: digest of its video, if it is known.
    """

    name: str
    dataset: str
    size: Size
    item: Item
    clip: Clip
    content: str | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the array: frames, height, width, channels."""
        return (self.clip.frames, self.size.height, self.size.width, 3)


class ClipsOrder(BaseModel, extra="forbid", frozen=True):
    """Order to cut the clips of a run.

    Attributes:
        folder: of the files.
        files: to be there in the end, and no others.
        source_fps: dataset -> frame rate of its videos.
        rate: frames a second that they are converted to.
        max_pixels: dataset -> most pixels of a scaled frame.
        skip: datasets whose broken videos are left out.
        faults: dataset -> faulty items, a line each.
        receipt: path of the job's receipt.
    """

    run: str
    folder: str
    files: list[ClipFile]
    source_fps: dict[str, SourceFps]
    rate: float = WAN_FPS
    max_pixels: dict[str, int]
    skip: list[str]
    faults: dict[str, list[str]]
    receipt: str

    @property
    def need(self) -> Need:
        """Room for the files that are not there; those of other content are replaced."""
        folder = Path(self.folder)
        size = sum(
            npz_bytes(file.shape)
            for file in self.files
            if not (folder / f"{file.name}.npz").exists()
        )
        return Need("clips", self.folder, size)


def npz_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of a clip's file, within a kilobyte."""
    frames, height, width, channels = shape
    return frames * height * width * channels + NPZ_HEADER + _AROUND


def plan_clips(facts: Facts, plan: RunPlan, run: Run) -> ClipsOrder:
    """Return the order to cut a run's clips.

    Raises:
        ConfigError: the run has no videos, or several resolutions.
    """
    where = f"clips_{plan.name}"
    datasets = facts.config.datasets
    videos = [name for name in run.datasets if datasets[name].video]
    if not videos:
        hint = "set target_frames in a dataset of videos"
        raise ConfigError("the run has no videos", where=where, hint=hint)
    if len(run.resolutions) > 1:
        names = ", ".join(each.name for each in run.resolutions)
        hint = "give each a run of its own"
        what = f"the run has several resolutions ({names}), but clips are cut at one"
        raise ConfigError(what, where=where, hint=hint)
    for name in run.datasets:
        if name not in videos:
            sys.stderr.write(f"note: {where}: the images of {name} are no clips and left out\n")
    receipt = Path(f".latentmake/orders/clips.{plan.name}.receipt.json")
    return ClipsOrder(
        run=plan.name,
        folder=str(CLIPS / plan.name),
        files=[file for name in videos for file in _files(facts, name, run, len(videos) > 1)],
        source_fps={name: datasets[name].source_fps for name in videos},
        rate=facts.layout(run.model).rate,
        max_pixels={name: datasets[name].max_image_pixels for name in videos},
        skip=[name for name in videos if datasets[name].on_error == "skip"],
        faults={name: [fault.line for fault in facts.items(name, run.model)[1]] for name in videos},
        receipt=str(receipt),
    )


def _files(facts: Facts, name: str, run: Run, prefixed: bool) -> Iterator[ClipFile]:
    """Yield the files of a dataset; names of several datasets begin with that of the dataset."""
    settings, layout = facts.config.datasets[name], facts.layout(run.model)
    (resolution,) = run.resolutions
    for item in facts.items(name, run.model)[0]:
        media, content = item.media, facts.memo.sources.get(item.image, item.files[0].stat)
        assert media is not None
        own = Size(media.width, media.height)
        size = layout.size(own, Size(resolution.width, resolution.height), settings)
        for clip in layout.clips(media, settings, item.span):
            stem = f"{layout.base(item.stem)}_{clip.start:05d}-{clip.frames:03d}"
            file = f"{name}_{stem}" if prefixed else stem
            yield ClipFile(file, name, size, item, clip, content)
