"""Past jobs tell what targets cost: by their pixels, and by what each costs besides."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from latentmake.index.memo import Memo
from latentmake.index.rates import Rate, Work

SMALL, LARGE = 64 * 64, 1024 * 1024  # pixels


def rate_after(*jobs: Work) -> Rate:
    with Memo(None) as memo:
        for job in jobs:
            memo.learn_rate("latents", job)
            memo.save()
        rate = memo.rate("latents")
    assert rate is not None
    return rate


def job(targets: int, pixels: int, a: float, b: float, **others: float) -> Work:
    """A job whose targets take a seconds each, and b seconds a pixel."""
    seconds = targets * (a + b * pixels)
    return Work(targets, seconds, 1.0, amount=targets * pixels, **others)


@pytest.mark.parametrize("saved", [False, True])
def test_each_job_halves_the_weight_of_those_before(saved: bool) -> None:
    with Memo(None) as memo:
        for targets, seconds, starting in ((100, 10.0, 8.0), (0, 5.0, 99.0), (100, 40.0, 2.0)):
            memo.learn_rate("latents", Work(targets, seconds, starting))
            if saved:
                memo.save()
        memo.save()
        rate = memo.rate("latents")
        assert rate == Rate(6 / 1.5, 45 / 150, speed=150 / 45)
        assert rate.seconds(300, 0) == pytest.approx(90)
        assert memo.rate("text") is None


def test_after_jobs_of_one_size_time_grows_with_the_pixels() -> None:
    rate = rate_after(*[job(1000, SMALL, 0.0, 1e-7)] * 3)
    assert rate.seconds(10, 10 * SMALL) == pytest.approx(10 * SMALL * 1e-7)
    assert rate.seconds(10, 10 * LARGE) == pytest.approx(10 * LARGE * 1e-7, rel=0.26)
    slow = rate_after(*[job(1000, SMALL, 0.0, 1e-3)] * 3)
    assert slow.seconds(10, 10 * LARGE) == pytest.approx(10 * LARGE * 1e-3, rel=0.01)


def test_jobs_of_two_sizes_tell_targets_and_pixels_apart() -> None:
    jobs = [job(1000, SMALL, 2e-3, 1e-7), *[job(300, LARGE, 2e-3, 1e-7)] * 9]
    rate = rate_after(*jobs)
    assert rate.target == pytest.approx(2e-3, rel=0.01)
    assert rate.unit == pytest.approx(1e-7, rel=0.01)


@pytest.mark.parametrize("times", [(1.0, 0.001), (0.001, 30.0)])
def test_times_that_contradict_each_other_grow_with_the_pixels_alone(
    times: tuple[float, float],
) -> None:
    small, large = times
    rate = rate_after(
        Work(10, 10 * small, 1.0, amount=10 * SMALL),
        Work(10, 10 * large, 1.0, amount=10 * LARGE),
    )
    assert 0 <= rate.target <= 1e-3
    assert rate.unit > 0


def test_what_is_not_encoding_grows_with_the_targets_alone() -> None:
    rate = rate_after(Work(100, 10.0, 1.0, amount=100 * SMALL, encoding=1.0))
    assert rate.seconds(100, 100 * SMALL) == pytest.approx(10.0)
    assert rate.seconds(100, 100 * SMALL * 4) == pytest.approx(9.0 + 4.0, rel=0.05)


def test_targets_that_are_linked_take_no_time_of_encoding() -> None:
    """Of 400 captions one differs: reading all takes 4 s, and encoding one of 10 tokens 0.1 s."""
    rate = rate_after(Work(1, 4.1, 1.0, amount=10, encoding=0.1, handled=400))
    assert rate.seconds(400, 4000) == pytest.approx(4.0 + 40.0, rel=0.05)
    assert rate.speed == pytest.approx(400 / 4.1)


def test_bytes_grow_with_the_pixels_and_headers_with_the_targets() -> None:
    assert rate_after(Work(10, 1.0, 0.0)).size(5, 0) == 0
    rate = rate_after(
        Work(10, 1.0, 0.0, amount=10 * SMALL, size=10 * (1000 + SMALL // 8)),
        Work(20, 1.0, 0.0, amount=20 * LARGE, size=20 * (1000 + LARGE // 8)),
    )
    assert rate.size(7, 7 * 512 * 512) == pytest.approx(7 * (1000 + 512 * 512 / 8))


def test_a_job_without_a_start_up_of_its_own_tells_nothing_about_it() -> None:
    rate = rate_after(Work(10, 1.0, 8.0), *[Work(10, 1.0, None)] * 5)
    assert rate.starting == 8.0


def test_once_amounts_are_known_jobs_without_them_count_no_more() -> None:
    rate = rate_after(Work(10, 100.0, 3.0), job(10, SMALL, 0.0, 1e-6))
    assert rate.seconds(1, SMALL) == pytest.approx(SMALL * 1e-6)
    assert rate.starting == pytest.approx((3.0 / 2 + 1.0) / 1.5)


def test_rates_of_a_former_version_count_until_a_job_has_run(tmp_path: Path) -> None:
    place = tmp_path / "memo.sqlite"
    Memo(place).__exit__()
    with sqlite3.connect(place) as database:
        row = (8, "latents tiny", 0, "150.0 45.0 6.0 1.5")
        database.execute("INSERT INTO facts (kind, name, mtime_ns, value) VALUES (?, ?, ?, ?)", row)
    with Memo(place) as memo:
        assert memo.rate("latents tiny") == Rate(4.0, 45 / 150, speed=150 / 45)
        memo.learn_rate("latents tiny", Work(10, 1.0, 2.0))
    with Memo(place) as memo:
        assert memo.rate("latents tiny") == Rate(2.0, 0.1, speed=10.0)
