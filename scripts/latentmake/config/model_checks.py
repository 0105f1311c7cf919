"""Checks of a model's section of the configuration: keys that do not go together."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic_core import PydanticCustomError

from latentmake.config.caching_flags import refuse_decided
from latentmake.config.model_keys import ModelKeys
from latentmake.config.strategies_checks import check_strategies
from latentmake.config.weights import refuse_unread


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
        refuse_decided(f"{kind}_arguments", further, script, own, dtype)


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
