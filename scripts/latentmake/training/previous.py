"""The previous result of a run: moved away as a new training begins, back where it is wanted again.

A result is the trained weights in all their forms, their records, clips and evaluation, and the
course of the training: samples, curves, logs, a launched trainer's folder. Each move is a rename.
The record leaves a run's folder first and comes back last, so that it never lies beside weights of
another training. A move that was killed is completed by the next job.

| below `runs/{run}/` | content |
|---|---|
| `previous/` | the last finished result, while a new training runs and after it |
| `previous/previous/` | the one before, until the new training is finished |
| `unfinished/` | the course of a killed training, until another one is finished |
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from pydantic import Field

from latentmake.errors import storage_error
from latentmake.files import atomic
from latentmake.plan.manifest import LEAVING, PREVIOUS
from latentmake.training.order import BASIS, COPIED, Forced, Origin, RunFiles, Wanted
from latentmake.training.seen import SEEN

_RETURNING = f".returning{atomic.TEMPORARY_SUFFIX}"
_UNFINISHED = "unfinished"
_MADE = (BASIS, SEEN, "trained.json", "generated.json", "generated", "evaluation")
# The last two say of which training all of these are; they are moved last.
_COURSE = ("samples.png", "curves.png", "logs", "samples", "output")

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_OfFiles = Callable[Concatenate[RunFiles, _Given], _Result]


class _Weights(Origin):
    """The record of a result; `files` as in `Record`."""

    files: dict[str, str] = Field({})


def _moving(function: _OfFiles[_Given, _Result]) -> _OfFiles[_Given, _Result]:
    """Complete a move that was killed before a function moves files; a full disk has its line."""

    @wraps(function)
    def wrapped(files: RunFiles, /, *given: _Given.args, **named: _Given.kwargs) -> _Result:
        try:
            if (files.output / LEAVING).is_dir():
                _leave(files)
            if (files.output / _RETURNING).is_dir():
                _return(files)
            return function(files, *given, **named)
        except OSError as error:
            raise storage_error(error, files.output) or error from None

    return wrapped


@_moving
def begin(
    files: RunFiles, want: Wanted, weights: Collection[str], continued: Collection[Wanted] = ()
) -> None:
    """Make the folder of a run ready for a training from `want`: of others, it keeps no result.

    Args:
        files: of the run.
        want: what is to be trained.
        weights: names of all files and folders that may hold its trained weights.
        continued: trainings whose samples and logs this one continues, besides its own.
    """
    kept, unfinished = (want, *continued), files.at(files.output / _UNFINISHED)
    _leave_to(want, files, weights)
    if _course(files) in kept:
        return
    if _course(unfinished) in kept:
        unfinished.output.rename(files.output / _RETURNING)
        _return(files)
        return
    _put_aside(files, weights)
    if _course(files.at(files.previous)) in continued:
        for folder in (files.logs, files.samples):
            _link(files.previous / folder.name, folder)


@_moving
def take_back(files: RunFiles, want: Wanted) -> bool:
    """Exchange the present result for a previous one that came from `want`, where there is one."""
    holder = files.holder(want)
    if holder is None or holder is files:
        return False
    _leave_to(want, files, files.names)
    _put_aside(files, files.names)
    holder = files.holder(want)
    assert holder is not None
    holder.output.rename(files.output / _RETURNING)
    _return(files)
    return True


@_moving
def anew(files: RunFiles, want: Wanted, planned: int, states: Iterable[Path] = ()) -> None:
    """Make the folder of a run ready for a forced training, which begins from the start.

    The result leaves, whatever it came from, and `states` are removed. If the job is tried again,
    which the time when its order was `planned` tells, or the build after a kill, it goes on.
    """
    mark = Forced(wanted=want, planned=planned)
    if Forced.read(files.forced) == mark:
        return
    if Origin.read(files.record):
        _leave(files)
    unfinished = files.at(files.output / _UNFINISHED)
    of_want = [each for each in (files, unfinished) if _course(each) == want]
    course = [each.output / name for each in of_want for name in _COURSE]
    for place in (*states, *course, *[unfinished.output] * (unfinished in of_want)):
        atomic.remove(place)
    mark.write(files.forced)


def settle(files: RunFiles) -> None:
    """Remove what was kept until a training is finished."""
    atomic.remove(files.previous / PREVIOUS)
    atomic.remove(files.output / _UNFINISHED)
    for place in files.previous.glob("output/*"):
        if place.name.endswith("-state") or place.name == files.resumed.name:
            atomic.remove(place)  # states of a finished training, which none resumes from


def reuse(folder: Path) -> None:
    """Link clips of the previous result into a folder that has none: some may need no LoRA."""
    before = folder.parent / PREVIOUS / folder.name
    if before.is_dir() and not folder.exists():
        _link(before, folder)


# -- moves -----------------------------------------------------------------------------------------


def _course(files: RunFiles) -> Wanted | None:
    """Return the training whose samples and states a folder holds; None where it is not known."""
    found = Origin.read(files.progress) or Origin.read(files.samples / "index.json")
    return None if found is None else found.wanted


def _leave_to(want: Wanted, files: RunFiles, weights: Collection[str]) -> None:
    """Move the finished result away if it is of another training than `want`."""
    record = Origin.read(files.record)
    if record is not None and record.wanted != want:
        _leave(files, weights)


def _leave(files: RunFiles, weights: Collection[str] = ()) -> None:
    """Move a result to `previous`, and what is there to `previous/previous`."""
    leaving = files.at(files.output / LEAVING)
    leaving.output.mkdir(exist_ok=True)
    _move(files.record, leaving.record)
    record, course = _Weights.read(leaving.record), _course(files)
    written = record.files if record else {}
    names = {*_MADE, *_first((*weights, *files.names, *written))}
    if record and course in (None, record.wanted):
        names |= {*_COURSE}
    for name in sorted(names):
        _move(files.output / name, leaving.output / name)
    for copy in files.saved.glob("*"):
        if record and Wanted.read(copy / COPIED) == record.wanted:
            _move(copy, leaving.saved / copy.name)
    with suppress(OSError):  # others stay
        files.saved.rmdir()
    _move(files.previous, leaving.previous)
    leaving.output.rename(files.previous)


def _return(files: RunFiles) -> None:
    """Move all that lies in the folder of what returns into the run's."""
    returning = files.at(files.output / _RETURNING)
    course = _course(returning)
    if course is not None and _course(files) not in (None, course):
        _put_aside(files)
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


def _put_aside(files: RunFiles, weights: Collection[str] = ()) -> None:
    """Move what a training that did not finish has left to `unfinished`."""
    names = [] if Origin.read(files.record) else [files.record.name, *_first(weights)]
    found = [files.output / name for name in (*names, *_COURSE)]
    unfinished = files.output / _UNFINISHED
    if any(map(os.path.lexists, found)) and _course(files.at(unfinished)):
        atomic.remove(unfinished)  # of another one; what was moved before a kill says of none yet
    for path in found:
        _move(path, unfinished / path.name)


def _first(names: Iterable[str]) -> Iterator[str]:
    """Yield what lies in the run's folder itself: the files, and the folders of others."""
    return (Path(name).parts[0] for name in names)


def _move(path: Path, to: Path) -> None:
    """Move a file or folder, if it is there, in place of another."""
    if os.path.lexists(path):
        to.parent.mkdir(parents=True, exist_ok=True)
        atomic.remove(to)
        path.rename(to)


def _link(folder: Path, to: Path) -> None:
    """Make a folder of links to the files of another, whose files are never written in place."""
    if folder.is_dir():
        with atomic.replacing_folder(to) as new:
            shutil.copytree(
                folder,
                new,
                copy_function=lambda path, name: atomic.link(Path(path), Path(name)),
                dirs_exist_ok=True,
            )
