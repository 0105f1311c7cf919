"""A project whose cache files are all there, written by the package's writer without an encoder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from latentmake.base import atomic, digest
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.formats import cachefile
from latentmake.layouts.names import LATENTS, hidden_state, plain_latents_metadata
from latentmake.plan.facts import Facts
from latentmake.plan.judge import Judge
from latentmake.plan.orders import parts_of
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


class Expected(NamedTuple):
    """A cache file, and what it should be made of."""

    path: str
    part: str
    source: str | None
    content: str
    key: str


def expected_of(facts: Facts) -> list[Expected]:
    """Return the origin that each cache file of the run should have."""
    found = []
    for part in parts_of(facts.config, facts.config.runs[RUN]):
        items = facts.wanted_items(DATASET, MODEL)
        judge = Judge(facts, DATASET, MODEL, [part.name], items)
        inputs = [each.inputs(part.name, judge.layout) for each in items]
        judge.contents.prepare_sizes(filter(None, map(judge.contents.of, inputs)))
        for item, (target,) in judge.targets(part.name, inputs):
            content = judge.contents.of(item) or ""
            key = judge.needed(item, target, content) or ""
            found.append(Expected(target.path, part.name, item.source, content, key))
    return found


def tensors_of(key: str, part: str) -> dict[str, torch.Tensor]:
    """Return tensors that no other key has, as small as those of pictures of 16 pixels."""
    dice = np.random.default_rng(int(key[:12], 16))
    if part == "text":
        return {hidden_state(0): torch.from_numpy(dice.standard_normal((77, 16), np.float32))}
    side = int(part) // 8
    return {LATENTS: torch.from_numpy(dice.standard_normal((4, side, side), np.float32))}


def write_cache(
    facts: Facts, each: Expected, tensors: dict[str, torch.Tensor] | None = None
) -> None:
    """Write a cache file as a job would, with other tensors if these are given."""
    kind = "text" if each.part == "text" else "latents"
    recipe = facts.recipe(DATASET, MODEL, kind)
    stamp = cachefile.stamp(key=each.key, source=each.content, recipe=recipe)
    said = {} if kind == "text" else plain_latents_metadata(1.0, 0.0, (16, 16), (16, 16))
    tensors = tensors or tensors_of(each.key, each.part)
    atomic.write(each.path, cachefile.serialize(tensors, said | stamp))


def learn_sizes(memo: Memo, folder: Path) -> None:
    """Let a memo know the sizes of all pictures, which encoding would tell it."""
    for path in folder.glob("*.png"):
        memo.learn_picture(digest.of_file(path), 16, 16, True)
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


def flip_a_bit(path: Path) -> None:
    """Flip the lowest bit of the last number."""

    def change(data: bytearray) -> None:
        data[-4] ^= 1

    in_place(path, change)


def put_nan(path: Path) -> None:
    """Let the first number of the tensors be NaN."""

    def change(data: bytearray) -> None:
        start = 8 + int.from_bytes(data[:8], "little")
        data[start : start + 4] = b"\0\0\xc0\x7f"

    in_place(path, change)
