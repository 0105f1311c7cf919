"""Figures of a clip against their definitions in plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from latentmake.training.clip_statistics import WORDS, ClipFigures, figures_of, mean_of


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_figures_are_what_their_names_say(frames: int, height: int, width: int, seed: int) -> None:
    dice = np.random.default_rng(seed)
    clip = dice.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    found, real = figures_of(clip), clip.astype(np.float64)
    luma = 0.2126 * real[..., 0] + 0.7152 * real[..., 1] + 0.0722 * real[..., 2]
    expected = {
        "temporal_difference": np.abs(np.diff(real, axis=0)).mean(),
        "first_to_last": np.abs(real[-1] - real[0]).mean(),
        "brightness": luma.mean(),
        "brightness_deviation": luma.std(),
        "red": real[..., 0].mean(),
        "green": real[..., 1].mean(),
        "blue": real[..., 2].mean(),
        "colour_deviation": real.std(axis=-1).mean(),
    }
    assert found.model_dump() == pytest.approx(expected, abs=1e-6)
    assert set(expected) == set(WORDS)


def test_one_frame_does_not_move() -> None:
    found = figures_of(np.full((1, 2, 2, 3), 7, np.uint8))
    assert found.temporal_difference is None and found.first_to_last is None
    assert found.brightness == pytest.approx(7) and found.colour_deviation == 0
    with pytest.raises(ValueError, match="no frame"):
        figures_of([])


def test_means_leave_out_what_a_clip_has_not() -> None:
    still, moving = figures_of(np.zeros((1, 1, 1, 3))), figures_of(np.zeros((2, 1, 1, 3)))
    brighter = ClipFigures(**{**moving.model_dump(), "brightness": 8.0, "first_to_last": 3.0})
    means = mean_of([still, brighter])
    assert means["brightness"] == 4 and means["first_to_last"] == 3
    assert mean_of([still])["temporal_difference"] is None
