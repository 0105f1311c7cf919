"""The bytes of a format never change: what was cached by an older release stays fresh."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from golden_files import CAPTION, FITS, HERE, LATENTS, TEXT, bitmap, fitted, write_caches
from latentmake.base import digest
from latentmake.formats import cachefile
from latentmake.models.cache_recipe import FORMAT_VERSIONS
from safetensors import safe_open

LEVELS = 1  # of 255, by which Pillow's resampling may round otherwise in another release


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    write_caches(folder)
    return folder


def test_the_golden_files_are_those_of_this_format() -> None:
    title = (HERE / "README.md").read_text(encoding="utf-8").splitlines()[0]
    for kind in ("plain", "text"):
        assert f"{kind} {FORMAT_VERSIONS[kind]}" in title


@pytest.mark.parametrize("name", [LATENTS, TEXT])
def test_the_same_source_and_recipe_give_the_bytes_of_the_golden_file(
    written: Path, name: str
) -> None:
    assert (written / name).read_bytes() == (HERE / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "source", "variant"),
    [(LATENTS, bitmap(16, 24), "16x24+0+0:16x24"), (TEXT, CAPTION.encode(), "")],
)
def test_a_golden_file_is_read_as_what_it_is(name: str, source: bytes, variant: str) -> None:
    header = cachefile.read_header(HERE / name)
    assert header.source == digest.of_bytes(source)
    assert header.key == cachefile.target_key(header.source, header.recipe, variant)
    with safe_open(HERE / name, "pt") as file:
        assert all(file.get_tensor(key).any() for key in file.keys())  # noqa: SIM118
        if name == TEXT:
            assert file.metadata()["caption"] == CAPTION


@pytest.mark.parametrize("name", FITS)
def test_a_picture_is_brought_to_size_as_it_was(name: str) -> None:
    golden, found = np.load(HERE / name), fitted(name)
    assert found.shape == golden.shape
    assert np.abs(found.astype(int) - golden).max() <= LEVELS
