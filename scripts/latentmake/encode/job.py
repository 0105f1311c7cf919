"""State of a job that carries out an order: it reads each source once and writes each target.

Snakemake deletes the declared outputs of a failed job. So a batch job declares no target: the next
plan finds the targets that this job finished. A faulty source does not stop the other items.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from latentmake.base import atomic, digest
from latentmake.base.errors import SourceError, unreadable
from latentmake.base.progress import Progress
from latentmake.data.captions_made import answer_fault
from latentmake.data.item import Item, fault_of
from latentmake.encode.reading import Reading, identify, read_ahead, samples_of
from latentmake.formats import cachefile
from latentmake.plan import store
from latentmake.plan.orders import Order, Work, settings_digest
from latentmake.plan.receipts import Receipt

Say = Callable[[str], None]
ExternalEncoder = Callable[["Job", Sequence[Work], int, Progress], None]
"""Function that makes the missing targets of items by another program, with a number of threads."""


class Job:
    """State of an order being carried out.

    Attributes:
        order: order that the job carries out.
        say: function that shows a line about a fault.
        take_gpu: function that waits for a GPU, called before the first sample is encoded.
        sources, targets, faults, counts: fields of the receipt, so far.
        places: key -> a file with that key, for all orders of the process.
        making: keys that any order of the process has met, so that each is encoded once.
        refused: key -> source, fault and hint of content that cannot be encoded. The source's
            digest is "" if the next build should retry.
        paths: key -> path of the target that is encoded for the key.
        wanted: path -> item and key of a target that is not written yet.
        failed: stem -> fault in a line.
        marked: names of items whose texts contain `texts.MARKER`.
        common: fields that all faults of this order share.
        loaded: time (time.monotonic) at which the encoder or another program got the first item.
        waiting: number of samples in the pipeline.

    Args:
        before: job of the previous order in this process.
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
        self.common = {"dataset": order.dataset, "model": order.model, "kind": order.kind}
        self.common["recipe"] = self._digest
        self.common["settings"] = settings_digest(order.dataset_settings)
        # The store is usually empty; then no target has to be looked up there.
        self._has_store = bool(store.keys()) and not order.forced
        # Files newer than a forced order are kept: an earlier attempt of this job wrote them.
        self._planned = order.path.stat().st_mtime_ns if order.forced else -math.inf
        self._lock = threading.RLock()  # guards all state that workers change

    # -- reading ------------------------------------------------------------------------------

    def readings(
        self, works: Sequence[Work], threads: int, progress: Progress
    ) -> Iterator[Reading]:
        """Read items; of targets that share content, only the first counts as missing."""
        for reading in read_ahead(works, self.read, threads):
            self.count(reading, progress)
            yield reading

    def read(self, work: Work, sources: dict[str, list[Any]] | None = None) -> Reading:
        """Read an item's source; `sources` has stats and digests of files that were just read."""
        reading = Reading(work, sources=dict(sources or {}))
        try:
            identify(self.order, self._digest, reading)
            self._look_up(reading)
            if reading.missing:
                reading.samples = samples_of(self.order, reading)
        except SourceError as error:
            reading.fault = error
        except OSError as error:
            reading.fault = unreadable(error, work.item.name)
        if reading.fault is not None:
            reading.keys, reading.missing = {}, {}
        reading.data, reading.others = b"", {}  # many readings wait, and only samples are needed
        return reading

    def _look_up(self, reading: Reading) -> None:
        """Find out which targets are fresh, and which have content that another file has."""
        keys, reading.keys = reading.keys, {}
        for target, key in keys.items():
            # The plan found a fresh file here, or an earlier attempt of this job has written it.
            stat = Path(target.path).stat() if store.present_key(target) == key else None
            if stat is not None and stat.st_mtime_ns > self._planned:
                reading.kept += 1
                self._finish(target.path, key, stat)
                continue
            for possible in (key, *reading.former.get(key, ())):
                places = [store.stored(possible)] if self._has_store else []
                if possible in self.places:
                    places.append(self.places[possible])
                places += map(Path, target.at_hand)
                if place := next((path for path in places if store.holds(path, possible)), None):
                    self.places[possible] = place
                    reading.keys[target] = possible
                    break
            else:
                reading.keys[target] = reading.missing[target] = key

    def count(self, reading: Reading, progress: Progress) -> None:
        """Note the result of a reading, and count its targets that need no encoding.

        The reading keeps as missing only those whose content is not being encoded already.
        """
        with self._lock:
            keys = {key: target for target, key in reading.missing.items()}
            new = {key: target for key, target in keys.items() if key not in self.making}
            samples = {sample.key: sample for sample in reading.samples if sample.key in new}
            reading.missing = {target: key for key, target in new.items()}
            reading.samples = [*samples.values()]
            self.making.update(new)  # `|=` needs a set, so it would copy the keys
        work, item, uncounted = reading.work, reading.work.item, {*new}
        progress.update(len(work.targets) - len(reading.missing))
        if reading.fault is not None:
            self.fail(item, reading.content, reading.fault)
        elif work.content is not None and reading.content not in ("", work.content):
            self.say(
                f"{item.source}: was edited after this build was planned; its caches are made of "
                "what it holds now"
            )
        with self._lock:
            self.paths |= {key: target.path for target, key in reading.missing.items()}
            self.sources.update(reading.sources)
            self.marked.update(sample.item.name for sample in reading.samples if sample.is_marked)
            self._placing |= reading.placing
            self.counts["kept"] += reading.kept
            for target, key in reading.keys.items():
                self.wanted[target.path] = (work, key)
                if key in uncounted:
                    uncounted.remove(key)  # `store` counts it when it is encoded
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

        `source` is the digest of the content that the target was made from. `nonzero` names the
        tensors that are refused if they are all zeros; by default all tensors are.
        """
        model, is_caption = self.order.model_settings, self.order.makes_captions
        if is_caption and (fault := answer_fault(metadata["caption"])):
            hint = "change the `prompt` of the captioner, or write the caption yourself"
            self.refuse(item, key, source, f"the captioner {self.order.model} {fault}", hint)
            return
        if fault := _fault_of(tensors, nonzero):
            source_name = "caption" if self.order.kind == "text" else "image"
            hint = f"check the {source_name} and the weights"
            floats = (tensor for tensor in tensors.values() if tensor.is_floating_point())
            if any(tensor.element_size() < 4 for tensor in floats):
                hint = f"set `dtype: float32` in the model, or {hint}"
            if model.scripted:  # the scripts of musubi-tuner ignore `dtype`
                hint = "check its file, and the weights and arguments of the model"
            self.refuse(item, key, source, f"the encoder returned {fault}", hint)
            return
        path, view = self.paths[key], self._placing.get(key, "")
        stamp = cachefile.stamp(key=key, source=source, recipe=self._recipe, view=view)
        if is_caption:
            text = metadata["caption"]
            stat = atomic.write(path, cachefile.caption_file(text, stamp))
            # The next plan need not read the file.
            own = [stat.st_size, stat.st_mtime_ns, 0, stat.st_ino, digest.of_bytes(text.encode())]
            self.sources[path] = [*own, text]
        elif self.order.layout.npz:
            from latentmake.encode.encoders.sdscripts import file_bytes

            stat = atomic.write(path, file_bytes(self.order.kind, model, tensors, stamp))
        else:
            stat = atomic.write(path, *cachefile.pieces(tensors, metadata | stamp))
        if self.order.forced:
            # The store's file has the same key, but the bytes of an earlier encoding.
            store.stored(key).unlink(missing_ok=True)
        with self._lock:
            self.places[key] = Path(path)
            self.wanted.pop(path, None)
            self._finish(path, key, stat)
            self.counts["encoded"] += 1

    def _finish(self, path: str, key: str, stat: os.stat_result) -> None:
        self.targets[path] = [stat.st_size, stat.st_mtime_ns, stat.st_ino, key]
        self.places.setdefault(key, Path(path))

    # -- faults -------------------------------------------------------------------------------

    def fail(self, item: Item, content: str, error: SourceError) -> None:
        """Note a faulty item; the job goes on with the others."""
        line = fault_of(item, error).line
        beside = {"controls": item.controls, "layers": item.layers}
        fault = self.common | {"stem": item.stem, "path": item.source or ""}
        fault |= {name: "\n".join(paths) for name, paths in beside.items() if paths}
        with self._lock:
            self.say(f"faulty: {line}")
            self.failed[item.stem] = line
            self.faults.append({**fault, "digest": content, "line": line})

    def refuse(self, item: Item, key: str, source: str, what: str, hint: str) -> None:
        """Refuse the content with a key, and so the item; see `refused`."""
        self.refused[key] = (source, what, hint)
        self.fail(item, source, SourceError(what, hint=hint))

    def leave_receipt(
        self, seconds: float, starting: float | None, bottleneck: str, device: str
    ) -> None:
        """Write the receipt of the job."""
        work = self.order.work if self.loaded is not None else ""
        results = self.sources, self.targets, self.faults, self.counts
        size = sum(target.pixels for target in self.order.targets if target.path in self.targets)
        device = f"{device} {self.order.recipe.get('dtype', '')}".rstrip() if work else ""
        receipt = Receipt(*results, seconds, starting, work, bottleneck, size, device)
        receipt.write(self.order.receipt)

    def outcome(self, bottleneck: str) -> str:
        """Return a line with the counts, and with the bottleneck if it is known."""
        others = {"restored": self.counts["spooled"], "linked": self.counts["linked"]}
        others |= {"kept": self.counts["kept"], "faulty": len(self.failed)}
        made = "made" if self.order.makes_captions else "encoded"
        line = f"{self.order.kind} of {self.order.dataset}: {self.counts['encoded']} {made}"
        line += "".join(f", {number} {word}" for word, number in others.items() if number)
        return f"{line}; {bottleneck}" if bottleneck else line

    # -- linking ------------------------------------------------------------------------------

    def deliver(self) -> list[Work]:
        """Link targets to files with the same key, which exist already or were just encoded.

        Items with the same content as a refused item are refused, too.

        Returns:
            Items that must be made again: another build has just deleted their files, or memory was
            short.
        """
        linked: dict[str, Path] = {}
        lost: dict[tuple[str, str | None], Work] = {}
        for work, key in self.wanted.values():
            if key in self.refused and work.item.stem not in self.failed:
                self.refuse(work.item, key, *self.refused[key])
        for path, (work, key) in list(self.wanted.items()):
            if work.item.stem in self.failed:
                continue
            # The first file may be gone by now; a target that was just linked has the same bytes.
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
        return [work.only(self.wanted) for work in lost.values()]


def _fault_of(tensors: dict[str, Any], nonzero: Collection[str] | None) -> str | None:
    """Return the fault of a target's tensors (NaN, infinity, all zeros), or None."""
    for name, tensor in tensors.items():
        largest = float(tensor.float().abs().max()) if tensor.numel() else 0.0  # keeps NaN
        if not math.isfinite(largest):
            return f"NaN or infinity ({name})"
        if (nonzero is None or name in nonzero) and not largest:
            return f"nothing but zeros ({name})"
    return None
