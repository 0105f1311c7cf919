"""Reads tensors out of cache files into memory that is there already, in a process of its own.

`python -I -S reader.py MEMORY PARENT` imports nothing but the standard library: it is there after
some hundredths of a second, takes a few megabytes, and has nothing to do with the threads and
devices of the process that started it. That one sends a line for each batch and gets a line back;
the bytes themselves go from the file straight into memory that both share.
"""

# No package modules here: this file is also run by its path, without any of them in reach.
from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import zlib
from collections.abc import Sequence

__all__ = ["Part", "fill", "main"]

# A tensor to read: the file's path, how long its header is and the header's CRC-32, where the
# tensor begins after the header, how many bytes it has, where they go, and how many zeros follow.
Part = tuple[str, int, int, int, int, int, int]

_FLAGS = os.O_RDONLY | os.O_CLOEXEC
_PATIENCE = 5.0  # seconds between two looks whether the process that started this one still lives


def _read(file: int, *places: memoryview) -> bool:
    """Fill places one after another; False where the file ends before."""
    missing = sum(map(len, places))
    while missing:
        got = os.readv(file, places)
        if got == missing:
            return True
        if not got:
            return False
        # A network's file system, or a signal, may cut any read short.
        missing -= got
        rest = []
        for place in places:
            rest.append(place[got:])
            got = max(0, got - len(place))
        places = tuple(place for place in rest if len(place))
    return True


def fill(parts: Sequence[Part], memory: memoryview) -> list[int]:
    """Read tensors into memory, each file by one open and, as a rule, one read.

    Args:
        parts: what to read, and where in `memory` it goes.
        memory: bytes that can be written.

    Returns:
        Positions in `parts` of files that are missing, cut short or have another header now.
    """
    if not parts:
        return []
    wrong: list[int] = []
    scratch = memoryview(bytearray(max(part[1] for part in parts)))
    zero = os.open("/dev/zero", _FLAGS) if any(part[6] for part in parts) else -1
    for number, (path, length, check, start, size, place, zeros) in enumerate(parts):
        header, end = scratch[:length], place + size
        try:
            file = os.open(path, _FLAGS)
        except OSError:
            wrong.append(number)
            continue
        try:
            if start:
                whole = _read(file, header)
                os.lseek(file, length + start, os.SEEK_SET)
                whole = _read(file, memory[place:end]) and whole
            else:
                whole = _read(file, header, memory[place:end])
        except OSError:
            whole = False
        finally:
            os.close(file)
        if not whole or zlib.crc32(header) != check:
            wrong.append(number)
        if zeros:
            _read(zero, memory[end : end + zeros])
    if zero >= 0:
        os.close(zero)
    return wrong


def _end_with(parent: int) -> None:
    """Look now and then whether the parent lives: another child of it may hold the pipe open."""

    def look(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(0)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE, _PATIENCE)


def main(memory: int, parent: int) -> None:
    """Carry out the lines of the standard input until it ends, which it does with the parent.

    A line is a JSON list: where a segment of the memory begins, its length, where the batch begins
    in it and its length, and the parts. The answer is a line with what `fill` returns.

    Args:
        memory: descriptor of the file that is the shared memory.
        parent: number of the process that started this one; it may have ended already.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    _end_with(parent)
    segments: dict[int, memoryview] = {}
    try:
        for line in sys.stdin.buffer:
            if not line.endswith(b"\n"):
                break  # the parent was killed while it wrote
            begin, length, start, size, parts = json.loads(line)
            if begin not in segments:
                segments[begin] = memoryview(mmap.mmap(memory, length, offset=begin))
            wrong = fill(parts, segments[begin][start : start + size])
            os.write(1, b"%s\n" % " ".join(map(str, wrong)).encode())
    except BrokenPipeError:  # the parent has gone
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
