"""Cached latents decoded by their VAE, beside the pixels that it was given."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import safe_open

from latentmake import digest, layouts
from latentmake.caches.encoders.device import pick_device
from latentmake.caches.encoders.vae import load_vae, tile
from latentmake.caches.inputs import SourceBytes, samples_of
from latentmake.config import Dataset, Model
from latentmake.errors import CacheError, ModelError, SourceError
from latentmake.files.cachefile import read_header, target_key
from latentmake.geometry.buckets import Size
from latentmake.plan.keys import UNKNOWN
from latentmake.plan.orders import Target, WorkItem, WorkOrder
from latentmake.reports.images import embedded
from latentmake.reports.items_order import Shown, decodes
from latentmake.training.sd.decode import decode

__all__ = ["Decoded", "Decoder", "psnr", "read_latents"]

_BYTES = 6000  # of memory that decoding takes a pixel
_LATENTS = re.compile(r"latents(_\d+x\d+)?")  # the array in files of either kind
_SIDE, _EXACT = 256, 128  # pixels: larger pictures are scaled down, smaller ones exact


class Decoded(NamedTuple):
    """Decoded latents of one target.

    Attributes:
        decoded: data URI; None where there is none, see `note`.
        original: data URI of the pixels that the VAE was given.
        psnr: of both, in dB; None where they are equal.
    """

    decoded: str | None
    original: str | None = None
    psnr: float | None = None
    note: str = ""


class Decoder:
    """Decodes cached latents of one model.

    Attributes:
        fault: why there is no decoder, in a line; "" where there is one.
        on_cpu: whether it runs on the processor.
    """

    def __init__(self, name: str, model: Model) -> None:
        self._name, self._model = name, model
        self.fault = ""
        device = pick_device()
        self.on_cpu = device.type == "cpu"
        if not decodes(model):
            self.fault = f"latents of models.{name} are not decoded: its VAE is no AutoencoderKL"
            return
        try:
            self._vae = load_vae(model.vae, device, torch.float32)
        except ModelError as error:
            self.fault = f"latents of models.{name} are not decoded: {error}"

    def show(
        self, item: Shown, resolution: str, path: str, settings: Dataset, recipe: str
    ) -> Decoded:
        """Return what a cache file holds, as a picture; `recipe` is today's digest."""
        if self.fault:
            return Decoded(None)
        order = WorkOrder("latents", item.dataset, self._name, settings, self._model, {}, items=())
        size = layouts.size_of(resolution)
        target = Target(resolution, path, None, size)
        source = WorkItem(item.stem, item.image, None, (target,), media=item.media)
        try:
            data = Path(item.image).read_bytes()
            content = digest.of_bytes(data)
            header = read_header(path)
            if header.source != content:
                return Decoded(None, note="is stale: it was made of another image")
            (sample,) = samples_of(order, SourceBytes(source, data, content), {target: ""})
            variant = order.layout.variant(size, Size(*sample.original), settings, None)
            if recipe != UNKNOWN and header.key != target_key(content, recipe, variant):
                return Decoded(None, note="is stale: it was made by another recipe")
            latents = read_latents(path)
        except FileNotFoundError:
            return Decoded(None, note="is not made yet")
        except (CacheError, SourceError) as error:
            return Decoded(None, note=error.what)
        except OSError as error:
            return Decoded(None, note=f"cannot be read ({error.strerror})")
        assert not isinstance(sample.content, str)
        return self._beside(latents, sample.content)

    def _beside(self, latents: torch.Tensor, pixels: NDArray[np.uint8]) -> Decoded:
        if pixels.shape[0] * pixels.shape[1] * _BYTES > psutil.virtual_memory().available // 2:
            tile(self._vae)
        shift, factor = self._model.spec.scale or (0.0, 1.0)
        try:
            image = decode(self._vae, latents / factor + shift)
        except RuntimeError as error:  # latents of another VAE, or too little memory
            return Decoded(None, note=f"cannot be decoded ({str(error).partition(chr(10))[0]})")
        seen = pixels[: image.height, : image.width]
        value = psnr(np.asarray(image), seen) if seen.shape == (*image.size[::-1], 3) else math.inf
        return Decoded(
            _preview(image),
            _preview(Image.fromarray(np.ascontiguousarray(pixels))),
            round(value, 1) if math.isfinite(value) else None,
        )


def read_latents(path: str) -> torch.Tensor:
    """Return the latents [C, h, w] in a cache file, float32, as they are cached.

    Raises:
        CacheError: it holds none, or is damaged.
        OSError: it cannot be read.
    """
    try:
        if path.endswith(".npz"):
            with np.load(path, allow_pickle=False) as arrays:
                return torch.from_numpy(arrays[_named(arrays.files)]).float()
        with safe_open(path, "pt") as tensors:
            found: torch.Tensor = tensors.get_tensor(_named(tensors.keys())).float()
            return found
    except OSError:
        raise
    except Exception as error:  # each library has its own for a damaged file
        raise CacheError(f"cannot be read ({error})", where=path) from None


def _named(names: list[str]) -> str:
    found = [name for name in names if _LATENTS.fullmatch(name)]
    if len(found) != 1:
        raise ValueError("it holds no latents of an image")
    return found[0]


def _preview(image: Image.Image) -> str:
    if max(image.size) <= _EXACT:
        return embedded(image, "webp", lossless=True)
    image.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    return embedded(image, "webp", quality=80)


def psnr(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    """Return the peak signal-to-noise ratio of two pictures of one size, in dB."""
    error = float(np.mean((one.astype(np.float32) - other) ** 2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)
