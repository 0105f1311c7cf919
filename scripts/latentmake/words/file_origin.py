"""Origin of a cache file, or of all cache files of an image or a caption, for `explain`."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from latentmake.data.item import Item
from latentmake.data.texts import read_caption
from latentmake.errors import CacheError, SourceError, UserError, nearest
from latentmake.files.cachefile import Checked, Header, read_metadata, verify
from latentmake.files.workspace import is_remote
from latentmake.layouts.layout import parsed
from latentmake.plan.batches import judge_one, named_targets
from latentmake.plan.facts import Facts
from latentmake.plan.orders import PROMPTS, Part, Target, parts_of, prompts_of, targets_of
from latentmake.plan.state import Difference, short
from latentmake.plan.store import mark_reusable
from latentmake.reports.explanation import differences, program_of, recipe_words


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

    def values(self) -> dict[str, object]:
        """Return it as plain values."""
        said = ("damage", "has_checksum", "is_foreign")
        checked = self.checked and {name: getattr(self.checked, name) for name in said}
        return {
            **vars(self),
            "header": self.header and self.header._asdict(),
            "checked": checked,
            "differences": [each._asdict() for each in self.differences],
        }

    def lines(self) -> Iterator[str]:
        """Yield it as text."""
        reason = f" ({self.reason})" if self.reason else ""
        yield f"{self.path}: {self.state}{reason}"
        rows = [
            ("differs" if found.old != found.new else "because", str(found))
            for found in self.differences
        ]
        rows += [("reusable", f"{path} has its key") for path in self.at_hand[:1]]
        rows += [("source", source) for source in self.source]
        if self.header is not None:
            caption = "" if self.caption is None else f"{_quoted(self.caption)}, "
            rows.append(("made of", f"{caption}SHA-256 {self.header.source}"))
            rows.append(("recipe", recipe_words(self.recipe)))
            rows.append(("key", self.header.key))
        if self.key is not None and (self.header is None or self.header.key != self.key):
            rows.append(("key today", self.key))
        if self.checked is not None:
            rows.append(("content", self._content(self.checked)))
        with suppress(OSError):
            rows.append(("made", self._made(Path(self.path).stat().st_mtime)))
        rows.append(("runs", ", ".join(self.runs) or "none"))
        before = ""
        for name, text in rows:
            yield f"  {name if name != before else '':12}{text}"
            before = name

    def _content(self, checked: Checked) -> str:
        """Return what the checksum of a file says."""
        if checked.damage is not None:
            hint = f"; `latentmake verify {self.runs[0]} --repair` deletes it" if self.runs else ""
            return f"damaged: {checked.damage}{hint}"
        known = checked.has_checksum
        return "as it was written, by its checksum" if known else "no checksum to tell by"

    def _made(self, seconds: float) -> str:
        """Return when and by what a file was made."""
        moment = f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}"
        if self.header is None:
            return moment
        if self.header.adopted:
            digests = ", ".join(map(short, self.header.adopted.split()))
            return f"{moment} from another program's file ({digests})"
        return f"{moment} by {program_of(self.recipe) or 'latentmake'}"


def explanations(facts: Facts, file: str) -> list[Explanation]:
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
                layout, settings = facts.layout(model), config.datasets[dataset]
                inputs = [item.inputs(part.name, layout)]
                for each, targets in targets_of(layout, settings, part, inputs):
                    yield from (_of_target(facts, part, each, target) for target in targets)
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
    there = os.path.lexists(path)
    found = _of_header(path) if there else Explanation(path, "unknown")
    _, dataset, model, place, name = (*path.split("/", 4), "", "", "", "")[:5]
    known = dataset in (PROMPTS, *facts.config.datasets)
    if known and model in facts.config.models:
        try:
            bases = facts.layout(model).owners(name)
            for item, target in named_targets(facts, dataset, model, place, bases):
                if target.path == path:
                    found = _of_target(facts, Part(dataset, model, target.part), item, target)
                    break
            else:
                if found.header is not None:
                    _orphaned(facts, found, dataset, model, bases)
        except UserError as error:
            found.reason = str(error)
    else:
        lost = f"model {model}" if known else f"dataset {dataset}"
        found.reason = f"the configuration has no {lost}"
    if not there and not found.runs:
        raise CacheError("there is no such cache file", where=path, hint=_near(path))
    return found


def _orphaned(
    facts: Facts, found: Explanation, dataset: str, model: str, bases: Collection[str]
) -> None:
    """Say why a file in a folder of caches is none of its targets."""
    layout = facts.layout(model)
    items = [] if dataset == PROMPTS else facts.items(dataset, model)[0]
    for fault in facts.faults.get((dataset, model), ()):
        if layout.base(fault.stem) in bases:
            found.reason = f"its item is faulty: {fault.line}"
            return
    found.state, found.reason = "orphaned", "its item is gone, or named otherwise"
    if any(layout.base(item.stem) in bases for item in items):
        found.reason = "its item has no such text, clip or size any more"
    if not bases:
        found.reason = f"the layout of {model} has no cache file of such a name"


def _of_header(path: str) -> Explanation:
    """Explain a file by its header alone."""
    try:
        checked = verify(path)
    except FileNotFoundError:
        return Explanation(path, "unreadable", "is a link that leads nowhere")
    except OSError as error:
        return Explanation(path, "unreadable", f"cannot be read ({error.strerror})")
    if checked.header is None:
        return Explanation(path, "unreadable", checked.damage or "")
    found = Explanation(path, "unknown", header=checked.header, recipe={**checked.recipe})
    metadata, found.checked = read_metadata(path), checked
    found.caption = metadata.get("caption", metadata.get("caption1"))
    return found


def _of_target(facts: Facts, part: Part, item: Item, target: Target) -> Explanation:
    """Explain a target of some inputs."""
    path = target.path
    found = _of_header(path) if os.path.lexists(path) else Explanation(path, "stale", "new")
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
        if not facts.recipe(part.dataset, part.model, parsed(part.name).kind):
            found.reason += f": the model {part.model} is not here"
        elif not found.differences:
            found.differences = [Difference("key", short(found.header.key), short(found.key or ""))]
    return found


def _runs(facts: Facts, part: Part, item: Item) -> Iterator[str]:
    """Yield the runs that use a target."""
    config = facts.config
    for name, run in config.runs.items():
        prompts = prompts_of(config, run, generated=True)
        is_prompt = part.dataset == PROMPTS and run.model == part.model and item.text in prompts
        if is_prompt or part in parts_of(config, run):
            yield name


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
            yield Difference("caption", _quoted(old), _quoted(new) + place)
            return
    name = f"{'caption' if is_text else 'source'}'s digest"
    name = "digest of its sources" if len(item.read) > 1 else name
    yield Difference(name, short(header.source), short(content) + place)


def _quoted(text: str) -> str:
    """Return a text in quotes, in one line."""
    return json.dumps(text, ensure_ascii=False)
