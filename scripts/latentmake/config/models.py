"""Encoders, and what is trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from latentmake.config.fields import Closed, Dtype, Ending, Number, listed, place

__all__ = ["Adopt", "Model", "TextWeights", "WanTask", "Weights"]


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


class Weights(Closed):
    """Where the weights of one network lie: a local path, or a hub id with its revision."""

    path: str | None = Field(None, min_length=1, description="Folder or single file of weights.")
    hub: str | None = Field(None, min_length=1, description="Repository id on the hub.")
    revision: str | None = Field(None, description="Commit of the hub repository; required there.")
    subfolder: str | None = Field(None, description="Folder inside the hub repository.")
    config: str | None = Field(
        None, description="Folder or config.json that describes a single .safetensors file."
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.hub is None):
            raise ValueError("needs either `path` or `hub`")
        if self.hub is not None and not self.revision:
            raise ValueError(
                "a `hub` model needs its `revision` (a commit), so that it cannot change"
            )
        return self


class TextWeights(Weights):
    """Where a text encoder and its tokenizer lie."""

    tokenizer: str | None = Field(
        None,
        description="Folder of the tokenizer (sub-folder for a hub id); by default `tokenizer` "
        "beside `text_encoder`, `tokenizer_2` beside `text_encoder_2`, else the encoder's folder.",
    )
    max_length: Number | None = Field(
        None, gt=1, description="Tokens kept of a caption; by default 77 for CLIP, 512 for T5."
    )
    projection: str | None = Field(
        None,
        min_length=1,
        description="A linear layer that the embeddings go through before they are cached: its "
        "folder, file, or the folder of a pipeline that has one.",
    )
    trust_remote_code: bool = Field(
        False, description="Run the Python code in the pipeline folder that `projection` names."
    )

    @model_validator(mode="after")
    def _code_of_a_projection(self) -> Self:
        if self.trust_remote_code and self.projection is None:
            raise ValueError("`trust_remote_code` is about the code of a `projection`")
        return self


# No longer than the ending of our own cache files, which stems leave room for.
_CacheEnding = Annotated[Ending, StringConstraints(max_length=20)]


class Adopt(Closed):
    """Caches that ai-training's scripts keep beside images: what their names end in."""

    latents: _CacheEnding | None = Field(
        None, description="Ending of latents: .img_sdvae, .img_sdxl or what the scripts were told."
    )
    text: Annotated[
        list[_CacheEnding] | None,
        BeforeValidator(
            lambda value: value if value is None else listed(value),
            json_schema_input_type=_CacheEnding | list[_CacheEnding] | None,
        ),
    ] = Field(
        None,
        description="Endings of embeddings, one a text encoder in their order: .txt_t5cache, "
        ".txt_clipl.",
    )

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
    """The encoders whose caches a trainer reads, and the network that is trained."""

    vae: Annotated[
        Weights,
        BeforeValidator(place, json_schema_input_type=str | Weights),
        Field(description="The AutoencoderKL, or Wan's VAE, that makes the latents."),
    ]
    text: Annotated[
        list[_TextPlace],
        BeforeValidator(listed, json_schema_input_type=_TextPlace | list[_TextPlace]),
        Field(min_length=1, description="The text encoders, CLIP, T5 or UMT5, in order."),
    ]
    unet: (
        Annotated[Weights, BeforeValidator(place, json_schema_input_type=str | Weights)] | None
    ) = Field(None, description="The UNet that is trained.")
    text_projection: str | None = Field(
        None,
        min_length=1,
        description="A linear layer between the embeddings and the UNet that is trained with it: "
        "`new`, or the folder or file of one.",
    )
    scheduler: str | None = Field(
        None, description="Folder of the noise schedule; by default `scheduler` beside the UNet."
    )
    task: WanTask | None = Field(
        None,
        description="Makes this a Wan model: its caches are those of musubi-tuner, whose --task "
        "this is.",
    )
    dit: str | None = Field(
        None, min_length=1, description="Wan's network that is trained; of Wan 2.2 the low-noise."
    )
    dit_high_noise: str | None = Field(
        None, min_length=1, description="Wan 2.2's network for high noise."
    )
    clip: (
        Annotated[Weights, BeforeValidator(place, json_schema_input_type=str | Weights)] | None
    ) = Field(None, description="The CLIP image encoder that Wan 2.1's image-to-video needs.")
    fp8_t5: bool = Field(False, description="Keep umT5's weights in 8 bits: less memory.")
    vae_cache_cpu: bool = Field(
        False, description="Encode with Wan's VAE in tiles and slices: less memory, more time."
    )
    encoder: Literal["latentmake", "musubi"] = Field(
        "latentmake",
        description="Who encodes for a Wan model: our encoders, or musubi-tuner's own scripts.",
    )
    dtype: Dtype = Field(
        "float32", description="Number format of the caches; by default bfloat16 for Wan."
    )
    vae_dtype: Dtype | None = Field(None, description="The same for the latents alone.")
    text_dtype: Dtype | None = Field(None, description="The same for the embeddings alone.")
    posterior: Literal["mean", "sample"] = Field(
        "mean", description="Keep the mean of the VAE's posterior, or one seeded sample of it."
    )
    posterior_seed: Number = Field(0, ge=0, description="Seed of `posterior: sample`.")
    adopt: Adopt | None = Field(
        None, description="Caches of ai-training that adopt_{run} takes and export_{run} writes."
    )

    @property
    def layout(self) -> Literal["plain", "musubi"]:
        """Which names and tensors its caches have."""
        return "plain" if self.task is None else "musubi"

    @property
    def image_to_video(self) -> bool:
        """Whether its caches hold the first frame's latents too."""
        return self.task is not None and self.task.startswith(("i2v", "flf2v"))

    @property
    def needs_clip(self) -> bool:
        """Whether its latents hold the CLIP image encoder's output: Wan 2.1 image-to-video."""
        return self.task in _NEEDS_CLIP

    @model_validator(mode="before")
    @classmethod
    def _wan_is_half(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("task") is not None:
            return {"dtype": "bfloat16", **values}
        return values

    @model_validator(mode="after")
    def _adopted(self) -> Self:
        if self.adopt is None:
            return self
        if self.task is not None:
            raise ValueError("`adopt` is about Stable Diffusion's caches: leave out `task` or it")
        if self.adopt.text is not None and len(self.adopt.text) != len(self.text):
            raise ValueError(
                f"`adopt.text` names {len(self.adopt.text)} endings for {len(self.text)} text "
                "encoders; name one for each, in their order"
            )
        if self.adopt.latents is not None and self.posterior != "mean":
            raise ValueError(
                "ai-training keeps the posterior's mean: leave out `posterior` or `adopt.latents`"
            )
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
            raise ValueError(
                f"{self.task} (Wan 2.1 image-to-video) needs the CLIP image encoder: set `clip`"
            )
        if self.clip is not None and not self.needs_clip:
            raise ValueError(f"{self.task} has no CLIP image encoder: leave out `clip`")
        if self.dit_high_noise is not None and self.task not in _TWO_NETWORKS:
            raise ValueError(f"{self.task} has one network: leave out `dit_high_noise`")
        return self
