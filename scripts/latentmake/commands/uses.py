"""`latentmake uses`: name everything that contains a picture, a caption or a folder, by content.

Contents are compared, not names: a picture is found in caches, trainings, publications and exports
after it was renamed or deleted. Rosters of former trainings say what is in their weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any

import typer

from latentmake.base.errors import ConfigError, SourceError, refuse_folder
from latentmake.commands.project import print_json, printable
from latentmake.data.contents import read_caption
from latentmake.data.item import CAPTION, IMAGE, TAGS, Item
from latentmake.formats.cachefile import header_of
from latentmake.formats.endings import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import PREVIOUS, run_folder
from latentmake.plan.product import some
from latentmake.plan.store import STORE
from latentmake.runs.edited import all_contents
from latentmake.runs.history import RosterItem, all_trainings

_MEDIA = IMAGE_EXTENSIONS | VIDEO_EXTENSIONS
_TEXT = ".txt"
_DIGEST = re.compile("[0-9a-fA-F]{64}")
_SHOWN = 5  # most files of a kind that are listed
_UNKNOWN = "of unknown items: their roster is missing or damaged"

_Contains = Callable[[str, Sequence[str]], bool]
"""Function that says whether a digest of a picture, or any of some texts, is looked for."""
_Contents = tuple[str, Item, dict[str, Any]]
"""Dataset, one of its items of today, and its contents, see `all_contents`."""
_Found = tuple[str, Sequence[str], Sequence[str]]
"""Absolute path of a place, with digests and texts that it holds; a digest may be ""."""


def uses(
    facts: Facts, paths: Sequence[str] | None, digests: Sequence[str] | None, as_json: bool
) -> None:
    """Name all caches, trainings, publications and exports that contain a picture or caption."""
    if not (paths or digests):
        hint = "name a picture, a caption or a folder, or use --digest SHA-256"
        raise ConfigError("nothing is named", where="latentmake uses", hint=hint)
    items = [*all_contents(facts)]
    sources, texts = contents_of(facts, items, paths or ())
    for value in digests or ():
        if not _DIGEST.fullmatch(value):
            raise ConfigError("is no SHA-256", where=value, hint="give all its 64 digits")
        sources.add(value.lower())
    sources.update([*filter(None, joined_digests(facts, items, sources))])

    def contains(source: str, captions: Sequence[str]) -> bool:
        return source in sources or not texts.isdisjoint(captions)

    folders, own = _folders(facts), files_of_items(facts, items, contains)
    pairs = [
        (kind, path) for kind in folders for path in files_with(facts, folders[kind], contains)
    ]
    files: dict[str, list[str]] = {kind: [] for kind in folders}
    for kind, place in dict.fromkeys([*pairs, *own]):
        files[kind].append(place)
    trained = [*trainings_with(contains)]
    if as_json:
        values = {"sources": sorted(sources), "texts": sorted(texts), "files": files}
        print_json({**values, "trainings": trained})
    else:
        contents = [*sorted(sources), *map(repr, sorted(texts))]
        lines = (f"{label:12}{text}" for label, text in _rows(files, trained, contents))
        for line in (*lines, *advice(trained, [*files["files"], *files["rows"]])):
            typer.echo(printable(line))
    if any(training["weights"] or training["saved"] for training in trained):
        raise typer.Exit(1)


def contents_of(
    facts: Facts, items: Sequence[_Contents], paths: Iterable[str]
) -> tuple[set[str], set[str]]:
    """Return the digests of the pictures, and the texts, that files and folders hold.

    For a file that no longer exists, the items of its name are looked up in the rosters.

    Raises:
        SourceError: a file does not exist, and no training saw an item of its name.
    """
    sources, texts = set[str](), set[str]()
    left = {os.path.abspath(path): path for path in paths}  # noqa: PTH100 -- links stay
    for contents in (partial(_of_items, items), _of_files, _of_rosters):
        for place, own_sources, own_texts in [*contents(facts, left)]:
            if any(own_sources) or own_texts:
                sources.update(own_sources)
                texts.update(own_texts)
                left.pop(place, None)
    for path in left.values():
        what = "is in no dataset, and no training saw it under this name"
        raise SourceError(what, where=path, hint="check the path, or use --digest SHA-256")
    return sources - {""}, texts


def joined_digests(
    facts: Facts, items: Iterable[_Contents], sources: Container[str]
) -> Iterator[str]:
    """Yield the digests of pictures among `sources` joined with their control images or layers.

    Trainings may have seen other ones; the items' names tell which digests these gave.
    """
    names = set[str]()
    for dataset, item, contents in items:
        if (item.controls or item.layers) and (facts.digest_of(item.image) or "") in sources:
            names.add(f"{dataset}/{item.stem}")
            yield contents.get("source", "")
    for entry in _seen_items() if names else ():
        if entry.name in names:
            yield entry.source


def files_with(facts: Facts, folders: Iterable[Path], contains: _Contains) -> Iterator[str]:
    """Yield the files below folders that contain a picture or text; raises StorageError."""
    for folder in (folder.parent if folder.is_file() else folder for folder in folders):
        for place, folders_below, names in os.walk(folder, onerror=refuse_folder):
            folders_below.sort()
            for name in sorted(names):
                path = Path(place, name)
                if _has(facts, path, contains):
                    yield str(path)


def files_of_items(
    facts: Facts, items: Iterable[_Contents], contains: _Contains
) -> Iterator[tuple[str, str]]:
    """Yield the `files` of pictures and captions of today's items with a content, and the `rows`.

    A row is named as `line 1 of lists/cats.jsonl`.
    """
    for _, item, contents in items:
        roles = _roles_with(facts, item, contents, contains)
        yield from (("files", str(Path(path))) for role, path, _ in item.files if role in roles)
        if roles and item.place:
            file, _, row = item.place.rpartition(", ")
            yield "rows", f"{row} of {file}"


def _roles_with(
    facts: Facts, item: Item, contents: Mapping[str, Any], contains: _Contains
) -> Sequence[str]:
    """Return the roles of an item's files that have a content; none if the item lacks it."""
    pictures = [contents.get("source", ""), facts.digest_of(item.image) or ""]
    if any(contains(source, ()) for source in pictures):
        return IMAGE, CAPTION, TAGS
    return (CAPTION, TAGS) if contains("", contents.get("texts", ())) else ()


def trainings_with(contains: _Contains) -> Iterator[dict[str, Any]]:
    """Yield the JSON values of each training that saw an item with the content, with such items.

    A training whose items are unknown follows without items, if weights of it are left.
    """
    for training in all_trainings():
        items = training.items
        names = [item.name for item in items or () if contains(item.source, item.texts)]
        if names or (items is None and (training.weights or training.saved)):
            more = {"ended": training.record.ended, "items": names, "saved": training.saved}
            yield {**training.values(), **more}


# -- contents of files ----------------------------------------------------------------------------


def _of_items(
    items: Iterable[_Contents], facts: Facts, places: Mapping[str, str]
) -> Iterator[_Found]:
    """Yield the contents of today's items that a path names: one of their files, or a folder."""
    for _, item, contents in items:
        roles = dict[str, set[str]]()
        for role, path, _ in () if item.is_remote else item.files:
            full = os.path.abspath(path)  # noqa: PTH100 -- links stay, and it is much faster
            for place in filter(places.__contains__, _and_above(full)):
                roles.setdefault(place, set()).add(role)
        for place, own in roles.items():
            if own - {CAPTION, TAGS}:
                yield place, [contents.get("source", ""), facts.digest_of(item.image) or ""], []
            else:
                yield place, [], contents.get("texts", [])


def _and_above(path: str) -> Iterator[str]:
    """Yield a path and its folders."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def _of_files(facts: Facts, places: Mapping[str, str]) -> Iterator[_Found]:
    """Yield the contents of files that belong to no item."""
    for place, path in places.items():
        for file in [Path(path)] if Path(path).is_file() else _files_below(path):
            ending = file.suffix.lower()
            if ending in _MEDIA and file.is_file():
                yield place, [facts.digest_of(file) or ""], []
            elif ending == _TEXT and file.is_file():
                yield place, [], [read_caption(str(file))]


def _files_below(top: str) -> Iterator[Path]:
    for folder, _, names in os.walk(top, onerror=refuse_folder):
        yield from (Path(folder, name) for name in names)


def _of_rosters(facts: Facts, places: Mapping[str, str]) -> Iterator[_Found]:
    """Yield what trainings saw under the names of files and folders that are gone."""
    by_name = dict[str, set[str]]()
    for name, place in _names(facts, places):
        by_name.setdefault(name, set()).add(place)
    for item in _seen_items():
        for place in set[str]().union(*(by_name.get(name, ()) for name in _and_above(item.name))):
            is_text = place.lower().endswith(_TEXT)
            yield place, [] if is_text else [item.source], item.texts if is_text else []


def _seen_items() -> Iterator[RosterItem]:
    """Yield each item that a training saw, once for each of these trainings."""
    for training in all_trainings():
        yield from training.items or ()


def _names(facts: Facts, places: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the possible names of places as an item, a folder of items or a dataset."""
    for place, (name, dataset) in product(places, facts.config.datasets.items()):
        paths = [os.path.relpath(place, dataset.folder)]
        if dataset.is_list:  # its pictures may lie elsewhere
            paths += [os.path.relpath(place), place.lstrip("/")]
        for path in paths:
            for end in ("", PurePosixPath(path).suffix):
                yield str(PurePosixPath(name, path.removesuffix(end))), place


def _has(facts: Facts, path: Path, contains: _Contains) -> bool:
    """Whether a file is a picture, a caption or a cache file with a content."""
    ending = path.suffix.lower()
    if ending in _MEDIA:
        return contains(facts.digest_of(path) or "", ())
    if ending == _TEXT:
        with suppress(SourceError):
            return contains("", [read_caption(str(path))])
        return False
    header = header_of(path)
    if header is None:
        return False
    captions = [header.caption] if header.caption is not None else []
    return contains(header.source, captions)


def _folders(facts: Facts) -> dict[str, list[Path]]:
    """Return kind of places -> folders of such files. Exports may lie beside the images."""
    config = facts.config
    return {
        "files": [*filter(Path.exists, (Path(data.path) for data in config.datasets.values()))],
        "rows": [],
        "cache": [Path("cache")],
        "store": [STORE],
        "published": [Path(config.publish.path)],
        "exported": [Path(folder) for folder in [config.export.folder] if folder],
    }


# -- output ---------------------------------------------------------------------------------------


def _rows(
    files: dict[str, list[str]], trained: Sequence[dict[str, Any]], contents: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield labels and texts of lines about all that contains the contents."""
    for kind, places in {"content": contents, **files}.items():
        yield from ((kind, place) for place in places[:_SHOWN])
        if len(places) > _SHOWN:
            yield "", f"and {len(places) - _SHOWN} more"
    for training in trained:
        items = f"as {some(training['items'])}" if training["items"] else _UNKNOWN
        yield "training", f"{training['run']}, {training['began'][:16]}, {items}"
        copies = _copies(training)
        gone = "it left no weights" if training["ended"] else "its weights are not here any more"
        yield "", f"weights: {some(copies)}" if copies else gone


def advice(trained: Sequence[dict[str, Any]], present: Sequence[str]) -> Iterator[str]:
    """Yield what to do to have no weights that contain the contents; `present` are their files."""
    unknown = [path for training in trained if not training["items"] for path in _copies(training)]
    if unknown:
        yield f"it is unknown whether {some(unknown)} contain it: delete these files to be sure"
    trained = [training for training in trained if training["items"]]
    copies = [path for training in trained for path in _copies(training)]
    runs = dict.fromkeys(training["run"] for training in trained if training["weights"])
    if not copies:
        yield from [] if unknown else ["no weights here contain it"]
        return
    earlier = [str(run_folder(run) / PREVIOUS) for run in runs]
    if all(PREVIOUS in Path(path).parts for path in copies):
        yield f"only earlier weights contain it: delete {some(earlier)}"
        return
    if not runs:
        yield f"only saved steps or checkpoints contain it: delete {some(copies)}"
        return
    first = f"delete {some(present)}, then run" if present else "run"
    targets = " ".join(runs)
    yield f"weights of {some([*runs])} contain it"
    yield f"to train without it, {first} `latentmake build {targets}`"
    yield f"then delete the earlier weights: {some(earlier)}"


def _copies(training: Mapping[str, Any]) -> list[str]:
    return [*training["weights"], *training["saved"]]
