"""Facts for planning: listings, items and recipes of a configuration, each found out once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from latentmake import digest, layouts
from latentmake.config.machines import ExternalProgram
from latentmake.config.models import Model
from latentmake.config.root import Config
from latentmake.errors import DatasetError, ModelError, SourceError, TrainingError
from latentmake.files.paths import normalized
from latentmake.geometry.buckets import Size
from latentmake.index.memo import Memo, SourceStat
from latentmake.layouts import Layout, kind_of
from latentmake.models import places, recipe
from latentmake.models.recipe_differences import keep_places
from latentmake.plan.contents import Contents
from latentmake.plan.lock import read_lock
from latentmake.plan.state import UNKNOWN, Judge
from latentmake.plan.target import PROMPTS, known_prompts, prompt_items, text_parts
from latentmake.sources import folders
from latentmake.sources.item import Fault, Item, Scan

if TYPE_CHECKING:
    from latentmake.sources.probe import Measured

ProgramDigest = Callable[[ExternalProgram, Model, str, Memo], str]
"""Returns the digest of the program that encodes a model's `latents` or `text`."""


class Facts:
    """Facts about datasets and models; those asked for first may raise any UserError.

    Attributes:
        asks: whether the command only asks, so that its plans write no orders.
        runs_jobs: whether jobs run in this environment, not in one that Snakemake makes.
        unreadable: dataset -> stem -> fault of an item whose source cannot be read.

    Args:
        program_digest: asked where a model names such a program as its `encoder`.
        encoders: whether the command needs them; otherwise they may lie on another machine.
    """

    def __init__(
        self,
        config: Config,
        memo: Memo,
        *,
        runs_jobs: bool = True,
        program_digest: ProgramDigest | None = None,
        encoders: bool = True,
        asks: bool = False,
    ) -> None:
        self.config = places.resolved(config)
        self._encoders = encoders
        self.asks = asks
        self.memo = memo
        self.runs_jobs = runs_jobs
        self._program_digest = program_digest
        self._scans: dict[str, Scan] = {}
        self._controls: dict[str, Scan | None] = {}
        self._found: dict[tuple[str, bool], tuple[list[Item], list[Fault]]] = {}
        self._items: dict[tuple[str, ...], tuple[list[Item], list[Fault]]] = {}
        self._recipes: dict[tuple[str, str, str], dict[str, object]] = {}
        self._skipped: dict[str, list[dict[str, str]]] = {}
        self._noted: set[str] = set()
        self.unreadable: dict[str, dict[str, Fault]] = {}

    # -- datasets -----------------------------------------------------------------------------

    def scan(self, dataset: str) -> Scan:
        """Return the listing of a dataset."""
        if dataset not in self._scans:
            settings = self.config.datasets[dataset]
            if settings.is_list:
                from latentmake.sources import lists

                self._scans[dataset] = lists.scan(dataset, settings)
            else:
                self._scans[dataset] = folders.scan(dataset, settings)
        return self._scans[dataset]

    def control(self, dataset: str) -> Scan | None:
        """Return the listing of a dataset's control images; None where it has none."""
        if dataset not in self._controls:
            settings = self.config.datasets[dataset]
            self._controls[dataset] = (
                None
                if settings.control_directory is None
                else folders.scan(dataset, settings, "control_directory")
            )
        return self._controls[dataset]

    def note_unused(self, dataset: str) -> None:
        """Write a line about the files of a dataset's folder that nothing uses, once."""
        from latentmake.sources.unused import unused_note

        if dataset not in self._noted:
            self._noted.add(dataset)
            path = self.config.datasets[dataset].path
            sharing = [each for each in self.config.datasets.values() if each.path == path]
            if note := unused_note(sharing, self.scan(dataset)):
                sys.stderr.write(f"note: datasets.{dataset}: {note}\n")

    def items(self, dataset: str, model: str) -> tuple[list[Item], list[Fault]]:
        """Return the items of a dataset as a model needs them, and the faults of the others."""
        layout = self.layout(model)
        asked = self._asked(dataset, model)
        if asked not in self._items:
            scan = self.scan(dataset)
            read = dataset, layout.first_line
            if read not in self._found:
                self._found[read] = self._composed(dataset, scan, layout)
            found, faults = self._found[read]
            if layout.names_media:
                made = self._measured(dataset, model, scan, found)
                for line in made.lines():
                    sys.stderr.write(f"note: datasets.{dataset}: {line}\n")
                if made.short and not (made.found or made.faults or faults):
                    raise DatasetError(
                        f"none of its {len(made.short)} videos is long enough for a clip",
                        where=f"datasets.{dataset}.target_frames",
                        hint="use fewer frames, or longer videos",
                    )
                found, faults = made.found, faults + made.faults
            if unreadable := self.unreadable.get(dataset):
                found = [item for item in found if item.stem not in unreadable]
                faults = [*faults, *unreadable.values()]
            self._items[asked] = found, sorted(faults)
        return self._items[asked]

    def items_among(
        self, dataset: str, model: str, entries: list[tuple[str, int, int, int, int]]
    ) -> list[Item] | None:
        """Return the items of some entries of a dataset's listing, of all files of these items.

        None where anything is wrong with one of them, or worth a note.
        """
        scan = self.scan(dataset)._replace(entries=entries)
        if not entries:
            return []
        try:
            found, faults = self._composed(dataset, scan, self.layout(model))
            if self.layout(model).names_media:
                made = self._measured(dataset, model, scan, found)
                found, faults = made.found, faults + made.faults
                if made.short or made.notes:
                    return None
        except DatasetError:
            return None
        return None if faults else sorted(found)

    def _composed(self, dataset: str, scan: Scan, layout: Layout) -> tuple[list[Item], list[Fault]]:
        """Return the items of a listing with their texts, and the faults of the others."""
        from latentmake.sources import lists, metadata
        from latentmake.sources.caption_files import first_lines, texts_of

        settings = self.config.datasets[dataset]
        entries, listed = None, None
        if scan.rows is None:
            found, faults = folders.items(dataset, settings, scan)
        else:
            found, faults, entries = lists.items(dataset, settings, scan)
        if settings.composed:
            if settings.metadata_file is not None:
                place = settings.metadata_file
                listed = metadata.entries_of(dataset, place, scan.root)
            roots, first = scan.roots, layout.first_line
            made = texts_of(settings, roots, found, listed, self.memo, entries, first_line=first)
            if note := made.note(dataset, settings.text_variants):
                sys.stderr.write(f"note: {note}\n")
            texts, faults = made.found, faults + made.faults
            found = [item._replace(texts=texts[x]) for item in found if (x := item.stem) in texts]
        elif layout.first_line:
            found, more = first_lines(settings, scan.roots, found, self.memo)
            faults = faults + more
        return found, faults

    def _measured(self, dataset: str, model: str, scan: Scan, found: Sequence[Item]) -> Measured:
        """Return items with sizes and clips, as far as a layout's names contain these."""
        from latentmake.sources.probe import measured

        settings, section = self.config.datasets[dataset], self.config.models[model]
        control = self.control(dataset)
        return measured(self.layout(model), settings, scan, found, control, self.memo, section)

    def image_sizes(self, dataset: str, stats: dict[str, SourceStat]) -> dict[str, Size | None]:
        """Return width and height of a dataset's images as stored; None of an unreadable one."""
        from latentmake.sources.probe import image_sizes

        return image_sizes(self.scan(dataset).roots, stats, self.memo)

    def known_faults(self, dataset: str, model: str) -> list[Fault]:
        """Return the faults of a dataset's items; none where a remembered state spared them."""
        return self._items.get(self._asked(dataset, model), ([], []))[1]

    def _asked(self, dataset: str, model: str) -> tuple[str, ...]:
        """Return the dataset's name with all of a model that decides about its items."""
        section = self.config.models[model]
        return dataset, section.layout_name, section.task or "", section.encoder

    def add_faults(self, dataset: str, unreadable: Mapping[str, SourceError]) -> None:
        """Count the items whose sources cannot be read as faulty from now on."""
        self.unreadable.setdefault(dataset, {}).update(
            (stem, Fault(error.where, stem, error.what, error.hint))
            for stem, error in unreadable.items()
        )
        self._items = {asked: made for asked, made in self._items.items() if asked[0] != dataset}

    def skipped(self, dataset: str) -> list[dict[str, str]]:
        """Return the faulty items that jobs skipped and that are still as they were then."""
        if self.config.datasets[dataset].on_error != "skip":
            return []
        if dataset not in self._skipped:
            noted = {
                json.dumps(fault, sort_keys=True): fault
                for run in self.config.runs
                for fault in read_lock(run).aside.get(dataset, [])
            }
            self._skipped[dataset] = [each for each in noted.values() if self._is_unchanged(each)]
        return self._skipped[dataset]

    def _is_unchanged(self, fault: Mapping[str, str]) -> bool:
        dataset, model, kind = (fault.get(key, "") for key in ("dataset", "model", "kind"))
        if not fault.get("digest") or model not in self.config.models:
            return False
        if digest.of_value(self.recipe(dataset, model, kind)) != fault["recipe"]:
            return False
        parts = ["latents"] if kind == "latents" else text_parts(self.config.datasets[dataset])
        items = [each for each in self.items(dataset, model)[0] if each.stem == fault["stem"]]
        contents = self.contents(dataset, items)
        inputs = (each for part in parts for each in self.inputs(model, part, items))
        return any(contents.of(each) == fault["digest"] for each in inputs)

    def digest_of(self, path: str | Path) -> str | None:
        """Return the digest of a file; None where it cannot be read."""
        try:
            return self.memo.digest_of_file(Path(path))
        except OSError:
            return None

    # -- targets ------------------------------------------------------------------------------

    def inputs(self, model: str, part: str, items: Iterable[Item]) -> list[Item]:
        """Return the inputs of the targets of a part, of some items."""
        controlled = self.layout(model).controlled_text
        return [item.inputs(part, controlled_text=controlled) for item in items]

    def wanted_items(self, dataset: str, model: str) -> list[Item]:
        """Return the items of a dataset that jobs do not skip; of the prompts those of all runs."""
        if dataset == PROMPTS:
            return prompt_items(known_prompts(self.config, model))
        without = {fault["stem"] for fault in self.skipped(dataset)}
        return [item for item in self.items(dataset, model)[0] if item.stem not in without]

    def contents(self, dataset: str, items: Sequence[Item] | None = None) -> Contents:
        """Return what tells digests of inputs; asked of some items only, it looks up only these."""
        settings = self.config.datasets.get(dataset)
        if settings is None:
            return Contents(self.memo, None, {})
        control = settings.control_directory
        folders = [*self.scan(dataset).roots, *([normalized(control)] if control else [])]
        if items is not None:
            paths = {each.path for item in items for each in item.files}
            return Contents(self.memo, settings, self.memo.sources.known(paths, *folders))
        below = (self.memo.sources.below(each) for each in folders)
        known = {path: fact for found in below for path, fact in found.items()}
        return Contents(self.memo, settings, known)

    def judge(
        self,
        dataset: str,
        model: str,
        parts: Iterable[str],
        some: tuple[Sequence[Item], Collection[str]] | None = None,
    ) -> Judge:
        """Return the judge of the targets of some parts.

        Args:
            dataset: its name.
            model: its name.
            parts: their names.
            some: items and paths of cache files, where only these are to be judged.
        """
        folder, cached = f"cache/{dataset}/{model}", self.memo.targets
        return Judge(
            self.memo,
            self.layout(model),
            self.config.datasets.get(dataset),
            (dataset, model),
            {part: self.recipe_digest(dataset, model, kind_of(part)) for part in parts},
            self.contents(dataset, some and some[0]),
            cached.below(folder) if some is None else cached.known(some[1], folder),
        )

    # -- models -------------------------------------------------------------------------------

    def layout(self, model: str) -> Layout:
        """Return the layout of a model's caches."""
        return layouts.of(self.config.models[model].layout_name)

    def recipe(self, dataset: str, model: str, kind: str) -> dict[str, object]:
        """Return the recipe of a kind; empty where the model is not here, and may be missing."""
        asked = (dataset if kind == "latents" else "", model, kind)
        if asked not in self._recipes:
            try:
                self._recipes[asked] = self._recipe(dataset, model, kind)
            except (ModelError, TrainingError) as error:
                if not self._encoders:
                    return self._recipes.setdefault(asked, {})
                if isinstance(error, TrainingError) or error.where.startswith("models."):
                    raise
                where = f"models.{model}.{'vae' if kind == 'latents' else 'text'}"
                what = f"{error.where}: {error.what}"
                raise ModelError(what, where=where, hint=error.hint) from None
        return self._recipes[asked]

    def _recipe(self, dataset: str, model: str, kind: str) -> dict[str, object]:
        settings = self.config.models[model]
        if settings.spec.scripts is not None:
            from latentmake.models.encoder_files import encoder_fault

            if wrong := encoder_fault(settings, kind):
                where = f"models.{model}.{wrong[0]}"
                raise ModelError(wrong[1], where=where, hint="name the right file")
        data = self.config.datasets.get(dataset)
        found = recipe.make(kind, data, settings, self.memo.digest_of_file)
        program = self.config.encoding_program(settings)
        if program is not None:
            assert self._program_digest is not None
            found["program"] = self._program_digest(program, settings, kind, self.memo)
        if not self.asks:
            keep_places(found, settings)
        return found

    def recipe_digest(self, dataset: str, model: str, kind: str) -> str:
        """Return the digest of a recipe; `UNKNOWN` where the model is not here."""
        found = self.recipe(dataset, model, kind)
        return digest.of_value(found) if found else UNKNOWN
