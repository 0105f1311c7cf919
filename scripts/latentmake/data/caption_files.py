"""Caption files beside pictures: their places, and the reasons not to write there.

Captioners never write these files. Two commands do, because a person asks for it:
`latentmake captions RUN --accept` and `--edit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from posixpath import splitext

from latentmake.base.regular import read_regular
from latentmake.config.datasets import Dataset
from latentmake.data.item import CAPTION, NO_FILE, TAGS, Item, Row


def caption_path(settings: Dataset, item: Item) -> Path:
    """Return the path of an item's caption file, which may not exist yet."""
    return Path(item.caption or f"{splitext(item.image)[0]}{settings.caption_extension}")


def read_if_there(path: Path) -> bytes | None:
    """Return the bytes of a caption file, None if there is none; raises OSError."""
    try:
        return read_regular(path)
    except FileNotFoundError:
        return None


def is_written(item: Item) -> bool:
    """Whether a person wrote the caption of an item, in a file."""
    return any(file.role in (CAPTION, TAGS) for file in item.files)


def awaits(item: Item) -> bool:
    """Whether a captioner must make one of an item's captions, or make it again."""
    return any(file.stat == NO_FILE for file in item.made)


def without_files(dataset: str, settings: Dataset) -> str:
    """Return a line that says why a dataset has no caption files to write; "" if it has."""
    where = f"datasets.{dataset}"
    if settings.remote:
        return f"{where}: lies at a URL, where Latentmake writes nothing; copy it to a disk"
    if settings.is_list:
        return f"{where}: has its captions in {settings.path}; edit that list"
    return ""


def fixed(settings: Dataset, item: Item, rows: Mapping[str, Row]) -> str:
    """Return why the caption file of an item must not be written; "" if it may be.

    `rows` has the rows of a metadata file, by stem.
    """
    path = caption_path(settings, item)
    if path.is_symlink():
        return f"{path} is a link to {path.readlink()}; edit it there"
    if item.stem in rows and not item.caption:
        return f"the caption is in {settings.metadata_file}; edit it there"
    if not item.caption and (tags := item.file(TAGS)):
        return f"only tags are written, in {tags.path}; edit them there"
    return ""
