"""State of a job: sources are read once, encoded targets get their names at once.

A batch job declares no target to Snakemake, which deletes the outputs of a failed job: the next
plan finds what this one finished. One bad source stops no other.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from latentmake import digest
from latentmake.caches.inputs import Reading, identify, read_ahead, samples_of
from latentmake.data.item import Item, fault_of
from latentmake.errors import SourceError, unreadable
from latentmake.files import atomic, cachefile
from latentmake.plan import store
from latentmake.plan.manifest import read_lock
from latentmake.plan.orders import Order, Work, pixels, settings_digest
from latentmake.plan.receipts import Receipt
from latentmake.progress import Progress

Say = Callable[[str], None]
ExternalEncoder = Callable[["Job", Sequence[Work], int, Progress], None]
"""Makes the missing targets of some items, by another program and n threads."""


class Job:
    """State of an order being carried out.

    Attributes:
        order: of the job.
        say: told of faults, a line each.
        take_gpu: waits for a GPU for another program; called when sources are read.
        sources, targets, faults, counts: of its receipt, so far.
        places: key -> a file that holds it, of all orders of a process.
        making: keys of all content that these have met.
        refused: key -> source, fault and hint of content that cannot be encoded; the source's
            digest is "" if the next build shall retry.
        paths: key -> path of the target that its content is encoded for.
        wanted: path -> item and key of the targets to link.
        failed: stem -> fault in a line.
        marked: names of items whose texts hold `texts.MARKER`.
        loaded: moment (time.monotonic) when its encoder or another program came to the first item.
        waiting: samples on their way through the pipeline.

    Args:
        before: job of the order before in this process.
    """

    def __init__(
        self,
        order: Order,
        say: Say,
        take_gpu: Callable[[], object] = bool,
        before: Job | None = None,
    ) -> None:
        self.order, self.say, self.take_gpu = order, say, take_gpu
        self.sources: dict[str, list[Any]] = {}
        self.targets: dict[str, list[Any]] = {}
        self.faults: list[dict[str, str]] = []
        self.counts = dict.fromkeys(("encoded", "spooled", "linked", "kept"), 0)
        self.places: dict[str, Path] = before.places if before else {}
        self.making: set[str] = before.making if before else set()
        self.refused: dict[str, tuple[str, str, str]] = before.refused if before else {}
        self.paths: dict[str, str] = {}
        self.wanted: dict[str, tuple[Work, str]] = {}
        self.failed: dict[str, str] = {}
        self.marked = set[str]()
        self.loaded: float | None = None
        self.waiting = 0
        self._placing: dict[str, str] = {}
        self._recipe = digest.canonical(order.recipe)
        self._digest = digest.of_bytes(self._recipe.encode())
        # Asked for each target, unless the folder is empty, as it is most often.
        self._has_store = bool(store.keys()) and not order.forced
        # A job that is tried again keeps what it wrote since.
        self._planned = order.path.stat().st_mtime_ns if order.forced else -math.inf
        self._lock = threading.RLock()  # of all that workers change

    # -- reading ------------------------------------------------------------------------------

    def readings(
        self, works: Sequence[Work], threads: int, progress: Progress
    ) -> Iterator[Reading]:
        """Read items; content that several targets share is missing for the first of them only."""
        for reading in read_ahead(works, self.read, threads):
            self.claim(reading)
            self.count(reading, progress)
            yield reading

    def read(self, work: Work, known: dict[str, list[Any]] | None = None) -> Reading:
        """Read an item's source; `known` has stat and digest of files read just now."""
        reading = Reading(work, sources=dict(known or {}))
        try:
            identify(self.order, self._digest, reading)
            self._look_up(reading)
            if reading.missing:
                reading.samples = samples_of(self.order, reading)
        except SourceError as error:
            reading.fail(error)
        except OSError as error:
            reading.fail(unreadable(error, work.item.name))
        reading.data, reading.others = b"", {}
        return reading

    def _look_up(self, reading: Reading) -> None:
        """Find out which targets are fresh, and whose content lies elsewhere."""
        found, reading.keys = reading.keys, {}
        for target, key in found.items():
            # Found while planning, or written since: by a job that was killed and is tried again.
            path = Path(target.path)
            if store.holds(path, key) and path.stat().st_mtime_ns > self._planned:
                reading.kept += 1
                self._finish(target.path, key, path.stat())
                continue
            for known in (key, *reading.former.get(key, ())):
                places = [store.stored(known)] if self._has_store else []
                places += [self.places[known]] if known in self.places else []
                places += map(Path, target.at_hand)
                if place := next((each for each in places if store.holds(each, known)), None):
                    self.places[known] = place
                    reading.keys[target] = known
                    break
            else:
                reading.keys[target] = reading.missing[target] = key

    def claim(self, reading: Reading) -> None:
        """Leave what is missing of an item to those before that have the same content."""
        with self._lock:
            keys = {key: target for target, key in reading.missing.items()}
            new = {key: target for key, target in keys.items() if key not in self.making}
            samples = {each.key: each for each in reading.samples if each.key in new}
            reading.missing = {target: key for key, target in new.items()}
            reading.samples = [*samples.values()]
            self.making.update(new)  # `|=` of keys would copy all of them

    def count(self, reading: Reading, progress: Progress) -> None:
        """Note the result of a reading and its targets that need no encoding."""
        work, item, uncounted = reading.work, reading.work.item, {*reading.missing.values()}
        progress.update(len(work.targets) - len(reading.missing))
        if work.content is not None and reading.content not in ("", work.content):
            self.say(
                f"{item.source}: was edited after this build was planned; its caches are made of "
                "what it holds now"
            )
        if reading.fault is not None:
            self.fail(item, reading.content, reading.fault)
        with self._lock:
            self.paths |= {key: target.path for target, key in reading.missing.items()}
            self.sources.update(reading.sources)
            self.marked.update(x.item.name for x in reading.samples if x.is_marked)
            self._placing |= reading.placing
            self.counts["kept"] += reading.kept
            for target, key in reading.keys.items():
                self.wanted[target.path] = (work, key)
                if key in uncounted:
                    uncounted.remove(key)  # counted when it is encoded
                    continue
                is_stored = self.places.get(key) == store.stored(key) and key not in self.making
                self.counts["spooled" if is_stored else "linked"] += 1
            self.making.update(reading.keys.values())

    # -- writing ------------------------------------------------------------------------------

    def store(
        self,
        item: Item,
        key: str,
        source: str,
        tensors: dict[str, Any],
        metadata: dict[str, str],
        nonzero: Collection[str] | None = None,
    ) -> None:
        """Write a finished target, or refuse it for NaN, infinity or zeros; raises StorageError.

        `source` is the digest of what it was made from; only tensors in `nonzero`, by default all,
        are refused for zeros.
        """
        model = self.order.model_settings
        if fault := _fault_of(tensors, nonzero):
            source_name = "caption" if self.order.kind == "text" else "image"
            hint = f"check the {source_name} and the weights"
            if any(
                each.element_size() < 4 for each in tensors.values() if each.is_floating_point()
            ):
                hint = f"set `dtype: float32` in the model, or {hint}"
            if model.scripted:  # scripts know no `dtype`
                hint = "check its file, and the weights and arguments of the model"
            self.refuse(item, key, source, f"the encoder returned {fault}", hint)
            return
        path, view = self.paths[key], self._placing.get(key, "")
        stamp = cachefile.stamp(key=key, source=source, recipe=self._recipe, view=view)
        if self.order.layout.npz:
            from latentmake.caches.encoders.sdscripts import file_bytes

            stat = atomic.write(path, file_bytes(self.order.kind, model, tensors, stamp))
        else:
            stat = atomic.write(path, *cachefile.pieces(tensors, metadata | stamp))
        if self.order.forced:
            store.stored(key).unlink(missing_ok=True)  # what it was encoded to before
        with self._lock:
            self.places[key] = Path(path)
            self.wanted.pop(path, None)
            self._finish(path, key, stat)
            self.counts["encoded"] += 1

    def _finish(self, path: str, key: str, stat: os.stat_result) -> None:
        self.targets[path] = [stat.st_size, stat.st_mtime_ns, stat.st_ino, key]
        self.places.setdefault(key, Path(path))

    # -- faults -------------------------------------------------------------------------------

    @cached_property
    def known_faults(self) -> set[str]:
        """Stems of the items that earlier builds skipped with this recipe, by the runs' locks."""
        same = self._same.items()
        locks = (read_lock(path.parent.name) for path in Path("runs").glob("*/dataset.lock"))
        skipped = (each for lock in locks for each in lock.aside.get(self.order.dataset, ()))
        return {each["stem"] for each in skipped if same <= each.items()}

    @property
    def _same(self) -> dict[str, str]:
        order = self.order
        fault = {"dataset": order.dataset, "model": order.model, "kind": order.kind}
        return fault | {"recipe": self._digest}

    def fail(self, item: Item, content: str, error: SourceError) -> None:
        """Note a faulty item; the job goes on with the others."""
        line = fault_of(item, error).line
        beside = {"controls": item.controls, "layers": item.layers}
        fault = self._same | {"stem": item.stem, "path": item.source or ""}
        fault |= {name: "\n".join(paths) for name, paths in beside.items() if paths}
        with self._lock:
            self.say(f"faulty: {line}")
            self.failed[item.stem] = line
            settings = settings_digest(self.order.dataset_settings)
            self.faults.append({**fault, "digest": content, "line": line, "settings": settings})

    def refuse(self, item: Item, key: str, source: str, what: str, hint: str) -> None:
        """Refuse the content of an item's target, named by its key; see `refused`."""
        self.refused[key] = (source, what, hint)
        self.fail(item, source, SourceError(what, hint=hint))

    def leave_faults(self) -> None:
        """Write the faults of a job that fails and so leaves no receipt."""
        atomic.write(self.order.faults, json.dumps(self.faults).encode())

    def leave_receipt(self, seconds: float, starting: float | None, words: str) -> None:
        """Write its receipt."""
        work = self.order.work if self.loaded is not None else ""
        made = self.sources, self.targets, self.faults, self.counts
        targets = (target for item in self.order.items for target in item.targets)
        size = pixels(target for target in targets if target.path in self.targets)
        Receipt(*made, seconds, starting, work, words, size).write(self.order.receipt)

    def outcome(self, words: str) -> str:
        """Return its counts in a line, with words on the bottleneck, if there are any."""
        others = {"restored": self.counts["spooled"], "linked": self.counts["linked"]}
        others |= {"kept": self.counts["kept"], "faulty": len(self.failed)}
        further = "".join(f", {number} {word}" for word, number in others.items() if number)
        counted = f"{self.counts['encoded']} encoded{further}"
        return f"{self.order.kind} of {self.order.dataset}: {counted}{words and f'; {words}'}"

    # -- linking ------------------------------------------------------------------------------

    def deliver(self) -> list[Work]:
        """Link what was found elsewhere or made for other targets to the names of its targets.

        Items whose content equals that of a refused one are refused.

        Returns:
            Items whose files another build has just deleted, or that memory did not suffice for:
            they must be made again.
        """
        linked: dict[str, Path] = {}
        lost: dict[tuple[str, str | None], Work] = {}
        for work, key in self.wanted.values():
            if key in self.refused and work.item.stem not in self.failed:
                self.refuse(work.item, key, *self.refused[key])
        for path, (work, key) in list(self.wanted.items()):
            if work.item.stem in self.failed:
                continue
            for place in (self.places.get(key), linked.get(key)):
                if place is not None and store.link(place, Path(path), key):
                    linked[key] = Path(path)
                    self._finish(path, key, Path(path).stat())
                    del self.wanted[path]
                    break
            else:
                self.places.pop(key, None)
                self.making.discard(key)
                lost[work.item.stem, work.item.text] = work
        return [
            work._replace(targets=tuple(each for each in work.targets if each.path in self.wanted))
            for work in lost.values()
        ]


def _fault_of(tensors: dict[str, Any], nonzero: Collection[str] | None) -> str | None:
    """Return what is wrong with the tensors of a target: NaN, infinity, all zeros."""
    for name, tensor in tensors.items():
        largest = float(tensor.float().abs().max()) if tensor.numel() else 0.0  # NaN stays
        if not math.isfinite(largest):
            return f"NaN or infinity ({name})"
        if (nonzero is None or name in nonzero) and not largest:
            return f"nothing but zeros ({name})"
    return None
