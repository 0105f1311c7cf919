"""`latentmake explain`: where a file of a build comes from, and why it is made again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from latentmake import backends
from latentmake.data.item import Item
from latentmake.data.texts import read_caption
from latentmake.errors import CacheError, ConfigError, SourceError, UserError, nearest
from latentmake.exchange.clip_files import CLIPS, LIST, plan_clips
from latentmake.files.cachefile import read_metadata, verify
from latentmake.files.workspace import is_remote
from latentmake.layouts.layout import parsed
from latentmake.plan.batches import judge_one, named_targets
from latentmake.plan.facts import Facts
from latentmake.plan.run_plan import RunPlan, stale_targets
from latentmake.plan.state import Difference, short
from latentmake.plan.store import mark_reusable
from latentmake.plan.target import (
    PROMPTS,
    Part,
    Target,
    parts_of,
    prompts_of,
    targets_of,
)
from latentmake.reports.explanation import (
    Explanation,
    differences,
    explanation_text,
    explanation_values,
    quoted,
)
from latentmake.reports.following import plan_following, refuse_following
from latentmake.words.project import ConfigFiles, Directory, Json, Project, opened

_MADE = {
    "caches": r"caches_{run}|runs/{run}/(dataset\.lock|manifest\.jsonl)",
    "generate": r"generate_{run}|runs/{run}/generated(\.json|/.*)",
    "evaluate": r"evaluate_{run}|runs/{run}/evaluation/.*|reports/evaluate_{run}\.html",
    "clips": r"clips_{run}|clips/{run}/.*",
    "train": r"train_{run}|runs/{run}/.*",
    "page": r"reports/(captions|report)_{run}\.(html|jsonl)|reports/compare_{run}(_vs_.*)?\.html",
}
"""What is asked -> pattern of its target and of the files that it makes."""
_FRESH = {"train": "trained; nothing differs", "page": "`latentmake` writes it anew when asked"}


def explain(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A cache file, an image or caption of a dataset, a file below runs/, clips/ or "
            "reports/, or a target such as train_cats.",
        ),
    ],
    as_json: Json = False,
    configfile: ConfigFiles = None,
    directory: Directory = None,
) -> None:
    """Say where a file comes from, and why it is fresh or stale; why a run is trained again."""
    with opened(configfile, directory, encoders=True) as project:
        found = _of_run(project, path) or explanations(project.facts, path)
    if as_json:
        typer.echo(json.dumps([*map(explanation_values, found)], indent=1))
    else:
        typer.echo(explanation_text(found), nl=False)


def _of_run(project: Project, path: str) -> list[Explanation]:
    """Explain a target of a run, or a file that one makes; nothing where it is neither."""
    place = os.path.relpath(path or ".")
    for run in project.config.runs:
        for word, pattern in _MADE.items():
            if re.fullmatch(pattern.format(run=re.escape(run)), place):
                found = _reasons(project, word, run, place)
                state, reason = ("stale", "") if found else ("fresh", _FRESH.get(word, ""))
                return [Explanation(place, state, reason, differences=found, runs=[run])]
    return []


def _reasons(project: Project, word: str, run: str, place: str) -> list[Difference]:
    """Return why what a word makes of a run is made again.

    Raises:
        UserError: the word makes nothing of this run.
    """
    config, facts = project.config, project.facts
    if word == "page":
        return []
    if word in ("generate", "evaluate"):
        refuse_following(config, run, word)
    elif word == "train" and config.runs[run].trainer is None:
        raise ConfigError("the run has no trainer", where=place, hint=f"see runs.{run}")
    if word == "clips":
        return _clip_reasons(project, run, place)
    drawn = [run] if word in ("generate", "evaluate") else []
    plan = project.plan([run], drawn).runs[run]
    if word in ("caches", "train"):
        return plan.reasons if word == "train" else _cache_reasons(plan)
    backend = backends.of_run(config, run)
    assert backend is not None
    return plan_following(facts, plan, backend, word)[1]


def _cache_reasons(plan: RunPlan) -> list[Difference]:
    """Return why caches, manifest or lock are made again; those of prompts are in no manifest."""
    parts = {f"{part.dataset}/{part.name}": state for part, state in plan.parts.items()}
    return list(dict.fromkeys((*stale_targets(parts), *plan.outdated)))


def _clip_reasons(project: Project, run: str, place: str) -> list[Difference]:
    """Return why clips of a run, or one of them, are cut again."""
    order = plan_clips(project.facts, run)
    named = {str(order.path(file)): file for file in order.files}
    whole = place in (f"clips_{run}", str(CLIPS / run / LIST))
    if not whole and place not in named:
        return [Difference("no clip of the run has this name; the next build removes it")]
    asked = named if whole else {place: named[place]}
    return [
        each._replace(name=f"{path}: {each.name}" if whole else each.name)
        for path, file in asked.items()
        for each in order.differences(file, file.source()[-1])
    ]


# -- an image, a caption, a cache file ------------------------------------------------------------


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
                return _of_target(facts, Part(dataset, model, target.part), item, target)
    except UserError as error:
        found.reason = str(error)
        return found
    if found.header is None:
        return found
    for fault in facts.faults.get((dataset, model), ()):
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
            yield Difference("caption", quoted(old), quoted(new) + place)
            return
    name = f"{'caption' if is_text else 'source'}'s digest"
    name = "digest of its sources" if len(item.read) > 1 else name
    yield Difference(name, short(header.source), short(content) + place)
