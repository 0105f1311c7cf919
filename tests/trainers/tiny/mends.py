"""What no table of small settings says: names that libraries have lost, and networks as folders."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import tiny
from tiny import hub


def sd_scripts() -> None:
    """Let sd-scripts of the working directory be imported with version 5 of transformers."""
    sys.path.insert(0, os.getcwd())
    import transformers

    # The first of these names is imported and not used.
    sys.modules["transformers"].CLIPFeatureExtractor = transformers.CLIPImageProcessor
    tokenizer = transformers.PreTrainedTokenizerBase
    tokenizer.batch_encode_plus = tokenizer.__call__


def text_model() -> None:
    """Give CLIP the name of a part that it had before version 5 of transformers."""
    from transformers import CLIPTextModel

    if not hasattr(CLIPTextModel, "text_model"):
        CLIPTextModel.text_model = property(lambda self: self)


def clip_of_flux() -> None:
    """Let a CLIP of FLUX.1 be made, of whose configuration version 5 takes the text's half."""
    import transformers
    from musubi_tuner.flux import flux_utils

    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    kept += ("num_hidden_layers", "projection_dim", "eos_token_id", "bos_token_id")
    flux_utils.CLIPConfig = lambda **config: transformers.CLIPTextConfig(
        **{name: config[name] for name in kept}
    )


def clip_of_wan() -> None:
    """Keep one dtype in Wan's CLIP: a CPU has no LayerNorm of two."""
    import torch
    from musubi_tuner.wan.configs import wan_i2v_14B

    wan_i2v_14B.i2v_14B["clip_dtype"] = torch.float32


def meta_tensors() -> None:
    """Leave buffers of Ideogram 4 as they are, which `to_empty` fills with what memory holds."""
    import torch
    from musubi_tuner.ideogram4 import ideogram4_utils

    def fill(model: Any) -> None:
        for layer in model.modules():
            for name, value in layer.named_parameters(recurse=False):
                setattr(layer, name, torch.nn.Parameter(torch.empty_like(value, device="cpu")))

    ideogram4_utils._materialize_meta_tensors = fill


def kandinsky_text(folder: Path) -> None:
    """Write the folders `clip` and `qwen` of Kandinsky 5."""
    import torch
    import transformers
    from musubi_tuner.hunyuan_model import text_encoder
    from musubi_tuner.qwen_image import qwen_image_utils

    torch.manual_seed(1)
    config = transformers.CLIPTextConfig(**text_encoder.CLIP_CONFIG)
    transformers.CLIPTextModel(config).save_pretrained(folder / "clip")
    tiny.write_tokenizer(folder / "clip", "clip")
    file = folder / "none.safetensors"
    made = hub.network_of(lambda: qwen_image_utils.load_qwen2_5_vl(str(file), None, "cpu"), file)
    tiny.write_tokenizer(folder / "qwen", "qwen2_processor")
    type(made)(made.config).save_pretrained(folder / "qwen")


def hidream(path: Path) -> None:
    """Write the one tensor of HiDream O1 that caching reads."""
    import torch
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    weight = torch.randn(272, 32, generator=torch.Generator().manual_seed(1))
    save_file({"model.language_model.embed_tokens.weight": weight}, path)
