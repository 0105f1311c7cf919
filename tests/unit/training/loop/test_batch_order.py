"""Which example is trained on when: a pure function of the seed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from latentmake.training.loop.recipe import BatchOrder, epoch_batches

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
    batches = epoch_batches(shapes, repeats, batch_size, 5, epoch)
    shown = Counter(index for batch in batches for index in batch)
    assert shown == dict(enumerate(repeats))
    for batch in batches:
        assert len({shapes[index] for index in batch}) == 1
        assert 1 <= len(batch) <= batch_size
    for side in {shape[1] for shape in shapes}:
        short = [b for b in batches if shapes[b[0]][1] == side and len(b) < batch_size]
        assert len(short) <= 1
    assert batches == epoch_batches(shapes, repeats, batch_size, 5, epoch)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    shapes, repeats = [(4, 8, 8)] * 30, [1] * 30
    orders = [epoch_batches(shapes, repeats, 2, *which) for which in ((0, 0), (0, 1), (1, 0))]
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 1), (2, 1), (3, 2), (4, 3)])
def test_processes_share_the_batches_of_epochs_without_gap_or_double(
    processes: int, accumulation: int
) -> None:
    schedule = BatchOrder(
        SHAPES, REPEATS, batch_size=2, seed=3, accumulation=accumulation, processes=processes
    )
    steps = 5
    rows = [list(schedule.batches(process, 1, steps)) for process in range(processes)]
    assert {len(row) for row in rows} == {steps * accumulation}
    together = [batch for micro in zip(*rows, strict=True) for batch in micro]
    expected: list[list[int]] = []
    epoch = 0
    while len(expected) < len(together):
        expected += epoch_batches(SHAPES, REPEATS, 2, 3, epoch)
        epoch += 1
    assert together == expected[: len(together)]
    assert sum(schedule.items(step) for step in range(1, steps + 1)) == sum(map(len, together))


def test_going_on_from_a_step_is_the_rest_of_the_whole() -> None:
    schedule = BatchOrder(SHAPES, REPEATS, batch_size=2, seed=3, accumulation=2)
    whole = list(schedule.batches(0, 1, 9))
    assert list(schedule.batches(0, 5, 9)) == whole[4 * 2 :]
