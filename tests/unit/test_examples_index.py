"""The index of the examples says what each file says of itself.

`PYTHONPATH=scripts python tests/unit/test_examples_index.py` writes it anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from latentmake.config import parse

FOLDER = Path(__file__).resolve().parents[2] / "config/examples"
INDEX = FOLDER / "README.md"
HEAD = """# Examples

Copy one of these configurations, name your own folders and weights, and pass it to Snakemake with
`--configfile`. The pages of the trainers have the commands that fetch the weights:
[`sd`](../../docs/trainers/sd.md), [`wan`](../../docs/trainers/wan.md),
[`musubi`](../../docs/trainers/musubi.md), [`sdscripts`](../../docs/trainers/sdscripts.md).

| file | result | trainer |
|---|---|---|
"""


def trainers(values: dict[str, Any]) -> str:
    runs = parse(values).runs.values()
    return ", ".join(sorted({f"`{run.trainer.kind}`" for run in runs if run.trainer})) or "none"


def lines() -> Iterator[str]:
    for path in sorted(FOLDER.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        first = text.partition("\n")[0].removeprefix("# ").rstrip(".")
        yield f"| [{path.name}]({path.name}) | {first} | {trainers(yaml.safe_load(text))} |\n"


def index() -> str:
    return HEAD + "".join(lines())


def test_the_index_has_each_example_with_its_own_words() -> None:
    assert INDEX.read_text(encoding="utf-8") == index(), __doc__
    for path in FOLDER.glob("*.yaml"):
        assert path.read_text(encoding="utf-8").startswith("# "), path


if __name__ == "__main__":
    INDEX.write_text(index(), encoding="utf-8")
