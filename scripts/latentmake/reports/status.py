"""Status of a run: state, bytes and rest of each dataset, model and kind; running builds."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from latentmake.errors import StorageError
from latentmake.files.workspace import human
from latentmake.index.memo import Folder, unpacked
from latentmake.layouts.layout import parsed
from latentmake.plan import receipts, store
from latentmake.plan.build import running
from latentmake.plan.facts import Facts
from latentmake.plan.orders import FOLDER, Order, Part
from latentmake.plan.run_plan import RunPlan, faulty_items, is_reg
from latentmake.reports.explanation import recipe_changes
from latentmake.reports.plan_report import row_of


class StatusRow(BaseModel, extra="forbid", frozen=True):
    """State of one dataset, model and kind; all variants of a text are one kind."""

    dataset: str
    model: str
    kind: str  # `latents 64`, `text`
    fresh: int  # number of fresh targets
    stale: dict[str, int]  # reason -> number of stale targets
    orphans: int  # number of cache files whose items are gone
    files: int  # cache files there now, stale and orphaned ones too
    bytes: int  # their size; of several names of one file once
    rest: int  # number of files to be encoded
    rest_bytes: int | None  # their estimated size; None where nobody knows
    rest_seconds: float | None  # to encode them; None where no job of the kind has run here


class Status(BaseModel, extra="forbid", frozen=True):
    """Status of a run."""

    run: str
    rows: list[StatusRow]  # of its parts
    files: list[dict[str, str]]  # reason and path of each target that is not fresh, or orphaned
    faulty: list[str]  # a line for each faulty item
    builds: list[dict[str, Any]]  # that run here
    lines: list[str]  # on changed recipes, the rest, past jobs, manifest, training and store

    @property
    def stale(self) -> int:
        """Number of stale targets."""
        return sum(sum(row.stale.values()) for row in self.rows)


def status_of(facts: Facts, plan: RunPlan) -> Status:
    """Return the status of a run."""
    files = []
    for state in plan.parts.values():
        files += [{"reason": each.reason, "path": each.path} for each in state.stale]
        files += [{"reason": "orphaned", "path": path} for path in state.orphans]
    return Status(
        run=plan.name,
        rows=[*_rows(facts, plan)],
        files=files,
        faulty=[line for lines in faulty_items(facts, plan).values() for line in lines],
        builds=running_builds(),
        lines=[*_lines(facts, plan)],
    )


def stale_items(plan: RunPlan) -> dict[tuple[str, str], list[str]]:
    """Return dataset and stem of each item with stale targets -> these, as `text: edited`."""
    found: dict[tuple[str, str], list[str]] = {}
    for part, state in plan.parts.items():
        for each in state.stale:
            words = found.setdefault((part.dataset, each.item.stem), [])
            if (word := f"{row_of(part)[-1]}: {each.reason}") not in words:
                words.append(word)
    return found


def _rows(facts: Facts, plan: RunPlan) -> Iterator[StatusRow]:
    def name_of(order: Order, part: str) -> tuple[str, str, str]:
        return row_of(Part(order.dataset, order.model, part))

    rests = receipts.estimates(facts.memo, plan.orders, name_of)
    parts: dict[tuple[str, str, str], list[Part]] = {}
    for part in plan.parts:
        parts.setdefault(row_of(part), []).append(part)
    listings = {place: Folder("/".join(("cache", *place))) for place in {x[:2] for x in parts}}
    for name, own in parts.items():
        dataset, model, kind = name
        states, rest = [plan.parts[part] for part in own], rests.get(name, receipts.Past())
        sizes = _sizes(facts, own, listings[dataset, model])
        yield StatusRow(
            dataset=dataset,
            model=model,
            kind=kind,
            fresh=sum(state.fresh for state in states),
            stale=Counter(each.reason for state in states for each in state.stale),
            orphans=sum(len(state.orphans) for state in states),
            files=len(sizes),
            bytes=sum(dict(sizes).values()),
            rest=round(rest.targets),
            rest_bytes=round(rest.size) if rest.size or not rest.targets else None,
            rest_seconds=round(rest.seconds, 3) if rest.seconds or not rest.targets else None,
        )


def _sizes(facts: Facts, parts: Sequence[Part], listing: Folder) -> list[tuple[int, int]]:
    """Return inode and bytes of each cache file of some parts of a kind."""
    layout, is_text = facts.layout(parts[0].model), parsed(parts[0].name).kind == "text"
    ending = layout.text_ending if is_text else layout.latents_ending
    folders = tuple(f"{layout.folder(*part)}/" for part in parts)
    return [
        (inode, size)
        for folder, block in listing.blocks
        if f"{folder}/".startswith(folders)  # stems may have folders of their own
        for name, size, _, inode in unpacked(block)
        if name.endswith(ending)
    ]


def _lines(facts: Facts, plan: RunPlan) -> Iterator[str]:
    yield from plan.warnings
    if regular := is_reg(facts, plan.name):
        yield f"{plan.name}: regularisation images: {', '.join(regular)}"
    yield from recipe_changes(facts, [plan])
    for work in dict.fromkeys(f"{parsed(part.name).kind} {part.model}" for part in plan.parts):
        if past := receipts.past_jobs(facts.memo, work):
            speed, words = past.targets / past.seconds, past.words and f", {past.words}"
            number = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
            yield f"past jobs of {work.replace(' ', ' of ')}: {number} targets/s{words}"
    if plan.manifest_order is not None:
        yield f"{plan.name}: the next build writes the manifest, the list of what is trained on"
    if plan.training_order is not None:
        lines = [line for line in (plan.reason, plan.note) if line]
        yield from lines or [f"{plan.name}: the next build trains it, or draws its samples"]
        if plan.forecast:
            yield f"training of {plan.name}: {plan.forecast}"
    used, bound = human(store.used()), human(facts.config.store.keep)
    yield f"store: {used} of {bound} used (store.keep)"


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
            with contextlib.suppress(StorageError):
                order = Order.read(FOLDER / f"{name}.json")
                done, total = made.get(order.work, (0, 0))
                targets = [target for item in order.items for target in item.targets]
                made[order.work] = (
                    done + sum(each.is_made for each in targets),
                    total + len(targets),
                )
        logs = {run: Path(f"logs/train/{run}.log") for run in about.pop("trained")}
        training = {run: _last_line(log, began) for run, log in logs.items()}
        found.append(about | {"made": made, "training": training})
    return found


def _last_line(log: Path, began: float) -> str:
    """Return the last line of a log that was written since a build began; of a bar as it is now."""
    with contextlib.suppress(OSError):
        if log.stat().st_mtime >= began - 1:  # another machine may have another clock
            text = log.read_text(errors="replace").replace("\r", "\n")
            return text.rstrip().rpartition("\n")[2].strip()
    return ""
