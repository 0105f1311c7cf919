"""Digests of the inputs of targets: of image files, and of captions as they are encoded.

Content decides which targets are stale. A stat only tells whether a file must be read again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, islice, product
from pathlib import Path

from latentmake.base import digest
from latentmake.base.errors import SourceError, unreadable
from latentmake.base.paths import is_remote
from latentmake.base.regular import read_regular
from latentmake.config.datasets import Dataset
from latentmake.data.item import CAPTION, MADE, TAGS, Fault, File, Item, fault_of, text_fault
from latentmake.data.memo import Memo
from latentmake.formats.cachefile import Header, made_caption
from latentmake.geometry.buckets import Size

_TEXTS = (CAPTION, TAGS, MADE)  # roles of files whose texts count, not their bytes
_SMALL = 16_384  # bytes; smaller files, such as captions, are read instead of guessed
_LARGEST = 1 << 32  # bytes of an image; the complete file is read into memory
_MOST_LOOKALIKES = 2  # most digests to guess for one unread file
_MOST_FORMER = 4  # most digests of earlier releases to guess for one text
_MOST_PRESUMED = 16  # most digests to guess for inputs that are several unread files


EMPTY = "is an empty caption", "describe the image, or set empty_caption: allow"


def check_length(path: str, size: int) -> None:
    """Raise a SourceError if an image or caption file is implausibly large.

    Args:
        path: path of the file, for the message.
        size: its size in bytes.
    """
    if size > _LARGEST:
        what = f"has {size} bytes, more than any image or caption"
        raise SourceError(what, where=path, hint="replace or remove the file")


def decode_text(data: bytes, path: str) -> str:
    """Decode the bytes of a text file: UTF-8, without a byte order mark, line ends as `newlines`.

    Raises:
        SourceError: the bytes are not UTF-8, or the text cannot be a caption (see `text_fault`).
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
    """Return a text as it is encoded: without a byte order mark and without space around it.

    The digest of this form is the content of a text target, whichever file the text comes from.
    """
    return newlines(text.removeprefix("\ufeff")).strip()


def former_digests(text: str) -> list[str]:
    """Return digests that releases before 0.3 may have stored for a text.

    They digested the bytes of the file, so line ends, trailing space and byte order marks counted.
    """
    forms = [text, f"{text}\n", *(text.replace("\n", "\r\n") + end for end in ("\r\n", ""))]
    forms += [text + end for end in (" ", " \n", "\n\n", "\r\n\r\n")]
    marked = [mark + form for mark in ("", "\ufeff") for form in forms]
    return [digest.of_bytes(form.encode()) for form in dict.fromkeys(marked)]


def caption_of(text: str, path: str, settings: Dataset | None) -> str:
    """Return the text of a caption file as it is encoded.

    Raises:
        SourceError: the caption is empty, and the dataset does not allow that.
    """
    caption = encoded(text)
    if not caption and settings is not None and settings.empty_caption == "error":
        raise SourceError(EMPTY[0], where=path, hint=EMPTY[1])
    return caption


def newlines(text: str) -> str:
    """Return a text with Unix line ends, as trainers get it from Python's text mode."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_caption(path: str | None) -> str:
    """Return the caption in a file as it is encoded, "" without a file; see `read_text`."""
    return encoded(read_text(path)) if path else ""


def read_text(path: str) -> str:
    """Return the text in a file on disk or at a URL, as `decode_text` does; raises SourceError."""
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


def read_made(path: str) -> str:
    """Return the text of a made caption as its captioner returned it; raises SourceError."""
    try:
        return newlines(made_caption(read_regular(path))["caption"])
    except OSError as error:
        raise unreadable(error, path) from None
    except ValueError as error:
        hint = "delete it, and run the same command again"
        raise SourceError(str(error), where=path, hint=hint) from None


def joined(item: Item, contents: Sequence[str], text: str | None = None) -> str:
    """Return the digest of an item's inputs.

    Texts count as they are encoded, whether they come from a caption file or not.

    Args:
        item: inputs of one target.
        contents: digests of the files that the inputs read, in the order of `Item.read`.
        text: digest to use in place of that of the text.
    """
    if item.source is None:
        text = text or digest.of_bytes(encoded(item.text or "").encode())
        contents = [text, *contents]
    elif text is not None:
        contents = [text, *contents[1:]]
    if len(contents) == 1:
        return contents[0]
    last = 1 + len(item.controls)
    layers = ["layers", *contents[last:]] if contents[last:] else []
    return digest.of_lines([*contents[:last], *layers])


def formerly(item: Item, text: str, contents: Sequence[str]) -> list[str]:
    """Return digests that releases before 0.3 may have computed in place of `joined`.

    They digested the bytes of a caption file, not the text as it is encoded. `text` is the latter;
    for `contents`, see `joined`.
    """
    own = [digest.of_bytes(item.text.encode())] if item.text else []
    return [joined(item, contents, former) for former in (*own, *former_digests(text))]


class Contents:
    """Digests of the inputs of a dataset's targets; captions count by their text as encoded.

    A file is read at most once, and only if its stat is new. Image sizes are looked up by the
    digest of the file, in the memo or in the header of a target that was made from it.

    Args:
        files: files that may be read; the memo is asked about all of them at once.
        memo: index of files that were read earlier; it gets new entries.
        settings: the dataset's section of the configuration; None for prompts.

    Attributes:
        unreadable: stem -> fault of an input that was read and cannot be used.
    """

    def __init__(self, files: Iterable[File], memo: Memo, settings: Dataset | None) -> None:
        texts, others = set[str](), set[str]()
        for file in files:
            (texts if file.role in _TEXTS else others).add(file.path)
        self.unreadable: dict[str, Fault] = {}
        self._memo, self._settings = memo, settings
        self._upright = settings is not None and settings.exif_rotation
        # Path -> stat with which the file was read, and its text or, for an image, its digest.
        self._texts, self._digests = memo.texts.look_up(texts), memo.sources.look_up(others)
        # (Size in bytes, property, its value) -> digests of files in the memo that have both.
        self._lookalikes: dict[tuple[int, str, int], set[str]] = {}
        self._sizes: dict[str, Size] = {}

    # -- digests ------------------------------------------------------------------------------

    def of(self, item: Item) -> str | None:
        """Return the digest of an item's inputs; None if they cannot be read."""
        try:
            return joined(item, [*map(self._file, item.read)])
        except SourceError as error:
            self.unreadable[item.stem] = fault_of(item, error)
            return None

    def known_digest(self, item: Item) -> str | None:
        """Return the digest of inputs that are one unchanged file, without reading it; or None."""
        if item.texts is not None or len(item.files) != 1:
            return None
        (file,) = item.files
        value = None if file.role == MADE else self._cached(file)
        if value is None or file.role != CAPTION:
            return value
        return digest.of_bytes(encoded(value).encode())

    def text(self, item: Item) -> str:
        """Return the text of an item's inputs as it is encoded; raises SourceError."""
        if item.awaits_caption:
            hint = "`latentmake build captions_{run}` makes it"
            raise SourceError(
                "has no caption yet, a captioner makes it", where=item.where, hint=hint
            )
        caption = item.file(CAPTION)
        return encoded(item.text or "") if caption is None else self._caption(caption)

    def lacks(self, item: Item, tokens: Collection[str]) -> bool:
        """Whether the text of an item's inputs is readable and contains none of these tokens."""
        try:
            text = self.text(item)
        except SourceError:  # the job that encodes it reports the error
            return False
        return not any(token in text for token in tokens)

    def formerly(self, item: Item) -> list[str]:
        """Return digests that caches of releases before 0.3 may hold for the same text."""
        return formerly(item, self.text(item), [*map(self._file, item.read)])

    def read(self, file: File) -> str:
        """Return the text of a file of captions or tags as it is written; raises SourceError."""
        if (text := self._cached(file)) is None:
            text = read_made(file.path) if file.role == MADE else read_text(file.path)
            self.learn(file, text)
        return text

    def _caption(self, file: File) -> str:
        return caption_of(self.read(file), file.path, self._settings)

    def _cached(self, file: File) -> str | None:
        """Return the digest of an image, or the text of another file; None if its stat is new."""
        entry = (self._texts if file.role in _TEXTS else self._digests).get(file.path)
        return entry[1] if entry is not None and entry[0] == file.stat else None

    def learn(self, file: File, value: str) -> None:
        """Remember the text of a file, or the digest of an image."""
        entries, memo = self._digests, self._memo.sources
        if file.role in _TEXTS:
            entries, memo = self._texts, self._memo.texts
        entries[file.path] = (file.stat, value)
        memo.learn(file.path, file.stat, value)

    def fetch(self, files: Iterable[File]) -> None:
        """Read new and changed files at URLs, several at a time."""
        from latentmake.data import remote

        remote_files = {file.path: file for file in files if is_remote(file.path)}
        new = {path: file for path, file in remote_files.items() if self._cached(file) is None}

        def value(data: bytes, path: str) -> str:
            return decode_text(data, path) if new[path].role == CAPTION else digest.of_bytes(data)

        for path, content in zip(new, remote.contents([*new], value), strict=True):
            if content is not None:  # else `_file` reads it again and reports the error
                self.learn(new[path], content)

    def _file(self, file: File) -> str:
        role, path, stat = file
        if role == CAPTION:
            return digest.of_bytes(self._caption(file).encode())
        if (content := self._cached(file)) is not None:
            return content
        if self._settings is None or not self._settings.video:
            check_length(path, stat.size)
        try:
            if is_remote(path):
                from latentmake.data import remote

                content = digest.of_bytes(remote.read(path)[0])
            else:
                content = digest.of_file(Path(path))
        except OSError as error:
            raise unreadable(error, path) from None
        self.learn(file, content)
        return content

    # -- sizes of images ----------------------------------------------------------------------

    def prepare_sizes(self, contents: Iterable[str]) -> None:
        """Look up the sizes of images by their digests, in one query."""
        self._sizes |= self._memo.pictures(contents, upright=self._upright)

    def size(self, item: Item, content: str, header: Header | None = None) -> Size | None:
        """Return the size of an item's image or video, or None if it is not known.

        Args:
            item: item or inputs.
            content: digest of the image.
            header: header of a target that may be made from the image.
        """
        if item.media is not None:
            return Size(item.media.width, item.media.height)
        size = self._sizes.get(content)
        if size is None and header and header.picture and header.source == content:
            width, height, upright = header.picture
            if upright == self._upright:
                size = self._sizes[content] = Size(width, height)
        return size

    # -- presumptions -------------------------------------------------------------------------

    def prepare_presumed(self, items: Iterable[Item]) -> None:
        """Look up in the memo, in few queries, the data that `presumed` needs for these inputs."""
        wanted = list(items)
        files = [file for item in wanted for file in item.read]
        changed = (file for file in files if self._digests.get(file.path, (None,))[0] != file.stat)
        sizes = {file.stat.size for file in changed}
        for _, stat, content in self._memo.sources.where("size", sizes):
            for kind, number in (("inode", stat.inode), ("mtime", stat.mtime_ns), ("", 0)):
                self._lookalikes.setdefault((stat.size, kind, number), set()).add(content)
        if self._settings is not None and self._settings.remote:
            captions = (file for file in files if file.role == CAPTION and is_remote(file.path))
            self._prepare_remote_texts(captions)
        self.prepare_sizes({content for item in wanted for content in self.presumed(item)})

    def _prepare_remote_texts(self, captions: Iterable[File]) -> None:
        """Look up texts in the memo that are as long as those of these captions that are unread."""
        sizes: dict[str, set[int]] = {}
        for file in captions:
            if self._cached(file) is None:
                sizes.setdefault("/".join(file.path.split("/", 3)[:3]), set()).add(file.stat.size)
        for bucket, wanted in sizes.items():
            for path, ((size, *_), text) in self._memo.texts.below(bucket).items():
                if size in wanted:
                    content = digest.of_bytes(encoded(text).encode())
                    # The same file name: its folder was renamed. Any name: the file was.
                    for like in (Path(path).name, CAPTION):
                        self._lookalikes.setdefault((size, like, 0), set()).add(content)

    def presumed(self, item: Item) -> list[str]:
        """Guess digests of inputs, to find targets that can be used again.

        The job that links such a target reads the inputs and verifies the guess.
        """
        guesses = [self._presumed(file) for file in item.read]
        combinations = [[*contents] for contents in islice(product(*guesses), _MOST_PRESUMED)]
        digests = [joined(item, contents) for contents in combinations]
        caption = item.file(CAPTION)
        is_here = caption and not (is_remote(caption.path) and self._cached(caption) is None)
        if combinations and (item.text is not None or is_here):
            with contextlib.suppress(SourceError):
                text = self.text(item)
                for contents in combinations:
                    digests += formerly(item, text, contents)[:_MOST_FORMER]
        return [*dict.fromkeys(digests)]

    def _presumed(self, file: File) -> list[str]:
        """Return the digest of a small file, or guess the digests of a large one.

        A large file is read only if the memo is new. Else it is presumed to equal one or two files
        in the memo of the same size: those with the same inode (it was renamed), else those with
        the same mtime (it was copied), else any.
        """
        role, path, stat = file
        if role == MADE:
            return []  # a captioner makes it first
        is_known = self._cached(file) is not None
        if is_known or ((stat.size <= _SMALL or self._memo.is_new) and not is_remote(path)):
            with contextlib.suppress(SourceError):  # the job that encodes it reports the error
                return [self._file(file)]
            return []
        if role == CAPTION:
            entry = self._texts.get(path)
            if entry is not None and entry[0][0] == stat.size:  # deleted and restored
                return [digest.of_bytes(encoded(entry[1]).encode())]
            likes = (Path(path).name, CAPTION)
            alike = [sorted(self._lookalikes.get((stat.size, like, 0), ())) for like in likes]
            return [*dict.fromkeys(chain(*alike))][:_MOST_LOOKALIKES]
        for like in (("inode", stat.inode), ("mtime", stat.mtime_ns), ("", 0)):
            contents = self._lookalikes.get((stat.size, *like), ())
            if 0 < len(contents) <= _MOST_LOOKALIKES:
                return sorted(contents)
        return []
