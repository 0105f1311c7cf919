"""Samples: inputs of an encoder; and readings: items whose samples are made of their sources.

Modules in `encoders` offer `latents` and `text`, which load encoders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentmake.config.datasets import Dataset
from latentmake.data.item import BUCKET, Item
from latentmake.data.texts import decode_text
from latentmake.errors import SourceError
from latentmake.files.media import check_image, probe_image
from latentmake.geometry.buckets import Size
from latentmake.plan.orders import Order, Target, Work

_NO_SIZE = Size(0, 0)


class Sample(NamedTuple):
    """Input of an encoder for one target.

    Attributes:
        key: of the target.
        source: digest of what it is made from.
        item: of the target.
        content: a caption, or pixels, 0 to 255: [H, W, 3] of an image, [F, H, W, 3] of a clip.
        original: width and height of the image before it was fitted; (0, 0) for a caption.
        control: pixels of the control, of the same shape.
        clip: whether it is a clip of a video.
        alpha: transparency, [H, W], if it counts.
        tokens: numbers of tokens that a caption takes in each encoder, with its padding.
    """

    key: str
    source: str
    item: Item
    content: NDArray[np.uint8] | str
    original: tuple[int, int]
    control: NDArray[np.uint8] | None = None
    clip: bool = False
    alpha: NDArray[np.uint8] | None = None
    tokens: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the pixels, or `tokens` of a caption; the same for all samples of a batch."""
        return self.tokens if isinstance(self.content, str) else self.content.shape

    @property
    def cost(self) -> int:
        """Pixels of a picture or of a clip's frame, or tokens: memory grows with their number."""
        return max(self.size, default=1)

    @property
    def size(self) -> tuple[int, ...]:
        """Frames and pixels, which tell what memory it takes; `tokens` of a caption."""
        if isinstance(self.content, str):
            return self.tokens
        *frames, height, width, _ = self.content.shape
        return (*(frames or [1]), height * width)


@dataclass
class Reading:
    """Result of reading one item.

    Attributes:
        work: the item and its targets.
        content: digest of its source; "" until it is read.
        data: bytes of its image or caption; none of a video.
        others: path -> bytes of its controls and layers.
        size: of its image or video; of an image upright or as stored, as its layout takes it.
        keys: of its targets; once they are looked up, of those that are not fresh.
        missing: targets still to encode, with their keys.
        samples: inputs for these.
        kept: number of fresh targets.
        fault: what is wrong with the source, in a line.
        sources: path -> stat and digest of each file that was read.
        placing: key -> settings that placed it, as its header has them, where these are unusual.
    """

    work: Work
    content: str = ""
    data: bytes = b""
    others: dict[str, bytes] = field(default_factory=dict)
    size: Size = _NO_SIZE
    keys: dict[Target, str] = field(default_factory=dict)
    missing: dict[Target, str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    kept: int = 0
    fault: str | None = None
    sources: dict[str, list[Any]] = field(default_factory=dict)
    placing: dict[str, str] = field(default_factory=dict)

    @property
    def item(self) -> Item:
        """The item."""
        return self.work.item

    def fail(self, fault: str) -> None:
        """Note that nothing can be made of it."""
        self.fault, self.keys, self.missing, self.samples = fault, {}, {}, []


def stored_size(item: Item, found: tuple[int, int] | None = None) -> Size:
    """Return the size that an item's image or video had while planning.

    Raises:
        SourceError: another size is `found` now.
    """
    size = None if item.media is None else Size(item.media.width, item.media.height)
    if size is None or (found is not None and found != size):
        raise SourceError(
            "was changed after the build began",
            where=item.image,
            hint="run the same command again",
        )
    return size


def caption_of(data: bytes, path: str | None, settings: Dataset) -> str:
    """Decode a caption; `path` is its file, None where it lies in none.

    Raises:
        SourceError: it is not UTF-8, or empty where that is not allowed.
    """
    caption = decode_text(data, path or "").strip()
    if not caption and path is not None and settings.empty_caption != "allow":
        raise SourceError(
            "is an empty caption",
            where=path,
            hint="describe the image, or set empty_caption: allow",
        )
    return caption


def samples_of(order: Order, reading: Reading) -> list[Sample]:
    """Make the samples of an item's missing targets; videos make none.

    Images that another program encodes are checked by their headers, and make none either.

    Raises:
        SourceError: the bytes are damaged, or an image was changed.
    """
    item, limit = reading.item, order.dataset_settings.max_image_pixels
    if order.kind == "latents":
        if order.cuts_clips:
            return []
        # One of them imports OpenCV. Only the layout of the other has no `media`.
        name = "plain" if item.media is None else "stored"
        module = import_module(f"latentmake.caches.pixels.{name}")
        if order.is_external:
            module.check(order, reading)
            return []
        return [*module.samples_of(order, reading)]
    if (image := item.file(BUCKET)) is not None:
        for path in item.controls:
            check_image(reading.others[path], path, limit)
        stored_size(item, probe_image(image.path)[:2])
    text = order.layout.caption(caption_of(reading.data, item.source, order.dataset_settings))
    keys = dict.fromkeys(reading.missing.values())
    return [Sample(key, reading.content, item, text, (0, 0)) for key in keys]


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
