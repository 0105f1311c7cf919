"""Places of weights: a local path, or a hub id with its revision."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    StringConstraints,
    model_validator,
)

from latentmake.config import hub as hubs
from latentmake.config.fields import Closed, DiskPath, Ending, Number, listed, place

_COMMIT = re.compile(r"[0-9a-f]{40}")


class Location(Closed):
    """Place of a part of a model: a local path, or a hub id with its revision."""

    path: DiskPath | None = Field(None, min_length=1)
    """Folder or single file of weights, or the folder of a pipeline that has them in a folder of
    their own."""
    hub: str | None = Field(None, min_length=1)
    """Repository id on the hub."""
    revision: str | None = None
    """Commit of the hub repository, 40 hexadecimal digits; required there."""
    subfolder: str | None = None
    """Folder inside the hub repository, or inside the folder `path`."""
    file: str | None = Field(None, min_length=1)
    """One file of the hub repository, read from the local hub cache."""

    @property
    def is_set(self) -> bool:
        """Whether it names anything."""
        return self.path is not None or self.hub is not None

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.hub is None):
            raise ValueError("needs either `path` or `hub`")
        if self.file is not None and self.hub is None:
            raise ValueError("has a `file` of no `hub`; set `path` to the file")
        if self.hub is not None and not _COMMIT.fullmatch(self.revision or ""):
            branch = self.revision or "main"
            given = f"`{self.revision}` is none" if self.revision else "there is none"
            known = hubs.known_commit(self.hub, branch)
            hint = f"huggingface.co/{self.hub}/commits/{branch} lists them"
            if known is not None:
                hint = f"write `revision: {known}`, which is in the local hub cache"
            raise ValueError(
                f"a `hub` model needs a commit (40 hexadecimal digits) as `revision`, and {given}; "
                f"{hint}"
            )
        return self

    @property
    def local(self) -> str:
        """Path of the file or folder on this machine; of a hub, in the local hub cache."""
        if self.hub is not None:
            return str(hubs.place_of(self.hub, self.revision or "", self.subfolder, self.file))
        path = self.path or ""
        return path if self.subfolder is None else str(Path(path, self.subfolder))


class Weights(Location):
    """Place of the weights of one network."""

    config: DiskPath | None = None
    """Folder or config.json that describes a single .safetensors file."""


NO_WEIGHTS = Weights.model_construct(path=None, hub=None)
"""In place of weights that an architecture does not have."""

_LocationPlace = Annotated[Location, BeforeValidator(place, json_schema_input_type=str | Location)]
WeightsPlace = Annotated[Weights, BeforeValidator(place, json_schema_input_type=str | Weights)]

if TYPE_CHECKING:
    LocalPlace = str
else:  # a path, which a hub id has in the local hub cache
    LocalPlace = Annotated[
        Location,
        BeforeValidator(place, json_schema_input_type=str | Location),
        AfterValidator(lambda location: location.local),
        PlainSerializer(str),
    ]


class TextWeights(Weights):
    """Place of a text encoder and its tokenizer."""

    tokenizer: _LocationPlace | None = None
    """Folder of the tokenizer (sub-folder for a hub id), or its own `hub`, `revision` and
    `subfolder`; by default `tokenizer` beside `text_encoder`, `tokenizer_2` beside
    `text_encoder_2`, else the encoder's folder."""
    max_length: Number | None = Field(None, gt=1)
    """Tokens kept of a caption; by default 77 for CLIP, 512 for T5."""
    projection: DiskPath | None = Field(None, min_length=1)
    """A linear layer that the embeddings go through before they are cached: its folder, file, or
    the folder of a pipeline that has one."""
    trust_remote_code: bool = False
    """Run the Python code in the pipeline folder that `projection` names."""

    @model_validator(mode="after")
    def _code_of_a_projection(self) -> Self:
        if self.trust_remote_code and self.projection is None:
            raise ValueError("`trust_remote_code` is about the code of a `projection`")
        return self


# No longer than the ending of our own cache files, which stems leave room for.
_CacheEnding = Annotated[Ending, StringConstraints(max_length=20)]


class Adopt(Closed):
    """Endings of the caches that ai-training's scripts keep beside images."""

    latents: _CacheEnding | None = None
    """Ending of latents: .img_sdvae, .img_sdxl or another."""
    text: Annotated[
        list[_CacheEnding] | None,
        BeforeValidator(listed, json_schema_input_type=_CacheEnding | list[_CacheEnding] | None),
    ] = None
    """Endings of embeddings, one a text encoder in their order: .txt_t5cache, .txt_clipl."""

    @model_validator(mode="after")
    def _endings(self) -> Self:
        endings = [*([self.latents] if self.latents else []), *(self.text or [])]
        if not endings:
            raise ValueError("needs `latents`, `text` or both")
        if len(set(endings)) < len(endings):
            raise ValueError("names an ending twice")
        return self


TextPlace = Annotated[TextWeights, BeforeValidator(place, json_schema_input_type=str | TextWeights)]


def refuse_unread(weights: Mapping[str, Weights | None], title: str) -> None:
    """Refuse what musubi-tuner's scripts do not take of weights: they get a path and no more.

    Args:
        weights: of a model, by its keys.
        title: of its architecture.

    Raises:
        ValueError: the first such key.
    """
    for name, found in weights.items():
        key = name.partition(".")[0]
        for unread in ("config", "tokenizer", "max_length"):
            if getattr(found, unread, None) is not None:
                raise ValueError(
                    f"musubi-tuner's scripts decide about `{unread}` of {title}'s `{key}`: leave "
                    "it out"
                )
