"""An item: one image, or one clip of a video, with its caption, as files and their stats."""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import PlainSerializer

from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Media, Span
from latentmake.index.memo import SourceStat
from latentmake.layouts import DROPPED, kind_of, text_of

IMAGE_EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif"}
)
IMAGE, CAPTION, TAGS, CONTROL, LAYER = "image", "caption", "tags", "control", "layer"
"""Roles of files. An image is the image or video that an item is named by."""
BUCKET = "bucket"
"""Role of the image in whose bucket the controls of a text are put; its content does not count."""

_MAIN = (IMAGE, CAPTION)
_OF_LATENTS = (IMAGE, CONTROL, LAYER)
_NO_STAT = SourceStat(0, 0, 0, 0)
_SHOWN = 60  # characters of a text in messages


class Row(NamedTuple):
    """One row.

    Attributes:
        line: number of its line, or of the object in a JSON list, from 1.
        path: absolute, or below the list's folder.
        caption: None where the row has none.
        tags: likewise.
        others: the columns that mean nothing here.
        first: index of the first frame.
        frames: length of the one clip that the row is.
        stride: every n-th frame is used; None: as the dataset says.
        start: seconds from the beginning of the video.
        end: likewise.
        relative: whether the path was given so, and may be that from the working directory.
    """

    line: int
    path: str
    caption: str | None
    tags: str | None
    others: dict[str, Any]
    first: int | None = None
    frames: int | None = None
    stride: int | None = None
    start: float | None = None
    end: float | None = None
    relative: bool = False

    @property
    def suffix(self) -> str:
        """The part of an item's name for the part of the video: `.f120-81x2`, `.s60-75.5`."""
        found = ""
        if self.start is not None or self.end is not None:
            end = "" if self.end is None else f"-{self.end:g}"
            found = f".s{self.start or 0:g}{end}"
            found += f".{self.frames}" if self.frames else ""
        elif self.first or self.frames:
            found = f".f{self.first or 0}" + (f"-{self.frames}" if self.frames else "")
        stride = self.stride or 1
        return found + (f"{'' if found else '.'}x{stride}" if stride > 1 else "")

    def span(self, stride: int) -> Span:
        """Return the part of the video as far as it is given in frames.

        `stride` is used where the row has none.
        """
        single = self.frames is not None
        return Span(self.first or 0, self.frames, self.stride or stride, single)


class File(NamedTuple):
    """A file of an item; in an order without its stat, so that it is the same in a copy."""

    role: str
    path: str
    stat: Annotated[SourceStat, PlainSerializer(lambda _: _NO_STAT)]


class Item(NamedTuple):
    """One image or video with its caption; or, of these, the inputs of some of its targets.

    Attributes:
        stem: path below the dataset, without the last ending; names the item.
        files: its image or video first, then its caption, tags, controls and layers, if any.
        texts: the variants of its text; None where it is the content of the caption file.
        media: size and length of the image or video, where the layout's names need them.
        span: the part of a video that its clips are cut from; None stands for all of it.
        row: the other columns of its row, where the dataset is a list.
        control_sizes: of its controls, where what is done to them depends on these.
        place: list and line of its row.
        window: the part of a video in seconds, from which its span is computed when it is probed.
    """

    stem: str
    files: tuple[File, ...] = ()
    texts: list[str] | None = None
    media: Media | None = None
    span: Span | None = None
    row: dict[str, Any] | None = None
    control_sizes: tuple[Size, ...] = ()
    place: str | None = None
    window: tuple[float, float | None] | None = None

    def file(self, *roles: str) -> File | None:
        """Return its first file of some roles."""
        return next((each for each in self.files if each.role in roles), None)

    def paths(self, role: str) -> tuple[str, ...]:
        """Return the paths of its files of a role."""
        return tuple(each.path for each in self.files if each.role == role)

    @property
    def image(self) -> str:
        """Path of its image or video."""
        found = self.file(IMAGE, BUCKET)
        assert found is not None
        return found.path

    @property
    def caption(self) -> str | None:
        """Path of its caption; None stands for the empty caption."""
        found = self.file(CAPTION)
        return found and found.path

    @property
    def controls(self) -> tuple[str, ...]:
        """Paths of its control images, or of its control video."""
        return self.paths(CONTROL)

    @property
    def layers(self) -> tuple[str, ...]:
        """Paths of its further target images."""
        return self.paths(LAYER)

    @property
    def where(self) -> str:
        """Its file in messages, with the line of its list."""
        return self.image if self.place is None else f"{self.place}: {self.image}"

    # -- inputs of targets --------------------------------------------------------------------

    def inputs(self, part: str, *, controlled_text: bool = False) -> Item:
        """Return the item with the files and the text that its targets of a part are made of.

        Args:
            part: name of the part; all parts of latents have the same inputs.
            controlled_text: whether text depends on control images.
        """
        if kind_of(part) == "latents":
            files = tuple(each for each in self.files if each.role in _OF_LATENTS)
            return Item(
                self.stem, files, None, self.media, self.span, control_sizes=self.control_sizes
            )
        found = Item(self.stem, *self._text(text_of(part)))
        if not controlled_text or not self.controls:
            return found
        controls = tuple(each for each in self.files if each.role == CONTROL)
        image = self.files[0]._replace(role=BUCKET)
        return found._replace(
            files=(*found.files, *controls, image),
            media=self.media,
            control_sizes=self.control_sizes,
        )

    def _text(self, name: str) -> tuple[tuple[File, ...], list[str] | None]:
        """Return the caption file, or the text of a name among several."""
        if self.texts is not None:
            number = int(name.partition(".")[2] or 0) if name != DROPPED else 0
            return (), ["" if name == DROPPED else self.texts[number]]
        files = tuple(each for each in self.files if each.role == CAPTION)
        return files, None if files else [""]

    @property
    def read(self) -> tuple[File, ...]:
        """Of inputs: the files whose content counts."""
        return tuple(each for each in self.files if each.role != BUCKET)

    @property
    def source(self) -> str | None:
        """Of inputs: path of the image, video or caption; None where `text` replaces it."""
        found = self.file(*_MAIN)
        return found and found.path

    @property
    def text(self) -> str | None:
        """Of inputs: the text, where that is not the content of a file."""
        return None if self.texts is None else self.texts[0]

    @property
    def name(self) -> str:
        """Of inputs: the source in messages: its file, or the beginning of the text."""
        if self.source is not None:
            return self.source
        text = self.text or ""
        dots = "..." * (len(text) > _SHOWN)
        return f"the text {text[:_SHOWN]!r}{dots}" if text else "the empty caption"


class Fault(NamedTuple):
    """A fault of one item or file."""

    path: str
    stem: str
    what: str
    hint: str

    @property
    def line(self) -> str:
        """The fault as one line."""
        return f"{self.path}: {self.what}; {self.hint}"


class Scan(NamedTuple):
    """All files below a dataset's folder, or objects of one on S3, with their stats.

    Attributes:
        root: the folder.
        entries: path below the root, then the stat's size, mtime_ns, ctime_ns and inode; a negative
            size stands for something that is not a file: a link that leads nowhere, a pipe, or a
            folder whose name has an ending. In no particular order. Of a list, all files that it
            names, by their paths as they are opened.
        fingerprint: digest of all that.
        rows: of a list; None of a folder.
        faults: of the other rows of a list.
        folders: of all files, the root first; empty stands for the root alone.
    """

    root: str
    entries: list[tuple[str, int, int, int, int]]
    fingerprint: str
    rows: Sequence[Row] | None = None
    faults: Sequence[Fault] = ()
    folders: tuple[str, ...] = ()

    @property
    def roots(self) -> tuple[str, ...]:
        """Folders below which all its files lie."""
        return self.folders or (self.root,)


def fingerprint(entries: Any) -> str:
    """Return a digest of a listing (tuples of text and whole numbers) in its order.

    A folder's order changes only when the folder does; otherwise nothing but time is lost.
    """
    # Version 2 of the marshal format depends on values alone, not on which objects are shared.
    return hashlib.sha256(marshal.dumps(entries, 2)).hexdigest()
