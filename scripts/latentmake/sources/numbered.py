"""Files whose names continue that of an item: `cat_0.png` and `cat_1.png` of `cat.png`.

musubi-tuner gives control images and layers to their items by such names. Source: its
`ImageDirectoryDatasource` (dataset/datasources.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from posixpath import splitext

from latentmake.errors import SourceError
from latentmake.index.memo import SourceStat

_File = tuple[str, SourceStat]
"""Path and stat."""


class Names:
    """Names of items, among which that of a file is looked up.

    Where several fit, that of the item with the longest file name counts: `cat_2.png` belongs to
    `cat_2`, and to `cat` only where there is no such item.

    Args:
        paths: of the items' images, below the dataset's folder.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._ranks: dict[str, tuple[int, str]] = {}
        for path in paths:
            rank = (-len(path.rpartition("/")[2]), path)
            stem = splitext(path)[0]
            self._ranks[stem] = min(rank, self._ranks.get(stem, rank))

    def owner(self, path: str, ends: str) -> str | None:
        """Return the item whose name a path continues, behind it one of the characters `ends`."""
        folder, slash, name = path.rpartition("/")
        ended = (f"{folder}{slash}{name[:at]}" for at, each in enumerate(name) if each in ends)
        found = [stem for stem in ended if stem in self._ranks]
        return min(found, key=self._ranks.__getitem__, default=None)


def in_order(stem: str, files: Iterable[_File], what: str) -> Sequence[_File]:
    """Return the files of an item in the order of their numbers, one without a number first.

    Args:
        stem: last part of the item's name.
        files: paths that continue it, and stats.
        what: each is, for messages: `control` or `layer`.

    Raises:
        SourceError: a name ends in no number, or two in the same.
    """
    numbered: dict[int, _File] = {}
    for path, stat in sorted(files):
        name = splitext(path.rpartition("/")[2])[0]
        digits = name.rpartition("_")[2]
        if name != stem and not (digits.isascii() and digits.isdecimal()):
            raise SourceError(
                f"has a {what} {path}, whose name does not end in a number",
                hint=f"name it {stem}_0 or likewise, or move it away",
            )
        number = -1 if name == stem else int(digits)
        if number in numbered:
            raise SourceError(
                f"has two {what}s of the same number, {numbered[number][0]} and {path}",
                hint="rename or remove one of them",
            )
        numbered[number] = path, stat
    return [numbered[number] for number in sorted(numbered)]
