"""Lines that name the source files of a program whose change made caches stale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from latentmake.files.cachefile import read_recipe
from latentmake.layouts import kind_of
from latentmake.plan import programs
from latentmake.plan.facts import Facts
from latentmake.plan.parts import RunPlan

__all__ = ["program_changes"]

_NAMED = 3  # files of a line


def program_changes(facts: Facts, runs: Iterable[RunPlan]) -> Iterator[str]:
    """Yield a line for each model and kind with targets that another version of a program made.

    One cache file of each recipe is read: its header holds the digest of that version.
    """
    stale: dict[tuple[str, str, str, str], dict[str, None]] = defaultdict(dict)
    for run in runs:
        for part, state in run.parts.items():
            if facts.config.encoding_program(facts.config.models[part.model]) is None:
                continue
            for each in state.stale:
                if each.recipe and not each.at_hand:
                    kind = kind_of(part.name)
                    stale[part.dataset, part.model, kind, each.recipe][each.path] = None
    counts: dict[tuple[str, str, str], int] = defaultdict(int)
    for (dataset, model, kind, _), paths in stale.items():
        now = str(facts.recipe(dataset, model, kind).get("program", ""))
        before = str(read_recipe(next(iter(paths))).get("program", ""))
        if now and before and now != before:
            counts[model, kind, _words(before, now)] += len(paths)
    for (model, kind, words), count in counts.items():
        yield f"models.{model}: {words} changed: {count} {kind} target{'s' * (count > 1)}"


def _words(before: str, now: str) -> str:
    """Return which files of a program changed, or the program's name where that is not known."""
    new, old = programs.program_of(now), programs.program_of(before)
    name = new.name if new is not None else "the program"
    if new is None or old is None or not (files := programs.changed(old, new)):
        return name
    more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
    return f"{name}'s {', '.join(files[:_NAMED])}{more}"
