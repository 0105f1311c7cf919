"""What the trainer reads, and how it says that it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from latentmake.errors import CacheError, TrainingError
from latentmake.trainers.data import Caches, pad, prefetched, read_items, read_scale
from safetensors.torch import load_file, save_file
from trainer_world import SCALING, SHIFT, make_latents, make_manifest, make_text


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return make_manifest(tmp_path)


def test_items_set_aside_are_not_trained_on(manifest: Path) -> None:
    assert [item.stem for item in read_items(manifest)] == ["item0", "item1", "item2"]


def test_only_files_that_the_manifest_names_are_read(manifest: Path) -> None:
    make_latents(manifest.parent / "cache/16/orphan.safetensors", 8, 8, 77)
    caches = Caches(read_items(manifest))
    names = {each.latents.name for each in caches.examples}
    assert names == {"0.safetensors", "1.safetensors", "2.safetensors"}
    assert len(caches.examples) == 6


def test_latents_are_shifted_and_scaled(manifest: Path) -> None:
    caches = Caches(read_items(manifest))
    stored = load_file(caches.examples[0].latents)["latents"]
    assert torch.equal(caches.batch([0]).latents[0], (stored - SHIFT) * SCALING)
    assert read_scale(caches.examples[0].latents) == (SCALING, SHIFT, 2.0)


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_caches_in_memory_and_on_disk_give_the_same_batches(manifest: Path, memory: int) -> None:
    caches = Caches(read_items(manifest), memory=memory)
    order = [[0, 2], [1, 3], [4, 0], [5], [2, 2]]
    for indices, batch in zip(order, prefetched(caches, iter(order)), strict=True):
        expected = Caches(read_items(manifest)).batch(indices)
        assert torch.equal(batch.latents, expected.latents)
        assert torch.equal(batch.text, expected.text)


def test_equal_lengths_need_no_mask() -> None:
    padded, mask = pad([torch.ones(3, 2), torch.zeros(3, 2)])
    assert padded.shape == (2, 3, 2)
    assert mask is None


def test_shorter_embeddings_are_padded_and_masked() -> None:
    padded, mask = pad([torch.ones(3, 2), torch.ones(1, 2)])
    assert padded[:, :, 0].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert mask is not None
    assert mask.tolist() == [[True, True, True], [True, False, False]]


def test_an_empty_manifest_says_that_there_is_nothing_to_train_on(manifest: Path) -> None:
    manifest.write_text(json.dumps({"dataset": "a", "stem": "b", "source": "c", "aside": "bad"}))
    with pytest.raises(TrainingError, match="nothing to train on: all 1 items were set aside"):
        read_items(manifest)
    manifest.write_text("")
    with pytest.raises(TrainingError, match="nothing to train on"):
        read_items(manifest)


@pytest.mark.parametrize("line", ["{", '{"dataset": "a"}', '{"stem": 1}', "[]"])
def test_a_damaged_line_is_named_by_its_number(manifest: Path, line: str) -> None:
    manifest.write_text(manifest.read_text() + line + "\n")
    with pytest.raises(TrainingError, match="line 5 of the manifest"):
        read_items(manifest)


@pytest.mark.parametrize("folder", ["16", "16x8", "text"])
def test_a_missing_cache_file_is_named(manifest: Path, folder: str) -> None:
    path = manifest.parent / "cache" / folder / "1.safetensors"
    path.unlink()
    with pytest.raises(CacheError, match="is missing") as caught:
        Caches(read_items(manifest))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("folder", ["16", "text"])
def test_a_damaged_cache_file_is_named(manifest: Path, folder: str) -> None:
    path = manifest.parent / "cache" / folder / "1.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CacheError, match="cannot be read") as caught:
        Caches(read_items(manifest))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_that_are_no_numbers_are_named(manifest: Path) -> None:
    path = manifest.parent / "cache/16/0.safetensors"
    save_file({"latents": torch.full((4, 8, 8), float("nan"))}, path, {"scaling_factor": "1"})
    with pytest.raises(CacheError, match="no numbers"):
        Caches(read_items(manifest)).batch([0])


def test_latents_without_their_scale_are_an_error(manifest: Path) -> None:
    path = manifest.parent / "cache/16/0.safetensors"
    save_file({"latents": torch.zeros(4, 8, 8)}, path)
    with pytest.raises(CacheError, match="scaling_factor"):
        Caches(read_items(manifest)).batch([0])


def test_embeddings_of_two_widths_are_an_error(manifest: Path) -> None:
    path = manifest.parent / "cache/text/2.safetensors"
    make_text(path, 2, width=24)
    with pytest.raises(CacheError, match="has 24 values a token") as caught:
        Caches(read_items(manifest))
    assert str(path) in str(caught.value)
