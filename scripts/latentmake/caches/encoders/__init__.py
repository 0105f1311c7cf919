"""Encoders of pixels and captions. All modules but this import torch.

A module of a layout offers `latents` and `text`, which load its encoders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from latentmake.caches.inputs import Sample

__all__ = ["Encoded", "Encoder", "Loaded"]

Encoded = Iterable[tuple[dict[str, Any], dict[str, str]]]
"""Tensors by name and further metadata, of each sample.

Of a GPU it comes as soon as all work is queued; going through it, once, waits for the results.
"""
Encoder = Callable[[list[Sample]], Encoded]
"""Encodes samples of one shape."""


class Loaded(NamedTuple):
    """A loaded encoder.

    Attributes:
        encode: encodes samples of one shape.
        size: samples in a batch.
        frugal: encodes one sample in less memory and more time, to the same bytes.
        remarks: lines for the user when all is encoded.
    """

    encode: Encoder
    size: int
    frugal: Encoder | None = None
    remarks: Callable[[], list[str]] = list
