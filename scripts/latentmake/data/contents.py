"""Contents of inputs: digests of images, and of captions by their texts as they are encoded.

Content decides what is stale: a stat only tells whether a file must be read again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, product
from pathlib import Path
from typing import Self

from latentmake import digest
from latentmake.config.datasets import Dataset
from latentmake.data.item import CAPTION, Fault, File, Item, fault_of, text_fault
from latentmake.digest import SourceStat
from latentmake.errors import SourceError, unreadable
from latentmake.files.cachefile import Header
from latentmake.files.workspace import is_remote
from latentmake.geometry.buckets import Size
from latentmake.index.memo import Memo
from latentmake.regular import read_regular

_SMALL = 16_384  # bytes; files up to this size are read rather than presumed: captions
_LARGEST = 1 << 32  # bytes of an image, which is read as a whole
_ALIKE = 2  # known files that an unknown one is presumed to equal
_FORMER = 4  # digests of releases before that a text is presumed to have
_MOST_PRESUMED = 16  # digests that inputs of several unknown files are presumed to have


EMPTY = "is an empty caption", "describe the image, or set empty_caption: allow"


def check_length(path: str, size: int) -> None:
    """Refuse, by SourceError, an image or a caption of more bytes than any has."""
    if size > _LARGEST:
        what = f"has {size} bytes, more than any image or caption"
        raise SourceError(what, where=path, hint="replace or remove the file")


def decode_text(data: bytes, path: str) -> str:
    """Return the text of a file: UTF-8, without byte order mark, line ends as `newlines` has them.

    Raises:
        SourceError: it is not UTF-8, or no text of a caption (see `text_fault`).
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what, hint = f"is not UTF-8 (byte {error.start + 1})", "save it as UTF-8"
        raise SourceError(what, where=path, hint=hint) from None
    if fault := text_fault(text):
        raise SourceError(fault, where=path, hint="write the caption there, as UTF-8")
    return newlines(text)


def encoded(text: str) -> str:
    """Return a text as it is encoded: without byte order mark and space around it.

    Its digest is the content that a cache of it is made of, whatever file it comes from.
    """
    return newlines(text.removeprefix("\ufeff")).strip()


def former_digests(text: str) -> list[str]:
    """Return digests that releases before 0.3 may have of a text: of the bytes of its file."""
    forms = [text, f"{text}\n", *(text.replace("\n", "\r\n") + end for end in ("\r\n", ""))]
    forms += [text + end for end in (" ", " \n", "\n\n", "\r\n\r\n")]
    marked = [mark + each for mark in ("", "\ufeff") for each in forms]
    return [digest.of_bytes(each.encode()) for each in dict.fromkeys(marked)]


def caption_of(text: str, path: str, settings: Dataset | None) -> str:
    """Return the content of a caption file as it is encoded; SourceError: it may not be empty."""
    caption = encoded(text)
    if not caption and settings is not None and settings.empty_caption == "error":
        raise SourceError(EMPTY[0], where=path, hint=EMPTY[1])
    return caption


def newlines(text: str) -> str:
    """Return a text with the line ends that Python's text mode gives, and so the trainers read."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_caption(path: str) -> str:
    """Return the caption in a file on disk or at a URL; a SourceError says why there is none."""
    return encoded(read_text(path))


def read_text(path: str) -> str:
    """Return the text in a file on disk or at a URL, see `decode_text`."""
    try:
        if is_remote(path):
            from latentmake.data import remote

            data = remote.read(path)[0]
        else:
            data = read_regular(path)
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise SourceError(what, where=path, hint="check the file's permissions") from None
    return decode_text(data, path)


def joined(item: Item, contents: Sequence[str]) -> str:
    """Return the digest of inputs, from those of the files that they read (`Item.read`).

    Of a caption, and of a text without a file, the text counts as it is encoded.
    """
    if item.source is None:
        contents = [digest.of_bytes(encoded(item.text or "").encode()), *contents]
    return _joined(item, contents)


def formerly(item: Item, text: str, contents: Sequence[str]) -> list[str]:
    """Return what `joined` may have been in releases before 0.3, which read more than the text.

    `text` is the one that is encoded; other arguments are as of `joined`.
    """
    others = contents if item.source is None else contents[1:]
    own = [digest.of_bytes(item.text.encode())] if item.text else []
    return [_joined(item, [each, *others]) for each in (*own, *former_digests(text))]


def _joined(item: Item, contents: Sequence[str]) -> str:
    if len(contents) == 1:
        return contents[0]
    last = 1 + len(item.controls)
    layers = ["layers", *contents[last:]] if contents[last:] else []
    return digest.of_lines([*contents[:last], *layers])


@dataclass
class Contents:
    """Digests of the inputs of a dataset's targets: of a caption, that of its text as encoded.

    A file is read at most once, and only if its stat is new. The size of an image is known by the
    digest of its file: from the memo, or from the header of a target made of it.

    Attributes:
        unreadable: stem -> fault of an input that had to be read and cannot be used.
    """

    _memo: Memo
    settings: Dataset | None  # the dataset's section of the configuration; None for prompts
    _known: dict[str, tuple[SourceStat, str]]
    _texts: dict[str, tuple[SourceStat, str]] = field(default_factory=dict)  # of caption files
    unreadable: dict[str, Fault] = field(default_factory=dict)
    _alike: dict[tuple[int, str, int], set[str]] = field(default_factory=dict)
    _sizes: dict[str, Size] = field(default_factory=dict)

    @classmethod
    def of_items(cls, items: Iterable[Item], memo: Memo, settings: Dataset | None) -> Self:
        """Return the contents of the inputs of some items, with what the memo knows of them."""
        captions, others = set[str](), set[str]()
        for file in (each for item in items for each in item.files):
            (captions if file.role == CAPTION else others).add(file.path)
        return cls(memo, settings, memo.sources.look_up(others), memo.texts.look_up(captions))

    # -- digests ------------------------------------------------------------------------------

    def of(self, item: Item) -> str | None:
        """Return the digest of an item's inputs; None where they cannot be read."""
        try:
            return joined(item, [*map(self._file, item.read)])
        except SourceError as error:
            self.unreadable[item.stem] = fault_of(item, error)
            return None

    def known(self, item: Item) -> str | None:
        """Return the digest of inputs that are one file, if it is known without reading."""
        if item.texts is not None or len(item.files) != 1:
            return None
        found = self._learnt(item.files[0])
        if found is None or item.files[0].role != CAPTION:
            return found
        return digest.of_bytes(encoded(found).encode())

    def text(self, item: Item) -> str:
        """Return the text of an item's inputs as it is encoded; SourceError: it has a fault."""
        caption = item.file(CAPTION)
        return encoded(item.text or "") if caption is None else self._caption(caption)

    def lacks(self, item: Item, tokens: Collection[str]) -> bool:
        """Whether the text of an item's inputs can be read, and contains none of these tokens."""
        try:
            text = self.text(item)
        except SourceError:  # which the job names
            return False
        return not any(token in text for token in tokens)

    def formerly(self, item: Item) -> list[str]:
        """Return digests that caches of releases before 0.3 may have of the same text."""
        return formerly(item, self.text(item), [*map(self._file, item.read)])

    def _caption(self, file: File) -> str:
        if (text := self._learnt(file)) is None:
            text = read_text(file.path)
            self._learn(file, text)
        return caption_of(text, file.path, self.settings)

    def _learnt(self, file: File) -> str | None:
        """Return what is known of a file with this stat: its digest, or the text of a caption."""
        known = (self._texts if file.role == CAPTION else self._known).get(file.path)
        return known[1] if known is not None and known[0] == file.stat else None

    def _learn(self, file: File, value: str) -> None:
        known, memo = self._known, self._memo.sources
        if file.role == CAPTION:
            known, memo = self._texts, self._memo.texts
        known[file.path] = (file.stat, value)
        memo.learn(file.path, file.stat, value)

    def fetch(self, files: Iterable[File]) -> None:
        """Read the files at URLs whose stats are new, many at a time."""
        from latentmake.data import remote

        asked = {file.path: file for file in files if is_remote(file.path)}
        new = [file for file in asked.values() if self._learnt(file) is None]
        captions = [file for file in new if file.role == CAPTION]
        others = [file for file in new if file.role != CAPTION]
        for several, *value in (others,), (captions, decode_text):
            contents = remote.contents([file.path for file in several], *value)
            for file, found in zip(several, contents, strict=True):
                if found is not None:  # `_file` says what is wrong
                    self._learn(file, found)

    def _file(self, file: File) -> str:
        role, path, stat = file
        if role == CAPTION:
            return digest.of_bytes(self._caption(file).encode())
        if (known := self._learnt(file)) is not None:
            return known
        if self.settings is None or not self.settings.video:
            check_length(path, stat.size)
        try:
            if is_remote(path):
                from latentmake.data import remote

                content = digest.of_bytes(remote.read(path)[0])
            else:
                content = digest.of_file(Path(path))
        except OSError as error:
            raise unreadable(error, path) from None
        self._learn(file, content)
        return content

    # -- sizes of images ----------------------------------------------------------------------

    def prepare_sizes(self, contents: Iterable[str]) -> None:
        """Look up the sizes of some images at once, by their digests."""
        upright = self.settings is not None and self.settings.exif_rotation
        self._sizes |= self._memo.pictures(contents, upright=upright)

    def size(self, item: Item, content: str, header: Header | None = None) -> Size | None:
        """Return the size of an item's image or video, if it is known; arguments as of `view`."""
        if item.media is not None:
            return Size(item.media.width, item.media.height)
        found = self._sizes.get(content)
        if found is None and header is not None and header.source == content:
            picture = header.picture
            upright = self.settings is not None and self.settings.exif_rotation
            if picture is not None and picture.upright == upright:
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
        self._prepare_texts([each for item in wanted for each in item.read if self._is_away(each)])
        self.prepare_sizes({each for item in wanted for each in self.presumed(item)})

    def _is_away(self, file: File) -> bool:
        """Whether a file is a caption at a URL that has not been read."""
        is_caption = file.role == CAPTION and is_remote(file.path)
        return is_caption and self._learnt(file) is None

    def _prepare_texts(self, files: Iterable[File]) -> None:
        """Look up the known texts of captions at URLs that are as long as some others."""
        sizes: dict[str, set[int]] = {}
        for file in files:
            sizes.setdefault("/".join(file.path.split("/", 3)[:3]), set()).add(file.stat.size)
        for bucket, wanted in sizes.items():
            for path, ((size, *_), text) in self._memo.texts.below(bucket).items():
                if size in wanted:
                    content = digest.of_bytes(encoded(text).encode())
                    # Of a renamed folder, and of a renamed file.
                    for like in (Path(path).name, CAPTION):
                        self._alike.setdefault((size, like, 0), set()).add(content)

    def presumed(self, item: Item) -> list[str]:
        """Return the digests that inputs may have, for a search that their job verifies."""
        found = [self._presumed(file) for file in item.read]
        several = [[*each] for each in islice(product(*found), _MOST_PRESUMED)]
        digests = [joined(item, each) for each in several]
        has_text = item.text is not None or item.file(CAPTION)
        if has_text and several and not any(map(self._is_away, item.read)):
            with contextlib.suppress(SourceError):
                text = self.text(item)
                digests += [x for each in several for x in formerly(item, text, each)[:_FORMER]]
        return [*dict.fromkeys(digests)]

    def _presumed(self, file: File) -> list[str]:
        """Return the digests that a file may have.

        A large file is not read unless the memo is new: it is presumed to equal known ones of its
        size, or of its inode or mtime too if there are several (it was renamed or copied).
        """
        role, path, stat = file
        is_known = self._learnt(file) is not None
        if is_known or ((stat.size <= _SMALL or self._memo.is_new) and not is_remote(path)):
            with contextlib.suppress(SourceError):  # which the job names
                return [self._file(file)]
            return []
        if role == CAPTION:
            known = self._texts.get(path)
            if known is not None and known[0][0] == stat.size:  # it came back
                return [digest.of_bytes(encoded(known[1]).encode())]
            likes = (Path(path).name, CAPTION)
            alike = chain(*(sorted(self._alike.get((stat.size, x, 0), ())) for x in likes))
            return [*dict.fromkeys(alike)][:_ALIKE]
        for like in (("inode", stat.inode), ("mtime", stat.mtime_ns), ("", 0)):
            contents = self._alike.get((stat.size, *like), ())
            if 0 < len(contents) <= _ALIKE:
                return sorted(contents)
        return []
