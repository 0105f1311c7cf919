"""Index of a video's frames: the time of each, and where decoding may begin.

It is made by reading the packets without decoding them, and only where packets are frames for
certain, as `probe_video` counts them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from latentmake.files.frames.bitstream import UnclearError, reader_of
from latentmake.files.media import COUNTED_CONTAINERS, is_plain

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet, PktSideDataT
    from av.video.stream import VideoStream

_OFTEN = 64  # packets between two signs of life
_CHANGES: tuple[PktSideDataT, ...] = ("new_extradata", "param_change", "palette")


class Entry(NamedTuple):
    """A packet where decoding may begin.

    Attributes:
        frame: index of its frame in the order of display.
        pts: its time, in the stream's time base.
        dts: the time of its decoding.
    """

    frame: int
    pts: int
    dts: int


class FrameIndex(NamedTuple):
    """Times of all frames in the order of display, and the entries among them, both ascending."""

    times: array[int]
    entries: list[Entry]

    def entry_for(self, frame: int) -> Entry:
        """Return the last entry at or before a frame."""
        return self.entries[bisect_right(self.entries, frame, key=lambda entry: entry.frame) - 1]


def read_index(
    container: InputContainer, stream: VideoStream, tick: Callable[[], object]
) -> FrameIndex | None:
    """Read a file's packets; None where frames cannot be told from them.

    Calls `tick` now and then.
    """
    context, format = stream.codec_context, container.format.name.partition(",")[0]
    look = reader_of(context.name, bytes(context.extradata or b""))
    if look is None or format not in COUNTED_CONTAINERS:
        return None
    first: Packet[VideoStream] | None = None
    times: array[int] = array("q")  # in the order of the file
    leading: set[int] = set()
    found: list[tuple[int, int, int]] = []  # place in the file, pts, dts
    latest: int | None = None
    try:
        for packet in container.demux(stream):
            if packet.size == 0 and packet.dts is None:  # PyAV's sign that the file is at its end
                continue
            first = first or packet
            pts = packet.pts
            if (
                pts is None
                or not is_plain(packet, first)
                or any(map(packet.has_sidedata, _CHANGES))
            ):
                return None
            seen = look(bytes(packet))
            if seen.entry and packet.is_keyframe and (latest is None or pts > latest):
                found.append((len(times), pts, pts if packet.dts is None else packet.dts))
            if seen.leading:
                leading.add(len(times))
            latest = pts if latest is None else max(latest, pts)
            times.append(pts)
            if len(times) % _OFTEN == 0:
                tick()
    except UnclearError:
        return None
    ordered = array("q", sorted(times))
    if any(one == other for one, other in pairwise(ordered)):
        return None
    entries = _entries(times, leading, found, ordered)
    return FrameIndex(ordered, entries) if entries and entries[0].frame == 0 else None


def _entries(
    times: array[int], leading: set[int], found: list[tuple[int, int, int]], ordered: array[int]
) -> list[Entry]:
    """Return those entries after which nothing is shown that was to be shown before them.

    Leading pictures are: HEVC's decoder leaves out those that it cannot decode.
    """
    entries: list[Entry] = []
    earliest: int | None = None  # of all frames behind that are not leading
    place = len(times)
    for begin, pts, dts in reversed(found):
        while place > begin + 1:
            place -= 1
            if place not in leading:
                earliest = times[place] if earliest is None else min(earliest, times[place])
        if earliest is None or earliest > pts:
            entries.append(Entry(bisect_left(ordered, pts), pts, dts))
    return entries[::-1]
