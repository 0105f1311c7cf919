"""Explanations: where a cache file comes from, the runs that use it, and why it is stale.

The differences of recipes are told in the words of the configuration.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from latentmake.config.datasets import Dataset
from latentmake.errors import CacheError, SourceError, UserError, nearest
from latentmake.files.cachefile import Header, read_header, read_metadata, read_recipe
from latentmake.files.paths import is_remote
from latentmake.files.verified import Checked, verify
from latentmake.layouts import kind_of
from latentmake.models.reasons import Difference, short, text_of
from latentmake.models.recipe_differences import recipe_differences
from latentmake.plan.facts import Facts
from latentmake.plan.planner import judge_one, named_targets
from latentmake.plan.reusable import mark_reusable
from latentmake.plan.state import Judge, Stale
from latentmake.plan.target import (
    PROMPTS,
    Part,
    Target,
    generation_prompts,
    parts_of,
    prompts_of,
    targets_of,
)
from latentmake.sources.item import Item
from latentmake.sources.texts import read_caption

PLACED = "size and crop"
"""Name of the difference between two placements of an image."""


@dataclass
class Explanation:
    """Explanation of one cache file, or of one that is to be made.

    Attributes:
        state: `fresh`, `stale`, `orphaned`, `unknown`, or `unreadable`.
        reason: one of `state.REASONS` of a stale one, or a sentence.
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
    path = file if is_remote(file) else os.path.relpath(file or ".")
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
        own = [item for item in items if any(_same(each.path, path) for each in item.files)]
        for item in own:
            for part in (x for x in needed if x[:2] == (dataset, model)):
                inputs = facts.inputs(model, part.name, [item])
                layout, settings = facts.layout(model), config.datasets[dataset]
                for each, targets in targets_of(layout, settings, part, inputs):
                    yield from (_explained(facts, part, each, target) for target in targets)
    for fault in faults:
        raise SourceError(fault.what, where=fault.path, hint=fault.hint)


def _may_hold(facts: Facts, dataset: str, path: str) -> bool:
    settings = facts.config.datasets[dataset]
    if settings.is_list or is_remote(path):
        return True
    folders = [*filter(None, (settings.path, settings.control_directory))]
    named, real = (Path(os.path.abspath(path)), Path(_place(path)))  # noqa: PTH100
    return any(
        named.is_relative_to(os.path.abspath(each)) or real.is_relative_to(os.path.realpath(each))  # noqa: PTH100
        for each in folders
    )


def _same(some: str, other: str) -> bool:
    if os.path.basename(some) != os.path.basename(other):  # noqa: PTH119 -- of many paths
        return False
    return some == other or _place(some) == _place(other)


def _place(path: str) -> str:
    """Return a path whose folders are no links."""
    folder, name = os.path.split(path)
    return f"{os.path.realpath(folder)}/{name}"


def _near(path: str) -> str:
    """Return a hint for a file that does not exist."""
    folder, name = os.path.split(path)
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir(folder or ".")  # noqa: PTH208 -- of a folder of many thousand files
    guess = nearest(name, names)
    return f"the nearest is {guess}" if guess else "check the path"


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
    layout = facts.layout(model)
    bases = layout.owners(name)
    try:
        for item, target in named_targets(facts, dataset, model, place, bases):
            if target.path == path:
                return _explained(facts, Part(dataset, model, target.part), item, target)
    except UserError as error:
        found.reason = str(error)
        return found
    if found.header is None:
        return found
    for fault in () if dataset == PROMPTS else facts.known_faults(dataset, model):
        if layout.base(fault.stem) in bases:
            found.reason = f"its item is faulty: {fault.line}"
            return found
    found.state, found.reason = "orphaned", "its item is gone, or named otherwise"
    items = [] if dataset == PROMPTS else facts.items(dataset, model)[0]
    if any(layout.base(item.stem) in bases for item in items):
        found.reason = "its item has no such text, clip or size any more"
    if not bases:
        found.reason = f"the layout of {model} has no cache file of such a name"
    return found


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


def _explained(facts: Facts, part: Part, item: Item, target: Target) -> Explanation:
    path = target.path
    found = _of_header(path) if os.path.lexists(path) else Explanation(path, "stale", "new")
    found.source = [each.path for each in item.read] or [repr(item.text)]
    found.runs = [*_runs(facts, part, item)]
    try:
        made = judge_one(facts, part.dataset, part.model, item, target)
        for error in made.unreadable.values():
            raise error
    except UserError as error:
        found.state, found.reason = "unknown", str(error)
        return found
    judge, all_stale = made.judge, made.parts[target.part].stale
    assert judge is not None
    content = judge.contents.of(item) or ""
    found.key = judge.key_of(item, target, content, found.header)
    stale = next((each for each in all_stale if each.path == path), None)
    if stale is None:
        found.state, found.reason = "fresh", ""
        found.key = found.header.key if found.header else found.key  # of other line ends, it may be
        return found
    mark_reusable(facts.memo, [made])  # the reason before tells more than `reusable`
    found.at_hand = [x for each in all_stale if each.path == path for x in each.target.at_hand]
    damage, found.state, found.reason = found.reason, "stale", stale.reason
    if stale.reason == "damaged":
        found.reason += f": it {damage}"
    if found.header is not None:
        found.differences = [
            *_source_differences(facts, part.model, item, found, content),
            *differences(facts, judge, part, stale),
        ]
        if not facts.recipe(part.dataset, part.model, kind_of(target.part)):
            found.reason += f": the model {part.model} is not here"
        elif not found.differences:
            found.differences = [Difference("key", short(found.header.key), short(found.key or ""))]
    return found


def _runs(facts: Facts, part: Part, item: Item) -> Iterator[str]:
    """Yield the runs that use a target."""
    config = facts.config
    for name, run in config.runs.items():
        prompts = {*prompts_of(run), *generation_prompts(config, run)}
        is_prompt = part.dataset == PROMPTS and run.model == part.model and item.text in prompts
        if is_prompt or part in parts_of(config, run):
            yield name


# -- differences ----------------------------------------------------------------------------------


def differences(facts: Facts, judge: Judge | None, part: Part, stale: Stale) -> list[Difference]:
    """Return what differs between recipe and placement of a file and those of today.

    Args:
        facts: of the model.
        judge: of the target; asked for where it is None.
        part: of the target.
        stale: a target with a file of another key.
    """
    now = facts.recipe(part.dataset, part.model, kind_of(part.name))
    found = []
    if now:
        model = facts.config.models[part.model]
        found = recipe_differences(read_recipe(stale.path), now, model)
    if settings := facts.config.datasets.get(part.dataset):
        some = ([stale.item], [stale.path])
        judge = judge or facts.judge(part.dataset, part.model, [part.name], some)
        with suppress(CacheError, OSError):
            found += _placing_differences(judge, stale, settings)
    return found


def _placing_differences(judge: Judge, stale: Stale, settings: Dataset) -> list[Difference]:
    """Return how the placement of an image differs in a file; nothing where it is the same.

    The last one is the placement itself, after the settings that changed it.
    """
    keys, was, now = judge.placed(stale, read_header(stale.path))
    if was == now or not now:
        return []
    if was is None:  # of an earlier release, which did not write the settings
        return [Difference(PLACED, "others", now)]
    before, today = settings.placed(keys), settings
    changed = [
        Difference(key, text_of(getattr(before, key)), text_of(getattr(today, key)))
        for key in dict.fromkeys((*before.placing(), *today.placing()))
        if getattr(before, key) != getattr(today, key)
    ]
    return [*changed, Difference(PLACED, was, now)]


def _source_differences(
    facts: Facts, model: str, item: Item, found: Explanation, content: str
) -> Iterator[Difference]:
    """Yield what differs between the source in a header and that of today."""
    header, is_text = found.header, found.recipe.get("kind") == "text"
    if header is None or header.source == content:
        return
    place = f" ({item.source})" if item.source else ""
    if item.media is None and is_text:
        old = found.caption
        text = item.text if item.source is None else read_caption(item.source)
        new = facts.layout(model).caption(text or "")
        if old is not None and old != new:
            yield Difference("caption", quoted(old), quoted(new) + place)
            return
    name = f"{'caption' if is_text else 'source'}'s digest"
    name = "digest of its sources" if len(item.read) > 1 else name
    yield Difference(name, short(header.source), short(content) + place)


def quoted(text: str) -> str:
    """Return a text in quotes, in one line."""
    return json.dumps(text, ensure_ascii=False)
