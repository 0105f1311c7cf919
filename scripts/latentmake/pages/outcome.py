"""Last lines of a build: its results and the next step, or its failures and finished files."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote

from latentmake.base.machine import counted
from latentmake.layouts.layout import CAPTIONS
from latentmake.plan import receipts
from latentmake.plan.manifest import PREVIOUS, run_folder
from latentmake.plan.orders import Order

_SHOWN = 3  # most runs of a build whose results are listed
_GOES_ON = "the same command goes on"


def tell(lines: Iterable[str]) -> None:
    """Print lines to stderr, where a build prints everything."""
    sys.stderr.writelines(f"{line}\n" for line in lines)


def built(
    orders: Sequence[Order], trained: Mapping[str, str], configfiles: Iterable[str | Path] = ()
) -> list[str]:
    """Return the last lines of a build: number of encoded targets, results, and the next step.

    Args:
        orders: orders that the build carried out.
        trained: run that the build trained -> path of its weights.
        configfiles: configuration files of the command line, repeated in the suggested command.
    """
    lines = [_encoded(orders)] if orders else []
    if len(trained) > 1:
        results = [", ".join(_results(run, weights)) for run, weights in trained.items()]
        lines += results[:_SHOWN]
        if len(results) > _SHOWN:
            lines.append(f"{len(results) - _SHOWN} more runs: see the folder runs")
        return lines
    options = "".join(f" -c {quote(str(file))}" for file in configfiles)
    for run, weights in trained.items():
        lines += [*_results(run, weights), _next(run, options)]
    return lines


def up_to_date(results: Mapping[str, str]) -> list[str]:
    """Return the last lines of a build that had nothing to do.

    Args:
        results: requested run or file -> path of its weights; "" if it has none.
    """
    runs = ", ".join(results)
    lines = [f"{runs or 'everything'}: up to date, nothing to do"]
    if len(results) == 1:
        lines += [
            line for run, weights in results.items() if weights for line in _results(run, weights)
        ]
    return lines


def _results(run: str, weights: str) -> list[str]:
    grid = run_folder(run) / "samples.png"
    pictures = [f"{run}: sample pictures in {grid}"] if grid.is_file() else []
    return [f"{run}: weights in {weights}", *pictures]


def _next(run: str, options: str) -> str:
    """Return the line that suggests the next step after a training."""
    folder = run_folder(run) / PREVIOUS
    if (folder / "samples.png").is_file():
        command = f"latentmake compare {run}{options}"
        return f"next: compare {run} with its previous result: {command}"
    if (folder / "training.json").is_file():
        return f"{run}: its previous result is in {folder}"
    return (
        "next: edit a caption and run the same command again; Latentmake encodes only that "
        "caption, and trains again"
    )


def _encoded(orders: Sequence[Order]) -> str:
    """Return the number of encoded targets as text: `1 text encoded, 0 latents`."""
    counts = Counter[str]()
    for order in orders:
        if receipt := receipts.read_receipt(order.receipt):
            counts[order.kind] += receipt.counts.get("encoded", 0)
    latents = counted(counts["latents"], "latent")
    texts = f"{counted(counts['text'], 'text')} encoded, {latents}"
    made = counts[CAPTIONS]
    return f"{counted(made, 'caption')} made, {texts}" if made else texts


def failed(logs: Mapping[str, str], sizes: Mapping[str, int], orders: Sequence[Order]) -> list[str]:
    """Return the last lines of a failed build: first fault, its log, and finished files.

    Args:
        logs: rule of a failed job -> path of its log; "" if it has none.
        sizes: log -> its size in bytes before the build.
        orders: orders that the build carries out.
    """
    faults: dict[str, str] = {}
    for rule, log in logs.items():
        faults.setdefault(_fault(Path(log), sizes.get(log, 0)) if log else rule, log)
    (fault, log), *others = faults.items()
    lines = [f"failed: {fault}", f"log: {log}"]
    if others:
        where = ", ".join(dict.fromkeys(other or name for name, other in others))
        lines.append(f"{counted(len(others), 'more failure', 'are')} in {where}")
    return [*lines, f"finished: {_finished(orders)}; {_GOES_ON}"]


def interrupted(orders: Sequence[Order]) -> list[str]:
    """Return the last line of a build that the user interrupted."""
    return [f"interrupted; finished: {_finished(orders)}; {_GOES_ON}"]


def _fault(log: Path, size: int) -> str:
    """Return the last error that a job wrote to its log, or the last line of the log.

    Args:
        log: path of the log.
        size: size of the log before the build; a job appends to it, or writes it anew.
    """
    with contextlib.suppress(OSError):
        data = log.read_bytes()
        is_longer = len(data) > size and data[:size].endswith(b"\n")
        text = (data[size:] if is_longer else data).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        if lines:
            return (errors or lines)[-1].removeprefix("error: ")
    return f"{log}: the job ended without a message; it may have been killed"


def _finished(orders: Sequence[Order]) -> str:
    targets = [target for order in orders for target in order.targets]
    if not targets:
        return "all caches"
    made = [target for target in targets if target.is_made and not Path(target.path).is_dir()]
    return f"{len(made)} of {len(targets)} cache files"
