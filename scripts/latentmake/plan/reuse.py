"""Files at hand: what a stale target needs may lie in the store, or in the cache under other names.

An item, a dataset or a model that was renamed, an edit that was undone, a setting that was taken
back: each asks for a key that some file bears already. Planning finds such files through the memo
and opens none; the job checks the headers, and encodes where one does not keep its word.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from latentmake.config import Dataset
from latentmake.errors import CacheError, SourceError
from latentmake.files.cachefile import Header, read_header, target_key
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Clip
from latentmake.index.memo import Memo
from latentmake.layouts import Layout, size_of
from latentmake.plan import store

if TYPE_CHECKING:
    from latentmake.plan.staleness import Evaluation, Source, Sources, Stale

__all__ = ["Keys", "Variants", "mark"]

_MOST = 3  # files that are tried for one target


class Variants:
    """The parts of keys that say what is done to sources.

    What is done to an image follows from its size, which the memo knows by the image's digest; so
    does the header of a target that was made of it.

    Args:
        layout: names the targets.
        settings: the dataset's section of the configuration; None for prompts.
        memo: knows the sizes of images.
    """

    def __init__(self, layout: Layout, settings: Dataset | None, memo: Memo) -> None:
        self._layout = layout
        self._settings = settings
        self._memo = memo
        self._upright = settings is not None and settings.exif_rotation
        self._sizes: dict[str, Size] = {}

    def prepare(self, contents: Iterable[str]) -> None:
        """Look up the sizes of some images at once, by their digests."""
        self._sizes |= self._memo.pictures(contents, upright=self._upright)

    def of(
        self,
        part: str,
        source: Source,
        content: str,
        clip: Clip | None,
        header: Header | None = None,
    ) -> str | None:
        """Return the variant of a target; None where it cannot be told, or there can be none.

        Args:
            part: of the target.
            source: what it is made from.
            content: digest of that.
            clip: which frames.
            header: of a file that may have been made of it.
        """
        size: Size | None = Size(0, 0)
        if (resolution := size_of(part)) is not None:
            if source.media is not None:
                size = Size(source.media.width, source.media.height)
            else:
                size = self._sizes.get(content)
            if size is None and header is not None and header.source == content:
                picture = header.picture
                if picture is not None and picture.upright == self._upright:
                    size = self._sizes[content] = Size(picture.width, picture.height)
        if size is None:
            return None
        try:
            return self._layout.variant(resolution, size, self._settings, clip)
        except SourceError:  # which the job names
            return None


@dataclass(frozen=True)
class Keys:
    """The keys of one dataset's and model's targets.

    Attributes:
        sources: digests of what they are made from.
        variants: what is done to that.
        recipes: part -> digest of its recipe; "" where a rule has yet to make the model.
    """

    sources: Sources
    variants: Variants
    recipes: Mapping[str, str]

    def prepare(self, stale: Iterable[Stale]) -> None:
        """Look up at once what is known of the sources of some targets."""
        sources = [each.source for each in stale]
        self.sources.prepare(sources)
        self.variants.prepare({x for each in sources for x in self.sources.presumed(each)})

    def of(self, part: str, stale: Stale) -> list[str]:
        """Return the keys that a target may have: one as a rule, none where nothing is known."""
        found = []
        for content in self.sources.presumed(stale.source):
            variant = self.variants.of(part, stale.source, content, stale.clip)
            if variant is not None:
                found.append(target_key(content, self.recipes[part], variant))
        return found


def mark(memo: Memo, evaluations: Sequence[Evaluation]) -> None:
    """Note for each stale target the files at hand that bear the key it needs.

    Args:
        memo: what is known of files.
        evaluations: whose stale targets get their `at_hand`.
    """
    asked = [
        (evaluation.target_keys, part, state)
        for evaluation in evaluations
        if evaluation.target_keys is not None
        for part, state in evaluation.parts.items()
        if state.stale and evaluation.target_keys.recipes.get(part)
    ]
    if not asked:
        return
    memo.save()  # what was learnt just now counts
    _learn_unknown(memo)
    kept = store.keys()
    if not kept and not memo.targets.any():
        return
    for keys in {id(each): each for each, _, _ in asked}.values():
        keys.prepare(stale for other, _, state in asked if other is keys for stale in state.stale)
    wanted = [
        (state, number, keys.of(part, stale))
        for keys, part, state in asked
        for number, stale in enumerate(state.stale)
    ]
    found = _files({key for _, _, each in wanted for key in each}, memo, kept)
    for state, number, each in wanted:
        if paths := [path for key in each for path in found.get(key, ())]:
            stale = state.stale[number]
            state.stale[number] = stale._replace(reason="at hand", at_hand=tuple(paths[:_MOST]))


def _files(keys: set[str], memo: Memo, kept: set[str]) -> dict[str, list[str]]:
    """Return key -> the files at hand that bear it."""
    found = {key: [str(store.stored(key))] for key in keys & kept}
    gone = []
    for path, stat, key in memo.targets.where("value", keys):
        try:
            if os.lstat(path).st_size == stat.size:
                found.setdefault(key, []).append(path)
        except OSError:
            gone.append(path)
    memo.targets.forget(gone)
    return found


def _learn_unknown(memo: Memo) -> None:
    """Read the headers of those cache folders of which the memo knows nothing: it was deleted."""
    from latentmake.plan.staleness import Folder

    for path in _folders("cache"):
        for folder in _folders(path):
            if memo.targets.any(folder):
                continue
            with contextlib.suppress(CacheError):
                for file, stat in Folder(folder).listing().items():
                    with contextlib.suppress(CacheError, OSError):
                        header = read_header(file)
                        memo.targets.learn(file, stat, header.key)
                        if header.picture is not None:
                            memo.learn_picture(header.source, header.picture)
    memo.save()


def _folders(path: str) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(path) as found:
        return [entry.path for entry in found if entry.is_dir()]
    return []
