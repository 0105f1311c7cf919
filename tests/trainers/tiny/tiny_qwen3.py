"""Krea 2, Ideogram 4 and HiDream O1: Qwen3-VL of 32 channels, and their VAEs of 4 and 32.

HiDream O1 caches pixels and tokens: of its network only the embedding of tokens is read.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tiny import hub, tiny_qwen_image
from tiny.random_weights import write_for

TRANSFORMERS = ["Qwen3VLForConditionalGeneration", "Qwen3VLConfig", "Qwen3VLModel"]
TRANSFORMERS += ["Qwen2TokenizerFast", "Qwen3VLProcessor", "AutoModel", "AutoTokenizer"]

_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
_SPECIALS += ("<|image_pad|>", "<|video_pad|>")
_HIDREAM = tuple(f"<|{name}_token|>" for name in ("boi", "bor", "eor", "bot", "tms"))
_ID = {token: 256 + number for number, token in enumerate((*_SPECIALS, *_HIDREAM))}
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 272,
    "mrope_section": [2, 3, 3],
    "bos_token_id": _ID["<|endoftext|>"],
    "eos_token_id": _ID["<|im_end|>"],
    "image_token_id": _ID["<|image_pad|>"],
    "video_token_id": _ID["<|video_pad|>"],
    "vision_start_token_id": _ID["<|vision_start|>"],
    "vision_end_token_id": _ID["<|vision_end|>"],
}
_VISION = {
    "depth": 1,
    "deepstack_visual_indexes": [0],
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 32,
}
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def _module(name: str) -> Any:
    return importlib.import_module(f"musubi_tuner.{name}")


def _shrink_config(config: dict[str, Any]) -> None:
    vision = {**config["vision_config"], **_VISION}
    config |= {**hub.shrunk(config, _TEXT), "vision_config": vision}


def _shrink_krea() -> None:
    tiny_qwen_image.SCRIPTS["qwen_image_cache_latents.py"]()
    _shrink_config(_module("krea2.krea2_encoder").QWEN3_VL_4B_INSTRUCT_CONFIG)


def _fill_meta_tensors(model: Any) -> None:
    """Leave buffers of values as they are, which `to_empty` fills with whatever memory holds."""
    import torch

    for layer in model.modules():
        for name, value in layer.named_parameters(recurse=False):
            setattr(layer, name, torch.nn.Parameter(torch.empty_like(value, device="cpu")))


def _shrink_ideogram() -> None:
    module = _module("ideogram4.ideogram4_utils")
    module._materialize_meta_tensors = _fill_meta_tensors
    _shrink_config(module.QWEN3_VL_8B_INSTRUCT_CONFIG)
    made = module.AutoEncoderParams
    module.AutoEncoderParams = lambda: made(ch=32, ch_mult=[1, 1, 1, 1], num_res_blocks=1)


SCRIPTS = {
    **dict.fromkeys(
        ("krea2_cache_latents.py", "krea2_cache_text_encoder_outputs.py"), _shrink_krea
    ),
    **dict.fromkeys(
        ("ideogram4_cache_latents.py", "ideogram4_cache_text_encoder_outputs.py"), _shrink_ideogram
    ),
}


def _tokenizer(folder: Path) -> None:
    settings = {**tiny_qwen_image.TOKENIZER, "chat_template": _TEMPLATE}
    hub.byte_tokenizer(folder, (*_SPECIALS, *_HIDREAM), **settings)
    hub.write_json(folder / "config.json", {"model_type": "qwen3_vl"})


def _processor(folder: Path) -> None:
    _tokenizer(folder)
    pixels = {"shortest_edge": 1024, "longest_edge": 65536}
    settings = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "size": pixels}
    settings["processor_class"] = "Qwen3VLProcessor"
    for name, kind in (("", "image_processor_type"), ("video_", "video_processor_type")):
        made = "Qwen3VLVideoProcessor" if name else "Qwen2VLImageProcessor"
        hub.write_json(folder / f"{name}preprocessor_config.json", {**settings, kind: made})
    (folder / "chat_template.jinja").write_text(_TEMPLATE)


REPOS = {
    "Qwen/Qwen3-VL-4B-Instruct": _tokenizer,
    "Qwen/Qwen3-VL-8B-Instruct": _tokenizer,
    "HiDream-ai/HiDream-O1-Image": _processor,
}


def _krea(folder: Path) -> None:
    """Write vae and qwen.safetensors, of Krea 2."""
    _shrink_krea()
    load_vae = _module("qwen_image.qwen_image_utils").load_vae
    load_qwen = _module("krea2.krea2_encoder")._load_qwen3_vl_model
    write_for(load_vae, folder / "vae.safetensors")
    write_for(lambda path: load_qwen(path, dtype=None, device="cpu"), folder / "qwen.safetensors")


def _ideogram(folder: Path) -> None:
    """Write vae and qwen.safetensors, of Ideogram 4."""
    _shrink_ideogram()
    module = _module("ideogram4.ideogram4_utils")
    settings = {"device": "cpu", "dtype": None}
    write_for(
        lambda path: module.load_ideogram4_autoencoder(path, **settings), folder / "vae.safetensors"
    )
    write_for(
        lambda path: module.load_ideogram4_text_encoder(path, **settings),
        folder / "qwen.safetensors",
    )


def _hidream(folder: Path) -> None:
    """Write dit.safetensors with the one tensor of HiDream O1 that caching reads."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weight = torch.randn(272, 32, generator=torch.Generator().manual_seed(1))
    save_file({"model.language_model.embed_tokens.weight": weight}, folder / "dit.safetensors")


WEIGHTS = {"krea2": _krea, "ideogram4": _ideogram, "hidream_o1": _hidream}
