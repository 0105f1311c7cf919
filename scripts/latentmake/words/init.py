"""`latentmake init`: a first configuration, from folders of pictures and a model on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Literal

import typer
import yaml

from latentmake import backends
from latentmake.config.fields import literal
from latentmake.config.root import parse
from latentmake.errors import DatasetError, StorageError, UserError
from latentmake.files import atomic
from latentmake.models import recipe
from latentmake.models.files import resolved
from latentmake.words.dataset_folders import Found, found_in, left_out
from latentmake.words.found import FIRST, named_model
from latentmake.words.model_section import Section, section_of, trainer_of
from latentmake.words.new_config import (
    PROGRAMS,
    Run,
    config_text,
    controls_of,
    run_and_file,
    shown,
    size_of,
    unedited,
)
from latentmake.words.project import HOME, say

Kind = Literal["sd", "wan", "musubi", "sdscripts"]
_DOWNLOAD = (  # without files that no training reads
    'hf download stable-diffusion-v1-5/stable-diffusion-v1-5 --include "*.json" '
    '--include "*/merges.txt" --include "*/diffusion_pytorch_model.safetensors" '
    f'--include "text_encoder/model.safetensors" --local-dir {FIRST}'
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
    by_folder = {folder: found_in(folder) for folder in folders}
    datasets = _named([one for found in by_folder.values() for one in found])
    name, file = run_and_file(datasets, output)
    if file.exists() and not force and not unedited(_text_of(file)):
        hint = "name another file by --output, or replace this one by --force"
        raise StorageError("exists already", where=file, hint=hint)
    found, place = named_model(model)
    taken = [each for each in datasets if found.takes(each)]
    if not taken:
        what = f"holds {datasets[0].counted}, which {found.title} does not take"
        hint = "name another folder, or another --model"
        raise DatasetError(what, where=datasets[0].path, hint=hint)
    kind = trainer_of(found, trainer, musubi=_program("musubi", folders) is not None)
    is_here = place is literal  # and not in the hub's cache
    beside = found.root if is_here else Path("models") / found.architecture.name
    section = section_of(Section(found, kind, beside, place))
    run = Run(name, taken, section, *size_of(found, taken), _program(kind, folders), file)
    text = config_text(run)
    told = list[str]()
    missing = [*_missing(run), *(() if section.missing else _faults(text, told))]
    try:
        atomic.write(file, text.encode())
    except UnicodeEncodeError:
        what, hint = "has a name that is not UTF-8, which YAML cannot hold", "rename the folder"
        raise DatasetError(what, where=folders[0], hint=hint) from None
    for each in taken:
        say("found", f"{each.path}: {each.described}")
    if found.networks:
        say("found", f"{found.root}: {found.title}")
    for line in told:
        say("found", f"it predicts {line}")
    for line in section.choices:
        say("note", line)
    say("wrote", f"{file}: trains a LoRA by `kind: {kind}`, at {shown(run.size)} pixels")
    for each in datasets:
        if each not in taken:
            what = f"its {each.counted} are left out, since {found.title} does not take them"
            say("note", f"{each.path}: {what}")
    for line in (line for each in by_folder.items() for line in left_out(*each)):
        say("note", line)
    for line in missing:
        say("missing", line)
    if Path("Snakefile").is_file():
        say("next", f"snakemake -n {run.command}")
    else:
        say("next", f"latentmake build -n {name} -c {quote(str(file))}")
    say("next", f"latentmake check {name} -c {quote(str(file))}")
    if missing:
        raise typer.Exit(1)


def _text_of(file: Path) -> str:
    with suppress(OSError, ValueError):
        return file.read_text(encoding="utf-8")
    return ""


def _named(datasets: list[Found]) -> list[Found]:
    """Give datasets of the same name a number."""
    names = [each.name for each in datasets]
    ends = (f"_{at}" * (names.count(name) > 1) for at, name in enumerate(names, 1))
    return [each._replace(name=each.name + end) for each, end in zip(datasets, ends, strict=True)]


def _program(kind: str, folders: list[Path]) -> str | None:
    """Return the folder of another trainer, from the usual places; None where there is none."""
    if kind not in PROGRAMS:
        return None
    home, near = Path.home(), (Path(), Path(".."), *(each.parent for each in folders))
    places = (each / PROGRAMS[kind][1] for each in (*near, home, home / "kohya_ss"))
    return next((str(each) for each in places if each.is_dir()), None)


def _missing(run: Run) -> Iterator[str]:
    section, model = run.section, run.section.model
    for each in run.datasets:
        if each.captioned and each.bare:
            yield each.lacking
    if not model.networks:
        yield f"a model; name yours by --model, or run {_DOWNLOAD}"
        if _TINY.is_dir():
            yield f"to try it without a download: --model {_TINY}, which only shows how it works"
    elif section.missing:
        names = ", ".join(f"`{key}`" for key in dict.fromkeys(section.missing))
        page = f"docs/trainers/{section.kind}.md"
        where = f"put the files that {page} names into {section.folder}"
        yield f"{names} of the model: {where}, and run this again"
    if run.clone:
        hint = "then set it up as docs/guides/install-trainers.md says"
        yield f"the trainer `{section.kind}`: {run.clone}, {hint}"
    for each in run.datasets if model.version.controls[0] else ():
        if not Path(controls_of(each)).is_dir():
            yield f"control images of {each.path}: put them into {controls_of(each)}"


def _faults(text: str, told: list[str]) -> Iterator[str]:
    """Yield why the configuration could not be planned; files are looked at, not read.

    What the network predicts is added to `told`.
    """
    try:
        config = resolved(parse(yaml.safe_load(text)))
        model = next(iter(config.models.values()))
        for dataset in config.datasets.values():
            recipe.make("latents", dataset, model, lambda _: "")
        recipe.make("text", None, model, lambda _: "")
        for run in config.runs:
            if (trainer := backends.of_run(config, run)) is not None:
                told += filter(None, [trainer.check_network(config, run)])
    except UserError as error:
        yield str(error)
