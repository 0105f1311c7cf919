"""Models: encoders, and the network to train."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from latentmake.config.architectures import (
    ARCHITECTURES,
    GENERIC,
    WAN,
    Architecture,
    ArchitectureName,
)
from latentmake.config.fields import Closed, DiskPath, Dtype, Ending, Number, listed, place
from latentmake.config.shapes import LATENTS, MACHINE, TEXT, WEIGHTS, Shapes

__all__ = ["Adopt", "Location", "Model", "TextWeights", "WanTask", "Weights"]


WanTask = Literal[
    "t2v-14B",
    "t2v-1.3B",
    "i2v-14B",
    "t2i-14B",
    "flf2v-14B",
    "t2v-14B-FC",
    "t2v-1.3B-FC",
    "i2v-14B-FC",
    "i2v-A14B",
    "t2v-A14B",
]
_NEEDS_CLIP = frozenset({"i2v-14B", "flf2v-14B", "i2v-14B-FC"})
_TWO_NETWORKS = frozenset({"i2v-A14B", "t2v-A14B"})


_COMMIT = re.compile(r"[0-9a-f]{40}")


class Location(Closed):
    """Place of a part of a model: a local path, or a hub id with its revision."""

    path: DiskPath | None = Field(None, min_length=1)
    """Folder or single file of weights."""
    hub: str | None = Field(None, min_length=1)
    """Repository id on the hub."""
    revision: str | None = None
    """Commit of the hub repository, 40 hexadecimal digits; required there."""
    subfolder: str | None = None
    """Folder inside the hub repository."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.hub is None):
            raise ValueError("needs either `path` or `hub`")
        if self.hub is not None and not _COMMIT.fullmatch(self.revision or ""):
            given = f"`{self.revision}` is none" if self.revision else "there is none"
            raise ValueError(
                f"a `hub` model needs a commit (40 hexadecimal digits) as `revision`, and {given}; "
                f"huggingface.co/{self.hub}/commits/{self.revision or 'main'} lists them"
            )
        return self


class Weights(Location):
    """Place of the weights of one network."""

    config: DiskPath | None = None
    """Folder or config.json that describes a single .safetensors file."""


_LocationPlace = Annotated[Location, BeforeValidator(place, json_schema_input_type=str | Location)]
_WeightsPlace = Annotated[Weights, BeforeValidator(place, json_schema_input_type=str | Weights)]


class TextWeights(Weights):
    """Place of a text encoder and its tokenizer."""

    tokenizer: _LocationPlace | None = None
    """Folder of the tokenizer (sub-folder for a hub id), or its own `hub`, `revision` and
    `subfolder`; by default `tokenizer` beside `text_encoder`, `tokenizer_2` beside
    `text_encoder_2`, else the encoder's folder."""
    max_length: Number | None = Field(None, gt=1)
    """Tokens kept of a caption; by default 77 for CLIP, 512 for T5."""
    projection: DiskPath | None = Field(None, min_length=1)
    """A linear layer that the embeddings go through before they are cached: its folder, file, or
    the folder of a pipeline that has one."""
    trust_remote_code: bool = False
    """Run the Python code in the pipeline folder that `projection` names."""

    @model_validator(mode="after")
    def _code_of_a_projection(self) -> Self:
        if self.trust_remote_code and self.projection is None:
            raise ValueError("`trust_remote_code` is about the code of a `projection`")
        return self


# No longer than the ending of our own cache files, which stems leave room for.
_CacheEnding = Annotated[Ending, StringConstraints(max_length=20)]


class Adopt(Closed):
    """Endings of the caches that ai-training's scripts keep beside images."""

    latents: _CacheEnding | None = None
    """Ending of latents: .img_sdvae, .img_sdxl or another."""
    text: Annotated[
        list[_CacheEnding] | None,
        BeforeValidator(listed, json_schema_input_type=_CacheEnding | list[_CacheEnding] | None),
    ] = None
    """Endings of embeddings, one a text encoder in their order: .txt_t5cache, .txt_clipl."""

    @model_validator(mode="after")
    def _endings(self) -> Self:
        endings = [*([self.latents] if self.latents else []), *(self.text or [])]
        if not endings:
            raise ValueError("needs `latents`, `text` or both")
        if len(set(endings)) < len(endings):
            raise ValueError("names an ending twice")
        return self


_TextPlace = Annotated[
    TextWeights, BeforeValidator(place, json_schema_input_type=str | TextWeights)
]


class Model(Closed):
    """Encoders whose caches a trainer reads, and the network to train."""

    vae: _WeightsPlace = Field(json_schema_extra=Shapes("latents", "pictures"))
    """The AutoencoderKL, or Wan's VAE, that makes the latents."""
    text: Annotated[
        list[_TextPlace],
        BeforeValidator(listed, json_schema_input_type=_TextPlace | list[_TextPlace]),
        Field(min_length=1, json_schema_extra=TEXT),
    ]
    """The text encoders, CLIP, T5 or UMT5, in order."""
    unet: _WeightsPlace | None = Field(None, json_schema_extra=WEIGHTS)
    """The UNet that is trained."""
    text_projection: DiskPath | None = Field(None, min_length=1, json_schema_extra=WEIGHTS)
    """A linear layer between the embeddings and the UNet that is trained with it: `new`, or the
    folder or file of one."""
    scheduler: DiskPath | None = Field(None, json_schema_extra=WEIGHTS)
    """Folder of the noise schedule; by default `scheduler` beside the UNet."""
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
    task: WanTask | None = Field(None, json_schema_extra=Shapes("latents", "weights"))
    """Makes this a Wan model: its caches are those of musubi-tuner, whose --task this is."""
    checkpoint: DiskPath | None = Field(None, min_length=1, json_schema_extra=WEIGHTS)
    """Network that sd-scripts trains: a .safetensors file, or for sd1, sd2 and sdxl a diffusers
    folder."""
    dit: DiskPath | None = Field(None, min_length=1, json_schema_extra=WEIGHTS)
    """Wan's network that is trained; of Wan 2.2 the low-noise."""
    dit_high_noise: DiskPath | None = Field(None, min_length=1, json_schema_extra=WEIGHTS)
    """Wan 2.2's network for high noise."""
    clip: _WeightsPlace | None = Field(None, json_schema_extra=LATENTS)
    """The CLIP image encoder that Wan 2.1's image-to-video needs."""
    fp8_t5: bool = Field(False, json_schema_extra=Shapes("text", layouts=("musubi",)))
    """Keep umT5's weights in 8 bits: less memory."""
    vae_cache_cpu: bool = Field(False, json_schema_extra=Shapes("latents", layouts=("musubi",)))
    """Encode with Wan's VAE in tiles and slices: less memory, more time."""
    encoder: Literal["latentmake", "musubi"] = Field(
        "latentmake", json_schema_extra=Shapes("latents", "text", layouts=("musubi",))
    )
    """Encoders of a Wan model: ours, or musubi-tuner's own scripts."""
    dtype: Dtype = Field("float32", json_schema_extra=Shapes("latents", "text"))
    """dtype of the caches; by default bfloat16 for Wan."""
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
    adopt: Adopt | None = Field(None, json_schema_extra=MACHINE)
    """Caches of ai-training that adopt_{run} takes and export_{run} writes."""

    @property
    def spec(self) -> Architecture:
        """Facts about its architecture."""
        if self.task is not None:
            return WAN
        return GENERIC if self.architecture is None else ARCHITECTURES[self.architecture]

    @property
    def scripted(self) -> bool:
        """Whether musubi-tuner's own scripts encode for it."""
        return self.encoder == "musubi"

    @property
    def layout_name(self) -> str:
        """Name of its layout, of which sd-scripts has one for each architecture."""
        return f"{self.layout}-{self.architecture}" if self.layout == "sdscripts" else self.layout

    @property
    def caption_dtype(self) -> Dtype:
        """Dtype of the embeddings' caches; musubi-tuner has one alone."""
        return "bfloat16" if self.task is not None else self.text_dtype or self.dtype

    @property
    def image_to_video(self) -> bool:
        """Whether its caches hold the first frame's latents too."""
        return self.task is not None and self.task.startswith(("i2v", "flf2v"))

    @property
    def has_two_networks(self) -> bool:
        """Whether it has a network for high noise and one for low: Wan 2.2."""
        return self.task in _TWO_NETWORKS

    @property
    def needs_clip(self) -> bool:
        """Whether its latents hold the CLIP image encoder's output: Wan 2.1 image-to-video."""
        return self.task in _NEEDS_CLIP

    @model_validator(mode="before")
    @classmethod
    def _wan_is_half(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("task") is not None:
            return {"dtype": "bfloat16", "layout": "musubi", **values}
        return values

    @model_validator(mode="after")
    def _layout_fits(self) -> Self:
        if (self.task is None) == (self.layout == "musubi"):
            raise ValueError("`layout: musubi` and a Wan model's `task` belong together")
        if self.checkpoint is not None and self.layout != "sdscripts":
            raise ValueError("`checkpoint` is what sd-scripts trains: it needs `layout: sdscripts`")
        if self.layout == "sdscripts":
            if self.architecture is None:
                raise ValueError("`layout: sdscripts` needs the model's `architecture`")
            if key := self.first_set("unet", "scheduler", "text_projection"):
                raise ValueError(f"sd-scripts trains the `checkpoint`: leave out `{key}`")
        if self.architecture is None:
            about = ("clip_skip", "max_token_length", "apply_lg_attn_mask", "apply_t5_attn_mask")
            if key := self.first_set(*about):
                raise ValueError(f"`{key}` needs the model's `architecture`")
            return self
        if self.task is not None:
            raise ValueError("a Wan model has a `task`, and no `architecture`")
        encoders = self.spec.text_encoders
        if len(self.text) != len(encoders):
            names = ", ".join(encoders)
            raise ValueError(f"{self.architecture} has {len(encoders)} text encoders: {names}")
        for each, name in zip(self.text, encoders, strict=True):
            if name != "T5" and each.max_length not in (None, 77):
                raise ValueError(f"set `max_token_length`, and leave out {name}'s `max_length`")
        if self.clip_skip is not None and not self.spec.picks_layer:
            raise ValueError(f"{self.architecture} has fixed layers: leave out `clip_skip`")
        if self.max_token_length != 75 and not self.spec.chunks_captions:
            raise ValueError(f"{self.architecture} keeps 77 tokens: leave out `max_token_length`")
        if self.apply_lg_attn_mask and self.architecture != "sd3":
            raise ValueError("`apply_lg_attn_mask` is about sd3")
        if self.layout == "sdscripts" and self.max_token_length not in (75, 150, 225):
            raise ValueError("sd-scripts wants captions of one length: set `max_token_length`")
        if self.apply_t5_attn_mask and "T5" not in encoders:
            raise ValueError("`apply_t5_attn_mask` is about sd3 and flux")
        return self

    @model_validator(mode="after")
    def _adopted(self) -> Self:
        if self.adopt is None:
            return self
        if self.task is not None:
            raise ValueError("`adopt` is about Stable Diffusion's caches: leave out `task` or it")
        if self.layout == "sdscripts":
            raise ValueError("`adopt` is about our own caches: leave out `layout: sdscripts` or it")
        if self.adopt.text is not None and len(self.adopt.text) != len(self.text):
            endings = len(self.adopt.text)
            raise ValueError(
                f"`adopt.text` names {endings} endings for {len(self.text)} text encoders"
            )
        if self.adopt.text is not None and self.architecture is not None:
            raise ValueError("`adopt.text` takes the last layer alone: leave out `architecture`")
        if self.adopt.latents is not None and self.posterior != "mean":
            raise ValueError("`adopt.latents` takes the posterior's mean: leave out `posterior`")
        return self

    @model_validator(mode="after")
    def _wan(self) -> Self:
        if self.task is None:
            about = ("dit", "dit_high_noise", "clip", "fp8_t5", "vae_cache_cpu", "encoder")
            if key := self.first_set(*about):
                raise ValueError(f"`{key}` is about Wan: it needs the model's `task`")
            return self
        if self.text_projection is not None or self.text[0].projection is not None:
            raise ValueError("a Wan model takes umT5's embeddings as they are: no projection")
        if self.unet is not None or self.scheduler is not None:
            raise ValueError("a Wan model has a `dit` to train, and no `unet` or `scheduler`")
        if len(self.text) != 1:
            raise ValueError("a Wan model has one text encoder, umT5")
        if self.posterior != "mean":
            raise ValueError("musubi-tuner keeps the posterior's mode: leave out `posterior`")
        if self.text_dtype not in (None, "bfloat16"):
            raise ValueError("musubi-tuner keeps embeddings in bfloat16: leave out `text_dtype`")
        if self.needs_clip and self.clip is None:
            raise ValueError(f"{self.task} needs the CLIP image encoder: set `clip`")
        if self.clip is not None and not self.needs_clip:
            raise ValueError(f"{self.task} has no CLIP image encoder: leave out `clip`")
        if self.dit_high_noise is not None and not self.has_two_networks:
            raise ValueError(f"{self.task} has one network: leave out `dit_high_noise`")
        return self
