"""`latentmake uses`: name everything that contains a picture, a caption or a folder, by content.

Contents are compared, not names: a picture is found in caches, trainings, publications and exports
after it was renamed or deleted. Rosters of former trainings say what is in their weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from latentmake.base.errors import ConfigError, SourceError
from latentmake.commands.project import print_json, printable
from latentmake.data.contents import read_caption
from latentmake.data.item import CAPTION, TAGS
from latentmake.formats.cachefile import header_of
from latentmake.formats.endings import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import PREVIOUS, run_folder
from latentmake.plan.product import some
from latentmake.plan.store import STORE
from latentmake.runs.edited import all_contents
from latentmake.runs.history import all_trainings

_MEDIA = IMAGE_EXTENSIONS | VIDEO_EXTENSIONS
_TEXT = ".txt"
_SHOWN = 5  # most files of a kind that are listed

_Contains = Callable[[str, Sequence[str]], bool]
"""Function that says whether a digest of a picture, or any of some texts, is looked for."""


def uses(
    facts: Facts, paths: Sequence[str] | None, digests: Sequence[str] | None, as_json: bool
) -> None:
    """Name all caches, trainings, publications and exports that contain a picture or caption."""
    if not (paths or digests):
        hint = "name a picture, a caption or a folder, or use --digest SHA-256"
        raise ConfigError("nothing is named", where="latentmake uses", hint=hint)
    sources, texts = contents_of(facts, paths or ())
    sources |= {value.lower() for value in digests or ()}

    def contains(source: str, captions: Sequence[str]) -> bool:
        return source in sources or not texts.isdisjoint(captions)

    datasets = facts.config.datasets
    files = {
        kind: [*files_with(facts, folders, contains)] for kind, folders in _folders(facts).items()
    }
    trained = [*trainings_with(contains)]
    for file in [file for file in files["files"] if Path(file).suffix.lower() in _MEDIA]:
        captions = {Path(file).with_suffix(data.caption_extension) for data in datasets.values()}
        files["files"] += [str(caption) for caption in captions if caption.is_file()]
    if as_json:
        values = {"sources": sorted(sources), "texts": sorted(texts), "files": files}
        print_json({**values, "trainings": trained})
    else:
        contents = [*sorted(sources), *map(repr, sorted(texts))]
        lines = (f"{label:12}{text}" for label, text in _rows(files, trained, contents))
        for line in (*lines, *advice(trained, files["files"])):
            typer.echo(printable(line))
    if any(training["weights"] or training["saved"] for training in trained):
        raise typer.Exit(1)


def contents_of(facts: Facts, paths: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the digests of the pictures, and the texts, that files and folders hold.

    A picture with control images counts together with them, as in its latents. For a file that no
    longer exists, the items of its name are looked up in the rosters.

    Raises:
        SourceError: a file does not exist, and no training saw an item of its name.
    """
    sources, texts = set[str](), set[str]()
    for path in paths:
        for contents in (_of_items, _of_files, _of_rosters):
            own_sources, own_texts = contents(facts, path)
            if own_sources or own_texts:
                break
        else:
            what = "is in no dataset, and no training saw it under this name"
            raise SourceError(what, where=path, hint="check the path, or use --digest SHA-256")
        sources |= own_sources
        texts |= own_texts
    return sources, texts


def files_with(facts: Facts, folders: Iterable[Path], contains: _Contains) -> Iterator[str]:
    """Yield the files below folders that contain a picture or text."""
    for folder in (folder.parent if folder.is_file() else folder for folder in folders):
        for place, folders_below, names in os.walk(folder):
            folders_below.sort()
            for name in sorted(names):
                path = Path(place, name)
                if _has(facts, path, contains):
                    yield str(path)


def trainings_with(contains: _Contains) -> Iterator[dict[str, Any]]:
    """Yield the JSON values of each training that saw an item with the content, with such items."""
    for training in all_trainings():
        items = (item for item in training.items or () if contains(item.source, item.texts))
        if names := [item.name for item in items]:
            more = {"ended": training.record.ended, "items": names, "saved": training.saved}
            yield {**training.values(), **more}


# -- contents of files ----------------------------------------------------------------------------


def _of_items(facts: Facts, path: str) -> tuple[set[str], set[str]]:
    """Return the contents of today's items that a path names: one of their files, or a folder."""
    below = f"{_absolute(path)}/"
    sources, texts = set[str](), set[str]()
    for _, item, contents in all_contents(facts):
        files = () if item.is_remote else item.files
        roles = {role for role, path, _ in files if f"{_absolute(path)}/".startswith(below)}
        if roles - {CAPTION, TAGS}:
            sources.update((contents.get("source", ""), facts.digest_of(item.image) or ""))
        elif roles:
            texts.update(contents.get("texts", ()))
    return sources - {""}, texts


def _absolute(path: str) -> str:
    return os.path.abspath(path)  # noqa: PTH100 -- links stay, and it is much faster


def _of_files(facts: Facts, path: str) -> tuple[set[str], set[str]]:
    """Return the contents of files that belong to no item."""
    place = Path(path)
    files = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
    sources = {facts.digest_of(file) for file in files if file.suffix.lower() in _MEDIA}
    texts = {read_caption(str(file)) for file in files if file.suffix.lower() == _TEXT}
    return {source for source in sources if source}, texts


def _of_rosters(facts: Facts, path: str) -> tuple[set[str], set[str]]:
    """Return what trainings saw under the name of a file that is gone."""
    stems = dict[str, str]()
    for dataset, settings in facts.config.datasets.items():
        place = os.path.relpath(path, settings.path)
        if not place.startswith(os.pardir):
            stems[dataset] = str(Path(place).with_suffix(""))
    is_text = path.lower().endswith(_TEXT)
    sources, texts = set[str](), set[str]()
    for training in all_trainings():
        for item in training.items or ():
            stem = stems.get(item.dataset)
            if stem is not None and f"{item.stem}/".startswith(f"{stem}/"):
                if is_text:
                    texts.update(item.texts)
                elif item.source:
                    sources.add(item.source)
    return sources, texts


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
    """Return kind of files -> folders of such files. Exports may lie beside the images."""
    config = facts.config
    return {
        "files": [*filter(Path.exists, (Path(data.path) for data in config.datasets.values()))],
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
        yield (
            "training",
            f"{training['run']}, {training['began'][:16]}, as {some(training['items'])}",
        )
        copies = [*training["weights"], *training["saved"]]
        gone = "it left no weights" if training["ended"] else "its weights are not here any more"
        yield "", f"weights: {some(copies)}" if copies else gone


def advice(trained: Sequence[dict[str, Any]], present: Sequence[str]) -> Iterator[str]:
    """Yield what to do to have no weights that contain the contents; `present` are their files."""
    copies = [path for training in trained for path in (*training["weights"], *training["saved"])]
    runs = dict.fromkeys(training["run"] for training in trained if training["weights"])
    if not copies:
        yield "no weights here contain it"
        return
    earlier = [str(run_folder(run) / PREVIOUS) for run in runs]
    if all(PREVIOUS in Path(path).parts for path in copies):
        yield f"only earlier weights contain it: delete {some(earlier)}"
        return
    if not runs:
        yield f"only saved steps or checkpoints contain it: delete {some(copies)}"
        return
    first = f"delete {some(present)}, then run" if present else "run"
    targets = " ".join(f"train_{run}" for run in runs)
    yield f"weights of {some([*runs])} contain it"
    yield f"to train without it, {first} `snakemake {targets}`"
    yield f"then delete the earlier weights: {some(earlier)}"
