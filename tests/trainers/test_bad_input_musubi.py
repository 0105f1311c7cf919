"""musubi-tuner's real caching scripts with bad weights and damaged sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from conftest import Make
from latentmake.base.errors import ModelError, SourceError
from PIL import Image
from real_models import PICTURE, STEMS
from real_project import RealProject
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.real_trainer

VAE = "vae.safetensors"


@pytest.fixture
def real(make_real: Make) -> Iterator[RealProject]:
    made = make_real("z_image")
    made.project.configure(lambda values: values["runs"]["real"].update(resolutions=[64]))
    yield made
    assert not [path for path in made.project.cache_files() if "_te." not in path]


def vae_of(real: RealProject) -> Path:
    """Return the VAE's file, as one of its own."""
    (path,) = (path for path in real.project.folder.rglob(VAE) if path.is_file())
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("prefix", "factor", "words"), [("", torch.nan, "had NaN"), ("odd_", 1, "RuntimeError")]
)
def test_weights_that_a_script_cannot_use_stop_it_in_one_line(
    real: RealProject, prefix: str, factor: float, words: str
) -> None:
    """The script itself replaces NaN by zeros, and ends where it cannot load a file."""
    vae = vae_of(real)
    save_file({f"{prefix}{name}": each * factor for name, each in load_file(vae).items()}, vae)
    with pytest.raises(ModelError) as caught:
        real.build()
    line = str(caught.value)
    assert f"musubi-tuner's encoder of latents failed: {words}" in line and "\n" not in line


def packets(path: Path) -> list[tuple[int, int]]:
    """Return place and size of each packet of a video."""
    with av.open(str(path)) as file:
        return [(each.pos or 0, each.size) for each in file.demux(video=0) if each.size]


@pytest.mark.parametrize("name", ["z_image", "hunyuan_video"])
def test_a_source_damaged_behind_its_header_is_named_and_stops_no_other(
    name: str, make_real: Make
) -> None:
    real = make_real(name)
    world = real.world
    (source,) = (path for path in Path("data").glob(f"{PICTURE}.*") if path.suffix != ".txt")
    if not world.video:
        noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
        Image.fromarray(noise).save(source)
    data = source.read_bytes()
    begin, size = packets(source)[10] if world.video else (len(data) // 2, 200)
    source.write_bytes(data[:begin] + bytes(size) + data[begin + size :])
    with pytest.raises(SourceError) as caught:
        real.build()
    line = str(caught.value)
    assert f"1 of 6 items are faulty: {source}: " in line and "\n" not in line
    made = [path for path in real.project.cache_files() if "_te." not in path]
    assert {stem for stem in STEMS if any(stem in path for path in made)} == {*STEMS} - {PICTURE}
