"""Rows of a run's manifest: its job writes them beside the lock, and trainers read them.

The job adds the keys of the batch jobs to those of its order, and removes orphans.

All items of a source (clips, resolutions, variants of its text) and all sources of equal content
are held out together. The choice depends on contents and on the number alone: not on names, order,
datasets or other settings. A source that is added or removed moves at most one other.

Regularisation images are never held out. An epoch shows them as often, all together, as the others.
"""

from __future__ import annotations

import contextlib
import heapq
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from posixpath import splitext
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from latentmake import digest
from latentmake.errors import CacheError, DatasetError, TrainingError, joined
from latentmake.files import atomic, cachefile
from latentmake.layouts.layout import layout_of, parsed
from latentmake.plan import store
from latentmake.plan.manifest import (
    SALT,
    Lock,
    ManifestOrder,
    Member,
    keys_digest,
    lines_of,
    lock_digest,
    refuse_too_many,
    row_of,
)
from latentmake.plan.orders import place_of
from latentmake.plan.receipts import GONE, check_listed, read_receipt


def balanced(repeats: Sequence[int], images: int) -> list[int]:
    """Return how often an epoch shows each regularisation image, so that they come to `images`.

    Each is shown as often as its dataset `repeats` it until there are enough, and the last ones of
    too many are not shown. Too few are shown once more, in turns.
    Source: sd-scripts, `DreamBoothDataset.__init__` (library/train_util.py).

    Args:
        repeats: of each image, in the order of datasets and paths.
        images: number of the other images in an epoch, with their repeats.
    """
    found, left = [0] * len(repeats), images
    for place, count in enumerate(repeats):
        if left > 0:
            found[place] = count
            left -= count
    turns, rest = divmod(max(left, 0), len(repeats) or 1)
    return [count + turns + (place < rest) for place, count in enumerate(found)]


def chosen(contents: Iterable[str], count: int) -> set[str]:
    """Return those of some digests of sources that are held out: `count` different ones.

    They have the smallest digests of salt and content.
    """
    ranks = {digest.of_bytes(f"{SALT}\n{each}".encode()): each for each in contents}
    return {ranks[each] for each in heapq.nsmallest(count, ranks)}


_CONTENT = 4  # in a receipt, behind the stat of a source

_OPTIONAL = ("held_out", "trained", "is_reg")  # of a lock

_UNUSED = "not used: there are more regularisation images than others"

_HELD_OUT = "not used: an equal image is held out for validation"


class Row(BaseModel, extra="allow"):
    """One line of a manifest; a skipped item has a reason (`aside`) instead of caches.

    Attributes:
        text: path of its embedding, or resolution -> path; None where captions are not cached.
        variants: likewise the paths of all its texts' embeddings, where there are several.
    """

    dataset: str
    stem: str  # path below the dataset's folder, without the last ending
    source: str  # path of the image or video
    repeats: int = Field(1, ge=1)
    latents: dict[str, str | list[str]] = {}  # resolution -> path, or paths of clips
    text: str | dict[str, str] | None = None
    variants: list[str] | dict[str, list[str]] | None = None
    texts: list[str] | None = None  # the texts, where they are not that of the caption file
    caption: str | None = None  # path of the caption file; None for the empty caption
    control: str | None = None  # path of the first control image, or of the control video
    controls: list[str] = []  # all control images, where there are several
    layers: list[str] = []  # further target images
    validation: bool = False  # whether it is held out: evaluated, and never trained on
    is_reg: bool = False  # whether it is a regularisation image
    row: dict[str, Any] = {}  # further columns of its list
    aside: str | None = None

    @property
    def group(self) -> str:
        """Its `label`, or the first folder of its file below the dataset's; "" without both."""
        if (label := self.row.get("label")) not in (None, ""):
            return str(label)
        if "/" in self.stem:
            return self.stem.split("/")[0]
        path = splitext(self.source)[0]  # the stem of one of several videos has `_` for `/`
        for at in (0, *(place + 1 for place, letter in enumerate(path) if letter == "/")):
            *folders, _ = (below := path[at:]).split("/")
            if folders and self.stem.startswith(below.replace("/", "_")):
                is_outside = path[:at] == "/"  # the folder of its list: its name has all folders
                return folders[-1 if is_outside else 0]
        return ""

    @property
    def learned(self) -> bool:
        """Whether it is neither held out nor a regularisation image."""
        return not (self.validation or self.is_reg)

    @property
    def control_files(self) -> list[str]:
        """Paths of all its controls."""
        return self.controls or ([] if self.control is None else [self.control])

    @property
    def first_text(self) -> str:
        """The embedding of its first text, at its first resolution; "" where there is none."""
        return next((text for size in self.latents for text in self.texts_at(size)), "")

    def latents_at(self, resolution: str) -> list[str]:
        """Return the caches of its latents at a resolution, one a clip."""
        found = self.latents.get(resolution, [])
        return [found] if isinstance(found, str) else found

    def texts_at(self, resolution: str) -> list[str]:
        """Return the embeddings of all its texts at a resolution."""
        text = self.text.get(resolution) if isinstance(self.text, dict) else self.text
        several = self.variants
        if isinstance(several, dict):
            several = several.get(resolution)
        return several or ([] if text is None else [text])


def rows_of(manifest: Path) -> Iterator[Row]:
    """Yield the items of a manifest, without skipped ones; raises TrainingError."""
    what, hint = "cannot be read", "run the build's command, which writes it anew"
    try:
        for number, line in enumerate(manifest.read_bytes().splitlines(), 1):
            what = f"line {number} of the manifest is damaged"
            row = Row.model_validate_json(line)
            if row.aside is None:
                yield row
    except (OSError, ValidationError):
        raise TrainingError(what, where=manifest, hint=hint) from None


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
        if receipt is None:  # the headers of its targets tell their keys
            continue
        made |= {name: str(target[-1]) for name, target in receipt.targets.items()}
        read |= {name: str(source[_CONTENT]) for name, source in receipt.sources.items()}
        for fault in receipt.faults:
            skipped.setdefault(fault["dataset"], []).append(fault)
    lines = [f["line"] for name, each in skipped.items() if name not in order.skip for f in each]
    if lines:
        what = f"{len(lines)} faulty: {joined(lines, say)}"
        hint = "all other items are done; set on_error: skip to train without these"
        raise DatasetError(what, where=f"run {order.run}", hint=hint)
    check_listed(made)
    without = {(name, fault["stem"]) for name, each in skipped.items() for fault in each}
    layout = layout_of(order.layout)
    keys: dict[str, list[tuple[str, str]]] = {}
    trained: dict[str, list[tuple[str, str]]] = {}
    images: dict[str, list[str]] = {}
    rows: list[dict[str, Any]] = []
    sources = {(each.dataset, each.item.stem): each.item.image for each in order.items}
    kept = [each for each in order.items if (each.dataset, each.item.stem) not in without]
    dropped = _dropped(order, without) if layout.flat else {}
    held = _held_out(order, kept, read)
    shown = _shown(order, kept, held)
    for member in kept:
        dataset, item = member.dataset, member.item
        pairs = {
            f"{dataset}/{part}": [
                (layout.identity(item.stem, path), made.get(path) or known or _header_of(path).key)
                for path, known in targets
            ]
            for part, targets in member.targets.items()
        }
        if member.text is not None:
            part, content = member.text
            pairs[part] = [(item.stem, content)]
        for side in (keys,) if item.image in held else (keys, trained):
            for part, found in pairs.items():
                side.setdefault(part, []).extend(found)
        images.setdefault(dataset, []).append(place_of(item, layout))
        rows.append(_row(order, member, held=item.image in held, shown=shown))
    if unused := sum("aside" in row for row in rows):
        say(f"regularisation images that are not used: {unused} of {len(shown)}")
    if len(rows) == unused:
        raise DatasetError("no item is left to train on", where=f"run {order.run}")
    for name, faults in skipped.items():
        for fault in faults:
            say(f"skipped: {fault['line']}")
            source = fault["path"] or sources.get((name, fault["stem"]), "")  # of a text: no file
            rows.append(_aside(name, fault["stem"], source, fault["line"]))
    used = {key for pairs in keys.values() for _, key in pairs}
    vanished = {*order.vanished}
    for name, paths in dropped.items():
        there = sum(len(found) for part, found in keys.items() if part.startswith(f"{name}/"))
        if store.is_bulk(len(paths), there + len(paths)):
            vanished.update(paths)
    _remove([*order.orphans, *chain(*dropped.values())], used, vanished, say)
    _remove([*store.returned(order.repeats)], used, (), lambda _: None)
    listed = lines_of(rows)
    if held:
        away = sum("validation" in row for row in rows)
        say(f"held out for validation: {order.validation} sources, {away} of {len(kept)} items")
    parts = {part: keys_digest(found) for part, found in keys.items()}
    training = {part: keys_digest(found) for part, found in trained.items()}
    lock = Lock(
        digest=lock_digest(parts, order.repeats, order.validation, order.is_reg),
        counts={part: len(pairs) for part, pairs in keys.items()},
        parts=parts,
        repeats=order.repeats,
        aside=skipped,
        images={name: digest.of_lines(paths) for name, paths in images.items()},
        manifest=digest.of_bytes(listed),
        held_out=sorted(set(held.values())),
        trained=lock_digest(training, order.repeats, is_reg=order.is_reg) if held else "",
        is_reg=order.is_reg,
    )
    atomic.write(folder / "manifest.jsonl", listed)
    # What a run has none of is left out: locks of former releases do not have it.
    values = {x: y for x, y in vars(lock).items() if y or x not in _OPTIONAL}
    text = json.dumps(values, indent=1, sort_keys=True, ensure_ascii=False)
    atomic.write(folder / "dataset.lock", f"{text}\n".encode())
    return lock


def _dropped(order: ManifestOrder, without: Collection[tuple[str, str]]) -> dict[str, list[str]]:
    """Return dataset -> the cache files of its items that a run goes `without`."""
    found: dict[str, list[str]] = {}
    for dataset, item, targets, _ in order.items:
        if (dataset, item.stem) in without:
            paths = (path for several in targets.values() for path, _ in several)
            found.setdefault(dataset, []).extend(path for path in paths if Path(path).exists())
    return found


def _held_out(
    order: ManifestOrder, items: Sequence[Member], read: Mapping[str, str]
) -> dict[str, str]:
    """Return path -> digest of the sources held out of training.

    `read` has the digests of the sources that jobs of this build read.
    """
    if not order.validation:
        return {}
    contents = {x.item.image: read.get(x.item.image) or _content_of(x) for x in items}
    learned = [contents[x.item.image] for x in items if x.dataset not in order.is_reg]
    refuse_too_many(order.run, order.validation, learned)
    held = chosen(learned, order.validation)
    return {path: content for path, content in contents.items() if content in held}


def _shown(
    order: ManifestOrder, items: Sequence[Member], held: Collection[str]
) -> dict[tuple[str, str], int]:
    """Return dataset and stem of each regularisation image -> how often an epoch shows it.

    An image with the content of one that is held out is not shown. A program that trains on the
    files balances them itself.
    """
    if not order.is_reg:
        return {}
    regular = [x for x in items if x.dataset in order.is_reg]
    found = {(x.dataset, x.item.stem): 0 for x in regular}
    places = {name: place for place, name in enumerate(order.repeats)}
    used = [x for x in regular if x.item.image not in held]
    used.sort(key=lambda x: (places[x.dataset], x.item.image))
    counts = [order.repeats[x.dataset] for x in used]
    if not layout_of(order.layout).external:
        others = [x for x in items if x.dataset not in order.is_reg and x.item.image not in held]
        counts = balanced(counts, sum(order.repeats[x.dataset] for x in others))
    names = [(x.dataset, x.item.stem) for x in used]
    return found | dict(zip(names, counts, strict=True))


def _row(
    order: ManifestOrder, member: Member, *, held: bool, shown: Mapping[tuple[str, str], int]
) -> dict[str, Any]:
    """Return a manifest's row of an item, with the reason if an epoch does not show it.

    `held` says whether it is held out, `shown` how often an epoch shows regularisation images.
    """
    dataset, item, is_reg = member.dataset, member.item, member.dataset in order.is_reg
    repeats = shown[dataset, item.stem] if is_reg else order.repeats[dataset]
    if not repeats:
        return _aside(dataset, item.stem, item.image, _HELD_OUT if held else _UNUSED)
    row = row_of(member, repeats, layout_of(order.layout))
    row |= {"is_reg": True} if is_reg else {}
    return row | ({"validation": True} if held else {})


def _aside(dataset: str, stem: str, source: str, reason: str) -> dict[str, Any]:
    return {"dataset": dataset, "stem": stem, "source": source, "aside": reason}


def _content_of(member: Member) -> str:
    """Return the digest of an item's source, from the header of its latents where that has it."""
    if member.item.controls or member.item.layers:
        return digest.of_file(Path(member.item.image))  # the header's is of all its files
    latents = next(x for part, x in member.targets.items() if parsed(part).kind == "latents")
    return _header_of(latents[0][0]).source


def _header_of(path: str) -> cachefile.Header:
    try:
        return cachefile.read_header(path)
    except FileNotFoundError:
        raise CacheError(GONE, where=path, hint="run again") from None
    except OSError as error:
        what = f"this cache file cannot be read ({error.strerror})"
        raise CacheError(what, where=path, hint="remove it") from None


def _remove(
    orphans: Iterable[str],
    used: Collection[str],
    vanished: Collection[str],
    say: Callable[[str], None],
) -> None:
    """Remove cache files that are ours by their header or temporary name.

    They go to the store, or are kept apart if they `vanished` in bulk, except those whose keys
    other files of the run have.
    An OSError says that one cannot be removed: a trainer that reads the folder would train on it.
    """
    removed, kept = 0, 0
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
            removed += 1
        elif name in vanished:
            store.keep_apart(path)
            kept += 1
        else:
            store.put(path, key)
            removed += 1
        with contextlib.suppress(OSError):  # a folder that is not empty
            for parent in path.parents[:-4]:  # cache/{dataset}/{model} stay
                parent.rmdir()
    if removed:
        say(f"removed {removed} cache files whose items are gone")
    if kept:
        say(f"moved {kept} cache files whose items are gone to the folder {store.KEPT}")
