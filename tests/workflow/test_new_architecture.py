"""An architecture of musubi-tuner more is one row and an example; nothing else of ours changes."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from pathlib import Path

import fast_tuner
import named_weights
import yaml
from latentmake.config.architectures import MUSUBI
from latentmake.config.makers import File, Script
from project import ROOT, Project
from safetensors import safe_open

ENDINGS = (".py", ".yaml")
CAPTIONS = {"ant": "a red circle", "bee": "a blue square", "cat": "a green star"}
ROW = """
nova_2:
  like: _guide
  title: Nova 2
  suffix: nv2
  header: nova
  mark: \\bnova_blocks\\.0\\.
  latents: {name: nova_cache_latents.py, reads_controls: true}
  text:
    name: nova_cache_text_encoder_outputs.py
    files:
      - {flag: --qwen, key: text, kind: language model}
      - {flag: --glyphs, key: text.1, kind: T5}
    reads_controls: true
  training: {name: nova_train_network.py}
  network: networks.lora_nova
  tensors: [varlen_qwen_, glyphs_]
  versions:
    edit: {training: [--task, edit], controls: [1, 2]}
    draw: {training: [--task, draw], latents: [--task, draw]}
  pixels: 32
  settings: {discrete_flow_shift: 1.5}
"""
EXAMPLE = """
datasets:
  shapes: {path: data/shapes, fit: bucket, control_directory: data/controls}
models:
  tiny:
    architecture: nova_2
    task: edit
    vae: models/tiny/vae.safetensors
    text: [models/tiny/text.safetensors, models/tiny/glyphs.safetensors]
    dit: models/tiny/dit.safetensors
runs:
  tiny:
    datasets: [shapes]
    model: tiny
    resolutions: [64, 96]
    trainer: {kind: musubi, max_train_epochs: 1}
musubi_tuner: {path: musubi-tuner, venv: VENV}
"""


NOVA = MUSUBI["z_image"].model_copy(
    update={
        "suffix": "nv2",
        "header": "nova",
        "latents": Script("nova_cache_latents.py", (File("--vae", "vae"),), reads_controls=True),
        "text": Script(
            "nova_cache_text_encoder_outputs.py",
            (File("--qwen", "text"), File("--glyphs", "text.1")),
            reads_controls=True,
        ),
        "training": Script("nova_train_network.py", (File("--dit", "dit"),)),
        "network": "networks.lora_nova",
        "tensors": ("varlen_qwen_", "glyphs_"),
        "pixels": 32,
    }
)
"""Scripts of a trainer's folder with these names."""


def differing(folder: Path) -> set[str]:
    """Return the files of the package that are not those of this repository."""
    found = set()
    for path in (path for path in (folder / "scripts").rglob("*") if path.suffix in ENDINGS):
        name = path.relative_to(folder)
        if not filecmp.cmp(path, ROOT / name, shallow=False):
            found.add(str(name))
    return found


def add_row(project: Project) -> None:
    table = project / "scripts/latentmake/config/musubi.yaml"
    table.write_text(table.read_text() + ROW)
    assert differing(project.folder) == {"scripts/latentmake/config/musubi.yaml"}


def test_a_row_and_an_example_are_all_that_a_new_architecture_needs(tmp_path: Path) -> None:
    weights = {"text": "embedding", "glyphs": "glyphs", "dit": "nova_blocks.0.weight"}
    fast_tuner.write_weights(tmp_path / "tiny", vae="encoder", **weights)
    project = Project.make(tmp_path / "project", {}, tmp_path / "tiny")
    add_row(project)
    venv = fast_tuner.config("z_image")["musubi_tuner"]["venv"]
    project.config = yaml.safe_load(EXAMPLE.replace("VENV", venv))
    fast_tuner.install(project / "musubi-tuner", NOVA)
    fast_tuner.write_pictures(project / "data/shapes", CAPTIONS, (160, 96))
    controls = {**CAPTIONS, "bee_1": ""}
    fast_tuner.write_pictures(project / "data/controls", controls, (64, 64))

    project.run("train_tiny")
    caches = set(project.cache_files())
    assert caches == {
        f"cache/shapes/tiny/{size}/{name}_nv2{te}.safetensors"
        for size in (64, 96)
        for stem in CAPTIONS
        for name, te in ((f"{stem}_0160x0096", ""), (stem, "_te"))
    }
    with safe_open(project / "cache/shapes/tiny/96/ant_0160x0096_nv2.safetensors", "pt") as file:
        assert file.metadata()["architecture"] == "nova"
        assert file.get_slice("latents_1x2x4_float32").get_shape() == [16, 1, 2, 4]
    assert (project / "runs/tiny/tiny.safetensors").is_file()

    # One control: what the row says depends on it of its item, and nothing else.
    state = project.snapshot()
    fast_tuner.write_pictures(project / "data/controls", {"cat": ""}, (64, 96))
    project.run("caches_tiny")
    made = {name for name in caches if name.rpartition("/")[2].startswith("cat_")}
    assert project.changed(state).content == made
    assert project.run("caches_tiny").idle

    # What the row forbids is said in a line.
    project.configure(lambda values: values["models"]["tiny"].update(task="paint"))
    refused = project.run("-n", "caches_tiny", check=False)
    refused.one_line("paint is no task of Nova 2", "edit, draw")


def test_init_needs_no_code_for_a_new_architecture(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project", {})
    add_row(project)
    fast_tuner.install(project / "musubi-tuner", NOVA)
    fast_tuner.write_pictures(project / "shapes", CAPTIONS, (1100, 1000))
    qwen = named_weights.write_model("qwen_image", project / "models/tiny", Path())
    glyphs = {"shared.weight": (1472, 64), "encoder.block.0.layer.0.SelfAttention.q.weight": (1, 1)}
    named_weights.write(project / "models/tiny/text_encoders/glyphs.safetensors", glyphs)
    named_weights.write(qwen, {"nova_blocks.0.weight": (64, 64)})

    # The project's own copy of the package, which has the row.
    command = [sys.executable, "-m", "latentmake", "init", "shapes", "--model", "models/tiny"]
    environment = {**project.environment(), "PYTHONPATH": str(project / "scripts")}
    said = subprocess.run(
        command, cwd=project.folder, env=environment, check=True, capture_output=True, text=True
    )
    assert "models/tiny: Nova 2 draw" in said.stdout
    values = yaml.safe_load((project / "shapes.yaml").read_text())
    (model,) = values["models"].values()
    assert (model["architecture"], model["task"]) == ("nova_2", "draw")
    assert model["dit"] == str(qwen.relative_to(project.folder))
    assert [Path(place).stem for place in model["text"]] == ["qwen_2.5_vl_7b", "glyphs"]
    run = values["runs"]["shapes"]
    assert (run["resolutions"], run["trainer"]["kind"]) == ([1024], "musubi")
    project.run("-n", "train_shapes", "--configfile", "shapes.yaml")
