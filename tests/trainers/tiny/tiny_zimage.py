"""Z-Image, and the Qwen3 of FLUX.2 klein: three layers; a VAE of 32 channels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny import hub

TRANSFORMERS = ["Qwen3Config", "Qwen3ForCausalLM", "Qwen2Tokenizer"]

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
TOKENIZER = {
    "tokenizer_class": "Qwen2Tokenizer",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "model_max_length": 131072,
    "chat_template": "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
}
_QWEN3 = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_window_layers": 3,
    "bos_token_id": 256,
    "eos_token_id": 258,
}
_VAE = {"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1}


def shrink_qwen3() -> None:
    """Let musubi-tuner make tiny Qwen3s."""
    from musubi_tuner.zimage import zimage_utils

    made = zimage_utils.Qwen3Config
    zimage_utils.Qwen3Config = lambda **config: made(**{**config, **_QWEN3})


def write_qwen3(path: Path) -> None:
    """Write a Qwen3, without the head that is tied to its embeddings."""
    import transformers
    from musubi_tuner.zimage import zimage_utils

    settings = hub.settings_of(
        zimage_utils, "Qwen3Config", lambda: zimage_utils.load_qwen3("", None, "cpu")
    )
    config = transformers.Qwen3Config(**{**settings, **_QWEN3})
    hub.write_random(transformers.Qwen3ForCausalLM._from_config(config), path)


def _shrink() -> None:
    from musubi_tuner.zimage import zimage_autoencoder

    shrink_qwen3()
    made = zimage_autoencoder.AutoencoderKL
    zimage_autoencoder.AutoencoderKL = lambda **given: made(**{**given, **_VAE})


def _write(folder: Path) -> None:
    from musubi_tuner.zimage import zimage_autoencoder as vae

    settings: dict[str, Any] = hub.settings_of(
        vae, "AutoencoderKL", lambda: vae.load_autoencoder_kl("")
    )
    hub.write_random(vae.AutoencoderKL(**{**settings, **_VAE}), folder / "vae.safetensors")
    write_qwen3(folder / "text.safetensors")


def write_tokenizer(folder: Path) -> None:
    """Write Qwen3's tokenizer."""
    hub.byte_tokenizer(folder, SPECIALS, **TOKENIZER)


SCRIPTS = dict.fromkeys(
    ("zimage_cache_latents.py", "zimage_cache_text_encoder_outputs.py"), _shrink
)
REPOS = {"Tongyi-MAI/Z-Image": lambda folder: write_tokenizer(folder / "tokenizer")}
WEIGHTS = {"z_image": _write}
