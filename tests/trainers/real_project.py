"""A project of a real model, built by Snakemake or in this process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import real_models
import torch
from latentmake.backends import encoder_of, facts_of
from latentmake.config.root import parse
from latentmake.layouts.layout import layout_of
from latentmake.pages.plan_report import by_work, to_make
from latentmake.plan.orders import Order
from latentmake.plan.planner import make_plan
from latentmake.session import Session
from order_world import carry_out
from project import NOTHING, Changes, Project, Snapshot
from real_models import CAPTION, CONTROL, PICTURE, STEMS, World
from safetensors import safe_open
from safetensors.torch import load_file, save_file

TARGET = "caches_real"

# Loads all items as a training does, by the trainer's own classes; prints what a batch holds.
_LOAD = """# preloaded
import argparse, json, logging, sys
from multiprocessing import Value
logging.disable()
from musubi_tuner.dataset import config_utils
from musubi_tuner.dataset.config_utils import BlueprintGenerator, ConfigSanitizer
toml, suffix, wanted = sys.argv[1:]
given = argparse.Namespace(dataset_config=toml, num_timestep_buckets=None)
user = config_utils.load_user_config(toml)
blueprint = BlueprintGenerator(ConfigSanitizer()).generate(user, given, architecture=suffix)
group = config_utils.generate_dataset_group_by_blueprint(
    blueprint.dataset_group, training=True, num_timestep_buckets=None, shared_epoch=Value("i", 1))
group.set_current_epoch(1)
batches = []
for number in range(len(group)):
    batch = group[number]
    batches.append({name: list(value.shape) if hasattr(value, "shape") else len(value)
                    for name, value in batch.items() if value is not None})
print(json.dumps([group.num_train_items, batches]))
"""


class RealProject:
    """One world's project, and the virtual environment of its trainer."""

    def __init__(self, world: World, folder: Path, weights: Path, tuner: Path, venv: Path) -> None:
        self.world = world
        self.tuner, self.venv = tuner, venv
        self.project = Project.make(folder, real_models.config(world, tuner, venv))
        real_models.write(world, folder, weights)

    def plan(self) -> list[Order]:
        """Return the orders of a plan; nothing is written."""
        return self.session(read_only=True).plan.orders

    def planned(self) -> set[str]:
        """Return the stale targets of a plan."""
        return {path for order in self.plan() for path in order.paths}

    def foretold(self) -> float | None:
        """Return the bytes of latents that a build would write; None if they are unknown."""
        facts = facts_of(parse(self.project.config), read_only=True)
        plan = make_plan(facts, ["real"]).runs["real"]
        sums = by_work(facts, to_make(plan.parts))
        return sums["latents tiny"].size or None

    def build(self) -> bool:
        """Bring all caches up to date; return whether there was anything to do."""
        if self.world.builds:
            return not self.project.run(TARGET).idle
        session = self.session(read_only=False)
        if not session.plan.orders:
            return False
        session.begin()
        succeeded = False
        try:
            for order in session.plan.orders:
                carry_out(order, say=lambda _: None, threads=1, encoder=encoder_of(order))
            succeeded = True
        finally:
            session.end(succeeded=succeeded)
        return True

    def edit(self) -> set[str]:
        """Edit a caption, a picture, and a control or layer; return the caches that they shape."""
        data = self.project / "data"
        (data / f"{CAPTION}.txt").write_text("an edited caption")
        real_models.item(self.world, data, PICTURE, 7)
        latents, text = {PICTURE}, {CAPTION}
        for ending in self.world.controls[-1:]:
            path = self.project / f"controls/{CONTROL}{ending}.png"
            real_models.picture(path, 8, real_models.SIZES[CONTROL])
        if self.world.layers:
            real_models.picture(data / f"{CONTROL}_0.png", 9, real_models.SIZES[CONTROL], "RGBA")
            latents.add(CONTROL)
        (order, *_) = self.everything("latents")
        scripts = order.model_settings.spec.scripts
        if self.world.controls:
            latents |= {CONTROL} if scripts.latents.reads_controls else set()
            text |= {CONTROL} if scripts.text.reads_controls else set()
        return self.names("latents", latents) | self.names("text", text)

    def everything(self, kind: str) -> list[Order]:
        """Return orders of all items of a kind, as they would be without caches."""
        if not hasattr(self, "_all"):
            self._all = self.plan()
        return [order for order in self._all if order.kind == kind]

    def names(self, kind: str, stems: Sequence[str] | set[str]) -> set[str]:
        """Return the paths of some items' caches of a kind."""
        return {
            target.path
            for order in self.everything(kind)
            for item in order.items
            for target in item.targets
            if item.item.stem in stems
        }

    def changed(self, before: Snapshot) -> Changes:
        """Return what happened to the caches since a snapshot."""
        return self.project.changed(before)

    def load(self, folder: Path, suffix: str, items: int) -> list[dict[str, object]]:
        """Load all items by the trainer's own classes; return shapes of each batch."""
        dataset = self.project.config["datasets"]["shapes"]
        kind = "video" if self.world.video else "image"
        keys = {
            "resolution": "[64, 64]",
            "enable_bucket": "true",
            "batch_size": "1",
            "caption_extension": '".txt"',
            f"{kind}_directory": f'"{self.project / "data"}"',
            "cache_directory": f'"{folder}"',
        }
        if self.world.controls:
            keys["control_directory"] = f'"{self.project / "controls"}"'
        for name in dataset.keys() - {"path", "fit", "control_directory"}:
            keys[name] = json.dumps(dataset[name])
        toml = self.project / "load.toml"
        lines = [f"{name} = {value}" for name, value in keys.items()]
        toml.write_text("\n".join(["[[datasets]]", *lines]))
        done = subprocess.run(
            [self.venv / "bin/python", "-c", _LOAD, toml, suffix, str(items)],
            env={**os.environ, "PYTHONPATH": str(self.tuner / "src")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        count, batches = json.loads(done.stdout.splitlines()[-1])
        assert count == items
        return batches

    def session(self, *, read_only: bool) -> Session:
        """Return a session of Snakemake's main process; one that only asks writes nothing."""
        here = Path.cwd()
        assert here == self.project.folder, "the test works in the project's folder"
        return Session(self.project.config, targets=[TARGET], main=True, read_only=read_only)


def check(real: RealProject) -> None:
    """Build, edit and load a project: exactly what was edited changes, at every step."""
    model = real.everything("latents")[0].model_settings
    scripts = model.spec.scripts
    latents, text = (real.names(kind, set(STEMS)) for kind in ("latents", "text"))
    assert len(text) == len(STEMS)
    assert len(latents) == len(STEMS) * max(1, len(real.names("latents", {CAPTION})))

    foretold = real.foretold()
    assert real.build()
    written = sum((real.project / name).stat().st_size for name in latents)
    assert foretold is None or foretold == pytest.approx(written, rel=0.02), (foretold, written)
    assert {*real.project.cache_files()} == latents | text
    assert not real.build()
    assert not real.planned()

    before = real.project.snapshot()
    edited = real.edit()
    assert real.planned() == edited
    assert real.build()
    assert real.changed(before) == NOTHING._replace(content=edited)
    assert not real.build()

    folder = Path(layout_of(model.layout_name).folder("shapes", "tiny", "64"))
    batches = real.load(folder.resolve(), scripts.suffix, len(latents))
    assert len(batches) == len(latents)
    expected = {"latents", *(each.removeprefix("varlen_").rstrip("_") for each in scripts.tensors)}
    for batch in batches:
        assert expected <= batch.keys()
        for tensor in model.version.tensors:
            assert any(name.startswith(tensor.rstrip("_")) for name in batch), tensor
        controls = [each for each in batch if each.startswith("latents_control")]
        assert len(controls) == len(real.world.controls) * scripts.control_latents

    for names, script in ((latents, scripts.latents), (text, scripts.text)):
        for weights in filter(None, (model.weights(file.key) for file in script.files)):
            path = Path(weights.path or "")
            path = path / "model.safetensors" if path.is_dir() else path
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            assert real.planned() == names, path
            path.write_bytes(data)
            assert not real.planned()

    check_adoption(real, latents | text)


def check_adoption(real: RealProject, names: set[str]) -> None:
    """Adopt what the scripts made, without our stamps: nothing is left to encode."""
    project = real.project
    theirs: dict[str, dict[str, torch.Tensor]] = {}
    for name in names:
        place = project / f"theirs/{Path(name).name}"
        place.parent.mkdir(exist_ok=True)
        with safe_open(project / name, framework="pt") as file:
            metadata = {k: v for k, v in file.metadata().items() if not k.startswith("latentmake.")}
        theirs[name] = load_file(project / name)
        save_file(theirs[name], place, metadata)
    for folder in ("cache", ".latentmake"):
        shutil.rmtree(project / folder)
    project.configure(lambda values: values["datasets"]["shapes"].update(adopt_from="theirs"))
    assert real.planned() == names
    project.ask("adopt", "real").one_line(f"real: {len(names)} adopted, ")
    assert not real.planned()
    for name in names:
        ours = load_file(project / name)
        assert ours.keys() == theirs[name].keys()
        assert all(ours[key].equal(tensor) for key, tensor in theirs[name].items())
