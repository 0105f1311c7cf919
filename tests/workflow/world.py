"""A micro model and a dataset of a few tiny pictures, drawn and built from fixed seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

CAPTIONS = {
    "ant": "a red circle",
    "bee": "a blue square",
    "cat": "a green circle on grey",
    "dog": "a yellow square on black",
    "eel": "a white circle",
    "fox": "a blue square",  # the same as bee's
}
COLOURS = ["red", "blue", "green", "yellow", "white", "cyan", "magenta", "orange"]


def draw(path: Path, number: int, size: tuple[int, int] = (40, 36)) -> None:
    """Draw a picture; every number gives another one."""
    image = Image.new("RGB", size, (number * 37 % 256, number * 91 % 256, number * 53 % 256))
    width, height = size
    box = (width // 5, height // 5, width * 4 // 5, height * 4 // 5)
    pen = ImageDraw.Draw(image)
    shape = pen.ellipse if number % 2 else pen.rectangle
    shape(box, fill=COLOURS[number % len(COLOURS)])
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def make_dataset(folder: Path) -> None:
    for number, (stem, caption) in enumerate(CAPTIONS.items()):
        draw(folder / f"{stem}.png", number)
        (folder / f"{stem}.txt").write_text(f"{caption}\n", encoding="utf-8")


def keep(folder: Path, number: int) -> None:
    """Leave so many of a dataset's pictures, with their captions."""
    for stem in list(CAPTIONS)[number:]:
        (folder / f"{stem}.png").unlink()
        (folder / f"{stem}.txt").unlink()


def config() -> dict[str, Any]:
    return {
        "datasets": {"shapes": {"path": "data/shapes"}},
        "models": {
            "micro": {
                "vae": "models/micro/vae",
                "text": ["models/micro/text_encoder"],
                "unet": "models/micro/unet",
            }
        },
        "runs": {
            "tiny": {"datasets": ["shapes"], "model": "micro", "resolutions": [16, 32]},
        },
    }


def training() -> dict[str, Any]:
    """The shortest training, without sample pictures' guidance."""
    samples = {"num_inference_steps": 1, "guidance_scale": 1}
    return {"kind": "sd", "rank": 2, "steps": 2, "train_batch_size": 2, "samples": samples}


def make_model(folder: Path, width: int = 16) -> None:
    """Save a Stable Diffusion of some thousand random weights, laid out as diffusers does.

    Args:
        folder: where.
        width: of the text's embeddings: 768 as Stable Diffusion 1.x, for whatever goes by it.
    """
    import tiny_networks
    import torch
    from diffusers import DDPMScheduler
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    vae = tiny_networks.vae(mid_block_add_attention=False, sample_size=32)
    vae.save_pretrained(folder / "vae")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=32,
            projection_dim=width,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=77,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).save_pretrained(folder / "text_encoder")
    settings = {"sample_size": 4, "attention_head_dim": 4, "norm_num_groups": 4}
    tiny_networks.unet((8, 16), width, **settings).save_pretrained(folder / "unet")
    DDPMScheduler(beta_schedule="scaled_linear").save_pretrained(folder / "scheduler")


def make_tokenizer() -> Any:
    """A CLIP tokenizer that knows every byte and no merges."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *(f"{letter}</w>" for letter in letters)]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)
