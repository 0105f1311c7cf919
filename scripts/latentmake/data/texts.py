"""Texts of a dataset's items, from caption files, files of tags and a metadata file.

For datasets whose texts are not just their caption files. Each file is read once: the memo keeps
its text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

from latentmake.config.datasets import Captions, Dataset
from latentmake.data import remote
from latentmake.data.captions import clean, decode_text, newlines, variants
from latentmake.data.item import CAPTION, TAGS, Fault, File, Item
from latentmake.data.rows import Row
from latentmake.errors import SourceError
from latentmake.files.paths import is_remote
from latentmake.index.memo import Memo
from latentmake.progress import Progress

_Lines = Literal["all", "first", "drawn"]
"""Lines of a caption that count: all; the first, as in sd-scripts; each, of which one is drawn."""

_Read = Callable[[File | None], str]
"""Returns the text of a file; "" where there is none."""

_LOOKS_LONG = 1000  # files whose reading is worth a progress bar
_FOLDER = "{folder}"  # in a prefix: the name of the image's folder
_EMPTY_FIRST_LINE = (
    "has an empty first line, and sd-scripts reads only that",
    "remove the empty line, or set empty_caption: allow",
)


class Texts(NamedTuple):
    """Texts of a dataset's items.

    Attributes:
        found: stem -> the variants of the item's text.
        faults: what is wrong with the captions of the others.
        alike: stems of items that have fewer different variants than were asked for.
    """

    found: dict[str, list[str]]
    faults: list[Fault]
    alike: list[str]


def read_caption(path: str) -> str:
    """Return the caption in a file on disk or at a URL; a SourceError says why there is none."""
    return _read(path).strip()


def _read(path: str) -> str:
    try:
        data = remote.read(path)[0] if is_remote(path) else Path(path).read_bytes()
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise SourceError(what, where=path, hint="check the file's permissions") from None
    return decode_text(data, path)


def _reader(memo: Memo, roots: Sequence[str], items: Sequence[Item]) -> tuple[_Read, Progress]:
    """Return what reads the files of text of some items, each only if its stat is new."""
    files = {x.path: x.stat for item in items for x in item.files if x.role in (CAPTION, TAGS)}
    known = memo.texts.known(files, *roots)
    new = sum(known.get(path, (None,))[0] != stat for path, stat in files.items())
    progress = Progress(total=new, desc="captions", unit="file", disable=new < _LOOKS_LONG)

    def read(file: File | None) -> str:
        if file is None:
            return ""
        _, path, stat = file
        if (there := known.get(path)) is not None and there[0] == stat:
            return there[1]
        progress.update()
        text = _read(path)
        memo.texts.learn(path, stat, text)
        return text

    return read, progress


def _lines(text: str, which: _Lines) -> str:
    """Return the lines of a text that count."""
    if which == "all":
        return text.strip()
    return text.partition("\n")[0].strip() if which == "first" else clean(text)


def first_lines(
    settings: Dataset, roots: Sequence[str], items: Sequence[Item], memo: Memo
) -> tuple[list[Item], list[Fault]]:
    """Return items whose captions of several lines are replaced by their first lines, and faults.

    Source: `read_caption` of sd-scripts' library/train_util.py, where wildcards are not enabled.
    """
    found, faults = [], []
    read, progress = _reader(memo, roots, items)
    with progress:
        for item in items:
            try:
                text = item.texts[0] if item.texts else read(item.file(CAPTION))
            except SourceError:
                text = ""  # its job names it
            first = _lines(text, "first")
            if not first and text.strip() and settings.empty_caption == "error":
                place = item.place or _place(settings, item)
                faults.append(Fault(place, item.stem, *_EMPTY_FIRST_LINE))
                continue
            found.append(item if first == text.strip() else item._replace(texts=[first]))
    return found, faults


def texts_of(
    settings: Dataset,
    roots: Sequence[str],
    items: Sequence[Item],
    listed: Mapping[str, Row] | None,
    memo: Memo,
    rows: Mapping[str, Row] | None = None,
    *,
    first_line: bool = False,
) -> Texts:
    """Make the texts of a dataset's items.

    Args:
        settings: the dataset's section of the configuration.
        roots: folders of its files, its own first.
        items: its items.
        listed: rows of its metadata file, if any, by the names of images.
        memo: knows the content of files and learns that of new ones.
        rows: stem -> the row of an item, of a list.
        first_line: whether only the first line of a caption counts, as in sd-scripts.
    """
    made, rows, listed = Texts({}, [], []), dict(rows or {}), listed or {}
    names = {
        item.stem: name
        for item in items
        for name in (item.stem, item.image[len(roots[0]) + 1 :])  # the latter counts
        if name in listed
    }
    rows |= {stem: listed[name] for stem, name in names.items()}
    read, progress = _reader(memo, roots, items)
    with progress:
        for item in items:
            row = rows.get(item.stem)
            try:
                texts = _texts(settings, read, item, row, "first" if first_line else "all")
            except SourceError as error:
                place = error.where or _place(settings, item)
                made.faults.append(Fault(place, item.stem, error.what, error.hint))
                continue
            made.found[item.stem] = texts
            # Dropped captions are empty on purpose.
            if len({text for text in texts if text}) < sum(text != "" for text in texts):
                made.alike.append(item.stem)
    if strangers := listed.keys() - names.values():  # one line: there may be a million
        file, more = str(settings.metadata_file), len(strangers) - 1
        who = f"{min(strangers)} and {more} more name" if more else f"{min(strangers)} names"
        hint = "a key is the image's path below the dataset's folder: correct it or take it out"
        made.faults.append(Fault(file, f"({file})", f"{who} no image of the dataset", hint))
    return made


def _texts(settings: Dataset, read: _Read, item: Item, row: Row | None, which: _Lines) -> list[str]:
    """Return the variants of an item's text.

    Raises:
        SourceError: there is none, file and metadata differ, or its braces do not fit.
    """
    making = settings.captions or Captions()
    if making.caption_prefix and _FOLDER in making.caption_prefix:
        words = re.sub(r"^\d+_(?=.)", "", PurePath(item.image).parent.name)  # kohya's `10_sks man`
        prefix = making.caption_prefix.replace(_FOLDER, words)
        making = making.model_copy(update={"caption_prefix": prefix})
    files = item.file(CAPTION), item.file(TAGS)
    contents = [read(file) for file in files]
    if settings.class_tokens and not (any(files) or row):
        contents[0] = settings.class_tokens
    each: _Lines = "drawn" if making.enable_wildcard else which
    found = [_lines(text, each) for text in contents]
    for number, text in enumerate((row.caption, row.tags) if row else ()):
        listed = clean(text or "") if each == "drawn" else newlines(text or "").strip()
        own = found[number]
        if not own or not listed or clean(contents[number]) == clean(listed):
            found[number] = listed or own
        elif settings.metadata_captions is None:
            file = files[number]
            raise SourceError(
                f"differs from the entry in {settings.metadata_file}",
                where=file.path if file else item.image,
                hint="set `metadata_captions` to override or join, or remove one of the two",
            )
        elif settings.metadata_captions == "override":
            found[number] = listed
        else:
            separator, lines = making.caption_separator, [own]
            if each == "drawn":
                listed, lines = listed.replace("\n", separator), own.split("\n")
            found[number] = "\n".join(f"{line}{separator}{listed}" for line in lines)
    if not any(found):
        _check_empty(settings, item, row, "".join(contents))
    caption, tags = found
    return variants(item.stem, caption, tags, making, first_line=which != "all")


def _check_empty(settings: Dataset, item: Item, row: Row | None, content: str) -> None:
    """Refuse a text that is missing or empty, unless the dataset allows it."""
    inside = item.file(CAPTION, TAGS) is None
    if inside and row is None:
        if settings.missing_caption == "error":  # and there are no class_tokens
            endings = [settings.caption_extension, settings.tags_extension]
            names = " or ".join(f"{item.stem}{each}" for each in endings if each)
            listed = f", or an entry in {settings.metadata_file}" if settings.metadata_file else ""
            hint = f"write {names}{listed}, or set `class_tokens` to a caption for all of them"
            raise SourceError("has no caption", where=item.image, hint=hint)
    elif settings.empty_caption == "error":
        what = f"has an empty {item.stem}" if inside else "is an empty caption"
        hint = "describe the image, or set empty_caption: allow"
        if content.strip():
            what, hint = _EMPTY_FIRST_LINE
        raise SourceError(what, where=_place(settings, item), hint=hint)


def _place(settings: Dataset, item: Item) -> str:
    """Return the file that an item's text comes from."""
    file = item.file(CAPTION, TAGS)
    return file.path if file else settings.metadata_file or item.image
