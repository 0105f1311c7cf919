"""Origin of a cache file, or of all cache files of an image or a caption, for `explain`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from latentmake.data.item import Item
from latentmake.errors import CacheError, SourceError, nearest
from latentmake.files.cachefile import Header, read_metadata
from latentmake.files.check import Checked, verify
from latentmake.files.workspace import is_remote
from latentmake.layouts.layout import parsed
from latentmake.plan.batches import judge_one, named_targets
from latentmake.plan.facts import Facts
from latentmake.plan.orders import PROMPTS, Part, Target, parts_of, prompts_of, targets_of
from latentmake.plan.state import Difference, Judge, short
from latentmake.plan.store import mark_reusable
from latentmake.reports.explanation import differences, program_of, recipe_words


@dataclass
class Explanation:
    """Explanation of a file, of one that is to be made, or of a target of a run."""

    path: str
    state: str  # `fresh`, `stale`, `orphaned`, `unknown`, `unreadable` or `previous`
    reason: str = ""  # one of `state.REASONS` of a stale one, or a sentence
    differences: list[Difference] = field(default_factory=list)  # of its key, or of a run
    source: list[str] = field(default_factory=list)  # files that it is made of, or the text
    header: Header | None = None  # None where it cannot be read
    recipe: dict[str, object] = field(default_factory=dict)  # in its header
    key: str | None = None  # that it needs today, if known
    at_hand: list[str] = field(default_factory=list)  # files that have this key
    caption: str | None = None  # in its header, where it is there
    checked: Checked | None = None  # what was found of its bytes; None without a header
    runs: list[str] = field(default_factory=list)  # that use it
    is_reg: bool = False  # whether it is made of a regularisation image

    def values(self) -> dict[str, object]:
        """Return it as plain values."""
        said = ("damage", "has_checksum", "is_foreign")
        checked = self.checked and {name: getattr(self.checked, name) for name in said}
        header = self.header._asdict() if self.header else {}
        header.pop("caption", None)  # which stands beside it
        return {
            **vars(self),
            "header": header or None,
            "checked": checked,
            "differences": [each._asdict() for each in self.differences],
        }

    def lines(self, shown: Callable[[str], str] = str) -> Iterator[str]:
        """Yield it as text; the state as it is to be `shown`."""
        yield f"{self.path}: {shown(self.state)}" + (f" ({self.reason})" if self.reason else "")
        before = ""
        for name, text in self._rows():
            yield f"  {name if name != before else '':12}{text}"
            before = name

    def _rows(self) -> Iterator[tuple[str, str]]:
        """Yield the names of its lines, and what they say."""
        for found in self.differences:
            yield "differs" if found.old != found.new else "because", str(found)
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
        known = checked.has_checksum
        return "as it was written, by its checksum" if known else "no checksum to tell by"


def explanations(facts: Facts, file: str) -> list[Explanation]:
    """Explain a cache file, or all targets of the item of an image, a caption or a control.

    Raises:
        UserError: there is no such file, or nothing is made of it.
    """
    path = file if is_remote(file) else os.path.relpath(file or ".")
    folder, name = os.path.split(path)
    place, caches = f"{os.path.realpath(folder)}/{name}", os.path.realpath("cache")
    if path.startswith("cache/"):
        return [_of_cache(facts, path)]
    if place.startswith(f"{caches}/"):  # by another way to the folder
        return [_of_cache(facts, f"cache{place.removeprefix(caches)}")]
    if found := [*_of_source(facts, path)]:
        return found
    if not os.path.lexists(path):
        raise SourceError("there is no such file", where=file, hint=_near(path))
    if read_metadata(path):  # in the store, or a copy
        return [_of_header(path)]
    hint = "name a cache file, or an image or a caption of a dataset"
    raise SourceError("no dataset of a run has an item with this file", where=file, hint=hint)


def _near(path: str) -> str:
    folder = Path(path).parent
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    guess = nearest(Path(path).name, names)
    return f"the nearest is {guess}" if guess else "check the path"


# -- what is asked for ----------------------------------------------------------------------------


def _of_source(facts: Facts, path: str) -> Iterator[Explanation]:
    """Explain all targets that runs need of the items that have a file."""
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
        own = (item for item in items if any(_same(each.path, path) for each in item.files))
        inputs = [item.inputs(part.name, layout) for item in own]
        for item, targets in targets_of(layout, settings, part, inputs):
            yield from (_of_target(facts, part, item, target) for target in targets)


def _same(some: str, other: str) -> bool:
    if os.path.basename(some) != os.path.basename(other):  # noqa: PTH119 -- of many paths
        return False
    with suppress(OSError):
        return Path(some).samefile(other)
    return some == other


def _of_cache(facts: Facts, path: str) -> Explanation:
    """Explain a cache file by its name, one that runs are yet to make as well."""
    there = os.path.lexists(path)
    _, dataset, model, place, name = (*path.split("/", 4), "", "", "", "")[:5]
    if model not in facts.config.models or dataset not in (PROMPTS, *facts.config.datasets):
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
        for fault in facts.faults.get((dataset, model), ()):
            if layout.base(fault.stem) in bases:
                state, reason = "unknown", f"its item is faulty: {fault.line}"
    if not there:
        raise CacheError("there is no such cache file", where=path, hint=_near(path))
    found = _of_header(path)
    if found.header is not None:
        found.state, found.reason = state, reason
    return found


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
    """Explain a target of some inputs; raises SourceError."""
    path = target.path
    found = _of_header(path) if os.path.lexists(path) else Explanation(path, "stale", "new")
    found.source = [each.path for each in item.read] or [repr(item.text)]
    found.runs = _runs(facts, part, item)
    settings = facts.config.datasets.get(part.dataset)  # None of prompts
    found.is_reg = settings is not None and settings.is_reg
    made = judge_one(facts, part.dataset, part.model, item, target)
    judge, stale = made.judge, made.stale(path)
    assert judge is not None
    content = judge.contents.of(item) or ""
    found.key = judge.needed(item, target, content, found.header)
    if stale is None:
        found.state, found.reason = "fresh", ""
        if found.header:  # whose key an earlier release may have made
            found.key = found.header.key
        return found
    damage = f": it {found.reason}" if stale.reason == "damaged" else ""
    found.state, found.reason = "stale", stale.reason + damage
    mark_reusable(facts.memo, [made])  # the reason before tells more than `reusable`
    found.at_hand = [path for each in made.parts[part.name].stale for path in each.target.at_hand]
    if found.header is not None:
        found.differences = [
            *_source_differences(judge, part, item, found, content),
            *differences(facts, part, stale),
        ] or [Difference("key", short(found.header.key), short(found.key or ""))]
    return found


def _runs(facts: Facts, part: Part, item: Item) -> list[str]:
    config = facts.config
    return [
        name
        for name, run in config.runs.items()
        if part in parts_of(config, run, generated=True)
        and (part.dataset != PROMPTS or item.text in prompts_of(config, run, generated=True))
    ]


def _source_differences(
    judge: Judge, part: Part, item: Item, found: Explanation, content: str
) -> list[Difference]:
    header = found.header
    if header is None or header.source == content:
        return []
    place = f" ({item.source})" if item.source else ""
    if found.caption is not None and item.media is None:
        new = judge.contents.text(item)
        if found.caption != new:
            return [Difference("caption", _quoted(found.caption), _quoted(new) + place)]
    name = "caption's digest" if parsed(part.name).kind == "text" else "source's digest"
    name = "digest of its sources" if len(item.read) > 1 else name
    return [Difference(name, short(header.source), short(content) + place)]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
