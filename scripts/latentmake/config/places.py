"""Files and lines of the configuration's keys, for messages about mistakes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from latentmake.base.errors import SeveralMistakesError, StorageError, UserError
from latentmake.config.document import check_file
from latentmake.config.root import Config

_OPTION = "--config"


class Places:
    """Places where keys of the merged configuration are set.

    Args:
        files: configuration files; the keys of later ones win.
        given: values of `--config`, which win over those of all files.
    """

    def __init__(
        self, files: Iterable[str | Path] = (), given: Mapping[str, object] | None = None
    ) -> None:
        self._files = [Path(file) for file in files]
        self._given = json.dumps(given or {}, default=str)

    def add_to(self, error: Exception) -> None:
        """Add file and line to the key that a mistake names. The files are read only here."""
        if isinstance(error, UserError) and not isinstance(error, StorageError):  # names a file
            several = error.mistakes if isinstance(error, SeveralMistakesError) else [error]
            for mistake in several:
                mistake.where = self.of(mistake.where)

    def of(self, key: str) -> str:
        """Return `FILE, line N, KEY` for a key; the line of a missing key is its section's."""
        given = yaml.SafeLoader(self._given).get_single_node()
        trees = [(str(_relative(file)), check_file(file)) for file in self._files]
        best, result = 0, key
        for name, tree in [*trees, (_OPTION, given)]:
            depth, line, missing = _search(tree, key)
            # A missing key belongs to the first file that has its section.
            if depth > best or (0 < depth == best and not missing):
                place = name if name == _OPTION else f"{name}, line {line}"
                best, result = depth, f"{place}, {key}"
        if not best and trees and key.partition(".")[0] in Config.model_fields:
            return f"{trees[0][0]}, {key}"  # no file has the section
        return result


def _relative(file: Path) -> Path:
    """Return the path of a file, relative to the working folder if it is below that."""
    path = file.absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _search(node: yaml.Node | None, key: str) -> tuple[int, int, str]:
    """Return how many parts of a key are set, the line of the last one, and the other parts."""
    depth, line = 0, 0
    while isinstance(node, yaml.CollectionNode):
        if isinstance(node, yaml.SequenceNode):
            parts = [(str(index), part, part) for index, part in enumerate(node.value)]
        else:
            parts = [(name.value, name, part) for name, part in node.value]
        # Names may have dots. Keys of a merge (`<<`) stand before those that replace them.
        matches = [part for part in parts if f"{key}.".startswith(f"{part[0]}.")]
        if not matches:
            break
        name, place, node = max(reversed(matches), key=lambda part: len(part[0]))
        depth, line, key = depth + 1, place.start_mark.line + 1, key[len(name) + 1 :]
    return depth, line, key
