"""Small datasets with control images and layers, and what a plan says of them without weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from latentmake.config.root import Config, parse
from latentmake.data.item import Fault, Item
from latentmake.data.memo import Memo
from latentmake.plan.facts import Facts
from latentmake.plan.judge import Judge
from latentmake.plan.orders import part_names
from PIL import Image

RECIPE = "1" * 64
MODELS: dict[str, dict[str, Any]] = {
    "qwen_image": {},
    "qwen_image_edit": {"task": "edit-2509"},
    "qwen_image_layered": {},
    "flux_kontext": {"text": ["t", "c"]},
    "flux_2_dev": {},
    "framepack": {"task": "one_frame", "text": ["t", "c"], "image_encoder": "siglip"},
    "kandinsky5": {"text": ["qwen", "clip"]},
    "hidream_o1": {"task": "i2i", "vae": None, "text": None},
}


def draw(path: str, colour: int = 0, size: tuple[int, int] = (64, 48)) -> None:
    """Draw a picture of one colour."""
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (colour % 256, 40 * colour % 256, 90)).save(place)


def put(*stems: str, folder: str = "data") -> None:
    """Draw pictures, each with a caption."""
    for number, stem in enumerate(stems):
        draw(f"{folder}/{stem}.png", number)
        Path(f"{folder}/{stem}.txt").write_text(f"this is {stem}\n")


def configured(architecture: str, *, task: str | None = None, **dataset: Any) -> Config:
    """Return a configuration of a dataset, a model of an architecture, and a run of both."""
    model = {"vae": "vae", "text": ["text"], "dit": "dit", **MODELS.get(architecture, {})}
    model = {key: value for key, value in model.items() if value is not None}
    if architecture == "wan":
        model |= {"task": "t2v-1.3B"}
    else:
        model |= {"architecture": architecture}
    model |= {} if task is None else {"task": task}
    runs = {"run": {"datasets": "pictures", "model": "model", "resolutions": [64, 96]}}
    return parse(
        {
            "datasets": {"pictures": {"path": "data", "fit": "bucket", **dataset}},
            "models": {"model": model},
            "runs": runs,
            "musubi_tuner": {"path": "musubi-tuner"},
        }
    )


def listed(architecture: str, **dataset: Any) -> tuple[dict[str, Item], list[Fault]]:
    """Return the items of a dataset by their stems, and the faults of the others."""
    facts = Facts(configured(architecture, **dataset), Memo(None))
    items, faults = facts.items("pictures", "model")
    return {item.stem: item for item in items}, faults


def controls_of(architecture: str, **dataset: Any) -> dict[str, list[str]]:
    """Return the names of each item's control images; there are no faults."""
    items, faults = listed(architecture, control_directory="control", **dataset)
    assert not faults
    return {stem: [Path(path).name for path in item.controls] for stem, item in items.items()}


def keys(architecture: str, **dataset: Any) -> dict[tuple[str, str], str]:
    """Return (part, stem) -> key of all targets of a dataset."""
    config = configured(architecture, **dataset)
    facts = Facts(config, Memo(None))
    parts = part_names(config, config.runs["run"], "pictures")
    items, faults = facts.items("pictures", "model")
    assert not faults
    return keys_of(facts, "pictures", "model", parts, items, RECIPE)


def keys_of(
    facts: Facts, dataset: str, model: str, parts: Sequence[str], items: Sequence[Item], recipe: str
) -> dict[tuple[str, str], str]:
    """Return (part, stem) -> key of the targets of items, by one digest of all recipes."""
    judge = Judge(facts, dataset, model, [], items, [])
    judge.recipes = dict.fromkeys(parts, recipe)
    found: dict[tuple[str, str], str] = {}
    for part in parts:
        inputs = [item.inputs(part, judge.layout) for item in items]
        for item, (target,) in judge.targets(part, inputs):
            content = judge.contents.of(item)
            assert content is not None
            key = judge.needed(item, target, content)
            assert key is not None
            found[part, item.stem] = key
    return found
