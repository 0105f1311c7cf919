"""Explanations: where a cache file comes from, the runs that use it, and why it is stale.

The differences of recipes are told in the words of the configuration.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from latentmake.errors import CacheError, SourceError, UserError
from latentmake.files.cachefile import Header, read_header, read_metadata, read_recipe, target_key
from latentmake.files.verified import Checked, verify
from latentmake.layouts import kind_of
from latentmake.models.reasons import Difference, short, text_of
from latentmake.models.recipe_differences import recipe_differences
from latentmake.plan.facts import Facts
from latentmake.plan.single import judge_one
from latentmake.plan.state import Judge, Stale
from latentmake.plan.store import mark_reusable
from latentmake.plan.target import (
    PROMPTS,
    Part,
    Target,
    generation_prompts,
    parts_of,
    prompts_of,
    view_of,
)
from latentmake.sources.caption_files import read_caption
from latentmake.sources.item import Item

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


def of_header(path: str) -> Explanation:
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


def of_target(facts: Facts, part: Part, item: Item, target: Target) -> Explanation:
    """Explain a target of some inputs."""
    path = target.path
    found = of_header(path) if os.path.lexists(path) else Explanation(path, "stale", "new")
    found.source = [each.path for each in item.read] or [repr(item.text)]
    found.runs = [*_runs(facts, part, item)]
    try:
        made = judge_one(facts, part.dataset, part.model, item, target)
    except UserError as error:
        found.state, found.reason = "unknown", str(error)
        return found
    judge, stale = made.judge, made.stale(path)
    assert judge is not None
    content = judge.contents.of(item) or ""
    found.key = judge.needed(item, target, content, found.header)
    if stale is None:
        found.state, found.reason = "fresh", ""
        found.key = found.header.key if found.header else found.key  # of other line ends, it may be
        return found
    damage, found.state, found.reason = found.reason, "stale", stale.reason
    mark_reusable(facts.memo, [made])  # the reason before tells more than `reusable`
    marked = made.stale(path)
    found.at_hand = [*marked.target.at_hand] if marked else []
    if stale.reason == "damaged":
        found.reason += f": it {damage}"
    if found.header is not None:
        found.differences = [
            *_source_differences(facts, part.model, item, found, content),
            *differences(facts, judge, part, stale),
        ]
        if not facts.recipe(part.dataset, part.model, kind_of(part.name)):
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
    some = ([stale.item], [stale.path])
    judge = judge or facts.judge(part.dataset, part.model, [part.name], some)
    with suppress(CacheError, OSError):
        found += _placing_differences(judge, stale)
    return found


def _placing_differences(judge: Judge, stale: Stale) -> list[Difference]:
    """Return how the placement of an image differs in a file; nothing where it is the same.

    The last one is the placement itself, after the settings that changed it. A file of an earlier
    release does not say its settings.
    """
    header, today = read_header(stale.path), judge.settings
    item, target, content = stale.item, stale.target, header.source
    now, size = (
        judge.view(item, target, content, header),
        judge.contents.size(item, content, header),
    )
    if today is None or not now or target_key(content, header.recipe, now) == header.key:
        return []
    with suppress(ValueError, SourceError):
        before = today.placed(json.loads(header.view or "{}"))
        was = size and view_of(judge.layout, before, item, target, size)
        if was is not None and target_key(content, header.recipe, was) == header.key:
            changed = [
                Difference(key, text_of(getattr(before, key)), text_of(getattr(today, key)))
                for key in dict.fromkeys((*before.placing(), *today.placing()))
                if getattr(before, key) != getattr(today, key)
            ]
            return [*changed, Difference(PLACED, was, now)]
    return [Difference(PLACED, "others", now)]


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
