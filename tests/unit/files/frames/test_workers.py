"""Files are read by processes that may hang or crash: each takes its one file with it."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import IO, Any

import av
import numpy as np
import psutil
import pytest
from clip_world import whole
from latentmake.errors import SourceError
from latentmake.files.frames import EndedError, Workers, frames_at, probe_videos, workers
from latentmake.files.frames.protocol import ALIVE, FRAME, HEAD
from latentmake.files.media import probe_video
from video_world import write_video

SCRIPTS = Path(workers.__file__).parents[3]


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A video of more pixels than fit into a pipe."""
    path = tmp_path_factory.mktemp("videos") / "a.mp4"
    return write_video(path, "libx264", 120, size=(320, 240), g="12", preset="ultrafast")


@pytest.fixture
def readers() -> Iterator[Workers]:
    with Workers() as made:
        yield made


def pids(of: Workers) -> list[int]:
    return [worker.process.pid for worker in of._all]


def impatient(of: Workers, seconds: float) -> None:
    """Shorten the time until processes that have started are taken to hang."""
    for worker in of._all:
        worker._timeout = seconds


def waiting_bytes(pipe: IO[bytes]) -> int:
    (count,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return count


def refusal(frames: Iterator[object]) -> str:
    with pytest.raises(SourceError) as caught:
        list(frames)
    line = str(caught.value)
    assert "\n" not in line and "; " in line
    return line


def test_frames_are_those_of_a_full_decode_and_a_process_serves_again(
    video: Path, readers: Workers
) -> None:
    expected = whole(video)
    for wanted in ([0, 3, 117], [119], range(5, 60)):
        found = [*readers.frames_at(str(video), wanted)]
        assert [index for index, _ in found] == [*wanted]
        assert all(np.array_equal(pixels, expected[index]) for index, pixels in found)
        assert all(pixels.flags.writeable for _, pixels in found)
    assert len(pids(readers)) == 1
    assert [index for index, _ in frames_at(str(video), [7])] == [7]


def test_a_fault_is_told_and_ends_no_process(video: Path, readers: Workers, tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("hello" * 100)
    assert "text.mp4: is not a video" in refusal(readers.frames_at(str(tmp_path / "text.mp4"), [0]))
    with pytest.raises(EndedError) as caught:
        [*readers.frames_at(str(video), [119, 120])]
    assert caught.value.frames == 120
    assert readers.probe(str(video)) == probe_video(str(video))
    assert len(pids(readers)) == 1


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (signal.SIGSEGV, "made FFmpeg crash (SIGSEGV)"),
        (signal.SIGABRT, "made FFmpeg crash (SIGABRT)"),
        (signal.SIGKILL, "the reading process was killed (SIGKILL)"),
    ],
)
def test_a_crash_names_its_video_and_others_go_on(
    number: signal.Signals, what: str, video: Path, readers: Workers
) -> None:
    other = readers.frames_at(str(video), range(120))
    assert next(other)[0] == 0
    (untouched,) = pids(readers)
    frames = readers.frames_at(str(video), range(120))
    next(frames)
    (reading,) = {*pids(readers)} - {untouched}
    os.kill(reading, number)
    assert f"{video}: " in (line := refusal(frames)) and what in line
    assert [index for index, _ in other] == [*range(1, 120)]
    assert pids(readers) == [untouched]
    assert not psutil.pid_exists(reading)
    assert len([*readers.frames_at(str(video), range(120))]) == 120


def test_a_signal_that_ends_a_build_makes_no_file_faulty(video: Path, readers: Workers) -> None:
    """Ctrl-C, a closed terminal and a build that is ended reach the whole process group."""
    frames = readers.frames_at(str(video), range(120))
    next(frames)
    (reading,) = pids(readers)
    assert os.getpgid(reading) != os.getpgrp()
    assert len([*frames]) == 119


def test_a_process_that_hangs_is_ended(video: Path) -> None:
    with Workers() as readers:
        frames = readers.frames_at(str(video), range(120))
        next(frames)
        (reading,) = pids(readers)
        impatient(readers, 0.5)
        os.kill(reading, signal.SIGSTOP)
        assert "gave no frame for 0.5 seconds" in refusal(frames)
        assert not psutil.pid_exists(reading)
    with Workers() as readers:
        assert len([*readers.frames_at(str(video), range(120))]) == 120


def test_whoever_takes_frames_slowly_is_not_taken_for_a_hang(tmp_path: Path) -> None:
    path = write_video(tmp_path / "small.mp4", "libx264", 120)
    with Workers() as readers:
        frames = readers.frames_at(str(path), range(120))
        _, first = next(frames)
        (worker,) = readers._all
        assert worker.process.stdout is not None
        while waiting_bytes(worker.process.stdout) < 2 * (HEAD.size + first.nbytes):
            time.sleep(0.01)
        impatient(readers, 0)  # it may not be waited for
        assert next(frames)[0] == 1
        impatient(readers, workers.READ_TIMEOUT)
        assert len([*frames]) == 118


def test_frames_decoded_in_vain_are_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be skipped the frame that was asked for comes late."""
    (tmp_path / "sitecustomize.py").write_text(
        "from latentmake.files.frames import protocol\nprotocol.SIGN_SECONDS = -1\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    picture = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    count, path = 12, tmp_path / "a.mkv"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("ffv1", rate=24, options={"g": "1"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        (packet,) = stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24"))
        data = bytes(packet)
        for number in range(count):
            each = av.Packet(data)
            each.stream, each.time_base, each.is_keyframe = stream, Fraction(1, 1000), True
            each.pts = each.dts = number * 42
            file.mux(each)
    with Workers() as readers:
        [*readers.frames_at(str(path), [0])]  # it has started
        (worker,) = readers._all
        assert worker.ask(str(path), [count - 1])
        assert worker.process.stdout is not None
        kinds = [HEAD.unpack(worker.process.stdout.read(HEAD.size))[0] for _ in range(count + 1)]
    assert kinds == [ALIVE] * count + [FRAME]


def test_one_that_was_ended_while_it_was_idle_is_replaced(video: Path, readers: Workers) -> None:
    [*readers.frames_at(str(video), [0])]
    (idle,) = pids(readers)
    os.kill(idle, signal.SIGKILL)
    os.waitid(os.P_PID, idle, os.WEXITED | os.WNOWAIT)
    assert [index for index, _ in readers.frames_at(str(video), [0])] == [0]
    assert idle not in pids(readers)


def test_frames_left_half_way_end_the_process_and_nothing_else(
    video: Path, readers: Workers
) -> None:
    frames = readers.frames_at(str(video), range(120))
    next(frames)
    (reading,) = pids(readers)
    frames.close()
    assert not psutil.pid_exists(reading)
    assert [index for index, _ in readers.frames_at(str(video), [2])] == [2]


def test_whoever_takes_the_last_frame_and_no_more_keeps_no_process(
    video: Path, readers: Workers
) -> None:
    iterators = []
    for number in range(3):
        frames = readers.frames_at(str(video), [number, 50])
        assert [next(frames)[0], next(frames)[0]] == [number, 50]
        iterators.append(frames)
    assert len(pids(readers)) == 1


def test_iterators_left_in_a_circle_of_references_block_nobody(
    video: Path, readers: Workers
) -> None:
    """The garbage collector ends them, wherever the thread is."""
    for _ in range(5):
        frames = readers.frames_at(str(video), range(120))
        next(frames)
        circle: list[object] = [frames]
        circle.append(circle)
        del frames, circle
    gc.collect()
    assert len(pids(readers)) <= 1


def test_several_threads_read_side_by_side(video: Path, readers: Workers) -> None:
    expected = whole(video)

    def read(number: int) -> bool:
        wanted = [number, 60 + number]
        found = dict(readers.frames_at(str(video), wanted))
        return all(np.array_equal(found[index], expected[index]) for index in wanted)

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(read, range(12)))
    assert len(pids(readers)) <= 3


# -- probing --------------------------------------------------------------------------------------


def test_probing_tells_size_and_length_or_the_fault_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    for number in range(12):
        path = tmp_path / f"{number}.mp4"
        paths.append(str(path))
        if number % 4 == 3:
            path.write_text("hello" * number)
        else:
            write_video(path, "mpeg4", number + 1)
    monkeypatch.setattr(workers, "_ENOUGH", 4)  # three processes at the most
    found = [*probe_videos(paths)]
    for number, each in enumerate(found):
        if number % 4 == 3:
            assert isinstance(each, SourceError)
            assert str(each).startswith(f"{paths[number]}: is not a video")
        else:
            assert each == probe_video(paths[number])
            assert each.frames == number + 1
    assert [*probe_videos([])] == []


def test_a_file_that_never_answers_is_named_while_planning(
    video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(pipe := tmp_path / "pipe.mp4")  # whoever opens it waits for a writer

    class Impatient(Workers):
        def _take(self, path: str) -> tuple[Any, bool]:
            worker, is_new = super()._take(path)
            assert worker._timeout in (workers.READ_TIMEOUT, 0.5)
            worker._timeout = 0.5 if path == str(pipe) else workers.READ_TIMEOUT
            return worker, is_new

    monkeypatch.setattr(workers, "Workers", Impatient)
    sound, hanging, other = probe_videos([str(video), str(pipe), str(video)])
    assert sound == other == probe_video(str(video))
    assert f"{pipe}: gave no frame for 0.5 seconds" in str(hanging)


# -- what a process is ----------------------------------------------------------------------------


def test_a_process_ends_with_the_one_that_asked(video: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from latentmake.files.frames import Workers\n"
        "readers = Workers()\n"
        f"frames = readers.frames_at({str(video)!r}, range(120))\n"
        "next(frames)\n"
        "print(*[each.process.pid for each in readers._all], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    left = int(done.stdout)
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(left)
        for _ in range(600):
            if process.status() == psutil.STATUS_ZOMBIE:
                return
            time.sleep(0.1)
        pytest.fail("it still runs")


def test_a_process_imports_no_more_than_it_needs() -> None:
    code = (
        "import sys, latentmake.files.frames.worker\n"
        "print(*{'torch', 'cv2', 'pydantic', 'snakemake'} & {*sys.modules})"
    )
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
