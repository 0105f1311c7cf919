"""Every image becomes an item or a named fault, whatever lies in its folder, in one fixed order."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from file_clock import await_another_time
from latentmake.base.digest import source_stat
from latentmake.base.errors import DatasetError
from latentmake.config.datasets import Dataset
from latentmake.data.folders import items
from latentmake.data.item import CAPTION, IMAGE, Fault, File, Item, Scan
from latentmake.data.listing import scan
from latentmake.data.memo import Memo
from latentmake.data.texts import rows_of_items, with_texts
from latentmake.data.unread import unread
from latentmake.formats.endings import IMAGE_EXTENSIONS


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"content of " + os.fsencode(name))


def find(root: Path, **changes: object) -> tuple[list[Item], list[Fault]]:
    settings_ = Dataset(path=str(root), **changes)  # type: ignore[arg-type]
    return described(settings_, scan("cats", settings_))


def described(settings_: Dataset, scanned: Scan) -> tuple[list[Item], list[Fault]]:
    found, faults = items("cats", settings_, scanned)
    rows, others = rows_of_items("cats", settings_, scanned, found)
    found, more, _ = with_texts(settings_, rows, found, Memo(None), like_sdscripts=False)
    return found, sorted([*faults, *others, *more])


def stems(root: Path, **changes: object) -> list[str]:
    found, faults = find(root, **changes)
    assert faults == []
    return [item.stem for item in found]


def fault(root: Path, **changes: object) -> str:
    (only,) = find(root, **changes)[1]
    assert "\n" not in only.line
    return only.line


def test_an_image_goes_with_the_caption_beside_it(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "a.txt", "sub/a.jpg", "sub/a.txt")
    found, faults = find(tmp_path)
    assert faults == []
    assert [(item.stem, item.image, item.caption) for item in found] == [
        ("a", f"{tmp_path}/a.png", f"{tmp_path}/a.txt"),
        ("sub/a", f"{tmp_path}/sub/a.jpg", f"{tmp_path}/sub/a.txt"),
    ]
    assert found[0].files == tuple(
        File(role, str(path), source_stat(path.stat()))
        for role, path in ((IMAGE, tmp_path / "a.png"), (CAPTION, tmp_path / "a.txt"))
    )


@pytest.mark.parametrize("ending", sorted(IMAGE_EXTENSIONS))
def test_every_image_ending_counts_in_any_case(tmp_path: Path, ending: str) -> None:
    put(tmp_path, f"low{ending}", "low.txt", f"HIGH{ending.upper()}", "HIGH.txt")
    assert stems(tmp_path) == ["HIGH", "low"]


CACHES = "a.img_sdxl a.img_sdvae a.txt_t5cache a.img_sdxl.webp a.img_sdvae.webp"
FOUND: list[tuple[str, dict[str, str], list[str]]] = [
    ("a.b.png a.b.txt dir.png/c.jpg dir.png/c.txt", {}, ["a.b", "dir.png/c"]),
    (f"a.png a.txt {CACHES}", {}, ["a"]),
    ("a.png a.txt .a.png .hidden/b.png sub/.DS_Store ._a.txt", {}, ["a"]),
    ("a.png a.txt a.json README sub/list.csv png", {}, ["a"]),
    ("a.png a.txt b.png/x.png b.png/x.txt b.txt/notes", {}, ["a", "b.png/x"]),
    # Links in a circle end and name no file twice.
    ("sub/a.png sub/a.txt", {"sub/again": "..", "all": "."}, ["sub/a"]),
]


@pytest.mark.parametrize(("names", "links", "expected"), FOUND)
def test_items_are_named_by_their_images_and_other_files_are_passed_over(
    tmp_path: Path, names: str, links: dict[str, str], expected: list[str]
) -> None:
    put(tmp_path, *names.split())
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    assert stems(tmp_path) == expected


def test_another_caption_ending_is_used_and_txt_then_means_nothing(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "a.caption", "a.txt", "notes.txt")
    assert stems(tmp_path, caption_extension=".caption") == ["a"]


def test_a_missing_caption_is_a_fault_or_the_empty_caption(tmp_path: Path) -> None:
    put(tmp_path, "a.png")
    assert "a.png: has no caption file; write" in fault(tmp_path)
    assert "set `class_tokens` to a caption for all of them" in fault(tmp_path)
    found, faults = find(tmp_path, missing_caption="empty")
    assert faults == []
    assert [file.role for file in found[0].files] == [IMAGE] and found[0].caption is None
    put(tmp_path, "b.png", "b.txt")
    found, faults = find(tmp_path, class_tokens="sks man")
    assert [item.texts for item in found] == [["sks man"], None] and not faults


def test_a_caption_without_an_image_is_a_fault(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "a.txt", "b.txt")
    assert f"{tmp_path}/b.txt: is a caption without an image; add" in fault(tmp_path)


def test_a_caption_that_only_looks_named_like_its_image_is_told_so(tmp_path: Path) -> None:
    put(tmp_path, "Ma\u0308rchen.png", "M\u00e4rchen.txt")
    (line,) = [each.line for each in find(tmp_path)[1] if each.path.endswith(".txt")]
    assert line == (
        f"{tmp_path}/M\u00e4rchen.txt: looks named like {tmp_path}/Ma\u0308rchen.png, but in other "
        "Unicode characters (NFC, NFD); rename both: type their names again"
    )


def test_an_image_of_a_format_that_is_not_read_is_named_and_not_its_caption(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "a.txt", "a.heic", "sub/b.HEIC", "sub/b.txt", "c.jxl")
    assert fault(tmp_path) == (
        f"{tmp_path}/sub/b.HEIC: is a HEIC image, which cannot be read; "
        "convert it to PNG or JPEG, or remove it"
    )
    with pytest.raises(DatasetError, match=r"no image; 1 file is not read: 1 \.HEIC"):
        find(tmp_path / "sub")


def test_two_images_of_one_stem_are_one_fault_that_names_both(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "a.jpg", "a.txt", "b.png", "b.txt")
    line = fault(tmp_path)
    assert "a.jpg: has the same name as a.png" in line
    assert [item.stem for item in find(tmp_path)[0]] == ["b"]


def test_a_link_that_leads_nowhere_is_a_fault_of_its_own_item(tmp_path: Path) -> None:
    put(tmp_path, "good.png", "good.txt", "b.txt", "c.png", "d.txt")
    (tmp_path / "b.png").symlink_to("nowhere")
    (tmp_path / "c.txt").symlink_to("nowhere")
    (tmp_path / "d.png").symlink_to("d.png")
    found, faults = find(tmp_path)
    assert [item.stem for item in found] == ["good"]
    assert [(each.stem, each.what) for each in faults] == [
        ("b", "is a link that leads nowhere"),
        ("c", "is a link that leads nowhere"),
        ("d", "cannot be read (Too many levels of symbolic links)"),
    ]


@pytest.mark.parametrize("name", ["drive", "v1.5", "sub/drive", "notes.md"])
def test_a_link_that_may_be_a_folder_of_items_is_a_fault_with_its_name(
    tmp_path: Path, name: str
) -> None:
    put(tmp_path, "good.png", "good.txt", "drive.png", "drive.txt", "sub/x.png", "sub/x.txt")
    (tmp_path / name).symlink_to("/not/mounted")
    (only,) = find(tmp_path)[1]
    assert only.line == (
        f"{tmp_path}/{name}: is a link that leads nowhere; "
        "mount its drive, or correct or remove the link"
    )
    found, faults = find(tmp_path, flat=True)
    assert [item.stem for item in found] == ["drive", "good"] and not faults


@pytest.mark.parametrize("name", ["b.png", "c.txt"])
def test_a_pipe_is_a_fault_for_reading_it_would_never_end(tmp_path: Path, name: str) -> None:
    put(tmp_path, "good.png", "good.txt", "b.txt", "b.png", "c.txt", "c.png")
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert fault(tmp_path).startswith(f"{tmp_path}/{name}: is a pipe, a socket or a device")
    assert "good" in [item.stem for item in find(tmp_path)[0]]


def test_a_link_to_a_folder_elsewhere_is_followed(tmp_path: Path) -> None:
    put(tmp_path, "elsewhere/x.png", "elsewhere/x.txt", "set/a.txt")
    (tmp_path / "set/a.png").symlink_to("../elsewhere/x.png")
    (tmp_path / "set/more").symlink_to("../elsewhere")
    assert stems(tmp_path / "set") == ["a", "more/x"]


def test_a_folder_keeps_its_own_name_beside_a_link_to_it(tmp_path: Path) -> None:
    # Which of the two a directory lists first differs from disk to disk, and so would the stems.
    for number in range(16):
        put(tmp_path, f"folder{number:02}/a.png", f"folder{number:02}/a.txt")
        (tmp_path / f"link{number:02}").symlink_to(f"folder{number:02}")
    assert stems(tmp_path) == [f"folder{number:02}/a" for number in range(16)]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (b"caf\xe9.png", "has a name that is not UTF-8; rename it"),
        *(
            (b"bad%cname.png" % x, "has a control character in its name; rename")
            for x in b"\n\r\x1b"
        ),
    ],
)
def test_an_unreadable_name_is_a_fault_in_readable_text(
    tmp_path: Path, name: bytes, what: str
) -> None:
    put(tmp_path, "good.png", "good.txt", os.fsdecode(name))
    line = fault(tmp_path)
    assert what in line and line.encode() and f"/{name[:3].decode()}" in line


def test_a_name_whose_cache_file_would_be_too_long_is_a_fault(tmp_path: Path) -> None:
    # 255 bytes is the most that common file systems take; `.latents.safetensors` needs 20.
    longest = "n" * (255 - len(".latents.safetensors"))
    put(tmp_path, f"{longest}.png", f"{longest}.txt", f"{longest}n.png", f"{longest}n.txt")
    found, faults = find(tmp_path)
    assert [item.stem for item in found] == [longest]
    assert {each.path.split(f"{longest}n")[-1] for each in faults} <= {".png", ".txt"}
    assert any(each.path.endswith(f"{longest}n.png") for each in faults)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "holds no image; put images"),
        ("missing", 'the dataset folder [^"]+/missing does not exist, or is a file; correct'),
        ("missing ", 'the dataset folder "[^"]+/missing " does not exist, or is a file; correct'),
        ("a.txt", "the dataset folder .*; correct"),
        ("drive", r"/drive is a link that leads nowhere; mount its drive, or correct the link"),
        ("drive/cats", r"/drive/cats lies behind [^ ]+/drive, a link that leads nowhere; mount"),
    ],
)
def test_a_dataset_without_a_folder_of_images_is_refused(
    tmp_path: Path, path: str, words: str
) -> None:
    put(tmp_path, "a.txt")
    if path.startswith("drive"):
        (tmp_path / "drive").symlink_to("/not/mounted")
    with pytest.raises(DatasetError, match=rf"^datasets\.cats\.path: .*{words}"):
        find(tmp_path / path)


def test_a_listing_tells_any_change_and_no_change(tmp_path: Path) -> None:
    settings_ = Dataset(path=str(tmp_path))

    def print_() -> str:
        return scan("cats", settings_).fingerprint

    put(tmp_path, "a.png", "a.txt")
    prints = [print_()]
    assert print_() == prints[0]
    (tmp_path / "a.txt").write_text("another caption")
    prints.append(print_())
    put(tmp_path, "b.png")
    prints.append(print_())
    (tmp_path / "b.png").rename(tmp_path / "c.png")
    prints.append(print_())
    stat = (tmp_path / "a.png").stat()
    await_another_time(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes(b"c" * stat.st_size)
    os.utime(tmp_path / "a.png", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # set back
    prints.append(print_())
    assert len({*prints}) == 5


PIECES = ["a", "b", "a.b", "A", "é", "x y", "{w}", "a\nb", "\udce9", "-", "~"]
ENDINGS = [".png", ".PNG", ".jpg", ".txt", ".json", "", ".png.txt", ".txt.png"]
NAMES = [f"{folder}{x}{y}" for folder in ("", "s/", "t.png/u/") for x in PIECES for y in ENDINGS]


@pytest.mark.parametrize("missing", ["error", "empty"])
@pytest.mark.parametrize("seed", range(20))
def test_each_image_is_an_item_or_in_a_fault_and_never_both(seed: int, missing: str) -> None:
    names, stat = random.Random(seed).sample(NAMES, 40), source_stat(Path(__file__).stat())
    settings_ = Dataset(path="root", missing_caption=missing)  # type: ignore[arg-type]
    scanned = Scan("root", [(name, *stat) for name in names], "fingerprint")
    found, faults = described(settings_, scanned)
    made = {file.path.removeprefix("root/") for item in found for file in item.files}
    told = "\n".join(each.line for each in faults)
    faulty = {each.stem for each in faults}
    for name in names:
        _, dot, ending = name.rpartition("/")[2].rpartition(".")
        if f"{dot}{ending.lower()}" in {*IMAGE_EXTENSIONS, ".txt"}:
            shown = name.encode("utf-8", "backslashreplace").decode().replace("\n", "\\n")
            stem = name.rpartition(".")[0]
            in_fault = f"root/{shown}:" in told or stem in faulty
            assert (name in made) != in_fault, name
    assert not {item.stem for item in found} & faulty
    assert [item.stem for item in found] == sorted({item.stem for item in found})


def sentence(root: Path, *others: Dataset, **changes: object) -> str:
    settings_ = Dataset(path=str(root), **changes)  # type: ignore[arg-type]
    return unread(settings_, others, [path for path, *_ in scan("cats", settings_).entries])


def test_a_caption_of_the_other_kind_is_no_fault(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "a.txt", "film.mp4", "film.txt", "film.tags")
    assert stems(tmp_path, tags_extension=".tags") == ["a"]
    assert stems(tmp_path, target_frames=[1]) == ["film"]
    rows = ['{"file_name": "a.png", "text": "x"}', '{"file_name": "film.mp4", "text": "y"}']
    (tmp_path / "metadata.jsonl").write_text("\n".join(rows))
    listed = str(tmp_path / "metadata.jsonl")
    assert stems(tmp_path, metadata_file=listed, caption_extension=".none") == ["a"]
    put(tmp_path, "photo.heic", "photo.mov", "photo.txt")
    assert "photo.heic: is a HEIC image" in fault(tmp_path)


def test_masks_of_other_trainers_are_no_items(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "a.txt", "a-masklabel.png", "a-condlabel.PNG", "a-masklabel.txt")
    put(tmp_path, "masks/a.png", "s/b.jpg", "s/b.txt", "s/Mask/b.png", "masks/s/b.png")
    put(tmp_path, "masks/venice.png", "masks/venice.txt", "s/mask/b.jpg", "s/mask/b.txt")
    assert stems(tmp_path) == ["a", "masks/venice", "s/b", "s/mask/b"]
    assert sentence(tmp_path) == (
        "5 files are not read: 3 *.png in masks/, 1 -condlabel.PNG, 1 -masklabel.png "
        "(masks, which are not used)"
    )


def test_files_that_are_not_read_are_counted_in_one_sentence(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "a.txt", "b.JPG", "b.TXT", "a.caption", "notes.caption", "film.mp4")
    assert sentence(tmp_path) == (
        "3 files are not read: 1 .caption, 1 .TXT (captions: see caption_extension), "
        "1 .mp4 (videos)"
    )
    assert "mp4" not in sentence(tmp_path, Dataset(path=str(tmp_path), target_frames=[1]))
    put(tmp_path, "1.HEIC", "2.heic", "3.heic", "c.jfif", "d.jpe", "e.tga", "f.3gp")
    put(tmp_path, "captions.csv", "a.json", "s/metadata.jsonl", "b.npz", "README.md", "a.img_sdxl")
    found = sentence(tmp_path, metadata_file=str(tmp_path / "captions.csv"))
    assert found.startswith("12 files are not read: 2 .heic, 1 .HEIC, 1 .tga (convert to PNG or JP")
    assert "1 .jfif, 1 .jpe (rename to .jpg), " in found
    assert "1 .3gp (convert to MP4), " in found
    assert "1 .json, metadata.jsonl (captions: see metadata_file)" in found
    put(tmp_path, *(f"{number}.csv" for number in range(99)), f"{'long' * 50}.csv")
    assert " and 100 more (captions: see" in sentence(tmp_path)
    assert len(sentence(tmp_path)) < 400


def test_a_faulty_file_is_not_counted_again(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "a.txt", "b.heic", "b.txt", "c.jfif", "c.txt", "a.heic")
    assert [each.line.partition(": ")[2] for each in find(tmp_path)[1]] == [
        "is a HEIC image, which cannot be read; convert it to PNG or JPEG, or remove it",
        "has the ending .jfif, which is not read; rename it to .jpg",
    ]
    assert sentence(tmp_path) == "1 file is not read: 1 .heic (convert to PNG or JPEG)"
