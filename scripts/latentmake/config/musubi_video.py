"""Rows of HunyuanVideo, HunyuanVideo 1.5, FramePack and Kandinsky 5; see `config.musubi`."""

from __future__ import annotations

from collections.abc import Mapping

from latentmake.config.row_parts import DIT, FIRST, I2V, LATENTS_16, TEXT, VAE, VIDEO, guide, shift
from latentmake.config.scripts import ATTENTIONS, File, Rule, Script, Scripts, Vae, Version

# Of HunyuanVideo, which FramePack and Kandinsky 5 share.
_HUNYUAN_VAE = VAE._replace(form="either")
_TEXTS = (
    File("--text_encoder1", "text", kind="language model", form="either"),
    File("--text_encoder2", "text.1", kind="CLIP text encoder", form="either"),
)
_IMAGE_ENCODER = File("--image_encoder", "image_encoder", kind="image encoder", form="either")
_SECTION = ("latents_clean_", "latents_clean_2x_", "latents_clean_4x_", "image_embeddings_")
# Of its image models the VAE is FLUX's, which the script of latents does not know.
_K5_TASKS = (
    "k5-lite-t2v-5s-sd",
    "k5-lite-t2v-10s-sd",
    "k5-lite-i2v-5s-sd",
    "k5-pro-t2v-5s-sd",
    "k5-pro-t2v-5s-hd",
    "k5-pro-t2v-10s-sd",
    "k5-pro-t2v-10s-hd",
    "k5-pro-i2v-5s-sd",
    "k5-pro-i2v-5s-hd",
    "k5-lite-t2v-5s-distil-sd",
    "k5-lite-t2v-10s-distil-sd",
    "k5-lite-t2v-5s-nocfg-sd",
    "k5-lite-t2v-10s-nocfg-sd",
    "k5-lite-t2v-5s-pretrain-sd",
    "k5-lite-t2v-10s-pretrain-sd",
)


VIDEO_ROWS: Mapping[str, Scripts] = {
    "hunyuan_video": Scripts(
        title="HunyuanVideo",
        attentions={**ATTENTIONS, "xformers": 0},
        mark=r"\bsingle_blocks\.0\.modulation\.linear\.",
        channels=LATENTS_16,
        fp8=(("fp8_base",),),
        suffix="hv",
        header="hunyuan_video",
        latents=Script("cache_latents.py", (VAE,), "--vae_dtype"),
        text=Script("cache_text_encoder_outputs.py", _TEXTS, "--text_encoder_dtype"),
        training=Script("hv_train_network.py", (DIT,)),
        network="networks.lora",
        tensors=("llm_", "clipL_"),
        versions={"": VIDEO},
        fps=24.0,
        settings={**guide(2e-4), **shift(7.0)},
    ),
    "hunyuan_video_1_5": Scripts(
        title="HunyuanVideo 1.5",
        mark=r"\bbyt5_in\.",
        channels={"latents": 32, "latents_image": 33},
        suffix="hv15",
        header="hunyuan_video_1_5",
        latents=Script(
            "hv_1_5_cache_latents.py",
            (
                File("--vae", "vae", kind="VAE", vae=Vae(3, 32)),
                _IMAGE_ENCODER._replace(required=False),
            ),
            "--vae_dtype",
        ),
        text=Script(
            "hv_1_5_cache_text_encoder_outputs.py", (TEXT, File("--byt5", "text.1", kind="T5"))
        ),
        training=Script("hv_1_5_train_network.py", (DIT,)),
        network="networks.lora_hv_1_5",
        tensors=("varlen_vl_embed_", "varlen_byt5_embed_"),
        versions={
            "t2v": Version(training=("--task", "t2v"), videos=True),
            "i2v": Version(
                latents=I2V,
                training=("--task", "i2v"),
                images=False,
                videos=True,
                needs=("image_encoder",),
                tensors=("latents_image_", "siglip_"),
            ),
        },
        pixels=16,
        fps=24.0,
        settings={**guide(1e-4), **shift(2.0)},
    ),
    "framepack": Scripts(
        title="FramePack",
        attentions={**ATTENTIONS, "sdpa": 1, "xformers": 1},
        mark=r"\bclean_x_embedder\.",
        channels={"latents": 16},
        rules=(Rule("--vae_dtype", values=("float16",)),),
        control_latents=False,
        suffix="fp",
        header="framepack",
        latents=Script(
            "fpack_cache_latents.py",
            (_HUNYUAN_VAE, _IMAGE_ENCODER),
            reads_controls=True,
        ),
        text=Script("fpack_cache_text_encoder_outputs.py", _TEXTS),
        training=Script("fpack_train_network.py", (DIT,)),
        network="networks.lora_framepack",
        tensors=("llama_vec_", "llama_attention_mask", "clip_l_pooler_"),
        versions={
            "i2v": Version(images=False, videos=True, needs=("image_encoder",), tensors=_SECTION),
            "f1": Version(
                latents=("--f1",),
                training=("--f1",),
                images=False,
                videos=True,
                needs=("image_encoder",),
                tensors=_SECTION,
            ),
            "one_frame": Version(
                latents=("--one_frame",),
                training=("--one_frame",),
                controls=(1, None),
                needs=("image_encoder",),
                tensors=("latents_clean_", "image_embeddings_"),
                one_frame=True,
            ),
        },
        fps=30.0,
        precisions=("bf16",),
        settings={**guide(2e-4), **shift(3.0)},
        sections=True,
    ),
    "kandinsky5": Scripts(
        title="Kandinsky 5",
        attentions={**ATTENTIONS, "flash3": None},
        mark=r"\bvisual_transformer_blocks\.0\.",
        channels={"latents": 16, "latents_image": 16},
        suffix="k5",
        header="kandinsky5",
        latents=Script("kandinsky5_cache_latents.py", (_HUNYUAN_VAE,), "--vae_dtype"),
        text=Script(
            "kandinsky5_cache_text_encoder_outputs.py",
            (
                File("--text_encoder_qwen", "text", kind="language model", form="folder"),
                File("--text_encoder_clip", "text.1", kind="CLIP text encoder", form="folder"),
            ),
        ),
        training=Script("kandinsky5_train_network.py", (DIT,)),
        network="networks.lora_kandinsky",
        tensors=("text_embeds_", "pooled_embed_", "attention_mask"),
        versions={
            task: Version(training=("--task", task), videos=True, tensors=FIRST)
            for task in _K5_TASKS
        },
        rounded={"--nabla_resize": 128},
        batch=1,  # embeddings of captions of different lengths are stacked
        fps=24.0,
        precisions=("bf16", "fp16"),
        settings={
            **guide(1e-4, network_alpha=None),
            **shift(5.0),
            "--optimizer_args": ["weight_decay=0.001", "betas=(0.9,0.95)"],
            "--lr_scheduler": "constant_with_warmup",
            "--lr_warmup_steps": 100,
        },
    ),
}
"""Name in the configuration -> facts."""
