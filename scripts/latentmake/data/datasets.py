"""Datasets of a configuration: their listings and items, each found out once."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from latentmake import digest
from latentmake.config.root import Config
from latentmake.data import listing
from latentmake.data.item import Entry, Fault, Item, Scan
from latentmake.errors import DatasetError
from latentmake.index.memo import Memo
from latentmake.layouts.layout import Layout, layout_of


class Datasets:
    """Listings and items of datasets; what is asked for first may raise any UserError.

    Attributes:
        config: of the project.
        memo: knows files; learns more.
        unreadable: dataset -> stem -> fault of an item whose source cannot be read.
        faults: dataset and model -> faults of items; none where a remembered state spared them.
    """

    def __init__(self, config: Config, memo: Memo) -> None:
        self.config = config
        self.memo = memo
        self.unreadable: dict[str, dict[str, Fault]] = {}
        self.faults: dict[tuple[str, str], list[Fault]] = {}
        self._scans: dict[tuple[str, str], Scan] = {}
        self._found: dict[tuple[str, str, bool], tuple[list[Item], list[Fault], list[str]]] = {}
        self._items: dict[tuple[str, str], tuple[list[Item], list[Fault]]] = {}
        self._noted: set[str] = set()

    def layout(self, model: str) -> Layout:
        """Return the layout of a model's caches."""
        return layout_of(self.config.models[model].layout_name)

    def scan(self, dataset: str, key: str = "path") -> Scan:
        """Return the listing of a dataset, or of its `control_directory`: empty without one."""
        if (asked := (dataset, key)) not in self._scans:
            settings = self.config.datasets[dataset]
            if getattr(settings, key) is None:
                self._scans[asked] = Scan("", [], "")
            elif key == "path" and settings.is_list:
                from latentmake.data import lists

                self._scans[asked] = lists.scan(dataset, settings)
            else:
                self._scans[asked] = listing.scan(dataset, settings, key)
        return self._scans[asked]

    def items(self, dataset: str, model: str) -> tuple[list[Item], list[Fault]]:
        """Return the items of a dataset as a model needs them, and the faults of the others.

        Notes for the user about those that are left out are written once.
        """
        asked = dataset, model
        if asked not in self._items:
            found, faults, notes = self._made(dataset, model, self.scan(dataset))
            lines = [f"note: datasets.{dataset}: {note}\n" for note in notes]
            sys.stderr.writelines(line for line in lines if line not in self._noted)
            self._noted.update(lines)
            if not found and not faults:
                what = "none of its videos is long enough for a clip"
                hint = "use fewer frames, or longer videos"
                raise DatasetError(what, where=f"datasets.{dataset}.target_frames", hint=hint)
            if unreadable := self.unreadable.get(dataset):
                found = [item for item in found if item.stem not in unreadable]
                faults = [*faults, *unreadable.values()]
            self.faults[asked] = sorted(faults)
            self._items[asked] = found, self.faults[asked]
        return self._items[asked]

    def items_among(self, dataset: str, model: str, entries: list[Entry]) -> list[Item] | None:
        """Return the items of some entries of a dataset's listing, of all files of these items.

        None where anything is wrong with one of them, or worth a note.
        """
        if not entries:
            return []
        mark = digest.of_entries(entries)
        scan = self.scan(dataset)._replace(entries=entries, fingerprint=mark)
        try:
            found, faults, notes = self._made(dataset, model, scan)
        except DatasetError:
            return None
        return None if faults or notes else sorted(found)

    def _made(
        self, dataset: str, model: str, scan: Scan
    ) -> tuple[list[Item], list[Fault], list[str]]:
        """Return the items of a listing as a model needs them, faults of others, and notes."""
        settings, layout = self.config.datasets[dataset], self.layout(model)
        like_sdscripts = layout.like_sdscripts
        read = dataset, scan.fingerprint, like_sdscripts
        if read not in self._found:
            # A plan with nothing to do lists a folder, and makes no items.
            from latentmake.data import folders
            from latentmake.data.texts import with_texts

            found, faults = scan.items, [*scan.faults]
            if found is None:
                found, faults = folders.items(dataset, settings, scan)
            found, more, notes = with_texts(
                dataset, settings, scan, found, self.memo, like_sdscripts=like_sdscripts
            )
            self._found[read] = found, faults + more, notes
        found, faults, notes = self._found[read]
        if not layout.external:
            return found, faults, notes
        from latentmake.data.probe import measured

        control, section = self.scan(dataset, "control_directory"), self.config.models[model]
        found, more, lines = measured(layout, settings, scan, found, control, self.memo, section)
        return found, faults + more, notes + lines

    def doubts(self, dataset: str, model: str) -> list[str]:
        """Return a line for each setting by which texts may lose what they were meant to have."""
        settings = self.config.datasets[dataset].captions
        if settings is None:
            return []
        from latentmake.data.texts import doubts

        lines = doubts(settings, self.layout(model).like_sdscripts)
        return [f"datasets.{dataset}.captions: {line}" for line in lines]

    def unread(self, dataset: str) -> str:
        """Return a line on the files of a dataset's folder that are left out; "" for none."""
        settings, scan = self.config.datasets[dataset], self.scan(dataset)
        if scan.items is not None:
            return ""
        folder = {x: y for x, y in self.config.datasets.items() if y.path == settings.path}
        others = [each for name, each in folder.items() if name != dataset]

        def find() -> tuple[str, tuple[()]]:
            from latentmake.data.unread import unread

            return unread(settings, others, [path for path, *_ in scan.entries]), ()

        asked = [each.model_dump() for each in (settings, *others)]
        found = self.memo.remembered(["unread", scan.fingerprint, asked], find)
        return f"datasets.{dataset}: {found}" if found else ""

    def add_faults(self, dataset: str, unreadable: Mapping[str, Fault]) -> None:
        """Count the items whose sources cannot be used as faulty from now on."""
        self.unreadable.setdefault(dataset, {}).update(unreadable)
        self._items = {asked: made for asked, made in self._items.items() if asked[0] != dataset}
        self.faults = {asked: made for asked, made in self.faults.items() if asked[0] != dataset}
