"""What launching another trainer takes, whichever it is: what to say of its end, and its result."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from latentmake import digest
from latentmake.errors import TrainingError
from latentmake.files import atomic
from latentmake.files.safetensors import not_finite, read_head
from latentmake.index.memo import source_stat
from latentmake.plan.orders import FOLDER, Receipt
from latentmake.training import process
from latentmake.training.external.result import Layout, Record
from latentmake.training.order import Wanted

__all__ = ["accept", "digest_with_receipt", "failure", "say", "weights_fault"]

_USAGE = re.compile(r"^\S*\.py: error: (.+)$", re.MULTILINE)
_UNKNOWN = re.compile(r"unrecognized arguments: (.+)")


def say(text: str, log: Path) -> None:
    """Say a line to the user, and append it to a log."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{text}\n")


def weights_fault(path: Path) -> str | None:
    """Return why a file is no result of a training; None where it is whole and holds a tensor."""
    try:
        tensors = read_head(path).tensors
    except FileNotFoundError:
        return "is not there"
    except (OSError, ValueError) as error:
        return str(error)
    if not tensors:
        return "holds no tensor"
    return next((f"holds values that are not finite ({x})" for x in not_finite(path)), None)


def digest_with_receipt(find: Callable[[Callable[[Path], str]], str]) -> str:
    """Return a digest of networks for a job, and leave a receipt of what was read for it.

    The planner then need not read files of tens of gigabytes again.

    Args:
        find: finds it; is given what finds the digest of a file.

    Raises:
        ModelError: a network is missing or cannot be read.
        StorageError: the disk is full or cannot be written.
    """
    read: dict[str, list[object]] = {}

    def file_digest(path: Path) -> str:
        with path.open("rb") as file:
            stat = source_stat(os.fstat(file.fileno()))
        content = digest.of_file(path)
        read[str(path)] = [*stat, content]
        return content

    found = find(file_digest)
    receipt = Receipt(sources=read, targets={}, faults=[], counts={}, seconds=0.0)
    receipt.write(FOLDER / f"{digest.of_value(read)[:20]}.receipt.json")
    return found


def accept(
    run: str,
    result: str,
    layout: Layout,
    want: Wanted,
    output: str,
    log: Path,
    seconds: float,
    tidy: Callable[[], object],
) -> Record:
    """Give a new and whole result its name, and write down what it came from.

    Args:
        run: its name.
        result: what it should be, in a word.
        layout: the run's files.
        want: what was trained.
        output: the end of what the trainer said.
        log: where all of that is.
        seconds: how long it ran.
        tidy: removes what was kept until there is a new result.

    Raises:
        TrainingError: there is no such result.
        StorageError: the disk is full or cannot be written.
    """
    if fault := weights_fault(layout.trained):
        last = next((x for x in reversed(re.split(r"[\r\n]+", output)) if x.strip()), "nothing")
        hint = process.last_error(output, 0)
        hint = last.strip() if hint.startswith("it ended with status") else hint
        raise TrainingError(
            f"run {run}: the trainer ended without an error, but wrote no {result} "
            f"({layout.trained} {fault}); what it said last: {hint[:300]}",
            mend=f"all output: {log}",
        )
    atomic.open_to_group(layout.work, f"{glob.escape(run)}*.safetensors")
    atomic.link(layout.trained, layout.lora)
    record = Record(wanted=want, weights=str(layout.lora), seconds=round(seconds, 3))
    atomic.write(layout.record, (record.model_dump_json(indent=2) + "\n").encode())
    tidy()
    say(f"{run}: trained: {layout.lora}", log)
    return record


def failure(
    run: str, program: str, output: str, status: int, log: Path, *, memory: str, further: str = ""
) -> TrainingError:
    """Return the one line that says why a trainer failed.

    Args:
        run: its name.
        program: the trainer's.
        output: the end of what it said.
        status: with which it ended.
        log: where all of that is.
        memory: what to try where memory ran out.
        further: what else may be to blame, and how to mend it.
    """
    usage = _USAGE.findall(output)
    unknown = _UNKNOWN.fullmatch(usage[-1].strip()) if usage else None
    if unknown is not None:
        flags = " ".join(each for each in unknown[1].split() if each.startswith("--"))
        return TrainingError(
            f"run {run}: this {program} is too old for {flags or unknown[1]}",
            mend=f"update it, or leave that out; all output: {log}",
        )
    reason = usage[-1].strip() if usage else process.last_error(output, status)
    mend = f"all output: {log}"
    if "OutOfMemory" in reason or "out of memory" in reason:
        mend = f"{memory}; {mend}"
    return TrainingError(f"run {run}: {reason}", mend=f"{further}; {mend}" if further else mend)
