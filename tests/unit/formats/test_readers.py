"""Files are read by processes that may hang or crash: each takes its one file with it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from clip_world import whole
from latentmake.base.errors import SourceError
from latentmake.formats import readers as module
from latentmake.formats.media import probe_video
from latentmake.formats.readers import Readers, probe_videos
from latentmake.formats.video import frame_of
from reader_world import counting, dying, facts, wrong
from refusals import refused
from video_world import write_video

SCRIPTS = Path(module.__file__).parents[2]


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("videos") / "a.mp4"
    return str(write_video(path, "libx264", 12))


@pytest.fixture
def readers() -> Iterator[Readers]:
    with Readers() as made:
        yield made


def frame(of: Readers, path: str, index: int = 0) -> Any:
    (pixels,) = of.iterate(path, frame_of, path, index)
    return pixels


def pids(of: Readers) -> list[int]:
    return [process.pid for process in of._all]


def refusal(of: Readers, path: str, *what: Any) -> str:
    return refused(lambda: [*of.iterate(path, *what)], path, SourceError)


def test_values_come_one_by_one_and_a_process_serves_again(video: str, readers: Readers) -> None:
    assert np.array_equal(frame(readers, video, 7), whole(Path(video))[7])
    values = [*readers.iterate("", counting, 3)]
    assert [value.tolist() for value in values] == [[[n] * 3] * 2 for n in range(3)]
    assert all(value.flags.writeable for value in values)
    left = readers.iterate("", counting, 3)
    next(left)
    left.close()
    circle: list[object] = [left]
    circle.append(circle)
    del left, circle
    gc.collect()
    assert "but frame 12 is needed" in refusal(readers, video, frame_of, video, 12)
    assert len(pids(readers)) == 1


def test_a_crash_or_a_hang_names_its_file_and_others_go_on(video: str) -> None:
    with Readers(timeout=5) as readers:
        other = readers.iterate("", counting, 3)
        next(other)
        (untouched,) = readers._all
        processes = [psutil.Process(untouched.pid)]
        for number, what in (
            (signal.SIGSEGV, "crashed the process that reads it, or memory was short"),
            (signal.SIGSTOP, "gave no frame for 5 seconds"),
        ):
            assert what in refusal(readers, "a.mp4", dying, number)
        assert len([*other]) == 2
        untouched.kill()  # while it is idle
        untouched.wait()
        readers._timeout = 600  # a new process starts slowly on a busy machine
        assert frame(readers, video).shape == (48, 64, 3)
        processes += psutil.Process().children()
    _, alive = psutil.wait_procs([each for each in processes if each.pid in pids(readers)], 60)
    assert not alive


def test_faults_of_others_are_no_faults_of_the_file(readers: Readers) -> None:
    with pytest.raises(ValueError, match="a fault of ours") as caught:
        [*readers.iterate("a.mp4", wrong)]
    assert "reader_world.py" in caught.value.__notes__[0]
    ((group, heavy),) = readers.iterate("a.mp4", facts)
    assert group != os.getpgrp()  # Ctrl-C and a closed terminal do not reach it
    assert not heavy
    left = readers.iterate("a.mp4", counting, 3)
    next(left)
    readers.close()
    for values in (left, readers.iterate("a.mp4", counting, 3)):
        with pytest.raises(RuntimeError, match="were ended"):
            next(values)


def test_a_process_ends_with_the_one_that_asked_which_may_be_any_script(
    video: str, tmp_path: Path
) -> None:
    (script := tmp_path / "script.py").write_text(
        "import os, signal\n"
        "from latentmake.formats.readers import Readers\n"
        "from latentmake.formats.video import frame_of\n"
        "readers = Readers()\n"
        f"next(readers.iterate('', frame_of, {video!r}, 0))\n"
        "print(readers._all[0].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(60)


def test_probing_tells_size_and_length_or_the_fault_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    for number in range(8):
        path = tmp_path / f"{number}.mp4"
        paths.append(str(path))
        if number % 4 == 3:
            path.write_text("hello" * number)
        else:
            write_video(path, "mpeg4", number + 1)
    monkeypatch.setattr(module, "_ENOUGH", 4)  # two processes
    found = [*probe_videos(paths)]
    for number, each in enumerate(found):
        if number % 4 == 3:
            assert isinstance(each, SourceError)
            assert str(each).startswith(f"{paths[number]}: is not a video")
        else:
            assert each == probe_video(paths[number])
            assert each.frames == number + 1
    assert [*probe_videos([])] == []
