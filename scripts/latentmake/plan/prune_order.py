"""Order of `prune_{dataset}`: names in the configuration, and memo rows to delete."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, TypeAdapter, ValidationError

from latentmake import digest
from latentmake.config import Config
from latentmake.config.fields import Name
from latentmake.errors import ConfigError, UserError
from latentmake.index.memo import Memo
from latentmake.layouts import kind_of
from latentmake.plan import owners
from latentmake.plan.facts import Facts
from latentmake.plan.orders import RUNS, write_order
from latentmake.plan.parts import PROMPTS, parts_of

__all__ = ["PruneOrder", "Pruning", "forget", "plan_prune", "prunable"]

_WORD = "prune_"
_NAME = TypeAdapter(Name)


class PruneOrder(BaseModel, extra="forbid", frozen=True):
    """Order of a pruning.

    Attributes:
        dataset: a name, or that of a folder in `cache/` which the configuration does not name.
        layouts: model -> layout, of the models that runs use with this dataset.
        folders: model -> folders of the parts that runs need, below that of the model.
        spared: paths in `cache/` that the configuration names.
        recipes: digests of the recipes of all runs; None where one of them is not known.
        unknown: why it is not.
        runs: names of all runs.
        memo_rows: number of facts in the memo about files that nobody names.
        confirm: whether to remove what was listed.
        verbose: whether to list each file.
    """

    dataset: str
    layouts: dict[str, str]
    folders: dict[str, list[str]]
    spared: list[str]
    recipes: list[str] | None
    unknown: str
    runs: list[str]
    memo_rows: int
    confirm: bool
    verbose: bool

    @property
    def list_path(self) -> Path:
        """Path of the list that was shown; a build deletes it after a week."""
        return RUNS / f"{self.dataset}.prune-list.json"


class Pruning(NamedTuple):
    """A planned pruning, and table of the memo -> names of facts that nobody needs."""

    order: PruneOrder
    forgotten: dict[str, list[str]]


def prunable(config: Config) -> list[str]:
    """Return the datasets of a configuration, and folders of `cache/` that are none of them."""
    found: set[str] = set()
    if Path("cache").is_dir():
        found = {each.name for each in Path("cache").iterdir() if _is_name(each.name)}
    return sorted(found | {*config.datasets})


def _is_name(name: str) -> bool:
    with contextlib.suppress(ValidationError):
        return bool(_NAME.validate_python(name))
    return name == PROMPTS


def plan_prune(
    facts: Facts, targets: Sequence[str], orders: dict[str, dict[str, str]]
) -> list[Pruning]:
    """Plan the prunings that some targets ask for, and add their orders to those of the plan.

    Raises:
        ConfigError: there are other targets beside them, or another project uses the caches.
    """
    asked = [each.removeprefix(_WORD) for each in targets if each.startswith(_WORD)]
    if asked and (others := [each for each in targets if not each.startswith(_WORD)]):
        what = f"cannot be given together with {others[0]}"
        hint = "prune first, then build"
        raise ConfigError(what, where=f"{_WORD}{asked[0]}", hint=hint)
    known = prunable(facts.config)
    planned = [_plan(facts, dataset) for dataset in asked if dataset in known]
    for each in planned:
        path = write_order(each.order.dataset, "prune", each.order)
        orders.setdefault(each.order.dataset, {})["prune"] = path
    return planned


def _plan(facts: Facts, dataset: str) -> Pruning:
    if (project := owners.other_owner(dataset)) is not None:
        what = f"the project {project} uses this folder too"
        raise ConfigError(what, where=f"cache/{dataset}", hint="give the command in its folder")
    config = facts.config
    parts: dict[str, list[str]] = {}
    for run in config.runs.values():
        for part in parts_of(config, run, generated=True):
            if part.dataset == dataset:
                parts.setdefault(part.model, []).append(part.name)
    recipes, unknown = _recipes(facts)
    layouts = {model: facts.layout(model) for model in parts}
    places = {
        model: [layouts[model].folder(dataset, model, part).split("/", 3)[3] for part in names]
        for model, names in parts.items()
    }
    forgotten = _forgotten(facts.memo, config, dataset, parts, places)
    order = PruneOrder(
        dataset=dataset,
        layouts={model: layout.name for model, layout in layouts.items()},
        folders=places,
        spared=_spared(config),
        recipes=recipes,
        unknown=unknown,
        runs=[*config.runs],
        memo_rows=sum(map(len, forgotten.values())),
        confirm=facts.options.confirm,
        verbose=facts.options.verbose,
    )
    return Pruning(order, forgotten)


def forget(memo: Memo, prunings: Iterable[Pruning]) -> None:
    """Delete the facts of confirmed prunings from the memo, after their jobs."""
    for each in prunings:
        for table, names in each.forgotten.items() if each.order.confirm else ():
            getattr(memo, table).forget(names)


def _recipes(facts: Facts) -> tuple[list[str] | None, str]:
    """Return the digests of all runs' recipes, or why one of them is not known."""
    found: set[str] = set()
    try:
        for run in facts.config.runs.values():
            for part in parts_of(facts.config, run, generated=True):
                recipe = facts.recipe(part.dataset, part.model, kind_of(part.name))
                if not recipe:
                    return None, f"the model {part.model} is not made yet"
                found.add(digest.of_value(recipe))
    except UserError as error:
        return None, str(error)
    return sorted(found), ""


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a configuration, of which some are paths."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str | Path) and str(value) and "\0" not in str(value):
        yield str(value)


def _spared(config: Config) -> list[str]:
    """Return the real paths in `cache/` that a configuration names: sources, models and others."""
    root = f"{os.path.realpath('cache')}/"
    real = (os.path.realpath(text) for text in _texts(config.model_dump()))
    return sorted({path for path in real if path.startswith(root)})


def _forgotten(
    memo: Memo,
    config: Config,
    dataset: str,
    parts: dict[str, list[str]],
    places: dict[str, list[str]],
) -> dict[str, list[str]]:
    """Return table -> names of facts of parts that no run needs, and of sources that are gone."""
    folder = f"cache/{dataset}/"

    def is_unnamed(path: str) -> bool:
        model, _, rest = path.removeprefix(folder).partition("/")
        place = rest.partition("/")[0]
        return path.startswith(folder) and place not in places.get(model, ())

    def is_old_snapshot(name: str) -> bool:
        owner, model, *asked = name.partition("\n\n")[0].split("\n")
        return owner == dataset and not {*asked} <= {*parts.get(model, ())}

    named = tuple(os.path.normpath(text) for text in _texts(config.model_dump()))

    def is_gone(path: str) -> bool:
        plain = os.path.normpath(path)
        inside = plain.startswith(named) and any(
            plain == each or plain.startswith(f"{each}/") for each in named
        )
        return not (inside or "://" in path or os.path.lexists(path))

    return {
        "targets": sorted(filter(is_unnamed, memo.targets.names())),
        "snapshots": sorted(filter(is_old_snapshot, memo.snapshots.names())),
        "sources": sorted(filter(is_gone, memo.sources.names())),
        "texts": sorted(filter(is_gone, memo.texts.names())),
    }
