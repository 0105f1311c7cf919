"""Taggers of WD14's kind: a timm model that gives each tag a probability.

The picture is padded to a white square, scaled to the size of the model, and its channels are in
the order blue, green, red. Source: `pil_pad_square` and `main` of neggles/wdv3-timm
(wdv3_timm.py), and `prepare_image` of SmilingWolf's wd-tagger (app.py).
"""

from __future__ import annotations

import csv
import importlib.util
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from latentmake.base.errors import ModelError
from latentmake.base.regular import read_text
from latentmake.config.captioners import Captioner
from latentmake.config.weights import Weights
from latentmake.encode.encoders.local_state import place, refusing
from latentmake.models.captioner_recipe import TAGS, Network

PACKAGES = (
    "run `pip install timm torchvision num2words`, with a torchvision for the torch that is there"
)
"""Hint for a captioner that needs one of these packages."""

_CATEGORIES = {0: "general", 4: "character", 9: "rating"}
"""Number in `selected_tags.csv` -> category. Its order is that of a caption's tags."""


class Tagger:
    """A tagger on a device.

    Args:
        network: files of the tagger.
        settings: settings of the captioner.
        device: device to compute on.
        dtype: dtype to compute in.
    """

    def __init__(
        self, network: Network, settings: Captioner, device: torch.device, dtype: torch.dtype
    ) -> None:
        if importlib.util.find_spec("timm") is None:
            raise ModelError("a tagger needs timm, which is missing", where=TAGS, hint=PACKAGES)
        import timm  # takes seconds, and only taggers need it

        self._settings, self._device, self._dtype = settings, device, dtype
        self.tags = read_tags(network.folder / TAGS)
        hint = f"name the complete folder of a timm model with its {TAGS}"
        with refusing(Weights(path=str(network.files[-1])), "a tagger", hint):
            model: Any = timm.create_model(
                f"local-dir:{network.folder}",
                pretrained=True,
                pretrained_cfg_overlay={"file": str(network.files[-1]), "source": "file"},
            )
            if model.num_classes != len(self.tags):
                raise ValueError(f"{TAGS} has {len(self.tags)} tags, it {model.num_classes}")
            config = timm.data.resolve_model_data_config(model)
        self._model: Any = place(model, device, dtype)
        self._side = int(config["input_size"][-1])
        self._mean, self._deviation = (
            torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std")
        )

    def write(self, pictures: Sequence[NDArray[np.uint8]]) -> list[str]:
        """Return the tags of pictures [H, W, 3] as text: `1girl, solo, long hair`."""
        squares = np.stack([square(picture, self._side) for picture in pictures])
        pixels = torch.from_numpy(squares).permute(0, 3, 1, 2).float() / 255
        pixels = ((pixels - self._mean) / self._deviation)[:, [2, 1, 0]]
        logits = self._model(pixels.to(self._device, self._dtype))
        return [self._text(row) for row in logits.float().sigmoid().cpu().numpy()]

    def _text(self, probabilities: NDArray[np.float32]) -> str:
        settings, rows = self._settings, []
        least = settings.thresholds.model_dump(exclude_none=True)
        excluded, order = {_plain(tag) for tag in settings.exclude}, [*_CATEGORIES.values()]
        for (tag, category), probability in zip(self.tags, probabilities.tolist(), strict=True):
            shown = probability >= least.get(category, math.inf)
            if shown and _plain(tag) not in excluded:
                rows.append((order.index(category), -probability, tag))
        names = [name for *_, name in sorted(rows)]
        return ", ".join(name if settings.underscores else spaced(name) for name in names)


def read_tags(path: Path) -> list[tuple[str, str]]:
    """Read the tags of a tagger in their order, each with its category; raises ModelError.

    The category is "" if it is never shown.
    """
    try:
        rows = list(csv.DictReader(read_text(path).splitlines()))
        return [(row["name"], _CATEGORIES.get(int(row["category"]), "")) for row in rows]
    except (OSError, KeyError, ValueError, TypeError, csv.Error):
        what, hint = "is no table with the columns `name` and `category`", "copy the model again"
        raise ModelError(what, where=path, hint=hint) from None


def square(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Return a picture [H, W, 3] in the middle of a white square with sides of some pixels."""
    height, width, _ = pixels.shape
    longest = max(height, width)
    canvas = Image.new("RGB", (longest, longest), (255, 255, 255))
    canvas.paste(Image.fromarray(pixels), ((longest - width) // 2, (longest - height) // 2))
    if longest != side:
        canvas = canvas.resize((side, side), Image.Resampling.BICUBIC)
    return np.asarray(canvas)


def spaced(tag: str) -> str:
    """Return a tag with spaces for underscores; a face such as `>_<` or `0_0` keeps them."""
    return tag.replace("_", " ") if re.search(r"[^\W\d_]{2}", tag) else tag


def _plain(tag: str) -> str:
    return spaced(tag).casefold()
