"""Keys that targets need today: digests of sources, and what is done to them."""

from __future__ import annotations

import contextlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

from latentmake import digest
from latentmake.config.datasets import Dataset
from latentmake.errors import SourceError
from latentmake.files.cachefile import Header, target_key
from latentmake.files.media import Media
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import AnyClip, Span
from latentmake.index.memo import Memo, SourceStat
from latentmake.layouts import Layout, beside, kind_of, size_of
from latentmake.sources import s3
from latentmake.sources.caption_pipeline import newlines

UNKNOWN = ""
"""Digest of the recipe of a model that lies on another machine."""

_SMALL = 16_384  # bytes; files up to this size are read rather than presumed: captions
_ALIKE = 2  # known files that an unknown one is presumed to equal
_MOST_PRESUMED = 16  # digests that a source of several unknown files is presumed to have


class Source(NamedTuple):
    """Source of a target.

    Attributes:
        path: the image or caption file; None where `text` replaces it.
        controls: the control images, or the control video.
        media: size and length of an image or video, where the layout's names contain them.
        span: the part of a video that its clips are counted in; None stands for all of it.
        layers: further target images.
        control_sizes: of the control images, where what is done to them depends on these.
        image: of a text that depends on controls, the image whose bucket they are brought to.
        former: of a caption that an earlier release read otherwise, the source as it read it.
    """

    stem: str
    path: str | None
    stat: SourceStat | None
    text: str | None = None
    controls: tuple[str, ...] = ()
    control_stats: tuple[SourceStat, ...] = ()
    media: Media | None = None
    span: Span | None = None
    layers: tuple[str, ...] = ()
    layer_stats: tuple[SourceStat, ...] = ()
    control_sizes: tuple[Size, ...] = ()
    image: str | None = None
    former: Source | None = None

    @property
    def files(self) -> list[tuple[str, SourceStat]]:
        """All its files."""
        own = [] if self.path is None or self.stat is None else [(self.path, self.stat)]
        paths, stats = (*self.controls, *self.layers), (*self.control_stats, *self.layer_stats)
        return [*own, *zip(paths, stats, strict=True)]


def resolution_of(part: str, source: Source) -> Size | None:
    """Return the resolution that shapes a target; None for a text without controls."""
    return size_of(part) if source.image is None else beside(part)


def joined(content: str, controls: Sequence[str], layers: Sequence[str] = ()) -> str:
    """Return the digest of a source, from those of its file or text, its controls and layers."""
    if not controls and not layers:
        return content
    return digest.of_lines([content, *controls, *(["layers", *layers] if layers else [])])


def _of_text(source: Source) -> str:
    return digest.of_bytes((source.text or "").encode())


def _joined(source: Source, contents: Sequence[str]) -> str:
    """Return the digest of a source, from those of its file or text, its controls and layers."""
    last = 1 + len(source.controls)
    return joined(contents[0], contents[1:last], contents[last:])


def unreadable(path: str, error: OSError) -> SourceError:
    """Return the fault of a source that cannot be read."""
    what = f"cannot be read ({error.strerror})"
    return SourceError(what, where=path, hint="check that the file exists and is readable")


class Keys:
    """Keys of the targets of one dataset and model.

    A source is read at most once, and only if its stat is new. What is done to an image depends on
    its size, which the memo knows by the image's digest; so does the header of a target made of it.

    Attributes:
        recipes: part -> digest of its recipe, or `UNKNOWN`.
        unreadable: stem -> fault of a source that had to be read and cannot be.

    Args:
        settings: the dataset's section of the configuration; None for prompts.
        known: path -> stat and digest of sources and control images.
    """

    def __init__(
        self,
        memo: Memo,
        layout: Layout,
        settings: Dataset | None,
        recipes: Mapping[str, str],
        known: dict[str, tuple[SourceStat, str]] | None = None,
    ) -> None:
        self.recipes = recipes
        self.unreadable: dict[str, SourceError] = {}
        self._memo = memo
        self._layout = layout
        self._settings = settings
        self._upright = settings is not None and settings.exif_rotation
        self._known = {} if known is None else known
        self._alike: dict[tuple[int, str, int], set[str]] = {}
        self._lost: dict[str, SourceError] = {}
        self._sizes: dict[str, Size] = {}

    # -- digests of sources -------------------------------------------------------------------

    def content(self, source: Source) -> str | None:
        """Return a source's digest; None where it cannot be read, see `unreadable`."""
        try:
            found = [self._file(path, stat) for path, stat in source.files]
            if source.path is None:
                found.insert(0, _of_text(source))
            return _joined(source, found)
        except SourceError as error:
            self.unreadable[source.stem] = error
            return None

    def is_former(self, source: Source, found: str) -> bool:
        """Whether the digest in a header is of the text as an earlier release read it."""
        if source.former is None:
            return False
        same = {key: getattr(source, key) for key in ("controls", "control_stats")}
        return self.content(source.former._replace(**same)) == found

    def with_line_ends(self, source: Source, content: str, found: str) -> str:
        """Return a text's digest, or the one found in a header if only line ends differ.

        A byte order mark does not count either.
        """
        if source.path is None or content == found or s3.is_remote(source.path):
            return content
        try:
            text = newlines(Path(source.path).read_bytes().decode("utf-8-sig")).encode()
            others = [self._file(path, stat) for path, stat in source.files[1:]]
        except (OSError, UnicodeDecodeError, SourceError):
            return content
        forms = product((b"", BOM_UTF8), (text, text.replace(b"\n", b"\r\n")))
        same = (_joined(source, [digest.of_bytes(b"".join(each)), *others]) for each in forms)
        return found if found in same else content

    def known_content(self, source: Source) -> str | None:
        """Return the digest of a source of one file, if it is known without reading."""
        found = self._known.get(source.path or "")
        if found is None or found[0] != source.stat or len(source.files) > 1:
            return None
        return found[1]

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
        """Read the objects on S3 whose stats are new, many at a time."""
        new = [each for each in files if self._known.get(each[0], (None,))[0] != each[1]]
        for (path, listed), read in zip(new, s3.digests(new), strict=True):
            if isinstance(read, SourceError):
                self._lost[path] = read
                continue
            content, stat = read
            self._known[path] = (listed, content)
            self._memo.sources.learn(path, stat, content)

    def _presumed(self, path: str, stat: SourceStat) -> list[str]:
        """Return the digests that a file may have, for a search that its job verifies.

        A large file is not read unless the memo is new: it is presumed to equal known ones of its
        size, or of its inode or mtime too if there are several (it was renamed or copied).
        """
        known = self._known.get(path)
        if known is not None and known[0] == stat:
            return [known[1]]
        if (stat.size <= _SMALL or self._memo.is_new) and not s3.is_remote(path):
            with contextlib.suppress(SourceError):  # which the job names
                return [self._file(path, stat)]
            return []
        for like in (("inode", stat.inode), ("mtime", stat.mtime_ns), ("", 0)):
            contents = self._alike.get((stat.size, *like), ())
            if 0 < len(contents) <= _ALIKE:
                return sorted(contents)
        return []

    def _presumed_contents(self, source: Source) -> list[str]:
        found = [self._presumed(path, stat) for path, stat in source.files]
        if source.path is None:
            found.insert(0, [_of_text(source)])
        return [_joined(source, each) for each in islice(product(*found), _MOST_PRESUMED)]

    # -- keys ---------------------------------------------------------------------------------

    def prepare_sizes(self, contents: Iterable[str]) -> None:
        """Look up the sizes of some images at once, by their digests."""
        self._sizes |= self._memo.pictures(contents, upright=self._upright)

    def variant(
        self,
        part: str,
        source: Source,
        content: str,
        clip: AnyClip | None,
        header: Header | None = None,
    ) -> str | None:
        """Return the variant of a target; None where it is unknown, or there can be none.

        Args:
            part: of the target.
            source: of the target.
            content: digest of the source.
            clip: frames of a video.
            header: of a file that may have been made of that content.
        """
        resolution, size = resolution_of(part, source), self._sizes.get(content)
        if resolution is None:
            size = Size(0, 0)
        elif source.media is not None:
            size = Size(source.media.width, source.media.height)
        elif size is None and header is not None and header.source == content:
            picture = header.picture
            if picture is not None and picture.upright == self._upright:
                size = self._sizes[content] = Size(picture.width, picture.height)
        if size is None:
            return None
        try:
            sizes = source.control_sizes
            if kind_of(part) == "text":
                return self._layout.text_variant(resolution, size, self._settings, sizes)
            turned = source.media.rotation if source.media else 0
            return self._layout.variant(
                resolution, size, self._settings, clip, source.span, turned, sizes
            )
        except SourceError:  # which the job names
            return None

    def prepare_presumed(self, sources: Iterable[Source]) -> None:
        """Look up at once what `presumed` needs of some sources."""
        wanted = list(sources)
        sizes = {
            stat.size
            for source in wanted
            for path, stat in source.files
            if self._known.get(path, (None,))[0] != stat
        }
        for _, stat, content in self._memo.sources.where("size", sizes):
            for kind, number in (("inode", stat.inode), ("mtime", stat.mtime_ns), ("", 0)):
                self._alike.setdefault((stat.size, kind, number), set()).add(content)
        self.prepare_sizes({each for source in wanted for each in self._presumed_contents(source)})

    def presumed(self, part: str, source: Source, clip: AnyClip | None) -> list[str]:
        """Return the keys that a target may have: usually one, none where nothing is known."""
        found = []
        for content in self._presumed_contents(source):
            variant = self.variant(part, source, content, clip)
            if variant is not None:
                found.append(target_key(content, self.recipes[part], variant))
        return found
