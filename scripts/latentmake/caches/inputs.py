"""Samples, the inputs of an encoder; and readings: bytes, digests, keys and samples of an item.

Modules in `encoders` offer `latents` and `text`, which load encoders.
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

from latentmake import digest
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
from latentmake.data.texts import MARKER
from latentmake.digest import source_stat
from latentmake.errors import SourceError, unreadable
from latentmake.files import cachefile
from latentmake.files.media import check_image, probe_image, upright_size
from latentmake.files.workspace import is_remote
from latentmake.geometry.buckets import Size
from latentmake.plan.orders import Order, Target, Work, placing_of, view_of
from latentmake.regular import open_regular

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
    def is_marked(self) -> bool:
        """Whether it is a caption with `texts.MARKER`."""
        return isinstance(self.content, str) and MARKER in self.content

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
        data: bytes of its image, or of its text as encoded; none of a video.
        others: path -> bytes of its controls and layers.
        size: of its image or video; of an image upright or as stored, as its layout takes it.
        keys: of its targets; once they are looked up, of those that are not fresh.
        former: key of a text -> keys that it may have in files of releases before 0.3.
        missing: targets still to encode, with their keys.
        samples: inputs for these.
        kept: number of fresh targets.
        fault: what is wrong with the source.
        sources: path -> stat and digest of each file that was read.
        placing: key -> settings that placed it, as its header has them, where these are unusual.
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
    placing: dict[str, str] = field(default_factory=dict)

    def fail(self, fault: SourceError) -> None:
        """Note that nothing can be made of it."""
        self.fault, self.keys, self.missing, self.samples = fault, {}, {}, []


# -- reading --------------------------------------------------------------------------------------


def read_ahead(
    works: Sequence[Work], read: Callable[[Work], Reading], threads: int
) -> Iterator[Reading]:
    """Yield the readings of items in their order, few of which are made before they are taken."""
    if any(is_remote(each.item.source or "") for each in works):
        threads = max(threads, remote.SIDE_BY_SIDE // 2)  # they mostly wait
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
    """Read an item's files, and find the keys of its targets by what the files hold now.

    Of videos only digests are kept. What is noted of an image whose targets are not named by its
    size holds that, too. `recipe` is the digest of the targets' recipe.

    Raises:
        OSError: a file cannot be read.
        SourceError: one is damaged, or cannot be fetched.
    """
    item, settings, contents = reading.work.item, order.dataset_settings, list[str]()
    reading.data = encoded(decode_text((item.text or "").encode(), "")).encode()
    for role, path, _ in item.read:
        data, content = _read(path, reading.sources, keep=not order.cuts_clips)
        if role == CAPTION:
            reading.content = content  # of a file that cannot be decoded
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
        view = view_of(order.layout, settings, item, target, reading.size)
        reading.keys[target] = key = cachefile.target_key(reading.content, recipe, view)
        if order.kind == "text" and target.at_hand:
            before = formerly(item, reading.data.decode(), contents)
            reading.former[key] = [cachefile.target_key(each, recipe, view) for each in before]
        if placing := placing_of(order.layout, settings, item, target, reading.size, view):
            reading.placing[key] = placing


def _read(path: str, sources: dict[str, list[Any]], *, keep: bool) -> tuple[bytes, str]:
    """Return a file's bytes, none unless `keep`, and its digest; note its stat in `sources`.

    Where no bytes are kept, what `sources` knows already is believed.
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
    """Refuse, by SourceError, files that are gone or not those whose stat was noted."""
    for path in paths:
        try:
            now = source_stat(Path(path).stat())
        except OSError as error:
            raise unreadable(error, path) from None
        size, mtime_ns, _, inode, *_ = sources[path]
        if (now.size, now.mtime_ns, now.inode) != (size, mtime_ns, inode):
            hint = "run the same command again when it is complete"
            raise SourceError("was changed while it was read", where=path, hint=hint)


def stored_size(item: Item, found: tuple[int, int] | None = None) -> Size:
    """Return the size that an item's image or video had while planning; raises SourceError."""
    size = None if item.media is None else Size(item.media.width, item.media.height)
    if size is None or (found is not None and found != size):
        what, hint = "was changed after the build began", "run the same command again"
        raise SourceError(what, where=item.image, hint=hint)
    return size


def samples_of(order: Order, reading: Reading) -> list[Sample]:
    """Make the samples of an item's missing targets; videos make none; raises SourceError.

    Images that another program encodes are checked by their headers, and make none either.
    """
    item, limit = reading.work.item, order.dataset_settings.max_image_pixels
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
    text = reading.data.decode()
    keys = dict.fromkeys(reading.missing.values())
    return [Sample(key, reading.content, item, text, (0, 0)) for key in keys]


# -- encoders -------------------------------------------------------------------------------------

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
        budget: pixels of pictures or of clips' frames, or tokens, in a batch, with whose number
            memory grows; None: any number.
        frugal: encodes one sample in less memory and more time, to the same bytes.
        remarks: lines for the user when all is encoded.
        workers: threads that call `encode` side by side.
        begin: called by each of these first.
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
    begin: Callable[[], object] = bool
    queues: bool = False
    lengths: Callable[[str], tuple[int, ...]] | None = None

    def limit(self, sample: Sample) -> int:
        """Return the number of samples of this one's shape in a batch."""
        if self.budget is None:
            return self.size
        return max(1, min(self.size, self.budget // max(1, *sample.size)))


def results(
    inputs: Sequence[Any], wait: Callable[[], Iterable[Iterable[Any]]], named: Callable[..., Named]
) -> Encoded:
    """Wait for rows of results, once they are asked for; `named` gets an input and its results."""
    for each in zip(inputs, *wait(), strict=True):
        yield named(*each)
