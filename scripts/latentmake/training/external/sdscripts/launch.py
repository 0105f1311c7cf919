"""Starts a training by sd-scripts, unless its result is already there: what the build calls.

It runs in its own environment and folder, on a folder of links to images and caches. That it ended
without an error is not taken for success: only a new and whole LoRA or network is.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from latentmake.training import checks, process
from latentmake.training.external.installation import Installation
from latentmake.training.external.launch import (
    accept,
    digest_with_receipt,
    failure,
    say,
    weights_fault,
)
from latentmake.training.external.result import Layout, Receipt, Record, read_record, wanted
from latentmake.training.external.resume import Resume, belongs, prepare, tidy
from latentmake.training.external.sdscripts.checkpoint import checkpoint_digest
from latentmake.training.external.sdscripts.command import accelerate_arguments, epochs_of
from latentmake.training.external.sdscripts.deploy import deploy
from latentmake.training.external.sdscripts.installation import find
from latentmake.training.external.sdscripts.order import SdScriptsOrder
from latentmake.training.external.sdscripts.preflight import command_arguments, is_usable, preflight
from latentmake.training.order import Wanted, read_order

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
    weights = digest_with_receipt(lambda each: checkpoint_digest(order, each))
    order = order.model_copy(update={"weights": weights})
    want = wanted(order)
    record = read_record(layout.record)
    if record is not None and record.wanted == want and not weights_fault(layout.lora):
        say(f"{order.run}: already trained on exactly this: {layout.lora}", log)
    else:
        record = _train(order, layout, want, log, processes, threads)
    Receipt(run=order.run, **dict(record)).write(receipt)


def _train(
    order: SdScriptsOrder, layout: Layout, want: Wanted, log: Path, processes: int, threads: int
) -> Record:
    checks.passed(preflight(order), partial(say, log=log))
    result = _RESULTS.get(order.script, "LoRA")
    if belongs(layout, want) and not weights_fault(layout.trained):
        say(f"{order.run}: all epochs were done before", log)
        return accept(order.run, result, layout, want, "", log, 0.0, lambda: tidy(layout))
    program = find(order)
    folder = layout.output / "sdscripts"
    changes = deploy(order, folder)
    say(
        f"{order.run}: {folder}: {changes.linked} files linked, {changes.copied} written, "
        f"{changes.unchanged} unchanged, {changes.removed} removed",
        log,
    )
    resume = prepare(
        layout, order.run, want, epochs=epochs_of(order), usable=partial(is_usable, order)
    )
    if resume.state is not None:
        say(f"{order.run}: resumed from {resume.state}, {resume.done} epochs are done", log)
    command = _command(order, program, resume, processes, log)
    started = time.monotonic()
    status, output = process.run(
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
        further = f"where the state {resume.state} is to blame, delete it" if resume.state else ""
        raise failure(order.run, "sd-scripts", output, status, log, memory=hint, further=further)
    return accept(order.run, result, layout, want, output, log, seconds, lambda: tidy(layout))


def _command(
    order: SdScriptsOrder, program: Installation, resume: Resume, processes: int, log: Path
) -> list[str]:
    """Return the whole command; all its paths are absolute."""
    arguments = command_arguments(order, resume)
    options = accelerate_arguments(order, processes=processes)
    if order.trainer.accelerate_config is not None:
        config = str(Path(order.trainer.accelerate_config).absolute())
        options = accelerate_arguments(order, config=config)
    launcher = program.launcher(options)
    if launcher is None:
        launcher = [str(program.python)]
        say(f"{order.run}: warning: {program.python} has no accelerate: run without it", log)
    return [*launcher, str(program.script(program.program.script)), *arguments]
