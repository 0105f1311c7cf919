"""Check while planning that musubi-tuner knows an architecture, from its sources.

What an old version lacks is a script, a flag, or a value of one.
"""

from __future__ import annotations

from difflib import get_close_matches

from latentmake.config.models import Model
from latentmake.errors import TrainingError
from latentmake.models.files import script_of
from latentmake.training.external.installation import Installation
from latentmake.training.external.musubi.caching_command import caching_arguments


def refuse_unknown(installation: Installation, model: Model, kind: str) -> None:
    """Refuse a musubi-tuner whose script of `latents` or `text` does not know a model.

    Raises:
        TrainingError: the script is missing, or does not know a flag, or the model's `task`.
    """
    name = script_of(model, kind).name
    installation.script(name)
    arguments = caching_arguments(
        model, kind, dataset_config="toml", place=lambda file, _: file.key, num_workers=1
    )
    missing = installation.missing_flags(arguments, name)
    further = model.further_arguments(kind)
    if wrong := [flag for flag in missing if any(each.startswith(flag) for each in further)]:
        known = installation.sources_of(name).flags or ()
        near = get_close_matches(wrong[0], known, 1, 0.8)
        raise TrainingError(
            f"{name} of {installation.folder} does not know {wrong[0]}",
            where=f"{kind}_arguments",
            hint=f"did you mean {near[0]}?" if near else "leave it out, or update musubi-tuner",
        )
    values = [x for x in model.version.caching(kind) if x[:1] != "-"]
    sources = installation.sources_of(name)
    missing += [x for x in values if not (sources.mentions(f'"{x}"') or sources.mentions(f"'{x}'"))]
    if missing:
        title = " ".join(filter(None, (model.title, model.task)))
        raise TrainingError(
            f"this musubi-tuner is too old for {title}: its {name} does not know {missing[0]}",
            where=installation.folder,
            hint="update it, or set `musubi_tuner.path` to one that knows it",
        )
