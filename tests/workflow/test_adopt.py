"""Caches that ai-training's scripts wrote are adopted, and written in their naming, on request."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import world
from latentmake.cachefile import read_header
from project import Counts, Project, Result
from safetensors.torch import load_file

ENDINGS = {"latents": ".img_sdxl", "text": ".txt_clipl"}
STEMS = tuple(world.CAPTIONS)


def write_foreign(path: Path, name: str, values: np.ndarray) -> None:
    """Write a safetensors file of one float32 tensor, byte by byte, with no note of its making."""
    data = np.ascontiguousarray(values, dtype="<f4").tobytes()
    entry = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [0, len(data)]}
    header = json.dumps({name: entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def latents(number: int, size: int = 4) -> np.ndarray:
    return np.random.default_rng(number).normal(size=(4, size, size)).astype(np.float32)


def embedding(number: int) -> np.ndarray:
    return np.random.default_rng(100 + number).normal(size=(77, 16)).astype(np.float32)


def put_foreign(project: Project, *stems: str) -> None:
    """Put what ai-training's scripts would write beside some images, for a resolution of 32."""
    for stem in stems:
        base, number = f"data/shapes/{stem}", STEMS.index(stem)
        write_foreign(project / f"{base}{ENDINGS['latents']}", "latent", latents(number))
        write_foreign(project / f"{base}{ENDINGS['text']}", "emb", embedding(number))


def foreign_files(project: Project) -> dict[str, tuple[bytes, int]]:
    """Return name -> bytes and mtime of all that lies beside the images under such names."""
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in (project / "data/shapes").iterdir()
        if path.suffix in ENDINGS.values()
    }


def caches(project: Project) -> list[str]:
    """Return the cache files, without the record of what was adopted."""
    return [name for name in project.cache_files() if name.endswith(".safetensors")]


def summary(result: Result) -> list[int]:
    """Return the numbers of an adoption's last line: adopted, fresh, without, unfit, out of date."""
    line = result.one_line("tiny: ", " adopted, ", " without a foreign file")
    return [int(word) for word in line.replace(",", " ").split() if word.isdigit()]


def cached(project: Project, name: str) -> torch.Tensor:
    """Return the tensor of a cache file that adoption makes."""
    (tensor,) = load_file(project / name).values()
    return tensor


@pytest.fixture
def project(fresh: Callable[[], Project]) -> Project:
    """A project of one resolution whose model adopts, with nothing built."""
    made = fresh()

    def change(config: dict[str, Any]) -> None:
        config["models"]["micro"]["adopt"] = dict(ENDINGS)
        config["runs"]["tiny"]["resolutions"] = [32]

    made.configure(change)
    return made


def test_what_was_adopted_is_not_encoded(project: Project) -> None:
    put_foreign(project, *STEMS)
    foreign = foreign_files(project)
    result = project.run("adopt_tiny")
    assert result.jobs == ["adopt_tiny"]
    assert summary(result) == [12, 0, 0, 0, 0]
    for number, stem in enumerate(STEMS):
        for (name,), values in (
            (project.latents(stem, resolutions=(32,)), latents(number)),
            (project.texts(stem), embedding(number)),
        ):
            assert np.array_equal(cached(project, name).numpy(), values)
    assert [read_header(project / name).adopted for name in caches(project)].count("") == 0

    before = project.snapshot()
    result = project.run("caches_tiny")
    assert result.encoded() == Counts()
    assert result.jobs == ["manifest", "caches_tiny"]
    assert [row["stem"] for row in project.manifest()] == sorted(STEMS)
    (project / ".latentmake/memo.sqlite").unlink()
    assert project.run("caches_tiny").idle
    assert project.snapshot() == before
    assert foreign_files(project) == foreign
