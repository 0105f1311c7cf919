"""Settings of the trainer `musubi` that an architecture's training script refuses, or takes."""

from __future__ import annotations

from typing import Any

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen_image", {"mixed_precision": "fp16"}, "mixed_precision: Qwen-Image is not trained in"),
    ("krea2", {"fp8_base": True}, "fp8_base: the training script of Krea 2 does not take it alone"),
    ("hidream_o1", {"fp8_base": True}, "set `fp8_scaled: true` too"),
    ("hunyuan_video", {"fp8_base": True, "fp8_scaled": True}, "fp8_scaled: the training script"),
    ("ideogram4", {"fp8_base": True}, "fp8_base: the training script of Ideogram 4 does not"),
    ("z_image", {"timestep_boundary": 800}, "one network"),
    ("kandinsky5", {"network_module": "networks.loha"}, "not know the layers of Kandinsky 5"),
    ("krea2", {"network_module": "networks.lokr"}, "not know the layers of Krea 2"),
    ("z_image", {"attention": "flash3"}, "attention: Z-Image is not trained with flash3"),
    ("hidream_o1", {"attention": "xformers"}, "use one of auto, sdpa, flash_attn"),
    ("hunyuan_video", {"attention": "xformers"}, "needs --split_attn for any batch with xformers"),
    ("framepack", {"batch_size": 2}, "for batches of more than 1 with sdpa; add --split_attn"),
    ("qwen_image", {"attention": "flash_attn", "batch_size": 2}, "needs --split_attn"),
]
TAKEN: list[tuple[str, dict[str, Any]]] = [
    ("krea2", {"fp8_base": True, "fp8_scaled": True}),
    ("framepack", {"batch_size": 2, "arguments": ["--split_attn"]}),
    ("qwen_image", {"batch_size": 2}),
    ("hunyuan_video", {"attention": "xformers", "arguments": ["--split_attn"]}),
    ("hunyuan_video", {"fp8_base": True}),
    ("z_image", {"fp8_base": True, "mixed_precision": "fp16"}),
]
