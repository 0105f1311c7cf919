"""History of a run: what each of its trainings saw, and how it went.

A training has a folder `runs/{run}/history/{digest}`. Its name is a digest of parts and roster:

| file | content |
|---|---|
| `roster.jsonl.gz` | one line an item: texts as encoded, digest of the picture, repeats, sizes |
| `training.json` | parts, losses, time and device: the record beside the weights, see `Record` |
| `samples.webp` | small copy of the sample pictures |

Captions, pictures and cache files may change afterwards. Pages, and the reasons to train, compare
today's items with a roster. The roster and the record are written when a training begins, so that a
training that was killed is in the history too.
"""

from __future__ import annotations

import gzip
import io
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel
from pydantic_core import to_json

from latentmake.base import atomic, digest
from latentmake.base.errors import SourceError, TrainingError, refuse_folder
from latentmake.base.state_file import read_state
from latentmake.data.contents import read_caption
from latentmake.formats.cachefile import header_of
from latentmake.formats.media import drawn_picture
from latentmake.plan.manifest import (
    LEAVING,
    PREVIOUS,
    read_lock,
    result_folder,
    run_folder,
)
from latentmake.plan.product import Parts
from latentmake.runs.order import COPIED, PROGRESS, RECORD, Record, RunFiles, RunOrder, parts_in
from latentmake.runs.rows import Row, rows_of

if TYPE_CHECKING:
    from PIL import Image

ROSTER = "roster.jsonl.gz"
SAMPLES = "samples.webp"
_KEPT = (f"saved/*/{COPIED}", f"checkpoints/*/{PROGRESS}", f"output/{COPIED}")
"""Records beside weights that are no result, below the folder of a run or of its result."""
UNKNOWN_END = "it was killed, or is still running"
"""End of a training whose process has not noted another one."""
_LOST = (
    "Latentmake no longer knows what this training saw; restore the file, or train the run again"
)
"""End of the line about a damaged roster."""
_SAMPLES = 8  # most sample pictures of a launched trainer that are kept
_SIDE = 1024  # longest side of the small copy, in pixels


class RosterItem(BaseModel, extra="ignore", frozen=True):
    """One item that a training saw.

    Attributes:
        source: digest of its picture or video, with its controls; "" if no cache file has it.
        texts: texts of the item, as they were encoded.
        repeats: how often an epoch shows it.
        size: width and height of the picture in pixels, before it was scaled and cropped; None if
            its cache files do not record them.
        resolutions: names of the resolutions that it was trained at.
        view: settings that scaled and cropped it, as canonical JSON; "" for the defaults.
        validation: whether it was held out: evaluated, but not trained on.
        is_reg: whether it was a regularisation image.
        captioners: captioners that made the texts; none if a person wrote them.
    """

    dataset: str
    stem: str
    source: str = ""
    texts: list[str] = []
    repeats: int = 1
    size: tuple[int, int] | None = None
    resolutions: list[str] = []
    view: str = ""
    validation: bool = False
    is_reg: bool = False
    captioners: list[str] = []

    @property
    def name(self) -> str:
        """Dataset and stem: `cats/a`."""
        return f"{self.dataset}/{self.stem}"


class Training(NamedTuple):
    """A training of a run.

    Attributes:
        folder: its folder in the history. A result of a release without history is in the folder
            of its weights.
        name: name by which a command calls it, such as `cats@1`.
    """

    run: str
    folder: Path
    record: Record
    name: str = ""

    @property
    def items(self) -> list[RosterItem] | None:
        """Items that it saw; None if they are unknown."""
        return items_of(self.folder)

    @property
    def seconds(self) -> float:
        """Unix time of its start; of its end, if only that is known."""
        return self.record.began or (self.folder / RECORD).stat().st_mtime

    @property
    def began(self) -> str:
        """Time of its start in ISO format; of its end, if only that is known."""
        return datetime.fromtimestamp(self.seconds).astimezone().isoformat(" ", "seconds")

    @property
    def weights(self) -> list[str]:
        """Present paths of its weights, below the run's folder."""
        return [
            str(folder / name)
            for folder, result in _results(self.run)
            if self.made(result)
            for name in result.files
            if (folder / name).is_file()
        ]

    @property
    def saved(self) -> list[str]:
        """Present folders of its saved steps, checkpoints and states."""
        files = run_folder(self.run).rglob("*.json")
        records = [path for path in files if any(map(path.match, _KEPT))]
        own = [path.parent for path in records if parts_in(path) == self.record.parts]
        return [str(folder) for folder in own if any(folder.rglob("*.safetensors"))]

    @property
    def is_present(self) -> bool:
        """Whether it made the present result of its run."""
        present = Record.read(result_folder(self.run) / RECORD)
        return present is not None and self.made(present)

    def made(self, result: Record) -> bool:
        """Whether a result with this record is its own; earlier releases have no roster."""
        return result.parts == self.record.parts and result.roster in ("", self.record.roster)

    def values(self) -> dict[str, Any]:
        """Return JSON values for the output of commands."""
        values = {"name": self.name} if self.name else {}
        values |= {"run": self.run, "folder": str(self.folder), "began": self.began}
        return {**values, "weights": self.weights}


def roster_of(manifest: Path) -> bytes:
    """Return the roster of the items in a manifest, with the texts in today's cache files.

    Raises:
        TrainingError: the manifest is missing or damaged.
    """
    return _lines(manifest_items(manifest))


def history_folder(run: str, parts: Parts, roster: str) -> Path:
    """Return the folder of a training with these parts and the digest of its roster."""
    return run_folder(run) / "history" / digest.of_value([parts, roster])[:16]


def begin(run: str, roster: bytes, record: Record) -> Record:
    """Write the folder of a training that begins, and return its record with the roster's digest.

    A training that is resumed keeps the time of its first start.
    """
    name = digest.of_bytes(roster)
    earlier = Record.read(history_folder(run, record.parts, name) / RECORD)
    began = earlier.began if earlier and earlier.ended else round(time.time(), 3)
    record = record.model_copy(update={"roster": name, "began": began})
    _write(run, roster, record.model_copy(update={"ended": UNKNOWN_END}))
    return record


def finish(order: RunOrder, record: Record, receipt: Path, **more: object) -> None:
    """Complete the folder of a training that has finished, and write the receipt.

    Results without a roster get a folder if the manifest is that of their training. Folders of old
    trainings are removed, unless their weights are in the run's folder. The receipt has the content
    of the record, and `more`.
    """
    files, run = RunFiles(order), order.run
    if not record.roster:
        keep_earlier(run)
    else:
        folder = history_folder(run, record.parts, record.roster)
        if (folder / ROSTER).is_file():
            _write_record(folder, record)
        elif digest.of_bytes(roster := roster_of(Path(order.manifest))) == record.roster:
            _write(run, roster, record)
        drawn = sorted((files.work / "sample").glob("*.png"), key=lambda path: path.stat().st_mtime)
        places = [files.grid] if files.grid.is_file() else drawn[-_SAMPLES:]
        if folder.is_dir() and not (folder / SAMPLES).is_file():
            pictures = [*filter(None, map(drawn_picture, places))]
            if pictures:
                atomic.write(folder / SAMPLES, _small(pictures))
    for old in trainings(run)[order.keep :]:
        if old.folder.parent == files.history and not old.weights:
            atomic.remove(old.folder)
    content: dict[str, Any] = {"run": run, "weights": str(files.weights)}
    content |= record.model_dump(exclude_defaults=True)
    atomic.write(receipt, to_json(content | more, indent=2) + b"\n")
    files.forced.unlink(missing_ok=True)


def keep_earlier(run: str) -> None:
    """Write folders for results of releases without history, as far as their items are known.

    It is called before caches and the run's manifest change.
    """
    for folder, record in _results(run):
        if not record.roster and (items := items_of(folder)):
            roster = _lines(items)
            began = round(max(0.0, (folder / RECORD).stat().st_mtime - record.seconds), 3)
            more = {"roster": digest.of_bytes(roster), "began": began}
            _write(run, roster, record.model_copy(update=more))


def note_end(run: str, record: Record, reason: str) -> None:
    """Note in the folder of a training that has begun why it did not finish."""
    if not record.roster:
        return
    place = history_folder(run, record.parts, record.roster) / RECORD
    record.model_copy(update={"ended": reason}).write(place)


def trainings(run: str) -> list[Training]:
    """Return the known trainings of a run, newest first, with results of earlier releases.

    Raises:
        StorageError: a folder cannot be read.
    """
    history = run_folder(run) / "history"
    folders = (history / name for name in _folders_in(history))
    noted = [(folder, record) for folder in folders if (record := Record.read(folder / RECORD))]
    present = [record.parts for _, record in noted]
    noted += [pair for pair in _results(run) if pair[1].parts not in present]
    several = [Training(run, folder, record) for folder, record in noted]
    return sorted(several, key=lambda one: (one.seconds, one.folder.name), reverse=True)


def remembered() -> list[str]:
    """Return the names of all runs with a history or a result, sorted; see `trainings`."""
    return sorted(
        run
        for run in _folders_in(run_folder(""))
        if "history" in _folders_in(run_folder(run)) or (result_folder(run) / RECORD).is_file()
    )


def _folders_in(folder: Path) -> list[str]:
    return next(os.walk(folder, onerror=refuse_folder), ("", [], []))[1]


def all_trainings() -> Iterator[Training]:
    """Yield each known training, the newest of each run first."""
    for run in remembered():
        yield from trainings(run)


def items_of(folder: Path) -> list[RosterItem] | None:
    """Return the items that a training saw; None if they are unknown.

    For a result of an earlier release, the items are those of the run's manifest, as long as the
    lock is the one of that training.

    Args:
        folder: a training's folder in the history, or a folder with a result and its record.
    """
    if (items := read_state(folder / ROSTER, _unpacked, advice=_LOST)) is not None:
        return items
    if (record := Record.read(folder / RECORD)) is None:
        return None
    place = Path(*folder.parts[: len(run_folder("x").parts)])  # the run's folder
    if record.roster:
        kept = history_folder(place.name, record.parts, record.roster)
        return None if kept == folder else items_of(kept)
    if record.dataset == read_lock(place.name).data:
        with suppress(TrainingError):
            return [*manifest_items(place / "manifest.jsonl")]
    return None


def manifest_items(manifest: Path) -> Iterator[RosterItem]:
    """Yield the items of a manifest, with the texts and digests in today's cache files.

    Raises:
        TrainingError: the manifest is missing or damaged.
    """
    for row in rows_of(manifest):
        values: dict[str, Any] = {
            "dataset": row.dataset,
            "stem": row.stem,
            "texts": [*_texts(row)],
            "repeats": row.repeats,
            "resolutions": [*row.latents],
            "validation": row.validation,
            "is_reg": row.is_reg,
            "captioners": row.captioners,
        }
        latents = next((path for size in row.latents for path in row.latents_at(size)), None)
        if latents and (header := header_of(latents)):
            size = header.picture[:2] if header.picture else None
            values |= {"source": header.source, "size": size, "view": header.view}
        yield RosterItem(**values)


def _texts(row: Row) -> Iterator[str]:
    """Yield the texts of a row. If the row has none, they are in the headers of its embeddings."""
    if row.texts is not None:
        yield from row.texts
        return
    embeddings = next((paths for size in (*row.latents, "") if (paths := row.texts_at(size))), [])
    headers = [header_of(path) for path in embeddings]
    captions = [header.caption for header in headers if header and header.caption is not None]
    if not captions and row.caption:  # a trainer that encodes captions itself reads the file
        with suppress(SourceError):
            captions = [read_caption(row.caption)]
    yield from captions or [""]


def _lines(items: Iterable[RosterItem]) -> bytes:
    return "".join(f"{item.model_dump_json(exclude_defaults=True)}\n" for item in items).encode()


def _unpacked(data: bytes) -> list[RosterItem]:
    try:
        lines = gzip.decompress(data).splitlines()
    except (OSError, EOFError, zlib.error):
        raise ValueError("is cut short, or no gzip file") from None
    if not lines:
        raise ValueError("is empty")
    return [RosterItem.model_validate_json(line) for line in lines]


def _results(run: str) -> Iterator[tuple[Path, Record]]:
    """Yield folder and record of the run's result and of the results before it."""
    folder = run_folder(run)
    places: Iterable[Path] = (folder, folder / LEAVING)
    while folder.is_dir():
        folder /= PREVIOUS
        places = (*places, folder)
    for place in places:
        if record := Record.read(place / RECORD):
            yield place, record


def _write(run: str, roster: bytes, record: Record) -> None:
    """Write roster and record of a training, unless they are there."""
    folder = history_folder(run, record.parts, record.roster)
    if read_state(folder / ROSTER, _unpacked) is None:
        atomic.write(folder / ROSTER, gzip.compress(roster, mtime=0))
    _write_record(folder, record)


def _write_record(folder: Path, record: Record) -> None:
    if Record.read(folder / RECORD) != record:
        record.write(folder / RECORD)


def _small(opened: Sequence[Image.Image]) -> bytes:
    """Return a WebP picture of sample pictures, side by side, that are scaled down."""
    from PIL import Image

    height = max(picture.height for picture in opened)
    row = Image.new("RGB", (sum(picture.width for picture in opened), height))
    left = 0
    for picture in opened:
        row.paste(picture, (left, 0))
        left += picture.width
    row.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    row.save(file, "WEBP", quality=75)
    return file.getvalue()
