"""Which example is trained on when, and with which text: a pure function of the seed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from latentmake.config.trainers import SdTrainer
from latentmake.trainers.loop.caches import Caches, read_items
from latentmake.trainers.loop.recipe import BatchOrder
from safetensors.torch import load_file
from trainer_world import batch_order, edit_rows, make_manifest, make_text

SHAPES = [(4, 8, 8), (4, 4, 8), (4, 8, 8), (4, 8, 8), (4, 4, 8)]
REPEATS = [1, 3, 2, 1, 1]


@given(
    members=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=20),
    batch_size=st.integers(1, 5),
    epoch=st.integers(0, 3),
)
def test_an_epoch_shows_each_example_as_often_as_it_repeats_one_shape_a_batch(
    members: list[tuple[int, int]], batch_size: int, epoch: int
) -> None:
    shapes = [(4, side, 8) for side, _ in members]
    repeats = [count for _, count in members]
    batches = batch_order(shapes, repeats, train_batch_size=batch_size, seed=5).shuffled(epoch)
    shown = Counter(index for batch in batches for index in batch)
    assert shown == dict(enumerate(repeats))
    for batch in batches:
        assert len({shapes[index] for index in batch}) == 1
        assert 1 <= len(batch) <= batch_size
    for side in {shape[1] for shape in shapes}:
        short = [b for b in batches if shapes[b[0]][1] == side and len(b) < batch_size]
        assert len(short) <= 1
    assert batches == batch_order(shapes, repeats, train_batch_size=batch_size, seed=5).shuffled(
        epoch
    )


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    shapes, repeats = [(4, 8, 8)] * 30, [1] * 30
    orders = [
        batch_order(shapes, repeats, seed=seed).shuffled(epoch)
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 1), (2, 1), (3, 2), (4, 3)])
def test_processes_share_the_batches_of_epochs_without_gap_or_double(
    processes: int, accumulation: int
) -> None:
    schedule = batch_order(
        SHAPES, REPEATS, processes, seed=3, gradient_accumulation_steps=accumulation
    )
    steps = 5
    rows = [list(schedule.batches(process, 1, steps)) for process in range(processes)]
    assert {len(row) for row in rows} == {steps * accumulation}
    together = [batch for micro in zip(*rows, strict=True) for batch in micro]
    expected: list[list[int]] = []
    epoch = 0
    while len(expected) < len(together):
        expected += batch_order(SHAPES, REPEATS, seed=3).shuffled(epoch)
        epoch += 1
    assert together == expected[: len(together)]
    assert sum(schedule.items(step) for step in range(1, steps + 1)) == sum(map(len, together))


# -- variants of a text ---------------------------------------------------------------------------

STEPS = 40


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Caches:
    """Three items at two resolutions: the first has four variants."""
    root = tmp_path_factory.mktemp("variants")
    manifest = make_manifest(root)
    others = [make_text(root / f"cache/text.{n}/0.safetensors", 100 + n, 5 + n) for n in (1, 2, 3)]

    def vary(rows: list[dict[str, Any]]) -> None:
        rows[0] |= {"variants": [rows[0]["text"], *others], "texts": ["a", "b", "c", "d"]}

    edit_rows(manifest, vary)
    return Caches(read_items(manifest))


def variants(
    caches: Caches, seed: int = 0, *, several: bool = True, accumulation: int = 1
) -> BatchOrder:
    known = caches.variants if several else {}
    made: Any = SimpleNamespace(examples=caches.examples, rows=caches.rows, variants=known)
    settings = {"train_batch_size": 2, "gradient_accumulation_steps": accumulation}
    return BatchOrder(made, SdTrainer(kind="sd", seed=seed, **settings))


def chosen(caches: Caches, made: BatchOrder, first: int = 1, last: int = STEPS) -> list[int]:
    """Return which variants of the first item were chosen, in order."""
    known = {
        index: number
        for several in caches.variants.values()
        for number, index in enumerate(several)
    }
    return [known[i] for batch in made.batches(0, first, last) for i in batch if i in known]


def test_only_texts_change_and_each_variant_comes_about_as_often(caches: Caches) -> None:
    made = variants(caches)
    alone = variants(caches, several=False)
    plain = [index for batch in alone.batches(0, 1, 400) for index in batch]
    found = [index for batch in made.batches(0, 1, 400) for index in batch]
    for before, after in zip(plain, found, strict=True):
        assert caches.examples[after].latents == caches.examples[before].latents
        assert after == before or before in caches.variants
    counts = Counter(chosen(caches, made, 1, 400))
    assert set(counts) == {0, 1, 2, 3}
    assert max(counts.values()) < 1.5 * min(counts.values())


def test_a_batch_holds_the_texts_of_the_chosen_variants(caches: Caches) -> None:
    several = caches.variants[0]
    batch = caches.batch([several[2], several[0]])
    path = Path(caches.examples[several[2]].text.path)
    assert path.parent.name == "text.2"
    assert torch.equal(batch.text[0], load_file(path)["text_encoder.hidden_state"])


def test_a_killed_training_goes_on_with_the_very_batches_and_variants(caches: Caches) -> None:
    whole = list(variants(caches).batches(0, 1, STEPS))
    assert whole[17:] == list(variants(caches).batches(0, 18, STEPS))
    whole = list(variants(caches, accumulation=2).batches(0, 1, STEPS))
    assert whole[2 * 17 :] == list(variants(caches, accumulation=2).batches(0, 18, STEPS))
    assert whole != list(variants(caches, seed=1).batches(0, 1, STEPS))
