"""Section `models`: encoders and the network to train, and checks of contradictions in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import TypeAdapter, ValidationError, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from latentmake.config.architectures import (
    ARCHITECTURES,
    GENERIC,
    MUSUBI,
    WAN,
    ArchitectureName,
)
from latentmake.config.fields import (
    TEXT,
    Applies,
    Closed,
    DiskPath,
    Dtype,
    Listed,
    Number,
    Real,
    Shapes,
    shaped,
)
from latentmake.config.makers import Architecture, File, Version, options_in
from latentmake.config.weights import (
    NO_WEIGHTS,
    AiTraining,
    LocalPlace,
    TextPlace,
    Weights,
    WeightsPlace,
)

_TASKS = [*dict.fromkeys(task for row in MUSUBI.values() for task in row.versions if task)]


def _only(models: str, when: Callable[[Any], object]) -> Applies:
    return Applies(f"is only for {models}", when=when)


def _having(fact: Callable[[Architecture], object]) -> dict[str, Any]:
    """Return the arguments of `Shapes` for a key of the architectures that have a fact."""
    *names, last = (name for name, row in ARCHITECTURES.items() if fact(row))
    words = f"{', '.join(names)} and {last}" if names else last
    applies = [_only(words, lambda model: fact(model.spec))]
    return {"when": ("architecture", (*names, last)), "applies": applies}


_PLAIN = _only("`layout: plain`", lambda model: model.is_plain)
_MUSUBI = _only("Wan and other architectures of musubi-tuner", lambda model: model.spec.has_tasks)
_TWO_NETWORKS = _only("Wan 2.2", lambda model: model.version.boundary is not None)
_VISION = _only("image-to-video with Wan 2.1", lambda model: model.needs_clip)
_SIGLIP = _only(
    "FramePack and image-to-video with HunyuanVideo 1.5",
    lambda model: "image_encoder" in model.version.needs,
)
_WAN = _only("Wan", lambda model: model.spec.encodes and model.spec.has_tasks)
_TILED = _only(
    "VAEs of images that Latentmake encodes with",
    lambda model: model.spec.encodes_pictures,
)
_CHECKPOINT = Applies(
    "is a file of Stable Diffusion, or what sd-scripts trains: it needs `layout: sdscripts`",
    when=lambda model: model.is_for_sdscripts or model.spec.checkpoints,
)
_VAE = Applies(
    "is not for this architecture, which has no VAE",
    when=lambda model: not model.spec.has_tasks or "vae" in model.files,
)
_DRAWN = Applies("is decided by musubi-tuner", when=lambda model: not model.spec.has_tasks)
_FOREIGN = Applies(
    "is for other programs that encode: it needs `encoder: musubi`",
    when=lambda model: model.is_external,
)
_FIXED = "is decided by the program that encodes this architecture"
_VAE_DTYPE = Applies(_FIXED, when=lambda model: model.spec.takes_dtype("latents", model.text_dtype))
_TEXT_DTYPE = Applies(_FIXED, when=lambda model: model.spec.takes_dtype("text", model.text_dtype))


_PLACE: TypeAdapter[str] = TypeAdapter(LocalPlace)


def _with_checkpoint(values: dict[str, Any], row: Architecture) -> dict[str, Any]:
    """Return the keys of a model, with places in its `checkpoint` for parts that no key names.

    With `layout: sdscripts`, `unet` stays unset, because sd-scripts trains the `checkpoint` itself.
    """
    try:
        path = _PLACE.validate_python(values["checkpoint"])
    except ValidationError:
        return values  # the check of the key itself reports the error
    keys = ("vae",) if values.get("layout") == "sdscripts" else ("vae", "unet")
    own = {key: {"path": path, "subfolder": key} for key in keys if values.get(key) is None}
    number = max(1, len(row.text_encoders))
    text = values.get("text") or {}
    texts = text if isinstance(text, list) else [text] * number if _lacks_place(text) else [text]
    names = ["text_encoder", *(f"text_encoder_{index}" for index in range(2, len(texts) + 1))]
    filled = [
        {"path": path, "subfolder": name, **section} if _lacks_place(section) else section
        for section, name in zip(texts, names, strict=False)
    ]
    return {**values, **own, "text": filled}


def _lacks_place(text: object) -> bool:
    """Whether a text encoder's section has neither `path` nor `hub`."""
    return isinstance(text, dict) and not text.get("path") and not text.get("hub")


class Model(Closed):
    """Encoders whose caches a trainer reads, and the network to train."""

    vae: WeightsPlace = shaped(NO_WEIGHTS, Shapes("latents", "pictures", applies=[_VAE]))
    """The VAE, which makes the latents: a path or [section](#place-of-weights). It is an
    `AutoencoderKL`, or the VAE of the architecture. Without an `architecture` it may be FLUX.2's,
    for a UNet of its 32 channels; set `scaling_factor` then. Every model needs one except HiDream
    O1, which has no VAE."""
    text: Listed[TextPlace] = shaped([], TEXT)
    """The text encoders, in the order of the network: CLIP, T5, umT5 or those of the architecture.
    Each is a path or [section](#text-encoders). The folder of a pipeline stands for all of its text
    encoders. Every model needs them except HiDream O1."""
    unet: WeightsPlace | None = shaped(None, Shapes("weights", applies=[_PLAIN]))
    """The UNet to train: a path or [section](#place-of-weights); by default that of `checkpoint`. A
    run with the trainer `sd` needs it."""
    text_projection: DiskPath | None = shaped(
        None, Shapes("weights", applies=[_PLAIN]), min_length=1
    )
    """A linear layer between the text embeddings and the UNet, trained together with the UNet:
    `new`, or the folder or file of a trained one to start from. It connects T5 (width 4096) to the
    UNet of Stable Diffusion 1.x (width 768). The result is written to
    `runs/{run}/text_projection`. Unlike `projection` of a text encoder, it is not part of the
    caches."""
    scheduler: LocalPlace | None = shaped(None, Shapes("weights", applies=[_PLAIN]))
    """Folder of the noise schedule (`scheduler_config.json`), or of its pipeline. By default
    `scheduler` beside the UNet, or in the same hub repository. Set it if the UNet is a single file
    that lies elsewhere."""
    architecture: ArchitectureName | None = shaped(None, Shapes("latents", "text", "weights"))
    """Architecture of the model. `sd1`, `sd2`, `sdxl`, `sd3` and `flux` select the [layers of the
    text encoders](#layers-of-the-text-encoders). `lumina`, `hunyuan_image` and `anima` are encoded
    by sd-scripts, all others by musubi-tuner; see [architectures](architectures.md). `wan` is the
    same as no architecture and a `task`. Without it the last layer of each text encoder is
    cached."""
    layout: Literal["plain", "sdscripts", "musubi"] = shaped("plain", Shapes("latents", "text"))
    """Names and tensors of the cache files: `plain`, the format of Latentmake, for the trainer
    `sd` and trainers of your own; `sdscripts` for sd-scripts; `musubi` for musubi-tuner and the
    trainer `wan`. The default is `musubi` with a `task` or an architecture of musubi-tuner,
    `sdscripts` with `lumina`, `hunyuan_image` and `anima`, else `plain`."""
    clip_skip: Number | None = shaped(
        None,
        Shapes("text", "weights", **_having(lambda row: row.picks_layer)),
        ge=1,
    )
    """CLIP layer to keep, counted from the last (`1`), followed by the final normalisation, as in
    sd-scripts. For `sd1` and `sd2`."""
    max_token_length: Literal[75, 150, 225, "auto"] = shaped(
        75,
        Shapes("text", "weights", **_having(lambda row: row.chunks_captions)),
    )
    """Tokens of a caption that CLIP keeps. CLIP reads them in chunks of 75, each with its own
    begin and end token, as in sd-scripts; the vector of the caption is that of the first chunk.
    `auto` uses as many chunks as the caption needs, so captions differ in length. Longer captions
    are cut and named in the log of the job. For `sd1`, `sd2` and `sdxl`; `auto` is not for
    `layout: sdscripts`."""
    apply_lg_attn_mask: bool = shaped(False, Shapes("text", **_having(lambda row: row.masks_clips)))
    """Hide padding tokens from the two CLIPs. For `sd3`."""
    apply_t5_attn_mask: bool = shaped(
        False,
        Shapes("text", layouts=("sdscripts",), **_having(lambda row: "T5" in row.text_encoders)),
    )
    """Hide padding tokens from T5. For `sd3` and `flux` with `layout: sdscripts`."""
    task: Annotated[str, WithJsonSchema({"type": "string", "enum": _TASKS})] | None = shaped(
        None, Shapes("latents", "text", "weights", applies=[_MUSUBI])
    )
    """Variant of the model, as in `--task` or `--model_version` of musubi-tuner. Without
    `architecture` it makes this a Wan model: `t2v-14B`, `t2v-1.3B`, `i2v-14B`, `t2i-14B`,
    `flf2v-14B`, `t2v-14B-FC`, `t2v-1.3B-FC`, `i2v-14B-FC` (Wan 2.1), `t2v-A14B`, `i2v-A14B` (Wan
    2.2). Image-to-video also caches the latents of the first frame, `-FC` those of a control
    image. Tasks of other architectures: [architectures](architectures.md). A change rebuilds only
    caches that differ between the two tasks."""
    checkpoint: LocalPlace | None = shaped(None, Shapes("weights", applies=[_CHECKPOINT]))
    """One file with VAE, text encoders and network, as Civitai has them: a `.safetensors` file of
    Stable Diffusion 1.x, 2.x or XL for the trainer `sd` or sd-scripts. Leave out `vae`, `text` and
    `unet` then, or set one of them to take it from elsewhere. For the other architectures of
    sd-scripts it is the file of the network that is trained."""
    dit: LocalPlace | None = shaped(None, Shapes("weights", applies=[_MUSUBI]))
    """Network that musubi-tuner or the trainer `wan` trains: a path or
    [section](#place-of-weights). For Wan 2.2 this is the network for low noise."""
    dit_high_noise: LocalPlace | None = shaped(None, Shapes("weights", applies=[_TWO_NETWORKS]))
    """Wan 2.2's network for high noise. Set `dit`, `dit_high_noise` or both."""
    clip: WeightsPlace | None = shaped(None, Shapes("latents", applies=[_VISION]))
    """CLIP image encoder, which image-to-video with Wan 2.1 needs: a path or
    [section](#place-of-weights)."""
    image_encoder: WeightsPlace | None = shaped(None, Shapes("latents", applies=[_SIGLIP]))
    """SigLIP image encoder, which FramePack and image-to-video with HunyuanVideo 1.5 need: a path
    or [section](#place-of-weights)."""
    latents_arguments: list[str] = shaped([], Shapes("latents", applies=[_FOREIGN]))
    """Further arguments of the program that encodes latents, as its documentation describes them,
    such as `[--vae_tiling]`. With `encoder: musubi` they go to musubi-tuner's caching script. With
    `encoder: sdscripts` these are possible, and the training gets them too: `--vae_chunk_size`
    (HunyuanImage, Anima), `--vae_disable_cache` (Anima)."""
    text_arguments: list[str] = shaped([], Shapes("text", applies=[_FOREIGN]))
    """Further arguments of the program that encodes captions, such as `[--fp8_vl]`. With `encoder:
    sdscripts` these are possible: `--system_prompt`, `--gemma2_max_token_length` (Lumina),
    `--qwen3_max_token_length`, `--t5_max_token_length`, `--t5_tokenizer_path` (Anima),
    `--tokenizer_cache_dir` (Lumina, HunyuanImage)."""
    fp8_t5: bool = shaped(False, Shapes("text", layouts=("musubi",), applies=[_WAN]))
    """Keep the weights of umT5 in 8 bits: half the memory, slightly different embeddings. For
    Wan."""
    vae_cache_cpu: bool = shaped(False, Shapes("latents", layouts=("musubi",), applies=[_WAN]))
    """Encode with Wan's VAE in tiles and slices: less memory, more time, slightly different
    latents above 256 x 256. With `encoder: musubi` it is passed on to musubi-tuner's script."""
    vae_tiling: bool = shaped(
        False, Shapes("latents", layouts=("plain", "sdscripts"), applies=[_TILED])
    )
    """Encode images that are wider or higher than 512 pixels in overlapping tiles of 512 x 512,
    for a GPU without enough memory for the complete image. Latents of these images differ
    slightly; smaller images stay the same."""
    encoder: Literal["latentmake", "musubi", "sdscripts"] = shaped(
        "latentmake", Shapes("latents", "text", layouts=("musubi",))
    )
    """Program that encodes: `latentmake`; `musubi`, musubi-tuner's own caching scripts; or
    `sdscripts`, sd-scripts' own classes. The default depends on the architecture: `musubi` for all
    architectures of musubi-tuner except Wan, `sdscripts` for `lumina`, `hunyuan_image` and
    `anima`, else `latentmake`. Set `musubi` for Wan if you use a fork of musubi-tuner whose caches
    differ. The sources that a caching script imports count like weights: if they change, its
    caches are made again. The environment of the program does not count."""
    dtype: Dtype = shaped("float32", Shapes("latents", "text"))
    """dtype of all caches. The default is `float32`, and `bfloat16` for Wan and where musubi-tuner
    or sd-scripts encode. `float16` halves the disk space and is exact enough for latents and for
    CLIP. T5 needs `bfloat16` or `float32`, because some of its values are too large for `float16`;
    such values are refused. On a CPU everything is computed in float32 and rounded when it is
    written. The exception is Wan's VAE, which computes in `bfloat16` if the processor supports it
    (AVX-512 BF16, AMX)."""
    vae_dtype: Dtype | None = shaped(None, Shapes("latents", applies=[_VAE_DTYPE]))
    """dtype of the latents, if it differs from `dtype`."""
    text_dtype: Dtype | None = shaped(None, Shapes("text", applies=[_TEXT_DTYPE]))
    """dtype of the embeddings, if it differs from `dtype`. Embeddings of Wan are always
    `bfloat16`."""
    posterior: Literal["mean", "sample"] = shaped(
        "mean", Shapes("latents", layouts=("plain", "sdscripts"), applies=[_DRAWN])
    )
    """Value of the VAE's posterior to cache. `mean` is what most trainers cache. `sample` is one
    random sample; its noise depends only on `posterior_seed` and the content of the item, so it is
    the same on every machine."""
    posterior_seed: Number = shaped(
        0, Shapes("latents", layouts=("plain", "sdscripts"), when=("posterior", ("sample",))), ge=0
    )
    """Seed of `posterior: sample`."""
    scaling_factor: Real | None = shaped(
        None, Shapes("latents", indirect=True, applies=[_PLAIN]), gt=0
    )
    """Factor of the latents, as the network takes them: `(latents - shift_factor) *
    scaling_factor`. By default that of the VAE's `config.json`; of a VAE without one, that of the
    `architecture`. Caches hold unscaled latents with both numbers in their header."""
    shift_factor: Real | None = shaped(None, Shapes("latents", indirect=True, applies=[_PLAIN]))
    """Shift of the latents, subtracted before they are scaled. The default is read where that of
    `scaling_factor` is."""
    ai_training: AiTraining | None = shaped(None, Shapes("machine", applies=[_PLAIN]))
    """File endings of [ai-training's](../trainers/ai-training.md) caches. `latentmake adopt` takes
    over such files that its scripts made with the encoders of this model, and `export_{run}` writes
    them."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_architecture(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if isinstance(values.get("vae"), dict) and not any(values["vae"].values()):
            # `vae` is NO_WEIGHTS in its saved form.
            values = {key: values[key] for key in values if key != "vae"}
        name, task = values.get("architecture"), values.get("task")
        if name == "wan":
            name, values = None, {key: values[key] for key in values if key != "architecture"}
        usual = GENERIC if name is not None or task is None else WAN
        row = ARCHITECTURES.get(name, usual) if isinstance(name, str) else usual
        if row.checkpoints and values.get("checkpoint") and task is None:
            values = _with_checkpoint(values, row)
        return {**row.defaults, **values}

    @model_validator(mode="after")
    def _applies(self) -> Self:
        if fault := next(_faults(self), None):
            raise ValueError(fault)
        return self

    @property
    def spec(self) -> Architecture:
        """Facts about the architecture."""
        if self.architecture is None:
            return GENERIC if self.task is None else WAN
        return ARCHITECTURES[self.architecture]

    @property
    def version(self) -> Version:
        """Version of the architecture that `task` names; the default one without musubi-tuner."""
        return self.spec.version(self.task)

    @property
    def is_plain(self) -> bool:
        """Whether the caches are for trainers of our own format, with names of one kind."""
        return self.layout == "plain"

    @property
    def is_for_sdscripts(self) -> bool:
        """Whether the caches are for sd-scripts."""
        return self.layout == "sdscripts"

    @property
    def is_external(self) -> bool:
        """Whether another program encodes."""
        return self.encoder != "latentmake"

    @property
    def scripted(self) -> bool:
        """Whether musubi-tuner's own scripts encode."""
        return self.encoder == "musubi"

    @property
    def title(self) -> str:
        """Name of the architecture for people."""
        return self.spec.title

    @property
    def layout_name(self) -> str:
        """Name of the layout; each architecture of an external trainer has its own."""
        named = self.architecture is not None and not self.is_plain
        return f"{self.layout}-{self.architecture}" if named else self.layout

    @property
    def caption_dtype(self) -> Dtype:
        """Dtype of cached embeddings; always `bfloat16` for musubi-tuner."""
        return self.spec.caption_dtype or self.text_dtype or self.dtype

    def further_arguments(self, kind: str) -> list[str]:
        """Return `latents_arguments` or `text_arguments`."""
        return self.text_arguments if kind == "text" else self.latents_arguments

    @property
    def image_to_video(self) -> bool:
        """Whether caches also contain latents of the first frame."""
        return "latents_image_" in self.version.tensors

    @property
    def needs_clip(self) -> bool:
        """Whether latents contain the CLIP image encoder's output (image-to-video, Wan 2.1)."""
        return "clip" in self.version.needs

    def weights(self, key: str) -> Weights | None:
        """Return the weights that a key names; None if it is not set.

        Args:
            key: name of the key; `text.1` is the second text encoder.
        """
        name, _, number = key.partition(".")
        value = getattr(self, name)
        if isinstance(value, list):
            value = value[int(number or 0)] if len(value) > int(number or 0) else None
        if isinstance(value, str):
            value = Weights(path=value)
        return value if isinstance(value, Weights) and (value.path or value.hub) else None

    @property
    def files(self) -> dict[str, File]:
        """Key -> file, for weights that external programs read."""
        return {file.key: file for file in self.spec.program_files}


def _faults(model: Model) -> Iterator[str]:
    """Yield the faults of a model; only the first is valid: checks rely on earlier ones."""
    yield from _faults_of_choice(model)
    if refused := model.refused():
        yield "`{}` {}: leave it out".format(*refused)
    for key in model.version.needs:
        if model.weights(key) is None:
            yield f"{model.task or model.title} needs `{key}`"
    if not model.spec.encodes:
        yield from _faults_of_program(model, model.title)
    yield from _faults_of_number(model)
    for key in model.spec.needs:
        if model.weights(key) is None:
            raise PydanticCustomError("missing_key", "this key is missing", {"key": key})
    if model.spec.text_encoders:
        yield from _faults_of_texts(model, model.spec.text_encoders)
    if model.ai_training is not None:
        yield from _faults_of_export(model, model.ai_training)


def _faults_of_choice(model: Model) -> Iterator[str]:
    """Yield faults of `architecture`, `task`, `layout` and `encoder`, which must fit together."""
    spec, title = model.spec, model.title
    if model.layout not in spec.trainers:
        yield "`layout: musubi` is for a Wan model's `task`, or an `architecture` of musubi-tuner"
    if spec.has_tasks and (model.task or "") not in spec.versions:
        tasks = ", ".join(filter(None, spec.versions)) or "none"
        what = f"{model.task} is no task of" if model.task else "a `task` is needed for"
        yield f"{what} {title}; known: {tasks}"
    if model.encoder not in spec.encoders:
        yield f"`encoder: {model.encoder}` is not for {title or 'this model'}"
    if model.is_for_sdscripts and model.architecture is None:
        yield "`layout: sdscripts` needs the model's `architecture`"


def _faults_of_number(model: Model) -> Iterator[str]:
    """Yield the fault of a wrong number of text encoders, for external trainers."""
    fewest, most = model.spec.text_counts or (0, len(model.text))
    if model.text and not fewest <= len(model.text) <= most:
        number = str(most) if most == fewest else f"{fewest} to {most}"
        noun = "text encoder" if number == "1" else "text encoders"
        yield f"a {model.title} model has {number} {noun}"


def _faults_of_program(model: Model, title: str) -> Iterator[str]:
    """Yield faults of a model that musubi-tuner's or sd-scripts' own encoders encode for."""
    spec = model.spec
    for name, value in spec.defaults.items():
        if name != "dtype" and getattr(model, name) != value:
            yield f"sd-scripts' own encoders make {title}'s caches: leave out `{name}`"
    if spec.fixes_dtype and model.dtype != "bfloat16":
        yield f"the program that encodes {title} decides about `dtype`: leave it out"
    for key in model.files:
        for name in ("config", "tokenizer", "max_length", "projection"):
            if getattr(model.weights(key), name, None) is not None:
                what = f"the program that encodes {title} takes a path only"
                yield f"`{key}`: {what}: leave out `{name}`"
    for kind in ("latents", "text"):
        if encoder := spec.encoder(kind):
            try:
                options_in(model.further_arguments(kind), encoder.options)
            except ValueError as error:
                yield f"`{kind}_arguments`: {error}"


def _faults_of_texts(model: Model, encoders: Sequence[str]) -> Iterator[str]:
    """Yield faults of the text encoders of an architecture that Latentmake encodes for."""
    if model.spec.has_tasks:
        if any(encoder.projection for encoder in model.text):
            yield f"a {model.title} model takes its embeddings without `projection`"
        return
    one = len(model.text) == 1 and model.text[0].config is None and model.text[0].file is None
    if len(model.text) != len(encoders) and not one:  # a pipeline's folder holds all of them
        yield f"{model.architecture} has {len(encoders)} text encoders: {', '.join(encoders)}"
    for encoder, name in zip(model.text, encoders, strict=False):
        if name != "T5" and encoder.max_length not in (None, 77):
            yield f"set `max_token_length`, and leave out {name}'s `max_length`"
    if model.is_for_sdscripts and isinstance(model.max_token_length, str):
        yield "sd-scripts wants captions of one length: set `max_token_length`"


def _faults_of_export(model: Model, endings: AiTraining) -> Iterator[str]:
    if endings.text is not None and len(endings.text) != len(model.text):
        number = len(endings.text)
        yield f"`ai_training.text` names {number} endings for {len(model.text)} text encoders"
    if endings.text is not None and model.architecture is not None:
        yield "`ai_training.text` is for the last layer: leave out `architecture`"
    if endings.latents is not None and (key := model.first_set("posterior", "vae_tiling")):
        yield f"`ai_training.latents` is not for such latents: leave out `{key}`"
