"""The process that reads frames: `python -m latentmake.files.frames.worker`.

Decoders of damaged files hang or crash now and then; here they take nothing else with them. It ends
with the process that asks it, whatever that dies of: its standard input is then at its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import sys
import threading
import time
from typing import Any

from latentmake.errors import SourceError
from latentmake.files.frames import npz
from latentmake.files.frames.ended import EndedError
from latentmake.files.frames.protocol import ALIVE, DONE, FAULT, FRAME, HEAD, MEDIA, SIGN_SECONDS
from latentmake.files.frames.reading import open_source, read_frames
from latentmake.files.media import NPZ, probe_video
from latentmake.geometry.clips import Media

_PIPE_BYTES = 1 << 20


class _Answers:
    """Writes messages to a pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._sent = time.monotonic()

    def send(self, kind: int, first: int = 0, second: int = 0, third: int = 0) -> None:
        self._write(HEAD.pack(kind, first, second, third))

    def send_json(self, kind: int, value: object) -> None:
        data = json.dumps(value).encode()
        self._write(HEAD.pack(kind, len(data), 0, 0) + data)

    def send_frame(self, index: int, pixels: Any) -> None:
        height, width, _ = pixels.shape
        self.send(FRAME, index, height, width)
        self._write(memoryview(pixels).cast("B"))

    def tick(self) -> None:
        """Give a sign of life, unless there was one just now."""
        if time.monotonic() - self._sent > SIGN_SECONDS:
            self.send(ALIVE)

    def _write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._pipe, left) :]
        self._sent = time.monotonic()


def main() -> None:
    """Answer requests until there are no more."""
    pipe = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print is no message
    with contextlib.suppress(OSError, AttributeError):  # not everywhere, nor to everybody
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    answers = _Answers(pipe)
    while True:
        _answer(requests.get(), answers)


def _listen(requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin.buffer:
        requests.put(json.loads(line))
    os._exit(0)  # even out of the midst of a decoder


def _answer(request: dict[str, Any], answers: _Answers) -> None:
    path = request["path"]
    try:
        if "indices" in request:
            for index, pixels in read_frames(path, request["indices"], answers.tick):
                answers.send_frame(index, pixels)
            answers.send(DONE)
        else:
            answers.send_json(MEDIA, [*_probe(path)])
    except SourceError as error:
        ended = [error.frames, error.needed] if isinstance(error, EndedError) else None
        answers.send_json(FAULT, [error.what, error.hint, ended])


def _probe(path: str) -> Media:
    if not path.lower().endswith(NPZ):
        return probe_video(path)
    with open_source(path) as file:
        return npz.probe(file, path)


if __name__ == "__main__":
    main()
