"""Clips of a run's videos as files for other trainers: uncompressed .npz arrays, and train.jsonl.

A file holds `frames`, uint8 [F, H, W, 3]. Key and origin are in the archive's comment. This module
plans what `cut_clips` cuts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from latentmake import digest
from latentmake.data.item import Item
from latentmake.data.probe import indices_of
from latentmake.digest import source_stat
from latentmake.errors import ConfigError, unreadable
from latentmake.files import npz
from latentmake.files.cachefile import KEY
from latentmake.files.workspace import Need
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import WAN_FPS, Clip, SourceFps, Span
from latentmake.plan.facts import Facts
from latentmake.plan.state import Difference, short, value_differences

CLIPS = Path("clips")
LIST = "train.jsonl"
_AROUND = 1152  # bytes of the archive around an array, comment included; an estimate
_VERSION = 1  # raised when the same frames would be scaled or stored otherwise


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

    def source(self) -> list[Any]:
        """Return stat and digest of the video, known to the plan or read; raises SourceError."""
        path = Path(self.item.image)
        try:
            stat = source_stat(path.stat())
            known = self.content if stat == self.item.files[0].stat else None
            return [*stat, known or digest.of_file(path)]
        except OSError as error:
            raise unreadable(error, path) from None


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

    def path(self, file: ClipFile) -> Path:
        """Return the path of a clip's file."""
        return Path(self.folder, f"{file.name}.npz")

    @property
    def need(self) -> Need:
        """Room for the files that are not there; those of other content are replaced."""
        missing = [file for file in self.files if not self.path(file).exists()]
        arrays = (math.prod((x.clip.frames, *x.size, 3)) for x in missing)
        return Need("clips", self.folder, sum(arrays) + _AROUND * len(missing))

    def indices(self, file: ClipFile) -> list[int]:
        """Return the indices in its video of a clip's frames."""
        return indices_of(file.item, file.clip, self.source_fps[file.dataset], self.rate)

    def origin(self, file: ClipFile) -> dict[str, Any]:
        """Return which frames of which video a file holds."""
        return {
            "source_video": file.item.image,
            "source_first_frame": self.indices(file)[0],
            "source_stride": (file.item.span or Span()).stride,
        }

    def key(self, file: ClipFile, content: str) -> str:
        """Return the digest of all that decides about a file's frames, by that of its video."""
        media, span, fps = file.item.media, file.item.span or Span(), self.source_fps[file.dataset]
        assert media is not None
        made = [_VERSION, content, fps, span, file.clip, file.size, media.timing, media.rotation]
        return digest.of_value(made if fps is None or self.rate == WAN_FPS else [*made, self.rate])

    def differences(self, file: ClipFile, content: str) -> list[Difference]:
        """Return why a clip's file is not what is asked for, by the digest of its video."""
        key, origin = self.key(file, content), self.origin(file)
        try:
            found = npz.read_metadata(self.path(file))
            if found[KEY] == key:
                return []
        except FileNotFoundError:
            return [Difference("it has not been cut yet")]
        except (OSError, ValueError, LookupError):
            return [Difference("it is damaged, or no file of latentmake")]
        known = value_differences({name: found.get(name) for name in origin}, origin)
        what = "key of video, size and frame rate"
        return known or [Difference(what, short(found[KEY]), short(key))]


def plan_clips(facts: Facts, name: str) -> ClipsOrder:
    """Return the order to cut a run's clips; raises ConfigError."""
    where, run, datasets = f"clips_{name}", facts.config.runs[name], facts.config.datasets
    videos = [each for each in run.datasets if datasets[each].video]
    if not videos:
        hint = "set target_frames in a dataset of videos"
        raise ConfigError("the run has no videos", where=where, hint=hint)
    if len(run.resolutions) > 1:
        names = ", ".join(each.name for each in run.resolutions)
        hint = "give each a run of its own"
        what = f"the run has several resolutions ({names}), but clips are cut at one"
        raise ConfigError(what, where=where, hint=hint)
    for each in run.datasets:
        if each not in videos:
            sys.stderr.write(f"note: {where}: the images of {each} are no clips and left out\n")
    (resolution,) = run.resolutions
    size = Size(resolution.width, resolution.height)
    return ClipsOrder(
        run=name,
        folder=str(CLIPS / name),
        files=[
            file._replace(name=f"{each}_{file.name}") if len(videos) > 1 else file
            for each in videos
            for file in _files(facts, each, run.model, size)
        ],
        source_fps={each: datasets[each].source_fps for each in videos},
        rate=facts.layout(run.model).rate,
        max_pixels={each: datasets[each].max_image_pixels for each in videos},
        skip=[each for each in videos if datasets[each].on_error == "skip"],
        faults={each: [x.line for x in facts.items(each, run.model)[1]] for each in videos},
        receipt=f".latentmake/orders/clips.{name}.receipt.json",
    )


def _files(facts: Facts, name: str, model: str, resolution: Size) -> Iterator[ClipFile]:
    settings, layout = facts.config.datasets[name], facts.layout(model)
    for item in facts.items(name, model)[0]:
        media, content = item.media, facts.memo.sources.get(item.image, item.files[0].stat)
        assert media is not None
        size = layout.size(Size(media.width, media.height), resolution, settings)
        for clip in layout.clips(media, settings, item.span):
            stem = f"{layout.base(item.stem)}_{clip.start:05d}-{clip.frames:03d}"
            yield ClipFile(stem, name, size, item, clip, content)
