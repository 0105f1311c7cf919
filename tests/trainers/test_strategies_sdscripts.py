"""Lumina, HunyuanImage 2.1 and Anima: sd-scripts' own classes encode, and train on all of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import world
from conftest import answer_of, sources
from latentmake import backends
from latentmake.config.architectures import SDSCRIPTS
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import ManifestOrder
from latentmake.plan.planner import make_plan
from latentmake.runs.findings import Finding
from latentmake.runs.rows import write_manifest
from latentmake.trainers.launched.order import Resume
from latentmake.trainers.sdscripts.backend import SdScripts
from latentmake.trainers.sdscripts.deploy import deploy
from latentmake.trainers.sdscripts.order import SdScriptsOrder, training_arguments
from order_world import carry_out
from safetensors.torch import save_file

pytestmark = pytest.mark.real_trainer

SIZES = {
    "ant": (200, 120),
    "bee": (64, 64),
    "sub/cat": (40, 90),
    "dog": (130, 70),
    "eel": (300, 300),
    "fox": (64, 64),
}
CAPTIONS = {
    "ant": "a red circle",
    "bee": "",
    "sub/cat": 'a sign that says "open" in a window',
    "dog": "a grey square, " * 30,
    "eel": "un cercle bleuâtre",
    "fox": "two triangles",
}
TEXT_FILES = {"lumina": ["text"], "hunyuan_image": ["text", "byt5"], "anima": ["text"]}
# A CPU takes long for convolutions in float16, which is HunyuanImage's dtype.
SIDES = {"lumina": [64, 128], "hunyuan_image": [64], "anima": [64, 128]}
CHANNELS = {"lumina": (16, 8), "hunyuan_image": (64, 32), "anima": (16, 8)}


class Project:
    """A project in the working directory, built without Snakemake."""

    def __init__(self, name: str, weights: Path, venv: Path, **trainer: Any) -> None:
        shutil.copytree(weights, "models")
        for number, (stem, caption) in enumerate(CAPTIONS.items()):
            world.draw(Path(f"data/{stem}.png"), number, SIZES[stem])
            Path(f"data/{stem}.txt").write_text(caption, encoding="utf-8")
        mark = SDSCRIPTS[name].marks[0]
        save_file({f"{mark}weight": torch.ones(2)}, "models/dit.safetensors")
        dataset = {"path": "data", "fit": "bucket", "min_bucket_reso": 64, "flip_aug": True}
        self.values: dict[str, Any] = {
            "datasets": {"shapes": {**dataset, "empty_caption": "allow"}},
            "models": {
                "tiny": {
                    "architecture": name,
                    "vae": "models/vae.safetensors",
                    "text": [f"models/{each}.safetensors" for each in TEXT_FILES[name]],
                    "checkpoint": "models/dit.safetensors",
                }
            },
            "runs": {
                "tiny": {
                    "datasets": ["shapes"],
                    "model": "tiny",
                    "resolutions": SIDES[name],
                    "trainer": {"kind": "sdscripts", "train_batch_size": 2, **trainer},
                }
            },
            "sd_scripts": {"path": os.fspath(sources("sd-scripts")), "venv": os.fspath(venv)},
        }

    def facts(self) -> Facts:
        memo = Memo(Path(".latentmake/memo.sqlite"))
        return Facts(parse(self.values), memo, program_digest=backends.program_digest)

    def build(self) -> set[str]:
        """Bring the caches up to date; return what was stale, by the ends of the names."""
        plan = make_plan(self.facts(), ["tiny"])
        made = set()
        for order in plan.orders:
            carry_out(order, say=print, encoder=backends.encoder_of(order))
            made |= {path.removeprefix("cache/shapes/tiny/") for path in order.paths}
        place = plan.runs["tiny"].manifest_order
        if place is not None:
            receipts = [order.receipt for order in plan.orders]
            write_manifest(ManifestOrder.read(place), receipts, Path("runs/tiny"), print)
        return made


def expected(name: str, stem: str) -> tuple[set[str], set[str]]:
    """Return the latents and the texts of an item."""
    ending = {"lumina": "lumina", "hunyuan_image": "hi", "anima": "anima"}[name]
    width, height = SIZES[stem]
    latents = {f"{side}/{stem}_{width:04d}x{height:04d}_{ending}.npz" for side in SIDES[name]}
    return latents, {f"text/{stem}_{ending}_te.npz"}


@pytest.fixture
def project(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forked_venv: Path,
    tiny_weights: Callable[[str], Path],
) -> Project:
    monkeypatch.chdir(tmp_path)
    sources("sd-scripts")
    return Project(request.param, tiny_weights(request.param), forked_venv)


@pytest.mark.parametrize("project", TEXT_FILES, indirect=True)
def test_what_is_stale_is_encoded_and_its_own_dataset_loads_all(project: Project) -> None:
    name = project.values["models"]["tiny"]["architecture"]
    every = [expected(name, stem) for stem in SIZES]
    all_latents = set().union(*(latents for latents, _ in every))
    all_texts = set().union(*(texts for _, texts in every))
    assert project.build() == all_latents | all_texts
    assert project.build() == set()
    before = {path: path.read_bytes() for path in Path("cache").rglob("*.npz")}

    Path("data/ant.txt").write_text("a purple circle")
    assert project.build() == expected(name, "ant")[1]
    world.draw(Path("data/sub/cat.png"), 77, SIZES["sub/cat"])
    assert project.build() == expected(name, "sub/cat")[0]
    changed = {path for path, data in before.items() if path.read_bytes() != data}
    assert {str(path)[len("cache/shapes/tiny/") :] for path in changed} == {
        *expected(name, "ant")[1],
        *expected(name, "sub/cat")[0],
    }
    assert project.build() == set()
    assert {each.verdict for each in findings(project)} <= {"ok", "warning"}
    loaded(project, name)
    made_by_a_training(project, name)
    with_several_texts(project)


def findings(project: Project) -> list[Finding]:
    """Return the checklist of the run."""
    backend, facts = SdScripts(), project.facts()
    order = SdScriptsOrder.of_run(facts.config, "tiny")
    found = [*backend.data_findings(order), *backend.preflight(order, facts.memo, quick=True)]
    assert {"sd-scripts", "arguments", "images and caches"} <= {each.what for each in found}
    return found


def load(project: Project, *mode: str) -> dict[str, Any]:
    """Let sd-scripts' own dataset load each batch, as its training script does."""
    order = SdScriptsOrder.of_run(parse(project.values), "tiny")
    deploy(order)
    if mode:
        for path in Path("runs/tiny/sdscripts").rglob("*.npz"):
            path.unlink()
    Path("arguments.json").write_text(
        json.dumps(training_arguments(order, order.places, "sdpa", Resume()))
    )
    python = Path(project.values["sd_scripts"]["venv"], "bin/python")
    script = Path(__file__).with_name("sdscripts_dataset.py")
    command = [python, script, order.script, Path("arguments.json").absolute(), *mode]
    found: dict[str, Any] = answer_of(*command, cwd=sources("sd-scripts"))
    return found


def loaded(project: Project, name: str) -> None:
    said = load(project)
    number = len(SIDES[name])
    assert said["accepted"] == number * len(SIZES)
    texts = {stem: Path(f"data/{stem}.txt").read_text(encoding="utf-8") for stem in SIZES}
    assert said["captions"] == sorted(number * [text.strip() for text in texts.values()])
    channels, side = CHANNELS[name]
    assert all(shape[1] == channels for shape in said["latents"])
    assert max(shape[0] for shape in said["latents"]) == 2
    assert {each // side for each in SIDES[name]} <= {shape[2] for shape in said["latents"]}


def made_by_a_training(project: Project, name: str) -> None:
    """Compare the caches to those that the training script would make, one item at a time."""
    arguments = ["--vae_batch_size", "1", "--text_encoder_batch_size", "1"]
    project.values["runs"]["tiny"]["trainer"]["arguments"] = arguments
    load(project, "make")
    compared = set()
    for path in Path("runs/tiny/sdscripts").rglob("*.npz"):
        block, *parts = path.relative_to("runs/tiny/sdscripts").parts
        text = path.name.endswith("_te.npz")
        part = "text" if text else block.removeprefix("shapes_")
        with np.load(path) as theirs, np.load(Path("cache/shapes/tiny", part, *parts)) as ours:
            assert {*theirs.files} == {*ours.files}
            for array in theirs.files:
                one, other = theirs[array], ours[array]
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
                # A sample of the posterior is another one each time.
                if not (SDSCRIPTS[name].samples and array.startswith("latents")):
                    assert np.array_equal(one, other), (path, array)
                    compared.add(array if text else array.partition("_")[0])
    assert {"crop", "original"} <= compared and len(compared) > 4


def with_several_texts(project: Project) -> None:
    """Train on two texts of each item, some of them dropped."""
    making = {"variants": 2, "caption_separator": " ", "shuffle_caption": True}
    making["caption_dropout_rate"] = 0.5
    project.values["datasets"]["shapes"]["captions"] = making
    assert {path.partition("/")[0] for path in project.build()} <= {"text", "text.1"}
    said = load(project)
    blocks = len(project.values["runs"]["tiny"]["resolutions"])
    assert said["accepted"] == len(said["captions"]) == 2 * blocks * len(SIZES)
    assert said["captions"].count("") > 2 * blocks
    assert project.build() == set()
