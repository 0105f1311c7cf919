"""Carries out a work order: read each source once, encode what is not there, write the targets.

Finished targets go to the spool first, named by key, and get their names at the end: Snakemake
deletes the declared outputs of a job that failed, but never the spool, so the next job takes from
it whatever this one finished. One bad source stops no other.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from latentmake import cachefile, digest, pixels, recipe
from latentmake.config import Dataset, Model
from latentmake.errors import CacheError, SourceError
from latentmake.memo import source_stat, target_stat
from latentmake.orders import Receipt, Target, WorkItem, WorkOrder, spooled

__all__ = ["Encoder", "Sample", "carry_out"]

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


class _Read(NamedTuple):
    """What reading one item gave: its samples and the keys of all its targets, or its fault."""

    item: WorkItem
    keys: dict[Target, str]
    samples: list[Sample]
    kept: int
    fault: str | None
    source: tuple[str, list[Any]] | None


@dataclass
class _Job:
    order: WorkOrder
    recipe: dict[str, object]
    say: Say
    keys: dict[str, str] = field(default_factory=dict)
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
                self.keys[target.path] = key
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
                key, content, item, pixels.fit(image, target.size or (0, 0), settings), image.size
            )
            for target, key in missing.items()
        ]

    def readings(self, threads: int) -> Iterator[_Read]:
        """Yield every item, read ahead by a few."""
        with ThreadPoolExecutor(threads) as pool:
            ahead: deque[Future[_Read]] = deque()
            try:
                for item in self.order.items:
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

    def deliver(self, keys: dict[str, str]) -> dict[str, list[Any]]:
        """Give the spooled files their names."""
        delivered = {}
        for path, key in keys.items():
            cachefile.link(spooled(key), Path(path))
        for path, key in {**self.keys, **keys}.items():
            delivered[path] = [*target_stat(Path(path).stat()), key]
        return delivered


def carry_out(
    order: WorkOrder,
    receipt: Path,
    *,
    say: Say,
    threads: int = 1,
    batch_size: int = 0,
    encoder: Encoder | None = None,
) -> Receipt:
    """Carry out a work order and leave its receipt.

    Args:
        order: what to make.
        receipt: where the receipt goes.
        say: told of faults and of the outcome, a line each.
        threads: how many cores to use.
        batch_size: samples of one shape encoded at once; 0: one on a CPU, where the same source
            then gives the same bytes whatever lies beside it, more on a GPU.
        encoder: stands in for the model's own.

    Raises:
        SourceError: items were faulty and the dataset says `on_error: fail`; all are named.
        ModelError: the model is missing or incomplete.
        StorageError: the disk is full or cannot be written.
    """
    began = time.monotonic()
    job = _Job(order, order.recipe or _recipe(order), say)
    waiting: dict[tuple[int, ...], list[Sample]] = {}
    wanted: dict[str, str] = {}
    stems: dict[str, str] = {}
    making: set[str] = set()
    total = sum(len(item.targets) for item in order.items)
    name = f"{order.kind} of {order.dataset}"
    ready: tuple[Encoder, int] | None = None if encoder is None else (encoder, batch_size or 1)
    with tqdm(total=total, desc=name, unit="target", mininterval=0.5) as progress:
        for reading in job.readings(threads):
            item = reading.item
            if reading.source is not None:
                job.sources[reading.source[0]] = reading.source[1]
            if reading.fault is not None:
                content = reading.source[1][-1] if reading.source else ""
                job.fail(item, content, reading.fault)
            job.counts["kept"] += reading.kept
            making_now = {sample.key for sample in reading.samples}
            for target, key in reading.keys.items():
                wanted[target.path], stems[target.path] = key, item.stem
                if key not in making_now and key not in making:
                    job.counts["spooled"] += 1
                    making.add(key)
                elif key in making:
                    job.counts["linked"] += 1
            progress.update(len(item.targets) - len(reading.samples))
            for sample in reading.samples:
                if sample.key in making:  # the same content twice: encoded once
                    progress.update()
                    continue
                making.add(sample.key)
                if ready is None:
                    ready = _load(order, threads, batch_size, say)
                same = waiting.setdefault(sample.shape, [])
                same.append(sample)
                if len(same) >= ready[1]:
                    job.encode(ready[0], waiting.pop(sample.shape))
                    progress.update(len(same))
                elif sum(map(len, waiting.values())) > 4 * ready[1]:
                    fullest = max(waiting, key=lambda shape: len(waiting[shape]))
                    most = waiting.pop(fullest)
                    job.encode(ready[0], most)
                    progress.update(len(most))
        for rest in waiting.values():
            assert ready is not None
            job.encode(ready[0], rest)
            progress.update(len(rest))
    for item in order.items:  # those whose content is another's that could not be encoded
        bad = [key for each in item.targets if (key := wanted.get(each.path, "")) in job.unsound]
        if bad and item.stem not in job.failed:
            job.fail_unsound(item, bad[0])
    counts = job.counts
    say(
        f"{name}: {counts['encoded']} encoded, {counts['spooled']} taken from the spool, "
        f"{counts['linked']} linked to an equal one, {counts['kept']} kept, "
        f"{len(job.failed)} items faulty"
    )
    if job.failed and order.dataset_settings.get("on_error") != "skip":
        raise SourceError(
            f"{len(job.failed)} of {len(order.items)} items are faulty: "
            + " | ".join(job.failed.values()),
            mend="the others are done and kept; mend these and give the same command again",
        )
    keys = {path: key for path, key in wanted.items() if stems[path] not in job.failed}
    done = Receipt(
        sources=job.sources,
        targets=job.deliver(keys),
        faults=job.faults,
        counts=counts,
        seconds=time.monotonic() - began,
    )
    done.write(receipt)
    return done


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


def _recipe(order: WorkOrder) -> dict[str, object]:
    """Return the recipe of a model that had yet to be made when the order was written."""
    model = Model.model_validate(order.model_settings)
    if order.kind == "text":
        return recipe.text_recipe(model, recipe.text_weights_digests(model))
    dataset = Dataset.model_validate(order.dataset_settings)
    return recipe.latents_recipe(dataset, model, recipe.weights_digest(model.vae))


def _load(order: WorkOrder, threads: int, batch_size: int, say: Say) -> tuple[Encoder, int]:
    """Load the order's model; torch is imported here and not before there is work for it."""
    from latentmake.encoders import load

    return load.encoder(order, threads=threads, batch_size=batch_size, say=say)
