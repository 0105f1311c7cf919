"""HunyuanVideo, HunyuanVideo 1.5, FramePack and Kandinsky 5: networks of 8 to 64 channels.

Kandinsky 5 has HunyuanVideo's VAE; its text encoders are folders, whose own configurations count.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tiny import hub
from tiny.random_weights import network_of, write_for
from tiny.tiny_qwen_image import shrink_vl, write_processor

TRANSFORMERS = ["LlamaForCausalLM", "LlamaModel", "LlamaTokenizerFast", "CLIPTextModel"]
TRANSFORMERS += ["CLIPTokenizer", "SiglipImageProcessor", "SiglipVisionModel", "AutoTokenizer"]
TRANSFORMERS += [
    "T5ForConditionalGeneration",
    "AutoProcessor",
    "Qwen2_5_VLForConditionalGeneration",
]

_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "vocab_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "projection_dim": 32,
    "vocab_size": 514,
}
_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 128,
}
_VAE = {"block_out_channels": [8] * 4, "norm_num_groups": 2, "layers_per_block": 1}
_VAE_1_5 = {"block_out_channels": (32, 32, 32, 32, 64), "layers_per_block": 1}
_BYT5 = {"d_ff": 16, "d_kv": 8, "num_heads": 1, "num_layers": 1, "num_decoder_layers": 1}


def _module(name: str) -> Any:
    return importlib.import_module(f"musubi_tuner.{name}")


def _shrink() -> None:
    vae = _module("hunyuan_model.autoencoder_kl_causal_3d").AutoencoderKLCausal3D
    made = vae.from_config.__func__
    vae.from_config = classmethod(lambda cls, config, **more: made(cls, {**config, **_VAE}, **more))
    for name in ("hunyuan_model.text_encoder", "frame_pack.framepack_utils"):
        module = _module(name)
        module.LLAMA_CONFIG.update(_LLAMA)
        module.CLIP_CONFIG.update(_CLIP)
    module.IMAGE_ENCODER_CONFIG.update(_SIGLIP)
    _name_text_model()


def _name_text_model() -> None:
    """Give CLIP the name of a part that it had before version 5 of transformers."""
    from transformers import CLIPTextModel

    if not hasattr(CLIPTextModel, "text_model"):
        CLIPTextModel.text_model = property(lambda self: self)


def _shrink_1_5() -> None:
    _shrink()
    vae = _module("hunyuan_video_1_5.hunyuan_video_1_5_vae")
    made_vae = vae.AutoencoderKLConv3D
    vae.AutoencoderKLConv3D = lambda **given: made_vae(**{**given, **_VAE_1_5})
    text = _module("hunyuan_video_1_5.hunyuan_video_1_5_text_encoder")
    made_config = text.T5Config
    text.T5Config = lambda **given: made_config(**{**given, **_BYT5})
    shrink_vl(_module("qwen_image.qwen_image_utils"))


SCRIPTS = {
    **dict.fromkeys(
        (
            "cache_latents.py",
            "cache_text_encoder_outputs.py",
            "fpack_cache_latents.py",
            "fpack_cache_text_encoder_outputs.py",
            "kandinsky5_cache_latents.py",
        ),
        _shrink,
    ),
    "hv_1_5_cache_latents.py": _shrink_1_5,
    "hv_1_5_cache_text_encoder_outputs.py": _shrink_1_5,
}


def _llama_tokenizer(folder: Path) -> None:
    # Of a token a byte, the instruction before a caption fills the length that scripts cut to:
    # LLaMA's embeddings of all captions are alike here, CLIP's are not.
    settings = {"pad_token": "</s>", "padding_side": "right"}
    specials = ("<unk>", "<s>", "</s>")
    hub.byte_tokenizer(folder, specials, tokenizer_class="PreTrainedTokenizerFast", **settings)
    hub.write_json(folder / "config.json", {"model_type": "llama"})


def _byt5_tokenizer(folder: Path) -> None:
    settings = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125}
    hub.write_json(folder / "tokenizer_config.json", settings)
    hub.write_json(folder / "config.json", {"model_type": "t5"})


def _hunyuan_repository(folder: Path) -> None:
    _llama_tokenizer(folder / "tokenizer")
    hub.clip_tokenizer(folder / "tokenizer_2")


REPOS = {
    "xtuner/llava-llama-3-8b-v1_1-transformers": _llama_tokenizer,
    "openai/clip-vit-large-patch14": hub.clip_tokenizer,
    "hunyuanvideo-community/HunyuanVideo": _hunyuan_repository,
    "google/byt5-small": _byt5_tokenizer,
}


def _hunyuan(folder: Path) -> None:
    """Write vae, llm, llama, clip and siglip.safetensors, of HunyuanVideo and FramePack."""
    _shrink()
    text = _module("hunyuan_model.text_encoder")
    load_vae = _module("hunyuan_model.vae").load_vae
    write_for(lambda path: load_vae(vae_path=path), folder / "vae.safetensors")
    write_for(text.load_clip_l, folder / "clip.safetensors")
    write_for(text.load_llm, folder / "llm.safetensors")
    load_llama = _module("frame_pack.framepack_utils").load_text_encoder1
    write_for(
        lambda path: load_llama(SimpleNamespace(text_encoder1=path), device="cpu"),
        folder / "llama.safetensors",
        lambda name: f"model.{name}",
        ["model.embed_tokens.weight"],
    )
    _siglip(folder)


def _siglip(folder: Path) -> None:
    load = _module("frame_pack.framepack_utils").load_image_encoders
    write_for(lambda path: load(SimpleNamespace(image_encoder=path)), folder / "siglip.safetensors")


def _hunyuan_1_5(folder: Path) -> None:
    """Write vae, qwen, byt5 and siglip.safetensors, of HunyuanVideo 1.5."""
    _shrink_1_5()
    load_vae = _module("hunyuan_video_1_5.hunyuan_video_1_5_vae").load_vae_from_checkpoint
    load_byt5 = _module("hunyuan_video_1_5.hunyuan_video_1_5_text_encoder").load_byt5
    load_vl = _module("qwen_image.qwen_image_utils").load_qwen2_5_vl
    write_for(lambda path: load_vae(path, "cpu", None), folder / "vae.safetensors")
    write_for(
        lambda path: load_byt5(path, None, "cpu"),
        folder / "byt5.safetensors",
        lambda name: "shared.weight" if name == "embed_tokens.weight" else f"encoder.{name}",
        ["shared.weight"],
    )
    write_for(lambda path: load_vl(path, None, "cpu"), folder / "qwen.safetensors", _comfy)
    _siglip(folder)


def _comfy(name: str) -> str:
    """Return the name of a tensor of Qwen2.5-VL in ComfyUI's files."""
    name = name.replace("model.language_model.", "model.", 1)
    return name.replace("model.visual.", "visual.", 1)


def _kandinsky(folder: Path) -> None:
    """Write vae.safetensors and the folders qwen and clip, of Kandinsky 5."""
    import torch
    import transformers

    _shrink()
    load_vae = _module("hunyuan_model.vae").load_vae
    write_for(lambda path: load_vae(vae_path=path), folder / "vae.safetensors")
    torch.manual_seed(1)
    text = _module("hunyuan_model.text_encoder")
    config = transformers.CLIPTextConfig(**text.CLIP_CONFIG)
    transformers.CLIPTextModel(config).save_pretrained(folder / "clip")
    hub.clip_tokenizer(folder / "clip")
    module = _module("qwen_image.qwen_image_utils")
    shrink_vl(module)
    made = network_of(
        lambda path: module.load_qwen2_5_vl(path, None, "cpu"), folder / "none.safetensors"
    )
    write_processor(folder / "qwen")
    type(made)(made.config).save_pretrained(folder / "qwen")


WEIGHTS = {"hunyuan": _hunyuan, "hunyuan_1_5": _hunyuan_1_5, "kandinsky": _kandinsky}
