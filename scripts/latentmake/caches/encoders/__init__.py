"""Encoders of pixels and captions. All modules but this import torch.

A module of a layout offers `latents` and `text`, which load its encoders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from latentmake.caches.batch_sizes import BatchSizes
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
        size: samples in a batch, where `sizes` does not tell.
        frugal: encodes one sample in less memory and more time, to the same bytes.
        remarks: lines for the user when all is encoded.
        workers: threads that call `encode` side by side.
        threads: of torch in each of these; None: as many as it likes.
        queues: whether `encode` puts work into a device's queue and returns before it is done: then
            it is called by one thread at a time, while others wait for results and write them.
        sizes: tells how many samples are in a batch, by their shape.
        lengths: tells the numbers of tokens that a caption takes in each of several encoders.
        alike: tells how many samples of one shape a CPU encodes at once: captions of the same
            lengths, and of no others. None: `size` of pictures, and captions of any lengths, which
            are padded to the longest.
    """

    encode: Encoder
    size: int
    frugal: Encoder | None = None
    remarks: Callable[[], list[str]] = list
    workers: int = 1
    threads: int | None = None
    queues: bool = False
    sizes: BatchSizes | None = None
    lengths: Callable[[str], tuple[int, ...]] | None = None
    alike: Callable[[tuple[int, ...]], int] | None = None

    def size_of(self, shape: tuple[int, ...]) -> int:
        """Return the number of samples of a shape in a batch."""
        if shape and self.alike is not None:
            return self.alike(shape)
        return self.size if self.sizes is None else self.sizes.of(shape)
