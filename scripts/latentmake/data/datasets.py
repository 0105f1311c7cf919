"""Datasets of a configuration: their listings and items, each found out once."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from os.path import normpath
from posixpath import splitext
from typing import TYPE_CHECKING

from latentmake.config.root import Config
from latentmake.data import folders
from latentmake.data.item import IMAGE_EXTENSIONS, Entry, Fault, Item, Scan
from latentmake.errors import DatasetError, SourceError, shortened
from latentmake.files.media import VIDEO_EXTENSIONS
from latentmake.geometry.buckets import Size
from latentmake.index.memo import Memo, SourceStat
from latentmake.layouts.layout import Layout, layout_of

if TYPE_CHECKING:
    from latentmake.data.probe import Measured

# Caches that trainers, and `export_{run}`, write beside images.
_CACHES = (".npz", ".safetensors", ".img_sdvae", ".img_sdxl", ".txt_t5cache", ".txt_clipl")
_NAMED = 3  # files that are not used


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
        self._found: dict[tuple[str, bool], tuple[list[Item], list[Fault]]] = {}
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
                self._scans[asked] = folders.scan(dataset, settings, key)
        return self._scans[asked]

    def note_unused(self, dataset: str) -> None:
        """Write a line about the files of a dataset's folder that nothing uses, once.

        It counts them and names one of each ending, the rarest endings first.
        """
        scan, path = self.scan(dataset), self.config.datasets[dataset].path
        if dataset in self._noted or scan.items is not None:
            return
        self._noted.add(dataset)
        images, texts, lists = {*_CACHES}, {""}, set[str]()
        for each in self.config.datasets.values():
            if each.path == path:
                images |= VIDEO_EXTENSIONS if each.video else IMAGE_EXTENSIONS
                texts |= {each.caption_extension, each.tags_extension or ""}
                lists.add(normpath(each.metadata_file or ""))
        unused: dict[str, list[str]] = defaultdict(list)
        used = tuple(images), tuple(texts - {""})
        for below, size, *_ in scan.entries:
            if size < 0 or below.lower().endswith(used[0]) or below.endswith(used[1]):
                continue
            if normpath(f"{scan.root}/{below}") not in lists:
                unused[splitext(below.lower())[1]].append(below)
        if unused:
            count = sum(map(len, unused.values()))
            first = sorted((len(several), min(several)) for several in unused.values())[:_NAMED]
            names = ", ".join(shortened(" ".join(each.split())) for _, each in first)
            names += ", ..." if count > len(first) else ""
            be = "file is" if count == 1 else "files are"
            self._note(dataset, f"{count} {be} not used: {names}")

    def _note(self, dataset: str, line: str) -> None:
        """Write a line about a dataset, once."""
        if (note := f"note: datasets.{dataset}: {line}\n") not in self._noted:
            self._noted.add(note)
            sys.stderr.write(note)

    def items(self, dataset: str, model: str) -> tuple[list[Item], list[Fault]]:
        """Return the items of a dataset as a model needs them, and the faults of the others."""
        layout, asked = self.layout(model), (dataset, model)
        if asked not in self._items:
            scan = self.scan(dataset)
            read = dataset, layout.first_line
            if read not in self._found:
                self._found[read] = self._composed(dataset, scan, layout)
            found, faults = self._found[read]
            if layout.external:
                made = self._measured(dataset, model, scan, found)
                for line in made.lines():
                    self._note(dataset, line)
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
            self.faults[asked] = sorted(faults)
            self._items[asked] = found, self.faults[asked]
        return self._items[asked]

    def items_among(self, dataset: str, model: str, entries: list[Entry]) -> list[Item] | None:
        """Return the items of some entries of a dataset's listing, of all files of these items.

        None where anything is wrong with one of them, or worth a note.
        """
        scan = self.scan(dataset)._replace(entries=entries)
        if not entries:
            return []
        try:
            found, faults = self._composed(dataset, scan, self.layout(model))
            if self.layout(model).external:
                made = self._measured(dataset, model, scan, found)
                found, faults = made.found, faults + made.faults
                if made.short or made.notes:
                    return None
        except DatasetError:
            return None
        return None if faults else sorted(found)

    def _composed(self, dataset: str, scan: Scan, layout: Layout) -> tuple[list[Item], list[Fault]]:
        """Return the items of a listing with their texts, and the faults of the others."""
        settings, listed = self.config.datasets[dataset], None
        if scan.items is None:
            found, faults = folders.items(dataset, settings, scan)
        else:
            found, faults = scan.items, [*scan.faults]
        if settings.composed:
            from latentmake.data import rows, texts

            if settings.metadata_file is not None:
                listed = rows.metadata_of(dataset, settings.metadata_file, scan.root)
            roots, first = scan.roots, layout.first_line
            made = texts.texts_of(
                settings, roots, found, listed, self.memo, scan.rows, first_line=first
            )
            if made.alike:
                first_stem, others = made.alike[0], len(made.alike) - 1
                who = f"{first_stem} and {others} more have" if others else f"{first_stem} has"
                few = f"fewer than {settings.text_variants} different texts"
                self._note(
                    f"{dataset}.captions.variants", f"{who} {few}; equal ones are encoded once"
                )
            faults += made.faults
            found = [x._replace(texts=made.found[x.stem]) for x in found if x.stem in made.found]
        elif layout.first_line:
            from latentmake.data import texts

            found, more = texts.first_lines(settings, scan.roots, found, self.memo)
            faults += more
        return found, faults

    def _measured(self, dataset: str, model: str, scan: Scan, found: Sequence[Item]) -> Measured:
        """Return items with sizes and clips, as far as a layout's names contain these."""
        from latentmake.data.probe import measured

        settings, section = self.config.datasets[dataset], self.config.models[model]
        beside = self.scan(dataset, "control_directory")
        control = beside if beside.root else None
        return measured(self.layout(model), settings, scan, found, control, self.memo, section)

    def image_sizes(self, dataset: str, stats: dict[str, SourceStat]) -> dict[str, Size | None]:
        """Return width and height of a dataset's images as stored; None of an unreadable one."""
        from latentmake.data.probe import probed

        found = probed(self.scan(dataset).roots, stats, self.memo, video=False)
        return {
            path: None if isinstance(media, SourceError) else Size(media.width, media.height)
            for path, media in found.items()
        }

    def add_faults(self, dataset: str, unreadable: Mapping[str, SourceError]) -> None:
        """Count the items whose sources cannot be read as faulty from now on."""
        self.unreadable.setdefault(dataset, {}).update(
            (stem, Fault(error.where, stem, error.what, error.hint))
            for stem, error in unreadable.items()
        )
        self._items = {asked: made for asked, made in self._items.items() if asked[0] != dataset}
        self.faults = {asked: made for asked, made in self.faults.items() if asked[0] != dataset}

    def inputs(self, model: str, part: str, items: Iterable[Item]) -> list[Item]:
        """Return the inputs of the targets of a part, of some items."""
        controlled = self.layout(model).controlled_text
        return [item.inputs(part, controlled_text=controlled) for item in items]
