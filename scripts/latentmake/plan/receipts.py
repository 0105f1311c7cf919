"""Receipts (files read and written for each batch), and estimates of time and size from them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import AfterValidator, Field, GetPydanticSchema, TypeAdapter

from latentmake.base import atomic
from latentmake.base.digest import SourceStat, TargetStat, target_stat
from latentmake.base.paths import is_remote
from latentmake.base.state_file import read_state
from latentmake.config.machines import Cluster, Resources
from latentmake.data.memo import Memo
from latentmake.plan.orders import FOLDER, Order, Target

_Group = TypeVar("_Group", bound=Hashable)
# Without past jobs: seconds that an item takes, and items of a batch.
_UNKNOWN_SECONDS, _UNKNOWN_ITEMS = 2.0, 1024


Amount = Annotated[float, Field(ge=0, le=1e18)]  # a larger value means damage, and would overflow


class Past(NamedTuple):
    """Sums over past jobs of a kind and model; a job counts twice as much as the one before it."""

    targets: Amount = 0.0  # cache files that were encoded, or linked to an equal one
    seconds: Amount = 0.0  # from the first encoded item to the end
    size: Amount = 0.0  # bytes of the files; a file with several names counts once
    starting: Amount = 0.0  # seconds from the start of the last job to its first encoded item
    words: str = ""  # text on the bottleneck of the last job that was not short
    pixels: Amount = 0.0  # pixels of the files; 0 for texts and for jobs of releases before 0.4

    def time(self, targets: float) -> float:
        """Return the seconds that a number of targets takes, without the start of the job."""
        return targets * self.seconds / (self.targets or 1)


_PAST = TypeAdapter(Past).validate_json


def past_jobs(memo: Memo, work: str) -> Past | None:
    """Return the sums over past jobs of a kind and model; None if none has run here."""
    try:
        return _PAST(memo.rates.get(work) or "")
    except ValueError:  # missing, or in the form of an earlier release
        return None


def learn_job(memo: Memo, work: str, job: Past) -> None:
    """Remember a job of a kind and model; ignore it if it encoded no targets."""
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
    """Return the number of items that a job of a kind and model encodes in some minutes.

    `targets` is the number of targets per item. A batch is at least so long that starting the job
    takes at most a tenth of its time.
    """
    past = past_jobs(memo, work)
    if past is None:
        return _UNKNOWN_ITEMS
    seconds = max(minutes * 60 - past.starting, 9 * past.starting)
    return max(1, int(seconds / past.time(targets)))


def estimates(
    memo: Memo, orders: Iterable[Order], group: Callable[[Order, str], _Group]
) -> dict[_Group, Past]:
    """Return sums over the targets that some orders encode; `group` maps order and part to a group.

    Seconds are estimated from past jobs. Bytes are estimated from past jobs, or else from the
    shapes of latents and embeddings. Unknown values are 0.
    """
    sums: dict[_Group, Past] = {}
    encoded = [order for order in orders if not order.reuses]
    if encoded:
        from latentmake.plan import sizes
    for order in encoded:
        past, parts = past_jobs(memo, order.work), dict[str, list[Target]]()
        for target in order.targets:
            parts.setdefault(target.part, []).append(target)
        for part, targets in parts.items():
            old, number = sums.get(name := group(order, part), Past()), len(targets)
            if past is None:
                seconds, size = 0.0, sizes.bytes_of(order, targets)
            else:
                # The ratio of these targets to the past jobs: of pixels if known, else of numbers.
                share, amount = number / (past.targets or 1), sum(t.pixels for t in targets)
                if amount and past.pixels:
                    share = amount / past.pixels
                seconds, size = share * past.seconds, share * past.size
            sums[name] = Past(old.targets + number, old.seconds + seconds, old.size + size)
    return sums


def resources_of(
    cluster: Cluster, kind: str, orders: Sequence[Order], memo: Memo | None
) -> Resources:
    """Return the cluster resources of a job of a kind (`encode`, `train`) with some orders.

    `memo` has the sums over past jobs; None in a process that does not plan.
    """
    past = past_jobs(memo, orders[0].work) if memo is not None and orders else None
    seconds = _UNKNOWN_SECONDS * max(1, sum(len(order.items) for order in orders))
    if past is not None:
        seconds = past.starting + past.time(sum(len(order.paths) for order in orders))
    return cluster.resources(kind, seconds if kind == "encode" else 0.0)


def _with(*names: str) -> AfterValidator:
    """Return a validator that checks that a dictionary has some keys."""

    def check(values: dict[str, str]) -> dict[str, str]:
        if lacks := {*names} - values.keys():
            raise ValueError(f"it lacks {', '.join(sorted(lacks))}")
        return values

    return AfterValidator(check)


def _as(kind: Any) -> GetPydanticSchema:
    """Return an annotation of a field that is checked like another type when it is read."""
    return GetPydanticSchema(lambda _, handler: handler.generate_schema(kind))


_SOURCE: Any = (
    tuple[int, int, int, int, str]
    | tuple[int, int, int, int, str, str]  # with the text of a caption file
    | tuple[int, int, int, int, str, int, int, bool]  # with the size of an image
)
NotedFault = Annotated[dict[str, str], _with("stem", "path", "digest", "line")]
"""A skipped item: stem, path and digest of the faulty file, and the fault in a line. If a job found
the fault, dataset, model, kind and recipe too."""


@dataclass(frozen=True)
class Receipt:
    """Result of a batch.

    Attributes:
        sources: path -> stat (size, mtime_ns, ctime_ns, inode) and digest of each file read. Width,
            height and upright follow for an image if the names of its targets do not contain its
            size. For a caption, the digest is that of its text as encoded, and the file's text
            follows.
        targets: path -> stat (size, mtime_ns, inode) and key.
        faults: skipped items: stem, path and digest of the faulty file, and the fault in a line.
        counts: number of targets by kind: `encoded`, `spooled` (restored from the store), `linked`
            to an equal file, `kept`.
        starting: seconds from the job's start to the first encoded item; None if the process had
            already encoded for another order.
    """

    sources: Annotated[Mapping[str, Sequence[Any]], _as(dict[str, _SOURCE])]
    targets: Annotated[Mapping[str, Sequence[Any]], _as(dict[str, tuple[int, int, int, str]])]
    faults: list[Annotated[NotedFault, _with("dataset")]]
    counts: dict[str, int]
    seconds: Amount
    starting: Amount | None = 0.0
    work: str = ""  # `Order.work`; "" if nothing was encoded
    words: str = ""  # text on the job's bottleneck; "" for a short job
    pixels: Amount = 0.0  # pixels of all targets; 0 for texts

    @property
    def result(self) -> Past:
        """Sums of this job, for estimates of later jobs."""
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
        """Write the receipt."""
        atomic.write(path, json.dumps(vars(self), separators=(",", ":")).encode())


_RECEIPT = TypeAdapter(Receipt).validate_json  # permits unknown keys of other versions


def read_receipt(path: Path) -> Receipt | None:
    """Read a receipt; return None if it is missing or damaged."""
    return read_state(path, _RECEIPT)


def made_by(orders: Iterable[Order]) -> Iterator[tuple[str, TargetStat]]:
    """Yield the targets of some orders with the stats in their receipts."""
    for receipt in filter(None, (read_receipt(order.receipt) for order in orders)):
        for path, (*stat, _) in receipt.targets.items():
            yield path, TargetStat(*stat)


def restore_times(files: Iterable[tuple[str, TargetStat]]) -> None:
    """Give files their former times back, unless they changed otherwise.

    Snakemake touches a rule's declared files once it has run. All names of a linked file change
    their time with it, and the next plan would read the headers of all of them.
    """
    for path, stat in files:
        with contextlib.suppress(OSError):
            now = target_stat(Path(path).stat())
            if now != stat and now._replace(mtime_ns=stat.mtime_ns) == stat:
                os.utime(path, ns=(stat.mtime_ns, stat.mtime_ns))


def learn_receipts(memo: Memo) -> None:
    """Add the digests and keys in receipts to the memo, so that no plan reads the files again."""
    learnt = {*memo.receipts.below("")}
    for path in sorted(FOLDER.glob("*.receipt.json")):
        if path.name in learnt:
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
                    memo.learn_picture(content, *more)
            for target, (*stat, key) in receipt.targets.items():
                memo.targets.learn(target, TargetStat(*stat), key)
            if receipt.work:
                learn_job(memo, receipt.work, receipt.result)
        memo.receipts.learn(path.name, None, "")  # damaged ones too: they only cost reading again
