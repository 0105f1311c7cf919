"""Orders over small datasets, and an encoder that needs no weights, for several tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from item_world import plain_path, work_of
from latentmake.base import digest
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.encode import runner as encode
from latentmake.encode.reading import Loaded, Sample
from latentmake.formats import cachefile
from latentmake.formats.media import probe_image
from latentmake.geometry.buckets import Size
from latentmake.layouts.layout import layout_of, resolution_of
from latentmake.layouts.names import LATENTS
from latentmake.models import cache_recipe
from latentmake.plan.orders import Order, Target
from latentmake.plan.receipts import Receipt, read_receipt
from PIL import Image

Encoded = list[tuple[dict[str, Any], dict[str, str]]]
MODEL = Model(vae="vae", text=["text_encoder"])  # type: ignore[arg-type, list-item]


def put_image(path: Path, colour: Iterable[int], size: tuple[int, int] = (16, 16)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    red, green, blue = colour
    Image.new("RGB", size, (red, green, blue)).save(path)
    return path


def target(stem: str, part: str, *, dataset: str = "cats", found: str | None = None) -> Target:
    return Target(part, plain_path(dataset, "tiny", part, stem), found, resolution_of(part))


def key_of(order: Order, source: Path, part: str) -> str:
    """Return the key that a target of an order gets: of a text, or of an image with no EXIF."""
    size = Size(0, 0) if part == "text" else Size(*probe_image(str(source))[:2])
    asked = resolution_of(part)
    variant = layout_of("plain").view(size, asked, order.dataset_settings)[0] if asked else ""
    recipe_digest = digest.of_value(order.recipe)
    return cachefile.target_key(digest.of_file(source), recipe_digest, variant)


def order(
    kind: str,
    items: dict[str, Path | str],
    *,
    parts: Iterable[str] = ("16",),
    found: dict[str, str] | None = None,
    **dataset: Any,
) -> Order:
    """Return an order for items of the dataset `cats`: stem -> source, or the caption itself."""
    settings = Dataset(path="data", **dataset)
    if kind == "latents":
        values = cache_recipe.latents_recipe(settings, MODEL, "weights")
    else:
        values, parts = cache_recipe.text_recipe(MODEL, [("weights", "tokenizer")]), ("text",)
    lying = found or {}
    return Order(
        kind=kind,
        dataset="cats",
        model="tiny",
        dataset_settings=settings,
        model_settings=MODEL,
        recipe=values,
        items=tuple(
            work_of(
                stem,
                str(source) if isinstance(source, Path) else None,
                source if isinstance(source, str) else None,
                tuple(target(stem, part, found=lying.get(f"{part}/{stem}")) for part in parts),
            )
            for stem, source in items.items()
        ),
    )


def written_order(kind: str, **found: str | None) -> Order:
    """Write an order whose targets are named as their items: stem -> what was found there."""
    items = tuple(
        work_of(stem, f"{stem}.png", None, (Target("64", stem, there),))
        for stem, there in found.items()
    )
    made = Order(kind, "cats", "small", Dataset(path="."), MODEL, {"a": 1}, items)
    made.write()
    return made


class Encoder:
    """Encodes an image to its mean colour, a caption to its bytes; keeps count of what it gets."""

    def __init__(
        self, change: Callable[[Sample, torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        self.batches: list[list[tuple[str, tuple[int, ...]]]] = []
        self._change = change or (lambda sample, tensor: tensor)

    def __call__(self, samples: list[Sample]) -> Encoded:
        self.batches.append([(sample.item.stem, sample.shape) for sample in samples])
        return [
            (
                {LATENTS: self._change(sample, whole_numbers(sample.content))},
                {"made": "here"},
            )
            for sample in samples
        ]

    @property
    def stems(self) -> list[str]:
        """Whose targets were encoded, in order."""
        return [stem for batch in self.batches for stem, _ in batch]


def whole_numbers(content: np.ndarray | str) -> torch.Tensor:
    """Return whole numbers that differ for different content, the same with any version of torch.

    An image [H, W, 3] gives [4, H / 8, W / 8], sums of its 8 x 8 blocks and 1; a caption its bytes.
    """
    if isinstance(content, str):
        return torch.tensor([[1, *content.encode()]], dtype=torch.float32)
    height, width = content.shape[0] // 8, content.shape[1] // 8
    blocks = content[: height * 8, : width * 8].astype(np.int64).reshape(height, 8, width, 8, 3)
    sums = blocks.sum(axis=(1, 3)).transpose(2, 0, 1).astype(np.float32)
    return torch.from_numpy(np.concatenate([sums, np.ones((1, height, width), np.float32)]))


def carry_out(order: Order, *, encoder: Any = None, **options: Any) -> Receipt:
    """Carry out an order by a loaded encoder, another program's, or its own; return its receipt."""
    if isinstance(encoder, Loaded):
        options["load"] = lambda _: encoder
    elif encoder is not None:
        options["external"] = lambda _: encoder
    encode.carry_out([order], **{"say": silent, **options})
    return read_receipt(order.receipt)


def silent(line: str) -> None:
    """Hear nothing."""
