"""Places of a model's parts, resolved once for the planner, its jobs and the trainings.

A configuration may name the folder of a pipeline for each part, or a repository on the hub. Here
both become the path of the part's own file or folder. Nothing here reaches the network, and a place
where nothing lies is left as it is written, so that its reader names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from latentmake.config.models import Model
from latentmake.config.root import Config
from latentmake.config.weights import TextWeights, Weights
from latentmake.errors import ConfigError

_Place = TypeVar("_Place", bound=Weights)
_CONFIGS = ("config.json", "scheduler_config.json")  # of a folder that is a part itself
_PARTS = {
    "vae": ("vae",),
    "unet": ("unet",),
    "scheduler": ("scheduler",),
    "clip": ("image_encoder",),
    "image_encoder": ("image_encoder",),
    # Wan 2.2's pipelines have the network for high noise in `transformer`, that for low noise in
    # `transformer_2`; its original release has folders of these other names.
    "dit": ("transformer_2", "transformer", "low_noise_model"),
    "dit_high_noise": ("transformer", "high_noise_model"),
}
"""Key of a model -> names of the part's folder in a pipeline, in order."""


def resolved(config: Config) -> Config:
    """Return a configuration whose models name the files and folders of their parts.

    Raises:
        ConfigError: one place for several text encoders is no pipeline.
    """
    models = {name: _resolved(name, model) for name, model in config.models.items()}
    return config.model_copy(update={"models": models})


def part_of(key: str, path: str) -> str:
    """Return the path of a part: of a pipeline's folder its sub-folder, else the path itself.

    Args:
        key: of the model, such as `dit_high_noise`.
        path: as configured.
    """
    return _in_pipeline(path, _PARTS[key])


def _in_pipeline(path: str, names: tuple[str, ...]) -> str:
    folder = Path(path)
    if any((folder / name).is_file() for name in _CONFIGS):
        return path
    return next((str(folder / name) for name in names if (folder / name).is_dir()), path)


def _resolved(name: str, model: Model) -> Model:
    changes = {key: found for key, found in _changes(model) if found != getattr(model, key)}
    texts = changes.get("text", model.text)
    if len(texts) < len(model.spec.text_encoders):
        number = len(model.spec.text_encoders)
        raise ConfigError(
            f"{texts[0].local} is no pipeline's folder, and {model.architecture} has {number} text "
            f"encoders: {', '.join(model.spec.text_encoders)}",
            where=f"models.{name}.text",
            hint="name each of them in a list",
        )
    return model.model_copy(update=changes) if changes else model


def _changes(model: Model) -> Iterator[tuple[str, Any]]:
    """Yield each key of a model that names a part, and its value."""
    for key, names in _PARTS.items():
        value = getattr(model, key)
        if isinstance(value, str):
            yield key, _in_pipeline(value, names)
        elif isinstance(value, Weights) and value.is_set:
            yield key, _weights(model, value, names)
    yield "text", list(_texts(model))


def _texts(model: Model) -> Iterator[TextWeights]:
    """Yield the text encoders; one place stands for all that an architecture has."""
    places = model.text
    if len(places) == 1 < len(model.spec.text_encoders) and _holds_several(places[0]):
        places = places * len(model.spec.text_encoders)
    seen: Counter[str] = Counter()
    for number, place in enumerate(places):
        seen[place.local] += 1
        at = number if model.spec.text_encoders else seen[place.local] - 1
        folder = f"text_encoder_{at + 1}" if at else "text_encoder"
        if len(places) > len(model.text) and place.hub is not None:
            place = place.model_copy(update={"subfolder": folder})
        yield _weights(model, place, (folder,))


def _holds_several(place: TextWeights) -> bool:
    return place.hub is not None or Path(place.local, "text_encoder_2").is_dir()


def _weights(model: Model, weights: _Place, names: tuple[str, ...]) -> _Place:
    """Return weights with the path of their part.

    Weights on the hub that an encoder of ours loads by itself stay there: its caches are known by
    the commit.
    """
    loads = model.spec.encodes and not model.scripted and weights.file is None
    if weights.hub is not None and loads:
        return weights
    if weights.hub is None and weights.subfolder and not Path(weights.path or "").is_dir():
        return weights  # a part of a complete checkpoint
    path = _in_pipeline(weights.local, names)
    if path == weights.path and weights.hub is None:
        return weights
    gone = dict.fromkeys(("hub", "revision", "subfolder", "file"))
    return weights.model_copy(update={**gone, "path": path})
