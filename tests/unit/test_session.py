"""What a command asks for decides what is planned; a wrong name gets the nearest right one."""

from __future__ import annotations

import pytest
from latentmake.config import Run
from latentmake.errors import ConfigError
from latentmake.session import runs_asked_for

RUNS = {name: Run(datasets=["cats"], model="sd15", resolutions=[64]) for name in ("cats", "a_b")}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ([], ["cats", "a_b"]),
        (["all"], ["cats", "a_b"]),
        (["train_cats"], ["cats"]),
        (["status_a_b", "latents_a_b"], ["a_b"]),
        (["runs/cats/dataset.lock"], ["cats"]),
        (["cache/cats/sd15/64/x.latents.safetensors"], []),
        (["train_cats", "all"], ["cats", "a_b"]),
        (["somewhere/else.txt"], ["cats", "a_b"]),
        (["compare_cats_vs_a_b"], []),
        (["reports/compare_cats_vs_a_b.html"], []),
        (["compare_cats_vs_a_b", "train_cats"], ["cats"]),
    ],
)
def test_only_the_runs_asked_for_are_planned(targets: list[str], expected: list[str]) -> None:
    assert runs_asked_for(targets, RUNS) == expected


def test_a_run_that_there_is_not_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"train_cat: there is no run `cat`; did you mean `train_cats`"
    ):
        runs_asked_for(["train_cat"], RUNS)
