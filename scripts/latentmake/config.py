"""The configuration: typed, closed against typing errors, each error in one line.

Everything that a user may write in `config/config.yaml` is a field here, with its description;
`config/schema.json` is generated from these types (`python -m latentmake.config`). Nothing here
touches a file: whether a path exists is for the planner to find out.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails

from latentmake.errors import ConfigError

__all__ = [
    "Batch",
    "Config",
    "Dataset",
    "Dtype",
    "Model",
    "Resolution",
    "Run",
    "Samples",
    "SdTrainer",
    "TextWeights",
    "Weights",
    "json_schema",
    "nearest",
    "parse",
]

Dtype = Literal["float32", "bfloat16", "float16"]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


def _no_truth(value: object) -> object:
    """Refuse `rank: yes`, which would otherwise be 1."""
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


Number = Annotated[int, BeforeValidator(_no_truth)]


class Closed(BaseModel):
    """A section that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Resolution(BaseModel):
    """A target size in pixels; for `fit: bucket`, its area is what the buckets keep."""

    model_config = ConfigDict(frozen=True)
    width: Annotated[int, Field(gt=0)]
    height: Annotated[int, Field(gt=0)]

    @property
    def name(self) -> str:
        """Its folder below the cache: `64` for a square, else `512x768` (width x height)."""
        return str(self.width) if self.width == self.height else f"{self.width}x{self.height}"


def _resolution(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("should be a side in pixels, or [width, height]")
    if isinstance(value, int):
        return {"width": value, "height": value}
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+)(?:x(\d+))?", value)):
        return {"width": int(match[1]), "height": int(match[2] or match[1])}
    if isinstance(value, list | tuple) and len(value) == 2:
        return {"width": value[0], "height": value[1]}
    if isinstance(value, Resolution | dict):
        return value
    raise ValueError("should be a side in pixels, or [width, height]")


def _listed(value: object) -> object:
    """One value may stand for a list of one."""
    return value if isinstance(value, list | tuple) else [value]


ResolutionField = Annotated[
    Resolution,
    BeforeValidator(_resolution),
    PlainSerializer(lambda resolution: [resolution.width, resolution.height]),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "exclusiveMinimum": 0},
                {
                    "type": "array",
                    "items": {"type": "integer", "exclusiveMinimum": 0},
                    "minItems": 2,
                    "maxItems": 2,
                },
                {"type": "string", "pattern": r"^\d+(x\d+)?$"},
            ]
        }
    ),
]


class Dataset(Closed):
    """A folder of images with a caption file beside each."""

    path: str = Field(min_length=1, description="Folder of the images, with sub-folders.")
    caption_extension: Annotated[str, StringConstraints(pattern=r"^\.[^/\\]+$")] = Field(
        ".txt", description="Ending of the caption file that lies beside an image."
    )
    fit: Literal["crop", "bucket"] = Field(
        "crop",
        description="crop: cover the resolution and cut its centre. bucket: keep the aspect ratio "
        "as nearly as a list of sizes of the same area allows.",
    )
    bucket_reso_steps: Number = Field(
        16, ge=8, description="Sides of buckets are multiples of this, in pixels."
    )
    bucket_no_upscale: bool = Field(
        False, description="Images smaller than the resolution keep their own size, rounded down."
    )
    exif_rotation: bool = Field(
        True, description="Turn an image as its EXIF orientation says before anything else."
    )
    background: Annotated[
        str, StringConstraints(pattern=r"^(#[0-9a-fA-F]{6}|white|black|gray)$")
    ] = Field(
        "white",
        description="Colour that shows through transparent pixels: white, black, gray or #rrggbb.",
    )
    max_image_pixels: Number = Field(
        178_956_970, gt=0, description="An image of more pixels is refused as a decompression bomb."
    )
    num_repeats: Number = Field(
        1, ge=1, description="How often an epoch shows each item of this dataset."
    )
    missing_caption: Literal["error", "empty"] = Field(
        "error", description="empty: an image without a caption file gets the empty caption."
    )
    empty_caption: Literal["error", "allow"] = Field(
        "error", description="allow: a caption file without text is a caption without text."
    )
    on_error: Literal["fail", "skip"] = Field(
        "fail",
        description="What a damaged item does: fail after all others are done, or be set aside, "
        "named in the manifest and on the screen.",
    )


class Weights(Closed):
    """Where the weights of one network lie: a local path, or a hub id with its revision."""

    path: str | None = Field(None, min_length=1, description="Folder or single .safetensors file.")
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


def _place(value: object) -> object:
    return {"path": value} if isinstance(value, str) else value


_TextPlace = Annotated[
    TextWeights, BeforeValidator(_place, json_schema_input_type=str | TextWeights)
]


class Model(Closed):
    """The encoders whose caches a trainer reads, and the network that is trained."""

    vae: Annotated[
        Weights,
        BeforeValidator(_place, json_schema_input_type=str | Weights),
        Field(description="The AutoencoderKL that makes the latents."),
    ]
    text: Annotated[
        list[_TextPlace],
        BeforeValidator(_listed, json_schema_input_type=_TextPlace | list[_TextPlace]),
        Field(min_length=1, description="The text encoders, CLIP, T5 or UMT5, in order."),
    ]
    unet: (
        Annotated[Weights, BeforeValidator(_place, json_schema_input_type=str | Weights)] | None
    ) = Field(None, description="The UNet that is trained.")
    scheduler: str | None = Field(
        None, description="Folder of the noise schedule; by default `scheduler` beside the UNet."
    )
    dtype: Dtype = Field("float32", description="Number format of the caches.")
    vae_dtype: Dtype | None = Field(None, description="The same for the latents alone.")
    text_dtype: Dtype | None = Field(None, description="The same for the embeddings alone.")
    posterior: Literal["mean", "sample"] = Field(
        "mean", description="Keep the mean of the VAE's posterior, or one seeded sample of it."
    )
    posterior_seed: Number = Field(0, ge=0, description="Seed of `posterior: sample`.")


class Samples(Closed):
    """Pictures drawn by the trained network at the start, at intervals and at the end."""

    prompts: list[str] = Field(
        [], description="What to draw; by default the captions of the run's first four items."
    )
    negative_prompt: str = Field("", description="What guidance leads away from.")
    every: Number | None = Field(
        None, gt=0, description="Steps between two rows; by default a quarter of the run."
    )
    num_inference_steps: Number = Field(30, gt=0, description="Denoising steps of a picture.")
    guidance_scale: float = Field(3.0, ge=1, description="Classifier-free guidance; 1 is none.")
    resolution: ResolutionField | None = Field(
        None, description="Size of the pictures; by default the run's first resolution."
    )
    seed: Number = Field(0, ge=0, description="Seed of their noise, the same in every row.")


class SdTrainer(Closed):
    """The trainer `sd`: Stable Diffusion 1.x and 2.x UNets, trained from caches alone."""

    kind: Literal["sd"] = Field(description="The trainer.")
    adapter: Literal["lora", "full"] = Field("lora", description="Train a LoRA, or the whole UNet.")
    rank: Number = Field(8, ge=1, description="Rank of the LoRA.")
    alpha: float | None = Field(None, gt=0, description="Scale of the LoRA; by default its rank.")
    target_modules: list[str] = Field(
        ["to_q", "to_k", "to_v", "to_out.0"],
        min_length=1,
        description="Layers that get a LoRA, by the end of their names.",
    )
    steps: Number = Field(1000, ge=1, description="Optimiser steps.")
    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate of AdamW.")
    lr_scheduler: Literal["constant", "linear", "cosine", "constant_with_warmup"] = Field(
        "constant", description="How the learning rate goes on."
    )
    lr_warmup_steps: Number = Field(0, ge=0, description="Steps over which it rises from zero.")
    train_batch_size: Number = Field(4, ge=1, description="Items of one shape a step and a device.")
    gradient_accumulation_steps: Number = Field(1, ge=1, description="Batches summed up in a step.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    weight_decay: float = Field(0.01, ge=0, description="Weight decay of AdamW.")
    prediction_type: Literal["epsilon", "v_prediction"] | None = Field(
        None, description="What the UNet predicts; by default what its scheduler says."
    )
    mixed_precision: Annotated[
        Literal["no", "bf16", "fp16"],
        BeforeValidator(lambda value: "no" if value is False else value),  # YAML's truth
    ] = Field("no", description="accelerate's mixed precision.")
    gradient_checkpointing: bool = Field(False, description="Less memory for more time.")
    seed: Number = Field(0, ge=0, description="Seed of order, noise, timesteps and new weights.")
    checkpointing_steps: Number = Field(
        500, ge=1, description="Steps between two states from which a killed run goes on."
    )
    checkpoints_total_limit: Number = Field(2, ge=1, description="How many of them are kept.")
    accelerate_config: str | None = Field(
        None, description="Configuration file for `accelerate launch`."
    )
    samples: Samples = Field(Samples(), description="Sample pictures.")


class Run(Closed):
    """Datasets x resolutions x model x trainer settings; its target is `train_{run}`."""

    datasets: Annotated[
        list[str],
        BeforeValidator(_listed, json_schema_input_type=str | list[str]),
        Field(min_length=1, description="What to train on."),
    ]
    model: str = Field(description="Which encoders, and what is trained.")
    resolutions: Annotated[
        list[ResolutionField],
        BeforeValidator(_listed, json_schema_input_type=ResolutionField | list[ResolutionField]),
        Field(min_length=1, description="A side in pixels, or [width, height], each."),
    ]
    trainer: SdTrainer | None = Field(
        None, description="Who trains, and how; without it the run is its caches alone."
    )


class Batch(Closed):
    """How the work is cut into jobs."""

    items: Number = Field(1024, ge=1, description="Items (images, captions) of one encoding job.")


class Config(Closed):
    """The whole of `config.yaml`."""

    datasets: dict[Name, Dataset] = Field(min_length=1, description="Folders of captioned images.")
    models: dict[Name, Model] = Field(min_length=1, description="Encoders and what is trained.")
    runs: dict[Name, Run] = Field(min_length=1, description="What to train, on what.")
    batch: Batch = Field(Batch(), description="How the work is cut into jobs.")

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        for name, run in self.runs.items():
            for dataset in run.datasets:
                _known(f"runs.{name}.datasets", dataset, self.datasets, "dataset")
            _known(f"runs.{name}.model", run.model, self.models, "model")
            _no_doubles(f"runs.{name}.datasets", run.datasets)
            _no_doubles(f"runs.{name}.resolutions", [each.name for each in run.resolutions])
            if run.trainer is not None and self.models[run.model].unet is None:
                raise ConfigError(
                    f"the model {run.model} has no `unet` to train",
                    where=f"runs.{name}.model",
                    mend=f"add `unet` to models.{run.model}, or leave out the run's `trainer`",
                )
        return self


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most like `word`, or None where none is."""
    matches = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def _known(where: str, word: str, known: Mapping[str, object], kind: str) -> None:
    if word in known:
        return
    guess = nearest(word, known)
    raise ConfigError(
        f"there is no {kind} `{word}`",
        where=where,
        mend=f"did you mean `{guess}`?" if guess else f"known: {', '.join(known)}",
    )


def _no_doubles(where: str, words: list[str]) -> None:
    for word in words:
        if words.count(word) > 1:
            raise ConfigError(f"`{word}` is named twice", where=where, mend="name it once")


_SECTIONS: dict[tuple[str, ...], type[BaseModel]] = {
    (): Config,
    ("datasets", "*"): Dataset,
    ("models", "*"): Model,
    ("models", "*", "vae"): Weights,
    ("models", "*", "unet"): Weights,
    ("models", "*", "text", "*"): TextWeights,
    ("runs", "*"): Run,
    ("runs", "*", "trainer"): SdTrainer,
    ("runs", "*", "trainer", "samples"): Samples,
    ("batch",): Batch,
}


def _unknown_key(location: tuple[int | str, ...]) -> str:
    """Say which key was meant: one of the same section, or the section that has this one."""
    key = str(location[-1])
    # Names (the second part) and list indices stand for any.
    pattern = tuple(
        "*" if index == 1 or isinstance(part, int) else str(part)
        for index, part in enumerate(location[:-1])
    )
    section = _SECTIONS.get(pattern)
    known = list(section.model_fields) if section else []
    likely = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.8)
    for other, fields in _SECTIONS.items():
        if key in fields.model_fields and not likely:
            return f"`{key}` belongs to {'.'.join(other).replace('*', 'NAME') or 'the top level'}"
    if guess := nearest(key, known):
        return f"did you mean `{guess}`?"
    return f"known here: {', '.join(known)}" if known else "remove it"


def _line(error: ErrorDetails) -> str:
    location = error["loc"]
    where = ".".join(str(part) for part in location)
    cause = (error.get("ctx") or {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    if error["type"] == "extra_forbidden":
        return str(ConfigError("unknown key", where=where, mend=_unknown_key(location)))
    if error["type"] == "missing":
        return str(ConfigError("this key is missing", where=where, mend="add it"))
    what = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    value = error["input"]
    shown = "" if isinstance(value, dict | BaseModel) else f"{json.dumps(value, default=str)} "
    return str(ConfigError(f"{shown}{what}", where=where, mend="see config/README.md"))


def parse(values: Mapping[str, object]) -> Config:
    """Check the values of a configuration file.

    Args:
        values: the file as read: mappings, lists and plain values.

    Raises:
        ConfigError: one line for each thing that is wrong, with key, value and mend.
    """
    try:
        return Config.model_validate(dict(values))
    except ConfigError:
        raise
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        lines = [_line(each) for each in mistakes]
        if any(each["type"] == "extra_forbidden" for each in mistakes):
            # A misspelt key is missing under its right name: the first line says it all.
            lines = [
                line
                for line, each in zip(lines, mistakes, strict=True)
                if each["type"] != "missing" or f"`{each['loc'][-1]}`" not in " ".join(lines)
            ]
        raise ConfigError(" | ".join(dict.fromkeys(lines))) from None


def json_schema() -> str:
    """Return the JSON schema of the configuration, as `config/schema.json` holds it."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "latentmake configuration"
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(json_schema())
