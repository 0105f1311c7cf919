"""`latentmake init`: write a first configuration for folders of pictures and a local model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote

import typer
import yaml

from latentmake import backends
from latentmake.base import atomic
from latentmake.base.errors import DatasetError, StorageError, UserError
from latentmake.commands.project import HOME, say
from latentmake.config.root import parse
from latentmake.config.trainers import Kind
from latentmake.models import cache_recipe
from latentmake.models.files import resolved
from latentmake.trainers.init.dataset_folders import FoundDataset, datasets_in, left_out
from latentmake.trainers.init.local_models import DOWNLOAD, named_model
from latentmake.trainers.init.model_section import fill_in, trainer_of
from latentmake.trainers.init.new_config import (
    CAPTIONER,
    PROGRAMS,
    Run,
    config_text,
    run_and_file,
    shown,
    size_of,
    unedited,
)

_TINY = HOME / "data/tiny-sd"


def init(
    folders: list[Path],
    model: str | None = None,
    trainer: Kind | None = None,
    output: Path | None = None,
    force: bool = False,
) -> None:
    """Write a first configuration for your images and model, with a comment at each setting.

    Prints what was found, what is missing, and what to run next.
    Exit status: 0 ready to build, 1 something is missing, 2 nothing was written.
    """
    by_folder = {folder: datasets_in(folder) for folder in folders}
    datasets = _named([dataset for several in by_folder.values() for dataset in several])
    name, file = run_and_file(datasets, output)
    if not str(file).isprintable():  # it stands in a comment of the configuration
        what, hint = "a configuration cannot have this name", "name another file by --output"
        raise StorageError(what, where=file, hint=hint)
    if file.exists() and not force and not unedited(_text_of(file)):
        hint = "name another file by --output, or replace this one by --force"
        raise StorageError("exists already", where=file, hint=hint)
    to_train = named_model(model)
    taken = [dataset for dataset in datasets if to_train.takes(dataset)]
    if not taken:
        what = f"holds {datasets[0].counted}, which {to_train.title} does not take"
        hint = "name another folder, or another --model"
        raise DatasetError(what, where=datasets[0].settings.path, hint=hint)
    is_installed = _program("musubi", folders) is not None
    kind = trainer_of(to_train, trainer, musubi=is_installed)
    fill_in(to_train, kind)
    run = Run(name, taken, to_train, *size_of(to_train, taken), _program(kind, folders), file)
    text = config_text(run)
    predictions = list[str]()
    missing = [*_missing(run), *(() if to_train.missing else _faults(text, predictions))]
    try:
        atomic.write(file, text.encode())
    except UnicodeEncodeError:
        what, hint = "has a name that is not UTF-8, which YAML cannot hold", "rename the folder"
        raise DatasetError(what, where=folders[0], hint=hint) from None
    for dataset in taken:
        say("found", f"{dataset.settings.path}: {dataset.described}")
    if to_train.networks:
        say("found", f"{to_train.root}: {to_train.title}")
    for line in predictions:
        say("found", f"it predicts {line}")
    for line in to_train.choices:
        say("note", line)
    say("wrote", f"{file}: trains a LoRA by `kind: {kind}`, at {shown(run.size)} pixels")
    for dataset in datasets:
        if dataset not in taken:
            what = f"its {dataset.counted} are left out, since {to_train.title} does not take them"
            say("note", f"{dataset.settings.path}: {what}")
    for dataset in taken:
        if not dataset.captioned:
            what = f"a network can write its captions: uncomment the captioner in {file}, and run"
            download = f"hf download {CAPTIONER} --local-dir models/florence"
            say("note", f"{dataset.settings.path}: {what} {download}")
    for folder, several in by_folder.items():
        for line in left_out(folder, several):
            say("note", line)
    for line in missing:
        say("missing", line)
    if Path("Snakefile").is_file():
        say("next", f"snakemake -n train_{name} --configfile {quote(str(file))}")
    else:
        say("next", f"latentmake build -n {run.arguments}")
    say("next", f"latentmake check {run.arguments}")
    if missing:
        raise typer.Exit(1)


def _text_of(file: Path) -> str:
    with suppress(OSError, ValueError):
        return file.read_text(encoding="utf-8")
    return ""


def _named(datasets: list[FoundDataset]) -> list[FoundDataset]:
    """Append numbers to the names of datasets that have the same name."""
    names = [dataset.name for dataset in datasets]
    return [
        dataset._replace(name=f"{name}_{number}") if names.count(name) > 1 else dataset
        for number, (name, dataset) in enumerate(zip(names, datasets, strict=True), 1)
    ]


def _program(kind: str, folders: list[Path]) -> str | None:
    """Return the folder of another trainer in one of the usual places; None if there is none."""
    if kind not in PROGRAMS:
        return None
    home, near = Path.home(), (Path(), Path(".."), *(folder.parent for folder in folders))
    places = (parent / PROGRAMS[kind][1] for parent in (*near, home, home / "kohya_ss"))
    return next((str(place) for place in places if place.is_dir()), None)


def _missing(run: Run) -> Iterator[str]:
    """Yield a line for everything that a user has to add before a build."""
    model = run.model
    for dataset in run.datasets:
        if dataset.captioned and dataset.bare:
            yield dataset.lacking
    if not model.networks:
        yield f"a model; name yours by --model, or run {DOWNLOAD}"
        if _TINY.is_dir():
            yield f"to try it without a download: --model {_TINY}, which only shows how it works"
    elif model.missing:
        names = ", ".join(f"`{key}`" for key in dict.fromkeys(model.missing))
        page = f"docs/trainers/{model.kind}.md"
        where = f"put the files that {page} names into {model.folder}"
        yield f"{names} of the model: {where}, and run this again"
    if run.clone:
        hint = "then set it up as docs/guides/install-trainers.md says"
        yield f"the trainer `{model.kind}`: {run.clone}, {hint}"
    for dataset in run.datasets if model.version.controls[0] else ():
        if not dataset.controls.is_dir():
            yield f"control images of {dataset.settings.path}: put them into {dataset.controls}"


def _faults(text: str, predictions: list[str]) -> Iterator[str]:
    """Yield the fault that prevents a plan of the configuration, if there is one.

    The check does not read the content of weights. Lines about the network's prediction type are
    added to `predictions`.
    """
    try:
        config = resolved(parse(yaml.safe_load(text)))
        model = next(iter(config.models.values()))
        for dataset in config.datasets.values():
            cache_recipe.make("latents", dataset, model, lambda _: "")
        cache_recipe.make("text", None, model, lambda _: "")
        for run in config.runs:
            if (trainer := backends.of_run(config, run)) is not None:
                predictions += filter(None, [trainer.check_network(config, run)])
    except UserError as error:
        yield str(error)
