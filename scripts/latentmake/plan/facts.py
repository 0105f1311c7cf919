"""Facts for planning: listings, items and recipes of a configuration, each computed once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from latentmake.base import digest
from latentmake.base.errors import ModelError, TrainingError
from latentmake.config.root import Config
from latentmake.data.contents import Contents
from latentmake.data.item import Item
from latentmake.data.memo import Memo
from latentmake.data.scan import Datasets
from latentmake.layouts.layout import kind_of
from latentmake.models import cache_recipe, files
from latentmake.plan.manifest import read_lock
from latentmake.plan.orders import (
    PROMPTS,
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
        self._recipes: dict[tuple[str, str, str], dict[str, object]] = {}
        self._faults_of_jobs: dict[str, list[dict[str, str]]] = {}
        self._by_stem: dict[tuple[str, str], dict[str, Item]] = {}

    def skipped(self, dataset: str) -> list[dict[str, str]]:
        """Return the faults of items that jobs skipped and that have not changed since."""
        return self.noted(dataset) if self.config.datasets[dataset].on_error == "skip" else []

    def noted(self, dataset: str) -> list[dict[str, str]]:
        """Return the faults that jobs found in items that have not changed since."""
        if dataset not in self._faults_of_jobs:
            locks = (read_lock(run).aside.get(dataset, []) for run in self.config.runs)
            noted_faults = (fault for faults in (*locks, left_faults(dataset)) for fault in faults)
            noted = {json.dumps(fault, sort_keys=True): fault for fault in noted_faults}
            self._faults_of_jobs[dataset] = [*filter(self._is_as_noted, noted.values())]
        return self._faults_of_jobs[dataset]

    def _is_as_noted(self, fault: Mapping[str, str]) -> bool:
        dataset, model, kind = (fault.get(key, "") for key in ("dataset", "model", "kind"))
        if model not in self.config.models:
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
        texts = text_parts(self.config.datasets[dataset])
        parts = [part for part in ("latents", *texts) if kind in ("", kind_of(part))]
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

    # -- targets ------------------------------------------------------------------------------

    def wanted_items(self, dataset: str, model: str) -> list[Item]:
        """Return a dataset's items without skipped ones; for `PROMPTS`, the prompts of all runs."""
        if dataset == PROMPTS:
            runs = [run for run in self.config.runs.values() if run.model == model]
            texts = (prompts_of(self.config, run, generated=True) for run in runs)
            return prompt_items(text for several in texts for text in several)
        without = {fault["stem"] for fault in self.skipped(dataset)}
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

    # -- models -------------------------------------------------------------------------------

    def recipe(self, dataset: str, model: str, kind: str) -> dict[str, object]:
        """Return the recipe of a kind; empty if the model is missing and not needed."""
        key = (dataset if kind == "latents" else "", model, kind)
        if key not in self._recipes:
            settings, data = self.config.models[model], self.config.datasets.get(dataset)
            read, place = self.memo.digest_of_file, f"models.{model}"
            try:
                result = cache_recipe.make(kind, data, settings, read, place)
                if program := self.config.encoding_program(settings):
                    assert self._program_digest is not None
                    result["program"] = self._program_digest(program, settings, kind, self.memo)
            except (ModelError, TrainingError):
                if self._encoders:
                    raise
                result = {}
            self._recipes[key] = result
        return self._recipes[key]

    def recipe_digest(self, dataset: str, model: str, kind: str) -> str:
        """Return the digest of a recipe; `UNKNOWN` if the model is not on this machine."""
        values = self.recipe(dataset, model, kind)
        return digest.of_value(values) if values else UNKNOWN
