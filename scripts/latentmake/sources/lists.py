"""Datasets that are lists: a JSON or JSONL file whose rows name videos or images.

Rows are read once, into the memo; then a list costs its stat and one of each file that it names.
One bad row stops no other.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from posixpath import basename, splitext
from stat import S_ISDIR, S_ISREG
from typing import IO

from latentmake.config.datasets import Dataset
from latentmake.errors import DatasetError
from latentmake.files.media import NPZ, UNREAD_FORMATS, VIDEO_EXTENSIONS, unread_format
from latentmake.geometry.clips import Span
from latentmake.index.memo import Entry, Listed, Memo, SourceStat, source_stat
from latentmake.progress import Progress
from latentmake.sources.caption_pipeline import newlines
from latentmake.sources.items import (
    IMAGE_EXTENSIONS,
    Fault,
    Item,
    Scan,
    fingerprint,
)
from latentmake.sources.metadata import json_objects, learned, name_of
from latentmake.sources.names import unusable_name
from latentmake.sources.rows import Row, columns_of, layers_of, row_of

_LARGE = 50_000_000  # bytes of a file whose reading is worth a progress bar
_LONGEST_LINE = 1 << 24  # bytes: more is no row


def scan(name: str, dataset: Dataset, memo: Memo) -> Scan:
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
    rows, faults = _rows(_read(str(place), stat, where, memo), dataset, root)
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
    return Scan(root, entries, fingerprint(entries), rows, faults, (root, *sorted(folders)))


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


def _read(file: str, stat: SourceStat, where: str, memo: Memo) -> Listed:
    """Return the rows of a list as the memo keeps them; it is read only if its stat is new."""
    return learned(memo, f"{file}\nrows", stat, lambda: _kept(Path(file)), where=where)


def _kept(path: Path) -> Iterator[Entry]:
    """Yield the number of each row with its object in JSON, or what is wrong with the line."""
    size = path.stat().st_size
    bar = Progress(total=size, desc=path.name, unit="B", unit_scale=True, disable=size < _LARGE)
    with path.open("rb") as stream, bar as progress:
        read = _lines if path.suffix.lower() == ".jsonl" else _objects
        for count, (number, text, fault) in enumerate(read(stream)):
            if count % 4096 == 0:
                progress.update(stream.tell() - progress.n)
            yield Entry(f"{number:012d}", text, fault)
        progress.update(size - progress.n)


def _lines(stream: IO[bytes]) -> Iterator[tuple[int, str | None, str | None]]:
    for number, line in enumerate(iter(lambda: stream.readline(_LONGEST_LINE + 1), b""), 1):
        if len(line) > _LONGEST_LINE:
            raise ValueError(f"has a line {number} of more than {_LONGEST_LINE} bytes")
        try:
            text = line.decode("utf-8-sig")
            if text.strip():
                yield number, _json(json.loads(text)), None
        except UnicodeDecodeError as error:
            yield number, None, f"is not UTF-8 (byte {error.start + 1})"
        except json.JSONDecodeError as error:
            whole = line.endswith(b"\n")
            yield number, None, f"is not JSON ({error.msg})" if whole else "ends in the middle"
        except UnicodeEncodeError:
            yield number, None, "is not JSON (it holds half a character)"
        except ValueError:
            yield number, None, "is not JSON (it holds NaN, infinity or a number that is too long)"
        except RecursionError:
            yield number, None, "is not JSON (it is nested too deeply)"


def _objects(stream: IO[bytes]) -> Iterator[tuple[int, str | None, str | None]]:
    for number, (key, values) in enumerate(json_objects(stream), 1):
        if key is not None and isinstance(values, dict):  # sd-scripts' form
            values = {"path": key, **values}
        yield number, _json(values), None


def _json(values: object) -> str:
    """Return a row's JSON; a ValueError says that it holds half a character, NaN or infinity."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    text.encode()
    return text


def _rows(listed: Listed, dataset: Dataset, root: str) -> tuple[list[Row], list[Fault]]:
    rows: list[Row] = []
    faults: list[Fault] = []
    roots = _roots(root)
    for number, text, fault in listed.entries():
        line = int(number)
        try:
            if text is None:
                raise ValueError(fault)
            row = row_of(line, json.loads(text), roots, video=dataset.video)
        except ValueError as error:
            hint = "correct the line, or take it out"
            faults.append(Fault(_line(dataset, line), _unnamed(line), str(error), hint))
            continue
        if not row.path.startswith("/"):
            row = row._replace(path=f"{root}/{row.path}")
        rows.append(row)
    return rows, faults


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
            texts[item.stem] = Entry(item.stem, row.caption, row.tags)
    return sorted(item for item, _ in found.values()), sorted(faults), texts


def _item(dataset: Dataset, root: str, row: Row, stats: dict[str, SourceStat]) -> Item:
    beside = splitext(row.path)[0]
    stem = beside.removeprefix(f"{root}/").removeprefix("./").lstrip("/")
    if dataset.flat:
        stem = basename(stem)
    if dataset.video:  # caches of clips lie flat
        stem = stem.replace("/", "_") + row.suffix
    there = {path: stats[path] for path in _beside(row, dataset) if stats[path].size != _NOWHERE}
    caption, tags = (
        path if (path := f"{beside}{ending}") in there else None
        for ending in (dataset.caption_extension, dataset.tags_extension)
    )
    item = Item(
        stem,
        row.path,
        stats[row.path],
        caption,
        there.get(caption or ""),
        tags,
        there.get(tags or ""),
        row=row.others or None,
        place=_line(dataset, row.line),
        window=None if row.start is None and row.end is None else (row.start or 0, row.end),
    )
    if dataset.multiple_target:
        layers = layers_of(row.others, root)
        item = item._replace(
            layers=tuple(layers), layer_stats=tuple(stats[layer] for layer in layers)
        )
    if dataset.video:
        span = row.span(dataset.sample_stride)
        item = item._replace(span=None if span == Span() else span)
    if row.caption is not None and not dataset.composed:
        item = item._replace(texts=[newlines(row.caption).strip()])
    elif caption is None and dataset.class_tokens is not None:
        item = item._replace(texts=[dataset.class_tokens])
    return item


def _fault(
    dataset: Dataset, item: Item, row: Row, stats: dict[str, SourceStat]
) -> tuple[str, str] | None:
    """Return what is wrong with a row, and the hint."""
    path = row.path
    if fault := unusable_name(f"{item.stem}."):
        return f"{path} {fault}", "rename the file"
    for each in (path, item.caption, item.tags, *item.layers):
        if each is not None and stats[each].size < 0:
            what, hint = _ODD[stats[each].size]
            return f"{each} {what}", hint
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
