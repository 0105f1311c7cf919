"""Latents of samples drawn along a training: one file a step."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from latentmake.files import atomic, cachefile
from latentmake.training.order import Wanted

Drawn = dict[str, torch.Tensor]
"""Keys of samples (`TrainingOrder.picture_keys`), and their latents, unscaled."""

_NAME = re.compile(r"step-(\d{6,})\.safetensors")


def write_row(folder: Path, step: int, drawn: Drawn, wanted: Wanted) -> None:
    """Write the pictures of a step, marked with their training."""
    data = cachefile.serialize(drawn, {"wanted": wanted.model_dump_json()})
    atomic.write(folder / f"step-{step:06d}.safetensors", data)


def _rows(folder: Path) -> list[tuple[int, Path]]:
    found = [(_NAME.fullmatch(path.name), path) for path in folder.glob("step-*")]
    return sorted((int(match[1]), path) for match, path in found if match)


def read_rows(folder: Path, wanted: Wanted) -> dict[int, Drawn]:
    """Return the pictures of this very training, by step, ascending."""
    rows: dict[int, Drawn] = {}
    for step, path in _rows(folder):
        try:
            with safe_open(path, framework="pt") as file:
                made = Wanted.model_validate_json((file.metadata() or {})["wanted"])
                if made == wanted:
                    rows[step] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 -- no dict
        except (OSError, SafetensorError, KeyError, ValidationError):
            continue
    return rows


def carry_rows(folder: Path, shorter: Wanted, wanted: Wanted) -> None:
    """Mark the rows of a shorter training as those of the training that goes on from it."""
    if shorter != wanted:
        for step, drawn in read_rows(folder, shorter).items():
            write_row(folder, step, drawn, wanted)


def clear_rows(folder: Path, wanted: Wanted | None = None) -> None:
    """Remove the rows of earlier trainings; with None, of this one too."""
    ours = {} if wanted is None else read_rows(folder, wanted)
    for step, path in _rows(folder):
        if step not in ours:
            path.unlink(missing_ok=True)
