"""Launch of a training, of clips or of an evaluation, unless the result is up to date.

This module does not import torch.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

from latentmake.base.errors import TrainingError
from latentmake.runs import history
from latentmake.runs.order import RunFiles, caption_in, lock_of, read_order, taken_back
from latentmake.runs.rows import rows_of
from latentmake.trainers import previous
from latentmake.trainers.loop.checkpoint import as_begun, resumable
from latentmake.trainers.loop.generation import EvaluationOrder, GenerationOrder, clip_reasons
from latentmake.trainers.loop.order import Order, Prompt, TrainingOrder
from latentmake.trainers.process import RUN, accelerate_arguments, run_child, say


def read(path: Path, kind: type[Order]) -> Order:
    """Read an order, and complete it by values that were unknown when it was planned.

    These are the prompts from captions, which are those of the first items in the manifest that are
    trained on, and the precision, if a training has chosen one before. The launcher and each
    process of a training complete the order in this way.

    Raises:
        StorageError: the order is missing or damaged.
        TrainingError: lock or manifest are missing or damaged.
        CacheError: a cache file is missing or damaged.
    """
    order = read_order(path, kind)
    data = lock_of(order.lock).data
    rows = (row for row in rows_of(Path(order.manifest)) if row.learned)
    texts = [(row.first_text, row.stem) for row in islice(rows, order.captions)]
    captions = [Prompt(prompt=caption_in(text) or stem, text=text) for text, stem in texts]
    complete = {"prompts": [*order.prompts, *captions], "captions": 0}
    return as_begun(order.model_copy(update=complete), data)


def train(
    kind: type[TrainingOrder],
    order_path: Path,
    *,
    log: Path,
    receipt: Path,
    processes: int = 1,
    threads: int = 2,
) -> None:
    """Bring the trained weights of an order up to date, and write the receipt.

    `kind` is the class of the order; see `Backend.train` for the others.
    """
    order = read(order_path, kind)
    files, want = RunFiles(order), order.wanted()
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")  # emptied in place, because the caller has it open
    if order.forced:
        states = (folder for folder, _ in resumable(order, want))
        previous.anew(files, want, order.planned, states)
    if files.trained(want) is not None:
        say(log, f"{order.run}: already trained on exactly this: {files.weights}")
    elif previous.take_back(files, want):
        say(log, taken_back(order.run))
    else:
        run_child(
            [*_launcher(order, processes), *RUN, str(order_path), "train"],
            run=order.run,
            folder=files.output,
            threads=max(1, threads // processes),
            log=log,
            online=order.from_hub,
            gpus=processes,
        )
        previous.settle(files)
        order = read(order_path, kind)  # now with the precision that the training chose
        want = order.wanted()
    record = files.trained(want)
    if record is None:
        raise TrainingError(
            "the trainer ended without an error, but its weights are not there",
            where=files.weights,
            hint=f"see {log}, and run the same command again",
        )
    grid = str(files.grid) if files.grid.is_file() else None
    history.finish(order, record, receipt, samples=grid)


def follow(path: Path, word: str, *, log: Path, threads: int) -> Path:
    """Bring clips or the results of an evaluation up to date; return their folder."""
    order = order_of(path, word)
    folder = Path(order.output)
    previous.reuse(folder)
    # If the clips are up to date, the caller only writes their page.
    if word == "evaluate" or order.forced or clip_reasons(order):
        run_child(
            [sys.executable, *RUN, str(path), word],
            run=order.run,
            folder=folder,
            threads=threads,
            log=log,
            online=order.online,
        )
    return folder


def order_of(path: Path, word: str) -> GenerationOrder:
    """Read the order of clips or of an evaluation; raises StorageError."""
    return read_order(path, GenerationOrder if word == "generate" else EvaluationOrder)


def _launcher(order: TrainingOrder, processes: int) -> list[str]:
    """Return the beginning of a training's command: Python, perhaps with accelerate's launcher.

    A single process needs no launcher, and finds its device itself.
    """
    config, compiles = order.trainer.accelerate_config, order.trainer.torch_compile
    if config is None and processes == 1 and not compiles:
        return [sys.executable]
    compiler = "inductor" if compiles else "no"
    # "no" here has no effect: the training passes its precision to its Accelerator itself.
    options = accelerate_arguments("no", processes=processes, config=config, compiler=compiler)
    return [sys.executable, "-m", "accelerate.commands.launch", *options]
