"""Model architectures: a table of facts, so that the rest of the package compares no names.

Sources: sd-scripts' library/strategy_sd.py, strategy_sdxl.py, strategy_sd3.py, strategy_flux.py and
flux_models.py; `verify_bucket_reso_steps` in its training scripts; musubi-tuner's wan/configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from latentmake.config.musubi import MUSUBI
from latentmake.config.sdscripts import SDSCRIPTS
from latentmake.config.spec import Architecture, ClipOutput

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
