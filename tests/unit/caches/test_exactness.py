"""Encoders compute as exactly as float32 allows: their pictures lie in memory as they should."""

from __future__ import annotations

import copy

import pytest
from exact_world import error, narrow_vae, pictures
from latentmake.caches.encoders.vae import encode_images

pytestmark = pytest.mark.usefixtures("one_thread")

BOUND = 1e-5  # of the largest value
PICTURES = pictures()


@pytest.mark.parametrize("name", ["white", "noise"])
def test_latents_of_an_autoencoder_kl_are_exact_in_float32(name: str) -> None:
    vae = narrow_vae()
    exact = encode_images(copy.deepcopy(vae).double(), PICTURES[name])
    assert exact.shape == (1, 4, 64, 64)
    assert error(encode_images(vae, PICTURES[name]), exact) < BOUND
    # sd-scripts' flipped latents come from a view of the same pixels.
    flipped = PICTURES[name].flip(2)
    mirrored = encode_images(copy.deepcopy(vae).double(), flipped)
    assert error(encode_images(vae, flipped), mirrored) < BOUND
