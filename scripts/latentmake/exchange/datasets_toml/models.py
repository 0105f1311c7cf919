"""Model and trainer of an imported run, which no dataset file names; weights are placeholders."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from latentmake.config.architectures import ARCHITECTURES, WAN
from latentmake.config.rows import Architecture
from latentmake.errors import ConfigError, nearest
from latentmake.layouts.layout import layout_of


def choose(name: str | None, folders: Collection[str], *, musubi: bool) -> tuple[Architecture, str]:
    """Return the architecture of a name, or of the caches in some folders, and how it is known.

    Raises:
        ConfigError: the trainer of the file does not train it.
    """
    usual = WAN if musubi else ARCHITECTURES["sdxl"]
    rows = [row for row in ARCHITECTURES.values() if (row.scripts is not None) == musubi]
    named = {row.name: row for row in [usual, *rows]}
    if name in named:
        return named[name], ""
    if name is not None:
        trainer = "musubi-tuner" if musubi else "sd-scripts"
        what = f"{name} is no architecture of {trainer}, whose file this is"
        known = name in (WAN.name, *ARCHITECTURES)  # of the other trainer
        guess = None if known else nearest(re.sub(r"\W+", "_", name), named)
        hint = f"did you mean {guess}?" if guess else f"use one of {', '.join(named)}"
        raise ConfigError(what, where="--architecture", hint=hint)
    for folder in folders:
        for row in named.values():
            if any(Path(folder.replace("$$", "$")).rglob(f"*{_ending(row)}")):
                return row, f"as the caches in {folder} are"
    return usual, "the usual one"


def _ending(row: Architecture) -> str:
    """Return the end of the names of an architecture's caches of latents."""
    if row.scripts is not None:
        return f"x[0-9][0-9][0-9][0-9]_{row.scripts.suffix}.safetensors"
    return layout_of(f"sdscripts-{row.name}").latents_ending


def tasks_of(spec: Architecture) -> list[str | None]:
    """Return what the model's `task` may be."""
    return [None] if spec.scripts is None else [name or None for name in spec.scripts.versions]


def model_of(spec: Architecture, task: str | None) -> dict[str, Any]:
    """Return the section of a model whose weights are placeholders."""
    folder = f"models/{spec.name}"
    scripts = spec.scripts
    if scripts is None:
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
    found: dict[str, Any] = {"architecture": spec.name} | ({"task": task} if task else {})
    version = scripts.versions.get(task or "")
    wanted = version.needs if version else ()
    files = (*scripts.latents.files, *scripts.text.files, *scripts.training.files)
    keys = [x.key for x in files if x.required or x.key in wanted]
    texts = sorted({key for key in keys if key.startswith("text")})
    found |= {key: f"{folder}/{key}.safetensors" for key in keys if key not in texts}
    places: list[Any] = [f"{folder}/text_{n + 1}.safetensors" for n in range(len(texts))]
    if spec.encodes:
        places = [{"path": each, "tokenizer": f"{folder}/tokenizer"} for each in places]
    return found | ({"text": places} if places else {})


def trainer_of(spec: Architecture, batch_size: int) -> dict[str, Any]:
    """Return the section of a trainer."""
    kind, key = ("sdscripts", "train_") if spec.scripts is None else ("musubi", "")
    return {"kind": kind} | ({f"{key}batch_size": batch_size} if batch_size > 1 else {})
