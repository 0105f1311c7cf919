"""Findings of `verify_{run}`: what a cache file holds, against what it should hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from latentmake.errors import shortened
from latentmake.files.atomic import TEMPORARY_SUFFIX
from latentmake.files.cachefile import read_recipe
from latentmake.plan.differences import recipe_differences
from latentmake.plan.expected import Expected
from latentmake.reports.verify_files import Content

__all__ = ["WEIGHTS", "Finding", "Origins", "kept_file", "unexpected_file"]

WEIGHTS = "damaged weights"
"""Kind of a finding about trained weights, which no repair deletes."""

_DONE = ("deleted", "kept")


class Finding(NamedTuple):
    """Something about a file.

    Attributes:
        kind: `damaged`, `edited header`, `other item`, `other recipe`, `other source`, `foreign`,
            `unreadable`, `odd`, `orphan` or `WEIGHTS`.
        note: whether it is nothing that a build would repair: a foreign file that is no cache file,
            an orphan, an odd one that is as it was written.
        key: of a sound file, under which the store keeps it; "" of others.
        done: what repair did: `deleted`, `kept in the store`, or why nothing.
    """

    path: str
    kind: str
    reason: str
    note: bool = False
    key: str = ""
    done: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it is wrong and was not repaired."""
        return not self.note and not self.done.startswith(_DONE)

    @property
    def line(self) -> str:
        """The finding in a line, whatever its file is called."""
        text = f"{self.path}: {self.kind}: {self.reason}{f'; {self.done}' if self.done else ''}"
        return text.replace("\n", "\\n").encode("utf-8", "backslashreplace").decode()


class Origins:
    """What all cache files of a run should be made of.

    Args:
        expected: the files.
        recipes: digest -> recipe.
    """

    def __init__(
        self, expected: Mapping[str, Expected], recipes: Mapping[str, Mapping[str, object]]
    ) -> None:
        self._recipes = recipes
        self._owners = {each.key: each for each in reversed([*expected.values()]) if each.key}

    def finding(self, wanted: Expected, found: Content) -> Finding | None:
        """Return what is wrong with a file in the place of a target; None where nothing is."""
        path = wanted.path
        if found.unreadable:
            return Finding(path, "unreadable", found.fault)
        if found.foreign:
            return Finding(path, "foreign", f"{found.fault}; the next build replaces it")
        if found.fault:
            return Finding(path, "damaged", found.fault)
        source_fits = not wanted.content or found.source == wanted.content
        recipe_fits = not wanted.recipe or found.recipe == wanted.recipe
        key_fits = found.key == wanted.key or not wanted.key
        if source_fits and recipe_fits and key_fits:
            reason = f"{found.doubt}, as its encoder wrote it; look at {_short(wanted.source)}"
            return Finding(path, "odd", reason, note=True) if found.doubt else None
        if wanted.key and key_fits:
            name = "recipe" if source_fits else "source"
            return Finding(path, "edited header", f"its key is not that of its {name}")
        owner = self._owners.get(found.key)
        if owner and (owner.content, owner.recipe) == (found.source, found.recipe):
            reason = f"it is the file of {owner.path}"
            return Finding(path, "other item", reason, key=found.key)
        if not recipe_fits:
            kind = "other recipe"
            reason = self._recipe_reason(wanted, found)
            if not source_fits:
                reason += "; its source is another too"
        elif not source_fits:
            kind, reason = "other source", f"it was not made of {_short(wanted.source)} as it is"
        else:
            kind = "other recipe"
            reason = "its key tells of another size or cut, or was edited"
        return Finding(path, kind, reason, key=found.key)

    def _recipe_reason(self, wanted: Expected, found: Content) -> str:
        new, old = self._recipes.get(wanted.recipe, {}), read_recipe(wanted.path)
        return ", ".join(map(str, recipe_differences(old, new))) or "it cannot be compared"


def _short(source: str) -> str:
    return shortened(" ".join(source.split()))


def unexpected_file(path: str, found: Content | None, others: Collection[str]) -> Finding | None:
    """Return the finding of a file in the place of no target.

    Args:
        path: of the file.
        found: its check; None where its name is no cache file's.
        others: bases that its name may have, of items of which nothing is expected.
    """
    if path.endswith(TEMPORARY_SUFFIX):
        return Finding(path, "orphan", "left by a job that was killed", note=True)
    if found is None or found.foreign:
        return Finding(path, "foreign", "was not made by latentmake", note=True)
    if found.unreadable:
        return Finding(path, "unreadable", found.fault)
    if not found.ours:
        return Finding(path, "foreign", f"{found.fault}, and is no item's", note=True)
    if found.fault:
        return Finding(path, "damaged", found.fault)
    if others:
        return None
    return Finding(path, "orphan", "its item is gone; the next build removes it", note=True)


def kept_file(path: str, found: Content, key: str) -> Finding | None:
    """Return what is wrong with a file that store or spool keep under a key."""
    if found.gone:  # taken by a build that runs beside
        return None
    if found.unreadable:
        return Finding(path, "unreadable", found.fault)
    if found.fault or found.key != key:
        reason = found.fault or "its header has another key than its name"
        return Finding(path, "damaged", reason)
    return None
