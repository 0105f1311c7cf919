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
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from latentmake import digest
from latentmake.caches.inputs import Sample, samples_of
from latentmake.caches.pixels.plain import upright_size
from latentmake.errors import CacheError, SourceError
from latentmake.files import atomic, cachefile
from latentmake.geometry.buckets import Size
from latentmake.index.memo import source_stat, target_stat
from latentmake.layouts import Layout
from latentmake.plan.orders import Target, WorkItem, WorkOrder, spooled
from latentmake.plan.store import stored
from latentmake.progress import Progress
from latentmake.sources import s3

__all__ = [
    "Encoder",
    "ExternalEncoder",
    "Job",
    "Load",
    "Loaded",
    "Reading",
    "Sample",
    "Say",
    "read_source",
]

Say = Callable[[str], None]


Encoded = list[tuple[dict[str, Any], dict[str, str]]]
Encoder = Callable[[list[Sample]], Encoded]
"""Encodes samples of one shape to (tensors by name, further metadata) each."""


class Loaded(NamedTuple):
    """An encoder, ready.

    Attributes:
        encode: encodes samples of one shape.
        size: how many it shall get at once.
        frugal: encodes one sample in less memory and more time, to the same bytes.
        remarks: what there is to say, a line each, when all is encoded.
    """

    encode: Encoder
    size: int
    frugal: Encoder | None = None
    remarks: Callable[[], list[str]] = list


Load = Callable[[], Loaded]


class Refusal(NamedTuple):
    """Why a target cannot be made.

    Attributes:
        source: digest of what it was to be made from; "" where the next build shall try again.
        what: what is wrong.
        mend: what to do about it.
    """

    source: str
    what: str
    mend: str


class Reading(NamedTuple):
    """What reading one item gave.

    Attributes:
        item: that was read.
        content: digest of its source.
        keys: of all its targets that do not stand already.
        samples: of those that must be encoded.
        missing: those, with their keys.
        kept: how many targets stand already.
        fault: what is wrong with the source, in a line.
        sources: path -> stat and digest of each file that was read.
    """

    item: WorkItem
    content: str
    keys: dict[Target, str]
    samples: list[Sample]
    missing: dict[Target, str]
    kept: int
    fault: str | None
    sources: dict[str, list[Any]]


def read_source(path: str, sources: dict[str, list[Any]]) -> tuple[bytes, str]:
    """Return the bytes of a source and their digest.

    Args:
        path: on a disk or on S3.
        sources: gets its stat and digest, for the receipt.

    Raises:
        OSError: it cannot be read.
        SourceError: it cannot be fetched.
    """
    if s3.is_remote(path):
        data, stat = s3.read(path)
    else:
        with Path(path).open("rb") as file:
            stat = source_stat(os.fstat(file.fileno()))
            data = file.read()
    content = digest.of_bytes(data)
    sources[path] = [*stat, content]
    return data, content


@dataclass
class Job:
    """The state of a work order that is being carried out."""

    order: WorkOrder
    recipe: dict[str, object]
    say: Say
    kept: dict[str, str] = field(default_factory=dict)
    places: dict[str, Path] = field(default_factory=dict)
    wanted: dict[str, tuple[WorkItem, str]] = field(default_factory=dict)
    sources: dict[str, list[Any]] = field(default_factory=dict)
    faults: list[dict[str, str]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("encoded", "spooled", "linked", "kept"), 0)
    )

    def __post_init__(self) -> None:
        self.recipe_digest = digest.of_value(self.recipe)

    @cached_property
    def _layout(self) -> Layout:
        return self.order.layout

    # -- reading ------------------------------------------------------------------------------

    def read(self, item: WorkItem) -> Reading:
        """Read an item's source, and decode it unless all its targets are there already."""
        sources: dict[str, list[Any]] = {}
        try:
            if item.source is None:
                data = (item.text or "").encode()
                content = digest.of_bytes(data)
            else:
                data, content = read_source(item.source, sources)
            control = b""
            if item.control is not None:
                control, other = read_source(item.control, sources)
                content = digest.of_lines([content, other])
        except SourceError as error:
            return Reading(item, "", {}, [], {}, 0, str(error), sources)
        except OSError as error:
            path = error.filename or item.place
            line = SourceError(
                f"cannot be read ({error.strerror})",
                where=path,
                mend="check that the file exists and is readable",
            )
            return Reading(item, "", {}, [], {}, 0, str(line), sources)
        try:
            wanted = self._keys(item, data, content, sources)
        except SourceError as error:
            return Reading(item, content, {}, [], {}, 0, str(error), sources)
        keys: dict[Target, str] = {}
        missing: dict[Target, str] = {}
        kept = 0
        for target, key in wanted.items():
            if self._stands(target, key):
                kept += 1
                self.kept[target.path] = key
                continue
            keys[target] = key
            if not self._finished(key, target):
                missing[target] = key
        if not missing:
            return Reading(item, content, keys, [], {}, kept, None, sources)
        try:
            samples = samples_of(self.order, item, data, control, content, missing)
        except SourceError as error:
            return Reading(item, content, {}, [], {}, kept, str(error), sources)
        return Reading(item, content, keys, samples, missing, kept, None, sources)

    def _keys(
        self, item: WorkItem, data: bytes, content: str, sources: dict[str, list[Any]]
    ) -> dict[Target, str]:
        """Return the key of each target of an item; its receipt learns the size of an image."""
        size, settings = Size(0, 0), self.order.dataset_settings
        if item.media is not None:
            size = Size(item.media.width, item.media.height)
        elif self.order.kind == "latents" and item.source is not None:
            size = upright_size(data, item.source, settings)
            sources[item.source] += [*size, settings.exif_rotation]
        return {
            target: cachefile.target_key(
                content,
                self.recipe_digest,
                self._layout.variant(target.size, size, settings, target.clip),
            )
            for target in item.targets
        }

    def _stands(self, target: Target, key: str) -> bool:
        if target.found is None and target.path not in self.kept:
            return False
        try:
            return cachefile.read_header(target.path).key == key
        except (CacheError, OSError):
            return False

    def _finished(self, key: str, target: Target) -> bool:
        """Find a file that holds a target: in the spool, in the store, or under another name."""
        for path in (spooled(key), stored(key), *map(Path, target.at_hand)):
            try:
                if cachefile.read_header(path).key == key:
                    self.places[key] = path
                    return True
            except (CacheError, OSError):
                continue  # not there, or cut short by a power failure
        return False

    def readings(self, items: Sequence[WorkItem], threads: int) -> Iterator[Reading]:
        """Yield items read, a few of them ahead."""
        if any(s3.is_remote(item.source or "") for item in items):
            threads = max(threads, s3.SIDE_BY_SIDE // 2)  # which wait most of the time
        with ThreadPoolExecutor(threads) as pool:
            ahead: deque[Future[Reading]] = deque()
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

    def encode(self, loaded: Loaded, samples: list[Sample]) -> None:
        """Encode samples of one shape into the spool.

        Where memory runs out: half of them at a time, and one alone in the frugal way. What does
        not fit then is refused: no target's bytes depend on how much memory was free.
        """
        from latentmake.caches.encoders.device import within_memory

        groups = [samples]
        while groups:
            group = groups.pop()
            results = within_memory(loaded.encode, group)
            if results is None and len(group) > 1:
                half = len(group) // 2
                self.say(f"out of memory with {len(group)} at once: trying half as many")
                groups += [group[half:], group[:half]]
                continue
            if results is None and loaded.frugal is not None:
                self.say(f"out of memory with one of {group[0].shape}: trying it in less memory")
                results = within_memory(loaded.frugal, group)
            if results is None:
                self.refused[group[0].key] = self._too_large(group[0])
                self.refuse(group[0].item, group[0].key)
                continue
            self._store_all(group, results)

    def _store_all(self, samples: list[Sample], results: Encoded) -> None:
        for sample, (tensors, metadata) in zip(samples, results, strict=True):
            self.store(sample.item, sample.key, sample.source, tensors, metadata)

    def _too_large(self, sample: Sample) -> Refusal:
        """Say that a sample does not fit into memory, and what would help."""
        what = "memory does not suffice to encode it, even alone"
        if not sample.shape:
            return Refusal("", what, "end other programs and give the same command again")
        what += f" ({' x '.join(map(str, sample.shape[:-1]))} pixels)"
        mend = "end other programs and give the same command again, or lower the resolution"
        if self.order.model_settings.spec.wan and not self.order.model_settings.vae_cache_cpu:
            mend += "; `vae_cache_cpu: true` in the model makes all its latents anew, in tiles"
        return Refusal("", what, mend)

    def store(
        self,
        item: WorkItem,
        key: str,
        source: str,
        tensors: dict[str, Any],
        metadata: dict[str, str],
    ) -> None:
        """Put a finished target into the spool, or note that it is unsound.

        Args:
            item: whose target it is.
            key: its key.
            source: digest of what it was made from.
            tensors: by name.
            metadata: for its header, besides our own.
        """
        if fault := _unsound(tensors):
            mend = "use dtype: float32, or look at the picture and at the model"
            self.refused[key] = Refusal(source, f"the encoder returned {fault}", mend)
            self.refuse(item, key)
            return
        stamp = cachefile.stamp(key=key, source=source, recipe=self.recipe)
        atomic.write(spooled(key), self._file(tensors, metadata, stamp))
        self.places[key] = spooled(key)
        self.counts["encoded"] += 1

    def _file(
        self, tensors: dict[str, Any], metadata: dict[str, str], stamp: dict[str, str]
    ) -> bytes:
        if not self._layout.npz:
            return cachefile.serialize(tensors, metadata | stamp)
        from latentmake.caches.encoders.sdscripts_arrays import file_bytes

        return file_bytes(self.order.kind, self.order.model_settings, tensors, stamp)

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

    def refuse(self, item: WorkItem, key: str) -> None:
        """Note an item whose content cannot be encoded."""
        source, what, mend = self.refused[key]
        self.fail(item, source, str(SourceError(what, where=item.place, mend=mend)))

    # -- all of it ----------------------------------------------------------------------------

    def make(
        self, items: Sequence[WorkItem], load: Load, *, threads: int, progress: Progress
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
            self.encode(load(), samples)
            progress.update(len(samples))

        for reading in self.readings(items, threads):
            new = {sample.key: sample for sample in reading.samples if sample.key not in making}
            progress.update(len(reading.item.targets) - len(new))
            self.take_in(reading, set(new), making)
            for sample in new.values():
                same = waiting.setdefault(sample.shape, [])
                same.append(sample)
                size = load().size
                if len(same) >= size:
                    flush(sample.shape)
                elif sum(map(len, waiting.values())) > 4 * size:
                    flush(max(waiting, key=lambda shape: len(waiting[shape])))
        for shape in list(waiting):
            flush(shape)
        self.refuse_twins()

    def refuse_twins(self) -> None:
        """Note as faulty whatever has the content of another item that was refused."""
        for item, key in self.wanted.values():
            if key in self.refused and item.stem not in self.failed:
                self.refuse(item, key)

    def take_in(self, reading: Reading, new: set[str], making: set[str]) -> None:
        """Note what reading an item gave.

        Args:
            reading: of the item.
            new: keys that are encoded for it.
            making: keys that are being encoded, for others too; gets those of this item.
        """
        item = reading.item
        self.sources |= reading.sources
        if item.content is not None and reading.content not in ("", item.content):
            self.say(
                f"{item.source}: was edited after this build was planned; what is made of it is of "
                "what it holds now"
            )
        if reading.fault is not None:
            self.fail(item, reading.content, reading.fault)
        self.counts["kept"] += reading.kept
        uncounted = set(new)
        for target, key in reading.keys.items():
            self.wanted[target.path] = (item, key)
            if key in uncounted:
                uncounted.remove(key)  # is counted when it is encoded
                continue
            # The same content twice is encoded once.
            is_spooled = self.places.get(key) == spooled(key) and key not in making | new
            self.counts["spooled" if is_spooled else "linked"] += 1
        making.update(reading.keys.values())

    def lost(self) -> list[WorkItem]:
        """Return the items whose files another build took away since they were counted."""
        return list(
            {
                (item.stem, item.text): item
                for item, key in self.wanted.values()
                if item.stem not in self.failed and not self.places.get(key, spooled(key)).is_file()
            }.values()
        )

    def deliver(self) -> list[WorkItem]:
        """Give the files of all sound items their names.

        Returns:
            The items of files that another build took away just now: they must be made again.
        """
        standing: dict[str, Path] = {}
        lost: dict[tuple[str, str | None], WorkItem] = {}
        for path, (item, key) in list(self.wanted.items()):
            if item.stem in self.failed:
                continue
            # Another plan may tidy the spool as soon as a file in it has its name.
            for there in (self.places.get(key), spooled(key), standing.get(key)):
                if there is not None and _linked(there, Path(path), key):
                    standing[key] = Path(path)
                    self.kept[path] = key
                    del self.wanted[path]
                    break
            else:
                lost[item.stem, item.text] = item
        return list(lost.values())

    def standing(self) -> dict[str, list[Any]]:
        """Return path -> stat (size, mtime_ns, inode) and key of every target that stands."""
        return {path: [*target_stat(Path(path).stat()), key] for path, key in self.kept.items()}


class ExternalEncoder(Protocol):
    """An encoder of another program."""

    def __call__(
        self, job: Job, items: Sequence[WorkItem], *, threads: int, progress: Progress
    ) -> None:
        """Put the missing targets of some items into the job's spool."""


def _linked(existing: Path, path: Path, key: str) -> bool:
    """Give the file of a key a further name; False where it is gone, or another one by now."""
    try:
        if existing.parts[0] == path.parts[0] and cachefile.read_header(existing).key != key:
            return False  # another job has made it anew meanwhile; those of spool and store stay
        atomic.link(existing, path)
    except (FileNotFoundError, CacheError):
        return False
    return True


def _unsound(tensors: dict[str, Any]) -> str | None:
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            return f"values that are not finite ({name})"
        if not tensor.any():
            return f"nothing but zeros ({name})"
    return None
