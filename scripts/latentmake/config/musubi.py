"""Architectures whose caches musubi-tuner's own scripts make: one row each, and parts they share.

Facts are read from its scripts, see `config.rows`. The names are those of its documentation.
"""

from __future__ import annotations

from collections.abc import Mapping

from latentmake.config.rows import ATTENTIONS, File, Rule, Script, Scripts, Setting, Vae
from latentmake.config.weights import Version

VAE = File("--vae", "vae", kind="VAE", vae=Vae(3, 16))
DIT = File("--dit", "dit")
TEXT = File("--text_encoder", "text", kind="language model")
VIDEO = Version(videos=True)
"""A version without arguments of its own, for images and videos."""
LATENTS_16 = {"latents": 16, "latents_control": 16}
"""Channels of most VAEs."""
I2V = ("--i2v",)
FIRST = ("latents_image_",)
"""Tensors of the first frame."""


def shift(value: float) -> Mapping[str, Setting]:
    """Return the trainer's settings for timesteps that are shifted by a value."""
    return {"timestep_sampling": "shift", "discrete_flow_shift": value}


def guide(learning_rate: float, **others: Setting) -> Mapping[str, Setting]:
    """Return the trainer's settings that the commands of musubi-tuner's guides have.

    Most name no alpha: the scripts' own is 1. None is the rank.
    """
    rank: dict[str, Setting] = {"network_dim": 32, "network_alpha": 1.0}
    rest: dict[str, Setting] = {"gradient_checkpointing": True, "seed": 42}
    return {"learning_rate": learning_rate, **rank, **rest, **others}


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

_IMAGE_VAE = VAE._replace(vae=Vae(2, 16))
_FLUX_2_VAE = VAE._replace(vae=Vae(2, 32))


_SCALED_ALONE = (("fp8_base", "fp8_scaled"),)
_UNWEIGHTED = Rule("--weighting_scheme", values=("none",))


def _qwen_image(
    title: str, suffix: str, versions: Mapping[str, Version], *, layers: bool = False
) -> Scripts:
    controlled = any(each.controls != (0, 0) for each in versions.values())
    vae = VAE._replace(vae=Vae(3, 16, colours=4)) if layers else VAE
    return Scripts(
        title=title,
        suffix=suffix,
        header="qwen_image",
        latents=Script("qwen_image_cache_latents.py", (vae,), reads_controls=controlled),
        text=Script("qwen_image_cache_text_encoder_outputs.py", (TEXT,), reads_controls=controlled),
        training=Script("qwen_image_train_network.py", (DIT,)),
        mark=r"\btransformer_blocks\.0\.img_mod\.",
        channels=LATENTS_16,
        rules=() if layers else (Rule("--remove_first_image_from_target", values=()),),
        # Without it their batches attend to padding.
        attentions={**ATTENTIONS, "flash_attn": 1, "xformers": 1},
        network="networks.lora_qwen_image",
        tensors=("varlen_vl_embed_",),
        versions=versions,
        precisions=("bf16",),
        settings={**guide(5e-5, network_dim=16), **shift(2.2)},
        layers=layers,
        sized_controls=controlled,
    )


def _model_version(name: str, controls: tuple[int, int | None] = (0, 0)) -> Version:
    flags = ("--model_version", name)
    return Version(flags, flags, flags, controls=controls)


def _flux_2(title: str, suffix: str, header: str, *versions: str) -> Scripts:
    named = {each: _model_version(each, (0, None)) for each in versions}
    return Scripts(
        title=title,
        suffix=suffix,
        header=header,
        latents=Script(
            "flux_2_cache_latents.py", (_FLUX_2_VAE,), "--vae_dtype", reads_controls=True
        ),
        text=Script("flux_2_cache_text_encoder_outputs.py", (TEXT,)),
        training=Script("flux_2_train_network.py", (DIT,)),
        mark=r"\bdouble_stream_modulation_img\.",
        channels={"latents": 128, "latents_control": 128},
        network="networks.lora_flux_2",
        tensors=("ctx_vec_",),
        versions=named if len(named) > 1 else {"": next(iter(named.values()))},
        pixels=16,
        precisions=("bf16", "fp16"),
        settings=guide(1e-4, timestep_sampling="flux2_shift", discrete_flow_shift=None),
        sized_controls=True,
    )


def _wan(
    task: str,
    *,
    first: bool = False,
    clip: bool = False,
    control: bool = False,
    boundary: int | None = None,
) -> Version:
    """Return a task of Wan: with the first frame's latents, a CLIP, or demanded controls."""
    return Version(
        latents=I2V if first else (),
        training=("--task", task),
        controls=(1, 1) if control else (0, 1),
        videos=True,
        needs=("clip",) if clip else (),
        tensors=(*(FIRST if first else ()), *(("clip_",) if clip else ())),
        boundary=boundary,
    )


def _hidream(model: str, task: str) -> Version:
    kind, edits = ("--model_type", model), task == "i2i"
    return Version(
        text=kind,
        training=(*kind, "--task", task),
        controls=(1, None) if edits else (0, 0),
        tensors=("latents_control_",) if edits else (),
    )


MUSUBI: Mapping[str, Scripts] = {
    "wan": Scripts(
        title="Wan",
        attentions={**ATTENTIONS, "flash3": None},
        mark=r"\bblocks\.0\.cross_attn\.k\.",
        channels={**LATENTS_16, "latents_image": 20},
        equal_shapes=True,
        suffix="wan",
        header="wan",
        latents=Script(
            "wan_cache_latents.py",
            (VAE, File("--clip", "clip", required=False, kind="image encoder")),
            "--vae_dtype",
            switches=(("--vae_cache_cpu", "vae_cache_cpu"),),
            reads_controls=True,
        ),
        text=Script(
            "wan_cache_text_encoder_outputs.py",
            (File("--t5", "text", kind="T5"),),
            switches=(("--fp8_t5", "fp8_t5"),),
        ),
        training=Script(
            "wan_train_network.py",
            (DIT, File("--dit_high_noise", "dit_high_noise", required=False)),
        ),
        network="networks.lora_wan",
        tensors=("varlen_t5_",),
        versions={
            "t2v-14B": _wan("t2v-14B"),
            "t2v-1.3B": _wan("t2v-1.3B"),
            "i2v-14B": _wan("i2v-14B", first=True, clip=True),
            "t2i-14B": _wan("t2i-14B"),
            "flf2v-14B": _wan("flf2v-14B", first=True, clip=True),
            "t2v-14B-FC": _wan("t2v-14B-FC", control=True),
            "t2v-1.3B-FC": _wan("t2v-1.3B-FC", control=True),
            "i2v-14B-FC": _wan("i2v-14B-FC", first=True, clip=True, control=True),
            "i2v-A14B": _wan("i2v-A14B", first=True, boundary=900),
            "t2v-A14B": _wan("t2v-A14B", boundary=875),
        },
        settings={**guide(2e-4), **shift(3.0)},
    ),
    "qwen_image": _qwen_image("Qwen-Image", "qi", {"": _model_version("original")}),
    "qwen_image_edit": _qwen_image(
        "Qwen-Image-Edit",
        "qie",
        {
            "edit": _model_version("edit", (1, 1)),
            "edit-2509": _model_version("edit-2509", (1, None)),
            "edit-2511": _model_version("edit-2511", (1, None)),
        },
    ),
    "qwen_image_layered": _qwen_image(
        "Qwen-Image-Layered", "qil", {"": _model_version("layered")}, layers=True
    ),
    "z_image": Scripts(
        title="Z-Image",
        mark=r"\bnoise_refiner\.0\.",
        channels=LATENTS_16,
        suffix="zi",
        header="z_image",
        latents=Script("zimage_cache_latents.py", (_IMAGE_VAE,)),
        text=Script("zimage_cache_text_encoder_outputs.py", (TEXT,)),
        training=Script("zimage_train_network.py", (DIT,)),
        network="networks.lora_zimage",
        tensors=("varlen_llm_embed_",),
        settings={**guide(1e-4), **shift(2.0)},
    ),
    "flux_2_dev": _flux_2("FLUX.2 dev", "f2d", "flux_2_dev", "dev"),
    "flux_2_klein_4b": _flux_2(
        "FLUX.2 klein 4B", "f2k4b", "flux_2_klein_4b", "klein-4b", "klein-base-4b"
    ),
    "flux_2_klein_9b": _flux_2(
        "FLUX.2 klein 9B", "f2k9b", "flux_2_klein_9b", "klein-9b", "klein-base-9b"
    ),
    "flux_kontext": Scripts(
        title="FLUX.1 Kontext",
        mark=r"\bdouble_blocks\.0\.img_mod\.lin\.",
        channels=LATENTS_16,
        suffix="fk",
        header="flux_kontext",
        latents=Script("flux_kontext_cache_latents.py", (_IMAGE_VAE,), reads_controls=True),
        text=Script(
            "flux_kontext_cache_text_encoder_outputs.py",
            (
                File("--text_encoder1", "text", kind="T5"),
                File("--text_encoder2", "text.1", kind="CLIP text encoder"),
            ),
        ),
        training=Script("flux_kontext_train_network.py", (DIT,)),
        network="networks.lora_flux",
        tensors=("t5_vec_", "clip_l_pooler_"),
        versions={"": Version(controls=(1, 1), tensors=("latents_control_",))},
        precisions=("bf16", "fp16"),
        settings=guide(1e-4, timestep_sampling="flux_shift", discrete_flow_shift=None),
        sized_controls=True,
    ),
    **VIDEO_ROWS,
    "krea2": Scripts(
        title="Krea 2",
        mark=r"\btxtfusion\.",
        channels=LATENTS_16,
        fp8=_SCALED_ALONE,
        rules=(
            Rule("--turbo_dit_cache", needs=("--turbo_dit",)),
            Rule("--turbo_dit", without=("--blocks_to_swap",)),
        ),
        suffix="kr2",
        header="krea2",
        latents=Script("krea2_cache_latents.py", (VAE,)),
        text=Script("krea2_cache_text_encoder_outputs.py", (TEXT,), "--text_encoder_dtype"),
        training=Script("krea2_train_network.py", (DIT,)),
        network="networks.lora_krea2",
        tensors=("varlen_krea2_vl_embed_",),
        precisions=("bf16",),
        settings={**guide(1e-4, network_alpha=None), **shift(2.5)},
    ),
    "ideogram4": Scripts(
        title="Ideogram 4",
        mark=r"\bllm_cond_proj\.",
        channels={"latents": 128},
        stamp=("model_type", "ideogram4_cond"),
        fp8=(),
        rules=(
            _UNWEIGHTED,
            Rule("--blocks_to_swap", most=33),
            Rule("--sample_prompts", needs=("--text_encoder", "--vae")),
        ),
        suffix="i4",
        header="ideogram4",
        latents=Script("ideogram4_cache_latents.py", (_FLUX_2_VAE,), "--vae_dtype"),
        text=Script("ideogram4_cache_text_encoder_outputs.py", (TEXT,)),
        training=Script("ideogram4_train_network.py", (DIT,)),
        network="networks.lora_ideogram4",
        tensors=("varlen_i4_llm_features_",),
        pixels=16,
        # Its guide names the sampling, which the script does not apply, and leaves the rate open:
        # it is that of the guide of HunyuanVideo, to which the guides refer for further options.
        settings=guide(2e-4, timestep_sampling="ideogram4_shift", discrete_flow_shift=None),
    ),
    "hidream_o1": Scripts(
        title="HiDream O1",
        attentions=dict.fromkeys(("sdpa", "flash_attn")),  # it reads no other flag
        mark=r"\bfinal_layer2\.",
        fp8=_SCALED_ALONE,
        rules=(_UNWEIGHTED,),
        suffix="ho1",
        header="hidream_o1_image",
        latents=Script("hidream_o1_cache_pixel.py", (), reads_controls=True),
        text=Script(
            "hidream_o1_cache_text_encoder_outputs.py",
            (File("--dit", "text", required=False, kind="language model", form="either"),),
            reads_controls=True,
        ),
        training=Script("hidream_o1_train_network.py", (DIT,)),
        network="networks.lora_hidream_o1",
        tensors=("varlen_input_ids_",),
        versions={
            "t2i": _hidream("full", "t2i"),
            "i2i": _hidream("full", "i2i"),
            "t2i-dev": _hidream("dev", "t2i"),
            "i2i-dev": _hidream("dev", "i2i"),
        },
        pixels=32,
        precisions=("bf16",),
        settings=guide(4e-5, timestep_sampling="uniform", discrete_flow_shift=None),
        sized_controls=True,
    ),
}
"""Name in the configuration -> facts; `config.architectures.ARCHITECTURES` holds a row of each."""
