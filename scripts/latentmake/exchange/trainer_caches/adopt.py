"""Adoption of the caches of musubi-tuner and sd-scripts: bytes are kept, and stamped with our key.

A file must have the name, the tensors and the shapes that a target is to have; that its image is
the present one, and its weights are the model's, is the user's word. The folder stays as it is.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from latentmake import digest
from latentmake.caches.identify import identified
from latentmake.caches.inputs import SourceBytes
from latentmake.caches.keyed_files import link_of_key
from latentmake.caches.reading import Reading
from latentmake.errors import CacheError, SourceError
from latentmake.exchange.adoption import (
    ADOPTED,
    FRESH,
    UNFIT,
    WITHOUT,
    OutdatedError,
    adopt_all,
    header_of,
    state_of,
)
from latentmake.exchange.record import Record
from latentmake.exchange.trainer_caches import arrays, tensors
from latentmake.exchange.trainer_caches.order import CachesOrder
from latentmake.files import atomic, cachefile
from latentmake.index.memo import target_stat
from latentmake.plan.orders import Target, WorkItem, WorkOrder

__all__ = ["adopt"]


def adopt(order: CachesOrder, *, say: Callable[[str], None], threads: int = 1) -> Counter[str]:
    """Adopt the stale targets of a run that have files in the folders of their datasets.

    Returns:
        Number of targets in each of `adoption.STATES`.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    return adopt_all(
        order.adoption, lambda work, record: _Batch(order, work, record), say=say, threads=threads
    )


class _Batch:
    """Adoption for one work order, in several threads; see `adoption.Batch`."""

    def __init__(self, order: CachesOrder, work: WorkOrder, record: Record) -> None:
        self.sources: dict[str, list[Any]] = {}
        self.targets: dict[str, list[Any]] = {}
        self.replaced: list[str] = []
        self._work = work
        self._record = record
        self._folders = order.folders[work.dataset]
        self._recipe = digest.of_value(work.recipe)
        self._format = arrays if work.layout.npz else tensors
        self._made: dict[str, Path] = {}
        self._lock = threading.Lock()

    def item(self, item: WorkItem) -> tuple[Counter[str], list[str]]:
        """Adopt an item's targets; return their number by state, and why files do not fit."""
        candidates = {target: list(self._candidates(item, target)) for target in item.targets}
        if not any(candidates.values()):
            return Counter({WITHOUT: len(item.targets)}), []
        reading = Reading(item)
        try:
            keys, source = identified(self._work, self._recipe, reading)
            if item.content not in (None, reading.content):
                raise OutdatedError("was edited just now", where=item.place)
        except (CacheError, SourceError) as error:
            return Counter({state_of(error): len(item.targets)}), [f"not adopted: {error}"]
        except OSError as error:
            line = f"{error.filename or item.place}: cannot be read ({error.strerror})"
            return Counter({UNFIT: len(item.targets)}), [f"not adopted: {line}"]
        self.sources |= reading.sources
        counts: Counter[str] = Counter()
        lines: list[str] = []
        for target, paths in candidates.items():
            state, line = self._adopt(target, keys[target], source, paths)
            counts[state] += 1
            lines += [f"not adopted: {line}"] if line else []
        return counts, lines

    def _candidates(self, item: WorkItem, target: Target) -> Iterator[Path]:
        """Yield the files of the folders that may be a target."""
        for folder in self._folders:
            for name in self._format.names(self._work, item, target):
                if (path := Path(folder, name)).is_file():
                    yield path

    def _adopt(
        self, target: Target, key: str, source: SourceBytes, paths: list[Path]
    ) -> tuple[str, str]:
        """Adopt the first of some files that fits a target.

        Returns:
            Its state, and why none fits, "" where one does or there is none.
        """
        existing = header_of(Path(target.path))
        if existing is not None and existing.key == key:
            return FRESH, ""
        found: list[CacheError] = []
        for path in paths:
            try:
                self._take(path, target, key, source, existing)
            except CacheError as error:
                found.append(error)
            except OSError as error:
                found.append(CacheError(f"cannot be read ({error.strerror})", where=path))
            else:
                return ADOPTED, ""
        if not found:
            return WITHOUT, ""
        # Of several folders, those of other resolutions hold files of the same name.
        first = next((x for x in found if isinstance(x, OutdatedError)), found[0])
        return state_of(first), str(first)

    def _take(
        self,
        path: Path,
        target: Target,
        key: str,
        source: SourceBytes,
        existing: cachefile.Header | None,
    ) -> None:
        """Write one cache file from another program's.

        Raises:
            CacheError: it does not fit, or is of other content.
            OSError: it cannot be read.
            StorageError: the disk is full or cannot be written.
        """
        data = path.read_bytes()
        try:
            sure = self._format.check(data, self._work, source, target, path.name)
        except CacheError as error:
            raise type(error)(error.what, where=path, hint=error.hint) from None
        content, name = digest.of_bytes(data), str(path)
        place = source.item.place
        if not sure:
            if existing is not None and existing.source != source.digest:
                raise OutdatedError(
                    f"may be of what {place} held before it was edited, as {target.path} is",
                    where=path,
                    hint="remove that file to adopt this one all the same",
                )
            if self._record.is_of_other(name, content, source.digest):
                what = f"is of what {place} held before it was edited"
                raise OutdatedError(what, where=path)
        with self._lock:
            made = self._made.get(key)
        if made is None or not link_of_key(made, Path(target.path), key):
            self._record.note(name, content, source.digest)
            stamp = cachefile.stamp(key=key, source=source.digest, recipe=self._work.recipe)
            stamp[cachefile.ADOPTED] = content
            atomic.write(Path(target.path), self._format.stamped(data, stamp))
        with self._lock:
            self._made.setdefault(key, Path(target.path))
            self.targets[target.path] = [*target_stat(Path(target.path).stat()), key]
            if existing is not None:
                self.replaced.append(existing.key)
