"""The text of `train_{run}.sh` and `train_{run}.bat`: caching what is missing, then training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from latentmake.musubi.command import LATENTS_SCRIPT, TEXT_SCRIPT, TRAINING_SCRIPT
from latentmake.trainers import scripts

__all__ = ["Commands", "batch_script", "shell_script"]

_NO_STEP = "No step for {what}: musubi-tuner's script wants one file of weights, not a folder."


@dataclass(frozen=True)
class Commands:
    """What a script does, in the paths of the system that runs it.

    Attributes:
        run: the run's name.
        tuner: folder of musubi-tuner.
        venvs: virtual environments, the first that is there is activated; relative to `tuner`.
        latents: arguments of the latents' script; None where it cannot read the weights.
        text: the same for the captions' script.
        accelerate: arguments of `accelerate launch`, before the script.
        training: arguments of the training's script.
    """

    run: str
    tuner: str
    venvs: Sequence[str]
    latents: Sequence[str] | None
    text: Sequence[str] | None
    accelerate: Sequence[str]
    training: Sequence[str]

    @property
    def whole(self) -> scripts.Commands:
        """All of it, musubi-tuner's scripts included."""
        return scripts.Commands(
            run=self.run,
            does=f"Caches what is missing of run {self.run} and trains it with musubi-tuner.",
            program="musubi-tuner",
            folder=self.tuner,
            package="src/musubi_tuner",
            venvs=self.venvs,
            steps=[
                _step("caching the latents", LATENTS_SCRIPT, self.latents),
                _step("caching the captions", TEXT_SCRIPT, self.text),
            ],
            accelerate=self.accelerate,
            script=TRAINING_SCRIPT,
            training=self.training,
        )


def _step(what: str, script: str, arguments: Sequence[str] | None) -> scripts.Step:
    return scripts.Step(what, script, arguments, _NO_STEP.format(what=what))


def shell_script(commands: Commands) -> str:
    """Return the script for bash."""
    return scripts.shell_script(commands.whole)


def batch_script(commands: Commands) -> str:
    """Return the script for cmd.exe, with CRLF at the end of each line.

    Raises:
        ConfigError: an argument has signs that no batch file can pass on.
    """
    return scripts.batch_script(commands.whole)
