"""Every key of datasets and models, changed on a built run of musubi-tuner's caching scripts.

Qwen-Image-Edit, whose latents and text both depend on control images; the scripts are fast ones.
Keys of trainers, publications and machines are changed in test_every_key_musubi.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import every_key
import fast_tuner
import pytest
from every_key import Change, Key, nothing, refused
from latentmake.config.architectures import MUSUBI
from project import Project

ARCHITECTURE = "qwen_image_edit"
MODEL = "tiny"
TRAINER = "MusubiTrainer"
CAPTIONS = {
    "ant_1x": "a red {circle|disc}, big, left ||| bright;;;clear, red",
    "bee": "a blue square, small, right ||| dark;;;dim\nanother line",
}
LATENTS_AND_TEXT = frozenset({"latents", "text"})
BUCKET = "controls are resized to the picture's bucket, which the text encoder sees"


def make_dataset(project: Project) -> None:
    """Two pictures with captions, tags and control pictures."""
    data = project / "data"
    fast_tuner.write_pictures(data / "shapes", CAPTIONS, (160, 96))
    fast_tuner.write_pictures(data / "control", CAPTIONS, (96, 96))
    fast_tuner.write_pictures(data / "controls", {"bee": "", "ant_1x": ""}, (64, 96))
    for number, stem in enumerate(CAPTIONS):
        (data / f"shapes/{stem}.caption").write_text("other, words, here\n", encoding="utf-8")
        (data / f"shapes/{stem}.tags").write_text(f"tag{number}, more, tags\n", encoding="utf-8")
    listed = {f"{stem}.png": {"caption": "listed, and, more"} for stem in CAPTIONS}
    (data / "meta.json").write_text(json.dumps(listed), encoding="utf-8")
    shutil.copytree(data / "shapes", data / "same")


@pytest.fixture(scope="session")
def key_template(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A trained run. Not to be changed: copy it."""
    models = tmp_path_factory.mktemp("models")
    tensors = {
        "vae": "encoder",
        "text": "embedding",
        "dit": "transformer_blocks.0.img_mod.1.weight",
    }
    fast_tuner.write_weights(models / "tiny", **tensors)
    fast_tuner.write_weights(models / "others", first="x", **tensors)
    values = fast_tuner.config(
        ARCHITECTURE,
        task="edit-2509",
        vae={"path": "models/tiny/vae.safetensors"},
        text={"path": "models/tiny/text.safetensors"},
        dit="models/tiny/dit.safetensors",
    )
    values["datasets"]["shapes"] |= {
        "control_directory": "data/control",
        "tags_extension": ".tags",
        "captions": {"shuffle_caption": True},
    }
    values["runs"]["tiny"] |= {
        "resolutions": [64],
        "trainer": {"kind": "musubi", "max_train_epochs": 1},
    }
    project = Project.make(tmp_path_factory.mktemp("keys") / "project", values, models / "tiny")
    shutil.copytree(models / "others", project / "models/others")
    shutil.copytree(models / "tiny", project / "models/same")
    fast_tuner.install(project / "musubi-tuner", MUSUBI[ARCHITECTURE])
    make_dataset(project)
    project.run("train_tiny")
    return project


CHANGES: dict[Key, Change] = {
    **every_key.DATASETS,
    **every_key.VIDEOS,
    **every_key.CONTROLS,
    **every_key.LAYOUT_OF_MUSUBI,
    # -- datasets
    ("datasets", "fit"): Change("crop", makes=LATENTS_AND_TEXT, why=BUCKET),
    ("datasets", "bucket_no_upscale"): nothing(True, "no picture is smaller than its bucket"),
    ("datasets", "captions", "seed"): Change(7),
    ("datasets", "control_directory"): Change("data/controls"),
    ("datasets", "no_resize_control"): Change(True),
    ("datasets", "control_resolution"): Change(64),
    ("datasets", "target_frames"): refused([1], "video"),
    # -- models
    ("models", "vae", "path"): Change("models/others/vae.safetensors"),
    ("models", "text", "path"): Change("models/others/text.safetensors"),
    ("models", "text", "tokenizer", "path"): refused("models/same", "tokenizer"),
    ("models", "text", "max_length"): refused(20, "max_length"),
    ("models", "unet", "path"): refused("models/same", "`unet`"),
    ("models", "scheduler", "path"): refused("models/same", "scheduler"),
    ("models", "architecture"): refused("qwen_image", "edit-2509 is no task"),
    ("models", "task"): Change("edit-2511"),
    ("models", "dit", "path"): Change("models/others/dit.safetensors"),
    ("models", "dit_high_noise", "path"): refused("models/tiny/x.safetensors", "only for Wan 2.2"),
    ("models", "clip", "path"): refused("models/tiny/x.pth", "clip"),
    ("models", "image_encoder", "path"): refused("models/tiny/x.pth", "image_encoder"),
    ("models", "latents_arguments"): Change(["--disable_cudnn_backend"]),
    ("models", "text_arguments"): Change(["--fp8_vl"]),
    ("models", "fp8_t5"): refused(True, "fp8_t5"),
    ("models", "vae_cache_cpu"): refused(True, "vae_cache_cpu"),
    ("models", "encoder"): refused("latentmake", "encoder"),
    ("models", "dtype"): refused("float32", "dtype"),
    ("models", "vae_dtype"): refused("float32", "vae_dtype"),
}


def test_every_key_of_datasets_and_models_is_changed_here_or_it_is_said_where() -> None:
    sections = ("captioners", "datasets", "models")
    known = {key for key in every_key.keys(TRAINER) if key[0] in sections}
    # What else a text is made of is the same for every layout: test_every_key_musubi.py.
    known -= every_key.CAPTIONS.keys() - CHANGES.keys()
    assert CHANGES.keys() <= known
    assert {key for key in known - CHANGES.keys() if key[-1] not in every_key.ELSEWHERE} == set()


test_a_key_makes_what_it_shapes_stale_and_nothing_else = every_key.one_by_one(
    CHANGES, MODEL, TRAINER
)
test_facts_of_the_machine_make_nothing = every_key.together(CHANGES, MODEL)


def test_an_edit_of_a_file_makes_what_depends_on_it_and_nothing_else(
    key_template: Project, tmp_path: Path
) -> None:
    project = key_template.copy(tmp_path / "project")
    folder = "cache/shapes/tiny/64"
    latents = {x: f"{folder}/{x}_0160x0096_qie.safetensors" for x in CAPTIONS}
    texts = {x: f"{folder}/{x}_qie_te.safetensors" for x in CAPTIONS}
    bee, everything = {latents["bee"], texts["bee"]}, {*latents.values(), *texts.values()}

    def edit(path: Path) -> None:
        data = path.read_bytes()
        if path.suffix == ".safetensors":
            data = (project / "models/others" / path.name).read_bytes()
        elif path.suffix == ".txt":
            data = b"more, " + data
        else:
            data += b"\n# more"
        path.write_bytes(data)

    tuner = project / "musubi-tuner"
    for name, made in (
        ("data/shapes/bee.txt", {texts["bee"]}),
        ("data/control/bee.png", bee),
        ("data/shapes/bee.png", {latents["bee"]}),
        ("models/tiny/vae.safetensors", {*latents.values()}),
        ("models/tiny/text.safetensors", {*texts.values()}),
        (f"musubi-tuner/{fast_tuner.TEXT_MODULE}", {*texts.values()}),
        ("musubi-tuner/src/musubi_tuner/fast_common.py", everything),
        (f"musubi-tuner/{fast_tuner.OTHER_MODULE}", set()),
    ):
        before = project.snapshot()
        edit(project / name)
        if name.endswith(fast_tuner.TEXT_MODULE):
            words = ("recipe: musubi-tuner's digest ", " -> ", ": 2 texts of ")
            project.run("-n", "caches_tiny").one_line(*words)
            project.ask("status").one_line(*words)
            project.ask("explain", f"{texts['bee']}").one_line("made", "by musubi-tuner")
        project.run("caches_tiny")
        changes = project.changed(before)
        assert changes.content == made, name
        assert not (changes.added or changes.removed), name
        assert project.run("caches_tiny").idle, name
    assert len(fast_tuner.calls(tuner)) == 2 + 1 + 2 + 1 + 1 + 1 + 1 + 2
