"""The layout of sd-scripts, for Stable Diffusion 1.x, 2.x, XL, 3 and Flux.

    cache/{dataset}/{model}/{resolution}/{stem}_{W}x{H}_sdxl.npz    latents
    cache/{dataset}/{model}/text/{stem}_te_outputs.npz              text
    cache/{dataset}/{model}/text.1/{stem}_te_outputs.npz            the same of another variant

W x H is an image's own size, as stored. Images in sub-folders keep their relative path. sd-scripts
wants caches beside images: a folder of links is made for its training. It encodes the captions of
Stable Diffusion 1.x and 2.x while it trains, so that these have no text. Names and arrays are those
of its library/strategy_sd.py, strategy_sdxl.py, strategy_sd3.py and strategy_flux.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from latentmake.buckets import Size
from latentmake.clips import Clip
from latentmake.config import Dataset
from latentmake.config.models import Architecture
from latentmake.layouts import Named
from latentmake.media import Media
from latentmake.sdscripts.buckets import placement

__all__ = ["PREFIX", "SdScripts", "array_name", "of"]

PREFIX = "sdscripts-"

_LATENTS: dict[Architecture, str] = {
    "sd1": "_sd.npz",
    "sd2": "_sd.npz",
    "sdxl": "_sdxl.npz",
    "sd3": "_sd3.npz",
    "flux": "_flux.npz",
}
_TEXT: dict[str, str] = {"sdxl": "_te_outputs.npz", "sd3": "_sd3_te.npz", "flux": "_flux_te.npz"}
_SIZE = re.compile(r"(.+)_(\d{4,})x(\d{4,})", re.DOTALL)


@dataclass(frozen=True)
class SdScripts:
    """The layout of one architecture.

    Attributes:
        architecture: `sd1`, `sd2`, `sdxl`, `sd3` or `flux`.
    """

    architecture: Architecture

    @property
    def latents_ending(self) -> str:
        """What the name of a file of latents ends in."""
        return _LATENTS[self.architecture]

    @property
    def text_ending(self) -> str | None:
        """What the name of a file of text ends in; None where there is none."""
        return _TEXT.get(self.architecture)

    @property
    def longest_ending(self) -> str:
        """The longest that the name of a cache file may have after the item's own name.

        An item with several texts is deployed under several names: `.v12` and so on.
        """
        return max(f"_00000x00000{self.latents_ending}", self.text_ending or "", key=len) + ".v000"

    def parts(self, resolutions: Iterable[str], texts: Sequence[str] = ("text",)) -> list[str]:
        """Return the parts of one dataset and model: each resolution, and texts if any."""
        return [*resolutions, *(texts if self.text_ending else ())]

    def folder(self, dataset: str, model: str, part: str) -> str:
        """Return the folder of one dataset's targets of one model and part."""
        return f"cache/{dataset}/{model}/{part}"

    def named(
        self, folder: str, part: str, stem: str, media: Media | None, settings: Dataset | None
    ) -> Sequence[Named]:
        """Return an item's one target of a part."""
        if part.startswith("text"):
            return (Named(f"{folder}/{stem}{self.text_ending}"),)
        assert media is not None
        size = f"{media.width:04d}x{media.height:04d}"
        return (Named(f"{folder}/{stem}_{size}{self.latents_ending}"),)

    def variant(
        self, resolution: Size | None, image: Size, settings: Dataset | None, clip: Clip | None
    ) -> str:
        """Return how an image is scaled and cut; "" for text."""
        if resolution is None or settings is None:
            return ""
        return placement(image, resolution, settings, self.architecture).name

    def base(self, stem: str) -> str:
        """Return the stem: cache files keep it whole."""
        return stem

    def owners(self, name: str) -> Sequence[str]:
        """Return the stem of the item that a file below a part's folder belongs to."""
        if self.text_ending and name.endswith(self.text_ending):
            return (name[: -len(self.text_ending)],)
        found = self._parted(name)
        return () if found is None else (found[1],)

    def identity(self, stem: str, path: str) -> str:
        """Return the stem: there is one target of it in a part."""
        return stem

    def row(self, targets: Mapping[str, Sequence[str]]) -> dict[str, object]:
        """Return `latents` (resolution -> path), `text` (path, or None), and `variants` of it.

        The last where there are several, the first among them.
        """
        texts = [paths[0] for part, paths in targets.items() if part.startswith("text")]
        row: dict[str, object] = {
            "latents": {
                part: paths[0] for part, paths in targets.items() if not part.startswith("text")
            },
            "text": texts[0] if texts else None,
        }
        return row | {"variants": texts} if len(texts) > 1 else row

    def size(self, path: str) -> Size:
        """Return the size of the image that a file of latents was made of, from its name.

        Raises:
            ValueError: it is no such name.
        """
        found = self._parted(path)
        if found is None:
            raise ValueError(f"{path} is not named as latents are")
        return Size(int(found[2]), int(found[3]))

    def _parted(self, name: str) -> re.Match[str] | None:
        if not name.endswith(self.latents_ending):
            return None
        return _SIZE.fullmatch(name[: -len(self.latents_ending)])


def of(architecture: str) -> SdScripts:
    """Return the layout of an architecture.

    Raises:
        KeyError: there is no such architecture.
    """
    return SdScripts({str(each): each for each in _LATENTS}[architecture])


def array_name(kind: str, architecture: Architecture, height: int, width: int) -> str:
    """Return the name of an array in a file of latents: `latents_64x96`, or `latents` alone.

    SD 3 and Flux may have several resolutions in one file.

    Args:
        kind: `latents`, `latents_flipped`, `original_size`, `crop_ltrb` or `alpha_mask`.
        architecture: of the model.
        height: of the latents, not of the image.
        width: likewise.
    """
    return f"{kind}_{height}x{width}" if architecture in ("sd3", "flux") else kind
