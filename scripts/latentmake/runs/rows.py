"""Rows of a run's manifest: a job writes them beside the lock, and trainers read them.

The manifest's job adds the keys from the receipts of the batch jobs to the keys in its order, and
removes orphaned cache files.

All items of a source (clips, resolutions, variants of its text) and all sources of equal content
are held out together. The choice depends only on the contents and on the number of held-out
sources. It does not depend on names, order, datasets or other settings. Adding or removing a source
moves at most one other source in or out.

Regularisation images are never held out. Together, they are shown as often in an epoch as all other
images.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from posixpath import splitext
from typing import Any, TypeAlias

from pydantic import BaseModel, Field, ValidationError

from latentmake.base import atomic, digest
from latentmake.base.errors import CacheError, DatasetError, TrainingError, joined, unreadable
from latentmake.data.texts import settled
from latentmake.formats import cachefile
from latentmake.layouts.layout import Layout, kind_of, layout_of
from latentmake.plan import store
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import (
    SALT,
    Lock,
    ManifestOrder,
    Member,
    digest_of_texts,
    keys_digest,
    lock_digest,
    read_lock,
    refuse_too_many,
)
from latentmake.plan.orders import place_of, run_order
from latentmake.plan.receipts import NotedFault, read_receipt
from latentmake.plan.run_plan import is_reg, members


def balanced(repeats: Sequence[int], images: int) -> list[int]:
    """Return how often an epoch shows each regularisation image, to match `images` other images.

    Images are shown as often as their dataset repeats them, until `images` is reached; the
    remaining ones are not shown. If there are too few, they are shown once more, in turns.
    Source: sd-scripts, `DreamBoothDataset.__init__` (library/train_util.py).

    Args:
        repeats: repeats of each regularisation image, in the order of datasets and paths.
        images: number of the other images in an epoch, with their repeats.
    """
    counts, left = [0] * len(repeats), images
    for place, count in enumerate(repeats):
        if left > 0:
            counts[place] = count
            left -= count
    turns, rest = divmod(max(left, 0), len(repeats) or 1)
    return [count + turns + (place < rest) for place, count in enumerate(counts)]


def chosen(contents: Iterable[str], count: int) -> set[str]:
    """Return the `count` different sources to hold out, by the digests of their contents.

    These are the sources with the smallest digests of salt and content.
    """
    ranks = {digest.of_bytes(f"{SALT}\n{content}".encode()): content for content in contents}
    return {ranks[rank] for rank in heapq.nsmallest(count, ranks)}


_GONE = "this cache file is gone"
_CONTENT = 4  # position of the content's digest in a receipt's source, after the file's stat

_OPTIONAL = ("held_out", "trained", "is_reg")  # keys that a lock may lack

_Keys: TypeAlias = dict[str, list[tuple[str, str]]]
"""`{dataset}/{part}` -> stem and key of each target"""

_UNUSED = "not used: there are more regularisation images than others"

_HELD_OUT = "not used: an equal image is held out for validation"


class Row(BaseModel, extra="allow"):
    """One line of a manifest. A skipped item has a reason (`aside`) instead of caches.

    Attributes:
        text: path of the embedding, or resolution -> path; None if captions are not cached.
        variants: paths of the embeddings of all texts, or resolution -> paths; None if there is
            only one text.
    """

    dataset: str
    stem: str  # path below the dataset's folder, without the file extension
    source: str  # path of the image or video
    repeats: int = Field(1, ge=1)
    latents: dict[str, str | list[str]] = Field(
        default_factory=dict
    )  # resolution -> path, or paths of clips
    text: str | dict[str, str] | None = None
    variants: list[str] | dict[str, list[str]] | None = None
    texts: list[str] | None = None  # texts, unless the caption file has the text
    captioners: list[str] = []  # captioners that made the texts; none if a person wrote them
    caption: str | None = None  # path of the caption file; None for the empty caption
    control: str | None = None  # path of the first control image, or of the control video
    controls: list[str] = Field(default_factory=list)  # all control images, if there are several
    layers: list[str] = Field(default_factory=list)  # further target images
    validation: bool = False  # whether it is held out: evaluated, but never trained on
    is_reg: bool = False  # whether it is a regularisation image
    row: dict[str, Any] = Field(default_factory=dict)  # further columns of its list
    aside: str | None = None  # reason why the item is skipped

    @property
    def group(self) -> str:
        """Value of the column `label`; else the first folder below the dataset's; else ""."""
        if (label := self.row.get("label")) not in (None, ""):
            return str(label)
        if "/" in self.stem:
            return self.stem.split("/")[0]
        path = splitext(self.source)[0]  # in the stems of several videos, `_` stands for `/`
        for at in (0, *(place + 1 for place, letter in enumerate(path) if letter == "/")):
            *folders, _ = (below := path[at:]).split("/")
            if folders and self.stem.startswith(below.replace("/", "_")):
                # The stem of a video outside its list's folder has all folders of the path.
                is_outside = path[:at] == "/"
                return folders[-1 if is_outside else 0]
        return ""

    @property
    def learned(self) -> bool:
        """Whether the item is neither held out nor a regularisation image."""
        return not (self.validation or self.is_reg)

    @property
    def control_files(self) -> list[str]:
        """Paths of all control images, or of the control video."""
        return self.controls or ([] if self.control is None else [self.control])

    @property
    def first_text(self) -> str:
        """Path of the first text's embedding, at the first resolution; "" if there is none."""
        return next((text for size in self.latents for text in self.texts_at(size)), "")

    def latents_at(self, resolution: str) -> list[str]:
        """Return the paths of the latents at a resolution, one for each clip."""
        paths = self.latents.get(resolution, [])
        return [paths] if isinstance(paths, str) else paths

    def texts_at(self, resolution: str) -> list[str]:
        """Return the paths of the embeddings of all texts at a resolution."""
        text = self.text.get(resolution) if isinstance(self.text, dict) else self.text
        several = self.variants
        if isinstance(several, dict):
            several = several.get(resolution)
        return several or ([] if text is None else [text])


def rows_of(manifest: Path) -> Iterator[Row]:
    """Yield the items of a manifest, except skipped ones; raises TrainingError."""
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

    Args:
        order: order of the manifest.
        receipts: receipts of the batch jobs that ran since the order was written.
        folder: folder of the run.
        say: shows a line to the user.

    Raises:
        DatasetError: a dataset without `on_error: skip` has faulty items; the error names all.
        ConfigError: more than half of the different sources would be held out.
        CacheError: a target is missing or damaged.
    """
    made, contents, skipped = _reported(order, receipts)
    fatal = [
        fault["line"]
        for name, faults in skipped.items()
        if name not in order.skip
        for fault in faults
    ]
    hint = "all other items are done; set on_error: skip to train without these"
    _refuse_faulty(order.run, fatal, say, hint)
    _check_listed(made)
    excluded = {(name, fault["stem"]) for name, faults in skipped.items() for fault in faults}
    layout = layout_of(order.layout)
    members = [
        _settled(order, member, layout) if member.item.awaits_caption else member
        for member in order.items
        if (member.dataset, member.item.stem) not in excluded
    ]
    held = _held_out(order, members, contents)
    shown = _shown(order, members, held)
    by_part: _Keys = defaultdict(list)
    learned: _Keys = defaultdict(list)  # without held-out items
    images: dict[str, list[str]] = defaultdict(list)
    for member in members:
        images[member.dataset].append(place_of(member.item, layout))
        for part, pairs in _keys_of(member, made, layout).items():
            by_part[part] += pairs
            if member.item.image not in held:
                learned[part] += pairs
    rows = [*_rows(order, members, held, shown)]
    if unused := sum("aside" in row for row in rows):
        say(f"regularisation images that are not used: {unused} of {len(shown)}")
    if len(rows) == unused:
        raise DatasetError("no item is left to train on", where=f"run {order.run}")
    listed = lines_of([*rows, *_skipped_rows(order, skipped, say)])
    _remove_orphans(order, excluded, by_part, say)
    trained = ""
    if held:
        away = sum("validation" in row for row in rows)
        say(f"held out for validation: {order.validation} sources, {away} of {len(members)} items")
        trained = lock_digest(_digests(learned), order.repeats, is_reg=order.is_reg)
    parts = _digests(by_part)
    lock = Lock(
        digest=lock_digest(parts, order.repeats, order.validation, order.is_reg),
        counts={part: len(pairs) for part, pairs in by_part.items()},
        parts=parts,
        repeats=order.repeats,
        aside=skipped,
        images={dataset: digest.of_lines(places) for dataset, places in images.items()},
        manifest=digest.of_bytes(listed),
        held_out=sorted(set(held.values())),
        trained=trained,
        is_reg=order.is_reg,
    )
    # Keys without a value are left out, so that the lock is the one that earlier releases wrote.
    values = {key: value for key, value in vars(lock).items() if value or key not in _OPTIONAL}
    text = f"{json.dumps(values, indent=1, sort_keys=True, ensure_ascii=False)}\n"
    # The lock has the manifest's digest, so it is written last.
    atomic.write(folder / "manifest.jsonl", listed)
    atomic.write(folder / "dataset.lock", text.encode())
    return lock


def _settled(order: ManifestOrder, member: Member, layout: Layout) -> Member:
    """Return a member with its texts, which a captioner has made in this build."""
    settings, like_sdscripts = order.captioned[member.dataset], layout.like_sdscripts
    item = settled(member.item, "", settings, like_sdscripts=like_sdscripts)
    text = member.text and (member.text[0], digest_of_texts(item.texts or ()))
    return member._replace(item=item, text=text)


def _check_listed(paths: Iterable[str]) -> None:
    """Raise CacheError if a batch's target is missing; Snakemake does not know these files.

    On a network file system, the list of a folder's files is up to date only after the folder is
    opened, so this lists folders and does not ask for single files.
    """
    folders: dict[str, set[str]] = {}
    for path in paths:
        folder, name = os.path.split(path)
        if folder not in folders:
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                folders[folder] = {entry.name for entry in entries}
        if name not in folders.get(folder, ()):
            raise CacheError(_GONE, where=path, hint="run again")


def _reported(
    order: ManifestOrder, receipts: Iterable[Path]
) -> tuple[dict[str, str], dict[str, str], dict[str, list[NotedFault]]]:
    """Return the keys of new targets, the digests of sources, and the faults of each dataset.

    Keys and digests are those that the receipts report, by path.
    """
    keys: dict[str, str] = {}
    contents: dict[str, str] = {}
    skipped = {dataset: list(faults) for dataset, faults in order.faults.items()}
    for path in receipts:
        receipt = read_receipt(path)
        if receipt is None:  # missing or damaged: `_header_of` reads the keys of its targets
            continue
        keys |= {name: str(target[-1]) for name, target in receipt.targets.items()}
        contents |= {name: str(source[_CONTENT]) for name, source in receipt.sources.items()}
        for fault in receipt.faults:
            skipped.setdefault(fault["dataset"], []).append(fault)
    return keys, contents, skipped


def _keys_of(member: Member, made: Mapping[str, str], layout: Layout) -> _Keys:
    """Return the keys of an item's targets; `made` has those of new targets, by path."""
    keys = {
        f"{member.dataset}/{part}": [
            (layout.identity(member.item.stem, path), made.get(path) or key or _header_of(path).key)
            for path, key in targets
        ]
        for part, targets in member.targets.items()
    }
    if member.text is not None:
        part, content = member.text
        keys[part] = [(member.item.stem, content)]
    return keys


def _digests(keys: _Keys) -> dict[str, str]:
    return {part: keys_digest(pairs) for part, pairs in keys.items()}


def _refuse_faulty(run: str, lines: Sequence[str], say: Callable[[str], object], hint: str) -> None:
    """Raise a DatasetError if there are lines about faulty items that a run may not skip."""
    if lines:
        what = f"{len(lines)} faulty: {joined(lines, say)}"
        raise DatasetError(what, where=f"run {run}", hint=hint)


def _remove_orphans(
    order: ManifestOrder,
    excluded: Collection[tuple[str, str]],
    keys: _Keys,
    say: Callable[[str], None],
) -> None:
    """Remove cache files of items that are gone and, if trainers read folders, of skipped ones.

    `excluded` has dataset and stem of the skipped items, `keys` the keys of all others.
    """
    dropped: dict[str, list[str]] = {}
    if layout_of(order.layout).flat:
        for dataset, item, targets, _ in order.items:
            if (dataset, item.stem) in excluded:
                paths = (path for pairs in targets.values() for path, _ in pairs)
                present = (path for path in paths if Path(path).exists())
                dropped.setdefault(dataset, []).extend(present)
    vanished = {*order.vanished}
    for dataset, files in dropped.items():
        kept = sum(len(pairs) for part, pairs in keys.items() if part.startswith(f"{dataset}/"))
        if store.is_bulk(len(files), kept + len(files)):
            vanished.update(files)
    used = {key for pairs in keys.values() for _, key in pairs}
    _remove([*order.orphans, *chain(*dropped.values())], used, vanished, say)
    _remove([*store.returned(order.repeats)], used, (), lambda _: None)


def _held_out(
    order: ManifestOrder, items: Sequence[Member], read: Mapping[str, str]
) -> dict[str, str]:
    """Return path -> digest of content, of the sources held out of training.

    `read` has the digests of sources that this build's jobs read.
    """
    if not order.validation:
        return {}
    contents = {
        member.item.image: read.get(member.item.image) or _content_of(member) for member in items
    }
    learned = [
        contents[member.item.image] for member in items if member.dataset not in order.is_reg
    ]
    refuse_too_many(order.run, order.validation, learned)
    held = chosen(learned, order.validation)
    return {path: content for path, content in contents.items() if content in held}


def _shown(
    order: ManifestOrder, items: Sequence[Member], held: Collection[str]
) -> dict[tuple[str, str], int]:
    """Return (dataset, stem) of each regularisation image -> how often an epoch shows it.

    Images that equal a held-out image are not shown. For a program that trains on the image files,
    the numbers are the repeats: it balances the images itself.
    """
    if not order.is_reg:
        return {}
    regular = [member for member in items if member.dataset in order.is_reg]
    unused = {(member.dataset, member.item.stem): 0 for member in regular}
    places = {name: place for place, name in enumerate(order.repeats)}
    used = [member for member in regular if member.item.image not in held]
    used.sort(key=lambda member: (places[member.dataset], member.item.image))
    counts = [order.repeats[member.dataset] for member in used]
    if not layout_of(order.layout).external:
        others = [
            member
            for member in items
            if member.dataset not in order.is_reg and member.item.image not in held
        ]
        counts = balanced(counts, sum(order.repeats[member.dataset] for member in others))
    names = [(member.dataset, member.item.stem) for member in used]
    return unused | dict(zip(names, counts, strict=True))


def _rows(
    order: ManifestOrder,
    members: Iterable[Member],
    held: Collection[str],
    shown: Mapping[tuple[str, str], int],
) -> Iterator[dict[str, Any]]:
    """Yield the row of each item; if no epoch shows it, the row has the reason.

    `held` has the held-out sources, `shown` how often an epoch shows regularisation images.
    """
    for member in members:
        dataset, item = member.dataset, member.item
        is_held, is_reg = item.image in held, dataset in order.is_reg
        repeats = shown[dataset, item.stem] if is_reg else order.repeats[dataset]
        if not repeats:
            yield _skipped(dataset, item.stem, item.image, _HELD_OUT if is_held else _UNUSED)
            continue
        row = row_of(member, repeats, layout_of(order.layout))
        if is_reg:
            row["is_reg"] = True
        if is_held:
            row["validation"] = True
        yield row


def row_of(member: Member, repeats: int, layout: Layout) -> dict[str, Any]:
    """Return the manifest's row of one item; `repeats` is its number of repeats per epoch."""
    item = member.item
    row = {"dataset": member.dataset, "stem": item.stem, "source": item.image, "repeats": repeats}
    targets = member.targets.items()
    row |= layout.row({part: [path for path, _ in files] for part, files in targets})
    if item.texts is not None:
        row["texts"] = item.texts
    if item.made:
        row["captioners"] = item.captioners
    if layout.external:
        row |= {"caption": item.caption, "control": next(iter(item.controls), None)}
        if len(item.controls) > 1:
            row["controls"] = [*item.controls]
        if item.layers:
            row["layers"] = [*item.layers]
    if item.span is not None:
        row["span"] = list(item.span)
    if item.row is not None:
        row["row"] = item.row
    return row


def lines_of(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the content of a manifest."""
    # JSON in ASCII, because some readers take characters such as U+2028 for the end of a line.
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def _skipped_rows(
    order: ManifestOrder, skipped: Mapping[str, Sequence[NotedFault]], say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of faulty items, and tell the user each fault."""
    sources = {(member.dataset, member.item.stem): member.item.image for member in order.items}
    for dataset, faults in skipped.items():
        for fault in faults:
            say(f"skipped: {fault['line']}")
            # A fault of a text names no file.
            source = fault["path"] or sources.get((dataset, fault["stem"]), "")
            yield _skipped(dataset, fault["stem"], source, fault["line"])


def _skipped(dataset: str, stem: str, source: str, reason: str) -> dict[str, Any]:
    return {"dataset": dataset, "stem": stem, "source": source, "aside": reason}


def _content_of(member: Member) -> str:
    """Return the digest of an item's source, from the header of its latents if possible."""
    if member.item.controls or member.item.layers:
        # The digest in the header covers all files of the item.
        return digest.of_file(Path(member.item.image))
    latents = next(
        targets for part, targets in member.targets.items() if kind_of(part) == "latents"
    )
    return _header_of(latents[0][0]).source


def _header_of(path: str) -> cachefile.Header:
    try:
        return cachefile.read_header(path)
    except FileNotFoundError:
        raise CacheError(_GONE, where=path, hint="run again") from None
    except OSError as error:
        what = f"this cache file cannot be read ({error.strerror})"
        raise CacheError(what, where=path, hint="remove it") from None


def _remove(
    orphans: Iterable[str],
    used: Collection[str],
    vanished: Collection[str],
    say: Callable[[str], None],
) -> None:
    """Remove orphaned cache files. Files that Latentmake did not make stay where they are.

    Removed files go to the store, or to a folder of kept files if they `vanished` in bulk. They are
    deleted if another file of the run has the same key, or if they were never completed.

    Args:
        orphans: paths of the files.
        used: keys of the run's cache files.
        vanished: paths of files whose items vanished in bulk.
        say: shows a line to the user.

    Raises:
        OSError: a file cannot be removed. A trainer that reads the folder would train on it, so
            the job must fail.
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
        with contextlib.suppress(OSError):  # the folder is not empty
            for parent in path.parents[:-4]:  # cache/{dataset}/{model} stay
                parent.rmdir()
    if removed:
        say(f"removed {_gone(removed)}")
    if kept:
        say(f"moved {_gone(kept)} to the folder {store.KEPT}")


def _gone(number: int) -> str:
    what = "cache file whose item is gone" if number == 1 else "cache files whose items are gone"
    return f"{number} {what}"


def write_items(facts: Facts, name: str) -> Path:
    """Write the manifest of a publication without caches; raises DatasetError for faulty items."""
    items, path = items_of(facts, name), run_order(name, "items", time.time_ns())
    path = path.with_suffix(".jsonl")
    if not facts.read_only:
        atomic.write(path, items)
    return path


def items_of(facts: Facts, name: str) -> bytes:
    """Return the manifest of a publication without caches; raises DatasetError for faulty items."""
    facts.refuse_awaiting(name)
    config, run, fatal = facts.config, facts.config.runs[name], list[str]()
    without = set[tuple[str, str]]()
    for dataset in run.datasets:
        lines = [fault.line for fault in facts.items(dataset, run.model)[1]]
        if config.datasets[dataset].on_error == "skip":
            for noted in read_lock(name).aside.get(dataset, []):  # faults of earlier builds here
                if noted["digest"] and facts.is_unchanged(noted | {"dataset": dataset}, run.model):
                    lines.append(noted["line"])
                    without.add((dataset, noted["stem"]))
            sys.stderr.writelines(f"skipped: {line}\n" for line in lines)
        else:
            fatal += lines
    hint = "set on_error: skip to publish without these"
    _refuse_faulty(name, fatal, lambda line: sys.stderr.write(f"{line}\n"), hint)
    repeats = {dataset: config.datasets[dataset].num_repeats for dataset in run.datasets}
    every, layout = members(facts, run, {}, {}), facts.layout(run.model)
    items = [member for member in every if (member.dataset, member.item.stem) not in without]
    if not items:
        raise DatasetError("no item is left to publish", where=f"run {name}")
    values: Any = {"run": name, "layout": layout.name, "repeats": repeats}
    values |= {"is_reg": is_reg(facts, name), "validation": getattr(run.validation, "items", 0)}
    order = ManifestOrder.model_construct(**values)
    held = _held_out(order, items, _read_all(facts, items) if run.validation else {})
    return lines_of(_rows(order, items, held, _shown(order, items, held)))


def _read_all(facts: Facts, items: Iterable[Member]) -> dict[str, str]:
    """Return path -> digest of content, of the sources of items; raises SourceError."""
    contents: dict[str, str] = {}
    for path in {member.item.image for member in items}:
        try:
            contents[path] = facts.memo.digest_of_file(Path(path))
        except OSError as error:
            raise unreadable(error, Path(path)) from None
    return contents
