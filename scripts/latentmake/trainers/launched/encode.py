"""Encoding by another program: a driver encodes the missing targets, and we store its files.

The driver (`driver.py`) calls the program's own code in the program's environment and reports each
file. A finished file is stored while the driver goes on, as with our own encoders. If memory runs
out, the item is at fault only if it is larger than every item that fitted.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load

from latentmake.base import atomic
from latentmake.base.errors import (
    DeviceError,
    ModelError,
    UserError,
    is_device_fault,
    is_out_of_memory,
)
from latentmake.base.progress import Progress
from latentmake.data.item import Item
from latentmake.encode.job import Job
from latentmake.encode.pipeline import known_faults
from latentmake.formats.safetensors import parse_head
from latentmake.plan.orders import EncodingJob, Target, Work
from latentmake.trainers import process
from latentmake.trainers.launched.installation import Installation

_FOLDER = Path(".latentmake/encoding")
_DRIVER = Path(__file__).with_name("driver.py")
_SECONDS = 0.5  # between two reads of the driver's results
_FEW = 2  # up to so many failed targets are refused one by one, even if no target succeeded
_HUB = r"huggingface\.co|cached files|HF_HUB_OFFLINE|[Oo]ffline mode"
_HUB_HINT = (
    "it loads a tokenizer by its name on the hub: fetch that once on a machine with internet, into "
    "the folder that HF_HOME names"
)


class PendingTarget(NamedTuple):
    """A target to be encoded.

    Attributes:
        source: digest of its inputs.
        caption: text to encode; None for latents.
    """

    item: Item
    target: Target
    key: str
    source: str
    caption: str | None


Content = tuple[dict[str, Any], dict[str, str], Collection[str] | None]
"""Tensors and metadata of a finished file, and names of tensors that must not be all zeros.

The names are None if that holds for all tensors.
"""


def parsed(data: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file from its bytes."""
    return load(data), parse_head(data).metadata


class Encoding(ABC):
    """Encoding of a job's targets by another program.

    Attributes:
        program: name of the program.
        left: path of the program's file -> target that it will become.
    """

    program: ClassVar[str]

    def __init__(
        self,
        job: Job,
        targets: Sequence[PendingTarget],
        folder: Path,
        threads: int,
        progress: Progress,
    ) -> None:
        self.job, self.order, self.threads = job, job.order, threads
        self.log = Path(EncodingJob((job.order,)).log).absolute()
        self.folder = folder
        self.left: dict[str, PendingTarget] = {}
        for pending in sorted(targets, key=self.amount):
            self.left[str(self.place(pending))] = pending
        self._progress = progress
        self._failed_before = {pending.item.stem for pending in targets} <= known_faults(job)
        self._begun: list[str] = []
        self._failed: list[tuple[PendingTarget, str]] = []
        self._fitted: int | None = None
        self._read = 0

    @abstractmethod
    def amount(self, pending: PendingTarget) -> int:
        """Return a number that grows with the memory a target takes, to compare targets."""

    @abstractmethod
    def place(self, pending: PendingTarget) -> Path:
        """Return the path to which the program writes the file of a target."""

    @abstractmethod
    def start(self) -> tuple[Installation, dict[str, Any]]:
        """Write the program's input files; return the program and the values of the job file."""

    @abstractmethod
    def content(self, path: Path, pending: PendingTarget) -> Content:
        """Read the file of a target.

        Raises:
            ValueError: the file is not complete, or is not the file of this target.
            OSError: the file cannot be read.
        """

    @classmethod
    def make(cls, job: Job, items: Sequence[Work], threads: int, progress: Progress) -> None:
        """Make the targets of some items, after a check of each source's header.

        Raises:
            TrainingError: the program is not where the configuration says.
            DeviceError: the GPU is at fault; finished files are kept.
            ModelError: the program fails with any item; finished files are kept.
        """
        targets: list[PendingTarget] = []
        for reading in job.readings(items, threads, progress):
            texts = {sample.key: str(sample.content) for sample in reading.samples}
            for target, key in reading.missing.items():
                caption = texts[key] if job.order.kind == "text" else None
                targets.append(
                    PendingTarget(reading.work.item, target, key, reading.content, caption)
                )
        if not targets:
            return
        job.take_gpu()
        folder = (_FOLDER / job.order.name).absolute()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            cls(job, targets, folder, threads, progress).run()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def run(self) -> None:
        """Run the driver until all targets are made or refused; raises UserError, see `make`."""
        status = -1
        while status != 0 and self.left:
            status, output = self._run_driver()
            faults = {path: self._take(path) for path in [*self.left]}
            if status != 0:
                error = process.last_error(output, status)
                begun = [path for path in self._begun if path in self.left]
                if is_device_fault(error) or status > 0 or not begun or self._fitted is None:
                    raise self._failure(error)
                # The program crashed on these: the next start encodes the targets that are left.
                faults = dict.fromkeys(begun, error)
            self._failed += ((self.left.pop(path), text) for path, text in faults.items() if text)
        self._judge()

    def _run_driver(self) -> tuple[int, str]:
        """Run the driver once; return its exit status and the end of its output."""
        program, values = self.start()
        results, place = self.folder / "results.jsonl", self.folder / "job.json"
        results.unlink(missing_ok=True)
        self._read, self._begun = 0, []
        values |= {"results": str(results), "kind": self.order.kind, "known": self._failed_before}
        atomic.write(place, json.dumps(values).encode())
        finished = threading.Event()

        def watch() -> None:
            with contextlib.suppress(Exception):  # the main thread meets it again, see `finally`
                while not finished.wait(_SECONDS):
                    self._take_reported(results)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            return process.run_program(
                [str(program.python), str(_DRIVER), str(place)],
                environment={
                    "OMP_NUM_THREADS": str(self.threads),
                    **program.environment(),
                    "TQDM_DISABLE": "1",  # these bars have no total; the job shows its own
                },
                log=self.log,
                cwd=program.folder,
            )
        finally:
            finished.set()
            thread.join()
            self._take_reported(results)

    def _take_reported(self, results: Path) -> None:
        """Take the files of the lines that the driver has completed since the last call."""
        if not results.exists():
            return
        with results.open("rb") as file:
            file.seek(self._read)
            lines = file.read().splitlines(keepends=True)
        for line in lines:
            if not line.endswith(b"\n"):
                return  # the driver is in the middle of this line
            result = json.loads(line)
            if self.job.loaded is None:
                self.job.loaded = time.monotonic()
            self._begun = result.get("begun", [])
            for path in result.get("files", ()):
                if path in self.left and "error" in result:
                    self._failed.append((self.left.pop(path), result["error"]))
                elif path in self.left:
                    self._take(path)
            self._read += len(line)

    def _take(self, path: str) -> str:
        """Store the content of a file; return its fault if it is faulty or not complete yet."""
        pending, place = self.left[path], Path(path)
        try:
            content = self.content(place, pending)
        except FileNotFoundError:
            return f"it ended well and wrote no {place.name} of it"
        except (OSError, SafetensorError) as error:
            return f"its file cannot be read ({error})"
        except ValueError as error:
            return f"its file {error}"
        self.job.store(pending.item, pending.key, pending.source, *content)
        del self.left[path]
        self._fitted = max(self._fitted or 0, self.amount(pending))
        self._progress.update()
        place.unlink()
        return ""

    def _judge(self) -> None:
        """Refuse the failed targets, or raise an error if the items are hardly at fault.

        If memory ran out, an item is at fault if it is larger than every item that fitted. If no
        item fitted, the items are at fault if an earlier build skipped all of them.
        """
        if self._fitted is None and len(self._failed) > _FEW and not self._failed_before:
            raise self._failure(self._failed[0][1])
        for pending, error in self._failed:
            is_short = is_out_of_memory(error)
            if self._fitted is None:
                fits = not self._failed_before
            else:
                fits = self.amount(pending) <= self._fitted
            if is_short and fits:
                raise self._failure(error)
            self._refuse(pending, f"not enough memory to encode it: {error}" if is_short else error)

    def _refuse(self, pending: PendingTarget, fault: str) -> None:
        """Refuse a target without a digest, so that the next build tries it again."""
        self._progress.update()
        what, hint = f"{self.program} could not encode it: {fault}", f"all output: {self.log}"
        if pending.item.stem in self.job.failed:
            self.job.refused[pending.key] = ("", what, hint)
        else:
            self.job.refuse(pending.item, pending.key, "", what, hint)

    def _failure(self, error: str) -> UserError:
        kind: type[UserError] = ModelError
        hint = _HUB_HINT if re.search(_HUB, error) else "finished caches are kept"
        if is_device_fault(error):
            kind = DeviceError
            hint = (
                "check the GPU with nvidia-smi, then run the same command; finished files are kept"
            )
        hint = f"{hint}; all output: {self.log}"
        what = f"{self.program}'s encoder of {self.order.kind} failed: {error}"
        return kind(what, where=f"models.{self.order.model}", hint=hint)
