"""Keys of a model: its encoders, and the network to train."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from latentmake.config.architectures import (
    ARCHITECTURES,
    GENERIC,
    WAN,
    Architecture,
    ArchitectureName,
)
from latentmake.config.fields import Closed, DiskPath, Dtype, Number, listed
from latentmake.config.scripts import Version
from latentmake.config.shapes import LATENTS, MACHINE, TEXT, WEIGHTS, Shapes
from latentmake.config.weights import (
    NO_WEIGHTS,
    Adopt,
    LocalPlace,
    TextPlace,
    Weights,
    WeightsPlace,
)

_TASKS = dict.fromkeys(
    task
    for row in (WAN, *ARCHITECTURES.values())
    for task in (row.scripts.versions if row.scripts else ())
    if task
)
_Task = Annotated[str, WithJsonSchema({"type": "string", "enum": list(_TASKS)})]


class ModelKeys(Closed):
    """Keys of a model before they are compared with each other; see `config.models`."""

    aliases: ClassVar[dict[str, str]] = {"adopt": "ai_training"}
    """Key of an earlier release -> key."""

    vae: WeightsPlace = Field(NO_WEIGHTS, json_schema_extra=Shapes("latents", "pictures"))
    """The AutoencoderKL, or Wan's VAE, that makes the latents. Left out where there is none:
    HiDream O1."""
    text: Annotated[
        list[TextPlace],
        BeforeValidator(listed, json_schema_input_type=TextPlace | list[TextPlace]),
        Field(json_schema_extra=TEXT),
    ] = Field([])
    """The text encoders, CLIP, T5, UMT5 or those of the architecture, in order. The folder of a
    pipeline stands for all of them."""
    unet: WeightsPlace | None = Field(None, json_schema_extra=WEIGHTS)
    """The UNet that is trained; by default that of the `checkpoint`."""
    text_projection: DiskPath | None = Field(None, min_length=1, json_schema_extra=WEIGHTS)
    """A linear layer between the embeddings and the UNet that is trained with it: `new`, or the
    folder or file of one."""
    scheduler: LocalPlace | None = Field(None, json_schema_extra=WEIGHTS)
    """Folder of the noise schedule, or of its pipeline; by default `scheduler` beside the UNet."""
    architecture: ArchitectureName | None = Field(
        None, json_schema_extra=Shapes("latents", "text", "weights")
    )
    """Decides the layers and vectors that are kept of the text encoders; by default the last layer
    of each."""
    layout: Literal["plain", "sdscripts", "musubi"] = Field(
        "plain", json_schema_extra=Shapes("latents", "text")
    )
    """Names and tensors of the caches: our own, those of sd-scripts, or (by default with a `task`)
    those of musubi-tuner."""
    clip_skip: Number | None = Field(
        None,
        ge=1,
        json_schema_extra=Shapes("text", "weights", when=("architecture", ("sd1", "sd2"))),
    )
    """Layer of CLIP that is kept, counted from the last (1), as in sd-scripts; for sd1 and sd2."""
    max_token_length: Literal[75, 150, 225, "auto"] = Field(
        75,
        json_schema_extra=Shapes("text", "weights", when=("architecture", ("sd1", "sd2", "sdxl"))),
    )
    """Tokens kept of a caption by CLIP, 75 at a time; auto: as many as the caption has. For sd1,
    sd2 and sdxl."""
    apply_lg_attn_mask: bool = Field(
        False, json_schema_extra=Shapes("text", when=("architecture", ("sd3",)))
    )
    """Hide the padding from SD3's two CLIPs, as sd-scripts calls it."""
    apply_t5_attn_mask: bool = Field(
        False,
        json_schema_extra=Shapes(
            "text", layouts=("sdscripts",), when=("architecture", ("sd3", "flux"))
        ),
    )
    """Hide the padding from T5, for sd3 and flux in the layout sdscripts."""
    task: _Task | None = Field(None, json_schema_extra=Shapes("latents", "text", "weights"))
    """The --task or --model_version of musubi-tuner. Without `architecture` it makes this a Wan
    model, whose caches are those of musubi-tuner."""
    checkpoint: LocalPlace | None = Field(None, json_schema_extra=WEIGHTS)
    """One .safetensors file of Stable Diffusion 1.x, 2.x or SDXL, as Civitai has them, or the
    folder of its pipeline. It gives the VAE, the text encoders and the UNet that no other key
    names. Of the other architectures of sd-scripts, the file of the network that it trains."""
    dit: LocalPlace | None = Field(None, json_schema_extra=WEIGHTS)
    """Network that musubi-tuner or the trainer wan trains; of Wan 2.2 the low-noise."""
    dit_high_noise: LocalPlace | None = Field(None, json_schema_extra=WEIGHTS)
    """Wan 2.2's network for high noise."""
    clip: WeightsPlace | None = Field(None, json_schema_extra=LATENTS)
    """The CLIP image encoder that Wan 2.1's image-to-video needs."""
    image_encoder: WeightsPlace | None = Field(None, json_schema_extra=LATENTS)
    """The SigLIP image encoder of FramePack, and of HunyuanVideo 1.5's image-to-video."""
    latents_arguments: list[str] = Field([], json_schema_extra=LATENTS)
    """Further arguments for musubi-tuner's script that caches latents, or sd-scripts' arguments
    about latents, as their documentation has them."""
    text_arguments: list[str] = Field([], json_schema_extra=TEXT)
    """The same for embeddings."""
    fp8_t5: bool = Field(False, json_schema_extra=Shapes("text", layouts=("musubi",)))
    """Keep umT5's weights in 8 bits: less memory."""
    vae_cache_cpu: bool = Field(False, json_schema_extra=Shapes("latents", layouts=("musubi",)))
    """Encode with Wan's VAE in tiles and slices: less memory, more time."""
    vae_tiling: bool = Field(
        False, json_schema_extra=Shapes("latents", layouts=("plain", "sdscripts"))
    )
    """Encode images above 512 x 512 in tiles: less memory, slightly other latents."""
    encoder: Literal["latentmake", "musubi", "sdscripts"] = Field(
        "latentmake", json_schema_extra=Shapes("latents", "text", layouts=("musubi",))
    )
    """Encoders: ours, musubi-tuner's own scripts, which its architectures but Wan need, or
    sd-scripts' own classes, for its lumina, hunyuan_image and anima."""
    dtype: Dtype = Field("float32", json_schema_extra=Shapes("latents", "text"))
    """dtype of the caches; by default bfloat16 for Wan and where other programs encode."""
    vae_dtype: Dtype | None = Field(None, json_schema_extra=LATENTS)
    """The same for the latents alone."""
    text_dtype: Dtype | None = Field(None, json_schema_extra=TEXT)
    """The same for the embeddings alone."""
    posterior: Literal["mean", "sample"] = Field(
        "mean", json_schema_extra=Shapes("latents", layouts=("plain", "sdscripts"))
    )
    """Keep the mean of the VAE's posterior, or one seeded sample of it."""
    posterior_seed: Number = Field(
        0,
        ge=0,
        json_schema_extra=Shapes(
            "latents", layouts=("plain", "sdscripts"), when=("posterior", ("sample",))
        ),
    )
    """Seed of `posterior: sample`."""
    ai_training: Adopt | None = Field(None, json_schema_extra=MACHINE)
    """Caches of ai-training that `latentmake adopt` takes and export_{run} writes."""

    @property
    def spec(self) -> Architecture:
        """Facts about its architecture."""
        if self.architecture is not None:
            return ARCHITECTURES[self.architecture]
        return GENERIC if self.task is None else WAN

    @property
    def version(self) -> Version:
        """Version that its `task` names; empty for an architecture without scripts."""
        scripts = self.spec.scripts
        return Version() if scripts is None else scripts.versions[self.task or ""]

    @property
    def scripted(self) -> bool:
        """Whether musubi-tuner's own scripts encode for it."""
        return self.encoder == "musubi"

    @property
    def by_strategies(self) -> bool:
        """Whether sd-scripts' own classes encode for it."""
        return self.encoder == "sdscripts"

    @property
    def title(self) -> str:
        """Its architecture as people call it."""
        known = self.spec.scripts or self.spec.strategies
        return known.title if known else self.spec.name

    @property
    def layout_name(self) -> str:
        """Name of its layout, of which there is one for each architecture of a trainer."""
        named = self.architecture is not None and self.layout != "plain"
        return f"{self.layout}-{self.architecture}" if named else self.layout

    @property
    def caption_dtype(self) -> Dtype:
        """Dtype of the embeddings' caches; musubi-tuner has one alone."""
        return "bfloat16" if self.spec.scripts is not None else self.text_dtype or self.dtype

    def further_arguments(self, kind: str) -> list[str]:
        """Return its `latents_arguments` or `text_arguments`."""
        return self.text_arguments if kind == "text" else self.latents_arguments

    @property
    def image_to_video(self) -> bool:
        """Whether its caches hold the first frame's latents too."""
        return "latents_image_" in self.version.tensors

    @property
    def has_two_networks(self) -> bool:
        """Whether it has a network for high noise and one for low: Wan 2.2."""
        return self.version.boundary is not None

    @property
    def needs_clip(self) -> bool:
        """Whether its latents hold the CLIP image encoder's output: Wan 2.1 image-to-video."""
        return "clip" in self.version.needs

    def weights(self, key: str) -> Weights | None:
        """Return the weights that one of its keys names; None where it is not set.

        `text.1` is the second text encoder, `dit` a path that is trained.
        """
        name, _, number = key.partition(".")
        found = getattr(self, name)
        if isinstance(found, list):
            found = found[int(number or 0)] if len(found) > int(number or 0) else None
        if isinstance(found, str):
            found = Weights(path=found)
        return found if isinstance(found, Weights) and found.is_set else None
