"""sd-scripts where it is installed."""

from __future__ import annotations

from latentmake.index.remembered import Memory
from latentmake.training.external.installation import Installation, Program
from latentmake.training.external.sdscripts.order import SdScriptsOrder

__all__ = ["find"]


def find(order: SdScriptsOrder, memory: Memory | None = None) -> Installation:
    """Find the script that trains a run, and the Python that runs it.

    Args:
        order: the run.
        memory: keeps what is found out about it.

    Raises:
        TrainingError: the folder, its script, or the Python of its environment are missing.
    """
    script = f"{order.script}.py"
    program = Program(
        name="sd-scripts",
        section="sd_scripts",
        package="",
        script=script,
        knows=f"an sd-scripts that has {script}",
    )
    return Installation.locate(program, order.sd_scripts.path, order.sd_scripts.venv, memory)
