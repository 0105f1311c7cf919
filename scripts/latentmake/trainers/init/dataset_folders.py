"""Datasets in folders, for `latentmake init`: images, videos, captions, and files left out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from posixpath import splitext
from typing import NamedTuple

from latentmake.base.errors import DatasetError, SourceError
from latentmake.base.machine import counted
from latentmake.config.datasets import Dataset
from latentmake.data.contents import read_caption
from latentmake.data.folders import kohya, slug
from latentmake.data.listing import scan
from latentmake.data.lists import metadata_of
from latentmake.data.unread import masks, unread
from latentmake.formats.endings import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from latentmake.formats.media import probe_image, probe_video
from latentmake.geometry.clips import Timing

_CAPTIONS = (".txt", ".caption", ".TXT")
_SHOWN = 3  # most items without a caption that a message names
_LISTS = ("metadata.jsonl", "metadata.csv")
_PROBED_IMAGES, _PROBED_VIDEOS = 500, 50  # about as many items are probed
_LONGEST = 33  # most frames of a clip: two seconds of Wan


class FoundDataset(NamedTuple):
    """Dataset in a folder.

    Attributes:
        name: name of the dataset in the configuration.
        words: name of the folder as a caption; `10_sks man` and `sks_man` become `sks man`.
        settings: section of the configuration: folder, captions, whether the items are videos, and
            repeats as in the name of a kohya folder, such as 10 in `10_sks man`.
        items: number of images or videos.
        bare: names of items without a caption file or an entry in the metadata file.
        texts: first lines of the captions of the probed items.
        sizes: width and height of the probed items in pixels, the smallest first.
        clips: number of frames, and frames per second, of the probed videos.
    """

    name: str
    words: str
    settings: Dataset
    items: int
    bare: list[str]
    texts: list[str]
    sizes: list[tuple[int, int]]
    clips: list[tuple[int, float]]

    @property
    def counted(self) -> str:
        """Number of items with its noun: `30 images`."""
        return counted(self.items, "video" if self.settings.video else "image")

    @property
    def controls(self) -> Path:
        """Folder where its control images are expected."""
        return Path(self.settings.path).parent / f"control_{self.name}"

    @property
    def captioned(self) -> int:
        """Number of items with a caption."""
        return self.items - len(self.bare)

    @property
    def described(self) -> str:
        """Line for people: `30 images, 28 captions, 640 x 480 to 1920 x 1080 pixels`."""
        ends = dict.fromkeys(f"{w} x {h}" for w, h in (*self.sizes[:1], *self.sizes[-1:]))
        sizes = f", {' to '.join(ends)} pixels" if ends else ""
        return f"{self.counted}, {counted(self.captioned, 'caption')}{sizes}"

    @property
    def lacking(self) -> str:
        """Line for people about the missing captions."""
        names = ", ".join(self.bare[:_SHOWN])
        if len(self.bare) > _SHOWN:
            names += f" and {len(self.bare) - _SHOWN} more"
        path, listed = self.settings.path, self.settings.metadata_file
        file = listed or Path(path, self.bare[0]).with_suffix(self.settings.caption_extension)
        first = "it" if len(self.bare) == 1 else "the first"
        many = counted(len(self.bare), "caption")
        return f"{many} of {path} ({names}): write {first} into {file}"

    @property
    def fps(self) -> float | None:
        """Frames per second of the videos; None if they differ or are unknown."""
        rates = {rate for _, rate in self.clips}
        return rates.pop() or None if len(rates) == 1 else None

    def target_frames(self, fps: float) -> int:
        """Return a clip length of 4 n + 1 frames that nine of ten videos reach.

        Args:
            fps: frames per second of the model.
        """
        lengths = sorted(int(n * min(1.0, fps / rate) if rate else n) for n, rate in self.clips)
        shortest = lengths[len(lengths) // 10] if lengths else 1
        return max(1, (min(shortest, _LONGEST) - 1) // 4 * 4 + 1)


def datasets_in(folder: Path) -> list[FoundDataset]:
    """Return the datasets of a folder: its images, its videos, or the kohya folders in it.

    Raises:
        DatasetError: The folder does not exist, or it contains neither images nor videos.
    """
    if folder.is_file():
        hint = "name the folder of the images or videos"
        if folder.suffix.lower() == ".toml":
            hint = f"for a dataset file of another trainer run `latentmake import {folder}`"
        raise DatasetError("is a file, not a folder", where=folder, hint=hint)
    if not folder.is_dir():
        raise DatasetError("this folder does not exist", where=folder, hint="correct the path")
    inside = [path for path in _folders(folder) if kohya(path)]
    datasets = [dataset for path in inside for dataset in _datasets_of(path)]
    datasets = datasets or list(_datasets_of(folder))
    if not datasets:
        endings = ", ".join(sorted(IMAGE_EXTENSIONS | VIDEO_EXTENSIONS))
        hint = _unread(folder) or f"put images or videos there ({endings})"
        raise DatasetError("holds neither images nor videos", where=folder, hint=hint)
    return datasets


def left_out(folder: Path, datasets: Sequence[FoundDataset]) -> Iterator[str]:
    """Yield a line, with the reason, for everything that `datasets_in` leaves out of a folder."""
    taken: dict[Path, list[Dataset]] = {}
    for dataset in datasets:
        taken.setdefault(Path(dataset.settings.path), []).append(dataset.settings)
    for path, (first, *others) in taken.items():
        if line := unread(first, others, _listing(path)):
            yield f"{path}: {line}"
    if folder in taken:
        return
    why = "its name begins with no number of repeats, as kohya's do that are beside it"
    for path in _folders(folder):
        if path not in taken:
            nothing = _unread(path) or "it holds neither images nor videos"
            yield f"{path}: left out, {why if [*_datasets_of(path)] else nothing}"
    kinds, beside = IMAGE_EXTENSIONS | VIDEO_EXTENSIONS, map(Path, _listing(folder))
    if files := [file for file in beside if len(file.parts) == 1 and file.suffix.lower() in kinds]:
        yield f"{folder}: left out {counted(len(files), 'file')} beside kohya's folders"


def _folders(folder: Path) -> list[Path]:
    visible = (path for path in folder.iterdir() if not path.name.startswith("."))
    return sorted(path for path in visible if path.is_dir())


def _listing(folder: Path) -> list[str]:
    """Return the names of the files of a folder and its sub-folders, as a dataset lists them."""
    entries = scan(slug(folder.name), Dataset.model_construct(path=str(folder))).entries
    return sorted(path for path, size, *_ in entries if size >= 0)


def _unread(folder: Path) -> str:
    """Return a sentence about the files of a folder that are not read; "" if all are read."""
    images = Dataset.model_construct(path=str(folder))
    return unread(images, [images.model_copy(update={"target_frames": [1]})], _listing(folder))


def _datasets_of(folder: Path) -> Iterator[FoundDataset]:
    """Yield the dataset of images, then the dataset of videos, of a folder and its sub-folders."""
    files = _listing(folder)
    hidden = masks(files, _CAPTIONS)
    images, videos = (
        [file for file in files if Path(file).suffix.lower() in endings and file not in hidden]
        for endings in (IMAGE_EXTENSIONS, VIDEO_EXTENSIONS)
    )
    for kind, items in (("images", images), ("videos", videos)):
        if items:
            suffix = f"_{kind}" if images and videos else ""
            yield _dataset(folder, suffix, items, {*files})


def _dataset(folder: Path, suffix: str, items: list[str], files: set[str]) -> FoundDataset:
    """Return the dataset of these items; unreadable items are reported later, by a job.

    Args:
        folder: folder of the dataset.
        suffix: suffix of the dataset's name.
        items: names of the images or videos.
        files: names of all files in the folder.
    """
    repeats, words = kohya(folder) or (1, Path(os.path.abspath(folder)).name)  # noqa: PTH100
    stems = [splitext(item)[0] for item in items]
    beside = {ending: sum(f"{stem}{ending}" in files for stem in stems) for ending in _CAPTIONS}
    ending = max(_CAPTIONS, key=beside.__getitem__)
    listed = None if beside[ending] else next((name for name in _LISTS if name in files), None)
    rows = metadata_of(slug(words), str(folder / listed), str(folder))[0] if listed else {}
    bare = [
        item
        for item, stem in zip(items, stems, strict=True)
        if not (item in rows or stem in rows if listed else f"{stem}{ending}" in files)
    ]
    video = Path(items[0]).suffix.lower() in VIDEO_EXTENSIONS
    sizes, clips, texts = [], [], []
    for item in items[:: -(-len(items) // (_PROBED_VIDEOS if video else _PROBED_IMAGES))]:
        stem = splitext(item)[0]
        row = rows.get(item) or rows.get(stem)
        if row is not None:
            texts += (row.caption or row.tags or "").splitlines()[:1]
        elif item not in bare:
            with suppress(SourceError):  # a build reports unreadable files
                lines = read_caption(str(folder / f"{stem}{ending}")).splitlines()
                texts += [line.strip() for line in lines if line.strip()][:1]
        place = str(folder / item)
        with suppress(SourceError):
            media = probe_video(place) if video else probe_image(place)
            sizes.append((media.width, media.height))
            seconds = float(Timing.parse(media.timing).seconds) if media.timing else 0.0
            if video:
                rate = round(media.frames / seconds, 3) if seconds else 0.0
                clips.append((media.frames, rate))
    sizes.sort(key=lambda size: size[0] * size[1])
    name, words = f"{slug(words)}{suffix}", words.replace("_", " ").strip() or "dataset"
    settings = Dataset.model_construct(
        path=str(folder),
        num_repeats=repeats,
        caption_extension=ending,
        metadata_file=str(folder / listed) if listed else None,
        target_frames=[1] if video else None,
    )
    return FoundDataset(name, words, settings, len(items), bare, texts, sizes, clips)
