"""Receipts: what jobs read and wrote for each batch, for the next plan's memo."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from latentmake.errors import CacheError
from latentmake.files import atomic
from latentmake.files.cachefile import Picture
from latentmake.index.memo import Memo, SourceStat, TargetStat
from latentmake.plan.estimates import Past, learn_job
from latentmake.plan.orders import FOLDER

GONE = "this cache file is gone"


@dataclass(frozen=True)
class Receipt:
    """Result of a batch.

    Attributes:
        sources: path -> stat (size, mtime_ns, ctime_ns, inode) and digest of each file read; for an
            image whose targets are not named by its size also width, height, upright.
        targets: path -> stat (size, mtime_ns, inode) and key.
        faults: skipped items: stem, path and digest of the faulty file, and the fault in a line.
        counts: targets `encoded`, `spooled` (of the store), `linked` to an equal one, `kept`.
        began: seconds since 1970, by the clock of its machine.
        starting: seconds from its start to the first encoded item; None where its process had
            encoded for another order.
        work: of the order; "" where nothing was encoded.
        stages: seconds in which the device encoded, and waited for `reading` and `writing`.
        words: on its bottleneck; "" of a short job.
    """

    sources: dict[str, list[Any]]
    targets: dict[str, list[Any]]
    faults: list[dict[str, str]]
    counts: dict[str, int]
    seconds: float
    began: float = 0.0
    starting: float | None = 0.0
    work: str = ""
    stages: dict[str, float] = field(default_factory=dict)
    words: str = ""

    @property
    def result(self) -> Past:
        """What the job did, for estimates of later ones."""
        encoded = self.counts.get("encoded", 0)
        sizes = [target[0] for target in self.targets.values()]
        return Past(
            targets=encoded + self.counts.get("linked", 0),
            seconds=self.seconds - (self.starting or 0.0),
            size=encoded * sum(sizes) / max(1, len(sizes)),
            starting=self.starting or 0.0,
            words=self.words,
        )

    def write(self, path: Path) -> None:
        """Write it."""
        atomic.write(path, json.dumps(vars(self), separators=(",", ":")).encode())


def read_receipt(path: Path) -> Receipt:
    """Read a receipt; an OSError or ValueError tells that there is none."""
    try:
        values = json.loads(path.read_bytes())  # of another version, it may have other keys
        known = {each.name for each in fields(Receipt)}
        return Receipt(**{name: value for name, value in values.items() if name in known})
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from None


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


def learn_receipts(memo: Memo) -> None:
    """Add to the memo what jobs read and wrote, so that nobody reads it again."""
    known = {*memo.receipts.below("")}
    for path in sorted(FOLDER.glob("*.receipt.json")):
        if path.name in known:
            continue
        try:
            receipt = read_receipt(path)
            for source, values in receipt.sources.items():
                (*stat, content), size = values[:5], values[5:]
                memo.sources.learn(source, SourceStat(*stat), content)
                if size:
                    memo.learn_picture(content, Picture(*size))
            for target, (*stat, key) in receipt.targets.items():
                memo.targets.learn(target, TargetStat(*stat), key)
            if receipt.work:
                learn_job(memo, receipt.work, receipt.result)
        except (OSError, ValueError, TypeError):
            continue  # it spares work, no more
        memo.receipts.learn(path.name, None, "")
