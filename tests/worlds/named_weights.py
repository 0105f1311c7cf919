"""Models with the real names and shapes of their tensors, in files of a few kilobytes.

A header says the shapes; all tensors share two bytes. Names are those that diffusers, transformers
and the original releases have.
"""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from pickle import dumps

Shapes = dict[str, tuple[int, ...]]


def _unet(width: int, *, xl: bool = False) -> Shapes:
    block = f"down_blocks.{int(xl)}.attentions.0.transformer_blocks.0"
    layers = {f"{block}.attn2.{x}.weight": (320, width) for x in ("to_k", "to_v")}
    own = [f"{block}.attn1.{x}.weight" for x in ("to_q", "to_k", "to_v", "to_out.0")]
    layers |= dict.fromkeys([*own, f"{block}.attn2.to_q.weight"], (320, 320))
    if xl:
        layers["add_embedding.linear_1.weight"] = (1280, 2816)
    return {"conv_in.weight": (320, 4, 3, 3), **layers}


def _vae(channels: int) -> Shapes:
    return {
        "encoder.conv_in.weight": (128, 3, 3, 3),
        "encoder.down_blocks.0.resnets.0.conv1.weight": (128, 128, 3, 3),
        "decoder.conv_in.weight": (512, channels, 3, 3),
    }


def _original_vae(channels: int) -> Shapes:
    return {
        "encoder.conv_in.weight": (128, 3, 3, 3),
        "encoder.down.0.block.0.conv1.weight": (128, 128, 3, 3),
        "encoder.down.3.block.0.conv1.weight": (512, 512, 3, 3),
        "decoder.conv_in.weight": (512, channels, 3, 3),
    }


def _clip(width: int, tokens: int = 49408) -> Shapes:
    return {
        "text_model.embeddings.token_embedding.weight": (tokens, width),
        "text_model.embeddings.position_embedding.weight": (77, width),
        "text_model.encoder.layers.0.self_attn.q_proj.weight": (width, width),
    }


def _t5(width: int = 4096, tokens: int = 32128) -> Shapes:
    return {
        "shared.weight": (tokens, width),
        "encoder.block.0.layer.0.SelfAttention.q.weight": (width, width),
    }


def _language(width: int, prefix: str = "model.") -> Shapes:
    return {
        f"{prefix}embed_tokens.weight": (151936, width),
        f"{prefix}layers.0.self_attn.q_proj.weight": (width, width),
        f"{prefix}layers.0.self_attn.q_norm.weight": (128,),
        f"{prefix}layers.0.mlp.gate_proj.weight": (9728, width),
    }


def _wan(width: int, channels: int = 16, *, clip: bool = False) -> Shapes:
    block = {
        f"blocks.0.{place}.{x}.weight": (width, width)
        for place in ("self_attn", "cross_attn")
        for x in ("q", "k", "v", "o")
    }
    image = {"img_emb.proj.1.weight": (1280, 1280)} if clip else {}
    return {"patch_embedding.weight": (width, channels, 1, 2, 2), **block, **image}


def _below(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


CHECKPOINT: Shapes = {
    "model.diffusion_model.input_blocks.0.0.weight": (320, 4, 3, 3),
    **_below("first_stage_model.", _original_vae(4)),
    **_below("cond_stage_model.transformer.", _clip(768)),
}
"""Some of a file of Stable Diffusion 1.5 as on Civitai; see `checkpoint_world` for all of one."""
WAN_VAE = ("encoder.conv1.weight", "encoder.downsamples.0.residual.0.gamma", "decoder.conv1.weight")
UMT5 = ("token_embedding.weight", "blocks.0.attn.q.weight", "blocks.0.ffn.gate.0.weight")
WAN_I2V = _wan(5120, 36, clip=True)
LORA: Shapes = {
    "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight": (16, 320),
    "lora_unet_down_blocks_0_attentions_0_proj_in.lora_up.weight": (320, 16),
}
NETWORKS: dict[str, Shapes] = {
    "sd3": {
        "model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight": (4608, 1536),
        **_below("first_stage_model.", _original_vae(16)),
    },
    "flux": {
        "double_blocks.0.img_mod.lin.weight": (18432, 3072),
        "single_blocks.0.modulation.lin.weight": (9216, 3072),
    },
    "qwen_image": {"transformer_blocks.0.img_mod.1.weight": (18432, 3072)},
    "z_image": {
        "cap_pad_token": (1, 3840),
        "cap_embedder.0.weight": (2560,),
        "noise_refiner.0.attention.qkv.weight": (11520, 3840),
    },
    "klein_4b": {"double_stream_modulation_img.lin.weight": (18432, 3072)},
    "lumina": {
        "cap_embedder.0.weight": (2304,),
        "noise_refiner.0.attention.qkv.weight": (3840, 2304),
    },
    "anima": {
        "net.llm_adapter.blocks.0.cross_attn.k_proj.weight": (1024, 1024),
        "net.x_embedder.proj.1.weight": (2048, 68),
    },
    "hunyuan_image": {
        "byt5_in.fc1.weight": (2048, 1472),
        "double_blocks.0.img_mod.linear.weight": (21504, 3584),
    },
}


def write(path: Path, shapes: Shapes, dtype: str = "BF16") -> Path:
    """Write a safetensors file whose tensors share two bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 2]}
        for name, shape in shapes.items()
    }
    head = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + bytes(2))
    return path


def write_torch(path: Path, names: Iterable[str]) -> Path:
    """Write a torch file, as far as the names in its pickle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", dumps(dict.fromkeys(names)))
    return path


def _json(path: Path, **values: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def _tokenizer(folder: Path, tokenizer: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(tokenizer, folder)


def _clip_folder(folder: Path, width: int, name: str = "CLIPTextModel") -> None:
    write(folder / "model.safetensors", _clip(width))
    sizes = {"hidden_size": width, "max_position_embeddings": 77, "num_hidden_layers": 12}
    _json(folder / "config.json", architectures=[name], model_type="clip_text_model", **sizes)


def _vae_folder(folder: Path, channels: int) -> None:
    write(folder / "diffusion_pytorch_model.safetensors", _vae(channels))
    blocks = [128, 256, 512, 512]
    _json(
        folder / "config.json",
        _class_name="AutoencoderKL",
        latent_channels=channels,
        block_out_channels=blocks,
    )


def _unet_folder(folder: Path, width: int, size: int) -> None:
    write(folder / "diffusion_pytorch_model.safetensors", _unet(width, xl=width == 2048))
    conditions = {"addition_embed_type": "text_time"} if width == 2048 else {}
    name = "UNet2DConditionModel"
    _json(folder / "config.json", _class_name=name, sample_size=size, **conditions)


def sd15(folder: Path, tokenizer: Path) -> Path:
    """The pipeline of Stable Diffusion 1.5."""
    _json(folder / "model_index.json", _class_name="StableDiffusionPipeline")
    _json(folder / "scheduler/scheduler_config.json", prediction_type="epsilon")
    _tokenizer(folder / "tokenizer", tokenizer)
    _clip_folder(folder / "text_encoder", 768)
    _vae_folder(folder / "vae", 4)
    _unet_folder(folder / "unet", 768, 64)
    return folder


def sdxl(folder: Path, tokenizer: Path) -> Path:
    """The pipeline of Stable Diffusion XL."""
    _json(folder / "model_index.json", _class_name="StableDiffusionXLPipeline")
    _json(folder / "scheduler/scheduler_config.json", prediction_type="epsilon")
    for number, (width, name) in {
        "": (768, "CLIPTextModel"),
        "_2": (1280, "CLIPTextModelWithProjection"),
    }.items():
        _tokenizer(folder / f"tokenizer{number}", tokenizer)
        _clip_folder(folder / f"text_encoder{number}", width, name)
    _vae_folder(folder / "vae", 4)
    _unet_folder(folder / "unet", 2048, 128)
    return folder


def _text_configs(folder: Path, tokenizer: Path, number: int) -> None:
    for each in range(number):
        suffix = f"_{each + 1}" if each else ""
        _tokenizer(folder / f"tokenizer{suffix}", tokenizer)
        kind = "t5" if each == number - 1 else "clip_text_model"
        _json(folder / f"text_encoder{suffix}/config.json", model_type=kind)


def sd3(folder: Path, tokenizer: Path) -> Path:
    """The files of Stable Diffusion 3.5, with the configurations of its text encoders."""
    write(folder / "sd3.5_medium.safetensors", NETWORKS["sd3"])
    write(folder / "text_encoders/clip_l.safetensors", _clip(768))
    write(folder / "text_encoders/clip_g.safetensors", _clip(1280))
    write(folder / "text_encoders/t5xxl_fp16.safetensors", _t5())
    _text_configs(folder, tokenizer, 3)
    return folder


def flux(folder: Path, tokenizer: Path) -> Path:
    """The files of FLUX.1 dev as its guide names them."""
    write(folder / "ae.safetensors", _original_vae(16))
    write(folder / "clip_l.safetensors", _clip(768))
    write(folder / "t5xxl_fp16.safetensors", _t5())
    _text_configs(folder, tokenizer, 2)
    return write(folder / "flux1-dev.safetensors", NETWORKS["flux"])


def _wan_encoders(folder: Path, tokenizer: Path) -> None:
    write_torch(folder / "Wan2.1_VAE.pth", WAN_VAE)
    write_torch(folder / "models_t5_umt5-xxl-enc-bf16.pth", UMT5)
    _tokenizer(folder / "google/umt5-xxl", tokenizer)


def wan_original(folder: Path, tokenizer: Path) -> Path:
    """Wan 2.1 T2V 1.3B as it was released."""
    _wan_encoders(folder, tokenizer)
    write(folder / "diffusion_pytorch_model.safetensors", _wan(1536))
    _json(folder / "config.json", _class_name="WanModel", dim=1536)
    return folder


def wan_pair(folder: Path, tokenizer: Path) -> Path:
    """Wan 2.2 T2V A14B: the files of ComfyUI."""
    _wan_encoders(folder, tokenizer)
    names = [f"wan2.2_t2v_{noise}_noise_14B_fp16.safetensors" for noise in ("high", "low")]
    return [write(folder / name, _wan(5120), "F16") for name in names][-1]


def qwen_image(folder: Path, _: Path) -> Path:
    """Qwen-Image: the files of ComfyUI."""
    vae = {"encoder.conv1.weight": (96, 3, 3, 3, 3), "decoder.conv1.weight": (384, 16, 3, 3, 3)}
    write(folder / "vae/qwen_image_vae.safetensors", vae)
    write(folder / "text_encoders/qwen_2.5_vl_7b.safetensors", _language(3584))
    name = "diffusion_models/qwen_image_bf16.safetensors"
    return write(folder / name, NETWORKS["qwen_image"])


def z_image(folder: Path, _: Path) -> Path:
    """Z-Image: the files of ComfyUI."""
    write(folder / "vae/ae.safetensors", _original_vae(16))
    write(folder / "text_encoders/qwen_3_4b.safetensors", _language(2560))
    return write(folder / "diffusion_models/z_image_bf16.safetensors", NETWORKS["z_image"])


def klein(folder: Path, _: Path) -> Path:
    """FLUX.2 klein base 4B as its guide names the files."""
    write(folder / "ae.safetensors", _original_vae(32))
    for number in (1, 2):
        write(folder / f"text_encoder/model-{number:05d}-of-00002.safetensors", _language(2560))
    return write(folder / "flux2-klein-base-4b.safetensors", NETWORKS["klein_4b"])


def lumina(folder: Path, _: Path) -> Path:
    """Lumina Image 2.0: the files of its guide."""
    write(folder / "ae.safetensors", _original_vae(16))
    gemma = {**_language(2304), "model.layers.0.post_feedforward_layernorm.weight": (2304,)}
    write(folder / "gemma_2_2b_fp16.safetensors", gemma)
    return write(folder / "lumina_2_model_bf16.safetensors", NETWORKS["lumina"])


def anima(folder: Path, _: Path) -> Path:
    """Anima: the files of its guide."""
    vae = {
        "encoder.conv1.weight": (96, 3, 3, 3, 3),
        "encoder.downsamples.0.residual.0.gamma": (96, 1, 1, 1),
        "decoder.conv1.weight": (384, 16, 3, 3, 3),
    }
    write(folder / "split_files/vae/qwen_image_vae.safetensors", vae)
    write(folder / "split_files/text_encoders/qwen_3_06b_base.safetensors", _language(1024))
    name = "split_files/diffusion_models/anima-preview.safetensors"
    return write(folder / name, NETWORKS["anima"])


MODELS: dict[str, Callable[[Path, Path], Path]] = {
    each.__name__: each
    for each in (
        *(sd15, sdxl, sd3, flux, wan_original, wan_pair, qwen_image),
        *(z_image, klein, lumina, anima),
    )
}
"""Name -> function that writes the model and returns its place; it gets a tokenizer's folder."""
