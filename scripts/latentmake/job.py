"""A work order being carried out: sources are read once, finished targets go to the spool.

The spool names files by key. Snakemake deletes the declared outputs of a job that failed, but never
the spool, so the next job takes from it whatever this one finished. One bad source stops no other.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from latentmake import cachefile, digest, pixels
from latentmake.errors import CacheError, SourceError
from latentmake.memo import source_stat, target_stat
from latentmake.orders import Target, WorkItem, WorkOrder, spooled

__all__ = ["Encoder", "Job", "Load", "Sample", "Say"]

Say = Callable[[str], None]


class Sample(NamedTuple):
    """One target on its way through the encoder.

    Attributes:
        key: names it in the spool.
        source: digest of what it is made from.
        item: whose target it is.
        content: pixels [H, W, 3] of an image, or a caption.
        original: width and height of the upright image, in pixels; (0, 0) for a caption.
    """

    key: str
    source: str
    item: WorkItem
    content: NDArray[np.uint8] | str
    original: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """What all samples of one batch share."""
        return () if isinstance(self.content, str) else self.content.shape


Encoder = Callable[[list[Sample]], list[tuple[dict[str, Any], dict[str, str]]]]
"""Encodes samples of one shape to (tensors by name, further metadata) each."""


Load = Callable[[], tuple[Encoder, int]]
"""Gives an encoder, and how many samples it shall get at once."""


class _Read(NamedTuple):
    """What reading one item gave: its samples and the keys of all its targets, or its fault."""

    item: WorkItem
    keys: dict[Target, str]
    samples: list[Sample]
    kept: int
    fault: str | None
    source: tuple[str, list[Any]] | None


@dataclass
class Job:
    """The state of a work order that is being carried out."""

    order: WorkOrder
    recipe: dict[str, object]
    say: Say
    kept: dict[str, str] = field(default_factory=dict)
    wanted: dict[str, tuple[WorkItem, str]] = field(default_factory=dict)
    sources: dict[str, list[Any]] = field(default_factory=dict)
    faults: list[dict[str, str]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    unsound: dict[str, tuple[str, str]] = field(default_factory=dict)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("encoded", "spooled", "linked", "kept"), 0)
    )

    def __post_init__(self) -> None:
        self.recipe_digest = digest.of_value(self.recipe)

    # -- reading ------------------------------------------------------------------------------

    def read(self, item: WorkItem) -> _Read:
        """Read an item's source, and decode it unless all its targets are there already."""
        source: tuple[str, list[Any]] | None = None
        path = item.source or "the empty caption"
        try:
            if item.source is None:
                data = (item.text or "").encode()
                content = digest.of_bytes(data)
            else:
                with Path(item.source).open("rb") as file:
                    stat = source_stat(os.fstat(file.fileno()))
                    data = file.read()
                content = digest.of_bytes(data)
                source = (item.source, [*stat, content])
        except OSError as error:
            line = SourceError(f"cannot be read ({error.strerror})", where=path, mend="see to it")
            return _Read(item, {}, [], 0, str(line), None)
        keys: dict[Target, str] = {}
        missing: dict[Target, str] = {}
        kept = 0
        for target in item.targets:
            part = "" if target.part == "text" else target.part
            key = cachefile.target_key(content, self.recipe_digest, part)
            if self._stands(target, key):
                kept += 1
                self.kept[target.path] = key
                continue
            keys[target] = key
            if not self._finished(key):
                missing[target] = key
        if not missing:
            return _Read(item, keys, [], kept, None, source)
        try:
            samples = self._decode(item, data, content, missing)
        except SourceError as error:
            return _Read(item, {}, [], kept, str(error), source)
        return _Read(item, keys, samples, kept, None, source)

    def _stands(self, target: Target, key: str) -> bool:
        if target.found is None:
            return False
        try:
            return cachefile.read_header(target.path).key == key
        except (CacheError, OSError):
            return False

    @staticmethod
    def _finished(key: str) -> bool:
        try:
            return cachefile.read_header(spooled(key)).key == key
        except (CacheError, OSError):
            return False  # not there, or cut short by a power failure

    def _decode(
        self, item: WorkItem, data: bytes, content: str, missing: dict[Target, str]
    ) -> list[Sample]:
        settings = self.order.dataset_settings
        if self.order.kind == "text":
            caption = _caption(data, item, settings)
            return [Sample(key, content, item, caption, (0, 0)) for key in missing.values()]
        image = pixels.decode(data, item.source or "", settings)
        return [
            Sample(
                key,
                content,
                item,
                pixels.fit(image, target.size or (0, 0), settings, item.source or ""),
                image.size,
            )
            for target, key in missing.items()
        ]

    def readings(self, items: Sequence[WorkItem], threads: int) -> Iterator[_Read]:
        """Yield items read, a few of them ahead."""
        with ThreadPoolExecutor(threads) as pool:
            ahead: deque[Future[_Read]] = deque()
            try:
                for item in items:
                    ahead.append(pool.submit(self.read, item))
                    if len(ahead) > 2 * threads:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()

    # -- encoding -----------------------------------------------------------------------------

    def encode(self, encoder: Encoder, samples: list[Sample]) -> None:
        """Encode samples of one shape into the spool; where memory runs out, half at a time."""
        import torch

        try:
            results = encoder(samples)
        except torch.OutOfMemoryError:
            if len(samples) == 1:
                raise
            self.say(f"out of memory with {len(samples)} at once: trying half as many")
            half = len(samples) // 2
            self.encode(encoder, samples[:half])
            self.encode(encoder, samples[half:])
            return
        for sample, (tensors, metadata) in zip(samples, results, strict=True):
            if fault := _unsound(tensors):
                self.unsound[sample.key] = (sample.source, fault)
                self.fail_unsound(sample.item, sample.key)
                continue
            stamp = cachefile.stamp(key=sample.key, source=sample.source, recipe=self.recipe)
            data = cachefile.serialize(tensors, metadata | stamp)
            cachefile.write(spooled(sample.key), data)
            self.counts["encoded"] += 1

    def fail(self, item: WorkItem, content: str, line: str) -> None:
        """Note a faulty item; the others go on."""
        self.say(f"faulty: {line}")
        self.failed[item.stem] = line
        self.faults.append(
            {
                "dataset": self.order.dataset,
                "model": self.order.model,
                "kind": self.order.kind,
                "recipe": self.recipe_digest,
                "stem": item.stem,
                "path": item.source or "",
                "digest": content,
                "line": line,
            }
        )

    def fail_unsound(self, item: WorkItem, key: str) -> None:
        """Note an item for whose content the encoder gave nothing of use."""
        source, fault = self.unsound[key]
        error = SourceError(
            f"the encoder returned {fault}",
            where=item.source or "a prompt",
            mend="use dtype: float32, or look at the picture and at the model",
        )
        self.fail(item, source, str(error))

    # -- all of it ----------------------------------------------------------------------------

    def make(
        self, items: Sequence[WorkItem], load: Load, *, threads: int, progress: tqdm[Any]
    ) -> None:
        """Put the targets of some items into the spool, but those that stand already.

        Args:
            items: what to make.
            load: gives the encoder and how many samples it takes at once, when first called.
            threads: how many cores read and decode.
            progress: counts targets.
        """
        waiting: dict[tuple[int, ...], list[Sample]] = {}
        making: set[str] = set()

        def flush(shape: tuple[int, ...]) -> None:
            samples = waiting.pop(shape)
            self.encode(load()[0], samples)
            progress.update(len(samples))

        for reading in self.readings(items, threads):
            item, source = reading.item, reading.source
            if source is not None:
                self.sources[source[0]] = source[1]
            if reading.fault is not None:
                self.fail(item, source[1][-1] if source else "", reading.fault)
            self.counts["kept"] += reading.kept
            new = {sample.key: sample for sample in reading.samples if sample.key not in making}
            progress.update(len(item.targets) - len(new))
            for target, key in reading.keys.items():
                self.wanted[target.path] = (item, key)
                if key in new:
                    continue
                # The same content twice is encoded once.
                self.counts["linked" if key in making else "spooled"] += 1
                making.add(key)
            for key, sample in new.items():
                making.add(key)
                same = waiting.setdefault(sample.shape, [])
                same.append(sample)
                size = load()[1]
                if len(same) >= size:
                    flush(sample.shape)
                elif sum(map(len, waiting.values())) > 4 * size:
                    flush(max(waiting, key=lambda shape: len(waiting[shape])))
        for shape in list(waiting):
            flush(shape)
        for item, key in self.wanted.values():  # whose content is another's that was refused
            if key in self.unsound and item.stem not in self.failed:
                self.fail_unsound(item, key)

    def lost(self) -> list[WorkItem]:
        """Return the items whose spooled files another build took away since they were counted."""
        return list(
            {
                item.stem: item
                for item, key in self.wanted.values()
                if item.stem not in self.failed and not spooled(key).is_file()
            }.values()
        )

    def deliver(self) -> dict[str, list[Any]]:
        """Give the spooled files of all sound items their names.

        Returns:
            path -> stat (size, mtime_ns, inode) and key of every target that stands.
        """
        delivered = dict(self.kept)
        standing: dict[str, Path] = {}
        for path, (item, key) in self.wanted.items():
            if item.stem not in self.failed:
                # Another plan may tidy the spool as soon as a file in it has its name.
                there = spooled(key)
                cachefile.link(there if there.is_file() else standing[key], Path(path))
                standing[key] = Path(path)
                delivered[path] = key
        return {path: [*target_stat(Path(path).stat()), key] for path, key in delivered.items()}


def _caption(data: bytes, item: WorkItem, settings: dict[str, Any]) -> str:
    where = item.source or "the empty caption"
    try:
        caption = data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise SourceError(
            f"is not UTF-8 (byte {error.start + 1})", where=where, mend="save it as UTF-8"
        ) from None
    if not caption and item.source is not None and settings.get("empty_caption") != "allow":
        raise SourceError(
            "is an empty caption",
            where=where,
            mend="describe the image, or set empty_caption: allow",
        )
    return caption


def _unsound(tensors: dict[str, Any]) -> str | None:
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            return f"values that are not finite ({name})"
        if not tensor.any():
            return f"nothing but zeros ({name})"
    return None
