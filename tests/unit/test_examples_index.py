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

Configurations to start from: copy one, name your own folders and weights, and give it to Snakemake
with `--configfile`. Where weights come from: the comments of each file, and
[docs/musubi.md](../../docs/musubi.md), [docs/wan.md](../../docs/wan.md),
[docs/sd-scripts.md](../../docs/sd-scripts.md).

| file | what it makes | trainer |
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
