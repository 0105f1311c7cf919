"""Qwen-Image: a Qwen2.5-VL of two layers and a VAE of four channels."""

from __future__ import annotations

from pathlib import Path

from tiny import hub

TRANSFORMERS = ["Qwen2_5_VLForConditionalGeneration", "Qwen2Tokenizer", "Qwen2VLProcessor"]
TRANSFORMERS += ["Qwen2_5_VLConfig"]

_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
_SPECIALS += ("<|image_pad|>", "<|video_pad|>", "<|vision_pad|>")
_ID = {token: 256 + number for number, token in enumerate(_SPECIALS)}
_TEXT = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "max_window_layers": 2,
    "mrope_section": [2, 3, 3],
    "bos_token_id": _ID["<|endoftext|>"],
    "eos_token_id": _ID["<|im_end|>"],
    "image_token_id": _ID["<|image_pad|>"],
    "video_token_id": _ID["<|video_pad|>"],
    "vision_token_id": _ID["<|vision_pad|>"],
    "vision_start_token_id": _ID["<|vision_start|>"],
    "vision_end_token_id": _ID["<|vision_end|>"],
}
_VISION = {
    "depth": 2,
    "fullatt_block_indexes": [1],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
}


def small_vl(config: dict) -> dict:  # type: ignore[type-arg]
    """Return the settings of a tiny Qwen2.5-VL."""
    return {**hub.shrunk(config, _TEXT), "vision_config": {**config["vision_config"], **_VISION}}


def shrink_vl(module) -> None:  # type: ignore[no-untyped-def]
    """Let a module make tiny Qwen2.5-VLs; it does not forget it when called again."""
    made = module.Qwen2_5_VLConfig
    module.Qwen2_5_VLConfig = lambda **config: made(**small_vl(config))


def shrink() -> None:
    """Let musubi-tuner make tiny encoders of Qwen-Image."""
    from musubi_tuner.qwen_image import qwen_image_autoencoder_kl as vae
    from musubi_tuner.qwen_image import qwen_image_utils

    shrink_vl(qwen_image_utils)
    made = vae.AutoencoderKLQwenImage
    qwen_image_utils.AutoencoderKLQwenImage = vae.AutoencoderKLQwenImage = lambda **given: made(
        **{**given, **_VAE}
    )


def write_processor(folder: Path) -> None:
    """Write the files of a Qwen2VLProcessor."""
    hub.byte_tokenizer(folder, _SPECIALS, **TOKENIZER)
    hub.write_json(folder / "config.json", {"model_type": "qwen2_5_vl"})  # as transformers 5 asks
    hub.write_json(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
            "patch_size": 14,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "min_pixels": 784,
            "max_pixels": 12544,
        },
    )


def write_vl(module, path: Path, load) -> None:  # type: ignore[no-untyped-def]
    """Write a Qwen2.5-VL under the names that its published files have."""
    import transformers

    settings = hub.settings_of(module, "Qwen2_5_VLConfig", load)
    config = transformers.Qwen2_5_VLConfig(**small_vl(settings))
    model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(config)

    def rename(name: str) -> str:
        return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")

    hub.write_random(model, path, rename)


def _write(folder: Path) -> None:
    from musubi_tuner.qwen_image import qwen_image_autoencoder_kl as vae
    from musubi_tuner.qwen_image import qwen_image_utils

    for name, channels in (("vae", 3), ("layered_vae", 4)):
        model = vae.AutoencoderKLQwenImage(**_VAE, input_channels=channels)
        hub.write_random(model, folder / f"{name}.safetensors")
    write_vl(
        qwen_image_utils,
        folder / "text.safetensors",
        lambda: qwen_image_utils.load_qwen2_5_vl("", None, "cpu"),
    )


_VAE = {"base_dim": 4, "num_res_blocks": 1}
TOKENIZER = {
    "tokenizer_class": "Qwen2Tokenizer",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "model_max_length": 131072,
}
SCRIPTS = dict.fromkeys(
    ("qwen_image_cache_latents.py", "qwen_image_cache_text_encoder_outputs.py"), shrink
)
REPOS = {
    "Qwen/Qwen-Image": lambda folder: hub.byte_tokenizer(
        folder / "tokenizer", _SPECIALS, **TOKENIZER
    ),
    "Qwen/Qwen-Image-Edit": lambda folder: write_processor(folder / "processor"),
}
WEIGHTS = {"qwen_image": _write}
