"""`latentmake verify` names each file that is not what was written, and repairs just that."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import verify_world
import world
from latentmake.base import digest
from latentmake.data.memo import Memo
from latentmake.formats import cachefile
from latentmake.formats.cachefile import target_key
from latentmake.formats.safetensors import read_head
from latentmake.pages.verification import DAMAGED, UNEXPECTED
from project import Project
from safetensors.torch import load_file, save_file


def edit_the_key(data: bytearray) -> None:
    place = data.index(b'"latentmake.key":"') + 20
    data[place] = ord("1" if data[place] != ord("1") else "2")


def put_zeros(data: bytearray) -> None:
    start = 8 + int.from_bytes(data[:8], "little")
    data[start:] = bytes(len(data) - start)


WAYS: dict[str, tuple[Callable[[bytearray], object], str]] = {
    "bee": (lambda data: data[:-7], "is cut short"),
    "cat": (edit_the_key, "has a damaged header"),
    "dog": (put_zeros, "checksum differs"),
}


def of_another_recipe(project: Project, path: str) -> None:
    """Write a file whose recipe has another dtype."""
    with verify_world.inside(project.folder), Memo(None) as memo:
        facts = verify_world.facts_of(project.config, memo)
        (each,) = [each for each in verify_world.expected_of(facts) if each.path == path]
        recipe = {**facts.recipe("shapes", "micro", "latents"), "dtype": "float16"}
        key = target_key(each.content, digest.of_value(recipe), "32x32")
        head = {n: text for n, text in read_head(path).metadata.items() if "sum" not in n}
        head |= cachefile.stamp(key=key, source=each.content, recipe=recipe)
        Path(path).write_bytes(cachefile.serialize(load_file(path), head))


def test_what_is_wrong_is_named_deleted_and_encoded_again_alone(built: Project) -> None:
    before = built.snapshot()

    def latents(stem: str, resolution: int = 16) -> str:
        return built.latents(stem, resolutions=(resolution,)).pop()

    spoilt = {latents("ant"): (DAMAGED, "checksum differs")}
    verify_world.flip_a_bit(built / latents("ant"))
    for stem, (way, reason) in WAYS.items():
        verify_world.in_place(built / latents(stem), way)
        spoilt[latents(stem)] = DAMAGED, reason
    (text,) = built.texts("ant")
    verify_world.put_nan(built / text)
    spoilt[text] = DAMAGED, "checksum differs"
    foreign = latents("eel")
    save_file({"latents": torch.ones(4, 2, 2)}, built / foreign)
    spoilt[foreign] = UNEXPECTED, "was not made by latentmake"
    of_another_recipe(built, latents("fox", 32))
    spoilt[latents("fox", 32)] = UNEXPECTED, "dtype float16 -> float32"
    one, other = latents("ant", 32), latents("bee", 32)
    (built / one).rename(built / "between")
    (built / other).rename(built / one)
    (built / "between").rename(built / other)
    for path, stem in ((one, "ant"), (other, "bee")):
        spoilt[path] = UNEXPECTED, f"it was not made of data/shapes/{stem}.png as it is"

    asked = built.ask("verify", check=False)
    assert asked.returncode == 1 and "9 wrong (5 damaged, 4 not what" in asked.output
    for path, (verdict, reason) in spoilt.items():
        assert f"{path}: {verdict}: {reason}" in asked.output
    repaired = built.ask("verify", "tiny", "--repair", "--json", check=False)
    found = json.loads(repaired.output)
    assert {each["path"]: each["verdict"] for each in found["findings"]} == {
        path: verdict for path, (verdict, _) in spoilt.items()
    }
    # A file of another program is left to the next build.
    assert [each["path"] for each in found["findings"] if not each["done"]] == [foreign]
    assert repaired.returncode == 1 and found["repaired"] == len(spoilt) - 1
    made = built.run("caches_tiny").encoded()
    # Of files under each other's names the store has the bytes.
    assert (made.encoded, made.spooled) == (len(spoilt) - 2, 2)
    now = built.snapshot()
    assert {path for path in now if now[path] != before[path]} == spoilt.keys() - {one, other}
    assert {path: content for path, (content, _) in now.items()} == {
        path: content for path, (content, _) in before.items()
    }
    assert "0 wrong" in built.ask("verify").output


def test_files_whose_sources_were_edited_are_counted_apart_and_are_no_error(built: Project) -> None:
    (built / "data/shapes/cat.txt").write_text("a green disc on grey")
    world.draw(built / "data/shapes/dog.png", 77)
    asked = built.ask("verify")
    assert "0 wrong, 0 repaired\n3 edited since: the next build encodes them again" in asked.output
    assert "--repair" not in asked.output
    before = built.snapshot()
    assert "3 edited" in built.ask("verify", "--repair").output and built.snapshot() == before
    of_another_recipe(built, (path := built.latents("fox", resolutions=(32,)).pop()))
    asked = built.ask("verify", check=False)
    assert asked.returncode == 1 and "1 wrong (1 not what the plan expects)" in asked.output
    asked.one_line("--repair` moves these files to the store, and the next build makes them")
    built.ask("verify", "--repair")
    assert not (built / path).exists()
