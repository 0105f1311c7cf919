"""musubi-tuner's lists (JSONL), written anew where ours would be read otherwise.

Its relative paths are those of the folder in which its scripts were started; columns that mean
something here mean nothing there.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, normpath
from typing import Any, NamedTuple

from latentmake.exchange.datasets_toml.folders import Places
from latentmake.regular import open_regular

__all__ = ["List", "read_list"]

_CONTROL = "control_path"


class List(NamedTuple):
    """A list.

    Attributes:
        rows: what a list of ours says for the same; empty where the list itself does.
        flat: whether its files lie elsewhere than directly in the folder of the list.
        skips: whether some row is none that can be used here.
        blank: whether some caption is empty.
    """

    rows: list[dict[str, Any]]
    flat: bool
    skips: bool
    blank: bool


def read_list(path: str, places: Places, *, video: bool) -> List:
    """Read a list of images or videos.

    What is no row is left for the plan to name, which reads the file as well.
    """
    kind = "video_path" if video else "image_path"
    rows: list[dict[str, Any]] = []
    same, skips, blank = True, False, False
    for values in _objects(Path(path)):
        name = None if values is None else values.get(kind, values.get(f"{kind}_0"))
        if values is None or not isinstance(name, str):
            skips = True
            continue
        row: dict[str, Any] = {}
        for key, value in values.items():
            if key in (kind, f"{kind}_0"):
                row[kind] = _absolute(name, places)
            elif key == "caption":
                row[key] = value
            elif key.startswith((_CONTROL, kind)) and isinstance(value, str):
                row[key] = _absolute(value, places)
        blank |= not str(row.get("caption", "")).strip()
        rows.append(row)
        same &= row == values
    if not rows:
        return List([], flat=False, skips=skips, blank=blank)
    root = str(Path(path).parent.absolute()) if same else None
    flat = any(dirname(row[kind]) != root for row in rows)
    return List([] if same else rows, flat, skips, blank)


def _absolute(path: str, places: Places) -> str:
    return normpath(Path(places.find(path)).absolute())


def _objects(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the object of each line that is not empty; None where there is none."""
    try:
        file, _ = open_regular(path)
        with io.BufferedReader(file) as lines:
            for line in lines:
                if not line.strip():
                    continue
                try:
                    values = json.loads(line)
                except (ValueError, RecursionError):
                    values = None
                yield values if isinstance(values, dict) else None
    except (OSError, ValueError):
        return  # the plan says so
