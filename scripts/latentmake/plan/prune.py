"""Files that no configuration names any more: listed, and removed as they were listed.

Only files that this tool wrote are listed: cache files by their headers, unfinished ones by their
names, a manifest by the digest in its lock.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from latentmake import digest
from latentmake.config.fields import Name
from latentmake.config.root import Config
from latentmake.errors import CacheError, ConfigError, StorageError, UserError
from latentmake.files import atomic
from latentmake.files.cachefile import read_header
from latentmake.files.removal import ListedFile, files_below, remove, remove_empty
from latentmake.layouts import kind_of
from latentmake.plan import owners
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import read_lock
from latentmake.plan.parts import PROMPTS, parts_of
from latentmake.plan.store import STORE

_NAME = TypeAdapter(Name)
_TEMPORARY = re.compile(rf"\.[0-9a-f]{{16,32}}(\.\d+)+{re.escape(atomic.TEMPORARY_SUFFIX)}")
_FOREIGN = "not written by latentmake"


@dataclass
class Pruning:
    """Files of a dataset's caches that may be removed.

    Attributes:
        groups: what and why -> files.
        left: path -> why it stays.
    """

    groups: dict[tuple[str, str], list[ListedFile]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def add(self, what: str, why: str, file: ListedFile) -> None:
        """Add a file to a group."""
        self.groups.setdefault((what, why), []).append(file)

    @property
    def files(self) -> list[ListedFile]:
        """All files that may be removed."""
        return [file for files in self.groups.values() for file in files]

    def remove(self) -> list[ListedFile]:
        """Remove the files that have not changed since they were listed; return those removed.

        Raises:
            StorageError: some cannot be removed; all others are.
        """
        removed: list[ListedFile] = []
        failed: list[tuple[str, str | None]] = []
        for file in self.files:
            try:
                removed += [file] if remove(file) else []
            except OSError as error:
                failed.append((file.path, error.strerror))
        remove_empty(file.path for file in removed if file.path.startswith("cache/"))
        if failed:
            path, fault = failed[0]
            what = f"cannot be removed ({fault}), and {len(failed) - 1} more"
            raise StorageError(what, where=path, hint="check the permissions of its folder")
        return removed


def prunable(config: Config) -> list[str]:
    """Return the datasets of a configuration, and folders of `cache/` that are none of them."""
    found: set[str] = set()
    if Path("cache").is_dir():
        found = {each.name for each in Path("cache").iterdir() if _is_name(each.name)}
    return sorted(found | {*config.datasets})


def _is_name(name: str) -> bool:
    with contextlib.suppress(ValidationError):
        return bool(_NAME.validate_python(name))
    return name == PROMPTS


def find(facts: Facts, dataset: str) -> Pruning:
    """Return the files of a dataset that the configuration does not name; removes nothing.

    Raises:
        ConfigError: another project uses the caches.
    """
    if (project := owners.other_owner(dataset)) is not None:
        what = f"the project {project} uses this folder too"
        raise ConfigError(what, where=f"cache/{dataset}", hint="give the command in its folder")
    found = Pruning()
    _find_caches(facts, dataset, found)
    try:
        _find_stored(_recipes(facts), found)
    except UserError as error:
        found.left[str(STORE)] = f"a run's recipe is not known ({error})"
    _find_manifests(dataset, facts.config, found)
    return found


def _find_caches(facts: Facts, dataset: str, found: Pruning) -> None:
    """Find caches of unnamed models and parts, and of other layouts than a model's."""
    root, spared = f"cache/{dataset}", _spared(facts.config)
    parts: dict[str, set[str]] = {}
    for run in facts.config.runs.values():
        for part in parts_of(facts.config, run, generated=True):
            if part.dataset == dataset:
                folder = facts.layout(part.model).folder(*part)
                parts.setdefault(part.model, set()).add(folder.split("/", 3)[3])
    for path, file in files_below(root):
        model, _, rest = path.removeprefix(f"{root}/").partition("/")
        part_folder, _, name = rest.partition("/")
        if model == owners.OWNER and not rest:
            if file is not None and not parts:
                found.add(root, "no run has the dataset", file)
            continue
        what, why = f"{root}/{model}", f"no run of {dataset} has the model {model}"
        if model in parts:
            if rest == owners.ADOPTED:
                continue
            what, why = f"{root}/{model}/{part_folder}", f"no run needs {part_folder} of it"
            if part_folder in parts[model]:
                layout = facts.layout(model)
                if layout.owners(name) or _is_temporary(path):
                    continue  # builds remove what has no item
                why = f"not of the layout {layout.name}"
        if file is None:
            found.left[path] = "a link, or no regular file"
        elif not rest or not (_is_temporary(path) or rest == owners.ADOPTED or _key(path)):
            found.left[path] = _FOREIGN
        elif _is_spared(path, spared):
            found.left[path] = "the configuration names it"
        else:
            found.add(what, why, file)


def _is_temporary(path: str) -> bool:
    return _TEMPORARY.fullmatch(path.rpartition("/")[2]) is not None


def _key(path: str) -> str | None:
    try:
        return read_header(path).key
    except (CacheError, OSError):
        return None


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a configuration, of which some are paths."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str | Path) and str(value) and "\0" not in str(value):
        yield str(value)


def _spared(config: Config) -> list[str]:
    """Return the real paths in `cache/` that a configuration names: sources, models and others."""
    root = f"{os.path.realpath('cache')}/"
    real = (os.path.realpath(text) for text in _texts(config.model_dump()))
    return sorted({path for path in real if path.startswith(root)})


def _is_spared(path: str, spared: list[str]) -> bool:
    real = os.path.realpath(path)
    return any(real == each or real.startswith(f"{each}/") for each in spared)


def _recipes(facts: Facts) -> set[str]:
    """Return the digests of all runs' recipes; a UserError where one of them is not known."""
    found: set[str] = set()
    for run in facts.config.runs.values():
        for part in parts_of(facts.config, run, generated=True):
            recipe = facts.recipe(part.dataset, part.model, kind_of(part.name))
            if not recipe:
                raise CacheError("is not made yet", where=f"models.{part.model}")
            found.add(digest.of_value(recipe))
    return found


def _find_stored(recipes: set[str], found: Pruning) -> None:
    """Find files of the store whose recipe no run has, so that no build links them."""
    for path, file in files_below(str(STORE)):
        try:
            header = read_header(path) if file is not None else None
        except (CacheError, OSError):
            header = None
        if header is None or file is None or header.key != path.removeprefix(f"{STORE}/"):
            if not _is_temporary(path):
                found.left[path] = _FOREIGN
        elif header.recipe not in recipes:
            found.add(str(STORE), "no run has their recipe", file)


def _find_manifests(dataset: str, config: Config, found: Pruning) -> None:
    """Find manifests and locks of the dataset's runs that are gone; weights and pictures stay."""
    folders = sorted(Path("runs").iterdir()) if Path("runs").is_dir() else []
    for folder in folders:
        if folder.name in config.runs or folder.is_symlink() or not folder.is_dir():
            continue
        paths = [folder / "dataset.lock", folder / "manifest.jsonl"]
        lock = read_lock(paths[0])
        if not any(part.startswith(f"{dataset}/") for part in lock.parts):
            continue
        try:
            files = [ListedFile.of(str(path), path.lstat()) for path in paths]
            ours = digest.of_file(paths[1]) == lock.manifest
        except OSError:
            continue
        for file, path in zip(files, paths, strict=True):
            if ours and file.is_same(path.lstat()):
                found.add(str(folder), f"there is no run {folder.name}", file)
