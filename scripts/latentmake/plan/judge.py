"""State of targets: fresh, stale with a reason, reusable or orphaned; and differences in words.

A target is stale if it is missing, or if the key in its header differs from the present key. The
present key follows from inputs, recipe and view. Content decides; a stat only says whether content
must be read again. All callers (the plan, `status`, `explain`, `verify`) use `Judge`.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path

from latentmake.base import digest
from latentmake.base.atomic import TEMPORARY_SUFFIX
from latentmake.base.digest import SourceStat, TargetStat
from latentmake.base.errors import CacheError, SourceError
from latentmake.base.paths import is_text
from latentmake.data.contents import Contents
from latentmake.data.item import CAPTION, IMAGE, Fault, Item
from latentmake.data.memo import Listing, Memo
from latentmake.formats.cachefile import Header, read_header, target_key
from latentmake.layouts.layout import MadeCaptions, kind_of
from latentmake.models.cache_recipe import before_readings
from latentmake.plan.facts import UNKNOWN, Facts
from latentmake.plan.orders import Part, Target, Work, targets_of, view_of

FORCED = "forced"  # the target is fresh, but the command encodes it again; its key stays the same
REASONS = ("reusable", "new", "edited", "changed recipe", "damaged", FORCED)


@dataclass
class PartState:
    """State of one part.

    Attributes:
        lines: function that returns stem -> lines of its fresh and forced targets, in the order
            of stems. A line is name, tab and key.
        remembered: digest of all keys, if it is known without calling `lines`.
    """

    fresh: int = 0  # number of fresh targets
    stale: list[Work] = field(default_factory=list)  # inputs with their stale targets
    orphans: list[str] = field(default_factory=list)  # cache files that no item needs
    gone: list[str] = field(default_factory=list)  # orphans whose item does not exist at all
    lines: Callable[[], Mapping[str, str]] = field(default=dict, compare=False)
    remembered: str | None = field(default=None, compare=False)

    @property
    def to_make(self) -> list[Target]:
        """Stale targets, with their reasons."""
        return [target for work in self.stale for target in work.targets]

    @cached_property
    def reasons(self) -> Counter[str]:
        """Reason -> number of stale targets with it, once reusable files are marked."""
        return Counter([target.reason for work in self.stale for target in work.targets])

    @cached_property
    def keys(self) -> str | None:
        """Digest of all keys; None if a target is stale, unless it is only forced."""
        if any(target.reason != FORCED for work in self.stale for target in work.targets):
            return None
        return self.remembered or digest.of_lines(self.lines().values())

    def keys_by_name(self) -> dict[str, str]:
        """Return name (`Layout.identity`) -> key of fresh and forced targets."""
        several = (line for lines in self.lines().values() for line in lines.split("\n"))
        return {name: key for name, _, key in (line.rpartition("\t") for line in several)}


@dataclass
class State:
    """State of the requested parts; parts nobody requested carry only their orphaned files.

    Attributes:
        unreadable: stem -> fault of an input that had to be read and cannot be used. No part
            counts these items; the caller leaves them out and judges the rest again.
        judge: judge of the targets; None if everything was remembered.
    """

    parts: dict[str, PartState]  # name -> state
    images: str = ""  # digest of the images' places in the manifest
    unreadable: dict[str, Fault] = field(default_factory=dict)
    judge: Judge | None = field(default=None, compare=False)


def header_of(memo: Memo, path: str) -> Header:
    """Read the header of a cache file; the memo learns the size of its picture."""
    header = read_header(path)
    if header.picture is not None:
        memo.learn_picture(header.source, *header.picture)
    return header


def key_of(
    memo: Memo, cached: Mapping[str, tuple[TargetStat, str]], path: str, stat: TargetStat
) -> tuple[str, Header | None]:
    """Return the key of a cache file, and its header if it was read because the stat is new."""
    row = cached.get(path)
    if row is not None and row[0] == stat:
        return row[1], None
    header = header_of(memo, path)
    memo.targets.learn(path, stat, header.key)
    if path.endswith(MadeCaptions.latents_ending) and header.caption is not None:  # read once
        size, mtime_ns, inode = stat
        memo.texts.learn(path, SourceStat(size, mtime_ns, 0, inode), header.caption)
    return header.key, header


class Judge:
    """Judge of the targets of some parts of one dataset and model: tells whether they are fresh.

    Attributes:
        settings: the dataset's section of the configuration; None for prompts.
        recipes: part -> digest of its recipe, or `UNKNOWN`.

    Args:
        facts: facts about the configuration.
        dataset: name of the dataset.
        model: name of the model.
        parts: names of the parts.
        items: items to judge.
        paths: cache files that may belong to the items; None stands for all of the dataset.
    """

    def __init__(
        self,
        facts: Facts,
        dataset: str,
        model: str,
        parts: Collection[str],
        items: Iterable[Item],
        paths: Collection[str] | None = None,
    ) -> None:
        self.settings = facts.config.datasets.get(dataset)
        self.layout = facts.layout(model)
        files = (file for item in items for file in item.files)
        self.contents = Contents(files, facts.memo, self.settings)
        self.forced = facts.forced_of(dataset, model)
        self._memo, self._place = facts.memo, (dataset, model)
        cached, folder = facts.memo.targets, f"cache/{dataset}/{model}"
        self._cached = cached.below(folder) if paths is None else cached.look_up(paths)
        self.recipes = dict[str, str]()
        # Part -> digest of an earlier release's recipe, and tokens that today's reads otherwise.
        self._before: dict[str, tuple[str, Collection[str]]] = {}
        for part in parts:
            place = Part(dataset, model, part)
            self.recipes[part] = facts.recipe_digest(place)
            former, tokens = before_readings(facts.recipe(dataset, place.maker, kind_of(part)))
            if tokens:
                self._before[part] = digest.of_value(former), tokens

    # -- one target ---------------------------------------------------------------------------

    def view(
        self, item: Item, target: Target, content: str, header: Header | None = None
    ) -> str | None:
        """Return a target's view; None if it is unknown or an image of this size has none.

        `content` is the digest of the inputs, `header` the header of a file that may be made from
        them.
        """
        if target.size is None:
            return view_of(self.layout, self.settings, item, target, None)[0]
        size = self.contents.size(item, content, header)
        try:
            return size and view_of(self.layout, self.settings, item, target, size)[0]
        except SourceError:  # the job reports this error
            return None

    def recipe(self, item: Item, target: Target, header: Header | None = None) -> str:
        """Return the digest of a target's recipe, or of an equivalent one of an earlier release."""
        if header is not None and target.part in self._before:
            before, tokens = self._before[target.part]
            if header.recipe == before and self.contents.lacks(item, tokens):
                return before
        return self.recipes[target.part]

    def needed(
        self, item: Item, target: Target, content: str, header: Header | None = None
    ) -> str | None:
        """Return the key that a target needs; None if unknown. See `view` for the arguments."""
        view, recipe = self.view(item, target, content, header), self.recipe(item, target, header)
        return None if view is None or recipe == UNKNOWN else target_key(content, recipe, view)

    def wanted(
        self, item: Item, target: Target, content: str, present: str, header: Header | None
    ) -> tuple[str, str, Header | None]:
        """Return the content and key that a target should have, and the header if it was read.

        A key that is unknown is "". The header is read only if `present`, the key of the present
        file, differs from the needed one.

        Raises:
            CacheError: the header is damaged.
            OSError: the header cannot be read.
        """
        if self.needed(item, target, content) == present:
            return content, present, None
        is_text = kind_of(target.part) == "text"
        for earlier in self.contents.formerly(item) if is_text else ():
            if self.needed(item, target, earlier) == present:
                return earlier, present, None
        header = header or header_of(self._memo, target.path)
        by_text = is_text and all(file.role == CAPTION for file in item.read)
        if by_text and header.caption == self.contents.text(item):
            content = header.source
        return content, self.needed(item, target, content, header) or "", header

    def state(self, item: Item, target: Target, stat: TargetStat) -> Target | str | None:
        """Return the key of a present target, or the stale target; None for an unreadable input."""
        if item.awaits_caption:
            return self._awaiting(target, stat)
        try:
            key, header = key_of(self._memo, self._cached, target.path, stat)
            target = target._replace(found=f"{key}@{stat.mtime_ns}")
            if self.recipes[target.part] == UNKNOWN:
                return target._replace(reason="changed recipe")
            today = self.contents.of(item)
            if today is None:
                return None
            content, wanted, header = self.wanted(item, target, today, key, header)
        except (CacheError, OSError):  # the memo may know the key from before the file was damaged
            return target._replace(found=f"damaged@{stat.mtime_ns}", reason="damaged")
        reason, recipe = "changed recipe", header.recipe if header else ""
        if header is None or wanted == key:
            if not self.forces(target):
                return key
            # A key that only an earlier release's recipe gives changes once a job encodes it again.
            if self.needed(item, target, today) in (None, key):
                reason = FORCED
        elif recipe == self.recipe(item, target, header) and header.source != content:
            reason = "edited"
        return target._replace(reason=reason, recipe=recipe)

    def _awaiting(self, target: Target, stat: TargetStat) -> Target:
        """Return the target of a text that a captioner makes first, with its present file."""
        key = "damaged"
        with contextlib.suppress(CacheError, OSError):
            key, _ = key_of(self._memo, self._cached, target.path, stat)
        return target._replace(found=f"{key}@{stat.mtime_ns}", reason="edited")

    def forces(self, target: Target) -> bool:
        """Return whether the command encodes a target again even if its file is fresh."""
        return target.part in self.forced or target.path in self.forced

    # -- all targets --------------------------------------------------------------------------

    def judge(
        self, inputs: Mapping[str, Sequence[Item]], owned: Collection[str], listing: Listing
    ) -> State:
        """Return the state of some parts.

        Args:
            inputs: part -> inputs of its targets, in the order of stems.
            owned: stems of all items, including faulty ones. Their cache files are no orphans.
            listing: files of the cache folder, or at least all that may belong to these items.
        """
        expected: set[str] = set()
        parts = {part: self._part(part, items, listing, expected) for part, items in inputs.items()}
        _refuse_obstacles((work for part in parts.values() for work in part.stale), listing)
        kept = {self.layout.base(stem) for stem in owned}
        items = chain(*inputs.values()) if listing else ()  # without files there are no orphans
        faulty = kept - {self.layout.base(item.stem) for item in items}
        prefix = f"cache/{'/'.join(self._place)}/"
        for path, stat in listing.items():
            if path in expected or not is_text(path):  # Latentmake writes no such name
                continue
            part, _, name = path[len(prefix) :].partition("/")
            bases = self.layout.owners(name)
            # Files of a faulty item stay. In a part nobody requested, other runs may need the files
            # of all items.
            owners = faulty if part in inputs else kept
            if owners.isdisjoint(bases) and self._is_ours(path, stat, bases):
                state = parts.setdefault(part, PartState())
                state.orphans.append(path)
                if bases and kept.isdisjoint(bases):
                    state.gone.append(path)
        self._memo.targets.forget(path for path in self._cached if path not in listing)
        return State(parts, unreadable=self.contents.unreadable, judge=self)

    def _part(
        self, part: str, items: Sequence[Item], listing: Listing, expected: set[str]
    ) -> PartState:
        """Return the state of some inputs' targets; add the targets' paths to `expected`."""
        state, lines = PartState(), dict[str, str]()
        identity = self.layout.identity
        if self.settings and self.settings.remote and self.recipes[part] != UNKNOWN:
            self.contents.fetch(  # all in one call, because many downloads at a time are faster
                file
                for item, several in self.targets(part, items)
                if any(target.path in listing for target in several)
                for file in item.files[:1]
                if file.role in (IMAGE, CAPTION)
            )
        if kind_of(part) == "latents" and listing:
            self.contents.prepare_sizes(filter(None, map(self.contents.known_digest, items)))
        for item, targets in self.targets(part, items):
            stale: list[Target] = []
            for target in targets:
                key: Target | str | None = target
                if (stat := listing.get(target.path)) is not None:
                    expected.add(target.path)
                    key = self.state(item, target, stat)
                if isinstance(key, Target):
                    stale.append(key)
                    key = key.found_key if key.reason == FORCED else None
                elif key is not None:
                    state.fresh += 1
                if key is not None:
                    line = f"{identity(item.stem, target.path)}\t{key}"
                    before = lines.get(item.stem)
                    lines[item.stem] = line if before is None else f"{before}\n{line}"
            if stale:
                state.stale.append(Work(item, tuple(stale), self.contents.known_digest(item)))
        state.lines = lambda: lines
        return state

    def targets(self, part: str, items: Iterable[Item]) -> Iterator[tuple[Item, list[Target]]]:
        """Yield some inputs, each with its targets of a part."""
        return targets_of(self.layout, self.settings, Part(*self._place, part), items)

    def _is_ours(self, path: str, stat: TargetStat, bases: Collection[str]) -> bool:
        """Return whether Latentmake wrote a file; it may be half written."""
        if not bases:
            return path.endswith(TEMPORARY_SUFFIX)
        try:
            key_of(self._memo, self._cached, path, stat)
        except (CacheError, OSError):
            return False  # foreign or damaged: nobody reads it, and no build may delete it
        return True


def _refuse_obstacles(works: Iterable[Work], listing: Listing) -> None:
    """Raise CacheError if a file or broken link lies where a missing cache file's folder belongs.

    A drive that is not mounted leaves such a link.
    """
    paths = (target.path for work in works for target in work.targets if not target.found)
    for folder in {path[: path.rindex("/")] for path in paths}:
        for place in (Path(folder), *Path(folder).parents):
            if str(place) in listing or (os.path.lexists(place) and not place.is_dir()):
                link = "a link that leads nowhere, or to other caches"
                what = f"is {link if place.is_symlink() else 'a file'}, where a folder belongs"
                raise CacheError(what, where=place, hint="move it away or remove it")
