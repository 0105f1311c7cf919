"""Datasets in a folder, as `latentmake init` finds them: images or videos, captions, sizes."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from latentmake.data.item import IMAGE_EXTENSIONS
from latentmake.errors import DatasetError, SourceError
from latentmake.files.media import VIDEO_EXTENSIONS, opened_video, probe_image, probe_video
from latentmake.reports.plan_report import counted

_CAPTIONS = (".txt", ".caption")
_LISTS = ("metadata.jsonl", "metadata.csv")
_REPEATS = re.compile(r"([1-9]\d{0,5})_(.*\S)")
_PROBED_IMAGES, _PROBED_VIDEOS = 500, 50
_BLANK = 64  # bytes: a caption file that may hold no text
_LONGEST = 33  # frames of a clip: two seconds of Wan


class Found(NamedTuple):
    """A dataset in a folder.

    Attributes:
        name: for the configuration.
        path: the folder.
        items: number of images, or of videos.
        captioned: number of those with a caption file, or with an entry of `listed`.
        blank: number of caption files without text.
        ending: of the caption files.
        listed: name of its metadata file, if any.
        sizes: width and height of those that were probed, in pixels.
        clips: likewise frames, and frames a second; empty for images.
        repeats: of kohya's `10_sks man`.
    """

    name: str
    path: Path
    items: int
    captioned: int
    blank: int = 0
    ending: str = ".txt"
    listed: str | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    clips: tuple[tuple[int, float], ...] = ()
    repeats: int = 1

    @property
    def video(self) -> bool:
        """Whether it holds videos."""
        return bool(self.clips)

    @property
    def words(self) -> str:
        """The folder's name as a caption: `10_sks man` and `sks_man` are `sks man`."""
        return (_kohya(self.path) or (1, self.path.absolute().name))[1].replace("_", " ")

    @property
    def counted(self) -> str:
        """Its items for people: `30 images`."""
        return counted(self.items, "video" if self.video else "image")

    @property
    def sides(self) -> list[float]:
        """Sides of squares of the same areas, in pixels, the smallest first."""
        return sorted((width * height) ** 0.5 for width, height in self.sizes)

    @property
    def described(self) -> str:
        """One line for people: `30 images, 28 captions, 640 x 480 to 1920 x 1080 pixels`."""
        areas = sorted(self.sizes, key=lambda size: size[0] * size[1])
        ends = dict.fromkeys(f"{w} x {h}" for w, h in (*areas[:1], *areas[-1:]))
        sizes = f", {' to '.join(ends)} pixels" if ends else ""
        return f"{self.counted}, {counted(self.captioned, 'caption')}{sizes}"

    @property
    def fps(self) -> float | None:
        """Frames a second of its videos; None where they differ, or are not known."""
        rates = {rate for _, rate in self.clips}
        return next(iter(rates)) or None if len(rates) == 1 else None

    def target_frames(self, fps: float) -> int:
        """Return the length of a clip, 4 n + 1 frames, that nine of ten videos have.

        Args:
            fps: frames a second that the model knows.
        """
        ends = sorted(int(n * min(1.0, fps / rate) if rate else n) for n, rate in self.clips)
        return max(1, (min((ends or [1])[len(ends) // 10], _LONGEST) - 1) // 4 * 4 + 1)


def slug(name: str) -> str:
    """Return a name for the configuration: `Michael Gove` becomes `michael_gove`."""
    plain = unicodedata.normalize("NFKD", name.replace("ß", "ss")).encode("ascii", "ignore")
    return re.sub(r"[^a-z0-9]+", "_", plain.decode().lower()).strip("_") or "dataset"


def _kohya(folder: Path) -> tuple[int, str] | None:
    """Return repeats and words of a folder that is named as kohya's are; None of others.

    Source: `extract_dreambooth_params` of sd-scripts' library/config_util.py.
    """
    match = _REPEATS.fullmatch(folder.name)
    return (int(match[1]), match[2]) if match else None


def found_in(folder: Path) -> list[Found]:
    """Return the datasets of a folder: its images, its videos, or kohya's folders in it.

    Raises:
        DatasetError: there is no such folder, or it holds neither images nor videos.
    """
    if folder.is_file():
        hint = "name the folder of the images or videos"
        if folder.suffix.lower() in (".toml", ".json"):
            hint = f"for a dataset file of another trainer run `latentmake import {folder}`"
        raise DatasetError("is a file, not a folder", where=folder, hint=hint)
    if not folder.is_dir():
        raise DatasetError("this folder does not exist", where=folder, hint="correct the path")
    inside = [each for each in sorted(folder.iterdir()) if each.is_dir() and _kohya(each)]
    found = [one for each in inside for one in _found(each)] or list(_found(folder))
    if not found:
        known = ", ".join(sorted(IMAGE_EXTENSIONS | VIDEO_EXTENSIONS))
        hint = f"put images or videos there ({known})"
        raise DatasetError("holds neither images nor videos", where=folder, hint=hint)
    return found


def _found(folder: Path) -> Iterator[Found]:
    """Yield the dataset of images, then that of videos, of a folder with its sub-folders."""
    below = [each.relative_to(folder) for each in sorted(folder.rglob("*")) if each.is_file()]
    files = [folder / each for each in below if not any(x.startswith(".") for x in each.parts)]
    images = [each for each in files if each.suffix.lower() in IMAGE_EXTENSIONS]
    videos = [each for each in files if each.suffix.lower() in VIDEO_EXTENSIONS]
    repeats, words = _kohya(folder) or (1, folder.absolute().name)
    for kind, items in (("images", images), ("videos", videos)):
        if items:
            name = f"{slug(words)}_{kind}" if images and videos else slug(words)
            found = _captions(Found(name, folder, len(items), 0, repeats=repeats), items)
            yield _probed(found, items, videos=items is videos)


def _captions(found: Found, items: list[Path]) -> Found:
    """Add the captions, from files beside the items or from a metadata file."""
    files = {ending: [each.with_suffix(ending) for each in items] for ending in _CAPTIONS}
    there = {ending: [x for x in paths if x.is_file()] for ending, paths in files.items()}
    ending, captions = max(there.items(), key=lambda each: len(each[1]))
    listed = next((name for name in _LISTS if (found.path / name).is_file()), None)
    if not captions and listed is not None:
        with (found.path / listed).open("rb") as file:
            rows = sum(1 for line in file if line.strip()) - listed.endswith(".csv")
        return found._replace(captioned=min(rows, len(items)), listed=listed)
    blank = sum(x.stat().st_size < _BLANK and not x.read_bytes().strip() for x in captions)
    ending = ending if captions else ".txt"
    return found._replace(captioned=len(captions), blank=blank, ending=ending)


def _probed(found: Found, items: list[Path], *, videos: bool) -> Found:
    """Add sizes, lengths and frame rates of some items; a job names those that cannot be read."""
    sizes, clips = [], []
    for each in map(
        str, items[:: -(-len(items) // (_PROBED_VIDEOS if videos else _PROBED_IMAGES))]
    ):
        with suppress(SourceError):
            media = probe_video(each) if videos else probe_image(each)
            if videos:
                with opened_video(each) as (_, stream, _):
                    clips.append((media.frames, round(float(stream.average_rate or 0), 3)))
            sizes.append((media.width, media.height))
    return found._replace(sizes=tuple(sizes), clips=tuple(clips) or ((1, 0.0),) * videos)
