"""Check a model's files and networks against the configuration, by reading file headers only.

The planner reports errors here that a job would otherwise meet after its start. Trainers check
again, since the planner may not see every file, such as a model on another machine.

`models.headers` identifies a network by the names of its tensors; no tensor's values are read.
Files with unknown names pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from latentmake.base.errors import ConfigError, ModelError
from latentmake.config.architectures import MUSUBI
from latentmake.config.datasets import BUCKET_STEPS
from latentmake.config.makers import File, Vae
from latentmake.config.models import Model
from latentmake.config.root import Config, Run, check_sides
from latentmake.config.weights import Weights
from latentmake.formats.safetensors import Tensor
from latentmake.layouts.layout import layout_of
from latentmake.models.files import (
    checkpoint_of,
    scripted_files,
    vae_factor,
    weights_files,
)
from latentmake.models.headers import SUFFIXES, kinds_of, one, tensors_of, vae_of, weight_file

Remembered = Callable[[object, Callable[[], tuple[Any, Iterable[object]]]], Any]
"""Type of `Memo.remembered`."""

Role = Literal["vae", "unet", "text"]
"""Key of a Stable Diffusion model that names a network."""

# Key -> its network in words, and the accepted families of `kinds_of`.
_ROLES: Mapping[Role, tuple[str, Collection[str]]] = {
    "vae": ("a VAE", ["VAE"]),
    "unet": ("a UNet", ["UNet", "DiT"]),  # SD 3's is a DiT
    "text": ("a text encoder", ["T5", "CLIP text encoder", "language model"]),
}
_FIT_VERSION = 2  # raise it when `models.fit` checks more: the memo keeps its results
_USUAL_FACTOR = 8  # width of a latent in pixels, for every Stable Diffusion VAE


def check_run(config: Config, name: str, run: Run, remembered: Remembered) -> None:
    """Refuse networks of the wrong kind for their key, and sizes that the VAE cannot encode.

    `check_networks` then refuses networks that are incomplete or do not fit each other.

    Raises:
        ConfigError: a resolution or `bucket_reso_steps` is no multiple of the VAE's factor.
        ModelError: a network cannot be used.
    """
    model, key = config.models[run.model], f"models.{run.model}"
    # Original files are inspected with the recipe, see `cache_recipe.make`.
    if not model.spec.original_files:
        places: tuple[tuple[Role, Weights | None], ...] = (
            ("vae", model.vae),
            *(("text", place) for place in model.text),
            ("unet", model.unet),
        )
        for role, place in places:
            if place is not None and (checkpoint := checkpoint_of(place)):
                checkpoint.check(model.architecture, f"{key}.checkpoint")
            elif place is not None:
                check_kind(place, role, f"{key}.{role}")
    check_networks(model, key, remembered, trains=run.trainer is not None)
    if layout_of(model.layout_name).external:
        return  # the configuration checks the sizes that another program accepts
    factor = vae_factor(model.vae) or _USUAL_FACTOR
    reason = f"the VAE's factor {factor}"
    check_sides(run.resolutions, factor, f"runs.{name}.resolutions", reason)
    samples = getattr(run.trainer, "samples", None)
    if samples and (size := samples.resolution):
        check_sides([size], factor, f"runs.{name}.trainer.samples.resolution", reason)
    for dataset in run.datasets:
        settings = config.datasets[dataset]
        if settings.fit != "bucket":
            continue
        if (steps := settings.bucket_reso_steps or BUCKET_STEPS) % factor:
            what, hint = f"{steps} is not a multiple of {reason}", f"use a multiple of {factor}"
            raise ConfigError(what, where=f"datasets.{dataset}.bucket_reso_steps", hint=hint)


def check_networks(model: Model, where: str, remembered: Remembered, *, trains: bool) -> None:
    """Refuse networks that are incomplete, of the wrong kind, or do not fit each other.

    Args:
        model: model with the paths of its parts.
        where: key of the model in the configuration.
        remembered: `Memo.remembered`, which repeats the checks if a file has changed.
        trains: whether the run trains the model's network; otherwise only encoders are checked.

    Raises:
        ModelError: a network cannot be used.
    """

    def find() -> tuple[list[str] | None, Iterable[Path]]:
        from latentmake.models import fit

        try:
            fit.check(model, trains)
        except ModelError as error:
            return [error.where, error.what, error.hint], _paths(model)
        return None, _paths(model)

    question = ["networks", _FIT_VERSION, trains, model.model_dump(mode="json")]
    if fault := remembered(question, find):
        key, what, hint = fault
        raise ModelError(what, where=f"{where}.{key}", hint=hint)


def _paths(model: Model) -> Iterator[Path]:
    """Yield all files and folders that the checks depend on."""
    places = (model.vae, model.clip, model.image_encoder, model.unet, *model.text)
    named = [model.checkpoint, model.dit, model.dit_high_noise, model.text_projection]
    for place in filter(None, places):
        tokenizer = getattr(getattr(place, "tokenizer", None), "path", None)
        named += [place.path, place.config, tokenizer, getattr(place, "projection", None)]
    for path in map(Path, filter(None, named)):
        yield path
        yield from sorted(path.iterdir()) if path.is_dir() else [path.with_name("config.json")]


def check_kind(weights: Weights, expected: Role, where: str) -> None:
    """Refuse a network of the wrong kind for its key; a network of unknown kind passes.

    Raises:
        ModelError: the network is of another kind.
    """
    kinds, (word, families) = dict[str, str](), _ROLES[expected]
    if weights.path is not None:
        with suppress(ValueError, ModelError):  # the loader will report the error
            path = Path(weights.path)
            kinds = kinds_of(tensors_of(weights_files(weights)[-1] if path.is_dir() else path))
    if kinds and kinds.keys().isdisjoint(families):
        named = "" if where == weights.path else f"{weights.path} "
        what = f"{named}holds {one(next(iter(kinds.values())))}, not {word}"
        raise ModelError(what, where=where, hint=f"name the folder or file of {word}")


DIT = "Wan DiT"
# Kind -> pattern of names that occur only in files of one library, and this library.
_CONVERTED = {
    "Wan DiT": (r"\.attn1\.to_|condition_embedder\.", "diffusers"),
    "Wan VAE": (r"(encoder|decoder)\.conv_in\.|encoder\.down_blocks\.", "diffusers"),
    "T5": (r"encoder\.block\.0\.|\.SelfAttention\.", "transformers"),
    "image encoder": (r"vision_model\.|embeddings\.class_embedding", "transformers"),
}
_FOREIGN_VAES = frozenset({Vae(2, 4), Vae(3, 48, 12)})  # SDXL's, Wan 2.2's 5B


class ModelFile(NamedTuple):
    """One of a model's files, and the result of its inspection.

    Attributes:
        key: key of the file in the configuration.
        place: path, or id on the hub.
        tensors: tensors by name; empty if the file cannot be read or is on the hub.
        fault: reason why the file cannot be used; "" if there is none.
        doubt: reason why the file might be unusable; "" if there is none.
        description: network in the file, in words; "" if it is not known.
    """

    key: str
    place: str
    tensors: Mapping[str, Tensor] = {}
    fault: str = ""
    doubt: str = ""
    description: str = ""


def encoder_fault(model: Model, kind: str) -> tuple[str, str] | None:
    """Return the fault of the first unusable encoder of `latents` or `text`.

    Returns:
        Key of the encoder in the configuration, and the fault of its file; None without a fault.
    """
    faulty = (file for file in encoders(model, kind) if file.fault)
    faults = ((file.key.partition(".")[0], f"{file.place}: {file.fault}") for file in faulty)
    return next(faults, None)


def encoders(model: Model, kind: str) -> Iterator[ModelFile]:
    """Inspect the files that encode `latents` or `text`, and yield the results."""
    for file in model.spec.encoder_files(kind):
        weights = model.weights(file.key)
        if weights is not None and weights.path is None:
            doubt = "is on the hub, and was not inspected"
            yield ModelFile(file.key, str(weights.hub), doubt=doubt)
        elif weights is not None:
            yield _encoder(model, file, Path(weights.path or ""))


def _encoder(model: Model, file: File, place: Path) -> ModelFile:
    """Inspect the file or folder of an encoder.

    Latentmake's own encoders of Wan take a file or a folder; a script takes only one of them.
    """
    result, wan = ModelFile(file.key, str(place)), model.spec.encodes
    kind, form = file.kind, "either" if wan else file.form
    if place.is_dir() and form == "file":
        return result._replace(fault=f"is a folder, and the script reads one file of {one(kind)}")
    if place.is_file() and form == "folder":
        return result._replace(fault=f"is a file, and the script reads the folder of {one(kind)}")
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    if not wan and place.exists() and not any(path.suffix in SUFFIXES for path in files):
        return result._replace(description="is there")  # a format that only the script can read
    try:
        tensors = tensors_at(place)
    except ValueError as error:
        return result._replace(fault=str(error))
    result = result._replace(tensors=tensors, description=kind or "is there")
    if fault := fault_of(file, tensors):
        return result._replace(fault=fault)
    if wan and not kinds_of(tensors):
        return result._replace(doubt=f"is not known as {one(kind)}")
    return in_original_names(result, kind) if model.scripted and wan else result


def tensors_at(place: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a weight file, or of a folder's first one; raises ValueError."""
    file = weight_file(place)
    try:
        scripted_files(place)
    except ModelError as error:
        raise ValueError(f"{error.what} ({error.where})") from None
    return tensors_of(file)


def fault_of(file: File, tensors: Mapping[str, Tensor]) -> str:
    """Return the reason why a script cannot use the tensors of a file; "" if it may use them."""
    kinds, vae = kinds_of(tensors), vae_of(tensors)
    if kinds and file.kind and file.kind not in (*kinds, *kinds.values()):
        return f"is {one(next(iter(kinds.values())))}, not {one(file.kind)}"
    if file.vae and vae and vae != file.vae:
        # Only VAEs of known models are refused: one of other sizes may be new, and fit.
        files = (known_file for row in MUSUBI.values() for known_file in row.latents.files)
        if vae in {*_FOREIGN_VAES, *(known_file.vae for known_file in files)}:
            return f"is a VAE {_words(vae)}, and not one {_words(file.vae)}"
    return ""


def _words(vae: Vae) -> str:
    what = "videos" if vae.axes == 3 else "pictures"
    alpha = " with transparency" if vae.colours == 4 else ""
    return f"for {what}{alpha}, whose latents have {vae.channels} channels"


def in_original_names(file: ModelFile, kind: str) -> ModelFile:
    """Return a file of Wan; add a fault if musubi-tuner cannot read the names of its tensors."""
    marks, library = _CONVERTED[kind]
    if not re.search(marks, "\n".join(file.tensors)):
        return file
    hint = "name the original release's file, see docs/guides/wan.md"
    fault = f"is in {library}' names, which musubi-tuner cannot read: {hint}"
    return file._replace(fault=fault)


def other_task(model: Model, tensors: Mapping[str, Tensor]) -> str:
    """Return the reason why a Wan DiT belongs to another task; "" if it fits.

    A DiT whose sizes are not those of any Wan model fits, too.
    """
    spec, own, task = model.spec, model.version, model.task
    if not own.channels:
        return ""
    versions = spec.versions.values()
    weights = (name for name in tensors if re.search(spec.sized_by, name))
    shapes = (tensors[name].shape for name in weights)
    for width, channels, *_ in (shape for shape in shapes if len(shape) == 5):
        if channels != own.channels and channels in {version.channels for version in versions}:
            return f"is a {DIT} of {channels} input channels; {task} has {own.channels}"
        if width != own.width and width in {version.width for version in versions}:
            return f"is a {DIT} of width {width}; {task} has {own.width}"
    return ""
