"""Wan: a VAE of 8 channels, a umT5 of one layer as wide as its networks want it, a small CLIP."""

from __future__ import annotations

import functools
from pathlib import Path

from tiny import hub

_T5 = {"vocab_size": 98, "dim_attn": 8, "dim_ffn": 8, "num_heads": 2, "encoder_layers": 1}
_CLIP = {
    "embed_dim": 16,
    "image_size": 28,
    "vision_dim": 32,
    "vision_heads": 2,
    "vision_layers": 2,
    "vocab_size": 98,
    "max_text_len": 16,
    "text_dim": 16,
    "text_heads": 2,
    "text_layers": 1,
}


def _shrink() -> None:
    import torch
    from musubi_tuner.wan.configs import wan_i2v_14B
    from musubi_tuner.wan.modules import clip, t5, vae

    wan_i2v_14B.i2v_14B["clip_dtype"] = torch.float32  # a CPU has no LayerNorm of two dtypes
    clip.clip_xlm_roberta_vit_h_14 = functools.partial(clip.clip_xlm_roberta_vit_h_14, **_CLIP)

    t5.umt5_xxl = functools.partial(t5.umt5_xxl, **_T5)
    vae._video_vae = functools.partial(vae._video_vae, dim=8)


def _write(folder: Path) -> None:
    from musubi_tuner.wan.modules import clip, t5, vae

    _write_tokenizer(folder / "tokenizer", "umt5")
    encoder = clip.clip_xlm_roberta_vit_h_14(**_CLIP)
    hub.write_random(encoder, folder / "clip.safetensors")
    model = t5.umt5_xxl(encoder_only=True, return_tokenizer=False, **_T5)
    hub.write_random(model, folder / "text.safetensors")
    kept: dict[str, object] = hub.settings_of(
        vae, "WanVAE_", lambda: vae._video_vae("", z_dim=16, dim=8)
    )
    hub.write_random(vae.WanVAE_(**kept), folder / "vae.safetensors")


def _write_tokenizer(folder: Path, kind: str) -> None:
    hub.t5_tokenizer(folder)
    hub.write_json(folder / "config.json", {"model_type": kind})


SCRIPTS = dict.fromkeys(("wan_cache_latents.py", "wan_cache_text_encoder_outputs.py"), _shrink)
REPOS = {
    "Wan-AI/Wan2.1-T2V-14B": lambda folder: _write_tokenizer(folder / "google/umt5-xxl", "umt5"),
    "Wan-AI/Wan2.1-I2V-14B-720P": lambda folder: _write_tokenizer(
        folder / "xlm-roberta-large", "xlm-roberta"
    ),
}
WEIGHTS = {"wan": _write}
