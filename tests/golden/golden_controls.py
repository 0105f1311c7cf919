"""Writes controls.json: what a plan says of Wan datasets, one of which has control images.

`python tests/golden/golden_controls.py` replaces it.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from controlled_world import keys_of
from golden_files import HERE, bitmap
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import ManifestOrder
from latentmake.plan.run_plan import members
from latentmake.runs.rows import row_of

GOLDEN = HERE / "controls.json"
RECIPE = "3" * 64
PARTS = ("64", "text@64")
CONFIG: dict[str, Any] = {
    "datasets": {
        "cats": {"path": "data", "control_directory": "controls", "fit": "bucket"},
        "dogs": {"path": "data", "fit": "bucket"},
    },
    "models": {
        "wan": {"task": "t2v-1.3B", "vae": "vae.pth", "text": "t5.pth", "dit": "dit.safetensors"}
    },
    "runs": {"all": {"datasets": ["cats", "dogs"], "model": "wan", "resolutions": [64]}},
}


def planned() -> dict[str, Any]:
    """Return keys and manifests of two pictures, one of them in a folder."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as workplace:
        os.chdir(workplace)
        try:
            for name, size in {"a": (48, 80), "sub/b": (64, 64)}.items():
                for folder, more in (("data", 0), ("controls", 16)):
                    path = Path(f"{folder}/{name}.bmp")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(bitmap(size[0] + more, size[1]))
                Path(f"data/{name}.txt").write_text("a cat\n")
            facts = Facts(parse(CONFIG), Memo(None))
            return {name: _planned(facts, name) for name in facts.config.datasets}
        finally:
            os.chdir(before)


def _planned(facts: Facts, dataset: str) -> dict[str, Any]:
    items, layout = facts.items(dataset, "wan")[0], facts.layout("wan")
    keys = keys_of(facts, dataset, "wan", PARTS, items, RECIPE)
    rows = members(facts, facts.config.runs["all"], {}, {})
    own = [row for row in rows if row.dataset == dataset]
    place = Path("manifest.order.json")
    order = ManifestOrder(
        run="all", model="wan", repeats={}, skip=[], items=own, faults={}, orphans=[], planned=1
    )
    place.write_text(order.model_dump_json())
    order = ManifestOrder.read(place)
    return {
        "keys": [keys[part, item.stem] for item in items for part in PARTS],
        "manifest": [json.dumps(row_of(each, 1, layout)) for each in order.items],
    }


if __name__ == "__main__":
    GOLDEN.write_text(f"{json.dumps(planned(), indent=1)}\n")
