"""What the trainer reads, and how it says that it cannot."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from latentmake.base.errors import CacheError, TrainingError
from latentmake.formats import cachefile
from latentmake.trainers.loop.caches import (
    PLAIN,
    Batch,
    Caches,
    find_not_finite,
    pad,
    read_items,
    read_text,
)
from safetensors.torch import load_file, save_file
from trainer_world import SCALING, SHIFT, edit_rows, make_latents, make_manifest, make_text

(HIDDEN_STATE,) = PLAIN.text

ORDER = [[0, 2], [1, 3], [4, 0], [5], [2, 2]]
METADATA = {"scaling_factor": str(SCALING), "shift_factor": str(SHIFT)}


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return make_manifest(tmp_path)


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Caches:
    """Caches with embeddings of different lengths."""
    manifest = make_manifest(tmp_path_factory.mktemp("lengths"), tokens=(7, 4, 5, 7, 1))
    return Caches(read_items(manifest))


def expected(caches: Caches, indices: list[int]) -> Batch:
    """Read a batch with safetensors alone."""
    examples = [caches.examples[index] for index in indices]
    stored = [load_file(each.latents.path)["latents"].float() for each in examples]
    text, mask = pad([load_file(each.text.path)[HIDDEN_STATE] for each in examples])
    return Batch(torch.stack([(each - SHIFT) * SCALING for each in stored]), text, mask, indices)


def assert_same(found: Batch, wanted: Batch) -> None:
    assert list(found.indices) == list(wanted.indices)
    assert found.latents.dtype == torch.float32
    assert torch.equal(found.latents, wanted.latents)
    assert found.text.dtype == wanted.text.dtype
    assert torch.equal(found.text, wanted.text)
    assert (found.mask is None) == (wanted.mask is None)
    if found.mask is not None and wanted.mask is not None:
        assert torch.equal(found.mask, wanted.mask)


def test_only_items_that_the_manifest_keeps_are_read(manifest: Path) -> None:
    make_latents(manifest.parent / "cache/16/orphan.safetensors", 8, 8, 77)
    caches = Caches(read_items(manifest))
    assert [item.stem for item in read_items(manifest)] == ["item0", "item1", "item2"]
    assert {Path(each.latents.path).stem for each in caches.examples} == {"0", "1", "2"}


def test_each_example_is_scaled_by_the_factors_of_its_own_file(manifest: Path) -> None:
    path = manifest.parent / "cache/16/1.safetensors"
    stored = load_file(path)["latents"]
    save_file({"latents": stored}, path, {"scaling_factor": "3", "shift_factor": "0.125"})
    caches = Caches(read_items(manifest))
    latents = caches.batch([0, 2]).latents
    assert torch.equal(latents[1], (stored - 0.125) * 3)
    assert_same(caches.batch([0]), expected(caches, [0]))
    assert caches.examples[0].latents.pixels == 2.0


@pytest.mark.parametrize(("threads", "tokens"), [(0, (7, 7, 7)), (2, (7, 4, 5))])
def test_batches_are_what_the_files_hold(
    tmp_path: Path, threads: int, tokens: tuple[int, ...]
) -> None:
    caches = Caches(read_items(make_manifest(tmp_path, tokens=tokens)))
    order = ORDER * 3
    for indices, batch in zip(order, caches.prefetched(order, threads=threads), strict=True):
        assert_same(batch, expected(caches, indices))
        assert_same(caches.batch(indices), batch)


def test_number_formats_may_differ(tmp_path: Path) -> None:
    latents, text = ("float16", "float32"), ("float32", "bfloat16")
    make_manifest(tmp_path, tokens=(7, 4))
    for number in (0, 1):
        for folder, key, name in (
            ("16", "latents", latents[number]),
            ("text", HIDDEN_STATE, text[number]),
        ):
            path = tmp_path / f"cache/{folder}/{number}.safetensors"
            values = load_file(path)[key].to(getattr(torch, name))
            save_file({key: values, "zz": torch.ones(3)}, path, METADATA)
    caches = Caches(read_items(tmp_path / "manifest.jsonl"))
    (batch,) = caches.prefetched([[0, 2]])
    wanted = expected(caches, [0, 2])
    assert torch.equal(batch.latents, wanted.latents)
    assert batch.text.dtype == torch.float32
    assert torch.equal(batch.text.float(), wanted.text.float())


def test_shorter_embeddings_are_padded_and_masked(lengths: Caches) -> None:
    assert pad([torch.ones(3, 2), torch.zeros(3, 2)])[1] is None
    padded, mask = pad([torch.ones(3, 2), torch.ones(1, 2)])
    assert padded[:, :, 0].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert mask is not None and mask.tolist() == [[True, True, True], [True, False, False]]
    assert_same(lengths.batch([4, 2, 8]), expected(lengths, [4, 2, 8]))


def test_an_empty_manifest_says_that_there_is_nothing_to_train_on(manifest: Path) -> None:
    manifest.write_text(json.dumps({"dataset": "a", "stem": "b", "source": "c", "aside": "bad"}))
    with pytest.raises(TrainingError, match="nothing to train on: all items were skipped"):
        read_items(manifest)


@pytest.mark.parametrize("line", ["{", '{"dataset": "a"}', '{"stem": 1}', "[]"])
def test_a_damaged_line_is_named_by_its_number(manifest: Path, line: str) -> None:
    manifest.write_text(manifest.read_text() + line + "\n")
    with pytest.raises(TrainingError, match="line 5 of the manifest"):
        read_items(manifest)


@pytest.mark.parametrize(
    "damaged",
    [
        lambda data: data[:-8],
        lambda _: b"",
        lambda _: (16).to_bytes(8, "little") + b'{"latents": {}} ',
    ],
    ids=["cut short", "empty", "a tensor of nothing"],
)
@pytest.mark.parametrize("folder", ["16", "text"])
def test_a_damaged_cache_file_is_named(
    manifest: Path, folder: str, damaged: Callable[[bytes], bytes]
) -> None:
    path = manifest.parent / "cache" / folder / "1.safetensors"
    path.write_bytes(damaged(path.read_bytes()))
    with pytest.raises(CacheError, match="cannot be read") as caught:
        Caches(read_items(manifest))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("folder", ["16", "text"])
@pytest.mark.parametrize("damage", ["is missing", "has another"])
def test_a_file_that_is_damaged_later_is_named_wherever_it_is_read(
    manifest: Path, folder: str, damage: str
) -> None:
    caches = Caches(read_items(manifest))
    path = manifest.parent / "cache" / folder / "1.safetensors"
    if damage == "is missing":
        path.unlink()
    elif folder == "text":
        make_text(path, 1, tokens=9)
    else:
        make_latents(path, 8, 16, 1)
    batches = caches.prefetched([[0], [4], [2], [0]])
    assert [list(next(batches).indices) for _ in range(2)] == [[0], [4]]
    with pytest.raises(CacheError, match=damage) as caught:
        next(batches)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_byte_that_changed_since_it_was_written_is_found_as_it_is_first_read(
    manifest: Path,
) -> None:
    paths = [manifest.parent / f"cache/{part}/1.safetensors" for part in ("16", "text")]
    for path, sizes in zip(paths, (METADATA, {}), strict=True):
        stamp = cachefile.stamp(key="k", source="s", recipe={})
        path.write_bytes(cachefile.serialize(load_file(path), sizes | stamp))
    Caches(read_items(manifest)).batch([0, 2])
    for path in paths:
        whole = path.read_bytes()
        path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
        with pytest.raises(CacheError, match="is damaged: checksum differs") as caught:
            Caches(read_items(manifest)).batch([0, 2])
        assert str(caught.value).startswith(f"{path}: ") and caught.value.hint
        if path == paths[1]:
            with pytest.raises(CacheError, match="checksum differs"):
                read_text(str(path), PLAIN)
        path.write_bytes(whole)


def test_files_of_values_that_are_no_numbers_are_found(manifest: Path) -> None:
    bad = manifest.parent / "cache/16/0.safetensors"
    save_file({"latents": torch.full((4, 8, 8), float("nan"))}, bad, {"scaling_factor": "1"})
    worse = manifest.parent / "cache/text/2.safetensors"
    save_file({HIDDEN_STATE: torch.full((7, 16), float("inf"))}, worse)
    caches = Caches(read_items(manifest))
    assert find_not_finite(caches, [2, 3]) == []
    assert find_not_finite(caches, [0, 0, 1]) == [str(bad)]
    assert find_not_finite(caches, range(6)) == [str(bad), str(worse)]
    assert not caches.batch([0]).latents.isfinite().any()
    with pytest.raises(CacheError, match="NaN or infinite values"):
        read_text(str(worse), PLAIN)


def test_latents_without_their_scale_are_an_error(manifest: Path) -> None:
    path = manifest.parent / "cache/16/0.safetensors"
    save_file({"latents": torch.zeros(4, 8, 8)}, path)
    with pytest.raises(CacheError, match="scaling_factor"):
        Caches(read_items(manifest))


def test_reading_ends_with_the_batches_and_when_these_are_closed_early(lengths: Caches) -> None:
    def reading() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name.startswith("caches")]

    list(lengths.prefetched([[0], [2]], threads=2))
    batches = lengths.prefetched(([0] for _ in range(10**9)), threads=2)
    next(batches)
    assert len(reading()) == 2
    batches.close()
    assert not reading()


def test_only_a_batch_with_regularisation_images_has_weights(manifest: Path) -> None:
    assert Caches(read_items(manifest), prior_loss_weight=0.5).batch([0, 2]).weights is None
    edit_rows(manifest, lambda rows: rows[0].update(is_reg=True))
    assert Caches(read_items(manifest)).batch([0, 2]).weights is None
    weighted = Caches(read_items(manifest), prior_loss_weight=0.5)
    for indices in ([0, 2], [2, 4]):
        weights = weighted.batch(indices).weights
        assert weights is not None
        regular = [weighted.rows[index].is_reg for index in indices]
        assert weights.tolist() == [0.5 if is_reg else 1.0 for is_reg in regular]
