"""Which variant of a text a step sees."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from latentmake.training.loop.caches import Caches, read_items
from latentmake.training.loop.recipe import BatchOrder
from safetensors.torch import load_file
from trainer_world import make_manifest, make_text

STEPS = 40


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Caches:
    """Three items at two resolutions: the first has four variants."""
    root = tmp_path_factory.mktemp("variants")
    manifest = make_manifest(root)
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    others = [make_text(root / f"cache/text.{n}/0.safetensors", 100 + n, 5 + n) for n in (1, 2, 3)]
    rows[0] |= {
        "variants": [rows[0]["text"], *others],
        "texts": ["a", "b", "c", "d"],
    }
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Caches(read_items(manifest))


def variants(caches: Caches, seed: int = 0, *, several: bool = True) -> BatchOrder:
    examples = caches.examples[: len(caches)]
    return BatchOrder(
        [each.shape for each in examples],
        [each.repeats for each in examples],
        batch_size=2,
        seed=seed,
        variants=caches.variants if several else {},
    )


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


def test_a_killed_training_goes_on_with_the_very_variants(caches: Caches) -> None:
    whole = list(variants(caches).batches(0, 1, STEPS))
    assert whole[17:] == list(variants(caches).batches(0, 18, STEPS))
    assert whole != list(variants(caches, seed=1).batches(0, 1, STEPS))
