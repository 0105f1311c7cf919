"""Manifest and lock of a run: the items that it trains on, and one digest of all keys.

The manifest order holds every item with the keys that the plan knows. The job adds the keys of the
batch jobs, removes orphans, and writes `manifest.jsonl` (one line an item) and `dataset.lock`. The
plan computes the same digest from keys alone, to tell whether a lock still fits.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from latentmake import digest, layouts
from latentmake.errors import CacheError, DatasetError
from latentmake.files import atomic, cachefile
from latentmake.layouts import Layout, kind_of
from latentmake.plan import holdout, store
from latentmake.plan.orders import all_of, one_or_all, run_order
from latentmake.plan.receipts import GONE, check_listed, read_receipt
from latentmake.sources.items import Item

CAPTIONS = "captions"
"""Part of the texts of items, where a trainer encodes them itself."""

_CONTENT = 4  # in a receipt, behind the stat of a source
_CONTROLS = 5  # in an item
_WITH_LAYERS = 5  # values behind the controls of an item with layers


def keys_digest(keys: Iterable[tuple[str, str]]) -> str:
    """Return the digest of (stem, key) pairs in the order of their stems."""
    return digest.of_lines(f"{stem}\t{key}" for stem, key in keys)


def images_digest(paths: Iterable[str]) -> str:
    """Return the digest of images' paths in the order of their stems."""
    return digest.of_lines(paths)


def place_of(item: Item | ManifestItem, path: str, layout: Layout) -> str:
    """Return what a manifest says of where the pixels of an item, with its image, are."""
    span, row = item.span, item.row  # beside: a Wan model's control has the name of its image
    beside = [*item.controls, *item.layers] if layout.numbered_controls else []
    if span is None and row is None and not beside:
        return path
    return json.dumps([path, span, row, *([beside] if beside else [])])


def lock_digest(parts: Mapping[str, str], repeats: Mapping[str, int], validation: int = 0) -> str:
    """Return the digest of `{dataset}/{part}` -> `keys_digest` and dataset -> `num_repeats`.

    With `validation`, the number of sources held out, it tells these too: keys hold the digests of
    sources, by which they are chosen.
    """
    held = [[holdout.SALT, validation]] if validation else []
    return digest.of_value([dict(parts), dict(repeats), *held])


class ManifestItem(NamedTuple):
    """One item.

    Attributes:
        source: path of its image or video.
        targets: part -> path and key of each target; a key is None until its job has run.
        caption: path of its caption file, if any.
        controls: paths of its control images, or of its control video.
        texts: variants of its text, where they are not the content of its caption file.
        text_digest: of its text, where that is not cached.
        span: the part of a video that its clips are cut from, see `Span`; None: all of it.
        row: the other columns of its row, where the dataset is a list.
        layers: paths of its further target images.
    """

    dataset: str
    stem: str
    source: str
    targets: Mapping[str, Sequence[tuple[str, str | None]]]
    caption: str | None = None
    controls: tuple[str, ...] = ()
    texts: Sequence[str] | None = None
    text_digest: str | None = None
    span: list[int | None] | None = None
    row: dict[str, Any] | None = None
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class ManifestOrder:
    """Order of the manifest job.

    Attributes:
        repeats: dataset -> `num_repeats`.
        skip: datasets with `on_error: skip`.
        faults: dataset -> faulty items: stem, path, digest, line.
        orphans: cache files whose items are gone.
        planned: time of the plan, in nanoseconds: no two orders are the same file to Snakemake.
        layout: name of the layout of the cache files.
        validation: number of sources to hold out of training.
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
    validation: int = 0

    @property
    def path(self) -> Path:
        """Path of its file."""
        return run_order(self.run, "manifest", self.planned)

    def write(self) -> Path:
        """Write it and return its path."""
        lines = map(json.dumps, [vars(self) | {"items": None}, *map(_values, self.items)])
        atomic.write(self.path, "\n".join(lines).encode())
        return self.path

    @classmethod
    def read(cls, path: Path) -> ManifestOrder:
        """Read an order."""
        head, *items = map(json.loads, path.read_text(encoding="utf-8").split("\n"))
        return cls(**head | {"items": list(map(_item, items))})


def _values(item: ManifestItem) -> list[Any]:
    """Return an item as an order has it: layers where there are some."""
    *usual, layers = item
    usual[_CONTROLS] = one_or_all(item.controls)
    return [*usual, layers] if layers else usual


def _item(values: list[Any]) -> ManifestItem:
    dataset, stem, source, targets, caption, control, *others = values
    pairs = {part: [(path, key) for path, key in found] for part, found in targets.items()}
    if len(others) == _WITH_LAYERS:
        others[-1] = tuple(others[-1])
    return ManifestItem(dataset, stem, source, pairs, caption, all_of(control), *others)


@dataclass(frozen=True)
class Lock:
    """Content of `dataset.lock`.

    Attributes:
        digest: `lock_digest` of the parts and repeats.
        counts: `{dataset}/{part}` -> number of targets.
        parts: `{dataset}/{part}` -> digest of its keys.
        repeats: dataset -> `num_repeats`.
        aside: dataset -> skipped items: stem, path, digest of the faulty file, line.
        images: dataset -> `images_digest` of the manifest's images.
        manifest: digest of the manifest's bytes.
        held_out: digests of the sources held out of training.
        trained: `lock_digest` of the other items, where some are held out.
    """

    digest: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)
    aside: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)
    manifest: str = ""
    held_out: list[str] = field(default_factory=list)
    trained: str = ""

    @property
    def data(self) -> str:
        """Digest of what trains."""
        return self.trained or self.digest

    def values(self) -> dict[str, Any]:
        """Return its values; without those of validation where nothing is held out."""
        without = set() if self.held_out else {"held_out", "trained"}
        return {key: value for key, value in asdict(self).items() if key not in without}


def read_lock(path: Path) -> Lock:
    """Read a lock; an empty one if it is missing or damaged."""
    try:
        return Lock(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return Lock()


def write_manifest(
    order: ManifestOrder, receipts: Iterable[Path], folder: Path, say: Callable[[str], None]
) -> Lock:
    """Remove orphans, and write `manifest.jsonl` and `dataset.lock` into a folder.

    The receipts are of the batch jobs that ran since the order was written.

    Raises:
        DatasetError: a dataset that is not to skip them has faulty items; all are named.
        ConfigError: more sources are to be held out than half of those that differ.
        CacheError: a target is missing or damaged.
    """
    made: dict[str, str] = {}
    read: dict[str, str] = {}
    skipped = {dataset: list(faults) for dataset, faults in order.faults.items()}
    for path in receipts:
        receipt = read_receipt(path)
        made |= {name: str(target[-1]) for name, target in receipt.targets.items()}
        read |= {name: str(source[_CONTENT]) for name, source in receipt.sources.items()}
        for fault in receipt.faults:
            skipped.setdefault(fault["dataset"], []).append(fault)
    lines = [f["line"] for name, each in skipped.items() if name not in order.skip for f in each]
    if lines:
        raise DatasetError(
            f"{len(lines)} faulty: {' | '.join(dict.fromkeys(lines))}",
            where=f"run {order.run}",
            hint="all other items are done; set on_error: skip to train without these",
        )
    check_listed(made)
    without = {(name, fault["stem"]) for name, each in skipped.items() for fault in each}
    layout = layouts.of(order.layout)
    keys: dict[str, list[tuple[str, str]]] = {}
    trained: dict[str, list[tuple[str, str]]] = {}
    images: dict[str, list[str]] = {}
    rows: list[dict[str, Any]] = []
    dropped: list[str] = []
    kept = [item for item in order.items if (item.dataset, item.stem) not in without]
    if layout.drops_skipped:
        lost = [item for item in order.items if (item.dataset, item.stem) in without]
        dropped = [target for item in lost for each in item.targets.values() for target, _ in each]
    held = _held_out(order, kept, read)
    for item in kept:
        pairs = {
            f"{item.dataset}/{part}": [
                (layout.identity(item.stem, path), made.get(path) or known or _key_of(path))
                for path, known in targets
            ]
            for part, targets in item.targets.items()
        }
        if item.text_digest is not None:
            pairs[f"{item.dataset}/{CAPTIONS}"] = [(item.stem, item.text_digest)]
        for side in (keys,) if item.source in held else (keys, trained):
            for part, found in pairs.items():
                side.setdefault(part, []).extend(found)
        images.setdefault(item.dataset, []).append(place_of(item, item.source, layout))
        row = row_of(item, order.repeats[item.dataset], layout)
        rows.append(row | ({"validation": True} if item.source in held else {}))
    if not rows:
        raise DatasetError("no item is left to train on", where=f"run {order.run}")
    for name, faults in skipped.items():
        for fault in faults:
            say(f"skipped: {fault['line']}")
            row = {"dataset": name, "stem": fault["stem"], "source": fault["path"]}
            rows.append(row | {"aside": fault["line"]})
    used = {key for pairs in keys.values() for _, key in pairs}
    _remove([*order.orphans, *dropped], used, say)
    listed = lines_of(rows)
    if held:
        away = sum(item.source in held for item in kept)
        say(f"held out for validation: {order.validation} sources, {away} of {len(kept)} items")
    parts = {part: keys_digest(found) for part, found in keys.items()}
    training = {part: keys_digest(found) for part, found in trained.items()}
    lock = Lock(
        digest=lock_digest(parts, order.repeats, order.validation),
        counts={part: len(pairs) for part, pairs in keys.items()},
        parts=parts,
        repeats=order.repeats,
        aside=skipped,
        images={name: images_digest(paths) for name, paths in images.items()},
        manifest=digest.of_bytes(listed),
        held_out=sorted(set(held.values())),
        trained=lock_digest(training, order.repeats) if held else "",
    )
    atomic.write(folder / "manifest.jsonl", listed)
    text = json.dumps(lock.values(), indent=1, sort_keys=True, ensure_ascii=False)
    atomic.write(folder / "dataset.lock", f"{text}\n".encode())
    return lock


def _held_out(
    order: ManifestOrder, items: Sequence[ManifestItem], read: Mapping[str, str]
) -> dict[str, str]:
    """Return path -> digest of the sources held out of training.

    Args:
        order: of the job.
        items: without skipped ones.
        read: path -> digest of the sources that jobs of this build read.
    """
    if not order.validation:
        return {}
    contents = {item.source: read.get(item.source) or _content_of(item) for item in items}
    holdout.refuse_too_many(order.run, order.validation, contents.values())
    held = holdout.chosen(contents.values(), order.validation)
    return {path: content for path, content in contents.items() if content in held}


def _content_of(item: ManifestItem) -> str:
    """Return the digest of an item's source, from the header of its latents where that has it."""
    latents = next(
        found[0][0] for part, found in item.targets.items() if kind_of(part) == "latents"
    )
    if not item.controls and not item.layers:
        return _header_of(latents).source
    return digest.of_file(Path(item.source))  # the header's is of all its files


def row_of(item: ManifestItem, repeats: int, layout: Layout) -> dict[str, Any]:
    """Return a manifest's row of one item; `repeats` is how often an epoch shows it."""
    return {
        "dataset": item.dataset,
        "stem": item.stem,
        "source": item.source,
        "repeats": repeats,
        **layout.row({part: [path for path, _ in found] for part, found in item.targets.items()}),
        **({} if item.texts is None else {"texts": item.texts}),
        **(_beside(item) if layout.lists_sources else {}),
        **({} if item.span is None else {"span": list(item.span)}),
        **({} if item.row is None else {"row": item.row}),
    }


def _beside(item: ManifestItem) -> dict[str, Any]:
    """Return the entries of a row for caption, controls and layers."""
    return {
        "caption": item.caption,
        "control": next(iter(item.controls), None),
        **({"controls": [*item.controls]} if len(item.controls) > 1 else {}),
        **({"layers": [*item.layers]} if item.layers else {}),
    }


def lines_of(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the content of a manifest."""
    # In ASCII: some readers take U+2028 and its like for the end of a line.
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def _key_of(path: str) -> str:
    return _header_of(path).key


def _header_of(path: str) -> cachefile.Header:
    try:
        return cachefile.read_header(path)
    except FileNotFoundError:
        raise CacheError(GONE, where=path, hint="run again") from None
    except OSError as error:
        raise CacheError(
            f"this cache file cannot be read ({error.strerror})", where=path, hint="remove it"
        ) from None


def _remove(orphans: Iterable[str], used: Collection[str], say: Callable[[str], None]) -> None:
    """Remove cache files that are ours by their header or temporary name.

    They go to the store, except those whose keys other files of the run have.
    An OSError says that one cannot be removed: a trainer that reads the folder would train on it.
    """
    removed = 0
    for name in orphans:
        path = Path(name)
        try:
            half = name.endswith(atomic.TEMPORARY_SUFFIX)
            key = None if half else cachefile.read_header(path).key
        except FileNotFoundError:
            continue
        except (CacheError, OSError):
            say(f"{name}: left where it is, for latentmake did not make it")
            continue
        if key is None or key in used:
            path.unlink(missing_ok=True)
        else:
            store.put(path, key)
        removed += 1
        with contextlib.suppress(OSError):  # a folder that is not empty
            for parent in path.parents[:-4]:  # cache/{dataset}/{model} stay
                parent.rmdir()
    if removed:
        say(f"removed {removed} cache files whose items are gone")
