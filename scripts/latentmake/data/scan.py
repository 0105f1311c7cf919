"""Datasets of a configuration: listings and items, each computed once and then kept."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping

from latentmake.base import digest
from latentmake.base.errors import DatasetError
from latentmake.config.root import Config
from latentmake.data import listing
from latentmake.data.item import Entry, Fault, Item, Row, Scan
from latentmake.data.memo import Memo
from latentmake.layouts.layout import CAPTIONS, Layout, layout_of


class Datasets:
    """Listings and items of datasets, computed on first use; any method may raise a UserError.

    Attributes:
        config: configuration of the project.
        memo: index of files that were read earlier; it gets new entries.
        unreadable: dataset -> stem -> fault of an item whose source cannot be read.
        faults: (dataset, model) -> faults of items; no entry if a remembered state made it
            unnecessary to compute the items.
    """

    def __init__(self, config: Config, memo: Memo) -> None:
        self.config = config
        self.memo = memo
        self.unreadable: dict[str, dict[str, Fault]] = {}
        self.faults: dict[tuple[str, str], list[Fault]] = {}
        self._scans: dict[tuple[str, str], Scan] = {}
        self._paired: dict[tuple[str, str], tuple[list[Item], Mapping[str, Row], list[Fault]]] = {}
        self._listed: dict[tuple[str, str, bool], tuple[list[Item], list[Fault], list[str]]] = {}
        self._items: dict[tuple[str, str], tuple[list[Item], list[Fault]]] = {}
        self._noted: set[str] = set()

    def layout(self, model: str) -> Layout:
        """Return the layout of a model's caches, or of `CAPTIONS`."""
        if model == CAPTIONS:
            return layout_of(CAPTIONS)
        return layout_of(self.config.models[model].layout_name)

    def scan(self, dataset: str, key: str = "path") -> Scan:
        """Return the listing of a dataset's `path` or `control_directory`; empty if not set."""
        if (place := (dataset, key)) not in self._scans:
            settings = self.config.datasets[dataset]
            if getattr(settings, key) is None:
                self._scans[place] = Scan("", [], "")
            elif key == "path" and settings.is_list:
                from latentmake.data import lists

                self._scans[place] = lists.scan(dataset, settings)
            else:
                self._scans[place] = listing.scan(dataset, settings, key)
        return self._scans[place]

    def items(self, dataset: str, model: str) -> tuple[list[Item], list[Fault]]:
        """Return the items of a dataset as a model needs them, and the faults of the others.

        For `CAPTIONS`, return the items without a caption of a person's, for the captioners.

        Notes about items that are left out go to stderr, each once in a process.
        """
        names = dataset, model
        if names not in self._items:
            items, faults, notes = self._made(dataset, model, self.scan(dataset))
            lines = [f"note: datasets.{dataset}: {note}\n" for note in notes]
            sys.stderr.writelines(line for line in lines if line not in self._noted)
            self._noted.update(lines)
            if not (items or faults or model == CAPTIONS):
                what = "none of its videos is long enough for a clip"
                hint = "use fewer frames, or longer videos"
                raise DatasetError(what, where=f"datasets.{dataset}.target_frames", hint=hint)
            if unreadable := self.unreadable.get(dataset):
                items = [item for item in items if item.stem not in unreadable]
                faults = [*faults, *unreadable.values()]
            self.faults[names] = sorted(faults)
            self._items[names] = items, self.faults[names]
        return self._items[names]

    def items_among(self, dataset: str, model: str, entries: list[Entry]) -> list[Item] | None:
        """Return the items that consist of some entries of a dataset's listing.

        The entries must include all files of these items. Return None if any item has a fault or
        a note: the caller must then go through the complete listing.
        """
        if not entries:
            return []
        mark = digest.of_entries(entries)
        scan = self.scan(dataset)._replace(entries=entries, fingerprint=mark)
        try:
            items, faults, notes = self._made(dataset, model, scan)
        except DatasetError:
            return None
        return None if faults or notes else sorted(items)

    def _made(
        self, dataset: str, model: str, scan: Scan
    ) -> tuple[list[Item], list[Fault], list[str]]:
        """Return the items of a listing as a model needs them, faults of the others, and notes."""
        settings, layout = self.config.datasets[dataset], self.layout(model)
        if model == CAPTIONS:
            from latentmake.data.texts import without_caption

            items, rows, faults = self._pairs(dataset, scan)
            return without_caption(items, rows), faults, []
        like_sdscripts = layout.like_sdscripts
        request = dataset, scan.fingerprint, like_sdscripts
        if request not in self._listed:
            # Imported here: a plan with nothing to do never makes items, and so starts faster.
            from latentmake.data.texts import with_texts, without_caption

            items, rows, faults = self._pairs(dataset, scan)
            if settings.captioner:
                lacking = {item.stem for item in without_caption(items, rows)}
                items = self._with_made(dataset, items, lacking)
            items, more, notes = with_texts(
                settings, rows, items, self.memo, like_sdscripts=like_sdscripts
            )
            self._listed[request] = items, faults + more, notes
        items, faults, notes = self._listed[request]
        if not layout.external:
            return items, faults, notes
        from latentmake.data.probe import measured

        control, section = self.scan(dataset, "control_directory"), self.config.models[model]
        items, more, lines = measured(layout, settings, scan, items, control, self.memo, section)
        return items, faults + more, notes + lines

    def _pairs(self, dataset: str, scan: Scan) -> tuple[list[Item], Mapping[str, Row], list[Fault]]:
        """Return the items of a listing without texts, stem -> row of a list, and faults."""
        if (request := (dataset, scan.fingerprint)) not in self._paired:
            from latentmake.data import folders

            settings = self.config.datasets[dataset]
            items, faults = scan.items, [*scan.faults]
            if items is None:
                items, faults = folders.items(dataset, settings, scan)
            rows = scan.rows
            if settings.metadata_file is not None:
                from latentmake.data.texts import rows_of_items

                rows, more = rows_of_items(dataset, settings, scan, items)
                faults += more
            self._paired[request] = items, rows, faults
        return self._paired[request]

    def listed(self, dataset: str) -> tuple[list[Item], Mapping[str, Row]]:
        """Return the items of a dataset without texts, and stem -> row with a caption or tags."""
        items, rows, _ = self._pairs(dataset, self.scan(dataset))
        return items, rows

    def items_with_made(self, dataset: str) -> list[Item]:
        """Return the items of a dataset without texts, each with the files of its made captions.

        An item with a caption of a person's may have made ones from earlier builds.
        """
        items, _ = self.listed(dataset)
        if not self.config.datasets[dataset].captioner:
            return items
        return self._with_made(dataset, items, {item.stem for item in items})

    def stems(self, dataset: str, entries: list[Entry] | None = None) -> set[str]:
        """Return the stems of all items of a dataset, and of all that are faulty.

        With `entries`, return those of the items that consist of some entries of its listing.
        """
        scan = self.scan(dataset)
        if entries is not None:
            scan = scan._replace(entries=entries, fingerprint=digest.of_entries(entries))
        items, _, faults = self._pairs(dataset, scan)
        return {item.stem for item in items} | {fault.stem for fault in faults}

    def _with_made(self, dataset: str, items: list[Item], lacking: Collection[str]) -> list[Item]:
        """Return the items; those that lack a caption of a person's have the files of made ones.

        The file of a caption that a job has to make has the stat `NO_FILE`. `lacking` has the stems
        of the items without a person's caption.
        """
        return items

    def doubts(self, dataset: str, model: str) -> list[str]:
        """Return a line for each setting by which texts may lose parts that the user wants."""
        settings = self.config.datasets[dataset].captions
        if settings is None:
            return []
        from latentmake.data.texts import doubts

        lines = doubts(settings, self.layout(model).like_sdscripts)
        return [f"datasets.{dataset}.captions: {line}" for line in lines]

    def unread(self, dataset: str) -> str:
        """Return a line about files in a dataset's folder that are not read; "" if all are."""
        settings, scan = self.config.datasets[dataset], self.scan(dataset)
        if scan.items is not None:
            return ""
        others = [
            section
            for name, section in self.config.datasets.items()
            if section.path == settings.path and name != dataset
        ]

        def find() -> tuple[str, tuple[()]]:
            from latentmake.data.unread import unread

            return unread(settings, others, [path for path, *_ in scan.entries]), ()

        sections = [section.model_dump() for section in (settings, *others)]
        line = self.memo.remembered(["unread", scan.fingerprint, sections], find)
        return f"datasets.{dataset}: {line}" if line else ""

    def add_faults(self, dataset: str, unreadable: Mapping[str, Fault]) -> None:
        """Treat items as faulty from now on, because their sources cannot be used.

        Args:
            dataset: name of the dataset.
            unreadable: stem -> fault of the item.
        """
        self.unreadable.setdefault(dataset, {}).update(unreadable)
        self._items = {names: made for names, made in self._items.items() if names[0] != dataset}
        self.faults = {names: made for names, made in self.faults.items() if names[0] != dataset}
