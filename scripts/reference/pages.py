"""Pages of the configuration: one per section and per trainer, with an entry for each key."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from latentmake.config.captioners import Captioner, Thresholds
from latentmake.config.datasets import Captions, Dataset
from latentmake.config.external_trainers import (
    LaunchedSamples,
    MusubiSamples,
    MusubiTrainer,
    SdScriptsTrainer,
)
from latentmake.config.fields import MACHINE, Kind, Shapes
from latentmake.config.machines import (
    Batch,
    Cluster,
    ClusterJob,
    Export,
    ExternalProgram,
    History,
    MusubiTuner,
    PathMap,
    Publish,
    Store,
    TrainingJob,
)
from latentmake.config.models import Model
from latentmake.config.root import Run, Validation
from latentmake.config.trainers import (
    Generation,
    Samples,
    SdTrainer,
    Trainer,
    WanSamples,
    WanTrainer,
)
from latentmake.config.weights import AiTraining, TextWeights, Weights
from pydantic import BaseModel

from reference.schema import declared, descriptions
from reference.types import alternatives, default_words, type_words

__all__ = ["PAGES", "Page", "entry", "rebuilds", "summary", "text"]

_REBUILT: dict[Kind, str] = {
    "latents": "latents",
    "text": "embeddings",
    "captions": "captions",
    "manifest": "training",
    "weights": "training",
    "pictures": "pictures",
    "clips": "clips",
    "publication": "publication",
    "machine": "nothing",
}


class Part(NamedTuple):
    """Further section on a page.

    Attributes:
        heading: heading of the section.
        section: class of the section.
        form: format of the headings of its entries; distinguishes keys that are on the page twice.
        inherited: whether the page shows inherited keys.
        held: declaration of the key that holds the section; see `schema.declared`.
    """

    heading: str
    section: type[BaseModel]
    form: str = "`{}`"
    inherited: bool = True
    held: Shapes | None = None


class Page(NamedTuple):
    """Page of the reference.

    Attributes:
        name: name of the file, without its ending.
        section: section that the page describes.
        place: place of the section in the configuration.
        parts: further sections.
    """

    name: str
    section: type[BaseModel]
    place: str
    parts: tuple[Part, ...] = ()

    @property
    def file(self) -> str:
        """Name of the file."""
        return f"{self.name}.md"

    @property
    def title(self) -> str:
        """Heading of the page, which names the key or the kind of the trainer."""
        return self.name.replace("trainer-", "Trainer ")


_WEIGHTS = (
    Part("Place of weights", Weights),
    Part("Text encoders", TextWeights, inherited=False),
    Part("Caches of ai-training", AiTraining, "`ai_training.{}`", held=MACHINE),
)
_JOBS = (
    Part("Encoding jobs", ClusterJob, "`encode.{}`"),
    Part("Trainings", TrainingJob, "`train.{}`"),
)
PAGES = (
    Page("datasets", Dataset, "datasets.NAME"),
    Page("captions", Captions, "datasets.NAME.captions"),
    Page(
        "captioners",
        Captioner,
        "captioners.NAME",
        (Part("Thresholds of a tagger", Thresholds, "`thresholds.{}`"),),
    ),
    Page("models", Model, "models.NAME", _WEIGHTS),
    Page("runs", Run, "runs.NAME"),
    Page("trainer-sd", SdTrainer, "runs.NAME.trainer"),
    Page("trainer-wan", WanTrainer, "runs.NAME.trainer"),
    Page("trainer-musubi", MusubiTrainer, "runs.NAME.trainer"),
    Page("trainer-sdscripts", SdScriptsTrainer, "runs.NAME.trainer"),
    Page(
        "samples",
        Samples,
        "runs.NAME.trainer.samples",
        (
            Part("Keys of the trainer wan", WanSamples, "`{}` (wan)", inherited=False),
            Part("Keys of musubi and sdscripts", LaunchedSamples, "`{}` (musubi, sdscripts)"),
            Part("Key of musubi", MusubiSamples, "`{}` (musubi)", inherited=False),
        ),
    ),
    Page("validation", Validation, "runs.NAME.validation"),
    Page("generate", Generation, "runs.NAME.generate"),
    Page("batch", Batch, "batch"),
    Page("cluster", Cluster, "cluster", _JOBS),
    Page("musubi_tuner", MusubiTuner, "musubi_tuner"),
    Page("sd_scripts", ExternalProgram, "sd_scripts"),
    Page("publish", Publish, "publish", (Part("Names of a folder", PathMap, "`path_maps.{}`"),)),
    Page("export", Export, "export"),
    Page("store", Store, "store"),
    Page("history", History, "history"),
)


def text(page: Page) -> str:
    """Return the Markdown of a page."""
    first, _, rest = _about(page.section).partition("\n\n")
    jumps = " · ".join(f"[`{key}`](#{key})" for key in _keys(page.section))
    blocks = [f"# {page.title}", f"{first} Place in the configuration: `{page.place}`.", rest]
    blocks += ["## Keys", jumps, *_entries(Part("", page.section))]
    for part in page.parts:
        blocks += [f"## {part.heading}", _about(part.section)]
        blocks += _entries(part)
    return "\n\n".join(filter(None, blocks)) + "\n"


def _about(section: type[BaseModel]) -> str:
    """Return the docstring of a section and, if there is one, the text in `sections/`."""
    file = Path(__file__).parent / "sections" / f"{section.__name__}.md"
    further = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    docstring = _unwrapped(inspect.cleandoc(section.__doc__ or ""))
    return "\n\n".join(filter(None, [docstring, further]))


def entry(
    section: type[BaseModel], key: str, form: str = "`{}`", held: Shapes | None = None
) -> str:
    """Return the entry of a key: heading, type, default, rebuilt results, description."""
    field, description = section.model_fields[key], _unwrapped(descriptions(section)[key])
    facts = [type_words(field), default_words(field, description)]
    if results := rebuilds(section, key, held):
        facts.append(f"rebuilds {results}")
    return f"### {form.format(key)}\n\n*{' · '.join(facts)}*\n\n{description}"


def rebuilds(section: type[BaseModel], key: str, held: Shapes | None = None) -> str:
    """Return the results that a changed value rebuilds.

    The text is empty if the value is a section and its keys have declarations of their own.
    """
    try:
        shapes = declared(section, key, held)
    except TypeError:
        return "the same as the key that holds it" if issubclass(section, Weights) else ""
    results = ", ".join(dict.fromkeys(_REBUILT[kind] for kind in shapes.kinds))
    if shapes.when is None:
        return results
    key, values = shapes.when
    if len(values) == 1:
        return f"{results} (with `{key}: {values[0]}`)"
    return f"{results} (with `{key}` {alternatives([f'`{value}`' for value in values])})"


def summary(section: type[BaseModel]) -> str:
    """Return the first line of a section's docstring."""
    return inspect.cleandoc(section.__doc__ or "").partition("\n")[0]


def _entries(part: Part) -> Iterator[str]:
    own = inspect.get_annotations(part.section)
    for key in _keys(part.section):
        if part.inherited or key in own:
            yield entry(part.section, key, part.form, part.held)


def _keys(section: type[BaseModel]) -> list[str]:
    """Return the keys of a section; keys that only this trainer has come first."""
    keys, own = list(descriptions(section)), inspect.get_annotations(section)
    return sorted(keys, key=lambda key: key not in own) if issubclass(section, Trainer) else keys


def _unwrapped(text: str) -> str:
    """Return Markdown with one line per paragraph and list item; code blocks stay as they are."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part if part.startswith("```") else re.sub(r"(?<=\S)\n(?!\n|- |#)[ ]*(?=\S)", " ", part)
        for part in parts
    )
