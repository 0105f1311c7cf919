"""Models: encoders, the network to train, and checks of keys that do not go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from latentmake.config.external_trainers import refuse_caching_flags
from latentmake.config.model_keys import ModelKeys
from latentmake.config.spec import GENERIC, Architecture
from latentmake.config.weights import LocalPlace, TextWeights, Weights, refuse_unread

_OF_OTHERS = (
    *("unet", "scheduler", "text_projection", "task", "dit", "dit_high_noise", "clip"),
    *("image_encoder", "fp8_t5", "vae_cache_cpu", "clip_skip", "max_token_length"),
    "vae_tiling",
    *("apply_lg_attn_mask", "apply_t5_attn_mask", "ai_training"),
)


def check_strategies(model: ModelKeys) -> None:
    """Refuse keys that sd-scripts' own encoders of an architecture cannot have.

    Raises:
        ValueError: the first such key.
    """
    strategies, title = model.spec.strategies, model.title
    assert strategies is not None
    for name, value in strategies.defaults.items():
        if name != "dtype" and getattr(model, name) != value:
            raise ValueError(f"sd-scripts' own encoders make {title}'s caches: leave out `{name}`")
    if key := model.first_set(*_OF_OTHERS):
        raise ValueError(f"{title} has no `{key}`: leave it out")
    texts = [file.key for file in strategies.files if file.key.startswith("text")]
    if model.text and len(model.text) != len(texts):
        raise ValueError(f"{title} has {len(texts)} text encoder{'s' * (len(texts) != 1)}")
    for kind, dtype in (("latents", "vae_dtype"), ("text", "text_dtype")):
        encoder = strategies.encoder(kind)
        assert encoder is not None
        if encoder.fixed and (getattr(model, dtype) is not None or model.dtype != "bfloat16"):
            raise ValueError(f"sd-scripts decides about {title}'s dtypes: leave out `{dtype}`")
        from latentmake.config.rows import options_in

        try:
            options_in(model.further_arguments(kind), encoder.options)
        except ValueError as error:
            raise ValueError(f"`{kind}_arguments`: {error}") from None
    for file in strategies.files:
        _check_place(model.weights(file.key), file.key, title)


def _check_place(weights: Weights | None, key: str, title: str) -> None:
    """Refuse what sd-scripts' loaders cannot be told about weights; missing ones are said later."""
    if weights is None:
        return
    unused = ["config"]
    if isinstance(weights, TextWeights):
        unused += ["tokenizer", "max_length", "projection"]
    for name in unused:
        if getattr(weights, name) is not None:
            raise ValueError(
                f"`{key}`: leave out `{name}`; what sd-scripts can be told is `text_arguments`"
            )


def check_model(model: ModelKeys) -> None:
    """Refuse keys that do not go together.

    Raises:
        ValueError: the first mistake; pydantic adds the model's place.
    """
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
    if model.ai_training is not None:
        _check_adopted(model)


def _check_present(model: ModelKeys) -> None:
    """Refuse a model without the encoders that its architecture has."""
    scripts, needed = model.spec.scripts, {"vae", "text"}
    if scripts is not None and not model.spec.encodes:
        files = (*scripts.latents.files, *scripts.text.files)
        needed = {file.key.partition(".")[0] for file in files if file.required}
    for key in sorted(needed, reverse=True):
        if model.weights(key) is None:
            raise PydanticCustomError("missing_key", "this key is missing", {"key": key})


def _check_layout(model: ModelKeys) -> None:
    if model.by_strategies and (model.spec.encodes or model.spec.strategies is None):
        raise ValueError("`encoder: sdscripts` is not for this architecture: leave it out")
    if (model.spec.scripts is None) == (model.layout == "musubi"):
        raise ValueError(
            "`layout: musubi` belongs to a Wan model's `task`, or an `architecture` of musubi-tuner"
        )
    if model.checkpoint is not None and model.layout != "sdscripts" and not model.spec.checkpoints:
        raise ValueError(
            "`checkpoint` is a file of Stable Diffusion, or what sd-scripts trains: it needs "
            "`layout: sdscripts`"
        )
    if model.layout == "sdscripts":
        if model.architecture is None:
            raise ValueError("`layout: sdscripts` needs the model's `architecture`")
        if key := model.first_set("unet", "scheduler", "text_projection"):
            raise ValueError(f"sd-scripts trains the `checkpoint`: leave out `{key}`")
    about = ("clip_skip", "max_token_length", "apply_lg_attn_mask", "apply_t5_attn_mask")
    without = model.architecture is None or model.spec.scripts is not None
    if without and (key := model.first_set(*about)):
        raise ValueError(f"`{key}` needs the `architecture` of Stable Diffusion or Flux")


def _check_text(model: ModelKeys) -> None:
    encoders = model.spec.text_encoders
    one = len(model.text) == 1 and model.text[0].config is None and model.text[0].file is None
    if len(model.text) != len(encoders) and not one:  # a pipeline's folder holds all of them
        names = ", ".join(encoders)
        raise ValueError(f"{model.architecture} has {len(encoders)} text encoders: {names}")
    for each, name in zip(model.text, encoders, strict=False):
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


def _check_adopted(model: ModelKeys) -> None:
    assert model.ai_training is not None
    if model.spec.scripts is not None:
        raise ValueError("`ai_training` is about Stable Diffusion's caches: leave out `task` or it")
    if model.layout == "sdscripts":
        raise ValueError(
            "`ai_training` is about our own caches: leave out `layout: sdscripts` or it"
        )
    if model.ai_training.text is not None and len(model.ai_training.text) != len(model.text):
        endings = len(model.ai_training.text)
        raise ValueError(
            f"`ai_training.text` names {endings} endings for {len(model.text)} text encoders"
        )
    if model.ai_training.text is not None and model.architecture is not None:
        raise ValueError("`ai_training.text` takes the last layer alone: leave out `architecture`")
    if model.ai_training.latents is not None and model.posterior != "mean":
        raise ValueError("`ai_training.latents` takes the posterior's mean: leave out `posterior`")
    if model.ai_training.latents is not None and model.vae_tiling:
        raise ValueError(
            "`ai_training.latents` takes those of whole images: leave out `vae_tiling`"
        )


def _refuse_musubi_keys(model: ModelKeys) -> None:
    if model.task is not None:
        raise ValueError(f"`architecture: {model.architecture}` has no `task`: leave out one")
    about = ("dit", "dit_high_noise", "clip", "fp8_t5", "vae_cache_cpu", "encoder")
    if key := model.first_set(*about):
        raise ValueError(f"`{key}` is about Wan: it needs the model's `task`")
    if key := model.first_set("image_encoder", "latents_arguments", "text_arguments"):
        raise ValueError(f"`{key}` is about musubi-tuner's architectures, and this is none")


def _check_scripted(model: ModelKeys) -> None:
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
    if model.vae_tiling:
        instead = "`vae_cache_cpu`" if model.spec.encodes else "`latents_arguments`"
        raise ValueError(f"{title}'s VAE has no `vae_tiling`: leave it out, or see {instead}")
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
    if model.text and not fewest <= len(model.text) <= texts:
        number = str(texts) if texts == fewest else f"{fewest} to {texts}"
        raise ValueError(f"a {title} model has {number} text encoder{'s' * (number != '1')}")
    _check_files(model, {file.key: file.flag for file in files})
    for kind, script, dtype in (
        ("latents", scripts.latents, "vae_dtype"),
        ("text", scripts.text, "text_dtype"),
    ):
        further, own = model.further_arguments(kind), model.version.caching(kind)
        refuse_caching_flags(f"{kind}_arguments", further, script, own, dtype)


def _check_files(model: ModelKeys, flags: Mapping[str, str]) -> None:
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


_PLACE: TypeAdapter[str] = TypeAdapter(LocalPlace)


def _of_checkpoint(values: dict[str, Any], row: Architecture) -> dict[str, Any]:
    """Return the keys of a model with the parts that its `checkpoint` holds and no key names.

    The network that sd-scripts trains stays the `checkpoint`.
    """
    if not row.checkpoints or not values.get("checkpoint") or values.get("task") is not None:
        return values
    try:
        path = _PLACE.validate_python(values["checkpoint"])
    except ValidationError:
        return values  # said of its own key
    keys = ("vae",) if values.get("layout") == "sdscripts" else ("vae", "unet")
    own = {key: {"path": path, "subfolder": key} for key in keys if values.get(key) is None}
    number = max(1, len(row.text_encoders))
    text = values.get("text") or {}
    texts = text if isinstance(text, list) else [text] * number if _no_place(text) else [text]
    names = ["text_encoder", *(f"text_encoder_{index}" for index in range(2, len(texts) + 1))]
    filled = [
        {"path": path, "subfolder": name, **each} if _no_place(each) else each
        for each, name in zip(texts, names, strict=False)
    ]
    return {**values, **own, "text": filled}


def _no_place(text: object) -> bool:
    """Whether a text encoder's section names neither file nor folder."""
    return isinstance(text, dict) and not text.get("path") and not text.get("hub")


class Model(ModelKeys):
    """Encoders whose caches a trainer reads, and the network to train.

    Each entry of `models` is a model with a name of yours. Its VAE makes the latents, its text
    encoders make the embeddings of captions, and its network is trained. The caches lie in
    `cache/{dataset}/{model}/`.

    ```yaml
    models:
      sd15:
        vae: models/sd15/vae
        text: [models/sd15/text_encoder]
        unet: models/sd15/unet
    ```

    The trainer decides which keys a model needs:

    - **`sd`**, the trainer for Stable Diffusion 1.x and 2.x: `vae`, `text` and `unet`.
    - **sd-scripts**: `architecture`, `layout: sdscripts`, `vae`, `text` and `checkpoint`. The
      architectures `lumina`, `hunyuan_image` and `anima` set the layout themselves. See
      [sd-scripts](../trainers/sdscripts.md).
    - **Wan**, by the trainer `wan` or by musubi-tuner: `task`, `vae`, `text` and `dit`, and no
      `architecture`. See [Wan](../trainers/wan.md).
    - **Other architectures of musubi-tuner**: `architecture`, `vae`, `text` and `dit`, and `task`
      where there are several. See [musubi-tuner](../trainers/musubi.md).

    [Architectures](architectures.md) lists the weights, tasks and training defaults of each
    architecture.

    If the content of a weight file, its `config.json` or a tokenizer changes, everything that was
    made from it is made again. Paths do not matter: a moved model rebuilds nothing.

    ## Layers of the text encoders

    `architecture` decides which layers and vectors are cached:

    - without `architecture`: the last layer of each text encoder.
    - `sd1`, `sd2`: the last layer of CLIP, normalised, or the layer of `clip_skip`; and the vector
      of the caption.
    - `sdxl`: the last layer but one of both CLIPs, not normalised; and the projected vector of the
      second CLIP at the first end-of-text token.
    - `sd3`: the same layer of both CLIPs and their projected vectors; and the last layer of T5.
    - `flux`: the last layer of CLIP and its vector, not projected; and the last layer of T5.

    With an `architecture` the cache also holds the `attention_mask` of each encoder (1 for tokens,
    0 for padding). T5 embeddings keep the length of their caption. In the layout `sdscripts` they
    are padded to `max_length`.

    ## Layout of sd-scripts

    With `layout: sdscripts` the caches have the names and arrays of sd-scripts' own caches. For
    SDXL these are `{stem}_{W}x{H}_sdxl.npz`, where W x H is the size of the image, and
    `{stem}_te_outputs.npz`; [architectures](architectures.md#architectures-of-sd-scripts) lists
    the others. Differences from `layout: plain`:

    - Captions of `sd1` and `sd2` are not cached. sd-scripts encodes them while it trains.
    - Latents are stored in float32, as sd-scripts expects. `dtype` is the precision of the
      computation.
    - `fit: bucket` uses the buckets of sd-scripts. EXIF orientation and `background` are not
      applied.
    - The key of the cache file is stored in the comment of the npz archive. A file that sd-scripts
      wrote over has no such comment, so Latentmake makes it again.

    For `lumina`, `hunyuan_image` and `anima`, sd-scripts' own classes encode the stale items, one
    at a time, in the environment of sd-scripts. Their `dtype` is `bfloat16`, as in a training with
    `mixed_precision: bf16`; HunyuanImage uses the precisions that sd-scripts fixes. Lumina and
    HunyuanImage cache a random sample of the VAE's posterior; its seed is made from
    `posterior_seed` and the content of the image.

    ## Files of Wan

    - `vae`: a diffusers folder, or the original `Wan2.1_VAE.pth` or `.safetensors`.
    - `text`: one umT5-XXL, as a transformers folder or the original
      `models_t5_umt5-xxl-enc-bf16.pth`. The original file needs a `tokenizer`: a folder with the
      `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json` and `spiece.model` of
      google/umt5-xxl.
    - `clip`: a transformers folder, or the original
      `models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth`.

    Sides of resolutions are multiples of 16. `cache/{dataset}/{model}/{resolution}/` is a
    `cache_directory` of musubi-tuner and has no sub-folders, so two items of a dataset may not
    have the same file name. After an OOM the encoder halves its batch; at batch size 1 it keeps
    features in the CPU's memory, which does not change the result.
    [Faults](../how-it-works/faults.md) says when an item that still does not fit is faulty.
    """

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_architecture(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if isinstance(values.get("vae"), dict) and not any(values["vae"].values()):
            values = {key: values[key] for key in values if key != "vae"}  # NO_WEIGHTS, as written
        name, task = values.get("architecture"), values.get("task")
        if name == "wan":
            name, values = None, {key: values[key] for key in values if key != "architecture"}
        row = GENERIC
        if isinstance(name, str):
            from latentmake.config.architectures import ARCHITECTURES

            row = ARCHITECTURES.get(name, GENERIC)
        values = _of_checkpoint(values, row)
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
        check_model(self)
        return self
