"""Work orders: the list that one batch job carries out, and the receipt it leaves.

A work order is named by a digest of its content, which includes what was found under each target's
name, so that Snakemake never takes a new order for one it has seen. The process that plans writes
it; jobs, and the processes that a cluster starts for them, only read.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pydantic import BaseModel

from latentmake import digest, layouts
from latentmake.config import Dataset, ExternalProgram, Model
from latentmake.errors import CacheError, LatentmakeError
from latentmake.files import atomic, cachefile
from latentmake.files.media import Media
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Clip
from latentmake.layouts import Layout
from latentmake.plan import store

__all__ = [
    "FOLDER",
    "SPOOL",
    "OutdatedOrderError",
    "Receipt",
    "Target",
    "WorkItem",
    "WorkOrder",
    "begin",
    "end",
    "forget_old",
    "keep_replaced",
    "newest_run_order",
    "on_disk",
    "read_receipt",
    "receipts",
    "run_order",
    "spooled",
    "touch",
    "unfinished",
]

FOLDER = Path(".latentmake/orders")
RUNS = Path(".latentmake/runs")
SPOOL = Path(".latentmake/spool")
_BUILDING = Path(".latentmake/building.lock")
_ITEMS = ".items.json"
_VERSION = 6  # of a work order's form
_SECTIONS: dict[str, type[BaseModel]] = {
    "dataset_settings": Dataset,
    "model_settings": Model,
    "musubi_tuner": ExternalProgram,
}
_RECEIPT = ".receipt.json"
_KEPT_SECONDS = 7 * 24 * 3600


class OutdatedOrderError(ValueError):
    """A work order that another version of this package wrote."""


class Target(NamedTuple):
    """One cache file to be made.

    Attributes:
        part: the resolution's name, or `text`, or `text@` and the resolution's name.
        path: its name.
        found: what lies there now: its key and mtime, or None.
        size: width and height asked for, in pixels; None for text.
        clip: which frames of a video it is made of.
        at_hand: files that seem to hold just what is to be made.
    """

    part: str
    path: str
    found: str | None
    size: Size | None = None
    clip: Clip | None = None
    at_hand: tuple[str, ...] = ()


class WorkItem(NamedTuple):
    """One source and the targets to be made from it.

    Attributes:
        stem: names the item.
        source: path of the image or caption; None where `text` stands for it.
        text: the caption itself, where it lies in no file.
        targets: what to make.
        control: path of the control image or video, if any.
        media: size and length of the image or video, where the names of targets tell them.
        content: digest that the source had when the order was written, where it was known.
    """

    stem: str
    source: str | None
    text: str | None
    targets: tuple[Target, ...]
    control: str | None = None
    media: Media | None = None
    content: str | None = None

    @property
    def place(self) -> str:
        """What to call its source in a message: the file, or the text itself."""
        if self.source is not None:
            return self.source
        text = self.text or ""
        return f"the text {text[:60]!r}{'...' * (len(text) > 60)}" if text else "the empty caption"


@dataclass(frozen=True)
class WorkOrder:
    """What one batch job is asked to do.

    Attributes:
        kind: `latents` or `text`.
        dataset: its name.
        model: its name.
        dataset_settings: the dataset's section of the configuration; the defaults for prompts.
        model_settings: the model's section of the configuration.
        recipe: the targets' recipe; empty where a rule has yet to make the model.
        items: what to encode.
        musubi_tuner: the installation whose scripts encode, if our encoders do not.
    """

    kind: str
    dataset: str
    model: str
    dataset_settings: Dataset
    model_settings: Model
    recipe: dict[str, Any]
    items: tuple[WorkItem, ...]
    musubi_tuner: ExternalProgram | None = None

    @property
    def layout(self) -> Layout:
        """Layout of its targets."""
        return layouts.of(self.model_settings.layout_name)

    @property
    def skips(self) -> bool:
        """Whether faulty items are skipped."""
        return self.dataset_settings.on_error == "skip"

    @property
    def work(self) -> str:
        """Kind and model: jobs of which are about equally fast."""
        return f"{self.kind} {self.model}"

    @property
    def pending(self) -> bool:
        """Whether the model has yet to be made, so that the job must find the recipe's digests."""
        return not self.recipe

    @cached_property
    def _head(self) -> str:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in _SECTIONS:
            values[name] = values[name] and values[name].model_dump()
        items = digest.of_bytes(self._items.encode())
        return digest.canonical(values | {"items": items, "version": _VERSION})

    @cached_property
    def _items(self) -> str:
        return json.dumps(self.items, separators=(",", ":"))

    @cached_property
    def name(self) -> str:
        """A digest of all that it asks for and of what was found."""
        return digest.of_bytes(self._head.encode())[:20]

    @property
    def path(self) -> Path:
        """Where it lies."""
        return FOLDER / f"{self.name}.json"

    @property
    def rule(self) -> str:
        """The name of its rule."""
        verb = "reuse" if self.reuses else "encode"
        return f"{verb}_{self.kind}_{self.dataset}_{self.name[:12]}"

    @property
    def log(self) -> str:
        """Where its job's log goes."""
        return f"logs/{self.kind}/{self.dataset}/{self.name[:12]}.log"

    @property
    def receipt(self) -> Path:
        """Where its receipt will lie."""
        return FOLDER / f"{self.name}{_RECEIPT}"

    @property
    def outputs(self) -> list[str]:
        """The targets that the batch rule declares.

        None where the job may find that what lies there is fresh (Snakemake deletes the declared
        outputs of a job before it runs) or may leave some out (on_error: skip), and where it links
        them to files of other names (Snakemake sets the mtime of declared outputs). Names with
        braces would be patterns to Snakemake; the job makes those undeclared.
        """
        if self.pending or self.reuses or self.skips:
            return []
        return [path for path in dict.fromkeys(self.paths) if not set("{}") & set(path)]

    @cached_property
    def reuses(self) -> bool:
        """Whether all that it asks for seems to be at hand, so that nothing has to be encoded."""
        return all(target.at_hand for item in self.items for target in item.targets)

    @property
    def paths(self) -> list[str]:
        """All its targets."""
        return [target.path for item in self.items for target in item.targets]

    def write(self) -> None:
        """Write it, with an mtime later than that of anything found and of its receipt.

        Where it lies there without a receipt it is left as it is: a build may be carrying it out,
        which Snakemake ends with an error where an input is newer than what was made of it.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        if self._is_waiting():
            return
        # The items lie beside the order: Snakemake digests its input once for each of the outputs.
        atomic.write(self._items_path, self._items.encode())
        atomic.write(self.path, self._head.encode())
        found = (target.found for item in self.items for target in item.targets)
        touch(self.path, max((int(each.split("@")[1]) for each in found if each), default=0))

    @property
    def _items_path(self) -> Path:
        return self.path.with_suffix(_ITEMS)

    def _is_waiting(self) -> bool:
        """Whether it lies there, whole and in no danger of being tidied away, and is not done."""
        try:
            return (
                self.path.stat().st_mtime > time.time() - _KEPT_SECONDS / 2
                and self.path.read_bytes() == self._head.encode()
                and self._items_path.read_bytes() == self._items.encode()
                and not self.receipt.exists()
            )
        except OSError:
            return False

    @classmethod
    def read(cls, path: Path) -> WorkOrder:
        """Read an order.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not one.
        """
        values = json.loads(path.read_bytes())
        if values.pop("version", 1) != _VERSION:
            raise OutdatedOrderError(f"{path} is of another version")
        for name, kind in _SECTIONS.items():
            values[name] = values[name] and kind.model_validate(values[name])
        values["items"] = tuple(
            _item(*values) for values in json.loads(path.with_suffix(_ITEMS).read_bytes())
        )
        return cls(**values)


def _item(
    stem: str,
    source: str | None,
    text: str | None,
    targets: list[list[Any]],
    control: str | None,
    media: list[int] | None,
    content: str | None,
) -> WorkItem:
    made = tuple(map(_target, targets))
    size = Media(*media) if media else None
    return WorkItem(stem, source, text, made, control, size, content)


def _target(values: list[Any]) -> Target:
    part, path, found, size, clip, at_hand = values
    frames = Clip(*clip) if clip else None
    return Target(part, path, found, Size(*size) if size else None, frames, tuple(at_hand))


@dataclass(frozen=True)
class Receipt:
    """What a batch job did.

    Attributes:
        sources: path -> its stat (size, mtime_ns, ctime_ns, inode) and digest, as it was read; for
            an image whose targets are not named by its size that too (width, height, upright).
        targets: path -> its stat (size, mtime_ns, inode) and key.
        faults: items set aside: stem, path and digest of the faulty file, and the fault in a line.
        counts: how many targets were encoded, taken from the spool, linked to an equal one, kept.
        began: when, in seconds since 1970 by the clock of the machine that did it; for people.
        seconds: how long the job took.
        starting: how many of them went by before anything was encoded.
        work: kind and model, whose speed this tells; "" where it tells none.
    """

    sources: dict[str, list[Any]]
    targets: dict[str, list[Any]]
    faults: list[dict[str, str]]
    counts: dict[str, int]
    seconds: float
    began: float = 0.0
    starting: float = 0.0
    work: str = ""

    def write(self, path: Path) -> None:
        """Write it.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        atomic.write(path, json.dumps(vars(self), separators=(",", ":")).encode())


def read_receipt(path: Path) -> Receipt:
    """Read a receipt.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not one.
    """
    try:
        return Receipt(**json.loads(path.read_bytes()))
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from None


def receipts() -> Iterator[Path]:
    """Yield the receipts on disk."""
    return (path for path in _listing() if path.name.endswith(_RECEIPT))


def _listing() -> list[Path]:
    return sorted(FOLDER.iterdir()) if FOLDER.is_dir() else []


def run_order(run: str, kind: str, planned: int) -> Path:
    """Return where a run's `manifest` or `train` order lies, of a plan made at some time (ns)."""
    return RUNS / f"{run}.{planned}.{kind}.json"


def newest_run_order(run: str, kind: str) -> Path | None:
    """Return a run's newest order of a kind, for processes that do not plan."""
    found = [
        path
        for path in RUNS.glob("*.json")
        if re.fullmatch(rf"{re.escape(run)}\.\d+\.{kind}\.json", path.name)
    ]
    return max(found, key=lambda path: int(path.name.split(".")[-3]), default=None)


def on_disk() -> list[WorkOrder]:
    """Return the work orders on disk, for processes that do not plan."""
    orders = []
    for path in _listing():
        if re.fullmatch(r"[0-9a-f]{20}\.json", path.name):
            try:
                orders.append(WorkOrder.read(path))
            except OutdatedOrderError:
                continue  # left behind by an earlier version, for no build of today
            except (OSError, ValueError, TypeError) as error:
                raise LatentmakeError(f"{path} is not a work order: {error}") from None
    return orders


def touch(path: Path, after_ns: int = 0) -> None:
    """Set a file's mtime to now, or just after another's where that lies in the future."""
    moment = max(time.time_ns(), after_ns + 1_000_000)
    os.utime(path, ns=(moment, moment))


def forget_old(keep: set[str]) -> None:
    """Delete what no build can need: week-old orders and receipts, spooled files that stand.

    A spooled file with a second name has been delivered; one that nobody fetched in a week is of a
    recipe that was given up.

    Args:
        keep: names of the orders of the present plan.
    """
    limit = time.time() - _KEPT_SECONDS
    for path in [*_listing(), *(RUNS.iterdir() if RUNS.is_dir() else ())]:
        with contextlib.suppress(FileNotFoundError):  # another plan may clean as well
            if path.name.split(".")[0] not in keep and path.stat().st_mtime < limit:
                path.unlink()
    forget_delivered()
    if SPOOL.is_dir():
        with os.scandir(SPOOL) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    # Its change time says since when it lies there: one that was kept from being
                    # replaced is older in itself.
                    if entry.stat().st_ctime < limit:
                        Path(entry.path).unlink()


def begin(orders: Sequence[WorkOrder]) -> BinaryIO | None:
    """Tidy up where no other build runs, and keep what the jobs of some orders will replace.

    To be called before any job, by a process that Snakemake lets build. Its lock is one on files:
    builds of different files run side by side, and what one of them keeps no other may tidy away.

    Returns:
        An open file, whose lock tells others of this build until the process ends; None where the
        file system knows no locks.
    """
    held: BinaryIO | None = None
    with contextlib.suppress(OSError):  # what is left behind costs space, no more
        _BUILDING.parent.mkdir(parents=True, exist_ok=True)
        held = _BUILDING.open("wb")
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            forget_old({order.name for order in orders})
        fcntl.flock(held, fcntl.LOCK_SH)
    keep_replaced(orders)
    return held


def end(held: BinaryIO | None, orders: Iterable[WorkOrder], keep: int) -> None:
    """Tidy up after a build that ended well, unless another one runs.

    Args:
        held: what `begin` returned.
        orders: that it carried out.
        keep: bytes that the store may take.
    """
    if held is None:
        return
    with contextlib.suppress(OSError):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        forget_delivered()
        targets = (
            x for order in orders if order.reuses for item in order.items for x in item.targets
        )
        store.forget_taken({path for target in targets for path in target.at_hand})
        store.prune(keep)


def keep_replaced(orders: Iterable[WorkOrder]) -> None:
    """Give what lies under the names of some orders' targets a name in the spool.

    Snakemake deletes a job's outputs before it runs. Should the job fail, or its configuration turn
    out to be a mistake, the next one takes them from there; so does this one, where another build
    has made its targets since they were planned.
    """
    for target in (target for order in orders for item in order.items for target in item.targets):
        with contextlib.suppress(OSError, CacheError):  # it spares work, no more
            found, _, moment = (target.found or "").partition("@")
            same = str(Path(target.path).stat().st_mtime_ns) == moment
            key = found if same else cachefile.read_header(target.path).key
            if key != "damaged" and not spooled(key).exists():
                SPOOL.mkdir(parents=True, exist_ok=True)
                os.link(target.path, spooled(key))


def unfinished() -> list[str]:
    """Return the files that killed writers left in the spool under temporary names."""
    if not SPOOL.is_dir():
        return []
    return [str(path) for path in SPOOL.glob(f".*{atomic.TEMPORARY_SUFFIX}")]


def forget_delivered() -> None:
    """Delete the spooled files whose targets bear their names now."""
    if SPOOL.is_dir():
        with os.scandir(SPOOL) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_nlink > 1:
                        Path(entry.path).unlink()


def spooled(key: str) -> Path:
    """Return where a finished target lies until its job ends."""
    return SPOOL / f"{key}.safetensors"
