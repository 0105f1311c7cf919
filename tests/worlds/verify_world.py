"""A project whose cache files are all there, written by the package's writer without an encoder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from latentmake import digest
from latentmake.config.root import parse
from latentmake.files import atomic, cachefile
from latentmake.files.cachefile import target_key
from latentmake.index.memo import Memo
from latentmake.layouts import layout
from latentmake.layouts.layout import parsed
from latentmake.plan.facts import Facts
from latentmake.reports.verification import DAMAGED, UNEXPECTED, Expected, _expected
from PIL import Image

RUN, DATASET, MODEL = "tiny", "shapes", "micro"


def put_items(folder: Path, number: int) -> None:
    """Write pictures of one colour each, and captions; no two are equal."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in range(number):
        colour = (each % 256, each // 256, 99)
        Image.new("RGB", (16, 16), colour).save(folder / f"item{each:04d}.png")
        (folder / f"item{each:04d}.txt").write_text(f"caption {each}")


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def facts_of(values: dict[str, Any], memo: Memo) -> Facts:
    """Return facts of a configuration; its models must be there."""
    return Facts(parse(values), memo)


def expected_of(facts: Facts) -> list[Expected]:
    """Return the origin that each cache file of the run should have."""
    return [*_expected(facts, RUN)]


def tensors_of(key: str, part: str) -> dict[str, torch.Tensor]:
    """Return tensors that no other key has, as small as those of pictures of 16 pixels."""
    dice = np.random.default_rng(int(key[:12], 16))
    if part == "text":
        return {
            layout.hidden_state(0): torch.from_numpy(dice.standard_normal((77, 16), np.float32))
        }
    side = int(part) // 8
    return {layout.LATENTS: torch.from_numpy(dice.standard_normal((4, side, side), np.float32))}


def write_cache(facts: Facts, each: Expected, **change: Any) -> None:
    """Write a cache file as a job would, with other tensors or another stamp if these are given."""
    kind = "text" if each.part == "text" else "latents"
    recipe = facts.recipe(DATASET, MODEL, kind)
    stamp = {"key": each.key, "source": each.content, "recipe": recipe} | change.get("stamp", {})
    said = {} if kind == "text" else layout.plain_latents_metadata(1.0, 0.0, (16, 16), (16, 16))
    tensors = change.get("tensors") or tensors_of(each.key, each.part)
    atomic.write(each.path, cachefile.serialize(tensors, said | cachefile.stamp(**stamp)))


def learn_sizes(memo: Memo, folder: Path) -> None:
    """Let a memo know the sizes of all pictures, which encoding would tell it."""
    for path in folder.glob("*.png"):
        memo.learn_picture(digest.of_file(path), cachefile.Picture(16, 16, True))
    memo.save()


def build(folder: Path) -> list[Expected]:
    """Write all cache files of a project below a folder; return what they are made of."""
    values = yaml.safe_load((folder / "config/config.yaml").read_text())
    with inside(folder), Memo(Path(".latentmake/memo.sqlite")) as memo:
        learn_sizes(memo, Path("data/shapes"))
        facts = facts_of(values, memo)
        files = expected_of(facts)
        for each in files:
            write_cache(facts, each)
    return files


# -- damages --------------------------------------------------------------------------------------


def in_place(path: Path, change: Any) -> None:
    """Change the bytes of a file by a function, leaving its inode and mtime."""
    stat, data = path.stat(), bytearray(path.read_bytes())
    changed = change(data)
    with path.open("r+b") as file:
        file.write(data if changed is None else changed)
        file.truncate()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def tensors_start(data: bytes | bytearray) -> int:
    """Return the offset of the first tensor's bytes."""
    return 8 + int.from_bytes(data[:8], "little")


def flip_a_bit(path: Path) -> None:
    """Flip the lowest bit of the last number."""

    def change(data: bytearray) -> None:
        data[-4] ^= 1

    in_place(path, change)


def cut_off(path: Path) -> None:
    in_place(path, lambda data: data[:-7])


def edit_header(path: Path) -> None:
    """Turn a digit of the key into another."""

    def change(data: bytearray) -> None:
        place = data.index(b'"latentmake.key":"') + 20
        data[place] = ord("1" if data[place] != ord("1") else "2")

    in_place(path, change)


def fill(path: Path, number: bytes) -> None:
    """Let all numbers of the tensors be one of 32 bits."""

    def change(data: bytearray) -> None:
        start = tensors_start(data)
        data[start:] = number * ((len(data) - start) // 4)

    in_place(path, change)


def put_zeros(path: Path) -> None:
    fill(path, bytes(4))


def put_nan(path: Path) -> None:
    """Let the first number of the tensors be NaN."""

    def change(data: bytearray) -> None:
        start = tensors_start(data)
        data[start : start + 4] = b"\0\0\xc0\x7f"

    in_place(path, change)


def swap(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def put_foreign(path: Path) -> None:
    """Write what another program might."""
    from safetensors.torch import save_file

    save_file({"latents": torch.ones(4, 2, 2)}, path)


WAYS = (
    (4, flip_a_bit, "checksum differs"),
    (3, cut_off, "is cut short"),
    (3, edit_header, "has a damaged header"),
    (3, put_zeros, "checksum differs"),
    (3, put_nan, "checksum differs"),
)


def spoil(folder: Path, files: list[Expected]) -> dict[str, tuple[str, str]]:
    """Damage 25 files of a project in 8 ways.

    Args:
        folder: of the project.
        files: of it, 150 or more.

    Returns:
        Path -> verdict on each, and how its reason begins.
    """
    values = yaml.safe_load((folder / "config/config.yaml").read_text())
    chosen = files[:: len(files) // 30]
    found: dict[str, tuple[str, str]] = {}
    with inside(folder), Memo(None) as memo:
        facts = facts_of(values, memo)
        for count, way, reason in WAYS:
            for _ in range(count):
                each = chosen.pop()
                way(Path(each.path))
                found[each.path] = DAMAGED, reason
        for _ in range(2):
            each = chosen.pop()
            put_foreign(Path(each.path))
            found[each.path] = UNEXPECTED, "was not made by latentmake"
        for _ in range(3):
            each = chosen.pop()
            recipe = {**facts.recipe(DATASET, MODEL, parsed(each.part).kind), "dtype": "float16"}
            key = target_key(each.content, digest.of_value(recipe), "16x16")
            write_cache(facts, each, stamp={"key": key, "recipe": recipe})
            found[each.path] = UNEXPECTED, "dtype float16 -> float32"
        for _ in range(2):
            one, other = chosen.pop(), chosen.pop()
            swap(Path(one.path), Path(other.path))
            for each in (one, other):
                found[each.path] = UNEXPECTED, f"it was not made of {each.source} as it is"
    return found
