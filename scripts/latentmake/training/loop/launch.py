"""Launch of a training, unless its result is already there.

No torch here before a training really starts.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from itertools import islice
from pathlib import Path

from latentmake.errors import TrainingError
from latentmake.files import atomic
from latentmake.plan.manifest import rows_of
from latentmake.training.child import environment, run_child
from latentmake.training.loop.checkpoint import as_begun
from latentmake.training.loop.checks import check_accelerate
from latentmake.training.loop.node import srun_command
from latentmake.training.loop.order import Prompt, TrainingOrder
from latentmake.training.loop.result import Receipt, RunFiles, wanted
from latentmake.training.loop.sample_images import picture_reasons
from latentmake.training.order import BASIS, caption_in, read_order


def train(
    kind: type[TrainingOrder],
    order_path: Path,
    *,
    log: Path,
    receipt: Path,
    processes: int = 1,
    threads: int = 2,
) -> None:
    """Bring the trained weights of an order up to date, and write the receipt; see `Backend`."""
    order = read_order(order_path, kind)
    files = RunFiles(order)
    want = wanted(order)
    # What could not be known when the order was written.
    known = order.model_copy(
        update={
            "resumed": want.resumed,
            "prompts": [*order.prompts, *_captions(order)],
            "captions": 0,
        }
    )
    known = as_begun(known, want)
    if known != order:
        order, order_path = known, _write(known, files)
        want = wanted(order)
    is_first, online = not files.record.is_file(), bool(order.vae.hub) or order.from_hub
    record = files.trained(want)
    run = partial(
        run_child,
        run=order.run,
        folder=files.output,
        environment=environment(threads),
        log=log,
    )
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")  # in place: the caller has it open
    if record is not None:
        said = f"{order.run}: already trained on exactly this: {files.weights}"
        _say(said)
        log.write_text(f"{said}\n", encoding="utf-8")
    else:
        launcher = _launcher(order, processes, threads)
        command = [*launcher, "-m", order.trains, str(order_path)]
        own = environment(max(1, threads // processes))  # of each process, by an accelerate_config
        run(command, environment=own, online=online, gpus=processes)
        if (known := as_begun(order, want)) != order:  # in the precision that it chose
            order, order_path = known, _write(known, files)
            want = wanted(order)
        record = files.trained(want)
        if record is None:
            raise TrainingError(
                "the trainer ended without an error, but its weights are not there",
                where=files.weights,
                hint=f"see {log}, and run the same command again",
            )
    if files.missing() or picture_reasons(order, want):
        command = [sys.executable, "-m", order.trains, str(order_path)]
        run(command, online=online)
    pictures = f", sample pictures in {files.grid}" if files.grid.is_file() else ""
    _say(f"{order.run}: weights in {files.weights}{pictures}")
    if is_first:
        _say(
            "next: edit a caption and run the same command again; Latentmake encodes only that "
            "caption, and trains again"
        )
    order.basis(want).write(files.output / BASIS)
    Receipt(
        run=order.run,
        weights=str(files.weights),
        wanted=want,
        steps=record.steps,
        loss_start=record.loss_start,
        loss_end=record.loss_end,
        seconds=record.seconds,
        samples=str(files.grid) if files.grid.is_file() else None,
    ).write(receipt)


def _write(order: TrainingOrder, files: RunFiles) -> Path:
    """Write an order into its run's folder; return its path."""
    path = files.output / "order.json"
    atomic.write(path, order.model_dump_json(indent=2).encode())
    return path


def _captions(order: TrainingOrder) -> list[Prompt]:
    """Return the first items of the manifest that are trained on, as prompts of sample pictures."""
    rows = (row for row in rows_of(Path(order.manifest)) if not row.validation)
    return [
        Prompt(prompt=caption_in(row.first_text) or row.stem, text=row.first_text)
        for row in islice(rows, order.captions)
    ]


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _launcher(order: TrainingOrder, processes: int, threads: int) -> list[str]:
    """Return the command before what is launched: accelerate here, or on all nodes of a job."""
    precision = order.trainer.mixed_precision
    config, nodes = order.trainer.accelerate_config, srun_command(os.environ, processes)
    if processes > 1 and not nodes and config is None:
        import torch

        if not torch.cuda.is_available():
            _say(f"{order.run}: one process instead of {processes}, for there is no GPU")
            processes = 1
    if config is not None:
        check_accelerate(Path(config), order.kind)
        options = ["--config_file", config]
    else:
        options = [
            *("--dynamo_backend", "inductor" if order.trainer.torch_compile else "no"),
            *("--mixed_precision", "no" if precision == "auto" else precision),  # it chooses itself
            *("--num_cpu_threads_per_process", str(max(1, threads // processes))),
        ]
    if nodes:
        return [*nodes, "--multi_gpu", *options]  # each node adds the number of its processes
    accelerate = [sys.executable, "-m", "latentmake.training.loop.quiet_launch"]
    if config is not None:
        return [*accelerate, *options]
    # One process finds its device itself: no torch is imported here to look for it.
    several = ["--multi_gpu"] if processes > 1 else []
    devices = ["--num_processes", str(processes), "--num_machines", "1", *several]
    return [*accelerate, *devices, *options]
