"""Verification of a run's cache files: each is read, and compared with what the plan expects.

A file is read once, whatever the number of its names. Those of the store and the spool are checked
too, since the next build may link to them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from latentmake import layouts
from latentmake.errors import CacheError
from latentmake.files import atomic
from latentmake.files.disk import human
from latentmake.index.memo import TargetStat, target_stat
from latentmake.index.table import is_text
from latentmake.layouts import kind_of
from latentmake.plan.expected import Expected
from latentmake.plan.listing import Folder, Listing
from latentmake.plan.spool import SPOOL
from latentmake.plan.store import STORE
from latentmake.progress import Progress
from latentmake.reports.repair import repaired
from latentmake.reports.verify_files import Content, Reading, read_all
from latentmake.reports.verify_findings import (
    WEIGHTS,
    Finding,
    Origins,
    kept_file,
    unexpected_file,
)
from latentmake.reports.verify_order import Place, VerifyOrder
from latentmake.reports.verify_weights import changed_weights

__all__ = ["Verified", "report_path", "verify"]

_SHOWN = 200  # lines; the JSON has all findings
_KEPT = (STORE, SPOOL)
_KEPT_NAME = re.compile(r"([0-9a-f]{64})(\.safetensors)?")


@dataclass
class Verified:
    """Result of a verification.

    Attributes:
        files: number of files of the run that were read.
        size: bytes that were read, those of the store included.
        seconds: that took.
        missing: targets without a file; the next build makes them.
        unsummed: files whose header holds no checksum.
    """

    files: int = 0
    size: int = 0
    seconds: float = 0.0
    missing: list[str] = field(default_factory=list)
    unsummed: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def wrong(self) -> list[Finding]:
        """Findings that are no mere notes."""
        return [each for each in self.findings if not each.note]

    @property
    def left(self) -> list[Finding]:
        """Findings of what is wrong still."""
        return [each for each in self.findings if each.is_open]


def report_path(run: str) -> Path:
    """Return the path of a run's findings as JSON; not declared, since failing jobs keep it."""
    return Path("reports") / f"verify_{run}.json"


def verify(order: VerifyOrder, threads: int, say: Callable[[str], None]) -> None:
    """Read a run's cache files, say what is wrong, and delete that where it is asked for.

    Args:
        order: of the planner.
        threads: cores that may be used.
        say: takes a line.

    Raises:
        CacheError: something is wrong that was not repaired.
        StorageError: the findings cannot be written.
    """
    found = _verified(order, threads)
    for finding in found.findings[:_SHOWN]:
        say(finding.line)
    if len(found.findings) > _SHOWN:
        say(f"... and {len(found.findings) - _SHOWN} more, all in {report_path(order.run)}")
    for line in _summary(found):
        say(line)
    _write(order, found)
    if found.left:
        several = len(found.left) > 1
        what = f"{len(found.left)} file{'s are' if several else ' is'} wrong"
        hint = f"see {report_path(order.run)}"
        if not order.repair and any(each.kind != WEIGHTS for each in found.left):
            hint = (
                f"`snakemake verify_{order.run} --config repair=true` deletes what is wrong and "
                "ours, and the next build makes it"
            )
        raise CacheError(what, where=f"verify_{order.run}", hint=hint)


def _verified(order: VerifyOrder, threads: int) -> Verified:
    expected = {each.path: each for place in order.places for each in place.files}
    listed: Listing = {}
    foreign: list[Finding] = []
    others: dict[str, list[str]] = {}
    for place in order.places:
        for path, stat, bases in _files(place, expected):
            if bases is None:
                finding = unexpected_file(path, None, ())
                foreign += [finding] if finding else []
                continue
            listed[path] = stat
            others[path] = bases
    kept: Listing = {}
    keys: dict[str, str] = {}
    for path, stat in (pair for folder in _KEPT for pair in _entries(str(folder))):
        if name := _KEPT_NAME.fullmatch(path.rpartition("/")[2]):
            kept[path], keys[path] = stat, name[1]
        elif finding := unexpected_file(path, None, ()):
            foreign.append(finding)
    stats = listed | kept
    result = Verified(missing=sorted(expected.keys() - listed.keys()), findings=foreign)
    files = {path: Reading(path, stat.size, keys.get(path, "")) for path, stat in stats.items()}
    files |= {
        path: _reading(each, listed[path]) for path, each in expected.items() if path in listed
    }
    contents = _contents(stats, files, threads, result)
    origins = Origins(expected, order.recipes)
    for path in listed:
        wanted, found = expected.get(path), contents[path]
        if found.gone:
            result.missing += [path] if wanted else []
            continue
        result.files += 1
        result.unsummed += found.ours and not found.summed
        finding = (
            unexpected_file(path, found, others[path])
            if wanted is None
            else origins.finding(wanted, found)
        )
        result.findings += [finding] if finding else []
    for path in kept:
        finding = kept_file(path, contents[path], keys[path])
        result.findings += [finding] if finding else []
    for finding, stat in _linked(result.findings, stats):
        result.findings.append(finding)
        stats[finding.path] = stat
    result.findings += changed_weights(order.run)
    result.findings.sort()
    if order.repair:
        result.findings = [repaired(each, stats) for each in result.findings]
    return result


def _files(
    place: Place, expected: dict[str, Expected]
) -> Iterator[tuple[str, TargetStat, list[str] | None]]:
    """Yield path and stat of the files in the folders of a run, with the bases of others' items.

    These are None of a file whose name is no cache file's.
    """
    layout = layouts.of(place.layout)
    folders = tuple(f"{folder}/" for folder in place.folders)
    top, others = f"cache/{place.dataset}/{place.model}", {*place.others}
    for path, stat in Folder(top).listing().items():
        if path in expected:
            yield path, stat, []
            continue
        below = path[len(top) + 1 :]
        if "/" in below and not path.startswith(folders):
            continue  # of other runs
        name = below.partition("/")[2]
        bases = layout.owners(name) if name and is_text(name) else ()
        yield path, stat, [each for each in bases if each in others] if bases else None


def _entries(folder: str) -> Iterator[tuple[str, TargetStat]]:
    """Yield path and stat of what lies in a folder itself, but not of its sub-folders."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as found:
        for entry in found:
            with contextlib.suppress(FileNotFoundError):  # taken by a build that runs beside
                if not entry.is_dir():
                    yield entry.path, target_stat(entry.stat(follow_symlinks=False))


def _reading(wanted: Expected, stat: TargetStat) -> Reading:
    key, content, recipe = wanted.key, wanted.content, wanted.recipe
    return Reading(wanted.path, stat.size, key, content, recipe, kind_of(wanted.part) == "text")


def _contents(
    found: Listing, readings: Mapping[str, Reading], threads: int, result: Verified
) -> dict[str, Content]:
    """Return the content of each file; names of the same file share one."""
    names: dict[TargetStat, list[str]] = {}
    for path, stat in found.items():
        names.setdefault(stat, []).append(path)
    several = list(names.values())
    files = [readings[each[0]] for each in several]
    contents: dict[str, Content] = {}
    result.size = sum(each.size for each in files)
    begun = time.monotonic()
    reading = read_all(files, threads)
    with Progress(total=result.size, unit="B", unit_scale=True, desc="verifying") as progress:
        for number, content in reading:
            contents |= dict.fromkeys(several[number], content)
            progress.update(files[number].size)
    result.seconds = time.monotonic() - begun
    return contents


def _linked(findings: Sequence[Finding], stats: Listing) -> Iterator[tuple[Finding, TargetStat]]:
    """Yield a finding for each further name, in caches of other runs, of a damaged file."""
    damaged = {
        stats[each.path]: each for each in findings if each.kind in ("damaged", "edited header")
    }
    if not any(_names(each.path) > 1 for each in damaged.values()):
        return
    for path, stat in Folder("cache").listing().items():
        if path not in stats and stat in damaged:
            other = damaged[stat]
            reason = f"the same file as {other.path}: {other.reason}"
            yield Finding(path, other.kind, reason), stat


def _names(path: str) -> int:
    try:
        return os.lstat(path).st_nlink
    except OSError:
        return 0


def _summary(found: Verified) -> Iterator[str]:
    speed = f"{human(found.size)} in {found.seconds:.1f} s"
    if found.seconds:
        speed += f", {human(found.size / found.seconds)} a second"
    yield f"verified {found.files} cache files ({speed})"
    counts = Counter(each.kind for each in found.wrong)
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
    done = len(found.wrong) - len(found.left)
    yield f"{len(found.wrong)} wrong{f' ({kinds})' if kinds else ''}, {done} repaired"
    notes = Counter(each.kind for each in found.findings if each.note)
    lines = {
        "missing: the next build makes them": len(found.missing),
        "foreign: in no item's place, and left as they are": notes["foreign"],
        "orphaned: the next build removes them": notes["orphan"],
        "odd, as their encoder wrote them": notes["odd"],
        "without a checksum: they were made by an earlier release": found.unsummed,
    }
    for what, number in lines.items():
        if number:
            yield f"{number} {what}"


def _write(order: VerifyOrder, found: Verified) -> None:
    values = {
        "run": order.run,
        "repair": order.repair,
        "files": found.files,
        "bytes": found.size,
        "seconds": round(found.seconds, 3),
        "wrong": len(found.wrong),
        "repaired": len(found.wrong) - len(found.left),
        "missing": found.missing,
        "without_checksum": found.unsummed,
        "findings": [
            {
                "path": each.path,
                "kind": each.kind,
                "reason": each.reason,
                "wrong": not each.note,
                "done": each.done,
            }
            for each in found.findings
        ],
    }
    atomic.write(report_path(order.run), json.dumps(values, indent=1).encode())
