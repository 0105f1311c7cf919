"""Rows of sd-scripts' architectures.

Sources: sd-scripts' library/strategy_*.py, `load_target_model` and `verify_bucket_reso_steps` of
its training scripts, and the commands in docs/*train_network.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from latentmake.config.rows import Call, Encoder, File, Network, Option, Setting, Strategies

_LATENTS = ("latents", "original_size", "crop_ltrb")
_LORA: Mapping[str, Setting] = {
    "learning_rate": 1e-4,
    "network_dim": 16,
    "network_alpha": 1.0,
    "gradient_checkpointing": True,
}
"""Of most guides; an alpha of None is the rank."""

SDSCRIPTS: Mapping[str, Strategies] = {
    "sd1": Strategies(
        "Stable Diffusion 1.x",
        "_sd.npz",
        ("train_network", "fine_tune"),
        "networks.lora",
        ("input_blocks.",),
        complete=("fine_tune",),
        settings=_LORA,
    ),
    "sd2": Strategies(
        "Stable Diffusion 2.x",
        "_sd.npz",
        ("train_network", "fine_tune"),
        "networks.lora",
        ("input_blocks.",),
        switches=("--v2",),
        complete=("fine_tune",),
        settings=_LORA,
    ),
    "sdxl": Strategies(
        "Stable Diffusion XL",
        "_sdxl.npz",
        ("sdxl_train_network", "sdxl_train"),
        "networks.lora",
        ("input_blocks.",),
        text_ending="_te_outputs.npz",
        complete=("sdxl_train",),
        settings={**_LORA, "network_dim": 32, "network_alpha": 16.0},
    ),
    "sd3": Strategies(
        "Stable Diffusion 3",
        "_sd3.npz",
        ("sd3_train_network",),
        "networks.lora_sd3",
        ("joint_blocks.",),
        text_ending="_sd3_te.npz",
        files=(File("--clip_l", "text"), File("--clip_g", "text.1"), File("--t5xxl", "text.2")),
        batches_text=True,
        settings=_LORA,
    ),
    "flux": Strategies(
        "FLUX.1",
        "_flux.npz",
        ("flux_train_network",),
        "networks.lora_flux",
        ("double_blocks.", "single_transformer_blocks."),
        text_ending="_flux_te.npz",
        files=(File("--ae", "vae"), File("--clip_l", "text"), File("--t5xxl", "text.1")),
        insists=True,
        batches_text=True,
        divisor=64,  # train_network's, which it asks besides its own
        settings={
            **_LORA,
            "--guidance_scale": 1.0,
            "--timestep_sampling": "flux_shift",
            "--model_prediction_type": "raw",
        },
    ),
    "lumina": Strategies(
        "Lumina Image 2.0",
        "_lumina.npz",
        ("lumina_train_network",),
        "networks.lora_lumina",
        ("cap_embedder.",),
        text_ending="_lumina_te.npz",
        files=(File("--gemma2", "text"), File("--ae", "vae")),
        insists=True,
        batches_text=True,
        samples=True,
        side=16,
        divisor=64,  # as Flux
        settings={
            **_LORA,
            "network_dim": 8,
            "network_alpha": None,
            "--timestep_sampling": "nextdit_shift",
        },
        channels=16,
        latents=Encoder(
            "library.strategy_lumina.LuminaLatentsCachingStrategy",
            (
                Network(
                    "vae",
                    Call("library.lumina_util.load_ae", {"device": "cpu"}),
                    "ckpt_path",
                    ("encoder.down.3.",),
                ),
            ),
            _LATENTS,
        ),
        text=Encoder(
            "library.strategy_lumina.LuminaTextEncoderOutputsCachingStrategy",
            (
                Network(
                    "text",
                    Call("library.lumina_util.load_gemma2", {"device": "cpu"}),
                    "ckpt_path",
                    ("post_feedforward_layernorm",),
                ),
            ),
            ("hidden_state", "attention_mask", "input_ids"),
            options={
                "--system_prompt": Option("system_prompt", "text"),
                "--gemma2_max_token_length": Option("max_length"),
                "--tokenizer_cache_dir": Option("tokenizer_cache_dir", "cache"),
            },
            tokenizer=Call(
                "library.strategy_lumina.LuminaTokenizeStrategy",
                {"system_prompt": "", "max_length": None},
            ),
            encoding="library.strategy_lumina.LuminaTextEncodingStrategy",
            autocast=True,
        ),
    ),
    "hunyuan_image": Strategies(
        "HunyuanImage 2.1",
        "_hi.npz",
        ("hunyuan_image_train_network",),
        "networks.lora_hunyuan_image",
        ("byt5_in.",),
        text_ending="_hi_te.npz",
        files=(File("--text_encoder", "text"), File("--byt5", "text.1"), File("--vae", "vae")),
        insists=True,
        batches_text=True,
        settings=_LORA,
        pixels=32,
        side=32,
        divisor=64,
        channels=64,
        samples=True,
        latents=Encoder(
            "library.strategy_hunyuan_image.HunyuanImageLatentsCachingStrategy",
            (
                Network(
                    "vae",
                    Call("library.hunyuan_image_vae.load_vae", {"device": "cpu"}),
                    "vae_path",
                    ("encoder.down.5.",),
                    dtype="float16",
                    takes_dtype=False,
                ),
            ),
            _LATENTS,
            options={"--vae_chunk_size": Option("chunk_size")},
        ),
        text=Encoder(
            "library.strategy_hunyuan_image.HunyuanImageTextEncoderOutputsCachingStrategy",
            (
                Network(
                    "text",
                    Call("library.hunyuan_image_text_encoder.load_qwen2_5_vl", {"device": "cpu"}),
                    "ckpt_path",
                    ("visual.blocks.",),
                    dtype="bfloat16",
                    place=1,
                ),
                Network(
                    "text.1",
                    Call("library.hunyuan_image_text_encoder.load_byt5", {"device": "cpu"}),
                    "ckpt_path",
                    ("SelfAttention.",),
                    dtype="float16",
                    place=1,
                ),
            ),
            ("vlm_embed", "vlm_mask", "byt5_embed", "byt5_mask", "ocr_mask"),
            options={"--tokenizer_cache_dir": Option("tokenizer_cache_dir", "cache")},
            tokenizer=Call("library.strategy_hunyuan_image.HunyuanImageTokenizeStrategy"),
            encoding="library.strategy_hunyuan_image.HunyuanImageTextEncodingStrategy",
        ),
    ),
    "anima": Strategies(
        "Anima",
        "_anima.npz",
        ("anima_train_network",),
        "networks.lora_anima",
        ("llm_adapter.", "x_embedder."),
        text_ending="_anima_te.npz",
        files=(File("--qwen3", "text"), File("--vae", "vae")),
        insists=True,
        folders=("--qwen3",),
        batches_text=True,
        settings={**_LORA, "network_dim": 8},
        side=16,
        divisor=16,
        channels=16,
        latents=Encoder(
            "library.strategy_anima.AnimaLatentsCachingStrategy",
            (
                Network(
                    "vae",
                    Call(
                        "library.qwen_image_autoencoder_kl.load_vae",
                        {"device": "cpu", "disable_mmap": True},
                    ),
                    "vae_path",
                    ("encoder.down_blocks.", "encoder.downsamples."),
                    takes_dtype=False,
                ),
            ),
            _LATENTS,
            options={
                "--vae_chunk_size": Option("spatial_chunk_size"),
                "--vae_disable_cache": Option("disable_cache", "flag"),
            },
        ),
        text=Encoder(
            "library.strategy_anima.AnimaTextEncoderOutputsCachingStrategy",
            (
                Network(
                    "text",
                    Call("library.anima_utils.load_qwen3_text_encoder", {"device": "cpu"}),
                    "qwen3_path",
                    ("self_attn.q_norm.",),
                    place=0,
                ),
            ),
            ("prompt_embeds", "attn_mask", "t5_input_ids", "t5_attn_mask", "caption_dropout_rate"),
            options={
                "--qwen3_max_token_length": Option("qwen3_max_length"),
                "--t5_max_token_length": Option("t5_max_length"),
                "--t5_tokenizer_path": Option("t5_tokenizer_path", "path"),
            },
            tokenizer=Call("library.strategy_anima.AnimaTokenizeStrategy"),
            paths={"qwen3_path": "text"},
            encoding="library.strategy_anima.AnimaTextEncodingStrategy",
            autocast=True,
            folders=("configs/qwen3_06b", "configs/t5_old"),
        ),
    ),
}
"""Name in the configuration -> facts."""
