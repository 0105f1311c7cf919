"""Doing nothing and `status` load few modules, and an edited caption runs few functions."""

from __future__ import annotations

import by_path
import preloaded
import pytest

house = by_path.load("tests/bench/house.py")


@pytest.fixture(scope="module")
def ways() -> house.Figures:
    return house.way_figures(house.ROOT, bounded=True, environment=preloaded.environment())[0]


@pytest.mark.parametrize("way", house.BOUNDS)
def test_a_way_of_a_build_keeps_its_bounds(way: str, ways: house.Figures) -> None:
    over = {
        name: (ways[way][name], bound)
        for name, bound in house.BOUNDS[way].items()
        if ways[way][name] > bound
    }
    assert not over
