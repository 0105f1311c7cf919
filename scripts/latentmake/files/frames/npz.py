"""Clips in npz files: an array uint8 [F, H, W, 3], read frame by frame, without pickles."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.lib import format as npy

from latentmake.errors import SourceError
from latentmake.files.frames.ended import EndedError
from latentmake.geometry.clips import Media

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HINT = "write it with numpy.savez(path, frames), frames uint8 of shape [F, H, W, 3]"
_USUAL = "frames.npy"  # the array where there are several
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # those of numpy
_MOST = 1032  # bytes that deflate makes of one


def probe(file: BinaryIO, path: str) -> Media:
    """Return the size and length of a clip, from the array's header.

    Raises:
        SourceError: it is no npz file, or holds no such array.
    """
    with _opened(file, path) as (_, (frames, height, width, _)):
        return Media(width, height, frames)


def read_frames(
    file: BinaryIO, path: str, wanted: Sequence[int], tick: Callable[[], object]
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield (index, RGB [H, W, 3]) of some frames, ascending.

    Raises:
        SourceError: it is no npz file, holds no such array, is damaged, or has fewer frames.
    """
    with _opened(file, path) as (member, (frames, *shape)):
        size, place = math.prod(shape), 0
        for index in wanted:
            if index >= frames:
                raise EndedError(path, frames, index)
            for _ in range(place, index + 1):
                data = member.read(size)
                tick()
                if len(data) != size:
                    raise SourceError("is cut short", where=path, hint=_HINT)
            place = index + 1
            yield index, np.frombuffer(data, np.uint8).reshape(shape)


@contextmanager
def _opened(file: BinaryIO, path: str) -> Iterator[tuple[IO[bytes], tuple[int, int, int, int]]]:
    """Open the array of a clip behind its header; return its shape."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.endswith(".npy")]
            name = _USUAL if _USUAL in names or len(names) != 1 else names[0]
            if name not in names:
                what = f"holds {len(names)} arrays, none of which is called frames"
                raise SourceError(what, where=path, hint=_HINT)
            info = archive.getinfo(name)
            if info.compress_type not in _METHODS:
                what = "is compressed in a way that numpy does not write"
                raise SourceError(what, where=path, hint=_HINT)
            # What a file says of sizes is believed as far as it is large enough for them.
            there = os.fstat(file.fileno()).st_size
            held = min(info.file_size, _MOST * min(info.compress_size, there))
            with archive.open(name) as member:
                shape = _shape(member, path)
                if math.prod(shape) > held - member.tell():
                    what = f"is too small for {list(shape)} (cut short, or a decompression bomb?)"
                    raise SourceError(what, where=path, hint=_HINT)
                yield member, shape
    except SourceError:
        raise
    except Exception as error:  # zipfile and zlib raise many things for a damaged file
        what = f"is damaged or no npz file ({error or type(error).__name__})"
        raise SourceError(what, where=path, hint="write it again, or remove it") from None


def _shape(member: IO[bytes], path: str) -> tuple[int, int, int, int]:
    version = npy.read_magic(member)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read is None:
        what = f"holds an array of numpy's format {version}"
        raise SourceError(what, where=path, hint=_HINT)
    shape, is_fortran, dtype = read(member)
    fits = len(shape) == 4 and shape[-1] == 3 and min(shape) > 0
    if not fits or dtype != np.uint8 or is_fortran:
        kind = f"{dtype} {list(shape)}" + " in Fortran's order" * is_fortran
        raise SourceError(f"holds {kind}, no clip", where=path, hint=_HINT)
    frames, height, width, channels = shape
    return frames, height, width, channels
