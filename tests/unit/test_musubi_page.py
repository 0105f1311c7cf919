"""The page on musubi-tuner has a paragraph and an example for each architecture."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from latentmake.config.architectures import MUSUBI, SDSCRIPTS
from latentmake.config.root import parse

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/trainers/musubi.md"


def test_each_architecture_has_a_paragraph() -> None:
    found = re.findall(r"^### (.+)$", PAGE.read_text().partition("## Architectures\n")[2], re.M)
    assert found == [row.title for row in MUSUBI.values()]


def test_each_architecture_has_an_example() -> None:
    examples = ROOT / "config/examples"
    models = [
        model
        for path in examples.glob("*.yaml")
        for model in parse(yaml.safe_load(path.read_text(encoding="utf-8"))).models.values()
    ]
    assert MUSUBI.keys() <= {model.spec.name for model in models}


def test_all_defaults_save_memory_and_share_a_seed() -> None:
    """The pages on musubi-tuner and sd-scripts say so in a sentence."""
    for rows, seed in ((MUSUBI, 42), (SDSCRIPTS, None)):
        for row in rows.values():
            assert row.settings["gradient_checkpointing"] is True
            assert row.settings.get("seed") == seed
