"""The index of the example configurations, from the first line of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml
from latentmake.config import parse

from reference.tables import table

__all__ = ["page"]

_TEXT = """# Examples

These are configurations to start from. Copy one, set your own folders and weights, and run
Snakemake with `--configfile FILE`. The comments of each file say where the weights come from; so
do the pages on [Wan](../../docs/trainers/wan.md), [musubi-tuner](../../docs/trainers/musubi.md)
and [sd-scripts](../../docs/trainers/sdscripts.md).

"""


def page(folder: Path) -> str:
    """Return the Markdown of the index."""
    return f"{_TEXT}{table(('file', 'content', 'trainer'), _rows(folder))}\n"


def _rows(folder: Path) -> Iterator[list[str]]:
    for path in sorted(folder.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        runs = parse(yaml.safe_load(text)).runs.values()
        kinds = sorted({f"`{run.trainer.kind}`" for run in runs if run.trainer})
        first = text.partition("\n")[0].removeprefix("# ").rstrip(".")
        yield [f"[{path.name}]({path.name})", first, ", ".join(kinds) or "none"]
