"""What is published, read and run by the real trainers: schemas, flags, and a whole script."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import publish_world
import pytest
import sdscripts_world
import world
from conftest import Find, Weights, output_of, said_by, write_wan_dit
from latentmake import backends
from latentmake.base.paths import System
from latentmake.config.datasets import Dataset
from latentmake.config.machines import ExternalProgram, Publish
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.plan.facts import Facts
from latentmake.plan.planner import make_plan
from latentmake.plan.remembered import facts_with
from latentmake.trainers.launched.installation import Installation
from latentmake.trainers.launched.publish import Names, Publication, publish
from latentmake.trainers.musubi.publish import MusubiPublication
from latentmake.trainers.sdscripts.backend import SdScriptsPublication
from order_world import carry_out
from project import ROOT
from safetensors import safe_open
from test_training_sdscripts import make_run

pytestmark = [pytest.mark.real_trainer, pytest.mark.usefixtures("own_folder")]


def facts(values: dict[str, Any]) -> Facts:
    return facts_with(parse(values), Memo(Path(".latentmake/memo.sqlite")), encoders=False)


def caption_in(cache: Path) -> str:
    """Return the caption that musubi-tuner notes in a cache of a text."""
    with safe_open(cache, framework="np") as file:
        return str(file.metadata()["caption1"])


def published(values: dict[str, Any]) -> None:
    """Publish the run without caches."""
    known = facts(values)
    backend = backends.of_run(known.config, "tiny")
    assert backend is not None
    backend.check_publication(known, "tiny")
    order = backend.plan_publication(known, "tiny")
    backends.of_order(order).publish(order, print)


def run_script(script: Path, program: Installation) -> None:
    """Run a published script with the Python of the trainers."""
    environment = program.environment()
    environment["PATH"] = f"{program.python.parent}:{environment['PATH']}"
    output_of("bash", script, **environment)


def test_musubi_tuner_makes_the_caches_of_a_published_folder_and_trains_on_them(
    trainer: Find, tiny_weights: Weights
) -> None:
    tuner = trainer("musubi-tuner", "wan_train_network.py")
    for number, (stem, caption) in enumerate([*world.CAPTIONS.items()][:2]):
        world.draw(Path(f"data/{stem}.{'tif' if number else 'png'}"), number, (64, 64))
        if not number:  # a captioner writes that of the other
            Path(f"data/{stem}.cap.txt").write_text(caption)
    weights = tiny_weights("wan")
    write_wan_dit(tuner, "dit.safetensors")
    values = {
        "datasets": {
            "shapes": {"path": "data", "captioner": "tiny", "caption_extension": ".cap.txt"}
        },
        "captioners": {"tiny": {"model": os.fspath(ROOT / "data/tiny-captioner")}},
        "models": {
            "wan": {
                "task": "t2v-1.3B",
                "vae": {"path": str(weights / "vae.safetensors")},
                "text": str(weights / "text.safetensors"),
                "dit": "dit.safetensors",
                "vae_dtype": "float32",
            }
        },
        "runs": {
            "tiny": {
                "datasets": ["shapes"],
                "model": "wan",
                "resolutions": [64],
                "trainer": {
                    "kind": "musubi",
                    "max_train_epochs": 1,
                    "network_dim": 2,
                    "mixed_precision": "no",
                    "max_data_loader_n_workers": 0,
                },
            }
        },
        "musubi_tuner": {"path": os.fspath(tuner.folder)},
        "publish": {"caches": False, "batch_size": 1, "num_workers": 1, "num_processes": 1},
    }
    for order in make_plan(facts(values), ["tiny"]).orders:
        if order.makes_captions:
            carry_out(order)
    published(values)
    place = Path("published/tiny")
    run_script(place / "train_tiny.sh", tuner)
    caches = place / "shapes_64_cache"
    names = {path.name for path in caches.glob("*.safetensors")}
    stems = [*world.CAPTIONS][:2]
    made = json.loads(Path(f"cache/shapes/captions/tiny/{stems[1]}.json").read_text())["text"]
    read = [caption_in(caches / f"{stem}_wan_te.safetensors") for stem in stems]
    assert read == [world.CAPTIONS[stems[0]], made]
    assert names == {
        f"{stem}_{kind}.safetensors" for stem in stems for kind in ("0064x0064_wan", "wan_te")
    }
    assert (place / "output/tiny.safetensors").stat().st_size > 1000
    times = {path.name: path.stat().st_mtime_ns for path in caches.glob("*.safetensors")}
    Path(f"data/{stems[0]}.cap.txt").write_text("another caption")
    published(values)
    left = {path.name for path in caches.glob("*.safetensors")}
    assert names - left == {f"{stems[0]}_wan_te.safetensors"}
    assert {name: (caches / name).stat().st_mtime_ns for name in left}.items() <= times.items()


def test_sd_scripts_makes_the_caches_of_a_published_folder_and_trains_on_them(
    trainer: Find,
) -> None:
    program = trainer("sd-scripts", "train_network.py")
    order = make_run(program, max_train_epochs=1, save_every_n_epochs=None).model_copy(
        update={
            "publish": Publish(caches=False, batch_size=2, num_processes=1),
            "program": ExternalProgram(path=os.fspath(program.folder)),
        }
    )
    shutil.rmtree("cache")
    publish(SdScriptsPublication(order), print)
    place = Path("published/cats")
    assert not list(place.rglob("*.npz"))
    run_script(place / "train_cats.sh", program)
    stems = ("ant", "bee", "cat")
    caches = {place / f"cats_64/{stem}_0064x0064_sd.npz" for stem in stems}
    assert {*place.rglob("*.npz")} == caches
    assert (place / "output/cats.safetensors").stat().st_size > 1000
    world.draw(Path("data/ant.png"), 7, (64, 64))
    publish(SdScriptsPublication(order), print)
    assert {*place.rglob("*.npz")} == caches - {place / "cats_64/ant_0064x0064_sd.npz"}


MUSUBI_DATASETS: dict[str, Any] = {
    "images": {"fit": "bucket", "bucket_no_upscale": True, "num_repeats": 2},
    "videos": {"target_frames": [1, 5], "frame_extraction": "uniform", "source_fps": 30},
    "control": {"control_directory": "control", "caption_extension": ".caption"},
}
SD_DATASET = {"path": "data", "fit": "bucket", "flip_aug": True, "alpha_mask": True}


def of_musubi(program: ExternalProgram) -> Iterator[Publication[Any]]:
    """Yield publications of a run with each attention."""
    datasets = {name: Dataset(path=name, **given) for name, given in MUSUBI_DATASETS.items()}
    for attention in ("sdpa", "flash_attn", "flash3", "xformers"):
        order = publish_world.order_of(
            datasets=datasets,
            model={"task": "i2v-A14B", "fp8_t5": True, "dit_high_noise": "high.safetensors"},
            trainer={"fp8_base": True, "fp8_scaled": True, "save_every_n_epochs": 2},
            program=program,
            publish=Publish(caches=False, attention=attention, batch_size=2, num_workers=2),
        )
        yield MusubiPublication(order)


def of_sd_scripts(program: ExternalProgram) -> Iterator[Publication[Any]]:
    """Yield publications of a run of each architecture."""
    for architecture in sdscripts_world.ENCODERS:
        order = sdscripts_world.order_of(
            architecture,
            datasets={"a": Dataset.model_validate(SD_DATASET)},
            trainer={"v_parameterization": architecture == "sd2"},
            program=program,
            publish=Publish(caches=False, batch_size=2),
        )
        yield SdScriptsPublication(order)


VALIDATE = {
    "musubi-tuner": """# preloaded
import sys, tomllib
from musubi_tuner.dataset.config_utils import ConfigSanitizer
for path in sys.argv[1:]:
    ConfigSanitizer().sanitize_user_config(tomllib.load(open(path, "rb")))
print("accepted", len(sys.argv) - 1)
""",
    "sd-scripts": """
# The class alone: what its module imports besides needs another transformers.
import argparse, ast, functools, logging, sys, tomllib, voluptuous
from typing import *
from voluptuous import Any, ExactSequence, MultipleInvalid, Object, Required, Schema
tree = ast.parse(open("library/config_util.py", encoding="utf-8").read())
tree.body = [node for node in tree.body if getattr(node, "name", "") == "ConfigSanitizer"]
exec(compile(tree, "config_util.py", "exec"))
for path in sys.argv[1:]:
    ConfigSanitizer(False, True, False, True).sanitize_user_config(tomllib.load(open(path, "rb")))
print("accepted", len(sys.argv) - 1)
""",
}


@pytest.mark.parametrize(
    ("name", "script", "publications"),
    [
        ("musubi-tuner", "wan_train_network.py", of_musubi),
        ("sd-scripts", "train_network.py", of_sd_scripts),
    ],
)
def test_a_schema_takes_every_toml_and_the_scripts_know_every_flag(
    tmp_path: Path, trainer: Find, name: str, script: str, publications: Callable[..., Any]
) -> None:
    program = trainer(name, script)
    tomls = []
    for number, publication in enumerate(publications(ExternalProgram(path=str(program.folder)))):
        order, found = publication.order, {each.what: each for each in publication.findings()}
        for what, finding in found.items():
            if what.startswith(("arguments", "dataset TOML", "attention")):
                assert finding.verdict == "ok", finding
        scripts = {call for call, _ in publication.calls(Names(order, "linux"))}
        assert {f"arguments of {each}" for each in scripts} <= found.keys()
        systems: tuple[System, ...] = ("linux", "windows")
        for system in systems:
            tomls.append(tmp_path / f"{number}_{system}.toml")
            tomls[-1].write_text(publication.dataset(Names(order, system)))
    assert said_by(program, VALIDATE[name], *tomls) == f"accepted {len(tomls)}"
