"""Report of a plan: its table, estimates of time and size, changed pictures, disks without space.

Before the first job, sizes follow from the encoders' files and the items, see `cache_bytes`.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from tabulate import tabulate

from latentmake.base.errors import SourceError
from latentmake.base.machine import Need, counted, duration, human, shortages
from latentmake.data.item import Item
from latentmake.layouts.layout import CAPTIONS, kind_of, resolution_of, row_of
from latentmake.plan.estimates import Past, past_jobs
from latentmake.plan.facts import Facts
from latentmake.plan.judge import REASONS, PartState
from latentmake.plan.orders import Order, Part, Target
from latentmake.plan.run_plan import Plan, RunPlan, faulty_items

if TYPE_CHECKING:
    from latentmake.pages.cache_bytes import Pairs

_ENLARGED = 1.01  # scale factor; smaller ones come from rounding the sides
_WIDTH = 80  # characters of a line in a terminal
_HEADS = {"changed recipe": "recipe"}  # reason -> shorter head of its column
_Group = TypeVar("_Group", bound=Hashable)

ToMake = Iterable[tuple[Part, "Pairs"]]
"""Targets that would be made with their inputs, by part."""


def plan_table(
    plan: Plan,
    orders: Collection[Order],
    rest: Iterable[str] = (),
    *,
    kinds: Mapping[str, Collection[str]] | None = None,
) -> str:
    """Return a table: number of targets in each state, by dataset, model and part.

    Args:
        plan: the plan.
        orders: orders that a build carries out.
        rest: further lines below the table, such as estimates of time and size.
        kinds: run -> requested kinds of caches; an empty collection or None stands for all.
    """
    parts = {
        part: state
        for name, run in plan.runs.items()
        for part, state in run.parts.items()
        if not kinds or not kinds[name] or kind_of(part.name) in kinds[name]
    }
    rows: dict[tuple[str, str, str], Counter[str]] = {}
    for part, state in parts.items():
        row = rows.setdefault((*part[:2], row_of(part.name)), Counter())
        row.update(fresh=state.fresh, orphaned=len(state.orphans))
        row.update({_HEADS.get(reason, reason): n for reason, n in state.reasons.items()})
    faults = dict(chain.from_iterable(run.faults.items() for run in plan.runs.values()))
    lines: list[str] = []
    if plan.runs:  # otherwise the command only names cache files
        lines = _table({name: counts for name, counts in rows.items() if counts.total()})
    for of_dataset in faults.values():
        by_path = sorted(of_dataset, key=lambda fault: _in_numbers(fault.path))
        lines += [f"faulty: {fault.line}" for fault in by_path]
    warnings = (line for run in plan.runs.values() for line in run.warnings)
    lines += [f"warning: {line}" for line in dict.fromkeys(warnings)]
    made = Counter[str]()
    for order in orders:
        made[order.kind] += len(order.paths)
    if total := made.total():
        carried_out = {*map(id, orders)}
        jobs = sum(any(id(order) in carried_out for order in job.orders) for job in plan.jobs)
        reused = sum(len(order.paths) for order in orders if order.reuses)
        linked = f", {reused} of them by linking" if reused else ""
        kinds_made = [counted(made["latents"], "latent"), counted(made["text"], "text")]
        if made[CAPTIONS]:
            kinds_made.insert(0, counted(made[CAPTIONS], "caption"))
        lines.append(
            f"{counted(total, 'target')} to make ({', '.join(kinds_made)}){linked}, "
            f"in {counted(jobs, 'job')}"
        )
        works = (work for order in orders if order.kind == "text" for work in order.items)
        if awaiting := sum(len(work.targets) for work in works if work.item.awaits_caption):
            lines.append(f"{counted(awaiting, 'text')} of these only if a new caption differs")
    lines += rest
    return "\n".join([*lines, ""]) if lines else ""


def _table(rows: Mapping[tuple[str, str, str], Counter[str]]) -> list[str]:
    """Return the lines of a table without empty columns, at most 80 characters wide if possible."""
    states = [*(_HEADS.get(reason, reason) for reason in REASONS), "orphaned"]
    states = [state for state in states if any(counts[state] for counts in rows.values())]
    heads = ["dataset", "model", "kind", "fresh", *states]
    cells = [
        [*name, *(str(counts[head] or ".") for head in heads[3:])] for name, counts in rows.items()
    ]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    sides = ["left", "left", "left", *("right" for _ in heads[3:])]
    lines = [heads, ["-" * width for width in widths], *cells]
    if sum(widths) + 2 * len(widths) - 2 > _WIDTH and len({row[1] for row in cells}) == 1:
        lines, sides = [[*line[:1], *line[2:]] for line in lines], sides[1:]  # all have one model
    # Without headers, tabulate makes the columns no wider than their texts.
    table = tabulate(lines, tablefmt="plain", disable_numparse=True, colalign=sides)
    return table.splitlines()


def _in_numbers(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts `line 9` before `line 10`."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def stopped_by(facts: Facts, plan: RunPlan) -> str:
    """Return a line about the faulty items that prevent a run's training; "" if there are none."""
    faults, videos = list[str](), False
    for name, lines in faulty_items(facts, plan).items():
        settings = facts.config.datasets[name]
        if lines and settings.on_error != "skip":
            videos |= bool(settings.video)
            faults += lines
    if not faults:
        return ""
    what = f"the manifest of {plan.name} will not be written"
    if facts.config.runs[plan.name].trainer is not None:
        what = f"the training of {plan.name} will not start"
    are = counted(len(faults), "video" if videos else "picture", "are")
    them = "it" if len(faults) == 1 else "them"
    return (
        f"{what}: {are} faulty; repair {them} as the lines `faulty` say, or set "
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
        facts: facts about the configuration's runs.
        plan: the plan.
        trained: runs whose training is requested.
        orders: orders that a build carries out.
        kinds: run -> requested kinds of caches.
        dry: whether nothing is built. If so, a disk without enough space is only a warning.
        more: a further line; "" for none.

    Raises:
        StorageError: A disk does not have enough space for the build.
    """
    training = [run for name, run in plan.runs.items() if name in trained]
    runs = plan.runs.values()
    lines = [*_noted(facts, runs)]
    if any("changed recipe" in state.reasons for run in runs for state in run.parts.values()):
        from latentmake.pages.explanation import recipe_changes

        lines += recipe_changes(facts, runs)
    lines += dict.fromkeys(fitting_lines(facts, plan))
    sums: Mapping[str, Past] = {}
    if orders:
        sums = by_work(facts, ordered(orders))
        lines += estimate_lines(facts, sums)
    lines += [f"training of {run.name}: {run.forecast}" for run in training if run.forecast]
    lines += [line for run in training for line in (run.reason, run.note) if line]
    needs = (need for need in plan.needs if need.size)
    lines += [f"{need.what}: {human(need.size)} in {need.folder}" for need in needs]
    lines += [more] if more else []
    # A command for one kind of caches writes no manifest, so faulty items do not stop it.
    complete = (run for name, run in plan.runs.items() if len(kinds[name]) > 1 and _may_stop(run))
    lines += [line for run in complete if (line := stopped_by(facts, run))]
    text = plan_table(plan, orders, lines, kinds=kinds)
    sys.stderr.write(f"{text}\n" if text else "")
    trainings = chain.from_iterable(run.needs for run in training)
    for shortage in shortages([*disk_needs(sums), *plan.needs, *trainings]):
        if not dry:
            raise shortage
        sys.stderr.write(f"warning: {shortage}\n")
    return text


def _may_stop(plan: RunPlan) -> bool:
    return bool(plan.faults) or any(state.stale for state in plan.parts.values())


def _noted(facts: Facts, runs: Iterable[RunPlan]) -> Iterator[str]:
    """Yield a line for each fault that a job of an earlier build noted and this plan did not."""
    printed = set[str]()
    for run in runs:
        if _may_stop(run):
            printed |= {fault.line for faults in run.faults.values() for fault in faults}
            noted = {line for lines in faulty_items(facts, run).values() for line in lines}
            yield from (f"faulty: {line}" for line in sorted(noted - printed, key=_in_numbers))
            printed |= noted


def fitting_lines(facts: Facts, plan: Plan) -> Iterator[str]:
    """Yield a line for each dataset and resolution whose stale pictures are enlarged or cut.

    Sizes come from the images' headers; the memo remembers them. In a large dataset, only a sample
    of the headers is read. Images on S3 count only if the names of their cache files contain the
    size.
    """
    parts = {part: state for run in plan.runs.values() for part, state in run.parts.items()}
    for part, state in parts.items():
        resolution = resolution_of(part.name)
        if resolution is None or kind_of(part.name) != "latents" or not state.stale:
            continue
        settings, layout = facts.config.datasets[part.dataset], facts.layout(part.model)
        if not layout.external and settings.exif_rotation and len(set(resolution)) > 1:
            continue  # EXIF may rotate an image, and the size in its header does not show this
        from latentmake.data.probe import sizes_of  # most plans make no latents

        sizes = Counter(sizes_of((work.item for work in state.stale), facts.memo).values())
        enlarged, cut, most = 0, 0, 0.0
        for size, count in sizes.items():
            try:
                resized, _, _, target = layout.place(size, resolution, settings)
            except SourceError:  # the item is faulty, and another line reports it
                continue
            scale = max(resized.width / size.width, resized.height / size.height)
            enlarged += count * (scale > _ENLARGED)
            most = max(most, scale)
            cut += count * (2 * target.width * target.height < resized.width * resized.height)
        changes = []
        if enlarged:
            changes.append(f"{_are(enlarged)} enlarged (up to {most:.3g} times)")
        if cut:
            changes.append(f"{_are(cut)} cut by more than half")
        if changes:
            items = counted(sizes.total(), "video" if settings.video else "picture")
            yield f"{part.dataset} at {part.name}: of {items}, {', '.join(changes)}"


def _are(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'}"


# -- estimates ------------------------------------------------------------------------------------


def to_make(parts: Mapping[Part, PartState]) -> Iterator[tuple[Part, Pairs]]:
    """Yield the stale targets of parts."""
    for part, state in parts.items():
        yield part, [(work.item, target) for work in state.stale for target in work.targets]


def ordered(orders: Iterable[Order]) -> Iterator[tuple[Part, Pairs]]:
    """Yield the targets of orders, by part."""
    parts = dict[tuple[str, str, str], list[tuple[Item, Target]]]()
    for order in orders:
        dataset, model = order.dataset, CAPTIONS if order.makes_captions else order.model
        for item, targets, _ in order.items:
            for target in targets:
                parts.setdefault((dataset, model, target.part), []).append((item, target))
    yield from ((Part(*part), pairs) for part, pairs in parts.items())


def estimates(
    facts: Facts, made: ToMake, group: Callable[[Part], _Group], *, computed: bool = False
) -> dict[_Group, Past]:
    """Return sums over the targets that are encoded, not linked; unknown values are 0.

    Args:
        facts: facts about the configuration.
        made: targets.
        group: function that returns the group of a part.
        computed: whether bytes follow from the encoders' files and the items, which must be read.
            By default they are estimated from past jobs of the same recipe, as seconds are.
    """
    sums: dict[_Group, Past] = {}
    seen: set[str] = set()
    for part, several in made:
        pairs = [(item, target) for item, target in several if not target.at_hand]
        if not pairs:
            continue
        past = past_jobs(facts.memo, part.work)
        old, number = sums.get(name := group(part), Past()), len(pairs)
        seconds, size, amount = 0.0, 0.0, sum(target.pixels for _, target in pairs)
        if past is not None:
            # The ratio of these targets to the past jobs: of pixels if known, else of numbers.
            share = number / (past.targets or 1)
            if amount and past.pixels:
                share = amount / past.pixels
            seconds, size = share * past.seconds, share * past.size
        is_other = past is None or pairs[0][1].reason == "changed recipe"
        if computed or is_other:
            from latentmake.pages.cache_bytes import bytes_of  # most plans have past jobs

            size = bytes_of(facts, part, pairs, seen) or (0.0 if is_other else size)
        sums[name] = Past(
            targets=old.targets + number,
            seconds=old.seconds + seconds,
            size=old.size + size,
            pixels=old.pixels + amount,
        )
    return sums


def by_work(facts: Facts, made: ToMake) -> dict[str, Past]:
    """Return the sums of `estimates` for each kind and model, see `Part.work`."""
    return estimates(facts, made, lambda part: part.work)


def estimate_lines(facts: Facts, sums: Mapping[str, Past]) -> Iterator[str]:
    """Yield a line for each sum of `by_work`: estimated time and bytes, where they are known."""
    for work, rest in sums.items():
        what = work.replace(" ", " of ")
        if past := past_jobs(facts.memo, work):
            time = duration((past.starting + rest.seconds) / 60)
            yield f"{what}: about {time}, {human(rest.size)}"
        elif rest.size:
            yield f"{what}: about {human(rest.size)}"


def disk_needs(sums: Mapping[str, Past]) -> list[Need]:
    """Return the disk space that the targets of `by_work` need, as far as it is known."""
    return [
        Need(work.replace(" ", " of "), "cache", round(past.size))
        for work, past in sums.items()
        if past.size
    ]
