"""Facts for planning: listings, items and recipes of a configuration, each computed once."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from latentmake.base import digest
from latentmake.base.digest import SourceStat
from latentmake.base.errors import DatasetError, ModelError, TrainingError
from latentmake.config.root import Config
from latentmake.data.contents import Contents
from latentmake.data.item import MADE, NO_FILE, Fault, File, Item
from latentmake.data.memo import Folder, Memo
from latentmake.data.scan import Datasets
from latentmake.layouts.layout import CAPTIONS, kind_of
from latentmake.models import cache_recipe, files
from latentmake.plan.manifest import read_lock
from latentmake.plan.orders import (
    PROMPTS,
    Part,
    caption_parts,
    left_faults,
    parts_of,
    prompt_items,
    prompts_of,
    settings_digest,
    text_parts,
)

UNKNOWN = ""
"""Digest of a recipe whose model is on another machine."""


class Facts(Datasets):
    """Facts about datasets and models. The first request for a fact may raise any UserError.

    Attributes:
        read_only: whether the command is read-only, so that its plans write no orders.
        runs_jobs: whether jobs run in this environment, not in one that Snakemake makes.
        options: command-line options that name this configuration, for messages.
        values: the configuration as it is written; empty in a build.
        local: whether jobs run on this machine, not on a cluster.
        forced: targets that the command makes again although they are fresh: targets of a run
            (`text_cats`, `train_cats`), paths of cache files, and kinds (`text`), which stand for
            the files that the command names.

    Args:
        program_digest: function that returns the digest of the external program that encodes a
            model's `latents` or `text`. Its arguments are installation, model, kind and memo.
        judge_captions: function that returns the `State` of a dataset's made captions. Its
            arguments are these facts and the dataset.
        caption_recipe: function that returns the recipe of a captioner. Its arguments are the
            captioner's section, the digest of a file, and the section's key.
        encoders: whether the command needs the encoders; otherwise they may be on another machine.
    """

    def __init__(
        self,
        config: Config,
        memo: Memo,
        *,
        runs_jobs: bool = True,
        local: bool = True,
        program_digest: Callable[..., str] | None = None,
        judge_captions: Callable[[Facts, str], Any] | None = None,
        caption_recipe: Callable[..., dict[str, object]] | None = None,
        encoders: bool = True,
        read_only: bool = False,
    ) -> None:
        super().__init__(files.resolved(config), memo)
        self._encoders = encoders
        self.read_only = read_only
        self.runs_jobs = runs_jobs
        self.options: tuple[str, ...] = ()
        self.values: Mapping[str, object] = {}
        self.local = local
        self.forced: set[str] = set()
        self._program_digest = program_digest
        self._judge_captions, self._caption_recipe = judge_captions, caption_recipe
        self._captions: dict[str, Any] = {}
        self._caption_folders: dict[str, Folder] = {}
        self._recipes: dict[tuple[str, str, str], dict[str, object]] = {}
        self._faults_of_jobs: dict[tuple[str, str], list[dict[str, str]]] = {}
        self._by_stem: dict[tuple[str, str], dict[str, Item]] = {}

    def skipped(self, dataset: str, model: str = "") -> list[dict[str, str]]:
        """Return the faults of items that jobs skipped, see `noted`."""
        skips = self.config.datasets[dataset].on_error == "skip"
        return self.noted(dataset, model) if skips else []

    def noted(self, dataset: str, model: str = "") -> list[dict[str, str]]:
        """Return the faults that jobs found in items that have not changed since.

        With `model`, return only those of its own jobs and of captioners' jobs.
        """
        key = dataset, model
        if key not in self._faults_of_jobs:
            locks = (read_lock(run).aside.get(dataset, []) for run in self.config.runs)
            noted_faults = (fault for faults in (*locks, left_faults(dataset)) for fault in faults)
            noted = {json.dumps(fault, sort_keys=True): fault for fault in noted_faults}.values()
            own = (f for f in noted if f.get("kind") == CAPTIONS or model in ("", f.get("model")))
            self._faults_of_jobs[key] = [*filter(self._is_as_noted, own)]
        return self._faults_of_jobs[key]

    def _is_as_noted(self, fault: Mapping[str, str]) -> bool:
        dataset, model, kind = (fault.get(key, "") for key in ("dataset", "model", "kind"))
        if model not in (self.config.captioners if kind == CAPTIONS else self.config.models):
            return False
        now = settings_digest(self.config.datasets[dataset])
        if fault.get("settings", now) != now:  # releases before 0.3 did not note the settings
            return False
        # A fault that the plan found has no kind: it does not depend on a recipe.
        if kind and digest.of_value(self.recipe(dataset, model, kind)) != fault.get("recipe"):
            return False
        return self.is_unchanged(fault, model)

    def is_unchanged(self, fault: Mapping[str, str], model: str) -> bool:
        """Return whether an item's content is the same as when a job noted its fault."""
        dataset, kind = fault["dataset"], fault.get("kind", "")
        model = CAPTIONS if kind == CAPTIONS else model
        texts = text_parts(self.config.datasets[dataset])
        kinds = ("latents", *texts, *([CAPTIONS] if kind == CAPTIONS else []))
        parts = [part for part in kinds if kind in ("", kind_of(part))]
        if (dataset, model) not in self._by_stem:
            items = self.items(dataset, model)[0]
            self._by_stem[dataset, model] = {item.stem: item for item in items}
        item = self._by_stem[dataset, model].get(fault["stem"])
        if item is None:
            return False
        contents = Contents(item.files, self.memo, self.config.datasets[dataset])
        digests = [contents.of(item.inputs(part, self.layout(model))) for part in parts]
        return (fault["digest"] or "none") in digests or bool(contents.unreadable)

    def digest_of(self, path: str | Path) -> str | None:
        """Return the digest of a file; None if it cannot be read."""
        try:
            return self.memo.digest_of_file(Path(path))
        except OSError:
            return None

    def add_faults(self, dataset: str, unreadable: Mapping[str, Fault]) -> None:
        """Treat items as faulty from now on; see `Datasets.add_faults`."""
        super().add_faults(dataset, unreadable)
        self._captions.pop(dataset, None)

    # -- targets ------------------------------------------------------------------------------

    def wanted_items(self, dataset: str, model: str) -> list[Item]:
        """Return a dataset's items without skipped ones; for `PROMPTS`, the prompts of all runs."""
        if dataset == PROMPTS:
            runs = [run for run in self.config.runs.values() if run.model == model]
            texts = (prompts_of(self.config, run, generated=True) for run in runs)
            return prompt_items(text for several in texts for text in several)
        without = {fault["stem"] for fault in self.skipped(dataset, model)}
        return [item for item in self.items(dataset, model)[0] if item.stem not in without]

    def forced_of(self, dataset: str, model: str) -> set[str]:
        """Return the forced parts of a dataset and model, and the paths of forced targets."""
        forced = {path for path in self.forced if path.startswith(f"cache/{dataset}/{model}/")}
        for name, run in self.config.runs.items() if self.forced else ():
            for part in parts_of(self.config, run, generated=True):
                kind = kind_of(part.name)
                if part[:2] == (dataset, model) and f"{kind}_{name}" in self.forced:
                    forced.add(part.name)
        return forced

    # -- made captions ------------------------------------------------------------------------

    def made_captions(self, dataset: str) -> Any:
        """Return the `State` of a dataset's made captions, one part for each captioner."""
        if dataset not in self._captions:
            assert self._judge_captions is not None
            self._captions[dataset] = self._judge_captions(self, dataset)
        return self._captions[dataset]

    def refuse_awaiting(self, run: str) -> None:
        """Raise DatasetError if captioners must make captions of a run's items first."""
        settings = self.config.runs[run]
        for dataset in settings.datasets:
            items = self.items(dataset, settings.model)[0]
            if number := sum(item.awaits_caption for item in items):
                what = "1 caption is" if number == 1 else f"{number} captions are"
                hint = f"run `latentmake build captions_{run}` first"
                where = f"datasets.{dataset}.captioner"
                raise DatasetError(f"{what} not made yet", where=where, hint=hint)

    def captions_folder(self, dataset: str) -> Folder:
        """Return the listing of a dataset's made captions, read once."""
        if dataset not in self._caption_folders:
            self._caption_folders[dataset] = Folder(f"cache/{dataset}/{CAPTIONS}")
        return self._caption_folders[dataset]

    def captions_mark(self, dataset: str) -> list[object]:
        """Return everything that a dataset's made captions depend on besides its items."""
        recipes = [*map(self.recipe_digest, caption_parts(self.config, dataset))]
        return [self.captions_folder(dataset).fingerprint, recipes]

    def _with_made(self, dataset: str, items: list[Item], lacking: Collection[str]) -> list[Item]:
        parts, layout = self.made_captions(dataset).parts, self.layout(CAPTIONS)
        listing = self.captions_folder(dataset).listing()
        unmade = {
            name: {work.item.stem for work in parts[name].stale}
            for name in self.config.datasets[dataset].captioner
        }

        def made(stem: str) -> Iterable[File]:
            for name, stems in unmade.items():
                folder = layout.folder(dataset, CAPTIONS, name)
                ((path, _),) = layout.named(folder, name, stem, None, None)
                stat = NO_FILE
                if stem not in stems and path in listing:
                    size, mtime_ns, inode = listing[path]
                    stat = SourceStat(size, mtime_ns, 0, inode)
                yield File(MADE, path, stat)

        return [
            item._replace(files=(*item.files, *made(item.stem))) if item.stem in lacking else item
            for item in items
        ]

    # -- models -------------------------------------------------------------------------------

    def recipe(self, dataset: str, model: str, kind: str) -> dict[str, object]:
        """Return the recipe of a kind; empty if the model is missing and not needed.

        For captions, `model` is the name of the captioner.
        """
        key = (dataset if kind != "text" else "", model, kind)
        if key not in self._recipes:
            read = self.memo.digest_of_file
            try:
                if kind == CAPTIONS:
                    assert self._caption_recipe is not None
                    section, place = self.config.captioners[model], f"captioners.{model}"
                    clips = bool(self.config.datasets[dataset].video)
                    self._recipes[key] = self._caption_recipe(section, read, place, clips=clips)
                    return self._recipes[key]
                settings, data = self.config.models[model], self.config.datasets.get(dataset)
                result = cache_recipe.make(kind, data, settings, read, f"models.{model}")
                if program := self.config.program(settings.encoder):
                    assert self._program_digest is not None
                    result["program"] = self._program_digest(program, settings, kind, self.memo)
            except (ModelError, TrainingError):
                if self._encoders:
                    raise
                result = {}
            self._recipes[key] = result
        return self._recipes[key]

    def recipe_of(self, part: Part) -> dict[str, object]:
        """Return the recipe of a part's targets, see `recipe`."""
        return self.recipe(part.dataset, part.maker, kind_of(part.name))

    def recipe_digest(self, part: Part) -> str:
        """Return the digest of a part's recipe; `UNKNOWN` if its model is not on this machine."""
        values = self.recipe(part.dataset, part.maker, kind_of(part.name))
        return digest.of_value(values) if values else UNKNOWN
