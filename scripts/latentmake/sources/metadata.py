"""Captions from one file for many images: sd-scripts' metadata, and that of an image folder.

    .json    {image key: {"caption": ..., "tags": ...}, ...}, or a list of such objects with names
    .jsonl   an object a line: image_path or file_name, caption or text, tags
    .csv     a table with the columns file_name (or image_path), text (or caption), tags

Sources: sd-scripts' FineTuningDataset (library/train_util.py); the `imagefolder` of Hugging Face's
datasets. Such a file may be larger than memory: it is read as a stream, once, into the memo.
"""

from __future__ import annotations

import csv
import json
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from posixpath import normpath
from stat import S_ISREG
from typing import IO, Any

from latentmake.errors import DatasetError
from latentmake.index.memo import Entry, Listed, Memo, SourceStat, source_stat
from latentmake.progress import Progress
from latentmake.sources.caption_pipeline import text_fault

NAMES = (
    *("image_path", "file_name", "image", "path", "image_path_0"),
    *("npz", "file", "media_path", "clip"),
)
"""Columns that may name a file; the first of them counts."""
_CAPTIONS = ("caption", "text")
_LARGE = 50_000_000  # bytes of a file whose reading is worth a progress bar
_LONGEST_LINE = 1 << 24  # characters: more is no line of text


def metadata_stat(dataset: str, file: str) -> SourceStat:
    """Return the stat of a metadata file; a DatasetError says that there is none."""
    where, hint = f"datasets.{dataset}.metadata_file", "correct the path"
    try:
        found = Path(file).stat()
    except OSError as error:
        what = f"{file} cannot be read ({error.strerror})"
        raise DatasetError(what, where=where, hint=hint) from None
    if not S_ISREG(found.st_mode):
        raise DatasetError(f"{file} is no regular file", where=where, hint=hint)
    return source_stat(found)


def entries_of(dataset: str, file: str, root: str, memo: Memo) -> Listed:
    """Return the entries of a metadata file; it is read only if its stat is new.

    Raises:
        DatasetError: it cannot be read, ends in the middle, or is no such file.
    """
    where = f"datasets.{dataset}.metadata_file"
    stat = metadata_stat(dataset, file)
    # Names are below the dataset's folder, so that another folder makes another list of them.
    return learned(memo, f"{file}\n{root}", stat, lambda: _entries(file, root), where=where)


def learned(
    memo: Memo, name: str, stat: SourceStat, read: Callable[[], Iterator[Entry]], *, where: str
) -> Listed:
    """Return the entries of a file; it is read only if its stat is new.

    Args:
        memo: keeps them.
        name: of the entries in the memo: the file's path, a line feed, and what they depend on.
        stat: of the file.
        read: called if it is to be read.
        where: key of the configuration that names the file.

    Raises:
        DatasetError: it cannot be read, or holds no such entries.
    """
    if (known := memo.listed(name, stat)) is not None:
        return known
    file = name.rpartition("\n")[0]
    try:
        return memo.learn_list(name, stat, read())
    except UnicodeDecodeError as error:
        what = f"{file} is not UTF-8 (byte {error.start + 1} of a part)"
        hint = "save it as UTF-8"
    except (ValueError, csv.Error) as error:
        what, hint = f"{file} {error}", "correct the file, or write it again"
    except OSError as error:
        what, hint = f"{file} cannot be read ({error.strerror})", "check the file's permissions"
    except sqlite3.Error as error:
        what = f"the entries of {file} cannot be kept ({error})"
        hint = "free space on the disk of .latentmake"
    raise DatasetError(what, where=where, hint=hint)


def name_of(key: str, roots: Collection[str]) -> str:
    """Return the path below the dataset's folder (its absolute names are `roots`) of a key.

    A key is a path, absolute or below that folder, with or without its ending, of Linux or Windows.
    """
    key = key.replace("\\", "/")
    if not key.startswith("/"):
        return normpath(key)
    for root in roots:
        if key.startswith(f"{root}/"):
            return normpath(key[len(root) + 1 :])
    return key


def _entries(file: str, root: str) -> Iterator[Entry]:
    path = Path(file)
    readers = {".json": json_objects, ".jsonl": _jsonl, ".csv": _csv}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"is none of {', '.join(readers)}")
    roots = {str(Path(root).absolute()), str(Path(root).resolve())}
    size = path.stat().st_size
    quiet = size < _LARGE
    bar = Progress(total=size, desc=path.name, unit="B", unit_scale=True, disable=quiet)
    with path.open("rb") as stream, bar as progress:
        for number, (key, values) in enumerate(reader(stream)):
            if number % 4096 == 0:
                progress.update(stream.tell() - progress.n)
            yield _entry(key, values, roots, number)
        progress.update(size - progress.n)


def _entry(key: str | None, values: object, roots: Collection[str], number: int) -> Entry:
    if not isinstance(values, Mapping):
        raise ValueError(f"has no object with a caption at {key or f'entry {number + 1}'}")
    if key is None:
        key = next((str(values[name]) for name in NAMES if values.get(name)), None)
    if not key:
        raise ValueError(f"names no image in entry {number + 1} ({' or '.join(NAMES[:2])})")
    caption = next((values[name] for name in _CAPTIONS if values.get(name) is not None), None)
    name = name_of(key, roots)
    return Entry(name, text_of(caption, "\n", name), text_of(values.get("tags"), ", ", name))


def text_of(value: object, separator: str, name: str) -> str | None:
    """Return a caption, of several lines if it is a list, or tags with commas between them."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = separator.join(value)
    if value is None:
        return None
    fault = text_fault(value) if isinstance(value, str) else "is no text"
    if fault is None:
        return str(value)
    raise ValueError(f"has a caption that {fault} at {name}")


def json_objects(stream: IO[bytes]) -> Iterator[tuple[str | None, object]]:
    """Yield the values of a JSON list, or key and value of a JSON object, while it is read.

    Raises:
        ValueError: it is neither; says what is wrong with it.
    """
    import ijson

    head = stream.read(64)
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    stream.seek(3 if head.startswith(b"\xef\xbb\xbf") else 0)
    if start == b"[":
        pairs = ((None, values) for values in ijson.items(stream, "item", use_float=True))
    elif start == b"{":
        pairs = ijson.kvitems(stream, "", use_float=True)
    else:
        raise ValueError("is no JSON object or list")
    count = 0
    try:
        for pair in pairs:
            yield pair
            count += 1
    except ijson.JSONError as error:
        said = error.args[0] if error.args else ""
        said = said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
        said = said.strip().split("\n")[0].removeprefix("parse error: ")
        what = f"is not JSON ({said})"
        if "premature EOF" in said or "incomplete" in said.lower():
            what = "ends in the middle"
        elif "UTF8" in said or "UTF-8" in said:
            what = "is not UTF-8"
        raise ValueError(f"{what}, after {count} entries") from None


def _jsonl(stream: IO[bytes]) -> Iterator[tuple[str | None, object]]:
    for number, line in enumerate(stream, 1):
        text = line.decode("utf-8-sig")
        if not text.strip():
            continue
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            ends = not line.endswith(b"\n")
            what = "ends in the middle of" if ends else f"is not JSON ({error.msg}) in"
            raise ValueError(f"{what} line {number}") from None
        yield None, values


def _csv(stream: IO[bytes]) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    lines = (
        line.decode("utf-8-sig" if number == 0 else "utf-8") for number, line in enumerate(stream)
    )
    csv.field_size_limit(_LONGEST_LINE)
    reader = csv.DictReader(lines, strict=True)
    columns = reader.fieldnames or []
    if not set(columns) & set(NAMES) or not set(columns) & {*_CAPTIONS, "tags"}:
        raise ValueError(
            f"has the columns {', '.join(columns) or 'none'}: it needs file_name, and text or tags"
        )
    for row in reader:
        if None in row:
            raise ValueError(f"has too many columns in line {reader.line_num}")
        yield None, row
