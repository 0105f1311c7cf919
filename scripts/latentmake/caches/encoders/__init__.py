"""Encoders of pixels and captions. All modules but this import torch.

A module of a layout offers `latents` and `text`, which load its encoders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from latentmake.caches.inputs import Sample

Named = tuple[dict[str, Any], dict[str, str]]
"""Tensors by name, and further metadata, of a sample."""
Encoded = Iterable[Named]
"""Results of each sample.

Of a GPU it comes as soon as all work is queued; going through it, once, waits for the results.
"""
Encoder = Callable[[list[Sample]], Encoded]
"""Encodes samples of one shape."""


class Loaded(NamedTuple):
    """A loaded encoder.

    Attributes:
        encode: encodes samples of one shape.
        size: samples in a batch, at the most.
        budget: pixels or tokens in a batch, see `Sample.cost`; None: any number.
        frugal: encodes one sample in less memory and more time, to the same bytes.
        remarks: lines for the user when all is encoded.
        workers: threads that call `encode` side by side.
        threads: of torch in each of these; None: as many as it likes.
        queues: whether `encode` puts work into a device's queue and returns before it is done: then
            it is called by one thread at a time, while others wait for results and write them.
        lengths: tells the numbers of tokens that a caption takes in each of several encoders.
    """

    encode: Encoder
    size: int = 1
    budget: int | None = None
    frugal: Encoder | None = None
    remarks: Callable[[], list[str]] = list
    workers: int = 1
    threads: int | None = None
    queues: bool = False
    lengths: Callable[[str], tuple[int, ...]] | None = None

    def limit(self, sample: Sample) -> int:
        """Return the number of samples of this one's shape in a batch."""
        if self.budget is None:
            return self.size
        return max(1, min(self.size, self.budget // max(1, sample.cost)))


def results(
    inputs: Sequence[Any],
    wait: Callable[[], Iterable[Iterable[Any]]],
    named: Callable[..., Named],
) -> Encoded:
    """Wait for rows of results, once they are asked for; `named` gets an input and its results."""
    for each in zip(inputs, *wait(), strict=True):
        yield named(*each)
