"""sd-scripts' installation."""

from __future__ import annotations

from latentmake.config import ExternalProgram
from latentmake.index.memo import Memo
from latentmake.training.external.installation import Installation, Program

__all__ = ["find"]


def find(script: str, settings: ExternalProgram, memory: Memo | None = None) -> Installation:
    """Find a training script, and the Python that runs it.

    Args:
        script: its name, without an ending.
        settings: where sd-scripts lies.
        memory: keeps what is found out about it; None asks anew.

    Raises:
        TrainingError: the folder, its script, or the Python of its environment are missing.
    """
    name = f"{script}.py"
    program = Program("sd-scripts", "sd_scripts", "", name, f"an sd-scripts that has {name}")
    return Installation.locate(program, settings.path, settings.venv, memory)
