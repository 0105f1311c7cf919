"""Training by a launched trainer: start or resume it, explain a failure, accept the result.

The trainer runs in its own environment and folder. An exit status of 0 does not mean success: the
training succeeded only if a new and complete result exists.

musubi-tuner and sd-scripts name a state `{name}-{epoch:06d}-state`, or `{name}-state` at the end.
The number, never the mtime, decides which state is the last.

After a resume, musubi-tuner and sd-scripts' scripts for complete networks count epochs from one
again. If they were called for 16 epochs, they would train 16 more and overwrite states and LoRAs of
the same numbers. So they are called for the remaining epochs only, and the earlier states and LoRAs
are moved first, into a folder named by the epochs done before. Other scripts, later versions and
forks record their progress in a state.
"""

from __future__ import annotations

import contextlib
import glob
import re
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from latentmake.base import atomic, digest
from latentmake.base.errors import TrainingError
from latentmake.base.regular import read_regular
from latentmake.encode import gpu
from latentmake.formats.integrity import fault_of_weights, is_complete
from latentmake.runs import history
from latentmake.runs.order import (
    Record,
    RunFiles,
    States,
    TrainedParts,
    digests_in,
    read_order,
    taken_back,
)
from latentmake.trainers import previous, process
from latentmake.trainers.launched.order import (
    ExternalOrder,
    Resume,
    absolute,
    prompt_lines,
)
from latentmake.trainers.weights_metadata import describe_copy

_BAR = re.compile(r"\bsteps:[^\r\n]*?\|\s*(\d+)/\d+ \[([^\r\n\]]*)\]")
_LOSS = re.compile(r"\b(?:avr_)?loss=([\d.e+-]+)")
_KEPT = 2  # states that are kept: the one to resume from, and a spare in case it is damaged


def prepare(order: ExternalOrder, want: TrainedParts) -> Resume:
    """Make the trainer's folder ready for a training, and find the state to resume from.

    States and LoRAs of an earlier start of this training move into a folder in `files.resumed`,
    named by the epochs that were done before that start. (`previous.begin` has already moved the
    files of other trainings.) If this is killed at any time, it can be repeated: the number of
    epochs is written last. `want` has the parts of the training.
    """
    files = RunFiles(order)
    files.work.mkdir(parents=True, exist_ok=True)
    _remove_partial(files)
    progress = States.read(files.progress)
    place = files.resumed / f"{progress.epochs if progress else 0:06d}"
    for path in _results(files):
        place.mkdir(parents=True, exist_ok=True)
        atomic.remove(place / path.name)
        path.replace(place / path.name)
    states = {state: _resume(state, order.epochs) for state in files.resumed.rglob("*-state")}
    latest = sorted(filter(None, states.values()), key=lambda option: option.done)[-_KEPT:]
    for state in states.keys() - {option.state for option in latest}:
        shutil.rmtree(state)
    resume = next(filter(order.can_resume, reversed(latest)), Resume())
    States(parts=want, epochs=resume.done).write(files.progress)
    return resume


def _remove_partial(files: RunFiles) -> None:
    """Remove LoRAs and states that the trainer has not written completely."""
    for path in _results(files):
        if path.is_dir() and not _is_complete(path):
            atomic.remove(path)
        elif path.is_file() and not is_complete(path):
            path.unlink()


def _results(files: RunFiles) -> list[Path]:
    name = re.compile(rf"{re.escape(files.run)}(-\d+|-step\d+)?(\.safetensors|-state)")
    return sorted(path for path in files.work.iterdir() if name.fullmatch(path.name))


def _number(path: Path) -> int | None:
    """Return the epoch in the name of a state or LoRA; None if the name has no number."""
    number = re.search(r"-(\d+)(-state|\.safetensors)$", path.name)
    return int(number[1]) if number else None


def _before(start: Path) -> int:
    """Return the epochs done before the start whose results lie in a folder of `files.resumed`.

    Return 0 for `files.resumed` itself: earlier releases put results there, which they had already
    numbered by the complete training.
    """
    return int(start.name) if start.name.isdigit() else 0


def _number_through(files: RunFiles, before: int) -> None:
    """Rename the epochs' LoRAs of a resumed training by the epochs of the complete training.

    `before` is the number of epochs that were done before the trainer's last start.
    """
    counted = any(map(_counts, files.resumed.rglob("*-state")))
    starts = [*sorted(files.resumed.glob("*"), reverse=True), files.resumed]
    # Highest numbers first, so that a new name is not that of a LoRA still to be renamed.
    for start, done in [(files.work, before), *((folder, _before(folder)) for folder in starts)]:
        for lora in sorted(start.glob(f"{glob.escape(files.run)}-*.safetensors"), reverse=True):
            if (number := _number(lora)) is not None:
                number += 0 if counted else done
                named = files.work / f"{files.run}-{number:06d}.safetensors"
                # A later start may have trained this epoch again: its LoRA stays.
                if not named.exists():
                    lora.rename(named)


def _is_complete(state: Path) -> bool:
    """Whether a state was written completely: accelerate writes the random states last."""
    names = {path.name for path in state.iterdir()}
    accelerates = any(name.startswith(("optimizer", "scheduler", "model")) for name in names)
    return bool(names) and (
        not accelerates or any(name.startswith("random_states") for name in names)
    )


def _resume(state: Path, epochs: int | None) -> Resume | None:
    """Return the progress of a state in `files.resumed`; None if unknown or not complete.

    `epochs` are those of the complete training, after which the trainer saves `{run}-state`; None
    if a number of steps ends it.
    """
    before, counted, done = _before(state.parent), _counts(state), _number(state)
    if done is None:
        done = epochs
    elif not counted:
        done += before
    if done is None or not _is_complete(state):
        return None
    taken = _values(state).get("current_step")  # optimizer steps since the start of that process
    steps = taken // (done - before) if isinstance(taken, int) and done > before else 0
    return Resume(state, done, counted, steps)


def _counts(state: Path) -> bool:
    """Whether a state records how far the training came; plain accelerate states do not."""
    if not any(state.glob("random_states*")) and not (state / "optimizer.bin").exists():
        return True
    return not {"epoch", "current_epoch", "global_step"}.isdisjoint(_values(state))


def _values(state: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for path in sorted(state.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            values |= from_json(read_regular(path))
    return values


def train(
    trainer: Any,
    order_path: Path,
    *,
    log: Path,
    receipt: Path,
    processes: int = 1,
    threads: int = 2,
) -> None:
    """Bring the result of an order up to date, and write the receipt; see `Backend.train`.

    `trainer` is the `Launched` that calls this; it is `Any` because its module imports this one.
    """
    order: ExternalOrder = read_order(order_path, trainer.order_type)
    files = RunFiles(order)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.open("wb").close()  # emptied, not replaced: processes that hold it open go on writing to it
    say = partial(process.say, log)
    # The checks come before the digest of the networks, which takes a while to compute.
    trainer.pass_checks(order, say)
    if not order.weights:
        order = order.with_weights(digest.of_file)
    want = order.wanted()
    if order.forced:
        previous.anew(files, want, order.planned)
    record = _trained(files, want)
    if record is not None:
        say(f"{order.run}: already trained on exactly this: {files.weights}")
    elif previous.take_back(files, want):
        say(taken_back(order.run))
        record = _trained(files, want)
    if record is None:
        record = _Training(trainer, order, want, log).run(processes, threads)
        previous.settle(files)
    history.finish(order, record, receipt)


def _trained(files: RunFiles, want: TrainedParts) -> Record | None:
    """Return the record of a run's result; None if the result is missing or another one."""
    record = Record.read(files.record)
    is_same = record is not None and record.parts == want
    return record if is_same and not fault_of_weights(files.weights) else None


class _Training:
    """A training whose result does not exist yet; `want` is written into its record."""

    def __init__(self, trainer: Any, order: ExternalOrder, want: TrainedParts, log: Path) -> None:
        self.trainer, self.order, self.wanted, self.log = trainer, order, want, log
        self.files, self.resume = RunFiles(order), Resume()
        self.say = partial(process.say, log)
        self.record = Record.of(order.product(want), seconds=0)

    def run(self, processes: int, threads: int) -> Record:
        """Train from the start or from a state; return the record of the result."""
        trainer, order, files, settings = self.trainer, self.order, self.files, self.order.trainer
        program = order.find()
        self.record = previous.begin(order, self.record, files.names)
        progress = States.read(files.progress)
        if progress and progress.parts == self.wanted and not fault_of_weights(files.last):
            self.say(f"{order.run}: all epochs were done before")
            return self._accept("", 0.0)
        trainer.deploy(order)
        if settings.samples.prompts:
            atomic.write(files.prompts, prompt_lines(order).encode())
        self.resume = prepare(order, self.wanted)
        if self.resume.state is not None:
            done = self.resume.done
            self.say(f"{order.run}: resumed from {self.resume.state}, {done} epochs are done")
        command = trainer.command(order, program, self.resume)
        config = settings.accelerate_config and absolute(settings.accelerate_config)
        launcher = [str(program.python), "-m", "accelerate.commands.launch"]
        launcher += process.accelerate_arguments(
            settings.mixed_precision, processes=processes, config=config
        )
        with previous.noted(order, self.record):
            with gpu.hold(processes, f"run {order.run}", self.say):
                output, seconds = self._launch([*launcher, *command], program, threads)
            return self._accept(output, seconds)

    def _launch(self, command: list[str], program: Any, threads: int) -> tuple[str, float]:
        """Run the trainer until it ends; return the end of its output, and its seconds."""
        started = time.monotonic()
        try:
            status, output = process.run_program(
                command,
                environment={"OMP_NUM_THREADS": str(threads), **program.environment()},
                log=self.log,
                cwd=program.folder,
            )
        except BaseException as error:
            _remove_partial(self.files)
            if isinstance(error, process.Stopped):
                self.say("")  # ends the line of a progress bar
                error.said = f"run {self.order.run}: {self._kept()}"
            raise
        seconds = time.monotonic() - started
        if not output.endswith("\n"):
            self.say("")  # ends the line of a progress bar
        if status != 0:
            _remove_partial(self.files)
            raise self._failure(output, status)
        return output, seconds

    def _accept(self, output: str, seconds: float) -> Record:
        """Give a new and complete result its name, and write its record.

        The order counts: the record comes after the weights, and the states go last, so that a job
        killed here finds the result or can resume.
        """
        files, run = self.files, self.order.run
        if fault := fault_of_weights(files.last, self.order.beginning):
            last = [line.strip() for line in re.split(r"[\r\n]+", output) if line.strip()][-1:]
            raise TrainingError(
                f"run {run}: the trainer ended without an error, but wrote no weights "
                f"({files.last} {fault}); its last line: {''.join(last)[:300]}",
                hint=f"all output: {self.log}",
            )
        atomic.open_to_group(files.work, f"{glob.escape(run)}*.safetensors")
        atomic.link(files.last, files.weights)
        described = describe_copy(self.order, self.record)
        figures = printed_figures(output)
        if self.resume.state is not None:
            figures.pop("steps", None)  # the bar counts the steps since the resume
        figures |= {
            "seconds": round(seconds, 3),
            "files": digests_in(files.output, [files.weights.name, described]),
        }
        record = self.record.model_copy(update=figures)
        record.write(files.record)
        if progress := States.read(files.progress):
            _number_through(files, progress.epochs)
        atomic.remove(files.resumed)
        self.say(f"{run}: trained: {files.weights}")
        return record

    def _kept(self) -> str:
        """Return a message that names the epoch after which a stopped training will go on."""
        before, states = self.resume.done, [path for path in _results(self.files) if path.is_dir()]
        numbers = ((_number(state) or 0) + (0 if _counts(state) else before) for state in states)
        if done := max([before, *numbers]):
            total = f" of {self.order.epochs}" if self.order.epochs else ""
            kept = f"the same command goes on after epoch {done}{total}"
        elif self.order.trainer.save_every_n_epochs is None:
            kept = "the same command begins again, unless `save_every_n_epochs` is set"
        else:
            kept = "the same command begins again, since no epoch has a state"
        return f"stopped; {self.order.name} saves no state amid an epoch: {kept}"

    def _failure(self, output: str, status: int) -> TrainingError:
        reason, hints = process.last_error(output, status), [f"all output: {self.log}"]
        if "unrecognized arguments" in reason:
            hints.insert(0, f"update {self.order.name}, or remove the setting")
        if full := re.search(r"No space left on device|Disk quota exceeded", output):
            reason = reason if full[0] in reason else f"{full[0]} ({reason})"
            hints.insert(0, "free some space, then run the same command; finished files are kept")
        if "OutOfMemory" in reason or "out of memory" in reason:
            hints.insert(0, self.order.memory_hint)
        if self.resume.state is not None:
            hints.insert(0, f"if the state {self.resume.state} is damaged, delete it")
        return TrainingError(f"run {self.order.run}: {reason}", hint="; ".join(hints))


def printed_figures(output: str) -> dict[str, Any]:
    """Return the number of steps and the last mean loss, as far as a trainer's output has them.

    The programs draw a bar: `steps: 100%|███| 60/60 [01:02<00:00,  1.03s/it, avr_loss=0.0912]`.
    """
    bars = _BAR.findall(output)
    if not bars:
        return {}
    steps, postfix = bars[-1]
    figures: dict[str, Any] = {"steps": int(steps)} if int(steps) else {}
    if loss := _LOSS.search(postfix):
        figures["loss_end"] = float(loss[1])
    return figures
