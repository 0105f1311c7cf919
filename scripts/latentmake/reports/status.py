"""Status of a run: state, bytes and rest of each dataset, model and kind; running builds."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ByteSize

from latentmake.index.memo import Folder, Memo, unpacked
from latentmake.layouts.layout import parsed
from latentmake.plan import receipts, store
from latentmake.plan.build import running
from latentmake.plan.facts import Facts
from latentmake.plan.orders import FOLDER, Order, Part, Target
from latentmake.plan.run_plan import RunPlan
from latentmake.reports.explanation import recipe_changes
from latentmake.reports.plan_report import row_of


class StatusRow(BaseModel, extra="forbid"):
    """State of one dataset, model and kind; all variants of a text are one kind.

    Attributes:
        kind: `latents 64`, `text`.
        fresh: number of fresh targets.
        stale: reason -> number of stale targets.
        orphans: number of cache files whose items are gone.
        files: cache files there now, stale and orphaned ones too.
        bytes: their size; of several names of one file once.
        rest: number of files to be encoded.
        rest_bytes: their estimated size; None where nobody knows.
        rest_seconds: estimated time to encode them; None where no job of the kind has run here.
    """

    dataset: str
    model: str
    kind: str
    fresh: int = 0
    stale: dict[str, int] = {}
    orphans: int = 0
    files: int = 0
    bytes: int = 0
    rest: int = 0
    rest_bytes: int | None = 0
    rest_seconds: float | None = 0.0


class Status(BaseModel, extra="forbid", frozen=True):
    """Status of a run.

    Attributes:
        rows: of its parts.
        files: reason and path of each target that is not fresh, and of each orphan.
        faulty: a line for each faulty item.
        builds: that run here.
        lines: on recipes that changed, the rest, past jobs, manifest, training and store.
    """

    run: str
    rows: list[StatusRow]
    files: list[dict[str, str]]
    faulty: list[str]
    builds: list[dict[str, Any]]
    lines: list[str]

    @property
    def fresh(self) -> int:
        """Number of fresh targets."""
        return sum(row.fresh for row in self.rows)

    @property
    def stale(self) -> int:
        """Number of stale targets."""
        return sum(sum(row.stale.values()) for row in self.rows)


def status_of(facts: Facts, plan: RunPlan) -> Status:
    """Return the status of a run."""
    files = [
        {"reason": reason, "path": path}
        for state in plan.parts.values()
        for reason, path in (
            *((each.reason, each.path) for each in state.stale),
            *(("orphaned", path) for path in state.orphans),
        )
    ]
    return Status(
        run=plan.name,
        rows=_rows(facts, plan),
        files=files,
        faulty=[fault.line for found in plan.faults.values() for fault in found],
        builds=running_builds(),
        lines=[*_lines(facts, plan)],
    )


def _rows(facts: Facts, plan: RunPlan) -> list[StatusRow]:
    rows: dict[tuple[str, str, str], StatusRow] = {}
    parts: dict[tuple[str, str, str], list[Part]] = {}
    for part, state in plan.parts.items():
        name = row_of(part)
        dataset, model, kind = name
        row = rows.setdefault(name, StatusRow(dataset=dataset, model=model, kind=kind))
        parts.setdefault(name, []).append(part)
        row.fresh += state.fresh
        row.stale = dict(Counter(row.stale) + Counter(each.reason for each in state.stale))
        row.orphans += len(state.orphans)
    listings = {place: Folder("/".join(("cache", *place))) for place in {x[:2] for x in rows}}
    for name, row in rows.items():
        _add_sizes(facts, row, parts[name], listings[name[:2]])

    def group(order: Order, part: str) -> tuple[str, str, str]:
        return row_of(Part(order.dataset, order.model, part))

    for name, rest in receipts.estimates(facts.memo, plan.orders, group).items():
        if name in rows:
            rows[name].rest = round(rest.targets)
            rows[name].rest_bytes = round(rest.size) if rest.size else None
            rows[name].rest_seconds = round(rest.seconds, 3) if rest.seconds else None
    return [*rows.values()]


def _add_sizes(facts: Facts, row: StatusRow, parts: Iterable[Part], listing: Folder) -> None:
    layout = facts.layout(row.model)
    ending = layout.text_ending if parsed(row.kind).kind == "text" else layout.latents_ending
    folders = {layout.folder(*part) for part in parts}
    seen: dict[int, int] = {}
    for folder, block in listing.blocks:
        # Stems may have folders of their own.
        if any(folder == each or folder.startswith(f"{each}/") for each in folders):
            for name, size, _, inode in unpacked(block):
                if ending and name.endswith(ending):
                    row.files += 1
                    seen[inode] = size
    row.bytes = sum(seen.values())


def _lines(facts: Facts, plan: RunPlan) -> Iterator[str]:
    yield from recipe_changes(facts, [plan])
    yield from receipts.lines(facts.memo, plan.orders)
    yield from _past_jobs(plan, facts.memo)
    if plan.manifest_order is not None:
        yield f"{plan.name}: the manifest is to be written"
    if plan.training_order is not None:
        lines = [line for line in (plan.reason, plan.note) if line]
        yield from lines or [f"{plan.name}: is to be trained, or its sample pictures drawn"]
        if plan.forecast:
            yield f"training of {plan.name}: {plan.forecast}"
    used, bound = (_exactly(size) for size in (store.used(), facts.config.store.keep))
    yield f"store: {used} of {bound} used (store.keep)"


def _past_jobs(plan: RunPlan, memo: Memo) -> Iterator[str]:
    for work in dict.fromkeys((parsed(part.name).kind, part.model) for part in plan.parts):
        if past := receipts.past_jobs(memo, " ".join(work)):
            speed, words = past.targets / past.seconds, past.words and f", {past.words}"
            yield f"past jobs of {' of '.join(work)}: {_speed(speed)} targets/s{words}"


def _speed(targets: float) -> str:
    return f"{targets:,.0f}" if targets >= 10 else f"{targets:.2g}"


def _exactly(size: int) -> str:
    return ByteSize(size).human_readable(decimal=True, separator=" ")


# -- running builds -------------------------------------------------------------------------------


def running_builds() -> list[dict[str, Any]]:
    """Return each build that runs here, and how far it is by what lies on the disk.

    Returns:
        `process` (its id, on its machine), `targets` (of its command line; none stand for all),
        `began` (seconds since 1970), `made` (`latents tiny` -> number of targets made and to make),
        `training` (run -> the last line of its log; "" before it has one).
    """
    found = []
    for _, about in running():
        began, made = about["began"], dict[str, tuple[int, int]]()
        for name in about.pop("orders"):
            with contextlib.suppress(OSError, ValueError):
                order = Order.read(FOLDER / f"{name}.json")
                done, total = made.get(order.work, (0, 0))
                targets = [target for item in order.items for target in item.targets]
                made[order.work] = done + sum(map(_is_made, targets)), total + len(targets)
        logs = {run: Path(f"logs/train/{run}.log") for run in about.pop("trained")}
        training = {run: _last_line(log, began) for run, log in logs.items()}
        found.append(about | {"made": made, "training": training})
    return found


def _is_made(target: Target) -> bool:
    """Whether a target is no longer what the plan found."""
    with contextlib.suppress(OSError):
        moment = str(os.lstat(target.path).st_mtime_ns)
        return target.found is None or target.found.rpartition("@")[2] != moment
    return False


def _last_line(log: Path, began: float) -> str:
    """Return the last line of a log that was written since a build began; of a bar as it is now."""
    with contextlib.suppress(OSError):
        if log.stat().st_mtime >= began - 1:  # another machine may have another clock
            text = log.read_text(errors="replace").replace("\r", "\n")
            return text.rstrip().rpartition("\n")[2].strip()
    return ""
