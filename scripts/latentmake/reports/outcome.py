"""Last lines of a build: its results and what to do next, or what failed and what is finished."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote

from latentmake.plan import receipts
from latentmake.plan.manifest import PREVIOUS, run_folder
from latentmake.plan.orders import Order
from latentmake.reports.plan_report import counted

_SHOWN = 3  # runs of a build whose results are named
_GOES_ON = "the same command goes on"


def tell(lines: Iterable[str]) -> None:
    """Print lines, as all that a build says."""
    sys.stderr.writelines(f"{line}\n" for line in lines)


def built(
    orders: Sequence[Order], trained: Mapping[str, str], configfiles: Iterable[str | Path] = ()
) -> list[str]:
    """Return the last lines of a build: how many targets it encoded, results, and what is next.

    Args:
        orders: those that it carried out.
        trained: run that it trained anew -> its weights.
        configfiles: those of the command line, for the command that comes next.
    """
    lines = [_encoded(orders)] * bool(orders)
    if len(trained) > 1:
        shown = [", ".join(_results(*each)) for each in trained.items()]
        more = f"{len(shown) - _SHOWN} more runs: see the folder runs"
        return [*lines, *shown[:_SHOWN], *([more] * (len(shown) > _SHOWN))]
    options = "".join(f" -c {quote(str(file))}" for file in configfiles)
    for run, weights in trained.items():
        lines += [*_results(run, weights), _next(run, options)]
    return lines


def up_to_date(results: Mapping[str, str]) -> list[str]:
    """Return the last lines of a build that had nothing to do.

    `results` has the weights of each run or file that was asked for; "" where it has none.
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
    """Return the line on what a user does next with a run that was trained anew."""
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
    """Return how many targets a build encoded: `1 text encoded, 0 latents`."""
    counts = Counter[str]()
    for order in orders:
        if receipt := receipts.read_receipt(order.receipt):
            counts[order.kind] += receipt.counts.get("encoded", 0)
    latents = counted(counts["latents"], "latent")
    return f"{counted(counts['text'], 'text')} encoded, {latents}"


def failed(logs: Mapping[str, str], sizes: Mapping[str, int], orders: Sequence[Order]) -> list[str]:
    """Return the last lines of a build that failed: the first fault, its log, what is finished.

    Args:
        logs: rule of a job that failed -> its log, "" without one.
        sizes: log -> bytes that it had before the build.
        orders: those that the build carries out.
    """
    faults: dict[str, str] = {}
    for rule, log in logs.items():
        faults.setdefault(_fault(Path(log), sizes.get(log, 0)) if log else rule, log)
    (fault, log), *others = faults.items()
    lines = [f"failed: {fault}", f"log: {log}"]
    if others:
        more = "failure is" if len(others) == 1 else "failures are"
        where = ", ".join(dict.fromkeys(other or name for name, other in others))
        lines.append(f"{len(others)} more {more} in {where}")
    return [*lines, f"finished: {_finished(orders)}; {_GOES_ON}"]


def interrupted(orders: Sequence[Order]) -> list[str]:
    """Return the last line of a build that a user ended."""
    return [f"interrupted; finished: {_finished(orders)}; {_GOES_ON}"]


def _fault(log: Path, size: int) -> str:
    """Return the last error that a job has written to its log, or its last line."""
    with contextlib.suppress(OSError):
        data = log.read_bytes()
        is_longer = len(data) > size and data[:size].endswith(b"\n")  # and not written anew
        text = (data[size:] if is_longer else data).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        if errors or lines:
            return [*lines, *errors][-1].removeprefix("error: ")
    return f"{log}: the job ended without a message; it may have been killed"


def _finished(orders: Sequence[Order]) -> str:
    targets = [target for order in orders for item in order.items for target in item.targets]
    if not targets:
        return "all caches"
    return f"{sum(each.is_made for each in targets)} of {len(targets)} cache files"
