"""Datasets in a folder, as `latentmake init` finds them: images or videos, captions, sizes."""

from __future__ import annotations

import json
import re
import statistics
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from latentmake.errors import DatasetError, SourceError
from latentmake.files.media import VIDEO_EXTENSIONS, opened_video, probe_image, probe_video
from latentmake.sources.items import IMAGE_EXTENSIONS

_CAPTIONS = (".txt", ".caption")
_LISTS = ("metadata.jsonl", "metadata.csv")
_REPEATS = re.compile(r"([1-9]\d{0,5})_(.*\S)")
_PROBED_IMAGES, _PROBED_VIDEOS = 200, 5
_MOST_FRAMES = 33  # of a clip: two seconds of Wan


class Found(NamedTuple):
    """A dataset in a folder.

    Attributes:
        name: for the configuration.
        path: the folder.
        items: number of images, or of videos.
        captioned: number of those with a caption file, or an entry of `listed`.
        ending: of the caption files.
        listed: name of its metadata file, if any.
        side: median of the square roots of the areas of its images or frames, in pixels.
        small: length of the shorter side of the smallest, in pixels.
        frames: fewest frames of its videos; 0 for images.
        fps: frames a second of its videos; None where they differ.
        repeats: of kohya's `10_sks man`.
    """

    name: str
    path: Path
    items: int
    captioned: int
    ending: str = ".txt"
    listed: str | None = None
    side: int = 0
    small: int = 0
    frames: int = 0
    fps: float | None = None
    repeats: int = 1

    @property
    def words(self) -> str:
        """The folder's name as a caption: `10_sks man` and `sks_man` are `sks man`."""
        return (_kohya(self.path) or (1, self.path.name))[1].replace("_", " ")

    @property
    def line(self) -> str:
        """One line for people: `data/cats: 30 images, 28 captions`."""
        kind = "video" if self.frames else "image"
        captions = f"{self.captioned} caption{'s' * (self.captioned != 1)}"
        return f"{self.path}: {self.items} {kind}{'s' * (self.items != 1)}, {captions}"

    def target_frames(self) -> int:
        """Return the length of a clip that each of its videos has, in frames: 4 n + 1."""
        return (min(self.frames, _MOST_FRAMES) - 1) // 4 * 4 + 1


def slug(name: str) -> str:
    """Return a name for the configuration: `Michael Gove` becomes `michael_gove`."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "_", plain.lower()).strip("_") or "dataset"


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
    if folder.suffix.lower() == ".toml":
        hint = f"run `latentmake import {folder}` for a dataset file of another trainer"
        raise DatasetError("is a file and no folder", where=folder, hint=hint)
    if not folder.is_dir():
        raise DatasetError("there is no such folder", where=folder, hint="correct the path")
    inside = [each for each in sorted(folder.iterdir()) if each.is_dir() and _kohya(each)]
    found = [one for each in inside for one in _found(each)] or list(_found(folder))
    if not found:
        known = ", ".join(sorted(IMAGE_EXTENSIONS | VIDEO_EXTENSIONS))
        hint = f"put images or videos there ({known})"
        raise DatasetError("holds neither images nor videos", where=folder, hint=hint)
    return found


def _found(folder: Path) -> Iterator[Found]:
    """Yield the dataset of images, then that of videos, of a folder with its sub-folders."""
    files = [each for each in sorted(folder.rglob("*")) if each.is_file()]
    files = [each for each in files if not any(part[0] == "." for part in each.parts[-2:])]
    images = [each for each in files if each.suffix.lower() in IMAGE_EXTENSIONS]
    videos = [each for each in files if each.suffix.lower() in VIDEO_EXTENSIONS]
    named, repeats = slug((_kohya(folder) or (1, folder.name))[1]), (_kohya(folder) or (1, ""))[0]
    for kind, of_kind in (("images", images), ("videos", videos)):
        if not of_kind:
            continue
        name = f"{named}_{kind}" if images and videos else named
        found = Found(name, folder, len(of_kind), *_captions(folder, of_kind), repeats=repeats)
        yield found._replace(**(_of_images(images) if of_kind is images else _of_videos(videos)))


def _captions(folder: Path, items: list[Path]) -> tuple[int, str, str | None]:
    """Return how many items have a caption, the ending of their files, and the metadata file."""
    counts = {
        ending: sum(each.with_suffix(ending).is_file() for each in items) for ending in _CAPTIONS
    }
    ending, count = max(counts.items(), key=lambda each: each[1])
    listed = next((name for name in _LISTS if (folder / name).is_file()), None)
    if count == 0 and listed is not None:
        with (folder / listed).open("rb") as file:
            rows = sum(1 for line in file if line.strip()) - listed.endswith(".csv")
        return min(rows, len(items)), ".txt", listed
    return count, ending if count else ".txt", None


def _of_images(images: list[Path]) -> dict[str, Any]:
    sizes = []
    for each in images[:: max(1, len(images) // _PROBED_IMAGES)]:
        try:
            media = probe_image(str(each))
        except SourceError:
            continue  # its job names it
        sizes.append((media.width, media.height))
    return _sides(sizes)


def _of_videos(videos: list[Path]) -> dict[str, Any]:
    sizes, rates, frames = [], Counter[float](), []
    for each in videos[:: max(1, len(videos) // _PROBED_VIDEOS)]:
        try:
            media = probe_video(str(each))
            with each.open("rb") as file, opened_video(file, str(each)) as (_, stream):
                rates[round(float(stream.average_rate or 0), 3)] += 1
        except SourceError:
            continue
        sizes.append((media.width, media.height))
        frames.append(media.frames)
    fps = next(iter(rates)) if len(rates) == 1 else None
    return {**_sides(sizes), "frames": min(frames, default=1), "fps": fps or None}


def _sides(sizes: list[tuple[int, int]]) -> dict[str, int]:
    if not sizes:
        return {}
    side = statistics.median((width * height) ** 0.5 for width, height in sizes)
    return {"side": round(side), "small": min(map(min, sizes))}


def json_of(path: Path) -> dict[str, Any]:
    """Return a JSON object in a file; {} where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
