"""Read lists of files with captions: datasets that are lists, and metadata files.

    .json    {name: {"caption": ..., "tags": ...}, ...}, or a list of objects with names
    .jsonl   an object a line: image_path or file_name, caption or text, tags
    .csv     a table with the columns file_name (or image_path), text (or caption), tags; .tsv too
    .parquet the same columns, read by pyarrow

{"video": "films/a.mp4", "prompt": "a street", "first_frame": 120, "frames": 81}
{"video": "films/a.mp4", "prompt": "the same street by night", "start": 60.0, "end": 75.5}

A plan reads the list, and stats every file that it names. A bad row does not stop the others.

Sources: sd-scripts' FineTuningDataset (library/train_util.py); the `imagefolder` of Hugging Face's
datasets.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from posixpath import basename, isabs, normpath, splitext
from stat import S_ISREG
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from latentmake.base import digest
from latentmake.base.digest import SourceStat, source_stat
from latentmake.base.errors import DatasetError, first_line, shortened
from latentmake.base.paths import is_text
from latentmake.base.regular import read_regular
from latentmake.config.datasets import Dataset
from latentmake.config.fields import Number, Real
from latentmake.config.trainers import whole_latents
from latentmake.data.item import (
    CAPTION,
    IMAGE,
    LAYER,
    NO_FILE,
    TAGS,
    Fault,
    File,
    Item,
    Row,
    Scan,
    Window,
    broken_link,
    missing_file,
    text_fault,
    unusable_name,
)
from latentmake.formats.endings import IMAGE_EXTENSIONS, NPZ, VIDEO_EXTENSIONS, unread_fault
from latentmake.geometry.clips import Span

NAMES = (
    *("video", "video_path", "image", "image_path", "file_name", "path", "image_path_0"),
    *("npz", "file", "media_path", "clip"),
)
"""Columns that may name the file of a row, in order of precedence."""

CAPTIONS = ("prompt", "caption", "text")
"""Columns that may hold the caption of a row, in order of precedence."""

_REWRITE = "correct the file, or write it again"
_LONGEST_FIELD = 1 << 24  # characters of a field of a CSV file
_MOST_BYTES = 1 << 31  # size of a list; the complete file is read into memory


def read_rows(
    file: str, where: str, captions: Sequence[str] = CAPTIONS, separator: str = ", "
) -> Iterator[tuple[int, Row | ValueError]]:
    """Yield the rows of a file with their line numbers; for Parquet, with row numbers from 1.

    A bad row gives a ValueError, whose message says what is wrong with it. The number of a row with
    several lines is that of the first.

    Args:
        file: path of the file.
        where: key of the configuration that names it, for messages.
        captions: columns that may hold the caption, in order of precedence.
        separator: text between two tags, if the tags are a list.

    Raises:
        DatasetError: the file cannot be read, or has none of the formats.
    """
    try:
        for number, value in _records(Path(file).suffix.lower(), read_regular(file, _MOST_BYTES)):
            try:
                yield number, _row(value, captions, separator)
            except ValueError as error:
                yield number, error
        return
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        what, hint = f"is not UTF-8 (line {line})", "save it as UTF-8"
    except json.JSONDecodeError as error:
        what, hint = str(_json_error(error, str(error))), _REWRITE
    except RecursionError:
        what, hint = "is nested too deeply", _REWRITE
    except ValueError as error:
        what, hint = str(error), _REWRITE
    except OSError as error:
        what, hint = f"cannot be read ({error.strerror})", "correct the path or its permissions"
        if broken_link(file):
            what, hint = missing_file(file), "mount its drive, or correct the link"
    raise DatasetError(f"{file} {what}", where=where, hint=hint)


def _row(value: object, captions: Sequence[str], separator: str) -> Row:
    if isinstance(value, ValueError):
        raise value
    if not isinstance(value, Mapping):
        raise ValueError("is no object with the name of a file")
    others = {column: cell for column, cell in value.items() if cell is not None}
    columns = (next((key for key in keys if key in others), "") for keys in (NAMES, captions))
    name, caption, tags = (others.pop(key, None) for key in (*columns, "tags"))
    if name is None:
        raise ValueError("names no file (video or file_name or path)")
    if not isinstance(name, str) or not name.strip():
        quotes = "" if isinstance(name, str) else ": put it in quotes"
        raise ValueError(f"names no file, but {shortened(repr(name))}{quotes}")
    number = len(caption) if isinstance(caption, list) else 1
    return Row(name.strip(), _text(caption, "\n"), _text(tags, separator), others, number)


def _text(value: object, separator: str) -> str | None:
    """Return a caption or tags as one text; join a list with the separator. Raises ValueError."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = separator.join(value)
    if value is None:
        return None
    if not isinstance(value, str):
        shown = shortened(json.dumps(value, default=str, ensure_ascii=False))
        raise ValueError(f"has a caption that is no text, but {shown}: put it in quotes")
    fault = text_fault(value)
    if fault is None and is_text(value):
        return value
    raise ValueError(f"has a caption that {fault or 'holds half a character'}")


def metadata_of(
    dataset: str, file: str, root: str, separator: str = ", "
) -> tuple[dict[str, Row], list[Fault]]:
    """Read a metadata file.

    Args:
        dataset: name of the dataset, for messages.
        file: path of the file.
        root: folder of the dataset.
        separator: text between two tags, if the tags are a list.

    Returns:
        The rows, by the names of images below `root`; and the faults of bad rows.

    Raises:
        DatasetError: the file cannot be read.
    """
    where, roots = f"datasets.{dataset}.metadata_file", absolute_names(root)
    rows, faults = dict[str, Row](), list[Fault]()
    for number, row in read_rows(file, where, (*CAPTIONS[1:], CAPTIONS[0]), separator):
        if isinstance(row, ValueError):
            faults.append(fault_in(file, number, row))
        else:
            rows[name_of(row.name, roots)] = row._replace(place=_place(file, number))
    return rows, faults


def fault_in(file: str, number: int, error: ValueError) -> Fault:
    """Return the fault of a row of a list or metadata file; `number` is its line or row."""
    return Fault(_place(file, number), f"(line {number})", str(error), _HINT)


def _place(file: str, number: int) -> str:
    return f"{file}, {'row' if file.lower().endswith('.parquet') else 'line'} {number}"


def absolute_names(folder: str) -> set[str]:
    """Return the absolute names of a folder: as given, and with symbolic links resolved."""
    return {str(Path(folder).absolute()), str(Path(folder).resolve())}


def name_of(name: str, roots: Collection[str]) -> str:
    """Return a path relative to a folder; a path outside of it stays absolute.

    Args:
        name: path as a row has it: absolute or relative to the folder, of Linux or Windows.
        roots: absolute names of the folder.
    """
    name = name.replace("\\", "/")
    inside = (name[len(root) + 1 :] for root in roots if name.startswith(f"{root}/"))
    below = next(inside, name)
    return below if below.startswith("/") else normpath(below)


# -- files ----------------------------------------------------------------------------------------


def _records(kind: str, data: bytes) -> Iterable[tuple[int, object]]:
    """Return the objects of a file with their line numbers; a ValueError for a damaged line."""
    if kind == ".jsonl":
        lines = enumerate(data.split(b"\n"), 1)
        blank = b"\xef\xbb\xbf \t\r"  # byte order marks and space
        return ((number, _value(line)) for number, line in lines if line.strip(blank))
    if kind in (".csv", ".tsv"):
        return _table(data.decode("utf-8-sig", "surrogateescape"))
    if kind == ".parquet":
        return enumerate(_parquet(data), 1)
    if kind != ".json":
        raise ValueError("is none of .json, .jsonl, .csv, .tsv, .parquet")
    return _entries(data.decode("utf-8-sig"))


def _value(line: bytes) -> object:
    """Return the value of a line of JSON, or a ValueError with the reason why it has none."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return ValueError(f"is not UTF-8 (byte {error.start + 1})")
    except json.JSONDecodeError as error:
        return _json_error(error, f"column {error.colno}: {error.msg}")
    except RecursionError:
        return ValueError("is nested too deeply")
    except ValueError as error:
        return ValueError(f"is not JSON ({error})")


def _json_error(error: json.JSONDecodeError, reason: str) -> ValueError:
    is_cut = not error.doc[error.pos :].strip() or error.msg.startswith("Unterminated")
    return ValueError("ends in the middle" if is_cut else f"is not JSON ({reason})")


def _entries(text: str) -> Iterator[tuple[int, object]]:
    """Yield the objects of a JSON list with their line numbers; raises ValueError.

    sd-scripts writes an object instead of a list: file names as keys, and objects as values.
    """
    decode, line, counted = json.JSONDecoder().raw_decode, 1, 0
    at, opening = _next_character(text, 0)
    if opening not in ("[", "{"):
        json.loads(text)
        raise ValueError("is no JSON object or list")
    closing = "]" if opening == "[" else "}"
    at, sign = _next_character(text, at + 1)
    while sign != closing:
        line, counted, named = line + text.count("\n", counted, at), at, {}
        if opening == "{":
            if sign != '"':
                raise json.JSONDecodeError("Expecting property name in double quotes", text, at)
            named[NAMES[0]], at = decode(text, at)
            at, sign = _next_character(text, at)
            if sign != ":":
                raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
            at, _ = _next_character(text, at + 1)
        value, at = decode(text, at)
        yield line, {**value, **named} if named and isinstance(value, dict) else value
        at, sign = _next_character(text, at)
        if sign == ",":
            at, sign = _next_character(text, at + 1)
        elif sign != closing:
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
    at, sign = _next_character(text, at + 1)
    if sign:
        raise json.JSONDecodeError("Extra data", text, at)


_NEXT_CHARACTER = re.compile(r"[ \t\r\n]*(.?)", re.DOTALL)


def _next_character(text: str, at: int) -> tuple[int, str]:
    """Return position and character of the next non-space character; "" at the end of the text."""
    match = _NEXT_CHARACTER.match(text, at)
    assert match is not None
    return match.start(1), match[1]


def _parquet(data: bytes) -> Iterator[dict[str, object]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        what, hint = "a table needs the Python package pyarrow", "install it: pip install pyarrow"
        raise DatasetError(what, where="datasets", hint=hint) from None
    try:
        with ParquetFile(io.BytesIO(data)) as table:
            for batch in table.iter_batches():
                yield from batch.to_pylist()
    except (ArrowException, OSError, ValueError, OverflowError) as error:  # each for some damage
        raise ValueError(f"is no Parquet file, or damaged ({first_line(error)})") from None


def _table(text: str) -> Iterator[tuple[int, object]]:
    """Yield the rows of a table with the numbers of their first lines.

    Raises:
        ValueError: the header is damaged, or lacks the necessary columns.
    """
    rows = _cells(text)
    first = next(rows, (1, []))[1]
    if isinstance(first, ValueError):
        raise ValueError(f"has a header that {first}")
    header = [*map(str.strip, first)]
    if not {*header} & {*NAMES} or not {*header} & {*CAPTIONS, "tags"}:
        raise ValueError(f"has no columns file_name, and text or tags, but {header}")
    for line, cells in rows:
        if isinstance(cells, ValueError):
            yield line, cells
        elif any(cells[len(header) :]):
            what = f"has {len(cells)} columns, and the header has {len(header)}"
            yield line, ValueError(f"{what}: put a text with commas in double quotes")
        else:
            yield line, {key: cell or None for key, cell in zip(header, cells, strict=False)}


def _cells(text: str) -> Iterator[tuple[int, list[str] | ValueError]]:
    """Yield the line number and the cells of each row of a table.

    The separator is the one of comma, semicolon and tab that is most frequent in the first line. A
    row with a bad quote is taken to end with its first line, so that the next row is not lost.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    lines, at, is_damaged = [*io.StringIO(text, newline="")], 0, not is_text(text)
    delimiter, reader, begin = max(",;\t", key=lines[0].count) if lines else ",", None, 0
    while at < len(lines):
        line = at + 1
        if reader is None:
            begin, rest = at, (lines[number] for number in range(at, len(lines)))
            reader = csv.reader(rest, delimiter=delimiter, strict=True)
        try:
            cells = next(reader)
            at = begin + reader.line_num
        except csv.Error as error:
            at, reader, what = line, None, f"has a quote without its pair ({error})"
            yield line, ValueError(f'{what}: write "" for a quote within a quoted text')
        else:
            if is_damaged and not all(map(is_text, cells)):
                yield line, ValueError("is not UTF-8: save it as UTF-8")
            elif any(map(str.strip, cells)):
                yield line, cells


# -- datasets that are lists ----------------------------------------------------------------------

_LARGEST = 2**31 - 1  # frames, or seconds
_HINT = "correct the row, or take it out"
_VIDEOS = VIDEO_EXTENSIONS | {NPZ}
_encoded = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


class _Part(BaseModel):
    """Columns that select a part of a video, in frames or in seconds."""

    first_frame: Number = Field(0, ge=0, le=_LARGEST)
    frames: Annotated[Number, AfterValidator(whole_latents)] | None = Field(None, ge=1, le=_LARGEST)
    stride: Number | None = Field(None, ge=1, le=_LARGEST)
    start: Real | None = Field(None, ge=0, le=_LARGEST)
    end: Real | None = Field(None, ge=0, le=_LARGEST)


def _take_part(columns: dict[str, Any], stride: int) -> tuple[str, Span, Window | None]:
    """Remove the columns that select a part of a video from a row, and check them.

    Args:
        columns: name -> value of the columns of the row, without empty ones.
        stride: stride to use if the row has none.

    Returns:
        A suffix for the item's name, such as `.f120-81x2` or `.s60-75.5`; the span in frames,
        which is a single clip if the row has `frames`; and the window in seconds, if any.

    Raises:
        ValueError: a value is wrong, or the columns contradict each other.
    """
    values = {key: columns.pop(key) for key in _Part.model_fields if key in columns}
    try:
        part = _Part.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        what = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        shown = f"{first['loc'][0]}: {shortened(repr(first['input']))}"
        raise ValueError(f"has {shown} ({what})") from None
    frames, start, end = part.frames, part.start or 0, part.end
    in_seconds = {"start", "end"} & {*values}
    if in_seconds and "first_frame" in values:
        raise ValueError("has first_frame and seconds: leave out one of them")
    if end is not None and frames is not None:
        raise ValueError("has frames and end: leave out one of them")
    if end is not None and end <= start:
        raise ValueError(f"ends at {end:g} s, which is not after its start")
    suffix = ""
    if in_seconds:
        suffix = f".s{start:g}" + (f".{frames}" if frames else "" if end is None else f"-{end:g}")
    elif part.first_frame or frames:
        suffix = f".f{part.first_frame}" + (f"-{frames}" if frames else "")
    if part.stride is not None and part.stride > 1:
        suffix = f"{suffix or '.'}x{part.stride}"
    span = Span(part.first_frame, frames, part.stride or stride, frames is not None)
    return suffix, span, (start, end) if in_seconds else None


class _List:
    """Contents of a list: stats of its files, items, and faults.

    Attributes:
        root: folder of the list.
        stats: path -> stat of every file that a row names or may use.
        items: stem -> item.
        faults: faults of bad rows.
        rows: stem -> row, for rows with a caption or tags.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.root = os.path.normpath(Path(dataset.path).parent)
        self.stats: dict[str, SourceStat] = {}
        self.items: dict[str, Item] = {}
        self.faults: list[Fault] = []
        self.rows: dict[str, Row] = {}
        self._dataset = dataset
        self._roots = absolute_names(self.root)

    def stat(self, path: str) -> SourceStat:
        """Return the stat of a file that a row names, or that may lie beside it; keep it."""
        if path not in self.stats:
            self.stats[path] = NO_FILE
            with contextlib.suppress(OSError):
                status = os.stat(path)  # noqa: PTH116 -- faster, and called for each row
                self.stats[path] = source_stat(status) if S_ISREG(status.st_mode) else NO_FILE
        return self.stats[path]

    def add(self, number: int, row: Row | ValueError) -> None:
        """Add the item of a row, or its fault."""
        place = _place(self._dataset.path, number)
        try:
            if isinstance(row, ValueError):
                raise row
            try:
                _encoded(row.others).encode()
            except (ValueError, TypeError, RecursionError) as error:  # Parquet may have bytes
                raise ValueError(f"is not JSON ({error})") from None
            item = self._item(row, place)
            if (first := self.items.setdefault(item.stem, item)) is not item:
                line = (first.place or "").rpartition(", ")[2]
                what = f"is the same clip as {line} ({item.image})"
                if first.image != item.image:
                    what = f"shares its name {item.stem} with {first.image}, {line}"
                raise ValueError(what)
        except ValueError as error:
            self.faults.append(fault_in(self._dataset.path, number, error))
        else:
            if row.caption is not None or (row.tags is not None and self._dataset.composed):
                self.rows[item.stem] = row

    def _item(self, row: Row, place: str) -> Item:
        """Return the item of a row; raises ValueError."""
        dataset, columns, span, window = self._dataset, row.others, None, None
        path = self._path(row.name)
        beside, ending = splitext(path)
        if (ending := ending.lower()) not in (_VIDEOS if dataset.video else IMAGE_EXTENSIONS):
            what = f"is no {'video' if dataset.video else 'image'}"
            if not dataset.video and ending in _VIDEOS:
                what += ": set target_frames for videos, for a model that takes them"
            elif unfit := unread_fault(ending):
                what = ": ".join(unfit)
            raise ValueError(f"{path} {what}")
        stem = beside.removeprefix(f"{self.root}/").removeprefix("./").lstrip("/")
        stem = basename(stem) if dataset.flat else stem
        if dataset.video:  # musubi-tuner's caches lie flat in one folder
            suffix, part, window = _take_part(columns, dataset.sample_stride)
            stem = stem.replace("/", "_") + suffix
            span = None if part == Span() else part
        if fault := unusable_name(f"{stem}."):
            raise ValueError(f"{path} {fault}")
        files = self._files(row, path, beside)
        return Item(stem, files, None, None, span, columns or None, place=place, window=window)

    def _files(self, row: Row, path: str, beside: str) -> tuple[File, ...]:
        """Return the files of a row, and stat its controls.

        Wrong controls are no fault here: only a model that takes controls reports them.
        """
        dataset, names = self._dataset, [(IMAGE, path)]
        for role, ending, text in (
            (CAPTION, dataset.caption_extension, row.caption),
            (TAGS, dataset.tags_extension, row.tags),
        ):
            file = f"{beside}{ending}"
            if ending and text is None and (self.stat(file) != NO_FILE or Path(file).is_symlink()):
                names.append((role, file))
        with contextlib.suppress(ValueError):
            for control in columns_of(row.others, self.root, "control_path"):
                self.stat(control)
        if dataset.multiple_target:
            columns = {
                key: value for key, value in row.others.items() if key.startswith("image_path_")
            }
            names += [(LAYER, layer) for layer in columns_of(columns, self.root, "image_path")]
        return tuple(File(role, file, self.stat(file)) for role, file in names)

    def _path(self, name: str) -> str:
        """Return the path that a row names: absolute, or relative to the list or to this directory.

        `clips_{run}` writes paths relative to its working directory. If the list is read from
        another directory, the files lie beside the list.
        """
        path = path_of(name, self.root, self._roots)
        here = path.removeprefix(f"{self.root}/")
        if isabs(name) or self.stat(path) != NO_FILE:
            return path
        if not os.path.isfile(here):  # noqa: PTH113
            folder, _, file = here.rpartition("/")
            beside = f"{self.root}/{file}"
            own = folder and any(root.endswith(f"/{folder}") for root in self._roots)
            return beside if own and self.stat(beside) != NO_FILE else path
        below = name_of(os.path.abspath(here), self._roots)  # noqa: PTH100 -- links stay
        return f"./{here}" if below.startswith("/") else f"{self.root}/{below}"


def scan(name: str, dataset: Dataset) -> Scan:
    """Read a list, and stat its files and the captions beside them.

    Args:
        name: name of the dataset, for messages.
        dataset: its section of the configuration.

    Raises:
        DatasetError: the list cannot be read, or is empty.
    """
    where = f"datasets.{name}.path"
    contents = _List(dataset)
    contents.stat(str(Path(dataset.path)))
    separator = dataset.captions.joint if dataset.captions else ", "
    for number, row in read_rows(dataset.path, where, separator=separator):
        contents.add(number, row)
    if not contents.items and not contents.faults:
        what = f"the list {dataset.path} has no row"
        hint = 'write an object a line, such as {"video": "a.mp4", "prompt": "a cat"}'
        raise DatasetError(what, where=where, hint=hint)
    entries = [(path, *stat) for path, stat in contents.stats.items()]
    mark, items = digest.of_entries(entries), sorted(contents.items.values())
    return Scan(contents.root, entries, mark, items, contents.faults, contents.rows)


# -- columns of paths -----------------------------------------------------------------------------


def path_of(name: str, root: str, roots: Collection[str]) -> str:
    """Return the path of a file that a row of a list names.

    Args:
        name: path as the row has it.
        root: folder of the list.
        roots: absolute names of this folder.

    Raises:
        ValueError: the name has control characters, or leads out of the folder.
    """
    if any(ord(character) < 32 for character in name) or not is_text(name):
        raise ValueError("has a control character in its name, or half a character")
    path = name_of(name, roots)
    if isabs(path):  # caches are named after it: `..` must not lead out of their folder
        return "/" + normpath(path).lstrip("/")
    if path == ".." or path.startswith("../"):
        raise ValueError(f"names {shortened(name)} outside the list's folder: make it absolute")
    return f"{root}/{path}"


def columns_of(row: Mapping[str, Any], root: str, name: str) -> list[str]:
    """Return the files in a row's columns `name`, `name_0`, `name_1` and so on, sorted by number.

    Args:
        row: name -> value of the columns.
        root: folder of the list.
        name: name of the columns, without the number.

    Raises:
        ValueError: a column has no path, or a wrong one.
    """
    columns: dict[int, str] = {}
    for column, value in row.items():
        if match := re.fullmatch(rf"{name}(?:_([0-9]+))?", column):
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"has {column}: {shortened(repr(value))}, which is no path")
            columns[int(match[1] or 0)] = value.strip()
    roots = absolute_names(root) if columns else ()
    return [path_of(columns[number], root, roots) for number in sorted(columns)]
