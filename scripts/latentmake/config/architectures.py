"""Model architectures: a table of facts, so that the rest of the package compares no names.

Sources: sd-scripts' library/strategy_sd.py, strategy_sdxl.py, strategy_sd3.py, strategy_flux.py and
flux_models.py; `verify_bucket_reso_steps` in its training scripts; musubi-tuner's wan/configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from latentmake.config.musubi import MUSUBI
from latentmake.config.rows import Scripts, Strategies
from latentmake.config.sdscripts import SDSCRIPTS


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

WAN = Architecture(
    "wan",
    text_encoders=("umT5",),
    side=16,
    bucket_steps=16,
    original_files=True,
    video=True,
    cleans_captions=True,
    scripts=MUSUBI["wan"],
)

_SD1_CLIP = ClipOutput(1, True, "own")
_SD3_CLIP = ClipOutput(2, False, "own", projects=True)
_SCRIPTED = {
    name: Architecture(
        name,
        side=32 if scripts.pixels == 32 else 16,
        bucket_steps=32 if scripts.pixels == 32 else 16,
        video=any(version.videos for version in scripts.versions.values()),
        scripts=scripts,
        encodes=False,
    )
    for name, scripts in MUSUBI.items()
    if scripts is not WAN.scripts
}
_BY_STRATEGIES = {
    name: Architecture(
        name,
        single_file=True,
        sized_arrays=True,
        side=strategies.side,
        bucket_divisor=strategies.divisor,
        strategies=strategies,
        encodes=False,
    )
    for name, strategies in SDSCRIPTS.items()
    if strategies.latents is not None
}
ARCHITECTURES: Mapping[str, Architecture] = {
    "sd1": Architecture(
        "sd1",
        text_encoders=("CLIP-L",),
        clips=(_SD1_CLIP,),
        picks_layer=True,
        chunks_captions=True,
        caches_text=False,
        strategies=SDSCRIPTS["sd1"],
        checkpoints=True,
    ),
    "sd2": Architecture(
        "sd2",
        text_encoders=("OpenCLIP-H",),
        clips=(_SD1_CLIP,),
        picks_layer=True,
        chunks_captions=True,
        caches_text=False,
        strategies=SDSCRIPTS["sd2"],
        checkpoints=True,
    ),
    "sdxl": Architecture(
        "sdxl",
        text_encoders=("CLIP-L", "CLIP-G"),
        clips=(ClipOutput(2, False, None), ClipOutput(2, False, "end", projects=True)),
        chunks_captions=True,
        bucket_steps=32,
        bucket_divisor=32,
        strategies=SDSCRIPTS["sdxl"],
        checkpoints=True,
    ),
    "sd3": Architecture(
        "sd3",
        text_encoders=("CLIP-L", "CLIP-G", "T5"),
        clips=(_SD3_CLIP, _SD3_CLIP),
        masks_clips=True,
        single_file=True,
        sized_arrays=True,
        side=16,
        bucket_divisor=32,
        strategies=SDSCRIPTS["sd3"],
    ),
    "flux": Architecture(
        "flux",
        text_encoders=("CLIP-L", "T5"),
        clips=(ClipOutput(None, True, "bare"),),
        single_file=True,
        # By constants of its AutoEncoder.encode, whatever a configuration beside the weights says.
        scale=(0.1159, 0.3611),
        sized_arrays=True,
        side=16,
        bucket_divisor=32,
        strategies=SDSCRIPTS["flux"],
    ),
    **_BY_STRATEGIES,
    **_SCRIPTED,
}
"""Name in the configuration -> facts. A Wan model has a `task` in place of a name."""


if TYPE_CHECKING:
    ArchitectureName = str
else:  # pydantic refuses any other
    ArchitectureName = Literal[tuple(ARCHITECTURES)]
