"""Every key of the configuration declares what it shapes, and what follows from it agrees."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from config_keys import keys_of
from latentmake.config import Config, MusubiTrainer, SdScriptsTrainer, SdTrainer, WanTrainer
from latentmake.config.shapes import Kind, shaping
from pydantic import BaseModel

KEYS = list(keys_of(Config))

README = (Path(__file__).parents[3] / "config" / "README.md").read_text(encoding="utf-8")

# The words of the documentation's column for each result.
WORDS: dict[Kind, set[str]] = {
    "latents": {"latents"},
    "text": {"text"},
    "manifest": {"training"},
    "weights": {"training"},
    "pictures": {"pictures"},
    "clips": {"clips"},
    "publication": {"publication"},
    "machine": {"nothing"},
}


def test_a_key_shapes_something_or_is_a_fact_of_the_machine_alone() -> None:
    assert len(KEYS) > 200
    for path, _, shapes in KEYS:
        assert shapes.kinds, path
        assert "machine" not in shapes.kinds or shapes.kinds == ("machine",), path


@pytest.mark.parametrize("trainer", [SdTrainer, WanTrainer, MusubiTrainer, SdScriptsTrainer])
def test_a_digest_of_settings_has_every_key_that_shapes_the_weights(
    trainer: type[BaseModel],
) -> None:
    kind = trainer.__name__.removesuffix("Trainer").lower()
    found = shaping(trainer(kind=kind), "weights")
    declared = {
        path[-1]
        for path, section, shapes in KEYS
        if section is trainer and "weights" in shapes.kinds
    }
    assert set(found) == declared
    assert {"learning_rate"} <= declared


def _documented(key: str) -> list[set[str]]:
    """Return what the last column of each row about a key says is made again."""
    known = set().union(*WORDS.values())
    cells = re.findall(rf"^\| `{key}` \|.*\| ([^|]+) \|$", README, flags=re.MULTILINE)
    said = [
        re.split(r", (?:where|with)| of | in ", cell.replace("all", "latents, text"))
        for cell in cells
    ]
    return [set(re.findall("[a-z]+", " ".join(each[:1] + each[2:]))) & known for each in said]


def test_the_documentation_says_what_each_key_shapes() -> None:
    for path, section, shapes in KEYS:
        if section.__name__ in ("Weights", "TextWeights", "Location"):
            continue  # what they shape is said of the key that holds them
        said = set().union(*(WORDS[kind] for kind in shapes.kinds))
        if said & {"latents", "text"}:
            said -= {"training", "pictures"}  # which follow
        documented = [
            each - {"training"} if each & {"latents", "text"} else each
            for each in _documented(path[-1])
        ]
        assert said in documented, (path, said, documented)
