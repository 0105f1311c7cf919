"""Places of weights: a local path, or a hub id with a revision, read from the local hub cache.

With a pinned commit, the path of a file follows from the configuration, without a look at the
disk. This module never uses the network.
"""

from __future__ import annotations

import os
import re
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

from latentmake.config.fields import (
    Applies,
    Closed,
    DiskPath,
    Ending,
    Listed,
    Number,
    Shapes,
    place,
    shaped,
)

_FILES = (".safetensors", ".gguf", ".pth", ".pt", ".bin", ".ckpt", ".json")
_SNAPSHOTS = "snapshots"
_LONGEST = 80  # characters; a hint does not repeat a longer name on the hub
_HUB_NAME = re.compile(r"(\w[\w.-]*/)?(\w[\w.-]*)")  # an owner, if any, and a name


def cache() -> Path:
    """Return the folder of the local hub cache, from the variables that huggingface_hub reads."""
    variable = os.environ.get
    home = variable("HF_HOME") or f"{variable('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    place = variable("HF_HUB_CACHE") or variable("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(place)).expanduser()


def place_of(hub: str, revision: str, *below: str | None) -> Path:
    """Return the path of a file or folder of OWNER/NAME at a commit in the local hub cache."""
    return _repository(hub) / _SNAPSHOTS / revision / Path(*filter(None, below))


def _repository(hub: str) -> Path:
    return cache() / "--".join(["models", *hub.split("/")])


def known_commit(hub: str, branch: str = "main") -> str | None:
    """Return the commit of a branch in the local hub cache; None if it is not there."""
    try:
        commit = (_repository(hub) / "refs" / branch).read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    return commit if (_repository(hub) / _SNAPSHOTS / commit).is_dir() else None


def snapshots(hub: str) -> list[Path]:
    """Return the folders of all commits of a repository in the local hub cache."""
    return sorted((_repository(hub) / _SNAPSHOTS).glob("*"))


def absence(path: str | Path) -> str:
    """Return the predicate for a missing path, with the command that fetches it, if any."""
    command, hint = download(path), fetching(path)
    if command:
        return f"is not in the local hub cache: run `{command}`"
    return f"does not exist: {hint}" if hint else "does not exist"


def fetching(word: str | Path) -> str:
    """Return a hint to download a model that is named like one of the hub; "" for a path."""
    named = _HUB_NAME.fullmatch(str(word))
    if (
        named is None
        or len(named[0]) > _LONGEST
        or named[2].endswith(_FILES)
        or (named[1] and Path(named[1]).exists())
    ):
        return ""
    hub = f"{named[1] or 'OWNER/'}{named[2]}"
    command = f"hf download {hub} --local-dir models/{named[2]}"
    return f"run `{command}` for a model of the hub, and name that folder"


def download(path: str | Path) -> str:
    """Return the command that fetches a missing path of the hub cache; "" for any other path."""
    parts = Path(path).parts
    for index, part in enumerate(parts[:-2]):
        if part.startswith("models--") and parts[index + 1] == _SNAPSHOTS:
            hub, revision = "/".join(part.split("--")[1:]), parts[index + 2]
            below = "/".join(parts[index + 3 :])
            if below and not below.endswith(_FILES):
                below = f'--include "{below}/*"'
            return " ".join(filter(None, ["hf download", hub, below, f"--revision {revision}"]))
    return ""


_COMMIT = re.compile(r"[0-9a-f]{40}")


class Location(Closed):
    """Place of a tokenizer: a local path, or a hub id with its revision."""

    path: DiskPath | None = Field(None, min_length=1)
    """Folder or file: a diffusers or transformers folder (`config.json` beside weights as
    `.safetensors`, in one file or in shards, or as `.bin`; a variant such as fp16 is read where
    nothing else is there), a single `.safetensors` file, or the folder of a pipeline, which
    stands for the sub-folder of this part: `vae: models/sd15` means
    `models/sd15/vae`. Set either `path` or `hub`."""
    hub: str | None = Field(None, min_length=1)
    """Repository id on the Hugging Face hub, such as `stabilityai/sd-vae-ft-mse`. Planning never
    contacts the hub; the first job that needs the model downloads it."""
    revision: str | None = None
    """Commit of the hub repository, 40 hexadecimal digits; required with `hub`.
    `huggingface.co/OWNER/NAME/commits/main` lists them. A branch name is refused, because a branch
    can change unnoticed."""
    subfolder: str | None = None
    """Folder inside the hub repository or inside the folder `path`, such as `vae`."""
    file: str | None = Field(None, min_length=1)
    """One file of the hub repository, read from the local hub cache. If it is not there, the
    message has the `hf download` line that fetches it."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.hub is None):
            raise ValueError("needs either `path` or `hub`")
        if self.file is not None and self.hub is None:
            raise ValueError("has a `file` of no `hub`; set `path` to the file")
        if self.hub is not None and not _COMMIT.fullmatch(self.revision or ""):
            hint = f"huggingface.co/{self.hub}/commits/{self.revision or 'main'} lists them"
            if commit := known_commit(self.hub, self.revision or "main"):
                hint = f"write `revision: {commit}`, which is in the local hub cache"
            what = "a `hub` model needs a commit (40 hexadecimal digits) as `revision`"
            raise ValueError(f"{what}; {hint}")
        return self

    @property
    def local(self) -> str:
        """Path of the file or folder on this machine; for a `hub`, in the local hub cache."""
        if self.hub is not None:
            return str(place_of(self.hub, self.revision or "", self.subfolder, self.file))
        path = self.path or ""
        return path if self.subfolder is None else str(Path(path, self.subfolder))


class Weights(Location):
    """Place of the weights of one network: a path, or a section with these keys."""

    config: DiskPath | None = None
    """For a single file: its `config.json`, or the folder of it. By default `config.json` beside
    the file. A text encoder needs one. A VAE without one is recognised by the shapes of its
    weights; its scale is then that of the model's `architecture`, see `scaling_factor`."""


NO_WEIGHTS = Weights.model_construct(path=None, hub=None)
"""Value for weights that an architecture does not have."""

_LocationPlace = Annotated[Location, BeforeValidator(place, json_schema_input_type=str | Location)]
WeightsPlace = Annotated[Weights, BeforeValidator(place, json_schema_input_type=str | Weights)]

if TYPE_CHECKING:
    LocalPlace = str
else:  # a path; a hub id becomes its path in the local hub cache
    LocalPlace = Annotated[
        Location,
        BeforeValidator(place, json_schema_input_type=str | Location),
        AfterValidator(lambda location: location.local),
        PlainSerializer(str),
    ]


_PROJECTED = Shapes(
    "text",
    applies=[
        Applies(
            "is about the code of a `projection`",
            when=lambda weights: weights.projection is not None,
        )
    ],
)


class TextWeights(Weights):
    """Place of a text encoder, with further keys for its tokenizer.

    ```yaml
    text: [{path: models/sd15/text_encoder, max_length: 77}]
    ```
    """

    tokenizer: _LocationPlace | None = None
    """Folder of the tokenizer; for a text encoder with `hub`, a sub-folder of the repository. By
    default `tokenizer` beside `text_encoder`, `tokenizer_2` beside `text_encoder_2` and so on,
    else the folder of the encoder. A tokenizer of another hub repository is a section with `hub`,
    `revision` and `subfolder`: `{hub: Wan-AI/Wan2.1-T2V-14B, revision: COMMIT, subfolder:
    google/umt5-xxl}`. For a `checkpoint` it is `tokenizer` beside the file, else that of
    openai/clip-vit-large-patch14 in the local hub cache. In layout `sdscripts`, only the
    vocabulary of a CLIP's tokenizer counts: sd-scripts reads `!` and tokens that were added as
    text, and chooses the token of padding itself."""
    max_length: Number | None = Field(None, gt=1)
    """Tokens of a caption to keep, including those that mark begin and end; by default 77 for CLIP
    and 512 for T5. CLIP reads at most 77; use `max_token_length` of the model for longer captions.
    Captions that are cut are named in the log of the job."""
    projection: DiskPath | None = Field(None, min_length=1)
    """A linear layer that gives the embeddings the width of the UNet before they are cached. The
    value is its folder, its `.safetensors` file, or the folder of a diffusers pipeline with a
    sub-folder such as `t5_projection`."""
    trust_remote_code: bool = shaped(False, _PROJECTED)
    """Load a projection that is a class of its own with the Python files in the folder of the
    pipeline. These files run on your machine, so read them first."""


# At most as long as the endings of our own cache files, for which names of items leave room.
_CacheEnding = Annotated[Ending, StringConstraints(max_length=20)]


class AiTraining(Closed):
    """File endings of caches that ai-training's scripts read beside the images."""

    latents: _CacheEnding | None = None
    """Ending of the latents: `.img_sdvae`, `.img_sdxl`, or the ending that you give to the
    scripts."""
    text: Listed[_CacheEnding] | None = None
    """Endings of the embeddings, one for each text encoder in their order: `.txt_t5cache`,
    `.txt_clipl`."""

    @model_validator(mode="after")
    def _endings(self) -> Self:
        if not (self.latents or self.text):
            raise ValueError("needs `latents`, `text` or both")
        return self


TextPlace = Annotated[TextWeights, BeforeValidator(place, json_schema_input_type=str | TextWeights)]
