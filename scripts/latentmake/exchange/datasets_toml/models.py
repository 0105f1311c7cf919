"""Model and trainer of an imported run: which a dataset file does not name.

Its caches do, where there are some: by their names, tensors and dtypes. Weights are placeholders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from latentmake import layouts
from latentmake.config.architectures import ARCHITECTURES, WAN, Architecture
from latentmake.config.mistakes import nearest
from latentmake.errors import ConfigError
from latentmake.files.safetensors import Head, read_head

__all__ = ["Chosen", "choose", "model_of", "tasks_of", "trainer_of"]

_HEADERS = 20  # files whose headers are read
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class Chosen(NamedTuple):
    """Architecture of a model.

    Attributes:
        spec: facts about it.
        why: where it was seen; "" where it was given.
        head: header of a cache of latents, if there is one.
    """

    spec: Architecture
    why: str
    head: Head | None = None

    @property
    def program(self) -> str:
        """Key of the configuration for the trainer's folder."""
        return "sd_scripts" if self.spec.scripts is None else "musubi_tuner"


def _rows(*, musubi: bool) -> list[Architecture]:
    """Return the architectures that musubi-tuner or sd-scripts trains, the usual one first."""
    rows = [row for row in ARCHITECTURES.values() if (row.scripts is not None) == musubi]
    usual = WAN if musubi else ARCHITECTURES["sdxl"]
    return [usual, *(row for row in rows if row is not usual)]


def _ending(row: Architecture) -> str:
    """Return the end of the names of an architecture's caches of latents."""
    if row.scripts is not None:
        return f"_{row.scripts.suffix}.safetensors"
    return layouts.of(f"sdscripts-{row.name}").latents_ending


def choose(name: str | None, folders: Collection[str], *, musubi: bool) -> Chosen:
    """Return the architecture of a name, or that of the caches in some folders.

    Args:
        name: as the configuration has it; None where the user named none.
        folders: of caches.
        musubi: whether the dataset file is musubi-tuner's.

    Raises:
        ConfigError: the trainer of the file does not train it.
    """
    rows = _rows(musubi=musubi)
    named = {row.name: row for row in rows}
    if name is not None and name not in named:
        trainer = "musubi-tuner" if musubi else "sd-scripts"
        what = f"{name} is no architecture of {trainer}, whose file this is"
        known = name in (WAN.name, *ARCHITECTURES)  # of the other trainer
        guess = None if known else nearest(re.sub(r"\W+", "_", name), named)
        hint = f"did you mean {guess}?" if guess else f"use one of {', '.join(named)}"
        raise ConfigError(what, where="architecture", hint=hint)
    asked = rows if name is None else [named[name]]
    for path in _files(folders):
        for row in asked:
            if path.name.endswith(_ending(row)):
                why = f"as {path} says" if name is None else ""
                return Chosen(row, why, _head(path))
    return Chosen(asked[0], "the usual one, since nothing tells" if name is None else "")


def _files(folders: Collection[str]) -> Iterator[Path]:
    for folder in folders:
        for place, _, names in os.walk(folder):
            yield from (Path(place, name) for name in sorted(names)[:_HEADERS])


def _head(path: Path) -> Head | None:
    try:
        return read_head(path)
    except (OSError, ValueError):
        return None  # an npz, or damaged


def tasks_of(chosen: Chosen, task: str | None) -> list[str | None]:
    """Return what the model's `task` may be, the likeliest first.

    Of several that fit, the first is the one whose tensors a cache holds.
    """
    if task is not None or chosen.spec.scripts is None:
        return [task]
    entries = chosen.head.entries if chosen.head else {}

    def seen(name: str) -> int:
        asked = chosen.spec.scripts.versions[name].tensors if chosen.spec.scripts else ()
        found = sum(any(entry.startswith(each) for entry in entries) for each in asked)
        return found if found == len(asked) else -1

    names = sorted(chosen.spec.scripts.versions, key=seen, reverse=True)
    return [name or None for name in names]


def model_of(chosen: Chosen, task: str | None) -> dict[str, Any]:
    """Return the section of a model whose weights are placeholders."""
    spec = chosen.spec
    folder = f"models/{spec.name}"
    if spec.scripts is None:
        names = spec.text_encoders
        if not names and spec.strategies is not None and spec.strategies.text is not None:
            networks = spec.strategies.text.networks
            names = tuple(sorted({x.key for x in networks if x.key.startswith("text")}))
        encoders = ["text_encoder", *(f"text_encoder_{n + 2}" for n in range(len(names) - 1))]
        return {
            "architecture": spec.name,
            "layout": "sdscripts",
            "vae": f"{folder}/vae",
            "text": [f"{folder}/{each}" for each in encoders],
            "checkpoint": f"{folder}/model.safetensors",
        }
    scripts = spec.scripts
    found: dict[str, Any] = {"architecture": spec.name}
    if task is not None:
        found["task"] = task
    needed = scripts.versions.get(task or "")
    wanted = needed.needs if needed else ()
    files = (*scripts.latents.files, *scripts.text.files, *scripts.training.files)
    keys = [x.key for x in files if x.required or x.key in wanted]
    texts = sorted({key for key in keys if key.startswith("text")})
    for key in dict.fromkeys(each for each in keys if each not in texts):
        found[key] = f"{folder}/{key}.safetensors"
    places: list[Any] = [f"{folder}/text_{n + 1}.safetensors" for n in range(len(texts))]
    if spec.encodes:
        places = [{"path": each, "tokenizer": f"{folder}/tokenizer"} for each in places]
    if places:
        found["text"] = places
    dtype = _dtype(chosen.head)
    settable = spec.encodes or scripts.latents.dtype_flag is not None
    if dtype not in (None, "bfloat16") and settable:
        found["vae_dtype"] = dtype
    return found


def _dtype(head: Head | None) -> str | None:
    """Return the dtype of latents by a header."""
    for name, entry in (head.entries if head else {}).items():
        if name.startswith("latents_"):
            return _DTYPES.get(str(entry.get("dtype")))
    return None


def trainer_of(chosen: Chosen, batch_size: int) -> dict[str, Any]:
    """Return the section of a trainer."""
    key = "train_batch_size" if chosen.spec.scripts is None else "batch_size"
    kind = "sdscripts" if chosen.spec.scripts is None else "musubi"
    return {"kind": kind} | ({key: batch_size} if batch_size > 1 else {})
