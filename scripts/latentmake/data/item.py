"""An item: one image, or one clip of a video, with its caption, as files and their stats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from stat import S_ISDIR
from typing import Annotated, Any, NamedTuple

from pydantic import PlainSerializer

from latentmake.digest import SourceStat
from latentmake.errors import SourceError, UserError
from latentmake.files.workspace import is_text
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Media, Span
from latentmake.layouts.layout import Layout, parsed


class Row(NamedTuple):
    """The file that a row names, its caption and tags as far as it has some, and other columns."""

    name: str
    caption: str | None
    tags: str | None
    others: dict[str, Any]
    captions: int = 1  # several where a list of captions became the lines of one
    place: str = ""  # its line, in a metadata file


IMAGE_EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif"}
)
PREVIEWS = (".img_sdvae.webp", ".img_sdxl.webp")
"""Endings of previews of latents, which ai-training's scripts write beside images."""
IMAGE, CAPTION, TAGS, CONTROL, LAYER = "image", "caption", "tags", "control", "layer"
"""Roles of files. An image is the image or video that an item is named by."""
BUCKET = "bucket"
"""Role of the image in whose bucket the controls of a text are put; its content does not count."""

Entry = tuple[str, int, int, int, int]
"""A file of a listing: path below the root, then size, mtime_ns, ctime_ns and inode."""

Window = tuple[float, float | None]
"""Begin and end of the part of a video, in seconds; None stands for its end."""

NO_FILE = SourceStat(-1, 0, 0, 0)
"""Stat of what is no file: missing, a folder, a pipe, or not to be read; see `missing_file`."""

_MOST_BYTES = 1_000_000  # of a text; a tokenizer takes hundreds of bytes for each
_OF_LATENTS = (IMAGE, CONTROL, LAYER)
_SOURCES = (IMAGE, BUCKET, CAPTION)
_NO_STAT = SourceStat(0, 0, 0, 0)
_LONGEST_STEM = 235  # bytes: 255 are a name's most, of which `.latents.safetensors` takes 20
_SHOWN = 60  # characters of a text in messages


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
        place: list and line of its row; of inputs that are a text alone, `where` of the item.
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
    window: Window | None = None

    def file(self, role: str) -> File | None:
        """Return its first file of a role."""
        return next((each for each in self.files if each.role == role), None)

    @property
    def image(self) -> str:
        """Path of its image or video."""
        return next(path for role, path, _ in self.files if role in (IMAGE, BUCKET))

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
        """Its file in messages, with the line of its list; of inputs the file they are made of."""
        file = next((path for role, path, _ in self.files if role in _SOURCES), "")
        return ": ".join(filter(None, (self.place, file)))

    def inputs(self, part: str, layout: Layout) -> Item:
        """Return the item with the files and the text that its targets of a part are made of.

        All parts of latents have the same.
        """
        if parsed(part).kind == "latents":
            files = tuple(each for each in self.files if each.role in _OF_LATENTS)
            sizes = self.control_sizes
            made = Item(self.stem, files, None, self.media, self.span, control_sizes=sizes)
            return made if self.place is None else made._replace(place=self.place)
        files, texts = (), self.texts
        if texts is None:
            files = tuple(each for each in self.files if each.role == CAPTION)
            texts = None if files else [""]
        else:
            texts = [texts[int(parsed(part).text.partition(".")[2] or 0)]]
        if not layout.controlled_text or not self.controls:
            return Item(self.stem, files, texts, place=None if files else self.where)
        controls = (each for each in self.files if each.role == CONTROL)
        files = (*files, *controls, self.files[0]._replace(role=BUCKET))
        return Item(self.stem, files, texts, self.media, control_sizes=self.control_sizes)

    @property
    def read(self) -> tuple[File, ...]:
        """Of inputs: the files whose content counts."""
        return tuple(each for each in self.files if each.role != BUCKET)

    @property
    def source(self) -> str | None:
        """Of inputs: path of the image, video or caption; None where `text` replaces it."""
        return next((path for role, path, _ in self.files if role in (IMAGE, CAPTION)), None)

    @property
    def text(self) -> str | None:
        """Of inputs: the text, where that is not the content of a file."""
        return None if self.texts is None else self.texts[0]

    @property
    def name(self) -> str:
        """Of inputs: the source in messages: its file, and the beginning of a text without one."""
        if self.source is not None:
            return self.where
        text = self.text or ""
        dots = "..." * (len(text) > _SHOWN)
        shown = f"the text {text[:_SHOWN]!r}{dots}" if text else "the empty caption"
        return ": ".join(filter(None, (self.where, shown)))


class Fault(NamedTuple):
    """A fault of one item or file, which `path` names."""

    path: str
    stem: str
    what: str
    hint: str

    @property
    def line(self) -> str:
        """The fault as one line."""
        return str(SourceError(self.what, where=self.path, hint=self.hint))


def fault_of(item: Item, error: UserError) -> Fault:
    """Return the fault of an item: it names the item where the error names no other file."""
    where = item.name if error.where in ("", item.source) else error.where
    return Fault(where, item.stem, error.what, error.hint)


class Scan(NamedTuple):
    """The files of a dataset with their stats: of a folder on a disk or at a URL, or of a list.

    Attributes:
        root: the folder, or that of the list.
        entries: its files in no particular order, with `NO_FILE` for what is no file. Of a list,
            all files that it names, by their paths as they are opened.
        fingerprint: digest of all that.
        items: of a list; None of a folder, whose items are made by `folders.items`.
        faults: of the other rows of a list.
        rows: those of a list with caption or tags, by the stems of their items.
    """

    root: str
    entries: list[Entry]
    fingerprint: str
    items: list[Item] | None = None
    faults: Sequence[Fault] = ()
    rows: Mapping[str, Row] = {}


def broken_link(path: str) -> str | None:
    """Return the link that leads nowhere on the way to a path, which may be the path itself."""
    way = (each for each in (Path(path), *Path(path).parents) if each.is_symlink())
    return next((str(each) for each in way if not each.exists()), None)


def missing_file(path: str) -> str:
    """Return why the stat of a path is `NO_FILE`."""
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
    """Return why caches cannot be named after a file; None where they can."""
    if len(path) <= _LONGEST_STEM and path.isascii() and path.isprintable() and "/" not in path:
        return None
    *folders, name = path.split("/")
    stem = name.rpartition(".")[0]
    if len(stem.encode("utf-8", "surrogateescape")) > _LONGEST_STEM:
        return "has a name too long for its cache file"
    if any(ord(character) < 32 for character in path):
        return "has a control character in its name"
    if any(not each or len(each.encode("utf-8", "replace")) > 255 for each in folders):
        return "has a folder in its name that no disk can have"  # an object's may
    return None if is_text(path) else "has a name that is not UTF-8"


def text_fault(text: str) -> str | None:
    """Return why a text cannot be a caption; None where it can."""
    if "\0" in text:
        return "holds NUL characters (is it UTF-16?)"
    if len(text.encode("utf-8", "surrogatepass")) > _MOST_BYTES:
        return f"is longer than {_MOST_BYTES} bytes"
    return None
