"""Captions from one file for many images: sd-scripts' metadata, and that of an image folder.

    .json    {image key: {"caption": ..., "tags": ...}, ...}, or a list of such objects with names
    .jsonl   an object a line: image_path or file_name, caption or text, tags
    .csv     a table with the columns file_name (or image_path), text (or caption), tags

Sources: sd-scripts' FineTuningDataset (library/train_util.py); the `imagefolder` of Hugging Face's
datasets. Datasets that are lists read the same kinds of file.
"""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from posixpath import normpath
from stat import S_ISREG
from typing import Any, NamedTuple

from latentmake.errors import DatasetError
from latentmake.files.paths import is_text
from latentmake.index.memo import SourceStat, source_stat
from latentmake.sources.caption_pipeline import text_fault

NAMES = (
    *("image_path", "file_name", "image", "path", "image_path_0"),
    *("npz", "file", "media_path", "clip"),
)
"""Columns that may name a file; the first of them counts."""
_CAPTIONS = ("caption", "text")
_KINDS = (".json", ".jsonl", ".csv")
_LONGEST_FIELD = 1 << 24  # characters of a field of a CSV file


class Entry(NamedTuple):
    """Caption and tags of an image, from a metadata file or a row of a list."""

    caption: str | None
    tags: str | None


class Record(NamedTuple):
    """An object of a JSON, JSONL or CSV file.

    Attributes:
        number: of its line, of the object in a JSON file, or of the row below a CSV file's head,
            from 1.
        key: in a JSON file that is one object, its key there.
        value: the object; a ValueError says what is wrong with a line.
    """

    number: int
    key: str | None
    value: object


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


def entries_of(dataset: str, file: str, root: str) -> dict[str, Entry]:
    """Return the entries of a metadata file, by the images' names below the folder `root`.

    Raises:
        DatasetError: it cannot be read, ends in the middle, or is no such file.
    """
    where, path = f"datasets.{dataset}.metadata_file", Path(file)
    metadata_stat(dataset, file)
    roots = {str(Path(root).absolute()), str(Path(root).resolve())}
    with refusing(file, where):
        if path.suffix.lower() not in _KINDS:
            raise ValueError(f"is none of {', '.join(_KINDS)}")
        return dict(_entry(record, roots) for record in records(path))


@contextlib.contextmanager
def refusing(file: str, where: str) -> Iterator[None]:
    """Turn errors while a file of objects is read into a DatasetError about a key of the config."""
    try:
        yield
        return
    except UnicodeDecodeError as error:
        what, hint = f"{file} is not UTF-8 (byte {error.start + 1})", "save it as UTF-8"
    except (ValueError, csv.Error) as error:
        what, hint = f"{file} {error}", "correct the file, or write it again"
    except OSError as error:
        what, hint = f"{file} cannot be read ({error.strerror})", "check the file's permissions"
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


def _entry(record: Record, roots: Collection[str]) -> tuple[str, Entry]:
    number, key, values = record
    if isinstance(values, ValueError):
        raise ValueError(f"has a line {number} that {values}")
    if not isinstance(values, Mapping):
        raise ValueError(f"has no object with a caption at {key or f'entry {number}'}")
    if key is None:
        key = next((str(values[name]) for name in NAMES if values.get(name)), None)
    if not key:
        raise ValueError(f"names no image in entry {number} ({' or '.join(NAMES[:2])})")
    caption = next((values[name] for name in _CAPTIONS if values.get(name) is not None), None)
    name = name_of(key, roots)
    return name, Entry(text_of(caption, "\n", name), text_of(values.get("tags"), ", ", name))


def text_of(value: object, separator: str, name: str) -> str | None:
    """Return a caption, of several lines if it is a list, or tags with commas between them."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = separator.join(value)
    if value is None:
        return None
    fault = text_fault(value) if isinstance(value, str) else "is no text"
    if fault is None and is_text(str(value)):
        return str(value)
    fault = fault or "holds half a character"
    raise ValueError(f"has a caption that {fault} at {name}")


# -- reading --------------------------------------------------------------------------------------


def records(path: Path) -> Iterator[Record]:
    """Yield the objects of a JSON, JSONL or CSV file.

    Raises:
        ValueError: it is no such file; says what is wrong with it.
        csv.Error: likewise.
        OSError: it cannot be read.
    """
    kind = path.suffix.lower()
    if kind == ".csv":
        yield from _csv(path)
    elif kind == ".jsonl":
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip(b"\xef\xbb\xbf \t\r\n"):
                    yield Record(number, None, _line(line))
    else:
        pairs = _pairs(path.read_bytes().decode("utf-8-sig"))
        yield from (Record(number, *pair) for number, pair in enumerate(pairs, 1))


def _line(line: bytes) -> object:
    try:
        return _value(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return ValueError(f"is not UTF-8 (byte {error.start + 1})")
    except ValueError as error:
        return error


def _pairs(text: str) -> list[tuple[str | None, object]]:
    """Return key and value of each pair of a JSON object, or the values of a JSON list."""
    if not text.lstrip().startswith(("{", "[")):
        raise ValueError("is no JSON object or list")
    pairs: list[tuple[Any, Any]] = []

    def noted(found: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal pairs
        pairs = found  # the outermost object ends last; a key may stand there twice
        return dict(found)

    value = _value(text, noted)
    return [(None, each) for each in value] if isinstance(value, list) else pairs


def _value(text: str, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> object:
    """Return the value of JSON text; a ValueError says what is wrong with it."""
    try:
        return json.loads(text, object_pairs_hook=hook)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, " if error.lineno > 1 else ""
        what = f"is not JSON ({error.msg}, {place}column {error.colno})"
        if error.msg.startswith("Unterminated") or error.pos >= len(text.rstrip()):
            what = "ends in the middle"
    except ValueError:
        what = "is not JSON (it holds a number that is too long)"
    except RecursionError:
        what = "is not JSON (it is nested too deeply)"
    raise ValueError(what)


def _csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(_LONGEST_FIELD)
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        columns = reader.fieldnames or []
        if not set(columns) & set(NAMES) or not set(columns) & {*_CAPTIONS, "tags"}:
            names = ", ".join(columns) or "none"
            raise ValueError(f"has the columns {names}: it needs file_name, and text or tags")
        for number, row in enumerate(reader, 1):
            if None in row:
                raise ValueError(f"has too many columns in line {reader.line_num}")
            yield Record(number, None, row)
