"""Small projects of HunyuanVideo, FramePack, Kandinsky 5 and the models that read Qwen3-VL."""

from __future__ import annotations

from typing import Any

from real_models import World

# Videos have 20 frames: at 24 a second, and for FramePack at 30, as many as the clips need are
# kept, at a lower rate fewer.
_CLIPS = {"target_frames": [5], "source_fps": 96.0}
_SECTIONS = {"target_frames": [9], "fp_latent_window_size": 1, "source_fps": 66.0}
_ONE_FRAME = {"fp_1f_clean_indices": [0, 10], "fp_1f_target_index": 1, "fp_1f_no_post": True}


def _two(architecture: str, first: str, second: str, **more: Any) -> dict[str, Any]:
    texts = [f"{first}.safetensors", f"{second}.safetensors"]
    return {"architecture": architecture, "vae": "vae.safetensors", "text": texts, **more}


def _framepack(task: str) -> dict[str, Any]:
    return _two("framepack", "llama", "clip", task=task, image_encoder="siglip.safetensors")


def _hunyuan_1_5(task: str, **more: Any) -> dict[str, Any]:
    # 3D convolutions of 16 bits take minutes on a CPU.
    dtype = {"vae_dtype": "float32"}
    return _two("hunyuan_video_1_5", "qwen", "byt5", task=task, **dtype, **more)


def _qwen3(architecture: str) -> dict[str, Any]:
    return {
        "architecture": architecture,
        "vae": "vae.safetensors",
        "text": "qwen.safetensors",
    }


CLIP_WORLDS = {
    "hunyuan_video": World("hunyuan", _two("hunyuan_video", "llm", "clip"), _CLIPS, video=True),
    "hunyuan_video_images": World("hunyuan", _two("hunyuan_video", "llm", "clip")),
    "hunyuan_video_1_5": World("hunyuan_1_5", _hunyuan_1_5("t2v")),
    "hunyuan_video_1_5_i2v": World(
        "hunyuan_1_5",
        _hunyuan_1_5("i2v", image_encoder="siglip.safetensors"),
        _CLIPS,
        video=True,
    ),
    "framepack": World("hunyuan", _framepack("i2v"), _SECTIONS, video=True),
    "framepack_f1": World("hunyuan", _framepack("f1"), _SECTIONS, video=True),
    "framepack_one_frame": World(
        "hunyuan", _framepack("one_frame"), _ONE_FRAME, controls=("_0", "_1")
    ),
    "kandinsky5": World(
        "kandinsky",
        {
            "architecture": "kandinsky5",
            "task": "k5-pro-t2v-5s-sd",
            "vae": "vae.safetensors",
            "text": [{"path": "qwen"}, {"path": "clip"}],
        },
        _CLIPS,
        video=True,
    ),
    "kandinsky5_nabla": World(
        "kandinsky",
        {
            "architecture": "kandinsky5",
            "task": "k5-pro-i2v-5s-hd",
            "vae": "vae.safetensors",
            "text": [{"path": "qwen"}, {"path": "clip"}],
            "latents_arguments": ["--nabla_resize"],
        },
    ),
    "krea2": World("krea2", _qwen3("krea2")),
    "ideogram4": World("ideogram4", _qwen3("ideogram4")),
    "hidream_o1": World("hidream_o1", {"architecture": "hidream_o1", "task": "t2i"}),
    "hidream_o1_i2i": World(
        "hidream_o1",
        {"architecture": "hidream_o1", "task": "i2i", "text": "dit.safetensors"},
        controls=("",),
    ),
}
