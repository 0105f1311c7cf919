"""Random weights of the names and shapes that a trainer's own loader asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


class _Asked(Exception):
    """A loader has made its network."""


def write_for(
    loader: Callable[[str], object],
    file: Path,
    rename: Callable[[str], str] = str,
    expected: Iterable[str] = (),
) -> None:
    """Write a file of weights that a loader takes.

    Args:
        loader: takes the file's path, makes a network, and calls its `load_state_dict`.
        file: the file of safetensors.
        rename: name in the network -> name in the file.
        expected: names in the file that the loader asks for before.
    """
    from safetensors.torch import save_file

    tensors = randomized(network_of(loader, file, expected))
    save_file({rename(name): tensor for name, tensor in tensors.items()}, file)


def network_of(loader: Callable[[str], object], file: Path, expected: Iterable[str] = ()) -> Any:
    """Return the network that a loader makes before it loads a file; see `write_for`."""
    import torch
    from safetensors.torch import save_file

    def ask(self: Any, *_: Any, **__: Any) -> None:
        raise _Asked(self)

    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.zeros(1) for name in (*expected, "unused")}, file)
    load, torch.nn.Module.load_state_dict = torch.nn.Module.load_state_dict, ask
    try:
        loader(str(file))
    except _Asked as asked:
        return asked.args[0]
    finally:
        torch.nn.Module.load_state_dict = load
        file.unlink()
    raise AssertionError(f"{file.name}: its loader reads no weights")


def randomized(network: Any) -> dict[str, Any]:
    """Return random tensors in place of a network's, the same each time."""
    import torch

    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point():
            made = torch.randn(tensor.shape, generator=generator) * 0.1
            # Scales of normalisations are near 1.
            found[name] = (made + (tensor.ndim == 1 and name.endswith("weight"))).to(tensor.dtype)
        elif tensor.device.type != "meta":
            found[name] = tensor
    return found
