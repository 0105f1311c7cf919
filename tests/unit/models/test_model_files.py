"""Encoders of musubi-tuner's architectures are told by the names and shapes of their tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from latentmake.base.errors import ModelError
from latentmake.config.models import Model
from latentmake.models import cache_recipe
from latentmake.models.inspection import encoder_fault, encoders
from safetensors.torch import save_file

Shape = tuple[int, ...]


def vae(layer: str, encoder: Shape, decoder: Shape) -> dict[str, Shape]:
    return {f"encoder.{layer}.weight": encoder, f"decoder.{layer}.weight": decoder}


# Names of original releases, of diffusers and of transformers; shapes where they count.
FILES: dict[str, dict[str, Shape]] = {
    "qwen_vae": vae("conv1", (96, 3, 3, 3, 3), (4, 16, 3, 3, 3)),
    "layered_vae": vae("conv_in", (96, 4, 3, 3, 3), (4, 16, 3, 3, 3)),
    "flux_vae": vae("conv_in", (8, 3, 3, 3), (8, 16, 3, 3)),
    "flux_2_vae": vae("conv_in", (8, 3, 3, 3), (8, 32, 3, 3)),
    "hunyuan_vae": vae("conv_in.conv", (8, 3, 3, 3, 3), (8, 16, 3, 3, 3)),
    "tiny_vae": vae("conv_in", (8, 3, 3, 3), (8, 7, 3, 3)),
    "llm": {"model.layers.0.self_attn.q_proj.weight": (4, 4), "lm_head.weight": (4, 4)},
    "qwen_vl": {"visual.blocks.0.attn.qkv.weight": (4,), "model.layers.0.mlp.up.weight": (4,)},
    "t5": {"encoder.block.0.layer.0.SelfAttention.q.weight": (4, 4), "shared.weight": (4, 4)},
    "clip": {"text_model.encoder.layers.0.self_attn.q_proj.weight": (4, 4)},
    "siglip": {"vision_model.encoder.layers.0.self_attn.q_proj.weight": (4, 4)},
    "dit": {"transformer_blocks.0.attn.to_q.weight": (4, 4)},
    "wan_dit": {"blocks.0.self_attn.q.weight": (4, 4), "patch_embedding.weight": (4, 4)},
    "lora": {"lora_unet_encoder_conv_in.lora_down.weight": (4, 4)},
    "unknown": {"something.weight": (4, 4)},
}


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, tensors in FILES.items():
        save_file({key: torch.ones(shape) for key, shape in tensors.items()}, f"{name}.safetensors")
    Path("cut.safetensors").write_bytes(Path("flux_vae.safetensors").read_bytes()[:-1])


def model(architecture: str, vae: str, *text: str, **more: Any) -> Model:
    section = {"vae": f"{vae}.safetensors", "text": [f"{each}.safetensors" for each in text]}
    return Model.model_validate({"architecture": architecture, **section, **more})


RIGHT = [
    ("qwen_image", "qwen_vae", "qwen_vl"),
    ("qwen_image_layered", "layered_vae", "qwen_vl"),
    ("z_image", "flux_vae", "llm"),
    ("flux_2_dev", "flux_2_vae", "llm"),
    ("flux_kontext", "flux_vae", "t5", "clip"),
    ("hunyuan_video", "hunyuan_vae", "llm", "clip"),
    ("krea2", "qwen_vae", "llm"),
    ("ideogram4", "flux_2_vae", "llm"),
    ("z_image", "unknown", "unknown"),
    ("z_image", "tiny_vae", "unknown"),  # of sizes that no architecture has
]


@pytest.mark.parametrize("names", RIGHT)
def test_the_right_files_and_unknown_ones_pass(names: tuple[str, ...]) -> None:
    for kind in ("latents", "text"):
        assert encoder_fault(model(*names), kind) is None


WRONG = [
    (("z_image", "dit", "llm"), "vae", "is a DiT, not a VAE"),
    (("qwen_image", "wan_dit", "llm"), "vae", "is a Wan DiT, not a VAE"),
    (("z_image", "lora", "llm"), "vae", "is a LoRA, not a VAE"),
    (("z_image", "flux_2_vae", "llm"), "vae", "latents have 32 channels, and not one for pictures"),
    (("qwen_image", "flux_vae", "llm"), "vae", "is a VAE for pictures"),
    (("qwen_image", "layered_vae", "llm"), "vae", "for videos with transparency"),
    (("z_image", "flux_vae", "t5"), "text", "is a T5, not a language model"),
    (("flux_kontext", "flux_vae", "clip", "t5"), "text", "is a CLIP text encoder, not a T5"),
    (("flux_kontext", "flux_vae", "t5", "siglip"), "text", "is an image encoder, not a CLIP text"),
    (("z_image", "flux_vae", "missing"), "text", "does not exist"),
    (("z_image", "cut", "llm"), "vae", "cut.safetensors: is cut short or has grown"),
]


@pytest.mark.parametrize(("names", "key", "words"), WRONG)
def test_a_file_of_another_model_is_named_with_its_key(
    names: tuple[str, ...], key: str, words: str
) -> None:
    found = encoder_fault(model(*names), "text" if key == "text" else "latents")
    assert found is not None
    assert found[0] == key and words in found[1] and "\n" not in found[1]


def test_another_network_as_wans_vae_is_named_while_planning() -> None:
    text = {"path": "t5.safetensors", "tokenizer": "tokenizer"}
    section = {"task": "t2v-1.3B", "vae": "siglip.safetensors", "text": text}
    fault = r"^models\.wan\.vae: siglip\.safetensors: is an image encoder, not a Wan VAE; name"
    with pytest.raises(ModelError, match=fault):
        cache_recipe.make("latents", None, Model.model_validate(section), place="models.wan")


def test_a_folder_is_refused_where_a_script_reads_a_file_and_the_other_way_round() -> None:
    folder = Path("folder.safetensors")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(Path("llm.safetensors").read_bytes())
    assert encoder_fault(model("hunyuan_video", "hunyuan_vae", "folder", "clip"), "text") is None
    found = encoder_fault(model("z_image", "flux_vae", "folder"), "text")
    fault = "is a folder, and the script reads one file of a language model"
    assert found == ("text", f"{folder}: {fault}")
    names = ("kandinsky5", "hunyuan_vae", "folder", "clip")
    found = encoder_fault(model(*names, task="k5-lite-t2v-5s-sd"), "text")
    assert found is not None and "the folder of a CLIP text encoder" in found[1]


def test_each_file_is_inspected_once_and_says_what_it_is() -> None:
    made = model("flux_kontext", "flux_vae", "t5", "clip")
    files = [file for kind in ("latents", "text") for file in encoders(made, kind)]
    found = {file.key: file.description for file in files}
    assert len(files) == 3
    assert found == {"vae": "VAE", "text": "T5", "text.1": "CLIP text encoder"}
