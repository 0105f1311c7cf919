"""Verification of a run's cache files and trained weights: reads every file and judges its state.

The memo's record of a file is not trusted: the file may be damaged and still have the same stat.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from latentmake.base import digest
from latentmake.base.digest import target_stat
from latentmake.base.errors import shortened, storage_error
from latentmake.base.machine import usable_cores
from latentmake.base.progress import Progress
from latentmake.data.item import Item
from latentmake.formats import integrity
from latentmake.pages.explanation import differences
from latentmake.plan import store
from latentmake.plan.facts import UNKNOWN, Facts
from latentmake.plan.judge import Judge
from latentmake.plan.orders import PROMPTS, Part, Target, parts_of, prompt_items, prompts_of
from latentmake.runs.order import trained_files

DAMAGED, UNEXPECTED, MISSING = "damaged", "not what the plan expects", "missing"
"""Verdicts on a file."""
EDITED = "edited"
"""Verdict on an undamaged file whose source was edited. The next build encodes it again."""

_Wanted = tuple[Part, Judge, Item, Target]


class Finding(NamedTuple):
    """A file that is not as it should be.

    Attributes:
        is_ours: whether a repair may delete the file.
        source: if the source was edited, its digest in the header of the file.
        key: key of the file, or "" if unknown. A repair moves an undamaged file into the store
            under this key.
        done: action of the repair, or the reason why it did nothing.
    """

    path: str
    verdict: str
    reason: str = ""
    is_ours: bool = True
    key: str = ""
    done: str = ""
    source: str = ""


def verify(
    facts: Facts, runs: Sequence[str], *, repair: bool = False
) -> tuple[list[Finding], list[str], dict[str, float]]:
    """Read the cache files and weights of runs; `repair` deletes faulty ones; raises UserError.

    Returns:
        The findings, the paths of missing cache files, which the next build makes, and figures:
        `files` and `size` (number and bytes of the cache files that were read), `seconds`, and
        `repaired` (number of findings whose file no longer exists at its path).
    """
    wanted = {entry[-1].path: entry for run in runs for entry in _wanted(facts, run)}
    began, figures = time.monotonic(), {"files": 0, "size": 0, "seconds": 0.0, "repaired": 0}
    findings, missing = list[Finding](), list[str]()
    with (
        ThreadPoolExecutor(usable_cores()) as pool,
        Progress(total=len(wanted), unit="files", desc="verifying") as progress,
    ):
        for entry, (size, checked) in zip(wanted.values(), pool.map(_read, wanted), strict=True):
            progress.update()
            finding = _finding(facts, *entry, checked)
            if finding and finding.verdict == MISSING:
                missing.append(finding.path)
                continue
            figures["files"] += 1
            figures["size"] += size
            if finding:
                findings.append(finding)
    figures["seconds"] = time.monotonic() - began
    findings = sorted(_misplaced(findings, wanted))
    if repair:
        findings = [
            _repaired(finding, facts) if finding.is_ours else finding for finding in findings
        ]
        figures["repaired"] = sum(not os.path.lexists(finding.path) for finding in findings)
        # The next build must read the remaining files again, even if their stat is unchanged.
        facts.memo.targets.forget(finding.path for finding in findings)
    findings += (finding for run in runs for finding in _changed_weights(run))
    return findings, missing, figures


def _misplaced(findings: Sequence[Finding], wanted: Mapping[str, _Wanted]) -> Iterator[Finding]:
    """Yield the findings, with a new verdict on latents that belong to another picture.

    If the source of an edited file is another picture of today, no picture was edited: the file
    lies in the wrong place.
    """
    sources = set[str | None]()
    if any(finding.source for finding in findings):
        pictures = (entry for entry in wanted.values() if entry[-1].size is not None)
        sources = {judge.contents.of(item) for _, judge, item, _ in pictures}
    for finding in findings:
        if finding.verdict == EDITED and finding.source in sources:
            yield finding._replace(verdict=UNEXPECTED, is_ours=True)
        else:
            yield finding


def _wanted(facts: Facts, run_name: str) -> Iterator[_Wanted]:
    """Yield the targets of a run, each with its part, judge and item."""
    run, parts = facts.config.runs[run_name], dict[tuple[str, str], list[Part]]()
    for part in parts_of(facts.config, run):
        parts.setdefault((part.dataset, part.model), []).append(part)
    for (dataset, model), several in parts.items():
        items = facts.wanted_items(dataset, model)
        judge = Judge(facts, dataset, model, [part.name for part in several], items, paths=[])
        for part in several:
            if dataset == PROMPTS:
                inputs = prompt_items(prompts_of(facts.config, run))
            else:
                inputs = [item.inputs(part.name, judge.layout) for item in items]
            judge.contents.fetch(file for item in inputs for file in item.read)
            for item, targets in judge.targets(part.name, inputs):
                yield from ((part, judge, item, target) for target in targets)


# -- one file -------------------------------------------------------------------------------------


def _read(path: str) -> tuple[int, integrity.Checked | OSError]:
    try:
        return Path(path).stat().st_size, integrity.verify(path)
    except OSError as error:
        return 0, error


def _finding(
    facts: Facts,
    part: Part,
    judge: Judge,
    item: Item,
    target: Target,
    checked: integrity.Checked | OSError,
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
        key = facts.memo.targets.get(path) if checked.header is None else checked.header.key
        return Finding(path, DAMAGED, checked.damage or "", key=key or "")
    if judge.recipes[part.name] == UNKNOWN:  # the model is on another machine
        return None
    stale = judge.state(item, target, target_stat(Path(path).stat()))
    if not isinstance(stale, Target):
        return None
    reason = ", ".join(map(str, differences(facts, part, item, stale))) or "it has another key"
    if stale.reason == "edited":
        source = item.source if item.source is not None else item.text or ""
        reason = f"it was not made of {shortened(' '.join(source.split()))} as it is"
        header = checked.header
        return Finding(path, EDITED, reason, is_ours=False, key=header.key, source=header.source)
    return Finding(path, UNEXPECTED, reason, key=checked.header.key)


def _repaired(finding: Finding, facts: Facts) -> Finding:
    """Delete a damaged file, or move an undamaged one to the store. A link is only deleted."""
    path = Path(finding.path)
    try:
        if finding.verdict == UNEXPECTED and not path.is_symlink():
            store.put(path, finding.key)
            return finding._replace(done="moved to the store")
        for name in [*_other_names(path, finding.key, facts), path]:
            name.unlink(missing_ok=True)
    except OSError as error:
        fault = storage_error(error, path)
        return finding._replace(done=f"cannot be deleted ({fault.what if fault else error})")
    return finding._replace(done="deleted")


def _other_names(path: Path, key: str, facts: Facts) -> list[Path]:
    """Return other hard links of a damaged file; the next build would link it again from them."""
    if not key or path.is_symlink() or path.stat().st_nlink == 1:
        return []
    names = [store.stored(key)]
    names += [Path(name) for name, _, _ in facts.memo.targets.where("value", [key])]
    return [name for name in names if name.exists() and name.samefile(path)]


# -- trained weights ------------------------------------------------------------------------------


def _changed_weights(run: str) -> Iterator[Finding]:
    """Yield a finding for each file of trained weights that changed since its training.

    A repair never deletes weights. Missing files are not reported: the next training makes them.
    """
    record, files = trained_files(run)
    folder = record.parent
    for name, expected in files.items():
        path = folder / name
        try:
            if digest.of_file(path) == expected:
                continue
            # The output of an external trainer is a hard link to the same file. If it stayed, the
            # damaged weights would be taken from it again.
            files_there = [*folder.rglob("*.safetensors")]
            others = [other for other in files_there if other != path and other.samefile(path)]
        except FileNotFoundError:
            continue
        except OSError as error:
            reason = f"cannot be read ({error.strerror})"
        else:
            reason = (
                "changed since they were trained; restore the file from a copy, or delete "
                f"{' and '.join(map(str, [*sorted(others), record]))} and run `latentmake build "
                f"{run}`, which writes them from the last checkpoint or trains again"
            )
        yield Finding(str(path), DAMAGED, reason, is_ours=False)
