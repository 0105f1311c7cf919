"""Facts about an architecture and its versions, which `Model.spec` gives; see `config.rows`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

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


class Version(NamedTuple):
    """Version of an architecture: one value of the model's `task`.

    Attributes:
        latents: arguments that it adds to the script of latents.
        text: the same for the script of embeddings.
        training: the same for the training script.
        controls: fewest and most control images of an item; None for any number.
        images: whether items may be images.
        videos: whether items may be videos.
        one_frame: whether it is trained on one frame: a dataset's `fp_1f_*` count, and an item has
            a control image for each of `fp_1f_clean_indices`.
        needs: keys of the model that it needs besides the architecture's.
        tensors: beginnings of names of tensors that latents hold besides `latents_`.
        boundary: timestep, in thousandths, between its networks for high and for low noise; None
            where it has one network.
    """

    latents: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    training: tuple[str, ...] = ()
    controls: tuple[int, int | None] = (0, 0)
    images: bool = True
    videos: bool = False
    needs: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    boundary: int | None = None
    one_frame: bool = False

    def caching(self, kind: str) -> tuple[str, ...]:
        """Return the arguments that it adds to the script of `latents` or `text`."""
        return self.text if kind == "text" else self.latents


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
