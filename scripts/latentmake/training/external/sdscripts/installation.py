"""sd-scripts' installation."""

from __future__ import annotations

from pathlib import Path

from latentmake import digest
from latentmake.config.machines import ExternalProgram
from latentmake.config.models import Model
from latentmake.index.memo import Memo
from latentmake.models.recipe import encoder_of
from latentmake.training.external.installation import Installation, Program


def find(script: str, settings: ExternalProgram, memory: Memo | None = None) -> Installation:
    """Find a training script, named without its ending; raises TrainingError."""
    name = f"{script}.py"
    program = Program("sd-scripts", "sd_scripts", "", name, f"an sd-scripts that has {name}")
    return Installation.locate(program, settings.path, settings.venv, memory)


def program_digest(
    settings: ExternalProgram, model: Model, kind: str, memory: Memo | None = None
) -> str:
    """Return the digest of the sources that encode `latents` or `text`: its own, no packages.

    Raises:
        TrainingError: the folder, its modules, or the Python of its environment are missing.
    """
    strategies, encoder = model.spec.strategies, encoder_of(model, kind)
    assert strategies is not None
    installation = find(strategies.scripts[0], settings, memory)
    modules = [f"{module.replace('.', '/')}.py" for module in encoder.modules]
    for module in modules:
        installation.script(module)
    folders = [installation.folder / each for each in encoder.folders]
    files = sorted(file for folder in folders for file in folder.rglob("*") if file.is_file())
    sources = [installation.sources_of(module) for module in modules]
    beside = [_digest(file, memory) for file in files]
    return digest.of_value([*(each.digest for each in sources), *beside])


def _digest(file: Path, memory: Memo | None) -> str:
    return digest.of_file(file) if memory is None else memory.digest_of_file(file)
