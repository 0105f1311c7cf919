"""Facts about one model architecture, which `Model.spec` gives; `config.architectures` has all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict

if TYPE_CHECKING:
    from latentmake.config.rows import Scripts, Strategies


class ClipOutput(NamedTuple):
    """Tensors kept of a CLIP's output.

    Attributes:
        layer: whose hidden states, counted from the last (1); None: the last, normalised.
        normalised: whether those go through the final normalisation too.
        pooled: which vector of the caption: `own`, the one that the network itself takes,
            projected where it projects; `bare`, the same never projected; `end`, the last layer's
            state of the first EOS, projected; None: no vector.
        projects: whether the network must have a projection.
    """

    layer: int | None
    normalised: bool
    pooled: Literal["own", "bare", "end"] | None
    projects: bool = False


@dataclass(frozen=True)
class Architecture:
    """Facts about one model architecture.

    Attributes:
        name: as the configuration has it; "" for a model that names none.
        text_encoders: what each is, in order.
        clips: tensors kept of each CLIP among them.
        picks_layer: whether `clip_skip` chooses the layer of CLIP.
        masks_clips: whether padding may be hidden from its CLIPs.
        chunks_captions: whether CLIP takes captions in chunks of 75 tokens.
        caches_text: whether sd-scripts reads embeddings from caches; else it encodes captions while
            it trains.
        single_file: whether sd-scripts reads the network from one file only.
        scale: (shift, factor) applied to cached latents; None: they are cached unscaled.
        sized_arrays: whether names of sd-scripts' arrays contain the size of the latents.
        side: sides of resolutions are multiples of this, in pixels.
        bucket_steps: sd-scripts' default for `bucket_reso_steps`, in pixels.
        bucket_divisor: `bucket_reso_steps` must be a multiple of this, in pixels.
        original_files: whether encoders may be files of the original release, which need no
            configuration beside them.
        video: whether its VAE encodes videos, in tiles with `vae_cache_cpu`.
        cleans_captions: whether captions are cleaned of HTML and repeated blanks (umT5).
        scripts: what musubi-tuner knows about it; None where its trainer is another.
        strategies: what sd-scripts knows about it; None where it does not know it.
        encodes: whether there are encoders of ours; else those of `scripts` or `strategies`.
        checkpoints: whether one file may hold VAE, text encoders and UNet.
    """

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid"}

    name: str
    text_encoders: tuple[str, ...] = ()
    clips: tuple[ClipOutput, ...] = ()
    picks_layer: bool = False
    masks_clips: bool = False
    chunks_captions: bool = False
    caches_text: bool = True
    single_file: bool = False
    scale: tuple[float, float] | None = None
    sized_arrays: bool = False
    side: int = 8
    bucket_steps: int = 64
    bucket_divisor: int = 64
    original_files: bool = False
    video: bool = False
    cleans_captions: bool = False
    scripts: Scripts | None = None
    strategies: Strategies | None = None
    encodes: bool = True
    checkpoints: bool = False


GENERIC = Architecture("", checkpoints=True)
"""A model that names no architecture: the last layer of each text encoder is kept."""
