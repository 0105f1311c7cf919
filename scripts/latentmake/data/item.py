"""`Item`: one image or video with its caption, as files and their stats; and parts of items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from stat import S_ISDIR
from typing import Annotated, Any, NamedTuple

from pydantic import PlainSerializer

from latentmake.base.digest import SourceStat
from latentmake.base.errors import SourceError, UserError
from latentmake.base.paths import is_remote, is_text
from latentmake.formats.endings import NPZ
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Media, SourceFps, Span, kept_indices
from latentmake.layouts.layout import CAPTIONS, Layout, kind_of


class Row(NamedTuple):
    """Row of a list or metadata file.

    Attributes:
        name: name of the image or video, as written.
        caption: caption; None if the row has none.
        tags: tags; None if the row has none.
        others: other columns.
        captions: number of captions; if it is several, they are the lines of `caption`.
        place: file and line of the row, for messages; only in a metadata file.
    """

    name: str
    caption: str | None
    tags: str | None
    others: dict[str, Any]
    captions: int = 1
    place: str = ""


IMAGE, CAPTION, TAGS, CONTROL, LAYER = "image", "caption", "tags", "control", "layer"
"""Roles of an item's files. `IMAGE` is the image or video that gives the item its name."""
MADE = "made"
"""Role of a caption that a captioner makes, because nobody has written one."""
BUCKET = "bucket"
"""Role of an item's image in the inputs of a text with controls.

The controls are scaled to the bucket of this image. Its content is not part of the inputs.
"""

NAMED = "named"
"""Role of an item's image in the inputs of a text that a captioner makes: only its path counts."""

Entry = tuple[str, int, int, int, int]
"""File of a listing: path below the root, then size, mtime_ns, ctime_ns and inode."""

Window = tuple[float, float | None]
"""Begin and end of a part of a video, in seconds; None stands for the end of the video."""

NO_FILE = SourceStat(-1, 0, 0, 0)
"""Stat of a path that is not a readable file: missing, a folder, a pipe; see `missing_file`."""

_LARGEST_TEXT = 1_000_000  # bytes; a tokenizer needs hundreds of times this memory
_LATENTS_ROLES = (IMAGE, CONTROL, LAYER)
_SOURCE_ROLES = (IMAGE, BUCKET, NAMED, CAPTION)
_NO_STAT = SourceStat(0, 0, 0, 0)
_LONGEST_STEM = 235  # bytes: a name has at most 255, of which `.latents.safetensors` takes 20
_SHOWN = 60  # characters of a text that a message repeats


class File(NamedTuple):
    """File of an item.

    Orders contain it without its stat, so that a copy of the files gives the same order.
    """

    role: str
    path: str
    stat: Annotated[SourceStat, PlainSerializer(lambda _: _NO_STAT)]


class Item(NamedTuple):
    """One image or video with its caption; or the inputs of its targets (see `inputs`).

    Inputs have the same type, and contain the files and the text that some targets of the item are
    made from.

    Attributes:
        stem: name of the item: its path below the dataset, without the last ending.
        files: image or video, then caption, tags, controls, layers and made captions, if any.
        texts: variants of the text; None if the text is the content of the caption file, or if a
            captioner has not made it yet.
        media: size and length of the image or video, if names in the layout need them.
        span: part of the video that clips are cut from; None for the complete video.
        row: other columns of its row, if the dataset is a list.
        control_sizes: sizes of the controls, if their scaling depends on them.
        place: list and line of its row. Inputs that are only a text have the item's `where` here.
        window: part of the video in seconds; probing the video turns it into `span`.
    """

    stem: str
    files: tuple[File, ...] = ()
    texts: list[str] | None = None
    media: Media | None = None
    span: Span | None = None
    row: dict[str, Any] | None = None
    control_sizes: tuple[Size, ...] = ()
    place: str | None = None
    window: Window | None = None

    def file(self, role: str) -> File | None:
        """Return its first file of a role."""
        return next((file for file in self.files if file.role == role), None)

    @property
    def is_array(self) -> bool:
        """Whether its clip is stored as an array of frames."""
        return self.image.lower().endswith(NPZ)

    @property
    def image(self) -> str:
        """Path of its image or video."""
        return next(path for role, path, _ in self.files if role in (IMAGE, BUCKET, NAMED))

    @property
    def is_remote(self) -> bool:
        """Whether its image or video is at a URL."""
        return is_remote(self.image)

    @property
    def caption(self) -> str | None:
        """Path of its caption; None stands for the empty caption."""
        return next((path for role, path, _ in self.files if role == CAPTION), None)

    @property
    def controls(self) -> tuple[str, ...]:
        """Paths of its control images, or of its control video."""
        return tuple(path for role, path, _ in self.files if role == CONTROL)

    @property
    def layers(self) -> tuple[str, ...]:
        """Paths of its further target images."""
        return tuple(path for role, path, _ in self.files if role == LAYER)

    @property
    def where(self) -> str:
        """Name of its file in messages, with the line of its list, if any."""
        file = next((path for role, path, _ in self.files if role in _SOURCE_ROLES), "")
        return ": ".join(filter(None, (self.place, file)))

    def inputs(self, part: str, layout: Layout) -> Item:
        """Return the inputs of a part: the files and the text that its targets are made from.

        All parts of latents have the same inputs.
        """
        if (kind := kind_of(part)) == CAPTIONS:
            files = tuple(file for file in self.files if file.role == IMAGE)
            return Item(self.stem, files, span=self.span, place=self.place, window=self.window)
        if kind == "latents":
            files = tuple([file for file in self.files if file.role in _LATENTS_ROLES])
            sizes, place = self.control_sizes, self.place
            return Item(self.stem, files, None, self.media, self.span, None, sizes, place)
        files, texts = (), self.texts
        if texts is None:
            files = tuple([file for file in self.files if file.role in (CAPTION, MADE)])
            texts = None if files else [""]
            if self.awaits_caption:
                files = (self.files[0]._replace(role=NAMED), *files)
        else:
            number = part.partition("@")[0].partition(".")[2]
            texts = [texts[int(number or 0)]]
        if not layout.controlled_text or not self.controls:
            return Item(self.stem, files, texts, place=None if files else self.where)
        controls = (file for file in self.files if file.role == CONTROL)
        files = (*files, *controls, self.files[0]._replace(role=BUCKET))
        return Item(self.stem, files, texts, self.media, control_sizes=self.control_sizes)

    @property
    def made(self) -> tuple[File, ...]:
        """Its made captions, in the order of the dataset's captioners."""
        return tuple(file for file in self.files if file.role == MADE)

    @property
    def captioners(self) -> list[str]:
        """Names of the captioners that make its caption; none if a person wrote it."""
        return [file.path.split("/", 4)[3] for file in self.made]

    def indices(self, source_fps: SourceFps, rate: float) -> list[int]:
        """Return the indices, in the item's file, of the frames that the item uses."""
        assert self.media is not None
        frames, timing = self.media.frames, self.media.timing
        kept = kept_indices(frames, source_fps, self.span or Span(), timing, rate)
        return [index for index, _ in kept]

    @property
    def awaits_caption(self) -> bool:
        """Whether a captioner must make the item's text, or make it again, before it is known."""
        return self.texts is None and MADE in [file.role for file in self.files]

    @property
    def read(self) -> tuple[File, ...]:
        """Files of inputs whose content counts."""
        return tuple(file for file in self.files if file.role not in (BUCKET, NAMED))

    @property
    def source(self) -> str | None:
        """Path of the image, video or caption of inputs; None if they have a `text` instead."""
        return next((path for role, path, _ in self.files if role in (IMAGE, CAPTION)), None)

    @property
    def text(self) -> str | None:
        """Text of inputs; None if it is the content of a file."""
        return None if self.texts is None else self.texts[0]

    @property
    def name(self) -> str:
        """Name of inputs in messages: their file, or the beginning of a text without a file."""
        if self.source is not None:
            return self.where
        text = self.text or ""
        dots = "..." if len(text) > _SHOWN else ""
        shown = f"the text {text[:_SHOWN]!r}{dots}" if text else "the empty caption"
        return ": ".join(filter(None, (self.where, shown)))


class Fault(NamedTuple):
    """Fault of one item or file.

    Attributes:
        path: file or item, as messages name it.
        stem: stem of the item.
        what: predicate, such as `has no caption file`.
        hint: way to repair it.
    """

    path: str
    stem: str
    what: str
    hint: str

    @property
    def line(self) -> str:
        """The fault as one line."""
        return str(SourceError(self.what, where=self.path, hint=self.hint))


def fault_of(item: Item, error: UserError) -> Fault:
    """Turn an error into a fault of an item, which names the file of the error, if any."""
    where = item.name if error.where in ("", item.source) else error.where
    return Fault(where, item.stem, error.what, error.hint)


class Scan(NamedTuple):
    """Listing of a dataset: files with their stats, of a folder on disk, at a URL, or of a list.

    Attributes:
        root: folder of the dataset, or the folder that holds the list.
        entries: files in no particular order; other paths have the stat `NO_FILE`. For a list, all
            files that it names, with their paths as they are opened.
        fingerprint: digest of the entries and, for a folder, the stat of the metadata file.
        items: items of a list; None for a folder, whose items `folders.items` makes.
        faults: faults of rows of a list.
        rows: stem -> row, for rows of a list with a caption or tags.
    """

    root: str
    entries: list[Entry]
    fingerprint: str
    items: list[Item] | None = None
    faults: Sequence[Fault] = ()
    rows: Mapping[str, Row] = {}


def broken_link(path: str) -> str | None:
    """Return the broken link among a path and its parent folders; None if there is none."""
    links = (place for place in (Path(path), *Path(path).parents) if place.is_symlink())
    return next((str(place) for place in links if not place.exists()), None)


def missing_file(path: str) -> str:
    """Return the reason why a path has the stat `NO_FILE`, as a predicate."""
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        link = broken_link(path)
        if link == path:
            return "is a link that leads nowhere"
        return f"lies behind {link}, a link that leads nowhere" if link else "does not exist"
    except OSError as error:  # no permission, a name too long, links in a circle
        return f"cannot be read ({error.strerror})"
    return "is a folder" if S_ISDIR(mode) else "is a pipe, a socket or a device and no file"


def unusable_name(path: str) -> str | None:
    """Return the reason why caches cannot be named after a file; None if they can."""
    if len(path) <= _LONGEST_STEM and path.isascii() and path.isprintable() and "/" not in path:
        return None
    *folders, name = path.split("/")
    stem = name.rpartition(".")[0]
    if len(stem.encode("utf-8", "surrogateescape")) > _LONGEST_STEM:
        return "has a name too long for its cache file"
    if any(ord(character) < 32 for character in path):
        return "has a control character in its name"
    if any(not folder or len(folder.encode("utf-8", "replace")) > 255 for folder in folders):
        return "has a folder in its name that no disk can have"  # names of objects at a URL may
    return None if is_text(path) else "has a name that is not UTF-8"


def text_fault(text: str) -> str | None:
    """Return the reason why a text cannot be a caption; None if it can."""
    if "\0" in text:
        return "holds NUL characters (is it UTF-16?)"
    if len(text.encode("utf-8", "surrogatepass")) > _LARGEST_TEXT:
        return f"is longer than {_LARGEST_TEXT} bytes"
    return None
