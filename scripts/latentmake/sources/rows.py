"""Rows of a list of videos or images: the file, its caption, and the part of a video that is used.

{"video": "films/a.mp4", "prompt": "a street", "first_frame": 120, "frames": 81}
{"video": "films/a.mp4", "prompt": "the same street by night", "start": 60.0, "end": 75.5}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from posixpath import isabs, normpath
from typing import Any

from latentmake.errors import shortened
from latentmake.sources import metadata
from latentmake.sources.item import Row
from latentmake.sources.metadata import name_of, text_of

NAMES = tuple(dict.fromkeys(("video", "video_path", "image", *metadata.NAMES)))
"""Columns that may name the file; the first of them counts."""

CAPTIONS = ("prompt", "caption", "text")
"""Columns that may hold the caption; likewise."""

SPANS = ("first_frame", "frames", "stride", "start", "end")
"""Columns of the part of a video that is used."""

_MOST = 2**31 - 1  # frames, or seconds


def row_of(line: int, values: object, roots: Collection[str], *, video: bool) -> Row:
    """Return the row of an object.

    Args:
        line: its number.
        values: the object.
        roots: absolute names of the list's folder.
        video: whether it names a video, so that the columns of its part count.

    Raises:
        ValueError: says what is wrong with it.
    """
    if not isinstance(values, Mapping):
        raise ValueError("is no object with the name of a file")
    others = {key: value for key, value in values.items() if value is not None}
    name = _first(others, NAMES)
    if name is None:
        raise ValueError("names no file (video or file_name or path)")
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"names no file, but {shortened(repr(name))}")
    caption = text_of(_first(others, CAPTIONS), "\n", "its row")
    tags = text_of(others.pop("tags", None), ", ", "its row")
    name = name.strip()
    relative = not isabs(name)
    row = Row(line, _path(name, roots), caption, tags, others, relative=relative)
    if not video or others.keys().isdisjoint(SPANS):
        return row
    spans = {key: others.pop(key, None) for key in SPANS}
    row = row._replace(
        first=_whole("first_frame", spans["first_frame"], 0),
        frames=_whole("frames", spans["frames"], 1),
        stride=_whole("stride", spans["stride"], 1),
        start=_seconds("start", spans["start"]),
        end=_seconds("end", spans["end"]),
    )
    _check_span(row)
    return row


def columns_of(row: Mapping[str, Any], root: str, name: str) -> list[str]:
    """Return the files in the columns `name`, `name_0`, `name_1`, ... of a row, in their order.

    Args:
        row: its columns.
        root: the folder of the list.
        name: beginning of the columns' names.

    Raises:
        ValueError: says what is wrong with them.
    """
    columns: dict[int, str] = {}
    for column, value in row.items():
        if column != name and not column.startswith(f"{name}_"):
            continue
        digits = column.removeprefix(name).removeprefix("_") or "0"
        if not (digits.isascii() and digits.isdecimal()):
            raise ValueError(f"has a column {shortened(column)}, which does not end in a number")
        if int(digits) in columns:
            raise ValueError(f"has two columns {name} of the number {int(digits)}")
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"has {shortened(column)}: {shortened(repr(value))}, which is no path")
        columns[int(digits)] = value.strip()
    roots = {str(Path(root).absolute()), str(Path(root).resolve())}
    paths = [_path(columns[number], roots) for number in sorted(columns)]
    return [path if path.startswith("/") else f"{root}/{path}" for path in paths]


def layers_of(row: Mapping[str, Any], root: str) -> list[str]:
    """Return the paths in the columns `image_path_1`, `image_path_2`, ... of a row.

    Raises:
        ValueError: says what is wrong with them.
    """
    own = {column: value for column, value in row.items() if column.startswith("image_path_")}
    paths = columns_of(own, root, "image_path")
    for number in range(1, len(paths) + 1):
        if f"image_path_{number}" not in own:
            raise ValueError(f"has {shortened(max(own))}, and no image_path_{number}")
    return paths


def _first(values: dict[str, Any], names: Collection[str]) -> Any:
    """Take the first of some columns out of a row."""
    found = next((name for name in names if name in values), None)
    return None if found is None else values.pop(found)


def _path(name: str, roots: Collection[str]) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError("has a name that is not UTF-8") from None
    if not name.isprintable() and any(ord(character) < 32 for character in name):
        raise ValueError("has a control character in its name")
    if "://" in name:
        raise ValueError(f"names {shortened(name)}, and lists name files on a disk alone")
    path = name_of(name, roots)
    if isabs(path):  # caches are named after it, and stay in their folder
        return "/" + normpath(path).lstrip("/")
    if path == ".." or path.startswith("../"):
        what = f"names {shortened(name)}, which leaves the list's folder"
        raise ValueError(f"{what}: write its absolute path")
    return path


def _whole(key: str, value: object, least: int) -> int | None:
    if value is None:
        return None
    shown = shortened(repr(value))
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"has {key}: {shown}, which is no whole number")
    if value < least:
        raise ValueError(f"has {key}: {shown}, which is less than {least}")
    if value > _MOST:
        raise ValueError(f"has {key}: {shown}, which is more than {_MOST}")
    return value


def _seconds(key: str, value: object) -> float | None:
    if value is None:
        return None
    shown = shortened(repr(value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"has {key}: {shown}, which is no number of seconds")
    if value > _MOST:
        raise ValueError(f"has {key}: {shown}, which is more than {_MOST}")
    if not value >= 0:  # NaN, too
        raise ValueError(f"has {key}: {shown}, which is less than 0")
    return float(value)


def _check_span(row: Row) -> None:
    if row.frames is not None and row.frames % 4 != 1:
        below = max((row.frames - 1) // 4 * 4 + 1, 1)
        raise ValueError(
            f"has frames: {row.frames}, which is not 4 n + 1: use {below} or {below + 4}"
        )
    if row.first is not None and (row.start is not None or row.end is not None):
        raise ValueError("has first_frame and seconds: leave out one of them")
    if row.end is not None and row.frames is not None:
        raise ValueError("has frames and end: leave out one of them")
    if row.end is not None and row.end <= (row.start or 0):
        raise ValueError(f"ends at {row.end:g} s, which is not after its start")
