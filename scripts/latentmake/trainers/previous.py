"""Previous result of a run: moved away when a new training begins, and back when wanted again.

A result consists of the trained weights in all their forms, their records, clips and evaluation,
and the course of the training: samples, curves, logs and a launched trainer's folder.

Each move is a rename. The record leaves a run's folder first and comes back last, so that it never
lies beside weights of another training. If a process is killed amid a move, the next job completes
the move.

| below `runs/{run}/` | content |
|---|---|
| `previous/` | the last finished result, while a new training runs and after it |
| `previous/previous/` | the result before it, until the new training is finished |
| `unfinished/` | the course of a killed training, until another training is finished |
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from latentmake.base import atomic
from latentmake.base.errors import first_line, storage_error
from latentmake.encode import gpu
from latentmake.plan.earlier import BASIS
from latentmake.plan.manifest import LEAVING, PREVIOUS
from latentmake.plan.product import Parts
from latentmake.runs import history
from latentmake.runs.order import COPIED, Forced, Record, RunFiles, RunOrder, parts_in

_RETURNING = f".returning{atomic.TEMPORARY_SUFFIX}"
_UNFINISHED = "unfinished"
_MADE = (BASIS, "trained.json", "generated.json", "generated", "evaluation")
# The last two have the parts of their training. They are moved last, so that after a kill the
# folder does not claim files that are still elsewhere.
_COURSE = ("samples.png", "curves.png", "logs", "samples", "output")


@contextmanager
def _moving(files: RunFiles) -> Iterator[None]:
    """Complete a move that was killed, before other files are moved.

    An error of the disk becomes a StorageError.
    """
    try:
        if (files.output / LEAVING).is_dir():
            _leave(files)
        if (files.output / _RETURNING).is_dir():
            _return(files)
        yield
    except OSError as error:
        raise storage_error(error, files.output) or error from None


def begin(
    order: RunOrder, record: Record, weights: Collection[str], continued: Collection[Parts] = ()
) -> Record:
    """Prepare a run's folder for a training, and return its record with the roster's digest.

    Results of other trainings are moved away.

    Args:
        order: order of the training.
        record: record of the training that begins, with its parts.
        weights: names of all files and folders that may hold its trained weights.
        continued: parts of other trainings whose samples and logs this training continues.
    """
    files = RunFiles(order)
    make_room(files, record.parts, weights, continued)
    if not order.keep:
        return record
    record = record.model_copy(update={"device": gpu.device()})
    return history.begin(order.run, history.roster_of(Path(order.manifest)), record)


@contextmanager
def noted(order: RunOrder, record: Record) -> Iterator[None]:
    """Note in the run's history why a training that has begun does not finish."""
    try:
        yield
    except BaseException as error:
        history.note_end(order.run, record, first_line(error))
        raise


def make_room(
    files: RunFiles, want: Parts, weights: Collection[str], continued: Collection[Parts] = ()
) -> None:
    """Move results of other trainings than `want` away; see `begin`."""
    kept, unfinished = (want, *continued), files.at(files.output / _UNFINISHED)
    with _moving(files):
        _leave_to(want, files, weights)
        if _course(files) in kept:
            return
        if _course(unfinished) in kept:
            unfinished.output.rename(files.output / _RETURNING)
            _return(files)
            return
        _keep_unfinished(files, weights)
        if _course(files.at(files.previous)) in continued:
            for folder in (files.logs, files.samples):
                _link(files.previous / folder.name, folder)


def take_back(files: RunFiles, want: Parts) -> bool:
    """Exchange the present result for a previous one with the parts `want`.

    Returns:
        False if there is no such previous result.
    """
    with _moving(files):
        holder = files.holder(want)
        if holder is None or holder is files:
            return False
        _leave_to(want, files, files.names)
        _keep_unfinished(files, files.names)
        holder = files.holder(want)  # it may have moved one folder down
        assert holder is not None
        holder.output.rename(files.output / _RETURNING)
        _return(files)
        return True


def anew(files: RunFiles, want: Parts, planned: int, states: Iterable[Path] = ()) -> None:
    """Prepare a run's folder for a forced training, which begins from the start.

    The present result is moved away, whatever its parts. If the job is tried again, or the build
    is started again after a kill, the training goes on instead: the mark in the folder is equal.

    Args:
        files: files of the run.
        want: parts of the training.
        planned: time of its order, see `RunOrder`.
        states: checkpoints that the training could resume from; they are removed.
    """
    mark, unfinished = Forced(parts=want, planned=planned), files.at(files.output / _UNFINISHED)
    with _moving(files):
        if Forced.read(files.forced) == mark:
            return
        if parts_in(files.record):
            _leave(files)
        of_want = [place for place in (files, unfinished) if _course(place) == want]
        course = [place.output / name for place in of_want for name in _COURSE]
        removed = [*states, *course]
        if unfinished in of_want:
            removed.append(unfinished.output)
        for path in removed:
            atomic.remove(path)
        mark.write(files.forced)  # last: a killed preparation is done again


def settle(files: RunFiles) -> None:
    """Remove the files that are only kept until a training is finished."""
    atomic.remove(files.previous / PREVIOUS)
    atomic.remove(files.output / _UNFINISHED)
    for place in files.previous.glob("output/*"):
        if place.name.endswith("-state") or place.name == files.resumed.name:
            atomic.remove(place)  # no training resumes from the states of a finished one


def reuse(folder: Path) -> None:
    """Link clips of the previous result into a folder that does not exist yet.

    Clips that were drawn without the LoRA may still be up to date.
    """
    before = folder.parent / PREVIOUS / folder.name
    if before.is_dir() and not folder.exists():
        _link(before, folder)


# -- moves -----------------------------------------------------------------------------------------


def _course(files: RunFiles) -> Parts | None:
    """Return the parts of the training whose samples and states a folder holds; else None."""
    return parts_in(files.progress) or parts_in(files.samples / "index.json")


def _leave_to(want: Parts, files: RunFiles, weights: Collection[str]) -> None:
    """Move the finished result away if its parts are not `want`."""
    if parts_in(files.record) not in (None, want):
        _leave(files, weights)


def _leave(files: RunFiles, weights: Collection[str] = ()) -> None:
    """Move the present result to `previous`, and the previous one to `previous/previous`."""
    # The rename to `previous` comes last: until then, LEAVING says that the move is incomplete.
    leaving = files.at(files.output / LEAVING)
    leaving.output.mkdir(exist_ok=True)
    _move(files.record, leaving.record)
    record, course = Record.read(leaving.record), _course(files)
    written = record.files if record else {}
    names = {*_MADE, *_first((*weights, *files.names, *written))}
    if record and course in (None, record.parts):
        names |= {*_COURSE}
    for name in sorted(names):
        _move(files.output / name, leaving.output / name)
    for copy in files.saved.glob("*"):
        if record and parts_in(copy / COPIED) == record.parts:
            _move(copy, leaving.saved / copy.name)
    with suppress(OSError):  # copies of other trainings stay
        files.saved.rmdir()
    _move(files.previous, leaving.previous)
    leaving.output.rename(files.previous)


def _return(files: RunFiles) -> None:
    """Move all files of the returning result into the run's folder."""
    returning = files.at(files.output / _RETURNING)
    course = _course(returning)
    if course is not None and _course(files) not in (None, course):
        _keep_unfinished(files)
    free = files.previous
    while free.exists():
        free /= PREVIOUS
    _move(returning.previous, free)
    for copy in returning.saved.glob("*"):
        _move(copy, files.saved / copy.name)
    atomic.remove(returning.saved)
    last = (*_COURSE, files.record.name)
    others = sorted(path.name for path in returning.output.iterdir() if path.name not in last)
    for name in (*others, *last):
        _move(returning.output / name, files.output / name)
    returning.output.rmdir()


def _keep_unfinished(files: RunFiles, weights: Collection[str] = ()) -> None:
    """Move the files of a training that did not finish to `unfinished`."""
    names = [] if parts_in(files.record) else [files.record.name, *_first(weights)]
    paths = [files.output / name for name in (*names, *_COURSE)]
    unfinished = files.output / _UNFINISHED
    # If the folder names its training, it is complete and another one's. A move that was killed
    # has not brought that name there yet: its files stay.
    if any(map(os.path.lexists, paths)) and _course(files.at(unfinished)):
        atomic.remove(unfinished)
    for path in paths:
        _move(path, unfinished / path.name)


def _first(names: Iterable[str]) -> Iterator[str]:
    """Yield the first part of each path: a file in the run's folder, or a folder with files."""
    return (Path(name).parts[0] for name in names)


def _move(path: Path, to: Path) -> None:
    """Move a file or folder, if it exists, and replace its target."""
    if os.path.lexists(path):
        to.parent.mkdir(parents=True, exist_ok=True)
        atomic.remove(to)
        path.rename(to)


def _link(folder: Path, to: Path) -> None:
    """Make a folder of hard links to the files of another folder.

    The files are never written in place, so a change cannot reach the other folder.
    """
    if folder.is_dir():
        with atomic.replacing_folder(to) as new:
            shutil.copytree(
                folder,
                new,
                copy_function=lambda path, name: atomic.link(Path(path), Path(name)),
                dirs_exist_ok=True,
            )
