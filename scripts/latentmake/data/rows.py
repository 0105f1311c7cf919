"""Rows of files that list images or videos: lists, and metadata files with captions.

    .json    {name: {"caption": ..., "tags": ...}, ...}, or a list of objects with names
    .jsonl   an object a line: image_path or file_name, caption or text, tags
    .csv     a table with the columns file_name (or image_path), text (or caption), tags
    .parquet the same, read by pyarrow

Sources: sd-scripts' FineTuningDataset (library/train_util.py); the `imagefolder` of Hugging Face's
datasets.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from posixpath import normpath
from typing import Any, NamedTuple

from latentmake.data.captions import text_fault
from latentmake.errors import DatasetError, shortened
from latentmake.files.workspace import is_text

NAMES = (
    *("video", "video_path", "image", "image_path", "file_name", "path", "image_path_0"),
    *("npz", "file", "media_path", "clip"),
)
"""Columns that may name a file; the first of them counts."""

CAPTIONS = ("prompt", "caption", "text")
"""Columns that may hold the caption; likewise."""

_HINT = "correct the file, or write it again"
_LONGEST_FIELD = 1 << 24  # characters of a field of a CSV file


class Row(NamedTuple):
    """The file that a row names, its caption and tags as far as it has some, and other columns."""

    name: str
    caption: str | None
    tags: str | None
    others: dict[str, Any]


def read_rows(
    file: str, where: str, captions: Sequence[str] = CAPTIONS
) -> Iterator[tuple[int, Row | ValueError]]:
    """Yield the rows of a file with their numbers: of a line, in JSON or of a table's row, from 1.

    In the place of a bad row stands a ValueError that says what is wrong with it.

    Args:
        file: its path.
        where: the key of the configuration that names it.
        captions: columns that may hold the caption; the first of them counts.

    Raises:
        DatasetError: it cannot be read, or is no such file.
    """
    try:
        for number, value in _records(Path(file).suffix.lower(), Path(file).read_bytes()):
            try:
                yield number, _row(value, captions)
            except ValueError as error:
                yield number, error
        return
    except UnicodeDecodeError as error:
        what, hint = f"is not UTF-8 (byte {error.start + 1})", "save it as UTF-8"
    except (ValueError, csv.Error) as error:
        what, hint = str(error), _HINT
    except OSError as error:
        what, hint = f"cannot be read ({error.strerror})", "correct the path or its permissions"
    raise DatasetError(f"{file} {what}", where=where, hint=hint)


def _row(value: object, captions: Sequence[str]) -> Row:
    if isinstance(value, ValueError):
        raise value
    if not isinstance(value, Mapping):
        raise ValueError("is no object with the name of a file")
    others = {key: each for key, each in value.items() if each is not None}
    columns = (next((key for key in keys if key in others), "") for keys in (NAMES, captions))
    name, caption, tags = (others.pop(key, None) for key in (*columns, "tags"))
    if name is None:
        raise ValueError("names no file (video or file_name or path)")
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"names no file, but {shortened(repr(name))}")
    return Row(name.strip(), _text(caption, "\n"), _text(tags, ", "), others)


def _text(value: object, separator: str) -> str | None:
    """Return a caption, of several lines if it is a list, or tags with commas between them."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = separator.join(value)
    if value is None:
        return None
    fault = text_fault(value) if isinstance(value, str) else "is no text"
    if fault is None and is_text(str(value)):
        return str(value)
    raise ValueError(f"has a caption that {fault or 'holds half a character'}")


def metadata_of(dataset: str, file: str, root: str) -> dict[str, Row]:
    """Return the rows of a metadata file, by the images' names below the folder `root`.

    Raises:
        DatasetError: it cannot be read, ends in the middle, or is no such file.
    """
    where, roots, found = f"datasets.{dataset}.metadata_file", absolute_names(root), {}
    for number, row in read_rows(file, where, (*CAPTIONS[1:], CAPTIONS[0])):
        if isinstance(row, ValueError):
            raise DatasetError(f"{file} has a line {number} that {row}", where=where, hint=_HINT)
        found[name_of(row.name, roots)] = row
    return found


def absolute_names(folder: str) -> set[str]:
    """Return the absolute names of a folder, one of them with links followed."""
    return {str(Path(folder).absolute()), str(Path(folder).resolve())}


def name_of(name: str, roots: Collection[str]) -> str:
    """Return a path below the folder whose absolute names are `roots`; other paths stay absolute.

    It may be absolute or below that folder, of Linux or Windows.
    """
    name = name.replace("\\", "/")
    inside = (name[len(root) + 1 :] for root in roots if name.startswith(f"{root}/"))
    below = next(inside, name)
    return below if below.startswith("/") else normpath(below)


# -- files ----------------------------------------------------------------------------------------


def _records(kind: str, data: bytes) -> Iterable[tuple[int, object]]:
    """Return the objects of a file with their numbers; a ValueError for that of a damaged line."""
    if kind == ".jsonl":
        lines = enumerate(data.split(b"\n"), 1)
        return ((number, _value(x)) for number, x in lines if x.strip(b"\xef\xbb\xbf \t\r"))
    if kind == ".csv":
        return enumerate(_table(data.decode("utf-8-sig")), 1)
    if kind == ".parquet":
        return enumerate(_parquet(data), 1)
    if kind != ".json":
        raise ValueError("is none of .json, .jsonl, .csv, .parquet")
    value = _value(data)
    if isinstance(value, ValueError):
        raise value
    if isinstance(value, dict):  # sd-scripts' form: objects by the names of their files
        pairs = value.items()
        value = [{**x, NAMES[0]: key} if isinstance(x, dict) else x for key, x in pairs]
    if not isinstance(value, list):
        raise ValueError("is no JSON object or list")
    return enumerate(value, 1)


def _value(data: bytes) -> object:
    """Return the value of JSON text, or a ValueError that says what is wrong with it."""
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return ValueError(f"is not UTF-8 (byte {error.start + 1})")
    except (ValueError, RecursionError) as error:  # nested too deeply
        left = isinstance(error, json.JSONDecodeError) and error.doc[error.pos :].strip()
        is_cut = left == "" or str(error).startswith("Unterminated")
        return ValueError("ends in the middle" if is_cut else f"is not JSON ({error})")


def _parquet(data: bytes) -> Iterator[dict[str, object]]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError:
        what, hint = "a table needs the Python package pyarrow", "install it: pip install pyarrow"
        raise DatasetError(what, where="datasets", hint=hint) from None
    try:
        with ParquetFile(io.BytesIO(data)) as table:
            for batch in table.iter_batches():
                yield from batch.to_pylist()
    except ArrowInvalid as error:
        raise ValueError(f"is no Parquet file ({' '.join(str(error).split())})") from None


def _table(text: str) -> Iterator[dict[str, str | None]]:
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    columns = reader.fieldnames or []
    if not {*columns} & {*NAMES} or not {*columns} & {*CAPTIONS, "tags"}:
        raise ValueError(f"has no columns file_name, and text or tags, but {[*columns]}")
    for row in reader:
        if None in row:
            raise ValueError(f"has too many columns in line {reader.line_num}")
        yield {key: value or None for key, value in row.items()}
