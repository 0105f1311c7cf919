"""State of targets: fresh, stale with a reason, reusable, or orphaned; and what differs.

A target is stale when it is missing, or the key in its header is not the key that its inputs, its
recipe and its view give today. Content decides; a stat only tells whether content must be read
again. Everyone who asks about targets (the plan, `status`, `explain`, `verify`) asks `Judge`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

from latentmake import digest
from latentmake.config.datasets import Dataset
from latentmake.data.contents import Contents
from latentmake.data.item import CAPTION, IMAGE, Fault, Item
from latentmake.digest import TargetStat
from latentmake.errors import CacheError, SourceError
from latentmake.files.atomic import TEMPORARY_SUFFIX
from latentmake.files.cachefile import Header, read_header, target_key
from latentmake.files.workspace import is_text
from latentmake.index.memo import Listing, Memo
from latentmake.layouts.layout import Layout, parsed
from latentmake.plan.orders import Part, Target, targets_of, view_of

FORCED = "forced"  # of a fresh target that a command encodes again: its key stays
REASONS = ("reusable", "new", "edited", "changed recipe", "damaged", FORCED)
UNKNOWN = ""
"""Digest of the recipe of a model that lies on another machine."""


class Stale(NamedTuple):
    """A target to be made.

    Attributes:
        recipe: digest of the recipe of the file there, where that is another than it should be.
    """

    item: Item  # its inputs
    target: Target
    reason: str  # one of `REASONS`
    content: str | None = None  # digest of the inputs, if it is known
    recipe: str = ""

    @property
    def path(self) -> str:
        """Path of the target."""
        return self.target.path


@dataclass
class PartState:
    """State of one part.

    Attributes:
        lines: returns stem -> a line of each of its fresh and forced targets, name and key with
            a tab between them, in the order of stems.
        remembered: digest of all keys, where it is known without `lines`.
    """

    fresh: int = 0  # number of fresh targets
    stale: list[Stale] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)  # cache files that no item needs
    gone: list[str] = field(default_factory=list)  # those of them that have no item at all
    lines: Callable[[], Mapping[str, str]] = field(default=dict, compare=False)
    remembered: str | None = field(default=None, compare=False)

    @cached_property
    def keys(self) -> str | None:
        """Digest of all keys; None while a target is stale whose key is not known."""
        if any(each.reason != FORCED for each in self.stale):
            return None
        return self.remembered or digest.of_lines(self.lines().values())

    def known(self) -> dict[str, str]:
        """Return name (`Layout.identity`) -> key of the fresh and the forced targets."""
        several = (line for lines in self.lines().values() for line in lines.split("\n"))
        return {name: key for name, _, key in (line.rpartition("\t") for line in several)}


@dataclass
class State:
    """State of the requested parts; of other parts only orphans are known.

    Attributes:
        unreadable: stem -> fault of an input that had to be read and cannot be used. No part
            counts these items: they are to be left out and the rest judged again.
        judge: who judged; None where everything was remembered.
    """

    parts: dict[str, PartState]  # name -> state
    images: str = ""  # digest of the images' paths, which a manifest names
    unreadable: dict[str, Fault] = field(default_factory=dict)
    judge: Judge | None = field(default=None, compare=False)

    def stale(self, path: str) -> Stale | None:
        """Return a target by its path, where it is stale."""
        every = (each for part in self.parts.values() for each in part.stale)
        return next((each for each in every if each.path == path), None)


@dataclass
class Judge:
    """Tells whether the targets of one dataset and model (`place`) are fresh."""

    _memo: Memo
    place: tuple[str, str]
    settings: Dataset | None  # the dataset's section of the configuration; None for prompts
    layout: Layout
    recipes: Mapping[str, str]  # part -> digest of its recipe, or `UNKNOWN`
    contents: Contents
    _cached: Mapping[str, tuple[TargetStat, str]]
    # Part -> digest of a recipe of earlier releases, and tokens that it reads otherwise.
    before: Mapping[str, tuple[str, Collection[str]]] = field(default_factory=dict)
    forced: Collection[str] = ()  # parts and paths of targets that the command encodes again

    @classmethod
    def of(cls, items: Iterable[Item], memo: Memo, settings: Dataset | None, **others: Any) -> Self:
        """Return the judge of the targets of some items."""
        contents = Contents.of_items(items, memo, settings)
        return cls(_memo=memo, settings=settings, contents=contents, **others)

    # -- one target ---------------------------------------------------------------------------

    def key(self, path: str, stat: TargetStat) -> str:
        """Return the key of a cache file; its header is read only if its stat is new."""
        known = self._cached.get(path)
        if known is not None and known[0] == stat:
            return known[1]
        header = self.header(path)
        self._memo.targets.learn(path, stat, header.key)
        return header.key

    def header(self, path: str) -> Header:
        """Read the header of a cache file."""
        header = read_header(path)
        if header.picture is not None:
            self._memo.learn_picture(header.source, header.picture)
        return header

    def view(
        self, item: Item, target: Target, content: str, header: Header | None = None
    ) -> str | None:
        """Return a target's view; None where it is unknown, or there can be none.

        `content` is the digest of the inputs, `header` that of a file that may be made of it.
        """
        if target.size is None:
            return ""
        size = self.contents.size(item, content, header)
        try:
            return size and view_of(self.layout, self.settings, item, target, size)
        except SourceError:  # which the job names
            return None

    def recipe(self, item: Item, target: Target, header: Header | None = None) -> str:
        """Return the digest of a target's recipe; an earlier one where the file's is as good."""
        if header is not None and target.part in self.before:
            before, tokens = self.before[target.part]
            if header.recipe == before and self.contents.lacks(item, tokens):
                return before
        return self.recipes[target.part]

    def needed(
        self, item: Item, target: Target, content: str, header: Header | None = None
    ) -> str | None:
        """Return the key that a target needs; None where it is unknown. Arguments as of `view`."""
        view, recipe = self.view(item, target, content, header), self.recipe(item, target, header)
        return None if view is None or recipe == UNKNOWN else target_key(content, recipe, view)

    def wanted(
        self, item: Item, target: Target, content: str, known: str
    ) -> tuple[str, str, Header | None]:
        """Return content and key ("" if unknown) that a target should have; its header, if read.

        The header is read only where `known`, the key of the file there, is another one. A
        CacheError or OSError says that it cannot be.
        """
        if known and self.needed(item, target, content) == known:
            return content, known, None
        is_text = parsed(target.part).kind == "text"
        for each in self.contents.formerly(item) if is_text and known else ():
            if self.needed(item, target, each) == known:
                return each, known, None
        header = self.header(target.path)
        by_text = is_text and all(file.role == CAPTION for file in item.read)
        if by_text and header.caption == self.contents.text(item):
            content = header.source
        return content, self.needed(item, target, content, header) or "", header

    def state(self, item: Item, target: Target, stat: TargetStat | None) -> Stale | str | None:
        """Return the key of a fresh target, or why it is stale; None where an input is unreadable.

        `stat` is that of the file there, if any.
        """
        if stat is None:
            return Stale(item, target, "new", self.contents.known_digest(item))
        recipe = self.recipes[target.part]
        try:
            key = self.key(target.path, stat)
            target = target._replace(found=f"{key}@{stat.mtime_ns}")
            if recipe == UNKNOWN:
                return Stale(item, target, "changed recipe")
            content = self.contents.of(item)
            if content is None:
                return None
            today = content
            content, wanted, header = self.wanted(item, target, content, key)
        except (CacheError, OSError):  # it may have been sound when the memo learnt its key
            return Stale(item, target._replace(found=f"damaged@{stat.mtime_ns}"), "damaged")
        if header is None or wanted == key:
            if not self.forces(target):
                return key
            # A job gives another key to what an earlier release encoded.
            reason = FORCED if self.needed(item, target, today) in (None, key) else "changed recipe"
            before = header.recipe if header else ""
            return Stale(item, target, reason, self.contents.known_digest(item), before)
        edited = header.recipe == self.recipe(item, target, header) and header.source != content
        reason = "edited" if edited else "changed recipe"
        return Stale(item, target, reason, self.contents.known_digest(item), header.recipe)

    def forces(self, target: Target) -> bool:
        """Whether the command encodes a target again, whatever is there."""
        return target.part in self.forced or target.path in self.forced

    # -- all targets --------------------------------------------------------------------------

    def judge(
        self,
        inputs: Mapping[str, Sequence[Item]],
        owned: Collection[str],
        found: Listing,
    ) -> State:
        """Return the state of some parts.

        Args:
            inputs: part -> inputs of its targets, in the order of stems.
            owned: stems of all items, faulty ones too: their cache files are no orphans.
            found: listing of the cache folder, or of the files that may be of these items.
        """
        expected: set[str] = set()
        parts = {part: self._part(part, items, found, expected) for part, items in inputs.items()}
        missing = (x.path for each in parts.values() for x in each.stale if not x.target.found)
        _refuse_obstacles(missing, found)
        kept = {self.layout.base(stem) for stem in owned}
        with_inputs = {self.layout.base(x.stem) for items in inputs.values() for x in items}
        for part, path in self._orphans(found, expected, inputs, kept, kept - with_inputs):
            state = parts.setdefault(part, PartState())
            state.orphans.append(path)
            bases = self.layout.owners(path.removeprefix(f"cache/{'/'.join(self.place)}/{part}/"))
            if bases and kept.isdisjoint(bases):
                state.gone.append(path)
        self._memo.targets.forget(path for path in self._cached if path not in found)
        return State(parts, unreadable=self.contents.unreadable, judge=self)

    def _part(
        self, part: str, items: Sequence[Item], found: Listing, expected: set[str]
    ) -> PartState:
        """Return the state of the targets of some inputs, whose paths are added to `expected`."""
        state, lines = PartState(), dict[str, str]()
        identity = self.layout.identity
        if self.settings and self.settings.remote and self.recipes[part] != UNKNOWN:
            self.contents.fetch(  # many at a time
                file
                for item, several in self.targets(part, items)
                if any(each.path in found for each in several)
                for file in item.files[:1]
                if file.role in (IMAGE, CAPTION)
            )
        if parsed(part).kind == "latents" and found:
            self.contents.prepare_sizes(filter(None, map(self.contents.known_digest, items)))
        for item, targets in self.targets(part, items):
            for target in targets:
                expected.add(target.path)
                is_ = self.state(item, target, found.get(target.path))
                if isinstance(is_, Stale):
                    state.stale.append(is_)
                    is_ = (
                        (is_.target.found or "").partition("@")[0] if is_.reason == FORCED else None
                    )
                elif is_ is not None:
                    state.fresh += 1
                if is_ is not None:
                    line = f"{identity(item.stem, target.path)}\t{is_}"
                    before = lines.get(item.stem)
                    lines[item.stem] = line if before is None else f"{before}\n{line}"
        state.lines = lambda: lines
        return state

    def targets(self, part: str, items: Iterable[Item]) -> Iterator[tuple[Item, list[Target]]]:
        """Yield some inputs, each with its targets of a part."""
        return targets_of(self.layout, self.settings, Part(*self.place, part), items)

    def _orphans(
        self,
        found: Listing,
        expected: Collection[str],
        requested: Collection[str],
        kept: Collection[str],
        faulty: set[str],
    ) -> Iterator[tuple[str, str]]:
        """Yield part and path of our cache files that have no owner.

        Of parts nobody requested, other runs may need the files of all `kept` bases; of requested
        ones only those of `faulty` items are not `expected`, and stay.
        """
        prefix = f"cache/{'/'.join(self.place)}/"
        for path, stat in found.items():
            if path in expected or not is_text(path):  # no name of ours
                continue
            part, _, name = path[len(prefix) :].partition("/")
            if bases := self.layout.owners(name):
                if any(each in (faulty if part in requested else kept) for each in bases):
                    continue
                try:
                    self.key(path, stat)
                except (CacheError, OSError):
                    continue  # not ours, or damaged: nobody reads it, and nobody may delete it
            elif not name.endswith(TEMPORARY_SUFFIX):
                continue
            yield part, path


def _refuse_obstacles(paths: Iterable[str], found: Listing) -> None:
    """Refuse a file, or a link that leads nowhere, in the place of a missing cache file's folder.

    A drive that is not mounted leaves such a link.
    """
    for folder in {path.rpartition("/")[0] for path in paths}:
        for each in (Path(folder), *Path(folder).parents):
            if str(each) in found or (os.path.lexists(each) and not each.is_dir()):
                link = "a link that leads nowhere, or to other caches"
                what = f"is {link if each.is_symlink() else 'a file'}, where a folder belongs"
                raise CacheError(what, where=each, hint="move it away or remove it")


_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHOWN = 8  # digits of a digest
_NAMED = 3  # differences, or datasets, of a line


class Difference(NamedTuple):
    """What something was made of, as it was then and as it is today.

    Without values, its name is a sentence that says what differs.
    """

    name: str
    old: str = ""
    new: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.old} -> {self.new}" if self.old != self.new else self.name


def is_digest(value: str) -> bool:
    """Tell whether a text is a whole SHA-256 digest."""
    return _SHA256.fullmatch(value) is not None


def short(value: str) -> str:
    """Return the beginning of a digest, and any other text as it is."""
    return f"{value[:_SHOWN]}.." if is_digest(value) else value


def some(names: Collection[object]) -> str:
    """Return the first of some names, and the number of the others."""
    others = len(names) - _NAMED
    return ", ".join([*map(str, names)][:_NAMED]) + f" and {others} more" * (others > 0)


def value_differences(
    old: Mapping[str, object], new: Mapping[str, object], name: str = "{}"
) -> list[Difference]:
    """Return the values that differ; `name` is the pattern of their names."""
    return [
        Difference(name.format(key), short(text_of(old.get(key))), short(text_of(new.get(key))))
        for key in dict.fromkeys((*new, *old))
        if old.get(key) != new.get(key)
    ]


def text_of(value: object) -> str:
    """Return a value of a recipe or of the configuration as text."""
    if isinstance(value, list):
        return " ".join(map(text_of, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)
