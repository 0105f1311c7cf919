"""Receipts: the files that each batch read and wrote."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, GetPydanticSchema, TypeAdapter

from latentmake.base import atomic
from latentmake.base.digest import SourceStat, TargetStat, target_stat
from latentmake.base.paths import is_remote
from latentmake.base.state_file import read_state
from latentmake.data.memo import Memo
from latentmake.plan.estimates import Amount, Past, learn_job
from latentmake.plan.orders import FOLDER, Order


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
    device: str = ""  # see `Past`

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
            device=self.device,
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
