"""Check of the files that musubi-tuner's caching scripts write, and their way into the cache.

A file is taken as soon as it is complete, while the script goes on: what is finished survives a
job that is killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from safetensors import SafetensorError, safe_open

from latentmake import digest
from latentmake.caches.job import Job
from latentmake.files.cachefile import CAPTION
from latentmake.files.safetensors import read_head
from latentmake.geometry.buckets import Size
from latentmake.layouts.musubi import frames_and_sides
from latentmake.plan.orders import Order
from latentmake.progress import Progress
from latentmake.training.external.musubi.scratch import Awaited
from latentmake.training.process import Pipe

_SECONDS = 0.5  # between two looks at the folder
_NAN = re.compile(r"tensor has NaN: (.+?), replace NaN with 0", re.DOTALL)
_BEGIN = "Encoding dataset ["
_CLIP = re.compile(r"_\d{5,}-\d{3,}(?=\.[^./]*$|$)")
_KEPT_OUTPUT = 1 << 12  # bytes of output in which the end of a message may still come


class Taker:
    """Takes finished files into the cache while a script runs: a context manager around it.

    The scripts replace NaN by zeros and say so in their output alone, before they write the file:
    each file is taken a moment after it was found, when that output has been read.

    Attributes:
        pipe: of the script's output.
        left: files that are yet to be taken, by path, in the order of the script's dataset.
        taken: how many were taken or refused.

    Args:
        job: that they are for.
        awaited: the files.
        log: that gets the script's output.
        progress: counts them.
    """

    def __init__(self, job: Job, awaited: Iterable[Awaited], log: Path, progress: Progress) -> None:
        self.left = {each.path: each for each in awaited}
        self.taken = 0
        self.pipe = Pipe()
        self._job = job
        self._progress = progress
        self._output = _Output(log)
        self._seen: dict[Path, tuple[int, int]] = {}
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if error is not None:
            with contextlib.suppress(Exception):  # that the job was stopped says more
                self.finish(-1)
        elif self._error is not None:
            raise self._error

    @property
    def began(self) -> bool:
        """Whether the script came to its items, behind the loading of weights."""
        self._output.read()
        return self.taken > 0 or self._output.began or bool(self._present())

    def finish(self, status: int) -> None:
        """Take what is left after the script has ended with a status.

        A script that was killed by a signal may have cut short the file it wrote last, and one that
        failed may have written a part of the tensors; one that ended well has nothing to add.
        """
        stats = self._present()
        newest = max((moment for _, moment in stats.values()), default=0)
        self._output.read()
        for path, (_, moment) in stats.items():
            if status >= 0 or moment < newest:
                self._take(path, last=status == 0)

    def progress_of_left(self) -> Iterator[tuple[Awaited, int]]:
        """Yield the files that are left, each with how many of its tensors it has by now."""
        for path, each in self.left.items():
            try:
                names = read_head(path).entries
            except (OSError, ValueError):
                yield each, 0
            else:
                patterns = _patterns(self._job.order, each)
                yield each, 1 + len(patterns) - len(_missing(patterns, names))

    def _present(self) -> dict[Path, tuple[int, int]]:
        """Return the files that are there and not taken, with size and mtime."""
        found = {}
        for folder in {path.parent for path in self.left}:
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    if (path := folder / entry.name) in self.left:
                        stat = entry.stat()
                        found[path] = stat.st_size, stat.st_mtime_ns
        return found

    def _watch(self) -> None:
        try:
            while not self._stop.wait(_SECONDS):
                now = self._present()
                ready = [path for path, stat in now.items() if self._seen.get(path) == stat]
                self._seen = now
                if ready:
                    self.pipe.settle()
                self._output.read()
                if self._output.began and self._job.loaded is None:
                    self._job.loaded = time.monotonic()
                for path in ready:
                    self._take(path)
        except BaseException as error:  # which the job's own thread raises
            self._error = error

    def _take(self, path: Path, *, last: bool = False) -> None:
        """Take or refuse a file; leave one that is not complete, unless this is the last look."""
        each = self.left[path]
        patterns = _patterns(self._job.order, each)
        fault = None
        try:
            head = read_head(path)
            if missing := _missing(patterns, head.entries):
                fault = f"holds no tensor {missing[0]}*, but {', '.join(head.entries)}"
            else:
                with safe_open(path, framework="pt") as file:
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                    metadata = dict(file.metadata() or {})
        except (OSError, ValueError, SafetensorError) as error:
            fault = f"cannot be read ({error})"
        if fault is not None and not last:
            return
        del self.left[path]
        self.taken += 1
        self._progress.update()
        if fault is None:
            fault = self._fault_of(each, tensors, metadata)
        item, source = each.reading.item, each.reading.content
        if fault is not None:
            hint = f"see {self._job.order.log}"
            what = f"musubi-tuner's cache of it ({path.name}) {fault}"
            self._job.refuse(item, each.key, source, what, hint)
            return
        if each.caption is not None:
            # musubi-tuner keeps our key when it writes another caption into the file.
            metadata[CAPTION] = digest.of_bytes(each.caption.encode())
        nonzero = [name for name in tensors if re.match(patterns[0], name)]
        self._job.store(item, each.key, source, tensors, metadata, nonzero=nonzero)

    def _fault_of(
        self, each: Awaited, names: Iterable[str], metadata: dict[str, str]
    ) -> str | None:
        """Return what is wrong with a complete file besides its tensors' values."""
        scripts = self._job.order.model_settings.spec.scripts
        assert scripts is not None
        if (header := metadata.get("architecture")) != scripts.header:
            return f"is one of the architecture {header}, not {scripts.header}"
        if each.caption is not None and metadata.get("caption1") != each.caption:
            return "is of another caption"
        if each.caption is None and scripts.counts_controls:
            found = sum(name.startswith("latents_control_") for name in names)
            given = len(each.reading.item.controls)
            if found != given:
                return f"holds latents of {found} control images, and the item has {given}"
        if each.source in self._output.defects:
            return "had NaN, which it replaced by zeros: use another dtype, or look at the weights"
        return None


class _Output:
    """Output of one attempt, read from the log as it comes.

    Attributes:
        began: whether a dataset's encoding was announced.
        defects: sources with NaN, as the script's dataset names them.
    """

    def __init__(self, log: Path) -> None:
        self.began = False
        self.defects: set[str] = set()
        self._log = log
        self._offset = log.stat().st_size if log.is_file() else 0
        self._rest = b""

    def read(self) -> None:
        """Read what was written since the last time."""
        if not self._log.is_file():
            return
        with self._log.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        data = self._rest + new
        text = data.decode("utf-8", "replace")
        self.began |= _BEGIN in text
        for found in _NAN.findall(text):
            # A clip is named by its video and its frames.
            self.defects |= {found, _CLIP.sub("", found)}
        self._rest = data[-_KEPT_OUTPUT:]


def _missing(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    return [each for each in patterns if not any(re.match(each, name) for name in names)]


def _patterns(order: Order, each: Awaited) -> list[str]:
    """Return patterns of the beginnings of names of tensors, all of which a file must have."""
    model, media = order.model_settings, each.reading.item.media
    scripts = model.spec.scripts
    assert scripts is not None
    if order.kind == "text":
        return [re.escape(each) for each in scripts.tensors]
    assert media is not None and each.target.size is not None
    stored = Size(media.width, media.height)
    size = order.layout.size(stored, each.target.size, order.dataset_settings)
    frames, sides = frames_and_sides(model, size, each.target.clip)
    shape = f"({frames}x)?{sides}"  # FLUX.2's names have no number of frames
    return [f"latents_{shape}_", *map(re.escape, model.version.tensors)]
