"""Tiny BLIP that describes drawn figures: `data/tiny-captioner`.

The folder has the layout of transformers: `config.json`, `model.safetensors`, and the files of a
processor and its tokenizer, whose tokens are words. Weights are float16.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    BlipConfig,
    BlipForConditionalGeneration,
    BlipImageProcessor,
    BlipProcessor,
    PreTrainedTokenizerFast,
)

from demo.descent import descend
from demo.shapes import COLOURS, PATTERNS, SHAPES, draw_background, fill_mask, with_article

_SIDE = 64
_BATCH = 64
_SCENES = 24_000
_RATE = 2e-3
_SPECIAL = ("[PAD]", "[UNK]", "[BOS]", "[EOS]")
_OTHERS = ("a", "an", "and", "on", "background", "pointing", "up")
_OUTLINE = (28, 20, 36)
_MEAN = 0.5  # mean and deviation of pixels from 0 to 1 that the processor takes off


def write_tiny_captioner(folder: Path, *, seed: int = 0, steps: int = 2400) -> None:
    """Train the model and write its folder, in about 10 minutes on one core.

    Args:
        folder: folder of the model; an existing folder is written into.
        seed: seed of weights, figures and batches.
        steps: optimizer steps.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    dice = random.Random(seed)  # noqa: S311 - drawing, not cryptography
    scenes = [draw_figure(dice) for _ in range(min(_SCENES, _BATCH * steps))]
    pictures = torch.from_numpy(np.stack([np.asarray(small(picture)) for picture, _ in scenes]))
    processor = make_processor()
    read: Any = processor.tokenizer([caption for _, caption in scenes], padding=True)
    tokens = torch.tensor(read["input_ids"])
    network = make_network(processor.tokenizer)

    def loss() -> Tensor:
        chosen = torch.randint(len(pictures), (_BATCH,), generator=generator)
        pixels = (pictures[chosen].permute(0, 3, 1, 2).float() / 255 - _MEAN) / _MEAN
        mask = tokens[chosen] != network.config.text_config.pad_token_id
        labels = tokens[chosen].masked_fill(~mask, -100)
        value: Tensor = network(
            pixel_values=pixels, input_ids=tokens[chosen], attention_mask=mask, labels=labels
        ).loss
        return value

    descend(network, loss, steps, name="tiny captioner", learning_rate=_RATE)
    network.to(torch.float16).save_pretrained(folder)
    processor.save_pretrained(folder)
    config = folder / "config.json"  # transformers computes in the dtype of the configuration
    config.write_text(config.read_text().replace('"float16"', '"float32"'))


def make_network(tokenizer: Any) -> Any:
    """Return an untrained BLIP for pictures of 64 x 64 pixels.

    The weights come from torch's global generator.
    """
    sizes: dict[str, Any] = {
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "initializer_range": 0.05,
    }
    text = {
        "vocab_size": len(tokenizer),
        "encoder_hidden_size": 96,
        "num_hidden_layers": 2,
        "max_position_embeddings": 24,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "sep_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {"num_hidden_layers": 3, "image_size": _SIDE, "patch_size": 8}
    config = BlipConfig(
        text_config=sizes | text,
        vision_config=sizes | vision,
        projection_dim=96,
        image_text_hidden_size=96,
    )
    network = BlipForConditionalGeneration(config)
    with torch.no_grad():  # BLIP draws values of deviation 1, in which pictures would drown
        network.vision_model.embeddings.position_embedding *= 0.1
        network.vision_model.embeddings.class_embedding *= 0.1
    return network


def make_processor() -> Any:
    """Return the processor: pictures become 64 x 64 pixels, and each word is a token."""
    words = {*_OTHERS, *COLOURS, *SHAPES, *PATTERNS}
    vocabulary = {word: number for number, word in enumerate([*_SPECIAL, *sorted(words)])}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token=_SPECIAL[1]))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(token, vocabulary[token]) for token in _SPECIAL[2:]]
    own.post_processor = processors.TemplateProcessing(
        single=f"{_SPECIAL[2]} $A {_SPECIAL[3]}", special_tokens=ends
    )
    names = ("pad_token", "unk_token", "bos_token", "eos_token")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own, model_max_length=24, **dict(zip(names, _SPECIAL, strict=True))
    )
    mean = [_MEAN] * 3
    size = {"height": _SIDE, "width": _SIDE}
    return BlipProcessor(BlipImageProcessor(size=size, image_mean=mean, image_std=mean), tokenizer)


def small(picture: Image.Image) -> Image.Image:
    """Return a picture in the size that the network reads."""
    return picture.resize((_SIDE, _SIDE), Image.Resampling.BICUBIC)


def draw_figure(dice: random.Random) -> tuple[Image.Image, str]:
    """Return a random figure as an `RGB` picture of random size, and its caption.

    The figure lies anywhere around the middle. Half of the figures have a dark outline and a
    striped frame. Stripes and checks have no colour that comes first, so their colours are named in
    the order of the alphabet.
    """
    size = (dice.randint(_SIDE, 96), dice.randint(_SIDE, 96))
    colour, *grounds = dice.sample(list(COLOURS), 3)
    shape, pattern = dice.choice(list(SHAPES)), dice.choice(("plain", *PATTERNS))
    framed, short = dice.random() < 0.5, min(size)
    first, second = (COLOURS[name] for name in grounds)
    image = draw_background(size, pattern, first, second, short * dice.uniform(0.13, 0.2))
    centre = (size[0] * (0.5 + dice.gauss(0, 0.03)), size[1] * (0.5 + dice.gauss(0, 0.03)))
    turn = 0.0 if shape in ("arrow", "tower", "heart") else dice.uniform(-0.22, 0.22)
    mask = fill_mask(shape, size, centre, short * dice.uniform(0.2, 0.34), turn)
    if framed:
        image.paste(_OUTLINE, (0, 0), mask.filter(ImageFilter.MaxFilter(5)))
    image.paste(COLOURS[colour], (0, 0), mask)
    pose = " pointing up" if shape == "arrow" else ""
    names = sorted(grounds) if pattern in ("striped", "checked") else grounds
    ground = names[0] if pattern == "plain" else f"{' and '.join(names)} {pattern}"
    caption = f"{with_article(colour)} {shape}{pose} on {with_article(ground)} background"
    return _framed(image, dice) if framed else image, caption


def _framed(image: Image.Image, dice: random.Random) -> Image.Image:
    """Return a picture with a frame of dark and yellow stripes around it."""
    short = min(image.size)
    width, period = round(short * dice.uniform(0.06, 0.13)), short * dice.uniform(0.08, 0.2)
    size = (image.width - 2 * width, image.height - 2 * width)
    frame = draw_background(image.size, "striped", COLOURS["yellow"], _OUTLINE, period)
    draw = ImageDraw.Draw(frame)
    draw.rectangle((width - 1, width - 1, width + size[0], width + size[1]), fill=_OUTLINE)
    box = (width, width, width + size[0], width + size[1])
    frame.paste(image.crop(box), box)
    return frame
