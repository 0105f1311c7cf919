"""A run of each of musubi-tuner's architectures: items, and caches as its own scripts write them.

Names of tensors and their shapes are those of musubi-tuner's dataset/cache_io.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from latentmake.base import digest
from latentmake.config.architectures import MUSUBI
from latentmake.config.datasets import Dataset
from latentmake.config.external_trainers import MusubiTrainer
from latentmake.config.machines import ExternalProgram, Publish
from latentmake.config.models import Model
from latentmake.trainers.launched.order import with_defaults
from latentmake.trainers.musubi.order import MusubiOrder
from PIL import Image
from safetensors.torch import save_file

RUN = "cats"
COLOURS = {"red": (250, 10, 10), "blue": (10, 10, 250)}
IMAGE = (80, 64)
RESOLUTION = (64, 64)
CLIP_FRAMES = 37
_BUCKET = (64, 64)  # (width, height) of an image of 80 x 64 without buckets
_WIDE = (32, 64)  # of a control, (height, width) in pixels

Tensors = dict[str, torch.Tensor]
ROWS = MUSUBI
VERSIONS = [(name, task) for name, scripts in ROWS.items() for task in scripts.versions]
# A name of a tensor that the DiT's file has, as its class names it.
DIT_NAMES = {
    "wan": "blocks.0.cross_attn.k.weight",
    "qwen_image": "transformer_blocks.0.img_mod.1.weight",
    "qwen_image_edit": "model.diffusion_model.transformer_blocks.0.img_mod.1.weight",
    "qwen_image_layered": "transformer_blocks.0.img_mod.1.weight",
    "z_image": "noise_refiner.0.attention.to_q.weight",
    "flux_2_dev": "double_stream_modulation_img.lin.weight",
    "flux_2_klein_4b": "double_stream_modulation_img.lin.weight",
    "flux_2_klein_9b": "double_stream_modulation_img.lin.weight",
    "flux_kontext": "double_blocks.0.img_mod.lin.weight",
    "hunyuan_video": "single_blocks.0.modulation.linear.weight",
    "hunyuan_video_1_5": "byt5_in.fc1.weight",
    "framepack": "clean_x_embedder.proj.weight",
    "kandinsky5": "visual_transformer_blocks.0.feed_forward.in_layer.weight",
    "krea2": "txtfusion.projector.weight",
    "ideogram4": "layers.0.attention.qkv.weight",
    "hidream_o1": "model.final_layer2.linear.weight",
}
# A name of a tensor of each kind of encoder.
ENCODER_NAMES = {
    **dict.fromkeys(("VAE", "Wan VAE"), "encoder.mid.block_1.conv1.weight"),
    "T5": "encoder.block.0.layer.0.SelfAttention.q.weight",
    "CLIP text encoder": "text_model.encoder.layers.0.mlp.fc1.weight",
    "image encoder": "vision_model.encoder.layers.0.mlp.fc1.weight",
    "language model": "model.layers.0.self_attn.q_proj.weight",
}
DIT_FURTHER = {
    "ideogram4": "llm_cond_proj.weight",
    "hunyuan_video_1_5": "double_blocks.0.img_attn_qkv.weight",
}


# Tensors by the suffix of cache files: name -> sides. F are frames, H and W the sides of the bucket
# and h and w those of a control in latents, N is a control's number. A name ends with its dtype.
_USUAL = {"latents_FxHxW_bfloat16": "16 F H W"}
_FLAT = {"latents_FxHxW_bfloat16": "16 H W"}
_FLUX_2 = ("f2d", "f2k4b", "f2k9b")
LATENTS: Mapping[str, dict[str, str]] = {
    **dict.fromkeys(("wan", "hv", "kr2", "qi", "qie"), _USUAL),
    **{key: {"latents_HxW_bfloat16": "128 H W"} for key in _FLUX_2},
    "qil": {"latents_3xHxW_bfloat16": "16 3 H W"},
    "zi": _FLAT,
    "fk": _FLAT | {"latents_control_1xhxw_bfloat16": "16 h w"},
    "hv15": {"latents_FxHxW_bfloat16": "32 F H W"},
    "k5": _USUAL | {"latents_image_2xHxW_bfloat16": "16 2 H W"},
    "i4": {"latents_FxHxW_bfloat16": "128 H W"},
    "ho1": {"latents_FxHxW_bfloat16": "H W 3072"},
    "fp": {
        **_USUAL,
        "image_embeddings_bfloat16": "729 1152",
        "latents_clean_FxHxW_bfloat16": "16 2 H W",
        "latents_clean_2x_FxHxW_bfloat16": "16 2 H W",
        "latents_clean_4x_FxHxW_bfloat16": "16 16 H W",
        "clean_latent_indices_int64": "2",
        "clean_latent_2x_indices_int64": "2",
        "clean_latent_4x_indices_int64": "16",
        "latent_indices_int64": "F",
    },
}
OF_A_CONTROL: Mapping[str, dict[str, str]] = {
    **{key: {"latents_control_N_1xhxw_bfloat16": "16 1 h w"} for key in ("qi", "qie")},
    **{key: {"latents_control_N_hxw_bfloat16": "128 h w"} for key in _FLUX_2},
    "ho1": {"latents_control_N_hxw_bfloat16": "h w 3072"},
    "wan": {"latents_control_FxHxW_bfloat16": "16 F H W"},
}
OF_A_PICTURE: Mapping[str, dict[str, str]] = {  # which a clip begins with
    "wan": {"latents_image_FxHxW_bfloat16": "20 F H W"},
    "hv15": {"latents_image_FxHxW_bfloat16": "33 F H W", "siglip_float16": "729 1152"},
}
TEXTS: Mapping[str, dict[str, str]] = {
    **{key: {"varlen_vl_embed_bfloat16": "3 32"} for key in ("qi", "qie", "qil")},
    **{key: {"ctx_vec_bfloat16": "8 32"} for key in _FLUX_2},
    "wan": {"varlen_t5_bfloat16": "3 32"},
    "zi": {"varlen_llm_embed_bfloat16": "3 32"},
    "fk": {"t5_vec_bfloat16": "8 32", "clip_l_pooler_bfloat16": "16"},
    "hv": {"llm_float16": "8 32", "llm_mask": "8", "clipL_float16": "16"},
    "hv15": {"varlen_vl_embed_bfloat16": "3 32", "varlen_byt5_embed_bfloat16": "2 16"},
    "fp": {
        "llama_vec_float16": "8 32",
        "llama_attention_mask": "8",
        "clip_l_pooler_float16": "16",
    },
    "k5": {"text_embeds_bfloat16": "8 32", "pooled_embed_bfloat16": "16", "attention_mask": "8"},
    "kr2": {"varlen_krea2_vl_embed_bfloat16": "3 2 32"},
    "i4": {"varlen_i4_llm_features_float32": "3 32"},
    "ho1": {"varlen_input_ids_int64": "3"},
}
_DTYPES = {"llm_mask": torch.int64, "llama_attention_mask": torch.bool}
_DTYPES |= {"attention_mask": torch.bool, "clip_bfloat16": torch.float16}


def _ones(table: Mapping[str, str], **values: int) -> Tensors:
    """Return a table's tensors; letters in its names and sides stand for values."""
    found = {}
    for name, sides in table.items():
        named = re.sub("[FHWNhw]", lambda letter: str(values[letter[0]]), name)
        dtype = _DTYPES.get(name) or getattr(torch, name.rpartition("_")[2])
        shape = [int(values.get(side, side)) for side in sides.split()]
        found[named] = torch.ones(shape, dtype=dtype)
    return found


def latents_of(name: str, task: str, *, controls: int, video: bool) -> Tensors:
    """Return the tensors of an image's, or of a clip's latents."""
    suffix, pixels = ROWS[name].suffix, ROWS[name].pixels
    frames = 9 if suffix == "fp" else (CLIP_FRAMES - 1) // 4 + 1
    values = {"F": frames if video else 1, "H": _BUCKET[1] // pixels, "W": _BUCKET[0] // pixels}
    values |= {"h": _WIDE[0] // pixels, "w": _WIDE[1] // pixels}
    found = _ones(LATENTS[suffix], **values)
    for number in range(controls):
        found |= _ones(OF_A_CONTROL.get(suffix, {}), **values, N=number)
    if task.startswith(("i2v", "flf2v")):
        found |= _ones(OF_A_PICTURE.get(suffix, {}), **values)
        if suffix == "wan" and "A14B" not in task:
            found |= _ones({"clip_bfloat16": "257 1280"})
    return found


def model_of(name: str, task: str) -> dict[str, Any]:
    """Return a model's section with all that its row demands."""
    scripts = ROWS[name]
    files = (*scripts.latents.files, *scripts.text.files, *scripts.training.files)
    keys = {file.key for file in files if file.required} | set(scripts.versions[task].needs)
    texts = sorted(key for key in keys if key.startswith("text"))
    folders = {file.key for file in files if file.form == "folder"}
    places = {
        key: f"models/{key.replace('.', '_')}{'' if key in folders else '.safetensors'}"
        for key in keys
    }
    section: dict[str, Any] = {key: places[key] for key in keys - set(texts)}
    section |= {"text": [places[key] for key in texts]} if texts else {}
    section |= {"task": task} if task else {}
    return section if name == "wan" else section | {"architecture": name}


def _write_models(root: Path, name: str, model: Model) -> None:
    folder = root / "models"
    folder.mkdir(parents=True, exist_ok=True)
    names = [DIT_NAMES[name], *filter(None, [DIT_FURTHER.get(name)])]
    if name == "wan":
        names += ["blocks.0.self_attn.q.weight", "patch_embedding.weight", "head.head.weight"]
    if name == "wan":
        weights = {
            "dit": names,
            "vae": ["encoder.conv1.weight", "decoder.conv1.weight"],
            "text": ["token_embedding.weight", "norm.weight"],
            "clip": ["visual.head", "textual.head"],
        }
    else:
        files = (*ROWS[name].latents.files, *ROWS[name].text.files)
        weights = {file.key: [ENCODER_NAMES[file.kind]] for file in files} | {"dit": names}
    for key, found in weights.items():
        place = model.weights(key)
        if place is not None:
            path = root / str(place.path)
            path = path / "model.safetensors" if path.suffix == "" else path
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({each: torch.ones(2, 2, dtype=torch.bfloat16) for each in found}, path)


def make_row_run(
    root: Path, name: str, task: str, *, tuner: Path | None = None, **trainer: Any
) -> MusubiOrder:
    """Write items, caches, manifest and weights of a run of one version of a row.

    Args:
        root: the working directory, in which relative paths lie.
        name: of the row; `wan` for a Wan model.
        task: of the version.
        tuner: musubi-tuner's folder.
        trainer: the trainer's section.
    """
    scripts = ROWS[name]
    version = scripts.versions[task]
    video, controls = not version.images, version.controls[0]
    model = Model.model_validate(model_of(name, task))
    _write_models(root, name, model)
    rows = []
    folder = Path(f"cache/{RUN}/m/64")
    (root / folder).mkdir(parents=True)
    for stem, colour in COLOURS.items():
        rows.append(_item(root, stem, colour, video, controls, layers=scripts.layers))
        size = IMAGE if not video else _BUCKET
        clip = f"_00000-{CLIP_FRAMES:03d}" * video + "-0000" * (video and scripts.sections)
        shape = f"{size[0]:04d}x{size[1]:04d}"
        latents = folder / f"{stem}{clip}_{shape}_{scripts.suffix}.safetensors"
        text = folder / f"{stem}_{scripts.suffix}_te.safetensors"
        head = {"architecture": scripts.header, "format_version": "1.0.1"}
        sides = {"width": str(size[0]), "height": str(size[1])}
        tensors = latents_of(name, task, controls=controls, video=video)
        save_file(tensors, root / latents, head | sides)
        save_file(
            _ones(TEXTS[scripts.suffix]), root / text, head | {"caption1": f"a {stem} square"}
        )
        rows[-1] |= {"latents": {"64": [os.fspath(latents)]}, "text": {"64": os.fspath(text)}}
    output = root / f"runs/{RUN}"
    output.mkdir(parents=True)
    (output / "manifest.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (output / "dataset.lock").write_text(json.dumps({"digest": digest.of_value("one")}))
    settings: dict[str, Any] = {"path": f"data/{RUN}"}
    settings |= {"control_directory": "control"} if controls else {}
    settings |= {"target_frames": [CLIP_FRAMES], "fit": "bucket"} if video else {"fit": "crop"}
    settings |= {"multiple_target": True} if scripts.layers else {}
    known = {key: value for key, value in settings.items() if key in Dataset.model_fields}
    given = MusubiTrainer.model_validate({"kind": "musubi", "max_train_epochs": 2, **trainer})
    return MusubiOrder(
        run=RUN,
        manifest=f"runs/{RUN}/manifest.jsonl",
        lock=f"runs/{RUN}/dataset.lock",
        output=f"runs/{RUN}",
        datasets={RUN: Dataset.model_validate(known)},
        resolutions=[RESOLUTION],
        model_name="m",
        model=model,
        **with_defaults(given, scripts.settings),
        program=None if tuner is None else ExternalProgram(path=os.fspath(tuner)),
        publish=Publish(),
    )


def _item(
    root: Path, stem: str, colour: tuple[int, int, int], video: bool, controls: int, layers: bool
) -> dict[str, Any]:
    """Write a picture or a stand-in for a video, its caption, controls and layers."""
    source = root / f"data/{RUN}/{stem}{'.mp4' if video else '.png'}"
    source.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", IMAGE, colour)
    if video:
        source.write_bytes(b"only its name is looked at")
    else:
        picture.save(source)
    source.with_suffix(".txt").write_text(f"a {stem} square\n")
    beside = []
    for number in range(controls):
        path = root / f"control/{stem}{f'_{number}' if controls > 1 else ''}.png"
        path.parent.mkdir(exist_ok=True)
        picture.save(path)
        beside.append(os.fspath(path.relative_to(root)))
    row: dict[str, Any] = {
        "dataset": RUN,
        "stem": stem,
        "source": os.fspath(source.relative_to(root)),
        "caption": os.fspath(source.with_suffix(".txt").relative_to(root)),
        "control": beside[0] if beside else None,
        "repeats": 1,
    }
    if len(beside) > 1:
        row["controls"] = beside
    if layers:
        row["layers"] = []
        for number in (1, 2):
            path = source.with_stem(f"{stem}_{number}")
            picture.save(path)
            row["layers"].append(os.fspath(path.relative_to(root)))
    return row
