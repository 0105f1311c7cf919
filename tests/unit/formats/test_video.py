"""Frames read by their index are those of a full sequential decode, wherever decoding begins.

MP4 files that are written are what a browser plays, and nearly what was given.
"""

from __future__ import annotations

import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import pytest
from clip_world import whole
from hypothesis import given, settings
from hypothesis import strategies as st
from latentmake.base.errors import SourceError, StorageError
from latentmake.formats import video as file
from latentmake.formats.video import EndedError, probe, read_frames, write_mp4
from latentmake.geometry.clips import Media, kept_indices
from numpy.typing import NDArray
from video_world import KINDS, rewrap, scene, write_kind, write_video

COUNT = 60
X264 = "keyint=12:min-keyint=12:scenecut=0:bframes=3"
X265 = f"log-level=none:pools=1:frame-threads=1:{X264}"
VP9 = {"auto-alt-ref": "1", "lag-in-frames": "8", "cpu-used": "8", "g": "12"}
AV1 = {"preset": "12", "svtav1-params": "keyint=16:lp=1"}
EVERY_12 = [0, 12, 24, 36, 48]
EVERY_16 = [0, 16, 32, 48]

# Encoder, its options, and where decoding may begin.
FILES: dict[str, tuple[str, dict[str, str], list[int]]] = {
    "closed.mp4": ("libx264", {"x264-params": X264}, EVERY_12),
    "closed.mkv": ("libx264", {"x264-params": X264}, EVERY_12),
    "pyramid.mp4": ("libx264", {"x264-params": f"{X264}:b-pyramid=2:ref=4"}, EVERY_12),
    "hevc.mp4": ("libx265", {"x265-params": f"{X265}:open-gop=0"}, EVERY_12),
    # Behind each of these stand frames that are shown before it and refer to the GOP before.
    "open-hevc.mp4": ("libx265", {"x265-params": f"{X265}:open-gop=1"}, EVERY_12),
    "open-hevc.mkv": ("libx265", {"x265-params": f"{X265}:open-gop=1"}, EVERY_12),
    "vp9.webm": ("libvpx-vp9", VP9, EVERY_12),
    "vp9.mp4": ("libvpx-vp9", VP9, EVERY_12),
    "av1.mp4": ("libsvtav1", AV1, EVERY_16),
    "av1.webm": ("libsvtav1", AV1, EVERY_16),
    "prores.mov": ("prores_ks", {}, [*range(COUNT)]),
    # Packets flagged as key frames, where H.264 must not begin.
    "open.mp4": ("libx264", {"x264-params": f"{X264}:open-gop=1"}, [0]),
    "open.mkv": ("libx264", {"x264-params": f"{X264}:open-gop=1"}, [0]),
    "refresh.mp4": ("libx264", {"x264-params": f"{X264}:bframes=0:intra-refresh=1"}, [0]),
    "refresh.mkv": ("libx264", {"x264-params": f"{X264}:bframes=0:intra-refresh=1"}, [0]),
}


class Video(NamedTuple):
    path: str
    frames: list[NDArray[np.uint8]]


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Video]:
    folder = tmp_path_factory.mktemp("videos")
    found = {}
    for name, (codec, options, _) in FILES.items():
        format = "yuv422p10le" if codec == "prores_ks" else "yuv420p"
        found[name] = decoded(write_video(folder / name, codec, COUNT, format=format, **options))
    found["odd.mp4"] = decoded(odd_gops(folder / "odd.mp4"))
    return found


def decoded(path: Path) -> Video:
    """Decode a file from its beginning to its end."""
    return Video(str(path), whole(path))


def odd_gops(path: Path) -> Path:
    """Write GOPs of all lengths, by key frames at odd places."""
    keys = {0, 1, 2, 5, 6, 17, 40, 59}
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=30, options={"bf": "3", "forced-idr": "1"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number, picture in enumerate([*scene(COUNT, 64, 48)]):
            frame = av.VideoFrame.from_ndarray(picture // 4 + 64, format="rgb24")
            if number in keys:
                frame.pict_type = av.video.frame.PictureType.I
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


def entries(path: str) -> list[int] | None:
    file._indices.clear()
    [*read_frames(path, [3])]  # far enough to look for an entry
    times, entries = file._indices[path] or ((), None)
    return entries and [times.index(entry) for entry in entries]


@pytest.fixture(autouse=True)
def _jumps_are_near() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "_FAR", 2)
        yield


def check(video: Video, wanted: list[int]) -> None:
    """Compare frames read by their index with those of the whole."""
    found = [(index, pixels) for index, pixels in read_frames(video.path, wanted)]
    assert [index for index, pixels in found if pixels is not None] == wanted
    for index, pixels in found:
        assert pixels is None or np.array_equal(pixels, video.frames[index]), index


@pytest.mark.parametrize("name", FILES)
def test_decoding_begins_where_nothing_refers_to_what_stands_before(
    name: str, videos: dict[str, Video]
) -> None:
    video, expected = videos[name], FILES[name][2]
    assert len(video.frames) == COUNT
    assert entries(video.path) == expected
    last = expected[-1]
    for wanted in ([last], [COUNT - 1], [0, last, last + 1 if last + 1 < COUNT else last]):
        check(video, sorted({*wanted}))
    decoded: list[object] = []
    agrees = file._agrees
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "_agrees", lambda *args: decoded.append(args) or agrees(*args))
        check(video, [last])
    assert len(decoded) <= 2  # whether to jump, and the frame of the entry


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([*FILES, "odd.mp4"]),
    st.sets(st.integers(0, COUNT - 1), min_size=1, max_size=6),
    st.sampled_from([None, 24.0, 30.0, 59.94]),
    st.integers(1, 4),
)
def test_any_frames_are_those_of_the_whole(
    videos: dict[str, Video], name: str, chosen: set[int], fps: float | None, stride: int
) -> None:
    kept = [index for index, _ in kept_indices(COUNT, fps)][::stride]
    wanted = sorted({kept[place % len(kept)] for place in chosen})
    check(videos[name], wanted)


@pytest.mark.parametrize("name", KINDS)
def test_kinds_without_an_index_are_decoded_from_their_beginning(tmp_path: Path, name: str) -> None:
    video = decoded(write_kind(tmp_path, name))
    dice = random.Random(0)
    for _ in range(4):
        check(video, sorted(dice.sample(range(24), 3)))


def test_frames_of_an_edit_list_are_counted_as_decoding_counts_them(tmp_path: Path) -> None:
    source = write_video(tmp_path / "whole.mp4", "libx264", 48, bf="2", g="12")
    plain = {"avoid_negative_ts": "disabled"}
    video = decoded(rewrap(source, tmp_path / "cut.mp4", earlier=0.7, container=plain))
    assert len(video.frames) < 48
    for index in range(0, len(video.frames), 5):
        check(video, [index])


def test_frames_without_a_time_of_their_own_are_decoded_from_the_beginning(tmp_path: Path) -> None:
    source = write_video(tmp_path / "whole.mkv", "libx264", 48, bf="0", g="12")
    with av.open(str(source)) as old, av.open(str(tmp_path / "twice.mkv"), "w") as new:
        copy = new.add_stream_from_template(old.streams.video[0])
        for packet in old.demux(video=0):
            if packet.size:
                packet.stream = copy
                packet.pts = packet.dts = packet.pts // 100 * 100  # two of them share one
                new.mux(packet)
    video = decoded(tmp_path / "twice.mkv")
    assert len(video.frames) == 48
    assert entries(video.path) is None
    check(video, [5, 30, 47])


def test_a_video_that_ends_too_early_says_how_many_frames_it_has(videos: dict[str, Video]) -> None:
    for name in ("closed.mp4", "open.mkv", "av1.webm"):
        for wanted in ([0, COUNT], [COUNT + 40]):
            with pytest.raises(EndedError) as caught:
                [*read_frames(videos[name].path, wanted)]
            assert caught.value.frames == COUNT
            assert f"ends after {COUNT} frames, but frame {wanted[-1]}" in str(caught.value)


def test_damage_behind_an_entry_is_an_error_and_no_guess(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mkv", "libx264", COUNT, **{"x264-params": X264})
    sound = decoded(path)
    with av.open(str(path)) as file:
        places = [(packet.pos, packet.size) for packet in file.demux(video=0) if packet.size]
    data = bytearray(path.read_bytes())
    begin, size = places[37][0] + 20, places[37][1]
    data[begin : begin + size // 2] = bytes(255 - each for each in data[begin : begin + size // 2])
    path.write_bytes(data)
    with pytest.raises(SourceError, match="damaged"):
        [*read_frames(str(path), [47])]
    check(Video(str(path), sound.frames), [3, 14, 50, 59])  # in other GOPs


def test_an_index_that_turns_out_wrong_costs_time_and_no_frame(
    videos: dict[str, Video], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, frames = videos["closed.mkv"]
    assert entries(path)
    index = file._indices[path]
    assert index
    times, starts = index
    times = [*times[:30], *times[31:]]  # as if a packet held no picture
    monkeypatch.setitem(file._indices, path, (times, starts))
    check(Video(path, frames), [1, 30, 40])


def test_frames_decoded_in_vain_are_signs_of_life(
    videos: dict[str, Video], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "_ALIVE", 10)
    path = videos["open.mp4"].path
    file._indices.clear()
    first, again = ([*read_frames(path, [25])] for _ in range(2))
    assert [index for index, _ in again] == [0, 10, 20, 25]
    assert [pixels is None for _, pixels in again] == [True, True, True, False]
    assert len(first) == len(again) + COUNT // 10  # while the index was read


CLIP = np.random.default_rng(0).integers(0, 256, (9, 12, 20, 3), dtype=np.uint8)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("named", [False, True])
def test_frames_are_those_of_the_array(save: Any, named: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    if named:
        save(path, mask=np.zeros(3), frames=CLIP)
    else:
        save(path, CLIP)
    for wanted in ([0], [8], [1, 2, 7], range(9)):
        found = [*read_frames(str(path), wanted)]
        assert [index for index, _ in found] == [*wanted]
        assert all(np.array_equal(pixels, CLIP[index]) for index, pixels in found)
    assert [*probe(str(path))] == [Media(20, 12, 9)]
    with pytest.raises(EndedError) as caught:
        [*read_frames(str(path), [3, 9])]
    assert caught.value.frames == 9


class _Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("touched"),))


@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        ({"frames": CLIP[0]}, "holds uint8 [12, 20, 3], no clip"),
        ({"frames": CLIP.astype(np.float32)}, "holds float32 [9, 12, 20, 3], no clip"),
        ({"frames": CLIP[..., :1]}, "[9, 12, 20, 1], no clip"),
        ({"frames": CLIP[:0]}, "[0, 12, 20, 3], no clip"),
        ({"frames": np.asfortranarray(CLIP)}, "in Fortran's order, no clip"),
        ({"frames": np.array([_Evil()], object)}, "holds object [1], no clip"),
        ({"a": CLIP, "b": CLIP}, "holds 2 arrays, none of which is called frames"),
    ],
)
def test_what_is_no_clip_is_named_and_never_unpickled(
    arrays: dict[str, Any], what: str, working: Path
) -> None:
    np.savez("a.npz", **arrays)
    with pytest.raises(SourceError) as caught:
        [*read_frames("a.npz", [0])]
    assert what in str(caught.value) and str(caught.value).startswith("a.npz: ")
    assert not Path("touched").exists()


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, CLIP)
    whole = path.read_bytes()
    for data in (b"", b"hello", whole[:-30], whole[: len(whole) // 2]):
        path.write_bytes(data)
        with pytest.raises(SourceError, match="is damaged or no npz file"):
            [*read_frames(str(path), range(9))]
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(SourceError, match="CRC"):
        [*read_frames(str(path), range(9))]


def frames(count: int, width: int, height: int) -> list[NDArray[np.uint8]]:
    rows, columns = np.mgrid[0:height, 0:width]
    return [
        np.stack([columns * 2 + 5 * index, rows * 3, np.full_like(rows, 40 + index)], axis=-1)
        .clip(0, 255)
        .astype(np.uint8)
        for index in range(count)
    ]


def test_a_clip_is_h264_that_browsers_play(tmp_path: Path) -> None:
    path = tmp_path / "deep/clip.mp4"
    write_mp4(path, frames(9, 64, 48), fps=16)
    data = path.read_bytes()
    assert data[4:8] == b"ftyp"
    assert 0 < data.index(b"moov") < data.index(b"mdat")  # plays before all of it is there
    with av.open(str(path)) as clip:
        (stream,) = clip.streams.video
        assert len(clip.streams) == 1
        assert stream.codec_context.name == "h264"
        assert stream.codec_context.pix_fmt == "yuv420p"
        assert (stream.width, stream.height, stream.average_rate) == (64, 48, 16)
        assert stream.codec_context.colorspace == 1 and stream.codec_context.color_range == 1
        assert [float(frame.time) for frame in clip.decode(stream)] == [n / 16 for n in range(9)]


def test_its_frames_are_nearly_those_given(tmp_path: Path) -> None:
    given = frames(5, 33, 47)
    write_mp4(tmp_path / "clip.mp4", given)
    found = whole(tmp_path / "clip.mp4")
    assert len(found) == 5 and found[0].shape == (48, 34, 3)  # even, by repeating the last lines
    pairs = zip(found, given, strict=True)
    assert max(float(np.abs(a[:47, :33].astype(int) - b).mean()) for a, b in pairs) < 4


def test_the_same_frames_give_the_same_bytes(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 12, (5, 48, 34, 3)).cumsum(axis=2) + 128
    given, written = list(noise.clip(0, 255).astype(np.uint8)), set()
    for _ in range(50):
        write_mp4(tmp_path / "clip.mp4", given)
        written.add((tmp_path / "clip.mp4").read_bytes())
    assert len(written) == 1


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let no file become longer than some bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_files")
def test_a_full_disk_is_one_line_and_leaves_no_half_clip(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (20, 64, 64, 3), dtype=np.uint8)
    with pytest.raises(StorageError, match=r"clip\.mp4"):
        write_mp4(tmp_path / "clip.mp4", list(noise))
    assert not list(tmp_path.iterdir())
