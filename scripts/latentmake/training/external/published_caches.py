"""Caches made by the trainer's machine in a published folder.

Trainers take a cache that is there for a fresh one, so that what a publication replaces or removes
takes its caches along. They have no record: their names tell whose they are.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from latentmake.layouts.layout import Layout

Kind = Literal["latents", "text"]

SETTINGS: Mapping[str, Kind] = {
    ".latentmake-latents.json": "latents",
    ".latentmake-text.json": "text",
}
"""Names of the files with the settings of the caches beside them."""


def settings_files(place: str, **settings: Any) -> dict[str, bytes]:
    """Return the files with the settings of a folder's caches; a new one makes all of a kind stale.

    `settings` is what shapes `latents` and `text` besides images and captions.
    """
    return {
        f"{place}/{name}": f"{json.dumps(settings[kind], sort_keys=True)}\n".encode()
        for name, kind in SETTINGS.items()
        if kind in settings
    }


class PublishedCaches:
    """The caches made by the trainer's machine in one published folder.

    Attributes:
        dropped: how many were removed.
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.dropped = 0
        self._folder = folder
        self._layout = layout
        self._listings: dict[str, dict[tuple[Kind, str], list[Path]]] = {}

    def drop(self, place: str, kind: Kind, base: str | None = None) -> None:
        """Remove the caches of an item, or those of all items of a folder.

        Args:
            place: the folder of caches, below the published folder.
            kind: which of them.
            base: prefix of their names from the item's stem; None for all items.
        """
        listing = self._listing(place)
        owned = [(kind, base)] if base is not None else [key for key in listing if key[0] == kind]
        for path in {path for key in owned for path in listing.pop(key, ())}:
            if path.is_file():
                path.unlink()
                self.dropped += 1

    def _listing(self, place: str) -> dict[tuple[Kind, str], list[Path]]:
        """Return (kind, base) -> the cache files that may belong to it; a folder is listed once."""
        if place not in self._listings:
            found: dict[tuple[Kind, str], list[Path]] = defaultdict(list)
            root, ending = self._folder / place, self._layout.text_ending
            for path in root.rglob("*"):
                name = path.relative_to(root).as_posix()
                kind: Kind = "text" if ending is not None and name.endswith(ending) else "latents"
                for base in self._layout.owners(name):
                    found[kind, base].append(path)
            self._listings[place] = found
        return self._listings[place]
