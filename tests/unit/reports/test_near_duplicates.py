"""Near-duplicates: pictures saved again are found, others are not, and no time is quadratic."""

from __future__ import annotations

import io
import random
from itertools import combinations

import numpy as np
import pytest
from latentmake.reports import near_duplicates
from latentmake.reports.near_duplicates import Fingerprint, alike, fingerprint
from picture_world import PHOTOGRAPHS, encoded
from PIL import Image

COLOURS = np.zeros((8, 8, 3), np.int16)


def photograph(name: str) -> Image.Image:
    return Image.fromarray(PHOTOGRAPHS[name]((120, 160)))


@pytest.mark.parametrize("name", ["clouds", "leaves"])
def test_a_picture_saved_again_is_like_itself(name: str) -> None:
    image = photograph(name)
    again = [
        Image.open(io.BytesIO(encoded(image, quality=40))),
        image.resize((80, 60)),
        image.point(lambda value: value * 24 // 25),
    ]
    others = [photograph("clouds" if name == "leaves" else "leaves"), image.rotate(180)]
    found = alike([fingerprint(each) for each in [image, *again, *others]])
    assert {number for number, _ in found[0]} == {1, 2, 3}
    assert set(found) == {0, 1, 2, 3}


def test_one_figure_in_two_colours_is_two_pictures() -> None:
    red, blue = (Image.new("RGB", (64, 64), "white") for _ in range(2))
    red.paste((200, 0, 0), (16, 16, 48, 48))
    blue.paste((0, 90, 200), (16, 16, 48, 48))
    prints = [fingerprint(each) for each in (red, blue)]
    assert (prints[0].bits ^ prints[1].bits).bit_count() <= 7
    assert alike(prints) == {}


def test_even_pictures_of_one_colour_are_alike() -> None:
    sizes = ((64, 64), (63, 40), (40, 64))
    prints = [fingerprint(Image.new("RGB", size, (90, 140, 30))) for size in sizes]
    assert set(alike(prints)) == {0, 1, 2}


def test_bands_find_what_a_comparison_of_all_pairs_finds() -> None:
    dice = random.Random(3)
    hashes = [dice.getrandbits(64) for _ in range(150)]
    for value in hashes[:100]:
        flipped = dice.sample(range(64), dice.randrange(10))
        hashes.append(value ^ sum(1 << bit for bit in flipped))
    found = alike([Fingerprint(value, COLOURS) for value in hashes])
    pairs = {
        (one, other)
        for one, other in combinations(range(len(hashes)), 2)
        if (hashes[one] ^ hashes[other]).bit_count() <= 7
    }
    assert len(pairs) > 60
    assert {(one, other) for one in found for other, _ in found[one] if one < other} == pairs


@pytest.mark.parametrize("different", [False, True])
def test_comparisons_are_linear_even_where_all_pictures_are_alike(different: bool) -> None:
    def compared(count: int) -> int:
        dice = random.Random(3)
        hashes = [(1 << dice.randrange(64)) * different for _ in range(count)]
        return sum(1 for _ in near_duplicates._candidates(hashes))

    assert compared(800) < 2.5 * compared(400)
    found = alike([Fingerprint(0, COLOURS)] * 400)
    assert len(found) == 400
    assert all(0 < len(others) <= 8 for others in found.values())
