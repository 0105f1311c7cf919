"""Clips of a run's videos as files for other trainers: uncompressed .npz arrays, and train.jsonl.

A file holds `frames`, uint8 [F, H, W, 3]. The comment of the zip archive has its key and origin.
This module plans the clips that `cut_clips` cuts.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, PlainSerializer

from latentmake.base import digest
from latentmake.base.digest import source_stat
from latentmake.base.errors import ConfigError, unreadable
from latentmake.base.machine import Need
from latentmake.config.datasets import Dataset
from latentmake.data.contents import read_caption
from latentmake.data.item import Item
from latentmake.formats import npz
from latentmake.formats.cachefile import KEY
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import WAN_FPS, Clip, Span
from latentmake.plan.facts import Facts
from latentmake.plan.product import Difference, Made, Product, judge, text_of

CLIPS = Path("clips")
LIST = "train.jsonl"
_AROUND = 1152  # estimated bytes of an archive besides its array, with the comment
_CUT = "video, size and frame rate"  # part of a clip's file
_VERSION = 1  # must change whenever the code scales or stores the same frames in another way


class ClipFile(NamedTuple):
    """One clip and its file.

    Attributes:
        name: name of the file, without its ending.
        dataset: name of the clip's dataset.
        size: size of the frames.
        item: video and prompt of the clip.
        clip: position of the clip in the kept frames of the video.
        content: digest of the video; None if unknown.
    """

    name: str
    dataset: str
    size: Size
    item: Item
    clip: Annotated[Clip, PlainSerializer(Clip.numbers)]
    content: str | None = None

    def source(self) -> list[Any]:
        """Return stat and digest of the video, reading it if necessary; raises SourceError."""
        path = Path(self.item.image)
        try:
            stat = source_stat(path.stat())
            content = self.content if stat == self.item.files[0].stat else None
            return [*stat, content or digest.of_file(path)]
        except OSError as error:
            raise unreadable(error, path) from None


class ClipsOrder(BaseModel, extra="forbid", frozen=True):
    """Order to cut the clips of a run.

    Attributes:
        folder: folder of the files.
        files: clips to cut; files of other clips are removed.
        datasets: dataset -> its section of the configuration.
        rate: frames per second to which the videos are converted.
        faults: dataset -> lines about faulty items.
        receipt: path of the job's receipt.
    """

    run: str
    folder: str
    files: list[ClipFile]
    datasets: dict[str, Dataset]
    rate: float = WAN_FPS
    faults: dict[str, list[str]]
    receipt: str

    def path(self, file: ClipFile) -> Path:
        """Return the path of a clip's file."""
        return Path(self.folder, f"{file.name}.npz")

    @property
    def need(self) -> Need:
        """Disk space for the missing files; outdated files do not count, as they are replaced."""
        missing = [file for file in self.files if not self.path(file).exists()]
        arrays = (math.prod((file.clip.frames, *file.size, 3)) for file in missing)
        return Need("clips", self.folder, sum(arrays) + _AROUND * len(missing))

    def indices(self, file: ClipFile) -> list[int]:
        """Return the indices of a clip's frames in the video."""
        source_fps = self.datasets[file.dataset].source_fps
        kept = file.item.indices(source_fps, self.rate)
        return kept[file.clip.start : file.clip.start + file.clip.frames]

    def origin(self, file: ClipFile) -> dict[str, Any]:
        """Return the video and the frames that a file holds, as columns of the list."""
        return {
            "source_video": file.item.image,
            "source_first_frame": self.indices(file)[0],
            "source_stride": (file.item.span or Span()).stride,
        }

    def row(self, file: ClipFile) -> dict[str, Any]:
        """Return a clip's row of the list: file, prompt, further columns of the item, and origin.

        Some programs read the file's path from `npz`, others from `video`. The path is relative to
        the working directory.
        """
        place = self.path(file).as_posix()
        texts = file.item.texts or [read_caption(file.item.caption)]
        own = {"npz": place, "video": place, "prompt": texts[0]}
        return {**own, **(file.item.row or {}), **own, **self.origin(file)}

    def is_listed(self, lines: bytes) -> bool:
        """Whether the list has these lines and no others."""
        place = Path(self.folder, LIST)
        return place.is_file() and place.read_bytes() == lines

    def key(self, file: ClipFile, content: str) -> str:
        """Return the digest of everything that decides about a file's frames.

        `content` is the digest of the video.
        """
        media, span = file.item.media, file.item.span or Span()
        fps = self.datasets[file.dataset].source_fps
        assert media is not None
        clip = file.clip.start, file.clip.frames
        made = [_VERSION, content, fps, span, clip, file.size, media.timing, media.rotation]
        return digest.of_value(made if fps is None or self.rate == WAN_FPS else [*made, self.rate])

    def differences(self, file: ClipFile, content: str) -> list[Difference]:
        """Return why a clip's file is not up to date; `content` is the digest of the video."""
        origin = {name: text_of(value) for name, value in self.origin(file).items()}
        made, absent = None, "it has not been cut yet"
        try:
            comment = npz.read_metadata(self.path(file))
            old = {name: text_of(comment.get(name)) for name in origin}
            made = Made(parts={_CUT: comment[KEY]}, values={_CUT: old})
        except FileNotFoundError:
            pass
        except (OSError, ValueError, LookupError):
            absent = "it is damaged, or no file of latentmake"
        return judge(Product(absent, {_CUT: self.key(file, content)}, {_CUT: origin}), made)


def plan_for(facts: Facts, name: str) -> ClipsOrder:
    """Return the order to cut a run's clips; raises ConfigError."""
    where, run, datasets = f"clips_{name}", facts.config.runs[name], facts.config.datasets
    videos = [dataset for dataset in run.datasets if datasets[dataset].video]
    if not videos:
        hint = "set target_frames in a dataset of videos"
        raise ConfigError("the run has no videos", where=where, hint=hint)
    if len(run.resolutions) > 1:
        names = ", ".join(resolution.name for resolution in run.resolutions)
        hint = "give each a run of its own"
        what = f"the run has several resolutions ({names}), but clips are cut at one"
        raise ConfigError(what, where=where, hint=hint)
    for dataset in run.datasets:
        if dataset not in videos:
            sys.stderr.write(f"note: {where}: the images of {dataset} are no clips and left out\n")
    facts.refuse_awaiting(name)
    (resolution,) = run.resolutions
    size = Size(resolution.width, resolution.height)
    return ClipsOrder(
        run=name,
        folder=str(CLIPS / name),
        files=[
            file._replace(name=f"{dataset}_{file.name}") if len(videos) > 1 else file
            for dataset in videos
            for file in _files(facts, dataset, run.model, size)
        ],
        datasets={dataset: datasets[dataset] for dataset in videos},
        rate=facts.layout(run.model).rate,
        faults={
            dataset: [fault.line for fault in facts.items(dataset, run.model)[1]]
            for dataset in videos
        },
        receipt=f".latentmake/orders/clips.{name}.receipt.json",
    )


def reasons(facts: Facts, run: str, place: str) -> list[Difference]:
    """Return why the clip at a place would be cut, or all clips of `clips_{run}`."""
    order, is_whole = plan_for(facts, run), place in (f"clips_{run}", str(CLIPS / run / LIST))
    requested = [file for file in order.files if is_whole or str(order.path(file)) == place]
    if not (requested or is_whole):
        return [Difference("no clip of the run has this name; the next build removes it")]
    # Each video is read once, whatever the number of its clips.
    videos = {file.item.image: file for file in requested}
    digests = {path: file.source()[-1] for path, file in videos.items()}
    changes = [
        change._replace(name=f"{order.path(file)}: {change.name}" if is_whole else change.name)
        for file in requested
        for change in order.differences(file, digests[file.item.image])
    ]
    if is_whole and not changes and not order.is_listed(lines_of(map(order.row, order.files))):
        return [Difference(f"{order.folder}/{LIST}: prompts, clips or columns have changed")]
    return changes


def lines_of(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the content of a list of clips."""
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()


def _files(facts: Facts, name: str, model: str, resolution: Size) -> Iterator[ClipFile]:
    settings, layout = facts.config.datasets[name], facts.layout(model)
    for item in facts.items(name, model)[0]:
        media, content = item.media, facts.memo.sources.get(item.image, item.files[0].stat)
        assert media is not None
        size = layout.size(Size(media.width, media.height), resolution, settings)
        for clip in layout.clips(media, settings, item.span):
            stem = f"{layout.base(item.stem)}_{clip.start:05d}-{clip.frames:03d}"
            yield ClipFile(stem, name, size, item, clip, content)
