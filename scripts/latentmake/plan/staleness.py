"""State of the targets of one dataset and model: fresh, stale or orphaned.

A target is stale when it is missing, or the key in its header is not the key that its source, its
recipe and its resolution give today. Content decides; a stat only tells whether content must be
read again. Where no listing changed since all was found fresh, a remembered verdict answers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from latentmake import digest, layouts
from latentmake.config.datasets import Dataset
from latentmake.errors import CacheError, SourceError
from latentmake.files.atomic import TEMPORARY_SUFFIX
from latentmake.files.cachefile import Header, read_header, target_key
from latentmake.geometry.clips import AnyClip
from latentmake.index.memo import Memo, TargetStat
from latentmake.index.table import is_text
from latentmake.layouts import Layout, Named, kind_of
from latentmake.plan.keys import UNKNOWN, Keys, Source
from latentmake.plan.listing import Listing
from latentmake.sources import s3

REASONS = ("reusable", "new", "edited", "changed recipe", "damaged")

_PLAIN = layouts.of("plain")


class Stale(NamedTuple):
    """A target to be made; see `Target` and `WorkItem`.

    Attributes:
        reason: one of `REASONS`.
        found: key and mtime of the file there now, if any.
        content: digest of the source, if it is known.
        recipe: digest of the recipe of the file there, where that is another than it should be.
        rule: the change of a rule that made it stale, as a sentence; "" of all others.
    """

    source: Source
    path: str
    reason: str
    found: str | None
    clip: AnyClip | None = None
    content: str | None = None
    at_hand: tuple[str, ...] = ()
    recipe: str = ""
    rule: str = ""


@dataclass
class PartState:
    """State of one part.

    Attributes:
        fresh: number of fresh targets.
        orphans: cache files whose items are gone.
        lines: returns stem -> a line with name and key (`manifest.keys_digest`) of each of its
            fresh targets, in the order of stems; nothing where a remembered verdict has only their
            digest.
    """

    fresh: int = 0
    stale: list[Stale] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    lines: Callable[[], Mapping[str, str]] = field(default=dict, compare=False)
    remembered: str | None = field(default=None, compare=False)

    @cached_property
    def keys(self) -> str | None:
        """Digest of all keys; None while a target is stale."""
        if self.stale:
            return None
        return self.remembered or digest.of_lines(self.lines().values())

    def known(self) -> dict[str, str]:
        """Return name (`Layout.identity`) -> key of the fresh targets, as far as `lines` tells."""
        pairs = (
            line.rpartition("\t") for lines in self.lines().values() for line in lines.split("\n")
        )
        return {name: key for name, _, key in pairs}


@dataclass
class Evaluation:
    """State of every requested part; parts nobody requested carry only their orphaned files.

    Attributes:
        parts: name -> state.
        images: digest of the images' paths, which a manifest names.
        unreadable: stem -> fault of a source that had to be read and cannot be. No part counts
            these items: they are to be left out and the rest evaluated again.
        keys: of the targets; None where a remembered verdict answered.
    """

    parts: dict[str, PartState]
    images: str = ""
    unreadable: dict[str, SourceError] = field(default_factory=dict)
    keys: Keys | None = field(default=None, compare=False)


class _Targets:
    """Keys of cache files; a header is read only if its stat is new."""

    def __init__(
        self, memo: Memo, folder: str, found: Listing, gone: Collection[str] | None
    ) -> None:
        self._memo = memo
        known = memo.targets
        self._known = known.below(folder) if gone is None else known.known([*found, *gone], folder)
        self.found = found

    def key(self, path: str, stat: TargetStat) -> str:
        known = self._known.get(path)
        if known is not None and known[0] == stat:
            return known[1]
        header = self.header(path)
        self._memo.targets.learn(path, stat, header.key)
        return header.key

    def header(self, path: str) -> Header:
        header = read_header(path)
        if header.picture is not None:
            self._memo.learn_picture(header.source, header.picture)
        return header

    def forget_missing(self) -> None:
        self._memo.targets.forget(path for path in self._known if path not in self.found)


def evaluate(
    *,
    dataset: str,
    model: str,
    roots: Sequence[str],
    sources: Mapping[str, Sequence[Source]],
    owned: set[str],
    recipes: Mapping[str, str],
    memo: Memo,
    found: Listing,
    layout: Layout = _PLAIN,
    settings: Dataset | None = None,
    gone: Collection[str] | None = None,
) -> Evaluation:
    """Find the stale targets of one dataset and model, or of some of its items.

    Args:
        dataset: its name.
        model: its name.
        roots: folders of the dataset's files, its own first; none for prompts.
        sources: part -> source of each of its targets, in the order of stems.
        owned: stems of all items, faulty ones too: their cache files are no orphans.
        recipes: part -> digest of its recipe, or `UNKNOWN`.
        memo: knows files; learns more.
        found: listing of the cache folder, or of the files that may be of these items.
        layout: of the targets.
        settings: the dataset's section of the configuration; None for prompts.
        gone: cache files that were there before, where `found` lists some of the files alone.

    Raises:
        CacheError: something that is no cache lies in the place of one, or of a folder of them.
    """
    control = settings.control_directory if settings else None
    folders = [*roots, *([s3.normalized(control)] if control else [])]
    if gone is None:
        known = {path: fact for each in folders for path, fact in memo.sources.below(each).items()}
    else:
        several = (source for wanted in sources.values() for source in wanted)
        paths = {path for source in several for path, _ in source.files}
        known = memo.sources.known(paths, *folders)
    keys = Keys(memo, layout, settings, recipes, known)
    targets = _Targets(memo, f"cache/{dataset}/{model}", found, gone)
    parts: dict[str, PartState] = {}
    expected: set[str] = set()
    for part, wanted in sources.items():
        folder = layout.folder(dataset, model, part)
        names = [
            (each, layout.named(folder, part, each.stem, each.media, settings, each.span))
            for each in wanted
        ]
        expected.update(named.path for _, several in names for named in several)
        if roots and s3.is_remote(roots[0]) and recipes[part] != UNKNOWN:
            keys.fetch(
                (each.path, each.stat)
                for each, several in names
                if each.path and each.stat and any(named.path in found for named in several)
            )
        if kind_of(part) == "latents" and found:
            keys.prepare_sizes(filter(None, map(keys.known_content, wanted)))
        parts[part] = _part(layout, part, names, keys, targets)
    _refuse_obstacles(
        (stale.path for state in parts.values() for stale in state.stale if stale.found is None),
        found,
    )
    kept = {layout.base(stem) for stem in owned}
    faulty = kept - {layout.base(each.stem) for wanted in sources.values() for each in wanted}

    def is_owned(part: str, bases: Sequence[str]) -> bool:
        # Of parts nobody requested, other runs may need the files.
        return not (faulty if part in sources else kept).isdisjoint(bases)

    for part, path in _orphans(f"cache/{dataset}/{model}/", layout, targets, expected, is_owned):
        parts.setdefault(part, PartState()).orphans.append(path)
    targets.forget_missing()
    return Evaluation(parts, unreadable=keys.unreadable, keys=keys)


def _part(
    layout: Layout,
    part: str,
    wanted: Sequence[tuple[Source, Sequence[Named]]],
    keys: Keys,
    targets: _Targets,
) -> PartState:
    state, recipe, is_text_part = PartState(), keys.recipes[part], kind_of(part) == "text"
    lines: dict[str, str] = {}
    for source, several in wanted:
        for path, clip in several:
            stat = targets.found.get(path)
            if stat is None:
                content = keys.known_content(source)
                state.stale.append(Stale(source, path, "new", None, clip, content))
                continue
            try:
                key = targets.key(path, stat)
            except (CacheError, OSError):
                found = f"damaged@{stat.mtime_ns}"
                state.stale.append(Stale(source, path, "damaged", found, clip))
                continue
            found = f"{key}@{stat.mtime_ns}"
            if recipe == UNKNOWN:
                state.stale.append(Stale(source, path, "changed recipe", found, clip))
                continue
            content = keys.content(source)
            if content is None:
                continue
            variant, header = keys.variant(part, source, content, clip), None
            if variant is None or key != target_key(content, recipe, variant):
                try:
                    header = targets.header(path)
                except (CacheError, OSError):  # it was sound when the memo learnt its key
                    found = f"damaged@{stat.mtime_ns}"
                    state.stale.append(Stale(source, path, "damaged", found, clip))
                    continue
                if variant is None:
                    variant = keys.variant(part, source, content, clip, header)
                if is_text_part:
                    content = keys.with_line_ends(source, content, header.source)
            if header is None or (
                variant is not None and key == target_key(content, recipe, variant)
            ):
                state.fresh += 1
                line = f"{layout.identity(source.stem, path)}\t{key}"
                before = lines.get(source.stem)
                lines[source.stem] = line if before is None else f"{before}\n{line}"
            else:
                edited = header.recipe == recipe and header.source != content
                rule = layout.lines_rule if edited and keys.is_former(source, header.source) else ""
                reason = "edited" if edited and not rule else "changed recipe"
                content = keys.known_content(source)
                state.stale.append(
                    Stale(source, path, reason, found, clip, content, (), header.recipe, rule)
                )
    state.lines = lambda: lines
    return state


def _refuse_obstacles(paths: Iterable[str], found: Listing) -> None:
    """Refuse a folder in the place of a missing cache file, or a file in that of its folders."""
    there: dict[str, bool] = {}
    for path in paths:
        folder = path.rpartition("/")[0]
        if folder not in there:
            place = Path(folder)
            for each in (place, *place.parents):
                if str(each) in found or (os.path.lexists(each) and not each.is_dir()):
                    what = f"{_kind(each)}, where a folder of caches belongs"
                    raise CacheError(what, where=each, hint="move it away or remove it")
            there[folder] = place.is_dir()
        if there[folder] and os.path.isdir(path):  # noqa: PTH112 -- of many thousand paths
            what = "is a folder, where a cache file belongs"
            raise CacheError(what, where=path, hint="move it away or remove it")


def _kind(path: Path) -> str:
    if path.is_symlink():
        return f"is a link that leads {'to other caches' if path.is_dir() else 'nowhere'}"
    return "is a file"


def _orphans(
    prefix: str,
    layout: Layout,
    targets: _Targets,
    expected: set[str],
    is_owned: Callable[[str, Sequence[str]], bool],
) -> Iterator[tuple[str, str]]:
    """Yield part and path of our cache files below a folder (with a slash) that have no owner."""
    for path, stat in targets.found.items():
        if path in expected or not is_text(path):  # no name of ours
            continue
        part, _, name = path[len(prefix) :].partition("/")
        if bases := layout.owners(name):
            if is_owned(part, bases):
                continue
            try:
                targets.key(path, stat)
            except (CacheError, OSError):
                continue  # not ours, or damaged: nobody reads it, and nobody may delete it
        elif not name.endswith(TEMPORARY_SUFFIX):
            continue
        yield part, path


def remember(evaluation: Evaluation) -> str | None:
    """Return a verdict to remember: every part's count and digest; None if anything is to do."""
    parts = evaluation.parts
    if evaluation.unreadable or any(state.stale or state.orphans for state in parts.values()):
        return None
    states = {part: [state.fresh, state.keys] for part, state in parts.items()}
    return json.dumps([states, evaluation.images])


def recall(answer: str, lines: Callable[[str], Mapping[str, str]] | None = None) -> Evaluation:
    """Return the evaluation of a remembered verdict; `lines` returns those of a part."""
    states, images = json.loads(answer)
    parts = {
        part: PartState(fresh, lines=partial(lines, part) if lines else dict, remembered=keys)
        for part, (fresh, keys) in states.items()
    }
    return Evaluation(parts, images)
