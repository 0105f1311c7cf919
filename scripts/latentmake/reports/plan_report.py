"""Report of a plan: its table and estimates, pictures that do not fit, and disks without room."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice

from latentmake.errors import SourceError
from latentmake.files.workspace import human, is_remote, shortages
from latentmake.geometry.buckets import Size
from latentmake.layouts.layout import parsed
from latentmake.plan import receipts
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Order, Part
from latentmake.plan.run_plan import Plan, RunPlan, faulty_items
from latentmake.plan.state import REASONS, PartState

_ENLARGED = 1.01  # times: less is the rounding of sides
_WIDTH = 80  # characters of a line in a terminal
_HEADS = {"changed recipe": "recipe"}  # reason -> a shorter head of its column
_LOOKED_AT = 1000  # pictures of a dataset whose headers are read: that takes a while on a disk


def plan_table(
    plan: Plan,
    orders: Collection[Order],
    estimates: Iterable[str] = (),
    *,
    kinds: Mapping[str, Collection[str]] | None = None,
) -> str:
    """Return a table: number of targets in each state, by dataset, model and part.

    Args:
        plan: the plan.
        orders: those that a build carries out.
        estimates: lines about what is to be made.
        kinds: run -> kinds of caches that are asked for; all where there is none.
    """
    parts = {
        part: state
        for name, run in plan.runs.items()
        for part, state in run.parts.items()
        if not kinds or not kinds[name] or parsed(part.name).kind in kinds[name]
    }
    rows: dict[tuple[str, str, str], Counter[str]] = {}
    for part, state in parts.items():
        row = rows.setdefault(row_of(part), Counter())
        row.update(fresh=state.fresh, orphaned=len(state.orphans))
        row.update(_HEADS.get(each.reason, each.reason) for each in state.stale)
    faults = {name: found for run in plan.runs.values() for name, found in run.faults.items()}
    lines = _table({name: counts for name, counts in rows.items() if counts.total()})
    if not plan.runs:
        lines = []  # files that the command names
    for found in faults.values():
        by_place = sorted(found, key=lambda fault: _in_numbers(fault.path))
        lines += [f"faulty: {fault.line}" for fault in by_place]
    warnings = (line for run in plan.runs.values() for line in run.warnings)
    lines += [f"warning: {line}" for line in dict.fromkeys(warnings)]
    made = Counter[str]()
    for order in orders:
        made[order.kind] += sum(len(item.targets) for item in order.items)
    if total := made.total():
        names = {order.name for order in orders}
        jobs = sum(any(order.name in names for order in job.orders) for job in plan.jobs)
        reused = sum(len(order.paths) for order in orders if order.reuses)
        linked = f", {reused} of them by linking" * bool(reused)
        lines.append(
            f"{counted(total, 'target')} to make ({counted(made['latents'], 'latent')}, "
            f"{counted(made['text'], 'text')}){linked}, in {counted(jobs, 'job')}"
        )
    lines += estimates
    return "\n".join([*lines, ""]) if lines else ""


def _table(rows: Mapping[tuple[str, str, str], Counter[str]]) -> list[str]:
    """Return the lines of a table without empty columns, of 80 characters if it can be."""
    reasons = [_HEADS.get(reason, reason) for reason in REASONS]
    heads = [x for x in (*reasons, "orphaned") if any(counts[x] for counts in rows.values())]
    heads = ["dataset", "model", "kind", "fresh", *heads]
    cells = [[*name, *(str(counts[x] or ".") for x in heads[3:])] for name, counts in rows.items()]
    columns = [[head, *column] for head, *column in zip(heads, *cells, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    if sum(widths) + 2 * len(widths) - 2 > _WIDTH and len({*columns[1][1:]}) == 1:
        del columns[1], widths[1]  # the same model in each row
    names = len(columns) - len(heads[3:])
    columns = [
        [x.ljust(width) if number < names else x.rjust(width) for x in column]
        for number, (column, width) in enumerate(zip(columns, widths, strict=True))
    ]
    head, *others = zip(*columns, strict=True)
    return ["  ".join(x).rstrip() for x in (head, ["-" * width for width in widths], *others)]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 target`, `2 targets`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _in_numbers(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which `line 9` stands before `line 10`."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def row_of(part: Part) -> tuple[str, str, str]:
    """Return dataset, model and kind of a part's row: all variants of a text make one."""
    kind = f"latents {part.name}"
    if parsed(part.name).kind == "text":
        text, _, resolution = part.name.partition("@")
        kind = f"{text.partition('.')[0]} {resolution}".rstrip()
    return part.dataset, part.model, kind


def stopped_by(facts: Facts, plan: RunPlan) -> str:
    """Return a line on the faulty items that keep a run from its training; "" without any."""
    found, videos = list[str](), False
    for name, lines in faulty_items(facts, plan).items():
        settings = facts.config.datasets[name]
        if lines and settings.on_error != "skip":
            videos |= bool(settings.video)
            found += lines
    if not found:
        return ""
    what = f"the manifest of {plan.name} will not be written"
    if facts.config.runs[plan.name].trainer is not None:
        what = f"the training of {plan.name} will not start"
    count = counted(len(found), "video" if videos else "picture")
    are, them = ("is", "it") if len(found) == 1 else ("are", "them")
    return (
        f"{what}: {count} {are} faulty; repair {them} as the lines `faulty` say, or set "
        f"`on_error: skip` to train without {them}"
    )


def report(
    facts: Facts,
    plan: Plan,
    trained: Collection[str],
    orders: Collection[Order],
    *,
    kinds: Mapping[str, Collection[str]],
    dry: bool,
    more: str = "",
) -> str:
    """Print the table of a plan, and return it; "" if the command needs no run and no cache file.

    Args:
        facts: of its runs.
        plan: the plan.
        trained: runs whose training is asked for.
        orders: those that a build carries out.
        kinds: run -> kinds of caches that are asked for.
        dry: whether nothing is built, so that a disk without room is no more than a warning.
        more: a further line.

    Raises:
        StorageError: what is to be built has no room.
    """
    asked = [run for name, run in plan.runs.items() if name in trained]
    lines = [*receipts.lines(facts.memo, orders)]
    lines += [f"training of {run.name}: {run.forecast}" for run in asked if run.forecast]
    lines += [line for run in asked for line in (run.reason, run.note) if line]
    runs = plan.runs.values()
    lines = [*dict.fromkeys(fitting_lines(facts, plan)), *lines]
    stale = (each for run in runs for state in run.parts.values() for each in state.stale)
    if any(each.reason == "changed recipe" for each in stale):
        from latentmake.reports.explanation import recipe_changes

        lines = [*recipe_changes(facts, runs), *lines]
    lines += [
        f"{need.what}: {human(need.size)} in {need.folder}" for need in plan.needs if need.size
    ]
    lines += [more] * bool(more)
    lines = [*_noted(facts, runs), *lines]
    whole = (run for name, run in plan.runs.items() if len(kinds[name]) > 1 and _may_stop(run))
    lines += [line for run in whole if (line := stopped_by(facts, run))]
    text = plan_table(plan, orders, lines, kinds=kinds)
    sys.stderr.write(f"{text}\n" if text else "")
    caches = receipts.needs(facts.memo, orders)
    for shortage in shortages(
        [*caches, *plan.needs, *(need for run in asked for need in run.needs)]
    ):
        if not dry:
            raise shortage
        sys.stderr.write(f"warning: {shortage}\n")
    return text


def _may_stop(plan: RunPlan) -> bool:
    return bool(plan.faults) or any(state.stale for state in plan.parts.values())


def _noted(facts: Facts, runs: Iterable[RunPlan]) -> Iterator[str]:
    """Yield a line for each fault that a job of an earlier build has found."""
    known = set[str]()
    for run in runs:
        if _may_stop(run):
            known |= {fault.line for faults in run.faults.values() for fault in faults}
            found = {line for lines in faulty_items(facts, run).values() for line in lines}
            yield from (f"faulty: {line}" for line in sorted(found - known, key=_in_numbers))
            known |= found


def fitting_lines(facts: Facts, plan: Plan) -> Iterator[str]:
    """Yield a line for each dataset and resolution with such pictures, of those to be encoded.

    Sizes come from the headers of images, each read once, of some of a large dataset; images on S3
    are left out where no name of a cache file contains their size.
    """
    parts = {part: state for run in plan.runs.values() for part, state in run.parts.items()}
    for part, state in parts.items():
        kind, _, resolution = parsed(part.name)
        if kind == "text" or resolution is None or not state.stale:
            continue
        settings, layout = facts.config.datasets[part.dataset], facts.layout(part.model)
        if not layout.external and settings.exif_rotation and len(set(resolution)) > 1:
            continue  # EXIF may turn an image, and its header's size does not tell
        sizes = Counter(_sizes(facts, part.dataset, state))
        enlarged, cut, most = 0, 0, 0.0
        for size, count in sizes.items():
            try:
                resized, _, _, target = layout.place(size, resolution, settings)
            except SourceError:  # a faulty item, said elsewhere
                continue
            scale = max(resized.width / size.width, resized.height / size.height)
            enlarged += count * (scale > _ENLARGED)
            most = max(most, scale)
            cut += count * (2 * target.width * target.height < resized.width * resized.height)
        what = [f"{_are(enlarged)} enlarged (up to {most:.3g} times)"] * (enlarged > 0)
        what += [f"{_are(cut)} cut by more than half"] * (cut > 0)
        if what:
            number = sizes.total()
            kind = ("video" if settings.video else "picture") + "s" * (number != 1)
            yield f"{part.dataset} at {part.name}: of {number} {kind}, {', '.join(what)}"


def _sizes(facts: Facts, dataset: str, state: PartState) -> Iterator[Size]:
    """Yield the size of each item to be encoded, where it is known."""
    unknown = {}
    for item in {stale.item.stem: stale.item for stale in state.stale}.values():
        if item.media is not None:
            yield Size(item.media.width, item.media.height)
        elif item.files and not is_remote(item.files[0].path):
            unknown[item.files[0].path] = item.files[0]
    step = -(-len(unknown) // _LOOKED_AT) or 1
    if some := [*islice(unknown.values(), 0, None, step)]:
        from latentmake.data.probe import probed

        found = probed(some, facts.memo, video=False)
        yield from (
            Size(x.width, x.height) for x in found.values() if not isinstance(x, SourceError)
        )


def _are(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'}"
