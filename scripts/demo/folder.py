"""Folders of model bundles: complete when they appear, the same bytes for the same seed."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from latentmake.errors import ModelError

__all__ = ["bundle_folder", "own_torch_state"]


@contextmanager
def bundle_folder(folder: Path) -> Iterator[Path]:
    """Give a folder to write a bundle into, which replaces an older one in the end.

    Raises:
        ModelError: the folder holds files but no bundle.
    """
    _check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(f".{folder.name}.*.unfinished"):  # of a killed build
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.unfinished")
    unfinished.mkdir()
    try:
        yield unfinished
        _open_to_readers(unfinished)
        _check_replaceable(folder)
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _check_replaceable(folder: Path) -> None:
    """Raise unless the folder is an older bundle or a tree of empty folders."""
    if (folder / "model_index.json").is_file():
        return
    if folder.is_file() or any(path.is_file() for path in folder.rglob("*")):
        raise ModelError(
            "holds something other than a model bundle",
            where=folder,
            hint="name another folder or remove this one",
        )


def _open_to_readers(folder: Path) -> None:
    """Set the files' mode to that of the folder; safetensors writes private ones."""
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


@contextmanager
def own_torch_state(seed: int, threads: int | None) -> Iterator[None]:
    """Seed torch and set its threads; restore the caller's state at the end."""
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
