"""Adoption of ai-training's files as our cache files, where encoding would give the same shapes.

No network is loaded. That the model's encoders made a file from its item's present content is the
user's word; shape, dtype and values are checked. Each cache file is written atomically, so a killed
adoption resumes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentmake import digest
from latentmake.caches.inputs import caption_of
from latentmake.caches.job import read_source
from latentmake.caches.pixels import plain as pixels
from latentmake.errors import CacheError, SourceError
from latentmake.exchange.ai_training.naming import from_bytes
from latentmake.exchange.ai_training.orders import AdoptOrder, Text
from latentmake.exchange.ai_training.record import Record
from latentmake.files import atomic, cachefile
from latentmake.geometry.buckets import Size, placement
from latentmake.index.memo import target_stat
from latentmake.layouts import plain
from latentmake.plan.orders import FOLDER, Target, WorkItem, WorkOrder
from latentmake.plan.receipts import Receipt
from latentmake.plan.spool import spooled
from latentmake.plan.store import put_away
from latentmake.progress import Progress

if TYPE_CHECKING:
    import torch

__all__ = ["STATES", "adopt"]

STATES = ("adopted", "fresh already", "without a foreign file", "unfit", "out of date")
_ADOPTED, _FRESH, _WITHOUT, _UNFIT, _OUTDATED = STATES
_LEAST_THREADS = 4  # they wait for the disk most of the time


@dataclass
class _Outcome:
    """Outcome of one item.

    Attributes:
        counts: state -> number of targets.
        lines: messages about its files.
        targets: path -> stat and key of written targets.
        sources: path -> stat and digest of what was read.
        replaced: keys of replaced cache files.
    """

    counts: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)
    targets: dict[str, list[Any]] = field(default_factory=dict)
    sources: dict[str, list[Any]] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)

    def refuse(self, state: str, targets: int, line: str = "") -> None:
        """Count targets that are not adopted, and say why."""
        self.counts[state] += targets
        if line:
            self.lines.append(f"not adopted: {line}")


@dataclass
class _File:
    """A file of ai-training, valid in itself."""

    path: Path
    digest: str
    tensor: torch.Tensor


def adopt(order: AdoptOrder, *, say: Callable[[str], None], threads: int = 1) -> Counter[str]:
    """Adopt the stale targets of a run that have files beside their images.

    Args:
        order: of the run.
        say: receives each file that is not adopted and why, and the outcome.
        threads: number of cores.

    Returns:
        Number of targets in each of `STATES`.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    import torch

    torch.set_num_threads(1)  # many small files, one in each of our threads
    total = Counter({_FRESH: order.fresh, _WITHOUT: order.passed})
    pool = ThreadPoolExecutor(max(threads, _LEAST_THREADS))
    with (
        ExitStack() as stack,
        Progress(total=order.stale, desc="adopting", unit="target") as progress,
    ):
        stack.callback(pool.shutdown, cancel_futures=True)
        records: dict[Path, Record] = {}
        for number, name in enumerate(order.orders):
            work = WorkOrder.read(FOLDER / f"{name}.json")
            path = Path(f"cache/{work.dataset}/{work.model}/adopted.tsv")
            if path not in records:
                records[path] = stack.enter_context(Record(path))
            batch = _Batch(order, work, records[path])
            sources: dict[str, list[Any]] = {}
            targets: dict[str, list[Any]] = {}
            counts: Counter[str] = Counter()
            replaced: list[str] = []
            for item, outcome in zip(work.items, pool.map(batch.item, work.items), strict=True):
                for line in outcome.lines:
                    say(line)
                sources |= outcome.sources
                targets |= outcome.targets
                counts += outcome.counts
                replaced += outcome.replaced
                progress.update(len(item.targets))
            receipt = FOLDER / f"adopted-{order.planned}-{number}.receipt.json"
            Receipt(sources, targets, [], dict(counts), 0.0).write(receipt)
            for key in replaced:
                put_away(spooled(key), key)
            total += counts
    say(f"{order.run}: " + ", ".join(f"{total[state]} {state}" for state in STATES))
    return total


class _Batch:
    """Adoption for one work order."""

    def __init__(self, order: AdoptOrder, work: WorkOrder, record: Record) -> None:
        self.order = order
        self.work = work
        self.record = record
        self.root = order.roots[work.dataset]
        self.recipe_digest = digest.of_value(work.recipe)
        if work.kind == "latents":
            self.endings = [(order.ending or "", False)]
        else:
            self.endings = [(text.ending, text.tokens.padded) for text in order.texts]

    def item(self, item: WorkItem) -> _Outcome:
        """Adopt the targets of one item."""
        outcome, count = _Outcome(), len(item.targets)
        paths = [Path(f"{self.root}/{item.stem}{ending}") for ending, _ in self.endings]
        try:
            if not all(path.is_file() for path in paths):
                outcome.refuse(_WITHOUT, count)
                return outcome
            data, source = _read(item, outcome)
            if item.content not in (None, source):
                outcome.refuse(_OUTDATED, count, f"{item.source}: was edited just now")
                return outcome
            files = [
                self._file(path, padded)
                for path, (_, padded) in zip(paths, self.endings, strict=True)
            ]
            variants, metadata = self._fitting(item, data, files)
        except (CacheError, SourceError) as error:
            outcome.refuse(_UNFIT, count, str(error))
            return outcome
        except OSError as error:
            name = error.filename or item.source
            outcome.refuse(_UNFIT, count, f"{name}: cannot be read ({error.strerror})")
            return outcome
        outcome.counts[_WITHOUT] += count - len(variants)
        for target, variant in variants.items():
            key = cachefile.target_key(source, self.recipe_digest, variant)
            self._take(item, target, key, source, files, metadata, outcome)
        return outcome

    def _file(self, path: Path, padded: bool) -> _File:
        data = path.read_bytes()
        try:
            tensor = from_bytes(self.work.kind, padded, data)
        except CacheError as error:
            raise CacheError(error.what, where=path) from None
        if not tensor.isfinite().all():
            raise CacheError("holds values that are not finite", where=path)
        if not tensor.any():
            raise CacheError("holds nothing but zeros", where=path)
        return _File(path, digest.of_bytes(data), tensor)

    def _fitting(
        self, item: WorkItem, data: bytes, files: Sequence[_File]
    ) -> tuple[dict[Target, str], dict[str, str]]:
        """Return the targets that files fit, with their variants, and the header's metadata.

        Raises:
            CacheError: files fit none.
            SourceError: the item itself is faulty.
        """
        settings = self.work.dataset_settings
        if self.work.kind == "text":
            for file, text in zip(files, self.order.texts, strict=True):
                _check_text(file, text)
            return dict.fromkeys(item.targets, ""), {"caption": caption_of(data, item, settings)}
        latents, (file,), path = self.order.latents, files, item.source or ""
        assert latents is not None
        channels, factor = latents.channels, latents.factor
        original = pixels.upright_size(data, path, settings)
        found = tuple(file.tensor.shape)
        names: dict[tuple[int, int], str] = {}
        shapes: dict[tuple[int, int], tuple[int, ...]] = {}
        for size in self.order.sizes:
            placed = placement(original, size, settings, path)
            names[size] = placed.name
            shapes[size] = (
                channels,
                placed.target.height // factor,
                placed.target.width // factor,
            )
        if found not in shapes.values():
            wanted = " or ".join(str(list(each)) for each in dict.fromkeys(shapes.values()))
            raise CacheError(f"is {list(found)} and not {wanted}", where=file.path)
        sizes = {target: target.size or Size(0, 0) for target in item.targets}
        fitting = {target: names[size] for target, size in sizes.items() if shapes[size] == found}
        pixel = (found[2] * factor, found[1] * factor)
        return fitting, plain.latents_metadata(latents.scaling, latents.shift, original, pixel)

    def _take(
        self,
        item: WorkItem,
        target: Target,
        key: str,
        source: str,
        files: Sequence[_File],
        metadata: Mapping[str, str],
        outcome: _Outcome,
    ) -> None:
        """Write one cache file, or say why not."""
        path = Path(target.path)
        existing = _header(path)
        digests = " ".join(file.digest for file in files)
        if existing is not None and existing.key == key:
            outcome.counts[_FRESH] += 1
            return
        before = existing is not None and existing.adopted == digests and existing.source != source
        if before or any(self._is_of_other(file, key, source) for file in files):
            name = item.source or item.stem
            line = f"{files[0].path}: is of what {name} held before it was edited"
            outcome.refuse(_OUTDATED, 1, line)
            return
        try:
            tensors = self._tensors(files)
        except CacheError as error:
            outcome.refuse(_UNFIT, 1, str(error))
            return
        for file in files:
            self.record.note(self._name(file), file.digest, source)
        stamp = cachefile.stamp(key=key, source=source, recipe=self.work.recipe)
        header = {**metadata, **stamp, cachefile.ADOPTED: digests}
        atomic.write(path, cachefile.serialize(tensors, header))
        outcome.targets[target.path] = [*target_stat(path.stat()), key]
        outcome.counts[_ADOPTED] += 1
        if existing is not None:
            outcome.replaced.append(existing.key)

    def _is_of_other(self, file: _File, key: str, source: str) -> bool:
        """Whether a file is known to be of other content than its item's present one."""
        if (stamped := _header(file.path)) is not None:  # an export of ours
            return stamped.key != key
        return self.record.is_of_other(self._name(file), file.digest, source)

    def _name(self, file: _File) -> str:
        return str(file.path).removeprefix(f"{self.root}/")

    def _tensors(self, files: Sequence[_File]) -> dict[str, torch.Tensor]:
        """Return the files' tensors under our names, in the model's dtype."""
        from latentmake.caches.encoders.device import DTYPES

        name = str(self.work.recipe["dtype"])
        tensors: dict[str, torch.Tensor] = {}
        for index, file in enumerate(files):
            stored = file.tensor.to(DTYPES[name])
            if stored is not file.tensor and not stored.isfinite().all():
                raise CacheError(f"holds values too large for {name}", where=file.path)
            latents = self.work.kind == "latents"
            tensors[plain.LATENTS if latents else plain.hidden_state(index)] = stored
        return tensors


def _read(item: WorkItem, outcome: _Outcome) -> tuple[bytes, str]:
    """Return the bytes of an item's source and their digest."""
    if item.source is None:
        data = (item.text or "").encode()
        return data, digest.of_bytes(data)
    return read_source(item.source, outcome.sources)


def _header(path: Path) -> cachefile.Header | None:
    try:
        return cachefile.read_header(path)
    except (CacheError, OSError):
        return None


def _check_text(file: _File, text: Text) -> None:
    shape, longest = tuple(file.tensor.shape), text.tokens.longest
    tokens = range(longest if text.tokens.padded else 1, longest + 1)
    if len(shape) == 2 and shape[0] in tokens and shape[1] == text.width:
        return
    wanted = longest if text.tokens.padded else f"1 to {longest}"
    raise CacheError(f"is {list(shape)} and not [{wanted}, {text.width}]", where=file.path)
