"""Random weights of the names and shapes that a trainer's own loader asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tiny import hub


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
    hub.write_random(network_of(loader, file, expected), file, rename)


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
