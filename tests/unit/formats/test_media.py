"""What probing says is what decoding gives, for containers and codecs sound and unsound."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from pathlib import Path

import av
import numpy as np
import pytest
from latentmake.base.errors import SourceError
from latentmake.formats import media
from latentmake.formats.endings import IMAGE_EXTENSIONS, IMAGE_FORMATS
from latentmake.formats.media import probe_image, probe_video
from latentmake.geometry.clips import Media, Timing
from PIL import Image
from refusals import refused
from video_world import KINDS, rewrap, turn, write_kind, write_timed, write_video

ROOT = Path(__file__).resolve().parents[3]


def decoded(path: Path) -> tuple[int, int, int]:
    """Width, height and number of the frames that decoding the whole file gives."""
    sizes = []
    with av.open(str(path)) as file:
        for frame in file.decode(video=0):
            picture = frame.to_image()
            sizes.append(picture.size)
    return (*sizes[0], len(sizes))


def packets(path: Path) -> int:
    with av.open(str(path)) as file:
        return sum(1 for _ in file.demux(video=0)) - 1  # the last one is PyAV's own


def refusal(path: Path) -> str:
    return refused(lambda: probe_video(str(path)), path, SourceError)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
def test_an_image_has_its_stored_size(tmp_path: Path, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a viewer would turn it by a quarter
    path = tmp_path / "a"
    Image.new("RGB", (30, 20)).save(path, kind, exif=exif)
    assert probe_image(str(path)) == Media(30, 20, 0)


def test_the_header_of_an_image_suffices(tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    Image.fromarray(dice.integers(0, 256, (200, 300, 3), np.uint8)).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    (tmp_path / "short.png").write_bytes(data[: len(data) // 2])
    assert probe_image(str(tmp_path / "short.png")) == Media(300, 200, 0)


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("hello")
    for name, what in (
        ("empty.png", "is an empty file"),
        ("text.png", "is not an image that can be read (JPEG, PNG, WebP, BMP, TIFF, GIF or AVIF)"),
        ("none.png", "cannot be read (No such file"),
        ("", "cannot be read (Is a directory"),
    ):
        with pytest.raises(SourceError) as caught:
            probe_image(str(tmp_path / name))
        assert what in str(caught.value)


@pytest.mark.parametrize(
    ("begin", "kind"),
    [
        (b"\0\0\0\x24ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic", "HEIC"),
        (b"\xff\x0a\xfa\x7f\x01", "JPEG XL"),
        (b"\0\0\0\x0cJXL \x0d\x0a\x87\x0a", "JPEG XL"),
    ],
)
def test_an_image_of_a_phone_or_of_jpeg_xl_is_named_whatever_it_is_called(
    tmp_path: Path, begin: bytes, kind: str
) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(begin + b"\0" * 100)
    with pytest.raises(SourceError) as caught:
        probe_image(str(path))
    what = f"is a {kind} image, which cannot be read; convert it to PNG or JPEG, or remove it"
    assert str(caught.value) == f"{path}: {what}"


@pytest.mark.parametrize("kind", ["PPM", "TGA", "ICO", "PCX", "JPEG2000", "PDF", "SGI", "EPS"])
def test_an_image_of_another_format_is_refused_whatever_it_is_called(
    tmp_path: Path, kind: str
) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png", kind)
    with pytest.raises(SourceError, match="is not an image that can be read"):
        probe_image(str(tmp_path / "a.png"))


def test_every_documented_ending_is_read(tmp_path: Path) -> None:
    Image.init()
    known = Image.registered_extensions()
    assert {known[ending] for ending in IMAGE_EXTENSIONS} == {*IMAGE_FORMATS}
    for ending in IMAGE_EXTENSIONS:
        Image.new("RGB", (30, 20)).save(tmp_path / f"a{ending}")
        assert probe_image(str(tmp_path / f"a{ending}")) == Media(30, 20, 0)
    two = [Image.new("RGB", (30, 20))]
    Image.new("RGB", (30, 20)).save(tmp_path / "two.jpg", "MPO", save_all=True, append_images=two)
    assert probe_image(str(tmp_path / "two.jpg")) == Media(30, 20, 0)  # as some cameras write it


def test_no_image_is_opened_in_any_format() -> None:
    files = [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "docs").rglob("*.py")]
    opened = [
        line for file in files for line in file.read_text().splitlines() if "Image.open" in line
    ]
    assert opened and all("formats=" in line for line in opened)


@pytest.mark.parametrize("name", KINDS)
def test_a_video_has_the_frames_that_decoding_gives_and_a_constant_rate_is_one_number(
    tmp_path: Path, name: str
) -> None:
    path = write_kind(tmp_path, name)
    found = probe_video(str(path))
    assert found[:3] == decoded(path) == (64, 48, 24)
    timing = Timing.parse(found.timing)
    assert timing.runs == ((1, 24),)
    assert float(24 / timing.seconds) == pytest.approx(24, rel=0.01)


@pytest.mark.parametrize(
    ("codec", "options"),
    [("libsvtav1", {"preset": "12"}), ("libx264", {"x264-params": "interlaced=1:tff=1"})],
    ids=["AV1", "interlaced"],
)
def test_pictures_are_counted_and_no_packets_or_fields(
    tmp_path: Path, codec: str, options: dict[str, str]
) -> None:
    path = write_video(tmp_path / "a.mp4", codec, size=(64, 64), **options)
    assert probe_video(str(path))[:3] == decoded(path) == (64, 64, 24)


def bytes_read() -> int:
    """How many bytes this process has read from files and pipes."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("flags", ["disable_chpl", "faststart", "frag_keyframe"])
def test_mp4_is_counted_without_its_media_data(tmp_path: Path, flags: str) -> None:
    path = write_video(
        tmp_path / "a.mp4",
        "libx264",
        size=(640, 480),
        container={"movflags": flags},
        **{"x264-params": "bframes=3:keyint=8", "qp": "0", "preset": "ultrafast"},
    )
    before = bytes_read()
    assert probe_video(str(path))[:3] == (640, 480, 24)
    assert bytes_read() - before < path.stat().st_size / 4 > 500_000


MOVIES = {
    "h264.mp4": ("libx264", {"bf": "3", "g": "8"}),
    "h264 open GOP.mov": (
        "libx264",
        {"x264-params": "keyint=12:min-keyint=12:scenecut=0:open-gop=1:bframes=3"},
    ),
    "h265.mp4": ("libx265", {"x265-params": "log-level=none:pools=1:frame-threads=1"}),
    "vp9.mp4": ("libvpx-vp9", {"auto-alt-ref": "1", "lag-in-frames": "8", "cpu-used": "8"}),
    "mjpeg.mov": ("mjpeg", {"format": "yuvj420p"}),
    "prores.mov": ("prores_ks", {"format": "yuv422p10le"}),
}


@pytest.mark.parametrize("name", MOVIES)
def test_media_data_does_not_change_what_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    codec, options = MOVIES[name]
    paths = []
    for number, flags in enumerate(["faststart", "frag_keyframe", "dash"]):
        path = tmp_path / f"{number}{name[-4:]}"
        write_video(path, codec, size=(96, 96), container={"movflags": flags}, **options)
        cut = rewrap(path, tmp_path / f"cut {path.name}", earlier=0.3)
        path.with_stem("short").write_bytes(path.read_bytes()[: path.stat().st_size * 4 // 5])
        paths += [path, cut, path.with_stem("short")]
    times = [0, 40, 80, 200, 240, 500, 520, 560] if codec == "libx264" else []
    paths += [write_timed(tmp_path / f"timed{name[-4:]}", times)] if times else []

    def found() -> list[Media | str]:
        return [_probed_or_refused(path) for path in paths]

    # FFmpeg reads in small pieces, so that little is read before media data is skipped.
    monkeypatch.setattr(av, "open", partial(av.open, buffer_size=256))
    skipping = found()
    monkeypatch.setattr(media.VideoFile, "skip", lambda _: None)
    assert found() == skipping


def _probed_or_refused(path: Path) -> Media | str:
    try:
        return probe_video(str(path))
    except SourceError as error:
        return str(error)


def test_frames_before_the_beginning_that_an_edit_list_sets_are_not_counted(tmp_path: Path) -> None:
    whole = write_video(tmp_path / "whole.mp4", "libx264", 24, bf="2", g="24")
    cut = rewrap(
        whole, tmp_path / "cut.mp4", earlier=0.3, container={"avoid_negative_ts": "disabled"}
    )
    assert packets(cut) == 24
    assert probe_video(str(cut))[:3] == decoded(cut)
    assert probe_video(str(cut)).frames < 24


def test_frames_that_refer_to_what_was_cut_off_are_not_counted(tmp_path: Path) -> None:
    codec, options = MOVIES["h264 open GOP.mov"]
    whole = write_video(tmp_path / "whole.mkv", codec, 48, **options)
    cut = rewrap(whole, tmp_path / "cut.mkv", skip_keys=1)
    assert probe_video(str(cut))[:3] == decoded(cut)
    assert probe_video(str(cut)).frames < packets(cut)


def test_a_turned_video_keeps_its_stored_size(tmp_path: Path) -> None:
    whole = write_video(tmp_path / "a.mp4", "libx264", 5)
    turn(whole)
    with av.open(str(whole)) as file:
        assert abs(next(file.decode(video=0)).rotation) == 90
    found = probe_video(str(whole))
    assert found[:3] == (64, 48, 5)
    with av.open(str(whole)) as file:
        assert found.rotation == -next(file.decode(video=0)).rotation % 360 in (90, 270)


@pytest.mark.parametrize("name", ["a.mkv", "a.mp4", "a.avi"])
def test_timestamps_of_a_variable_rate_are_known(tmp_path: Path, name: str) -> None:
    times = [0, 40, 80, 200, 240, 500, 520, 560]
    found = probe_video(str(write_timed(tmp_path / name, times, "mpeg4")))
    timing = Timing.parse(found.timing)
    assert timing.simplified() == timing
    steps = [step for step, number in timing.runs for _ in range(number)]
    starts = accumulate(steps[:-1], initial=0)
    assert [round(start * timing.base * 1000) for start in starts] == times


def test_what_is_no_video_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("hello" * 100)
    assert "is an empty file; replace or remove it" in refusal(tmp_path / "empty.mp4")
    assert "is not a video that FFmpeg can read" in refusal(tmp_path / "text.mp4")
    assert "cannot be read (No such file" in refusal(tmp_path / "none.mp4")
    whole = write_kind(tmp_path, "h264.mp4").read_bytes()
    (tmp_path / "codec.mp4").write_bytes(whole.replace(b"avc1", b"xyz1"))
    assert "coded in a way that this FFmpeg cannot decode" in refusal(tmp_path / "codec.mp4")


def test_a_file_of_sound_alone_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("aac", rate=44_100)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        sound.sample_rate = 44_100
        for frame in (sound, None):
            for packet in stream.encode(frame):
                file.mux(packet)
    assert "holds no video stream" in refusal(path)


@pytest.mark.parametrize(
    "playlist",
    [
        "ffconcat version 1.0\nfile other.mp4\n",
        "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\n"
        "m=video 45678 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\n",
    ],
    ids=["concat", "sdp"],
)
def test_a_playlist_in_disguise_leads_nowhere(working: Path, playlist: str) -> None:
    write_video(working / "other.mp4", "mpeg4", 5)
    (working / "a.mp4").write_text(playlist)
    assert "is not a video that FFmpeg can read" in refusal(working / "a.mp4")


@pytest.mark.parametrize("part", [0.2, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("name", KINDS)
def test_a_file_cut_short_is_named_or_has_the_frames_that_are_left(
    tmp_path: Path, name: str, part: float
) -> None:
    whole = write_kind(tmp_path, name)
    data = whole.read_bytes()
    whole.write_bytes(data[: int(len(data) * part)])
    try:
        expected = decoded(whole)
    except (av.error.FFmpegError, IndexError):
        refusal(whole)
    else:
        assert probe_video(str(whole))[:3] == expected
