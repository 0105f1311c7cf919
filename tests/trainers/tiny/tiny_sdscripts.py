"""Lumina Image 2.0, HunyuanImage 2.1 and Anima of sd-scripts: their encoders, of few channels."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from pathlib import Path
from typing import Any

from tiny import hub
from tiny.tiny_qwen_image import TOKENIZER, shrink_vl, write_vl

TRANSFORMERS = ["CLIPImageProcessor", "Gemma2Model", "GemmaTokenizerFast", "Qwen2Tokenizer"]
TRANSFORMERS += ["Qwen3ForCausalLM", "T5ForConditionalGeneration", "T5TokenizerFast"]
TRANSFORMERS += ["Qwen2_5_VLForConditionalGeneration", "AutoTokenizer"]

_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_GEMMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "vocab_size": 272,
}
# The width stays: zeros of it stand for a caption without quoted words.
_BYT5 = {"d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1}
_QWEN3 = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_window_layers": 2,
    "layer_types": ["full_attention"] * 2,
}
_HUNYUAN_VAE = {"block_out_channels": (32, 32, 32, 64, 64, 128), "num_res_blocks": 1}
_QWEN_VAE = {"base_dim": 4, "num_res_blocks": 1}


def _smaller(module: Any, name: str, small: dict[str, Any]) -> None:
    """Let a module make objects of a class with other settings."""
    made = getattr(module, name)
    setattr(module, name, lambda *args, **given: made(*args, **{**given, **small}))


def _shrink() -> None:
    sys.path.insert(0, os.getcwd())  # sd-scripts
    import transformers

    # Names that version 5 has no longer; the first is imported and not used.
    sys.modules["transformers"].CLIPFeatureExtractor = transformers.CLIPImageProcessor
    tokenizer = transformers.PreTrainedTokenizerBase
    tokenizer.batch_encode_plus = tokenizer.__call__

    from library import flux_models, hunyuan_image_text_encoder, hunyuan_image_vae, lumina_util
    from library import qwen_image_autoencoder_kl as qwen_vae

    _smaller(lumina_util, "Gemma2Config", _GEMMA)
    spec = flux_models.configs["schnell"]
    small = dataclasses.replace(spec.ae_params, ch=32, ch_mult=[1, 1, 1, 1], num_res_blocks=1)
    flux_models.configs["schnell"] = dataclasses.replace(spec, ae_params=small)
    for name in ("Encoder", "Decoder"):
        channels = _HUNYUAN_VAE["block_out_channels"]
        turned = {"block_out_channels": tuple(reversed(channels))} if name == "Decoder" else {}
        _smaller(hunyuan_image_vae, name, {**_HUNYUAN_VAE, **turned})
    _smaller(hunyuan_image_text_encoder, "T5Config", _BYT5)
    shrink_vl(hunyuan_image_text_encoder)
    _smaller(qwen_vae, "AutoencoderKLQwenImage", _QWEN_VAE)
    loaded = transformers.Qwen3Config.from_pretrained
    transformers.Qwen3Config.from_pretrained = functools.partial(loaded, **_QWEN3)


def _write_lumina(folder: Path) -> None:
    from library import flux_models, lumina_util

    config = hub.settings_of(
        lumina_util,
        "Gemma2Config",
        lambda: lumina_util.load_gemma2(None, None, "cpu", state_dict={}),
    )
    _shrink()
    hub.write_random(
        flux_models.AutoEncoder(flux_models.configs["schnell"].ae_params),
        folder / "vae.safetensors",
    )
    gemma = lumina_util.Gemma2Model._from_config(lumina_util.Gemma2Config(**config))
    hub.write_random(gemma, folder / "text.safetensors", lambda name: f"model.{name}")


def _write_hunyuan(folder: Path) -> None:
    from library import hunyuan_image_text_encoder as text
    from library import hunyuan_image_vae
    from transformers import AutoTokenizer

    write_vl(text, folder / "text.safetensors", lambda: text.load_qwen2_5_vl("", None, "cpu"))
    config = hub.settings_of(text, "T5Config", lambda: text.load_byt5("", None, "cpu"))
    _shrink()
    byt5 = text.T5ForConditionalGeneration._from_config(text.T5Config(**config)).get_encoder()
    text.add_special_token(AutoTokenizer.from_pretrained(text.BYT5_TOKENIZER_PATH), byt5)

    def rename(name: str) -> str:
        return "shared.weight" if name == "embed_tokens.weight" else f"encoder.{name}"

    hub.write_random(byt5, folder / "byt5.safetensors", rename)
    hub.write_random(hunyuan_image_vae.HunyuanVAE2D(), folder / "vae.safetensors")


def _write_anima(folder: Path) -> None:
    import transformers

    _shrink()
    from library import qwen_image_autoencoder_kl as vae

    hub.write_random(vae.AutoencoderKLQwenImage(), folder / "vae.safetensors")
    place = Path(str(vae.__file__)).parents[1] / "configs/qwen3_06b"
    config = transformers.Qwen3Config.from_pretrained(place)
    model = transformers.Qwen3ForCausalLM(config).model
    hub.write_random(model, folder / "text.safetensors", lambda name: f"model.{name}")


def _write_gemma_tokenizer(folder: Path) -> None:
    specials = ("<pad>", "<eos>", "<bos>", "<unk>")
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    hub.byte_tokenizer(folder, specials, tokenizer_class="PreTrainedTokenizerFast", **named)
    hub.write_json(folder / "config.json", {"model_type": "gemma2"})


def _write_byt5_tokenizer(folder: Path) -> None:
    hub.write_json(folder / "tokenizer_config.json", {"tokenizer_class": "ByT5Tokenizer"})
    hub.write_json(folder / "config.json", {"model_type": "t5", "tokenizer_class": "ByT5Tokenizer"})


SCRIPTS = dict.fromkeys(("strategies", "sdscripts_dataset.py"), _shrink)
REPOS = {
    "google/gemma-2-2b": _write_gemma_tokenizer,
    "google/byt5-small": _write_byt5_tokenizer,
    "Qwen/Qwen2.5-VL-7B-Instruct": lambda folder: hub.byte_tokenizer(
        folder, _SPECIALS, **TOKENIZER
    ),
}
WEIGHTS = {"lumina": _write_lumina, "hunyuan_image": _write_hunyuan, "anima": _write_anima}
