"""Datasets that are lists: a JSON or JSONL file whose rows name videos or images.

A plan reads the list, and the stat of each file that it names. One bad row stops no other.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from posixpath import basename, splitext
from stat import S_ISDIR, S_ISREG

from latentmake import digest
from latentmake.config.datasets import Dataset
from latentmake.errors import DatasetError
from latentmake.files.media import NPZ, UNREAD_FORMATS, VIDEO_EXTENSIONS, unread_format
from latentmake.geometry.clips import Span
from latentmake.index.memo import SourceStat, source_stat
from latentmake.sources.caption_pipeline import newlines
from latentmake.sources.item import (
    CAPTION,
    IMAGE,
    IMAGE_EXTENSIONS,
    LAYER,
    TAGS,
    Fault,
    File,
    Item,
    Row,
    Scan,
)
from latentmake.sources.metadata import Entry, name_of, records, refusing
from latentmake.sources.names import unusable_name
from latentmake.sources.rows import columns_of, layers_of, row_of


def scan(name: str, dataset: Dataset) -> Scan:
    """Read a list, and the stats of the files that its rows name and of the captions beside them.

    Raises:
        DatasetError: the list is missing, is no file, or cannot be read.
    """
    where, place = f"datasets.{name}.path", Path(dataset.path)
    try:
        found = place.stat()
    except OSError as error:
        what = f"the list {place} cannot be read ({error.strerror})"
        raise DatasetError(what, where=where, hint="correct the path") from None
    if not S_ISREG(found.st_mode):
        what = f"the list {place} is a pipe, a socket or a device and no file"
        raise DatasetError(what, where=where, hint="correct the path")
    root, stat = os.path.normpath(place.parent), source_stat(found)
    rows, faults = _rows(dataset, where, root)
    stats: dict[str, SourceStat] = {}
    for number, row in enumerate(rows):
        if row.path not in stats:
            stats[row.path] = _stat(row.path)
        if row.relative and stats[row.path].size == _NOWHERE:
            rows[number] = row = _from_here(row, root)
        for path in (row.path, *_beside(row, dataset), *_further(row, root)):
            if path not in stats:
                stats[path] = _stat(path)
    entries = [(str(place), *stat), *((path, *found) for path, found in stats.items())]
    folders = {path.rpartition("/")[0] for path in stats if not path.startswith(f"{root}/")}
    return Scan(root, entries, digest.of_entries(entries), rows, faults, (root, *sorted(folders)))


def _from_here(row: Row, root: str) -> Row:
    """Return a row with its path from the working directory, where that is there."""
    name = row.path.removeprefix(f"{root}/")
    if _stat(name).size == _NOWHERE:
        return row
    below = name_of(os.path.abspath(name), _roots(root))  # noqa: PTH100 -- links stay
    return row._replace(path=f"./{name}" if below.startswith("/") else f"{root}/{below}")


_NOWHERE, _SPECIAL, _FOLDER, _CLOSED = -1, -2, -3, -4  # in the place of a size
_ODD = {
    _NOWHERE: ("does not exist", "correct the row, or take it out"),
    _SPECIAL: ("is a pipe, a socket or a device and no file", "correct the row, or take it out"),
    _FOLDER: ("is a folder", "name a file in it, or take the row out"),
    _CLOSED: ("cannot be read", "check its permissions"),
}


def _stat(path: str) -> SourceStat:
    try:
        found = os.stat(path)  # noqa: PTH116 -- of each row
    except (FileNotFoundError, NotADirectoryError):
        return SourceStat(_NOWHERE, 0, 0, 0)
    except OSError:  # no permission, a name too long, links in a circle
        return SourceStat(_CLOSED, 0, 0, 0)
    if S_ISREG(found.st_mode):
        return source_stat(found)
    return SourceStat(_FOLDER if S_ISDIR(found.st_mode) else _SPECIAL, 0, 0, 0)


# -- reading --------------------------------------------------------------------------------------


_STRICT = json.JSONEncoder(allow_nan=False, ensure_ascii=False)


def _rows(dataset: Dataset, where: str, root: str) -> tuple[list[Row], list[Fault]]:
    """Read the rows of a list; one bad row stops no other."""
    rows: list[Row] = []
    faults: list[Fault] = []
    roots = _roots(root)
    with refusing(dataset.path, where):
        for number, key, value in records(Path(dataset.path)):
            if key is not None and isinstance(value, dict):  # sd-scripts' form
                value = {"path": key, **value}
            try:
                row = row_of(number, _checked(value), roots, video=dataset.video)
            except ValueError as error:
                hint = "correct the line, or take it out"
                faults.append(Fault(_line(dataset, number), _unnamed(number), str(error), hint))
                continue
            if not row.path.startswith("/"):
                row = row._replace(path=f"{root}/{row.path}")
            rows.append(row)
    return rows, faults


def _checked(value: object) -> object:
    """Return a row; a ValueError says what is wrong with its line, or that no file can hold it."""
    if isinstance(value, ValueError):
        raise value
    try:
        _STRICT.encode(value).encode()
    except UnicodeEncodeError:
        raise ValueError("is not JSON (it holds half a character)") from None
    except RecursionError:
        raise ValueError("is not JSON (it is nested too deeply)") from None
    except ValueError:
        raise ValueError("is not JSON (it holds NaN or infinity)") from None
    return value


def _roots(root: str) -> set[str]:
    """Return the absolute names of a list's folder."""
    return {str(Path(root).absolute()), str(Path(root).resolve())}


def _line(dataset: Dataset, line: int) -> str:
    return f"{dataset.path}, line {line}"


def _unnamed(line: int) -> str:
    """Return the name of a row without a usable one."""
    return f"(line {line})"


def _beside(row: Row, dataset: Dataset) -> list[str]:
    """Return the paths of caption and tags beside a file, as far as its row has none."""
    stem, tags = splitext(row.path)[0], dataset.tags_extension
    found = [stem + dataset.caption_extension] if row.caption is None else []
    return [*found, stem + tags] if tags and row.tags is None else found


def _further(row: Row, root: str) -> list[str]:
    """Return the paths of controls and layers; what is wrong with them is said with the items."""
    found: list[str] = []
    with contextlib.suppress(ValueError):
        found += columns_of(row.others, root, "control_path")
    with contextlib.suppress(ValueError):
        found += layers_of(row.others, root)
    return found


# -- items ----------------------------------------------------------------------------------------


def items(
    name: str, dataset: Dataset, scanned: Scan
) -> tuple[list[Item], list[Fault], dict[str, Entry]]:
    """Make the items of a list that was scanned.

    Returns:
        The items by their stems, the faults of other rows, and stem -> caption and tags of those
        rows that have some.

    Raises:
        DatasetError: it has no row at all.
    """
    rows, faults = scanned.rows or (), list(scanned.faults)
    if not rows and not faults:
        raise DatasetError(
            f"the list {dataset.path} has no row",
            where=f"datasets.{name}.path",
            hint='write an object a line, such as {"video": "a.mp4", "prompt": "a cat"}',
        )
    stats = {path: SourceStat(*stat) for path, *stat in scanned.entries}
    found: dict[str, tuple[Item, int]] = {}
    texts: dict[str, Entry] = {}
    for row in rows:
        where = _line(dataset, row.line)
        try:
            item = _item(dataset, scanned.root, row, stats)
        except ValueError as error:
            hint = "correct the row, or take it out"
            faults.append(Fault(where, _unnamed(row.line), f"{row.path} {error}", hint))
            continue
        if wrong := _fault(dataset, item, row, stats):
            faults.append(Fault(where, item.stem, *wrong))
            continue
        if (first := found.get(item.stem)) is not None:
            what = f"is the same clip as line {first[1]} ({row.path})"
            hint = "take one of them out, or give them different frames"
            if first[0].image != item.image:
                what = f"shares its name {item.stem} with {first[0].image}"
                hint = "rename one of the files"
            faults.append(Fault(where, _unnamed(row.line), what, hint))
            continue
        found[item.stem] = item, row.line
        if row.caption is not None or row.tags is not None:
            texts[item.stem] = Entry(row.caption, row.tags)
    return sorted(item for item, _ in found.values()), sorted(faults), texts


def _item(dataset: Dataset, root: str, row: Row, stats: dict[str, SourceStat]) -> Item:
    beside = splitext(row.path)[0]
    stem = beside.removeprefix(f"{root}/").removeprefix("./").lstrip("/")
    if dataset.flat:
        stem = basename(stem)
    if dataset.video:  # caches of clips lie flat
        stem = stem.replace("/", "_") + row.suffix
    there = {path: stats[path] for path in _beside(row, dataset) if stats[path].size != _NOWHERE}
    files = [File(IMAGE, row.path, stats[row.path])]
    for role, ending in ((CAPTION, dataset.caption_extension), (TAGS, dataset.tags_extension)):
        if (path := f"{beside}{ending}") in there:
            files.append(File(role, path, there[path]))
    if dataset.multiple_target:
        files += [File(LAYER, path, stats[path]) for path in layers_of(row.others, root)]
    item = Item(
        stem,
        tuple(files),
        row=row.others or None,
        place=_line(dataset, row.line),
        window=None if row.start is None and row.end is None else (row.start or 0, row.end),
    )
    if dataset.video:
        span = row.span(dataset.sample_stride)
        item = item._replace(span=None if span == Span() else span)
    if row.caption is not None and not dataset.composed:
        item = item._replace(texts=[newlines(row.caption).strip()])
    elif item.caption is None and dataset.class_tokens is not None:
        item = item._replace(texts=[dataset.class_tokens])
    return item


def _fault(
    dataset: Dataset, item: Item, row: Row, stats: dict[str, SourceStat]
) -> tuple[str, str] | None:
    """Return what is wrong with a row, and the hint."""
    path = row.path
    if fault := unusable_name(f"{item.stem}."):
        return f"{path} {fault}", "rename the file"
    for each in item.files:
        if each.stat.size < 0:
            what, hint = _ODD[each.stat.size]
            return f"{each.path} {what}", hint
    extensions = VIDEO_EXTENSIONS | {NPZ} if dataset.video else IMAGE_EXTENSIONS
    ending = splitext(path)[1].lower()
    if ending not in extensions:
        kind = "video" if dataset.video else "image"
        hint = f"name one of {', '.join(sorted(extensions))}"
        if not dataset.video and ending in VIDEO_EXTENSIONS | {NPZ}:
            hint = "set target_frames for videos, for a model that takes them"
        if not dataset.video and ending in UNREAD_FORMATS:
            what, hint = unread_format(UNREAD_FORMATS[ending])
            return f"{path} {what}", hint
        return f"{path} is no {kind}", hint
    if dataset.composed:
        return None
    demanded = dataset.missing_caption == "error" and dataset.class_tokens is None
    if row.caption is None and item.caption is None and demanded:
        beside = f"{splitext(path)[0]}{dataset.caption_extension}"
        hint = f"give it a `prompt`, write {beside}, or set class_tokens, a caption for all such"
        return f"{path} has no caption", hint
    if item.texts == [""] and dataset.empty_caption == "error":
        return f"{path} has an empty caption", "describe it, or set empty_caption: allow"
    return None
