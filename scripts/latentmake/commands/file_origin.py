"""Origin of a cache file, or of all cache files of an image or caption, for `explain`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from latentmake.base.errors import CacheError, SourceError, nearest
from latentmake.base.paths import is_remote
from latentmake.data.item import Item
from latentmake.formats.cachefile import Header, read_metadata
from latentmake.formats.integrity import Checked, verify
from latentmake.layouts.layout import CAPTIONS, kind_of
from latentmake.pages.explanation import differences, program_of, recipe_words
from latentmake.plan.batches import judged, named_targets
from latentmake.plan.facts import Facts
from latentmake.plan.orders import (
    PROMPTS,
    Part,
    Target,
    caption_parts,
    parts_of,
    prompts_of,
    targets_of,
)
from latentmake.plan.product import Difference, short
from latentmake.plan.store import mark_reusable


@dataclass
class Explanation:
    """Explanation of a file, of a missing cache file, or of a target of a run."""

    path: str
    state: str  # `fresh`, `stale`, `orphaned`, `unused`, `unknown`, `unreadable` or `previous`
    reason: str = ""  # one of `state.REASONS` if the file is stale; otherwise a sentence
    differences: list[Difference] = field(default_factory=list)  # differences of keys or trainings
    source: list[str] = field(default_factory=list)  # files that it is made from, or the text
    header: Header | None = None  # None if it cannot be read
    recipe: dict[str, object] = field(default_factory=dict)  # recipe in the header
    key: str | None = None  # key that the file should have today, if known
    at_hand: list[str] = field(default_factory=list)  # paths of files that have this key
    caption: str | None = None  # caption in the header, if there is one
    checked: Checked | None = None  # result of reading all bytes; None without a header
    runs: list[str] = field(default_factory=list)  # runs that use it
    is_reg: bool = False  # whether it is made from a regularisation image

    def values(self) -> dict[str, object]:
        """Return the explanation as JSON values."""
        names = ("damage", "has_checksum", "is_foreign")
        checked = self.checked and {name: getattr(self.checked, name) for name in names}
        header = self.header._asdict() if self.header else {}
        header.pop("caption", None)  # it is a value of its own
        return {
            **vars(self),
            "header": header or None,
            "checked": checked,
            "differences": [difference._asdict() for difference in self.differences],
        }

    def lines(self, shown: Callable[[str], str] = str) -> Iterator[str]:
        """Yield the lines of the explanation; `shown` formats the state, for example in colour."""
        yield f"{self.path}: {shown(self.state)}" + (f" ({self.reason})" if self.reason else "")
        before = ""
        for label, text in self._rows():
            yield f"  {label if label != before else '':12}{text}"
            before = label

    def _differing(self) -> Iterator[tuple[str, str]]:
        for difference in self.differences:
            label = "differs" if difference.old != difference.new else "because"
            yield label, str(difference)

    def _rows(self) -> Iterator[tuple[str, str]]:
        """Yield the label and the text of each line."""
        yield from self._differing()
        for path in self.at_hand[:1]:
            yield "reusable", f"{path} has its key"
        for source in self.source:
            yield "source", source
        header, program = self.header, ""
        if header is not None:
            caption = "" if self.caption is None else f"{_quoted(self.caption)}, "
            yield "made of", f"{caption}SHA-256 {header.source}"
            yield "recipe", recipe_words(self.recipe)
            yield "key", header.key
            program = f" by {program_of(self.recipe) or 'latentmake'}"
            program = " from another program's file" if header.adopted else program
        if self.key is not None and (header is None or header.key != self.key):
            yield "key today", self.key
        if self.checked is not None:
            yield "content", self._content(self.checked)
        with suppress(OSError):
            made = datetime.fromtimestamp(Path(self.path).stat().st_mtime).astimezone()
            yield "made", f"{made:%Y-%m-%d %H:%M:%S}{program}"
        if self.is_reg:
            yield "used as", "regularisation image"
        yield "runs", ", ".join(self.runs) or "none"

    def _content(self, checked: Checked) -> str:
        if checked.damage is not None:
            hint = f"; `latentmake verify {self.runs[0]} --repair` deletes it" if self.runs else ""
            return f"damaged: {checked.damage}{hint}"
        if checked.has_checksum:
            return "as it was written, by its checksum"
        return "no checksum to tell by"


def explanations(facts: Facts, file: str) -> list[Explanation]:
    """Explain a cache file, or all targets of the item with an image, caption or control image.

    Raises:
        UserError: The file does not exist, or no item of a run uses it.
    """
    path = file if is_remote(file) else os.path.relpath(file or ".")
    if os.path.isdir(path):  # noqa: PTH112 -- Path.is_dir raises an error if a name is too long
        raise SourceError("is a folder", where=path, hint="name a run, or a file in it")
    folder, name = os.path.split(path)
    place, caches = f"{os.path.realpath(folder)}/{name}", os.path.realpath("cache")
    if path.startswith("cache/"):
        return [_of_cache(facts, path)]
    if place.startswith(f"{caches}/"):  # the path reaches the folder through a link
        return [_of_cache(facts, f"cache{place.removeprefix(caches)}")]
    if explained := [*_of_source(facts, path)]:
        return explained
    if not os.path.lexists(path):
        raise SourceError("there is no such file", where=file, hint=_near(path))
    if read_metadata(path):  # a cache file in the store, or a copy
        return [_of_header(path)]
    hint = "name a cache file, or an image or a caption of a dataset"
    raise SourceError("no dataset of a run has an item with this file", where=file, hint=hint)


def _near(path: str) -> str:
    folder = Path(path).parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    guess = nearest(Path(path).name, names)
    return f"the nearest is {guess}" if guess else "check the path"


# -- requested paths ------------------------------------------------------------------------------


def _of_source(facts: Facts, path: str) -> Iterator[Explanation]:
    """Explain all targets of the items that use a file, as far as runs need them."""
    config = facts.config
    for part in dict.fromkeys(
        part for run in config.runs.values() for part in parts_of(config, run)
    ):
        settings = config.datasets.get(part.dataset)
        if settings is None or (is_remote(settings.path) and not is_remote(path)):
            continue
        items, faults = facts.items(part.dataset, part.model)
        for fault in faults:
            if _same(fault.path, path):
                raise SourceError(fault.what, where=fault.path, hint=fault.hint)
        layout = facts.layout(part.model)
        own = (item for item in items if any(_same(file.path, path) for file in item.files))
        inputs = [item.inputs(part.name, layout) for item in own]
        for item, targets in targets_of(layout, settings, part, inputs):
            yield from (_of_target(facts, part, item, target) for target in targets)


def _same(some: str, other: str) -> bool:
    # Comparing names first is fast: this is called for every file of every item.
    if os.path.basename(some) != os.path.basename(other):  # noqa: PTH119
        return False
    with suppress(OSError):
        return Path(some).samefile(other)
    return some == other


def _of_cache(facts: Facts, path: str) -> Explanation:
    """Explain the cache file with a name, whether it exists or a run still needs it."""
    there = os.path.lexists(path)
    names = path.split("/", 4)
    _, dataset, model, place, name = names + [""] * (5 - len(names))
    is_known = model == CAPTIONS or model in facts.config.models
    if not is_known or dataset not in (PROMPTS, *facts.config.datasets):
        state, reason = "unknown", "the configuration has no such dataset or model"
    else:
        layout = facts.layout(model)
        bases = layout.owners(name)
        for item, target in named_targets(facts, dataset, model, place, bases):
            part = Part(dataset, model, target.part)
            if target.path == path and (there or _runs(facts, part, item)):
                return _of_target(facts, part, item, target)
        items = [] if dataset == PROMPTS else facts.items(dataset, model)[0]
        state, reason = "orphaned", "its item is gone, or named otherwise"
        if any(layout.base(item.stem) in bases for item in items):
            reason = "its item has no such text, clip or size any more"
        if model == CAPTIONS and not facts.stems(dataset).isdisjoint(bases):
            state, reason = "unused", "somebody wrote the caption of its item"
        for fault in facts.faults.get((dataset, model), ()):
            if layout.base(fault.stem) in bases:
                state, reason = "unknown", f"its item is faulty: {fault.line}"
    if not there:
        raise CacheError("there is no such cache file", where=path, hint=_near(path))
    explanation = _of_header(path)
    if explanation.header is not None:
        explanation.state, explanation.reason = state, reason
    return explanation


# -- files and targets ----------------------------------------------------------------------------


def _of_header(path: str) -> Explanation:
    try:
        checked = verify(path)
    except FileNotFoundError:
        return Explanation(path, "unreadable", "is a link that leads nowhere")
    except OSError as error:
        return Explanation(path, "unreadable", f"cannot be read ({error.strerror})")
    if checked.header is None:
        return Explanation(path, "unreadable", checked.damage or "")
    return Explanation(
        path,
        "unknown",
        header=checked.header,
        recipe={**checked.recipe},
        caption=checked.header.caption,
        checked=checked,
    )


def _of_target(facts: Facts, part: Part, item: Item, target: Target) -> Explanation:
    """Explain a target of an item; raises SourceError."""
    path = target.path
    explanation = _of_header(path) if os.path.lexists(path) else Explanation(path, "stale", "new")
    explanation.source = [file.path for file in item.read] or [repr(item.text)]
    explanation.runs = _runs(facts, part, item)
    settings = facts.config.datasets.get(part.dataset)  # None for prompts
    explanation.is_reg = settings is not None and settings.is_reg
    made = judged(facts, part, [item], [path])
    judge, to_make = made.judge, made.parts[part.name].to_make  # an item may have several clips
    stale = next((stale for stale in to_make if stale.path == path), None)
    assert judge is not None
    content = "" if item.awaits_caption else judge.contents.of(item) or ""
    if content:
        explanation.key = judge.needed(item, target, content, explanation.header)
    if stale is None:
        explanation.state, explanation.reason = "fresh", ""
        if explanation.header:  # an earlier release may have written another valid key
            explanation.key = explanation.header.key
        return explanation
    damage = f": it {explanation.reason}" if stale.reason == "damaged" else ""
    faults = facts.noted(part.dataset, part.model) if settings else []
    if line := next((fault["line"] for fault in faults if fault["stem"] == item.stem), ""):
        damage += f"; its item is faulty: {line}"
    explanation.state, explanation.reason = "stale", stale.reason + damage
    mark_reusable(facts.memo, [made])  # afterwards: it replaces the reason by `reusable`
    explanation.at_hand = [
        path for made_target in made.parts[part.name].to_make for path in made_target.at_hand
    ]
    if item.awaits_caption:
        explanation.differences = [*_of_captioners(facts, part, item)]
    elif explanation.header is not None:
        explanation.differences = [
            *_source_differences(judge.contents.text, part, item, explanation, content),
            *differences(facts, part, item, target),
        ] or [Difference("key", short(explanation.header.key), short(explanation.key or ""))]
    return explanation


def _of_captioners(facts: Facts, part: Part, item: Item) -> Iterator[Difference]:
    """Yield why captioners make an item's caption first."""
    for made in caption_parts(facts.config, part.dataset):
        for work in facts.made_captions(part.dataset).parts[made.name].stale:
            if work.item.stem == item.stem:
                explanation = _of_target(facts, made, work.item, work.targets[0])
                for difference in explanation.differences or [Difference(explanation.reason)]:
                    name = f"caption by {made.name}: {difference.name}"
                    yield difference._replace(name=name)


def _runs(facts: Facts, part: Part, item: Item) -> list[str]:
    config = facts.config
    return [
        name
        for name, run in config.runs.items()
        if part in parts_of(config, run, generated=True)
        and (part.dataset != PROMPTS or item.text in prompts_of(config, run, generated=True))
    ]


def _source_differences(
    text: Callable[[Item], str], part: Part, item: Item, explanation: Explanation, content: str
) -> list[Difference]:
    """Return why the source of a file differs; `text` reads the present caption of an item."""
    header = explanation.header
    if header is None or header.source == content:
        return []
    place = f" ({item.source})" if item.source else ""
    if explanation.caption is not None and kind_of(part.name) == "text" and item.media is None:
        new = text(item)
        if explanation.caption != new:
            return [Difference("caption", _quoted(explanation.caption), _quoted(new) + place)]
    name = "caption's digest" if kind_of(part.name) == "text" else "source's digest"
    name = "digest of its sources" if len(item.read) > 1 else name
    return [Difference(name, short(header.source), short(content) + place)]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
