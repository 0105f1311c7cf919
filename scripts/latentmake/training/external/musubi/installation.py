"""musubi-tuner's installation: its scripts, and the attention that it trains with."""

from __future__ import annotations

from collections.abc import Collection

from latentmake.config.architectures import Scripts
from latentmake.config.machines import ExternalProgram
from latentmake.config.models import Model
from latentmake.errors import TrainingError
from latentmake.index.memo import Memo
from latentmake.models.files import script_of
from latentmake.training.external.installation import Installation, Program
from latentmake.training.external.musubi.command import caching_arguments

MODULES = {
    "flash_attn": "flash_attn",
    "flash3": "flash_attn_interface",
    "xformers": "xformers",
}
"""Attention -> the package that has it, if torch does not."""
PREFERRED = ("flash_attn", "xformers")  # SageAttention has no backward pass
_UNUSED = ("networks",)  # LoRAs: imported by helpers that load weights, and taken by no such script


def find(settings: ExternalProgram, scripts: Scripts, memory: Memo | None = None) -> Installation:
    """Find the scripts of an architecture and the Python of a musubi-tuner folder.

    Raises:
        TrainingError: the folder, the training script, or the Python of its environment is missing.
    """
    program = Program(
        name="musubi-tuner",
        section="musubi_tuner",
        package="src/musubi_tuner",
        script=scripts.training.name,
        knows=f"a musubi-tuner that knows {scripts.title}",
    )
    return Installation.locate(program, settings.path, settings.venv, memory)


def program_digest(
    settings: ExternalProgram, model: Model, kind: str, memory: Memo | None = None
) -> str:
    """Return the digest of the sources that cache `latents` or `text`: its own, no packages.

    Raises:
        TrainingError: the folder, its scripts, or the Python of its environment are missing, or a
            script is too old for the model.
    """
    assert model.spec.scripts is not None
    installation = find(settings, model.spec.scripts, memory)
    _refuse_unknown(installation, model, kind)
    # Caches of Wan's scripts are as old as their recipe, in which all that is imported counts.
    without = () if model.spec.encodes else _UNUSED
    sources = installation.sources_of(script_of(model, kind).name, without)
    return sources.digest


def _refuse_unknown(installation: Installation, model: Model, kind: str) -> None:
    """Refuse a musubi-tuner whose script of `latents` or `text` does not know a model.

    Raises:
        TrainingError: the script is missing, or does not know a flag, or the model's `task`.
    """
    name = script_of(model, kind).name
    installation.script(name)
    arguments = caching_arguments(
        model, kind, dataset_config="toml", place=lambda file, _: file.key, num_workers=1
    )
    missing, further = installation.missing_flags(arguments, name), model.further_arguments(kind)
    if wrong := [flag for flag in missing if any(each.startswith(flag) for each in further)]:
        near = installation.near(wrong[:1], name)
        raise TrainingError(
            f"{name} of {installation.folder} does not know {wrong[0]}",
            where=f"{kind}_arguments",
            hint=f"did you mean {near}?" if near else "leave it out, or update musubi-tuner",
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


def pick_attention(
    attention: str, installation: Installation, *, among: Collection[str] = PREFERRED
) -> str:
    """Return the flag of the attention to train with, without its dashes.

    Args:
        attention: the trainer's setting. `auto` is the fastest that its environment has and its
            version takes: flash-attn, xformers, else torch's own (sdpa).
        installation: the trainer's.
        among: what the architecture's network takes.
    """
    if attention != "auto":
        return attention
    known = installation.sources.flags
    names = [x for x in PREFERRED if x in among and (known is None or f"--{x}" in known)]
    lacks = installation.lacking(MODULES[name] for name in names) if names else ()
    return next((name for name in names if MODULES[name] not in lacks), "sdpa")
