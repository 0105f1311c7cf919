"""Explanations of cache files: their origin, the runs that use them, and why they are stale."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from latentmake.config.mistakes import nearest
from latentmake.errors import CacheError, SourceError, UserError
from latentmake.files.cachefile import Header, read_header, read_metadata, read_recipe, target_key
from latentmake.files.verified import Checked, verify
from latentmake.layouts import Named, kind_of
from latentmake.plan import reuse
from latentmake.plan.differences import (
    Difference,
    placement_differences,
    recipe_differences,
    short,
)
from latentmake.plan.facts import Facts
from latentmake.plan.keys import Source
from latentmake.plan.parts import (
    PROMPTS,
    Part,
    generation_prompts,
    parts_of,
    prompts_of,
    source_of,
)
from latentmake.plan.single import evaluate_one, named_targets
from latentmake.sources import s3
from latentmake.sources.caption_files import read_caption
from latentmake.sources.items import Item


@dataclass
class Explanation:
    """Explanation of one cache file, or of one that is to be made.

    Attributes:
        state: `fresh`, `stale`, `orphaned`, `unknown`, or `unreadable`.
        reason: one of `staleness.REASONS` of a stale one, or a sentence.
        differences: parts of its key that differ from those of today.
        source: files that it is made of; the text, where there is no file.
        header: digests in it; None where it cannot be read.
        recipe: in its header.
        key: that it needs today, if known.
        at_hand: files that have this key.
        caption: in its header, where it is there.
        checked: what was found of its bytes; None where its header cannot be read.
        runs: that use it.
    """

    path: str
    state: str
    reason: str = ""
    differences: list[Difference] = field(default_factory=list)
    source: list[str] = field(default_factory=list)
    header: Header | None = None
    recipe: dict[str, object] = field(default_factory=dict)
    key: str | None = None
    at_hand: list[str] = field(default_factory=list)
    caption: str | None = None
    checked: Checked | None = None
    runs: list[str] = field(default_factory=list)


def explain(facts: Facts, file: str) -> list[Explanation]:
    """Explain a cache file, or all targets of the item of an image, a caption or a control.

    Raises:
        UserError: there is no such file, or nothing is made of it.
    """
    path = file if s3.is_remote(file) else os.path.relpath(file or ".")
    if Path(path).is_dir():
        raise SourceError("is a folder", where=file, hint="name one of its files")
    caches = os.path.realpath("cache")
    if not path.startswith("cache/") and _place(path).startswith(f"{caches}/"):
        path = f"cache{_place(path).removeprefix(caches)}"
    if path.startswith("cache/"):
        return [_of_cache(facts, path)]
    if found := [*_of_source(facts, path)]:
        return found
    if not os.path.lexists(path):
        raise SourceError("there is no such file", where=file, hint=_near(path))
    if read_metadata(path):  # in the store, or a copy
        return [_of_header(path)]
    for dataset, settings in facts.config.datasets.items():
        if any(_same(each, path) for each in (settings.path, settings.metadata_file) if each):
            what = f"lists the items of the dataset {dataset}"
            raise SourceError(what, where=file, hint="name the image of one of them")
    hint = "name a cache file, or an image or a caption of a dataset"
    raise SourceError("no dataset of a run has an item with this file", where=file, hint=hint)


# -- an image or a caption ------------------------------------------------------------------------


def _of_source(facts: Facts, path: str) -> Iterator[Explanation]:
    """Explain all targets that runs need of the items that have a file."""
    config = facts.config
    needed = dict.fromkeys(part for run in config.runs.values() for part in parts_of(config, run))
    faults = []
    for dataset, model in dict.fromkeys((part.dataset, part.model) for part in needed):
        if dataset == PROMPTS or not _may_hold(facts, dataset, path):
            continue
        items, faulty = facts.items(dataset, model)
        faults += [fault for fault in faulty if _same(fault.path, path)]
        layout, settings = facts.layout(model), config.datasets[dataset]
        for item in items:
            if not any(_same(each, path) for each in _files(item)):
                continue
            for part in (x.name for x in needed if x[:2] == (dataset, model)):
                source = source_of(part, item, controlled_text=layout.controlled_text)
                folder, media = layout.folder(dataset, model, part), source.media
                for named in layout.named(folder, part, item.stem, media, settings, source.span):
                    yield _explained(facts, dataset, model, part, source, named)
    for fault in faults:
        raise SourceError(fault.what, where=fault.path, hint=fault.hint)


def _may_hold(facts: Facts, dataset: str, path: str) -> bool:
    settings = facts.config.datasets[dataset]
    if settings.is_list or s3.is_remote(path):
        return True
    folders = [*filter(None, (settings.path, settings.control_directory))]
    named, real = (Path(os.path.abspath(path)), Path(_place(path)))  # noqa: PTH100
    return any(
        named.is_relative_to(os.path.abspath(each)) or real.is_relative_to(os.path.realpath(each))  # noqa: PTH100
        for each in folders
    )


def _files(item: Item) -> Iterator[str]:
    yield from (item.image, *item.controls, *item.layers)
    yield from filter(None, (item.caption, item.tags))


def _same(some: str, other: str) -> bool:
    if os.path.basename(some) != os.path.basename(other):  # noqa: PTH119 -- of many paths
        return False
    return some == other or _place(some) == _place(other)


def _place(path: str) -> str:
    """Return a path whose folders are no links."""
    folder, name = os.path.split(path)
    return f"{os.path.realpath(folder)}/{name}"


# -- a cache file ---------------------------------------------------------------------------------


def _of_cache(facts: Facts, path: str) -> Explanation:
    """Explain a cache file by its name, one that runs are yet to make as well."""
    found = _of_name(facts, path)
    if found.runs or os.path.lexists(path):
        return found
    raise CacheError("there is no such cache file", where=path, hint=_near(path))


def _of_name(facts: Facts, path: str) -> Explanation:
    _, dataset, model, place, name = (*path.split("/", 4), "", "", "", "")[:5]
    config, found = facts.config, _of_header(path)
    if dataset not in (PROMPTS, *config.datasets) or model not in config.models:
        known = dataset in (PROMPTS, *config.datasets)
        lost = f"model {model}" if known else f"dataset {dataset}"
        found.reason = f"the configuration has no {lost}"
        return found
    bases = facts.layout(model).owners(name)
    try:
        for part, source, named in named_targets(facts, dataset, model, place, bases):
            if named.path == path:
                return _explained(facts, dataset, model, part, source, named)
    except UserError as error:
        found.reason = str(error)
        return found
    if found.header is None:
        return found
    for fault in () if dataset == PROMPTS else facts.known_faults(dataset, model):
        if facts.layout(model).base(fault.stem) in bases:
            found.reason = f"its item is faulty: {fault.line}"
            return found
    found.state, found.reason = "orphaned", "its item is gone, or named otherwise"
    if any(facts.layout(model).base(stem) in bases for stem in _stems(facts, dataset, model)):
        found.reason = "its item has no such text, clip or size any more"
    if not bases:
        found.reason = f"the layout of {model} has no cache file of such a name"
    return found


def _stems(facts: Facts, dataset: str, model: str) -> list[str]:
    return [] if dataset == PROMPTS else [item.stem for item in facts.items(dataset, model)[0]]


def _of_header(path: str) -> Explanation:
    """Explain a file by its header alone."""
    try:
        header = read_header(path)
    except CacheError as error:
        return Explanation(path, "unreadable", error.what)
    except FileNotFoundError:
        return Explanation(path, "unreadable", "is a link that leads nowhere")
    except OSError as error:
        return Explanation(path, "unreadable", f"cannot be read ({error.strerror})")
    recipe, metadata = read_recipe(path), read_metadata(path)
    caption = metadata.get("caption", metadata.get("caption1"))
    checked = verify(path, may_be_zero=recipe.get("kind") == "text")
    return Explanation(
        path, "unknown", header=header, recipe=recipe, caption=caption, checked=checked
    )


def _explained(
    facts: Facts, dataset: str, model: str, part: str, source: Source, named: Named
) -> Explanation:
    path, kind = named.path, kind_of(part)
    found = _of_header(path) if os.path.lexists(path) else Explanation(path, "stale", "new")
    found.source = [place for place, _ in source.files] or [repr(source.text)]
    found.runs = [*_runs(facts, Part(dataset, model, part), source)]
    try:
        now = facts.recipe(dataset, model, kind)
        state = evaluate_one(facts, dataset, model, part, source, path)
        for error in state.unreadable.values():
            raise error
    except UserError as error:
        found.state, found.reason = "unknown", str(error)
        return found
    targets = state.parts[part].stale
    stale = next((each for each in targets if each.path == path), None)
    assert state.keys is not None
    content = state.keys.content(source) or ""
    variant = state.keys.variant(part, source, content, named.clip, found.header)
    if now and variant is not None:
        found.key = target_key(content, state.keys.recipes[part], variant)
    if stale is None:
        found.state, found.reason = "fresh", ""
        found.key = found.header.key if found.header else found.key  # of other line ends, it may be
        return found
    damage, found.state, found.reason = found.reason, "stale", stale.reason
    if stale.reason == "damaged":
        found.reason += f": it {damage}"
    if stale.rule:
        found.reason += f": {stale.rule}"
    reuse.mark(facts.memo, [state])
    found.at_hand = [
        x for each in state.parts[part].stale if each.path == path for x in each.at_hand
    ]
    if found.header is not None:
        found.differences = [
            *_source_differences(facts, model, source, found, content),
            *(recipe_differences(found.recipe, now, facts.config.models[model]) if now else ()),
            *placement_differences(
                facts.memo,
                facts.layout(model),
                facts.config.datasets.get(dataset),
                part,
                source,
                found.header,
                named.clip,
            ),
        ]
        if not now:
            found.reason += f": the model {model} is not here"
        elif not found.differences:
            found.differences = [Difference("key", short(found.header.key), short(found.key or ""))]
    return found


def _source_differences(
    facts: Facts, model: str, source: Source, found: Explanation, content: str
) -> Iterator[Difference]:
    """Yield what differs between the source in a header and that of today."""
    header = found.header
    if header is None or header.source == content:
        return
    place = f" ({source.path})" if source.path else ""
    if source.media is None and found.recipe.get("kind") == "text":
        old = found.caption
        text = source.text if source.path is None else read_caption(source.path)
        new = facts.layout(model).caption(text or "")
        if old is not None and old != new:
            yield Difference("caption", quoted(old), quoted(new) + place)
            return
    several = len(source.files) > 1
    name = "digest of its sources" if several else f"{_noun(found)}'s digest"
    yield Difference(name, short(header.source), short(content) + place)


def _noun(found: Explanation) -> str:
    return "caption" if found.recipe.get("kind") == "text" else "source"


def quoted(text: str) -> str:
    """Return a text in quotes, in one line."""
    return json.dumps(text, ensure_ascii=False)


def _runs(facts: Facts, part: Part, source: Source) -> Iterator[str]:
    """Yield the runs that use a target."""
    config = facts.config
    for name, run in config.runs.items():
        prompts = {*prompts_of(run), *generation_prompts(config, run)}
        is_prompt = part.dataset == PROMPTS and run.model == part.model and source.text in prompts
        if is_prompt or part in parts_of(config, run):
            yield name


def _near(path: str) -> str:
    """Return a hint for a file that does not exist."""
    folder, name = os.path.split(path)
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir(folder or ".")  # noqa: PTH208 -- of a folder of many thousand files
    guess = nearest(name, names)
    return f"the nearest is {guess}" if guess else "check the path"
