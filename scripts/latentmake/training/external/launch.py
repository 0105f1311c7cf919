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
from latentmake.training.backend import Say
from latentmake.training.checks import passed
from latentmake.training.external.arguments import accelerate_arguments
from latentmake.training.external.order import ExternalOrder
from latentmake.training.external.result import Receipt, Record, RunFiles, wanted
from latentmake.training.external.resume import Resume, begun, belongs, prepare, tidy
from latentmake.training.order import BASIS, Wanted, lock_digest, read_order

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
    """Bring the result of an order up to date, and write the receipt.

    Args:
        trainer: the `Launched` that calls this, whose module imports this one.
        order_path: the order, a JSON file.
        log: gets all output of this call.
        receipt: a JSON file that says where the result lies; written last.
        processes: how many devices train together.
        threads: CPU threads of the trainer.

    Raises:
        UserError: the order cannot be carried out.
    """
    order = read_order(order_path, trainer.order_type)
    files = RunFiles(order.run, order.output)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.open("wb").close()  # emptied, not replaced: whoever holds it open goes on writing to it
    say = partial(child.say, log)
    passed(trainer.job_findings(order), say)  # first, since networks take a while to read
    weights = _digest_with_receipt(partial(trainer.weights_digest, order))
    asked = wanted(order, lock_digest(order.lock), weights)
    record = Record.read(files.record)
    if record and record.wanted in [want for _, want in asked] and not _fault(files.lora):
        say(f"{order.run}: already trained on exactly this: {files.lora}")
    else:
        left = begun(files, order.run)
        order, want = next((pair for pair in asked if pair[1] == left), asked[0])
        record = _train(trainer, order, files, want, say, log, processes, threads)
    order = next((each for each, want in asked if want == record.wanted), order)
    order.basis(record.wanted).write(files.output / BASIS)
    Receipt(run=order.run, **dict(record)).write(receipt)


def _train(
    trainer: Any,
    order: ExternalOrder,
    files: RunFiles,
    want: Wanted,
    say: Say,
    log: Path,
    processes: int,
    threads: int,
) -> Record:
    program = trainer.find(order)
    accept = partial(
        _accept, order.run, trainer.result(order), files, want, say, log, trainer.beginning
    )
    if belongs(files, want) and not _fault(files.trained):
        say(f"{order.run}: all epochs were done before")
        return accept("", 0.0)
    trainer.deploy(order, files, say)
    resume = prepare(
        files,
        order.run,
        want,
        epochs=trainer.epochs(order),
        usable=partial(trainer.can_resume, order),
    )
    if resume.state is not None:
        say(f"{order.run}: resumed from {resume.state}, {resume.done} epochs are done")
    command = trainer.command(order, program, resume)
    launcher = program.launcher(
        accelerate_arguments(
            order.trainer.mixed_precision,
            processes=processes,
            config=order.trainer.accelerate_config
            and str(Path(order.trainer.accelerate_config).absolute()),
        )
    )
    if launcher is None:
        launcher = [str(program.python)]
        say(f"{order.run}: warning: {program.python} has no accelerate: run without it")
    with gpu.hold(processes, f"run {order.run}", say):
        started = time.monotonic()
        status, output = process.run(
            [*launcher, *command],
            environment={**program.environment(), "OMP_NUM_THREADS": str(threads)},
            log=log,
            cwd=program.folder,
        )
    seconds = time.monotonic() - started
    if not output.endswith("\n"):
        say("")  # below a progress bar
    if status != 0:
        raise _failure(trainer, order.run, output, status, log, resume)
    return accept(output, seconds)


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


def _accept(
    run: str,
    result: str,
    files: RunFiles,
    want: Wanted,
    say: Say,
    log: Path,
    beginning: str,
    output: str,
    seconds: float,
) -> Record:
    """Give a new and complete result its name, and write its record."""
    if fault := _fault(files.trained, beginning):
        last = next((x for x in reversed(re.split(r"[\r\n]+", output)) if x.strip()), "nothing")
        hint = process.last_error(output, 0)
        hint = last.strip() if hint.startswith("it ended with status") else hint
        raise TrainingError(
            f"run {run}: the trainer ended without an error, but wrote no {result} "
            f"({files.trained} {fault}); its last line: {hint[:300]}",
            hint=f"all output: {log}",
        )
    atomic.open_to_group(files.work, f"{glob.escape(run)}*.safetensors")
    atomic.link(files.trained, files.lora)
    digests = {files.lora.name: digest.of_file(files.lora)}
    record = Record(wanted=want, weights=str(files.lora), seconds=round(seconds, 3), files=digests)
    record.write(files.record)
    tidy(files)
    say(f"{run}: trained: {files.lora}")
    return record


def _failure(
    trainer: Any, run: str, output: str, status: int, log: Path, resume: Resume
) -> TrainingError:
    """Return the one line that says why a trainer failed."""
    usage = _USAGE.findall(output)
    unknown = _UNKNOWN.fullmatch(usage[-1].strip()) if usage else None
    if unknown is not None:
        flags = " ".join(each for each in unknown[1].split() if each.startswith("--"))
        return TrainingError(
            f"run {run}: this {trainer.name} is too old for {flags or unknown[1]}",
            hint=f"update it, or remove the setting; all output: {log}",
        )
    reason = usage[-1].strip() if usage else process.last_error(output, status)
    hints = [f"all output: {log}"]
    if "OutOfMemory" in reason or "out of memory" in reason:
        hints.insert(0, trainer.memory_hint)
    if resume.state is not None:
        hints.insert(0, f"if the state {resume.state} is damaged, delete it")
    return TrainingError(f"run {run}: {reason}", hint="; ".join(hints))
