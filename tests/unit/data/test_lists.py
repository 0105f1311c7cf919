"""Lists of videos and images: each row becomes an item or a fault with the number of its line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import video_world
from latentmake.base.errors import DatasetError
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.data import lists
from latentmake.data import probe as probing
from latentmake.data.item import Fault, Item, Scan
from latentmake.data.memo import Memo
from latentmake.data.probe import measured
from latentmake.data.texts import with_texts
from latentmake.geometry.clips import Clip, Span, kept_indices
from latentmake.layouts.layout import layout_of

WAN = Model.model_validate({"task": "t2v-1.3B", "vae": "vae", "text": "text"})


def write(path: Path, *rows: Any) -> Path:
    """Write a list; a text is a line as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def part(**columns: Any) -> dict[str, Any]:
    return {"video": "a.mp4", "prompt": "x", **columns}


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"content of " + os.fsencode(name))


def find(path: Path, **changes: Any) -> tuple[list[Item], list[Fault]]:
    asked = Dataset.model_validate({"path": str(path), "target_frames": [5], **changes})
    scan = lists.scan("d", asked)
    assert scan.items is not None
    items, faults, _ = with_texts(asked, scan.rows, scan.items, Memo(None), like_sdscripts=False)
    return items, sorted([*scan.faults, *faults])


def probe(
    path: Path, memo: Memo | None = None, **changes: Any
) -> tuple[list[Item], list[Fault], list[str]]:
    asked = Dataset.model_validate({"path": str(path), "target_frames": [5], **changes})
    memo = memo or Memo(None)
    scan = lists.scan("d", asked)
    assert scan.items is not None and scan.faults == []
    return measured(layout_of("musubi"), asked, scan, scan.items, Scan("", [], ""), memo, WAN)


def test_a_row_names_a_file_and_its_caption_in_any_of_the_usual_columns(tmp_path: Path) -> None:
    names = "abcdefghij"
    put(tmp_path, *(f"{name}.mp4" for name in names))
    columns = ("video", "video_path", "file_name", "path", "image", "image_path")
    columns += ("npz", "clip", "file", "media_path")
    captions = ("prompt", "caption", "text") * 3 + ("prompt",)
    rows = [
        {column: f"{name}.mp4", caption: f"text of {name}", "score": 3}
        for name, column, caption in zip(names, columns, captions, strict=True)
    ]
    found, faults = find(write(tmp_path / "list.jsonl", *rows))
    assert faults == []
    assert [(item.stem, item.texts) for item in found] == [(x, [f"text of {x}"]) for x in names]
    assert {json.dumps(item.row) for item in found} == {'{"score": 3}'}


def test_a_path_that_is_not_below_the_list_is_one_from_the_working_directory(working: Path) -> None:
    put(working, "both.mp4", "set/both.mp4", "set/a.mp4", "films/b.mp4", "c.mp4")
    put(working, "absolute.mp4")
    names = ["both.mp4", "set/a.mp4", "films/b.mp4", "c.mp4", f"{working}/absolute.mp4"]
    lost = ["nowhere.mp4", f"{working}/set/absolute.mp4"]
    path = write(working / "set/list.jsonl", *({"npz": x, "prompt": x} for x in names + lost))
    for place in (Path("set/list.jsonl"), path):
        found, faults = find(place)
        images = {item.stem: os.path.relpath(item.image) for item in found}
        files = ("set/both.mp4", "set/a.mp4", "films/b.mp4", "c.mp4", "absolute.mp4")
        outside = f"{working}/absolute"[1:].replace("/", "_")
        assert images == dict(zip(("both", "a", "films_b", "c", outside), files, strict=True))
        assert [fault.stem for fault in faults] == ["nowhere", "absolute"]
        assert all("does not exist" in fault.what for fault in faults)


def test_a_list_of_cut_clips_is_the_same_from_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "project/clips/films/a.npz")
    place = "clips/films/a.npz"
    row = {"npz": place, "video": place, "prompt": "x"}
    path = write(tmp_path / "project/clips/films/train.jsonl", row)
    for folder in (tmp_path / "project", tmp_path):
        monkeypatch.chdir(folder)
        for name in (path, Path(os.path.relpath(path))):
            (item,), faults = find(name)
            assert (item.stem, faults) == ("a", [])
            assert Path(item.image).absolute() == path.with_name("a.npz")


def test_a_caption_may_lie_beside_the_video(tmp_path: Path) -> None:
    put(tmp_path, "a.mp4", "a.txt", "b.mp4", "b.txt")
    found, faults = find(
        write(tmp_path / "list.jsonl", {"video": "a.mp4"}, {"video": "b.mp4", "prompt": "row"})
    )
    assert faults == []
    assert [(item.caption, item.texts) for item in found] == [
        (f"{tmp_path}/a.txt", None),
        (None, ["row"]),
    ]


@pytest.mark.parametrize(
    ("captions", "exact", "told"),
    [
        (None, False, "which are encoded as one text, and 1 more; set `captions: {enable_wildcard"),
        ({"caption_prefix": "sks"}, True, "of which the first is encoded, and 1 more; set"),
        ({"enable_wildcard": True, "variants": 2}, False, None),
    ],
)
def test_a_list_of_captions_that_is_encoded_as_one_text_is_told(
    tmp_path: Path, captions: dict[str, Any] | None, exact: bool, told: str | None
) -> None:
    put(tmp_path, "a.png", "b.png", "c.png")
    texts = (["one", "two"], ["one"], ["one", "two", "three"])
    path = tmp_path / "l.json"
    rows = [{"image": f"{x}.png", "caption": y} for x, y in zip("abc", texts, strict=True)]
    path.write_text(json.dumps(rows, indent=1))
    asked = Dataset.model_validate({"path": str(path), "captions": captions})
    scan = lists.scan("d", asked)
    found = with_texts(asked, scan.rows, scan.items or [], Memo(None), like_sdscripts=exact)
    if told is None:
        assert (found[0][0].texts, found[2]) == (["one", "two"], [])
    else:
        assert found[2][0].startswith(f"{path}, line 2: {tmp_path}/a.png has a list of 2 captions,")
        assert told in found[2][0]


def test_a_link_that_leads_nowhere_is_named_wherever_a_list_meets_it(tmp_path: Path) -> None:
    put(tmp_path, "a.mp4", "b.mp4", "b.txt")
    for name in ("a.txt", "c.mp4", "drive", "gone.jsonl"):
        (tmp_path / name).symlink_to("/not/mounted")
    names = ("a.mp4", "b.mp4", "c.mp4", "drive/d.mp4")
    path = write(tmp_path / "list.jsonl", *({"video": name} for name in names))
    found, faults = find(path, class_tokens="sks")
    assert [item.stem for item in found] == ["b"]
    nowhere = "a link that leads nowhere"
    for fault, name, what in zip(
        faults,
        ("a.txt", "c.mp4", "drive/d.mp4"),
        (f"is {nowhere}", f"is {nowhere}", f"lies behind {tmp_path}/drive, {nowhere}"),
        strict=True,
    ):
        assert f"{tmp_path}/{name}: {what}; repair or remove it" in fault.line
    with pytest.raises(DatasetError, match=f"gone.jsonl is {nowhere}; mount its drive"):
        find(tmp_path / "gone.jsonl")


def test_one_video_may_have_several_spans_with_names_and_captions_of_their_own(
    tmp_path: Path,
) -> None:
    put(tmp_path, "a.mp4")
    spans: list[dict[str, Any]] = [
        {},
        {"first_frame": 120, "frames": 81},
        {"first_frame": 120, "frames": 81, "stride": 2},
        {"first_frame": 120},
        {"stride": 3},
        {"start": 1.5, "end": 60},
        {"start": 2, "frames": 5},
    ]
    rows = [{"video": "a.mp4", "prompt": f"{n}", **each} for n, each in enumerate(spans)]
    found, faults = find(write(tmp_path / "list.jsonl", *rows))
    assert faults == []
    assert {item.stem: (item.span, item.window) for item in found} == {
        "a": (None, None),
        "a.f120-81": (Span(120, 81, 1, single=True), None),
        "a.f120-81x2": (Span(120, 81, 2, single=True), None),
        "a.f120": (Span(120), None),
        "a.x3": (Span(stride=3), None),
        "a.s1.5-60": (None, (1.5, 60.0)),
        "a.s2.5": (Span(0, 5, 1, single=True), (2.0, None)),
    }
    assert len({text for item in found for text in item.texts or []}) == len(spans)
    (tmp_path / "list.csv").write_text("video,text,frames,stride\na.mp4,x,81,\n")
    assert find(tmp_path / "list.csv")[0][0].span == Span(0, 81, 1, single=True)


def test_the_strides_of_rows_come_before_that_of_the_dataset(tmp_path: Path) -> None:
    put(tmp_path, "a.mp4")
    path = write(
        tmp_path / "list.jsonl",
        {"video": "a.mp4", "prompt": "p"},
        {"video": "a.mp4", "prompt": "p", "stride": 3},
    )
    found, _ = find(path, sample_stride=2)
    assert [item.span for item in found] == [Span(stride=2), Span(stride=3)]


def test_captions_and_tags_of_rows_are_composed_like_those_of_files(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png")
    (tmp_path / "b.txt").write_text("from a file")
    (tmp_path / "b.tags").write_text("x, y")
    path = write(
        tmp_path / "list.jsonl",
        {"image": "a.png", "prompt": "from the row", "tags": ["u", "v"]},
        {"image": "b.png"},
    )
    asked = {"tags_extension": ".tags", "captions": {"caption_prefix": "photo:"}}
    found, faults = find(path, target_frames=None, **asked)
    assert faults == []
    assert {item.stem: item.texts for item in found} == {
        "a": ["photo: from the row,u, v"],
        "b": ["photo: from a file,x, y"],
    }


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("{,", "is not JSON"),
        ('{"video": "a.mp4", "prompt": "x", "n": NaN}', "is not JSON (Out of range"),
        ({"video": "", "prompt": "x"}, "names no file, but ''"),
        ({"video": 3, "prompt": "x"}, "names no file, but 3"),
        ({"video": "none.mp4", "prompt": "x"}, "none.mp4: does not exist"),
        ({"video": "a.mp4/x.mp4", "prompt": "x"}, "a.mp4/x.mp4: does not exist"),
        ({"video": "folder.mp4", "prompt": "x"}, "folder.mp4: is a folder"),
        ({"video": "pipe.mp4", "prompt": "x"}, "pipe.mp4: is a pipe"),
        ({"video": "../a.mp4", "prompt": "x"}, "outside the list's folder"),
        ({"video": "a\x07.mp4", "prompt": "x"}, "has a control character"),
        ({"video": "x" * 300 + ".mp4", "prompt": "x"}, "name too long"),
        ({"video": "b.txt", "prompt": "x"}, "b.txt is no video"),
        ({"video": ".mp4", "prompt": "x"}, "/.mp4 is no video"),
        ({"video": "set.1/walk", "prompt": "x"}, "set.1/walk is no video"),
        ({"video": "a.mp4"}, "a.mp4: has no caption file"),
        ({"video": "a.mp4", "prompt": " "}, "a.mp4: has an empty caption"),
        ({"video": "a.mp4", "prompt": "x" * 1_000_001}, "is longer than 1000000 bytes"),
        (part(frames=80), "use 77 or 81"),
        (part(frames=-3), "has frames: -3 (should be greater than"),
        (part(frames=True), "(should be a number)"),
        (part(first_frame=-1), "should be greater than or equal to 0"),
        (part(first_frame=1.5), "should be a valid integer"),
        (part(start="x"), "should be a valid number"),
        (part(end=10**400), "should be a valid number"),
        (part(stride=2**31), "should be less than or equal to 2147483647"),
        ("[" * 200_000, "is nested too deeply"),
        (part(start=3, end=2), "is not after its start"),
        (part(first_frame=1, end=2), "and seconds: leave out"),
        (part(frames=5, end=2), "frames and end: leave out"),
    ],
)
def test_a_bad_row_is_named_by_its_line_and_stops_no_other(
    tmp_path: Path, row: Any, what: str
) -> None:
    put(tmp_path, "a.mp4", "b.txt", "good.mp4", ".mp4", "set.1/walk")
    (tmp_path / "folder.mp4").mkdir()
    os.mkfifo(tmp_path / "pipe.mp4")
    path = write(tmp_path / "list.jsonl", {"video": "good.mp4", "prompt": "p"}, "", row)
    found, (fault,) = find(path)
    assert [item.stem for item in found] == ["good"]
    assert fault.line.startswith(f"{path}, line 3: ")
    assert what in fault.line and "\n" not in fault.line and "; " in fault.line


def test_a_row_of_an_image_of_a_format_that_is_not_read_says_so(tmp_path: Path) -> None:
    put(tmp_path, "a.heic")
    path = write(tmp_path / "list.jsonl", {"image": "a.heic", "prompt": "p"})
    _, (fault,) = find(path, target_frames=None)
    assert f"{tmp_path}/a.heic is a HEIC image, which cannot be read: convert it" in fault.line


def test_two_rows_of_the_same_clip_and_two_files_of_one_name_are_faults(tmp_path: Path) -> None:
    put(tmp_path, "a.mp4", "a.mkv", "b/c.mp4", "b_c.mp4")
    same = {"video": "a.mp4", "prompt": "x"}
    others = [{"video": name, "prompt": "x"} for name in ("a.mkv", "b/c.mp4", "b_c.mp4")]
    found, faults = find(write(tmp_path / "list.jsonl", same, {**same, "prompt": "y"}, *others))
    assert [item.stem for item in found] == ["a", "b_c"]
    lines = [fault.line for fault in faults]
    assert "line 2: is the same clip as line 1" in lines[0]
    assert "line 3: shares its name a with" in lines[1]
    assert "line 5: shares its name b_c with" in lines[2]


def test_what_is_no_list_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    for name, what in (
        ("none.jsonl", "cannot be read (No such file"),
        ("empty.jsonl", "has no row; write an object a line"),
    ):
        with pytest.raises(DatasetError, match=r"^datasets\.d\.path: ") as caught:
            find(tmp_path / name)
        assert what in str(caught.value)


def test_a_folder_with_the_name_of_a_list_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "set.json").mkdir()
    assert not Dataset(path=str(tmp_path / "set.json")).is_list


def test_a_listing_changes_with_each_file_that_rows_name(tmp_path: Path) -> None:
    put(tmp_path, "a.mp4", "b.mp4", "b.txt", "other.mp4")
    path = write(tmp_path / "list.jsonl", {"video": "a.mp4", "prompt": "p"}, {"video": "b.mp4"})
    asked = Dataset(path=str(path), target_frames=[5])

    def print_() -> str:
        return lists.scan("d", asked).fingerprint

    seen = {print_()}
    for name in ("a.mp4", "b.mp4", "b.txt"):
        (tmp_path / name).write_bytes(b"another content")
        seen.add(print_())
    assert len(seen) == 4
    (tmp_path / "other.mp4").write_bytes(b"another content")
    assert print_() in seen


def clips(item: Item, **changes: Any) -> list[Clip]:
    assert item.media is not None
    asked = Dataset.model_validate({"path": "d", "target_frames": [5], **changes})
    return layout_of("musubi").clips(item.media, asked, item.span)


def test_spans_are_found_by_frames_and_by_seconds(tmp_path: Path) -> None:
    video_world.write_video(tmp_path / "a.mp4", "mpeg4", 48)  # 24 frames a second
    rows: list[dict[str, Any]] = [
        {"first_frame": 30},
        {"first_frame": 39, "frames": 9},
        {"start": 1.0, "end": 1.5},
        {"start": 0.5, "frames": 5},
    ]
    path = write(
        tmp_path / "list.jsonl", *({"video": "a.mp4", "prompt": "p", **row} for row in rows)
    )
    found, *others = probe(path, frame_extraction="chunk")
    assert others == [[], []]
    assert {
        item.stem: (item.span, len(clips(item, frame_extraction="chunk"))) for item in found
    } == {
        "a.f30": (Span(30), 3),
        "a.f39-9": (Span(39, 9, 1, single=True), 1),
        "a.s1-1.5": (Span(24, 12), 2),
        "a.s0.5.5": (Span(12, 5, 1, single=True), 1),
    }


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"first_frame": 21, "frames": 5}, "names 5 frames from frame 21 on, but the video has 24"),
        ({"first_frame": 24}, "has 24 frames, and its row begins at frame 24"),
        ({"start": 1.0}, "is 1.00 s long, and its row names 1 to the end"),
        ({"end": 1.5}, "is 1.00 s long, and its row names 0 to 1.5"),
        ({"frames": 9, "stride": 3}, "names 9 frames from frame 0 on (every 3), but the video has"),
    ],
)
def test_a_row_that_names_frames_beyond_the_end_is_a_fault(
    tmp_path: Path, row: dict[str, Any], what: str
) -> None:
    video_world.write_video(tmp_path / "a.mp4", "mpeg4", 24)
    path = write(tmp_path / "list.jsonl", {"video": "a.mp4", "prompt": "p", **row})
    _, (fault,), _ = probe(path)
    assert what in fault.line and fault.line.startswith(f"{path}, line 1: {tmp_path}/a.mp4: ")


def test_short_videos_are_left_out_with_a_line_or_faulty(tmp_path: Path) -> None:
    for name, count in (("a", 1), ("b", 8)):
        video_world.write_video(tmp_path / f"{name}.mp4", "mpeg4", count)
    path = write(
        tmp_path / "list.jsonl", *({"video": f"{x}.mp4", "prompt": "p"} for x in ("a", "b"))
    )
    found, faults, notes = probe(path)
    assert [item.stem for item in found] == ["b"] and faults == []
    line = "a.mp4 has too few frames for any clip of target_frames: it is left out"
    assert notes == [f"{path}, line 1: {tmp_path}/{line}"]
    _, faults, notes = probe(path, short_videos="error")
    assert notes == [] and "too few frames for any clip" in faults[0].line
    video_world.write_video(tmp_path / "b.mp4", "mpeg4", 3)
    assert probe(path)[2] == [f"{path}, line 1: {tmp_path}/{line}, and 1 more"]


def test_clips_in_npz_files_are_items(tmp_path: Path) -> None:
    frames = np.zeros((9, 32, 48, 3), np.uint8)
    np.savez(tmp_path / "a.npz", frames=frames)
    np.savez_compressed(tmp_path / "b.npz", frames)
    np.savez(tmp_path / "c.npz", frames.astype(np.float32))
    np.savez(tmp_path / "d.npz", frames[..., 0])
    (tmp_path / "e.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:1000])
    path = write(tmp_path / "train.jsonl", *({"video": f"{x}.npz", "prompt": "p"} for x in "abcde"))
    found, faults, _ = probe(path, target_frames=9)
    sizes = [(item.stem, item.media and item.media[:3]) for item in found]
    assert sizes == [("a", (48, 32, 9)), ("b", (48, 32, 9))]
    assert [clips(item, target_frames=9) for item in found] == [[Clip(0, 9)]] * 2
    assert len(faults) == 3
    assert all("\n" not in fault.line for fault in faults)
    found, faults, _ = probe(path, target_frames=9, max_image_pixels=48 * 32 - 1)
    assert not found and "48 x 32 pixels, more than 1535" in faults[0].line


def test_a_video_of_many_rows_is_probed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    video_world.write_video(tmp_path / "a.mp4", "mpeg4", 24)
    rows = [{"video": "a.mp4", "prompt": "p", "first_frame": n} for n in range(9)]
    asked: list[str] = []
    real = probing.probe_videos

    def counted(paths: Any) -> Any:
        asked.extend(paths)
        return real(paths)

    monkeypatch.setattr(probing, "probe_videos", counted)
    with Memo(tmp_path / "memo.sqlite") as memo:
        assert len(probe(write(tmp_path / "list.jsonl", *rows), memo)[0]) == 9
    assert asked == [f"{tmp_path}/a.mp4"]
    with Memo(tmp_path / "memo.sqlite") as memo:
        probe(tmp_path / "list.jsonl", memo)
    assert len(asked) == 1


def test_a_rotation_is_told_with_its_key_and_a_variable_rate_counts_by_its_key(
    tmp_path: Path,
) -> None:
    times = [0, 40, 80, 200, 240, 500, 520, 560]
    video_world.write_timed(tmp_path / "a.mp4", times, "mpeg4")
    video_world.turn(video_world.write_video(tmp_path / "c.mp4", "libx264", 9))
    path = write(tmp_path / "list.jsonl", *({"video": f"{x}.mp4", "prompt": "p"} for x in "ac"))
    assert probe(path)[2] == [
        f"{tmp_path}/c.mp4 has a rotation for display, which does not count; set "
        "`display_rotation: true`"
    ]
    found, _, notes = probe(path, source_fps="auto", display_rotation=True)
    assert notes == []
    media = {item.stem: item.media for item in found}
    # From 0 to 600 ms: shown at 0, 62.5, 125, ... the frames that began last.
    kept = kept_indices(8, "auto", timing=media["a"].timing if media["a"] else "")
    assert [index for index, _ in kept] == [0, 1, 2, 2, 4, 4, 4, 4, 5, 7]
    assert media["c"] is not None and media["c"][:2] == (48, 64) and media["c"].rotation == 90


def test_orders_hold_timestamps_and_rotation_only_where_they_count(tmp_path: Path) -> None:
    video_world.turn(video_world.write_video(tmp_path / "a.mp4", "libx264", 9))
    path = write(tmp_path / "list.jsonl", {"video": "a.mp4", "prompt": "p"})
    ((item,), *_) = probe(path)
    assert item.media == (64, 48, 9, "", 0)


@pytest.mark.parametrize("up", ["/..", "/none/../..", "//.."])
def test_an_absolute_name_with_dots_leads_no_cache_out_of_its_folder(
    up: str, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(b"picture")
    path = write(tmp_path / "list.jsonl", {"image": f"{up}{tmp_path}/a.png", "prompt": "p"})
    (item,), faults = find(path, target_frames=None)
    assert not faults and Path(item.image).samefile(tmp_path / "a.png")
    assert ".." not in f"{item.image}/{item.stem}".split("/")
