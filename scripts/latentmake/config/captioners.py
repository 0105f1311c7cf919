"""Section `captioners`: networks that write the captions of items without one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, WithJsonSchema

from latentmake.base.errors import ConfigError, refuse_unknown
from latentmake.config.fields import (
    MADE,
    MAX_SIDE,
    TEXT,
    Closed,
    Dtype,
    Number,
    Real,
    shaped,
)
from latentmake.config.weights import WeightsPlace

_Phrase = Annotated[str, StringConstraints(min_length=1)]
_Share = Annotated[Real, Field(ge=0, le=1)]
_TAKEN = re.compile(r"text.*|[0-9].*|latents")  # parts of embeddings and latents


class Thresholds(Closed, shapes=MADE):
    """Probability from which a tagger's tags are part of the caption, for each category."""

    general: _Share = 0.35
    """Smallest probability of a general tag."""
    character: _Share = 0.85
    """Smallest probability of the name of a character."""
    rating: _Share | None = None
    """Smallest probability of a rating, such as `sensitive`. By default ratings are left out."""


class Captioner(Closed, shapes=MADE):
    """Networks that write the captions of images and videos without one."""

    model: WeightsPlace = Field(json_schema_extra=MADE)
    """The network: a folder, a file or a [section](models.md#place-of-weights). It is a
    vision-language model of transformers (Florence-2, BLIP, BLIP-2, Qwen2.5-VL, Qwen3-VL, SmolVLM,
    LLaVA and others), or a tagger of WD14's kind: the folder of a timm model with
    `selected_tags.csv`. Florence-2 is `florence-community/Florence-2-base` on the hub;
    `microsoft/Florence-2-base` is for other programs."""
    prompt: str | None = Field(None, min_length=1)
    """Instruction for the model, such as `Describe the picture in one sentence.`. For Florence-2
    it is a task, such as `<MORE_DETAILED_CAPTION>`. For BLIP and BLIP-2 it is the beginning of the
    caption, or a question that ends with `?` or `:` and is no part of the answer. By default it is
    a request for one or two sentences, `<CAPTION>` for Florence-2, and nothing for BLIP. Not for
    taggers."""
    dtype: Dtype = "bfloat16"
    """dtype in which a GPU computes. A CPU always computes in float32."""
    quantization: Literal["none", "8bit", "4bit"] = "none"
    """Bits of the weights in the memory of a GPU, for large models. `8bit` and `4bit` need
    bitsandbytes (`pip install bitsandbytes`). Not for taggers."""
    trust_remote_code: bool = False
    """Load a model that is a class of its own with the Python files in its folder. These files run
    on your machine, so read them first. Captions are made again if they change."""
    max_new_tokens: Annotated[Number, Field(ge=1, le=8192)] = 256
    """Largest length of an answer in tokens. Not for taggers."""
    temperature: Annotated[Real, Field(ge=0, le=10)] = 0.0
    """Randomness of the answer. With `0` the model always takes the likeliest token, so the same
    picture gives the same caption. Above `0` it draws each token from a random generator that
    depends on `seed` and the picture, and writes the captions one by one. Not for taggers."""
    seed: Number = Field(0, ge=0)
    """Seed of a `temperature` above 0. Another seed writes other captions."""
    image_size: Annotated[Number, Field(ge=8, le=MAX_SIDE)] | None = None
    """Longest side of the picture that the model reads, in pixels. A larger picture is scaled down
    first; a smaller one keeps its size. Models with tokens for each part of a picture get faster
    and use less memory. By default the model's processor decides."""
    frames: Annotated[Number, Field(ge=1, le=1000)] = 8
    """Frames that a captioner sees of a video, evenly spread. A model that reads one picture sees
    the middle one."""
    thresholds: Thresholds = Thresholds()
    """[Probabilities](#thresholds-of-a-tagger) from which tags are part of the caption. For
    taggers."""
    exclude: list[_Phrase] = Field([])
    """Tags to leave out, such as `[simple_background]`. For taggers."""
    underscores: bool = False
    """Keep the underscores of tags: `long_hair` in place of `long hair`. For taggers."""
    trigger: str | None = shaped(None, TEXT, min_length=1)
    """Word for what is learned, such as `sks`, before the caption and a comma. A caption that
    begins with it stays as it is. This key and those below are applied to written captions: a
    change makes no caption again, only embeddings."""
    prefix: str | None = shaped(None, TEXT, min_length=1)
    """Text before the caption, with a space, and behind `trigger`."""
    replace: dict[_Phrase, str] = shaped({}, TEXT)
    """Words or phrases and their replacements, in this order, such as `{a woman: Ann}`. Only
    complete words are replaced, with the same upper and lower case."""
    drop: list[_Phrase] = shaped([], TEXT)
    """Words or phrases to remove, in upper or lower case, such as `[the image shows]`. A comma or
    colon behind them is removed too."""
    max_words: Annotated[Number, Field(ge=1)] | None = shaped(None, TEXT)
    """Largest number of words, without `trigger` and `prefix`; the rest is cut off. By default all
    words are kept."""


def _by_name(value: object) -> object:
    if isinstance(value, dict):  # as an order has them
        return {
            name: section and Captioner.model_validate(section) for name, section in value.items()
        }
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return value
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"`{twice}` is named twice")
    return dict.fromkeys(names)


NamedCaptioners = Annotated[
    # Name -> `Captioner`, or None. As `Any`, because these are no keys of the dataset.
    dict[str, Any],
    BeforeValidator(_by_name),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""Captioners of a dataset by their names, which may be written as one name or a list of names.

`fill_in` adds their sections, so that a job that gets the dataset knows them.
"""


def fill_in(
    captioners: Mapping[str, Captioner], datasets: Mapping[str, Any], models: Collection[str]
) -> None:
    """Check the names of captioners, and give datasets the sections of those that they name.

    Captions of `florence` lie in `cache/{dataset}/captions/florence`, where a model's folder would
    be. The name of a folder in it tells its kind, like those of latents (`64`) and texts (`text`).

    Raises:
        ConfigError: a captioner or model has such a name, or a captioner does not exist.
    """
    if "captions" in models:
        what = "made captions have the folder of this name"
        raise ConfigError(what, where="models.captions", hint="use another name")
    for name in captioners:
        if _TAKEN.fullmatch(name):
            what = "a folder of latents or embeddings may have this name"
            raise ConfigError(what, where=f"captioners.{name}", hint="use another name")
    for dataset, settings in datasets.items():
        where = f"datasets.{dataset}.captioner"
        for name in settings.captioner:
            refuse_unknown("captioner", name, captioners, where)
            settings.captioner[name] = captioners[name]
