"""State of the readers of dataset files: places, lists, notes."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from latentmake.exchange.datasets_toml.document import Note
from latentmake.exchange.datasets_toml.folders import Folder, Places

__all__ = ["Reader"]

_SHOWN = 3  # names in a note


@dataclass
class Reader:
    """A dataset file being read.

    Attributes:
        file: its path.
        run: name of the run that is made of it.
        places: finds its paths.
        notes: what could not be taken over as it is.
        written: files to write beside the configuration: path -> content.
    """

    file: Path
    run: str
    places: Places
    notes: list[Note] = field(default_factory=list)
    written: dict[str, bytes] = field(default_factory=dict)

    def note(self, key: str, what: str, hint: str) -> None:
        """Note what could not be taken over as it is."""
        if (note := Note(key, what, hint)) not in self.notes:
            self.notes.append(note)

    def unknown(self, where: str, keys: Collection[str], trainer: str) -> None:
        """Note keys that the trainer of the file refuses."""
        for key in keys:
            what = f"{trainer} does not know this key"
            self.note(f"{where}.{key}", what, "it is left out; correct it there too")

    def rows(self, source: str, rows: Sequence[Mapping[str, Any]]) -> str:
        """Have a list written; return its path."""
        lines = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
        return self._write(PurePosixPath(source).stem, ".jsonl", lines)

    def captions(self, source: str, texts: Mapping[str, str]) -> str:
        """Have a metadata file written with captions of images; return its path."""
        entries = {name: {"caption": text} for name, text in texts.items()}
        text = json.dumps(entries, indent=1, ensure_ascii=False)
        name = PurePosixPath(source.replace("\\", "/")).name
        return self._write(f"{name}_captions", ".json", f"{text}\n")

    def _write(self, stem: str, ending: str, text: str) -> str:
        data, number = text.encode(), 1
        while True:
            path = f"runs/{self.run}/{stem}{f'_{number}' if number > 1 else ''}{ending}"
            if self.written.setdefault(path, data) == data:
                return path
            number += 1

    def differences(self, where: str, values: dict[str, Any], folder: Folder, trainer: str) -> None:
        """Set the keys by which a folder has the same items here; note what is left."""
        if folder.nested:
            values["flat"] = True
        if folder.blank:
            values["empty_caption"] = "allow"
        if folder.others:
            what = f"{_some(folder.others)}: taken as items here, and not by {trainer}"
            self.note(where, what, "move them away to train on the same")
        if folder.strays:
            values["on_error"] = "skip"
            what = f"{_some(folder.strays)}: of no item, so that on_error is skip here"
            self.note(where, what, "remove them, and take out on_error, to be told of faulty items")

    def twins(self, where: str, folder: Folder) -> None:
        """Note items whose caches would have one name."""
        seen: dict[str, str] = {}
        for name in folder.items:
            first = seen.setdefault(PurePosixPath(name).stem, name)
            if first != name:
                what = f"{first} and {name} would have caches of one name, and are refused here"
                self.note(where, what, "rename one of them")

    def missing(self) -> None:
        """Note the paths that are not on this machine."""
        if missing := list(dict.fromkeys(self.places.missing)):
            what = f"not on this machine: {_some(missing)}"
            hint = "correct the paths in the YAML; relative ones are those of this folder"
            self.note("paths", what, hint)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
