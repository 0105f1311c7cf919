"""FLUX.1 Kontext and FLUX.2: autoencoders of 32 channels, text encoders of a few layers."""

from __future__ import annotations

from pathlib import Path

from tiny import hub, tiny_zimage

TRANSFORMERS = ["CLIPTextModel", "CLIPTokenizer", "T5EncoderModel", "T5Tokenizer"]
TRANSFORMERS += ["AutoProcessor", "Mistral3ForConditionalGeneration", "PixtralProcessor"]

_T5 = {"d_ff": 48, "d_kv": 16, "d_model": 32, "num_heads": 2, "num_layers": 2, "vocab_size": 98}
_CLIP = {
    "vocab_size": 514,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "projection_dim": 32,
    "eos_token_id": 513,
    "bos_token_id": 512,
}
_AUTOENCODER = {"ch": 32, "ch_mult": [1, 1, 1, 1], "num_res_blocks": 1}
_MISTRAL_TOKENS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]")
_MISTRAL_TOKENS += ("[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<pad>")
_MISTRAL = {
    "vocab_size": 272,
    "hidden_size": 32,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "image_token_index": 256 + _MISTRAL_TOKENS.index("[IMG]"),
    "image_size": 56,
}
_LAYERS = [1, 2, 3]  # outputs that the embedding is made of


def _shrink_flux_1() -> None:
    import transformers
    from musubi_tuner.flux import flux_models, flux_utils

    flux_utils.T5Config = lambda **config: transformers.T5Config(**{**config, **_T5})
    flux_utils.CLIPConfig = lambda **_: transformers.CLIPTextConfig(**_CLIP)
    for name, value in _AUTOENCODER.items():
        setattr(flux_models.configs_flux_dev_context.ae_params, name, value)


def _write_flux_1(folder: Path) -> None:
    import transformers
    from musubi_tuner.flux import flux_models, flux_utils

    _shrink_flux_1()
    params = flux_models.configs_flux_dev_context.ae_params
    hub.write_random(flux_models.AutoEncoder(params), folder / "vae.safetensors")
    settings = hub.settings_of(
        flux_utils, "T5Config", lambda: flux_utils.load_t5xxl("", None, "cpu")
    )
    t5 = transformers.T5EncoderModel._from_config(flux_utils.T5Config(**settings))
    hub.write_random(t5, folder / "text.safetensors")
    clip = transformers.CLIPTextModel._from_config(flux_utils.CLIPConfig())
    hub.write_random(clip, folder / "text_1.safetensors")


def _shrink_flux_2() -> None:
    import transformers
    from musubi_tuner.flux_2 import flux2_models, flux2_utils

    tiny_zimage.shrink_qwen3()
    made = transformers.Mistral3Config
    flux2_utils.Mistral3Config = lambda **config: made(**hub.shrunk(config, _MISTRAL))
    flux2_utils.OUTPUT_LAYERS_MISTRAL = flux2_utils.OUTPUT_LAYERS_QWEN3 = _LAYERS
    params = flux2_models.AutoEncoderParams
    flux2_models.AutoEncoderParams = lambda: params(**_AUTOENCODER)


def _write_flux_2(folder: Path) -> None:
    import transformers
    from musubi_tuner.flux_2 import flux2_models, flux2_utils

    autoencoder = flux2_models.AutoEncoder(flux2_models.AutoEncoderParams(**_AUTOENCODER))
    hub.write_random(autoencoder, folder / "vae.safetensors")
    tiny_zimage.write_qwen3(folder / "qwen3.safetensors")
    settings = hub.settings_of(
        flux2_utils,
        "Mistral3Config",
        lambda: flux2_utils.Mistral3Embedder("", None, "cpu"),
    )
    config = transformers.Mistral3Config(**hub.shrunk(settings, _MISTRAL))
    model = transformers.Mistral3ForConditionalGeneration._from_config(config)

    def rename(name: str) -> str:
        if name.startswith("lm_head"):
            return f"language_model.{name}"
        name = name.removeprefix("model.")
        return name.replace("language_model.", "language_model.model.", 1)

    hub.write_random(model, folder / "mistral.safetensors", rename)


def _write_mistral(folder: Path) -> None:
    hub.byte_tokenizer(
        folder,
        _MISTRAL_TOKENS,
        tokenizer_class="PreTrainedTokenizerFast",
        processor_class="PixtralProcessor",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        model_max_length=131072,
        padding_side="right",
    )
    template = (
        "{{ bos_token }}{% for message in messages %}"
        "{% set tag = 'SYSTEM_PROMPT' if message['role'] == 'system' else 'INST' %}"
        "[{{ tag }}]{% for part in message['content'] %}{{ part['text'] }}{% endfor %}[/{{ tag }}]"
        "{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    tokens = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]"}
    settings = {"patch_size": 14, "spatial_merge_size": 2, **tokens, "image_end_token": "[IMG_END]"}
    hub.write_json(
        folder / "processor_config.json", {"processor_class": "PixtralProcessor", **settings}
    )
    hub.write_json(
        folder / "preprocessor_config.json",
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 56}},
    )
    hub.write_json(folder / "config.json", {"model_type": "mistral3"})


SCRIPTS = dict.fromkeys(
    ("flux_kontext_cache_latents.py", "flux_kontext_cache_text_encoder_outputs.py"), _shrink_flux_1
) | dict.fromkeys(
    ("flux_2_cache_latents.py", "flux_2_cache_text_encoder_outputs.py"), _shrink_flux_2
)
REPOS = {
    "openai/clip-vit-large-patch14": hub.clip_tokenizer,
    "google/t5-v1_1-xxl": hub.t5_tokenizer,
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": _write_mistral,
    "Qwen/Qwen3-4B": tiny_zimage.write_tokenizer,
    "Qwen/Qwen3-8B": tiny_zimage.write_tokenizer,
}
WEIGHTS = {"flux_1": _write_flux_1, "flux_2": _write_flux_2}
