"""sd-scripts' installation."""

from __future__ import annotations

from latentmake.config import ExternalProgram
from latentmake.index.memo import Memo
from latentmake.training.external.installation import Installation, Program

__all__ = ["find"]


def find(script: str, settings: ExternalProgram, memory: Memo | None = None) -> Installation:
    """Find a training script, named without its ending; raises TrainingError."""
    name = f"{script}.py"
    program = Program("sd-scripts", "sd_scripts", "", name, f"an sd-scripts that has {name}")
    return Installation.locate(program, settings.path, settings.venv, memory)
