"""The plan: what a run needs, what of it is stale, and the jobs that make it.

Made in the process that reads the Snakefile first, and in no other. It imports no torch and opens
no file whose stat it knows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from latentmake import dataset as datasets
from latentmake import digest, evaluate, manifest, orders, recipe
from latentmake.config import Config, Run
from latentmake.dataset import Fault, Item, Scan
from latentmake.errors import ConfigError, ModelError
from latentmake.evaluate import Evaluation, Folder, Source
from latentmake.finish import finish
from latentmake.layouts import plain
from latentmake.memo import Memo, SourceStat, TargetStat, target_stat
from latentmake.orders import Target, WorkItem, WorkOrder
from latentmake.parts import (
    PROMPTS,
    Part,
    Plan,
    RunPlan,
    kind_of,
    parts_of,
    prompt_sources,
    read_lock,
    size_of,
    source_of,
)

__all__ = ["Planner"]


class Planner:
    """Makes plans; scans each dataset and digests each model once.

    Args:
        config: the configuration.
        memo: what is known of files.
        buildable: folders that a rule makes; a model there may be missing.
    """

    def __init__(self, config: Config, memo: Memo, *, buildable: Sequence[str] = ()) -> None:
        self.config = config
        self.memo = memo
        self._buildable = [Path(folder) for folder in buildable]
        self._scans: dict[str, Scan] = {}
        self._items: dict[str, tuple[list[Item], list[Fault]]] = {}
        self._recipes: dict[tuple[str, str, str], dict[str, object]] = {}
        self._asides: dict[str, list[dict[str, str]]] = {}

    # -- what there is ------------------------------------------------------------------------

    def scan(self, name: str) -> Scan:
        """Return the listing of a dataset.

        Raises:
            DatasetError: its folder is missing or cannot be read.
        """
        if name not in self._scans:
            self._scans[name] = datasets.scan(name, self.config.datasets[name])
        return self._scans[name]

    def items(self, name: str) -> tuple[list[Item], list[Fault]]:
        """Return the items of a dataset, and what is wrong with the others.

        Raises:
            DatasetError: it is missing, cannot be read, or holds no image.
        """
        if name not in self._items:
            settings = self.config.datasets[name]
            self._items[name] = datasets.items(name, settings, self.scan(name))
        return self._items[name]

    def faults(self, name: str) -> list[Fault]:
        """Return what is wrong with files of a dataset, as far as its items had to be made.

        Where a remembered verdict answered for it, nothing is.
        """
        return self._items[name][1] if name in self._items else []

    def is_pending(self, path: str | None) -> bool:
        """Whether a path lies in a folder that a rule has yet to make."""
        if path is None or Path(path).exists():
            return False
        return any(Path(path).is_relative_to(folder) for folder in self._buildable)

    def recipe(self, dataset: str, model: str, kind: str) -> dict[str, object]:
        """Return the recipe of `latents` or `text`; empty where a rule has yet to make the model.

        Raises:
            ModelError: files are missing.
        """
        asked = (dataset if kind == "latents" else "", model, kind)
        if asked not in self._recipes:
            settings = self.config.models[model]
            places = [settings.vae] if kind == "latents" else settings.text
            try:
                if any(self.is_pending(place.path) for place in places):
                    found: dict[str, object] = {}
                elif kind == "latents":
                    weights = recipe.weights_digest(settings.vae, self.memo.digest_of_file)
                    found = recipe.latents_recipe(self.config.datasets[dataset], settings, weights)
                else:
                    digests = recipe.text_weights_digests(settings, self.memo.digest_of_file)
                    found = recipe.text_recipe(settings, digests)
            except ModelError as error:
                key = "vae" if kind == "latents" else "text"
                raise ModelError(
                    f"{error.where}: {error.what}", where=f"models.{model}.{key}", mend=error.mend
                ) from None
            self._recipes[asked] = found
        return self._recipes[asked]

    # -- what a run needs ---------------------------------------------------------------------

    def _check_resolutions(self, name: str, run: Run) -> None:
        """Refuse a resolution that the VAE cannot encode without cutting more off."""
        model = self.config.models[run.model]
        known = None if self.is_pending(model.vae.path) else recipe.vae_factor(model.vae)
        factor = known or 8  # that of every Stable Diffusion VAE
        asked = [("resolutions", size) for size in run.resolutions]
        if run.trainer is not None and run.trainer.samples.resolution is not None:
            asked.append(("trainer.samples.resolution", run.trainer.samples.resolution))
        for key, size in asked:
            wrong = [side for side in (size.width, size.height) if side % factor]
            if wrong:
                below = wrong[0] // factor * factor
                near = [str(side) for side in (below, below + factor) if side > 0]
                raise ConfigError(
                    f"{wrong[0]} pixels are not a multiple of the VAE's factor {factor}",
                    where=f"runs.{name}.{key}",
                    mend=f"use {' or '.join(near)}",
                )
        for dataset in run.datasets:
            settings = self.config.datasets[dataset]
            if settings.fit == "bucket" and settings.bucket_reso_steps % factor:
                raise ConfigError(
                    f"{settings.bucket_reso_steps} is not a multiple of the VAE's factor {factor}",
                    where=f"datasets.{dataset}.bucket_reso_steps",
                    mend=f"use a multiple of {factor}",
                )
            for size in run.resolutions:
                if (
                    settings.fit == "bucket"
                    and size.width * size.height < settings.bucket_reso_steps**2
                ):
                    raise ConfigError(
                        f"{settings.bucket_reso_steps} is more than the resolution {size.name} has",
                        where=f"datasets.{dataset}.bucket_reso_steps",
                        mend="use smaller steps or a larger resolution",
                    )

    # -- evaluation ---------------------------------------------------------------------------

    def _evaluate(self, dataset: str, model: str, parts: Iterable[str]) -> Evaluation:
        """Return the state of some parts, by a remembered verdict where nothing changed."""
        kinds = {part: kind_of(part) for part in parts}
        recipes = {
            part: digest.of_value(values) if (values := self.recipe(dataset, model, kind)) else ""
            for part, kind in kinds.items()
        }
        folder = Folder(f"cache/{dataset}/{model}")
        scanned, aside = self.scan(dataset), self.aside(dataset)
        settings = self.config.datasets[dataset].model_dump()
        question = digest.of_value(
            [dataset, model, recipes, scanned.fingerprint, settings, folder.fingerprint]
        )
        if not aside and (answer := self.memo.verdict(question)):
            return evaluate.recall(answer)
        items, faults = self.items(dataset)
        without = {fault["stem"] for fault in aside}
        wanted = [item for item in items if item.stem not in without]
        evaluation = evaluate.evaluate(
            dataset=dataset,
            model=model,
            root=scanned.root,
            sources={
                part: [source_of(kind, item) for item in wanted] for part, kind in kinds.items()
            },
            owned={item.stem for item in items} | {fault.stem for fault in faults},
            recipes=recipes,
            memo=self.memo,
            found=folder.listing(),
        )
        evaluation.images = manifest.images_digest(item.image for item in wanted)
        if not faults and not aside and (verdict := evaluate.remember(evaluation)):
            self.memo.learn_verdict(question, verdict)
        return evaluation

    def _evaluate_prompts(self, model: str, runs: Iterable[Run]) -> Evaluation:
        """Return the state of the prompts of some runs of one model."""
        sharing = [run for run in self.config.runs.values() if run.model == model]
        recipe_digest = ""
        if recipes := self.recipe(PROMPTS, model, "text"):
            recipe_digest = digest.of_value(recipes)
        return evaluate.evaluate(
            dataset=PROMPTS,
            model=model,
            root="",
            sources={"text": prompt_sources(runs)},
            owned={source.stem for source in prompt_sources(sharing)},
            recipes={"text": recipe_digest},
            memo=self.memo,
            found=Folder(f"cache/{PROMPTS}/{model}").listing(),
        )

    def aside(self, dataset: str) -> list[dict[str, str]]:
        """Return the items that jobs set aside and that are still as they were then."""
        settings = self.config.datasets[dataset]
        if settings.on_error != "skip":
            return []
        if dataset not in self._asides:
            noted = {
                json.dumps(fault, sort_keys=True): fault
                for run in self.config.runs
                for fault in read_lock(run).aside.get(dataset, [])
            }
            self._asides[dataset] = [each for each in noted.values() if self._unchanged(each)]
        return self._asides[dataset]

    def _unchanged(self, fault: dict[str, str]) -> bool:
        if not fault.get("digest") or fault.get("model") not in self.config.models:
            return False
        now = self.recipe(fault["dataset"], fault["model"], fault["kind"])
        if digest.of_value(now) != fault["recipe"]:
            return False
        try:
            return self.memo.digest_of_file(Path(fault["path"])) == fault["digest"]
        except OSError:
            return False

    # -- plans --------------------------------------------------------------------------------

    def plan(self, names: Iterable[str], *, force: bool = False) -> Plan:
        """Plan some runs, and write the orders of all jobs that have something to do.

        Args:
            names: of the runs.
            force: write the orders of manifests and trainings even if they have nothing to do.

        Raises:
            UserError: something that makes planning impossible.
        """
        runs = {name: self.config.runs[name] for name in names}
        self._take_in_receipts()
        needed: dict[tuple[str, str], dict[str, set[str]]] = {}
        for name, run in runs.items():
            self._check_resolutions(name, run)
            for part in parts_of(run):
                asked = needed.setdefault((part.dataset, part.model), {})
                asked.setdefault(part.name, set()).add(name)
        states = {
            (dataset, model): (
                self._evaluate_prompts(model, (run for run in runs.values() if run.model == model))
                if dataset == PROMPTS
                else self._evaluate(dataset, model, asked)
            )
            for (dataset, model), asked in needed.items()
        }
        plans = {
            name: RunPlan(
                name,
                parts={
                    Part(dataset, run.model, part): state
                    for dataset in dict.fromkeys(part.dataset for part in parts_of(run))
                    for part, state in states[dataset, run.model].parts.items()
                    if name in needed[dataset, run.model].get(part, {name})
                },
                images={name: states[name, run.model].images for name in run.datasets},
            )
            for name, run in runs.items()
        }
        found: list[WorkOrder] = []
        for (dataset, model), asked in needed.items():
            for order, kind, wanting in self._batches(dataset, model, asked, states):
                found.append(order)
                for name in wanting:
                    plans[name].orders[kind].append(order)
        for order in found:
            order.write()
        for name, plan in plans.items():
            finish(self, plan, runs[name], force=force)
        self.memo.save()
        return Plan(plans, found)

    def _batches(
        self,
        dataset: str,
        model: str,
        asked: Mapping[str, set[str]],
        states: Mapping[tuple[str, str], Evaluation],
    ) -> Iterator[tuple[WorkOrder, str, frozenset[str]]]:
        """Cut what is stale into jobs: one kind each, needed by the same runs, an item in one."""
        groups: dict[tuple[str, frozenset[str]], dict[Source, list[Target]]] = {}
        for part, wanting in asked.items():
            group = groups.setdefault((kind_of(part), frozenset(wanting)), {})
            for stale in states[dataset, model].parts[part].stale:
                target = Target(part, stale.path, stale.found, size_of(part))
                group.setdefault(stale.source, []).append(target)
        for (kind, runs), group in groups.items():
            work = [
                WorkItem(source.stem, source.path, source.text, tuple(targets))
                for source, targets in group.items()
            ]
            size = self.config.batch.items
            for start in range(0, len(work), size):
                batch = tuple(work[start : start + size])
                yield self._order(dataset, model, kind, batch), kind, runs

    def _order(self, dataset: str, model: str, kind: str, work: tuple[WorkItem, ...]) -> WorkOrder:
        settings = self.config.datasets.get(dataset)
        return WorkOrder(
            kind=kind,
            dataset=dataset,
            model=model,
            # The captions of a prompt need no settings but that an empty one is meant.
            dataset_settings=settings.model_dump() if settings else {"empty_caption": "allow"},
            model_settings=self.config.models[model].model_dump(),
            recipe=self.recipe(dataset, model, kind),
            items=work,
        )

    def single(
        self, dataset: str, model: str, part: str, stem: str
    ) -> tuple[WorkOrder, bool] | None:
        """Plan one cache file, asked for by its name.

        Returns:
            Its order, and whether it is stale; None where there is no such item.

        Raises:
            UserError: something that makes planning impossible.
        """
        if model not in self.config.models:
            return None
        kind = kind_of(part)
        if dataset == PROMPTS:
            runs = [run for run in self.config.runs.values() if run.model == model]
            sources = {each.stem: each for each in prompt_sources(runs)}
            root = ""
        elif dataset in self.config.datasets:
            sources = {item.stem: source_of(kind, item) for item in self.items(dataset)[0]}
            root = self.scan(dataset).root
        else:
            return None
        if stem not in sources:
            return None
        recipe_values = self.recipe(dataset, model, kind)
        path = plain.path(dataset, model, part, stem)
        stat = Path(path).lstat() if Path(path).exists() else None
        state = evaluate.evaluate(
            dataset=dataset,
            model=model,
            root=root,
            sources={part: [sources[stem]]},
            owned={stem},
            recipes={part: digest.of_value(recipe_values) if recipe_values else ""},
            memo=self.memo,
            found={} if stat is None else {path: target_stat(stat)},
        ).parts[part]
        self.memo.save()
        found = state.stale[0].found if state.stale else None
        source = sources[stem]
        target = Target(part, path, found, size_of(part))
        work = WorkItem(source.stem, source.path, source.text, (target,))
        order = self._order(dataset, model, kind, (work,))
        order.write()
        return order, bool(state.stale)

    def clean(self, plan: Plan) -> None:
        """Delete what earlier builds left behind: old orders, spooled files that have their names.

        Not for a dry run: another build may be at work beside it.
        """
        orders.forget_old({order.name for order in plan.orders})

    def _take_in_receipts(self) -> None:
        """Learn what jobs read and wrote, so that nobody reads it again."""
        known = self.memo.known_receipts()
        for path in orders.receipts():
            if path.name in known:
                continue
            try:
                receipt = orders.read_receipt(path)
                for source, (*stat, content) in receipt.sources.items():
                    self.memo.learn_source(source, SourceStat(*stat), content)
                for target, (*stat, key) in receipt.targets.items():
                    self.memo.learn_target(target, TargetStat(*stat), key)
            except (OSError, ValueError, TypeError):
                continue  # it spares work, no more
            self.memo.learn_receipt(path.name)
        self.memo.save()
