"""Folders as other trainers read them: which files are items there, and where ours would differ.

musubi-tuner and sd-scripts take the files of a folder itself, by endings in lower or upper case.
Sources: `glob_images` and `glob_videos` of musubi-tuner's dataset/media_utils.py, `glob_images` of
sd-scripts' library/train_util.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import splitext

from latentmake.errors import ConfigError
from latentmake.files.media import VIDEO_EXTENSIONS
from latentmake.sources.items import IMAGE_EXTENSIONS

__all__ = ["THEIR_IMAGES", "Folder", "Places", "look_into"]

THEIR_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif")
"""Endings of images that both take."""

_SMALL = 1 << 20  # bytes; more is no caption


@dataclass
class Folder:
    """Files of a folder as another trainer sees them.

    Attributes:
        items: names of its images or videos.
        nested: whether sub-folders hold some too, which it does not read.
        others: names of files that we would take and it would not.
        without: items without a caption file.
        strays: caption files without an item.
        blank: captions without text.
    """

    items: list[str] = field(default_factory=list)
    nested: bool = False
    others: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    blank: list[str] = field(default_factory=list)


class Places:
    """Paths of a dataset file, as our configuration writes them.

    Relative ones are looked for where the build works, then beside the file.

    Attributes:
        missing: those that are not there.
    """

    def __init__(self, file: Path) -> None:
        self._beside = file.parent
        self.missing: list[str] = []

    def find(self, path: str) -> str:
        """Return where a path of the file leads; itself where nothing is there."""
        for place in (Path(path), self._beside / path):
            if place.exists():
                return str(place)
        self.missing.append(path)
        return path

    @staticmethod
    def written(path: str) -> str:
        """Return a path for our configuration, which replaces `~` and `$NAME`."""
        path = path.replace("$", "$$")
        return f"./{path}" if path.startswith("~") else path


def look_into(folder: str, caption_extension: str | None, *, video: bool) -> Folder:
    """List a folder; captions are read where there is an ending for them.

    Raises:
        ConfigError: it cannot be read.
    """
    found = Folder()
    if not Path(folder).is_dir():
        return found
    ours = VIDEO_EXTENSIONS if video else IMAGE_EXTENSIONS
    theirs = tuple(VIDEO_EXTENSIONS) if video else THEIR_IMAGES
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if not entry.is_dir())
        found.nested = _is_nested(folder, ours)
    except OSError as error:
        hint = "give your user permission to read it"
        what = f"cannot be read ({error.strerror})"
        raise ConfigError(what, where=folder, hint=hint) from None
    for name in names:
        ending = splitext(name)[1]
        if ending in theirs or (ending.upper() == ending and ending.lower() in theirs):
            found.items.append(name)
        elif ending.lower() in ours and not name.startswith("."):
            found.others.append(name)
    if caption_extension:
        _captions(found, folder, names, caption_extension)
    return found


def _is_nested(folder: str, endings: frozenset[str]) -> bool:
    return any(
        splitext(name)[1].lower() in endings
        for place, _, names in os.walk(folder)
        if place != folder
        for name in names
    )


def _captions(found: Folder, folder: str, names: Sequence[str], ending: str) -> None:
    captions = {name.removesuffix(ending): name for name in names if name.endswith(ending)}
    stems = {splitext(name)[0] for name in found.items}
    found.without = [name for name in found.items if splitext(name)[0] not in captions]
    found.strays = [name for stem, name in captions.items() if stem not in stems]
    for stem in sorted(stems & captions.keys()):
        path = Path(folder) / captions[stem]
        try:
            if path.stat().st_size > _SMALL:
                continue
            text = path.read_bytes().strip()
        except OSError:
            continue  # the plan says so
        if not text:
            found.blank.append(captions[stem])
