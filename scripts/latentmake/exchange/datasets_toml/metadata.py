"""sd-scripts' metadata files, as far as they say which images are items."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from posixpath import commonpath, dirname, join, normpath, relpath, splitext
from typing import Any, NamedTuple

from latentmake.regular import read_regular
from latentmake.sources.items import IMAGE_EXTENSIONS

__all__ = ["Metadata", "read_metadata"]


class Metadata(NamedTuple):
    """Metadata file of a folder, compared to the images in it.

    Attributes:
        root: folder of the images.
        captioned: whether caption files (.txt) lie beside some.
        unused: an ending that no file there has.
        nested: whether images lie in sub-folders that no entry names.
        blank: whether some image has neither caption nor tags.
        others: number of images without an entry.
        strangers: number of entries without an image.
    """

    root: str
    captioned: bool = False
    unused: str = ".none"
    nested: bool = False
    blank: bool = False
    others: int = 0
    strangers: int = 0


def read_metadata(file: str, folder: str | None) -> Metadata:
    """Compare a metadata file with the images.

    Args:
        file: .json (image -> caption, tags) or .jsonl (an object a line).
        folder: that of the images; None where the file names them by absolute paths.
    """
    entries = _entries(Path(file))
    paths = {_absolute(join(folder or "", key)) for key in entries}
    if folder is not None and not all(_is_below(path, folder) for path in paths):
        folder = None
    if folder is None:
        folders = {dirname(path) for path in paths}
        folder = commonpath(folders) if folders else "."
    top = _absolute(folder)
    named = {normpath(join(top, key)) for key in entries}  # as a build reads them
    there: set[str] = set()
    beside: set[str] = set()
    for place, _, names in os.walk(top):
        for name in names:
            path, ending = normpath(join(place, name)), splitext(name)[1]
            (there if ending.lower() in IMAGE_EXTENSIONS else beside).add(path)
    nested = any(dirname(path) != top for path in there - named) and not any(
        dirname(path) != top for path in named
    )
    if nested:
        there = {path for path in there if dirname(path) == top}
    endings = {splitext(path)[1] for path in beside}
    texts = [(each.get("caption") or "", each.get("tags") or "") for each in entries.values()]
    return Metadata(
        folder,
        captioned=any(f"{splitext(path)[0]}.txt" in beside for path in there),
        unused=next(x for x in (".none", ".unused", ".no-caption") if x not in endings),
        nested=nested,
        blank=any(not str(caption).strip() and not str(tags).strip() for caption, tags in texts),
        others=len(there - named),
        strangers=len(named - there),
    )


def _absolute(path: str) -> str:
    return normpath(Path(path).absolute())


def _is_below(path: str, folder: str) -> bool:
    return not relpath(path, folder).startswith("..")


def _entries(path: Path) -> Mapping[str, dict[str, Any]]:
    """Return the entries of a file; none where it cannot be read, which the plan says."""
    try:
        text = read_regular(path).decode("utf-8-sig")
        if path.suffix.lower() != ".jsonl":
            values = json.loads(text)
        else:
            lines = [json.loads(line) for line in text.splitlines() if line.strip()]
            values = {each["image_path"]: each for each in lines}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}
    if not isinstance(values, dict):
        return {}
    return {str(key): each for key, each in values.items() if isinstance(each, dict)}
