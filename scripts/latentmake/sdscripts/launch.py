"""Starts a training by sd-scripts, unless its result is already there: what the build calls.

It runs in its own environment and folder, on a folder of links to images and caches. That it ended
without an error is not taken for success: only a new and whole LoRA or network is.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from latentmake.errors import TrainingError
from latentmake.sdscripts.command import (
    accelerate_arguments,
    encoder_places,
    training_arguments,
)
from latentmake.sdscripts.deploy import deploy
from latentmake.sdscripts.installation import find
from latentmake.sdscripts.network import checkpoint_digest, refuse_unreadable
from latentmake.sdscripts.order import SdScriptsOrder
from latentmake.trainers import child
from latentmake.trainers.installation import Installation
from latentmake.trainers.launched import Layout, Receipt, Record, read_record, wanted
from latentmake.trainers.launching import accept, digest_with_receipt, failure, say, weights_fault
from latentmake.trainers.order import Wanted, read_order
from latentmake.trainers.states import set_aside, tidy

__all__ = ["train"]

_RESULTS = {"fine_tune": "network", "sdxl_train": "network"}


def train(
    order_path: Path, *, log: Path, receipt: Path, processes: int = 1, threads: int = 2
) -> None:
    """Bring the result of an order up to date, and write the receipt.

    Args:
        order_path: the order, a JSON file.
        log: gets all output of this call.
        receipt: a JSON file that says where the result lies; written last.
        processes: how many devices train together.
        threads: CPU threads of the trainer.

    Raises:
        UserError: the order cannot be carried out; the line says why.
    """
    order = read_order(order_path, SdScriptsOrder)
    layout = Layout(order.run, order.output)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.open("wb").close()  # emptied, not replaced: whoever holds it open goes on writing to it
    refuse_unreadable(order)
    program = find(order)
    weights = digest_with_receipt(lambda each: checkpoint_digest(order, each))
    order = order.model_copy(update={"weights": weights})
    want = wanted(order)
    record = read_record(layout.record)
    if record is not None and record.wanted == want and not weights_fault(layout.lora):
        say(f"{order.run}: already trained on exactly this: {layout.lora}", log)
    else:
        record = _train(order, program, layout, want, log, processes, threads)
    Receipt(run=order.run, **dict(record)).write(receipt)


def _train(
    order: SdScriptsOrder,
    program: Installation,
    layout: Layout,
    want: Wanted,
    log: Path,
    processes: int,
    threads: int,
) -> Record:
    folder = layout.output / "sdscripts"
    changes = deploy(order, folder)
    say(
        f"{order.run}: {folder}: {changes.linked} files linked, {changes.copied} written, "
        f"{changes.unchanged} unchanged, {changes.removed} removed",
        log,
    )
    if program.note:
        say(f"{order.run}: warning: {program.note}", log)
    if not program.sources.mentions('"image_size"'):
        say(
            f"{order.run}: warning: {program.folder} may be too old to read sizes from metadata, "
            "and to find images by them",
            log,
        )
    command = _command(order, program, layout, processes, log)
    set_aside(layout, order.run)
    started = time.monotonic()
    status, output = child.run(
        command,
        environment={**program.environment(), "OMP_NUM_THREADS": str(threads)},
        log=log,
        cwd=program.folder,
    )
    seconds = time.monotonic() - started
    if not output.endswith("\n"):
        say("", log)  # below a progress bar
    if status != 0:
        hint = "try gradient_checkpointing, a smaller train_batch_size or a smaller resolution"
        raise failure(order.run, "sd-scripts", output, status, log, memory=hint)
    result = _RESULTS.get(order.script, "LoRA")
    return accept(order.run, result, layout, want, output, log, seconds, lambda: tidy(layout))


def _command(
    order: SdScriptsOrder, program: Installation, layout: Layout, processes: int, log: Path
) -> list[str]:
    """Return the whole command; all its paths are absolute."""
    arguments = training_arguments(
        order,
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
    )
    if missing := program.missing_flags(arguments):
        raise TrainingError(
            f"run {order.run}: this sd-scripts does not know {' '.join(missing)}",
            where=program.folder,
            mend="update it, or leave that out",
        )
    options = accelerate_arguments(order, processes=processes)
    if order.trainer.accelerate_config is not None:
        config = Path(order.trainer.accelerate_config)
        if not config.is_file():
            raise TrainingError(
                "this configuration of accelerate does not exist",
                where=config,
                mend="correct the trainer's `accelerate_config`",
            )
        options = accelerate_arguments(order, config=_absolute(config))
    launcher = program.launcher(options)
    if launcher is None:
        launcher = [str(program.python)]
        say(f"{order.run}: warning: {program.python} has no accelerate: run without it", log)
    return [*launcher, str(program.script(program.program.script)), *arguments]


def _absolute(path: Path | str) -> str:
    return os.path.abspath(path)  # noqa: PTH100 -- links stay
