"""Texts of a dataset's items, from caption files, files of tags and a metadata file.

For datasets whose texts are not just their caption files. Each file is read once: the memo keeps
its text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

from latentmake.config.datasets import Captions, Dataset
from latentmake.errors import SourceError
from latentmake.files.paths import is_remote
from latentmake.index.memo import Memo
from latentmake.progress import Progress
from latentmake.sources import s3
from latentmake.sources.caption_pipeline import (
    CaptionError,
    clean,
    decode_text,
    newlines,
    variants,
)
from latentmake.sources.item import CAPTION, TAGS, Fault, File, Item
from latentmake.sources.metadata import Entry

_Lines = Literal["all", "first", "drawn"]
"""Lines of a caption that count: all; the first, as in sd-scripts; each, of which one is drawn."""

_LOOKS_LONG = 1000  # files whose reading is worth a progress bar
_FOLDER = "{folder}"  # in a prefix: the name of the image's folder


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

    def note(self, dataset: str, wanted: int) -> str | None:
        """Return a line about items with too few different variants; None where there are none."""
        if not self.alike:
            return None
        first, others = self.alike[0], len(self.alike) - 1
        who = f"{first} and {others} more have" if others else f"{first} has"
        return (
            f"datasets.{dataset}.captions.variants: {who} fewer than {wanted} different texts; "
            "equal ones are encoded once"
        )


def folder_words(image: str) -> str:
    """Return the name of an image's folder, without the repeats of kohya's `10_sks man`."""
    return re.sub(r"^\d+_(?=.)", "", PurePath(image).parent.name)


def read_caption(path: str) -> str:
    """Return the caption in a file on disk or on S3; a SourceError says why there is none."""
    return _read(path).strip()


def _read(path: str) -> str:
    try:
        data = s3.read(path)[0] if is_remote(path) else Path(path).read_bytes()
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise SourceError(what, where=path, hint="check the file's permissions") from None
    return decode_text(data, path)


def first_lines(
    settings: Dataset, roots: Sequence[str], items: Iterable[Item], memo: Memo
) -> tuple[list[Item], list[Fault]]:
    """Return items whose captions of several lines are replaced by their first lines, and faults.

    Source: `read_caption` of sd-scripts' library/train_util.py, where wildcards are not enabled.
    """
    found, faults, known = [], [], list(items)
    files = _Files(memo, roots, known)
    with files.progress:
        for item in known:
            try:
                text = item.texts[0] if item.texts else files.read(item.file(CAPTION))
            except SourceError:
                found.append(item)  # its job names it
                continue
            first = _lines(text, "first")
            if first == text.strip():
                found.append(item)
            elif first or settings.empty_caption == "allow":
                found.append(item._replace(texts=[first]))
            else:
                place = item.place or _place(settings, item)
                faults.append(Fault(place, item.stem, *_EMPTY_FIRST_LINE))
    return found, faults


def texts_of(
    settings: Dataset,
    roots: Sequence[str],
    items: Sequence[Item],
    listed: Mapping[str, Entry] | None,
    memo: Memo,
    rows: Mapping[str, Entry] | None = None,
    *,
    first_line: bool = False,
) -> Texts:
    """Make the texts of a dataset's items.

    Args:
        settings: the dataset's section of the configuration.
        roots: folders of its files, its own first.
        items: its items.
        listed: entries of its metadata file, if any.
        memo: knows the content of files and learns that of new ones.
        rows: stem -> what the row of an item says, of a list.
        first_line: whether only the first line of a caption counts, as in sd-scripts.
    """
    made = Texts({}, [], [])
    making = settings.captions or Captions()
    entries, strangers = dict(rows or {}), set[str]()
    if listed is not None:
        names = _names(listed, items, roots[0])
        entries = {stem: listed[name] for stem, name in names.items()}
        strangers = listed.keys() - names.values()
    files = _Files(memo, roots, items)
    with files.progress:
        for item in items:
            try:
                sources = _Sources(settings, making, files, item, entries.get(item.stem))
                texts = sources.texts("first" if first_line else "all")
            except SourceError as error:
                made.faults.append(Fault(error.where, item.stem, error.what, error.hint))
                continue
            except CaptionError as error:
                hint = "write {{ and }} for braces that are no wildcard, or correct it"
                made.faults.append(Fault(_place(settings, item), item.stem, str(error), hint))
                continue
            made.found[item.stem] = texts
            # Dropped captions are empty on purpose.
            if len({text for text in texts if text}) < sum(text != "" for text in texts):
                made.alike.append(item.stem)
    if strangers:
        made.faults.append(_unmatched(str(settings.metadata_file), strangers))
    return made


def _names(listed: Collection[str], items: Iterable[Item], root: str) -> dict[str, str]:
    """Return stem -> name in a metadata file: the image's below the folder, or the stem."""
    return {
        item.stem: name
        for item in items
        for name in (item.stem, item.image[len(root) + 1 :])  # the latter counts
        if name in listed
    }


def _unmatched(file: str, names: Collection[str]) -> Fault:
    """Say in one line which entries name no image: there may be a million."""
    first, count = min(names), len(names)
    who = f"{first} names no image" if count == 1 else f"{first} and {count - 1} more name no image"
    hint = "a key is the image's path below the dataset's folder: correct it or take it out"
    return Fault(file, f"({file})", f"{who} of the dataset", hint)


class _Files:
    """Content of files of text, each read at most once and only if its stat is new."""

    def __init__(self, memo: Memo, roots: Iterable[str], items: Iterable[Item]) -> None:
        self._memo = memo
        files = {
            path: stat
            for item in items
            for role, path, stat in item.files
            if role in (CAPTION, TAGS)
        }
        self._known = memo.texts.known(files, *roots)
        new = sum(self._known.get(path, (None,))[0] != stat for path, stat in files.items())
        self.progress = Progress(total=new, desc="captions", unit="file", disable=new < _LOOKS_LONG)

    def read(self, file: File | None) -> str:
        """Return the text of a file; "" where there is none."""
        if file is None:
            return ""
        _, path, stat = file
        known = self._known.get(path)
        if known is not None and known[0] == stat:
            return known[1]
        self.progress.update()
        text = _read(path)
        self._memo.texts.learn(path, stat, text)
        return text


_EMPTY_FIRST_LINE = (
    "has an empty first line, and sd-scripts reads only that",
    "remove the empty line, or set empty_caption: allow",
)


def _lines(text: str, which: _Lines) -> str:
    """Return the lines of a text that count."""
    if which == "all":
        return text.strip()
    return text.partition("\n")[0].strip() if which == "first" else clean(text)


class _Sources:
    """Caption and tags of an item, each from a file, from the metadata file or both."""

    def __init__(
        self,
        settings: Dataset,
        making: Captions,
        files: _Files,
        item: Item,
        entry: Entry | None,
    ) -> None:
        if making.caption_prefix and _FOLDER in making.caption_prefix:
            prefix = making.caption_prefix.replace(_FOLDER, folder_words(item.image))
            making = making.model_copy(update={"caption_prefix": prefix})
        self._settings, self._making, self._item = settings, making, item
        self._caption = files.read(item.file(CAPTION))
        self._tags = files.read(item.file(TAGS))
        self._entry = entry
        if settings.class_tokens and not (item.file(CAPTION, TAGS) or entry):
            self._caption = settings.class_tokens

    def texts(self, which: _Lines) -> list[str]:
        """Return the variants of the item's text.

        Raises:
            SourceError: there is none, or file and metadata differ.
            CaptionError: see `variants`.
        """
        each = "drawn" if self._making.enable_wildcard else which
        caption, tags, entry, item = self._caption, self._tags, self._entry, self._item
        found = _lines(caption, each), _lines(tags, each)
        if entry is not None:
            found = (
                self._of_both(caption, entry.caption, item.file(CAPTION), each),
                self._of_both(tags, entry.tags, item.file(TAGS), each),
            )
        if not any(found):
            self._check_empty()
        caption, tags = found
        return variants(item.stem, caption, tags, self._making, first_line=which != "all")

    def _check_empty(self) -> None:
        """Refuse a text that is missing or empty, unless the dataset allows it."""
        item, settings = self._item, self._settings
        if item.file(CAPTION, TAGS) is None and self._entry is None:
            if settings.missing_caption == "error":  # and there are no class_tokens
                endings = [settings.caption_extension, settings.tags_extension]
                names = " or ".join(f"{item.stem}{each}" for each in endings if each)
                listed = (
                    f", or an entry in {settings.metadata_file}" if settings.metadata_file else ""
                )
                hint = f"write {names}{listed}, or set `class_tokens` to a caption for all of them"
                raise SourceError("has no caption", where=item.image, hint=hint)
        elif settings.empty_caption == "error":
            inside = item.file(CAPTION, TAGS) is None
            what = f"has an empty {item.stem}" if inside else "is an empty caption"
            hint = "describe the image, or set empty_caption: allow"
            if (self._caption + self._tags).strip():
                what, hint = _EMPTY_FIRST_LINE
            raise SourceError(what, where=_place(settings, item), hint=hint)

    def _of_both(self, text: str, entry: str | None, file: File | None, which: _Lines) -> str:
        """Resolve the caption when both a file and a metadata entry exist."""
        listed = clean(entry or "") if which == "drawn" else newlines(entry or "").strip()
        own = _lines(text, which)
        if not own or not listed or clean(text) == clean(listed):
            return listed or own
        if self._settings.metadata_captions == "override":
            return listed
        if self._settings.metadata_captions == "join":
            separator = self._making.caption_separator
            if which != "drawn":
                return f"{own}{separator}{listed}"
            tail = listed.replace("\n", separator)
            return "\n".join(f"{line}{separator}{tail}" for line in own.split("\n"))
        raise SourceError(
            f"differs from the entry in {self._settings.metadata_file}",
            where=file.path if file else self._item.image,
            hint="set `metadata_captions` to override or join, or remove one of the two",
        )


def _place(settings: Dataset, item: Item) -> str:
    """Return the file that an item's text comes from."""
    file = item.file(CAPTION, TAGS)
    return file.path if file else settings.metadata_file or item.image
