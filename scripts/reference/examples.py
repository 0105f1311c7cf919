"""Index of the example configurations, made from the first line of each file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml
from latentmake.config.root import parse

from reference.tables import table

__all__ = ["page"]

_TEXT = """# Examples

Copy one of these configurations, name your own folders and weights, and pass it to Snakemake with
`--configfile`. The pages of the trainers have the commands that fetch the weights:
[`sd`](../../docs/trainers/sd.md), [`wan`](../../docs/trainers/wan.md),
[`musubi`](../../docs/trainers/musubi.md), [`sdscripts`](../../docs/trainers/sdscripts.md).

"""


def page(folder: Path) -> str:
    """Return the Markdown of the index of a folder."""
    return f"{_TEXT}{table(('file', 'result', 'trainer'), _rows(folder))}\n"


def _rows(folder: Path) -> Iterator[list[str]]:
    for path in sorted(folder.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        runs = parse(yaml.safe_load(text)).runs.values()
        kinds = sorted({f"`{run.trainer.kind}`" for run in runs if run.trainer})
        first = text.partition("\n")[0].removeprefix("# ").rstrip(".")
        yield [f"[{path.name}]({path.name})", first, ", ".join(kinds) or "none"]
