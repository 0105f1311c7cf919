"""Keys of a model: its encoders, and the network to train."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from latentmake.config.fields import (
    LATENTS,
    MACHINE,
    TEXT,
    WEIGHTS,
    Closed,
    DiskPath,
    Dtype,
    Number,
    OneOf,
    Shapes,
    listed,
)
from latentmake.config.spec import GENERIC, Architecture
from latentmake.config.weights import (
    NO_WEIGHTS,
    Adopt,
    LocalPlace,
    TextPlace,
    Version,
    Weights,
    WeightsPlace,
)


def _architectures() -> Iterable[str]:
    from latentmake.config.architectures import ARCHITECTURES

    return ARCHITECTURES


def _tasks() -> Iterable[str]:
    from latentmake.config.architectures import ARCHITECTURES, WAN

    rows = [row.scripts for row in (WAN, *ARCHITECTURES.values()) if row.scripts is not None]
    return dict.fromkeys(task for row in rows for task in row.versions if task)


class ModelKeys(Closed):
    """Keys of a model before they are compared with each other; see `config.models`."""

    aliases: ClassVar[dict[str, str]] = {"adopt": "ai_training"}
    """Key of an earlier release -> key."""

    vae: WeightsPlace = Field(NO_WEIGHTS, json_schema_extra=Shapes("latents", "pictures"))
    """The VAE, which makes the latents: a path or [section](#place-of-weights). It is an
    `AutoencoderKL`, or the VAE of the architecture. Every model needs one except HiDream O1, which
    has no VAE."""
    text: Annotated[
        list[TextPlace],
        BeforeValidator(listed, json_schema_input_type=TextPlace | list[TextPlace]),
        Field(json_schema_extra=TEXT),
    ] = Field([])
    """The text encoders, in the order of the network: CLIP, T5, umT5 or those of the architecture.
    Each is a path or [section](#text-encoders). The folder of a pipeline stands for all of its text
    encoders. Every model needs them except HiDream O1."""
    unet: WeightsPlace | None = Field(None, json_schema_extra=WEIGHTS)
    """The UNet to train: a path or [section](#place-of-weights); by default that of `checkpoint`. A
    run with the trainer `sd` needs it."""
    text_projection: DiskPath | None = Field(None, min_length=1, json_schema_extra=WEIGHTS)
    """A linear layer between the text embeddings and the UNet, trained together with the UNet:
    `new`, or the folder or file of a trained one to start from. It connects T5 (width 4096) to the
    UNet of Stable Diffusion 1.x (width 768). The result is written to
    `runs/{run}/text_projection`. Unlike `projection` of a text encoder, it is not part of the
    caches."""
    scheduler: LocalPlace | None = Field(None, json_schema_extra=WEIGHTS)
    """Folder of the noise schedule (`scheduler_config.json`), or of its pipeline. By default
    `scheduler` beside the UNet, or in the same hub repository. Set it if the UNet is a single file
    that lies elsewhere."""
    architecture: Annotated[str, OneOf(_architectures)] | None = Field(
        None, json_schema_extra=Shapes("latents", "text", "weights")
    )
    """Architecture of the model. `sd1`, `sd2`, `sdxl`, `sd3` and `flux` select the [layers of the
    text encoders](#layers-of-the-text-encoders). `lumina`, `hunyuan_image` and `anima` are encoded
    by sd-scripts, all others by musubi-tuner; see [architectures](architectures.md). `wan` is the
    same as no architecture and a `task`. Without it the last layer of each text encoder is
    cached."""
    layout: Literal["plain", "sdscripts", "musubi"] = Field(
        "plain", json_schema_extra=Shapes("latents", "text")
    )
    """Names and tensors of the cache files: `plain`, the format of Latentmake, for the trainer
    `sd` and trainers of your own; `sdscripts` for sd-scripts; `musubi` for musubi-tuner and the
    trainer `wan`. The default is `musubi` with a `task` or an architecture of musubi-tuner,
    `sdscripts` with `lumina`, `hunyuan_image` and `anima`, else `plain`."""
    clip_skip: Number | None = Field(
        None,
        ge=1,
        json_schema_extra=Shapes("text", "weights", when=("architecture", ("sd1", "sd2"))),
    )
    """CLIP layer to keep, counted from the last (`1`), followed by the final normalisation, as in
    sd-scripts. For `sd1` and `sd2`."""
    max_token_length: Literal[75, 150, 225, "auto"] = Field(
        75,
        json_schema_extra=Shapes("text", "weights", when=("architecture", ("sd1", "sd2", "sdxl"))),
    )
    """Tokens of a caption that CLIP keeps. CLIP reads them in chunks of 75, each with its own
    begin and end token, as in sd-scripts; the vector of the caption is that of the first chunk.
    `auto` uses as many chunks as the caption needs, so captions differ in length. Longer captions
    are cut and named in the log of the job. For `sd1`, `sd2` and `sdxl`; `auto` is not for
    `layout: sdscripts`."""
    apply_lg_attn_mask: bool = Field(
        False, json_schema_extra=Shapes("text", when=("architecture", ("sd3",)))
    )
    """Hide padding tokens from the two CLIPs. For `sd3`."""
    apply_t5_attn_mask: bool = Field(
        False,
        json_schema_extra=Shapes(
            "text", layouts=("sdscripts",), when=("architecture", ("sd3", "flux"))
        ),
    )
    """Hide padding tokens from T5. For `sd3` and `flux` with `layout: sdscripts`."""
    task: Annotated[str, OneOf(_tasks, refuses=False)] | None = Field(
        None, json_schema_extra=Shapes("latents", "text", "weights")
    )
    """Variant of the model, as in `--task` or `--model_version` of musubi-tuner. Without
    `architecture` it makes this a Wan model: `t2v-14B`, `t2v-1.3B`, `i2v-14B`, `t2i-14B`,
    `flf2v-14B`, `t2v-14B-FC`, `t2v-1.3B-FC`, `i2v-14B-FC` (Wan 2.1), `t2v-A14B`, `i2v-A14B` (Wan
    2.2). Image-to-video also caches the latents of the first frame, `-FC` those of a control
    image. Tasks of other architectures: [architectures](architectures.md). A change rebuilds only
    caches that differ between the two tasks."""
    checkpoint: LocalPlace | None = Field(None, json_schema_extra=WEIGHTS)
    """One file with VAE, text encoders and network, as Civitai has them: a `.safetensors` file of
    Stable Diffusion 1.x or 2.x for the trainer `sd`, of these or SDXL for sd-scripts. Leave out
    `vae`, `text` and `unet` then, or set one of them to take it from elsewhere. For the other
    architectures of sd-scripts it is the file of the network that is trained. It is not a state to
    resume from; that is `resume_from_checkpoint` of a trainer."""
    dit: LocalPlace | None = Field(None, json_schema_extra=WEIGHTS)
    """Network that musubi-tuner or the trainer `wan` trains: a path or
    [section](#place-of-weights). For Wan 2.2 this is the network for low noise."""
    dit_high_noise: LocalPlace | None = Field(None, json_schema_extra=WEIGHTS)
    """Wan 2.2's network for high noise. Set `dit`, `dit_high_noise` or both."""
    clip: WeightsPlace | None = Field(None, json_schema_extra=LATENTS)
    """CLIP image encoder, which image-to-video with Wan 2.1 needs: a path or
    [section](#place-of-weights)."""
    image_encoder: WeightsPlace | None = Field(None, json_schema_extra=LATENTS)
    """SigLIP image encoder, which FramePack and image-to-video with HunyuanVideo 1.5 need: a path
    or [section](#place-of-weights)."""
    latents_arguments: list[str] = Field([], json_schema_extra=LATENTS)
    """Further arguments of the program that encodes latents, as its documentation describes them,
    such as `[--vae_tiling]`. With `encoder: musubi` they go to musubi-tuner's caching script. With
    `encoder: sdscripts` these are possible, and the training gets them too: `--vae_chunk_size`
    (HunyuanImage, Anima), `--vae_disable_cache` (Anima)."""
    text_arguments: list[str] = Field([], json_schema_extra=TEXT)
    """Further arguments of the program that encodes captions, such as `[--fp8_vl]`. With `encoder:
    sdscripts` these are possible: `--system_prompt`, `--gemma2_max_token_length` (Lumina),
    `--qwen3_max_token_length`, `--t5_max_token_length`, `--t5_tokenizer_path` (Anima),
    `--tokenizer_cache_dir` (Lumina, HunyuanImage)."""
    fp8_t5: bool = Field(False, json_schema_extra=Shapes("text", layouts=("musubi",)))
    """Keep the weights of umT5 in 8 bits: half the memory, slightly different embeddings. For
    Wan."""
    vae_cache_cpu: bool = Field(False, json_schema_extra=Shapes("latents", layouts=("musubi",)))
    """Encode with Wan's VAE in tiles and slices: less memory, more time, slightly different
    latents above 256 x 256. With `encoder: musubi` it is passed on to musubi-tuner's script."""
    vae_tiling: bool = Field(
        False, json_schema_extra=Shapes("latents", layouts=("plain", "sdscripts"))
    )
    """Encode images that are wider or higher than 512 pixels in overlapping tiles of 512 x 512,
    for a GPU without enough memory for the complete image. Latents of these images differ
    slightly; smaller images stay the same."""
    encoder: Literal["latentmake", "musubi", "sdscripts"] = Field(
        "latentmake", json_schema_extra=Shapes("latents", "text", layouts=("musubi",))
    )
    """Program that encodes: `latentmake`; `musubi`, musubi-tuner's own caching scripts; or
    `sdscripts`, sd-scripts' own classes. The default depends on the architecture: `musubi` for all
    architectures of musubi-tuner except Wan, `sdscripts` for `lumina`, `hunyuan_image` and
    `anima`, else `latentmake`. Set `musubi` for Wan if you use a fork of musubi-tuner whose caches
    differ. The sources that a caching script imports count like weights: if they change, its
    caches are made again. The environment of the program does not count."""
    dtype: Dtype = Field("float32", json_schema_extra=Shapes("latents", "text"))
    """dtype of all caches. The default is `float32`, and `bfloat16` for Wan and where musubi-tuner
    or sd-scripts encode. `float16` halves the disk space and is exact enough for latents and for
    CLIP. T5 needs `bfloat16` or `float32`, because some of its values are too large for `float16`;
    such values are refused. On a CPU everything is computed in float32 and rounded when it is
    written. The exception is Wan's VAE, which computes in `bfloat16` if the processor supports it
    (AVX-512 BF16, AMX)."""
    vae_dtype: Dtype | None = Field(None, json_schema_extra=LATENTS)
    """dtype of the latents, if it differs from `dtype`."""
    text_dtype: Dtype | None = Field(None, json_schema_extra=TEXT)
    """dtype of the embeddings, if it differs from `dtype`. Embeddings of Wan are always
    `bfloat16`."""
    posterior: Literal["mean", "sample"] = Field(
        "mean", json_schema_extra=Shapes("latents", layouts=("plain", "sdscripts"))
    )
    """Value of the VAE's posterior to cache. `mean` is what most trainers cache. `sample` is one
    random sample; its noise depends only on `posterior_seed` and the content of the item, so it is
    the same on every machine."""
    posterior_seed: Number = Field(
        0,
        ge=0,
        json_schema_extra=Shapes(
            "latents", layouts=("plain", "sdscripts"), when=("posterior", ("sample",))
        ),
    )
    """Seed of `posterior: sample`."""
    ai_training: Adopt | None = Field(None, json_schema_extra=MACHINE)
    """File endings of caches that [ai-training's](../trainers/ai-training.md) scripts made with
    the encoders of this model. `latentmake adopt` takes such files over and `export_{run}` writes
    them. Caches of musubi-tuner and sd-scripts are named by [`adopt_from`](datasets.md#adopt_from)
    of the dataset."""

    @property
    def spec(self) -> Architecture:
        """Facts about its architecture."""
        if self.architecture is None and self.task is None:
            return GENERIC
        from latentmake.config.architectures import ARCHITECTURES, WAN

        return WAN if self.architecture is None else ARCHITECTURES[self.architecture]

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
