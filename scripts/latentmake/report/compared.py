"""What a target `compare_{a}_vs_{b}` names, whether its pictures are there, and what they are.

No Pillow here: the planner asks this. A page bears the state of all that it shows, a digest, so
that it is made anew when a picture is another one and not because a file is newer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from latentmake import digest
from latentmake.config import Config, nearest
from latentmake.dataset import IMAGE_EXTENSIONS
from latentmake.errors import ConfigError, DatasetError, TrainingError
from latentmake.files import atomic
from latentmake.parts import run_folder
from latentmake.report.page import state_in, template_digest
from latentmake.trainers.order import Wanted
from latentmake.trainers.pictures import INDEX, PictureIndex, read_index
from latentmake.trainers.record import read_record

__all__ = [
    "Page",
    "PageOrder",
    "Source",
    "index_of",
    "is_page",
    "pictures_in",
    "plan_page",
    "resolve",
    "state_of",
]

ORDERS = Path(".latentmake/compare")
_BETWEEN = "_vs_"
_TARGET = re.compile(r"compare_(.+)|reports/compare_(.+)\.html")


class Source(BaseModel):
    """A run or a folder of images.

    Attributes:
        path: folder of the pictures.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    kind: Literal["run", "folder"]
    path: str


class PageOrder(BaseModel):
    """What a page is to show; `planned` (ns) makes each order another file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    sources: list[Source]
    planned: int


class Page(NamedTuple):
    """A page that was asked for.

    Attributes:
        name: what follows `compare_` in its target.
        order: path of its order.
        stale: whether it is missing, or shows other pictures than there are.
        trained: receipts of the trainings, asked for beside it, whose pictures it shows.
    """

    name: str
    order: str
    stale: bool
    trained: list[str]

    @property
    def path(self) -> str:
        """Where it lies."""
        return f"reports/compare_{self.name}.html"


def is_page(target: str) -> bool:
    """Whether a target asks for a comparison."""
    return _TARGET.fullmatch(target) is not None


def resolve(target: str, config: Config) -> list[str]:
    """Return the runs and folders that a target names, in its order.

    Raises:
        ConfigError: one that there is not, one named twice, or names that can be read in two ways.
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
            mend=f"give the one whose name holds `{_BETWEEN}` another name",
        )
    (names,) = found
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"`{twice[0]}` is named twice", where=target, mend="name it once")
    return names


def _readings(text: str, known: Collection[str]) -> Iterator[list[str]]:
    for name in known:
        if text == name:
            yield [name]
        elif text.startswith(name + _BETWEEN):
            for rest in _readings(text[len(name + _BETWEEN) :], known):
                yield [name, *rest]


def _unknown(target: str, text: str, known: Sequence[str]) -> ConfigError:
    """Say which part of a target is no known name: as few and as short ones as can be."""
    pieces = text.split(_BETWEEN)
    # best[i]: the fewest unknown pieces among the first i, and the names that they were read as.
    best: list[tuple[int, list[str]]] = [(0, [])]
    for end in range(1, len(pieces) + 1):
        ways = []
        for start in range(end):
            name = _BETWEEN.join(pieces[start:end])
            unknown, names = best[start]
            if name in known or start == end - 1:
                ways.append((unknown + (name not in known), [*names, name]))
        best.append(min(ways, key=lambda way: (way[0], len(way[1]))))
    names = best[-1][1]
    wrong = next(name for name in names if name not in known)
    mend = f"known: {', '.join(known)}"
    if guess := nearest(wrong, known):
        guesses = [name if name in known else nearest(name, known) or name for name in names]
        whole = f"compare_{_BETWEEN.join(guesses)}"
        mend = f"did you mean `{whole if set(guesses) <= set(known) else guess}`?"
    return ConfigError(f"there is no run or folder `{wrong}`", where=target, mend=mend)


def plan_page(
    target: str,
    config: Config,
    *,
    digest_of: Callable[[Path], str],
    trained: Collection[str],
    planned: int,
) -> Page:
    """Write the order of a page.

    Args:
        target: asks for it.
        config: knows runs and folders.
        digest_of: returns a file's digest.
        trained: the runs that the same command trains before.
        planned: when, in nanoseconds.

    Raises:
        UserError: a name that there is not, or no pictures; one line.
    """
    sources = [_source(name, config) for name in resolve(target, config)]
    awaited = [each.name for each in sources if each.kind == "run" and each.name in trained]
    for source in sources:
        if source.name not in awaited and not _pictures(source):
            raise _without_pictures(target, source, config)
    name = _BETWEEN.join(source.name for source in sources)
    path = ORDERS / f"{name}.json"
    atomic.write(path, PageOrder(sources=sources, planned=planned).model_dump_json().encode())
    receipts = [str(run_folder(run) / "trained.json") for run in awaited]
    page = Page(name, str(path), True, receipts)
    shown = state_in(Path(page.path))
    fresh = shown is not None and not awaited and shown == state_of(sources, digest_of)
    return page._replace(stale=not fresh)


def _source(name: str, config: Config) -> Source:
    if name in config.runs:
        return Source(name=name, kind="run", path=str(run_folder(name) / "samples"))
    return Source(name=name, kind="folder", path=config.folders[name].path)


def _pictures(source: Source) -> bool:
    if source.kind == "run":
        return index_of(source) is not None
    return bool(pictures_in(source))


def _without_pictures(
    target: str, source: Source, config: Config
) -> ConfigError | DatasetError | TrainingError:
    if source.kind == "folder":
        return DatasetError(
            "holds no images", where=f"{target}: {source.path}", mend=f"see folders.{source.name}"
        )
    trainer = config.runs[source.name].trainer
    if trainer is None or trainer.kind != "sd":
        return ConfigError(
            f"the run {source.name} draws no sample pictures, for only the trainer sd does",
            where=target,
            mend="name a folder of pictures drawn with it under `folders`, and compare that",
        )
    return TrainingError(
        f"the run {source.name} has no sample pictures yet",
        where=target,
        mend=f"make them: snakemake --cores all train_{source.name}",
    )


def index_of(source: Source) -> PictureIndex | None:
    """Return the index of a run's pictures; None where it has none, or weights of another run."""
    folder = Path(source.path)
    index = read_index(folder)
    record = read_record(folder.with_name("training.json"))
    if index is None or not index.prompts or not index.steps:
        return None
    wanted: Wanted = index.wanted if record is None else record.wanted
    return index if wanted == index.wanted else None


def pictures_in(source: Source) -> dict[str, Path]:
    """Return the images of a folder and its sub-folders: relative path without ending -> path.

    Hidden files and folders are passed over.

    Raises:
        DatasetError: there is no such folder, or two images differ in their ending alone.
    """
    root = Path(source.path)
    if not root.is_dir():
        raise DatasetError(
            f"the folder {root} does not exist",
            where=f"folders.{source.name}",
            mend="correct the path or create it",
        )
    found: dict[str, Path] = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(folder, name)
            if name.startswith(".") or path.suffix.lower() not in IMAGE_EXTENSIONS:
                continue
            stem = path.relative_to(root).with_suffix("").as_posix()
            if stem in found:
                raise DatasetError(
                    f"{found[stem].name} and {path.name} differ in their ending alone",
                    where=f"folders.{source.name}",
                    mend="rename or remove one of them",
                )
            found[stem] = path
    return dict(sorted(found.items(), key=lambda item: _natural(item[0])))


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort `step 9` before `step 10`."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def state_of(sources: Sequence[Source], digest_of: Callable[[Path], str]) -> str:
    """Return the digest of all that a page of some runs and folders shows.

    Raises:
        DatasetError: a folder does not exist.
    """

    def content_of(path: Path) -> str:
        try:
            return digest_of(path)
        except OSError:  # the page says so in its place
            return "cannot be read"

    state: list[object] = [template_digest()]
    for source in sources:
        if source.kind == "run":
            content: object = content_of(Path(source.path, INDEX))
        else:
            found = pictures_in(source)
            content = [[os.fsencode(name).hex(), content_of(found[name])] for name in found]
        state.append([source.name, source.kind, content])
    return digest.of_value(state)
