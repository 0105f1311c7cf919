"""Datasets in folders, as `latentmake init` finds them: images, videos, captions, and the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from posixpath import splitext
from typing import NamedTuple

from latentmake.config.datasets import Dataset
from latentmake.data.folders import kohya, slug
from latentmake.data.item import IMAGE_EXTENSIONS
from latentmake.data.listing import scan
from latentmake.data.lists import metadata_of
from latentmake.data.unread import masks, unread
from latentmake.errors import DatasetError, SourceError
from latentmake.files.media import VIDEO_EXTENSIONS, probe_image, probe_video
from latentmake.geometry.clips import Timing
from latentmake.reports.plan_report import counted

_CAPTIONS = (".txt", ".caption", ".TXT")
_SHOWN = 3  # items without a caption that are named
_LISTS = ("metadata.jsonl", "metadata.csv")
_PROBED_IMAGES, _PROBED_VIDEOS = 500, 50
_LONGEST = 33  # frames of a clip: two seconds of Wan


class Found(NamedTuple):
    """A dataset in a folder.

    Attributes:
        name: for the configuration.
        words: the folder's name as a caption: `10_sks man` and `sks_man` are `sks man`.
        path: the folder.
        repeats: of kohya's `10_sks man`.
        video: whether it holds videos.
        items: number of images, or of videos.
        bare: those of them without a caption file, and without an entry of `listed`.
        texts: captions of those that were probed, of each file the first line.
        ending: of the caption files.
        listed: name of its metadata file, if any.
        sizes: width and height of those that were probed, in pixels, the smallest first.
        clips: frames, and frames a second, of the videos among them.
    """

    name: str
    words: str
    path: Path
    repeats: int
    video: bool
    items: int
    bare: list[str]
    texts: list[str]
    ending: str
    listed: str | None
    sizes: list[tuple[int, int]]
    clips: list[tuple[int, float]]

    @property
    def counted(self) -> str:
        """Its items for people: `30 images`."""
        return counted(self.items, "video" if self.video else "image")

    @property
    def captioned(self) -> int:
        """Number of its items with a caption."""
        return self.items - len(self.bare)

    @property
    def described(self) -> str:
        """One line for people: `30 images, 28 captions, 640 x 480 to 1920 x 1080 pixels`."""
        ends = dict.fromkeys(f"{w} x {h}" for w, h in (*self.sizes[:1], *self.sizes[-1:]))
        sizes = f", {' to '.join(ends)} pixels" if ends else ""
        return f"{self.counted}, {counted(self.captioned, 'caption')}{sizes}"

    @property
    def lacking(self) -> str:
        """One line for people about the captions that are missing."""
        more = f" and {len(self.bare) - _SHOWN} more" * (len(self.bare) > _SHOWN)
        names = ", ".join(self.bare[:_SHOWN]) + more
        file = self.path / (self.listed or Path(self.bare[0]).with_suffix(self.ending))
        first = "it" if len(self.bare) == 1 else "the first"
        many = counted(len(self.bare), "caption")
        return f"{many} of {self.path} ({names}): write {first} into {file}"

    @property
    def settings(self) -> Dataset:
        """Its section of the configuration, as far as that says which files are read."""
        return Dataset.model_construct(
            path=str(self.path),
            caption_extension=self.ending,
            metadata_file=str(self.path / self.listed) if self.listed else None,
            target_frames=[1] if self.video else None,
        )

    @property
    def fps(self) -> float | None:
        """Frames a second of its videos; None where they differ, or are not known."""
        rates = {rate for _, rate in self.clips}
        return rates.pop() or None if len(rates) == 1 else None

    def target_frames(self, fps: float) -> int:
        """Return the length of a clip, 4 n + 1 frames, that nine of ten videos have.

        Args:
            fps: frames a second that the model knows.
        """
        lengths = sorted(int(n * min(1.0, fps / rate) if rate else n) for n, rate in self.clips)
        shortest = lengths[len(lengths) // 10] if lengths else 1
        return max(1, (min(shortest, _LONGEST) - 1) // 4 * 4 + 1)


def found_in(folder: Path) -> list[Found]:
    """Return the datasets of a folder: its images, its videos, or kohya's folders in it.

    Raises:
        DatasetError: there is no such folder, or it holds neither images nor videos.
    """
    if folder.is_file():
        hint = "name the folder of the images or videos"
        if folder.suffix.lower() == ".toml":
            hint = f"for a dataset file of another trainer run `latentmake import {folder}`"
        raise DatasetError("is a file, not a folder", where=folder, hint=hint)
    if not folder.is_dir():
        raise DatasetError("this folder does not exist", where=folder, hint="correct the path")
    inside = [each for each in _folders(folder) if kohya(each)]
    found = [one for each in inside for one in _found(each)] or list(_found(folder))
    if not found:
        known = ", ".join(sorted(IMAGE_EXTENSIONS | VIDEO_EXTENSIONS))
        hint = _unread(folder) or f"put images or videos there ({known})"
        raise DatasetError("holds neither images nor videos", where=folder, hint=hint)
    return found


def left_out(folder: Path, found: Sequence[Found]) -> Iterator[str]:
    """Yield what `found_in` leaves out of a folder, a line each with the reason."""
    taken = {each.path: [x.settings for x in found if x.path == each.path] for each in found}
    for path, (first, *others) in taken.items():
        if told := unread(first, others, _listing(path)):
            yield f"{path}: {told}"
    if folder in taken:
        return
    why = "its name begins with no number of repeats, as kohya's do that are beside it"
    for each in _folders(folder):
        if each not in taken:
            nothing = _unread(each) or "it holds neither images nor videos"
            yield f"{each}: left out, {why if [*_found(each)] else nothing}"
    kinds, beside = IMAGE_EXTENSIONS | VIDEO_EXTENSIONS, (Path(x) for x in _listing(folder))
    if files := [x for x in beside if len(x.parts) == 1 and x.suffix.lower() in kinds]:
        yield f"{folder}: left out {counted(len(files), 'file')} beside kohya's folders"


def _folders(folder: Path) -> list[Path]:
    return sorted(x for x in folder.iterdir() if x.is_dir() and not x.name.startswith("."))


def _listing(folder: Path) -> list[str]:
    """Return the files of a folder and its sub-folders, as a dataset lists them."""
    entries = scan(slug(folder.name), Dataset.model_construct(path=str(folder))).entries
    return sorted(path for path, size, *_ in entries if size >= 0)


def _unread(folder: Path) -> str:
    """Return a sentence on the files of a folder that are not read; "" where there is none."""
    images = Dataset.model_construct(path=str(folder))
    return unread(images, [images.model_copy(update={"target_frames": [1]})], _listing(folder))


def _found(folder: Path) -> Iterator[Found]:
    """Yield the dataset of images, then that of videos, of a folder with its sub-folders."""
    files = _listing(folder)
    hidden = masks(files, _CAPTIONS)
    images, videos = (
        [x for x in files if Path(x).suffix.lower() in known and x not in hidden]
        for known in (IMAGE_EXTENSIONS, VIDEO_EXTENSIONS)
    )
    for kind, items in (("images", images), ("videos", videos)):
        if items:
            yield _dataset(folder, f"_{kind}" * bool(images and videos), items, {*files})


def _dataset(folder: Path, kind: str, items: list[str], files: set[str]) -> Found:
    """Return the dataset of some files; a job names those that cannot be read."""
    repeats, words = kohya(folder) or (1, Path(os.path.abspath(folder)).name)  # noqa: PTH100
    stems = [splitext(each)[0] for each in items]
    beside = {x: sum(f"{each}{x}" in files for each in stems) for x in _CAPTIONS}
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
    for each in items[:: -(-len(items) // (_PROBED_VIDEOS if video else _PROBED_IMAGES))]:
        stem, row = splitext(each)[0], rows.get(each) or rows.get(splitext(each)[0])
        if row is not None:
            texts += (row.caption or row.tags or "").splitlines()[:1]
        elif each not in bare:
            texts += _first_line(folder / f"{stem}{ending}")
        place = str(folder / each)
        with suppress(SourceError):
            media = probe_video(place) if video else probe_image(place)
            sizes.append((media.width, media.height))
            seconds = float(Timing.parse(media.timing).seconds) if media.timing else 0.0
            clips += [(media.frames, round(media.frames / seconds, 3) if seconds else 0.0)] * video
    sizes.sort(key=lambda size: size[0] * size[1])
    name, words = f"{slug(words)}{kind}", words.replace("_", " ").strip() or "dataset"
    counts = (len(items), bare, texts, ending, listed)
    return Found(name, words, folder, repeats, video, *counts, sizes, clips)


def _first_line(file: Path) -> list[str]:
    """Return the first line of a caption file; a build names a file that cannot be read."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError):
        return []
    return [line.strip() for line in text.splitlines() if line.strip()][:1]
