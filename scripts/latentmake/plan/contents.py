"""Digests of the inputs of one dataset's targets, and the sizes of its images."""

from __future__ import annotations

import contextlib
from codecs import BOM_UTF8
from collections.abc import Iterable
from itertools import islice, product
from pathlib import Path

from latentmake import digest
from latentmake.config.datasets import Dataset
from latentmake.errors import SourceError
from latentmake.files.cachefile import Header
from latentmake.files.paths import is_remote
from latentmake.geometry.buckets import Size
from latentmake.index.memo import Memo, SourceStat
from latentmake.plan.target import joined
from latentmake.sources.item import Item

_SMALL = 16_384  # bytes; files up to this size are read rather than presumed: captions
_ALIKE = 2  # known files that an unknown one is presumed to equal
_MOST_PRESUMED = 16  # digests that inputs of several unknown files are presumed to have


def unreadable(path: str, error: OSError) -> SourceError:
    """Return the fault of a source that cannot be read."""
    what = f"cannot be read ({error.strerror})"
    return SourceError(what, where=path, hint="check that the file exists and is readable")


class Contents:
    """Digests of the inputs of a dataset's targets.

    A file is read at most once, and only if its stat is new. The size of an image is known by the
    digest of its file: from the memo, or from the header of a target made of it.

    Attributes:
        unreadable: stem -> fault of an input that had to be read and cannot be.

    Args:
        memo: knows files; learns more.
        settings: the dataset's section of the configuration; None for prompts.
        known: path -> stat and digest of files that the memo knows.
    """

    def __init__(
        self, memo: Memo, settings: Dataset | None, known: dict[str, tuple[SourceStat, str]]
    ) -> None:
        self.unreadable: dict[str, SourceError] = {}
        self._memo = memo
        self._upright = settings is not None and settings.exif_rotation
        self._known = known
        self._alike: dict[tuple[int, str, int], set[str]] = {}
        self._lost: dict[str, SourceError] = {}
        self._sizes: dict[str, Size] = {}

    # -- digests ------------------------------------------------------------------------------

    def of(self, item: Item) -> str | None:
        """Return the digest of an item's inputs; None where they cannot be read."""
        try:
            return self._joined(item, [self._file(path, stat) for _, path, stat in item.read])
        except SourceError as error:
            self.unreadable[item.stem] = error
            return None

    def known(self, item: Item) -> str | None:
        """Return the digest of inputs that are one file, if it is known without reading."""
        if item.texts is not None or len(item.files) != 1:
            return None
        _, path, stat = item.files[0]
        found = self._known.get(path)
        return None if found is None or found[0] != stat else found[1]

    def with_line_ends(self, item: Item, content: str, found: str) -> str:
        """Return a text's digest, or the one found in a header if only line ends differ.

        A byte order mark does not count either.
        """
        from latentmake.sources.captions import newlines

        path = item.source
        if path is None or content == found or is_remote(path):
            return content
        try:
            text = newlines(Path(path).read_bytes().decode("utf-8-sig")).encode()
            others = [self._file(each.path, each.stat) for each in item.read[1:]]
        except (OSError, UnicodeDecodeError, SourceError):
            return content
        forms = product((b"", BOM_UTF8), (text, text.replace(b"\n", b"\r\n")))
        same = (self._joined(item, [digest.of_bytes(b"".join(x)), *others]) for x in forms)
        return found if found in same else content

    def fetch(self, files: Iterable[tuple[str, SourceStat]]) -> None:
        """Read the objects on S3 whose stats are new, many at a time."""
        from latentmake.sources import s3

        remote = (each for each in files if is_remote(each[0]))
        new = [each for each in remote if self._known.get(each[0], (None,))[0] != each[1]]
        for (path, listed), read in zip(new, s3.digests(new), strict=True):
            if isinstance(read, SourceError):
                self._lost[path] = read
                continue
            content, stat = read
            self._known[path] = (listed, content)
            self._memo.sources.learn(path, stat, content)

    def _joined(self, item: Item, contents: list[str]) -> str:
        if item.source is None:
            contents = [digest.of_bytes((item.text or "").encode()), *contents]
        last = 1 + len(item.controls)
        return joined(contents[0], contents[1:last], contents[last:])

    def _file(self, path: str, stat: SourceStat) -> str:
        known = self._known.get(path)
        if known is not None and known[0] == stat:
            return known[1]
        if is_remote(path):
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

    # -- sizes of images ----------------------------------------------------------------------

    def prepare_sizes(self, contents: Iterable[str]) -> None:
        """Look up the sizes of some images at once, by their digests."""
        self._sizes |= self._memo.pictures(contents, upright=self._upright)

    def size(self, item: Item, content: str, header: Header | None = None) -> Size | None:
        """Return the size of an item's image or video, if it is known.

        Args:
            item: inputs of a target.
            content: their digest.
            header: of a file that may have been made of that content.
        """
        if item.media is not None:
            return Size(item.media.width, item.media.height)
        found = self._sizes.get(content)
        if found is None and header is not None and header.source == content:
            picture = header.picture
            if picture is not None and picture.upright == self._upright:
                found = self._sizes[content] = Size(picture.width, picture.height)
        return found

    # -- presumptions -------------------------------------------------------------------------

    def prepare_presumed(self, items: Iterable[Item]) -> None:
        """Look up at once what `presumed` needs of some inputs."""
        wanted = list(items)
        files = (each for item in wanted for each in item.read)
        sizes = {x.stat.size for x in files if self._known.get(x.path, (None,))[0] != x.stat}
        for _, stat, content in self._memo.sources.where("size", sizes):
            for kind, number in (("inode", stat.inode), ("mtime", stat.mtime_ns), ("", 0)):
                self._alike.setdefault((stat.size, kind, number), set()).add(content)
        self.prepare_sizes({each for item in wanted for each in self.presumed(item)})

    def presumed(self, item: Item) -> list[str]:
        """Return the digests that inputs may have, for a search that their job verifies."""
        found = [self._presumed(path, stat) for _, path, stat in item.read]
        return [self._joined(item, [*each]) for each in islice(product(*found), _MOST_PRESUMED)]

    def _presumed(self, path: str, stat: SourceStat) -> list[str]:
        """Return the digests that a file may have.

        A large file is not read unless the memo is new: it is presumed to equal known ones of its
        size, or of its inode or mtime too if there are several (it was renamed or copied).
        """
        known = self._known.get(path)
        if known is not None and known[0] == stat:
            return [known[1]]
        if (stat.size <= _SMALL or self._memo.is_new) and not is_remote(path):
            with contextlib.suppress(SourceError):  # which the job names
                return [self._file(path, stat)]
            return []
        for like in (("inode", stat.inode), ("mtime", stat.mtime_ns), ("", 0)):
            contents = self._alike.get((stat.size, *like), ())
            if 0 < len(contents) <= _ALIKE:
                return sorted(contents)
        return []
