"""Encoding by another program: its driver runs for missing targets, and its files become ours.

A driver (`driver.py`) calls the program's own code in the program's environment, and tells of each
file. What it has finished gets its name while it goes on, like the files of our encoders. A lack of
memory is the fault of an item only if it is larger than all that fitted.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
import time
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load

from latentmake.caches.job import Job
from latentmake.data.item import Item
from latentmake.errors import DeviceError, ModelError, UserError, is_device_fault, is_out_of_memory
from latentmake.files import atomic
from latentmake.files.safetensors import parse_head
from latentmake.plan.orders import Target, Work
from latentmake.progress import Progress
from latentmake.training import process
from latentmake.training.external.installation import Installation

_FOLDER = Path(".latentmake/encoding")
_DRIVER = Path(__file__).with_name("driver.py")
_SECONDS = 0.5  # between two looks at what is finished
_FEW = 2  # targets that are refused one by one even if nothing could be made
_HUB = r"huggingface\.co|cached files|HF_HUB_OFFLINE|[Oo]ffline mode"
_HUB_HINT = (
    "it loads a tokenizer by its name on the hub: fetch that once on a machine with internet, into "
    "the folder that HF_HOME names"
)


class Wanted(NamedTuple):
    """A target to be encoded.

    Attributes:
        source: digest of what it is made from.
        caption: None for latents.
    """

    item: Item
    target: Target
    key: str
    source: str
    caption: str | None


Content = tuple[dict[str, Any], dict[str, str], Collection[str] | None]
"""Tensors and metadata of a finished file, and the names of those that cannot be all zeros."""


def parsed(data: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file, by its bytes."""
    return load(data), parse_head(data).metadata


class Encoding(ABC):
    """Encoding of a job's targets by another program.

    Attributes:
        program: its name.
        left: path of the program's file -> target that is to be made of it.
    """

    program: ClassVar[str]

    def __init__(
        self, job: Job, wanted: Sequence[Wanted], folder: Path, threads: int, progress: Progress
    ) -> None:
        self.job, self.order, self.threads = job, job.order, threads
        self.log = Path(job.order.log).absolute()
        self.folder = folder
        self.left: dict[str, Wanted] = {}
        for each in sorted(wanted, key=self.amount):
            self.left[str(self.place(each))] = each
        self._progress = progress
        self._known = {each.item.stem for each in wanted} <= job.known_faults
        self._begun: list[str] = []
        self._failed: list[tuple[Wanted, str]] = []
        self._fitted: int | None = None
        self._read = 0

    @abstractmethod
    def amount(self, wanted: Wanted) -> int:
        """Return a number that tells what memory a target takes, for comparisons."""

    @abstractmethod
    def place(self, wanted: Wanted) -> Path:
        """Return where the program writes the file of a target."""

    @abstractmethod
    def start(self) -> tuple[Installation, dict[str, Any]]:
        """Write what the program reads; return the program, and what the driver is to do."""

    @abstractmethod
    def content(self, path: Path, wanted: Wanted) -> Content:
        """Read the file of a target.

        Raises:
            ValueError: it is not complete, or another file than the one that was asked for.
            OSError: it cannot be read.
        """

    @classmethod
    def make(cls, job: Job, items: Sequence[Work], threads: int, progress: Progress) -> None:
        """Make the targets of some items; the header of each source is checked before.

        Raises:
            TrainingError: the program is not where the configuration says.
            DeviceError: the GPU is at fault; what is finished is kept.
            ModelError: the program failed whatever the item; what it had finished is kept.
        """
        wanted: list[Wanted] = []
        for reading in job.readings(items, threads, progress):
            texts = {sample.key: str(sample.content) for sample in reading.samples}
            for target, key in reading.missing.items():
                caption = texts[key] if job.order.kind == "text" else None
                wanted.append(Wanted(reading.work.item, target, key, reading.content, caption))
        if not wanted:
            return
        job.take_gpu()
        folder = (_FOLDER / job.order.name).absolute()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            cls(job, wanted, folder, threads, progress).run()
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
                faults = dict.fromkeys(begun, error)  # it crashed, and encodes the others
            self._failed += ((self.left.pop(path), x) for path, x in faults.items() if x)
        self._judge()

    def _run_driver(self) -> tuple[int, str]:
        """Run the driver once; return its exit status and the end of its output."""
        program, values = self.start()
        results, place = self.folder / "results.jsonl", self.folder / "job.json"
        results.unlink(missing_ok=True)
        self._read, self._begun = 0, []
        values |= {"results": str(results), "kind": self.order.kind, "known": self._known}
        atomic.write(place, json.dumps(values).encode())
        ends = threading.Event()

        def watch() -> None:
            with contextlib.suppress(Exception):  # which comes again below
                while not ends.wait(_SECONDS):
                    self._take_told(results)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            return process.run_program(
                [str(program.python), str(_DRIVER), str(place)],
                environment={
                    "OMP_NUM_THREADS": str(self.threads),
                    **program.environment(),
                    "TQDM_DISABLE": "1",  # bars without a total; the job has one of finished files
                },
                log=self.log,
                cwd=program.folder,
            )
        finally:
            ends.set()
            thread.join()
            self._take_told(results)

    def _take_told(self, results: Path) -> None:
        """Take what the driver has told of since the last time, by complete lines."""
        if not results.exists():
            return
        data = results.read_bytes()
        whole = data.rfind(b"\n") + 1
        for line in data[self._read : whole].splitlines(keepends=True):
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
        """Store the content of a file; return what is wrong with one that is not right (yet)."""
        wanted, place = self.left[path], Path(path)
        try:
            content = self.content(place, wanted)
        except FileNotFoundError:
            return f"it ended well and wrote no {place.name} of it"
        except (OSError, EOFError, SafetensorError, zipfile.BadZipFile) as error:
            return f"its file cannot be read ({error})"
        except ValueError as error:
            return f"its file {error}"
        self.job.store(wanted.item, wanted.key, wanted.source, *content)
        del self.left[path]
        self._fitted = max(self._fitted or 0, self.amount(wanted))
        self._progress.update()
        place.unlink()
        return ""

    def _judge(self) -> None:
        """Refuse the targets that failed, unless hardly an item is at fault.

        Of those that memory did not suffice for, an item is at fault if it is larger than all that
        fitted; where nothing was made, if an earlier build skipped all of them.
        """
        if self._fitted is None and len(self._failed) > _FEW and not self._known:
            raise self._failure(self._failed[0][1])
        for wanted, error in self._failed:
            is_short = is_out_of_memory(error)
            fits = not self._known if self._fitted is None else self.amount(wanted) <= self._fitted
            if is_short and fits:
                raise self._failure(error)
            self._refuse(wanted, f"not enough memory to encode it: {error}" if is_short else error)

    def _refuse(self, wanted: Wanted, fault: str) -> None:
        """Refuse a target without a digest: the next build tries it again."""
        self._progress.update()
        what, hint = f"{self.program} could not encode it: {fault}", f"all output: {self.log}"
        if wanted.item.stem in self.job.failed:
            self.job.refused[wanted.key] = ("", what, hint)
        else:
            self.job.refuse(wanted.item, wanted.key, "", what, hint)

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
