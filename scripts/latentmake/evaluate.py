"""Which targets of one dataset and model are stale, and why.

A target is stale when it is missing, or the key in its header is not the key that its source, its
recipe and its resolution give today. Content decides; a stat only says whether content must be
looked at again. Where nothing in the listings changed since all was found fresh, a remembered
verdict answers for the whole dataset.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from latentmake import digest, manifest
from latentmake.cachefile import TEMPORARY_SUFFIX, Header, read_header, target_key
from latentmake.dataset import fingerprint
from latentmake.errors import CacheError, SourceError
from latentmake.layouts import plain
from latentmake.memo import Memo, SourceStat, TargetStat

__all__ = ["REASONS", "Evaluation", "Folder", "PartState", "Source", "Stale", "evaluate"]

REASONS = ("new", "edited", "changed recipe", "damaged")

_PENDING = ""  # the recipe digest of a model that a rule has yet to make


class Source(NamedTuple):
    """What one target is made from.

    Attributes:
        stem: names the item.
        path: the image or caption file; None where `text` stands for it.
        stat: its stat.
        text: the caption, where it lies in no file.
    """

    stem: str
    path: str | None
    stat: SourceStat | None
    text: str | None = None


class Stale(NamedTuple):
    """A target that must be made: from what, as which file, why, and what lies there now."""

    source: Source
    path: str
    reason: str
    found: str | None


@dataclass
class PartState:
    """The targets of one part: `text` or a resolution.

    Attributes:
        fresh: how many need nothing.
        stale: those that do.
        keys: digest of all keys; None while a target is stale.
        known: stem -> key of the fresh ones; empty where a remembered verdict answered.
        orphans: cache files whose items are gone.
    """

    fresh: int = 0
    stale: list[Stale] = field(default_factory=list)
    keys: str | None = None
    known: dict[str, str] = field(default_factory=dict)
    orphans: list[str] = field(default_factory=list)


@dataclass
class Evaluation:
    """All parts of one dataset and model, and of parts that no run asks for the orphans.

    Attributes:
        parts: name -> state.
        images: digest of the images' paths, which a manifest names.
    """

    parts: dict[str, PartState]
    images: str = ""


Listing = dict[str, TargetStat]


class Folder:
    """What lies in a cache folder.

    Attributes:
        fingerprint: digest of all names and stats.
    """

    def __init__(self, path: str) -> None:
        self._folders: list[tuple[str, list[tuple[str, int, int, int]]]] = []
        pending = [path]
        while pending:
            folder = pending.pop()
            entries: list[tuple[str, int, int, int]] = []
            try:
                # Plain tuples and little else: this loop is what doing nothing costs.
                with os.scandir(folder) as found:
                    for entry in found:
                        if entry.is_dir():
                            pending.append(entry.path)
                            continue
                        stat = entry.stat(follow_symlinks=False)
                        entries.append((entry.name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
            except FileNotFoundError:
                continue
            self._folders.append((folder, entries))
        digests = [(folder, fingerprint(entries)) for folder, entries in self._folders]
        self.fingerprint = fingerprint(sorted(digests))

    def listing(self) -> Listing:
        """Return path -> stat of every file."""
        return {
            f"{folder}/{name}": TargetStat(*stat)
            for folder, entries in self._folders
            for name, *stat in entries
        }


class _Sources:
    """Digests of sources, each file read at most once and only if its stat is new."""

    def __init__(self, memo: Memo, root: str) -> None:
        self._memo = memo
        self._known = memo.sources_below(root) if root else {}

    def digest(self, source: Source) -> str:
        if source.path is None or source.stat is None:
            return digest.of_bytes((source.text or "").encode())
        known = self._known.get(source.path)
        if known is not None and known[0] == source.stat:
            return known[1]
        try:
            content = digest.of_file(Path(source.path))
        except OSError as error:
            raise SourceError(
                f"cannot be read ({error.strerror})", where=source.path, mend="see its rights"
            ) from None
        self._known[source.path] = (source.stat, content)
        self._memo.learn_source(source.path, source.stat, content)
        return content


class _Targets:
    """Keys of cache files, each header read only if its stat is new."""

    def __init__(self, memo: Memo, folder: str, found: Listing) -> None:
        self._memo = memo
        self._known = memo.targets_below(folder)
        self.found = found

    def key(self, path: str, stat: TargetStat) -> str:
        known = self._known.get(path)
        if known is not None and known[0] == stat:
            return known[1]
        header = self.header(path)
        self._memo.learn_target(path, stat, header.key)
        return header.key

    @staticmethod
    def header(path: str) -> Header:
        return read_header(path)


def evaluate(
    *,
    dataset: str,
    model: str,
    root: str,
    sources: Mapping[str, Sequence[Source]],
    owned: set[str],
    recipes: Mapping[str, str],
    memo: Memo,
    found: Listing,
) -> Evaluation:
    """Find the stale targets of one dataset and model.

    Args:
        dataset: its name.
        model: its name.
        root: the dataset's folder; "" where it has none.
        sources: part -> what each of its targets is made from, in the order of stems.
        owned: stems of all items, faulty ones too: their cache files are no orphans.
        recipes: part -> digest of its recipe; "" where a rule has yet to make the model.
        memo: what is known of files.
        found: what lies in the dataset's cache folder.

    Raises:
        SourceError: a source whose content must be known cannot be read.
    """
    known_sources = _Sources(memo, root)
    targets = _Targets(memo, f"cache/{dataset}/{model}", found)
    parts: dict[str, PartState] = {}
    for part, wanted in sources.items():
        parts[part] = _part(
            plain.folder(dataset, model, part), part, wanted, recipes[part], known_sources, targets
        )
    _orphans(dataset, model, owned, targets, parts)
    return Evaluation(parts)


def _part(
    folder: str,
    part: str,
    wanted: Sequence[Source],
    recipe: str,
    sources: _Sources,
    targets: _Targets,
) -> PartState:
    state = PartState()
    resolution = "" if part == "text" else part
    ending = plain.ending(part)
    for source in wanted:
        path = f"{folder}/{source.stem}{ending}"
        stat = targets.found.get(path)
        if stat is None:
            state.stale.append(Stale(source, path, "new", None))
            continue
        try:
            key = targets.key(path, stat)
        except (CacheError, OSError):
            found = f"damaged@{stat.mtime_ns}"
            state.stale.append(Stale(source, path, "damaged", found))
            continue
        found = f"{key}@{stat.mtime_ns}"
        if recipe == _PENDING:
            state.stale.append(Stale(source, path, "changed recipe", found))
            continue
        if key == target_key(sources.digest(source), recipe, resolution):
            state.fresh += 1
            state.known[source.stem] = key
        else:
            same = targets.header(path).recipe == recipe
            state.stale.append(Stale(source, path, "edited" if same else "changed recipe", found))
    if not state.stale:
        state.keys = manifest.keys_digest(state.known.items())
    return state


def _orphans(
    dataset: str, model: str, owned: set[str], targets: _Targets, parts: dict[str, PartState]
) -> None:
    """Note the cache files of ours that no item owns, in any part's folder."""
    prefix = f"cache/{dataset}/{model}/"
    for path, stat in targets.found.items():
        part, _, name = path[len(prefix) :].partition("/")
        if name.endswith(ending := plain.ending(part)):
            if name[: -len(ending)] in owned:
                continue
            try:
                targets.key(path, stat)
            except (CacheError, OSError):
                continue  # not ours, or damaged: nobody reads it, and nobody may delete it
        elif not name.endswith(TEMPORARY_SUFFIX):
            continue
        parts.setdefault(part, PartState()).orphans.append(path)


def remember(evaluation: Evaluation) -> str | None:
    """Return a verdict to remember: every part's count and digest, or None if anything is to do."""
    parts = evaluation.parts
    if any(state.keys is None or state.orphans for state in parts.values()):
        return None
    states = {part: [state.fresh, state.keys] for part, state in parts.items()}
    return json.dumps([states, evaluation.images])


def recall(answer: str) -> Evaluation:
    """Return the evaluation that a remembered verdict stands for."""
    states, images = json.loads(answer)
    parts = {part: PartState(fresh=count, keys=keys) for part, (count, keys) in states.items()}
    return Evaluation(parts, images)
