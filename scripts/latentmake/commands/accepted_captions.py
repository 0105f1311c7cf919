"""`latentmake captions RUN --accept` and `--undo`: made captions become files of a person.

A made caption is copied beside its picture, and is never written over from then on. A state file
notes the digest of each copy, so that `--undo` removes only copies that nobody edited.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import typer
from pydantic import Field

from latentmake.base import atomic, digest
from latentmake.base.errors import ConfigError, SourceError, nearest
from latentmake.base.machine import counted
from latentmake.base.state_file import JsonFile
from latentmake.commands.project import print_json
from latentmake.data import caption_files
from latentmake.data.contents import Contents
from latentmake.data.item import Item
from latentmake.data.texts import made_text
from latentmake.plan.facts import Facts

_ALL = "all"  # stands for all items of a run
_PLACE = Path(".latentmake/accepted_captions.json")


class Accepted(JsonFile):
    """Captions that were accepted: dataset -> stem -> path of the copy and digest of its bytes."""

    datasets: dict[str, dict[str, tuple[str, str]]] = Field({})


def accept(facts: Facts, run: str, stems: Sequence[str], as_json: bool) -> None:
    """Copy made captions beside their pictures.

    Raises:
        ConfigError: a named one cannot be copied; others are.
    """
    state, written, kept = Accepted.read(_PLACE) or Accepted(), list[str](), list[str]()
    try:
        for dataset, item in _items(facts, run, stems):
            path = caption_files.caption_path(facts.config.datasets[dataset], item)
            try:
                data = f"{_text(facts, dataset, item)}\n".encode()
                atomic.create(path, data)
            except SourceError as error:
                # Among all, a caption that a person wrote is no news.
                if _ALL not in stems or not caption_files.is_written(item):
                    kept.append(f"{item.stem}: {error.what}")
            except FileExistsError:
                kept.append(f"{item.stem}: {path} exists")
            else:
                written.append(str(path))
                copy = str(path), digest.of_bytes(data)
                state.datasets.setdefault(dataset, {})[item.stem] = copy
    finally:
        if written:  # after the files: a copy that is not noted is never removed
            state.write(_PLACE)
    if kept and _ALL not in stems:
        raise ConfigError(" | ".join(kept), where="--accept")
    _report("accepted", written, kept, as_json)


def undo(facts: Facts, run: str, stems: Sequence[str], as_json: bool) -> None:
    """Remove copies that `accept` wrote and nobody edited since."""
    state, removed = Accepted.read(_PLACE) or Accepted(), list[str]()
    of_run = [state.datasets.get(name, {}) for name in facts.config.runs[run].datasets]
    accepted = {_ALL}.union(*of_run)
    kept = [f"{stem}: was not accepted" for stem in stems if stem not in accepted]
    chosen = accepted if not stems or _ALL in stems else {*stems}
    for copies in of_run:
        for stem in sorted(copies.keys() & chosen):
            path, content = copies[stem]
            now = caption_files.read_if_there(Path(path))
            if now is None:
                kept.append(f"{stem}: {path} is gone already")
            elif digest.of_bytes(now) != content:
                kept.append(f"{stem}: {path} was edited since, so it stays")
                continue
            else:
                Path(path).unlink()
                removed.append(path)
            del copies[stem]
    if accepted != {_ALL}:
        state.write(_PLACE)
    _report("removed", removed, kept, as_json)


def _items(facts: Facts, run: str, stems: Sequence[str]) -> Iterator[tuple[str, Item]]:
    """Yield dataset and item for each stem of a run's items; raises ConfigError."""
    items, refused = list[tuple[str, Item]](), list[str]()
    for name in facts.config.runs[run].datasets:
        settings = facts.config.datasets[name]
        reason = caption_files.without_files(name, settings)
        if not settings.captioner:
            reason = f"datasets.{name}: no captioner writes its captions; set `captioner`"
        if reason:
            refused.append(reason)
        else:
            items += ((name, item) for item in facts.items_with_made(name))
    if not items:
        raise ConfigError(" | ".join(refused))
    names = sorted({item.stem for _, item in items})
    for stem in {*stems}.difference(names, [_ALL]):
        guess = nearest(stem, names)
        hint = f"did you mean `{guess}`?" if guess else f"items are named by stems, or `{_ALL}`"
        raise ConfigError("there is no such item", where=f"--accept {stem}", hint=hint)
    yield from (pair for pair in items if _ALL in stems or pair[1].stem in stems)


def _text(facts: Facts, dataset: str, item: Item) -> str:
    """Return the text of an item's made captions; raises SourceError if there is none to copy."""
    settings = facts.config.datasets[dataset]
    if reason := caption_files.fixed(settings, item, facts.listed(dataset)[1]):
        raise SourceError(reason)
    if caption_files.is_written(item):
        raise SourceError("has a caption already, which stays")
    if caption_files.awaits(item):
        raise SourceError("its caption is not made yet, or is not up to date; build it first")
    return made_text(Contents(item.files, facts.memo, settings), item, settings)


def _report(word: str, paths: Sequence[str], kept: Sequence[str], as_json: bool) -> None:
    lines = [*paths, *(f"kept: {line}" for line in kept)]
    text = "\n".join([*lines, f"{counted(len(paths), 'caption')} {word}"])
    if as_json:
        print_json({word: [*paths], "kept": [*kept]})
    else:
        typer.echo(text)
