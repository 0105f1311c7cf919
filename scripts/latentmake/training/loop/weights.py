"""Trained weights: in a checkpoint, and as files that take an older result's place."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from latentmake.errors import storage_error
from latentmake.files import atomic
from latentmake.training.loop.result import RunFiles


def trained_state(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the trained weights by the name of their parameter, on the CPU."""
    return {
        name: parameter.detach().cpu().contiguous()
        for name, parameter in network.named_parameters()
        if parameter.requires_grad
    }


def load_trained(network: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Put back the result of `trained_state`.

    Raises:
        ValueError: it belongs to another network.
    """
    parameters = {name: each for name, each in network.named_parameters() if each.requires_grad}
    for name in sorted(parameters.keys() ^ state.keys()):
        raise ValueError(f"only one of the two trains {name}")
    for name, parameter in parameters.items():
        if parameter.shape != state[name].shape:
            raise ValueError(f"{name} has another shape")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def write_trained(write: Callable[[Path], object], names: Iterable[str], files: RunFiles) -> None:
    """Write the trained weights; an older result stays until the new one is complete.

    Its record goes first, so that it never stands beside weights of another training.

    Args:
        write: writes the weights into a new folder.
        names: of all files and folders that any training of this kind may write there.
        files: of the run.
    """
    new, old = (files.output / f".{name}{atomic.TEMPORARY_SUFFIX}" for name in ("new", "old"))
    try:
        write(new)
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir()
        files.record.unlink(missing_ok=True)
        for name in names:
            if (files.output / name).exists():
                (files.output / name).rename(old / name)
            if (new / name).exists():
                (new / name).rename(files.output / name)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise storage_error(error, files.output) or error from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
