"""Held-out items: sd-scripts' own code trains on the others, and computes the loss of these."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import world
from conftest import said_by
from latentmake.config.root import Validation
from latentmake.formats.safetensors import read_head
from latentmake.pages.curves import read_curves
from latentmake.pages.following import training_section
from latentmake.runs.order import read_order
from latentmake.trainers.launched.installation import Installation
from latentmake.trainers.sdscripts.backend import SdScripts as Trainer
from latentmake.trainers.sdscripts.deploy import deploy
from latentmake.trainers.sdscripts.order import SdScriptsOrder
from test_resume_sdscripts import LOG, make_run

pytestmark = pytest.mark.real_trainer

HELD_OUT = {"ant": ((64, 64), "a held-out ant"), "an": ((80, 72), ""), "anteater": ((72, 96), "b")}
# The items of both halves of a dataset, as sd-scripts finds them.
SCRIPT = """# preloaded
import argparse, json, sys
import transformers
sys.modules["transformers"].CLIPFeatureExtractor = transformers.CLIPImageProcessor
from library import config_util, strategy_base, strategy_sd, train_util
parser = argparse.ArgumentParser()
train_util.add_dataset_arguments(parser, True, True, True)
train_util.add_training_arguments(parser, True)
args = parser.parse_args([])
train_util.prepare_dataset_args(args, True)
caching = strategy_sd.SdSdxlLatentsCachingStrategy(True, True, 1, False)
strategy_base.LatentsCachingStrategy.set_strategy(caching)
user = config_util.load_user_config(sys.argv[1])
sanitizer = config_util.ConfigSanitizer(True, True, False, True)
blueprint = config_util.BlueprintGenerator(sanitizer).generate(user, args)
groups = config_util.generate_dataset_group_by_blueprint(blueprint.dataset_group)
print(json.dumps([
    sorted([x.caption, list(x.image_size)] for each in group.datasets
           for x in each.image_data.values())
    for group in groups
]))
"""


def with_held_out(order: Path) -> SdScriptsOrder:
    """Give a run further items, which are held out; one's name begins another one's."""
    found = read_order(order, SdScriptsOrder)
    rows = [json.loads(line) for line in Path(found.manifest).read_text().splitlines()]
    for stem, (size, caption) in HELD_OUT.items():
        world.draw(Path(f"more/{stem}.png"), 7, size)
        Path(f"more/{stem}.txt").write_text(caption)
        latents = Path(f"cache/{stem}_{size[0]:04d}x{size[1]:04d}_sd.npz")
        latents.write_bytes(Path("cache/ant_0064x0064_sd.npz").read_bytes())
        row = {**rows[0], "stem": f"more/{stem}", "source": f"more/{stem}.png", "validation": True}
        row |= {"caption": f"more/{stem}.txt" if caption else None, "latents": {"64": str(latents)}}
        rows.append(row)
    Path(found.manifest).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    other = found.datasets["cats"].model_copy(update={"path": "none"})  # which has none held out
    changed = found.model_copy(
        update={
            "validation": Validation(items=3, every=2),
            "datasets": {**found.datasets, "dogs": other},
        }
    )
    order.write_text(changed.model_dump_json())
    return changed


def test_their_loss_is_computed_and_shown_and_none_is_trained_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trainer: Callable[[str, str], Installation],
) -> None:
    program = trainer("sd-scripts", "train_network.py")
    monkeypatch.chdir(tmp_path)
    path = make_run(tmp_path, program, max_train_epochs=2, samples={})
    order = with_held_out(path)
    deploy(order)
    toml = tmp_path / "runs/cats" / order.toml
    trained, held = json.loads(said_by(program, SCRIPT, toml))
    assert trained == [[f"a {stem}", [64, 64]] for stem in ("ant", "bee", "cat")]
    assert held == sorted([caption, list(size)] for size, caption in HELD_OUT.values())
    Trainer().train(path, log=LOG, receipt=Path("runs/cats/trained.json"))
    metadata = read_head(Path("runs/cats/cats.safetensors")).metadata
    assert (metadata["ss_num_train_images"], metadata["ss_num_validation_images"]) == ("3", "3")
    (events,) = Path("runs/cats/logs").rglob("events.out.tfevents*")
    curves = read_curves(events.parent)
    assert [*curves["loss/validation/step_average"][0]] == [2, 4, 6]
    assert [*curves["loss/validation/epoch_average"][0]] == [2]  # the last one
    assert [name for name, _ in training_section("cats")["pictures"]] == ["Curves"]
