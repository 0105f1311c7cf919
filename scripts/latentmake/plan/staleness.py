"""Which targets of one dataset and model are stale, and why.

A target is stale when it is missing, or the key in its header is not the key that its source, its
recipe and its resolution give today. Content decides; a stat only says whether content must be
looked at again. Where nothing in the listings changed since all was found fresh, a remembered
verdict answers for the whole dataset.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from latentmake import digest, layouts
from latentmake.config import Dataset
from latentmake.errors import CacheError, SourceError
from latentmake.files.atomic import TEMPORARY_SUFFIX
from latentmake.files.cachefile import Header, read_header, target_key
from latentmake.files.media import Media
from latentmake.geometry.clips import Clip
from latentmake.index.memo import Memo, SourceStat, TargetStat
from latentmake.layouts import Layout, Named, kind_of
from latentmake.plan import manifest
from latentmake.plan.reuse import Keys, Variants
from latentmake.sources import s3
from latentmake.sources.items import fingerprint

__all__ = [
    "REASONS",
    "Evaluation",
    "Folder",
    "PartState",
    "Source",
    "Sources",
    "Stale",
    "evaluate",
    "unreadable",
]

REASONS = ("at hand", "new", "edited", "changed recipe", "damaged")

_SMALL = 16_384  # bytes that are read rather than guessed at: captions
_ALIKE = 2  # known files that an unknown one is taken for

_PLAIN = layouts.of("plain")
_PENDING = ""  # the recipe digest of a model that a rule has yet to make


class Source(NamedTuple):
    """What one target is made from.

    Attributes:
        stem: names the item.
        path: the image or caption file; None where `text` stands for it.
        stat: its stat.
        text: the caption, where it lies in no file.
        control: the control image or video, if any.
        control_stat: its stat.
        media: size and length of an image or video, where the layout's names need them.
    """

    stem: str
    path: str | None
    stat: SourceStat | None
    text: str | None = None
    control: str | None = None
    control_stat: SourceStat | None = None
    media: Media | None = None


class Stale(NamedTuple):
    """A target that must be made.

    Attributes:
        source: what it is made from.
        path: its cache file.
        reason: one of `REASONS`.
        found: what lies there now: key and mtime.
        clip: which frames it is made of.
        content: digest of the source, where it is known.
        at_hand: files that seem to hold what is to be made.
    """

    source: Source
    path: str
    reason: str
    found: str | None
    clip: Clip | None = None
    content: str | None = None
    at_hand: tuple[str, ...] = ()


@dataclass
class PartState:
    """The targets of one part: `text` or a resolution.

    Attributes:
        fresh: how many need nothing.
        stale: those that do.
        keys: digest of all keys; None while a target is stale.
        known: path -> key of the fresh ones; empty where a remembered verdict answered.
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
        unreadable: stem -> fault of a source whose content must be known and cannot be read; no
            part counts these items, so they are to be left out and the rest evaluated again.
        target_keys: makes the keys of its targets; None where a remembered verdict answered.
    """

    parts: dict[str, PartState]
    images: str = ""
    unreadable: dict[str, SourceError] = field(default_factory=dict)
    target_keys: Keys | None = field(default=None, compare=False)


Listing = dict[str, TargetStat]


class Folder:
    """What lies in a cache folder.

    Links to folders outside of it are followed, others are listed like files: they may lead in
    circles, and what they lead to has a name of its own.

    Attributes:
        fingerprint: digest of all names and stats.

    Raises:
        CacheError: a folder in it cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._folders: list[tuple[str, list[tuple[str, int, int, int]]]] = []
        self._places = [_real(path)]
        pending = [path]
        while pending:
            folder = pending.pop()
            entries: list[tuple[str, int, int, int]] = []
            try:
                # Plain tuples and little else: this loop is what doing nothing costs.
                with os.scandir(folder) as found:
                    for entry in found:
                        if not entry.is_file(follow_symlinks=False) and (
                            entry.is_dir(follow_symlinks=False)
                            or (entry.is_symlink() and self._leads_out(entry.path))
                        ):
                            pending.append(entry.path)
                            continue
                        try:
                            stat = entry.stat(follow_symlinks=False)
                        except FileNotFoundError:
                            continue  # a job that runs has renamed or removed it since
                        entries.append((entry.name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise CacheError(
                    f"cannot be read ({error.strerror})", where=folder, mend="check its permissions"
                ) from None
            self._folders.append((folder, entries))
        digests = [(folder, fingerprint(entries)) for folder, entries in self._folders]
        self.fingerprint = fingerprint(sorted(digests))

    def _leads_out(self, link: str) -> bool:
        """Whether a link leads to a folder that no other name stands for; notes where it leads."""
        place = _real(link)
        if not Path(link).is_dir() or any(
            place.startswith(known) or known.startswith(place) for known in self._places
        ):
            return False
        self._places.append(place)
        return True

    def listing(self) -> Listing:
        """Return path -> stat of every file."""
        return {
            f"{folder}/{name}": TargetStat(*stat)
            for folder, entries in self._folders
            for name, *stat in entries
        }


def _real(path: str) -> str:
    return f"{os.path.realpath(path).rstrip('/')}/"


class Sources:
    """Digests of sources, each file read at most once and only if its stat is new.

    Attributes:
        unreadable: stem -> fault of a source that cannot be read.
    """

    def __init__(self, memo: Memo, *roots: str) -> None:
        self._memo = memo
        self._known: dict[str, tuple[SourceStat, str]] = {}
        self._alike: dict[tuple[int, str, int], set[str]] = {}
        self._lost: dict[str, SourceError] = {}
        self.unreadable: dict[str, SourceError] = {}
        for root in filter(None, roots):
            self._known |= memo.sources.below(root)

    def digest(self, source: Source) -> str | None:
        """Return a source's digest; None where it cannot be read, which is noted."""
        if source.path is None or source.stat is None:
            return digest.of_bytes((source.text or "").encode())
        try:
            content = self._file(source.path, source.stat)
            if source.control is None or source.control_stat is None:
                return content
            return digest.of_lines([content, self._file(source.control, source.control_stat)])
        except SourceError as error:
            self.unreadable[source.stem] = error
            return None

    def known(self, source: Source) -> str | None:
        """Return a source's digest where that needs no reading."""
        found = self._known.get(source.path or "")
        if found is None or found[0] != source.stat or source.control is not None:
            return None
        return found[1]

    def prepare(self, sources: Iterable[Source]) -> None:
        """Look up sources of the same sizes as some that are unknown, for `presumed`."""
        sizes = {
            stat.size
            for source in sources
            for path, stat in ((source.path, source.stat), (source.control, source.control_stat))
            if path and stat and self._known.get(path, (None,))[0] != stat
        }
        for _, stat, content in self._memo.sources.where("size", sizes):
            for kind, number in (("inode", stat.inode), ("mtime", stat.mtime_ns), ("", 0)):
                self._alike.setdefault((stat.size, kind, number), set()).add(content)

    def presumed(self, source: Source) -> tuple[str, ...]:
        """Return the digests that a source may have, for a search that its job verifies.

        A file of no more than a few pages is read. An unknown larger one is not, unless the memo
        was deleted: it is presumed to be a known one of the same size, of the same inode or mtime
        if there are several, as one is that was renamed or copied.
        """
        if source.path is None or source.stat is None:
            return tuple(filter(None, [self.digest(source)]))
        contents = self._presumed(source.path, source.stat)
        if source.control is None or source.control_stat is None:
            return contents
        controls = self._presumed(source.control, source.control_stat)
        return tuple(digest.of_lines([one, two]) for one in contents for two in controls)

    def _presumed(self, path: str, stat: SourceStat) -> tuple[str, ...]:
        known = self._known.get(path)
        if known is not None and known[0] == stat:
            return (known[1],)
        small = stat.size <= _SMALL or self._memo.is_new
        if small and not s3.is_remote(path):
            with contextlib.suppress(SourceError):  # which the job names
                return (self._file(path, stat),)
            return ()
        for like in (("inode", stat.inode), ("mtime", stat.mtime_ns), ("", 0)):
            contents = self._alike.get((stat.size, *like), ())
            if 0 < len(contents) <= _ALIKE:
                return tuple(sorted(contents))
        return ()

    def _file(self, path: str, stat: SourceStat) -> str:
        known = self._known.get(path)
        if known is not None and known[0] == stat:
            return known[1]
        if s3.is_remote(path):
            if path not in self._lost:
                self.fetch([(path, stat)])
            if path in self._lost:
                raise self._lost[path]
            return self._known[path][1]
        try:
            content = digest.of_file(Path(path))
        except OSError as error:
            raise unreadable(path, error) from None
        self._known[path] = (stat, content)
        self._memo.sources.learn(path, stat, content)
        return content

    def fetch(self, files: Iterable[tuple[str, SourceStat]]) -> None:
        """Read those objects of a server whose stats are new, many at a time."""
        new = [each for each in files if self._known.get(each[0], (None,))[0] != each[1]]
        for (path, listed), read in zip(new, s3.digests(new), strict=True):
            if isinstance(read, SourceError):
                self._lost[path] = read
                continue
            content, stat = read
            self._known[path] = (listed, content)
            self._memo.sources.learn(path, stat, content)


class _Targets:
    """Keys of cache files, each header read only if its stat is new."""

    def __init__(self, memo: Memo, folder: str, found: Listing) -> None:
        self._memo = memo
        self._known = memo.targets.below(folder)
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

    def gone(self) -> list[str]:
        """Return the files that the memo knows and that are no longer there."""
        return [path for path in self._known if path not in self.found]


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
    layout: Layout = _PLAIN,
    settings: Dataset | None = None,
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
        layout: names the targets.
        settings: the dataset's section of the configuration, where it has one.

    Raises:
        CacheError: something that is no cache lies in the place of one, or of a folder of them.
    """
    control = settings.control_directory if settings else None
    known_sources = Sources(memo, root, s3.normalized(control) if control else "")
    targets = _Targets(memo, f"cache/{dataset}/{model}", found)
    variants = Variants(layout, settings, memo)
    parts: dict[str, PartState] = {}
    expected: set[str] = set()
    for part, wanted in sources.items():
        folder = layout.folder(dataset, model, part)
        names = [
            (each, layout.named(folder, part, each.stem, each.media, settings)) for each in wanted
        ]
        expected.update(named.path for _, several in names for named in several)
        if s3.is_remote(root) and recipes[part] != _PENDING:
            known_sources.fetch(
                (each.path, each.stat)
                for each, several in names
                if each.path and each.stat and any(named.path in found for named in several)
            )
        if kind_of(part) == "latents" and found:
            variants.prepare(filter(None, (known_sources.known(each) for each in wanted)))
        parts[part] = _part(layout, part, names, recipes[part], known_sources, targets, variants)
    without = {layout.base(each.stem) for wanted in sources.values() for each in wanted}
    kept = {layout.base(stem) for stem in owned}
    _refuse_obstacles(
        (stale.path for state in parts.values() for stale in state.stale if stale.found is None),
        found,
    )
    _orphans(f"cache/{dataset}/{model}/", layout, expected, kept, kept - without, targets, parts)
    memo.targets.forget(targets.gone())
    keys = Keys(known_sources, variants, recipes)
    return Evaluation(parts, unreadable=known_sources.unreadable, target_keys=keys)


def _part(
    layout: Layout,
    part: str,
    wanted: Sequence[tuple[Source, Sequence[Named]]],
    recipe: str,
    sources: Sources,
    targets: _Targets,
    variants: Variants,
) -> PartState:
    state = PartState()
    keys: list[tuple[str, str]] = []
    for source, several in wanted:
        for path, clip in several:
            stat = targets.found.get(path)
            if stat is None:
                state.stale.append(Stale(source, path, "new", None, clip, sources.known(source)))
                continue
            try:
                key = targets.key(path, stat)
            except (CacheError, OSError):
                found = f"damaged@{stat.mtime_ns}"
                state.stale.append(Stale(source, path, "damaged", found, clip))
                continue
            found = f"{key}@{stat.mtime_ns}"
            if recipe == _PENDING:
                state.stale.append(Stale(source, path, "changed recipe", found, clip))
                continue
            content = sources.digest(source)
            if content is None:
                continue
            variant = variants.of(part, source, content, clip)
            if variant is None:
                variant = variants.of(part, source, content, clip, targets.header(path))
            if variant is not None and key == target_key(content, recipe, variant):
                state.fresh += 1
                state.known[path] = key
                keys.append((layout.identity(source.stem, path), key))
            else:
                header = targets.header(path)
                edited = header.recipe == recipe and header.source != content
                reason = "edited" if edited else "changed recipe"
                known = sources.known(source)
                state.stale.append(Stale(source, path, reason, found, clip, known))
    if not state.stale:
        state.keys = manifest.keys_digest(keys)
    return state


def unreadable(path: str, error: OSError) -> SourceError:
    """Return the fault of a source that cannot be read."""
    what = f"cannot be read ({error.strerror})"
    return SourceError(what, where=path, mend="check that the file exists and is readable")


def _refuse_obstacles(paths: Iterable[str], found: Listing) -> None:
    """Refuse what lies where missing cache files, or their folders, must come.

    Args:
        paths: the missing cache files.
        found: what was listed; the folders there are not.

    Raises:
        CacheError: a folder in the place of a file, or the other way round.
    """
    there: dict[str, bool] = {}
    for path in paths:
        folder = Path(path).parent
        if str(folder) not in there:
            for each in (folder, *folder.parents):
                if str(each) in found or (os.path.lexists(each) and not each.is_dir()):
                    what = f"{_kind(each)}, where a folder of caches belongs"
                    raise CacheError(what, where=each, mend="move it away or remove it")
            there[str(folder)] = folder.is_dir()
        if there[str(folder)] and Path(path).is_dir():
            what = "is a folder, where a cache file belongs"
            raise CacheError(what, where=path, mend="move it away or remove it")


def _kind(path: Path) -> str:
    if path.is_symlink():
        return f"is a link that leads {'to other caches' if path.is_dir() else 'nowhere'}"
    return "is a file"


def _orphans(
    prefix: str,
    layout: Layout,
    expected: set[str],
    kept: set[str],
    faulty: set[str],
    targets: _Targets,
    parts: dict[str, PartState],
) -> None:
    """Note the cache files of ours that no item owns, in any part's folder.

    Args:
        prefix: folder of the dataset and model, with a slash.
        layout: knows the names of cache files.
        expected: all targets of the parts that were asked for.
        kept: whose cache files stay in parts that were not asked for.
        faulty: whose cache files stay everywhere.
        targets: what lies there.
        parts: get the orphans.
    """
    for path, stat in targets.found.items():
        if path in expected:
            continue
        part, _, name = path[len(prefix) :].partition("/")
        if bases := layout.owners(name):
            if any(each in (faulty if part in parts else kept) for each in bases):
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
    if evaluation.unreadable or any(
        state.keys is None or state.orphans for state in parts.values()
    ):
        return None
    states = {part: [state.fresh, state.keys] for part, state in parts.items()}
    return json.dumps([states, evaluation.images])


def recall(answer: str) -> Evaluation:
    """Return the evaluation that a remembered verdict stands for."""
    states, images = json.loads(answer)
    parts = {part: PartState(fresh=count, keys=keys) for part, (count, keys) in states.items()}
    return Evaluation(parts, images)
