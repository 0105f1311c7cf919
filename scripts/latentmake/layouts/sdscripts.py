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
from latentmake.geometry.buckets import Placement, Size
from latentmake.geometry.sdscripts_buckets import placement
from latentmake.layouts.layout import SIZED, Layout


class SdScripts(Layout):
    """The layout of one architecture."""

    encoding = "sdscripts"
    adopts = True
    npz = True
    pads_t5 = True
    first_line = True
    names_architecture = True

    def __init__(self, architecture: ArchitectureName) -> None:
        self.architecture = architecture
        self.name = f"sdscripts-{architecture}"
        strategies = ARCHITECTURES[architecture].strategies
        assert strategies is not None
        self.latents_ending = strategies.latents_ending
        self.text_ending = strategies.text_ending
        # An item with several texts is deployed under several names: `.v12` and so on.
        longest = max(f"_00000x00000{self.latents_ending}", self.text_ending or "", key=len)
        self.longest_ending = f"{longest}.v000"

    def placement(self, resolution: Size, image: Size, settings: Dataset) -> Placement:
        """Return how an image, as stored, is brought to its size."""
        return placement(image, resolution, settings, self.architecture)

    def size(self, path: str) -> Size:
        """Return the size of the image that a latents file was made of, from its name.

        Raises:
            ValueError: it is not named as latents are.
        """
        found = SIZED.fullmatch(path.removesuffix(self.latents_ending))
        if found is None or not path.endswith(self.latents_ending):
            raise ValueError(f"{path} is not named as latents are")
        return Size(int(found[2]), int(found[3]))


LAYOUTS = tuple(
    SdScripts(name) for name, each in ARCHITECTURES.items() if each.strategies is not None
)
"""The layout of each architecture."""


def array_name(kind: str, architecture: ArchitectureName, height: int, width: int) -> str:
    """Return the name of an array in a file of latents: `latents_64x96`, or `latents` alone.

    SD 3, Flux and later ones may have several resolutions in one file. Height and width are those
    of the latents; `kind` is `latents`, `latents_flipped`, `original_size`, `crop_ltrb` or
    `alpha_mask`.
    """
    return f"{kind}_{height}x{width}" if ARCHITECTURES[architecture].sized_arrays else kind
