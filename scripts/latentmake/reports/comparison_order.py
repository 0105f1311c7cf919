"""Planning of `compare_{a}_vs_{b}`: names, orders, and whether a page is up to date.

A page holds the digest of what it shows: it is written again when a picture has other content. No
Pillow: the planner imports this.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel

from latentmake import digest
from latentmake.config import Config, LoopTrainer, nearest
from latentmake.errors import ConfigError, DatasetError, TrainingError, UserError
from latentmake.files import atomic
from latentmake.plan.parts import run_folder
from latentmake.reports.natural import natural_key
from latentmake.reports.page import state_in, template_digest
from latentmake.sources.items import IMAGE_EXTENSIONS
from latentmake.training.generation import FOLDER as GENERATED
from latentmake.training.generation import INDEX as GENERATED_INDEX
from latentmake.training.generation import GenerationIndex
from latentmake.training.loop.result import Record
from latentmake.training.loop.sample_images import INDEX, PictureIndex, read_index

__all__ = [
    "PLAYED",
    "Page",
    "PageOrder",
    "Source",
    "generated_folder",
    "generated_of",
    "index_of",
    "is_page",
    "pictures_in",
    "plan_page",
    "resolve",
    "state_of",
]

ORDERS = Path(".latentmake/compare")
PLAYED = frozenset({".mp4", ".webm"})
"""Endings of clips that browsers play."""
_BETWEEN = "_vs_"
_TARGET = re.compile(r"compare_(.+)|reports/compare_(.+)\.html")


class Source(BaseModel, extra="forbid", frozen=True):
    """A run or a folder of images and clips, with the folder of its pictures."""

    name: str
    kind: Literal["run", "folder"]
    path: str


class PageOrder(BaseModel, extra="forbid", frozen=True):
    """Order of a page; `planned` (ns) makes each order another file."""

    sources: list[Source]
    planned: int


class Page(NamedTuple):
    """A requested page.

    Attributes:
        name: its target without `compare_`.
        stale: whether it is missing or shows other pictures.
        trained: receipts of trainings and generations of the same command that it shows.
    """

    name: str
    order: str
    stale: bool
    trained: list[str]

    @property
    def path(self) -> str:
        """Its file."""
        return f"reports/compare_{self.name}.html"


def is_page(target: str) -> bool:
    """Whether a target asks for a comparison."""
    return _TARGET.fullmatch(target) is not None


def resolve(target: str, config: Config) -> list[str]:
    """Return the runs and folders that a target names, in its order.

    Raises:
        ConfigError: an unknown name, a name given twice, or an ambiguous target.
    """
    match = _TARGET.fullmatch(target)
    assert match is not None
    text = match[1] or match[2]
    known = [*config.runs, *config.folders]
    found = list(_readings(text, known))
    if not found:
        raise _unknown(target, text, known)
    if len(found) > 1:
        ways = " or as ".join(" and ".join(f"`{name}`" for name in each) for each in found[:3])
        raise ConfigError(
            f"can be read as {ways}",
            where=target,
            hint=f"give the one whose name holds `{_BETWEEN}` another name",
        )
    (names,) = found
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"`{twice[0]}` is named twice", where=target, hint="name it once")
    return names


def _readings(text: str, known: Collection[str]) -> Iterator[list[str]]:
    for name in known:
        if text == name:
            yield [name]
        elif text.startswith(name + _BETWEEN):
            for rest in _readings(text[len(name + _BETWEEN) :], known):
                yield [name, *rest]


def _unknown(target: str, text: str, known: Sequence[str]) -> ConfigError:
    pieces, names = text.split(_BETWEEN), []
    while pieces:  # the longest known name, else one piece
        lengths = range(len(pieces), 0, -1)
        length = next((n for n in lengths if _BETWEEN.join(pieces[:n]) in known), 1)
        names.append(_BETWEEN.join(pieces[:length]))
        del pieces[:length]
    wrong = next(name for name in names if name not in known)
    hint = f"known: {', '.join(known)}"
    if guess := nearest(wrong, known):
        guesses = [name if name in known else nearest(name, known) for name in names]
        full = f"compare_{_BETWEEN.join(map(str, guesses))}"
        hint = f"did you mean `{full if all(guesses) else guess}`?"
    return ConfigError(f"there is no run or folder `{wrong}`", where=target, hint=hint)


def plan_page(
    target: str,
    config: Config,
    *,
    digest_of: Callable[[Path], str],
    trained: Collection[str],
    planned: int,
    generated: Collection[str] = (),
) -> Page:
    """Write the order of a page.

    Args:
        target: as in `is_page`.
        config: its runs and folders may be named.
        digest_of: returns a file's digest.
        trained: runs that the same command trains first.
        planned: time in nanoseconds.
        generated: runs whose clips the same command generates first.

    Raises:
        UserError: an unknown name, or no pictures.
    """
    sources = [_source(name, config) for name in resolve(target, config)]
    runs = [each.name for each in sources if each.kind == "run"]
    awaited = [run_folder(run) / "trained.json" for run in runs if run in trained]
    awaited += [run_folder(run) / "generated.json" for run in runs if run in generated]
    coming = {*trained, *generated}
    for source in sources:
        if not (source.name in runs and source.name in coming) and not _has_pictures(source):
            raise _without_pictures(target, source, config)
    name = _BETWEEN.join(source.name for source in sources)
    path = ORDERS / f"{name}.json"
    atomic.write(path, PageOrder(sources=sources, planned=planned).model_dump_json().encode())
    page = Page(name, str(path), True, [str(receipt) for receipt in awaited])
    shown = state_in(Path(page.path))
    fresh = shown is not None and not awaited and shown == state_of(sources, digest_of)
    return page._replace(stale=not fresh)


def _source(name: str, config: Config) -> Source:
    if name in config.runs:
        return Source(name=name, kind="run", path=str(run_folder(name) / "samples"))
    return Source(name=name, kind="folder", path=config.folders[name].path)


def _has_pictures(source: Source) -> bool:
    if source.kind == "run":
        return index_of(source) is not None or generated_of(source) is not None
    return bool(pictures_in(source))


def _without_pictures(target: str, source: Source, config: Config) -> UserError:
    if source.kind == "folder":
        return DatasetError(
            "holds no images", where=f"{target}: {source.path}", hint=f"see folders.{source.name}"
        )
    run = config.runs[source.name]
    if isinstance(run.trainer, LoopTrainer) and not run.trainer.draws:
        make = f"make clips: snakemake --cores all generate_{source.name}"
        return ConfigError(
            f"the run {source.name} draws no sample clips, for its trainer has no prompts",
            where=target,
            hint=make if run.generate else "set `samples: {prompts: [...]}` of its trainer",
        )
    if not hasattr(run.trainer, "samples"):
        return ConfigError(
            f"the run {source.name} draws no sample pictures, for only our own trainers do",
            where=target,
            hint="name a folder of pictures drawn with it under `folders`, and compare that",
        )
    return TrainingError(
        f"the run {source.name} has no sample pictures yet",
        where=target,
        hint=f"make them: snakemake --cores all train_{source.name}",
    )


def generated_folder(source: Source) -> Path:
    """Return the folder of a run's generated clips."""
    return Path(source.path).with_name(GENERATED)


def generated_of(source: Source) -> GenerationIndex | None:
    """Return the index of a run's generated clips; None where there are none."""
    index = GenerationIndex.read(generated_folder(source) / GENERATED_INDEX)
    return index if index is not None and index.clips else None


def index_of(source: Source) -> PictureIndex | None:
    """Return the index of a run's pictures; None without pictures of the present weights."""
    folder = Path(source.path)
    index = read_index(folder)
    record = Record.read(folder.with_name("training.json"))
    if index is None or not index.prompts or not index.steps:
        return None
    return index if record is None or record.wanted == index.wanted else None


def pictures_in(source: Source) -> dict[str, Path]:
    """Return the images of a folder and its sub-folders: relative path without ending -> path.

    Hidden files and folders are ignored.

    Raises:
        DatasetError: the folder does not exist, or two images differ in their ending alone.
    """
    root = Path(source.path)
    where = f"folders.{source.name}"
    if not root.is_dir():
        raise DatasetError(
            f"the folder {root} does not exist", where=where, hint="correct the path or create it"
        )
    found: dict[str, Path] = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(folder, name)
            suffix = path.suffix.lower()
            if name.startswith(".") or suffix not in IMAGE_EXTENSIONS | PLAYED:
                continue
            stem = path.relative_to(root).with_suffix("").as_posix()
            if stem in found and {suffix, found[stem].suffix.lower()} & PLAYED:
                if suffix not in PLAYED:  # of a picture and a clip of one name, the picture
                    found[stem] = path
                continue
            if stem in found:
                raise DatasetError(
                    f"{found[stem].name} and {path.name} differ in their ending alone",
                    where=where,
                    hint="rename or remove one of them",
                )
            found[stem] = path
    return dict(sorted(found.items(), key=lambda item: natural_key(item[0])))


def state_of(sources: Sequence[Source], digest_of: Callable[[Path], str]) -> str:
    """Return the digest of what a page of some runs and folders shows.

    Raises:
        DatasetError: a folder does not exist.
    """

    def content_of(path: Path) -> str:
        try:
            return digest_of(path)
        except OSError:
            return "cannot be read"  # as the page says

    state: list[object] = [template_digest("compare")]
    for source in sources:
        if source.kind == "run":
            content: object = content_of(Path(source.path, INDEX))
            if generated_of(source) is not None:
                content = [content, content_of(generated_folder(source) / GENERATED_INDEX)]
        else:
            found = pictures_in(source)
            content = [[os.fsencode(name).hex(), content_of(path)] for name, path in found.items()]
        state.append([source.name, source.kind, content])
    return digest.of_value(state)
