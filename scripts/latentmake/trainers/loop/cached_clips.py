"""Cached clips and cut clips as torch datasets, for your own training loops."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset as TorchDataset

from latentmake.base.errors import DatasetError, SourceError
from latentmake.formats import npz
from latentmake.formats.safetensors import read_head
from latentmake.models.files import T5_LENGTH
from latentmake.runs.order import caption_in
from latentmake.runs.rows import rows_of
from latentmake.trainers.loop.caches import FORM, WAN, Caches, naming

_SPLITS = {"train": [False], "validation": [True], "all": [False, True]}


class CachedClipDataset(TorchDataset[dict[str, Any]]):
    """Latents and embeddings of a run that has been built, in the order of its manifest.

    The dataset only reads cache files: it loads no VAE and no text encoder. It can be pickled, and
    keeps no file open.

    Args:
        manifest: path `runs/{run}/manifest.jsonl`, or the folder `runs/{run}`.
        split: `train` for all items that are not held out for validation, `validation` for the
            items that are, `all` for both.
        resolution: resolution to read, such as `832x480`; by default all resolutions of the run.

    Raises:
        DatasetError: the manifest has no such item, or its model is no Wan model.
        TrainingError: the manifest is missing or damaged.
        CacheError: a cache file is missing or damaged.
    """

    def __init__(
        self, manifest: str | os.PathLike[str], split: str = "train", resolution: str | None = None
    ) -> None:
        path = Path(manifest)
        self.manifest = path / "manifest.jsonl" if path.is_dir() else path
        if split not in _SPLITS:
            what, hint = f"split={split!r} is unknown", f"use one of {', '.join(_SPLITS)}"
            raise DatasetError(what, where="CachedClipDataset", hint=hint)
        rows = [row for row in rows_of(self.manifest) if row.validation in _SPLITS[split]]
        # Paths in a manifest are relative to the folder of the build, in which `runs` lies.
        runs = self.manifest.absolute().parent.parent
        root = str(runs.parent) if runs.name == "runs" else ""
        named = (
            (row, Path(root, path))
            for row in rows
            for size in row.latents
            if resolution in (None, size)
            for path in row.latents_at(size)
        )
        row, path = next(named, (None, path))
        if row is None:
            what = f"has no item of split={split!r}"
            what += f" and resolution={resolution!r}" if resolution else ""
            hint = "see the run's datasets, resolutions and `validation`"
            raise DatasetError(what, where=self.manifest, hint=hint)
        if _names_in(Path(root, row.first_text)) != [*WAN.text]:
            what, hint = "is not the manifest of a Wan run", "name one whose model has a `task`"
            raise DatasetError(what, where=self.manifest, hint=hint)
        latents = {name: 4 if name.startswith("latents") else 2 for name in _names_in(path)}
        tensors = WAN._replace(latents={**WAN.latents, **latents})
        self._caches = Caches(rows, tensors, root=root, resolution=resolution)
        self._order = [
            number for number, row in enumerate(self._caches.rows) for _ in range(row.repeats)
        ]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read the caches of one item; raises CacheError.

        Returns:
            `latents` [16, f, h, w], float32, normalised for the network; `text` [T, D], without
            padding, in the dtype of the cache; `prompt`; `row`, the item's row of the manifest.
            Some models also have `latents_image` [20, f, h, w], `latents_control` and `clip`.
        """
        number = self._order[index]
        item = self._caches[number]
        text = item.pop("text")
        return {
            **{name: tensor.float() for name, tensor in item.items()},
            "text": text,
            "prompt": caption_in(self._caches.examples[number].text.path),
            "row": self._caches.rows[number].model_dump(exclude_unset=True),
        }


class ClipDataset(TorchDataset[dict[str, Any]]):
    """Clips that `clips_{run}` has cut, in the order of `clips/{run}/train.jsonl`.

    Clips of one shape need no `collate_fn`. The dataset can be pickled, and keeps no file open.

    Args:
        source: path of `train.jsonl`, or its folder.

    Raises:
        DatasetError: the list is missing or damaged, or is no list of clips.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        path = Path(source)
        path = path / "train.jsonl" if path.is_dir() else path
        self._folder = path.parent
        try:
            rows = [json.loads(line) for line in path.read_bytes().splitlines()]
            self.clips = [(Path(row["npz"]), str(row["prompt"])) for row in rows]
        except (OSError, ValueError, LookupError, TypeError):
            hint = "run `latentmake build clips_{run}`, which writes it"
            raise DatasetError("is no list of clips", where=path, hint=hint) from None

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return `frames`, float32 [F, 3, H, W] from -1 to 1, and `prompts`, the clip's caption."""
        path, prompt = self.clips[index]
        if not path.is_file():  # its path is relative to another working directory
            path = self._folder / path.name
        try:
            frames = torch.from_numpy(npz.load(path)["frames"]).permute(0, 3, 1, 2)
        except (OSError, ValueError, LookupError):
            hint = "run `latentmake build clips_{run}`, which cuts it again"
            raise SourceError("is missing or damaged", where=path, hint=hint) from None
        return {"frames": frames.float() / 127.5 - 1.0, "prompts": prompt}


def _names_in(path: Path) -> list[str]:
    with naming(str(path)):
        return [re.sub(f"{FORM}$", "", name) for name in read_head(path).entries]


def collate_fn(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make a batch of items of a CachedClipDataset that have one shape.

    Embeddings are padded with zeros to 512 tokens, as Wan's network was trained and as diffusers'
    WanPipeline pads them. If one is longer, they are padded to the longest.

    Returns:
        All tensors of the items, stacked: `latents` [B, 16, f, h, w], `text` [B, 512, D] and
        others. `mask` [B, 512] is true where a caption has tokens. `prompts` and `rows` are lists
        of length B.
    """
    text = torch.nn.utils.rnn.pad_sequence([item["text"] for item in items], batch_first=True)
    text = torch.nn.functional.pad(text, (0, 0, 0, max(0, T5_LENGTH - text.shape[1])))
    lengths = torch.tensor([len(item["text"]) for item in items])
    others = [name for name, value in items[0].items() if isinstance(value, torch.Tensor)]
    return {
        **{name: torch.stack([item[name] for item in items]) for name in others if name != "text"},
        **{f"{name}s": [item[name] for item in items] for name in ("prompt", "row")},
        "text": text,
        "mask": torch.arange(text.shape[1]) < lengths[:, None],
    }
