"""Networks of real sizes with random weights, pictures and orders, to measure a GPU."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, AutoencoderKLWan
from PIL import Image
from tabulate import tabulate
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/worlds"), str(ROOT / "tests/workflow")]

from demo.text import clip_tokenizer, t5_tokenizer  # noqa: E402
from item_world import work_of  # noqa: E402
from latentmake.config.datasets import Dataset  # noqa: E402
from latentmake.config.models import Model  # noqa: E402
from latentmake.geometry.clips import Media  # noqa: E402
from latentmake.layouts.layout import layout_of, resolution_of  # noqa: E402
from latentmake.plan.orders import Order, Target  # noqa: E402

SENTENCE = "a quiet old house stands under the blue sky beside a red stone bridge"
WORDS = SENTENCE.split()
SD_VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
    "sample_size": 512,
    "force_upcast": False,
}
"""The VAE of Stable Diffusion 1.5 (source: its vae/config.json, which asks for no float32)."""
T5_XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
"""Encoder of T5 v1.1 XXL (source: google/t5-v1_1-xxl, config.json)."""
CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
DISTINCT = 16  # pictures; the others differ from them in bytes that no decoder reads


@contextlib.contextmanager
def on(device: torch.device, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Make networks on a device and in a dtype."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Work in a new folder, which is removed at the end."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="latentmake-bench-") as name:
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(before)


def free_memory() -> None:
    """Free the memory of networks that nobody needs."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def sd_vae(device: torch.device, *, tiny: bool) -> AutoencoderKL:
    """Return a VAE of Stable Diffusion's size."""
    narrow = {"block_out_channels": (8, 8, 16, 16), "norm_num_groups": 4, "layers_per_block": 1}
    with on(device):
        return AutoencoderKL(**{**SD_VAE, **(narrow if tiny else {})}).eval()


def wan_vae(device: torch.device, *, tiny: bool) -> AutoencoderKLWan:
    """Return Wan's VAE."""
    with on(device):
        return AutoencoderKLWan(**({"base_dim": 8} if tiny else {})).eval()


def save_t5(path: Path, device: torch.device, *, tiny: bool) -> None:
    """Save a T5 encoder of XXL's size in bfloat16 (9.5 GB), and a tokenizer beside it."""
    small = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    tokenizer = t5_tokenizer([" ".join(WORDS)])
    tokenizer.save_pretrained(path / "tokenizer")
    config = T5Config(
        vocab_size=32128, feed_forward_proj="gated-gelu", **(small if tiny else T5_XXL)
    )
    with on(device, torch.bfloat16):
        T5EncoderModel(config).save_pretrained(path / "text_encoder")


def save_clip(path: Path, device: torch.device, *, tiny: bool) -> None:
    """Save a CLIP text encoder of Stable Diffusion's size, and a tokenizer beside it."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    tokenizer = clip_tokenizer([" ".join(WORDS)])
    tokenizer.save_pretrained(path / "tokenizer")
    sizes = (small if tiny else CLIP_L) | {"num_attention_heads": 4 if tiny else 12}
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = CLIPTextConfig(vocab_size=49408, max_position_embeddings=77, **sizes, **special)
    with on(device):
        CLIPTextModel(config).save_pretrained(path / "text_encoder")


def captions(count: int) -> list[str]:
    """Return different captions of 8 to 120 words."""
    dice = random.Random(0)
    return [
        f"{number} " + " ".join(dice.choices(WORDS, k=dice.randint(8, 120)))
        for number in range(count)
    ]


def write_pictures(place: Path, count: int, size: tuple[int, int]) -> list[Path]:
    """Write JPEGs half as large again as the size that they are brought to."""
    generator = np.random.default_rng(0)
    width, height = (side * 3 // 2 for side in size)
    made = []
    for _ in range(min(count, DISTINCT)):
        coarse = generator.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        data = io.BytesIO()
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(data, "JPEG")
        made.append(data.getvalue())
    place.mkdir(parents=True, exist_ok=True)
    paths = [place / f"{number:06}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(made[number % DISTINCT] + number.to_bytes(4, "big"))
    return paths


def pixels(count: int, *shape: int) -> torch.Tensor:
    """Return noise, [count, *shape, 3], uint8, in the CPU's memory."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, *shape, 3), dtype=torch.uint8, generator=generator)


def order_of(kind: str, model: Model, sources: list[Path] | list[str], part: str) -> Order:
    """Return an order for pictures, all of one size, or captions."""
    layout = layout_of(model.layout_name)
    base = layout.folder("bench", "bench", part)
    suffix = "npz" if layout.npz else "safetensors"
    size = resolution_of(part)
    media = None
    if kind == "latents":
        with Image.open(sources[0]) as image:
            media = Media(*image.size, 0)
    return Order(
        kind=kind,
        dataset="bench",
        model="bench",
        dataset_settings=Dataset(path="data"),
        model_settings=model,
        recipe={"made": "for a measurement", "dtype": model.dtype},
        items=tuple(
            work_of(
                f"{number:06}",
                str(source) if isinstance(source, Path) else None,
                source if isinstance(source, str) else None,
                (Target(part, f"{base}/{number:06}.{kind}.{suffix}", None, size),),
                media=media,
            )
            for number, source in enumerate(sources)
        ),
    )


def rate(work: Callable[[], object], count: int, device: torch.device, seconds: float) -> float:
    """Return how many of the `count` things of a piece of work are done in a second."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(2):  # kernels are chosen
        work()
    wait()
    began, rounds = time.perf_counter(), 0
    while rounds == 0 or time.perf_counter() - began < seconds:
        work()
        rounds += 1
        if rounds % 4 == 0:
            wait()  # the queue may be long
    wait()
    return rounds * count / (time.perf_counter() - began)


def tell(rows: Iterable[dict[str, object]], path: Path | None) -> None:
    """Print a table of rows; each is written as soon as it is there, in case time runs out."""
    found = []
    try:
        for row in rows:
            found.append(row)
            if path is not None:
                path.write_text(json.dumps(found))
    finally:
        sys.stdout.write(f"{tabulate(found, headers='keys', floatfmt='.3g')}\n")
