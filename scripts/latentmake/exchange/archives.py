"""Finished caches on S3, as archives that Snakemake's storage plugin carries.

An archive holds one part (a dataset's targets of one model and resolution, or its texts) and is
named by the digest of the part's keys: equal content is sent once. A record names the archives of a
run; the newest counts.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from latentmake.config import Config, Run
from latentmake.errors import CacheError, ConfigError, StorageError
from latentmake.files import atomic, cachefile
from latentmake.files.verified import corruption_of
from latentmake.layouts import DROPPED
from latentmake.plan.facts import Facts
from latentmake.plan.parts import (
    PROMPTS,
    Part,
    RunPlan,
    prompt_path,
    prompts_of,
    read_lock,
    run_folder,
)
from latentmake.sources import s3

__all__ = [
    "archived",
    "check_plugin",
    "pack",
    "plan_fetch",
    "plan_store",
    "record",
    "unpack",
    "write_record",
]

ARCHIVES = Path(".latentmake/archives")
_WHERE = "storage.caches"
_MODE = 0o644


def plan_store(facts: Facts, plan: RunPlan, run: Run) -> dict[str, Any]:
    """Write the orders of a run's archives; return the order of its record.

    Raises:
        UserError: caches are not up to date, or S3 cannot be read.
    """
    root = _root(facts.config)
    if plan.manifest_order is not None or any(state.stale for state in plan.parts.values()):
        raise CacheError(
            "has caches that are not up to date",
            where=f"run {plan.name}",
            hint=f"bring them up to date first: caches_{plan.name}, or train_{plan.name}",
        )
    archives: dict[str, str] = {}
    for part, paths in _paths(facts.config, plan, run).items():
        name = f"{_key(part)}.{(plan.parts[part].keys or '')[:20]}"
        archives[_key(part)] = name
        atomic.write(ARCHIVES / f"{name}.json", json.dumps({"paths": sorted(paths)}).encode())
    content = {"archives": archives, "lock": read_lock(plan.name).values()}
    newest, before = _newest(root, plan.name)
    new = f"{root}/runs/{plan.name}/{time.time_ns():020}.json"
    return {
        "record": newest if before == content else new,
        "archives": [f"{root}/{name}.tar" for name in archives.values()],
        "content": content,
    }


def plan_fetch(facts: Facts, plan: RunPlan, run: Run) -> dict[str, Any]:
    """Return the order to fetch archives of parts with stale targets.

    Raises:
        UserError: nothing of the run is stored, or S3 cannot be read.
    """
    root = _root(facts.config)
    _, stored = _newest(root, plan.name)
    if stored is None:
        raise StorageError(
            f"nothing of the run {plan.name} is stored in {root}",
            where=_WHERE,
            hint=f"give store_{plan.name} where its caches are",
        )
    wanted = {
        f"{root}/{stored['archives'][_key(part)]}.tar": [stale.path for stale in state.stale]
        for part, state in plan.parts.items()
        if state.stale and _key(part) in stored["archives"]
    }
    return {"archives": wanted}


def archived(order: str | None) -> list[str]:
    """Return the addresses of an order's archives."""
    return [] if order is None else list(json.loads(Path(order).read_bytes())["archives"])


def record(order: str | None) -> list[str]:
    """Return the address of an order's record."""
    return [] if order is None else [json.loads(Path(order).read_bytes())["record"]]


def pack(order: Path, archive: Path) -> None:
    """Write an archive; equal cache files give equal bytes.

    Raises:
        CacheError: a cache file is damaged or gone.
        OSError: the archive cannot be written.
    """
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for name in json.loads(order.read_bytes())["paths"]:
            try:
                _check(name)
                data = Path(name).read_bytes()
            except FileNotFoundError:
                raise CacheError("is gone", where=name, hint="build again") from None
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), _MODE
            tar.addfile(entry, io.BytesIO(data))


def _check(path: str | Path) -> None:
    """Check that a cache file is ours and holds what was written; else a CacheError."""
    cachefile.read_header(path)
    if damage := corruption_of(path):
        raise CacheError(f"is damaged: {damage}", where=path, hint="delete it and build again")


def write_record(order: Path, path: Path) -> None:
    """Write the record of an order."""
    atomic.write(path, json.dumps(json.loads(order.read_bytes())["content"]).encode())


def unpack(order: Path, archives: Sequence[Path], say: Callable[[str], None]) -> None:
    """Take an order's cache files from archives, each atomically.

    Other members of an archive are ignored: no name leads anywhere else.

    Args:
        order: names archives and targets.
        archives: local files, in the order's order.
        say: receives the number of files, and damaged ones.

    Raises:
        StorageError: an archive is damaged; or the disk is full.
    """
    staged = Path(f".latentmake/fetched.{os.getpid()}")
    taken = 0
    try:
        asked = json.loads(order.read_bytes())["archives"]
        for (place, names), archive in zip(asked.items(), archives, strict=True):
            for name, data in _members(archive, place, set(names)):
                atomic.write(staged, data)
                try:
                    _check(staged)
                except CacheError as error:
                    say(f"{place}: {name} {error.what}; it will be encoded")
                    continue
                atomic.link(staged, Path(name))
                taken += 1
    finally:
        staged.unlink(missing_ok=True)
    say(f"fetched {taken} cache files from {len(archives)} archives")


def _members(archive: Path, place: str, names: set[str]) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isreg() else None
                if file is not None and member.name in names:
                    yield member.name, file.read()
    except tarfile.TarError as error:
        raise StorageError(
            f"is damaged ({error})", where=place, hint="remove it there, and store it again"
        ) from None


def check_plugin(config: Config) -> None:
    """Check that Snakemake's storage plugin is installed if `storage` is set.

    Raises:
        ConfigError: it is missing.
    """
    if config.storage is not None and find_spec("snakemake_storage_plugin_s3") is None:
        raise ConfigError(
            "Snakemake's storage plugin for S3 is missing",
            where=_WHERE,
            hint="install it: pip install -r envs/requirements-s3.lock",
        )


def _root(config: Config) -> str:
    if config.storage is None:
        raise ConfigError("this key is missing", where=_WHERE, hint="set it to s3://bucket/folder")
    return s3.normalized(config.storage.caches)


def _newest(root: str, run: str) -> tuple[str, dict[str, Any] | None]:
    """Return address and content of a run's newest record; None without one."""
    folder = f"{root}/runs/{run}"
    names = [entry[0] for entry in s3.listing(folder, _WHERE, may_be_empty=True)]
    if not names:
        return "", None
    place = f"{folder}/{max(names)}"
    try:
        found = json.loads(s3.read(place)[0])
        return place, {"archives": dict(found["archives"]), "lock": found["lock"]}
    except (ValueError, LookupError, TypeError):
        raise StorageError("is damaged", where=place, hint="remove it there") from None


def _key(part: Part) -> str:
    return "/".join(part)


def _paths(config: Config, plan: RunPlan, run: Run) -> dict[Part, list[str]]:
    """Return the cache files of each part, as the run's manifest names them."""
    found: defaultdict[Part, list[str]] = defaultdict(list)
    with (run_folder(plan.name) / "manifest.jsonl").open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if "aside" not in row:
                for name, paths in _parts_of(row):
                    part = Part(row["dataset"], run.model, name)
                    found[part] += [paths] if isinstance(paths, str) else paths
    if prompts := prompts_of(run):
        part = Part(PROMPTS, run.model, "text")
        found[part] = [prompt_path(config, run.model, text) for text in prompts]
    return found


def _parts_of(row: dict[str, Any]) -> Iterator[tuple[str, str | list[str]]]:
    """Yield the parts of a manifest's row with their paths."""
    yield from row["latents"].items()
    yield from _texts_of("text", row["text"])
    variants = row.get("variants", [])
    if isinstance(variants, dict):
        for resolution, paths in variants.items():
            for number, path in enumerate(paths[1:], 1):
                yield f"text.{number}@{resolution}", path
    else:
        for number, path in enumerate(variants[1:], 1):
            yield f"text.{number}", path
    yield from _texts_of(DROPPED, row.get("dropped"))


def _texts_of(part: str, found: str | dict[str, str] | None) -> Iterator[tuple[str, str]]:
    """Yield parts and paths of one text of an item: one file, or one of each resolution."""
    if isinstance(found, dict):
        yield from ((f"{part}@{resolution}", path) for resolution, path in found.items())
    elif found:
        yield part, found
