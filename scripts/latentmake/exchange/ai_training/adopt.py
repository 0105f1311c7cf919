"""Adoption: what another program encoded becomes our cache files, where it is what we would make.

No network is loaded. A file is taken on the user's word that the model's encoders made it of what
its item holds now; whatever can be checked is. Each cache file appears whole or not at all, so a
killed adoption goes on where it was.
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
from latentmake.exchange.ai_training import of
from latentmake.exchange.ai_training.orders import AdoptOrder
from latentmake.exchange.ai_training.record import Record
from latentmake.files import atomic, cachefile
from latentmake.geometry.buckets import Placement, Size, placement
from latentmake.index.memo import target_stat
from latentmake.layouts import plain
from latentmake.plan.orders import FOLDER, Receipt, Target, WorkItem, WorkOrder, spooled
from latentmake.plan.store import put_away
from latentmake.progress import Progress

if TYPE_CHECKING:
    import torch

__all__ = ["STATES", "adopt"]

STATES = ("adopted", "fresh already", "without a foreign file", "unfit", "out of date")
_ADOPTED, _FRESH, _WITHOUT, _UNFIT, _OUTDATED = STATES
_LEAST_THREADS = 4  # which wait for the disk most of the time


@dataclass
class _Outcome:
    """What became of one item.

    Attributes:
        counts: state -> number of targets.
        lines: what is to be said of its files.
        targets: path -> stat and key of those that stand now.
        sources: path -> stat and digest of what was read.
        replaced: keys of what was replaced.
    """

    counts: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)
    targets: dict[str, list[Any]] = field(default_factory=dict)
    sources: dict[str, list[Any]] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)


@dataclass
class _File:
    """A file of the other program, read and sound in itself."""

    path: Path
    digest: str
    tensor: torch.Tensor


def adopt(order: AdoptOrder, *, say: Callable[[str], None], threads: int = 1) -> Counter[str]:
    """Adopt what of a run is stale and lies beside its images.

    Args:
        order: what to adopt.
        say: told of each file that is left out and why, and of the outcome.
        threads: how many cores to use.

    Returns:
        How many targets are in which of `STATES`.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    import torch

    torch.set_num_threads(1)  # each file is small; they are worked on side by side
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
            whole = _Outcome()
            for item, outcome in zip(work.items, pool.map(batch.item, work.items), strict=True):
                for line in outcome.lines:
                    say(line)
                whole.counts += outcome.counts
                whole.targets |= outcome.targets
                whole.sources |= outcome.sources
                whole.replaced += outcome.replaced
                progress.update(len(item.targets))
            total += whole.counts
            receipt = FOLDER / f"adopted-{order.planned}-{number}.receipt.json"
            Receipt(whole.sources, whole.targets, [], dict(whole.counts), 0.0).write(receipt)
            for key in whole.replaced:
                put_away(spooled(key), key)
    say(f"{order.run}: " + ", ".join(f"{total[state]} {state}" for state in STATES))
    return total


class _Batch:
    """The adoption of what one work order asks for."""

    def __init__(self, order: AdoptOrder, work: WorkOrder, record: Record) -> None:
        self.order = order
        self.work = work
        self.record = record
        self.naming = of(order.naming)
        self.recipe_digest = digest.of_value(work.recipe)
        if work.kind == "latents":
            self.endings = [(order.ending or "", False)]
        else:
            self.endings = [(text.ending, text.tokens.padded) for text in order.texts]

    def item(self, item: WorkItem) -> _Outcome:
        """Adopt the targets of one item, as far as that can be."""
        outcome = _Outcome()
        state, line = self._try(item, outcome)
        if state is not None:
            outcome.counts[state] += len(item.targets)
        if line:
            outcome.lines.append(line)
        return outcome

    def _try(self, item: WorkItem, outcome: _Outcome) -> tuple[str | None, str]:
        """Return the state of all targets and what is to be said of it; None: they are counted."""
        base = f"{self.order.roots[self.work.dataset]}/{item.stem}"
        paths: list[Path] = []
        for ending, _ in self.endings:
            path = self.naming.find(base, ending)
            if path is None:
                return _WITHOUT, ""
            paths.append(path)
        try:
            data, source = _read(item, outcome)
            if item.content not in (None, source):
                return _OUTDATED, f"not adopted: {item.source}: was edited just now"
            padded = [pads for _, pads in self.endings]
            files = [self._file(*each) for each in zip(paths, padded, strict=True)]
            fitting, metadata = self._fitting(item, data, files)
        except (CacheError, SourceError) as error:
            return _UNFIT, f"not adopted: {error}"
        except OSError as error:
            name = error.filename or item.source
            return _UNFIT, f"not adopted: {name}: cannot be read ({error.strerror})"
        outcome.counts[_WITHOUT] += len(item.targets) - len(fitting)
        for target, variant in fitting.items():
            key = cachefile.target_key(source, self.recipe_digest, variant)
            self._take(item, target, key, source, files, metadata, outcome)
        return None, ""

    def _file(self, path: Path, padded: bool) -> _File:
        data = path.read_bytes()
        try:
            tensor = self.naming.read(self.work.kind, padded, data)
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
        """Return the targets that some files fit with their variants, and what their headers say.

        Raises:
            CacheError: none of them.
            SourceError: the item itself is faulty.
        """
        settings = self.work.dataset_settings
        if self.work.kind == "text":
            for file, text in zip(files, self.order.texts, strict=True):
                _check_text(file, text.tokens.longest, text.tokens.padded, text.width)
            return dict.fromkeys(item.targets, ""), {"caption": caption_of(data, item, settings)}
        latents, (file,), path = self.order.latents, files, item.source or ""
        assert latents is not None
        original = pixels.upright_size(data, path, settings)

        def shape(placed: Placement) -> tuple[int, ...]:
            target = placed.target
            return (
                latents.channels,
                target.height // latents.factor,
                target.width // latents.factor,
            )

        placed = {size: placement(original, size, settings, path) for size in self.order.sizes}
        shapes = {size: shape(each) for size, each in placed.items()}
        found = tuple(file.tensor.shape)
        if found not in shapes.values():
            wanted = " or ".join(str(list(each)) for each in dict.fromkeys(shapes.values()))
            raise CacheError(f"is {list(found)} and not {wanted}", where=file.path)
        pixel = (found[2] * latents.factor, found[1] * latents.factor)
        sizes = {each: each.size or Size(0, 0) for each in item.targets}
        fitting = {each: placed[size].name for each, size in sizes.items() if shapes[size] == found}
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
        there = _header(target.path)
        digests = " ".join(file.digest for file in files)
        if there is not None and there.key == key:
            outcome.counts[_FRESH] += 1
            return
        before = there is not None and there.adopted == digests and there.source != source
        if before or any(self._is_of_other(file, key, source) for file in files):
            outcome.counts[_OUTDATED] += 1
            name = item.source or item.stem
            outcome.lines.append(
                f"not adopted: {files[0].path}: is of what {name} held before it was edited"
            )
            return
        try:
            tensors = self._tensors(files)
        except CacheError as error:
            outcome.counts[_UNFIT] += 1
            outcome.lines.append(f"not adopted: {error}")
            return
        for file in files:
            self.record.note(self._name(file), file.digest, source)
        stamp = cachefile.stamp(key=key, source=source, recipe=self.work.recipe)
        header = {**metadata, **stamp, cachefile.ADOPTED: digests}
        atomic.write(Path(target.path), cachefile.serialize(tensors, header))
        outcome.targets[target.path] = [*target_stat(Path(target.path).stat()), key]
        outcome.counts[_ADOPTED] += 1
        if there is not None:
            outcome.replaced.append(there.key)

    def _is_of_other(self, file: _File, key: str, source: str) -> bool:
        """Whether a file is known to be of other content than its item holds now."""
        if (stamped := _header(file.path)) is not None:  # we exported it, and it says of what
            return stamped.key != key
        return self.record.is_of_other(self._name(file), file.digest, source)

    def _name(self, file: _File) -> str:
        return str(file.path).removeprefix(f"{self.order.roots[self.work.dataset]}/")

    def _tensors(self, files: Sequence[_File]) -> dict[str, torch.Tensor]:
        """Return what the files hold under our names, in the model's number format."""
        from latentmake.caches.encoders.device import DTYPES

        name = str(self.work.recipe["dtype"])
        tensors: dict[str, torch.Tensor] = {}
        for index, file in enumerate(files):
            stored = file.tensor.to(DTYPES[name])
            if stored is not file.tensor and not stored.isfinite().all():
                raise CacheError(f"holds values too large for {name}", where=file.path)
            if self.work.kind == "latents":
                tensors[plain.LATENTS] = stored
            else:
                tensors[plain.hidden_state(index)] = stored
        return tensors


def _read(item: WorkItem, outcome: _Outcome) -> tuple[bytes, str]:
    """Return the bytes of an item's source and their digest."""
    if item.source is None:
        data = (item.text or "").encode()
        return data, digest.of_bytes(data)
    return read_source(item.source, outcome.sources)


def _header(path: str | Path) -> cachefile.Header | None:
    try:
        return cachefile.read_header(path)
    except (CacheError, OSError):
        return None


def _check_text(file: _File, longest: int, padded: bool, width: int) -> None:
    shape = tuple(file.tensor.shape)
    sound = len(shape) == 2 and shape[1] == width
    if sound and (shape[0] == longest if padded else 1 <= shape[0] <= longest):
        return
    tokens = longest if padded else f"1 to {longest}"
    raise CacheError(f"is {list(shape)} and not [{tokens}, {width}]", where=file.path)
