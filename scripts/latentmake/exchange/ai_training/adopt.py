"""Adoption of ai-training's files as our cache files, where encoding would give the same shapes.

No network is loaded. That the model's encoders made a file from its item's present content is the
user's word; shape, dtype and values are checked. Each cache file is written atomically, so a killed
adoption resumes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from latentmake import digest
from latentmake.caches.inputs import caption_of
from latentmake.caches.pixels import plain as pixels
from latentmake.caches.reading import read_source
from latentmake.errors import CacheError, SourceError
from latentmake.exchange.adoption import (
    ADOPTED,
    FRESH,
    STATES,
    UNFIT,
    WITHOUT,
    Adoption,
    OutdatedError,
    adopt_all,
    header_of,
    state_of,
)
from latentmake.exchange.ai_training.naming import from_bytes
from latentmake.exchange.ai_training.orders import AdoptOrder, Text
from latentmake.exchange.record import Record
from latentmake.files import atomic, cachefile
from latentmake.geometry.buckets import Size, placement
from latentmake.index.memo import target_stat
from latentmake.layouts import plain
from latentmake.plan.orders import Target, WorkItem, WorkOrder

if TYPE_CHECKING:
    import torch

__all__ = ["STATES", "adopt"]


class _File(NamedTuple):
    """A file of ai-training, valid in itself."""

    path: Path
    digest: str
    tensor: torch.Tensor


class _Fit(NamedTuple):
    """Files of an item, and the targets that they fit.

    Attributes:
        source: digest of the item's source.
        files: one of latents, or one of each text encoder.
        variants: target -> part of its key.
        metadata: of the header.
    """

    source: str
    files: list[_File]
    variants: dict[Target, str]
    metadata: dict[str, str]


def adopt(order: AdoptOrder, *, say: Callable[[str], None], threads: int = 1) -> Counter[str]:
    """Adopt the stale targets of a run that have files beside their images.

    Returns:
        Number of targets in each of `STATES`.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    import torch

    torch.set_num_threads(1)  # many small files, one in each of our threads
    adoption = Adoption(
        order.run, order.orders, order.fresh, order.passed, order.stale, order.planned
    )
    return adopt_all(
        adoption, lambda work, record: _Batch(order, work, record), say=say, threads=threads
    )


class _Batch:
    """Adoption for one work order, in several threads.

    Attributes:
        sources: path -> stat and digest of what was read.
        targets: path -> stat and key of written targets.
        replaced: keys of replaced cache files.
    """

    def __init__(self, order: AdoptOrder, work: WorkOrder, record: Record) -> None:
        self.order = order
        self.work = work
        self.record = record
        self.root = order.roots[work.dataset]
        self.recipe_digest = digest.of_value(work.recipe)
        self.endings = [(order.ending or "", False)]
        if work.kind == "text":
            self.endings = [(text.ending, text.tokens.padded) for text in order.texts]
        self.sources: dict[str, list[Any]] = {}
        self.targets: dict[str, list[Any]] = {}
        self.replaced: list[str] = []

    def item(self, item: WorkItem) -> tuple[Counter[str], list[str]]:
        """Adopt an item's targets; return their number by state, and why files do not fit."""
        paths = [Path(f"{self.root}/{item.stem}{ending}") for ending, _ in self.endings]
        if not all(path.is_file() for path in paths):
            return Counter({WITHOUT: len(item.targets)}), []
        try:
            fit = self._fit(item, paths)
        except (CacheError, SourceError) as error:
            return Counter({state_of(error): len(item.targets)}), [f"not adopted: {error}"]
        except OSError as error:
            line = f"{error.filename or item.source}: cannot be read ({error.strerror})"
            return Counter({UNFIT: len(item.targets)}), [f"not adopted: {line}"]
        counts = Counter({WITHOUT: len(item.targets) - len(fit.variants)})
        lines = []
        for target, variant in fit.variants.items():
            try:
                counts[self._take(item, target, variant, fit)] += 1
            except CacheError as error:
                counts[state_of(error)] += 1
                lines.append(f"not adopted: {error}")
        return counts, lines

    def _fit(self, item: WorkItem, paths: Sequence[Path]) -> _Fit:
        """Read files, and find the targets that they fit.

        Raises:
            CacheError: they are damaged, fit no target, or the item was edited.
            SourceError: the item itself is faulty.
            OSError: something cannot be read.
        """
        if item.source is None:
            data = (item.text or "").encode()
            source = digest.of_bytes(data)
        else:
            data, source = read_source(item.source, self.sources)
        if item.content not in (None, source):
            raise OutdatedError("was edited just now", where=item.source or item.stem)
        files = [
            _read(path, self.work.kind, padded)
            for path, (_, padded) in zip(paths, self.endings, strict=True)
        ]
        if self.work.kind == "text":
            for file, text in zip(files, self.order.texts, strict=True):
                _check_text(file, text)
            caption = caption_of(data, item, self.work.dataset_settings)
            return _Fit(source, files, dict.fromkeys(item.targets, ""), {"caption": caption})
        return _Fit(source, files, *self._fit_latents(item, data, files[0]))

    def _fit_latents(
        self, item: WorkItem, data: bytes, file: _File
    ) -> tuple[dict[Target, str], dict[str, str]]:
        latents, settings = self.order.latents, self.work.dataset_settings
        assert latents is not None
        path = item.source or ""
        original = pixels.upright_size(data, path, settings)
        placed = {size: placement(original, size, settings, path) for size in self.order.sizes}
        shapes = {
            size: (latents.channels, *(side // latents.factor for side in each.target[::-1]))
            for size, each in placed.items()
        }
        found = tuple(file.tensor.shape)
        if found not in shapes.values():
            wanted = " or ".join(str(list(each)) for each in dict.fromkeys(shapes.values()))
            raise CacheError(f"is {list(found)} and not {wanted}", where=file.path)
        sizes = {target: target.size or Size(0, 0) for target in item.targets}
        variants = {
            target: placed[size].name for target, size in sizes.items() if shapes[size] == found
        }
        pixel = (found[2] * latents.factor, found[1] * latents.factor)
        return variants, plain.latents_metadata(latents.scaling, latents.shift, original, pixel)

    def _take(self, item: WorkItem, target: Target, variant: str, fit: _Fit) -> str:
        """Write one cache file; return its state.

        Raises:
            CacheError: the files are of other content, or have too large values.
            StorageError: the disk is full or cannot be written.
        """
        key = cachefile.target_key(fit.source, self.recipe_digest, variant)
        path = Path(target.path)
        existing = header_of(path)
        if existing is not None and existing.key == key:
            return FRESH
        digests = " ".join(file.digest for file in fit.files)
        before = (
            existing is not None and existing.adopted == digests and existing.source != fit.source
        )
        if before or any(self._is_of_other(file, key, fit.source) for file in fit.files):
            name = item.source or item.stem
            what = f"is of what {name} held before it was edited"
            raise OutdatedError(what, where=fit.files[0].path)
        tensors = self._tensors(fit.files)
        for file in fit.files:
            self.record.note(self._name(file), file.digest, fit.source)
        stamp = cachefile.stamp(key=key, source=fit.source, recipe=self.work.recipe)
        header = {**fit.metadata, **stamp, cachefile.ADOPTED: digests}
        atomic.write(path, cachefile.serialize(tensors, header))
        self.targets[target.path] = [*target_stat(path.stat()), key]
        if existing is not None:
            self.replaced.append(existing.key)
        return ADOPTED

    def _is_of_other(self, file: _File, key: str, source: str) -> bool:
        """Whether a file is known to be of other content than its item's present one."""
        if (stamped := header_of(file.path)) is not None:  # an export of ours
            return stamped.key != key
        return self.record.is_of_other(self._name(file), file.digest, source)

    def _name(self, file: _File) -> str:
        return str(file.path).removeprefix(f"{self.root}/")

    def _tensors(self, files: Sequence[_File]) -> dict[str, torch.Tensor]:
        """Return the files' tensors under our names, in the model's dtype."""
        from latentmake.caches.encoders.device import DTYPES

        dtype = str(self.work.recipe["dtype"])
        latents = self.work.kind == "latents"
        tensors: dict[str, torch.Tensor] = {}
        for index, file in enumerate(files):
            stored = file.tensor.to(DTYPES[dtype])
            if stored is not file.tensor and not stored.isfinite().all():
                raise CacheError(f"holds values too large for {dtype}", where=file.path)
            tensors[plain.LATENTS if latents else plain.hidden_state(index)] = stored
        return tensors


def _read(path: Path, kind: str, padded: bool) -> _File:
    data = path.read_bytes()
    try:
        tensor = from_bytes(kind, padded, data)
    except CacheError as error:
        raise CacheError(error.what, where=path) from None
    if not tensor.isfinite().all():
        raise CacheError("holds values that are not finite", where=path)
    if not tensor.any():
        raise CacheError("holds nothing but zeros", where=path)
    return _File(path, digest.of_bytes(data), tensor)


def _check_text(file: _File, text: Text) -> None:
    shape, longest = tuple(file.tensor.shape), text.tokens.longest
    tokens = range(longest if text.tokens.padded else 1, longest + 1)
    if len(shape) == 2 and shape[0] in tokens and shape[1] == text.width:
        return
    wanted = longest if text.tokens.padded else f"1 to {longest}"
    raise CacheError(f"is {list(shape)} and not [{wanted}, {text.width}]", where=file.path)
