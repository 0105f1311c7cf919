"""Samples and readings: the inputs of an encoder, and what a job reads of one item.

The types `Encoder` and `Loaded` are here too. Modules in `encoders` have functions `latents` and
`text`, which load an encoder.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentmake.base import digest
from latentmake.base.digest import source_stat
from latentmake.base.errors import SourceError, unreadable
from latentmake.base.paths import is_remote
from latentmake.base.regular import open_regular
from latentmake.data import remote
from latentmake.data.contents import (
    caption_of,
    check_length,
    decode_text,
    encoded,
    formerly,
    joined,
)
from latentmake.data.item import BUCKET, CAPTION, IMAGE, Item
from latentmake.data.texts import MARKER, settled
from latentmake.formats import cachefile
from latentmake.formats.media import check_image, probe_image, upright_size
from latentmake.geometry.buckets import Placement, Size
from latentmake.plan.orders import Order, Target, Work, placing_of, view_of

_NO_SIZE = Size(0, 0)


class Sample(NamedTuple):
    """Input of an encoder for one target.

    Attributes:
        key: key of the target.
        source: digest of the content that the target is made from.
        item: item of the target.
        content: a caption, or pixels from 0 to 255: [H, W, 3] for an image, [F, H, W, 3] for a
            clip.
        original: width and height of the image before it was scaled; (0, 0) for a caption.
        control: pixels of the control, in the shape of `content`.
        alpha: alpha channel, [H, W], if the model uses it.
        tokens: number of tokens of the caption in each encoder, padding included.
    """

    key: str
    source: str
    item: Item
    content: NDArray[np.uint8] | str
    original: tuple[int, int]
    control: NDArray[np.uint8] | None = None
    alpha: NDArray[np.uint8] | None = None
    tokens: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the pixels, or `tokens` for a caption; the same for all samples of a batch."""
        return self.tokens if isinstance(self.content, str) else self.content.shape

    @property
    def is_marked(self) -> bool:
        """Whether the sample is a caption that contains `texts.MARKER`."""
        return isinstance(self.content, str) and MARKER in self.content

    @property
    def size(self) -> tuple[int, ...]:
        """Numbers of frames and pixels, or `tokens` for a caption; memory grows with them."""
        if isinstance(self.content, str):
            return self.tokens
        *frames, height, width, _ = self.content.shape
        return (*(frames or [1]), height * width)


@dataclass
class Reading:
    """Result of reading one item.

    Attributes:
        work: item and its targets.
        content: digest of the source; "" until the source is read.
        data: bytes of the image, or of the text in the form that is encoded; empty for a video.
        others: path -> bytes of a control or layer.
        size: size of the image or video. The layout decides whether an image counts as upright or
            as stored.
        keys: target -> key. After the look-up it lacks the fresh targets.
        former: key of a text -> keys of the same text in files of releases before 0.3.
        missing: target -> key, of the targets that must be encoded.
        samples: samples of the missing targets.
        kept: number of fresh targets.
        fault: error of the source; a faulty item has no targets to make.
        sources: path -> stat and digest of each file that was read.
        places: target -> placement of the image or video.
        placing: key -> settings of scaling and cropping in the form of the header, if they matter.
    """

    work: Work
    content: str = ""
    data: bytes = b""
    others: dict[str, bytes] = field(default_factory=dict)
    size: Size = _NO_SIZE
    keys: dict[Target, str] = field(default_factory=dict)
    former: dict[str, list[str]] = field(default_factory=dict)
    missing: dict[Target, str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    kept: int = 0
    fault: SourceError | None = None
    sources: dict[str, list[Any]] = field(default_factory=dict)
    places: dict[Target, Placement] = field(default_factory=dict)
    placing: dict[str, str] = field(default_factory=dict)


# -- reading --------------------------------------------------------------------------------------


def read_ahead(
    works: Sequence[Work], read: Callable[[Work], Reading], threads: int
) -> Iterator[Reading]:
    """Yield the readings of items in their order; threads read only a few items ahead."""
    if any(is_remote(work.item.source or "") for work in works):
        threads = max(threads, remote.SIDE_BY_SIDE // 2)  # downloads mostly wait
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[Reading]] = deque()
        try:
            for work in works:
                ahead.append(pool.submit(read, work))
                if len(ahead) > 2 * threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def identify(order: Order, recipe: str, reading: Reading) -> None:
    """Read an item's files and derive the keys of its targets from the present content.

    Bytes of videos are not kept, only their digests. If file names do not contain the image's size,
    `reading.sources` records it too. `recipe` is the digest of the targets' recipe.

    Raises:
        OSError: a file cannot be read.
        SourceError: a file is damaged or cannot be downloaded.
    """
    settings, contents = order.dataset_settings, list[str]()
    part, like_sdscripts = reading.work.targets[0].part, order.layout.like_sdscripts
    item = settled(reading.work.item, part, settings, like_sdscripts=like_sdscripts)
    reading.work = reading.work._replace(item=item)
    reading.data = encoded(decode_text((item.text or "").encode(), "")).encode()
    keeps = not (order.dataset_settings.video and order.kind != "text")
    for role, path, _ in item.read:
        data, content = _read(path, reading.sources, keep=keeps)
        if role == CAPTION:
            reading.content = content  # identifies the fault if the file cannot be decoded
            text = decode_text(data, path)
            data = caption_of(text, path, settings).encode()
            content = digest.of_bytes(data)
            reading.sources[path][-1:] = [content, text]
        contents.append(content)
        if role in (IMAGE, CAPTION):
            reading.data = data
        else:
            reading.others[path] = data
    reading.content = joined(item, contents)
    if item.media is not None:
        reading.size = stored_size(item)
    elif order.kind == "latents" and item.source is not None:
        turns, limit = settings.exif_rotation, settings.max_image_pixels
        reading.size = upright_size(reading.data, item.source, limit, turns=turns)
        reading.sources[item.source] += [*reading.size, turns]
    for target in reading.work.targets:
        view, placed = view_of(order.layout, settings, item, target, reading.size)
        if placed is not None:
            reading.places[target] = placed
        reading.keys[target] = key = cachefile.target_key(reading.content, recipe, view)
        if order.kind == "text" and target.at_hand:
            before = formerly(item, reading.data.decode(), contents)
            reading.former[key] = [
                cachefile.target_key(content, recipe, view) for content in before
            ]
        if placing := placing_of(order.layout, settings, item, target, reading.size, view):
            reading.placing[key] = placing


def _read(path: str, sources: dict[str, list[Any]], *, keep: bool) -> tuple[bytes, str]:
    """Return a file's bytes and digest, and note its stat and digest in `sources`.

    Without `keep` the bytes are empty, and a digest that `sources` already has is used again.
    """
    if not keep and path in sources:
        return b"", str(sources[path][-1])
    if is_remote(path):
        if not keep:
            hint = "copy the videos to a disk"
            raise SourceError("is a video at a URL, which cannot be read", where=path, hint=hint)
        data, stat = remote.read(path)
        content = digest.of_bytes(data)
    else:
        file, size = open_regular(path)
        with file:
            stat = source_stat(os.fstat(file.fileno()))
            if keep:
                check_length(path, size)
            data = file.readall() if keep else b""
            content = (
                digest.of_bytes(data) if keep else hashlib.file_digest(file, "sha256").hexdigest()
            )
    sources[path] = [*stat, content]
    return data, content


def refuse_changed(paths: Iterable[str], sources: dict[str, list[Any]]) -> None:
    """Raise SourceError if a file is gone or its stat differs from `sources`."""
    for path in paths:
        try:
            now = source_stat(Path(path).stat())
        except OSError as error:
            raise unreadable(error, path) from None
        size, mtime_ns, _, inode, *_ = sources[path]
        if (now.size, now.mtime_ns, now.inode) != (size, mtime_ns, inode):
            hint = "run the same command again when it is complete"
            raise SourceError("was changed while it was read", where=path, hint=hint)


def stored_size(item: Item, now: tuple[int, int] | None = None) -> Size:
    """Return the size that an item's image or video had while planning; raises SourceError.

    The error says that planning did not know the size, or that the size `now` differs from it.
    """
    media = item.media
    if media is None or now not in (None, (media.width, media.height)):
        what, hint = "was changed after the build began", "run the same command again"
        raise SourceError(what, where=item.image, hint=hint)
    return Size(media.width, media.height)


def samples_of(order: Order, reading: Reading) -> list[Sample]:
    """Return the samples of an item's missing targets.

    Videos have none here. Images that another program encodes have none either: only their headers
    are checked.

    Raises:
        SourceError: an image is damaged or too large, or was changed.
    """
    item, limit = reading.work.item, order.dataset_settings.max_image_pixels
    if order.kind == "latents":
        if order.cuts_clips:
            return []
        # Imported late: `stored` imports OpenCV. Only the layout of `plain` sets no `media`.
        name = "plain" if item.media is None else "stored"
        module = import_module(f"latentmake.encode.pixels.{name}")
        if order.is_external:
            module.check(order, reading)
            return []
        return [*module.samples_of(order, reading)]
    if order.makes_captions:
        return [*import_module("latentmake.encode.pixels.plain").pictures_of(order, reading)]
    if (image := item.file(BUCKET)) is not None:
        for path in item.controls:
            check_image(reading.others[path], path, limit)
        stored_size(item, probe_image(image.path)[:2])
    text = reading.data.decode()
    keys = dict.fromkeys(reading.missing.values())
    return [Sample(key, reading.content, item, text, (0, 0)) for key in keys]


# -- encoders -------------------------------------------------------------------------------------

Named = tuple[dict[str, Any], dict[str, str]]
"""Tensors of a sample by name, and further metadata of its file."""
Encoded = Iterable[Named]
"""Results of the samples of a batch.

On a GPU the encoder returns it once the work is queued. Iterating it, which is possible once, waits
for the results.
"""
Encoder = Callable[[list[Sample]], Encoded]
"""Function that encodes samples of one shape."""


class Loaded(NamedTuple):
    """A loaded encoder.

    Attributes:
        encode: function that encodes samples of one shape.
        size: largest number of samples in a batch.
        budget: largest number of pixels (of all frames, for clips) or tokens in a batch, since
            memory grows with them; None: no limit.
        frugal: function that encodes one sample in less memory and more time, to the same bytes.
        remarks: function that returns lines for the user when all samples are encoded.
        workers: number of threads that call `encode` in parallel.
        begin: function that each of these threads calls first.
        queues: whether `encode` only puts work into a device's queue and returns before the work
            is done. Then one thread at a time calls it, while other threads wait for results and
            write them.
        lengths: function that returns the number of a caption's tokens in each text encoder.
    """

    encode: Encoder
    size: int = 1
    budget: int | None = None
    frugal: Encoder | None = None
    remarks: Callable[[], list[str]] = list
    workers: int = 1
    begin: Callable[[], object] = bool
    queues: bool = False
    lengths: Callable[[str], tuple[int, ...]] | None = None

    def limit(self, sample: Sample) -> int:
        """Return the largest number of samples of this sample's shape in a batch."""
        if self.budget is None:
            return self.size
        return max(1, min(self.size, self.budget // max(1, *sample.size)))


def results(
    inputs: Sequence[Any], wait: Callable[[], Iterable[Iterable[Any]]], named: Callable[..., Named]
) -> Encoded:
    """Yield `named` of each input and its results; the first iteration calls `wait`."""
    for row in zip(inputs, *wait(), strict=True):
        yield named(*row)
