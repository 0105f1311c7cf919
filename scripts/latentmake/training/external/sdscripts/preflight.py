"""What a training by sd-scripts needs besides its caches: networks, sd-scripts, settings that fit.

Checked while planning, before anything is encoded, and again before the training. Nothing here
imports torch or numpy, or reads tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from latentmake.errors import ModelError, TrainingError
from latentmake.index.remembered import Memory
from latentmake.training import checks
from latentmake.training.checks import Finding
from latentmake.training.external.arguments import depends_on_length, located
from latentmake.training.external.installation import Installation
from latentmake.training.external.result import Layout
from latentmake.training.external.resume import Resume
from latentmake.training.external.sdscripts.checkpoint import refuse_unreadable
from latentmake.training.external.sdscripts.command import (
    encoder_places,
    epochs_of,
    training_arguments,
)
from latentmake.training.external.sdscripts.installation import find
from latentmake.training.external.sdscripts.order import SdScriptsOrder

__all__ = ["command_arguments", "is_usable", "preflight"]


def preflight(order: SdScriptsOrder, memory: Memory | None = None) -> Iterator[Finding]:
    """Check all that a training needs besides its data, a finding each.

    Args:
        order: the run.
        memory: keeps what is found out about the trainer; None asks anew.
    """
    try:
        refuse_unreadable(order)
        yield Finding("model: checkpoint", "ok", str(order.model.checkpoint))
    except ModelError as error:
        yield Finding("model: checkpoint", "failed", str(error))
    try:
        program = find(order, memory)
        note = program.note or str(program.script(program.program.script))
        yield Finding("sd-scripts", "warning" if program.note else "ok", note)
        yield checks.environment(program, _optional(order, program))
    except TrainingError as error:
        yield Finding("sd-scripts", "failed", str(error))
        return
    if not program.sources.mentions('"image_size"'):
        note = f"{program.folder} may be too old to read sizes from metadata: update it"
        yield Finding("version", "warning", note)
    resume = Resume(Path("state")) if order.trainer.save_every_n_epochs else None
    yield checks.flags(program, command_arguments(order, resume))
    counts = order.script.endswith("_network")  # notes in its states how far it came
    if resume and not counts and not is_usable(order, resume):
        note = (
            "the number of steps, or a learning rate that depends on it, cannot be kept: a killed "
            "training begins anew; set `max_train_epochs`, or `lr_scheduler: constant`"
        )
        yield Finding("resume", "warning", note)
    yield from checks.paths(order.trainer.arguments, program.folder)
    yield from checks.accelerate_config(order.trainer.accelerate_config)


def command_arguments(order: SdScriptsOrder, resume: Resume | None = None) -> list[str]:
    """Return the arguments of a training on this machine; all its paths are absolute.

    Args:
        order: the run.
        resume: where it is resumed; see `is_usable`.
    """
    layout = Layout(order.run, order.output)
    state, initial_step = None, None
    if resume is not None and resume.state is not None:
        state = _absolute(resume.state)
        if resume.counted:
            initial_step = resume.done * resume.steps
        else:  # it counts from one again
            left = (epochs_of(order) or 0) - resume.done
            trainer = order.trainer.model_copy(update={"max_train_epochs": left})
            order = order.model_copy(update={"trainer": trainer})
    return training_arguments(
        located(order),
        dataset_config=_absolute(layout.output / "sdscripts" / f"{order.run}.toml"),
        checkpoint=_absolute(order.model.checkpoint or ""),
        encoders={
            flag: _absolute(path)
            for flag, path in encoder_places(order).items()
            if Path(path).is_file()
        },
        output_dir=_absolute(layout.work),
        output_name=order.run,
        logging_dir=_absolute(layout.logs) if order.trainer.logging else None,
        resume=state,
        initial_step=initial_step,
    )


def is_usable(order: SdScriptsOrder, resume: Resume) -> bool:
    """Tell whether a training can be resumed from a state, and then takes just what is left.

    Scripts that train a LoRA note in a state how far it came, and count epochs on from the step
    that they are told; but the last epoch is then trained whole, whatever the number of steps.
    Those that train a whole network count from one again, and cannot end at once.
    """
    trainer, epochs = order.trainer, epochs_of(order)
    if resume.counted:
        steps = trainer.max_train_steps or (epochs or 0) * resume.steps
        return 0 < resume.steps * resume.done < steps and steps % resume.steps == 0
    endless = not depends_on_length(trainer.arguments, trainer.lr_scheduler)
    return epochs is not None and resume.done < epochs and endless


def _absolute(path: Path | str) -> str:
    return os.path.abspath(path)  # noqa: PTH100 -- links stay


def _optional(order: SdScriptsOrder, program: Installation) -> set[str]:
    """Return the packages that these settings need besides those its script imports."""
    trainer = order.trainer
    needs = {"xformers"} if trainer.attention == "xformers" else set()
    needs |= {"deepspeed"} if trainer.deepspeed else set()
    eight_bit = trainer.optimizer_type.lower().endswith("8bit")
    if eight_bit and program.sources.mentions("bitsandbytes"):
        needs.add("bitsandbytes")
    return needs
