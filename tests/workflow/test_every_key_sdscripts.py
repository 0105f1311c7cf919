"""Every key of the configuration, changed on a built run of SDXL that sd-scripts trains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import every_key
import pytest
import sdscripts
import text_world
from every_key import Change, Key, nothing, refused
from PIL import Image
from project import Project
from safetensors.torch import load_file, save_file

MODEL = "tiny"
TRAINER = "SdScriptsTrainer"
CAPTIONS = {
    "ant": "a red {circle|disc} big, left ||| bright;;;clear, red",
    "bee": "a blue square small, right ||| dark;;;dim\nanother line",
    "sub/cat": "a green circle grey ground, plain ||| dull;;;flat",
}


def make_dataset(project: Project) -> None:
    """Three pictures, one of them transparent, with captions and tags."""
    folder = project / "data/shapes"
    for stem in sdscripts.CAPTIONS.keys() - CAPTIONS.keys():
        for ending in (".png", ".txt"):
            (folder / f"{stem}{ending}").unlink()
    for number, (stem, caption) in enumerate(CAPTIONS.items()):
        (folder / f"{stem}.txt").write_text(f"{caption}\n", encoding="utf-8")
        (folder / f"{stem}.caption").write_text("other, words, here\n", encoding="utf-8")
        (folder / f"{stem}.tags").write_text(f"tag{number}, more, tags\n", encoding="utf-8")
    clear = Image.open(folder / "bee.png").convert("RGBA")
    clear.putalpha(100)
    clear.save(folder / "bee.png")
    listed = {f"{stem}.png": {"caption": "listed, and, more"} for stem in CAPTIONS}
    (folder.parent / "meta.json").write_text(json.dumps(listed), encoding="utf-8")
    shutil.copytree(folder, folder.parent / "same")
    shutil.copytree(folder, folder.parent / "more")
    (folder.parent / "more/ant.png").write_bytes((folder / "bee.png").read_bytes())
    (folder.parent / "accelerate.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\n", encoding="utf-8"
    )


def _others(project: Project) -> None:
    """Put other weights beside those of the model, and a copy of its own elsewhere."""
    shutil.copytree(project / "models/micro", project / "models/same")
    shutil.copytree(project / "models/clip", project / "models/others")
    shutil.copytree(project / "models/micro/vae", project / "models/others/vae")
    for path in (project / "models/others").rglob("*.safetensors"):
        save_file({name: value * 1.01 for name, value in load_file(path).items()}, path)


@pytest.fixture(scope="session")
def key_template(tmp_path_factory: pytest.TempPathFactory, micro: Path) -> Project:
    """A trained run. Not to be changed: copy it."""
    texts = tmp_path_factory.mktemp("texts")
    text_world.make_texts(texts)
    project = sdscripts.make_xl(tmp_path_factory.mktemp("keys") / "project", micro, texts)
    for kind in ("clip", "big"):
        shutil.copytree(texts / kind, project / "models" / kind)
    make_dataset(project)
    _others(project)
    program = sdscripts.with_trainer(project, script="sdxl_train_network")
    code = (program / "sdxl_train_network.py").read_text(encoding="utf-8")
    whole = code.replace("assert args.network_train_unet_only or not CACHED", "pass")
    assert whole != code
    (program / "sdxl_train.py").write_text(whole, encoding="utf-8")

    base = load_file(project / "models/base.safetensors")
    changed = {name: value * 2 + 1 for name, value in base.items()}
    save_file(changed, project / "models/other.safetensors")

    def rich(values: dict[str, Any]) -> None:
        values["datasets"]["shapes"]["tags_extension"] = ".tags"
        values["datasets"]["more"] = {**values["datasets"]["shapes"], "path": "data/more"}
        model = values["models"]["tiny"]
        model["text"] = [{"path": f"models/{kind}/text_encoder"} for kind in ("clip", "big")]
        model["vae"] = {"path": "models/micro/vae"}
        values["models"]["other"] = {**model, "posterior": "sample"}
        values["runs"]["tiny"]["resolutions"] = [128]

    project.configure(rich)
    project.run("train_tiny")
    return project


CHANGES: dict[Key, Change] = {
    **every_key.DATASETS,
    **every_key.CAPTIONS,
    **every_key.MACHINES,
    **every_key.VIDEOS,
    **every_key.CONTROLS,
    **every_key.WAN,
    **every_key.EXPORT,
    **every_key.PROMPT,
    **every_key.GENERATION,
    **every_key.PICTURES,
    **every_key.publications(),
    # -- datasets
    ("datasets", "flat"): Change(
        True, makes=frozenset({"latents", "text"}), why="those of the image in a sub-folder go"
    ),
    ("datasets", "captions", "caption_separator"): Change("/"),
    ("datasets", "captions", "shuffle_caption"): Change(
        lambda section: section.update(shuffle_caption=False, enable_wildcard=True)
    ),
    ("datasets", "bucket_reso_steps"): Change(64),
    ("datasets", "min_bucket_reso"): Change(128),
    ("datasets", "max_bucket_reso"): Change(128),
    ("datasets", "flip_aug"): Change(True),
    ("datasets", "alpha_mask"): Change(True),
    ("datasets", "exif_rotation"): refused(False, "exif_rotation"),
    ("datasets", "background"): refused("black", "background"),
    ("datasets", "control_directory"): refused("data/more", "control"),
    ("datasets", "target_frames"): refused([1], "video"),
    # -- models
    ("models", "vae", "path"): Change("models/others/vae"),
    ("models", "text", "path"): Change("models/others/text_encoder"),
    ("models", "text", "tokenizer", "path"): nothing("models/same/tokenizer", every_key.ONE),
    ("models", "text", "max_length"): refused(20, "max_token_length"),
    ("models", "unet", "path"): refused("models/micro/unet", "only for `layout: plain`"),
    ("models", "text_projection"): refused("new", "only for `layout: plain`"),
    ("models", "scheduler", "path"): refused("models/micro/scheduler", "only for `layout: plain`"),
    ("models", "architecture"): refused("sd1", "text encoders"),
    ("models", "layout"): refused("plain", "layout sdscripts"),
    ("models", "clip_skip"): refused(1, "clip_skip"),
    ("models", "max_token_length"): Change(150),
    ("models", "apply_lg_attn_mask"): refused(True, "apply_lg_attn_mask"),
    ("models", "apply_t5_attn_mask"): refused(True, "apply_t5_attn_mask"),
    ("models", "task"): refused("t2v-1.3B", "`task` is only for Wan"),
    ("models", "checkpoint", "path"): Change("models/other.safetensors"),
    ("models", "dtype"): Change("float16"),
    ("models", "vae_dtype"): Change("float16"),
    ("models", "text_dtype"): Change("float16"),
    ("models", "posterior"): Change("sample"),
    ("models", "posterior_seed"): Change(3, before={"posterior": "sample"}),
    ("models", "vae_tiling"): Change(True),
    ("models", "scaling_factor"): refused(0.5, "only for `layout: plain`"),
    ("models", "shift_factor"): refused(0.1, "only for `layout: plain`"),
    ("models", "ai_training", "latents"): refused(".img_sdxl", "ai_training"),
    ("models", "ai_training", "text"): refused([".a", ".b"], "ai_training"),
    # -- runs
    ("runs", "datasets"): Change(
        ["shapes", "more"], makes=frozenset({"latents", "text"}), why="of the dataset that joins it"
    ),
    ("runs", "model"): Change("other", makes=frozenset({"latents", "text"}), why="under its name"),
    ("runs", "resolutions"): Change([128, 64]),
    ("runs", "validation", "items"): Change(
        1, makes=frozenset({"manifest"}), why="no setting of the trainer"
    ),
    ("runs", "validation", "clips"): refused(1, "draws no held-out items", before={"items": 1}),
    ("runs", "validation", "every"): Change(2, before={"items": 1}),
    # -- its trainer
    ("runs", "trainer", "kind"): refused("sd", "unknown key"),
    ("runs", "trainer", "script"): Change("sdxl_train"),
    ("runs", "trainer", "network_dim"): Change(3),
    ("runs", "trainer", "network_alpha"): Change(2.0),
    ("runs", "trainer", "network_module"): Change("networks.dylora"),
    ("runs", "trainer", "network_args"): Change(["conv_dim=4"]),
    ("runs", "trainer", "v_parameterization"): Change(True),
    ("runs", "trainer", "zero_terminal_snr"): Change(True, before={"v_parameterization": True}),
    ("runs", "trainer", "network_train_unet_only"): Change(True),
    ("runs", "trainer", "learning_rate"): Change(1e-3),
    ("runs", "trainer", "optimizer_type"): Change("Lion"),
    ("runs", "trainer", "lr_scheduler"): Change("cosine"),
    ("runs", "trainer", "max_train_epochs"): Change(2),
    ("runs", "trainer", "max_train_steps"): Change(
        lambda section: (section.pop("max_train_epochs", None), section.update(max_train_steps=3))
    ),
    ("runs", "trainer", "train_batch_size"): Change(2),
    ("runs", "trainer", "gradient_accumulation_steps"): Change(2),
    ("runs", "trainer", "max_data_loader_n_workers"): Change(0),
    ("runs", "trainer", "mixed_precision"): Change("fp16"),
    ("runs", "trainer", "gradient_checkpointing"): Change(False),
    ("runs", "trainer", "attention"): Change("mem_eff_attn"),
    ("runs", "trainer", "torch_compile"): Change(True),
    ("runs", "trainer", "dynamo_backend"): Change("eager", before={"torch_compile": True}),
    ("runs", "trainer", "zero_stage"): refused(1, "deepspeed"),
    ("runs", "trainer", "prior_loss_weight"): refused(0.5, "no dataset of the run has"),
    ("runs", "trainer", "deepspeed"): refused(True, "lacks deepspeed"),
    ("runs", "trainer", "seed"): Change(5),
    ("runs", "trainer", "save_every_n_epochs"): Change(1),
    ("runs", "trainer", "logging"): Change(False),
    ("runs", "trainer", "arguments"): Change(["--masked_loss"]),
    ("runs", "trainer", "accelerate_config"): Change("data/accelerate.yaml"),
}

test_every_key_is_changed_here_or_it_is_said_where = every_key.completeness(
    TRAINER, CHANGES, every_key.ELSEWHERE
)
test_a_key_makes_what_it_shapes_stale_and_nothing_else = every_key.one_by_one(
    CHANGES, MODEL, TRAINER
)
test_a_key_that_needs_another_is_asked_after_it = every_key.after_others(CHANGES, MODEL, TRAINER)
test_keys_of_a_publication_make_it_anew_and_nothing_else = every_key.published(CHANGES, MODEL)
test_facts_of_the_machine_make_nothing = every_key.together(CHANGES, MODEL)
