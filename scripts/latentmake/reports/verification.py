"""Verification of runs' cache files and trained weights: each is read, and judged as a plan does.

The memo is not believed, since a file may be damaged that it says is fresh.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from latentmake import digest
from latentmake.data.item import Item
from latentmake.digest import target_stat
from latentmake.errors import shortened, storage_error
from latentmake.files import check
from latentmake.files.workspace import usable_cores
from latentmake.plan import store
from latentmake.plan.facts import Facts
from latentmake.plan.orders import PROMPTS, Part, Target, parts_of, prompt_items, prompts_of
from latentmake.plan.state import UNKNOWN, Judge, Stale
from latentmake.progress import Progress
from latentmake.reports.explanation import differences
from latentmake.training.order import trained_files

DAMAGED, UNEXPECTED, MISSING = "damaged", "not what the plan expects", "missing"
"""Verdicts on a file."""
EDITED = "edited"
"""Verdict on a sound file whose source was edited since: the next build encodes it again."""

_Wanted = tuple[Part, Judge, Item, Target]


class Finding(NamedTuple):
    """A file that is not as it should be.

    Attributes:
        is_ours: whether a repair may delete it.
        source: digest in the header of a file whose source was edited.
        key: of the file, as far as it is known: a repair puts a sound one into the store under it.
        done: what repair did, or why it did nothing.
    """

    path: str
    verdict: str
    reason: str = ""
    is_ours: bool = True
    key: str = ""
    done: str = ""
    source: str = ""


@dataclass
class Verified:
    """Result of a verification.

    Attributes:
        files: number of cache files that were read.
        size: bytes that were read.
        missing: paths of cache files that the next build makes.
        repaired: number of findings of which nothing is left.
    """

    files: int = 0
    size: int = 0
    seconds: float = 0.0
    repaired: int = 0
    missing: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def wrong(self) -> list[Finding]:
        """Findings besides the files whose sources were edited."""
        return [each for each in self.findings if each.verdict != EDITED]


def verify(facts: Facts, runs: Sequence[str], *, repair: bool = False) -> Verified:
    """Read runs' cache files and weights; `repair` deletes what is wrong; raises UserError."""
    wanted = {each[-1].path: each for run in runs for each in _wanted(facts, run)}
    found, began = Verified(), time.monotonic()
    with (
        ThreadPoolExecutor(usable_cores()) as pool,
        Progress(total=len(wanted), unit="files", desc="verifying") as progress,
    ):
        for each, (size, checked) in zip(wanted.values(), pool.map(_read, wanted), strict=True):
            progress.update()
            finding = _finding(facts, *each, checked)
            if finding and finding.verdict == MISSING:
                found.missing.append(finding.path)
                continue
            found.files += 1
            found.size += size
            found.findings += [finding] if finding else []
    found.seconds = time.monotonic() - began
    found.findings = sorted(_misplaced(found.findings, wanted))
    if repair:
        found.findings = [
            _repaired(each, facts) if each.is_ours else each for each in found.findings
        ]
        found.repaired = sum(not os.path.lexists(each.path) for each in found.findings)
        # A build reads again what is left, whatever its stat.
        facts.memo.targets.forget(each.path for each in found.findings)
    found.findings += (each for run in runs for each in _changed_weights(run))
    return found


def _misplaced(findings: Sequence[Finding], wanted: Mapping[str, _Wanted]) -> Iterator[Finding]:
    """Yield findings; latents of another picture of today have its place, and are not edited."""
    sources = set[str | None]()
    if any(each.source for each in findings):
        pictures = (x for x in wanted.values() if x[-1].size is not None)
        sources = {judge.contents.of(item) for _, judge, item, _ in pictures}
    for each in findings:
        if each.verdict == EDITED and each.source in sources:
            yield each._replace(verdict=UNEXPECTED, is_ours=True)
        else:
            yield each


def _wanted(facts: Facts, run_name: str) -> Iterator[_Wanted]:
    """Yield the targets of a run, and who judges each."""
    run, parts = facts.config.runs[run_name], dict[str, list[Part]]()
    for part in parts_of(facts.config, run):
        parts.setdefault(part.dataset, []).append(part)
    for dataset, several in parts.items():
        items = facts.wanted_items(dataset, run.model)
        judge = facts.judge(dataset, run.model, [part.name for part in several], items, paths=[])
        for part in several:
            if dataset == PROMPTS:
                inputs = prompt_items(prompts_of(facts.config, run))
            else:
                inputs = [each.inputs(part.name, judge.layout) for each in items]
            judge.contents.fetch(file for item in inputs for file in item.read)
            for item, targets in judge.targets(part.name, inputs):
                yield from ((part, judge, item, target) for target in targets)


# -- one file -------------------------------------------------------------------------------------


def _read(path: str) -> tuple[int, check.Checked | OSError]:
    try:
        return Path(path).stat().st_size, check.verify(path)
    except OSError as error:
        return 0, error


def _finding(
    facts: Facts,
    part: Part,
    judge: Judge,
    item: Item,
    target: Target,
    checked: check.Checked | OSError,
) -> Finding | None:
    path = target.path
    if isinstance(checked, FileNotFoundError):
        if not os.path.lexists(path):
            return Finding(path, MISSING)
        return Finding(path, DAMAGED, "is a link that leads nowhere")
    if isinstance(checked, OSError):
        return Finding(path, DAMAGED, f"cannot be read ({checked.strerror})", is_ours=False)
    if checked.is_foreign:
        reason = f"{checked.damage}; the next build replaces it"
        return Finding(path, UNEXPECTED, reason, is_ours=False)
    if checked.damage is not None or checked.header is None:
        known = facts.memo.targets.get(path) if checked.header is None else checked.header.key
        return Finding(path, DAMAGED, checked.damage or "", key=known or "")
    if judge.recipes[part.name] == UNKNOWN:  # the model is on another machine
        return None
    stale = judge.state(item, target, target_stat(Path(path).stat()))
    if not isinstance(stale, Stale):
        return None
    reason = ", ".join(map(str, differences(facts, part, stale))) or "it has another key"
    if stale.reason == "edited":
        source = item.source if item.source is not None else item.text or ""
        reason = f"it was not made of {shortened(' '.join(source.split()))} as it is"
        known = checked.header.source
        return Finding(path, EDITED, reason, is_ours=False, key=checked.header.key, source=known)
    return Finding(path, UNEXPECTED, reason, key=checked.header.key)


def _repaired(finding: Finding, facts: Facts) -> Finding:
    """Delete a file, or put it into the store where it is sound; of a link the link is deleted."""
    path = Path(finding.path)
    try:
        if finding.verdict == UNEXPECTED and not path.is_symlink():
            store.put(path, finding.key)
            return finding._replace(done="moved to the store")
        for name in [*_other_names(path, finding.key, facts), path]:
            name.unlink(missing_ok=True)
    except OSError as error:
        known = storage_error(error, path)
        return finding._replace(done=f"cannot be deleted ({known.what if known else error})")
    return finding._replace(done="deleted")


def _other_names(path: Path, key: str, facts: Facts) -> list[Path]:
    """Return other names of a damaged file, from which the next build would link it again."""
    if not key or path.is_symlink() or path.stat().st_nlink == 1:
        return []
    known = [store.stored(key)]
    known += [Path(name) for name, _, _ in facts.memo.targets.where("value", [key])]
    return [each for each in known if each.exists() and each.samefile(path)]


# -- trained weights ------------------------------------------------------------------------------


def _changed_weights(run: str) -> Iterator[Finding]:
    """Yield a finding for each file of trained weights that is not as its training wrote it.

    A repair never deletes them. Missing files are no finding: the next training makes them.
    """
    record, files = trained_files(run)
    folder = record.parent
    for name, expected in files.items():
        path = folder / name
        try:
            if digest.of_file(path) == expected:
                continue
            # An external trainer's own output is the same file, and would be taken again.
            others = [x for x in folder.rglob("*.safetensors") if x != path and x.samefile(path)]
        except FileNotFoundError:
            continue
        except OSError as error:
            reason = f"cannot be read ({error.strerror})"
        else:
            reason = (
                "changed since they were trained; restore the file from a copy, or delete "
                f"{' and '.join(map(str, [*sorted(others), record]))} and run `snakemake "
                f"train_{run}`, which writes them from the last checkpoint or trains again"
            )
        yield Finding(str(path), DAMAGED, reason, is_ours=False)
