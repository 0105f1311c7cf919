"""CachedClipDataset: cached latents and text of a built Wan run as a torch dataset."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch.utils.data import Dataset as TorchDataset

from latentmake.errors import CacheError, DatasetError
from latentmake.files.cachefile import corruption_of

SPLITS = ("train", "validation", "all")
_DELETE = "delete it and run the build's command again, which encodes it anew"
_HINT = "run the build's command again, which makes it anew"


class _Pair(NamedTuple):
    """Paths of one cache of latents and of its text, and the manifest's row."""

    latents: str
    text: str
    row: int


class CachedClipDataset(TorchDataset[dict[str, Any]]):
    """Latents and embeddings of a run that was built, as its manifest lists them.

    Nothing is encoded, and neither VAE nor text encoder is loaded. It can be pickled, and holds no
    open file.

    Args:
        manifest: `runs/{run}/manifest.jsonl`, or the folder `runs/{run}`.
        split: `train`: all items but those held out for validation; `validation`: those;
            `all`: both.
        resolution: of the run's resolutions the one to read (`832x480`); by default all of them.

    Raises:
        DatasetError: the manifest is missing or damaged, or has no such item.
    """

    def __init__(
        self,
        manifest: str | os.PathLike[str],
        split: str = "train",
        resolution: str | None = None,
    ) -> None:
        path = Path(manifest)
        self.manifest = path / "manifest.jsonl" if path.is_dir() else path
        if split not in SPLITS:
            raise DatasetError(
                f"split={split!r} is unknown",
                where="CachedClipDataset",
                hint=f"use one of {SPLITS}",
            )
        self._checked: set[str] = set()
        # Paths in a manifest are below the folder of the build: that of `runs`.
        self._root = self._folder_of_build()
        self.rows = [row for row in self._rows() if "aside" not in row and _belongs(row, split)]
        self._pairs = [
            pair
            for number, row in enumerate(self.rows)
            for pair in self._pairs_of(number, row, resolution)
            for _ in range(row.get("repeats", 1))
        ]
        if not self._pairs:
            what = f"has no item of split={split!r}"
            what += f" and resolution={resolution!r}" if resolution else ""
            hint = "see the run's datasets, resolutions and `validation`"
            raise DatasetError(what, where=self.manifest, hint=hint)

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read the caches of one item.

        Returns:
            `latents` [16, f, h, w], normalised as the network takes them, float32; `text` [T, D],
            without padding, in the dtype of the cache; `prompt`; `row` of the manifest; and, where
            the model has them, `latents_image` [20, f, h, w], `latents_control` and `clip`.

        Raises:
            CacheError: a file is gone or damaged.
        """
        pair = self._pairs[index]
        item: dict[str, Any] = {}
        tensors, _ = self._read(pair.latents)
        for name, tensor in tensors.items():
            kind = name.partition("_")[0] if name.startswith("clip") else name.rsplit("_", 2)[0]
            item[kind] = tensor.float()
        tensors, metadata = self._read(pair.text)
        if "latents" not in item or len(tensors) != 1:
            what = "is no cache of a Wan model"
            raise CacheError(what, where=pair.latents, hint="name the manifest of a Wan run")
        (item["text"],) = tensors.values()
        return {**item, "prompt": metadata.get("caption1", ""), "row": self.rows[pair.row]}

    def _read(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return tensors and metadata of a cache file, whose checksum is compared once."""
        path = self._root / name
        if name not in self._checked:
            with contextlib.suppress(OSError):  # which reading tells too
                if damage := corruption_of(path):
                    raise CacheError(f"is damaged: {damage}", where=path, hint=_DELETE)
            self._checked.add(name)
        return _read(path)

    def _folder_of_build(self) -> Path:
        place = self.manifest.absolute().parent
        return place.parent.parent if place.parent.name == "runs" else Path()

    def _rows(self) -> list[dict[str, Any]]:
        try:
            lines = self.manifest.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            hint = "build the run first: snakemake caches_{run}"
            raise DatasetError("cannot be read", where=self.manifest, hint=hint) from None
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                row["stem"], row["source"]
            except (ValueError, LookupError, TypeError):
                what = f"line {number} is damaged"
                raise DatasetError(what, where=self.manifest, hint=_HINT) from None
            rows.append(row)
        return rows

    def _pairs_of(self, number: int, row: dict[str, Any], resolution: str | None) -> list[_Pair]:
        latents, text = row.get("latents"), row.get("text")
        if not isinstance(latents, dict) or not isinstance(text, dict):
            what = "is not the manifest of a Wan run"
            hint = "name that of a run whose model has a `task`"
            raise DatasetError(what, where=self.manifest, hint=hint)
        return [
            _Pair(path, text[name], number)
            for name, paths in latents.items()
            if resolution in (None, name)
            for path in paths
        ]


def _belongs(row: dict[str, Any], split: str) -> bool:
    held_out = bool(row.get("validation", False))
    return split == "all" or held_out == (split == "validation")


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a cache file."""
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        what = f"cannot be read ({error})"
        raise CacheError(what, where=path, hint=_HINT) from None
