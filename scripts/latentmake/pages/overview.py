"""Status of a run: state, size and unfinished work by dataset, model and kind; running builds."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from latentmake.base.errors import StorageError
from latentmake.base.machine import human
from latentmake.data.memo import Folder, unpacked
from latentmake.layouts.layout import kind_of, row_of
from latentmake.plan import store
from latentmake.plan.build_locks import running
from latentmake.plan.estimates import Past, past_jobs
from latentmake.plan.facts import Facts
from latentmake.plan.orders import FOLDER, Order, Part
from latentmake.plan.run_plan import RunPlan, faulty_items, is_reg


class StatusRow(BaseModel, extra="forbid", frozen=True):
    """State of one dataset, model and kind; all variants of a text count as one kind."""

    dataset: str
    model: str
    kind: str  # `latents 64`, `text`
    fresh: int  # number of fresh targets
    stale: dict[str, int]  # reason -> number of stale targets
    orphans: int  # number of cache files whose items are gone
    files: int  # number of existing cache files, including stale and orphaned ones
    bytes: int  # their size; a file with several hard links counts once
    rest: int  # number of files to be encoded
    rest_bytes: int | None  # their estimated size; None if unknown
    rest_seconds: float | None  # estimated time; None if no job of the kind has run here


CostRows = dict[tuple[str, str, str], dict[str, Any]]
"""Dataset, model and kind -> values of a row of `latentmake cost`."""


class Status(BaseModel, extra="forbid", frozen=True):
    """Status of a run."""

    run: str
    rows: list[StatusRow]  # one row per dataset, model and kind
    files: list[dict[str, str]]  # reason and path of each stale target and each orphaned file
    faulty: list[str]  # a line for each faulty item
    builds: list[dict[str, Any]]  # running builds, as `running_builds` returns them
    lines: list[str]  # further lines: warnings, recipes, past jobs, manifest, training, store

    @property
    def stale(self) -> int:
        """Number of stale targets."""
        return sum(sum(row.stale.values()) for row in self.rows)


def status_of(facts: Facts, plan: RunPlan) -> Status:
    """Return the status of a run."""
    files = []
    for state in plan.parts.values():
        files += [{"reason": target.reason, "path": target.path} for target in state.to_make]
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
    """Return dataset and stem of an item -> its stale targets, such as `text: edited`."""
    items: dict[tuple[str, str], list[str]] = {}
    for part, state in plan.parts.items():
        for item, targets, _ in state.stale:
            words = items.setdefault((part.dataset, item.stem), [])
            new = dict.fromkeys(f"{row_of(part.name)}: {target.reason}" for target in targets)
            words += [word for word in new if word not in words]
    return items


def _rows(facts: Facts, plan: RunPlan) -> Iterator[StatusRow]:
    rests: Mapping[tuple[str, str, str], Past] = {}
    if any(state.stale for state in plan.parts.values()):
        from latentmake.pages.plan_report import estimates, to_make

        rests = estimates(facts, to_make(plan.parts), _row)
    for name, own, files in _files(facts, plan):
        dataset, model, kind = name
        states, rest = [plan.parts[part] for part in own], rests.get(name, Past())
        yield StatusRow(
            dataset=dataset,
            model=model,
            kind=kind,
            fresh=sum(state.fresh for state in states),
            stale=sum((state.reasons for state in states), Counter()),
            orphans=sum(len(state.orphans) for state in states),
            files=len(files),
            bytes=sum(dict(files.values()).values()),
            rest=round(rest.targets),
            rest_bytes=round(rest.size) if rest.size or not rest.targets else None,
            rest_seconds=round(rest.seconds, 3) if rest.seconds or not rest.targets else None,
        )


def _row(part: Part) -> tuple[str, str, str]:
    """Return dataset, model and kind of a part, which name its row."""
    return part.dataset, part.model, row_of(part.name)


def _files(
    facts: Facts, plan: RunPlan
) -> Iterator[tuple[tuple[str, str, str], list[Part], dict[str, tuple[int, int]]]]:
    """Yield each row of a plan, its parts, and path -> inode and size of their cache files."""
    rows: dict[tuple[str, str, str], list[Part]] = {}
    for part in plan.parts:
        rows.setdefault(_row(part), []).append(part)
    listings = {place: Folder(f"cache/{'/'.join(place)}") for place in {row[:2] for row in rows}}
    for row, parts in rows.items():
        layout, is_text = facts.layout(row[1]), kind_of(parts[0].name) == "text"
        ending = layout.text_ending if is_text else layout.latents_ending
        folders = tuple(f"{layout.folder(*part)}/" for part in parts)
        files = {
            f"{folder}/{name}": (inode, size)
            for folder, block in listings[row[:2]].blocks
            if f"{folder}/".startswith(folders)  # not ==: a stem may contain sub-folders
            for name, size, _, inode in unpacked(block)
            if name.endswith(ending)
        }
        yield row, parts, files


def cost_rows(facts: Facts, plan: RunPlan) -> CostRows:
    """Return the files and the bytes of a run's caches, now and after a build.

    A file with several names counts once. Unknown bytes are None.
    """
    from latentmake.pages.plan_report import estimates, to_make

    parts, rows = plan.parts, CostRows()
    sums = estimates(facts, to_make(parts), _row, computed=True)
    for key, own, files in _files(facts, plan):
        stale = [target for part in own for target in parts[part].to_make]
        replaced = {target.path for target in stale}.union(*(parts[part].orphans for part in own))
        kept = {inode: size for path, (inode, size) in files.items() if path not in replaced}
        for target in stale:
            for path in target.at_hand[:1]:
                with contextlib.suppress(OSError):
                    stat = Path(path).stat()
                    kept[stat.st_ino] = stat.st_size
        encoded = sums.get(key)
        is_known = encoded is None or encoded.size
        made = encoded.size if encoded else 0.0
        rows[key] = {
            "items": len(facts.wanted_items(*key[:2])),
            "files": len(files),
            "bytes": sum(dict(files.values()).values()),
            "then files": len(files.keys() - replaced) + len({target.path for target in stale}),
            "then bytes": round(sum(kept.values()) + made) if is_known else None,
        }
    return rows


def _lines(facts: Facts, plan: RunPlan) -> Iterator[str]:
    yield from plan.warnings
    if regular := is_reg(facts, plan.name):
        yield f"{plan.name}: regularisation images: {', '.join(regular)}"
    if any("changed recipe" in state.reasons for state in plan.parts.values()):
        from latentmake.pages.explanation import recipe_changes

        yield from recipe_changes(facts, [plan])
    for work in dict.fromkeys(part.work for part in plan.parts):
        if past := past_jobs(facts.memo, work):
            speed, words = past.targets / past.seconds, f", {past.words}" if past.words else ""
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
    """Return the builds that run in this folder, and their progress, which is read from the disk.

    Returns:
        `process` (process ID on the build's machine), `targets` (targets of its command line;
        empty for all), `began` (seconds since 1970), `made` (`latents tiny` -> number of finished
        targets, and of all), `training` (run -> last line of its log; "" if there is none yet).
    """
    builds = []
    for _, note in running():
        made = dict[str, tuple[int, int]]()
        for name in note.orders:
            with contextlib.suppress(StorageError):
                order = Order.read(FOLDER / f"{name}.json")
                done, total = made.get(order.work, (0, 0))
                finished = sum(target.is_made for target in order.targets)
                made[order.work] = done + finished, total + len(order.paths)
        logs = {run: Path(f"logs/train/{run}.log") for run in note.trained}
        training = {run: _last_line(log, note.began) for run, log in logs.items()}
        about = note.model_dump(exclude={"orders", "trained"})
        builds.append(about | {"made": made, "training": training})
    return builds


def _last_line(log: Path, began: float) -> str:
    """Return the last line of a log; "" if it was not written since a build began.

    If the last line is a progress bar, its latest state is returned.
    """
    with contextlib.suppress(OSError):
        if log.stat().st_mtime >= began - 1:  # the clocks of machines may differ
            text = log.read_text(errors="replace").replace("\r", "\n")
            return text.rstrip().rpartition("\n")[2].strip()
    return ""
