"""Receipts: what jobs read and wrote for each batch; and estimates by them."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter

from latentmake.config.machines import Cluster
from latentmake.digest import SourceStat, TargetStat, target_stat
from latentmake.errors import CacheError
from latentmake.files import atomic
from latentmake.files.cachefile import Picture
from latentmake.files.state_file import read_state
from latentmake.files.workspace import Need, duration, human, is_remote
from latentmake.index.memo import Memo
from latentmake.plan.orders import FOLDER, Order, Target, pixels

Resources = dict[str, int | str | Callable[[object, int], int]]
_Group = TypeVar("_Group", bound=Hashable)
_UNKNOWN_SECONDS, _UNKNOWN_ITEMS = 2.0, 1024  # of an item, and in a batch, without past jobs


Amount = Annotated[float, Field(ge=0, le=1e18)]  # a larger one is damage, and overflows


class Past(NamedTuple):
    """Sums over past jobs of a kind and model; each counts twice as much as the one before."""

    targets: Amount = 0.0  # cache files that were encoded, or linked to an equal one
    seconds: Amount = 0.0  # from the first encoded item to the end
    size: Amount = 0.0  # bytes of the files, of several names of one file once
    starting: Amount = 0.0  # seconds from the start of the last job to its first encoded item
    words: str = ""  # on the bottleneck of the last job that was not short
    pixels: Amount = 0.0  # of the files; 0 of texts, and if releases before 0.4 encoded them

    def share(self, targets: float, pixels: float) -> float:
        """Return how many times these jobs some targets are, by their pixels if these are known."""
        return pixels / self.pixels if pixels and self.pixels else targets / (self.targets or 1)

    def time(self, targets: float) -> float:
        """Return the seconds that some targets take in a job that has started."""
        return targets * self.seconds / (self.targets or 1)


_PAST = TypeAdapter(Past).validate_json


def past_jobs(memo: Memo, work: str) -> Past | None:
    """Return what past jobs of a kind and model tell; None where none has run here."""
    try:
        return _PAST(memo.rates.get(work) or "")
    except ValueError:  # none, or in the form of a former version
        return None


def learn_job(memo: Memo, work: str, job: Past) -> None:
    """Remember a job of a kind and model; one without targets counts for nothing."""
    if job.targets > 0 and job.seconds > 0:
        old = past_jobs(memo, work) or Past()
        new = Past(
            old.targets / 2 + job.targets,
            old.seconds / 2 + job.seconds,
            old.size / 2 + job.size,
            job.starting or old.starting,
            job.words or old.words,
            (old.pixels or old.targets * job.pixels / job.targets) / 2 + job.pixels,
        )
        memo.rates.learn(work, None, json.dumps(new._asdict()))


def batch_items(memo: Memo, work: str, minutes: float, targets: float) -> int:
    """Return how many items of some targets each past jobs of a kind and model encoded in minutes.

    Starting a job shall be a tenth of it at most, however short the time asked for.
    """
    past = past_jobs(memo, work)
    if past is None:
        return _UNKNOWN_ITEMS
    seconds = max(minutes * 60 - past.starting, 9 * past.starting)
    return max(1, int(seconds / past.time(targets)))


def estimates(
    memo: Memo, orders: Iterable[Order], group: Callable[[Order, str], _Group]
) -> dict[_Group, Past]:
    """Return sums over the targets that some orders encode, in groups by order and part.

    Seconds are estimates by past jobs, bytes by these or by the shapes of what is encoded. They are
    0 where they are unknown.
    """
    found: dict[_Group, Past] = {}
    encoded = [order for order in orders if not order.reuses]
    if encoded:
        from latentmake.plan import sizes
    for order in encoded:
        past, parts = past_jobs(memo, order.work), dict[str, list[Target]]()
        for target in (each for item in order.items for each in item.targets):
            parts.setdefault(target.part, []).append(target)
        for part, targets in parts.items():
            old, number = found.get(name := group(order, part), Past()), len(targets)
            if past is None:
                seconds, size = 0.0, sizes.bytes_of(order, targets)
            else:
                share = past.share(number, pixels(targets))
                seconds, size = share * past.seconds, share * past.size
            found[name] = Past(old.targets + number, old.seconds + seconds, old.size + size)
    return found


def lines(memo: Memo, orders: Iterable[Order]) -> Iterator[str]:
    """Yield a line for each kind and model: time by past jobs, and bytes, where they are known."""
    for work, rest in estimates(memo, orders, lambda x, _: x.work).items():
        if past := past_jobs(memo, work):
            time = duration((past.starting + rest.seconds) / 60)
            yield f"{work.replace(' ', ' of ')}: about {time}, {human(rest.size)}"
        elif rest.size:
            yield f"{work.replace(' ', ' of ')}: about {human(rest.size)}"


def needs(memo: Memo, orders: Iterable[Order]) -> list[Need]:
    """Return the room that some orders need, as far as it is known."""
    found = estimates(memo, orders, lambda order, _: f"{order.kind} of {order.model}")
    return [Need(what, "cache", round(each.size)) for what, each in found.items() if each.size]


def resources_of(
    cluster: Cluster, kind: str, orders: Sequence[Order], memo: Memo | None
) -> Resources:
    """Return the cluster resources of a job of a kind (`encode`, `train`) with some orders.

    `memo` knows past jobs; None in a process that does not plan.
    """
    asked = cluster.encode if kind == "encode" else cluster.train
    past = past_jobs(memo, orders[0].work) if memo is not None and orders else None
    seconds = _UNKNOWN_SECONDS * max(1, sum(len(order.items) for order in orders))
    if past is not None:
        seconds = past.starting + past.time(sum(len(order.paths) for order in orders))
    limit = asked.runtime + (2 * seconds / 60 if kind == "encode" else 0)
    found: Resources = {
        "mem_mb": lambda wildcards, attempt: int(asked.mem_mb * (1 + (attempt - 1) / 2)),
        "runtime": lambda wildcards, attempt: math.ceil(limit * attempt),
    }
    slurm = {
        "slurm_partition": asked.partition or cluster.partition,
        "slurm_account": cluster.account,
        "constraint": asked.constraint or cluster.constraint,
        "qos": asked.qos or cluster.qos,
    }
    return found | {name: value for name, value in slurm.items() if value}


GONE = "this cache file is gone"


def _with(*names: str) -> AfterValidator:
    """Return the check that a dictionary has some keys."""

    def check(values: dict[str, str]) -> dict[str, str]:
        if lacks := {*names} - values.keys():
            raise ValueError(f"it lacks {', '.join(sorted(lacks))}")
        return values

    return AfterValidator(check)


NotedFault = Annotated[dict[str, str], _with("stem", "path", "digest", "line")]
"""A skipped item: stem, path and digest of the faulty file, and the fault in a line; that of a job
has dataset, model, kind and recipe as well."""


@dataclass(frozen=True)
class Receipt:
    """Result of a batch.

    Attributes:
        sources: path -> stat (size, mtime_ns, ctime_ns, inode) and digest of each file read; for an
            image whose targets are not named by its size also width, height, upright; for a caption
            the digest of its text as encoded, and the text of the file.
        faults: skipped items: stem, path and digest of the faulty file, and the fault in a line.
        counts: targets `encoded`, `spooled` (of the store), `linked` to an equal one, `kept`.
        starting: seconds from its start to the first encoded item; None where its process had
            encoded for another order.
    """

    sources: Mapping[str, Sequence[Any]]
    targets: Mapping[str, Sequence[Any]]  # path -> stat (size, mtime_ns, inode) and key
    faults: list[dict[str, str]]
    counts: dict[str, int]
    seconds: float
    starting: float | None = 0.0
    work: str = ""  # of the order; "" where nothing was encoded
    words: str = ""  # on its bottleneck; "" of a short job
    pixels: float = 0.0  # of all targets; 0 of texts

    @property
    def result(self) -> Past:
        """What the job did, for estimates of later ones."""
        encoded = self.counts.get("encoded", 0)
        done, number = encoded + self.counts.get("linked", 0), max(1, len(self.targets))
        return Past(
            targets=done,
            seconds=self.seconds - (self.starting or 0.0),
            size=encoded * sum(size for size, *_ in self.targets.values()) / number,
            starting=self.starting or 0.0,
            words=self.words,
            pixels=done * self.pixels / number,
        )

    def write(self, path: Path) -> None:
        """Write it."""
        atomic.write(path, json.dumps(vars(self), separators=(",", ":")).encode())


class _Checked(BaseModel):  # of another version, it may have other keys
    sources: dict[
        str,
        tuple[int, int, int, int, str]
        | tuple[int, int, int, int, str, str]  # with the text of a caption file
        | tuple[int, int, int, int, str, int, int, bool],  # with the size of an image
    ]
    targets: dict[str, tuple[int, int, int, str]]
    faults: list[Annotated[NotedFault, _with("dataset")]]
    counts: dict[str, int]
    seconds: Amount
    starting: Amount | None = 0.0
    work: str = ""
    words: str = ""
    pixels: Amount = 0.0


def read_receipt(path: Path) -> Receipt | None:
    """Read a receipt; None where it is missing or damaged."""
    found = read_state(path, _Checked.model_validate_json)
    return None if found is None else Receipt(**dict(found))


def check_listed(paths: Iterable[str]) -> None:
    """Refuse targets of batches that are not there, for Snakemake does not know of them.

    On a network file system, opening a folder is what brings the list of its files up to date.
    """
    folders: dict[str, set[str]] = {}
    for path in paths:
        folder, name = os.path.split(path)
        if folder not in folders:
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                folders[folder] = {entry.name for entry in entries}
        if name not in folders.get(folder, ()):
            raise CacheError(GONE, where=path, hint="run again")


def made_by(orders: Iterable[Order]) -> Iterator[tuple[str, TargetStat]]:
    """Yield the targets of some orders with their stats, as receipts tell them."""
    for receipt in filter(None, (read_receipt(order.receipt) for order in orders)):
        for path, (*stat, _) in receipt.targets.items():
            yield path, TargetStat(*stat)


def restore_times(files: Iterable[tuple[str, TargetStat]]) -> None:
    """Give files the times that they had, where they are as they were.

    Snakemake touches what a rule declares, once it has run. A linked file has other names, whose
    times change as well, and the next plan would read the headers of all.
    """
    for path, stat in files:
        with contextlib.suppress(OSError):
            now = target_stat(Path(path).stat())
            if now != stat and now._replace(mtime_ns=stat.mtime_ns) == stat:
                os.utime(path, ns=(stat.mtime_ns, stat.mtime_ns))


def learn_receipts(memo: Memo) -> None:
    """Add to the memo what jobs read and wrote, so that nobody reads it again."""
    known = {*memo.receipts.below("")}
    for path in sorted(FOLDER.glob("*.receipt.json")):
        if path.name in known:
            continue
        if receipt := read_receipt(path):
            for source, values in receipt.sources.items():
                (*stat, content), more = values[:5], values[5:]
                is_caption = len(more) == 1
                if is_caption:
                    memo.texts.learn(source, SourceStat(*stat), *more)
                if not is_caption or is_remote(source):
                    memo.sources.learn(source, SourceStat(*stat), content)
                if more and not is_caption:
                    memo.learn_picture(content, Picture(*more))
            for target, (*stat, key) in receipt.targets.items():
                memo.targets.learn(target, TargetStat(*stat), key)
            if receipt.work:
                learn_job(memo, receipt.work, receipt.result)
        memo.receipts.learn(path.name, None, "")  # a damaged one would only have spared work
