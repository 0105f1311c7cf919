"""Layout of sd-scripts, for Stable Diffusion, Flux and each other architecture of its.

    cache/{dataset}/{model}/{resolution}/{stem}_{W}x{H}_sdxl.npz    latents
    cache/{dataset}/{model}/text/{stem}_te_outputs.npz              text
    cache/{dataset}/{model}/text.1/{stem}_te_outputs.npz            the same of another variant

W x H is an image's own size, as stored. Images in sub-folders keep their relative path. sd-scripts
wants caches beside images: a folder of links is made for its training. It encodes the captions of
Stable Diffusion 1.x and 2.x while it trains, so that these have no text. Names and arrays are those
of its library/strategy_*.py.
"""

from __future__ import annotations

from latentmake.config.architectures import ARCHITECTURES, ArchitectureName
from latentmake.config.datasets import Dataset
from latentmake.errors import SourceError
from latentmake.geometry.buckets import Placement, Size, cover, nearest_bucket, shrink
from latentmake.layouts.layout import Layout


class SdScripts(Layout):
    """The layout of one architecture."""

    encoding = "sdscripts"
    npz = True
    scales_alpha = False
    pads_t5 = True
    first_line = True
    names_architecture = True

    def __init__(self, architecture: ArchitectureName) -> None:
        self._architecture = ARCHITECTURES[architecture]
        self.name = f"sdscripts-{architecture}"
        strategies = self._architecture.strategies
        assert strategies is not None
        self.latents_ending = strategies.latents_ending
        self.text_ending = strategies.text_ending
        # An item with several texts is deployed under several names: `.v12` and so on.
        longest = max(f"_00000x00000{self.latents_ending}", self.text_ending or "", key=len)
        self.longest_ending = f"{longest}.v000"

    def size(self, image: Size, resolution: Size, settings: Dataset) -> Size:
        """Return the size that an image is brought to."""
        return self.place(image, resolution, settings).target

    def place(self, image: Size, resolution: Size, settings: Dataset, path: str = "") -> Placement:
        """Return how an image, as stored, is brought to its size."""
        limit = settings.max_image_pixels
        if settings.fit == "crop":  # `enable_bucket = false`
            return cover(image, resolution, limit, path)
        step, no_upscale, least, most = settings.bucketing(self._architecture)
        if not no_upscale:
            target = nearest_bucket(image, resolution, range(least, most + 1, step), most)
            return cover(image, target, limit, path)
        try:
            return shrink(image, resolution, step)
        except ValueError as error:
            what = f"{error} ({image.width} x {image.height})"
            hint = "remove it, or leave out the dataset's `bucket_no_upscale`"
            raise SourceError(what, where=path, hint=hint) from None


LAYOUT = SdScripts


def array_name(kind: str, architecture: ArchitectureName, height: int, width: int) -> str:
    """Return the name of an array in a file of latents: `latents_64x96`, or `latents` alone.

    SD 3, Flux and later ones may have several resolutions in one file. Height and width are those
    of the latents; `kind` is `latents`, `latents_flipped`, `original_size`, `crop_ltrb` or
    `alpha_mask`.
    """
    return f"{kind}_{height}x{width}" if ARCHITECTURES[architecture].sized_arrays else kind
