"""A second reading of what sd-scripts demands of cache files, and tiny encoders to make some.

`latents_fault` and `text_fault` say what its strategies would find wrong with a file; they know
nothing of how this project writes one. `stand_in` writes programs that read a dataset as its
scripts do, without any package: what they find wrong they raise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tiny_networks
import torch
from diffusers import AutoencoderKL
from latentmake.config.datasets import Dataset
from latentmake.config.external_trainers import SdScriptsTrainer
from latentmake.config.machines import ExternalProgram, Publish
from latentmake.config.models import Model
from latentmake.trainers.sdscripts.order import SdScriptsOrder
from musubi_world import declarations, make_venv, write_network

SUFFIX = {"sd1": "sd", "sd2": "sd", "sdxl": "sdxl", "sd3": "sd3", "flux": "flux"}
MULTIPLE = {"sd3", "flux"}
TEXT_KEYS = {
    "sdxl": {"hidden_state1", "hidden_state2", "pool2"},
    "sd3": {
        *("lg_out", "lg_pooled", "t5_out", "clip_l_attn_mask", "clip_g_attn_mask"),
        *("t5_attn_mask", "apply_lg_attn_mask", "apply_t5_attn_mask"),
    },
    "flux": {"l_pooled", "t5_out", "txt_ids", "t5_attn_mask", "apply_t5_attn_mask"},
}


def tiny_vae(channels: int = 4) -> AutoencoderKL:
    """A VAE of some thousand random weights, which makes an eighth of each side."""
    torch.manual_seed(0)
    return tiny_networks.vae(latent_channels=channels, mid_block_add_attention=False).eval()


def read(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def latents_fault(
    path: Path,
    architecture: str,
    bucket: tuple[int, int],
    image: tuple[int, int],
    *,
    flip_aug: bool = False,
    alpha_mask: bool = False,
) -> str | None:
    """Say what is wrong with a file of latents; None where sd-scripts would train on it.

    Args:
        path: of the file.
        architecture: of the model.
        bucket: width and height of what was encoded, in pixels.
        image: those of the image.
        flip_aug: whether mirrored latents are asked for.
        alpha_mask: whether a mask is.
    """
    width, height = bucket[0] // 8, bucket[1] // 8
    ending = f"_{height}x{width}" if architecture in MULTIPLE else ""
    found = read(path)
    if not path.name.endswith(f"_{image[0]:04d}x{image[1]:04d}_{SUFFIX[architecture]}.npz"):
        return "it has another name"
    wanted = {"latents", "original_size", "crop_ltrb"}
    wanted |= {"latents_flipped"} if flip_aug else set()
    wanted |= {"alpha_mask"} if alpha_mask else set()
    if set(found) != {name + ending for name in wanted}:
        return f"it has the keys {sorted(found)}"
    found = {name.removesuffix(ending): array for name, array in found.items()}
    for name in wanted & {"latents", "latents_flipped"}:
        array = found[name]
        if array.dtype != np.float32 or array.shape[1:] != (height, width) or array.ndim != 3:
            return f"{name} is {array.dtype} {array.shape}"
    if found["original_size"].tolist() != list(image):
        return f"original_size is {found['original_size']}"
    if found["crop_ltrb"].dtype != np.float64 or found["crop_ltrb"].shape != (4,):
        return f"crop_ltrb is {found['crop_ltrb']}"
    if alpha_mask:
        mask = found["alpha_mask"]
        if mask.dtype != np.float32 or mask.shape != (bucket[1], bucket[0]):
            return f"alpha_mask is {mask.dtype} {mask.shape}"
        if mask.min() < 0 or mask.max() > 1:
            return "alpha_mask goes beyond 0 to 1"
    return None


def text_fault(
    path: Path, architecture: str, *, lg_mask: bool = False, t5_mask: bool = False
) -> str | None:
    """Say what is wrong with a file of text; None where sd-scripts would train on it."""
    found = read(path)
    if set(found) != TEXT_KEYS[architecture]:
        return f"it has the keys {sorted(found)}"
    for name, applied in (("apply_lg_attn_mask", lg_mask), ("apply_t5_attn_mask", t5_mask)):
        if name in found and (found[name].shape != () or found[name] != applied):
            return f"{name} is {found[name]}"
    shapes = {name: array.shape for name, array in found.items()}
    for name, array in found.items():
        if name.endswith("_attn_mask") and not name.startswith("apply"):
            of = "t5_out" if name.startswith("t5") else "lg_out"
            if array.dtype != np.int64 or array.shape != shapes[of][:1]:
                return f"{name} is {array.dtype} {array.shape}"
        elif not name.startswith("apply") and array.dtype not in (np.float32, np.float16):
            return f"{name} is {array.dtype}"
    if architecture == "flux" and (shapes["txt_ids"] != (shapes["t5_out"][0], 3)):
        return f"txt_ids is {shapes['txt_ids']}"
    if architecture == "sdxl" and shapes["hidden_state1"][0] != shapes["hidden_state2"][0]:
        return f"the states have {shapes['hidden_state1'][0]} and {shapes['hidden_state2'][0]} rows"
    return None


# -- a run ----------------------------------------------------------------------------------------

ENCODERS = {"sd1": 1, "sd2": 1, "sdxl": 2, "sd3": 3, "flux": 2}
ENCODERS |= {"lumina": 1, "hunyuan_image": 2, "anima": 1}


def order_of(
    architecture: str = "sdxl",
    *,
    trainer: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **changes: Any,
) -> SdScriptsOrder:
    """Return an order; `model` and `trainer` add to their sections."""
    values = {
        "vae": "ae.safetensors",
        "text": [f"text_{number}.safetensors" for number in range(ENCODERS[architecture])],
        "architecture": architecture,
        "layout": "sdscripts",
        "checkpoint": "base.safetensors",
        **(model or {}),
    }
    given = {
        "run": "cats",
        "manifest": "manifest.jsonl",
        "lock": "dataset.lock",
        "output": "runs/cats",
        "datasets": {"a": Dataset(path="data")},
        "resolutions": [(512, 512), (512, 768)],
        "model_name": "big",
        "model": Model.model_validate(values),
        "trainer": SdScriptsTrainer.model_validate({"kind": "sdscripts", **(trainer or {})}),
        "program": ExternalProgram(path="sd-scripts"),
        "publish": Publish(),
    }
    return SdScriptsOrder(**(given | changes))


# -- a trainer ------------------------------------------------------------------------------------

SWITCHES = (
    *("cache_latents", "cache_latents_to_disk", "cache_text_encoder_outputs", "deepspeed", "v2"),
    *("cache_text_encoder_outputs_to_disk", "network_train_unet_only", "gradient_checkpointing"),
    *("sdpa", "xformers", "mem_eff_attn", "torch_compile", "apply_t5_attn_mask"),
    *("apply_lg_attn_mask", "masked_loss", "save_state"),
    *("no_half_vae", "v_parameterization", "zero_terminal_snr"),
)
VALUES = (
    *("pretrained_model_name_or_path", "dataset_config", "output_dir", "output_name"),
    *("save_model_as", "logging_dir", "network_module", "network_dim", "network_alpha"),
    *("learning_rate", "optimizer_type", "lr_scheduler", "gradient_accumulation_steps"),
    *("max_data_loader_n_workers", "mixed_precision", "seed", "max_train_steps"),
    *("max_train_epochs", "dynamo_backend", "zero_stage", "save_every_n_epochs", "clip_skip"),
    *("max_token_length", "t5xxl_max_token_length", "ae", "clip_l", "clip_g", "t5xxl"),
    *("save_last_n_epochs_state", "resume", "initial_step"),
    *("validate_every_n_steps", "validate_every_n_epochs"),
    *("vae", "vae_batch_size", "text_encoder_batch_size"),
    *("gemma2", "system_prompt", "gemma2_max_token_length", "tokenizer_cache_dir"),
    "timestep_sampling",
)
_PROGRAM = """
import argparse, json, os, re, struct, sys, tomllib, zipfile

DATASET = {{"resolution", "batch_size", "enable_bucket", "min_bucket_reso", "max_bucket_reso",
           "bucket_reso_steps", "bucket_no_upscale", "subsets", "validation_split"}}
SUBSET = {{"image_dir", "metadata_file", "num_repeats", "flip_aug", "alpha_mask"}}
LATENTS, TEXT, CACHED = {latents!r}, {text!r}, {cached!r}


def keys(path, old):
    assert not os.path.exists(old), f"{{old}} wins"
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {{name.removesuffix(".npy") for name in archive.namelist()}}


def look(config):
    items = []
    for block in config["datasets"]:
        assert set(block) <= DATASET, block
        if "validation_split" in block:
            continue
        (subset,) = block["subsets"]
        assert set(subset) <= SUBSET, subset
        for key, entry in json.load(open(subset["metadata_file"], encoding="utf-8")).items():
            assert not os.path.isabs(key) and set(entry) == {{"caption", "image_size"}}
            image = os.path.join(subset["image_dir"], key)
            assert os.path.isfile(image), image
            stem = os.path.splitext(image)[0]
            width, height = entry["image_size"]
            found = keys(f"{{stem}}_{{width:04d}}x{{height:04d}}{{LATENTS}}", f"{{stem}}.npz")
            first = {{name.split("_")[0] for name in found}}
            assert {{"latents", "original", "crop"}} <= first, found
            if CACHED:
                assert len(keys(stem + TEXT, f"{{stem}}.npz")) > 2
            items.append([key, entry["caption"]])
    if not items:
        raise ValueError("No data found.")
    return items


def write(path, mood):
    tensor = {{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    header = {{}} if mood == "empty" else {{"lora_unet.lora_down.weight": tensor}}
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + (b"" if mood in ("empty", "short") else bytes(4))
    open(path, "wb").write(data)


def main():
    parser = argparse.ArgumentParser()
{arguments}
    args = parser.parse_args()
    mood = os.environ.get("STAND_IN", "")
    config = tomllib.load(open(args.dataset_config, "rb"))
    assert set(config) == {{"general", "datasets"}}
    assert args.cache_latents and args.cache_latents_to_disk
    assert args.cache_text_encoder_outputs == args.cache_text_encoder_outputs_to_disk == CACHED
    assert args.network_train_unet_only or not CACHED
    assert os.path.exists(args.pretrained_model_name_or_path)
    called = {{"argv": sys.argv[1:], "cwd": os.getcwd(), "items": look(config)}}
    here = os.path.dirname(os.path.abspath(__file__))
    json.dump(called, open(os.path.join(here, "called.json"), "w"))
    if mood == "broken":
        raise RuntimeError("the loss has gone its own way")
    if mood == "silent":
        print("nothing to do, leaving")
        return
    os.makedirs(args.output_dir, exist_ok=True)
    write(os.path.join(args.output_dir, args.output_name + ".safetensors"), mood)


main()
"""


def stand_in(folder: Path, *, own_venv: bool = True, without: tuple[str, ...] = ()) -> Path:
    """Write the folder of an sd-scripts that trains nothing.

    Args:
        folder: gets its scripts.
        own_venv: it has an environment of its own; see `make_venv`.
        without: flags that it does not know.
    """
    folder.mkdir(parents=True, exist_ok=True)
    declared = declarations(SWITCHES, VALUES, without)
    for script, latents, text in (
        ("train_network", "_sd.npz", ""),
        ("sdxl_train_network", "_sdxl.npz", "_te_outputs.npz"),
        ("lumina_train_network", "_lumina.npz", "_lumina_te.npz"),
    ):
        facts = {"latents": latents, "text": text, "cached": bool(text), "arguments": declared}
        program = _PROGRAM.format(**facts)
        (folder / f"{script}.py").write_text(program, encoding="utf-8")
    write_network(folder / "networks/dylora.py")
    if own_venv and not (folder / "venv").exists():
        make_venv(folder / "venv")
    return folder
