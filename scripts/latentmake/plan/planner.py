"""The plan: what a run needs, what of it is stale, and the jobs that make it.

Made in the process that reads the Snakefile first, and in no other. It imports no torch and opens
no file whose stat it knows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import latentmake
from latentmake import digest, layouts
from latentmake.config import Config, Run, SdTrainer, Weights
from latentmake.errors import ConfigError, ModelError, SourceError
from latentmake.files.cachefile import Picture
from latentmake.index.memo import Memo, SourceStat, TargetStat
from latentmake.models import checks, files, recipe
from latentmake.models.wan_files import encoder_fault
from latentmake.plan import manifest, orders, reuse, staleness
from latentmake.plan.batches import batches, minutes_of
from latentmake.plan.orders import WorkOrder
from latentmake.plan.parts import (
    PROMPTS,
    Part,
    Plan,
    RunPlan,
    kind_of,
    parts_of,
    prompt_sources,
    read_lock,
    source_of,
)
from latentmake.plan.runs import finish
from latentmake.plan.staleness import Evaluation, Folder
from latentmake.sources import items as datasets
from latentmake.sources import metadata, s3
from latentmake.sources.caption_files import Texts, note_of, texts_of
from latentmake.sources.items import Fault, Item, Scan
from latentmake.sources.probe import measured
from latentmake.training.external.musubi.installation import program_digest

__all__ = ["Planner"]


class Planner:
    """Makes plans; scans each dataset and digests each model once.

    Args:
        config: the configuration.
        memo: what is known of files.
        buildable: folders that a rule makes; a model there may be missing.
        runs_jobs: whether jobs run in this very environment, not in one that Snakemake makes.
    """

    def __init__(
        self,
        config: Config,
        memo: Memo,
        *,
        buildable: Sequence[str] = (),
        runs_jobs: bool = True,
    ) -> None:
        self.runs_jobs = runs_jobs
        self.config = config
        self.memo = memo
        self._buildable = [Path(folder) for folder in buildable]
        self._scans: dict[str, Scan] = {}
        self._controls: dict[str, Scan | None] = {}
        self._texts: dict[str, Texts] = {}
        self._items: dict[tuple[str, str], tuple[list[Item], list[Fault]]] = {}
        self._recipes: dict[tuple[str, str, str], dict[str, object]] = {}
        self._asides: dict[str, list[dict[str, str]]] = {}
        self._unreadable: dict[str, dict[str, Fault]] = {}

    # -- what there is ------------------------------------------------------------------------

    def scan(self, name: str) -> Scan:
        """Return the listing of a dataset.

        Raises:
            DatasetError: its folder is missing or cannot be read.
        """
        if name not in self._scans:
            self._scans[name] = datasets.scan(name, self.config.datasets[name])
        return self._scans[name]

    def control(self, name: str) -> Scan | None:
        """Return the listing of a dataset's control images; None where it has none.

        Raises:
            DatasetError: their folder is missing or cannot be read.
        """
        if name not in self._controls:
            self._controls[name] = datasets.scan_control(name, self.config.datasets[name])
        return self._controls[name]

    def layout(self, model: str) -> str:
        """Return the name of a model's layout."""
        return self.config.models[model].layout_name

    def items(self, name: str, model: str) -> tuple[list[Item], list[Fault]]:
        """Return the items of a dataset as a model needs them, and what is wrong with the others.

        Raises:
            DatasetError: it is missing, cannot be read, or holds no image.
        """
        asked = (name, self.layout(model))
        if asked not in self._items:
            settings = self.config.datasets[name]
            found, faults = datasets.items(name, settings, self.scan(name))
            if settings.composed:
                made = self._compose(name, found)
                found = [item for item in found if item.stem in made.found]
                faults = sorted([*faults, *made.faults])
            if (layout := layouts.of(self.layout(model))).names_media:
                root = self.scan(name).root
                control = self.control(name)
                found, further = measured(layout, settings, root, found, control, self.memo)
                faults = sorted([*faults, *further])
            if unreadable := self._unreadable.get(name):
                found = [item for item in found if item.stem not in unreadable]
                faults = sorted([*faults, *unreadable.values()])
            self._items[asked] = found, faults
        return self._items[asked]

    def _compose(self, name: str, items: list[Item]) -> Texts:
        """Make the texts of a dataset's items, once."""
        if name not in self._texts:
            settings, root = self.config.datasets[name], self.scan(name).root
            listed = None
            if settings.metadata_file is not None:
                listed = metadata.entries_of(name, settings.metadata_file, root, self.memo)
            made = texts_of(settings, root, items, listed, self.memo)
            if note := note_of(name, made, settings.text_variants):
                sys.stderr.write(f"note: {note}\n")
            self._texts[name] = made
        return self._texts[name]

    def texts(self, name: str, stem: str) -> list[str] | None:
        """Return the variants of an item's text; None where it is what its caption file holds.

        To be asked for items that `items` returned.
        """
        made = self._texts.get(name)
        return None if made is None else made.found[stem]

    def faults(self, name: str, model: str) -> list[Fault]:
        """Return what is wrong with files of a dataset, as far as its items had to be made.

        Where a remembered verdict answered for it, nothing is.
        """
        asked = (name, self.layout(model))
        return self._items[asked][1] if asked in self._items else []

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
            places: list[Weights] = [settings.vae] if kind == "latents" else [*settings.text]
            try:
                if any(self.is_pending(place.path) for place in places):
                    found: dict[str, object] = {}
                else:
                    if settings.spec.wan and (wrong := encoder_fault(settings, kind)):
                        raise ModelError(
                            wrong[1], where=f"models.{model}.{wrong[0]}", mend="name the right file"
                        )
                    data = self.config.datasets.get(dataset)
                    found = recipe.make(kind, data, settings, self.memo.digest_of_file)
                    if settings.scripted and self.config.musubi_tuner is not None:
                        found["program"] = program_digest(self.config.musubi_tuner, kind, self.memo)
            except ModelError as error:
                if error.where.startswith("models."):
                    raise
                key = "vae" if kind == "latents" else "text"
                raise ModelError(
                    f"{error.where}: {error.what}", where=f"models.{model}.{key}", mend=error.mend
                ) from None
            self._recipes[asked] = found
        return self._recipes[asked]

    # -- what a run needs ---------------------------------------------------------------------

    def _check_kinds(self, run: Run) -> None:
        """Refuse networks of another kind than their keys say."""
        model, key = self.config.models[run.model], f"models.{run.model}"
        if model.spec.wan:
            return  # whose files the recipe looks at
        for kind, places in (("vae", [model.vae]), ("text", model.text), ("unet", [model.unet])):
            for place in places:
                if place is not None:
                    checks.check_kind(place, kind, f"{key}.{kind}")

    def _check_trainer(self, name: str, run: Run) -> None:
        """Refuse settings of the trainer `sd` that its UNet and noise schedule do not have."""
        model, trainer = self.config.models[run.model], run.trainer
        if not isinstance(trainer, SdTrainer) or model.unet is None:
            return
        if (names := checks.parameter_names(model.unet)) is not None:
            checks.check_names(trainer, names, f"runs.{name}.trainer")
        scheduler = checks.schedule_of(model.unet, model.scheduler)
        if scheduler and (Path(scheduler) / "scheduler_config.json").is_file():
            checks.read_schedule(scheduler, trainer.prediction_type)

    def check_resolutions(self, name: str, run: Run) -> None:
        """Refuse a resolution that the VAE cannot encode without cutting more off.

        Raises:
            ConfigError: the first mistake.
        """
        model = self.config.models[run.model]
        if not layouts.of(model.layout_name).any_size:
            return  # the configuration has been checked for its rule
        known = None if self.is_pending(model.vae.path) else files.vae_factor(model.vae)
        factor = known or 8  # that of every Stable Diffusion VAE
        asked = [("resolutions", size) for size in run.resolutions]
        if run.trainer and (size := run.trainer.sample_resolution):
            asked.append(("trainer.samples.resolution", size))
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
            if settings.fit == "bucket" and settings.bucket_steps % factor:
                raise ConfigError(
                    f"{settings.bucket_steps} is not a multiple of the VAE's factor {factor}",
                    where=f"datasets.{dataset}.bucket_reso_steps",
                    mend=f"use a multiple of {factor}",
                )
            for size in run.resolutions:
                if settings.fit == "bucket" and size.width * size.height < settings.bucket_steps**2:
                    raise ConfigError(
                        f"{settings.bucket_steps} is more than the resolution {size.name} has",
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
        layout, control = self.layout(model), self.control(dataset)
        listings = [scanned.fingerprint, folder.fingerprint, control and control.fingerprint]
        if (listed := self.config.datasets[dataset].metadata_file) is not None:
            listings.append(str(metadata.metadata_stat(dataset, listed)))
        version = [latentmake.__version__, latentmake.PLAN_VERSION]
        question = digest.of_value([version, dataset, model, layout, recipes, listings, settings])
        whole = not aside and dataset not in self._unreadable
        if whole and (answer := self.memo.verdict(question)):
            return staleness.recall(answer)
        items, faults = self.items(dataset, model)
        without = {fault["stem"] for fault in aside}
        wanted = [item for item in items if item.stem not in without]
        owned = {item.stem for item in items} | {fault.stem for fault in faults}
        if layouts.of(layout).drops_skipped and settings["on_error"] == "skip":
            owned = {item.stem for item in wanted}
        evaluation = staleness.evaluate(
            dataset=dataset,
            model=model,
            root=scanned.root,
            sources={
                part: [source_of(part, item, self.texts(dataset, item.stem)) for item in wanted]
                for part in kinds
            },
            owned=owned,
            recipes=recipes,
            memo=self.memo,
            found=folder.listing(),
            layout=layouts.of(layout),
            settings=self.config.datasets[dataset],
        )
        evaluation.images = manifest.images_digest(item.image for item in wanted)
        if "text" not in kinds.values():  # which a trainer encodes itself
            evaluation.unreadable |= self._unread_captions(wanted)
        if not faults and not aside and (verdict := staleness.remember(evaluation)):
            self.memo.learn_verdict(question, verdict)
        return evaluation

    def _unread_captions(self, items: Iterable[Item]) -> dict[str, SourceError]:
        """Return stem -> fault of the captions in files that cannot be read."""
        found: dict[str, SourceError] = {}
        for item in items:
            if item.caption is not None and not s3.is_remote(item.caption):
                try:
                    self.memo.digest_of_file(Path(item.caption))
                except OSError as error:
                    found[item.stem] = staleness.unreadable(item.caption, error)
        self.memo.save()  # they are asked for again
        return found

    def _leave_out(self, dataset: str, unreadable: Mapping[str, SourceError]) -> None:
        """Count the items whose sources cannot be read as faulty from now on."""
        self._unreadable.setdefault(dataset, {}).update(
            (stem, Fault(error.where, stem, error.what, error.mend))
            for stem, error in unreadable.items()
        )
        self._items = {asked: made for asked, made in self._items.items() if asked[0] != dataset}
        self.memo.save()  # what was read already is not read again

    def _evaluate_prompts(self, model: str, runs: Iterable[Run]) -> Evaluation:
        """Return the state of the prompts of some runs of one model."""
        sharing = [run for run in self.config.runs.values() if run.model == model]
        recipe_digest = ""
        if recipes := self.recipe(PROMPTS, model, "text"):
            recipe_digest = digest.of_value(recipes)
        return staleness.evaluate(
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
        path = fault["path"]
        try:
            if not s3.is_remote(path):
                return self.memo.digest_of_file(Path(path)) == fault["digest"]
            scanned = self.scan(fault["dataset"])
            below = path.removeprefix(f"{scanned.root}/")
            stat = next((SourceStat(*x[1:]) for x in scanned.entries if x[0] == below), None)
            if stat is None:
                return False
            content = self.memo.known_digest(path, stat)
            if content is None:
                found = next(s3.digests([(path, stat)]))
                if isinstance(found, SourceError):
                    return False
                content, stat = found
                self.memo.learn_source(path, stat, content)
            return content == fault["digest"]
        except OSError:
            return False

    # -- plans --------------------------------------------------------------------------------

    def plan(
        self, names: Iterable[str], *, force: bool = False, trained: Collection[str] | None = None
    ) -> Plan:
        """Plan some runs, and write the orders of all jobs that have something to do.

        Args:
            names: of the runs.
            force: write the orders of manifests and trainings even if they have nothing to do.
            trained: the runs whose training is asked for; None stands for all.

        Raises:
            UserError: something that makes planning impossible.
        """
        runs = {name: self.config.runs[name] for name in names}
        self._take_in_receipts()
        needed: dict[tuple[str, str], dict[str, set[str]]] = {}
        for name, run in runs.items():
            self._check_kinds(run)
            self.check_resolutions(name, run)
            self._check_trainer(name, run)
            for part in parts_of(self.config, run):
                asked = needed.setdefault((part.dataset, part.model), {})
                asked.setdefault(part.name, set()).add(name)
        states: dict[tuple[str, str], Evaluation] = {}
        pending = list(needed)
        while pending:
            dataset, model = pending.pop(0)
            if dataset == PROMPTS:
                using = [run for run in runs.values() if run.model == model]
                states[dataset, model] = self._evaluate_prompts(model, using)
                continue
            state = self._evaluate(dataset, model, needed[dataset, model])
            states[dataset, model] = state
            if state.unreadable:
                self._leave_out(dataset, state.unreadable)
                again = [each for each in states if each[0] == dataset]
                pending += [each for each in again if each not in pending]
        reuse.mark(self.memo, [*states.values()])
        plans = {
            name: RunPlan(
                name,
                parts={
                    Part(dataset, run.model, part): state
                    for dataset in dict.fromkeys(
                        part.dataset for part in parts_of(self.config, run)
                    )
                    for part, state in states[dataset, run.model].parts.items()
                    if name in needed[dataset, run.model].get(part, {name})
                },
                images={name: states[name, run.model].images for name in run.datasets},
            )
            for name, run in runs.items()
        }
        found: list[WorkOrder] = []
        for (dataset, model), asked in needed.items():
            for order, kind, wanting in batches(self, dataset, model, asked, states):
                found.append(order)
                for name in wanting:
                    plans[name].orders[kind].append(order)
        for order in found:
            order.write()
        for name, plan in plans.items():
            wanted = trained is None or name in trained
            finish(self, plan, runs[name], force=force, train=wanted)
        self.memo.save()
        minutes = {order.name: known for order in found if (known := minutes_of(self, order))}
        return Plan(plans, found, minutes)

    def _take_in_receipts(self) -> None:
        """Learn what jobs read and wrote, so that nobody reads it again."""
        known = self.memo.known_receipts()
        for path in orders.receipts():
            if path.name in known:
                continue
            try:
                receipt = orders.read_receipt(path)
                for source, values in receipt.sources.items():
                    (*stat, content), size = values[:5], values[5:]
                    self.memo.learn_source(source, SourceStat(*stat), content)
                    if size:
                        self.memo.learn_picture(content, Picture(*size))
                for target, (*stat, key) in receipt.targets.items():
                    self.memo.learn_target(target, TargetStat(*stat), key)
                encoding = receipt.seconds - receipt.starting
                if receipt.work:
                    encoded = receipt.counts.get("encoded", 0)
                    self.memo.learn_rate(receipt.work, encoded, encoding, receipt.starting)
            except (OSError, ValueError, TypeError):
                continue  # it spares work, no more
            self.memo.learn_receipt(path.name)
        self.memo.save()
