"""What a command asks for decides what is planned; a wrong name gets the nearest right one."""

from __future__ import annotations

import pytest
from latentmake.config import Run
from latentmake.errors import ConfigError
from latentmake.plan.targets import (
    check_known,
    is_evaluation_asked,
    is_training_asked,
    runs_asked_for,
)

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
        (["evaluate_a_b"], ["a_b"]),
        (["reports/evaluate_a_b.html"], ["a_b"]),
        (["compare_cats_vs_a_b"], []),
        (["reports/compare_cats_vs_a_b.html"], []),
        (["compare_cats_vs_a_b", "train_cats"], ["cats"]),
        (["sample_model"], []),
        (["clean"], []),
    ],
)
def test_only_the_runs_asked_for_are_planned(targets: list[str], expected: list[str]) -> None:
    assert runs_asked_for(targets, RUNS) == expected


def test_a_run_that_there_is_not_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"train_cat: there is no run `cat`; did you mean `train_cats`"
    ):
        runs_asked_for(["train_cat"], RUNS)


@pytest.mark.parametrize("target", ["evaluate_a_b", "reports/evaluate_a_b.html"])
def test_an_evaluation_asks_for_the_training_of_its_run_alone(target: str) -> None:
    assert is_evaluation_asked("a_b", [target]) and is_training_asked("a_b", [target])
    assert not is_evaluation_asked("cats", [target]) and not is_training_asked("cats", [target])


RULES = ["all", "train_cats", "caches_cats", "status_cats", "train_a_b", "encode_latents_x_123"]


def made(target: str) -> bool:
    return target in ("runs/cats/dataset.lock", "reports/x.html")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("trian_cats", "did you mean `train_cats`?"),
        ("train", "did you mean `train_"),
        ("foo_cats", "of the run cats there are caches_cats, status_cats, train_cats"),
        ("clean", "removed by a build, others by prune_{dataset}; targets: all, train_{run}, "),
        (
            "zzz",
            "targets: all, train_{run}, caches_{run}, status_{run}, cache/...; runs: cats, a_b",
        ),
        ("runs/cats/lock", "targets: all"),
    ],
)
def test_a_target_that_no_rule_makes_is_answered_with_the_nearest_or_all(
    target: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_known(["all", target], RUNS, rules=RULES, is_made=made)
    assert str(caught.value).startswith(f"{target}: there is no such target")
    assert expected in str(caught.value) and "encode_" not in str(caught.value)


def test_targets_that_rules_make_are_taken() -> None:
    targets = ["train_cats", "runs/cats/dataset.lock", "reports/x.html", "cache/a/b/64/c.npz"]
    check_known(targets, RUNS, rules=RULES, is_made=made)
