"""Caches of other programs that lie beside images: taken over on request, written on request.

Each program's naming is a module that offers the functions of `Naming`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Naming", "of"]


class Naming(Protocol):
    """What the module of a program offers. Only reading and writing of tensors imports torch."""

    def find(self, base: str, ending: str) -> Path | None:
        """Return an item's file, where there is one.

        Args:
            base: path of the item's image without its ending.
            ending: what the user says such files end in.

        Raises:
            OSError: its folder cannot be looked into.
        """

    def place(self, base: str, ending: str, original: tuple[int, int]) -> Path:
        """Return where an item's file is written.

        Args:
            base: as above.
            ending: as above.
            original: width and height of the image in pixels; (0, 0) for text.
        """

    def dtype(self, kind: str, padded: bool) -> str:
        """Return the number format of `latents` or `text`, which may differ for padded text."""

    def read(self, kind: str, padded: bool, data: bytes) -> torch.Tensor:
        """Return latents [C, h, w], or an embedding [T, D], of a file's bytes.

        Raises:
            CacheError: it is not such a file; `what` says why.
        """

    def write(
        self, kind: str, padded: bool, tensor: torch.Tensor, stamp: Mapping[str, str]
    ) -> bytes:
        """Return the bytes of a file.

        Args:
            kind: `latents` or `text`.
            padded: whether it is the text of an encoder that pads.
            tensor: as `read` returns it, in any number format.
            stamp: what the file shall say of its making, for nobody but us.
        """


def of(name: str) -> Naming:
    """Return the naming of a program: `ai-training`."""
    from latentmake.exchange.ai_training import naming

    return {"ai-training": naming}[name]
