"""Starts a training by musubi-tuner, unless its result is already there: what the build calls.

It runs in its own environment and folder. That it ended without an error is not taken for success:
only a new and whole LoRA is.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from latentmake.files import atomic
from latentmake.training import checks, process
from latentmake.training.external.arguments import depends_on_length
from latentmake.training.external.launch import (
    accept,
    digest_with_receipt,
    failure,
    say,
    weights_fault,
)
from latentmake.training.external.musubi.check import check, training_toml
from latentmake.training.external.musubi.command import TRAINING_SCRIPT, accelerate_arguments
from latentmake.training.external.musubi.installation import Installation, pick_attention
from latentmake.training.external.musubi.networks import networks_digest
from latentmake.training.external.musubi.order import MusubiOrder
from latentmake.training.external.musubi.preflight import command_arguments
from latentmake.training.external.result import Layout, Receipt, Record, read_record, wanted
from latentmake.training.external.resume import Resume, belongs, prepare, tidy
from latentmake.training.order import Wanted, read_order

__all__ = ["train"]


def train(
    order_path: Path, *, log: Path, receipt: Path, processes: int = 1, threads: int = 2
) -> None:
    """Bring the LoRA of an order up to date, and write the receipt.

    Args:
        order_path: the order, a JSON file.
        log: gets all output of this call.
        receipt: a JSON file that says where the LoRA lies; written last.
        processes: how many devices train together.
        threads: CPU threads of the trainer.

    Raises:
        TrainingError: the order cannot be carried out; the line says why.
        StorageError: the disk is full or cannot be written.
    """
    order = read_order(order_path, MusubiOrder)
    layout = Layout(order.run, order.output)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.open("wb").close()  # emptied, not replaced: whoever holds it open goes on writing to it
    checked = not order.weights
    if checked:  # first, since its networks take a while to read
        checks.passed(check(order), partial(say, log=log))
        weights = digest_with_receipt(lambda each: networks_digest(order.model, each))
        order = order.model_copy(update={"weights": weights})
    want = wanted(order)
    record = read_record(layout.record)
    if record is not None and record.wanted == want and not weights_fault(layout.lora):
        say(f"{order.run}: already trained on exactly this: {layout.lora}", log)
    else:
        if not checked:
            checks.passed(check(order), partial(say, log=log))
        record = _train(order, layout, want, log, processes, threads)
    Receipt(run=order.run, **dict(record)).write(receipt)


def _train(
    order: MusubiOrder, layout: Layout, want: Wanted, log: Path, processes: int, threads: int
) -> Record:
    assert order.musubi_tuner is not None  # or the checklist had failed
    tuner = Installation.find(order.musubi_tuner)
    if belongs(layout, want) and not weights_fault(layout.trained):
        say(f"{order.run}: all epochs were done before", log)
        return accept(order.run, "LoRA", layout, want, "", log, 0.0, lambda: tidy(layout))
    atomic.write(layout.dataset_config, training_toml(order).encode())
    needs_count = depends_on_length(order.trainer.arguments)
    resume = prepare(
        layout,
        order.run,
        want,
        epochs=order.trainer.max_train_epochs,
        usable=lambda found: found.counted or not needs_count,
    )
    command = _command(order, tuner, resume, processes, log)
    started = time.monotonic()
    status, output = process.run(
        command,
        environment={**tuner.environment(), "OMP_NUM_THREADS": str(threads)},
        log=log,
        cwd=tuner.folder,
    )
    seconds = time.monotonic() - started
    if not output.endswith("\n"):
        say("", log)  # below a progress bar
    if status != 0:
        raise failure(
            order.run,
            "musubi-tuner",
            output,
            status,
            log,
            memory="try fp8_base, a smaller resolution, or `arguments: [--blocks_to_swap, 20]`",
            further=""
            if resume.state is None
            else f"where the state {resume.state} is to blame, delete it",
        )
    return accept(order.run, "LoRA", layout, want, output, log, seconds, lambda: tidy(layout))


def _command(
    order: MusubiOrder, tuner: Installation, resume: Resume, processes: int, log: Path
) -> list[str]:
    """Return the whole command, and say what is unusual about it."""
    trainer = order.trainer
    attention = pick_attention(trainer.attention, tuner)
    if resume.state is not None:
        say(f"{order.run}: resumed from {resume.state}", log)
        if not resume.counted:
            left = max(0, trainer.max_train_epochs - resume.done)
            say(f"{order.run}: {left} of {trainer.max_train_epochs} epochs are left", log)
            # Checked already: a copy only, with fewer epochs. With none, it writes its LoRA.
            shorter = trainer.model_copy(update={"max_train_epochs": left})
            order = order.model_copy(update={"trainer": shorter})
    arguments = command_arguments(order, attention=attention, resume=resume.state)
    script = [str(tuner.script(TRAINING_SCRIPT)), *arguments]
    options = ["--num_processes", str(processes), "--num_machines", "1", "--dynamo_backend", "no"]
    options += ["--multi_gpu"] if processes > 1 else []
    options += accelerate_arguments(order)
    if trainer.accelerate_config is not None:
        config = str(Path(trainer.accelerate_config).absolute())
        options = accelerate_arguments(order, config=config)
    launcher = tuner.launcher(options)
    if launcher is None:
        launcher = [str(tuner.python)]
        say(f"{order.run}: warning: {tuner.python} has no accelerate: run without it", log)
    return [*launcher, *script]
