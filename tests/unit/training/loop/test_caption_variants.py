"""Which variant of a text a step sees."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from latentmake.training.loop.caches import Caches, read_items
from latentmake.training.loop.order import TextSchedule
from latentmake.training.loop.recipe import BatchOrder, Variants
from safetensors.torch import load_file
from trainer_world import make_manifest, make_text

STEPS = 40


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Caches:
    """Three items at two resolutions: the first has four variants and an empty caption."""
    root = tmp_path_factory.mktemp("variants")
    manifest = make_manifest(root)
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    others = [make_text(root / f"cache/text.{n}/0.safetensors", 100 + n, 5 + n) for n in (1, 2, 3)]
    rows[0] |= {
        "variants": [rows[0]["text"], *others],
        "dropped": make_text(root / "cache/dropped/0.safetensors", 200, 2),
        "texts": ["a", "b", "c", "d"],
    }
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Caches(read_items(manifest))


def variants(caches: Caches, seed: int = 0, processes: int = 1, **asked: float) -> Variants:
    examples = caches.examples[: len(caches)]
    schedule = BatchOrder(
        [each.shape for each in examples],
        [each.repeats for each in examples],
        batch_size=2,
        seed=seed,
        processes=processes,
    )
    texts = {"shapes": TextSchedule.model_validate(asked)} if asked else {}
    return Variants(caches, texts, schedule, steps=STEPS, seed=seed)


def chosen(caches: Caches, made: Variants, first: int = 1, last: int = STEPS) -> list[int]:
    """Return which variants of the first item were chosen, in order; -1 for the empty caption."""
    known = {
        index: number
        for several in caches.variants.values()
        for number, index in enumerate(several)
    } | dict.fromkeys(caches.dropped.values(), -1)
    return [known[i] for batch in made.batches(0, first, last) for i in batch if i in known]


def test_only_texts_change_and_each_variant_comes_about_as_often(caches: Caches) -> None:
    made = variants(caches)
    plain = [index for batch in made.order.batches(0, 1, 400) for index in batch]
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


def test_a_killed_training_goes_on_with_the_very_variants(caches: Caches) -> None:
    whole = list(variants(caches).batches(0, 1, STEPS))
    assert whole[17:] == list(variants(caches).batches(0, 18, STEPS))
    assert whole != list(variants(caches, seed=1).batches(0, 1, STEPS))


def test_in_every_second_epoch_all_captions_are_empty(caches: Caches) -> None:
    made = variants(caches, caption_dropout_every_n_epochs=2)
    each = made.order.batches_per_epoch
    assert -1 not in chosen(caches, made, 1, each)
    assert set(chosen(caches, made, each + 1, 2 * each)) == {-1}
    assert -1 not in chosen(caches, made, 2 * each + 1, 3 * each)


@pytest.mark.parametrize("until", [20, 0.5])
def test_the_warm_up_goes_through_the_first_half_of_the_variants(
    caches: Caches, until: float
) -> None:
    made = variants(caches, token_warmup_step=until)
    assert set(chosen(caches, made, 1, 10)) == {0}
    assert set(chosen(caches, made, 11, 20)) == {1}
    assert set(chosen(caches, made, 21, STEPS)) == {2, 3}
