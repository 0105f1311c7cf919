"""Every key of the configuration, changed on a built run of our own layout and trainer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import every_key
import pytest
import world
from every_key import Change, Key, nothing, refused
from PIL import Image
from project import Project

MODEL = "micro"
TRAINER = "SdTrainer"
SIZES = {"ant": (40, 20), "bee": (24, 40), "cat": (40, 36), "dog": (64, 32)}
CAPTIONS = {
    "ant": "a red {circle|disc}, big, left ||| bright;;;clear, red",
    "bee": "a blue square, small, right ||| dark;;;dim\nanother line",
    "cat": "a green circle, grey ground, plain ||| dull;;;flat",
    "dog": "a yellow square, black ground, wide ||| loud;;;warm",
}


def make_dataset(folder: Path) -> None:
    """Four pictures: one turned by its EXIF, one transparent, of several shapes."""
    for number, (stem, caption) in enumerate(CAPTIONS.items()):
        world.draw(folder / f"{stem}.png", number, SIZES[stem])
        (folder / f"{stem}.txt").write_text(f"{caption}\n", encoding="utf-8")
        (folder / f"{stem}.caption").write_text(f"{stem}, other, words\n", encoding="utf-8")
        (folder / f"{stem}.tags").write_text(f"tag{number}, more, {stem}\n", encoding="utf-8")
    turned = Image.open(folder / "bee.png")
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(folder / "bee.png", exif=exif)
    clear = Image.open(folder / "cat.png").convert("RGBA")
    clear.putalpha(100)
    clear.save(folder / "cat.png")
    listed = {f"{stem}.png": {"caption": f"listed {stem}, and, more"} for stem in CAPTIONS}
    (folder.parent / "meta.json").write_text(json.dumps(listed), encoding="utf-8")
    (folder.parent / "prompts.txt").write_text("a listed prompt\n", encoding="utf-8")
    (folder.parent / "accelerate.yaml").write_text("compute_environment: LOCAL_MACHINE\n"
        "distributed_type: 'NO'\nuse_cpu: true\nnum_processes: 1\n", encoding="utf-8")  # fmt: skip


def config() -> dict[str, Any]:
    values = world.config()
    values["datasets"]["shapes"] |= {
        "fit": "bucket",
        "bucket_reso_steps": 8,
        "tags_extension": ".tags",
        "captions": {"variants": 2, "shuffle_caption": True, "caption_tag_dropout_rate": 0.1},
    }
    values["datasets"]["more"] = {"path": "data/more"}
    values["models"]["micro"] = {
        "vae": {"path": "models/micro/vae"},
        "text": [{"path": "models/micro/text_encoder"}],
        "unet": {"path": "models/micro/unet"},
    }
    values["models"]["other"] = {**values["models"]["micro"], "posterior": "sample"}
    run = values["runs"]["tiny"]
    run["resolutions"] = [32]
    samples = {"num_inference_steps": 1, "guidance_scale": 1.5, "prompts": ["a drawn circle"]}
    run["trainer"] = {**world.training(), "checkpointing_steps": 1, "samples": samples}
    return values


def _other_models(project: Project) -> None:
    """Put other weights beside those of the model, and a copy of its own elsewhere."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(project / "models/micro", project / "models/same")
    shutil.copytree(project / "models/micro", project / "models/others")
    for path in (project / "models/others").rglob("*.safetensors"):
        tensors = {name: value * 1.01 for name, value in load_file(path).items()}
        save_file({name: value.to(torch.float32) for name, value in tensors.items()}, path)
    schedule = project / "models/others/scheduler/scheduler_config.json"
    settings = json.loads(schedule.read_bytes())
    schedule.write_text(json.dumps({**settings, "beta_end": 0.02}), encoding="utf-8")


@pytest.fixture(scope="session")
def key_template(tmp_path_factory: pytest.TempPathFactory, micro: Path) -> Project:
    """A trained run. Not to be changed: copy it."""
    project = Project.make(tmp_path_factory.mktemp("keys") / "project", config(), micro)
    make_dataset(project / "data/shapes")
    world.make_dataset(project / "data/more")
    shutil.copytree(project / "data/shapes", project / "data/same")
    _other_models(project)
    project.run("train_tiny")
    return project


def _without(name: str, **others: Any) -> Any:
    def change(section: dict[str, Any]) -> None:
        section.pop(name, None)
        section.update(others)

    return change


CHANGES: dict[Key, Change] = {
    **every_key.DATASETS,
    **every_key.CAPTIONS,
    **every_key.MACHINES,
    **every_key.VIDEOS,
    **every_key.CONTROLS,
    **every_key.WAN,
    **every_key.EXPORT,
    **every_key.PROMPT,
    **{
        ("runs", "generate", name): nothing(value, "of generate_{run} alone")
        for name, value in {**every_key.DRAWN, "images": 2}.items()
    },
    **{
        ("runs", "generate", name): refused(value, "draws pictures, not clips")
        for name, value in every_key.FILMED.items()
    },
    ("runs", "generate", "image"): refused("first.png", "draws from text only"),
    **{key: nothing(value, "of other trainers") for key, value in every_key.PUBLICATION.items()},
    # -- datasets
    ("datasets", "adopt_from"): nothing("data/same", "latentmake adopt alone reads it"),
    ("datasets", "bucket_reso_steps"): Change(16),
    ("datasets", "min_bucket_reso"): refused(64, "min_bucket_reso"),
    ("datasets", "max_bucket_reso"): refused(512, "max_bucket_reso"),
    ("datasets", "flip_aug"): refused(True, "flip_aug"),
    ("datasets", "alpha_mask"): refused(True, "alpha_mask"),
    ("datasets", "exif_rotation"): Change(False),
    ("datasets", "background"): Change("black"),
    ("datasets", "control_directory"): refused("data/more", "control_directory"),
    ("datasets", "target_frames"): refused([1], "video"),
    # -- models
    ("models", "vae", "path"): Change("models/others/vae"),
    ("models", "text", "path"): Change("models/others/text_encoder"),
    ("models", "text", "tokenizer", "path"): nothing("models/same/tokenizer", every_key.ONE),
    ("models", "text", "max_length"): Change(20),
    ("models", "unet", "path"): Change("models/others/unet"),
    ("models", "text_projection"): Change("new"),
    ("models", "scheduler", "path"): Change("models/others/scheduler"),
    ("models", "architecture"): Change(
        "sd1", makes=frozenset({"text"}), why="our latents are the same for all of them"
    ),
    ("models", "layout"): refused("sdscripts", "architecture"),
    ("models", "clip_skip"): Change(1, before={"architecture": "sd1"}, makes=frozenset({"text"})),
    ("models", "max_token_length"): Change(
        150, before={"architecture": "sd1"}, makes=frozenset({"text"})
    ),
    ("models", "apply_lg_attn_mask"): refused(True, "apply_lg_attn_mask"),
    ("models", "apply_t5_attn_mask"): refused(True, "apply_t5_attn_mask"),
    ("models", "task"): refused("t2v-1.3B", "only for `layout: plain`"),
    ("models", "checkpoint", "path"): nothing("models/x.safetensors", "all parts are named"),
    ("models", "dtype"): Change("bfloat16"),
    ("models", "vae_dtype"): Change("float16"),
    ("models", "text_dtype"): Change("float16"),
    ("models", "posterior"): Change("sample"),
    ("models", "posterior_seed"): Change(3, before={"posterior": "sample"}),
    ("models", "vae_tiling"): Change(True),
    ("models", "scaling_factor"): Change(0.5),
    ("models", "shift_factor"): Change(0.1),
    ("models", "ai_training", "latents"): Change(".img_sdvae"),
    ("models", "ai_training", "text"): Change([".txt_clipl"]),
    # -- runs
    ("runs", "datasets"): Change(
        ["shapes", "more"], makes=frozenset({"latents", "text"}), why="of the dataset that joins it"
    ),
    ("runs", "model"): Change("other", makes=frozenset({"latents", "text"}), why="under its name"),
    ("runs", "resolutions"): Change([32, 16]),
    ("runs", "validation", "items"): Change(
        2, before={"items": 1}, makes=frozenset({"manifest"}), why="no setting of the trainer"
    ),
    ("runs", "validation", "clips"): nothing(1, "of evaluate_{run} alone", before={"items": 1}),
    ("runs", "validation", "every"): Change(1, before={"items": 1}),
    # -- its trainer
    ("runs", "trainer", "kind"): refused("musubi", "unknown key"),
    ("runs", "trainer", "adapter"): Change(_without("rank", adapter="full")),
    ("runs", "trainer", "rank"): Change(3),
    ("runs", "trainer", "alpha"): Change(1.0),
    ("runs", "trainer", "target_modules"): Change(["to_q"]),
    ("runs", "trainer", "lora_dropout"): Change(0.5),
    ("runs", "trainer", "parts"): Change(
        ["norms"], before={"adapter": "parts", "parts": ["cross_attention"]}
    ),
    ("runs", "trainer", "reinitialize"): Change(["conv_out"], before={"adapter": "full"}),
    ("runs", "trainer", "steps"): Change(3),
    ("runs", "trainer", "epochs"): Change(_without("steps", epochs=1)),
    ("runs", "trainer", "optimizer"): Change("lion"),
    ("runs", "trainer", "optimizer_arguments"): Change({"betas": [0.8, 0.9]}),
    ("runs", "trainer", "learning_rate"): Change(1e-3),
    ("runs", "trainer", "lr_scheduler"): Change("cosine"),
    ("runs", "trainer", "lr_warmup_steps"): Change(1, before={"lr_scheduler": "linear"}),
    ("runs", "trainer", "lr_min_ratio"): Change(0.5, before={"lr_scheduler": "linear"}),
    ("runs", "trainer", "train_batch_size"): Change(1),
    ("runs", "trainer", "gradient_accumulation_steps"): Change(2),
    ("runs", "trainer", "max_grad_norm"): Change(0.1),
    ("runs", "trainer", "weight_decay"): Change(0.5),
    ("runs", "trainer", "prediction_type"): Change("v_prediction"),
    ("runs", "trainer", "zero_terminal_snr"): Change(
        True, before={"prediction_type": "v_prediction"}
    ),
    ("runs", "trainer", "snr_gamma"): Change(5.0),
    ("runs", "trainer", "noise_offset"): Change(0.1),
    ("runs", "trainer", "prior_loss_weight"): refused(0.5, "no dataset of the run has"),
    ("runs", "trainer", "ema_decay"): Change(0.5),
    ("runs", "trainer", "mixed_precision"): Change("bf16"),
    ("runs", "trainer", "gradient_checkpointing"): Change(True),
    ("runs", "trainer", "deterministic"): Change(True),
    ("runs", "trainer", "seed"): Change(5),
    ("runs", "trainer", "checkpointing_steps"): Change(2),
    ("runs", "trainer", "checkpoints_total_limit"): Change(1),
    ("runs", "trainer", "init_lora"): refused("data/none.safetensors", "init_lora"),
    ("runs", "trainer", "save_every_n_steps"): Change(1),
    ("runs", "trainer", "on_change"): Change("continue"),
    ("runs", "trainer", "save_every_n_epochs"): Change(1),
    ("runs", "trainer", "dataloader_num_workers"): Change(0),
    ("runs", "trainer", "accelerate_config"): Change("data/accelerate.yaml"),
    ("runs", "trainer", "samples", "prompts"): Change(["a drawn circle", "a blue disc"]),
    ("runs", "trainer", "samples", "negative_prompt"): Change("grey"),
    ("runs", "trainer", "samples", "every"): Change(1),
    ("runs", "trainer", "samples", "num_inference_steps"): Change(2),
    ("runs", "trainer", "samples", "guidance_scale"): Change(2.0),
    ("runs", "trainer", "samples", "resolution"): Change(16),
    ("runs", "trainer", "samples", "seed"): Change(9),
}
ELSEWHERE = {**every_key.ELSEWHERE, "torch_compile": "compiles for minutes: tests/gpu"}

test_every_key_is_changed_here_or_it_is_said_where = every_key.completeness(
    TRAINER, CHANGES, ELSEWHERE
)
test_a_key_makes_what_it_shapes_stale_and_nothing_else = every_key.one_by_one(
    CHANGES, MODEL, TRAINER
)
test_a_key_that_needs_another_is_asked_after_it = every_key.after_others(CHANGES, MODEL, TRAINER)
test_what_keys_shape_is_made_and_then_nothing_is_left = every_key.built(CHANGES, MODEL, TRAINER)
test_facts_of_the_machine_make_nothing = every_key.together(CHANGES, MODEL)
