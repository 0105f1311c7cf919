"""The texts of a dataset's items, from caption files, files of tags and a metadata file.

For datasets whose texts are not just what caption files hold. Each file is read once: the memo
keeps what it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from latentmake.config import Captions, Dataset
from latentmake.errors import SourceError
from latentmake.index.memo import Entry, Listed, Memo, SourceStat
from latentmake.progress import Progress
from latentmake.sources import caption_pipeline
from latentmake.sources.caption_pipeline import CaptionError, clean, decode_caption
from latentmake.sources.items import Fault, Item

__all__ = ["Texts", "note_of", "texts_of"]

_LOOKS_LONG = 1000  # files whose reading is worth a progress bar


class Texts(NamedTuple):
    """What is encoded for a dataset's items.

    Attributes:
        found: stem -> the variants of the item's text.
        faults: what is wrong with captions of the others.
        alike: stems of items that have fewer different variants than were asked for.
    """

    found: dict[str, list[str]]
    faults: list[Fault]
    alike: list[str]


def texts_of(
    settings: Dataset, root: str, items: Sequence[Item], listed: Listed | None, memo: Memo
) -> Texts:
    """Make the texts of items.

    Args:
        settings: the dataset's section of the configuration.
        root: its folder.
        items: what is in it.
        listed: entries of its metadata file, if it has one.
        memo: knows the content of files; learns that of new ones.
    """
    files = _Files(memo, root)
    found: dict[str, list[str]] = {}
    faults: list[Fault] = []
    alike: list[str] = []
    making = settings.captions or Captions()
    entries = {} if listed is None else _entries(listed, items, root)
    new = sum(files.is_new(path, stat) for each in items for path, stat in _files_of(each))
    with Progress(total=new, desc="captions", unit="file", disable=new < _LOOKS_LONG) as progress:
        files.progress = progress
        for item in items:
            try:
                entry = entries.get(item.stem)
                caption, tags = _sources(settings, making, files, item, entry)
                variants = caption_pipeline.texts(item.stem, caption, tags, making)
            except SourceError as error:
                faults.append(Fault(error.where, item.stem, error.what, error.mend))
                continue
            except CaptionError as error:
                path = item.caption or item.tags or settings.metadata_file or item.image
                mend = "write {{ and }} for braces that are no wildcard, or mend it"
                faults.append(Fault(path, item.stem, str(error), mend))
                continue
            found[item.stem] = variants
            # Dropped captions are empty on purpose.
            if len({text for text in variants if text}) < sum(text != "" for text in variants):
                alike.append(item.stem)
    if listed is not None and len(entries) < listed.count:
        faults.append(_strangers(str(settings.metadata_file), listed, entries.values()))
    return Texts(found, faults, alike)


def _entries(listed: Listed, items: Sequence[Item], root: str) -> dict[str, Entry]:
    """Return stem -> entry; a key is an image's path below the folder, with its ending or not."""
    names = {item.image[len(root) + 1 :]: item.stem for item in items}
    found = {names[name]: entry for name, entry in listed.find(names).items()}
    found |= listed.find(item.stem for item in items if item.stem not in found)
    return found


def _strangers(file: str, listed: Listed, known: Iterable[Entry]) -> Fault:
    """Say in one line which entries name no image: there may be a million."""
    names = {entry.name for entry in known}
    first = next(name for name in listed.names() if name not in names)
    count = listed.count - len(names)
    who = f"{first} names no image" if count == 1 else f"{first} and {count - 1} more name no image"
    return Fault(
        file,
        f"({file})",
        f"{who} of the dataset",
        "a key is the image's path below the dataset's folder: correct it or take it out",
    )


class _Files:
    """The content of files of text, each read at most once and only if its stat is new."""

    def __init__(self, memo: Memo, root: str) -> None:
        self._memo = memo
        self._known: Mapping[str, tuple[SourceStat, str]] = memo.texts.below(root)
        self.progress: Progress | None = None

    def is_new(self, path: str | None, stat: SourceStat | None) -> bool:
        return path is not None and self._known.get(path, (None,))[0] != stat

    def read(self, path: str | None, stat: SourceStat | None) -> str:
        """Return what a file holds; nothing where there is none."""
        if path is None or stat is None:
            return ""
        known = self._known.get(path)
        if known is not None and known[0] == stat:
            return known[1]
        if self.progress is not None:
            self.progress.update()
        try:
            text = clean(decode_caption(Path(path).read_bytes(), path))
        except OSError as error:
            raise SourceError(
                f"cannot be read ({error.strerror})",
                where=path,
                mend="check the file's permissions",
            ) from None
        self._memo.texts.learn(path, stat, text)
        return text


def _files_of(item: Item) -> list[tuple[str | None, SourceStat | None]]:
    return [(item.caption, item.caption_stat), (item.tags, item.tags_stat)]


def _sources(
    settings: Dataset, making: Captions, files: _Files, item: Item, entry: Entry | None
) -> tuple[str, str]:
    """Return an item's caption and its tags, each from a file, from the metadata file or both."""
    caption, tags = (files.read(*each) for each in _files_of(item))
    if entry is not None:
        pairs = ((caption, entry.caption, item.caption), (tags, entry.tags, item.tags))
        caption, tags = (
            _of_both(text, clean(listed or ""), path or item.image, settings, making)
            for text, listed, path in pairs
        )
    if caption or tags:
        return caption, tags
    if item.caption is None and item.tags is None and entry is None:
        if settings.missing_caption == "error":
            endings = [settings.caption_extension, settings.tags_extension]
            files_ = " or ".join(f"{item.stem}{each}" for each in endings if each)
            entries = f", or an entry in {settings.metadata_file}" if settings.metadata_file else ""
            mend = f"write {files_}{entries}, or set missing_caption: empty"
            raise SourceError("has no caption", where=item.image, mend=mend)
    elif settings.empty_caption == "error":
        path = item.caption or item.tags or settings.metadata_file or item.image
        what = "is an empty caption" if item.caption or item.tags else f"has an empty {item.stem}"
        raise SourceError(what, where=path, mend="describe the image, or set empty_caption: allow")
    return "", ""


def _of_both(text: str, listed: str, path: str, settings: Dataset, making: Captions) -> str:
    """Return what counts of a file's text and an entry's."""
    if not text or not listed or text == listed:
        return listed or text
    if settings.metadata_captions == "override":
        return listed
    if settings.metadata_captions == "join":
        return "\n".join(
            f"{line}{making.caption_separator}{listed.replace(chr(10), making.caption_separator)}"
            for line in text.split("\n")
        )
    raise SourceError(
        f"says something else than {settings.metadata_file}",
        where=path,
        mend="set metadata_captions: override or join, or leave one of them out",
    )


def note_of(dataset: str, made: Texts, variants: int) -> str | None:
    """Return a line about items without as many different texts as variants; None if all have."""
    if not made.alike:
        return None
    others = len(made.alike) - 1
    who = f"{made.alike[0]} has" if not others else f"{made.alike[0]} and {others} more have"
    return (
        f"datasets.{dataset}.captions.variants: {who} fewer than {variants} different texts; equal "
        "ones are encoded once"
    )
