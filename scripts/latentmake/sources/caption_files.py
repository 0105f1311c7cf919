"""Texts of a dataset's items, from caption files, files of tags and a metadata file.

For datasets whose texts are not just their caption files. Each file is read once: the memo keeps
its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from latentmake.config import Captions, Dataset
from latentmake.errors import SourceError
from latentmake.index.memo import Entry, Listed, Memo, SourceStat
from latentmake.progress import Progress
from latentmake.sources import s3
from latentmake.sources.caption_pipeline import CaptionError, clean, decode_caption, variants
from latentmake.sources.items import Fault, Item

__all__ = ["Texts", "read_caption", "texts_of"]

_LOOKS_LONG = 1000  # files whose reading is worth a progress bar


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


def read_caption(path: str) -> str:
    """Return the text of a caption file on disk or on S3; a SourceError says why there is none."""
    try:
        data = s3.read(path)[0] if s3.is_remote(path) else Path(path).read_bytes()
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise SourceError(what, where=path, hint="check the file's permissions") from None
    return decode_caption(data, path)


def texts_of(
    settings: Dataset,
    roots: Sequence[str],
    items: Sequence[Item],
    listed: Listed | None,
    memo: Memo,
    rows: Mapping[str, Entry] | None = None,
) -> Texts:
    """Make the texts of a dataset's items.

    Args:
        settings: the dataset's section of the configuration.
        roots: folders of its files, its own first.
        items: its items.
        listed: entries of its metadata file, if any.
        memo: knows the content of files and learns that of new ones.
        rows: stem -> what the row of an item says, of a list.
    """
    made = Texts({}, [], [])
    making = settings.captions or Captions()
    entries = dict(rows or {})
    if listed is not None:
        entries = _entries(listed, items, roots[0])
    files = _Files(memo, roots, items)
    with files.progress:
        for item in items:
            try:
                caption, tags = _sources(settings, making, files, item, entries.get(item.stem))
                texts = variants(item.stem, caption, tags, making)
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
    if listed is not None and len(entries) < listed.count:
        made.faults.append(_strangers(str(settings.metadata_file), listed, entries.values()))
    return made


def _entries(listed: Listed, items: Sequence[Item], root: str) -> dict[str, Entry]:
    """Return stem -> entry; a key is an image's path below the folder, with its ending or not."""
    names = {item.image[len(root) + 1 :]: item.stem for item in items}
    found = {names[name]: entry for name, entry in listed.find(names).items()}
    return found | listed.find(item.stem for item in items if item.stem not in found)


def _strangers(file: str, listed: Listed, known: Iterable[Entry]) -> Fault:
    """Say in one line which entries name no image: there may be a million."""
    names = {entry.name for entry in known}
    first = next(name for name in listed.names() if name not in names)
    count = listed.count - len(names)
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
            for path, stat in ((item.caption, item.caption_stat), (item.tags, item.tags_stat))
            if path is not None
        }
        self._known = memo.texts.known(files, *roots)
        new = sum(self._known.get(path, (None,))[0] != stat for path, stat in files.items())
        self.progress = Progress(total=new, desc="captions", unit="file", disable=new < _LOOKS_LONG)

    def read(self, path: str | None, stat: SourceStat | None) -> str:
        """Return the cleaned text of a file; "" where there is none."""
        if path is None or stat is None:
            return ""
        known = self._known.get(path)
        if known is not None and known[0] == stat:
            return known[1]
        self.progress.update()
        text = clean(read_caption(path))
        self._memo.texts.learn(path, stat, text)
        return text


def _sources(
    settings: Dataset, making: Captions, files: _Files, item: Item, entry: Entry | None
) -> tuple[str, str]:
    """Return an item's caption and its tags, each from a file, from the metadata file or both."""
    caption = files.read(item.caption, item.caption_stat)
    tags = files.read(item.tags, item.tags_stat)
    if entry is not None:
        caption = _of_both(caption, entry.caption, item.caption or item.image, settings, making)
        tags = _of_both(tags, entry.tags, item.tags or item.image, settings, making)
    if caption or tags:
        return caption, tags
    if item.caption is None and item.tags is None and entry is None:
        if settings.missing_caption == "error":
            endings = [settings.caption_extension, settings.tags_extension]
            names = " or ".join(f"{item.stem}{each}" for each in endings if each)
            listed = f", or an entry in {settings.metadata_file}" if settings.metadata_file else ""
            hint = f"write {names}{listed}, or set missing_caption: empty"
            raise SourceError("has no caption", where=item.image, hint=hint)
    elif settings.empty_caption == "error":
        what = "is an empty caption" if item.caption or item.tags else f"has an empty {item.stem}"
        hint = "describe the image, or set empty_caption: allow"
        raise SourceError(what, where=_place(settings, item), hint=hint)
    return "", ""


def _place(settings: Dataset, item: Item) -> str:
    """Return the file that an item's text comes from."""
    return item.caption or item.tags or settings.metadata_file or item.image


def _of_both(text: str, entry: str | None, path: str, settings: Dataset, making: Captions) -> str:
    """Resolve the caption when both a file and a metadata entry exist."""
    listed = clean(entry or "")
    if not text or not listed or text == listed:
        return listed or text
    if settings.metadata_captions == "override":
        return listed
    if settings.metadata_captions == "join":
        separator = making.caption_separator
        tail = listed.replace("\n", separator)
        return "\n".join(f"{line}{separator}{tail}" for line in text.split("\n"))
    raise SourceError(
        f"says something else than {settings.metadata_file}",
        where=path,
        hint="set metadata_captions: override or join, or leave one of them out",
    )
