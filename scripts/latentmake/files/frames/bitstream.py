"""Random access points of video streams, and packets that are one frame each, from their bytes.

A container's key-frame flag promises less than a decoder needs: H.264 flags recovery points of open
GOPs and of periodic intra refresh, where pictures refer to what stands before.
Sources: ITU-T H.264 7.4.1 and H.265 7.4.2 (NAL unit types), ISO/IEC 14496-15 (avcC, hvcC), the VP9
bitstream specification 6.2 and annex B, the AV1 bitstream specification 5.3 to 5.9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple


class UnclearError(Exception):
    """It cannot be told for certain which frames come of the packets."""


class Seen(NamedTuple):
    """Facts about a packet.

    Attributes:
        entry: whether decoding may begin here: all frames shown later come out the same.
        leading: whether its frame, shown before the entry that it follows, needs earlier ones.
    """

    entry: bool
    leading: bool = False


Reader = Callable[[bytes], Seen]
"""Looks at the packets of a stream in turn."""

_INTRA = frozenset({"prores"})  # each packet is a frame that refers to no other
_H264_SETS, _H264_SLICES, _H264_IDR = frozenset({7, 8, 13, 15}), range(1, 6), 5
_HEVC_SETS, _HEVC_ENDS = frozenset({32, 33, 34}), frozenset({36, 37})
_HEVC_SLICES, _HEVC_LEADING, _HEVC_IRAP = range(32), range(6, 10), range(16, 22)


def reader_of(codec: str, extradata: bytes) -> Reader | None:
    """Return what tells the random access points of a codec; None where nobody can."""
    match codec:
        case "h264":
            return _NalUnits(extradata, hevc=False)
        case "hevc":
            return _NalUnits(extradata, hevc=True)
        case "vp9":
            return _vp9
        case "av1" | "libdav1d":
            return _Av1()
    return (lambda _: Seen(entry=True)) if codec in _INTRA else None


class _NalUnits:
    """H.264 and HEVC, with lengths before their NAL units (avcC, hvcC) or in Annex B's form."""

    def __init__(self, extradata: bytes, *, hevc: bool) -> None:
        self._hevc = hevc
        self._extradata = extradata
        self._first: set[bytes] | None = None
        if hevc:
            lengths = len(extradata) > 22 and extradata[0] == 1
        else:
            lengths = len(extradata) > 6 and extradata[0] == 1
        self._length = (extradata[21 if hevc else 4] & 3) + 1 if lengths else 0

    def __call__(self, data: bytes) -> Seen:
        slices: set[int] = set()
        sets: set[bytes] = set()
        kinds = _HEVC_SETS if self._hevc else _H264_SETS
        for start, end in self._units(data):
            if self._hevc:
                kind = data[start] >> 1 & 63
                if data[start] & 1 or data[start + 1] >> 3:
                    continue  # of another layer
                if kind in _HEVC_ENDS:  # after these, leading pictures are skipped
                    raise UnclearError
            else:
                kind = data[start] & 31
            if kind in (_HEVC_SLICES if self._hevc else _H264_SLICES):
                slices.add(kind)
            elif kind in kinds:
                sets.add(data[start:end].rstrip(b"\0"))
        if not slices:
            raise UnclearError
        if self._first is None:
            self._first = sets
        # Whoever leaves out a packet must not miss parameters in it.
        if not all(each in self._first or each in self._extradata for each in sets):
            raise UnclearError
        if self._hevc:
            entry = all(kind in _HEVC_IRAP for kind in slices)
            return Seen(entry, all(kind in _HEVC_LEADING for kind in slices))
        return Seen(slices == {_H264_IDR})

    def _units(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Yield where NAL units begin and end."""
        least = 2 if self._hevc else 1
        if not self._length:
            begin = data.find(b"\0\0\1")
            while begin >= 0:
                following = data.find(b"\0\0\1", begin + 3)
                end = following if following >= 0 else len(data)
                if end - begin - 3 >= least:
                    yield begin + 3, end
                begin = following
            return
        place = 0
        while place + self._length <= len(data):
            start = place + self._length
            place = start + int.from_bytes(data[place:start], "big")
            if place > len(data):
                raise UnclearError
            if place - start >= least:
                yield start, place


def _vp9(data: bytes) -> Seen:
    frames = _vp9_frames(data)
    shown = [_vp9_header(frame) for frame in frames]
    if sum(visible for _, visible in shown) != 1:
        raise UnclearError
    return Seen(len(shown) == 1 and shown[0] == (True, True))


def _vp9_frames(data: bytes) -> list[bytes]:
    """Return the frames of a packet: several in a superframe, all but one of them hidden."""
    last = data[-1]
    if last & 0xE0 == 0xC0:
        count, width = (last & 7) + 1, (last >> 3 & 3) + 1
        index = data[-(2 + count * width) :]
        if index[0] == last and len(index) == 2 + count * width:
            found, place = [], 0
            for number in range(count):
                begin = 1 + number * width
                size = int.from_bytes(index[begin : begin + width], "little")
                found.append(data[place : place + size])
                place += size
            return found
    return [data]


def _vp9_header(frame: bytes) -> tuple[bool, bool]:
    """Return whether a frame is a key frame, and whether it is shown."""
    if len(frame) < 2 or frame[0] >> 6 != 2:
        raise UnclearError
    bits = int.from_bytes(frame[:2], "big")
    profile = (bits >> 13 & 1) | (bits >> 12 & 1) << 1
    place = 11 - (profile == 3)  # of the next bit, the most significant one being 15
    if bits >> place & 1:  # shows a frame that was decoded before
        return False, True
    return not bits >> place - 1 & 1, bool(bits >> place - 2 & 1)


class _Av1:
    """Temporal units of AV1."""

    _SEQUENCE, _HEADER, _FRAME, _TILES = 1, 3, 6, 8

    def __init__(self) -> None:
        self._sequence: bytes | None = None

    def __call__(self, data: bytes) -> Seen:
        frames: list[int] = []  # first byte of each frame's header
        has_sequence = False
        for kind, payload in self._units(data):
            if kind == self._SEQUENCE and payload:
                has_sequence = True
                self._sequence = self._sequence or payload
                if payload != self._sequence or payload[0] & 8:  # `reduced_still_picture_header`
                    raise UnclearError
            elif kind in (self._HEADER, self._FRAME) and payload:
                frames.append(payload[0])
            elif kind == self._TILES:
                raise UnclearError
        # show_existing_frame, frame_type (two bits, 0 is a key frame), show_frame
        if sum(bool(each & 0x90) for each in frames) != 1:
            raise UnclearError
        return Seen(has_sequence and len(frames) == 1 and frames[0] & 0xF0 == 0x10)

    @staticmethod
    def _units(data: bytes) -> Iterator[tuple[int, bytes]]:
        place = 0
        while place < len(data):
            head = data[place]
            place += 1
            if head & 4:
                if place >= len(data) or data[place] >> 3 & 3:  # a spatial layer
                    raise UnclearError
                place += 1
            size = len(data) - place
            if head & 2:
                size = 0
                for number in range(8):
                    if place >= len(data):
                        raise UnclearError
                    byte = data[place]
                    place += 1
                    size |= (byte & 127) << 7 * number
                    if byte < 128:
                        break
            if place + size > len(data):
                raise UnclearError
            yield head >> 3 & 15, data[place : place + size]
            place += size
