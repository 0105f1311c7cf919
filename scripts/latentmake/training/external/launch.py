"""Training by an external trainer: launch it, explain a failure, accept the result.

It runs in its own environment and folder. An exit status of 0 is not taken for success: only a new
and complete result is.
"""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from latentmake import digest
from latentmake.caches import gpu
from latentmake.errors import TrainingError
from latentmake.files import atomic
from latentmake.files.safetensors import not_finite, read_head
from latentmake.index.memo import source_stat
from latentmake.plan.orders import FOLDER
from latentmake.plan.receipts import Receipt as ReadFiles
from latentmake.training import child, process
from latentmake.training.checks import passed
from latentmake.training.external.arguments import absolute, accelerate_arguments
from latentmake.training.external.order import ExternalOrder, wanted
from latentmake.training.external.resume import Resume, belongs, prepare, tidy
from latentmake.training.order import Wanted, lock_digest, read_order
from latentmake.training.record import LaunchedRecord, RunFiles, finish

_USAGE = re.compile(r"^\S*\.py: error: (.+)$", re.MULTILINE)
_UNKNOWN = re.compile(r"unrecognized arguments: (.+)")


def train(
    trainer: Any,
    order_path: Path,
    *,
    log: Path,
    receipt: Path,
    processes: int = 1,
    threads: int = 2,
) -> None:
    """Bring the result of an order up to date, and write the receipt; see `Backend.train`.

    `trainer` is the `Launched` that calls this, whose module imports this one.
    """
    order = read_order(order_path, trainer.order_type)
    files = RunFiles(order)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.open("wb").close()  # emptied, not replaced: whoever holds it open goes on writing to it
    say = partial(child.say, log)
    passed(trainer.job_findings(order), say)  # first, since networks take a while to read
    weights = _digest_with_receipt(partial(trainer.weights_digest, order))
    record, data = LaunchedRecord.read(files.record), lock_digest(order.lock)
    if (
        record
        and record.wanted == wanted(order, data, weights, record)
        and not _fault(files.weights)
    ):
        say(f"{order.run}: already trained on exactly this: {files.weights}")
    else:
        want = wanted(order, data, weights)
        record = _Training(trainer, order, want, log).run(processes, threads)
    finish(order, record, receipt)


class _Training:
    """A training whose result is not there.

    Args:
        trainer: the program's `Launched`.
        order: of the training.
        want: digests that its record gets.
        log: gets all output.
    """

    def __init__(self, trainer: Any, order: ExternalOrder, want: Wanted, log: Path) -> None:
        self.trainer, self.order, self.wanted, self.log = trainer, order, want, log
        self.files, self.resume = RunFiles(order), Resume()
        self.say = partial(child.say, log)

    def run(self, processes: int, threads: int) -> LaunchedRecord:
        """Train, or go on from a state; return the record of the result."""
        trainer, order, files, settings = self.trainer, self.order, self.files, self.order.trainer
        program = trainer.find(order)
        if belongs(files, self.wanted) and not _fault(files.last):
            self.say(f"{order.run}: all epochs were done before")
            return self._accept("", 0.0)
        trainer.deploy(order, files, self.say)
        usable = partial(trainer.can_resume, order)
        self.resume = prepare(files, self.wanted, epochs=trainer.epochs(order), usable=usable)
        if self.resume.state is not None:
            done = self.resume.done
            self.say(f"{order.run}: resumed from {self.resume.state}, {done} epochs are done")
        command = trainer.command(order, program, self.resume)
        config = settings.accelerate_config and absolute(settings.accelerate_config)
        launcher = program.launcher(
            accelerate_arguments(settings.mixed_precision, processes=processes, config=config)
        )
        if launcher is None:
            launcher = [str(program.python)]
            self.say(f"{order.run}: warning: {program.python} has no accelerate: run without it")
        with gpu.hold(processes, f"run {order.run}", self.say):
            started = time.monotonic()
            status, output = process.run(
                [*launcher, *command],
                environment={**program.environment(), "OMP_NUM_THREADS": str(threads)},
                log=self.log,
                cwd=program.folder,
            )
        seconds = time.monotonic() - started
        if not output.endswith("\n"):
            self.say("")  # below a progress bar
        if status != 0:
            raise self._failure(output, status)
        return self._accept(output, seconds)

    def _accept(self, output: str, seconds: float) -> LaunchedRecord:
        """Give a new and complete result its name, and write its record."""
        files, run = self.files, self.order.run
        if fault := _fault(files.last, self.trainer.beginning):
            last = next((x for x in reversed(re.split(r"[\r\n]+", output)) if x.strip()), "nothing")
            hint = process.last_error(output, 0)
            hint = last.strip() if hint.startswith("it ended with status") else hint
            raise TrainingError(
                f"run {run}: the trainer ended without an error, but wrote no "
                f"{self.trainer.result(self.order)} ({files.last} {fault}); its last line: "
                f"{hint[:300]}",
                hint=f"all output: {self.log}",
            )
        atomic.open_to_group(files.work, f"{glob.escape(run)}*.safetensors")
        atomic.link(files.last, files.weights)
        record = LaunchedRecord(
            wanted=self.wanted,
            weights=str(files.weights),
            seconds=round(seconds, 3),
            files={files.weights.name: digest.of_file(files.weights)},
        )
        record.write(files.record)
        tidy(files)
        self.say(f"{run}: trained: {files.weights}")
        return record

    def _failure(self, output: str, status: int) -> TrainingError:
        """Return the one line that says why the program failed."""
        run, log = self.order.run, f"all output: {self.log}"
        usage = _USAGE.findall(output)
        unknown = _UNKNOWN.fullmatch(usage[-1].strip()) if usage else None
        if unknown is not None:
            flags = " ".join(each for each in unknown[1].split() if each.startswith("--"))
            return TrainingError(
                f"run {run}: this {self.trainer.name} is too old for {flags or unknown[1]}",
                hint=f"update it, or remove the setting; {log}",
            )
        reason = usage[-1].strip() if usage else process.last_error(output, status)
        hints = [log]
        if "OutOfMemory" in reason or "out of memory" in reason:
            hints.insert(0, self.trainer.memory_hint)
        if self.resume.state is not None:
            hints.insert(0, f"if the state {self.resume.state} is damaged, delete it")
        return TrainingError(f"run {run}: {reason}", hint="; ".join(hints))


def _fault(path: Path, beginning: str = "") -> str | None:
    """Return why a file is no result of a training; None where it is complete.

    `beginning` is that of the names of its tensors.
    """
    try:
        tensors = read_head(path).tensors
    except FileNotFoundError:
        return "is not there"
    except (OSError, ValueError) as error:
        return str(error)
    if not tensors:
        return "holds no tensor"
    if not any(name.startswith(beginning) for name in tensors):
        return f"holds no tensor {beginning}*"
    return next((f"holds values that are not finite ({x})" for x in not_finite(path)), None)


def _digest_with_receipt(find: Callable[[Callable[[Path], str]], str]) -> str:
    """Return a digest of networks, and leave a receipt of the files read for it.

    The planner then need not read files of tens of gigabytes again.
    """
    read: dict[str, list[object]] = {}

    def file_digest(path: Path) -> str:
        with path.open("rb") as file:
            stat = source_stat(os.fstat(file.fileno()))
        content = digest.of_file(path)
        read[str(path)] = [*stat, content]
        return content

    found = find(file_digest)
    receipt = ReadFiles(sources=read, targets={}, faults=[], counts={}, seconds=0.0)
    receipt.write(FOLDER / f"{digest.of_value(read)[:20]}.receipt.json")
    return found
