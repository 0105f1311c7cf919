"""Verification of runs' cache files and trained weights: each is read, and compared with the plan.

No cache file is believed: a memo or a header may say that a damaged one is fresh.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from latentmake import digest
from latentmake.errors import CacheError, shortened, storage_error
from latentmake.files import cachefile
from latentmake.files.cachefile import Header
from latentmake.files.workspace import usable_cores
from latentmake.layouts.layout import parsed
from latentmake.plan import store
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import run_folder
from latentmake.plan.orders import PROMPTS, parts_of, prompt_items, prompts_of
from latentmake.progress import Progress
from latentmake.reports.explanation import recipe_differences

DAMAGED, UNEXPECTED, MISSING = "damaged", "not what the plan expects", "missing"
"""Verdicts on a file."""

_Recipes = Mapping[str, Mapping[str, object]]


class Finding(NamedTuple):
    """A file that is not as it should be.

    Attributes:
        is_ours: whether a repair may delete it.
        key: of a sound file, under which a repair puts it into the store.
        done: what repair did, or why it did nothing.
    """

    path: str
    verdict: str
    reason: str = ""
    is_ours: bool = True
    key: str = ""
    done: str = ""


@dataclass
class Verified:
    """Result of a verification.

    Attributes:
        files: number of cache files that were read.
        size: bytes that were read.
        missing: paths of cache files that the next build makes.
        unsummed: number of files whose header holds no checksum.
        repaired: number of findings of which nothing is left.
    """

    files: int = 0
    size: int = 0
    seconds: float = 0.0
    unsummed: int = 0
    repaired: int = 0
    missing: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def verify(facts: Facts, runs: Sequence[str], *, repair: bool = False) -> Verified:
    """Read the cache files of runs and their trained weights; `repair` deletes what is wrong.

    Raises:
        UserError: a dataset or a model cannot be read.
    """
    expected = {each.path: each for run in runs for each in _expected(facts, run)}
    parts = {part for run in runs for part in parts_of(facts.config, facts.config.runs[run])}
    known = (facts.recipe(part.dataset, part.model, parsed(part.name).kind) for part in parts)
    recipes = {digest.of_value(recipe): recipe for recipe in known if recipe}
    found, began = Verified(), time.monotonic()
    with (
        ThreadPoolExecutor(usable_cores()) as pool,
        Progress(total=len(expected), unit="files", desc="verifying") as progress,
    ):
        for size, has_checksum, finding in pool.map(partial(_read, recipes), expected.values()):
            progress.update()
            if finding and finding.verdict == MISSING:
                found.missing.append(finding.path)
                continue
            found.files += 1
            found.size += size
            found.unsummed += not (has_checksum or finding)
            found.findings += [finding] if finding else []
    found.seconds = time.monotonic() - began
    found.findings.sort()
    if repair:
        found.findings = [
            _repaired(each, expected[each.path].key, facts) if each.is_ours else each
            for each in found.findings
        ]
        found.repaired = sum(not os.path.lexists(each.path) for each in found.findings)
        # A build reads again what is left, whatever its stat.
        facts.memo.targets.forget(each.path for each in found.findings)
    found.findings += (each for run in runs for each in _changed_weights(run))
    return found


class Expected(NamedTuple):
    """Origin that a cache file should have.

    Attributes:
        source: path of the image or caption; its text where it has no file.
        content: digest of the inputs; "" where they cannot be read.
        recipe: digest of the recipe; "" where the model is not here.
        key: "" where it is unknown, as the size of an image that nobody read.
    """

    path: str
    part: str
    source: str
    content: str
    recipe: str
    key: str


def _expected(facts: Facts, run_name: str) -> Iterator[Expected]:
    """Yield the cache files of a run and what each should be made of.

    What a file says of its content is not believed.
    """
    run, memo = facts.config.runs[run_name], facts.memo
    parts: dict[str, list[str]] = {}
    for part in parts_of(facts.config, run):
        parts.setdefault(part.dataset, []).append(part.name)
    for dataset, names in parts.items():
        items = facts.wanted_items(dataset, run.model)
        judge = facts.judge(dataset, run.model, names, items)
        for name in names:
            if dataset == PROMPTS:
                inputs = prompt_items(prompts_of(facts.config, run))
            else:
                inputs = [x.inputs(name, judge.layout) for x in items]
            judge.contents.fetch(file[1:] for item in inputs for file in item.read)
            if parsed(name).kind == "latents":
                judge.contents.prepare_sizes(filter(None, map(judge.contents.of, inputs)))
            for item, targets in judge.targets(name, inputs):
                source = item.source if item.source is not None else item.text or ""
                for target in targets:
                    content, key = judge.contents.of(item) or "", ""
                    try:
                        if content:
                            known = memo.targets.get(target.path) or ""
                            content, key, _ = judge.wanted(item, target, content, known)
                    except (CacheError, OSError):
                        key = judge.needed(item, target, content) or ""
                    yield Expected(target.path, name, source, content, judge.recipes[name], key)


# -- one file -------------------------------------------------------------------------------------


def _read(recipes: _Recipes, wanted: Expected) -> tuple[int, bool, Finding | None]:
    """Read a cache file, and compare it with what it should be made of.

    Returns:
        Its size, whether it has a checksum, what is wrong with it.
    """
    path = wanted.path
    try:
        size = Path(path).stat().st_size
        checked = cachefile.verify(path)
    except FileNotFoundError:
        if not os.path.lexists(path):
            return 0, False, Finding(path, MISSING)
        return 0, False, Finding(path, DAMAGED, "is a link that leads nowhere")
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        return 0, False, Finding(path, DAMAGED, reason, is_ours=False)
    if checked.is_foreign:
        reason = f"{checked.damage}; the next build replaces it"
        return size, False, Finding(path, UNEXPECTED, reason, is_ours=False)
    if checked.damage is not None or checked.header is None:
        return size, False, Finding(path, DAMAGED, checked.damage or "")
    return size, checked.has_checksum, _compared(wanted, checked.header, checked.recipe, recipes)


def _compared(
    wanted: Expected, found: Header, recipe: Mapping[str, object], recipes: _Recipes
) -> Finding | None:
    """Compare the origin of a sound file, and its recipe, with those that it should have."""
    path, key = wanted.path, found.key
    source_fits = wanted.content in ("", found.source)
    recipe_fits = wanted.recipe in ("", found.recipe)
    if source_fits and recipe_fits and wanted.key in ("", key):
        return None
    if key == wanted.key:  # in a file without a checksum
        return Finding(path, DAMAGED, "its key is not that of its source and recipe")
    reasons = []
    if not recipe_fits:
        differences = recipe_differences(recipe, recipes.get(wanted.recipe, {}))
        reasons.append(", ".join(map(str, differences)) or "it has another recipe")
    if not source_fits:
        source = shortened(" ".join(wanted.source.split()))
        reasons.append(f"it was not made of {source} as it is")
    reason = "; ".join(reasons) or "it has another size, or was cut otherwise"
    return Finding(path, UNEXPECTED, reason, key=key)


def _repaired(finding: Finding, key: str, facts: Facts) -> Finding:
    """Delete a file, or put it into the store where it is sound; of a link the link is deleted."""
    path = Path(finding.path)
    try:
        if finding.key and not path.is_symlink():
            store.put(path, finding.key)
            return finding._replace(done="moved to the store")
        for name in [*_other_names(path, key, facts), path]:
            name.unlink(missing_ok=True)
    except OSError as error:
        known = storage_error(error, path)
        return finding._replace(done=f"cannot be deleted ({known.what if known else error})")
    return finding._replace(done="deleted")


def _other_names(path: Path, key: str, facts: Facts) -> list[Path]:
    """Return other names of a damaged file, from which the next build would link it again."""
    if path.is_symlink() or path.stat().st_nlink == 1:
        return []
    known = [store.stored(key)]
    known += [Path(name) for name, _, _ in facts.memo.targets.where("value", [key])]
    return [each for each in known if each.exists() and each.samefile(path)]


# -- trained weights ------------------------------------------------------------------------------


def _changed_weights(run: str) -> Iterator[Finding]:
    """Yield a finding for each file of trained weights that is not as its training wrote it.

    A repair never deletes them. Missing files are no finding: the next training makes them.
    """
    folder = run_folder(run)
    record = folder / "training.json"
    try:
        files = json.loads(record.read_bytes()).get("files", {}).items()
    except (OSError, ValueError, AttributeError):
        return
    for name, expected in files:
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
