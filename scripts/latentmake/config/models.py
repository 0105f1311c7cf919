"""Models: encoders, and the network to train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from latentmake.config.architectures import (
    ARCHITECTURES,
    GENERIC,
    WAN,
    Architecture,
    ArchitectureName,
)
from latentmake.config.caching_flags import refuse_decided
from latentmake.config.fields import Closed, DiskPath, Dtype, Number, listed
from latentmake.config.scripts import Version
from latentmake.config.shapes import LATENTS, MACHINE, TEXT, WEIGHTS, Shapes
from latentmake.config.strategies_checks import check_strategies
from latentmake.config.weights import (
    NO_WEIGHTS,
    Adopt,
    TextPlace,
    Weights,
    WeightsPlace,
    refuse_unread,
)

__all__ = ["Model"]

_TASKS = dict.fromkeys(
    task
    for row in (WAN, *ARCHITECTURES.values())
    for task in (row.scripts.versions if row.scripts else ())
    if task
)
_Task = Annotated[str, WithJsonSchema({"type": "string", "enum": list(_TASKS)})]


class Model(Closed):
    """Encoders whose caches a trainer reads, and the network to train."""

    vae: WeightsPlace = Field(NO_WEIGHTS, json_schema_extra=Shapes("latents", "pictures"))
    """The AutoencoderKL, or Wan's VAE, that makes the latents. Left out where there is none:
    HiDream O1."""
    text: Annotated[
        list[TextPlace],
        BeforeValidator(listed, json_schema_input_type=TextPlace | list[TextPlace]),
        Field(json_schema_extra=TEXT),
    ] = Field([])
    """The text encoders, CLIP, T5, UMT5 or those of the architecture, in order."""
    unet: WeightsPlace | None = Field(None, json_schema_extra=WEIGHTS)
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
    task: _Task | None = Field(None, json_schema_extra=Shapes("latents", "text", "weights"))
    """The --task or --model_version of musubi-tuner. Without `architecture` it makes this a Wan
    model, whose caches are those of musubi-tuner."""
    checkpoint: DiskPath | None = Field(None, min_length=1, json_schema_extra=WEIGHTS)
    """Network that sd-scripts trains: a .safetensors file, or for sd1, sd2 and sdxl a diffusers
    folder."""
    dit: DiskPath | None = Field(None, min_length=1, json_schema_extra=WEIGHTS)
    """Network that musubi-tuner or the trainer wan trains; of Wan 2.2 the low-noise."""
    dit_high_noise: DiskPath | None = Field(None, min_length=1, json_schema_extra=WEIGHTS)
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
    adopt: Adopt | None = Field(None, json_schema_extra=MACHINE)
    """Caches of ai-training that adopt_{run} takes and export_{run} writes."""

    @property
    def spec(self) -> Architecture:
        """Facts about its architecture."""
        if self.architecture is not None:
            return ARCHITECTURES[self.architecture]
        return GENERIC if self.task is None else WAN

    @property
    def version(self) -> Version:
        """What its `task` stands for; that of an architecture without scripts is empty."""
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

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_musubi(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if isinstance(values.get("vae"), dict) and not any(values["vae"].values()):
            values = {key: values[key] for key in values if key != "vae"}  # NO_WEIGHTS, as written
        name, task = values.get("architecture"), values.get("task")
        if name == WAN.name:
            name, values = None, {key: values[key] for key in values if key != "architecture"}
        row = ARCHITECTURES.get(name, GENERIC) if isinstance(name, str) else GENERIC
        if row.scripts is not None:
            (only, *others) = row.scripts.versions
            given = {} if others or not only else {"task": only}
            forced = {"dtype": "bfloat16", "layout": "musubi", "encoder": "musubi"}
            return {**forced, **given, **values}
        if row.strategies is not None and not row.encodes:
            return {**row.strategies.defaults, **values}
        if name is None and task is not None:
            return {"dtype": "bfloat16", "layout": "musubi", **values}
        return values

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check(self)
        return self


def _check(model: Model) -> None:
    """Refuse keys that do not go together; pydantic adds the model's place to a ValueError."""
    _check_layout(model)
    if model.spec.scripts is not None:
        _check_scripted(model)
    elif not model.spec.encodes:
        check_strategies(model)
    else:
        _refuse_musubi_keys(model)
    _check_present(model)
    if model.spec.encodes and model.architecture is not None:
        _check_text(model)
    if model.adopt is not None:
        _check_adopted(model)


def _check_present(model: Model) -> None:
    """Refuse a model without the encoders that its architecture has."""
    scripts, needed = model.spec.scripts, {"vae", "text"}
    if scripts is not None and not model.spec.encodes:
        files = (*scripts.latents.files, *scripts.text.files)
        needed = {file.key.partition(".")[0] for file in files if file.required}
    for key in sorted(needed, reverse=True):
        if model.weights(key) is None:
            raise PydanticCustomError("missing_key", "this key is missing", {"key": key})


def _check_layout(model: Model) -> None:
    if model.by_strategies and (model.spec.encodes or model.spec.strategies is None):
        raise ValueError("`encoder: sdscripts` is not for this architecture: leave it out")
    if (model.spec.scripts is None) == (model.layout == "musubi"):
        raise ValueError(
            "`layout: musubi` belongs to a Wan model's `task`, or an `architecture` of musubi-tuner"
        )
    if model.checkpoint is not None and model.layout != "sdscripts":
        raise ValueError("`checkpoint` is what sd-scripts trains: it needs `layout: sdscripts`")
    if model.layout == "sdscripts":
        if model.architecture is None:
            raise ValueError("`layout: sdscripts` needs the model's `architecture`")
        if key := model.first_set("unet", "scheduler", "text_projection"):
            raise ValueError(f"sd-scripts trains the `checkpoint`: leave out `{key}`")
    about = ("clip_skip", "max_token_length", "apply_lg_attn_mask", "apply_t5_attn_mask")
    without = model.architecture is None or model.spec.scripts is not None
    if without and (key := model.first_set(*about)):
        raise ValueError(f"`{key}` needs the `architecture` of Stable Diffusion or Flux")


def _check_text(model: Model) -> None:
    encoders = model.spec.text_encoders
    if len(model.text) != len(encoders):
        names = ", ".join(encoders)
        raise ValueError(f"{model.architecture} has {len(encoders)} text encoders: {names}")
    for each, name in zip(model.text, encoders, strict=True):
        if name != "T5" and each.max_length not in (None, 77):
            raise ValueError(f"set `max_token_length`, and leave out {name}'s `max_length`")
    if model.clip_skip is not None and not model.spec.picks_layer:
        raise ValueError(f"{model.architecture} has fixed layers: leave out `clip_skip`")
    if model.max_token_length != 75 and not model.spec.chunks_captions:
        raise ValueError(f"{model.architecture} keeps 77 tokens: leave out `max_token_length`")
    if model.apply_lg_attn_mask and not model.spec.masks_clips:
        raise ValueError("`apply_lg_attn_mask` is about sd3")
    if model.layout == "sdscripts" and model.max_token_length not in (75, 150, 225):
        raise ValueError("sd-scripts wants captions of one length: set `max_token_length`")
    if model.apply_t5_attn_mask and "T5" not in encoders:
        raise ValueError("`apply_t5_attn_mask` is about sd3 and flux")


def _check_adopted(model: Model) -> None:
    assert model.adopt is not None
    if model.spec.scripts is not None:
        raise ValueError("`adopt` is about Stable Diffusion's caches: leave out `task` or it")
    if model.layout == "sdscripts":
        raise ValueError("`adopt` is about our own caches: leave out `layout: sdscripts` or it")
    if model.adopt.text is not None and len(model.adopt.text) != len(model.text):
        endings = len(model.adopt.text)
        raise ValueError(
            f"`adopt.text` names {endings} endings for {len(model.text)} text encoders"
        )
    if model.adopt.text is not None and model.architecture is not None:
        raise ValueError("`adopt.text` takes the last layer alone: leave out `architecture`")
    if model.adopt.latents is not None and model.posterior != "mean":
        raise ValueError("`adopt.latents` takes the posterior's mean: leave out `posterior`")


def _refuse_musubi_keys(model: Model) -> None:
    if model.task is not None:
        raise ValueError(f"`architecture: {model.architecture}` has no `task`: leave out one")
    about = ("dit", "dit_high_noise", "clip", "fp8_t5", "vae_cache_cpu", "encoder")
    if key := model.first_set(*about):
        raise ValueError(f"`{key}` is about Wan: it needs the model's `task`")
    if key := model.first_set("image_encoder", "latents_arguments", "text_arguments"):
        raise ValueError(f"`{key}` is about musubi-tuner's architectures, and this is none")


def _check_scripted(model: Model) -> None:
    scripts, title = model.spec.scripts, model.title
    assert scripts is not None
    if (model.task or "") not in scripts.versions:
        known = ", ".join(filter(None, scripts.versions)) or "none"
        what = f"{model.task} is no task of {title}" if model.task else f"{title} needs a `task`"
        raise ValueError(f"{what}; known: {known}")
    if model.text_projection is not None or any(each.projection for each in model.text):
        raise ValueError(f"a {title} model takes its text embeddings as they are: no projection")
    if model.unet is not None or model.scheduler is not None:
        raise ValueError(f"a {title} model has a `dit` to train, and no `unet` or `scheduler`")
    if model.posterior != "mean":
        raise ValueError("musubi-tuner decides about the posterior: leave out `posterior`")
    if model.spec.encodes and model.text_dtype not in (None, "bfloat16"):
        raise ValueError("musubi-tuner keeps embeddings in bfloat16: leave out `text_dtype`")
    if not model.scripted:
        if not model.spec.encodes:
            raise ValueError(f"{title} is encoded by musubi-tuner's scripts: leave out `encoder`")
        if key := model.first_set("latents_arguments", "text_arguments"):
            raise ValueError(f"`{key}` is for musubi-tuner's scripts: set `encoder: musubi`")
    files = (*scripts.latents.files, *scripts.text.files, *scripts.training.files)
    if not model.spec.encodes:
        refuse_unread({file.key: model.weights(file.key) for file in files}, title)
    texts = len({file.key for file in files if file.key.startswith("text")})
    fewest = len({file.key for file in files if file.key.startswith("text") and file.required})
    if not fewest <= len(model.text) <= texts:
        number = str(texts) if texts == fewest else f"{fewest} to {texts}"
        raise ValueError(f"a {title} model has {number} text encoder{'s' * (number != '1')}")
    _check_files(model, {file.key: file.flag for file in files})
    for key, script, version, dtype in (
        ("latents_arguments", scripts.latents, model.version.latents, "vae_dtype"),
        ("text_arguments", scripts.text, model.version.text, "text_dtype"),
    ):
        refuse_decided(key, getattr(model, key), script, version, dtype)


def _check_files(model: Model, flags: Mapping[str, str]) -> None:
    """Refuse weights that the architecture or its task does not take, or lacks."""
    about = model.task or model.title
    for key, what in (("clip", "CLIP image encoder"), ("image_encoder", "image encoder")):
        needed, given = key in model.version.needs, model.weights(key) is not None
        if needed and not given:
            raise ValueError(f"{about} needs the {what}: set `{key}`")
        if given and not needed:
            raise ValueError(f"{about} has no {what}: leave out `{key}`")
    if model.dit_high_noise is not None and not model.has_two_networks:
        raise ValueError(f"{about} has one network: leave out `dit_high_noise`")
    if model.vae.is_set and "vae" not in flags:
        raise ValueError(f"{model.title} has no VAE: leave out `vae`")
    scripts = model.spec.scripts
    assert scripts is not None
    known = {key for script in (scripts.latents, scripts.text) for _, key in script.switches}
    for key in ("fp8_t5", "vae_cache_cpu"):
        if getattr(model, key) and key not in known:
            instead = f"{model.title} has `latents_arguments`, `text_arguments`"
            raise ValueError(f"`{key}` is about Wan: {instead}")
    if model.spec.encodes:
        return
    for key, flag, what in (
        ("vae_dtype", scripts.latents.dtype_flag, "latents"),
        ("text_dtype", scripts.text.dtype_flag, "embeddings"),
    ):
        if getattr(model, key) and flag is None:
            what = f"musubi-tuner decides about the dtype of {model.title}'s {what}"
            raise ValueError(f"{what}: leave out `{key}`")
    if model.dtype != "bfloat16":
        raise ValueError("musubi-tuner's scripts know no `dtype`: set `vae_dtype` or leave it out")
