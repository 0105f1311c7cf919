"""The estimated memory of a training is what its tensors take, counted in real sizes."""

from __future__ import annotations

import pytest
from latentmake.config.trainers import WanTrainer
from latentmake.training.wan.dit import check_targets
from latentmake.training.wan.estimate import lora_numbers, training_memory
from memory_world import Sizes, count_step

USUAL = ("to_q", "to_k", "to_v", "to_out.0")
ALL = (*USUAL, "ffn.net.0.proj", "ffn.net.2")
CLIP = (21, 60, 104)  # of 81 frames of 480 x 832
# Widths of Wan 2.1's two networks; of their 30 and 40 blocks two, which is quicker.
SMALL = Sizes(dim=1536, heads=12, ffn_dim=8960, layers=2)
LARGE = Sizes(dim=5120, heads=40, ffn_dim=13824, layers=2)


@pytest.mark.parametrize("gradient_checkpointing", [True, False])
@pytest.mark.parametrize(
    ("dit", "latent", "targets", "rank", "half"),
    [
        (SMALL, CLIP, USUAL, 32, True),
        (LARGE, CLIP, USUAL, 128, True),
        (SMALL, CLIP, ALL, 32, True),
        (SMALL, (1, 60, 104), USUAL, 32, True),
        (SMALL, CLIP, ALL, 32, False),
    ],
    ids=["1.3B", "14B", "feed-forward", "image", "float32"],
)
def test_the_formula_is_what_a_step_of_real_size_takes(
    dit: Sizes,
    latent: tuple[int, int, int],
    targets: tuple[str, ...],
    rank: int,
    half: bool,
    gradient_checkpointing: bool,
) -> None:
    counted = count_step(
        dit,
        latent=latent,
        targets=targets,
        rank=rank,
        half=half,
        gradient_checkpointing=gradient_checkpointing,
    )
    shapes = dit.shapes()
    layers = check_targets(targets, shapes, "targets")
    trainer = WanTrainer(
        kind="wan",
        rank=rank,
        mixed_precision="bf16" if half else "no",
        gradient_checkpointing=gradient_checkpointing,
    )
    formula = training_memory(shapes, dit.settings(), layers, latent, trainer)
    assert formula["weights"] == counted.weights
    # Gradients are made in the backward pass, when others of its tensors are gone.
    assert counted.peak == pytest.approx(sum(formula.values()), rel=0.06)
    assert counted.before == pytest.approx(
        formula["weights"] + formula["optimizer"] + 4 * lora_numbers(shapes, layers, rank), rel=0.01
    )


def test_the_formula_is_what_a_step_with_data_takes() -> None:
    dit = Sizes(dim=384, heads=3, ffn_dim=1536, layers=4, text_dim=512)
    latent, trainer = (5, 24, 32), WanTrainer(kind="wan", rank=16, mixed_precision="bf16")
    counted = count_step(dit, targets=USUAL, fake=False, latent=latent, rank=16, text_tokens=64)
    shapes = dit.shapes()
    layers = check_targets(USUAL, shapes, "targets")
    formula = training_memory(shapes, dit.settings(), layers, latent, trainer, 64)
    assert counted.peak == pytest.approx(sum(formula.values()), rel=0.06)
