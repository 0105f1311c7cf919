"""One bad file is named, with its hint, and stops no other; nothing shows a traceback."""

from __future__ import annotations

import os
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import world
from PIL import Image
from project import NOTHING, Counts, Project, Result


def _fails(project: Project, *words: str, target: str = "caches_tiny") -> Result:
    """Run a command that must fail with one line that holds all these words."""
    result = project.run(target, check=False)
    assert result.returncode != 0, result.output
    result.one_line(*words)
    assert "Traceback" not in result.output, result.output
    return result


def _bomb(width: int, height: int) -> bytes:
    """Return a PNG of a few bytes that claims a size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def _truncated_jpeg(path: Path) -> None:
    noise = Image.effect_noise((60, 60), 80).convert("RGB")
    noise.save(path, "JPEG")
    path.write_bytes(path.read_bytes()[:900])


# -- found while planning ----------------------------------------------------------------------


def _misspelt(config: dict[str, Any]) -> None:
    config["runs"]["tiny"]["resolution"] = config["runs"]["tiny"].pop("resolutions")


def _missing_model(config: dict[str, Any]) -> None:
    config["models"]["micro"]["vae"] = "models/micro/vea"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            _misspelt,
            [
                "error: config/config.yaml, line ",
                ", runs.tiny.resolution: ",
                "did you mean `resolutions`?",
            ],
        ),
        (_missing_model, [", models.micro.vae: models/micro/vea: ", "correct its path"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mistake_in_the_configuration_is_one_line(
    built: Project, change: Callable[[dict[str, Any]], None], words: list[str]
) -> None:
    before = built.snapshot()
    built.configure(change)
    result = _fails(built, *words)
    assert len(result.output.strip().splitlines()) <= 3, result.output
    assert built.changed(before) == NOTHING


# -- faulty items ------------------------------------------------------------------------------


FAULTS = {
    "bomb": ["data/shapes/bomb.png: has 100000 x 100000 pixels", "max_image_pixels"],
    "cut": ["data/shapes/cut.jpg: is damaged or cut short", "replace or remove it"],
    "large": ["data/shapes/large.png: has 80 x 60 pixels", "max_image_pixels"],
    "letter": ["data/shapes/letter.jpg: is not an image", "save it again"],
    "nothing": ["data/shapes/nothing.png: is an empty file", "replace or remove it"],
}
CAPTION_FAULTS = {
    "latin": ["data/shapes/latin.txt: is not UTF-8 (byte 3)", "save it as UTF-8"],
    "silent": ["data/shapes/silent.txt: is an empty caption", "empty_caption: allow"],
}


def _break(project: Project) -> None:
    data = project / "data/shapes"
    for number, stem in enumerate([*FAULTS, *CAPTION_FAULTS]):
        (data / f"{stem}.txt").write_text(f"the picture {stem}")
        if stem in CAPTION_FAULTS:
            world.draw(data / f"{stem}.png", number + 80)
    (data / "bomb.png").write_bytes(_bomb(100_000, 100_000))
    _truncated_jpeg(data / "cut.jpg")
    world.draw(data / "large.png", 90, (80, 60))
    (data / "letter.jpg").write_text("Dear Sir or Madam,")
    (data / "nothing.png").write_bytes(b"")
    (data / "latin.txt").write_bytes("grün".encode("latin-1"))
    (data / "silent.txt").write_text(" \n")
    project.configure(lambda config: config["datasets"]["shapes"].update(max_image_pixels=4000))


def _mend(project: Project) -> None:
    data = project / "data/shapes"
    for number, stem in enumerate(FAULTS):
        for path in data.glob(f"{stem}.*g"):
            path.unlink()
        world.draw(data / f"{stem}.png", number + 100)
    (data / "latin.txt").write_text("grün", encoding="utf-8")
    (data / "silent.txt").write_text("not silent any more")


def test_every_damaged_item_is_named_and_only_these_are_left_to_do(built: Project) -> None:
    before = built.snapshot()
    _break(built)
    result = _fails(built, "5 of 7 items are faulty")
    result.one_line("2 of 7 items are faulty")
    for words in [*FAULTS.values(), *CAPTION_FAULTS.values()]:
        result.one_line(*words)
    assert result.encoded("latents") == Counts(encoded=4, faulty=5)
    assert result.encoded("text") == Counts(encoded=5, faulty=2)
    assert built.changed(before).content == set()
    assert built.changed(before).removed == set()
    built.assert_all_whole()

    _mend(built)
    result = built.run("caches_tiny")
    assert result.encoded("latents") == Counts(encoded=10)
    assert result.encoded("text") == Counts(encoded=2)
    stems = [*FAULTS, *CAPTION_FAULTS]
    added = built.latents(*stems) | built.texts(*stems)
    assert built.changed(before) == NOTHING._replace(added=added)
    assert built.run("caches_tiny").idle


def test_bad_items_can_be_set_aside_and_come_back_when_mended(built: Project) -> None:
    _break(built)
    world.draw(built / "data/shapes/lonely.png", 120)
    ant = built / "data/shapes/ant.png"  # whose caches are there already
    old = ant.read_bytes()
    ant.write_bytes(old[:60])
    built.configure(lambda config: config["datasets"]["shapes"].update(on_error="skip"))
    before = built.snapshot()
    result = built.run("caches_tiny")
    for words in [*FAULTS.values(), *CAPTION_FAULTS.values()]:
        result.one_line("skipped: ", *words)
    rows = {row["stem"]: row for row in built.manifest()}
    aside = {stem for stem, row in rows.items() if "aside" in row}
    assert aside == {*FAULTS, *CAPTION_FAULTS, "ant", "lonely"}
    assert rows.keys() - aside == world.CAPTIONS.keys() - {"ant"}
    assert "has no caption file" in rows["lonely"]["aside"]
    assert built.lock()["counts"]["shapes/text"] == len(world.CAPTIONS) - 1
    assert built.changed(before).content == set()
    assert built.run("caches_tiny").idle

    _mend(built)
    ant.write_bytes(old)
    (built / "data/shapes/lonely.txt").write_text("not lonely any more")
    result = built.run("caches_tiny")
    assert not [row for row in built.manifest() if "aside" in row]
    assert len(built.manifest()) == len(world.CAPTIONS) + 8
    assert result.encoded("latents").encoded == 12
    assert result.encoded("text").encoded == 3


def test_sources_that_cannot_be_read_stop_no_other_though_they_have_caches(built: Project) -> None:
    before = built.snapshot()
    for name in ("ant.png", "bee.txt"):
        (built / "data/shapes" / name).rename(built / name)
        (built / "data/shapes" / name).symlink_to("/proc/self/mem")  # which even root cannot read
    world.draw(built / "data/shapes/cat.png", 70)
    result = _fails(built, "2 faulty", "ant.png: cannot be read", "bee.txt: cannot be read")
    assert result.encoded() == Counts(encoded=2)
    assert built.changed(before).content == built.latents("cat")
    name = "cache/shapes/micro/16/ant.latents.safetensors"
    _fails(built, "error: data/shapes/ant.png: cannot be read (Input/output error)", target=name)

    built.configure(lambda config: config["datasets"]["shapes"].update(on_error="skip"))
    result = built.run("caches_tiny")
    for each in ("ant.png", "bee.txt"):
        result.one_line("skipped: ", f"data/shapes/{each}: cannot be read")
    rows = {row["stem"]: row for row in built.manifest()}
    assert {stem for stem, row in rows.items() if "aside" in row} == {"ant", "bee"}
    assert built.changed(before).removed == set()

    for name in ("ant.png", "bee.txt"):
        (built / name).rename(built / "data/shapes" / name)
    assert built.run("caches_tiny").encoded() == Counts()
    assert len(built.manifest()) == len(world.CAPTIONS)


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_faulty_cache_file_asked_for_by_name_fails_with_its_fault(
    built: Project, on_error: str
) -> None:
    built.configure(lambda config: config["datasets"]["shapes"].update(on_error=on_error))
    (built / "data/shapes/ant.png").write_bytes(b"")
    name = "cache/shapes/micro/16/ant.latents.safetensors"
    result = _fails(built, "error: ", "data/shapes/ant.png: is an empty file", target=name)
    assert "filesystem latency" not in result.output


# -- odd things in the cache folder --------------------------------------------------------------


# -- the disk ----------------------------------------------------------------------------------


@contextmanager
def _small_disk(folder: Path, size: str) -> Iterator[None]:
    """Put a small disk in a folder's place, with what the folder holds."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs the rights of root")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _resize(folder: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


def test_a_full_disk_is_named_and_costs_nothing_once_there_is_space(
    fresh: Callable[[], Project],
) -> None:
    if os.name != "posix":
        pytest.skip("there is no tmpfs here")
    project = fresh()
    cache = project / "cache"
    page = os.sysconf("SC_PAGE_SIZE") // 1024
    with _small_disk(cache, f"{5 * page}k"):
        words = ["error: ", "no space left on the disk", "run the same command"]
        _fails(project, *words, "cache/shapes/micro/", target="latents_tiny")
        finished = len(project.cache_files())
        assert finished >= 3
        project.assert_all_whole()
        assert project.temporaries() == []

        _resize(cache, "1m")
        result = project.run("latents_tiny")
        assert result.encoded() == Counts(encoded=12 - finished)
        assert set(project.cache_files()) == project.latents(*world.CAPTIONS)
        project.assert_all_whole()
        assert project.temporaries() == []
