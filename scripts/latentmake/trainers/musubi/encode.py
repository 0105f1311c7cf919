"""Encoding by musubi-tuner's own caching scripts, which the driver runs.

The scripts cannot tell which caches are stale. So they get a dataset of the missing items only, and
an empty cache folder.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import tomli_w

from latentmake.base import atomic, digest
from latentmake.data.item import BUCKET, IMAGE, Item
from latentmake.formats.cachefile import CAPTION
from latentmake.geometry.buckets import Size
from latentmake.layouts.names import frames_and_sides
from latentmake.trainers.launched.encode import Content, Encoding, PendingTarget, parsed
from latentmake.trainers.launched.installation import Installation
from latentmake.trainers.launched.order import absolute, with_paths
from latentmake.trainers.musubi.command import caching_arguments
from latentmake.trainers.musubi.deploy import shapes
from latentmake.trainers.musubi.order import find

_NO_SIZE = Size(512, 512)  # for captions without pictures: the script needs one, and ignores it


class ScriptsEncoding(Encoding):
    """Encoding by a caching script, with a dataset for each size, and for each text of an item."""

    program = "musubi-tuner"

    def __init__(self, *options: Any) -> None:
        self._owners: dict[tuple[str, str], str] = {}  # (folder, name) -> item with that name
        super().__init__(*options)

    def amount(self, pending: PendingTarget) -> int:
        """Return the frames' pixels, or the caption's letters, times the number of pictures."""
        item, target, clip = pending.item, pending.target, pending.target.clip
        pictures = 1 + len(item.layers) + len(item.controls)
        if pending.caption is not None:
            return len(pending.caption) * pictures
        return math.prod(self._size(item, target.size)) * (clip.frames if clip else 1) * pictures

    def place(self, pending: PendingTarget) -> Path:
        size, number, item = pending.target.size, 0, self._path(pending.item)
        # The script names a cache by its file's name only; the item may lie in a sub-folder.
        base, own = self.order.layout.base(pending.item.stem), Path(item).stem
        name = f"{own}{Path(pending.target.path).name.removeprefix(base)}"
        if self.order.kind == "text":
            name = f"{own}{self.order.layout.text_ending}"
        first = place = f"{size.width}x{size.height}" if size else "text"
        while (
            str(self.folder / place / name) in self.left
            or self._owners.setdefault((place, own), item) != item
        ):
            number += 1
            place = f"{first}-{number}"
        return self.folder / place / name

    def start(self) -> tuple[Installation, dict[str, Any]]:
        order, settings = self.order, self.order.musubi_tuner
        scripts = order.model_settings.spec.scripts
        assert settings is not None
        program = find(settings, scripts)
        script = program.script(scripts.caching(order.kind).name)
        workers = settings.num_workers or self.threads
        files = self._write(settings.batch_size or 1)
        arguments = caching_arguments(
            order.model_settings,
            order.kind,
            str(self.folder / "dataset.toml"),
            lambda weights: absolute(weights.local),
            {
                "--batch_size": settings.batch_size,
                "--num_workers": workers,
                "--keep_cache": True,
            },
        )
        return program, {
            "folder": str(script.parent),
            "script": str(script),
            "arguments": with_paths(arguments),  # the script runs in another folder
            "workers": workers,
            "files": files,
        }

    def _write(self, batch_size: int) -> dict[str, dict[str, list[str]]]:
        """Write the dataset; return folder -> path of the item, without its ending -> files."""
        lines: dict[Path, dict[str, dict[str, Any]]] = {}
        sizes: dict[Path, Size] = {}
        for path, pending in self.left.items():
            folder = Path(path).parent
            sizes[folder] = pending.target.size or _NO_SIZE
            items = lines.setdefault(folder, {})
            line = items.setdefault(self._path(pending.item), self._line(pending))
            line["files"].append(path)
        tables = []
        for folder, items in lines.items():
            listed = folder.with_suffix(".jsonl")
            text = "".join(f"{json.dumps(line)}\n" for line in items.values())
            atomic.write(listed, text.encode())
            tables.append(
                {
                    f"{self._kind}_jsonl_file": str(listed),
                    "cache_directory": str(folder),
                    "resolution": list(sizes[folder]),
                    "batch_size": batch_size,
                    **shapes(self.order.dataset_settings),
                }
            )
        atomic.write(self.folder / "dataset.toml", tomli_w.dumps({"datasets": tables}).encode())
        return {
            str(folder): {
                os.path.splitext(path)[0]: line["files"]  # noqa: PTH122 -- as musubi-tuner does
                for path, line in items.items()
            }
            for folder, items in lines.items()
        }

    @property
    def _kind(self) -> str:
        return "video" if self.order.dataset_settings.video else "image"

    def _path(self, item: Item) -> str:
        """Return the path of an item in the script's dataset."""
        picture = item.file(BUCKET if self.order.kind == "text" else IMAGE)
        # Without a picture this file need not exist: the script only names the cache after it.
        return absolute(f"{item.stem}.png" if picture is None else picture.path)

    def _line(self, pending: PendingTarget) -> dict[str, Any]:
        """Return an item's line of the list, with its caption if captions are encoded."""
        item = pending.item
        line: dict[str, Any] = {
            f"{self._kind}_path": self._path(item),
            "caption": pending.caption or "",
            "files": [],
        }
        if self.order.kind == "text" and item.file(BUCKET) is None:
            return line
        line |= {f"image_path_{n}": absolute(path) for n, path in enumerate(item.layers, 1)}
        if len(item.controls) == 1:
            return line | {"control_path": absolute(item.controls[0])}
        return line | {f"control_path_{n}": absolute(path) for n, path in enumerate(item.controls)}

    def _size(self, item: Item, size: Size | None) -> Size:
        assert item.media is not None and size is not None
        stored = Size(item.media.width, item.media.height)
        return self.order.layout.size(stored, size, self.order.dataset_settings)

    def content(self, path: Path, pending: PendingTarget) -> Content:
        # Read, not memory-mapped: a second pass of the script may cut the file short.
        tensors, metadata = parsed(path.read_bytes())
        patterns = self._patterns(pending)
        for pattern in patterns:
            if not any(re.match(pattern, name) for name in tensors):
                raise ValueError(f"holds no tensor {pattern}*, but {', '.join(tensors)}")
        scripts = self.order.model_settings.spec.scripts
        if (header := metadata.get("architecture")) != scripts.header:
            raise ValueError(f"is one of the architecture {header}, not {scripts.header}")
        if pending.caption is not None:
            if metadata.get("caption1") != pending.caption:
                raise ValueError("is of another caption")
            # musubi-tuner keeps our key when it writes another caption into the file.
            metadata[CAPTION] = digest.of_bytes(pending.caption.encode())
        elif scripts.counts_controls:
            cached = sum(name.startswith("latents_control_") for name in tensors)
            given = len(pending.item.controls)
            if cached != given:
                words = f"holds latents of {cached} control images, and the item has {given}"
                raise ValueError(words)
        nonzero = [name for name in tensors if re.match(patterns[0], name)]
        return tensors, metadata, nonzero

    def _patterns(self, pending: PendingTarget) -> list[str]:
        """Return patterns that must match the beginning of some tensor's name in the file."""
        model = self.order.model_settings
        if pending.caption is not None:
            return [re.escape(name) for name in model.spec.scripts.tensors]
        size = self._size(pending.item, pending.target.size)
        frames, sides = frames_and_sides(model, size, pending.target.clip)
        shape = f"({frames}x)?{sides}"  # without frames in names of FLUX.2
        return [f"latents_{shape}_", *map(re.escape, model.version.tensors)]
