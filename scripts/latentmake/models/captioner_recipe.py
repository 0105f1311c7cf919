"""Networks of captioners on disk, and recipes: all that affects an answer except the picture.

As in `cache_recipe`, a recipe has digests of files, not their paths. Post-processing is no part of
it. This module loads no network. A file that is missing or cannot be read raises a ModelError.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from latentmake.base.errors import ConfigError, ModelError
from latentmake.base.regular import read_text
from latentmake.config.captioners import Captioner
from latentmake.config.weights import Weights
from latentmake.models.cache_recipe import FileDigest, files_digest
from latentmake.models.files import network_config, refuse_missing, weights_files

FORMAT_VERSION = 1
"""Raise it when the same picture and recipe give another answer; all made captions become stale."""

TAGS = "selected_tags.csv"
"""File of a tagger's tags, beside its weights."""

Kind = Literal["chat", "task", "tagger"]
"""`chat`: a vision-language model with a chat template. `task`: one without, such as Florence-2 or
BLIP. `tagger`: a timm model with probabilities of tags."""

_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_FILES = (
    *_TOKENIZERS,
    *_PROCESSORS,
    *_TEMPLATES,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("video_preprocessor_config.json", "generation_config.json"),
)
_PROMPTS = {"florence2": "<CAPTION>", "paligemma": "caption en"}
"""Type of a model without a chat template -> prompt without which it writes no caption."""
_CHAT_PROMPT = "Describe the picture in one or two sentences."
_OF_TAGGERS = ("thresholds", "exclude", "underscores")
_OF_LANGUAGE = (
    *("prompt", "quantization", "trust_remote_code", "max_new_tokens", "temperature", "seed"),
    "image_size",
)
_COPY = "copy the model again"


class Network(NamedTuple):
    """Network of a captioner on this disk.

    Attributes:
        kind: kind of the network.
        folder: folder with its configuration and its processor.
        files: its configuration, then its weights.
        config: content of its config.json.
    """

    kind: Kind
    folder: Path
    files: list[Path]
    config: dict[str, Any]

    def prompt(self, settings: Captioner) -> str | None:
        """Return the prompt of the settings, or the default one of such a network."""
        usual = _PROMPTS.get(str(self.config.get("model_type")))
        return settings.prompt or (_CHAT_PROMPT if self.kind == "chat" else usual)


def network_of(settings: Captioner) -> Network:
    """Find the network of a captioner, in a folder or in the local hub cache.

    Raises:
        ModelError: files are missing or damaged.
    """
    named = settings.model
    weights = Weights(path=named.local, config=named.config)
    path = Path(weights.path or "")
    refuse_missing(path)
    files = weights_files(weights)
    if files[0].name != "config.json":
        raise ModelError("there is no config.json beside these weights", where=path, hint=_COPY)
    config, folder = network_config(weights) or {}, files[0].parent
    if (folder / TAGS).is_file():
        return Network("tagger", folder, files, config)
    if "model_type" not in config:
        what = f"is no vision-language model, and no tagger, which has a {TAGS}"
        raise ModelError(what, where=folder, hint="name the folder of a captioner")
    if path.is_file():
        what = "is one file of a vision-language model, which has several"
        raise ModelError(what, where=path, hint="name its folder")
    for names in (_PROCESSORS, _TOKENIZERS):
        if not any((folder / name).is_file() for name in names):
            what = f"this model folder has no {' or '.join(names)}"
            raise ModelError(what, where=folder, hint=_COPY)
    return Network("chat" if _has_template(folder) else "task", folder, files, config)


def _has_template(folder: Path) -> bool:
    """Return whether a model's folder has a chat template."""
    if any((folder / name).is_file() for name in _TEMPLATES):
        return True
    for name in ("processor_config.json", "tokenizer_config.json"):
        try:
            if (folder / name).is_file() and json.loads(read_text(folder / name))["chat_template"]:
                return True
        except KeyError:
            continue
        except (OSError, ValueError, TypeError):
            raise ModelError("cannot be read", where=folder / name, hint=_COPY) from None
    return False


def make(
    settings: Captioner, read: FileDigest, place: str, *, clips: bool = True
) -> dict[str, object]:
    """Return the recipe of the answers of a captioner.

    Args:
        settings: settings of the captioner.
        read: digest of a file, such as the memo's.
        place: key of the captioner in the configuration, such as `captioners.florence`.
        clips: whether the dataset may have videos, for which `frames` counts.

    Raises:
        ConfigError: a key has no effect with such a network.
        ModelError: a file of the network is missing or damaged.
    """
    try:
        network = network_of(settings)
        _refuse_idle(settings, network, place)
        own = _of_tags if network.kind == "tagger" else _of_language
        recipe = {
            "format": FORMAT_VERSION,
            "kind": "captions",
            "network": network.kind,
            "model": files_digest(network.files, read),
            "dtype": settings.dtype,
            **own(settings, network, read),
        }
        return recipe | ({"frames": settings.frames} if clips else {})
    except ModelError as error:
        where, what = f"{place}.model", error.what
        raise ModelError(f"{error.where}: {what}", where=where, hint=error.hint) from None


def _refuse_idle(settings: Captioner, network: Network, place: str) -> None:
    """Raise a ConfigError for the first key that has no effect with a network."""
    is_tagger = network.kind == "tagger"
    if key := settings.first_set(*(_OF_LANGUAGE if is_tagger else _OF_TAGGERS)):
        what = "has no effect with a tagger" if is_tagger else "is for taggers"
        raise ConfigError(what, where=f"{place}.{key}", hint="leave it out")


def _of_tags(settings: Captioner, network: Network, read: FileDigest) -> dict[str, object]:
    return {
        "tags": files_digest([network.folder / TAGS], read),
        "thresholds": settings.thresholds.model_dump(exclude_none=True),
        "exclude": sorted({*settings.exclude}),
        "underscores": settings.underscores,
    }


def _of_language(settings: Captioner, network: Network, read: FileDigest) -> dict[str, object]:
    own = settings.model_dump(include={*_OF_LANGUAGE} - {"trust_remote_code"})
    if not settings.temperature:
        del own["seed"]
    if settings.trust_remote_code:
        own["code"] = _named_digest(sorted(network.folder.glob("*.py")), read)
    processor = [network.folder / name for name in sorted(_FILES)]
    return own | {
        "prompt": network.prompt(settings),
        "processor": _named_digest([file for file in processor if file.is_file()], read),
    }


def _named_digest(files: Sequence[Path], read: FileDigest) -> str:
    return files_digest(files, read, [file.name for file in files])
