"""`latentmake show`: what an order, a receipt, a lock, a manifest or a cache file holds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from latentmake.errors import SourceError
from latentmake.files import cachefile, npz
from latentmake.index.memo import MEMO, Memo, SourceStat, source_stat
from latentmake.plan.manifest import ManifestOrder
from latentmake.plan.orders import Order
from latentmake.plan.receipts import read_receipt
from latentmake.words.project import Directory, Json, show_values


def show(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A cache file, order, receipt, lock or manifest; of an image or a caption, what "
            "the memo knows.",
        ),
    ],
    as_json: Json = False,
    directory: Directory = None,
) -> None:
    """Print what a file of Latentmake holds: a header, an order, a receipt, a lock, a manifest."""
    found = _plain(_content(file, directory or Path()), bare=not as_json)
    show_values(found, as_json=as_json)


def _content(file: Path, folder: Path) -> object:
    """Return what a file holds; raises SourceError where nothing is known of it."""
    path = folder / file
    try:
        with path.open("rb") as opened:
            begin = opened.read(9)
        if file.name.endswith(".receipt.json"):
            return read_receipt(path)
        if file.name.endswith(".manifest.json"):
            return ManifestOrder.read(path)
        if begin.startswith(npz.MAGIC) or begin.startswith(b"{", 8):
            arrays = cachefile.arrays_in(path)
            tensors = {name: f"{dtype} {[*shape]}" for name, dtype, shape in arrays}
            return _header(tensors, cachefile.read_metadata(path))
        if begin.startswith(b"{") and file.suffix in (".json", ".jsonl", ".lock"):
            if path.with_suffix(".items.json").exists():
                return Order.read(path)
            return _json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SourceError("there is no such file", where=file, hint="check the path") from None
    except (ValueError, LookupError, TypeError) as error:
        raise SourceError(
            f"cannot be read ({error})", where=file, hint="name a file that Latentmake wrote"
        ) from None
    if known := _remembered(file, folder):
        return known
    what = "is no order, receipt, lock, manifest or cache file, and the memo does not know it"
    raise SourceError(what, where=file, hint="`latentmake explain FILE` looks in the datasets")


def _json(text: str) -> object:
    """Return the value of a JSON file, or those of its lines."""
    try:
        return json.loads(text)
    except ValueError:
        return [*map(json.loads, text.splitlines())]


def _header(tensors: dict[str, str], metadata: dict[str, Any]) -> dict[str, object]:
    """Return a header, with the recipe as an object and without the prefix of our keys."""
    found = {name.removeprefix("latentmake."): value for name, value in metadata.items()}
    if isinstance(recipe := found.get("recipe"), str):
        found["recipe"] = json.loads(recipe)
    return {**found, "tensors": tensors}


def _remembered(file: Path, folder: Path) -> dict[str, object]:
    """Return the memo's rows of a source."""
    place = folder / MEMO
    if not place.exists():
        return {}
    now = source_stat((folder / file).stat())
    with Memo(place) as memo:
        tables = {"digest": memo.sources, "text": memo.texts}
        rows: dict[str, object] = {
            name: {"value": value, **SourceStat(*stat)._asdict(), "is_current": stat == now}
            for name, table in tables.items()
            for stat, value in table.known([str(file)]).values()
        }
        if media := memo.media([str(file)]).get(str(file)):
            rows["media"] = media[1]
    return rows


def _plain(value: Any, *, bare: bool) -> Any:
    """Return a value as JSON has it; `bare` leaves out what is empty."""
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=bare)
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    elif dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        pairs = ((str(name), _plain(each, bare=bare)) for name, each in value.items())
        return {name: each for name, each in pairs if not bare or each not in (None, [], {}, "")}
    if isinstance(value, list | tuple):
        return [_plain(each, bare=bare) for each in value]
    return value if isinstance(value, str | int | float | None) else str(value)
