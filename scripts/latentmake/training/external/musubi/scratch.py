"""Scratch folder of a caching script: its dataset of some items, and the files that it shall write.

Each job has a folder of its own, and in it each attempt: a script that outlived a killed job writes
where nobody reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import shutil
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import tomli_w

from latentmake.caches.inputs import Reading
from latentmake.data.item import BUCKET, IMAGE, Item
from latentmake.files import atomic
from latentmake.geometry.buckets import Size
from latentmake.plan.orders import KEPT_SECONDS, Order
from latentmake.plan.target import Target
from latentmake.training.external.musubi.dataset_toml import shapes

_FOLDER = Path(".latentmake/musubi")
_HOST = re.sub(r"\W", "-", socket.gethostname())
_NO_SIZE = Size(512, 512)  # of a caption without pictures, on which nothing depends


@dataclass(frozen=True)
class Awaited:
    """A cache file that a script shall write.

    Attributes:
        reading: of its item.
        target: that it will be.
        key: of the target.
        path: where the script writes it.
        source: path of the item in the script's dataset, and in its messages.
        caption: that is encoded; None for latents.
    """

    reading: Reading
    target: Target
    key: str
    path: Path
    source: str
    caption: str | None = None


@dataclass
class _Block:
    """One `[[datasets]]` block: its resolution, its lines, and the names of the files in it."""

    size: Size
    lines: list[dict[str, str]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)


class Scratch:
    """Folder of one job; it is removed at the end, with those that killed jobs left behind."""

    def __init__(self, order: Order) -> None:
        self._order = order
        name = f"{_HOST}.{order.name}.{uuid.uuid4().hex[:8]}"
        self._folder = (_FOLDER / name).absolute()
        self._attempts = 0

    def __enter__(self) -> Self:
        _FOLDER.mkdir(parents=True, exist_ok=True)
        _remove_abandoned()
        # Held before there is a folder: another job never finds that without.
        self._lock = _lock_of(self._folder).open("wb")
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._folder.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        _lock_of(self._folder).unlink(missing_ok=True)
        self._lock.close()

    def write(self, wanted: Sequence[Reading], batch_size: int) -> tuple[Path, list[Awaited]]:
        """Write the dataset of some items for the next attempt.

        Args:
            wanted: the items; their missing targets are asked for.
            batch_size: items that the script may encode at once.

        Returns:
            The path of the TOML, and the files to be written, in the order of the dataset.
        """
        self._attempts += 1
        folder = self._folder / str(self._attempts)
        folder.mkdir()
        blocks: dict[str, _Block] = {}
        awaited: dict[str, list[Awaited]] = {}
        for reading in wanted:
            line = self._line(reading)
            places: set[str] = set()
            for target, key in reading.missing.items():
                name = self._name(line, target)
                place = _place(target, name, blocks)
                block = blocks.setdefault(place, _Block(target.size or _NO_SIZE))
                block.names.add(name)
                if place not in places:
                    block.lines.append(line)
                    places.add(place)
                awaited.setdefault(place, []).append(
                    Awaited(
                        reading,
                        target,
                        key,
                        folder / place / name,
                        line[f"{self._kind}_path"],
                        line["caption"] if self._order.kind == "text" else None,
                    )
                )
        toml = folder / "dataset.toml"
        tables = [self._table(folder / place, block, batch_size) for place, block in blocks.items()]
        atomic.write(toml, tomli_w.dumps({"datasets": tables}).encode())
        return toml, [each for place in blocks for each in awaited[place]]

    @property
    def _kind(self) -> str:
        return "video" if self._order.dataset_settings.video else "image"

    def _table(self, folder: Path, block: _Block, batch_size: int) -> dict[str, Any]:
        """Write the list of a block; return its TOML table."""
        listed = folder.with_suffix(".jsonl")
        atomic.write(listed, "".join(f"{json.dumps(line)}\n" for line in block.lines).encode())
        return {
            f"{self._kind}_jsonl_file": str(listed),
            "cache_directory": str(folder),
            "resolution": list(block.size),
            "batch_size": batch_size,
            **shapes(self._order.dataset_settings),
        }

    def _line(self, reading: Reading) -> dict[str, str]:
        """Return the line of an item in a list, with its caption if that is encoded."""
        item, kind = reading.item, self._kind
        if self._order.kind == "text":
            caption, picture = str(reading.samples[0].content), item.file(BUCKET)
        else:
            caption, picture = "", item.file(IMAGE)
        if picture is None:
            # Only the name of this file is needed, for that of the cache.
            return {f"{kind}_path": _absolute(f"{item.stem}.png"), "caption": caption}
        return {
            f"{kind}_path": _absolute(picture.path),
            "caption": caption,
            **{f"image_path_{n}": _absolute(x) for n, x in enumerate(item.layers, 1)},
            **_controls(item),
        }

    def _name(self, line: dict[str, str], target: Target) -> str:
        """Return the name that the script gives to the cache of a target."""
        if self._order.kind == "text":
            return f"{Path(line[f'{self._kind}_path']).stem}{self._order.layout.text_ending}"
        return Path(target.path).name


def _controls(item: Item) -> dict[str, str]:
    if len(item.controls) == 1:
        return {"control_path": _absolute(item.controls[0])}
    return {f"control_path_{n}": _absolute(path) for n, path in enumerate(item.controls)}


def _place(target: Target, name: str, blocks: dict[str, _Block]) -> str:
    """Return the folder of a target: one for each size, and for each text of one item."""
    found = f"{target.size.width}x{target.size.height}" if target.size else "text"
    place, number = found, 0
    while place in blocks and name in blocks[place].names:
        number += 1
        place = f"{found}-{number}"
    return place


def _absolute(path: str) -> str:
    return str(Path(path).absolute())


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _remove_abandoned() -> None:
    """Remove the folders of jobs that were killed: on this machine, or a week ago.

    Not every file system shows the locks of other machines.
    """
    limit = time.time() - KEPT_SECONDS
    for folder in _FOLDER.glob("*"):
        with contextlib.suppress(OSError):
            if not folder.is_dir():
                continue
            if not folder.name.startswith(f"{_HOST}.") and folder.stat().st_mtime > limit:
                continue
            with _lock_of(folder).open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                _lock_of(folder).unlink(missing_ok=True)
