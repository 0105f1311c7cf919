"""Names that the shell completes: runs, datasets and targets of the configurations in a folder.

Each press of Tab starts a process, and the user waits for it. Therefore this module only reads the
names in a section and checks nothing. An unreadable file counts as empty.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from latentmake.base.regular import read_text

DEFAULT = Path("config/config.yaml")
"""Configuration that is read if the user names none."""

_TARGETS = "train caches captions latents text generate evaluate publish clips export"
_SECTION = re.compile(r"\b(runs|datasets)\b")


def runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the runs that begin with what was typed."""
    return [name for name in _names(ctx, "runs") if name.startswith(incomplete)]


def datasets(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the datasets that begin with what was typed."""
    return [name for name in _names(ctx, "datasets") if name.startswith(incomplete)]


def targets(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the targets of a build that begin with what was typed: `train_cats`."""
    names = [f"{word}_{run}" for word in _TARGETS.split() for run in _names(ctx, "runs")]
    return [name for name in (*names, "all") if name.startswith(incomplete)]


def builds(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the runs and targets of a build that begin with what was typed."""
    return [*runs(ctx, incomplete), *targets(ctx, incomplete)]


def files(folder: Path) -> list[Path]:
    """Return the files of a project that may be configurations, the default first."""
    others = (*sorted(folder.glob("*.y*ml")), *sorted(folder.glob("config/*.y*ml")))
    return [file for file in dict.fromkeys((folder / DEFAULT, *others)) if file.is_file()]


def sections(file: Path) -> Mapping[str, Any]:
    """Return the unchecked sections of a configuration; no sections if it cannot be read."""
    import yaml

    try:
        text = read_text(file)
        if not _SECTION.search(text):
            return {}
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
        values = yaml.load(text, loader)  # noqa: S506 -- both are safe
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def _names(ctx: typer.Context, section: str) -> list[str]:
    """Return the keys of a section in the files of `-c`, or in the files of the folder."""
    named = [Path(file) for file in ctx.params.get("configfile") or ()]
    names: dict[str, None] = {}
    for file in named or files(Path(ctx.params.get("directory") or ".")):
        content = sections(file).get(section)
        if isinstance(content, dict):
            names.update(dict.fromkeys(map(str, content)))
    return list(names)
