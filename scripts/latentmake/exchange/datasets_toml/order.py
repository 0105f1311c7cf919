"""Order of an import, written while the Snakefile is read; no configuration is needed for it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from latentmake.errors import ConfigError
from latentmake.exchange.datasets_toml.document import read
from latentmake.files import atomic
from latentmake.plan.orders import run_order

__all__ = ["ImportOrder", "imported_run", "plan_import"]

_WORD = "import_"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_KEYS = ("dataset_toml", "architecture", "task")


class ImportOrder(BaseModel):
    """Order of an import.

    Attributes:
        run: name of the run to make.
        dataset_toml: the file of musubi-tuner or sd-scripts, TOML or JSON.
        architecture: of the model, where the user names it.
        task: likewise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    run: str
    dataset_toml: str
    architecture: str | None = None
    task: str | None = None

    def write(self) -> Path:
        """Write it, and return its path."""
        path = run_order(self.run, "import", time.time_ns())
        atomic.write(path, self.model_dump_json().encode())
        return path


def imported_run(targets: Sequence[str]) -> str | None:
    """Return the run that a command imports; None where its targets are others.

    Raises:
        ConfigError: it has other targets too, or the run cannot be named so.
    """
    asked = [target for target in targets if target.startswith(_WORD)]
    if not asked:
        return None
    if others := [target for target in targets if target != asked[0]]:
        what = f"cannot be given together with {others[0]}"
        hint = "import first: it writes a configuration for the other command"
        raise ConfigError(what, where=asked[0], hint=hint)
    run = asked[0].removeprefix(_WORD)
    if not _NAME.fullmatch(run):
        hint = "use letters, digits, `.`, `_` and `-`, as in import_cats"
        raise ConfigError(f"`{run}` is no name of a run", where=asked[0], hint=hint)
    return run


def plan_import(run: str, values: Mapping[str, object]) -> ImportOrder:
    """Return the order of an import; `values` are those of `--config`.

    Raises:
        ConfigError: no file is named, it cannot be read, or a value is no text.
    """
    found: dict[str, str] = {}
    for key in _KEYS:
        value = values.get(key)
        if value is None:
            continue
        if not isinstance(value, str) or not value:
            raise ConfigError("should be a text", where=key, hint=f"--config {key}=...")
        found[key] = value
    if "dataset_toml" not in found:
        what = "needs the dataset file of musubi-tuner or sd-scripts"
        hint = "add --config dataset_toml=path/to/dataset.toml"
        raise ConfigError(what, where=f"{_WORD}{run}", hint=hint)
    read(Path(found["dataset_toml"]))  # a mistake in it is said at once
    return ImportOrder(run=run, **found)
