"""Checks of a model's files and networks against the configuration, by headers alone.

The planner refuses what a job would refuse after it has started; trainers check what the planner
could not see, such as a model on another machine.

Headers tell a file, see `models.headers`: no tensor is read. Names that are not known pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from latentmake.config.architectures import MUSUBI, File, Vae
from latentmake.config.datasets import BUCKET_STEPS
from latentmake.config.models import Model
from latentmake.config.root import Config, Run, check_sides
from latentmake.config.weights import Weights
from latentmake.errors import ConfigError, ModelError
from latentmake.files.safetensors import Tensor
from latentmake.layouts.layout import layout_of
from latentmake.models.files import (
    checkpoint_of,
    script_of,
    scripted_files,
    vae_factor,
    weights_files,
)
from latentmake.models.headers import SUFFIXES, kinds_of, one, tensors_of, vae_of, weight_file

Remembered = Callable[[object, Callable[[], tuple[Any, Iterable[object]]]], Any]
"""`Memo.remembered`."""

Role = Literal["vae", "unet", "text"]
"""Key of a Stable Diffusion model that takes a network."""

_ROLES: Mapping[Role, tuple[str, Collection[str]]] = {
    "vae": ("a VAE", ["VAE"]),
    "unet": ("a UNet", ["UNet", "DiT"]),  # SD 3's is a DiT
    "text": ("a text encoder", ["T5", "CLIP text encoder", "language model"]),
}
_FIT_VERSION = 1  # raised when the checks of `models.fit` find something else
_USUAL_FACTOR = 8  # pixels a latent: that of every Stable Diffusion VAE


def asked(question: object, find: Callable[[], tuple[Any, Iterable[object]]]) -> Any:
    """Return a fact from `find`, without a memo."""
    del question
    return find()[0]


def check_run(config: Config, name: str, run: Run, remembered: Remembered = asked) -> None:
    """Refuse networks of another kind than their keys say, and sizes that the VAE cannot encode.

    See `check_networks` for networks that are incomplete or do not fit each other.
    """
    model, key = config.models[run.model], f"models.{run.model}"
    if not model.spec.original_files:  # whose files the recipe looks at
        places: tuple[tuple[Role, Weights | None], ...] = (
            ("vae", model.vae),
            *(("text", place) for place in model.text),
            ("unet", model.unet),
        )
        for role, place in places:
            if place is not None and (whole := checkpoint_of(place)):
                whole.check(model.architecture, f"{key}.checkpoint")
            elif place is not None:
                check_kind(place, role, f"{key}.{role}")
    check_networks(model, key, remembered, trains=run.trainer is not None)
    if layout_of(model.layout_name).external:
        return  # the configuration has been checked for its rule
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
    """Refuse, by ModelError, networks that are incomplete, of another kind, or do not fit.

    Args:
        model: with the paths of its parts.
        where: its key in the configuration.
        remembered: `Memo.remembered`, which asks again if a file has changed.
        trains: whether its network is trained, not only named.
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
    """Yield every file and folder that tells something."""
    places = (model.vae, model.clip, model.image_encoder, model.unet, *model.text)
    named = [model.checkpoint, model.dit, model.dit_high_noise, model.text_projection]
    for place in filter(None, places):
        tokenizer = getattr(getattr(place, "tokenizer", None), "path", None)
        named += [place.path, place.config, tokenizer, getattr(place, "projection", None)]
    for path in map(Path, filter(None, named)):
        yield path
        yield from sorted(path.iterdir()) if path.is_dir() else [path.with_name("config.json")]


def check_kind(weights: Weights, expected: Role, where: str) -> None:
    """Refuse, by ModelError, a network of another kind than its key says; an unknown one passes."""
    kinds, (word, families) = dict[str, str](), _ROLES[expected]
    if weights.path is not None:
        with suppress(ValueError, ModelError):  # its loader says so
            path = Path(weights.path)
            kinds = kinds_of(tensors_of(weights_files(weights)[-1] if path.is_dir() else path))
    if kinds and kinds.keys().isdisjoint(families):
        named = "" if where == weights.path else f"{weights.path} "
        what = f"{named}holds {one(next(iter(kinds.values())))}, not {word}"
        raise ModelError(what, where=where, hint=f"name the folder or file of {word}")


DIT = "Wan DiT"
_CHANNELS = {"i2v": 36, "flf2v": 36, "t2v": 16, "t2i": 16, "FC": 48}  # of a Wan DiT's input
_WIDTHS = {"14B": 5120, "1.3B": 1536, "A14B": 5120}  # of its blocks
# Kind -> pattern of names that only the files of a library have, and the library.
_CONVERTED = {
    "Wan DiT": (r"\.attn1\.to_|condition_embedder\.", "diffusers"),
    "Wan VAE": (r"(encoder|decoder)\.conv_in\.|encoder\.down_blocks\.", "diffusers"),
    "T5": (r"encoder\.block\.0\.|\.SelfAttention\.", "transformers"),
    "image encoder": (r"vision_model\.|embeddings\.class_embedding", "transformers"),
}
_FOREIGN_VAES = frozenset({Vae(2, 4), Vae(3, 48, 12)})  # SDXL's, and that of Wan 2.2's 5B model


class ModelFile(NamedTuple):
    """One of a model's files."""

    key: str  # in the configuration
    place: str  # its path, or its id on the hub
    tensors: Mapping[str, Tensor] = {}  # none where they cannot be read, or are on the hub
    fault: str = ""  # why it cannot be used
    doubt: str = ""  # why it might be unusable
    known: str = ""  # what it is


def encoder_fault(model: Model, kind: str) -> tuple[str, str] | None:
    """Return the fault of the first unusable encoder of `latents` or `text`.

    Returns:
        Its key in the configuration, and the fault of its file; None where all may do.
    """
    files = (x for x in encoders(model, kind) if x.fault)
    return next(((x.key.partition(".")[0], f"{x.place}: {x.fault}") for x in files), None)


def encoders(model: Model, kind: str) -> Iterator[ModelFile]:
    """Yield the files that encode `latents` or `text`, inspected."""
    for file in script_of(model, kind).files:
        weights = model.weights(file.key)
        if weights is not None and weights.path is None:
            doubt = "is on the hub, and was not inspected"
            yield ModelFile(file.key, str(weights.hub), doubt=doubt)
        elif weights is not None:
            yield _encoder(model, file, Path(weights.path or ""))


def _encoder(model: Model, file: File, place: Path) -> ModelFile:
    """Return the file or folder of an encoder, inspected; ours take any form."""
    found, wan = ModelFile(file.key, str(place)), model.spec.encodes
    kind = f"Wan {file.kind}" if wan and file.kind == "VAE" else file.kind
    form = "either" if wan else file.form
    if place.is_dir() and form == "file":
        return found._replace(fault=f"is a folder, and the script reads one file of {one(kind)}")
    if place.is_file() and form == "folder":
        return found._replace(fault=f"is a file, and the script reads the folder of {one(kind)}")
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    if not wan and place.exists() and not any(x.suffix in SUFFIXES for x in files):
        return found._replace(known="is there")  # in a format that only the script knows
    try:
        tensors = tensors_at(place)
    except ValueError as error:
        return found._replace(fault=str(error))
    found = found._replace(tensors=tensors, known=kind or "is there")
    if fault := fault_of(file._replace(kind=kind), tensors):
        return found._replace(fault=fault)
    if wan and not kinds_of(tensors):
        return found._replace(doubt=f"is not known as {one(kind)}")
    return in_original_names(found, kind) if model.scripted and wan else found


def tensors_at(place: Path) -> Mapping[str, Tensor]:
    """Return the tensors of the file that stands for some weights; raises ValueError."""
    file = weight_file(place)
    try:
        scripted_files(place)
    except ModelError as error:
        raise ValueError(f"{error.what} ({error.where})") from None
    return tensors_of(file)


def fault_of(file: File, tensors: Mapping[str, Tensor]) -> str:
    """Return why tensors are not those that a script takes; "" where they may be."""
    kinds, vae = kinds_of(tensors), vae_of(tensors)
    if kinds and file.kind and file.kind not in (*kinds, *kinds.values()):
        return f"is {one(next(iter(kinds.values())))}, not {one(file.kind)}"
    if file.vae and vae and vae != file.vae:
        files = (each for row in MUSUBI.values() for each in row.latents.files)
        if vae in {*_FOREIGN_VAES, *(each.vae for each in files)}:
            return f"is a VAE {_words(vae)}, and not one {_words(file.vae)}"
    return ""


def _words(vae: Vae) -> str:
    what = "videos" if vae.axes == 3 else "pictures"
    alpha = " with transparency" if vae.colours == 4 else ""
    return f"for {what}{alpha}, whose latents have {vae.channels} channels"


def in_original_names(file: ModelFile, kind: str) -> ModelFile:
    """Return a file of Wan, with a fault if musubi-tuner does not know its names."""
    marks, library = _CONVERTED[kind]
    if not re.search(marks, "\n".join(file.tensors)):
        return file
    hint = "name the original release's file, see docs/guides/wan.md"
    fault = f"is in {library}' names, which musubi-tuner cannot read: {hint}"
    return file._replace(fault=fault)


def other_task(task: str, tensors: Mapping[str, Tensor]) -> str:
    """Return why a Wan DiT is another task's; "" where it fits, or has sizes of no Wan model."""
    family, _, size = task.removesuffix("-FC").partition("-")
    channels = _CHANNELS["FC" if task.endswith("-FC") else family]
    shapes = (x.shape for name, x in tensors.items() if name.endswith("patch_embedding.weight"))
    for width, inputs, *_ in (shape for shape in shapes if len(shape) == 5):
        if inputs != channels and inputs in _CHANNELS.values():
            return f"is a Wan DiT of {inputs} input channels; {task} has {channels}"
        if width != _WIDTHS[size] and width in _WIDTHS.values():
            return f"is a Wan DiT of width {width}; {task} has {_WIDTHS[size]}"
    return ""
