"""Writes the golden files; `python tests/golden/golden_files.py` replaces those beside it.

Everything goes the way of a real build, with an encoder of whole numbers in the model's place: no
version of torch, Pillow or zlib has a say in a byte.
"""

from __future__ import annotations

import os
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from item_world import work_of
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.encode.pixels import plain as pixels
from latentmake.encode.reading import Loaded, Sample
from latentmake.geometry.buckets import Size
from latentmake.layouts.layout import layout_of
from latentmake.models import cache_recipe
from latentmake.plan.orders import Order, Target
from order_world import carry_out
from PIL import Image

HERE = Path(__file__).parent
DATASET = Dataset(path="data")
MODEL = Model.model_validate({"vae": "vae", "text": ["text_encoder"], "text_dtype": "bfloat16"})
CAPTION = "michael_gove, a café ☕ on a table"
LATENTS, TEXT = "latents.safetensors", "text.safetensors"
FITS = {
    "crop.npy": ((48, 32), {"fit": "crop"}),
    "enlarged.npy": ((160, 96), {"fit": "crop"}),
    "bucket.npy": ((64, 64), {"fit": "bucket"}),
}


def bitmap(width: int, height: int) -> bytes:
    """Return an uncompressed BMP of 24 bits (rows from below, blue first)."""
    values = np.arange(width * height * 3, dtype=np.uint32).reshape(height, width, 3) % 251
    rows = values.astype(np.uint8)[::-1, :, ::-1].tobytes()
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, len(rows), 2835, 2835, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(rows), 0, 0, 54) + head + rows


def encode(samples: list[Sample]) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Encode an image to its top left pixels, a caption to its bytes: whole numbers alone."""
    found: list[tuple[dict[str, Any], dict[str, str]]] = []
    for sample in samples:
        if isinstance(sample.content, str):
            numbers = torch.tensor([list(sample.content.encode())], dtype=torch.bfloat16)
            tensors = {
                "text_encoder.hidden_state": numbers,
                "text_encoder.pooled": numbers[0, :4].to(torch.float32),
            }
            found.append((tensors, {"caption": sample.content}))
        else:
            corner = sample.content[:2, :3].transpose(2, 0, 1).astype(np.float32)
            size = {"original_width": str(sample.original[0]), "pixel_height": "24"}
            found.append(({"latents": torch.from_numpy(corner)}, size))
    return found


def write_caches(folder: Path) -> None:
    """Carry out an order for one image and one for its caption; the caches go to a folder."""
    values: dict[str, dict[str, object]] = {
        "latents": cache_recipe.latents_recipe(DATASET, MODEL, "1" * 64),
        "text": cache_recipe.text_recipe(MODEL, [("2" * 64, "3" * 64)]),
    }
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as workplace:
        os.chdir(workplace)
        try:
            Path("a.bmp").write_bytes(bitmap(16, 24))
            Path("a.txt").write_text(f"{CAPTION}\n", encoding="utf-8")
            for kind, source, part, size in (
                ("latents", "a.bmp", "16x24", Size(16, 24)),
                ("text", "a.txt", "text", None),
            ):
                target = Target(part, f"{kind}.safetensors", None, size)
                order = Order(
                    kind=kind,
                    dataset="golden",
                    model="tiny",
                    dataset_settings=DATASET,
                    model_settings=MODEL,
                    recipe=values[kind],
                    items=(work_of("a", source, None, (target,)),),
                )
                carry_out(order, say=lambda line: None, encoder=Loaded(encode, 1))
            written = {name: Path(name).read_bytes() for name in (LATENTS, TEXT)}
        finally:
            os.chdir(before)
    for name, data in written.items():
        (folder / name).write_bytes(data)


def fitted(name: str) -> np.ndarray:
    """Return a drawn picture of 100 x 70 pixels, brought to one of the sizes."""
    rows, columns = np.mgrid[0:70, 0:100]
    channels = [
        columns * 255 // 99,
        np.where((rows // 10 + columns // 10) % 2, 230, 25),
        np.where((rows - 35) ** 2 + (columns - 50) ** 2 < 600, 240, rows * 3),
    ]
    image = Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))
    resolution, changes = FITS[name]
    dataset = DATASET.model_copy(update=changes)
    placed = layout_of("plain").place(Size(*image.size), Size(*resolution), dataset)
    return pixels.fit(np.array(image), placed)


def main() -> None:
    """Replace the golden files."""
    write_caches(HERE)
    for name in FITS:
        np.save(HERE / name, fitted(name))
    sys.stdout.write(f"written for FORMAT_VERSIONS {cache_recipe.FORMAT_VERSIONS}\n")


if __name__ == "__main__":
    main()
