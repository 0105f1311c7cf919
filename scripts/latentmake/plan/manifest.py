"""Manifest and lock: what a run trains on, and one digest of it all.

The planner writes a manifest order: every item of the run with the keys that it knows. The job
adds the keys that batch jobs made since, removes orphans, and writes `manifest.jsonl` (one line an
item) and `dataset.lock`. The same digest can be computed by the planner from keys alone, so that it
knows whether a lock still fits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from latentmake import digest, layouts
from latentmake.errors import CacheError, DatasetError
from latentmake.files import atomic, cachefile
from latentmake.layouts import Layout
from latentmake.plan import store
from latentmake.plan.orders import run_order
from latentmake.plan.receipts import read_receipt
from latentmake.plan.spool import spooled

__all__ = [
    "CAPTIONS",
    "Lock",
    "ManifestItem",
    "ManifestOrder",
    "images_digest",
    "keys_digest",
    "lines_of",
    "lock_digest",
    "read_lock",
    "row_of",
    "write_manifest",
]

CAPTIONS = "captions"
"""Stands for a part: the texts of items, where a trainer encodes them itself."""


def keys_digest(keys: Iterable[tuple[str, str]]) -> str:
    """Return the digest of (stem, key) pairs, given in the order of their stems."""
    return digest.of_lines(f"{stem}\t{key}" for stem, key in keys)


def images_digest(paths: Iterable[str]) -> str:
    """Return the digest of the images' paths, given in the order of their stems."""
    return digest.of_lines(paths)


def lock_digest(parts: Mapping[str, str], repeats: Mapping[str, int]) -> str:
    """Return the digest of a run's data.

    Args:
        parts: `{dataset}/{part}` -> `keys_digest` of that part.
        repeats: dataset -> how often an epoch shows its items.
    """
    return digest.of_value([dict(parts), dict(repeats)])


@dataclass(frozen=True)
class ManifestItem:
    """One item.

    Attributes:
        dataset: its dataset's name.
        stem: names it there.
        source: path of its image or video.
        targets: part -> path and key of each target; the key is None where it is not known yet.
        caption: path of its caption file, if any.
        control: path of its control image or video, if any.
        texts: the variants of its text, where they are not what the caption file holds.
        said: digest of its text, where no cache is made of that.
    """

    dataset: str
    stem: str
    source: str
    targets: dict[str, list[tuple[str, str | None]]]
    caption: str | None = None
    control: str | None = None
    texts: list[str] | None = None
    said: str | None = None


def _item(
    dataset: str,
    stem: str,
    source: str,
    targets: dict[str, list[tuple[str, str | None]]],
    *others: Any,
) -> ManifestItem:
    pairs = {part: [(path, key) for path, key in found] for part, found in targets.items()}
    return ManifestItem(dataset, stem, source, pairs, *others)


@dataclass(frozen=True)
class ManifestOrder:
    """What the manifest job is asked to do.

    Attributes:
        run: name of the run.
        model: name of its model.
        repeats: dataset -> `num_repeats`.
        skip: datasets with `on_error: skip`.
        items: everything the run trains on.
        faults: dataset -> items that cannot be, one dict each: stem, path, digest, line.
        orphans: cache files whose items are gone.
        planned: when, in nanoseconds: no two orders are the same file to Snakemake.
        layout: of the cache files.
        replaced: keys of what lay in the place of what was made, kept in the spool till now.
    """

    run: str
    model: str
    repeats: dict[str, int]
    skip: list[str]
    items: list[ManifestItem]
    faults: dict[str, list[dict[str, str]]]
    orphans: list[str]
    planned: int
    layout: str = "plain"
    replaced: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """Where it lies: no other plan writes there, so that a build keeps what it began with."""
        return run_order(self.run, "manifest", self.planned)

    def write(self) -> Path:
        """Write it and return its path.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        head = {**vars(self), "items": None}
        lines = [json.dumps(head), *(json.dumps(list(vars(item).values())) for item in self.items)]
        atomic.write(self.path, "\n".join(lines).encode())
        return self.path

    @classmethod
    def read(cls, path: Path) -> ManifestOrder:
        """Read an order.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not one.
        """
        head, *lines = path.read_text(encoding="utf-8").split("\n")
        return cls(**{**json.loads(head), "items": [_item(*json.loads(x)) for x in lines]})


@dataclass(frozen=True)
class Lock:
    """What `dataset.lock` holds.

    Attributes:
        digest: `lock_digest` of all that follows.
        counts: `{dataset}/{part}` -> number of targets.
        parts: `{dataset}/{part}` -> digest of its keys.
        repeats: dataset -> `num_repeats`.
        aside: dataset -> items set aside: stem, path, digest of the faulty file, line.
        images: dataset -> `images_digest` of what the manifest names.
        manifest: digest of the manifest's bytes.
    """

    digest: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)
    aside: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)
    manifest: str = ""


def read_lock(path: Path) -> Lock:
    """Read a lock; an empty one stands for one that is missing or damaged."""
    try:
        return Lock(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return Lock()


def write_manifest(
    order: ManifestOrder, receipts: Iterable[Path], folder: Path, say: Callable[[str], None]
) -> Lock:
    """Remove orphans and write a run's manifest and lock.

    Args:
        order: what the planner asked for.
        receipts: of the batch jobs that ran since.
        folder: gets `manifest.jsonl` and `dataset.lock`.
        say: told, a line each, what was set aside and removed.

    Raises:
        DatasetError: a dataset that is not to skip them has faulty items; all are named.
        CacheError: a target is missing or damaged.
    """
    made: dict[str, str] = {}
    aside = {dataset: list(faults) for dataset, faults in order.faults.items()}
    for path in receipts:
        receipt = read_receipt(path)
        made |= {name: str(target[-1]) for name, target in receipt.targets.items()}
        for fault in receipt.faults:
            aside.setdefault(fault["dataset"], []).append(fault)
    lines = [f["line"] for name, each in aside.items() if name not in order.skip for f in each]
    if lines:
        raise DatasetError(
            f"{len(lines)} faulty: {' | '.join(dict.fromkeys(lines))}",
            where=f"run {order.run}",
            mend="all other items are done; set on_error: skip to train without these",
        )
    without = {(name, fault["stem"]) for name, each in aside.items() for fault in each}
    layout = layouts.of(order.layout)
    keys: dict[str, list[tuple[str, str]]] = {}
    images: dict[str, list[str]] = {}
    rows: list[dict[str, Any]] = []
    unread: list[str] = []
    for item in order.items:
        if (item.dataset, item.stem) in without:
            if layout.drops_skipped:
                unread += [target for each in item.targets.values() for target, _ in each]
            continue
        paths: dict[str, list[str]] = {}
        for part, targets in item.targets.items():
            paths[part] = [target for target, _ in targets]
            found = keys.setdefault(f"{item.dataset}/{part}", [])
            for target, known in targets:
                key = made.get(target) or known or _key_of(target)
                found.append((layout.identity(item.stem, target), key))
        if item.said is not None:
            keys.setdefault(f"{item.dataset}/{CAPTIONS}", []).append((item.stem, item.said))
        images.setdefault(item.dataset, []).append(item.source)
        rows.append(row_of(item, paths, order.repeats[item.dataset], layout))
    if not rows:
        raise DatasetError("no item is left to train on", where=f"run {order.run}")
    for name, faults in aside.items():
        for fault in faults:
            say(f"set aside: {fault['line']}")
            rows.append(
                {
                    "dataset": name,
                    "stem": fault["stem"],
                    "source": fault["path"],
                    "aside": fault["line"],
                }
            )
    standing = {key for pairs in keys.values() for _, key in pairs}
    _remove([*order.orphans, *unread], standing, say)
    listed = lines_of(rows)
    parts = {part: keys_digest(pairs) for part, pairs in keys.items()}
    lock = Lock(
        digest=lock_digest(parts, order.repeats),
        counts={part: len(pairs) for part, pairs in keys.items()},
        parts=parts,
        repeats=order.repeats,
        aside=aside,
        images={name: images_digest(paths) for name, paths in images.items()},
        manifest=digest.of_bytes(listed),
    )
    atomic.write(folder / "manifest.jsonl", listed)
    text = json.dumps(asdict(lock), indent=1, sort_keys=True, ensure_ascii=False)
    atomic.write(folder / "dataset.lock", f"{text}\n".encode())
    for key in set(order.replaced) - standing:
        store.put_away(spooled(key), key)
    return lock


def row_of(
    item: ManifestItem, paths: Mapping[str, Sequence[str]], repeats: int, layout: Layout
) -> dict[str, Any]:
    """Return a manifest's line of one item.

    Args:
        item: the item.
        paths: part -> paths of its cache files.
        repeats: how often an epoch shows it.
        layout: of the cache files.
    """
    return {
        "dataset": item.dataset,
        "stem": item.stem,
        "source": item.source,
        "repeats": repeats,
        **layout.row(paths),
        **({} if item.texts is None else {"texts": item.texts}),
        **({"caption": item.caption, "control": item.control} if layout.lists_sources else {}),
    }


def lines_of(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the content of a manifest."""
    # In ASCII: some readers take U+2028 and its like for the end of a line.
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def _key_of(path: str) -> str:
    try:
        return cachefile.read_header(path).key
    except FileNotFoundError:
        raise CacheError("this cache file is gone", where=path, mend="run again") from None
    except OSError as error:
        raise CacheError(
            f"this cache file cannot be read ({error.strerror})", where=path, mend="remove it"
        ) from None


def _remove(orphans: list[str], standing: Collection[str], say: Callable[[str], None]) -> None:
    """Remove cache files that no item owns; only what a header or its temporary name calls ours.

    They go to the store, but those of keys that other files of the run bear.
    """
    removed = 0
    for name in orphans:
        path = Path(name)
        try:
            ours = not name.endswith(atomic.TEMPORARY_SUFFIX)
            key = cachefile.read_header(path).key if ours else None
            if key is None or key in standing:
                path.unlink()
            else:
                store.put_away(path, key)
            removed += 1
        except FileNotFoundError:
            continue
        except (CacheError, OSError):
            say(f"{name}: left where it is, for latentmake did not make it")
            continue
        for parent in path.parents[:-4]:  # cache/{dataset}/{model} stay
            try:
                parent.rmdir()
            except OSError:
                break
    if removed:
        say(f"removed {removed} cache files whose items are gone")
