"""Every key of the configuration, changed on a built run of Wan that musubi-tuner trains."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import every_key
import musubi_world
import pytest
import wan
import world
from every_key import Change, Key, nothing, refused
from project import Project

MODEL = "wan"
TRAINER = "MusubiTrainer"
CAPTIONS = {
    "ant": "a red {circle|disc}, big, left ||| bright;;;clear, red",
    "bee": "a blue square, small, right ||| dark;;;dim\nanother line",
}


def make_dataset(project: Project) -> None:
    """Two pictures with captions, tags and control pictures, and a video."""
    data = project / "data"
    for number, (stem, caption) in enumerate(CAPTIONS.items()):
        world.draw(data / f"shapes/{stem}.png", number, wan.SIZES[stem])
        world.draw(data / f"control/{stem}.png", number + 3, wan.SIZES[stem])
        (data / f"shapes/{stem}.txt").write_text(f"{caption}\n", encoding="utf-8")
        (data / f"shapes/{stem}.caption").write_text("other, words, here\n", encoding="utf-8")
        (data / f"shapes/{stem}.tags").write_text(f"tag{number}, more, tags\n", encoding="utf-8")
    listed = {f"{stem}.png": {"caption": "listed, and, more"} for stem in CAPTIONS}
    (data / "meta.json").write_text(json.dumps(listed), encoding="utf-8")
    (data / "accelerate.yaml").write_text("compute_environment: LOCAL_MACHINE\n", encoding="utf-8")
    shutil.copytree(data / "shapes", data / "same")
    shutil.copytree(data / "shapes", data / "more")
    world.draw(data / "more/ant.png", 5, wan.SIZES["ant"])


def _others(project: Project) -> None:
    """Put other weights beside those of the model, and a copy of its own elsewhere."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(project / "models/wan", project / "models/same")
    shutil.copytree(project / "models/wan", project / "models/others")
    for path in (project / "models/others").glob("*.pth"):
        tensors = torch.load(path, weights_only=True)
        torch.save({name: value * 1.01 for name, value in tensors.items()}, path)
    for path in (project / "models/others").glob("*.safetensors"):
        save_file({name: value * 2 for name, value in load_file(path).items()}, path)


@pytest.fixture(scope="session")
def key_template(tmp_path_factory: pytest.TempPathFactory, wan_model: Path) -> Project:
    """A trained run. Not to be changed: copy it."""
    values = wan.config()
    values["models"]["wan"]["vae"] = {"path": "models/wan/Wan2.1_VAE.pth"}
    values["models"]["wan"]["text"]["tokenizer"] = {"path": "models/wan/tokenizer"}
    values["runs"]["tiny"] |= {
        "resolutions": [96],
        "trainer": {"kind": "musubi", "max_train_epochs": 1, "network_dim": 4},
    }
    values["musubi_tuner"] = {"path": "musubi-tuner", "venv": str(Path(sys.prefix))}
    values["datasets"]["shapes"] |= {
        "tags_extension": ".tags",
        "captions": {"shuffle_caption": True},
    }
    values["datasets"]["more"] = {**values["datasets"]["shapes"], "path": "data/more"}
    values["models"]["other"] = {**values["models"]["wan"], "vae_cache_cpu": True}
    project = Project.make(tmp_path_factory.mktemp("keys") / "project", values, wan_model)
    musubi_world.stand_in(project / "musubi-tuner", own_venv=False)
    make_dataset(project)
    _others(project)
    project.run("train_tiny")
    return project


def _caching_scripts(project: Project) -> None:
    """Write the scripts that a publication checks; they come in the way of no other test."""
    for name in ("latents", "text_encoder_outputs"):
        script = project / f"musubi-tuner/wan_cache_{name}.py"
        script.write_text("import sys\nprint(sys.argv)\n", encoding="utf-8")


CHANGES: dict[Key, Change] = {
    **every_key.DATASETS,
    **every_key.CAPTIONS,
    **every_key.MACHINES,
    **every_key.VIDEOS,
    **every_key.CONTROLS,
    **every_key.EXPORT,
    **every_key.PROMPT,
    **every_key.GENERATION,
    **every_key.PICTURES,
    ("runs", "trainer", "samples", "frames"): Change(5),
    **every_key.LAYOUT_OF_MUSUBI,
    **every_key.publications(_caching_scripts),
    # -- datasets
    ("datasets", "control_directory"): Change(
        "data/control", makes=frozenset({"latents"}), why="no text of Wan depends on controls"
    ),
    ("datasets", "target_frames"): refused([1], "no video"),
    # -- models
    ("models", "vae", "path"): Change("models/others/Wan2.1_VAE.pth"),
    ("models", "text", "path"): Change(wan.umt5_file("models/others")),
    ("models", "text", "tokenizer", "path"): nothing("models/same/tokenizer", every_key.ONE),
    ("models", "text", "max_length"): Change(20),
    ("models", "unet", "path"): refused("models/wan", "`unet`"),
    ("models", "scheduler", "path"): refused("models/wan", "scheduler"),
    ("models", "architecture"): refused("sd1", "architecture"),
    ("models", "task"): Change(
        "t2v-14B", makes=frozenset({"weights"}), why="both are text to video"
    ),
    ("models", "dit", "path"): Change("models/others/wan2.1_t2v_1.3B_bf16.safetensors"),
    ("models", "dit_high_noise", "path"): refused("models/wan/x.safetensors", "only for Wan 2.2"),
    ("models", "clip", "path"): refused("models/wan/x.pth", "clip"),
    ("models", "fp8_t5"): Change(True),
    ("models", "vae_cache_cpu"): Change(True),
    ("models", "encoder"): refused("musubi", "wan_cache"),
    ("models", "image_encoder", "path"): refused("models/wan/x.pth", "image_encoder"),
    ("models", "latents_arguments"): refused(["--vae_tiling"], "encoder: musubi"),
    ("models", "text_arguments"): refused(["--device", "cpu"], "encoder: musubi"),
    ("models", "dtype"): Change("float32", makes=frozenset({"latents"}), why="text is bfloat16"),
    ("models", "vae_dtype"): Change("float32"),
    # -- runs
    ("runs", "datasets"): Change(
        ["shapes", "more"], makes=frozenset({"latents", "text"}), why="of the dataset that joins it"
    ),
    ("runs", "model"): Change("other", makes=frozenset({"latents", "text"}), why="under its name"),
    ("runs", "resolutions"): Change(
        [96, 64], makes=frozenset({"latents", "text"}), why="text lies beside each resolution"
    ),
    ("runs", "validation", "items"): refused(1, "validation"),
    ("runs", "validation", "clips"): refused(1, "validation"),
    ("runs", "validation", "every"): refused(1, "validation"),
    # -- its trainer
    ("runs", "trainer", "kind"): refused("sd", "unknown key"),
    ("runs", "trainer", "network_dim"): Change(3),
    ("runs", "trainer", "network_alpha"): Change(2.0),
    ("runs", "trainer", "network_module"): Change("networks.loha"),
    ("runs", "trainer", "network_args"): Change(["factor=4"]),
    ("runs", "trainer", "learning_rate"): Change(1e-3),
    ("runs", "trainer", "optimizer_type"): Change("lion"),
    ("runs", "trainer", "max_train_epochs"): Change(2),
    ("runs", "trainer", "max_train_steps"): Change(
        lambda section: (section.pop("max_train_epochs", None), section.update(max_train_steps=3))
    ),
    ("runs", "trainer", "batch_size"): Change(2),
    ("runs", "trainer", "gradient_accumulation_steps"): Change(2),
    ("runs", "trainer", "max_data_loader_n_workers"): Change(1),
    ("runs", "trainer", "mixed_precision"): Change("no"),
    ("runs", "trainer", "attention"): Change("sdpa"),
    ("runs", "trainer", "timestep_sampling"): Change("sigmoid"),
    ("runs", "trainer", "discrete_flow_shift"): Change(5.0),
    ("runs", "trainer", "timestep_boundary"): refused(900, "timestep_boundary"),
    ("runs", "trainer", "gradient_checkpointing"): nothing(False, "it computes the same"),
    ("runs", "trainer", "seed"): Change(5),
    ("runs", "trainer", "fp8_base"): Change(True),
    ("runs", "trainer", "fp8_scaled"): refused(True, "fp8_scaled"),
    ("runs", "trainer", "logging"): Change(False),
    ("runs", "trainer", "save_every_n_epochs"): Change(1),
    ("runs", "trainer", "arguments"): Change(["--blocks_to_swap", "2"]),
    ("runs", "trainer", "accelerate_config"): Change("data/accelerate.yaml"),
}
del CHANGES["musubi_tuner", "path"]
ELSEWHERE = {**every_key.ELSEWHERE, "path": "the place of musubi-tuner: the last test"}

test_every_key_is_changed_here_or_it_is_said_where = every_key.completeness(
    TRAINER, CHANGES, ELSEWHERE
)
test_a_key_makes_what_it_shapes_stale_and_nothing_else = every_key.one_by_one(
    CHANGES, MODEL, TRAINER
)
test_keys_of_a_publication_make_it_anew_and_nothing_else = every_key.published(CHANGES, MODEL)
test_facts_of_the_machine_make_nothing = every_key.together(CHANGES, MODEL)


def test_the_place_of_the_trainer_makes_nothing(key_template: Project, tmp_path: Path) -> None:
    project = key_template.copy(tmp_path / "project")
    (project / "musubi-tuner").rename(project / "moved")
    project.configure(lambda values: values["musubi_tuner"].update(path="moved"))
    result = project.run("train_tiny")
    assert result.idle, result.output
